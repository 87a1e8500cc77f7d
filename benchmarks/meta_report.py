"""The tables of `benchmarks/meta.py`, from its rows."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One contender; ratios are to the reference of its question, and `target` says what they should be."""

    question: str
    setting: str
    contender: str
    median_ms: float | None
    ratio: float | None
    ratio_quartiles: tuple[float, float] | None
    live_mb: float | None = None  # the peak, in tensors
    note: str = ""


# the results


def targets(rows: list[Row]) -> list[dict[str, Any]]:
    """What was asked for and what was found."""
    found = []

    def add(question: str, what: str, value: float | None, bound: float, at_least: bool = False) -> None:
        met = None if value is None else bool(value >= bound if at_least else value <= bound)
        shown = None if value is None else round(value, 3)
        found.append({"question": question, "what": what, "found": shown, "target": bound, "at_least": at_least, "met": met})

    at = {(r.question, r.setting, r.contender): r for r in rows}
    for (question, setting, name), r in at.items():
        if question == "closed form" and name != "plain training":
            add(question, f"{setting}, {name.removeprefix('closed form ')}: time / plain training", r.ratio, 1.25)
        if question == "forward mode" and name.startswith("MetaMD"):
            for (asked, where, loop), other in at.items():
                if (asked, where) == (question, setting) and loop != name:
                    add(question, f"{setting}: {loop} / MetaMD", other.ratio / r.ratio, 1.5, True)
        if question == "quadratics" and name == "all at once":
            assert r.median_ms is not None
            add(question, f"{setting}: seconds", r.median_ms / 1e3, 10.0)
        if question == "reverse mode" and name in ("TorchOpt", "higher"):
            tape, some = (at[question, setting, f"MetaMD, {kind}"] for kind in ("full tape", "checkpoints"))
            there = r.ratio is not None
            add(question, f"{setting}: full tape / {name}, time", tape.ratio / r.ratio if there else None, 1.0)
            add(question, f"{setting}: checkpoints / {name}, time", some.ratio / r.ratio if there else None, 1.5)
            add(question, f"{setting}: checkpoints / {name}, memory", some.live_mb / r.live_mb if there else None, 0.25)
    return found


def show(rows: list[Row], goals: list[dict[str, Any]]) -> None:
    print(f"{'':44}{'ms':>10}  ratio  (quartiles)      MB live")
    for r in rows:
        name = f"{r.question:13} {r.setting:28} {r.contender}"
        if r.ratio is None or r.ratio_quartiles is None:
            print(f"{name:66}  {r.note}")
            continue
        low, high = r.ratio_quartiles
        memory = "" if r.live_mb is None else f"{r.live_mb:9.1f}"
        print(f"{name:66} {r.median_ms:9.1f} {r.ratio:7.3f}  ({low:.3f}-{high:.3f}) {memory} {r.note}")
    print()
    for goal in goals:
        mark = {True: "met", False: "MISSED", None: "not installed"}[goal["met"]]
        sign = ">=" if goal["at_least"] else "<="
        print(f"{goal['question']:13} {goal['what']:52} {goal['found']!s:>8} {sign} {goal['target']:<5} {mark}")


def markdown(goals: list[dict[str, Any]]) -> str:
    """The table of docs/results/costs.md: each ratio over all settings that it was measured in, from least to most."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for goal in goals:
        groups.setdefault((goal["question"], goal["what"].rpartition(": ")[2]), []).append(goal)
    lines = ["| | found | aim |", "|---|---|---|"]
    for (question, what), each in groups.items():
        values = sorted(goal["found"] for goal in each if goal["found"] is not None)
        least, most = (f"{x:.3f}" for x in (values[0], values[-1])) if values else ("", "")
        missed = sum(goal["met"] is False for goal in each)
        aim = f"at {'least' if each[0]['at_least'] else 'most'} {each[0]['target']:g}"
        said = f": **missed in {missed} of {len(each)}**" if missed else ""
        lines.append(f"| {question}: {what} | {least if least == most else f'{least} to {most}'} | {aim}{said} |")
    return "\n".join(lines)

"""The table and the figure of `benchmarks/meta.py`, from its rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


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


def draw(rows: list[Row], goals: list[dict[str, Any]], path: Path) -> None:
    """A panel per question: ratios with their quartiles; beside reverse mode its memory."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 8.5), layout="constrained")
    panels = (
        ("closed form", "time / plain training", 1.25),
        ("forward mode", "time / a loop of double backwards", 1 / 1.5),
        ("reverse mode", "time / unrolled torch loop", None),
    )
    for axis, (question, label, goal) in zip(axes.flat, panels, strict=False):
        shown = [r for r in rows if r.question == question and r.ratio is not None][::-1]
        middle = np.array([r.ratio for r in shown])
        spread = np.abs(np.array([r.ratio_quartiles for r in shown]).T - middle)
        bars(axis, shown, middle, label, spread)
        if goal is not None:
            axis.axvline(goal, color="#2a6f4e", lw=1.2, ls="--")
        axis.set_title(question if goal is None else f"{question} (dashed: target {goal:.3g})", fontsize=11)
    shown = [r for r in rows if r.live_mb is not None][::-1]
    bars(axes[1, 1], shown, np.array([r.live_mb for r in shown]), "peak megabytes in live tensors", None)
    axes[1, 1].set_title("reverse mode, memory", fontsize=11)
    quadratics = next(g for g in goals if g["question"] == "quadratics")
    figure.suptitle(f"What meta-training costs (quadratics, {quadratics['what']}: {quadratics['found']:g})", fontsize=12)
    figure.savefig(path, dpi=130)


def bars(axis: Any, rows: list[Row], values: np.ndarray, label: str, spread: np.ndarray | None) -> None:
    names = [f"{r.setting}: {r.contender}" for r in rows]
    ours = [r.contender.startswith(("MetaMD", "closed form")) for r in rows]
    error = {} if spread is None else {"xerr": spread, "error_kw": {"lw": 0.8, "ecolor": "#333"}}
    axis.barh(names, values, color=["#c2571a" if o else "#8a8f98" for o in ours], **error)
    ends = values if spread is None else values + spread[1]
    for at, (value, end) in enumerate(zip(values, ends, strict=True)):
        axis.text(
            end + 0.015 * values.max(), at, f"{value:.2f}" if spread is not None else f"{value:.0f}", va="center", fontsize=8
        )
    axis.set_xlim(right=1.15 * float(ends.max()))
    axis.set_xlabel(label)
    axis.tick_params(axis="y", labelsize=8)

"""Put the tables of the experiments with networks into docs/results.md and README.md, between their marks, from the records.

    python benchmarks/results_page.py

Of a leave-one-out experiment the page of results shows what it is judged by, the tables of the pace, and under the paper's
protocol the test accuracies; all others are beside the records. The README has one line for each.
"""

import json
import re
from pathlib import Path
from typing import Any

from metamd.cli.report import tables
from metamd.comparison.pace import geometric_mean
from metamd.comparison.page import as_markdown, markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
MARKS = re.compile(r"<!-- results/([\w-]+): begin -->\n.*?<!-- end -->\n", re.S)
JUDGED = re.compile(r"<!-- (aims|published): begin -->\n.*?<!-- end -->\n", re.S)
OVERVIEW = re.compile(r"<!-- results: begin -->\n.*?<!-- end -->\n", re.S)

PAPERS, ALL = "the best of the paper's rivals", "the best of all"
LINES = {
    "adapt-rotated-mnist": "adapt an MLP to an unseen angle, 100 steps",
    "rotated-mnist-mlp": "train an MLP on an unseen angle, 500 steps",
    "diverse-digits-lenet": "train LeNet on an unseen dataset, 500 steps",
}


def shown(name: str) -> str:
    """The tables of an experiment that the page has."""
    result = json.loads((ROOT / "results" / name / "summary.json").read_text())
    parts = tables(result)
    if result.get("protocol") == "paper":  # which is about accuracy
        return as_markdown(parts[1:2])
    judged = [i for i, part in enumerate(parts) if part.columns and part.columns[0].startswith("against ")]
    return as_markdown(parts[judged[0] :] if judged else parts)


def written(page: str) -> str:
    """The page with the tables of the records in it."""
    page = MARKS.sub(lambda m: f"<!-- results/{m[1]}: begin -->\n{shown(m[1])}<!-- end -->\n", page)
    tables = {"aims": aims, "published": published}
    return JUDGED.sub(lambda m: f"<!-- {m[1]}: begin -->\n{tables[m[1]]()}<!-- end -->\n", page)


def overview() -> str:
    """A line for each experiment: means over what was held out, geometric ones of ratios."""
    heads = ["", "steps, Adam & co.", "seconds", "mean loss, best of all", "steps", "seconds", "test accuracy, %"]
    lines = []
    for name, said in LINES.items():
        rows = json.loads((ROOT / "results" / name / "summary.json").read_text())["rows"]
        papers, best = rows[0]["pace"][PAPERS], rows[0]["pace"][ALL]
        cells = [f"{said} (`{name}`, {len(best)} held out)", *(_ratio(papers, k) for k in ("steps", "seconds"))]
        cells += [_ratio(best, k) for k in ("mean_loss", "steps", "seconds")]
        ours, theirs = (sum(row[k] for row in best) / len(best) for k in ("accuracy", "best_accuracy"))
        lines.append([*cells, f"{ours:.2f} (best rival {theirs:.2f})"])
    return markdown_table(heads, lines)


def _ratio(rows: list[dict[str, Any]], key: str) -> str:
    """The geometric mean, or in how many runs a loss was reached where it was not in all."""
    mean = geometric_mean([row[key] for row in rows])
    if mean is not None:
        return f"{mean:.2f} x"
    if key == "seconds":
        return ""
    ours, theirs, runs = (sum(row["arrived"][k] for row in rows) for k in ("ours", "rival", "runs"))
    return f"there in {ours} of {runs} runs (rival: {theirs})"


COMPARED = {
    "rotated-mnist-linear": "linear model",
    "rotated-mnist-mlp": "MLP",
    "diverse-digits-lenet": "LeNet",
    "resnet18-cifar10": "ResNet18",
    "adapt-rotated-mnist": "adaptation",
    "adapt-rotated-mnist-learned": "adaptation, learned start",
}
"""Experiments by what they train."""


def aims() -> str:
    """MetaMD against each of the paper's rivals under its better schedule: steps to the target, and errors at the end."""
    rivals = ("SGD", "SGD-M", "Adam")
    heads = ["", *(f"steps, {r}" for r in rivals), "test error, best rival", "final loss, best rival"]
    lines = []
    for name, said in COMPARED.items():
        tuned = _tuned(name)
        cells = []
        for rival in rivals:
            own = [row["steps_to_target"] for row in tuned if row["label"].split(",")[0] == rival]
            cells.append(_verdict(min(own, key=_steps)) if own else "")
        for metric in ("test_error", "final_loss"):
            best = min((row for row in tuned if row[metric]["value"] is not None), key=lambda row: row[metric]["value"])
            cells.append(f"{_verdict(best[metric])} ({best['label']})")
        lines.append([said, *cells])
    return markdown_table(heads, lines)


def _tuned(name: str) -> list[dict[str, Any]]:
    rows = json.loads((ROOT / "results" / name / "summary.json").read_text())["rows"]
    return [row for row in rows if not row["label"].startswith("MetaMD") and not row["label"].endswith("untuned")]


def _steps(found: dict[str, Any]) -> tuple[float, float]:
    """Fewest first; where a run in the middle does not arrive, the part of runs that do."""
    return float("inf") if found["value"] is None else found["value"], -found["arrived"]


def _verdict(found: dict[str, Any]) -> str:
    ratio = found.get("ratio")
    return f"{'it never arrives' if ratio is None else f'{ratio:.2f} x'}, {found['verdict']}"


def published() -> str:
    """Test accuracies here and in the paper, in the mean over the domains that both have."""
    heads = ["test accuracy, %", "here", "in the paper", "difference", "best of the paper's rivals here", "in the paper"]
    lines = []
    for name in list(COMPARED)[:4]:
        rows = json.loads((ROOT / "results" / name / "summary.json").read_text())["rows"]
        ours, others = rows[0], {r["label"].split(",")[0]: r for r in rows if r["published"]}
        domains = [d for d in ours["accuracy"] if d in ours["published"]]
        mine, papers = _mean(ours["accuracy"], domains), _mean(ours["published"], domains)
        names = [n for n in others if n != "MetaMD"]
        tuned = [row for row in _tuned(name) if row["label"].split(",")[0] in names]
        best = max(tuned, key=lambda row: _mean(row["accuracy"], domains))
        their = max(names, key=lambda n: _mean(others[n]["published"], domains))
        said = [f"{mine:.2f}", f"{papers:.2f}", f"{mine - papers:+.2f}"]
        said += [f"{_mean(best['accuracy'], domains):.2f} ({best['label']})"]
        said += [f"{_mean(others[their]['published'], domains):.2f} ({their})"]
        lines.append([COMPARED[name], *said])
    return markdown_table(heads, lines)


def _mean(values: dict[str, float], domains: list[str]) -> float:
    return sum(values[d] for d in domains) / len(domains)


def written_readme(page: str) -> str:
    """The README with the overview of the records in it."""
    return OVERVIEW.sub(lambda m: f"<!-- results: begin -->\n{overview()}<!-- end -->\n", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    README.write_text(written_readme(README.read_text()))

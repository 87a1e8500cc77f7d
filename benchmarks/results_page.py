"""Put the tables of the experiments with networks into docs/results.md and README.md, between their marks, from the records.

    python benchmarks/results_page.py

Of a leave-one-out experiment the page of results shows what it is judged by, the tables of the pace, and under the paper's
protocol the test accuracies; all others are beside the records. The README has one line for each.
"""

import json
import re
from pathlib import Path
from typing import Any

from metamd.experiments.pace import geometric_mean

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
MARKS = re.compile(r"<!-- results/([\w-]+): begin -->\n.*?<!-- end -->\n", re.S)
OVERVIEW = re.compile(r"<!-- results: begin -->\n.*?<!-- end -->\n", re.S)

PAPERS, ALL = "the best of the paper's rivals", "the best of all"
LINES = {
    "adapt-rotated-mnist": "adapt an MLP to an unseen angle, 100 steps",
    "rotated-mnist-mlp": "train an MLP on an unseen angle, 500 steps",
    "diverse-digits-lenet": "train LeNet on an unseen dataset, 500 steps",
}


def shown(name: str) -> str:
    """The tables of an experiment that the page has."""
    text = (ROOT / "results" / name / "tables.md").read_text()
    if text.startswith("Protocol: paper."):  # which is about accuracy
        return text.split("\n\n")[1] + "\n"
    at = text.find("| against ")
    return text[at:] if at >= 0 else text


def written(page: str) -> str:
    """The page with the tables of the records in it."""
    return MARKS.sub(lambda m: f"<!-- results/{m[1]}: begin -->\n{shown(m[1])}<!-- end -->\n", page)


def overview() -> str:
    """A line for each experiment: means over what was held out, geometric ones of ratios."""
    heads = ["", "steps, Adam & co.", "seconds", "mean loss, best of all", "steps", "seconds", "test accuracy, %"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, said in LINES.items():
        rows = json.loads((ROOT / "results" / name / "summary.json").read_text())["rows"]
        papers, best = rows[0]["pace"][PAPERS], rows[0]["pace"][ALL]
        cells = [f"{said} (`{name}`, {len(best)} held out)", *(_ratio(papers, k) for k in ("steps", "seconds"))]
        cells += [_ratio(best, k) for k in ("mean_loss", "steps", "seconds")]
        ours, theirs = (sum(row[k] for row in best) / len(best) for k in ("accuracy", "best_accuracy"))
        lines.append("| " + " | ".join([*cells, f"{ours:.2f} (best rival {theirs:.2f})"]) + " |")
    return "\n".join(lines) + "\n"


def _ratio(rows: list[dict[str, Any]], key: str) -> str:
    """The geometric mean, or in how many runs a loss was reached where it was not in all."""
    mean = geometric_mean([row[key] for row in rows])
    if mean is not None:
        return f"{mean:.2f} x"
    if key == "seconds":
        return ""
    ours, theirs, runs = (sum(row["arrived"][k] for row in rows) for k in ("ours", "rival", "runs"))
    return f"there in {ours} of {runs} runs (rival: {theirs})"


def written_readme(page: str) -> str:
    """The README with the overview of the records in it."""
    return OVERVIEW.sub(lambda m: f"<!-- results: begin -->\n{overview()}<!-- end -->\n", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    README.write_text(written_readme(README.read_text()))

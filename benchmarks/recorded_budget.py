"""What the largest experiments took, from their records, as a table for docs/reproduction.md.

    python benchmarks/recorded_budget.py

A training takes its steps times the time of a step, as the record has it: medians over the splits, without evaluations. A
lesson is what learning took by the clock, all geometries of a split together.
"""

import json
from collections import Counter
from pathlib import Path
from statistics import median

from metamd.cli.report import read

ROOT = Path(__file__).resolve().parents[1] / "results"
LARGE = (
    "rotated-mnist-mlp",
    "diverse-digits-lenet",
    "resnet18-cifar10",
    "adapt-rotated-mnist",
    "adapt-rotated-mnist-learned",
    "every-rival",
    "averages",
    "by-the-clock",
    "bayesian",
    "bayesian-lenet",
    "learned-rivals",
)


def row(name: str) -> str:
    """The line of one experiment."""
    comparison, _ = read(ROOT / name)
    folds, labels = comparison.folds, [x for x in comparison.labels if not x.endswith("untuned")]
    trainings = sum(len(c.outcomes) for f in folds for candidates in f.entrants.values() for c in candidates)
    trainings += sum(len(tuning.best_so_far) for f in folds for tuning in f.tunings.values())
    each = {label: median(f.seconds[label] for f in folds) * folds[0].steps for label in labels}
    slowest = max(each, key=lambda label: each[label])
    lessons: Counter[str] = Counter()
    for line in (ROOT / name / "cells.jsonl").read_text().splitlines():
        cell = json.loads(line)
        lessons[cell["cell"].split("-")[1]] += cell["cost"]["seconds"] / 60
    seconds = f"{each['Adam, linear decay']:.1f}, {each['MetaMD']:.1f}, {each[slowest]:.1f} ({slowest.partition(',')[0]})"
    minutes = f"{min(lessons.values()):.0f} to {max(lessons.values()):.0f}"
    return f"| `{name}` | {len(folds)} | {trainings:,} | {seconds} | {minutes} |"


def table() -> str:
    """Of all of them."""
    heads = "| scale `cpu` | splits | trainings | seconds each: Adam, MetaMD, the slowest | lessons of a split, minutes |"
    return "\n".join([heads, "|---|---|---|---|---|", *map(row, LARGE)]) + "\n"


if __name__ == "__main__":
    print(table(), end="")

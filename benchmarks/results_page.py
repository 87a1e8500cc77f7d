"""Put the tables of the experiments into docs/results/*.md, docs/reproduction.md and README.md, between their marks.

    python benchmarks/results_page.py

Every number comes from the folders in results/. Of a leave-one-out experiment a page shows how quick MetaMD is against the
best rival, on the mean over what was held out; under the paper's protocol it shows test accuracies. Rows of untuned rivals,
and all tables of the synthetic experiments but the first, are left to `tables.md` in the folder.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from metamd.cli.report import read_comparison, tables
from metamd.comparison.comparison import Fold
from metamd.comparison.pace import geometric_mean
from metamd.comparison.page import as_markdown, markdown_table
from metamd.comparison.sections import Section
from metamd.files.store import read_cells, records_in

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
COSTS = ROOT / "docs" / "reproduction.md"
README = ROOT / "README.md"
MARKS = re.compile(r"<!-- results/([\w-]+): begin -->\n.*?<!-- end -->\n", re.S)
JUDGED = re.compile(r"<!-- (aims|published|starts|costs): begin -->\n.*?<!-- end -->\n", re.S)
OVERVIEW = re.compile(r"<!-- results: begin -->\n.*?<!-- end -->\n", re.S)

PAPERS, ALL = "the best of the paper's rivals", "the best of all"
LINES = {
    "adaptation": "adapt an MLP to an unseen angle, 100 steps",
    "rotated-mnist-mlp": "train an MLP on an unseen angle, 500 steps",
    "diverse-digits-lenet": "train LeNet on an unseen dataset, 500 steps",
}


@cache
def shown(name: str) -> str:
    """The tables of an experiment that its page has."""
    result = json.loads((ROOT / "results" / name / "summary.json").read_text())
    parts = [part for part in tables(result) if part.rows]
    judged = [part for part in parts if part.columns[0].startswith("against ")]
    if result.get("protocol") == "paper":  # which is about accuracy
        parts = parts[:1]
    elif judged:
        parts = [_means(part) for part in judged]
    elif "protocol" not in result:
        parts = parts[:1]
    return as_markdown([replace(part, rows=[row for row in part.rows if "untuned" not in str(row[0])]) for part in parts])


def _means(part: Section) -> Section:
    """The mean over what was held out, where there are several; it leaves out what has no mean."""
    means = [row for row in part.rows if row[0] == "mean"] if len(part.rows) > 2 else part.rows[:1]
    kept = [i for i in range(len(part.columns)) if i == 0 or means[0][i]]
    rows = [["mean of all", *(row[i] for i in kept[1:])] if row[0] == "mean" else [row[i] for i in kept] for row in means]
    return replace(part, columns=[part.columns[i] for i in kept], rows=rows)


def written(page: str) -> str:
    """The page with the tables of the records in it."""
    page = MARKS.sub(lambda m: f"<!-- results/{m[1]}: begin -->\n{shown(m[1])}<!-- end -->\n", page)
    tables = {"aims": aims, "published": published, "starts": starts, "costs": costs}
    return JUDGED.sub(lambda m: f"<!-- {m[1]}: begin -->\n{tables[m[1]]()}<!-- end -->\n", page)


def overview() -> str:
    """A line for each experiment: means over what was held out, geometric ones of ratios."""
    heads = [
        "held out, nothing tuned",
        "mean loss / best rival's",
        "seconds to its loss / quickest rival's",
        "test accuracy, %",
    ]
    lines = []
    for name, said in LINES.items():
        rows = json.loads((ROOT / "results" / name / "summary.json").read_text())["rows"]
        best = rows[0]["pace"][ALL]
        ours, theirs = (sum(row[k] for row in best) / len(best) for k in ("accuracy", "best_accuracy"))
        cells = [f"{said} (`{name}`)", _ratio(best, "mean_loss"), _ratio(best, "seconds")]
        lines.append([*cells, f"{ours:.2f} (best rival {theirs:.2f})"])
    return markdown_table(heads, lines)


def _ratio(rows: list[dict[str, Any]], key: str) -> str:
    """The geometric mean, or in how many runs a loss was reached where it was not in all."""
    mean = geometric_mean([row[key] for row in rows])
    if mean is not None:
        return f"{mean:.2f} x"
    ours, theirs, runs = (sum(row["arrived"][k] for row in rows) for k in ("ours", "rival", "runs"))
    return f"there in {ours} of {runs} runs (rival: {theirs})"


COMPARED = {
    "rotated-mnist-linear": "linear model",
    "rotated-mnist-mlp": "MLP",
    "diverse-digits-lenet": "LeNet",
    "resnet18-cifar10": "ResNet18",
    "adaptation": "adaptation",
    "adaptation-learned-start": "adaptation, learned start",
}
"""Experiments by what they train."""


@cache
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


@cache
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


@cache
def starts() -> str:
    """Mean losses of adaptation from the given model and from the learned start, with geometric means of the ratios."""
    heads = ["mean loss", "MetaMD, given start", "MetaMD, learned start", "best rival, given start"]
    heads += ["best rival, learned start", "learned against given", "learned against learned"]
    pairs = zip(*(read_comparison(ROOT / "results" / name)[0].folds for name in list(COMPARED)[4:]), strict=True)
    lines, ratios = [], []
    for fold, other in pairs:
        (given, there, theirs), (learned, here, after) = _mean_losses(fold), _mean_losses(other)
        ratios.append((learned / theirs, learned / after))
        losses = [f"{given:.3f}", f"{learned:.3f}", f"{theirs:.3f} ({there})", f"{after:.3f} ({here})"]
        lines.append([fold.group, *losses, *(f"{x:.2f} x" for x in ratios[-1])])
    means = np.exp(np.log(ratios).mean(0))
    return markdown_table(heads, [*lines, ["mean", "", "", "", "", *(f"{x:.2f} x" for x in means)]])


def _mean_losses(fold: Fold) -> tuple[float, str, float]:
    """MetaMD's, and the best rival with its own."""
    losses = {label: fold.best(label, "mean_loss").outcomes for label in fold.entrants}
    means = {label: float(np.mean([o.mean_loss for o in runs])) for label, runs in losses.items()}
    rival = min((label for label in means if not label.startswith("MetaMD")), key=lambda label: means[label])
    return means["MetaMD"], rival, means[rival]


@cache  # thousands of records are read
def costs() -> str:
    """What the experiments took: medians of a training over the splits, and what learning took by the clock."""
    heads = [
        "scale `cpu`",
        "held out",
        "trainings",
        "seconds each: Adam, MetaMD, the slowest",
        "minutes to learn, per split",
    ]
    found = [path.parent.name for path in sorted((ROOT / "results").glob("*/summary.json"))]
    networks = [name for name in found if name not in ("quadratic", "rosenbrock") and not name.endswith("-linear-paper")]
    return markdown_table(heads, [_cost(name) for name in networks])


def _cost(name: str) -> list[str]:
    with records_in(ROOT / "results" / name) as records:
        comparison, _ = read_comparison(records)
        learned = {cell: found for cell, found in read_cells(records).items() if cell.startswith("learn-")}
    folds, labels = comparison.folds, [x for x in comparison.labels if not x.endswith("untuned")]
    trainings = sum(len(c.outcomes) for f in folds for candidates in f.entrants.values() for c in candidates)
    trainings += sum(len(tuning.best_so_far) for f in folds for tuning in f.tunings.values())
    timed = {x: [f.seconds[x] for f in folds if np.isfinite(f.seconds.get(x, np.nan))] for x in labels}
    each = {label: median(seconds) * folds[0].steps for label, seconds in timed.items() if seconds}
    slowest = max(each, key=lambda label: each[label])
    minutes: Counter[str] = Counter()
    for cell, found in learned.items():
        minutes[cell.split("-")[1]] += found.get("cost", {}).get("seconds", 0) / 60
    ours = comparison.labels[0]
    adam = next(label for label in ("Adam, linear decay", "Adam", "AdamW") if label in each)
    said = f"{each[adam]:.1f}, {each[ours]:.1f}, {each[slowest]:.1f} ({slowest.partition(',')[0]})"
    least, most = (f"{x:.0f}" for x in (min(minutes.values()), max(minutes.values())))
    return [f"`{name}`", str(len(folds)), f"{trainings:,}", said, least if least == most else f"{least} to {most}"]


def written_readme(page: str) -> str:
    """The README with the overview of the records in it."""
    return OVERVIEW.sub(lambda m: f"<!-- results: begin -->\n{overview()}<!-- end -->\n", page)


if __name__ == "__main__":
    for path in (*PAGES, COSTS):
        path.write_text(written(path.read_text()))
    README.write_text(written_readme(README.read_text()))

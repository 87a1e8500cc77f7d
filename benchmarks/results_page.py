"""Put the tables of the experiments into docs/results/*.md, docs/reproduction.md and README.md, between their marks.

    python benchmarks/results_page.py

Every number comes from the folders in results/. A page shows what its text speaks of: MetaMD against the best rival, or one
line for each optimiser under its better schedule. All optimisers, domains and columns are in `tables.md` in the folder.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from metamd.cli.report import read_comparison, tables
from metamd.comparison.comparison import Fold
from metamd.comparison.entrants import PRINTED, UNTUNED
from metamd.comparison.once import FOR_THE_END
from metamd.comparison.pace import geometric_mean
from metamd.comparison.page import as_markdown, markdown_table
from metamd.comparison.sections import formatted, interval
from metamd.files.store import Result, read_cells, read_json, records_in

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
COSTS = ROOT / "docs" / "reproduction.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"
README = ROOT / "README.md"
MARKS = re.compile(r"<!-- results/([\w-]+): begin -->\n.*?<!-- end -->\n", re.S)
JUDGED = re.compile(r"<!-- (aims|handicap|published|starts|costs|certificates|silent): begin -->\n.*?<!-- end -->\n", re.S)
OVERVIEW = re.compile(r"<!-- results: begin -->\n.*?<!-- end -->\n", re.S)

PAPERS, ALL = "the best of the paper's rivals", "the best of all"
DECAY = ", linear decay"
PEOPLE = {
    "speakers": "an adapter per speaker, 50 steps",
    "texts": "a transformer per text, 200 steps",
    "images": "a network per picture, 200 steps",
    "burgers": "a network per equation, 500 steps",
    "cash-machines": "a forecaster per cash machine, 200 steps",
}
"""What a user trains again and again, by the protocol `once`."""

LINES = {
    "adaptation": "adapt an MLP to an unseen angle, 100 steps",
    "rotated-mnist-mlp": "train an MLP on an unseen angle, 500 steps",
    "diverse-digits-lenet": "train LeNet on an unseen dataset, 500 steps",
}


@cache
def shown(name: str) -> str:
    """The table of an experiment that its page has."""
    result = _summary(name)
    if name in OWN:
        return OWN[name](result)
    if str(result.get("variant", "")).startswith("published"):
        return _against_sgd(result)
    return _accuracies(result) if result.get("protocol") == "paper" else _against(result)


def _summary(name: str) -> Result:
    return dict(read_json(ROOT / "results" / name / "summary.json"))


# tables of one experiment


def _against(result: Result) -> str:
    """MetaMD against the best rival of a group, in the mean over what was held out; each column has its own rival."""
    row = result["rows"][0]
    where = "its final loss" if row["share"] == 1 else f"its loss at {row['share']:.0%} of the run"
    lines = [[title, *_paced(found)] for title, found in row["pace"].items()]
    return markdown_table(["against", "mean loss", f"steps to {where}", "seconds to it", "test accuracy, %"], lines)


def _domains(result: Result) -> str:
    """The same against the best of the paper's rivals, for each domain."""
    lines = []
    for found in result["rows"][0]["pace"][PAPERS]:
        cells = [_ratio([found], "mean_loss"), f"{found['accuracy']:.2f}", f"{found['best_accuracy']:.2f}"]
        lines.append([found["domain"], *cells])
    return markdown_table(["", "mean loss, of the best rival's", "test accuracy, %", "best rival's"], lines)


def _paced(found: list[Result]) -> list[str]:
    ours, theirs = (fmean(row[k] for row in found) for k in ("accuracy", "best_accuracy"))
    ratios = [_ratio(found, k) for k in ("mean_loss", "steps", "seconds")]
    if ratios[1] == ratios[2]:  # in how many runs the loss was reached is said once
        ratios[2] = "not in all runs"
    return [*ratios, f"{ours:.2f} (rival {theirs:.2f})"]


def _ratio(rows: list[Result], key: str) -> str:
    """The geometric mean, or in how many runs a loss was reached where it was not in all."""
    mean = geometric_mean([row[key] for row in rows])
    if mean is not None:
        return f"{mean:.2f} x"
    if key == "mean_loss":
        return "diverged"
    ours, theirs, runs = (sum(row["arrived"][k] for row in rows) for k in ("ours", "rival", "runs"))
    return f"there in {ours} of {runs} runs (rival: {theirs})"


def _accuracies(result: Result) -> str:
    """Test accuracies in the mean over the domains, and the paper's."""
    domains = list(result["rows"][0]["accuracy"])
    best = _better_schedule(result["rows"], lambda row: -_mean(row["accuracy"], domains))
    papers = {row["label"]: _mean(row["published"], domains) for row in result["rows"] if {*domains} <= {*row["published"]}}
    lines = [[row["label"], f"{_mean(row['accuracy'], domains):.2f}"] for row in best]
    if not papers:
        return markdown_table(["test accuracy, %", "here"], lines)
    lines = [[*line, formatted(papers.get(line[0].removesuffix(DECAY)), ".2f")] for line in lines]
    return markdown_table(["test accuracy, %", "here", "in the paper"], lines)


def _against_sgd(result: Result, pieces: bool = False) -> str:
    """The paper's method: accuracies, and everybody divided by tuned SGD. Each piece alone has a line if asked for."""
    rows = [row for row in result["rows"] if "label" in row and not row["label"].endswith((UNTUNED, PRINTED))]
    against = {row["against SGD"]: row for row in result["rows"] if "against SGD" in row}
    domains = list(rows[0]["accuracy"])
    lines = []
    for row in rows:
        paper = _mean(row["published"], domains) if {*domains} <= {*row["published"]} else None
        name = row["label"].replace(f"{rows[0]['label']}, ", "... ")
        if name.endswith("alone") and not pieces:
            continue
        cells = [name, f"{_mean(row['accuracy'], domains):.2f}", formatted(paper, ".2f")]
        found = against.get(row["label"])
        loss, low, steps = (geometric_mean(found[k]) if found else 1.0 for k in ("mean_loss", "quickest", "steps"))
        there = f"there in {found['arrived'][0]} of {found['arrived'][1]} runs" if found and steps is None else ""
        lines.append([*cells, *(formatted(x, ".2f", "diverged") for x in (loss, low)), formatted(steps, ".2f", there)])
    heads = [
        "",
        "test accuracy, %",
        "in the paper",
        "mean loss / SGD's",
        "lowest of any setting",
        "steps to SGD's final loss",
    ]
    return markdown_table(heads, lines)


def _better_schedule(rows: Sequence[Result], score: Callable[[Result], float]) -> list[Result]:
    """One line for each optimiser but the untuned: at a constant rate or with linear decay, whichever scores lower."""
    tuned = [row for row in rows if "label" in row and not row["label"].endswith(UNTUNED)]
    found: dict[str, Result] = {}
    for row in tuned:
        name = row["label"].removesuffix(DECAY)
        found[name] = min(found.get(name, row), row, key=score)
    return list(found.values())


def _mean_loss(row: Result) -> float:
    value = row["mean_loss"]["value"]
    return float("inf") if value is None else value


def _losses(result: Result, names: Mapping[str, str] = {}, *, more: Sequence[str] = ("interval",)) -> str:
    """A line for each optimiser, or for those that are named, with what the page calls them."""
    rows = result["rows"]
    if names:
        by = {row["label"]: row for row in rows if "label" in row}
        chosen = [(said, by[label]) for label, said in names.items()]
    else:
        chosen = [(row["label"], row) for row in _better_schedule(rows, _mean_loss)]
    heads = ["", f"mean loss{' (95 % interval)' * ('interval' in more)}", *(["final loss"] * ("final" in more))]
    lines = []
    for said, row in chosen:
        loss, end = (
            "diverged" if row[k]["value"] is None else f"{row[k]['value']:.3g}" for k in ("mean_loss", "final_loss")
        )
        if "interval" in more and loss != "diverged":
            loss = interval(row["mean_loss"], ".3g")
        right = "" if loss == "diverged" else f"{fmean(row['accuracy'].values()):.2f}"
        lines.append([said, loss, *([end] * ("final" in more)), right, *([_spent(row)] * ("learning" in more))])
    return markdown_table([*heads, "test accuracy, %", *(["gradients to learn"] * ("learning" in more))], lines)


def _spent(row: Result) -> str:
    return f"{row['learning']['gradients']:,.0f}" if row["learning"]["gradients"] else ""


def _ways(result: Result) -> str:
    """Ways to use one file, each against the best rival."""
    lines = [
        [title.partition(", by MetaMD, ")[2] or "as learned", *_paced(found)]
        for title, found in result["rows"][0]["pace"].items()
    ]
    return markdown_table(["", "mean loss", "steps to its final loss", "seconds to it", "test accuracy, %"], lines)


def _other_runs(result: Result) -> str:
    """What was changed, with the loss and the accuracy of both files and of the best rival that is tuned there."""
    by = {(row["variant"], row["label"]): row for row in result["rows"]}
    rivals = sorted({label for _, label in by if label.endswith("(tuned here)")})
    lines = []
    for variant in dict.fromkeys(variant for variant, _ in by):
        ours, role = (by[variant, label] for label in ("MetaMD", "MetaMD, by role"))
        theirs = [by[variant, label] for label in rivals]
        losses = [ours["mean_loss"], role["mean_loss"], min(row["mean_loss"] for row in theirs)]
        right = [ours["accuracy"], role["accuracy"], max(row["accuracy"] for row in theirs)]
        lines.append([variant, *(f"{x:.3f}" for x in losses), *(f"{x:.1f}" for x in right)])
    heads = ["runs", "mean loss", "by role", "best rival", "test accuracy, %", "by role", "best rival"]
    return markdown_table(heads, lines)


def _first(result: Result, columns: Mapping[str, str]) -> str:
    """The first table, of these columns, with what the page calls them."""
    part = next(part for part in tables(result) if part.rows)
    kept = [list(part.columns).index(column) for column in columns]
    return as_markdown([replace(part, columns=list(columns.values()), rows=[[row[i] for i in kept] for row in part.rows])])


def _family(result: Result) -> str:
    """The protocol `once`, without untuned rivals: what the field states, and MetaMD's figures divided by the others'."""
    parts = []
    for part in (part for part in tables(result) if part.rows):
        kept = [i for i, head in enumerate(part.columns) if head != "seconds to it"]
        rows = [[row[i] for i in kept] for row in part.cells() if not row[0].endswith(UNTUNED)]
        if part.columns[0] == "MetaMD":
            # against rivals alone and without intervals; a test loss has a column of its own
            rows = [row for row in rows if not row[0].startswith("against MetaMD")]
            rows = [[re.sub(r" \([^)]*\)|, but test loss worse", "", cell) for cell in row] for row in rows]
        parts.append(replace(part, columns=[part.columns[i] for i in kept], rows=rows))
    return as_markdown(parts)


FAMILIES = ("images", "images-learned-start", "speakers", "texts", "burgers", "cash-machines")
"""Experiments by the protocol `once`, on families that people have."""

PARTS_OF_THE_DEFAULT = {
    "Kronecker, plain": "learned coordinates, plain steps",
    "Kronecker, best usage of the learned metric": "... with their best usage",
    "Kronecker, rule average": "... rule `average`",
    "Kronecker, rule polar": "... polar steps",
    "Kronecker of all directions, rule polar, signal": "... polar steps with a signal",
    "MetaMD": "the default: with a tail average too",
    "MetaMD, judged by its iterates": "default, without an average",
    "one number per tensor, rule polar, signal": "one number per tensor, polar steps with a signal",
    "MetaMD, quadratic decay": "default, quadratic decay",
    "MetaMD, learned schedule": "default, learned schedule",
    "diagonal, regret to a reference": "diagonal, closed form",
    "diagonal, regret to the run's end": "... regret to the run's own end",
    "regret, Reverse": "... by gradient (`Reverse`)",
    "training loss, Reverse": "training loss, by gradient (`Reverse`)",
    "paper's bound, Reverse": "the paper's bound, by gradient (`Reverse`)",
    "paper's preset": "the preset `paper-plain`",
    "Adam, linear decay": "Adam",
    "Muon + AdamW, linear decay": "Muon + AdamW",
    "SOAP": "SOAP",
}
PIECES = {
    "1 piece": "1 piece",
    "2 pieces": "2 pieces",
    "3 pieces": "3 pieces",
    "3 pieces, piece 3 alone": "... the third piece alone",
    "3 pieces, the paper's step": "... the paper's step",
    "3 pieces about the origin": "... about the origin",
    "3 pieces about the origin, the paper's step": "... about the origin, the paper's step",
    "5 pieces": "5 pieces",
    "SGD-M, linear decay": "SGD-M",
    "Adam, linear decay": "Adam",
}
AVERAGED = {
    f"{who}{said}{'' if who == 'MetaMD' else DECAY}": f"{who}{said}"
    for who, both in {"MetaMD": ("", ", by its iterates"), "Adam": ("", ", averaged"), "SOAP": ("", ", averaged")}.items()
    for said in both
}
FIVE_MORE = {
    label: label.removesuffix(DECAY)
    for label in (
        "MetaMD",
        "Adam, linear decay",
        "Muon + AdamW, linear decay",
        "SOAP, linear decay",
        "Nesterov, linear decay",
        "AdaGrad",
        "Shampoo, linear decay",
        "Schedule-Free SGD",
        "D-Adaptation, linear decay",
    )
}
ITERATIONS = {
    "optimiser": "optimiser",
    "1e-6: median (quartiles)": "iterations, median (quartiles)",
    "MetaMD is faster by": "of MetaMD's",
    "paper": "in the paper",
}

OWN: dict[str, Callable[[Result], str]] = {
    **dict.fromkeys(FAMILIES, _family),
    "ablation": partial(_losses, names=PARTS_OF_THE_DEFAULT),
    "ablation-paper-preset": _domains,
    "learned-rivals": partial(_losses, more=("interval", "learning")),
    "out-of-distribution": _other_runs,
    "pieces": partial(_losses, names=PIECES),
    "quadratic": partial(_first, columns=ITERATIONS),
    "rosenbrock": partial(
        _first, columns={"optimiser": "optimiser", "loss after 500": "loss after 500", "reached": "reached"}
    ),
    "rotated-mnist-mlp-all-rivals": partial(_losses, names=FIVE_MORE, more=()),
    "rotated-mnist-mlp-averages": partial(_losses, names=AVERAGED, more=("interval", "final")),
    "rotated-mnist-linear-published": partial(_against_sgd, pieces=True),
    "rotated-mnist-mlp-seconds": _ways,
}
"""Tables of experiments that are not about the pace of one file; which lines, and what the page calls them."""


# pages


def written(page: str) -> str:
    """The page with the tables of the records in it."""
    page = MARKS.sub(lambda m: f"<!-- results/{m[1]}: begin -->\n{shown(m[1])}<!-- end -->\n", page)
    tables: dict[str, Callable[[], str]] = {"aims": aims, "published": published, "starts": starts, "costs": costs}
    tables |= {"handicap": handicap, "certificates": certificates, "silent": silent}
    page = JUDGED.sub(lambda m: f"<!-- {m[1]}: begin -->\n{tables[m[1]]()}<!-- end -->\n", page)
    return OVERVIEW.sub(lambda m: f"<!-- results: begin -->\n{overview()}<!-- end -->\n", page)


def overview() -> str:
    """A line for each family that people have: nobody has anything tuned on the tasks that are shown."""
    heads = ["a task", "mean loss / best rival's", "at the end: MetaMD, best rival", "seconds to Adam's last loss / Adam's"]
    known = {name: said for name, said in PEOPLE.items() if (ROOT / "results" / name).exists()}
    return markdown_table(heads, [_line(name, said) for name, said in known.items()])


def _line(experiment: str, said: str) -> list[str]:
    rows = _summary(experiment)["rows"]
    here = [row for row in rows if row.get("side") == rows[0]["side"]]
    rivals = [row for row in here if not row["label"].startswith("MetaMD") and not row["label"].endswith(UNTUNED)]
    worst = max(rivals, key=lambda row: row["against"]["mean_loss"]["ratio"])["against"]["mean_loss"]
    end = list(here[0]["looks"])[-1]
    (measure,) = here[0]["looks"][end]
    stated = {row["label"]: row["looks"][end][measure]["value"] for row in here if end in row["looks"]}
    finished = [row["label"] for row in rivals if stated[row["label"]] is not None]
    best = (max if measure.startswith("PSNR") else min)(finished, key=lambda label: stated[label])
    name, _, unit = measure.partition(", ")
    unit = f" {unit}" * bool(unit)
    adam = next(row for row in rivals if row["label"] in ("Adam", "AdamW"))["against"]["seconds"]
    loss = f"{worst['ratio']:.2f} x, {worst['verdict'].partition(',')[0]} ({_short(worst['label'])})"
    ours = f"{name} {stated[here[0]['label']]:.3g}{unit}, {stated[best]:.3g}{unit} ({_short(best)})"
    return [f"{said} (`{experiment}`)", loss, ours, formatted(adam["value"], ".2f", "never")]


def handicap() -> str:
    """A line for each experiment by the protocol `handicap`: means over what was held out, geometric ones of ratios."""
    heads = [
        "held out, nothing tuned",
        "mean loss / best rival's",
        "seconds to the best rival's loss / quickest rival's",
        "test accuracy, %",
    ]
    lines = []
    for name, said in LINES.items():
        rows = _summary(name)["rows"]
        best = rows[0]["pace"][ALL]
        ours, theirs = (sum(row[k] for row in best) / len(best) for k in ("accuracy", "best_accuracy"))
        cells = [f"{said} (`{name}`)", _ratio(best, "mean_loss"), _ratio(best, "seconds")]
        lines.append([*cells, f"{ours:.2f} (best rival {theirs:.2f})"])
    return markdown_table(heads, lines)


COMPARED = {
    "rotated-mnist-linear": "linear model",
    "rotated-mnist-mlp": "MLP",
    "diverse-digits-lenet": "LeNet",
    "resnet18-cifar10": "ResNet18",
    "adaptation": "adaptation",
    "adaptation-learned-start": "adaptation, learned start",
}
"""Experiments with networks, by what they train."""

STARTS = ("adaptation", "adaptation-learned-start")


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
            cells.append(_verdict(min(own, key=_steps)) if own else "not run")
        for metric in ("test_error", "final_loss"):
            best = min((row for row in tuned if row[metric]["value"] is not None), key=lambda row: row[metric]["value"])
            cells.append(f"{_verdict(best[metric])} ({_short(best['label'])})")
        lines.append([said, *cells])
    return markdown_table(heads, lines)


def _tuned(name: str) -> list[dict[str, Any]]:
    rows = _summary(name)["rows"]
    return [row for row in rows if not row["label"].startswith("MetaMD") and not row["label"].endswith("untuned")]


def _steps(found: dict[str, Any]) -> tuple[float, float]:
    """Fewest first; where a run in the middle does not arrive, the part of runs that do."""
    return float("inf") if found["value"] is None else found["value"], -found["arrived"]


def _short(label: str) -> str:
    return label.removesuffix(FOR_THE_END).removesuffix(DECAY).removesuffix(" + AdamW")


def _verdict(found: dict[str, Any]) -> str:
    ratio = found.get("ratio")
    verdict = found["verdict"].partition(",")[0]  # the table has a column for test errors
    return f"{'it never arrives' if ratio is None else f'{ratio:.2f}'}, {verdict}"


@cache
def published() -> str:
    """Test accuracies here and in the paper, in the mean over the domains that both have."""
    heads = ["test accuracy, %", "MetaMD, here", "MetaMD, paper", "best of the paper's rivals, here", "best rival, paper"]
    lines = []
    for name in list(COMPARED)[:4]:
        rows = _summary(name)["rows"]
        ours, others = rows[0], {r["label"].split(",")[0]: r for r in rows if r["published"]}
        domains = [d for d in ours["accuracy"] if d in ours["published"]]
        mine, papers = _mean(ours["accuracy"], domains), _mean(ours["published"], domains)
        names = [n for n in others if n != "MetaMD"]
        tuned = [row for row in _tuned(name) if row["label"].split(",")[0] in names]
        best = max(tuned, key=lambda row: _mean(row["accuracy"], domains))
        their = max(names, key=lambda n: _mean(others[n]["published"], domains))
        said = [f"{mine:.2f}", f"{papers:.2f}", f"{_mean(best['accuracy'], domains):.2f} ({_short(best['label'])})"]
        said += [f"{_mean(others[their]['published'], domains):.2f} ({their})"]
        lines.append([COMPARED[name], *said])
    return markdown_table(heads, lines)


def _mean(values: dict[str, float], domains: list[str]) -> float:
    return sum(values[d] for d in domains) / len(domains)


@cache
def starts() -> str:
    """Mean losses of adaptation from the given model and from the learned start, in the mean over the angles.

    Ratios are geometric means over the angles: from the same start, and from the learned start against the given one.
    """
    each = [[_mean_losses(fold) for fold in read_comparison(ROOT / "results" / name)[0].folds] for name in STARTS]
    ours, theirs = (np.array([[losses[i] for losses in folds] for folds in each]) for i in (0, 1))
    same, across = (np.exp(np.log(x).mean(-1)) for x in (ours / theirs, ours[1] / theirs[0]))
    lines = [[who, *(f"{x:.3f}" for x in losses.mean(1))] for who, losses in {"MetaMD": ours, "best rival": theirs}.items()]
    lines.append(["MetaMD / best rival, same start", *(f"{x:.2f} x" for x in same)])
    lines.append(["MetaMD / best rival from the given start", "", f"{across:.2f} x"])
    return markdown_table(["mean loss", "given start", "learned start"], lines)


def _mean_losses(fold: Fold) -> tuple[float, float]:
    """MetaMD's, and the best rival's."""
    runs = {label: fold.best(label, "mean_loss").outcomes for label in fold.entrants}
    means = {label: fmean(o.mean_loss for o in found) for label, found in runs.items()}
    return means["MetaMD"], min(mean for label, mean in means.items() if not label.startswith("MetaMD"))


@cache  # thousands of records are read
def costs() -> str:
    """What the experiments took: medians of a training over the splits, and what learning took by the clock."""
    heads = ["", "trainings", "seconds each: Adam, MetaMD", "minutes to learn, per split"]
    return markdown_table(heads, [_cost(name) for name in COMPARED])


def _cost(name: str) -> list[str]:
    with records_in(ROOT / "results" / name) as records:
        comparison, _ = read_comparison(records)
        learned = {cell: found for cell, found in read_cells(records).items() if cell.startswith("learn-")}
    folds, labels = comparison.folds, [x for x in comparison.labels if not x.endswith("untuned")]
    trainings = sum(len(c.outcomes) for f in folds for candidates in f.entrants.values() for c in candidates)
    trainings += sum(len(tuning.best_so_far) for f in folds for tuning in f.tunings.values())
    timed = {x: [f.seconds[x] for f in folds if np.isfinite(f.seconds.get(x, np.nan))] for x in labels}
    each = {label: median(seconds) * folds[0].steps for label, seconds in timed.items() if seconds}
    minutes: Counter[str] = Counter()
    for cell, found in learned.items():
        minutes[cell.split("-")[1]] += found.get("cost", {}).get("seconds", 0) / 60
    adam = next(label for label in ("Adam, linear decay", "Adam", "AdamW") if label in each)
    said = f"{each[adam]:.1f}, {each[comparison.labels[0]]:.1f}"
    least, most = (f"{x:.0f}" for x in (min(minutes.values()), max(minutes.values())))
    return [f"`{name}`", f"{trainings:,}", said, least if least == most else f"{least} to {most}"]


def _guarantees() -> dict[str, Result]:
    return dict(read_json(ROOT / "benchmarks" / "results" / "guarantees.json"))


def certificates() -> str:
    """For every family, the certificate of one run against the mean loss of that run."""
    words = {None: "not comparable: losses fall below zero", False: "something", True: "nothing"}
    lines = [
        [name, str(row["steps"]), *(f"{row[k]:.3g}" for k in ("mean_loss", "bound")), words[row["says_nothing"]]]
        for name, row in _guarantees().items()
    ]
    return markdown_table(["family", "steps", "mean loss of the run", "bound on the mean", "says"], lines)


def silent() -> str:
    """For how many families the certificate of a run says nothing."""
    rows = _guarantees()
    nothing = [name for name, row in rows.items() if row["says_nothing"]]
    link = "[says nothing](../guarantees.md#where-the-certificate-of-a-run-says-something)"
    return f"- The certificate of a run {link} for {len(nothing)} of {len(rows)} families: {'; '.join(nothing)}.\n"


if __name__ == "__main__":
    for path in (*PAGES, COSTS, GUARANTEES, README):
        path.write_text(written(path.read_text()))

"""The variant `published`: the paper's own method by the paper's own protocol, on the models and data of its tables.

"MetaMD as published" is `metamd.paper()`: Algorithm 1 with N = 3 diagonals about the origin, the paper's step and objective,
what is unpublished chosen on training tasks. Everybody is tuned in learning rate and weight decay for validation accuracy:
the rivals of the paper's table, the published method with N = 1, 2 and 3, each of three pieces alone, and our default.
Files of the published method have geometric mean 1, so they have the grid and the range of SGD. The linear model and the MLP
have the paper's grid as printed, and that grid extended until the best value is inside; LeNet and ResNet18 have 25 trials of
Bayesian optimisation [GaoMetaMD2022].

Beside the accuracies stand the spread of log M and the share of the steps that each piece takes. A file whose log M differs
by less than 0.1 between coordinates and between tensors counts as SGD.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from metamd.comparison.comparison import Comparison, Fold
from metamd.comparison.entrants import PRINTED, UNTUNED, draw_configs
from metamd.comparison.pace import geometric_mean, pace
from metamd.comparison.sections import Section, formatted
from metamd.comparison.training import Measuring, Outcome
from metamd.experiments.declare import Entrant, Geometry, Scale, coordinates, learned_file, learning_settings
from metamd.experiments.experiment import Experiment, by_domain
from metamd.experiments.paper_tables import (
    AT_HAND,
    DIVERSE_DIGITS,
    ONE_ANGLE,
    PAPER_ANGLES,
    RESNET18,
    ROTATED_LINEAR,
    ROTATED_MLP,
)
from metamd.experiments.pieces import draw_weights, piece_weights
from metamd.files.learned import load
from metamd.files.store import Records, Result, read_cells
from metamd.inner.executor import Cell, fill
from metamd.learning.meta import paper
from metamd.learning.outer import Unpublished
from metamd.learning.paper import metric_spread
from metamd.tasks.base import TaskFamily

AS_PUBLISHED = "MetaMD as published"
COUNTS_AS_SGD = 0.1
"""The spread of log M below which, between coordinates and between tensors, a file is SGD and not the paper's method."""

OFFERED = Unpublished(paces=(0.05,))
"""Outer steps are longer than by default, so that few of them go as far."""

TWO_K = replace(OFFERED, shares=(0.5, 2.0))
"""The shares of k for the linear model, where the smaller was better for every angle. The others have a third, smaller
one."""


def as_published(pieces: int, entries: Mapping[str, Entrant], offered: Unpublished) -> Geometry:
    """The paper's method with so many pieces; outer steps and tasks in each are those of the scale."""
    options: dict[str, Any] = {n: x for n, x in paper(pieces=pieces).items() if n != "outer_steps"}
    options["method"] = replace(options["method"], unpublished=offered)
    return Geometry(options.pop("potential"), entries, options=options, same_tasks=True)


def _entrant(piece: int | None = None) -> Entrant:
    return Entrant(exact=False, piece=piece, searched_as="sgd")


ALONE = {f"{AS_PUBLISHED}, piece {j + 1} alone": _entrant(j) for j in range(3)}
NUMBERS = {
    "published-3": (3, {AS_PUBLISHED: _entrant()} | ALONE),
    "published-1": (1, {f"{AS_PUBLISHED}, N = 1": _entrant()}),
    "published-2": (2, {f"{AS_PUBLISHED}, N = 2": _entrant()}),
}
"""N, and how files with so many pieces enter."""


def geometries(offered: Unpublished = OFFERED) -> dict[str, Geometry]:
    """The published method with each number of pieces, and our default."""
    published = {name: as_published(pieces, entries, offered) for name, (pieces, entries) in NUMBERS.items()}
    return published | {"kronecker": coordinates({"MetaMD": Entrant()})}


BY_GRID: dict[str, Any] = {"protocol": "paper", "search": "extended", "schedules": ("constant",), "budget": 30}
BY_BAYES: dict[str, Any] = {"protocol": "paper", "schedules": ("constant",)}
LEARNING: dict[str, Any] = {"outer_steps": 150, "tasks_per_step": 2}
SHORTER: dict[str, Any] = {"steps": 100, "outer_steps": 45, "tasks_per_step": 2}
"""What a core can learn for six angles; runs of the comparison are longer."""


def about_file(path: Path) -> Result:
    """The spread of log M in a learned file, whether it counts as SGD, and what was tried on training tasks."""
    learned = load(path)
    by = metric_spread(learned.potential)
    kind = "SGD" if max(by["coordinates"], by["tensors"]) < COUNTS_AS_SGD else "its own"
    sgd, *tried = (learned.header.choice or {"tried": [{}]})["tried"]
    finished = [row for row in tried if row["loss"] is not None]
    chosen: Result = min(finished, key=lambda row: row["loss"], default={})
    return {**by, "counts as": kind, "SGD": sgd, "chosen": chosen, "tried": tried}


def _more(experiment: Experiment, size: Scale, folder: Path, seed: int, workers: int) -> list[Result]:
    """Everybody against tuned SGD; of every published file its spread, and its pieces followed through held-out runs."""
    about = {"experiment": "published, activity", "seed": seed, **learning_settings(size)}
    records, cells = Records(folder / "activity", about), list[Cell]()
    for domain in size.domains:
        sides: dict[str, TaskFamily] = {}
        for name in (n for n in size.geometries or NUMBERS if n in NUMBERS):
            path, mine = learned_file(folder, domain, name), f"{domain}-{name}"
            seeds = range(size.seeds if name != "published-1" else 0)
            if path.exists():
                sides = sides or dict(experiment.held_out_sides(size, domain, experiment.family(size, domain)))
                configs = draw_configs(sides[domain], size.seeds, seed)[domain]
                cells.append(Cell(f"file-{mine}", partial(about_file, path)))
                cells += [
                    Cell(f"{mine}-{i}", partial(piece_weights, sides[domain], configs[i], path, exact=False)) for i in seeds
                ]
            else:  # what a folder without its learned files knows of them
                known = [name for name in (f"file-{mine}", *(f"{mine}-{i}" for i in seeds)) if records.has(name)]
                cells += [Cell(name, partial(records.read, name)) for name in known]
    found = fill(records, cells, title="published: activity", workers=workers)
    rows: list[Result] = []
    activity: dict[str, list[Result]] = {}
    for name, file in found.items():
        if name.startswith("file-"):
            mine = name.removeprefix("file-")
            domain, pieces = mine.split("-published-")
            runs = [run for cell, run in found.items() if cell.rpartition("-")[0] == mine]
            title = f"{domain}, N = {pieces}"
            rows.append({"learned": title, **file, "windows": _windows(runs) if runs else [[1.0]]})
            activity |= {title: runs} if runs else {}
    if activity:
        draw_weights(activity, folder / "activity.png")
    return [*against_sgd([p for d in size.domains if ((p := folder / f"domain-{d}") / "comparison.json").exists()]), *rows]


def _windows(runs: Sequence[Result]) -> list[list[float]]:
    """The share of the steps of every piece in tenths of a run, in the mean over runs."""
    return [[fmean(w) for w in zip(*at, strict=True)] for at in zip(*(run["weights"] for run in runs), strict=True)]


def against_sgd(places: Sequence[Path]) -> list[Result]:
    """Everybody's mean loss and steps to SGD's final loss, divided by those of tuned SGD, as geometric means over domains.

    `quickest` is the same for the lowest mean loss of all settings that the search tried: the one that is chosen for its
    validation accuracy need not be quick.
    """
    if not places:
        return []
    joined = Comparison.join(Comparison.read(place) for place in places)
    lowest = [_lowest(place) for place in places]
    found: list[Result] = []
    for label in joined.labels:
        if label == "SGD" or label.endswith((UNTUNED, PRINTED)):
            continue
        rows = pace(joined, ["SGD"], ours=label)
        each = [(_of(fold, label), _of(fold, "SGD"), low) for fold, low in zip(joined.folds, lowest, strict=True)]
        found.append(
            {
                "against SGD": label,
                "domains": [row["domain"] for row in rows],
                "mean_loss": [row["mean_loss"] for row in rows],
                "steps": [row["steps"] for row in rows],
                "arrived": [sum(row["arrived"]["ours"] for row in rows), sum(row["arrived"]["runs"] for row in rows)],
                "quickest": [low[mine] / low[sgd] for mine, sgd, low in each if mine in low and sgd in low],
                "lr": [fold.entrants[label][0].contender["setting"]["lr"] for fold in joined.folds],
            }
        )
    return found


def _of(fold: Fold, label: str) -> tuple[str, str]:
    """The rival and the identity of a contender, by which trials are found."""
    contender = fold.entrants[label][0].contender
    return str(contender["rival"]), str(contender.get("identity", ""))


def _lowest(place: Path) -> dict[tuple[str, str], float]:
    """The lowest mean loss of everybody's trials."""
    found: dict[tuple[str, str], float] = {}
    for name, cell in read_cells(place / "tuning").items():
        if name.startswith("trial-") and cell.get("runs"):
            runs = [Outcome.from_json(run) for run in cell["runs"]]
            who = str(runs[0].contender["rival"]), str(runs[0].contender.get("identity", ""))
            found[who] = min(found.get(who, math.inf), fmean(run.mean_loss for run in runs))
    return found


def sections(rows: Sequence[Result]) -> list[Section]:
    """The tables of a comparison, everybody against SGD, and of every file the spread of log M and the pieces it uses."""
    against, files = ([r for r in rows if key in r] for key in ("against SGD", "learned"))
    shown = [r for r in rows if "against SGD" not in r and "learned" not in r]
    paces = []
    for r in against:
        steps = geometric_mean(r["steps"])
        there = f"{r['arrived'][0]} of {r['arrived'][1]} runs arrive" if steps is None else f"{steps:.2f} x"
        values = [geometric_mean(r[k]) for k in ("mean_loss", "quickest")]
        losses = [formatted(x, ".2f", "diverged") for x in values]
        paces.append([r["against SGD"], losses[0], there, losses[1]])
    learned = []
    for r in files:
        ends = (r["windows"][0], [fmean(w) for w in zip(*r["windows"], strict=True)], r["windows"][-1])
        shares = [" / ".join(f"{x:.2f}" for x in w) for w in ends]
        spreads = [f"{r[k]:.2f}" for k in ("coordinates", "tensors", "pieces")]
        losses = [formatted(r[k].get("loss"), ".3f") for k in ("SGD", "chosen")]
        learned.append([r["learned"], *spreads, r["counts as"], *shares, *losses])
    columns = ["divided by tuned SGD's", "mean loss", "steps to SGD's final loss", "lowest mean loss of any setting"]
    heads = [
        "spread of log M and share of the steps",
        "between coordinates",
        "between tensors",
        "between pieces",
        "counts as",
    ]
    heads += ["pieces 1 / 2 / 3, first tenth of a run", "whole run", "last tenth", "loss in training, SGD", "this file"]
    return [*by_domain(shown), Section(columns=columns, rows=paces), Section(columns=heads, rows=learned)]


def _published(of: Experiment, offered: Unpublished = OFFERED, **scales: Scale) -> Experiment:
    """The variant of an experiment."""
    return replace(
        of,
        variant="published",
        geometries=geometries(offered),
        published={AS_PUBLISHED if title == "MetaMD" else title: found for title, found in of.published.items()},
        scales=scales,
        target="SGD",
        more=partial(_more, of),
        sections=sections,
        off_family=True,  # at the scale `cpu` runs are longer than those that were learned on
    )


SMOKE = replace(
    ONE_ANGLE,
    images=100,
    steps=6,
    outer_steps=1,
    rivals=("sgd", "adam"),
    protocol="paper",
    search="grid",
    budget=2,
    schedules=("constant",),
    usage_tasks=1,
)
LINEAR = _published(
    ROTATED_LINEAR,
    TWO_K,
    smoke=replace(SMOKE, search="extended", budget=16),
    cpu=Scale(PAPER_ANGLES, 1000, test_steps=1000, geometries=tuple(NUMBERS), **SHORTER, **BY_GRID),
    paper=Scale(PAPER_ANGLES, 1000, steps=1000, **LEARNING, **BY_GRID),
)
MLP = _published(
    ROTATED_MLP,
    smoke=SMOKE,
    cpu=Scale(PAPER_ANGLES, 10_000, test_steps=500, geometries=("published-3",), **SHORTER, **BY_GRID),
    paper=Scale(PAPER_ANGLES, 10_000, steps=500, test_steps=5000, **LEARNING, **BY_GRID),
)
# Compared over as many steps as were learned on: at the scale `cpu` the others are compared over five times as many.
MLP_SHORT = replace(
    MLP,
    variant="published-short",
    scales={
        "smoke": SMOKE,
        "cpu": replace(MLP.scales["cpu"], test_steps=None),
        "paper": replace(MLP.scales["paper"], test_steps=None),
    },
    off_family=False,
)
LENET = _published(
    DIVERSE_DIGITS,
    smoke=replace(SMOKE, domains=("usps",), steps=4),
    cpu=Scale(AT_HAND, 10_000, steps=250, outer_steps=24, tasks_per_step=2, geometries=("published-3",), **BY_BAYES),
    paper=replace(DIVERSE_DIGITS.scales["paper"], **LEARNING, **BY_BAYES),
)
RESNET = _published(
    RESNET18,
    smoke=replace(
        RESNET18.scales["smoke"], outer_steps=1, protocol="paper", search="grid", budget=2, schedules=("constant",)
    ),
    # an eighth of the width, where a gradient takes 60 ms, and as many steps as a core takes in an hour for all trials
    cpu=replace(
        RESNET18.scales["cpu"],
        width=8,
        steps=40,
        test_steps=100,
        outer_steps=9,
        tasks_per_step=1,
        rivals=("sgd", "sgdm", "adam", "adamw"),
        geometries=("published-3",),
        measuring=Measuring(every=10, examples=500),
        **BY_BAYES,
    ),
    paper=replace(RESNET18.scales["paper"], **LEARNING, **BY_BAYES),
)

EXPERIMENTS = (LINEAR, MLP, MLP_SHORT, LENET, RESNET)

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from metamd.comparison.entrants import draw_configs
from metamd.comparison.parallel import Cell, fill
from metamd.comparison.sections import Section
from metamd.experiments.declare import Entrant, Geometry, Scale, coordinates, learned_file, learning_settings
from metamd.experiments.experiment import Experiment, by_domain
from metamd.experiments.paper_tables import (
    DIVERSE_DIGITS,
    ONE_ANGLE,
    PAPER_ANGLES,
    RESNET18,
    ROTATED_LINEAR,
    ROTATED_MLP,
)
from metamd.experiments.pieces import draw_weights, piece_weights
from metamd.files.learned import load
from metamd.files.store import Records, Result
from metamd.learning.meta import paper
from metamd.learning.outer import Unpublished
from metamd.learning.published import spread
from metamd.tasks.base import TaskFamily

AS_PUBLISHED = "MetaMD as published"
COUNTS_AS_SGD = 0.1
"""The spread of log M below which, between coordinates and between tensors, a file is SGD and not the paper's method."""

OFFERED = Unpublished(paces=(0.05,))
"""Longer outer steps than by default, of which a few then go as far."""


def as_published(pieces: int, entries: Mapping[str, Entrant]) -> Geometry:
    """The paper's method with so many pieces; outer steps and tasks in each are those of the scale."""
    options: dict[str, Any] = {n: x for n, x in paper(pieces=pieces).items() if n != "outer_steps"}
    options["method"] = replace(options["method"], unpublished=OFFERED)
    return Geometry(options.pop("potential"), entries, options=options, same_tasks=True)


def _entrant(piece: int | None = None) -> Entrant:
    return Entrant(exact=False, piece=piece, searched_as="sgd")


ALONE = {f"{AS_PUBLISHED}, piece {j + 1} alone": _entrant(j) for j in range(3)}
GEOMETRIES = {
    "published-3": as_published(3, {AS_PUBLISHED: _entrant()} | ALONE),
    "published-1": as_published(1, {f"{AS_PUBLISHED}, N = 1": _entrant()}),
    "published-2": as_published(2, {f"{AS_PUBLISHED}, N = 2": _entrant()}),
    "kronecker": coordinates({"MetaMD": Entrant()}),
}

BY_GRID: dict[str, Any] = {"protocol": "paper", "search": "extended", "schedules": ("constant",), "budget": 30}
BY_BAYES: dict[str, Any] = {"protocol": "paper", "schedules": ("constant",)}
LEARNED: dict[str, Any] = {"outer_steps": 150, "tasks_per_step": 2}
NUMBERS = tuple(name for name in GEOMETRIES if name.startswith("published"))
SHORTER: dict[str, Any] = {"steps": 100, "outer_steps": 45, "tasks_per_step": 2, "geometries": NUMBERS}
"""What a core can learn for six angles with each number of pieces; runs of the comparison are longer."""


def spreads(files: Mapping[str, Path]) -> list[Result]:
    """How far log M differs in learned files, by name: between coordinates, between tensors, and between pieces."""
    found: list[Result] = []
    for name, path in files.items():
        if path.exists():
            by = spread(load(path).potential)
            kind = "SGD" if max(by["coordinates"], by["tensors"]) < COUNTS_AS_SGD else "its own"
            found.append({"learned": name, **by, "counts as": kind})
    return found


def _more(experiment: Experiment, size: Scale, folder: Path, seed: int, workers: int) -> list[Result]:
    """The spread of every published file, and its pieces followed through held-out runs at the rate of the file."""
    about = {"experiment": "published, activity", "seed": seed, **learning_settings(size)}
    files = {
        f"{domain}, N = {n}": learned_file(folder, domain, f"published-{n}") for domain in size.domains for n in (1, 2, 3)
    }
    cells: list[Cell] = []
    sides: dict[str, TaskFamily] = {}
    for domain in size.domains:
        if (path := learned_file(folder, domain, "published-3")).exists():
            sides |= experiment.held_out_sides(size, domain, experiment.family(size, domain))
            for i, config in enumerate(draw_configs(sides[domain], size.seeds, seed)[domain]):
                cells.append(Cell(f"{domain}-{i}", partial(piece_weights, sides[domain], config, path, exact=False)))
    found = fill(Records(folder / "activity", about), cells, title="published: activity", workers=workers)
    activity = {f"held out: {d}": [found[f"{d}-{i}"] for i in range(size.seeds)] for d in sides}
    if activity:
        draw_weights(activity, folder / "activity.png")
    followed = [
        {
            "followed": name,
            "windows": [[sum(w) / len(w) for w in zip(*at, strict=True)] for at in zip(*weights, strict=True)],
        }
        for name, runs in activity.items()
        for weights in [[r["weights"] for r in runs]]
    ]
    return [*spreads(files), *followed]


def sections(rows: Sequence[Result]) -> list[Section]:
    """The tables of a comparison, the spread of log M, and which pieces took the steps."""
    shown = [r for r in rows if "learned" not in r and "followed" not in r]
    learned = [
        [r["learned"], *(f"{r[k]:.2f}" for k in ("coordinates", "tensors", "pieces")), r["counts as"]]
        for r in rows
        if "learned" in r
    ]
    followed = []
    for r in (r for r in rows if "followed" in r):
        ends = (r["windows"][0], [sum(w) / len(w) for w in zip(*r["windows"], strict=True)], r["windows"][-1])
        followed.append([r["followed"], *(" / ".join(f"{x:.2f}" for x in w) for w in ends)])
    columns = ["spread of log M", "between coordinates", "between tensors", "between pieces", "counts as"]
    steps = ["share of the steps of pieces 1 / 2 / 3", "first tenth of the run", "whole run", "last tenth"]
    return [*by_domain(shown), Section(columns=columns, rows=learned), Section(columns=steps, rows=followed)]


def _published(of: Experiment, **scales: Scale) -> Experiment:
    """The variant of an experiment."""
    return replace(
        of,
        variant="published",
        geometries=GEOMETRIES,
        scales=scales,
        target="SGD",
        more=partial(_more, of),
        sections=sections,
        off_family=True,  # at the scale `cpu` runs are longer than those that were learned on
    )


SMOKE = replace(ONE_ANGLE, rivals=("sgd", "adam"), protocol="paper", search="grid", budget=2, schedules=("constant",))
SMOKE = replace(SMOKE, images=100, steps=6, outer_steps=1, usage_tasks=1)
LINEAR = _published(
    ROTATED_LINEAR,
    smoke=replace(SMOKE, search="extended", budget=16),
    cpu=Scale(PAPER_ANGLES, 1000, test_steps=1000, **SHORTER, **BY_GRID),
    paper=Scale(PAPER_ANGLES, 1000, steps=1000, **LEARNED, **BY_GRID),
)
MLP = _published(
    ROTATED_MLP,
    smoke=SMOKE,
    cpu=Scale(PAPER_ANGLES, 10_000, test_steps=500, **SHORTER, **BY_GRID),
    paper=Scale(PAPER_ANGLES, 10_000, steps=500, test_steps=5000, **LEARNED, **BY_GRID),
)
LENET = _published(
    DIVERSE_DIGITS,
    smoke=replace(SMOKE, domains=("usps",), steps=4),
    cpu=Scale(("kmnist", "usps"), 10_000, outer_steps=45, tasks_per_step=2, usage_tasks=2, **BY_BAYES),
    paper=replace(DIVERSE_DIGITS.scales["paper"], **LEARNED, **BY_BAYES),
)
RESNET = _published(
    RESNET18,
    smoke=replace(
        RESNET18.scales["smoke"], outer_steps=1, protocol="paper", search="grid", budget=2, schedules=("constant",)
    ),
    cpu=replace(
        RESNET18.scales["cpu"], outer_steps=15, steps=100, test_steps=500, rivals=("sgdm", "adam", "adamw"), **BY_BAYES
    ),
    paper=replace(RESNET18.scales["paper"], **LEARNED, **BY_BAYES),
)

EXPERIMENTS = (LINEAR, MLP, LENET, RESNET)

"""`metamd reproduce rosenbrock`: 500 iterations in the Rosenbrock valley, an experiment that the paper's authors cut.

The paper says that only MetaMD reaches the minimum, with the rates of all rivals tuned. It publishes neither numbers nor the
starting point, and trains and tests on the same function. Here every rival is tuned for the loss after 500 iterations, on
the very function it is measured on; the best diagonal is what any single learned metric could reach at most.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from metamd import tasks
from metamd.comparison import figures
from metamd.comparison.sections import Section
from metamd.experiments import synthetic
from metamd.experiments.synthetic import BatchedRival, Problems, Synthetic
from metamd.files.learned import LearnedOptimiser
from metamd.files.store import Result, shortened
from metamd.inner.estimators import Reverse
from metamd.inner.executor import Cell
from metamd.learning.meta import paper
from metamd.potentials import Diagonal
from metamd.rivals.base import Setting
from metamd.tasks.base import TaskFamily, derive_seed

STEPS = 500
REACHED = 1e-6
"""The minimum, 0, counts as reached when the loss is below this after the last iteration."""

OUTCOME_KEYS = ("loss", "distance", "reached", "setting", "metrics", "failed")

STARTS = {"customary": (-1.2, 1.0), "origin": (0.0, 0.0), "far": (-2.0, 2.0)}
ROSENBROCK_LABELS = {"metamd": "MetaMD", "paper": "MetaMD, paper", **synthetic.LABELS}
RATES = {"low": -6, "high": 2, "per_decade": 16}


@dataclass(frozen=True)
class Scale:
    """How much is computed."""

    starts: tuple[str, ...] = ("customary", "origin", "far")  # names in `STARTS`
    outer_steps: int = 30  # of the meta-trainings, at most
    tasks_per_step: int = 1  # all tasks are the same function, as in the paper
    grid: int = 60  # points per coordinate of the brute force
    everything: bool = True  # whether rivals are also tuned in more than the rate


SCALES = {"smoke": Scale(("customary",), 1, 1, 4, False), "cpu": Scale(), "paper": Scale()}
"""The paper publishes no more of its protocol than `cpu` has."""


def cells(scale: Scale, seed: int) -> Iterator[Cell]:
    """What there is to compute."""
    for name in scale.starts:
        tuned, brute = partial(_tuned, name), partial(_brute, scale, name)
        yield from synthetic.tuned_cells(name, tuned, brute, RATES, everything=scale.everything)
    for name in scale.starts:
        yield Cell(f"{name}-metamd", partial(_learned, scale, seed, name, {"potential": Diagonal()}))
        # Reverse gives Forward's gradient to rounding, in a fraction of the time
        yield Cell(f"{name}-paper", partial(_learned, scale, seed, name, paper(10.0, estimator=Reverse(), stable=False)))


def family(name: str) -> TaskFamily:
    """The function from a start."""
    return tasks.rosenbrock(start=STARTS[name], steps=STEPS)


def _score(name: str, rival: BatchedRival, settings: Sequence[Setting]) -> torch.Tensor:
    return synthetic.final_losses(Problems.draw(family(name), 1, 0), rival, settings, STEPS)


def _tuned(name: str, rival: BatchedRival, settings: Sequence[Setting]) -> Result:
    """The setting with the smallest loss after the last iteration."""
    problems = Problems.draw(family(name), 1, 0)
    best = settings[int(_score(name, rival, settings).argmin())]
    return _outcome(problems, synthetic.path(problems, rival, best, STEPS)) | {"setting": best}


def _brute(scale: Scale, name: str) -> Result:
    """The best single diagonal metric: a grid over six decades in each coordinate, then two finer ones."""
    score, shrink = partial(_score, name), 4 / scale.grid
    best = synthetic.best_diagonal(score, (2.0, 2.0), 3.0, points=scale.grid, rounds=3, shrink=shrink)
    return _tuned(name, synthetic.ONE_DIAGONAL, [best])


def _learned(scale: Scale, seed: int, name: str, options: Mapping[str, Any]) -> Result:
    """Meta-train on the function, then minimise it."""
    given = {**options, "outer_steps": scale.outer_steps, "tasks_per_step": scale.tasks_per_step}
    problems = Problems.draw(family(name), 1, 0)

    def result(learned: LearnedOptimiser) -> Result:
        points, _ = synthetic.run_learned(problems.tasks[0], learned, STEPS, exact="method" not in options)
        return _outcome(problems, [points[t] for t in synthetic.thinned(STEPS) if t < len(points)])

    return synthetic.measured(synthetic.try_meta_train(family(name), given, derive_seed(seed, name)), result)


def _outcome(problems: Problems, points: list[list[float]]) -> Result:
    """Loss and distance at the end, and the losses on the way."""
    task, steps = problems.tasks[0], synthetic.thinned(STEPS)
    losses = [task.evaluate({"theta": torch.tensor(p, dtype=torch.float64)}).loss for p in points]
    if not math.isfinite(losses[-1]) or len(points) < len(steps):
        return {"loss": None, "distance": None, "reached": False, "path": points[:1], "losses": [], "steps": []}
    return {
        "loss": losses[-1],
        "distance": math.dist(points[-1], [1.0, 1.0]),
        "reached": losses[-1] < REACHED,
        "path": shortened(points, synthetic.PATH_DIGITS),
        "losses": shortened(losses, synthetic.PATH_DIGITS),
        "steps": steps,
    }


# the table


def table(results: Mapping[str, Result]) -> list[Result]:
    """One row for every optimiser and start."""
    return [
        {"start": name, "optimiser": label, **{k: found[k] for k in OUTCOME_KEYS if k in found}}
        for name in STARTS
        for label, found in _of(results, name).items()
    ]


def _of(results: Mapping[str, Result], start: str) -> dict[str, Result]:
    """By label the results from a start."""
    return {label: results[f"{start}-{key}"] for key, label in ROSENBROCK_LABELS.items() if f"{start}-{key}" in results}


def sections(rows: Sequence[Result]) -> list[Section]:
    """The tables of the results page."""
    columns = ["optimiser", "loss after 500", "distance to the minimum", "reached", "chosen"]
    lines = {start: [_line(r) for r in rows if r["start"] == start] for start in STARTS}
    titles = {start: f"Start ({x:g}, {y:g})" for start, (x, y) in STARTS.items()}
    parts = [Section(titles[start], columns=columns, rows=found) for start, found in lines.items() if found]
    return [replace(part, headline="" if i else _headline(rows)) for i, part in enumerate(parts)]


def _headline(rows: Sequence[Result]) -> str:
    """Who reaches the minimum."""
    reached = list(dict.fromkeys(r["optimiser"] for r in rows if r.get("reached")))
    ours, theirs = ([x for x in reached if x.startswith("MetaMD") == learned] for learned in (True, False))
    said = f"{', '.join(theirs) or 'No rival'} reach{'' if len(theirs) > 1 else 'es'} the minimum from at least one start"
    return f"{said}; {', '.join(ours) or 'no MetaMD'} does."


def _line(row: Result) -> list[str]:
    if row.get("loss") is None:
        return [row["optimiser"], "the meta-training diverged" if "failed" in row else "diverged", "", "no", ""]
    chosen = ", ".join(f"{k} {v:.3g}" for k, v in row.get("setting", {}).items())
    if "metrics" in row:
        chosen = "D = " + "; ".join("(" + ", ".join(f"{d:.3g}" for d in piece) + ")" for piece in row["metrics"])
    numbers = [f"{row[k]:.1e}" for k in ("loss", "distance")]
    return [row["optimiser"], *numbers, "yes" if row["reached"] else "no", chosen]


# the figures


def draw(results: Mapping[str, Result], folder: Path) -> None:
    """The trajectories from every start, and the losses on the way."""
    rows: dict[str, list[figures.Panel]] = {}
    panels: dict[str, list[figures.Curve]] = {}
    for name, place in STARTS.items():
        here = {label: found for label, found in _of(results, name).items() if found.get("losses")}
        if not here:
            continue
        title, task = f"start ({place[0]:g}, {place[1]:g})", Problems.draw(family(name), 1, 0).tasks[0]
        rows[title] = [
            synthetic.panel(f"{label.removesuffix(' (rate)')}\nloss {found['loss']:.0e}", task, found["path"])
            for label, found in here.items()
            if "(all)" not in label
        ]
        panels[title] = [
            figures.Curve(label, found["steps"], [max(v, 1e-14) for v in found["losses"]], dashed="(all)" in label)
            for label, found in here.items()
        ]
    figures.trajectories(rows, folder / "trajectories.png")
    figures.curves(panels, folder / "losses.png", xlabel="iteration", ylabel="loss")


EXPERIMENTS = (Synthetic("rosenbrock", SCALES, cells, table, sections, draw),)

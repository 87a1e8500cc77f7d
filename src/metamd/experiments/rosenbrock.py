"""`metamd reproduce rosenbrock`: 500 iterations in the Rosenbrock valley, an experiment that the paper's authors cut.

The paper says that only MetaMD reaches the minimum, with the rates of all rivals tuned. It publishes neither numbers nor the
starting point, and trains and tests on the same function. Here every rival is tuned for the loss after 500 iterations, on
the very function it is measured on; the best diagonal is what any single learned metric could reach at most.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from metamd import tasks
from metamd.comparison.parallel import Cell, fill, own_warnings
from metamd.comparison.sections import Section
from metamd.experiments.race import (
    DIAGONAL,
    DIGITS,
    NEVER,
    RIVALS,
    BatchedRival,
    Problems,
    Setting,
    Synthetic,
    final_losses,
    metrics_of,
    path,
    thinned,
    train,
)
from metamd.files.store import Records, Result, shortened
from metamd.inner import run as engine
from metamd.inner.estimators import Reverse
from metamd.inner.run import OptimiserSteps
from metamd.learning.meta import paper
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials import Diagonal
from metamd.tasks.base import derive_seed

STEPS = 500
REACHED = 1e-6
"""The minimum, 0, counts as reached when the loss is below this after the last iteration."""

KEPT = ("loss", "distance", "reached", "setting", "metrics", "failed")

STARTS = {"customary": (-1.2, 1.0), "origin": (0.0, 0.0), "far": (-2.0, 2.0)}
RATES = {"low": -6, "high": 2, "per_decade": 16}


@dataclass(frozen=True)
class Scale:
    """How much is computed.

    Args:
        starts: names in `STARTS`.
        outer_steps: of the meta-trainings, at most.
        tasks_per_step: all tasks are the same function, as in the paper.
        grid: points per coordinate of the brute force.
        everything: whether rivals are also tuned in more than the rate.
    """

    starts: tuple[str, ...] = ("customary", "origin", "far")
    outer_steps: int = 30
    tasks_per_step: int = 1
    grid: int = 60
    everything: bool = True


SCALES = {"smoke": Scale(("customary",), 1, 1, 4, False), "cpu": Scale(), "paper": Scale()}
"""Of the paper's protocol no more is published than `cpu` has."""


def run(scale: str, folder: Path, seed: int, workers: int = 1, ray: str | None = None) -> Result:
    """Fill the table and draw the figures; what is in the folder already is kept."""
    settings = {"experiment": "rosenbrock", "scale": scale, "seed": seed, **asdict(SCALES[scale])}
    results = fill(Records(folder, settings), cells(SCALES[scale], seed), title="rosenbrock", workers=workers, ray=ray)
    draw(results, folder)
    return {"experiment": "rosenbrock", "scale": scale, "seed": seed, "rows": table(results)}


def cells(scale: Scale, seed: int) -> Iterator[Cell]:
    """What there is to compute."""
    for name in scale.starts:
        yield Cell(f"{name}-best-diagonal", partial(_brute, scale, name))
        for key, rival in RIVALS.items():
            for everything in (False, True) if scale.everything and rival.others else (False,):
                grid = rival.grid(RATES, everything=everything)
                yield Cell(f"{name}-{key}-{'all' if everything else 'rate'}", partial(_rival, name, rival, grid))
    for name in scale.starts:
        yield Cell(f"{name}-metamd", partial(_learned, scale, seed, name, {"potential": Diagonal()}))
        # Reverse gives Forward's gradient to rounding, in a fraction of the time
        yield Cell(f"{name}-paper", partial(_learned, scale, seed, name, paper(10.0, estimator=Reverse())))


def _rival(name: str, rival: BatchedRival, grid: Sequence[Setting]) -> Result:
    return tuned(_problem(name), rival, grid)


def _problem(name: str) -> Problems:
    return Problems.draw(tasks.rosenbrock(start=STARTS[name], steps=STEPS), 1, 0)


def tuned(problems: Problems, rival: BatchedRival, settings: Sequence[Setting]) -> Result:
    """The setting with the smallest loss after the last iteration."""
    best = settings[int(final_losses(problems, rival, settings, STEPS).mean(1).argmin())]
    points = path(problems, rival, best, NEVER, STEPS)
    return _outcome(problems, points, sorted(thinned(STEPS))) | {"setting": best, "tried": len(settings)}


def _brute(scale: Scale, name: str) -> Result:
    """The best single diagonal metric: a grid over six decades in each coordinate, then two finer ones."""
    problems, width, centre = _problem(name), 3.0, (2.0, 2.0)
    best: Setting = {}
    for _ in range(3):
        axes = [torch.logspace(c - width, c + width, scale.grid, dtype=torch.float64).tolist() for c in centre]
        settings = [{"d0": a, "d1": b} for a, b in product(*axes)]
        best = settings[int(final_losses(problems, DIAGONAL, settings, STEPS).mean(1).argmin())]
        centre, width = (math.log10(best["d0"]), math.log10(best["d1"])), 4 * width / scale.grid
    return tuned(problems, DIAGONAL, [best])


def _learned(scale: Scale, seed: int, name: str, options: Mapping[str, Any]) -> Result:
    """Meta-train on the function, then minimise it with `MetaMD`, lr = 1."""
    family, problems = tasks.rosenbrock(start=STARTS[name], steps=STEPS), _problem(name)
    counts = {"outer_steps": scale.outer_steps, "tasks_per_step": scale.tasks_per_step}
    training, warned = train(family, {**options, **counts}, derive_seed(seed, name))
    if isinstance(training, str):
        return {"failed": training, "warnings": warned}
    task, points = problems.tasks[0], list[list[float]]()
    theta = torch.nn.Parameter(task.init()["theta"])
    optimiser = MetaMD([("theta", theta)], training, exact="method" not in options, check_finite=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = OptimiserSteps({"theta": theta}, optimiser)
        engine.train(task, steps, STEPS, watch=lambda *step: points.append(theta.detach().tolist()), until=None)
    points.append(theta.detach().tolist())
    shown = sorted(thinned(STEPS))
    found = _outcome(problems, [points[t] for t in shown], shown)
    return found | {"metrics": metrics_of(training), "warnings": sorted({*warned, *own_warnings(caught)})}


def _outcome(problems: Problems, points: list[list[float]], steps: list[int]) -> Result:
    """Loss and distance at the end, and the losses on the way."""
    task = problems.tasks[0]
    losses = [task.evaluate({"theta": torch.tensor(p, dtype=torch.float64)}).loss for p in points]
    if not math.isfinite(losses[-1]) or len(points) < len(steps):
        return {"loss": None, "distance": None, "reached": False, "path": points[:1], "losses": [], "steps": []}
    distance = math.dist(points[-1], [1.0, 1.0])
    return {
        "loss": losses[-1],
        "distance": distance,
        "reached": losses[-1] < REACHED,
        "path": shortened(points, DIGITS),
        "losses": shortened(losses, DIGITS),
        "steps": steps,
    }


# the table


def labels() -> dict[str, str]:
    """What each cell is called, by the second part of its name."""
    found = {"metamd": "MetaMD", "paper": "MetaMD, paper"}
    found |= {"best-diagonal": "best diagonal"}
    for key, rival in RIVALS.items():
        found |= {f"{key}-rate": f"{rival.name} (rate)", f"{key}-all": f"{rival.name} (all)"}
    return found


def table(results: Mapping[str, Result]) -> list[Result]:
    """One row for every optimiser and start."""
    rows = []
    for name in STARTS:
        for key, label in labels().items():
            found = results.get(f"{name}-{key}")
            if found is not None:
                kept: Result = {k: found[k] for k in KEPT if k in found}
                rows.append({"start": name, "optimiser": label, **kept})
    return rows


def sections(rows: Sequence[Result]) -> list[Section]:
    """The tables of the results page."""
    parts = []
    columns = ["optimiser", "loss after 500", "distance to the minimum", "reached", "chosen"]
    for name, place in STARTS.items():
        if lines := [_line(r) for r in rows if r["start"] == name]:
            parts.append(Section(f"Start ({place[0]:g}, {place[1]:g})", columns=columns, rows=lines))
    return parts


def _line(row: Result) -> list[str]:
    if row.get("loss") is None:
        what = "the meta-training diverged" if "failed" in row else "diverged"
        return [row["optimiser"], what, "", "no", ""]
    reached = "yes" if row["reached"] else "no"
    return [row["optimiser"], f"{row['loss']:.1e}", f"{row['distance']:.1e}", reached, _chosen(row)]


def _chosen(row: Result) -> str:
    """The setting, or the metrics."""
    if "metrics" in row:
        return "D = " + "; ".join("(" + ", ".join(f"{d:.3g}" for d in piece) + ")" for piece in row["metrics"])
    return ", ".join(f"{k} {v:.3g}" for k, v in row.get("setting", {}).items())


# the figures


def draw(results: Mapping[str, Result], folder: Path) -> None:
    """The trajectories from every start, and the losses on the way."""
    from metamd.comparison import figures

    def surface(x: Any, y: Any) -> Any:
        return 100 * (y - x**2) ** 2 + (1 - x) ** 2

    rows: dict[str, list[figures.Panel]] = {}
    panels: dict[str, list[figures.Curve]] = {}
    for name, place in STARTS.items():
        here = {
            label: results[f"{name}-{key}"]
            for key, label in labels().items()
            if results.get(f"{name}-{key}", {}).get("losses")
        }
        if not here:
            continue
        title = f"start ({place[0]:g}, {place[1]:g})"
        rows[title] = [
            figures.Panel(f"{label.removesuffix(' (rate)')}\nloss {found['loss']:.0e}", surface, found["path"], (1.0, 1.0))
            for label, found in here.items()
            if "(all)" not in label
        ]
        panels[title] = [
            figures.Curve(label, found["steps"], [max(v, 1e-14) for v in found["losses"]], dashed="(all)" in label)
            for label, found in here.items()
        ]
    figures.trajectories(rows, folder / "trajectories.png")
    figures.curves(panels, folder / "losses.png", xlabel="iteration", ylabel="loss")


EXPERIMENTS = (Synthetic("rosenbrock", SCALES, run, sections),)

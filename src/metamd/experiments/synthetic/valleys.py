"""Rosenbrock valleys that are shifted and scaled: learned on some, tested on others; part of `metamd reproduce rosenbrock`.

Every rival is tuned on the test valleys themselves, for the mean logarithm of the loss after the last iteration.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from metamd import tasks
from metamd.comparison.parallel import Cell
from metamd.comparison.sections import Section
from metamd.comparison.statistics import Spread
from metamd.experiments.synthetic.batched import DIAGONAL, RIVALS, BatchedRival, Setting, State
from metamd.experiments.synthetic.race import Problems, start
from metamd.experiments.synthetic.trainings import metrics_of, train
from metamd.files.store import Result
from metamd.inner.estimators import Reverse
from metamd.inner.objectives import LogGap
from metamd.learning.meta import paper
from metamd.learning.rounds.outer import Refine
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials import Diagonal
from metamd.tasks.base import TaskFamily, derive_seed

STEPS = 500
REACHED = 1e-6
"""The minimum, 0, counts as reached when the loss is below this after the last iteration."""

SHIFT, SCALE = 0.2, 0.1
"""How far the valleys lie apart, and how much their scales vary."""

LOWEST, HIGHEST = 1e-16, 1e16
"""Losses count as these at least and at most, when rivals are tuned: a run that diverged is not infinitely bad."""

REFINE = Refine(10, Reverse(), objective=LogGap(1e-9))
"""No more steps of it than of the training."""


def family() -> TaskFamily:
    """Shifted and scaled valleys, from the customary start."""
    return tasks.rosenbrock(start=(-1.2, 1.0), steps=STEPS, shift=SHIFT, scale=SCALE)


@lru_cache
def problems(count: int, seed: int) -> Problems:
    """The test valleys.

    Args:
        count: how many.
        seed: of the draw.
    """
    return Problems.draw(family(), count, derive_seed(seed, "test valleys"))


def cells(
    count: int, options: Mapping[str, int], grid: int, rates: Mapping[str, int], everything: bool, seed: int
) -> Iterator[Cell]:
    """What there is to compute.

    Args:
        count: test valleys.
        options: outer_steps and tasks_per_step of the meta-trainings.
        grid: points per coordinate of the brute force.
        rates: of the rivals.
        everything: whether rivals are also tuned in more than the rate.
        seed: of valleys and trainings.
    """
    yield Cell("valleys-best-diagonal", partial(_brute, count, grid, seed))
    for key, rival in RIVALS.items():
        for more in (False, True) if everything and rival.others else (False,):
            settings = rival.grid(rates, everything=more)
            yield Cell(f"valleys-{key}-{'all' if more else 'rate'}", partial(_rival, count, rival, settings, seed))
    refine = replace(REFINE, steps=min(REFINE.steps, options["outer_steps"]))
    ours: dict[str, dict[str, Any]] = {
        "metamd": {"potential": Diagonal(), **options},
        "refined": {"potential": Diagonal(), **options, "refine": refine},
        "paper": paper(10.0, estimator=Reverse(1), outer_steps=options["outer_steps"]) | {"tasks_per_step": 4},
    }
    for name, chosen in ours.items():
        yield Cell(f"valleys-{name}", partial(_learned, count, chosen, seed))


def final_losses(valleys: Problems, rival: BatchedRival, settings: Sequence[Setting], steps: int = STEPS) -> Tensor:
    """The loss of each setting on each valley after so many steps, (H, P); infinite if it diverged.

    Args:
        valleys: P of them.
        rival: the optimiser.
        settings: H of them.
        steps: iterations.
    """
    theta, batch, options = start(valleys, settings)
    state, gradient = State(), valleys.gradient
    for t in range(steps):
        theta = theta - rival.rule(gradient(theta, batch), state, options, t)
    losses = torch.func.vmap(lambda x, b: valleys.tasks[0].loss({"theta": x}, b))(theta, batch)
    return torch.where(losses.isfinite(), losses, math.inf).view(len(settings), -1)


def best(losses: Tensor) -> int:
    """The setting with the smallest mean logarithm of the loss.

    Args:
        losses: (H, P).
    """
    return int(losses.clamp(LOWEST, HIGHEST).log().mean(1).argmin())


def _rival(count: int, rival: BatchedRival, settings: Sequence[Setting], seed: int) -> Result:
    losses = final_losses(problems(count, seed), rival, settings)
    chosen = best(losses)
    return _outcome(losses[chosen].tolist()) | {"setting": settings[chosen], "tried": len(settings)}


def _brute(count: int, grid: int, seed: int) -> Result:
    """The best single diagonal metric: a grid over four decades in each coordinate, then a finer one."""
    width, centre, settings = 2.0, (2.5, 2.5), [Setting()]
    for _ in range(2):
        axes = [torch.logspace(c - width, c + width, grid, dtype=torch.float64).tolist() for c in centre]
        settings = [{"d0": a, "d1": b} for a, b in product(*axes)]
        chosen = settings[best(final_losses(problems(count, seed), DIAGONAL, settings))]
        centre, width = (math.log10(chosen["d0"]), math.log10(chosen["d1"])), 4 * width / grid
    return _rival(count, DIAGONAL, settings, seed)


def _learned(count: int, options: Mapping[str, Any], seed: int) -> Result:
    """Meta-train on valleys, then run through others with `MetaMD`, lr = 1."""
    geometry, warned = train(family(), options, derive_seed(seed, "valleys"))
    if isinstance(geometry, str):
        return {"failed": geometry, "warnings": warned}
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # off-family warnings of single valleys
        for task in problems(count, seed).tasks:
            theta = torch.nn.Parameter(task.init()["theta"])
            optimiser = MetaMD([("theta", theta)], geometry, exact="estimator" not in options, check_finite=False)
            for t in range(STEPS):
                (theta.grad,) = torch.autograd.grad(task.loss({"theta": theta}, task.batch(t)), theta)
                optimiser.step()
            losses.append(task.evaluate({"theta": theta.detach()}).loss)
    return _outcome(losses) | {"metrics": metrics_of(geometry), "warnings": warned}


def _outcome(losses: list[float]) -> Result:
    return {"losses": [v if math.isfinite(v) else None for v in losses]}


# the table


def table(results: Mapping[str, Result], labels: Mapping[str, str]) -> list[Result]:
    """One row for every optimiser.

    Args:
        results: of all cells.
        labels: what each is called, by the second part of its name.
    """
    rows: list[Result] = []
    for key, label in labels.items():
        found = results.get(f"valleys-{key}")
        if found is not None:
            kept: Result = {k: found[k] for k in ("setting", "metrics", "failed") if k in found}
            losses = found.get("losses", [])
            spread: Result = Spread.of(losses).to_json() if losses else {}
            reached = sum(v is not None and v < REACHED for v in losses)
            rows.append({"start": "family", "optimiser": label, **spread, "reached": reached, **kept})
    return rows


def section(rows: Sequence[Result], chosen: Mapping[str, str]) -> Section:
    """The table of the results page; `chosen` is the setting or metrics of each, in words."""
    found = []
    for row in rows:
        if "median" not in row:
            found.append([row["optimiser"], "the meta-training diverged", "0", ""])
            continue
        low, middle, high = (_loss(row[k]) for k in ("lower", "median", "upper"))
        reached = f"{row['reached']}/{row['count']}"
        found.append([row["optimiser"], f"{middle} ({low} to {high})", reached, chosen[row["optimiser"]]])
    title = "Valleys that are shifted and scaled, start (-1.2, 1)"
    return Section(title, columns=["optimiser", "median loss after 500 (quartiles)", "reached", "chosen"], rows=found)


def _loss(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.1e}"

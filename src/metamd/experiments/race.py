"""Races on many small problems at once: rivals with many settings in one batch, tuned by brute force, and what was learned.

The arithmetic of a batched rival is that of the rival of `metamd.rivals`, with one row for every (setting, problem); the
tests hold the two against each other. The optimiser itself would need a Python call per setting and step.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metamd import rivals
from metamd.comparison.parallel import own_warnings
from metamd.comparison.sections import Section
from metamd.files.learned import LearnedOptimiser
from metamd.files.store import Result, shortened
from metamd.inner import run as engine
from metamd.inner.run import OptimiserSteps
from metamd.learning.meta import meta_train
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials.base import Params
from metamd.rivals.base import Rival, Stepper
from metamd.tasks.base import Task, TaskFamily

EPS = 1e-8
"""torch.optim's."""

Setting = dict[str, float]
State = dict[str, Tensor]
Rule = Callable[[Tensor, State, Mapping[str, Tensor], int], Tensor]
"""The displacement from (gradient, state, settings, steps taken before); it updates the state, rows that start at zero."""


@dataclass(frozen=True)
class BatchedRival:
    """An optimiser and the grids on which it is tuned, fixed before any result was seen.

    Args:
        name: for tables.
        rule: its step.
        namesake: the same as an optimiser.
        others: the further hyperparameters by name: torch's default first, then what else is tried.
    """

    name: str
    rule: Rule
    namesake: Rival | None
    others: Mapping[str, tuple[float, ...]]

    def grid(self, rates: Mapping[str, Any], *, everything: bool) -> list[Setting]:
        """All settings to try."""
        count = round((rates["high"] - rates["low"]) * rates["per_decade"]) + 1
        lrs = np.logspace(rates["low"], rates["high"], count).tolist()
        others = [values if everything else values[:1] for values in self.others.values()]
        return [dict(zip(("lr", *self.others), values, strict=True)) for values in product(lrs, *others)]

    def torch(self, theta: torch.nn.Parameter, setting: Setting) -> Stepper:
        """The namesake with this setting."""
        if self.namesake is None:
            raise ValueError(f"{self.name} has no namesake among the rivals. Use the rule.")
        return self.namesake.with_setting("constant", **setting).start([("theta", theta)])


def _sgd(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    return setting["lr"] * grad


def _momentum(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    state["buffer"] = setting["momentum"] * state.get("buffer", 0.0) + grad
    return setting["lr"] * state["buffer"]


def _adam(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    b1, b2, t = setting["beta1"], setting["beta2"], steps + 1
    state["mean"] = b1 * state.get("mean", 0.0) + (1 - b1) * grad
    state["square"] = b2 * state.get("square", 0.0) + (1 - b2) * grad.square()
    scale = (state["square"] / (1 - b2**t)).sqrt() + EPS
    return setting["lr"] / (1 - b1**t) * state["mean"] / scale


def _rmsprop(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    alpha = setting["alpha"]
    state["square"] = alpha * state.get("square", 0.0) + (1 - alpha) * grad.square()
    state["buffer"] = setting["momentum"] * state.get("buffer", 0.0) + grad / (state["square"].sqrt() + EPS)
    return setting["lr"] * state["buffer"]


def _diagonal(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    return grad / torch.cat([d for _, d in sorted(setting.items())], 1)


RIVALS = {
    "sgd": BatchedRival("SGD", _sgd, rivals.rival("sgd"), {}),
    "sgd-m": BatchedRival("SGD-M", _momentum, rivals.rival("sgdm"), {"momentum": (0.9, 0.5, 0.7, 0.8, 0.95, 0.97, 0.99)}),
    "adam": BatchedRival(
        "Adam", _adam, rivals.rival("adam"), {"beta1": (0.9, 0.0, 0.5, 0.8, 0.95), "beta2": (0.999, 0.5, 0.9, 0.99, 0.9999)}
    ),
    "rmsprop": BatchedRival(
        "RMSprop",
        _rmsprop,
        rivals.rival("rmsprop"),
        {"alpha": (0.99, 0.5, 0.9, 0.999, 0.9999), "momentum": (0.0, 0.5, 0.8, 0.9, 0.95)},
    ),
}

DIAGONAL = BatchedRival("one diagonal", _diagonal, None, {})
"""Mirror descent in one fixed diagonal metric; its settings are `d0`, `d1`, ... ."""


DIGITS = 7
"""Of the points and losses of a path, which figures show."""

NEVER = -1
"""The count of a run that did not arrive."""

CLEAN_EVERY = 20
"""Rows that are done are dropped every so many steps: dropping costs more than a step."""


@dataclass(frozen=True)
class Problems:
    """Tasks of one small shape that are solved together.

    Args:
        tasks: of a family with a shared loss and one tensor, `theta`.
        start: their theta_1, (P, d).
        batch: their batches, stacked; they are the same at every step.
    """

    tasks: tuple[Task, ...]
    start: Tensor
    batch: dict[str, Tensor]

    @classmethod
    def draw(cls, family: TaskFamily, count: int, seed: int) -> "Problems":
        """Problems of a family."""
        generator = torch.Generator().manual_seed(seed)
        tasks = tuple(family.build(family.sample(generator)) for _ in range(count))
        batches = [task.batch(0) for task in tasks]
        batch = {key: torch.stack([b[key] for b in batches]) for key in batches[0]}
        return cls(tasks, torch.stack([task.init()["theta"] for task in tasks]), batch)

    def __len__(self) -> int:
        return len(self.tasks)

    def of(self, rows: Tensor) -> "Batch":
        """The batches of the problems of that number, one row each."""
        return {key: value[rows] for key, value in self.batch.items()}

    @property
    def gradient(self) -> "Gradient":
        """The gradient at points (R, d) for batches with R rows."""
        return GRADIENTS[self.tasks[0].config["family"]]


Batch = dict[str, Tensor]
Gradient = Callable[[Tensor, Batch], Tensor]


def _quadratic(theta: Tensor, batch: Batch) -> Tensor:
    """2Q theta - b."""
    return 2 * (batch["Q"] * theta[:, None]).sum(2) - batch["b"]


def _rosenbrock(theta: Tensor, batch: Batch) -> Tensor:
    x = batch["scale"] * (theta - batch["shift"])
    here, bend = x[:, :-1], x[:, 1:] - x[:, :-1] ** 2
    by_x = torch.zeros_like(x)
    by_x[:, :-1] = -400 * here * bend - 2 * (1 - here)
    by_x[:, 1:] += 200 * bend
    return batch["scale"] * by_x


GRADIENTS: dict[str, Gradient] = {"quadratic": _quadratic, "rosenbrock": _rosenbrock}
"""By hand: ten thousands of steps through vmap and autograd would take minutes. The tests compare them with the tasks."""


def iterations(problems: Problems, rival: BatchedRival, settings: Sequence[Setting], tolerance: float, limit: int) -> Tensor:
    """The steps that each setting takes on each problem, (H, P); `NEVER` if it diverges or needs more than the limit.

    A setting is given up, its unfinished runs `NEVER`, as soon as its mean cannot be the smallest any more.
    """
    counts = torch.full((len(settings), len(problems)), NEVER, dtype=torch.int64)
    live = torch.ones_like(counts, dtype=torch.bool)
    rows, first = torch.arange(counts.numel()), counts.flatten().clone()
    theta, batch, options = start(problems, settings)
    gradient, state = problems.gradient, State()
    for t in range(limit + 1):
        grad = gradient(theta, batch)
        square = grad.square().sum(1)
        first = torch.where((square < tolerance**2) & (first == NEVER), t, first)
        if t % CLEAN_EVERY == 0 or t == limit:
            counts.view(-1)[rows] = first
            live.view(-1)[rows] = (first == NEVER) & (square < math.inf)
            live &= ~_beaten(counts, live, t, limit)[:, None]
            keep = live.view(-1)[rows]
            if not keep.any():
                break
            rows, first, theta, grad = rows[keep], first[keep], theta[keep], grad[keep]
            batch, options, state = ({k: v[keep] for k, v in d.items()} for d in (batch, options, state))
        theta = theta - rival.rule(grad, state, options, t)
    return counts


def start(problems: Problems, settings: Sequence[Setting]) -> tuple[Tensor, Batch, dict[str, Tensor]]:
    """One row for every setting and problem: the points, the batches and the hyperparameters."""
    h, p = len(settings), len(problems)
    theta, dtype = problems.start.repeat(h, 1), problems.start.dtype
    options = {k: torch.tensor([s[k] for s in settings], dtype=dtype).repeat_interleave(p)[:, None] for k in settings[0]}
    return theta, problems.of(torch.arange(p).repeat(h)), options


def _beaten(counts: Tensor, live: Tensor, t: int, limit: int) -> Tensor:
    """Which settings cannot have the smallest mean any more; a run that never arrives counts as the limit."""
    best = torch.where(live.any(1), math.inf, means(counts, limit)).min()
    bound = torch.where(live, t, torch.where(counts == NEVER, limit, counts)).double().mean(1)
    return bound > best


def means(counts: Tensor, limit: int) -> Tensor:
    """The mean count of each setting, a run that never arrives counted as the limit."""
    return torch.where(counts == NEVER, limit, counts).double().mean(1)


@dataclass(frozen=True)
class Entry:
    """How one optimiser did on the problems.

    Args:
        setting: its hyperparameters.
        counts: iterations on every problem, None where it did not arrive.
        path: its points on the first problem, thinned, (points, d).
    """

    setting: Setting
    counts: list[int | None]
    path: list[list[float]]


def tuned(problems: Problems, rival: BatchedRival, settings: Sequence[Setting], tolerance: float, limit: int) -> Entry:
    """The setting with the smallest mean number of iterations on these very problems, which is generous to the rival."""
    counts = iterations(problems, rival, settings, tolerance, limit)
    best = int(means(counts, limit).argmin())
    own = iterations(problems, rival, [settings[best]], tolerance, limit)[0]
    return Entry(settings[best], _counts(own), path(problems, rival, settings[best], int(own[0]), limit))


def path(problems: Problems, rival: BatchedRival, setting: Setting, count: int, limit: int) -> list[list[float]]:
    """The points of a run on the first problem: all of the first hundred, then ever fewer."""
    total = limit if count == NEVER else count
    wanted, state = thinned(total), State()
    first = Problems(problems.tasks[:1], problems.start[:1], problems.of(torch.zeros(1, dtype=torch.int64)))
    theta, batch, options = start(first, [setting])
    points = [theta[0].tolist()]
    for t in range(total):
        theta = theta - rival.rule(first.gradient(theta, batch), state, options, t)
        if not theta.isfinite().all():
            break
        if t + 1 in wanted:
            points.append(theta[0].tolist())
    return points


def thinned(total: int) -> set[int]:
    """Which of the steps 0..total a figure shows: the first hundred, then 2 % apart, and the last."""
    steps, t = set(range(min(total, 100) + 1)), 100.0
    while t < total:
        steps.add(int(t))
        t *= 1.02
    return steps | {total}


def best_diagonal(problems: Problems, tolerance: float, limit: int, *, points: int = 25, rounds: int = 4) -> Entry:
    """The one diagonal metric with the smallest mean number of iterations on these problems, by brute force.

    A grid over log D around the mean Hessian's diagonal, a factor e^3 to either side, then finer grids around the best.
    """
    task, theta = problems.tasks[0], problems.start
    curvature = torch.func.vmap(torch.func.hessian(lambda x, b: task.loss({"theta": x}, b)))(theta, problems.batch)
    centre = curvature.mean(0).diagonal().clamp_min(1e-12).log()
    width, best = 3.0, (math.inf, Setting())
    for _ in range(rounds):
        axes = [torch.linspace(float(c) - width, float(c) + width, points).exp().tolist() for c in centre]
        settings = [{f"d{i}": d for i, d in enumerate(ds)} for ds in product(*axes)]
        found = means(iterations(problems, DIAGONAL, settings, tolerance, limit), limit)
        if float(found.min()) < best[0]:
            # of many that are equally good the middle one
            equal = [s for s, m in zip(settings, found.tolist(), strict=True) if m == float(found.min())]
            best = float(found.min()), equal[len(equal) // 2]
        centre = torch.tensor([best[1][k] for k in sorted(best[1])]).log()
        width /= 4
    return tuned(problems, DIAGONAL, [best[1]], tolerance, limit)


def learned(
    problems: Problems, geometry: LearnedOptimiser, tolerances: Sequence[float], limit: int, *, exact: bool = True
) -> list[Entry]:
    """What `MetaMD` does with a learned geometry, lr = 1 and nothing tuned; an entry for each tolerance."""
    counts: list[list[int | None]] = [[None] * len(problems) for _ in tolerances]
    points: list[list[float]] = []
    for number, task in enumerate(problems.tasks):
        theta = torch.nn.Parameter(task.init()["theta"])

        def watch(t: int, loss: Tensor, grads: Params, number: int = number, theta: Tensor = theta) -> None:
            if number == 0:
                points.append(theta.detach().tolist())
            for found, tolerance in zip(counts, tolerances, strict=True):
                if found[number] is None and float(grads["theta"].norm()) < tolerance:
                    found[number] = t

        def until(t: int, losses: Sequence[float], grads: Params) -> str:
            norm = float(grads["theta"].norm())
            return "" if min(tolerances) <= norm < math.inf else "it has arrived, or left for good"

        optimiser = MetaMD([("theta", theta)], geometry, exact=exact, check_finite=False)
        engine.train(task, OptimiserSteps({"theta": theta}, optimiser), limit + 1, watch=watch, until=until)
    wanted = thinned(len(points) - 1)
    path = [x for t, x in enumerate(points) if t in wanted]
    return [Entry({}, found, path) for found in counts]


def _counts(counts: Tensor) -> list[int | None]:
    return [None if c == NEVER else int(c) for c in counts]


def final_losses(valleys: Problems, rival: BatchedRival, settings: Sequence[Setting], steps: int) -> Tensor:
    """The loss of each setting on each valley after so many steps, (H, P); infinite if it diverged."""
    theta, batch, options = start(valleys, settings)
    state, gradient = State(), valleys.gradient
    for t in range(steps):
        theta = theta - rival.rule(gradient(theta, batch), state, options, t)
    losses = torch.func.vmap(lambda x, b: valleys.tasks[0].loss({"theta": x}, b))(theta, batch)
    return torch.where(losses.isfinite(), losses, math.inf).view(len(settings), -1)


Training = tuple[LearnedOptimiser | str, list[str]]
"""What was learned, or why nothing could be; and the names of the warnings."""


def train(family: TaskFamily, options: Mapping[str, Any], seed: int) -> Training:
    """Meta-train; a training that diverges for good is a result, not a failure."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: LearnedOptimiser | str = meta_train(family, **options, seed=seed)
        except ValueError as error:
            found = str(error)
    return found, own_warnings(caught)


def raced(
    problems: Problems, training: Training, tolerances: Mapping[str, float], limit: int, *, exact: bool = True
) -> Result:
    """Count the iterations of what was learned on test problems."""
    geometry, warned = training
    if isinstance(geometry, str):
        return {"failed": geometry, "warnings": warned}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entries = learned(problems, geometry, list(tolerances.values()), limit, exact=exact)
    return {
        "iterations": {name: entry.counts for name, entry in zip(tolerances, entries, strict=True)},
        "metrics": metrics_of(geometry),
        "cost": {k: v for k, v in (geometry.header.cost or {}).items() if k != "seconds"},
        "warnings": sorted({*warned, *own_warnings(caught)}),
        "path": shortened(entries[0].path, DIGITS),
    }


def metrics_of(geometry: LearnedOptimiser) -> list[list[float]]:
    """The metrics of the only tensor, by piece."""
    return next(v.detach().exp().tolist() for v in geometry.potential.log_d.values())


@dataclass(frozen=True)
class Synthetic:
    """An experiment that compares in a way of its own, on functions of two variables.

    Args:
        name: of the experiment.
        scales: by name.
        run: fills the table and draws the figures; what is in the folder already is kept.
        sections: the tables, from the rows.
    """

    name: str
    scales: Mapping[str, Any]
    run: Callable[[str, Path, int, int, str | None], Result]
    sections: Callable[[Sequence[Result]], list[Section]]
    variant: str = ""

"""Functions of two variables: rivals with many settings in one batch, tuned by brute force, and what was learned.

The arithmetic of a batched rival is that of the rival of `metamd.rivals`, with one row for every (setting, problem); the
tests hold the two against each other. The optimiser itself would need a Python call per setting and step.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, islice, product, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metamd.comparison.figures import Panel
from metamd.comparison.sections import Section
from metamd.files.learned import LearnedOptimiser
from metamd.files.store import Records, Result
from metamd.inner import run as engine
from metamd.inner.executor import Cell, Executor, fill
from metamd.inner.run import OptimiserSteps
from metamd.learning.meta import meta_train
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials.base import Params
from metamd.rivals.base import Setting
from metamd.tasks.base import Task, TaskFamily

EPS = 1e-8
"""torch.optim's."""

RowState = dict[str, Tensor]
BatchedRule = Callable[[Tensor, RowState, Mapping[str, Tensor], int], Tensor]
"""The displacement from (gradient, state, settings, steps taken before); it updates the state, rows that start at zero."""


@dataclass(frozen=True)
class BatchedRival:
    """An optimiser and the grids on which it is tuned, fixed before any result was seen."""

    name: str
    rule: BatchedRule
    others: Mapping[str, tuple[float, ...]]  # the further hyperparameters: torch's default first, then what else is tried

    def grid(self, rates: Mapping[str, Any], *, everything: bool) -> list[Setting]:
        """All settings to try."""
        points = round((rates["high"] - rates["low"]) * rates["per_decade"]) + 1
        lrs = np.logspace(rates["low"], rates["high"], points).tolist()
        others = [values if everything else values[:1] for values in self.others.values()]
        return [dict(zip(("lr", *self.others), values, strict=True)) for values in product(lrs, *others)]


def _sgd(grad: Tensor, state: RowState, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    return setting["lr"] * grad


def _momentum(grad: Tensor, state: RowState, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    state["buffer"] = setting["momentum"] * state.get("buffer", 0.0) + grad
    return setting["lr"] * state["buffer"]


def _adam(grad: Tensor, state: RowState, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    b1, b2, t = setting["beta1"], setting["beta2"], steps + 1
    state["mean"] = b1 * state.get("mean", 0.0) + (1 - b1) * grad
    state["square"] = b2 * state.get("square", 0.0) + (1 - b2) * grad.square()
    scale = (state["square"] / (1 - b2**t)).sqrt() + EPS
    return setting["lr"] / (1 - b1**t) * state["mean"] / scale


def _rmsprop(grad: Tensor, state: RowState, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    alpha = setting["alpha"]
    state["square"] = alpha * state.get("square", 0.0) + (1 - alpha) * grad.square()
    state["buffer"] = setting["momentum"] * state.get("buffer", 0.0) + grad / (state["square"].sqrt() + EPS)
    return setting["lr"] * state["buffer"]


def _diagonal(grad: Tensor, state: RowState, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    return grad / torch.cat([d for _, d in sorted(setting.items())], 1)


BATCHED_RIVALS = {
    "sgd": BatchedRival("SGD", _sgd, {}),
    "sgd-m": BatchedRival("SGD-M", _momentum, {"momentum": (0.9, 0.5, 0.7, 0.8, 0.95, 0.97, 0.99)}),
    "adam": BatchedRival("Adam", _adam, {"beta1": (0.9, 0.0, 0.5, 0.8, 0.95), "beta2": (0.999, 0.5, 0.9, 0.99, 0.9999)}),
    "rmsprop": BatchedRival(
        "RMSprop", _rmsprop, {"alpha": (0.99, 0.5, 0.9, 0.999, 0.9999), "momentum": (0.0, 0.5, 0.8, 0.9, 0.95)}
    ),
}

ONE_DIAGONAL = BatchedRival("one diagonal", _diagonal, {})
"""Mirror descent in one fixed diagonal metric; its settings are `d0`, `d1`, ... ."""

LABELS = {"best-diagonal": "best diagonal"} | {
    f"{key}-{tuned}": f"{rival.name} ({tuned})" for key, rival in BATCHED_RIVALS.items() for tuned in ("rate", "all")
}
"""The labels of what is tuned on the test problems, by the end of the cell's name."""

PATH_DIGITS = 7
"""Digits of the points and losses of a path, which only figures show."""

NEVER = -1
"""The count of a run that did not arrive."""

CLEAN_EVERY = 20
"""Rows that are done are dropped every so many steps: dropping costs more than a step."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Problems:
    """Tasks of one small shape that are solved together."""

    tasks: tuple[Task, ...]  # of a family with a shared loss and one tensor, `theta`
    start: Tensor  # their theta_1, (P, d)
    batch: Batch  # their batches, stacked; they are the same at every step

    @classmethod
    def draw(cls, family: TaskFamily, count: int, seed: int) -> "Problems":
        """Problems of a family."""
        generator = torch.Generator().manual_seed(seed)
        tasks = tuple(family.build(family.sample(generator)) for _ in range(count))
        batches = [task.batch(0) for task in tasks]
        batch = {key: torch.stack([b[key] for b in batches]) for key in batches[0]}
        return cls(tasks, torch.stack([task.init()["theta"] for task in tasks]), batch)

    def rows(self, settings: Sequence[Setting]) -> tuple[Tensor, Batch, dict[str, Tensor]]:
        """One row for every setting and problem: the points, the batches and the hyperparameters."""
        h, p = len(settings), len(self.tasks)
        options = {k: torch.tensor([s[k] for s in settings], dtype=self.start.dtype) for k in settings[0]}
        batch = {key: value[torch.arange(p).repeat(h)] for key, value in self.batch.items()}
        return self.start.repeat(h, 1), batch, {k: v.repeat_interleave(p)[:, None] for k, v in options.items()}

    def losses(self, theta: Tensor, batch: Batch) -> Tensor:
        """The losses at points (R, d) for batches with R rows."""
        return torch.func.vmap(lambda x, b: self.tasks[0].loss({"theta": x}, b))(theta, batch)

    def gradient(self, theta: Tensor, batch: Batch) -> Tensor:
        """The gradient at points (R, d) for batches with R rows.

        By hand: ten thousands of steps through vmap and autograd would take minutes. The tests compare it with the tasks.
        """
        if "Q" in batch:  # quadratics: 2Q theta - b
            return 2 * (batch["Q"] * theta[:, None]).sum(2) - batch["b"]
        x = batch["scale"] * (theta - batch["shift"])
        here, bend = x[:, :-1], x[:, 1:] - x[:, :-1] ** 2
        by_x = torch.zeros_like(x)
        by_x[:, :-1] = -400 * here * bend - 2 * (1 - here)
        by_x[:, 1:] += 200 * bend
        return batch["scale"] * by_x


def iterations(problems: Problems, rival: BatchedRival, settings: Sequence[Setting], tolerance: float, limit: int) -> Tensor:
    """The steps that each setting takes on each problem, (H, P); `NEVER` if it diverges or needs more than the limit.

    A setting is given up, its unfinished runs `NEVER`, as soon as its mean cannot be the smallest any more.
    """
    counts = torch.full((len(settings), len(problems.tasks)), NEVER, dtype=torch.int64)
    live = torch.ones_like(counts, dtype=torch.bool)
    rows, first = torch.arange(counts.numel()), counts.flatten().clone()
    theta, batch, options = problems.rows(settings)
    state = RowState()
    # Not `inner.run.train`: thousands of settings step as the rows of one tensor, and leave as soon as they have lost.
    for t in range(limit + 1):
        grad = problems.gradient(theta, batch)
        square = grad.square().sum(1)
        first = torch.where((square < tolerance**2) & (first == NEVER), t, first)
        if t % CLEAN_EVERY == 0 or t == limit:
            counts.view(-1)[rows] = first
            live.view(-1)[rows] = (first == NEVER) & (square < math.inf)
            best = torch.where(live.any(1), math.inf, means(counts, limit)).min()
            bound = torch.where(live, t, torch.where(counts == NEVER, limit, counts)).double().mean(1)
            live &= (bound <= best)[:, None]
            keep = live.view(-1)[rows]
            if not keep.any():
                break
            rows, first, theta, grad = rows[keep], first[keep], theta[keep], grad[keep]
            batch, options, state = ({k: v[keep] for k, v in d.items()} for d in (batch, options, state))
        theta = theta - rival.rule(grad, state, options, t)
    return counts


def means(counts: Tensor, limit: int) -> Tensor:
    """The mean count of each setting, a run that never arrives counted as the limit."""
    return torch.where(counts == NEVER, limit, counts).double().mean(1)


def iterates(problems: Problems, rival: BatchedRival, settings: Sequence[Setting]) -> Iterator[Tensor]:
    """theta_1, theta_2, ... without end, a row for every setting and problem."""
    theta, batch, options = problems.rows(settings)
    state = RowState()
    for t in count():
        yield theta
        theta = theta - rival.rule(problems.gradient(theta, batch), state, options, t)


def final_losses(problems: Problems, rival: BatchedRival, settings: Sequence[Setting], steps: int) -> Tensor:
    """The mean loss of each setting after so many steps, (H,); infinite if it diverged."""
    theta = next(islice(iterates(problems, rival, settings), steps, None))
    losses = problems.losses(theta, problems.rows(settings)[1])
    return torch.where(losses.isfinite(), losses, math.inf).view(len(settings), -1).mean(1)


def path(problems: Problems, rival: BatchedRival, setting: Setting, total: int) -> list[list[float]]:
    """The points of a run on the first problem that a figure shows, while they are finite."""
    wanted = {*thinned(total)}
    first = Problems(problems.tasks[:1], problems.start[:1], {key: value[:1] for key, value in problems.batch.items()})
    run = takewhile(lambda theta: bool(theta.isfinite().all()), islice(iterates(first, rival, [setting]), total + 1))
    return [theta[0].tolist() for t, theta in enumerate(run) if t in wanted]


def thinned(total: int) -> list[int]:
    """Which of the steps 0..total a figure shows: the first hundred, then 2 % apart, and the last."""
    steps, t = set(range(min(total, 100) + 1)), 100.0
    while t < total:
        steps.add(int(t))
        t *= 1.02
    return sorted(steps | {total})


SettingScore = Callable[[BatchedRival, Sequence[Setting]], Tensor]
"""A score for each setting; smaller is better."""


def best_diagonal(
    score: SettingScore, centre: Sequence[float], width: float, *, points: int, rounds: int, shrink: float
) -> Setting:
    """The one diagonal metric with the smallest score: a grid over log10 D, so wide to either side, then narrower ones."""
    least, best = math.inf, dict[str, float]()
    for _ in range(rounds):
        axes = [torch.logspace(c - width, c + width, points, dtype=torch.float64).tolist() for c in centre]
        settings = [{f"d{i}": d for i, d in enumerate(ds)} for ds in product(*axes)]
        found = score(ONE_DIAGONAL, settings).tolist()
        if min(found) < least:
            least = min(found)
            equal = [s for s, m in zip(settings, found, strict=True) if m == least]
            best = equal[len(equal) // 2]  # of many that are equally good the middle one
        centre, width = [math.log10(d) for d in best.values()], width * shrink
    return best


TunedResult = Callable[[BatchedRival, Sequence[Setting]], Result]


def tuned_cells(
    place: str, tuned: TunedResult, brute: Callable[[], Result], rates: Mapping[str, Any], *, everything: bool
) -> Iterator[Cell]:
    """The cells of what is tuned on the test problems: the best diagonal, then the rivals, in the rate and in everything."""
    yield Cell(f"{place}-best-diagonal", brute)
    for key, rival in BATCHED_RIVALS.items():
        yield Cell(f"{place}-{key}-rate", partial(tuned, rival, rival.grid(rates, everything=False)))
        if everything and rival.others:
            yield Cell(f"{place}-{key}-all", partial(tuned, rival, rival.grid(rates, everything=True)))


Attempt = tuple[LearnedOptimiser | str, list[str]]
"""What was learned, or why nothing could be; and the names of the warnings."""


def try_meta_train(family: TaskFamily, options: Mapping[str, Any], seed: int) -> Attempt:
    """Meta-train; a training that diverges for good is a result, not a failure."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: LearnedOptimiser | str = meta_train(family, **options, seed=seed)
        except ValueError as error:
            found = str(error)
    return found, own_warnings(caught)


def own_warnings(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """The kinds of MetaMD's own warnings among those that were caught: they belong to a result."""
    return sorted({w.category.__name__ for w in caught if w.category.__module__.startswith("metamd")})


def measured(training: Attempt, measure: Callable[[LearnedOptimiser], Result]) -> Result:
    """What was learned, measured, with its metrics, what learning took, and the names of all warnings."""
    learned, warned = training
    if isinstance(learned, str):
        return {"failed": learned, "warnings": warned}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure(learned)
    return found | {
        "metrics": next(v.detach().exp().tolist() for v in learned.potential.log_d.values()),
        "cost": {k: v for k, v in (learned.header.cost or {}).items() if k != "seconds"},
        "warnings": sorted({*warned, *own_warnings(caught)}),
    }


def run_learned(
    task: Task, learned: LearnedOptimiser, limit: int, *, exact: bool = True, tolerance: float = 0.0
) -> tuple[list[list[float]], list[float]]:
    """The points and gradient norms of `MetaMD`, lr = 1 and nothing tuned, until a norm is below the tolerance."""
    theta = torch.nn.Parameter(task.init()["theta"])
    points, norms = list[list[float]](), list[float]()

    def watch(t: int, loss: Tensor, grads: Params) -> None:
        points.append(theta.detach().tolist())
        norms.append(float(grads["theta"].norm()))

    def until(t: int, losses: Sequence[float], grads: Params) -> str:
        return "" if tolerance <= norms[-1] < math.inf else "it has arrived, or left for good"

    optimiser = MetaMD([("theta", theta)], learned, metric="learned", exact=exact, check_finite=False)
    engine.train(task, OptimiserSteps({"theta": theta}, optimiser), limit + 1, watch=watch, until=until)
    return points, norms


def panel(title: str, task: Any, points: Sequence[Sequence[float]]) -> Panel:
    """A run over the contours of the task's loss, for a figure."""

    def surface(x: Any, y: Any) -> Any:
        theta = torch.from_numpy(np.stack([x, y], -1).reshape(-1, 2))
        losses = torch.func.vmap(lambda p: task.loss({"theta": p}, task.batch(0)))(theta)
        return losses.reshape(x.shape).numpy()

    return Panel(title, surface, points, task.optimum()["theta"].tolist())


@dataclass(frozen=True)
class Synthetic:
    """An experiment that compares in a way of its own, on functions of two variables."""

    name: str
    scales: Mapping[str, Any]  # by name
    cells: Callable[[Any, int], Iterator[Cell]]  # what there is to compute at a scale, with a seed
    table: Callable[[Mapping[str, Result]], list[Result]]  # the rows, from the results of the cells
    sections: Callable[[Sequence[Result]], list[Section]]  # the tables, from the rows
    draw: Callable[[Mapping[str, Result], Path], None]  # the figures, from the results of the cells, into the folder
    variant: str = ""

    def run(self, scale: str, folder: Path, seed: int, workers: int | Executor = 1, only: Sequence[str] = ()) -> Result:
        """Fill the table and draw the figures; what is in the folder already is kept. No domain is held out."""
        size, about = self.scales[scale], {"experiment": self.name, "scale": scale, "seed": seed}
        records = Records(folder, about | asdict(size))
        results = fill(records, self.cells(size, seed), title=self.name, workers=workers)
        self.draw(results, folder)
        return about | {"rows": self.table(results)}

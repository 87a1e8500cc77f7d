"""How many iterations until the gradient is small: of many settings on many problems, and of the best setting."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from metamd.experiments.synthetic.batched import DIAGONAL, BatchedRival, Setting, State
from metamd.files.learned import LearnedOptimiser
from metamd.optimiser.optimiser import MetaMD
from metamd.tasks.base import Task, TaskFamily

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
        """Problems of a family.

        Args:
            family: `quadratic` or `rosenbrock`.
            count: P.
            seed: of the draw.
        """
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

    Args:
        problems: P of them.
        rival: the optimiser.
        settings: H of them.
        tolerance: a run has arrived when the norm of its gradient is below this.
        limit: the most steps.
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
    """One row for every setting and problem: the points, the batches and the hyperparameters.

    Args:
        problems: P of them.
        settings: H of them.
    """
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
    """The setting with the smallest mean number of iterations on these very problems, which is generous to the rival.

    Args:
        problems: what it is tuned on and measured on.
        rival: the optimiser.
        settings: the grid.
        tolerance: as for `iterations`.
        limit: the most steps.
    """
    counts = iterations(problems, rival, settings, tolerance, limit)
    best = int(means(counts, limit).argmin())
    own = iterations(problems, rival, [settings[best]], tolerance, limit)[0]
    return Entry(settings[best], _counts(own), path(problems, rival, settings[best], int(own[0]), limit))


def path(problems: Problems, rival: BatchedRival, setting: Setting, count: int, limit: int) -> list[list[float]]:
    """The points of a run on the first problem: all of the first hundred, then ever fewer.

    Args:
        problems: of which the first counts.
        rival: the optimiser.
        setting: its hyperparameters.
        count: its iterations, or `NEVER`.
        limit: how far to follow a run that does not arrive.
    """
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

    Args:
        problems: what it is tuned on and measured on.
        tolerance: as for `iterations`.
        limit: the most steps.
        points: per coordinate.
        rounds: grids, each a quarter of the width of the one before.
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
    """What `MetaMD` does with a learned geometry, as its users run it: lr = 1, nothing tuned; an entry for each tolerance.

    Args:
        problems: P of them.
        geometry: as `meta_train` returns it.
        tolerances: as for `iterations`.
        limit: the most steps.
        exact: False takes the paper's step.
    """
    counts: list[list[int | None]] = [[None] * len(problems) for _ in tolerances]
    points: list[list[float]] = []
    for number, task in enumerate(problems.tasks):
        theta = torch.nn.Parameter(task.init()["theta"])
        optimiser = MetaMD([("theta", theta)], geometry, exact=exact, check_finite=False)
        for t in range(limit + 1):
            if number == 0:
                points.append(theta.detach().tolist())
            (theta.grad,) = torch.autograd.grad(task.loss({"theta": theta}, task.batch(t)), theta)
            norm = float(theta.grad.norm())
            for found, tolerance in zip(counts, tolerances, strict=True):
                if found[number] is None and norm < tolerance:
                    found[number] = t
            if norm < min(tolerances) or not norm < math.inf:
                break
            optimiser.step()
    wanted = thinned(len(points) - 1)
    path = [x for t, x in enumerate(points) if t in wanted]
    return [Entry({}, found, path) for found in counts]


def _counts(counts: Tensor) -> list[int | None]:
    return [None if c == NEVER else int(c) for c in counts]

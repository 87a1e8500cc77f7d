"""Many tasks of one shape, trained side by side as one batch of runs."""

import time
from collections.abc import Sequence
from functools import partial
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from metamd.inner.executor import Executor
from metamd.inner.run import Cost, ReferenceRun, Trajectory, bound, referred, run_inner, train, trouble
from metamd.potentials.base import Params, Potential, mirror_step
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task

SMALL = 10_000
"""Parameters up to which runs side by side are faster: steps of such models are all overhead. (Measured on one CPU thread:
quadratics in 2-D 80 times, a network of 3,700 parameters 1.7 times, one of 13,000 1.1 times; one of 118,000 takes 1.6 times
as long.)"""


def run_many(
    tasks: Sequence[Task],
    potential: Potential,
    *,
    lr: float = 1.0,
    exact: bool = True,
    reference: ReferenceRun | None = None,
    products: bool = False,
    executor: Executor | None = None,
) -> list[Trajectory]:
    """The records of runs of tasks whose loss is the same function (`family.shared_loss`), under vmap where that is faster.

    It is faster for models of up to `SMALL` parameters. Runs with several pieces are made one after another, because every
    task has active pieces of its own, and so are runs with products, because their sums would be as many as the tasks.
    The executor computes runs that are not made under vmap. The other arguments are those of `run_inner`.
    """
    if not tasks:
        raise ValueError("there must be at least one task to run, got none.")
    one_piece = isinstance(potential, MaxDiagonal) and potential.pieces == 1
    if not small(tasks) or not one_piece or products or len(tasks) == 1:
        options: dict[str, Any] = {"lr": lr, "exact": exact, "reference": reference, "products": products}
        pieces = {f"task {i}": partial(run_inner, task, potential, **options) for i, task in enumerate(tasks)}
        return list((executor or Executor()).all(pieces).values())
    runs = _SideBySide(Stacked(tasks), potential, lr)
    began = time.perf_counter()
    train(runs.task, runs, runs.steps, until=None)
    seconds = (time.perf_counter() - began) / len(tasks)
    return [referred(runs.record(i, seconds), task, reference) for i, task in enumerate(tasks)]


def small(tasks: Sequence[Task]) -> bool:
    """Whether tasks whose loss is the same function are trained in less time side by side."""
    return sum(x.numel() for x in tasks[0].init().values()) <= SMALL and len({t.steps for t in tasks}) == 1


class Stacked:
    """Tasks as one: every tensor has one more dimension in front, the task, and the loss is the sum of theirs."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.losses = torch.zeros(len(tasks))
        self._loss = torch.func.vmap(tasks[0].loss, randomness="different")
        self._last: list[Any] = []
        self._batch: Any = None

    def init(self) -> dict[str, Tensor]:
        """The starts."""
        starts = [t.init() for t in self.tasks]
        return {n: torch.stack([s[n].detach() for s in starts]) for n in starts[0]}

    def batch(self, step: int) -> Any:
        """The batches of a step; they are not stacked again while they are the same tensors."""
        batches, specs = zip(*(tree_flatten(t.batch(step)) for t in self.tasks), strict=True)
        leaves = [x for batch in batches for x in batch]
        if not self._last or any(map(is_not, leaves, self._last)):
            self._batch = tree_unflatten([torch.stack(column) for column in zip(*batches, strict=True)], specs[0])
        self._last = leaves
        return self._batch

    def loss(self, params: Params, batch: Any) -> Tensor:
        """The sum over tasks, which the gradient of each is the same for; `losses` has them one by one."""
        losses = self._loss(params, batch)
        self.losses = losses.detach()
        return torch.sum(losses)


class _SideBySide:
    """Mirror descent with one piece on stacked tasks, a `StepRule` that records every run."""

    def __init__(self, task: Stacked, potential: Potential, lr: float) -> None:
        self.task, self.lr, self.steps, count = task, lr, task.tasks[0].steps, len(task.tasks)
        self.params = self.start = self._ends = task.init()
        self.potential = bound(potential, {n: x[0] for n, x in self.start.items()}, lr, self.steps)
        metrics = {n: self.potential.metric(n) for n in self.start}
        self._squares = {n: d.new_zeros(count, *d.shape[1:]) for n, d in metrics.items()}
        self._losses = np.zeros((self.steps, count))
        self._taken = np.full(count, self.steps)
        self._why = [""] * count
        self._largest = np.zeros(count)
        self._step = 0

    @torch.no_grad()
    def step(self, loss: Tensor, grads: Params) -> str:
        """One step of every task that has not diverged; one that has cannot touch the others."""
        going = torch.as_tensor(self._watch(grads))
        if not going.any():
            return "All runs diverged."
        for n, g in grads.items():
            into = self._squares[n]
            coordinates = torch.func.vmap(lambda x, n=n: self.potential.basis.into(n, x))(g)
            square = coordinates.square().sum_to_size(into.shape)
            into += square if bool(going.all()) else torch.where(spread_over(going, into), square, 0)
        self.params = mirror_step(self.params, grads, self.potential, self.lr).params
        if going.all():
            self._ends = self.params
        else:
            self._ends = {n: torch.where(spread_over(going, x), x, self._ends[n]) for n, x in self.params.items()}
        self._step += 1
        return ""

    def _watch(self, grads: Params) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Note losses and norms; which tasks are still going."""
        t, values = self._step, self.task.losses.double().cpu().numpy()
        squares = torch.stack([g.double().square().reshape(len(g), -1).sum(1) for g in grads.values()]).sum(0)
        norms = squares.sqrt().cpu().numpy()
        first = self._losses[0] if t else values
        suspicious = ~np.isfinite(values) | ~np.isfinite(norms) | (values - first > 0)
        for i in np.flatnonzero(suspicious & (self._taken == self.steps)):
            self._why[i] = trouble(t, float(first[i]), float(values[i]), float(norms[i]))
            if self._why[i]:
                self._taken[i] = t
        going = self._taken > t
        self._losses[t] = values
        self._largest = np.where(going, np.maximum(self._largest, norms), self._largest)
        return going

    def record(self, i: int, seconds: float) -> Trajectory:
        """The record of one task."""
        taken = int(self._taken[i])
        start, end, squares = ({n: x[i] for n, x in part.items()} for part in (self.start, self._ends, self._squares))
        return Trajectory(
            losses=torch.from_numpy(self._losses[:taken, i].copy()),
            start=start,
            end=end,
            squares=squares,
            lr=self.lr,
            steps=self.steps,
            diverged=self._why[i],
            cost=Cost(gradients=taken, seconds=seconds),
            weights=np.ones((taken, 1)),
            gaps=np.zeros(taken),
            largest_gradient=float(self._largest[i]),
        )


def spread_over(going: Tensor, x: Tensor) -> Tensor:
    """One number per task, in the shape of stacked tensors."""
    return going.view(-1, *[1] * (x.ndim - 1))

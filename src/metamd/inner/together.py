"""Many tasks of one shape, trained side by side as one batch of runs."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from metamd.inner.run import (
    Cost,
    ReferenceRun,
    Trajectory,
    bound,
    check_run,
    local_norm,
    reference_trouble,
    run_inner,
    trouble,
)
from metamd.potentials.base import Params, Potential
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.step import mirror_step
from metamd.tasks.base import Task

SMALL = 10_000
"""Parameters up to which runs side by side are faster: steps of such models are all overhead. (Measured on one CPU thread:
quadratics in 2-D 80 times, a network of 3,700 parameters 1.7 times, one of 13,000 1.1 times; one of 118,000 takes 1.6 times
as long.)"""


def run_many(
    tasks: Sequence[Task],
    potential: Potential,
    *,
    together: bool = False,
    lr: float = 1.0,
    exact: bool = True,
    steps: int | None = None,
    phases: int = 3,
    reference: ReferenceRun | None = None,
    products: bool = False,
) -> list[Trajectory]:
    """The records of many runs; those of small models are trained together under vmap.

    Args:
        tasks: the problems.
        potential: phi, as for `run_inner`.
        together: whether one task's loss serves all (`family.shared_loss`), so that they can run side by side. This is done
            where it is faster, for models of up to `SMALL` parameters, and for one piece alone: with several, every task
            has active pieces of its own.
        lr: eta.
        exact: False takes the paper's step.
        steps: T.
        phases: as for `run_inner`.
        reference: as for `run_inner`.
        products: as for `run_inner`; such runs are made one after another, since their sums would be as many as the tasks.
    """
    if not tasks:
        raise ValueError("there must be at least one task to run, got none.")
    lengths = {t.steps if steps is None else steps for t in tasks}
    one_piece = isinstance(potential, MaxDiagonal) and potential.pieces == 1
    small = together and sum(x.numel() for x in tasks[0].init().values()) <= SMALL
    if not small or not one_piece or products or len(lengths) > 1 or len(tasks) == 1:
        options: dict[str, Any] = {"lr": lr, "exact": exact, "steps": steps, "phases": phases, "reference": reference}
        return [run_inner(task, potential, **options, products=products) for task in tasks]
    check_run(potential, lr, max(lengths), phases)
    return _Lockstep(tasks, potential, lr, max(lengths), phases).run(reference)


class _Lockstep:
    """Runs side by side: every tensor has one more dimension in front, the task.

    Args:
        tasks: the problems.
        potential: phi, of one piece.
        lr: eta.
        steps: T.
        phases: the number of phases.
    """

    def __init__(self, tasks: Sequence[Task], potential: Potential, lr: float, steps: int, phases: int) -> None:
        self.tasks, self.lr, self.steps, self.phases = tasks, lr, steps, phases
        starts = [{n: x.detach() for n, x in t.init().items()} for t in tasks]
        self.potential = bound(potential, starts[0])
        self.start = {n: torch.stack([s[n] for s in starts]) for n in starts[0]}
        self._loss = torch.func.vmap(tasks[0].loss, randomness="different")
        self._batches = _Batches(tasks)
        metrics = {n: self.potential.metric(n) for n in self.start}
        self._squares = {n: d.new_zeros(len(tasks), phases, *d.shape[1:]) for n, d in metrics.items()}
        self._losses = np.zeros((steps, len(tasks)))
        self._taken = np.full(len(tasks), steps)
        self._why = [""] * len(tasks)
        self._largest = np.zeros(len(tasks))

    def run(self, reference: ReferenceRun | None) -> list[Trajectory]:
        """Train all tasks."""
        began = time.perf_counter()
        params = self.start
        ends = dict(params)
        for t in range(self.steps):
            losses, grads = self._gradients(params, t)
            going = self._watch(t, losses, grads)
            if not going.any():
                break
            self._count(grads, torch.as_tensor(going), t * self.phases // self.steps)
            with torch.no_grad():
                params = mirror_step(params, grads, self.potential, self.lr).params
            ends = params if going.all() else _choose(torch.as_tensor(going), params, ends)
        seconds = (time.perf_counter() - began) / len(self.tasks)
        return [self._record(i, ends, seconds, reference) for i in range(len(self.tasks))]

    def _gradients(self, params: Params, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {n: x.detach().requires_grad_() for n, x in params.items()}
        with torch.enable_grad():
            losses = self._loss(leaves, self._batches(step))
            found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        return losses.detach(), dict(zip(leaves, found, strict=True))

    def _watch(self, step: int, losses: Tensor, grads: Params) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Note losses and norms; which tasks are still going. One that is not cannot touch the others."""
        values = losses.double().cpu().numpy()
        squares = torch.stack([g.double().square().reshape(len(g), -1).sum(1) for g in grads.values()]).sum(0)
        norms = squares.sqrt().cpu().numpy()
        first = self._losses[0] if step else values
        suspicious = ~np.isfinite(values) | ~np.isfinite(norms) | (values - first > 0)
        for i in np.flatnonzero(suspicious & (self._taken == self.steps)):
            self._why[i] = trouble(step, float(first[i]), float(values[i]), float(norms[i]))
            if self._why[i]:
                self._taken[i] = step
        going = self._taken > step
        self._losses[step] = values
        self._largest = np.where(going, np.maximum(self._largest, norms), self._largest)
        return going

    @torch.no_grad()
    def _count(self, grads: Params, going: Tensor, phase: int) -> None:
        for n, g in grads.items():
            into = self._squares[n][:, phase]
            coordinates = torch.func.vmap(lambda x, n=n: self.potential.basis.into(n, x))(g)
            square = coordinates.square().sum_to_size(into.shape)
            into += square if bool(going.all()) else torch.where(going.view(-1, *[1] * (into.ndim - 1)), square, 0)

    def _record(self, i: int, ends: Params, seconds: float, reference: ReferenceRun | None) -> Trajectory:
        taken, why = int(self._taken[i]), self._why[i]
        start, end = ({n: x[i] for n, x in side.items()} for side in (self.start, ends))
        squares = {n: s[i] for n, s in self._squares.items()}
        shares = {n: s.sum(0, keepdim=True) for n, s in squares.items()}
        cost, best = Cost(gradients=taken, seconds=seconds), None
        if reference is not None and not why:
            best, extra = reference.run(self.tasks[i], start, self.steps)
            cost, why = cost + extra, reference_trouble(best)
        return Trajectory(
            losses=torch.from_numpy(self._losses[:taken, i].copy()),
            start=start,
            end=end,
            reference=best,
            squares=squares,
            shares=shares,
            weights=np.ones((taken, 1)),
            gaps=np.zeros(taken),
            switches=0,
            largest_gradient=float(self._largest[i]),
            local_norm=float(local_norm(shares, self.potential)),
            gradient_sum=None,
            linear=None,
            lr=self.lr,
            steps=self.steps,
            diverged=why,
            cost=cost,
        )


class _Batches:
    """The tasks' batches of a step, stacked; not stacked again while they are the same tensors."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self._last: list[Any] = []
        self._stacked: Any = None

    def __call__(self, step: int) -> Any:
        batches = [t.batch(step) for t in self.tasks]
        if not self._last or not all(map(_same, batches, self._last)):
            flat = [tree_flatten(b) for b in batches]
            columns = zip(*(leaves for leaves, _ in flat), strict=True)
            self._stacked = tree_unflatten([torch.stack(column) for column in columns], flat[0][1])
        self._last = batches
        return self._stacked


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return all(a[k] is b[k] for k in a)
    return a is b or (isinstance(a, tuple) and all(x is y for x, y in zip(a, b, strict=True)))


def _choose(going: Tensor, new: Params, old: Params) -> dict[str, Tensor]:
    return {n: torch.where(going.view(-1, *[1] * (x.ndim - 1)), x, old[n]) for n, x in new.items()}

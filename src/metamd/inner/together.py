"""Many tasks of one shape, trained side by side as one batch of runs."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from metamd.files.usage import Usage
from metamd.inner.executor import Executor
from metamd.inner.run import Cost, ReferenceRun, Trajectory, bound, laid_out_like, referred, run_inner, train, trouble
from metamd.optimiser.averaging import tail_share
from metamd.optimiser.binding import check_scales
from metamd.potentials.base import Params, Potential, mirror_step
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.eigenbases import turned_step
from metamd.potentials.forms import Array, widen
from metamd.potentials.online import Online, State, _due, turns
from metamd.potentials.whitening import inverse_root
from metamd.tasks.base import Task
from metamd.tasks.supervised import SupervisedTask

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
    task has active pieces of its own. So are runs with products, because their sums would be as many as the tasks. The
    executor computes runs that are not made under vmap. The other arguments are those of `run_inner`.
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


GATHERED = 50_000_000
"""Numbers up to which the training data of tasks are stacked as a whole, so that a batch of all is one call."""


class Stacked:
    """Tasks as one: every tensor has one more dimension in front, the task, and the loss is the sum of theirs."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.losses = torch.zeros(len(tasks))
        self._loss = torch.func.vmap(tasks[0].loss, randomness="different")
        self._last: list[Any] = []
        self._batch: Any = None
        self._data = _stacked_data(tasks)

    def init(self) -> dict[str, Tensor]:
        """The starts."""
        starts = [t.init() for t in self.tasks]
        return {n: torch.stack([s[n].detach() for s in starts]) for n in starts[0]}

    def batch(self, step: int) -> Any:
        """The batches of a step; they are not stacked again while they are the same tensors."""
        if self._data is not None:
            rows = torch.stack([t.shuffle.indices(step) for t in self.tasks])  # type: ignore[attr-defined]
            which = torch.arange(len(rows)).unsqueeze(1)
            return {name: part[which, rows] for name, part in self._data.items()}
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


def _stacked_data(tasks: Sequence[Task]) -> dict[str, Tensor] | None:
    """The training examples of tasks with as many each, in memory twice; None where their batches are stacked one by one."""
    if not all(isinstance(t, SupervisedTask) and not t.dropout and t.device.type == "cpu" for t in tasks):
        return None
    parts = [t.splits["train"] for t in tasks if isinstance(t, SupervisedTask)]
    if not all(isinstance(x, Tensor) and x.device.type == "cpu" for pair in parts for x in pair):
        return None
    if len({tuple(x.shape for x in pair if isinstance(x, Tensor)) for pair in parts}) > 1:
        return None
    inputs, targets = zip(*parts, strict=True)
    size = sum(x.numel() for pair in parts for x in pair if isinstance(x, Tensor))
    return {"inputs": torch.stack(inputs), "targets": torch.stack(targets)} if size <= GATHERED else None


class Watched:
    """The records of stacked runs: their losses, how many steps each took, and why one was given up."""

    def __init__(self, task: Stacked, steps: int) -> None:
        count = len(task.tasks)
        self.task, self.steps, self.step = task, steps, 0
        self.losses, self.taken = np.zeros((steps, count)), np.full(count, steps)
        self.largest, self.why = np.zeros(count), [""] * count

    def going(self, grads: Params) -> Tensor:
        """Note the losses and the lengths of the gradients of the next step; which runs take it."""
        t, values = self.step, self.task.losses.double().cpu().numpy()
        squares = torch.stack([g.double().square().reshape(len(g), -1).sum(1) for g in grads.values()]).sum(0)
        norms = squares.sqrt().cpu().numpy()
        first = self.losses[0] if t else values
        suspicious = ~np.isfinite(values) | ~np.isfinite(norms) | (values > first)
        for i in np.flatnonzero(suspicious & (self.taken == self.steps)):
            self.why[i] = trouble(t, float(first[i]), float(values[i]), float(norms[i]))
            if self.why[i]:
                self.taken[i] = t
        going = self.taken > t
        self.losses[t] = values
        self.largest = np.where(going, np.maximum(self.largest, norms), self.largest)
        self.step += 1
        return torch.as_tensor(going)


class _SideBySide:
    """Mirror descent with one piece on stacked tasks, a `StepRule` that records every run."""

    def __init__(self, task: Stacked, potential: Potential, lr: float) -> None:
        self.task, self.lr, self.steps, count = task, lr, task.tasks[0].steps, len(task.tasks)
        self.params = self.start = self._ends = task.init()
        self.potential = bound(potential, {n: x[0] for n, x in self.start.items()}, lr, self.steps)
        metrics = {n: self.potential.metric(n) for n in self.start}
        self._squares = {n: d.new_zeros(count, *d.shape[1:]) for n, d in metrics.items()}
        self._watched = Watched(task, self.steps)

    @torch.no_grad()
    def step(self, loss: Tensor, grads: Params) -> str:
        """One step of every task that has not diverged; one that has cannot touch the others."""
        going = self._watched.going(grads)
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
        return ""

    def record(self, i: int, seconds: float) -> Trajectory:
        """The record of one task."""
        watched, taken = self._watched, int(self._watched.taken[i])
        start, end, squares = ({n: x[i] for n, x in part.items()} for part in (self.start, self._ends, self._squares))
        return Trajectory(
            losses=torch.from_numpy(watched.losses[:taken, i].copy()),
            start=start,
            end=end,
            squares=squares,
            lr=self.lr,
            steps=self.steps,
            diverged=watched.why[i],
            cost=Cost(gradients=taken, seconds=seconds),
            weights=np.ones((taken, 1)),
            gaps=np.zeros(taken),
            largest_gradient=float(watched.largest[i]),
        )


def spread_over(going: Tensor, x: Tensor) -> Tensor:
    """One number per task, in the shape of stacked tensors."""
    return going.view(-1, *[1] * (x.ndim - 1))


# runs as learned files recommend


class StackedSteps:
    """Steps of stacked tasks as usages say, one for each; a run that diverges stays where it is.

    The geometry has one piece. An online metric, if given, is that of all usages. The losses of steps that are `looked_at`
    are kept, for tail averages the losses there. A `start` replaces the starts of all runs.
    """

    def __init__(
        self,
        task: Stacked,
        potential: MaxDiagonal,
        usages: Sequence[Usage],
        total: int,
        online: Online | None = None,
        *,
        looked_at: Callable[[int], bool] | None = None,
        start: Params | None = None,
    ) -> None:
        self.task, self.usages, self.total, self.looked_at = task, usages, total, looked_at
        own = task.init()
        start = own if start is None else {n: start[n].to(x).expand_as(x) for n, x in own.items()}
        self.x, self.z = ({n: v.clone() for n, v in start.items()} for _ in range(2))
        self.tail = torch.tensor([usage.averaging == "tail" for usage in usages])
        self.momentum = torch.tensor([usage.momentum for usage in usages], dtype=torch.float64)
        self.watched, self.seen = Watched(task, total), list[Array]()
        self.directions = StackedDirections(potential, {n: x[0] for n, x in start.items()}, online)
        self._averaged = bool((self.tail | (self.momentum > 0)).any())

    @property
    def params(self) -> Params:
        """A tail average is taken of iterates that know nothing of it."""
        if not self._averaged or bool(self.tail.all()):
            return self.z
        return {n: torch.where(spread_over(self.tail, x), self.z[n], x) for n, x in self.x.items()}

    @torch.no_grad()
    def step(self, loss: Tensor, grads: Params) -> str:
        """One step of all tasks that go on."""
        t, values = self.watched.step, self.task.losses.double().numpy().copy()
        going = self.watched.going(grads)
        if not going.any():
            return "All runs diverged."
        if self.looked_at is not None and self.looked_at(t):
            if bool(self.tail.any()):
                self.task.loss(self.x, self.task.batch(t))
                values = np.where(self.tail.numpy(), self.task.losses.double().numpy(), values)
            self.seen.append(values)
        rates = torch.tensor([usage.factor * usage.share(t, self.total) for usage in self.usages], dtype=torch.float64)
        share, every = torch.where(self.tail, tail_share(t + 1), 1 - self.momentum), bool(going.all())
        for n, direction in self.directions.of(grads).items():
            x, z = self.x[n], self.z[n]
            moved = direction.mul_(spread_over(rates, z).to(z))
            z.sub_(moved if every else torch.where(spread_over(going, z), moved, 0))
            if self._averaged:
                nearer = (z - x).mul_(spread_over(share, x).to(x))
                x.add_(nearer if every else torch.where(spread_over(going, x), nearer, 0))
        return ""

    def end(self, i: int) -> dict[str, Tensor]:
        """The parameters of a run as they are judged."""
        return {n: x[i].clone() for n, x in (self.x if self._averaged else self.z).items()}


class StackedDirections:
    """The directions of stacked gradients at lr 1, in a metric that was learned or follows each run.

    Another spelling of `Online.advance` and of the step in one piece, with the products of all runs in one call.
    """

    def __init__(self, potential: MaxDiagonal, example: Params, online: Online | None) -> None:
        if potential.pieces > 1:
            raise ValueError(
                f"runs side by side need a geometry of one piece, got one of {potential.pieces}: every run has active "
                "pieces of its own. Train them one after another with MetaMD."
            )
        check_scales(online, potential, example)
        self.potential, self.online = potential, online
        self.metrics = {n: potential.metric(n)[0].detach().to(widen(x).dtype) for n, x in example.items()}
        self.states: dict[str, State] = {n: {} for n in example}
        for n, x in example.items():  # what a basis computes once is not computed inside vmap
            potential.basis.out_of(n, potential.basis.into(n, widen(x)))

    def of(self, grads: Params) -> dict[str, Tensor]:
        """By tensor, with the task in front."""
        wide = {n: widen(g) for n, g in grads.items()}
        if self.online is None:
            return {n: self._out_of(n, self._into(n, g) / self.metrics[n]).to(grads[n].dtype) for n, g in wide.items()}
        step = {"polar": self._polar, "eigen": self._eigen}.get(self.online.rule, self._squares)
        return {n: step(self.online, n, g).to(grads[n].dtype) for n, g in wide.items()}

    def _into(self, name: str, x: Tensor) -> Tensor:
        if self.potential.basis.kind == "identity" and self.metrics[name].shape == x.shape[1:]:
            return x
        return torch.func.vmap(partial(self.potential.basis.into, name))(x)

    def _out_of(self, name: str, x: Tensor) -> Tensor:
        if self.potential.basis.kind == "identity" and self.metrics[name].shape == x.shape[1:]:
            return x
        return torch.func.vmap(partial(self.potential.basis.out_of, name))(x)

    def _scale(self, online: Online, name: str) -> float:
        return online.step_size(self.potential.slots[name].key)

    def _squares(self, online: Online, name: str, grad: Tensor) -> Tensor:
        """The rules "sum" and "average"."""
        c = self._into(name, grad)
        (metric,) = online.metrics([c], [self.states[name]])
        return self._out_of(name, c / metric).mul_(self._scale(online, name))

    def _eigen(self, online: Online, name: str, grad: Tensor) -> Tensor:
        """The rule "eigen"."""
        state = self.states[name]
        average = state.setdefault("average", torch.zeros_like(grad)).lerp_(grad, 1 - online.beta)
        c, ahead = self._into(name, grad), self._into(name, grad.lerp(average, online.beta))
        if grad.ndim < 3:  # beside weights
            (metric,) = online.metrics([c], [state])
            return self._out_of(name, ahead.div_(metric)).mul_(self._scale(online, name))
        turn = turns(online, state)
        found, _ = turned_step(state, c.flatten(2), ahead.flatten(2), epsilon=online.epsilon, turn=turn)
        return self._out_of(name, found.reshape(c.shape)).reshape(grad.shape).mul_(self._scale(online, name))

    def _polar(self, online: Online, name: str, grad: Tensor) -> Tensor:
        """The rule "polar": (C C')^-1/2 C D^-1/2 of every run, by the share of signal in its gradients."""
        state, beta = self.states[name], online.beta
        average = state.setdefault("average", torch.zeros_like(grad))
        average.lerp_(grad, 1 - beta)
        ahead = torch.lerp(grad, average, beta)
        if grad.ndim < 3:  # beside weights
            (metric,) = online.metrics([grad], [state])
            return ahead.div_(metric).mul_(self._scale(online, name) / (1 - beta ** (state["counted"] + 1)))
        new, share = _due(online, state), grad.new_ones(len(grad))
        if online.signal:
            share = self._signal(online, state, grad, average)
        if new:
            state["direction"] = self._whitened(online, name, ahead)
        return state["direction"] * spread_over(share * self._scale(online, name), grad).to(grad)

    def _signal(self, online: Online, state: State, grad: Tensor, average: Tensor) -> Tensor:
        now, short = (torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64) for x in (grad, average))
        kept = state.get("length", torch.zeros_like(now)).square() * online.signal + (1 - online.signal) * now.square()
        # kept in the type of the gradients, as that of one run is
        state["length"] = kept.sqrt().to(grad.dtype).double()
        seen = (1 - online.signal ** state["counted"]) ** 0.5 / (1 - online.beta ** state["counted"])
        return (seen * short / kept.sqrt().clamp_min(torch.finfo(grad.dtype).tiny)).clamp_max(1.0)

    def _whitened(self, online: Online, name: str, a: Tensor) -> Tensor:
        d, tiny = self.metrics[name], torch.finfo(a.dtype).tiny
        sizes = a.flatten(1).abs().amax(1).double()
        powers = sizes.clamp_min(tiny).log2().floor().exp2()  # nothing is rounded by a power of two
        coordinates, root = self._into(name, a / spread_over(powers, a).to(a)), d.sqrt()
        c = (coordinates / root).flatten(2)
        wide = c.shape[1] <= c.shape[2]
        c = c if wide else c.mT
        rows = c.shape[1]
        count = math.ceil(rows / online.block) if online.block else 1
        c = torch.nn.functional.pad(c, (0, 0, 0, -rows % count)).reshape(len(c) * count, -1, c.shape[2])
        found = (inverse_root(c @ c.mT, online.whiten) @ c).reshape(len(a), -1, c.shape[2])[:, :rows]
        found = (found if wide else found.mT).reshape(coordinates.shape) / root
        full = (sizes / online.epsilon).clamp_max(1)
        return self._out_of(name, found).reshape(a.shape) * spread_over(full, a).to(a)


class StackedOptimiser:
    """The steps of a torch optimiser that moves every number by itself, on stacked tasks."""

    def __init__(self, task: Stacked, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], total: int) -> None:
        self.params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
        self.optimiser, self.watched = make(list(self.params.values())), Watched(task, total)

    def step(self, loss: Tensor, grads: Params) -> str:
        """One step; what is not a number stays with its own run."""
        if not self.watched.going(grads).any():
            return "All runs diverged."
        for n, g in grads.items():
            self.params[n].grad = laid_out_like(self.params[n], g)
        self.optimiser.step()
        return ""

    def end(self, i: int) -> dict[str, Tensor]:
        """The parameters of a run."""
        return {n: x[i].detach().clone() for n, x in self.params.items()}

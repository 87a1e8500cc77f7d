"""The exact gradient by reverse mode, with checkpoints."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from metamd.hypergrad.base import Estimator, Hypergradient, differentiate, given_up, learnable
from metamd.hypergrad.recursion import Passage, Recursion, stays
from metamd.hypergrad.straight import Straight
from metamd.inner import State, Trajectory, Walk, gradient
from metamd.mirror import mirror_step
from metamd.objectives import Objective
from metamd.potentials.base import Active, Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task

SHARE = 2 / 3
"""Segments per sqrt(T): a head takes less memory than the graph of a step, so that segments may be longer than many."""


@dataclass(frozen=True)
class Reverse(Estimator):
    """The exact gradient for any number of metrics, from the last step to the first.

    The run is cut into segments and only the state at the head of each is kept; going back, a segment is run again with
    the graph of every gradient, but for the last, whose graphs are kept. With 2/3 sqrt(T) segments memory is
    O(sqrt(T)) and the cost about four gradients a step.

    Args:
        checkpoints: how many segments; None for 2/3 sqrt(T), 1 for the full tape, which repeats nothing.

    Example:
        >>> Reverse()
        Reverse(checkpoints=None)
    """

    checkpoints: int | None = None

    def __post_init__(self) -> None:
        if self.checkpoints is not None and self.checkpoints < 1:
            raise ValueError(f"checkpoints must be at least 1, got {self.checkpoints}. 1 keeps the whole tape.")

    def __call__(
        self,
        task: Task,
        potential: MaxDiagonal,
        objective: Objective,
        *,
        lr: float = 1.0,
        exact: bool = True,
        steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Hypergradient:
        """Run the task forwards, then go back over it."""
        began = time.perf_counter()
        walk = Walk(task, potential, lr=lr, exact=exact, steps=steps)
        leaf = learnable(potential, walk.start)
        cuts = _cuts(walk.steps, self.checkpoints or math.ceil(SHARE * math.sqrt(walk.steps)))
        heads, tape = _forwards(walk, cuts)
        run = walk.finish(objective.reference)
        if run.diverged:
            return given_up(run, leaf, run.cost)
        objective = objective.held(run) if objective.looks_ahead else objective
        adjoint = Adjoint(Recursion(walk, leaf), objective, run)
        adjoint.back_over(tape)
        del tape
        for first, last in reversed(list(pairwise(cuts))):
            adjoint.back_over(_replay(walk, heads.pop(first), range(first, last)))
        repeated = cuts[-1]
        cost = replace(
            run.cost,
            gradients=run.cost.gradients + repeated,
            hvps=walk.steps,
            seconds=time.perf_counter() - began,
        )
        value = float(objective.value(run, leaf).detach())
        return Hypergradient(adjoint.log_d, adjoint.offsets, value, run, cost)


@dataclass(frozen=True)
class Taped:
    """A step with the graph of its gradient.

    Args:
        passage: the step; without theta_t where it stays on one piece, because nothing needs it then.
        entries: where theta_t enters the graph. The graph itself keeps of theta_t what it needs, which can be little.
        outputs: loss and gradients with their graph.
    """

    passage: Passage
    entries: tuple[GradientEdge, ...]
    outputs: list[Tensor]


class _Enter(torch.autograd.Function):
    """Points that a graph starts from and that it does not keep alive, as it would keep leaves."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, *point: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in point)


def _cuts(steps: int, segments: int) -> list[int]:
    """The first step of every segment; the last segment, which is not run again, is as long as any.

    Example:
        >>> _cuts(10, 3)
        [0, 3, 6]
    """
    segments = min(segments, steps)
    return [i * steps // segments for i in range(segments)]


def _forwards(walk: Walk, cuts: Sequence[int]) -> tuple[dict[int, State], list[Taped]]:
    """The run: the states at the heads of all segments but the last, by step, and the last segment with its graphs."""
    heads: dict[int, State] = {}
    tape: list[Taped] = []
    while walk.going:
        if walk.step in cuts[:-1]:
            heads[walk.step] = (walk.params, walk.active)
        if walk.step < cuts[-1]:
            walk.advance(*gradient(walk.task, walk.params, walk.task.batch(walk.step)))
            continue
        before, active = walk.params, walk.active
        entries, loss, grads = _graph(walk, before, walk.step)
        walk.advance(loss, grads)
        tape.append(_taped(walk, before, entries, [loss, *grads.values()], (active, walk.active)))
    return heads, tape


def _replay(walk: Walk, head: State, steps: range) -> list[Taped]:
    """One segment again, with the graphs of its gradients."""
    (params, active), tape = head, []
    for t in steps:
        entries, loss, grads = _graph(walk, params, t)
        with torch.no_grad():
            taken = mirror_step(params, grads, walk.potential, walk.lr, active=active, exact=walk.exact)
        after = taken.active or active
        tape.append(_taped(walk, params, entries, [loss, *grads.values()], (active, after)))
        params, active = taken.params, after
    return tape


def _graph(walk: Walk, params: Params, step: int) -> tuple[tuple[GradientEdge, ...], Tensor, dict[str, Tensor]]:
    """The loss and its gradient with a graph, and where the parameters enter it."""
    key = next(iter(params.values())).new_zeros((), requires_grad=True)
    points = _Enter.apply(key, *params.values())  # type: ignore[no-untyped-call]
    loss, grads = gradient(walk.task, dict(zip(params, points, strict=True)), walk.task.batch(step), graph=True)
    return tuple(map(get_gradient_edge, points)), loss, grads


def _taped(
    walk: Walk, params: Params, entries: tuple[GradientEdge, ...], outputs: list[Tensor], active: tuple[Active, Active]
) -> Taped:
    before, after = (a.weights for a in active)
    grads = {n: g.detach() for n, g in zip(params, outputs[1:], strict=True)}
    kept = {} if stays(before, after, exact=walk.exact) is not None else dict(params)
    return Taped(Passage(kept, grads, outputs[0].detach(), before, after), entries, outputs)


class Adjoint:
    """The cotangents of (theta_t, w_t), and the gradient gathered so far.

    Args:
        recursion: the differentiable step.
        objective: E.
        run: the record of the run.
    """

    def __init__(self, recursion: Recursion, objective: Objective, run: Trajectory) -> None:
        self.recursion, self.objective = recursion, objective
        ends = {n: x.detach().requires_grad_() for n, x in run.end.items()}
        final = objective.final(run, recursion.potential, ends)
        self._final, self.offsets, by_end = differentiate(final, recursion.potential, *ends.values())
        self.params = [torch.empty_like(x).copy_(by) for x, by in zip(ends.values(), by_end, strict=True)]
        self._straight = Straight(recursion, objective)
        self._logs = {n: torch.zeros_like(d) for n, d in recursion.metrics.items()}
        self.weights = torch.zeros_like(self.offsets)

    @property
    def log_d(self) -> dict[str, Tensor]:
        """The gradient by the logarithms of the metrics, gathered so far."""
        return {k: v + self._final[k] for k, v in self.recursion.added_up(self._logs).items()}

    def back_over(self, tape: Sequence[Taped]) -> None:
        """Pull the cotangents back over the steps of a segment, which is consumed."""
        tape = list(tape)
        while tape:
            self._back(tape.pop())

    def _back(self, taped: Taped) -> None:
        piece = stays(taped.passage.before, taped.passage.after, exact=self.recursion.exact)
        if piece is None:
            self._back_between(taped)
            return
        slopes = self._straight.slopes(taped.passage, piece)
        by_grads = self._straight.back(taped.passage, piece, slopes, self.params, self._logs)
        # Through the gradient: one product with the Hessian, H c.
        through = _through(taped, [taped.passage.loss.new_tensor(slopes.loss), *by_grads])
        torch._foreach_add_(self.params, through)
        self.weights = torch.zeros_like(self.weights)  # a vertex of the simplex is constant

    def _back_between(self, taped: Taped) -> None:
        """Back over a step onto, along or off a kink."""
        r, passage = self.recursion, taped.passage
        metrics, params, grads = _leaves(r.metrics), _leaves(passage.params), _leaves(passage.grads)
        offsets, loss = r.offsets.detach().requires_grad_(), passage.loss.detach().requires_grad_()
        weights = torch.tensor(passage.before, dtype=offsets.dtype, requires_grad=True)
        moved, after = r.step(metrics, offsets, params, weights, grads, passage, r.newton(passage))
        outputs, cotangents = list(moved.values()), list(self.params)
        if after.requires_grad:
            outputs, cotangents = [*outputs, after], [*cotangents, self.weights]
        if self.objective.runs:
            term = r.running(self.objective, metrics, weights, loss, grads)
            outputs, cotangents = [*outputs, term], [*cotangents, torch.ones_like(term)]
        leaves = [offsets, weights, loss, *metrics.values(), *params.values(), *grads.values()]
        by = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, materialize_grads=True)
        self.offsets = self.offsets + by[0]
        self.weights = by[1]
        by_metric, by_params, by_grads = _cut(by[3:], len(metrics), len(params))
        for gathered, d, b in zip(self._logs.values(), r.metrics.values(), by_metric, strict=True):
            gathered.addcmul_(d, b)
        through = _through(taped, [by[2], *by_grads])
        self.params = [p + t for p, t in zip(by_params, through, strict=True)]


def _through(taped: Taped, cotangents: list[Tensor]) -> list[Tensor]:
    # A gradient that is constant in the parameters has no graph.
    live = [(o, c) for o, c in zip(taped.outputs, cotangents, strict=True) if o.requires_grad]
    outputs, weights = [o for o, _ in live], [c for _, c in live]
    return list(torch.autograd.grad(outputs, taped.entries, weights, allow_unused=True, materialize_grads=True))


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.detach().requires_grad_() for n, x in tensors.items()}


def _cut(found: Sequence[Tensor], first: int, second: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    return found[:first], found[first : first + second], found[first + second :]

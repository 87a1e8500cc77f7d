"""The exact gradient by reverse mode, with checkpoints."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from metamd.inner.estimators.base import Estimator, Hypergradient, Setting, differentiate, given_up, learnable
from metamd.inner.estimators.step import Passage, Recursion, stays
from metamd.inner.objectives import Objective
from metamd.inner.run import Cost, MirrorDescent, Trajectory, gradient, train
from metamd.inner.sums import scalar
from metamd.potentials.base import Active, Params
from metamd.potentials.step import mirror_step

State = tuple[dict[str, Tensor], Active]
"""What a step starts from: the parameters, and the active pieces there."""

SHARE = 2 / 3
"""Segments per sqrt(T): a head takes less memory than the graph of a step, so that segments may be longer than many."""


@dataclass(frozen=True)
class Reverse(Estimator):
    """The exact gradient for any number of metrics, from the last step to the first.

    The run is cut into segments and only the state at the head of each is kept; going back, a segment is run again with
    the graph of every gradient, but for the last, whose graphs are kept. With 2/3 sqrt(T) segments memory is
    O(sqrt(T)) and the cost about four gradients a step. Nothing goes back beyond the first step, which needs no graph.

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

    def estimate(self, setting: Setting, objective: Objective, generator: torch.Generator | None) -> Hypergradient:
        """Run the task forwards, then go back over it."""
        began, walk = time.perf_counter(), setting.descent()
        leaf = learnable(setting.potential, walk.start)
        cuts = _cuts(walk.steps, self.checkpoints or math.ceil(SHARE * math.sqrt(walk.steps)))
        heads, first, tape = _forwards(walk, cuts)
        run = walk.finish(objective.reference)
        if run.diverged:
            return given_up(run, leaf, run.cost)
        objective = objective.held(run) if objective.looks_ahead else objective
        adjoint = Adjoint(Recursion(walk, leaf, objective), run)
        adjoint.back_over(tape)
        del tape
        for head, end in reversed(list(pairwise(cuts))):
            adjoint.back_over(_replay(walk, heads.pop(head), range(head, end)))
        adjoint.pull(first, adjoint.params)
        gradients, seconds = run.cost.gradients + cuts[-1] - 1, time.perf_counter() - began
        cost = Cost(gradients, walk.steps - 1, seconds)
        return Hypergradient(adjoint.log_d, adjoint.offsets, float(objective.value(run, leaf).detach()), run, cost)


@dataclass
class Past:
    """The steps on a tape. It is apart from the tape, which has the graph: nodes that knew that would keep it alive."""

    passages: list[Passage] = field(default_factory=list)
    adjoint: "Adjoint | None" = None


class _Taken(torch.autograd.Function):
    """A step as a node of the graph: the run computed it, and on the way back the adjoint knows its derivatives.

    It keeps nothing. Of theta_t the graph of the gradient keeps what it needs, which can be little.
    """

    @staticmethod
    def forward(ctx: Any, past: Past, after: Iterable[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.past = past
        return tuple(x.detach() for x in after)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.past.adjoint.pull(ctx.past.passages.pop(), cotangents))


class Tape:
    """Steps of a run in one graph, which leads from each to the next, so that one pass goes back over all of them."""

    def __init__(self, walk: MirrorDescent, head: Params) -> None:
        self.walk, self._past = walk, Past()
        self.head = self.end = tuple(x.detach().requires_grad_() for x in head.values())

    def gradient(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss at the end of the tape and its gradient, with their graphs."""
        params = dict(zip(self.walk.start, self.end, strict=True))
        return gradient(self.walk.task, params, self.walk.task.batch(step), graph=True)

    def extend(self, loss: Tensor, grads: Params, before: State, after: State) -> None:
        """Add the step that was taken with these gradients."""
        self._past.passages.append(_passage(loss, grads, before, after, exact=self.walk.exact))
        inputs = (loss, *self.end, *grads.values())
        self.end = _Taken.apply(self._past, after[0].values(), *inputs)  # type: ignore[no-untyped-call]

    def back(self, adjoint: "Adjoint", cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The cotangents of the head from those of the end; the tape is consumed."""
        self._past.adjoint = adjoint
        return torch.autograd.grad(self.end, self.head, cotangents, allow_unused=True, materialize_grads=True)


def _cuts(steps: int, segments: int) -> list[int]:
    """The first step of every segment; the last segment, which is not run again, is as long as any.

    Example:
        >>> _cuts(10, 3)
        [1, 4, 7]
    """
    segments = max(min(segments, steps - 1), 1)
    return [1 + i * (steps - 1) // segments for i in range(segments)]


def _forwards(walk: MirrorDescent, cuts: Sequence[int]) -> tuple[dict[int, State], Passage, Tape]:
    """The run: the states at the heads of all segments but the last, by step; the first step; the last segment."""
    heads: dict[int, State] = {}
    seen: list[tuple[Tensor, Params]] = []

    def watch(t: int, loss: Tensor, grads: Params) -> None:
        if t in (0, *cuts):
            heads[t] = (walk.params, walk.active)
        if not t:
            seen.append((loss, grads))

    train(walk.task, walk, cuts[-1], watch=watch, until=None)
    first = _passage(*seen[0], heads.pop(0), heads.get(1, (walk.params, walk.active)), exact=walk.exact)
    tape = Tape(walk, walk.params)
    while walk.going:
        before = (walk.params, walk.active)
        loss, grads = tape.gradient(walk.taken)
        walk.step(loss, grads)
        tape.extend(loss, grads, before, (walk.params, walk.active))
    return heads, first, tape


def _replay(walk: MirrorDescent, head: State, steps: range) -> Tape:
    """One segment again, with the graphs of its gradients."""
    before, tape = head, Tape(walk, head[0])
    for t in steps:
        loss, grads = tape.gradient(t)
        with torch.no_grad():
            taken = mirror_step(before[0], grads, walk.potential, walk.lr, active=before[1], exact=walk.exact)
        after = (taken.params, taken.active or before[1])
        tape.extend(loss, grads, before, after)
        before = after
    return tape


def _passage(loss: Tensor, grads: Params, before: State, after: State, *, exact: bool) -> Passage:
    """A step as constants; without theta_t where it stays on one piece, because nothing needs it then."""
    here, there = before[1].weights, after[1].weights
    params = {} if stays(here, there, exact=exact) is not None else dict(before[0])
    return Passage(params, {n: g.detach() for n, g in grads.items()}, loss.detach(), here, there)


class Adjoint:
    """The cotangents of (theta_t, w_t), and the gradient gathered so far."""

    def __init__(self, recursion: Recursion, run: Trajectory) -> None:
        self.recursion = recursion
        ends = _leaves(run.end)
        final = recursion.objective.final(run, recursion.potential, ends)
        self._final, self.offsets, by_end = differentiate(final, recursion.potential, *ends.values())
        self.params = tuple(torch.empty_like(x).copy_(by) for x, by in zip(ends.values(), by_end, strict=True))
        self._aimless = not any(bool(by.any()) for by in by_end)
        self._logs = {n: torch.zeros_like(d) for n, d in recursion.metrics.items()}
        self._rows = [[scalar(d[j]) for d in self._logs.values()] for j in range(recursion.pieces)]
        self.weights = torch.zeros_like(self.offsets)

    @property
    def log_d(self) -> dict[str, Tensor]:
        """The gradient by the logarithms of the metrics, gathered so far."""
        return {k: v + self._final[k] for k, v in self.recursion.by_key(self._logs).items()}

    def back_over(self, tape: Tape) -> None:
        """Pull the cotangents back over the steps of a segment, which is consumed."""
        self.params = tape.back(self, self.params)

    def pull(self, passage: Passage, cotangents: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        """The cotangents of loss, theta_t and g_t from those of theta_{t+1}; those of the metrics are gathered."""
        aimless, self._aimless = self._aimless, False
        piece = self.recursion.stays(passage)
        if piece is None:
            return self._pull_between(passage, cotangents)
        slopes = self.recursion.slopes(passage, piece)
        if aimless and not slopes.energy:  # nothing depends on where the last step led to: there is no H c to find
            return [None, *torch._foreach_mul(list(passage.grads.values()), slopes.loss), *[None] * len(passage.grads)]
        by_grads = self.recursion.back(passage, piece, slopes, cotangents, self._rows[piece])
        if len(passage.before) > 1:
            self.weights = torch.zeros_like(self.weights)  # a vertex of the simplex is constant
        return [passage.loss.new_tensor(slopes.loss), *cotangents, *by_grads]

    @torch.enable_grad()
    def _pull_between(self, passage: Passage, cotangents: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """The same for a step onto, along or off a kink."""
        r = self.recursion
        metrics, params, grads = _leaves(r.metrics), _leaves(passage.params), _leaves(passage.grads)
        offsets, loss = r.offsets.detach().requires_grad_(), passage.loss.detach().requires_grad_()
        weights = r.weights_of(passage).requires_grad_()
        moved, after = r.step(metrics, offsets, params, weights, grads, passage)
        term = r.running(metrics, weights, loss, grads)
        outputs, given = [*moved.values(), term], [*cotangents, torch.ones_like(term)]
        if after.requires_grad:
            outputs, given = [*outputs, after], [*given, self.weights]
        leaves = [offsets, weights, *metrics.values(), loss, *params.values(), *grads.values()]
        by = torch.autograd.grad(outputs, leaves, given, allow_unused=True, materialize_grads=True)
        self.offsets = self.offsets + by[0]
        self.weights = by[1]
        for gathered, d, b in zip(self._logs.values(), r.metrics.values(), by[2:], strict=False):
            gathered.addcmul_(d, b)
        return by[2 + len(metrics) :]


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.detach().requires_grad_() for n, x in tensors.items()}

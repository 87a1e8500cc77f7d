"""The exact gradient by reverse mode, with checkpoints."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from metamd.inner.estimators.base import Estimator, Hypergradient, Setting, differentiate, given_up, learnable
from metamd.inner.estimators.step import Passage, Recursion, part, stays
from metamd.inner.objectives import Objective
from metamd.inner.run import Cost, MirrorDescent, Trajectory, gradient, train
from metamd.inner.sums import scalar
from metamd.potentials.base import Active, Params
from metamd.potentials.step import mirror_step

State = tuple[dict[str, Tensor], Active]
"""What a step starts from: the parameters, and the active pieces there."""

Tensors = list[Tensor] | tuple[Tensor, ...]

Taken = tuple[Passage, dict[str, Tensor], list[GradientEdge]]
"""A step that was taken: its constants, g_t with its graph, and where that begins."""

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
        began, descent = time.perf_counter(), setting.descent()
        leaf = learnable(setting.potential, descent.start)
        cuts = _cuts(descent.steps, self.checkpoints or math.ceil(SHARE * math.sqrt(descent.steps)))
        heads, first, tape = _forwards(descent, cuts)
        run = descent.finish(objective.reference)
        if run.diverged:
            return given_up(run, leaf, run.cost)
        objective = objective.held(run) if objective.looks_ahead else objective
        adjoint = Adjoint(Recursion(descent, leaf, objective), run)
        adjoint.back_over(tape)
        for head, end in reversed(list(pairwise(cuts))):
            adjoint.back_over(_replay(descent, heads.pop(head), range(head, end)))
        adjoint.pull(first)
        gradients, seconds = run.cost.gradients + cuts[-1] - 1, time.perf_counter() - began
        cost = Cost(gradients, descent.steps - 1, seconds)
        return Hypergradient(adjoint.log_d, adjoint.offsets, float(objective.value(run, leaf).detach()), run, cost)


def _cuts(steps: int, segments: int) -> list[int]:
    """The first step of every segment; the last segment, which is not run again, is as long as any.

    Example:
        >>> _cuts(10, 3)
        [1, 4, 7]
    """
    segments = max(min(segments, steps - 1), 1)
    return [1 + i * (steps - 1) // segments for i in range(segments)]


def _forwards(descent: MirrorDescent, cuts: Sequence[int]) -> tuple[dict[int, State], Passage, list[Taken]]:
    """The run: the states at the heads of all segments but the last, by step; the first step; the last segment."""
    heads: dict[int, State] = {}
    seen: list[tuple[Tensor, Params]] = []

    def watch(t: int, loss: Tensor, grads: Params) -> None:
        if t in (0, *cuts):
            heads[t] = (descent.params, descent.active)
        if not t:
            seen.append((loss, grads))

    train(descent.task, descent, cuts[-1], watch=watch, until=None)
    first = _passage(*seen[0], heads.pop(0), heads.get(1, (descent.params, descent.active)), exact=descent.exact)
    tape: list[Taken] = []
    while descent.going:
        before, taken = (descent.params, descent.active), _gradient(descent, descent.params, descent.taken)
        descent.step(*taken[:2])
        tape.append((_passage(*taken[:2], before, (descent.params, descent.active), exact=descent.exact), *taken[1:]))
    return heads, first, tape


def _replay(descent: MirrorDescent, before: State, steps: range) -> list[Taken]:
    """One segment again, with the graphs of its gradients."""
    tape: list[Taken] = []
    for t in steps:
        loss, grads, edges = _gradient(descent, before[0], t)
        with torch.no_grad():
            step = mirror_step(before[0], grads, descent.potential, descent.lr, active=before[1], exact=descent.exact)
        after = (step.params, step.active or before[1])
        tape.append((_passage(loss, grads, before, after, exact=descent.exact), grads, edges))
        before = after
    return tape


def _gradient(descent: MirrorDescent, params: Params, t: int) -> tuple[Tensor, dict[str, Tensor], list[GradientEdge]]:
    """The loss and its gradient with their graphs, and the edges at which these begin."""
    # Leaves would stay in memory for as long as their graph. Of a sum it keeps only what the gradient needs.
    zero = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        here = {n: x.detach() + zero.to(x) for n, x in params.items()}
    return *gradient(descent.task, here, descent.task.batch(t), graph=True), [get_gradient_edge(x) for x in here.values()]


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
        self.params: Tensors = by_end
        self.weights = torch.zeros_like(self.offsets)
        self._logs = {n: torch.zeros_like(d) for n, d in recursion.metrics.items()}
        self._rows = [[scalar(d[j]) for d in self._logs.values()] for j in range(recursion.pieces)]

    @property
    def log_d(self) -> dict[str, Tensor]:
        """The gradient by the logarithms of the metrics, gathered so far."""
        return {k: v + self._final[k] for k, v in self.recursion.by_key(self._logs).items()}

    def back_over(self, tape: list[Taken]) -> None:
        """Pull the cotangents back over the steps of a segment, which is consumed."""
        while tape:
            passage, grads, edges = tape.pop()
            by_loss, self.params, by_grads = self.pull(passage)
            if by_loss:
                self.params = torch._foreach_add(self.params, list(passage.grads.values()), alpha=by_loss)
            live = [(g, c) for g, c in zip(grads.values(), by_grads, strict=True) if g.requires_grad]
            if live:  # else all gradients are constant
                outputs, given = zip(*live, strict=True)
                found = torch.autograd.grad(outputs, edges, given, allow_unused=True)
                self.params = [x if by is None else x + by for x, by in zip(self.params, found, strict=True)]

    def pull(self, passage: Passage) -> tuple[float, Tensors, Tensors]:
        """The cotangents of loss, theta_t and g_t from those of theta_{t+1}; those of the metrics are gathered."""
        piece = self.recursion.stays(passage)
        if piece is None:
            return self._pull_between(passage)
        slopes = self.recursion.slopes(passage, piece)
        by_grads = self.recursion.back(passage, piece, slopes, self.params, self._rows[piece])
        if len(passage.before) > 1:
            self.weights = torch.zeros_like(self.weights)  # a vertex of the simplex is constant
        return slopes.loss, self.params, by_grads

    def _pull_between(self, passage: Passage) -> tuple[float, Tensors, Tensors]:
        """The same for a step onto, along or off a kink."""
        leaves, outputs, term = self.recursion.between(passage)
        given = [*self.params, *([self.weights] if "" in outputs else []), torch.ones_like(term)]
        found = torch.autograd.grad(
            [*outputs.values(), term], list(leaves.values()), given, allow_unused=True, materialize_grads=True
        )
        by = dict(zip(leaves, found, strict=True))
        self.offsets, self.weights = self.offsets + by["offsets"], by["weights"]
        for n, gathered in self._logs.items():
            gathered.addcmul_(self.recursion.metrics[n], by[f"metrics/{n}"])
        return float(by["loss"]), list(part(by, "params").values()), list(part(by, "grads").values())


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.detach().requires_grad_() for n, x in tensors.items()}

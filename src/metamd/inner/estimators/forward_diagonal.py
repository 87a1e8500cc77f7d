"""The diagonal of the run's Jacobian, carried forward: cheap for any number of metrics."""

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metamd.inner.estimators.base import (
    Estimator,
    Hypergradient,
    differentiate,
    foreseen,
    given_up,
    learnable,
    needs_generator,
)
from metamd.inner.estimators.recursion import Passage, Recursion
from metamd.inner.estimators.tangents import Pulled, hessian_products, pull, push
from metamd.inner.objectives import Objective
from metamd.inner.run import Walk
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class ForwardDiagonal(Estimator):
    """z_i = d theta_i / d log D_i, each coordinate's response to its own metric, with diag(H) z from r o H(r o z), r = +-1.

    The r are drawn anew at every step, so that other coordinates enter as noise of mean zero in z. Exact on separable
    problems with one active piece, for every tying; elsewhere the responses of other coordinates are missing. On kinks the
    weights are held fixed. N Hessian-vector products a step, memory O(N numel), flat in T.

    Example:
        >>> ForwardDiagonal()
        ForwardDiagonal()
    """

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
        """Run the task once, with one tangent for every piece."""
        began, source = time.perf_counter(), needs_generator(generator, self)
        objective, ahead = foreseen(objective, task, potential, lr=lr, exact=exact, steps=steps)
        walk = Walk(task, potential, lr=lr, exact=exact, steps=steps)
        leaf = learnable(potential, walk.start)
        carried = _Responses(Recursion(walk, leaf), walk.start)
        while walk.going:
            before, weights = walk.params, walk.active.weights
            signs = {n: _signs(x, source) for n, x in before.items()}
            loss, grads, products = hessian_products(task, before, task.batch(walk.step), carried.outwards(signs))
            walk.advance(loss, grads)
            if walk.diverged:
                break
            passage = Passage(before, grads, loss, weights, walk.active.weights)
            carried.advance(passage, objective, carried.inwards(products, signs))
        run = walk.finish(objective.reference)
        hvps = leaf.pieces * len(run.losses)
        if run.diverged:
            return given_up(run, leaf, replace(run.cost + ahead, hvps=hvps))
        ends = {n: x.detach().requires_grad_() for n, x in run.end.items()}
        by_log, by_offset, by_end = differentiate(objective.final(run, leaf, ends), leaf, *ends.values())
        grads = carried.total(by_log, dict(zip(ends, by_end, strict=True)))
        cost = replace(run.cost + ahead, hvps=hvps, seconds=time.perf_counter() - began)
        return Hypergradient(grads, by_offset, float(objective.value(run, leaf).detach()), run, cost)


class _Responses:
    """z for every piece, in the coordinates of the basis, and the gradient gathered so far.

    Args:
        recursion: the differentiable step.
        start: theta_1.
    """

    def __init__(self, recursion: Recursion, start: Params) -> None:
        self.recursion, pieces = recursion, recursion.pieces
        coordinates = recursion.into(start)
        self.z = {n: x.new_zeros(pieces, *x.shape) for n, x in coordinates.items()}
        self._gathered = {n: torch.zeros_like(z) for n, z in self.z.items()}
        self._direct = {n: torch.zeros_like(d) for n, d in recursion.metrics.items()}
        # Direction j moves every coordinate's own log D_j at once: in these coordinates nothing mixes.
        self._directions = {n: _each_piece(d) for n, d in recursion.metrics.items()}
        self._still = torch.zeros(pieces, pieces, dtype=recursion.offsets.dtype)

    def outwards(self, signs: Params) -> dict[str, Tensor]:
        """R o z as displacements of the parameters."""
        return self._map("out_of", {n: signs[n] * z for n, z in self.z.items()})

    def inwards(self, products: Params, signs: Params) -> dict[str, Tensor]:
        """R o (H r o z), in the basis."""
        return {n: signs[n] * h for n, h in self._map("into", products).items()}

    def _map(self, way: str, rows: Params) -> dict[str, Tensor]:
        turn = getattr(self.recursion.basis, way)
        return {n: torch.func.vmap(lambda x, n=n: turn(n, x))(v) for n, v in rows.items()}

    def advance(self, passage: Passage, objective: Objective, responses: Params) -> None:
        """One step: what it adds to the gradient, and z after it."""
        if objective.runs:
            self._gather(pull(self.recursion, objective, passage), passage, responses)
        z, _ = push(
            self.recursion,
            passage,
            self._directions,
            self._still,
            self._map("out_of", self.z),
            self._still,
            self._map("out_of", responses),
            None,
        )
        self.z = self._map("into", z)

    def _gather(self, pulled: Pulled, passage: Passage, responses: Params) -> None:
        into = self.recursion.basis.into
        for n, z in self.z.items():
            by_theta = pulled.loss * into(n, passage.grads[n])
            self._gathered[n] += by_theta * z + into(n, pulled.grads[n]) * responses[n]
        self._direct = {n: v + pulled.metrics[n] for n, v in self._direct.items()}

    def total(self, by_log: Params, by_end: Params) -> dict[str, Tensor]:
        """The gradient by key: the direct part, and every coordinate's response added up over those it is tied to."""
        grads = {k: v + by_log[k] for k, v in self.recursion.by_key(self._direct).items()}
        for n, slot in self.recursion.slots.items():
            here = self._gathered[n] + self.recursion.basis.into(n, by_end[n]) * self.z[n]
            tied = torch.stack([row.sum_to_size(slot.shape) for row in here])
            grads[slot.key] = grads[slot.key] + slot.gather(tied)
        return grads


def _each_piece(d: Tensor) -> Tensor:
    """The directions d D = D_j, one for every piece: (N, N, ...)."""
    eye = torch.eye(len(d), dtype=d.dtype, device=d.device)
    return eye.reshape(len(d), len(d), *[1] * (d.ndim - 1)) * d


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(2, (math.prod(x.shape),), generator=generator).reshape(x.shape)
    return (2 * bits - 1).to(x)

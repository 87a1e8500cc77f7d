"""One step of a run as a differentiable function, which tangents are pushed through and cotangents pulled back.

The state is (theta, w): parameters and weights of the active pieces. With y = D(w)(theta - c) - eta g the exact step is
theta+ = c + D(w+)^-1 y, where w+ makes the forms F_j = 1/2 x'D_j x + b_j, x = D(w+)^-1 y, equal on its support. The run
itself finds w+; here it is differentiated implicitly, by one Newton step from the w+ found, on the face it lies on:
dw+ = P dF with P the inverse of H = x'D_j D(w+)^-1 D_k x on that face. Its value is zero, its derivative the right one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metamd.inner.objectives import Objective, Point
from metamd.inner.run import Array, MirrorDescent
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import combine


@dataclass(frozen=True)
class Passage:
    """One step that the run took, as constants.

    Args:
        params: theta_t.
        grads: g_t.
        loss: the loss at theta_t.
        before: w_t.
        after: w_{t+1}.
    """

    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    loss: Tensor
    before: Array
    after: Array


class Recursion:
    """The differentiable step of a run.

    Args:
        walk: the run, which knows the start, the step size and the kind of step.
        potential: leaves to differentiate by, bound to the same tensors.
    """

    def __init__(self, walk: MirrorDescent, potential: MaxDiagonal) -> None:
        self.potential, self.lr, self.exact, self.steps = potential, walk.lr, walk.exact, walk.steps
        self.slots, self.pieces, self.basis = potential.slots, potential.pieces, potential.basis
        self.centre: Mapping[str, Tensor] = walk.potential.start
        self.metrics = {n: potential.metric(n).detach() for n in self.slots}
        self.offsets = potential.offsets.detach()

    # metrics and their logarithms

    def directions(self, log_d: Params) -> dict[str, Tensor]:
        """Directions in log_d, (k, N, ...) by key, as directions in the metrics by tensor: dD = D d log D."""
        return {n: self.metrics[n] * v for n, v in self.by_tensor(log_d).items()}

    def by_tensor(self, log_d: Params) -> dict[str, Tensor]:
        """Directions in log_d by key as (k, N, ...) by tensor."""
        return {n: s.spread(log_d[s.key].reshape(-1, self.pieces, *s.stored)) for n, s in self.slots.items()}

    def by_key(self, by_metric: Params) -> dict[str, Tensor]:
        """A derivative by the metrics of every tensor as one by log_d; tensors that share a key add up."""
        return self.added_up({n: d * by_metric[n] for n, d in self.metrics.items()})

    def added_up(self, by_log: Params) -> dict[str, Tensor]:
        """A derivative by the logarithms of the metrics of every tensor, by key."""
        found: dict[str, Tensor] = {}
        for n, s in self.slots.items():
            here = s.gather(by_log[n])
            found[s.key] = found[s.key] + here if s.key in found else here
        return found

    # the step

    def step(
        self,
        d: Params,
        offsets: Tensor,
        params: Params,
        weights: Tensor,
        grads: Params,
        passage: Passage,
        newton: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """(theta_{t+1}, w_{t+1}) as a function of everything before `passage`, which says which pieces it goes between.

        Args:
            d: the metrics, by tensor.
            offsets: b.
            params: theta_t.
            weights: w_t.
            grads: g_t.
            passage: the step taken.
            newton: P, for implicit differentiation of the weights; without it they are constants.
        """
        after = torch.as_tensor(passage.after, dtype=offsets.dtype, device=offsets.device)
        j = stays(passage.before, passage.after, exact=self.exact)
        if j is not None:
            moved = {n: g / piece(d[n], j) for n, g in self.into(grads).items()}
            return {n: params[n] - self.lr * self.basis.out_of(n, m) for n, m in moved.items()}, after
        y = self._dual(d, params, weights, grads)
        if newton is not None:
            after = after + newton @ self._forms(d, offsets, {n: v / mix(d[n], after) for n, v in y.items()})
        return {n: self._out_of(n, v / mix(d[n], after)) for n, v in y.items()}, after

    @torch.no_grad()
    def newton(self, passage: Passage) -> Tensor | None:
        """P of the face that w_{t+1} lies on; None on a vertex, where the weights are constant."""
        support = np.flatnonzero(passage.after)
        if len(support) == 1 or stays(passage.before, passage.after, exact=self.exact) is not None:
            return None
        d = self.metrics
        before = torch.as_tensor(passage.before, dtype=self.offsets.dtype)
        y = self._dual(d, passage.params, before, passage.grads)
        hessian = np.zeros((self.pieces, self.pieces))
        for n, v in y.items():
            mixed = combine(d[n], passage.after)
            rows = d[n].reshape(self.pieces, -1).double()
            curvature = (v.double().square().sum_to_size(mixed.shape) / mixed.double() ** 3).reshape(-1)
            hessian += ((rows * curvature) @ rows.T).cpu().numpy()
        # On the directions along the face, that is with sum zero; pieces that coincide leave some without curvature.
        along = np.zeros((self.pieces, len(support) - 1))
        along[support[1:], np.arange(len(support) - 1)] = 1
        along[support[0]] = -1
        inverse = along @ np.linalg.pinv(along.T @ hessian @ along, rcond=1e-13, hermitian=True) @ along.T
        return torch.as_tensor(inverse, dtype=self.offsets.dtype, device=self.offsets.device)

    def _dual(self, d: Params, params: Params, weights: Tensor, grads: Params) -> dict[str, Tensor]:
        shifted = {n: x - self.centre[n] if n in self.centre else x for n, x in params.items()}
        x, g = self.into(shifted), self.into(grads)
        return {n: mix(d[n], weights) * x[n] - self.lr * g[n] for n in x}

    def _forms(self, d: Params, offsets: Tensor, x: Params) -> Tensor:
        halves = [0.5 * (d[n] * v * v).reshape(self.pieces, -1).sum(1).to(offsets.dtype) for n, v in x.items()]
        return torch.stack(halves).sum(0) + offsets

    def into(self, x: Params) -> dict[str, Tensor]:
        """Displacements in the coordinates of the basis."""
        return {n: self.basis.into(n, v) for n, v in x.items()}

    def _out_of(self, name: str, x: Tensor) -> Tensor:
        out = self.basis.out_of(name, x)
        return out + self.centre[name] if name in self.centre else out

    # the objective along the way

    def running(self, objective: Objective, d: Params, weights: Tensor, loss: Tensor, grads: Params) -> Tensor:
        """What the step adds to the objective, as a function of metrics, weights, loss and gradient."""

        def energy() -> Tensor:
            parts = [(g * g / mix(d[n], weights)).sum(dtype=torch.float64) for n, g in self.into(grads).items()]
            return torch.stack(parts).sum()

        return objective.running(Point(loss.double(), energy, self.lr, self.steps))


def stays(before: Array, after: Array, *, exact: bool) -> int | None:
    """The piece j if a step is theta - eta D_j^-1 g, which needs no dual point; None if it is not.

    Args:
        before: w_t.
        after: w_{t+1}.
        exact: whether it is not the paper's step.
    """
    if len(before) == 1:
        return 0
    if not exact or (before.max() == 1 and (before == after).all()):
        return int(np.argmax(before))
    return None


def mix(d: Tensor, weights: Tensor) -> Tensor:
    """D(w), differentiable in both."""
    return piece(d, 0) if len(d) == 1 else torch.tensordot(weights.to(d.dtype), d, dims=1)


def piece(d: Tensor, j: int) -> Tensor:
    """D_j; a view where it is the only one, whose derivative is then one as well."""
    return d.reshape(d.shape[1:]) if len(d) == 1 else d[j]

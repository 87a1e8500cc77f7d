"""One step of a run as a differentiable function, which tangents are pushed through and cotangents pulled back.

The state is (theta, w): parameters and weights of the active pieces. With y = D(w)(theta - c) - eta g the exact step is
theta+ = c + D(w+)^-1 y, where w+ makes the forms F_j = 1/2 x'D_j x + b_j, x = D(w+)^-1 y, equal on its support. The run
itself finds w+; here it is differentiated implicitly, by one Newton step from the w+ found, on the face it lies on:
dw+ = P dF with P the inverse of H = x'D_j D(w+)^-1 D_k x on that face. Its value is zero, its derivative the right one.

Most steps stay on one piece, all of them with one piece: theta+ = theta - eta D_j^-1 g. They are differentiated by hand, in
a few passes over the model. With r = eta / D_j and e = g'D_j^-1 g the derivatives are

    d theta+ = dz - r (dg - g d log D_j),    de = 2/eta r g dg - 1/eta r g^2 d log D_j.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metamd.inner.objectives import Objective, Point, Slopes
from metamd.inner.run import Array, MirrorDescent
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import combine, grouped_squares


@dataclass(frozen=True)
class Passage:
    """One step that the run took, as constants: theta_t, g_t, the loss at theta_t, w_t and w_{t+1}."""

    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    loss: Tensor
    before: Array
    after: Array


class Recursion:
    """The differentiable step of a run, and what it adds to the objective.

    Args:
        descent: the run, which knows the start, the step size and the kind of step.
        potential: leaves to differentiate by, bound to the same tensors.
        objective: E.
    """

    def __init__(self, descent: MirrorDescent, potential: MaxDiagonal, objective: Objective) -> None:
        self.potential, self.objective = potential, objective
        self.lr, self.exact, self.steps = descent.lr, descent.exact, descent.steps
        self.slots, self.pieces, self.basis = potential.slots, potential.pieces, potential.basis
        self.centre: Mapping[str, Tensor] = descent.potential.start
        self.metrics = {n: potential.metric(n).detach() for n in self.slots}
        self.offsets = potential.offsets.detach()
        self._rates: dict[int, dict[str, Tensor]] = {}
        self._slopes: Slopes | None = None

    def by_tensor(self, log_d: Params) -> dict[str, Tensor]:
        """Directions in log_d by key as (k, N, ...) by tensor."""
        return {n: s.spread(log_d[s.key].reshape(-1, self.pieces, *s.stored)) for n, s in self.slots.items()}

    def by_key(self, by_log: Params) -> dict[str, Tensor]:
        """A derivative by the logarithms of the metrics of every tensor, by key; tensors that share a key add up."""
        found: dict[str, Tensor] = {}
        for n, s in self.slots.items():
            here = s.gather(by_log[n])
            found[s.key] = found[s.key] + here if s.key in found else here
        return found

    # steps onto, along or off a kink

    @torch.enable_grad()
    def between(self, passage: Passage) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Such a step as a graph: all that it depends on as leaves, (theta_{t+1}, w_{t+1}), and what it adds to E.

        The leaves are named as `named` has it, and w_{t+1} is left out where it is constant.
        """
        here = named(self.metrics, self.offsets, passage.params, self._weights_of(passage), passage.grads)
        leaves = {n: x.detach().requires_grad_() for n, x in {**here, "loss": passage.loss}.items()}
        d, params, grads = (part(leaves, group) for group in ("metrics", "params", "grads"))
        offsets, weights = leaves["offsets"], leaves["weights"]
        after = torch.as_tensor(passage.after, dtype=offsets.dtype, device=offsets.device)
        y, newton = self._dual(d, params, weights, grads), self.newton(passage)
        if newton is not None:
            x = {n: v / mix(d[n], after) for n, v in y.items()}
            halves = [0.5 * (d[n] * v * v).reshape(self.pieces, -1).sum(1).to(offsets.dtype) for n, v in x.items()]
            after = after + newton @ (torch.stack(halves).sum(0) + offsets)
        moved = {n: self.basis.out_of(n, v / mix(d[n], after)) for n, v in y.items()}
        moved = {n: x + self.centre[n] if n in self.centre else x for n, x in moved.items()}

        def energy() -> Tensor:
            parts = [(g * g / mix(d[n], weights)).sum(dtype=torch.float64) for n, g in self._into(grads).items()]
            return torch.stack(parts).sum()

        added = self.objective.running(Point(leaves["loss"].double(), energy, self.lr, self.steps))
        return leaves, moved | ({"": after} if after.requires_grad else {}), added

    @torch.no_grad()
    def newton(self, passage: Passage) -> Tensor | None:
        """P of the face that w_{t+1} lies on; None on a vertex, where the weights are constant."""
        support = np.flatnonzero(passage.after)
        if len(support) == 1:
            return None
        y = self._dual(self.metrics, passage.params, self._weights_of(passage), passage.grads)
        hessian = np.zeros((self.pieces, self.pieces))
        for n, v in y.items():
            mixed = combine(self.metrics[n], passage.after)
            rows = self.metrics[n].reshape(self.pieces, -1).double()
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
        x, g = self._into(shifted), self._into(grads)
        return {n: mix(d[n], weights) * x[n] - self.lr * g[n] for n in x}

    def _into(self, x: Params) -> dict[str, Tensor]:
        return {n: self.basis.into(n, v) for n, v in x.items()}

    def _weights_of(self, passage: Passage) -> Tensor:
        return torch.tensor(passage.before, dtype=self.offsets.dtype)

    # steps on one piece j

    def stays(self, passage: Passage) -> int | None:
        """The piece j if a step is theta - eta D_j^-1 g, which needs no dual point; None if it is not."""
        return stays(passage.before, passage.after, exact=self.exact)

    def rates(self, j: int) -> dict[str, Tensor]:
        """-eta / D_j by tensor, divided once."""
        if j not in self._rates:
            self._rates[j] = {n: -self.lr / d[j] for n, d in self.metrics.items()}
        return self._rates[j]

    def slopes(self, passage: Passage, j: int) -> Slopes:
        """How the step's contribution to the objective changes with its loss and energy, which is found if asked for."""
        if self._slopes is not None:
            return self._slopes

        def energy() -> Tensor:
            parts = []
            for n, g in self._into(passage.grads).items():
                d = self.metrics[n][j]
                parts.append((grouped_squares(g, tuple(d.shape)) / d).sum(dtype=torch.float64))
            return torch.stack(parts).sum()

        found = self.objective.slopes(Point(passage.loss, energy, self.lr, self.steps))
        self._slopes = found if self.objective.steady else None
        return found

    def back(
        self, passage: Passage, j: int, slopes: Slopes, cotangents: Sequence[Tensor], logs: list[Tensor]
    ) -> list[Tensor]:
        """The cotangents of the gradient from those of theta_{t+1}; those of log D_j are added to `logs`."""
        s, rates, found = slopes.energy / self.lr, self.rates(j), []
        for (n, grad), cotangent, into in zip(passage.grads.items(), cotangents, logs, strict=True):
            g, p, r = self.basis.into(n, grad), self.basis.into(n, cotangent), rates[n]
            c = (torch.sub(p, g, alpha=s) if s else p) * r
            if into.shape == c.shape:
                into.addcmul_(c, g, value=-1)
            elif into.ndim:
                into.sub_((c * g).sum_to_size(into.shape))
            else:
                into.sub_(torch.dot(c.reshape(-1), g.to(c.dtype).reshape(-1)))
            c = torch.addcmul(c, g, r, value=-s) if s else c
            found.append(self.basis.out_of(n, c).to(grad.dtype))
        return found

    def along(self, passage: Passage, j: int, logs: Params, z: Params, zg: Params) -> Tensor:
        """The derivatives of what the step adds to the objective, for all directions at once.

        Args:
            passage: the step.
            j: the piece.
            logs: the directions in log D, (k, N, ...) by tensor.
            z: tangents of theta_t, (k, ...).
            zg: tangents of the gradient, H z.
        """
        slopes = self.slopes(passage, j)
        found = torch.zeros(len(next(iter(z.values()))), dtype=torch.float64)
        if slopes.loss:
            found += slopes.loss * dot(z, passage.grads)
        if slopes.energy:
            s, rates, grads = slopes.energy / self.lr, self.rates(j), self._into(passage.grads)
            pull = {n: self.basis.out_of(n, rates[n] * g) for n, g in grads.items()}
            energy = {n: rates[n] * grouped_squares(g, tuple(rates[n].shape)) for n, g in grads.items()}
            found += s * dot({n: v[:, j] for n, v in logs.items()}, energy) - 2 * s * dot(zg, pull)
        return found

    def forth(self, passage: Passage, j: int, logs: Params, z: Params, zg: Params) -> None:
        """The tangents of theta_{t+1}, written over those of theta_t; the arguments are those of `along`."""
        rates = self.rates(j)
        for n, grad in passage.grads.items():
            moves, directions = rates[n] * self.basis.into(n, grad), logs[n][:, j]
            if self.basis.kind == "identity":
                z[n].addcmul_(zg[n], rates[n]).addcmul_(moves, directions, value=-1)
                continue

            def moved(h: Tensor, by: Tensor, n: str = n, moves: Tensor = moves) -> Tensor:
                return self.basis.out_of(n, rates[n] * self.basis.into(n, h) - moves * by)

            z[n] += torch.func.vmap(moved)(zg[n], directions)


def named(metrics: Params, offsets: Tensor, params: Params, weights: Tensor, grads: Params) -> dict[str, Tensor]:
    """All that a step depends on under one mapping; tensors by group and name."""
    groups = {"metrics": metrics, "params": params, "grads": grads}
    tensors = {f"{group}/{n}": x for group, by_name in groups.items() for n, x in by_name.items()}
    return {"offsets": offsets, "weights": weights, **tensors}


def part(arguments: Params, group: str) -> dict[str, Tensor]:
    """The tensors of one group, by name."""
    return {n.removeprefix(f"{group}/"): x for n, x in arguments.items() if n.startswith(f"{group}/")}


def stays(before: Array, after: Array, *, exact: bool) -> int | None:
    """The piece j if a step from weights to weights is theta - eta D_j^-1 g; always, if it is the paper's step."""
    if len(before) == 1:
        return 0
    if not exact or (before.max() == 1 and (before == after).all()):
        return int(np.argmax(before))
    return None


def mix(d: Tensor, weights: Tensor) -> Tensor:
    """D(w), differentiable in both."""
    return torch.tensordot(weights.to(d.dtype), d, dims=1)


def dot(rows: Params, by: Params) -> Tensor:
    """sum over tensors of <row, by> for every row, in float64."""
    products = [r.reshape(len(r), -1) @ by[n].reshape(-1).to(r.dtype) for n, r in rows.items()]
    return torch.stack([p.double() for p in products]).sum(0)

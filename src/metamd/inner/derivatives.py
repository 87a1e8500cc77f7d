"""One step of a run as a differentiable function, which tangents are pushed through and cotangents pulled back.

The state is (theta, w): parameters and weights of the active pieces. With y = D(w)(theta - c) - eta g the exact step is
theta+ = c + D(w+)^-1 y, where w+ makes the forms F_j = 1/2 x'D_j x + b_j, x = D(w+)^-1 y, equal on its support. The run
itself finds w+; here it is differentiated implicitly, by one Newton step from the w+ found, on the face it lies on:
dw+ = P dF with P the inverse of H = x'D_j D(w+)^-1 D_k x on that face. Its value is zero, its derivative the right one.

Most steps stay on one piece, all of them with one piece: theta+ = theta - eta D_j^-1 g. They are differentiated by hand, in
a few passes over the model. With r = -eta / D_j and e = g'D_j^-1 g the derivatives are

    d theta+ = d theta + r (dg - g d log D_j),    de = -1/eta (2 r g dg - r g^2 d log D_j).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metamd.inner.objectives import Objective, Point
from metamd.inner.run import MirrorDescent, gradient
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import Array, combine
from metamd.tasks.base import Task


@dataclass(frozen=True)
class TakenStep:
    """One step that the run took, as constants: theta_t, g_t, the loss at theta_t, w_t and w_{t+1}."""

    params: Params
    grads: Params
    loss: Tensor
    before: Array
    after: Array


class Recursion:
    """The differentiable step of a run, and what it adds to the objective. The potential has the leaves."""

    def __init__(self, descent: MirrorDescent, potential: MaxDiagonal, objective: Objective) -> None:
        self.potential, self.objective = potential, objective
        self.lr, self.exact, self.steps = descent.lr, descent.exact, descent.steps
        self.pieces, self.basis = potential.pieces, potential.basis
        self.centre: Mapping[str, Tensor] = descent.potential.start
        self.metrics = {n: potential.metric(n).detach() for n in potential.slots}
        self.offsets = potential.offsets.detach()
        self._rates = {n: -self.lr / d for n, d in self.metrics.items()}

    # steps onto, along or off a kink

    @torch.enable_grad()
    def graph(self, taken: TakenStep) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A step as a graph: all that it depends on as leaves, and all that depends on it.

        The latter are theta_{t+1} under "params/", what the step adds to E as "objective", and w_{t+1} as "weights". The
        weights are left out where they are constant. Leaves have the same kind of names.
        """
        tensors = {"metrics": self.metrics, "params": taken.params, "grads": taken.grads}
        numbers = {"offsets": self.offsets, "weights": self._weights(taken.before), "loss": taken.loss.double()}
        here = {**numbers, **{name: x for group, by in tensors.items() for name, x in named(group, by).items()}}
        leaves = {name: x.detach().requires_grad_() for name, x in here.items()}
        metrics, params, grads = (part(leaves, group) for group in tensors)
        d, g = {n: mix(metric, leaves["weights"]) for n, metric in metrics.items()}, self._into(grads)
        y, after, newton, outputs = self._dual(d, params, g), self._weights(taken.after), self.newton(taken), {}
        if newton is not None:
            x = {n: v / mix(metrics[n], after) for n, v in y.items()}
            forms = [0.5 * (metrics[n] * v * v).reshape(self.pieces, -1).sum(1).to(after.dtype) for n, v in x.items()]
            after = outputs["weights"] = after + newton @ (torch.stack(forms).sum(0) + leaves["offsets"])
        moved = {n: self.basis.out_of(n, v / mix(metrics[n], after)) for n, v in y.items()}
        outputs |= named("params", {n: x + self.centre[n] if n in self.centre else x for n, x in moved.items()})

        def energy() -> Tensor:
            return torch.stack([(v * v / d[n]).sum(dtype=torch.float64) for n, v in g.items()]).sum()

        outputs["objective"] = self.objective.running(Point(leaves["loss"], energy, self.lr, self.steps))
        return leaves, outputs

    @torch.no_grad()
    def newton(self, taken: TakenStep) -> Tensor | None:
        """P of the face that w_{t+1} lies on; None on a vertex, where the weights are constant."""
        support = np.flatnonzero(taken.after)
        if len(support) == 1:
            return None
        d = {n: mix(metric, self._weights(taken.before)) for n, metric in self.metrics.items()}
        hessian = np.zeros((self.pieces, self.pieces))
        for n, v in self._dual(d, taken.params, self._into(taken.grads)).items():
            mixed = combine(self.metrics[n], taken.after)
            rows = self.metrics[n].reshape(self.pieces, -1).double()
            curvature = (v.double().square().sum_to_size(mixed.shape) / mixed.double() ** 3).reshape(-1)
            hessian += ((rows * curvature) @ rows.T).cpu().numpy()
        # On the directions along the face, that is with sum zero; pieces that coincide leave some without curvature.
        along = np.zeros((self.pieces, len(support) - 1))
        along[support[1:], np.arange(len(support) - 1)] = 1
        along[support[0]] = -1
        inverse = along @ np.linalg.pinv(along.T @ hessian @ along, rcond=1e-13, hermitian=True) @ along.T
        return self._weights(inverse)

    def _dual(self, d: Params, params: Params, g: Params) -> dict[str, Tensor]:
        """y from D(w), theta and the gradient in the coordinates of the basis."""
        x = self._into({n: x - self.centre[n] if n in self.centre else x for n, x in params.items()})
        return {n: d[n] * x[n] - self.lr * g[n] for n in x}

    def _into(self, x: Params) -> dict[str, Tensor]:
        return {n: self.basis.into(n, v) for n, v in x.items()}

    def _weights(self, weights: Array) -> Tensor:
        return torch.tensor(weights, dtype=self.offsets.dtype, device=self.offsets.device)

    # steps on one piece j

    def slopes(self, loss: Tensor) -> tuple[float, float]:
        """The derivatives of what a step adds to the objective by its loss, and by its energy over eta."""
        point = loss.double().requires_grad_(), torch.zeros((), dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():  # at any energy, since objectives are linear in it
            added = self.objective.running(Point(point[0], lambda: point[1], self.lr, self.steps))
            by_loss, by_energy = torch.autograd.grad(added, point, allow_unused=True, materialize_grads=True)
        return float(by_loss), float(by_energy) / self.lr

    def pull(self, taken: TakenStep, j: int, after: Params, logs: Params) -> tuple[float, dict[str, Tensor]]:
        """The cotangents of the loss and of g_t from those of theta_{t+1}; the cotangents of log D are added to `logs`."""
        (by_loss, s), found = self.slopes(taken.loss), {}
        for n, grad in taken.grads.items():
            g, p, r, into = self.basis.into(n, grad), self.basis.into(n, after[n]), self._rates[n][j], logs[n][j]
            c = (torch.sub(p, g, alpha=s) if s else p) * r
            into -= (c * g).sum_to_size(into.shape)
            c = torch.addcmul(c, g, r, value=-s) if s else c
            found[n] = self.basis.out_of(n, c).to(grad.dtype)
        return by_loss, found

    def push(self, taken: TakenStep, j: int, logs: Params, z: Params, zg: Params) -> Tensor:
        """The tangents of theta_{t+1}, written over those of theta_t, and the derivatives of what the step adds to E.

        The directions in log D are (k, N, ...) by tensor; `zg` are the tangents of the gradient, H z.
        """
        by_loss, s = self.slopes(taken.loss)
        found = by_loss * dot(z, taken.grads)
        for n, grad in taken.grads.items():
            g, r, by = self.basis.into(n, grad), self._rates[n][j], logs[n][:, j]
            moves = r * g
            if s:
                squares = {n: (moves * g).sum_to_size(r.shape)}
                found += s * (dot({n: by}, squares) - 2 * dot({n: zg[n]}, {n: self.basis.out_of(n, moves)}))
            if self.basis.kind == "identity":
                z[n].addcmul_(zg[n], r).addcmul_(moves, by, value=-1)
                continue

            def moved(h: Tensor, b: Tensor, n: str = n, r: Tensor = r, moves: Tensor = moves) -> Tensor:
                return self.basis.out_of(n, r * self.basis.into(n, h) - moves * b)

            z[n] += torch.func.vmap(moved)(zg[n], by)
        return found


def named(group: str, tensors: Params) -> dict[str, Tensor]:
    """Tensors under names that say their group."""
    return {f"{group}/{n}": x for n, x in tensors.items()}


def part(tensors: Params, group: str) -> dict[str, Tensor]:
    """The tensors of one group, by name."""
    return {n.removeprefix(f"{group}/"): x for n, x in tensors.items() if n.startswith(f"{group}/")}


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


def pushed(leaves: Params, outputs: Params, tangents: Params) -> dict[str, Tensor]:
    """J z for every row z of the tangents of leaves."""
    # Two reverse passes, u -> J'u -> J: a forward pass through torch.func costs several times as much.
    u = {n: torch.zeros_like(y, requires_grad=True) for n, y in outputs.items()}
    pulled = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), list(u.values()), create_graph=True, allow_unused=True
    )
    return batched({n: p for n, p in zip(leaves, pulled, strict=True) if p is not None}, u, tangents)


def hessian_products(
    task: Task, params: Params, batch: object, tangents: Params
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, its gradient, and the Hessian times every tangent.

    Reverse over reverse, with the second pass vmapped over tangents: H is symmetric, so that z'H serves. (Forward over
    forward would be silently wrong through batch norm; forward over reverse is right, and slower.) A convolution over many
    tangents is a grouped one, slower than one tangent after the other.
    """
    leaves = {n: x.detach().requires_grad_() for n, x in params.items()}
    loss, grads = gradient(task, leaves, batch, graph=True)
    products = batched(grads, leaves, tangents, in_turn=_convolves(loss))
    return loss.detach(), {n: g.detach() for n, g in grads.items()}, products


def batched(outputs: Params, inputs: Params, rows: Params, *, in_turn: bool = False) -> dict[str, Tensor]:
    """sum over outputs of <row, d output / d input>, for every input and all rows of cotangents, at once or in turn."""
    live = [n for n, y in outputs.items() if y.requires_grad]  # a gradient can be constant
    count = len(next(iter(rows.values())))
    found = {n: x.new_zeros(count, *x.shape) for n, x in inputs.items()}
    parts: list[Any] = list(range(count)) if in_turn else [slice(None)]
    for rows_of in parts if live else []:
        products = torch.autograd.grad(
            [outputs[n] for n in live],
            list(inputs.values()),
            [rows[n][rows_of].contiguous() for n in live],
            retain_graph=rows_of != parts[-1],
            allow_unused=True,
            is_grads_batched=not in_turn,
        )
        for into, product in zip(found.values(), products, strict=True):
            if product is not None:
                into[rows_of] = product
    return found


def _convolves(loss: Tensor) -> bool:
    """Whether there is a convolution in the graph of a loss."""
    seen, left = {loss.grad_fn}, [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None:
            continue
        if "Convolution" in node.name():
            return True
        following = {f for f, _ in node.next_functions} - seen
        seen |= following
        left.extend(following)
    return False

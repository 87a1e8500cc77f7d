"""Forward mode: tangents of the run are carried along with it, so that memory does not grow with its length.

For a direction v in the space of (log_d, offsets), z_t = d theta_t . v obeys z_{t+1} = A_t z_t + B_t v, the recursion of
[Franceschi2017] and of the paper's appendix. All tangents of one step go through one vmapped Hessian-vector product.
"""

import math
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from metamd.inner.estimators.base import differentiate, foreseen, learnable
from metamd.inner.estimators.recursion import Passage, Recursion, stays
from metamd.inner.estimators.straight import Straight, dot
from metamd.inner.objectives import Objective
from metamd.inner.run import Cost, MirrorDescent, Trajectory, gradient
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class Layout:
    """How (log_d, offsets) lie in one vector: the keys in order, then the offsets, which a single piece does not have.

    Args:
        shapes: of log_d, by key.
        offsets: how many offsets there are.
    """

    shapes: dict[str, torch.Size]
    offsets: int

    @classmethod
    def of(cls, potential: MaxDiagonal) -> "Layout":
        """The layout of a bound potential."""
        shapes = {k: v.shape for k, v in potential.log_d.items()}
        return cls(shapes, potential.pieces if potential.pieces > 1 else 0)

    def __len__(self) -> int:
        return sum(math.prod(s) for s in self.shapes.values()) + self.offsets

    def split(self, rows: Tensor, like: MaxDiagonal) -> tuple[dict[str, Tensor], Tensor]:
        """Rows of vectors (k, H) as (k, N, ...) by key, and (k, N)."""
        sizes = [math.prod(s) for s in self.shapes.values()]
        *parts, last = torch.split(rows, [*sizes, self.offsets], dim=-1)
        lead = rows.shape[:-1]
        logs = {
            k: p.reshape(*lead, *s).to(like.log_d[k].dtype) for (k, s), p in zip(self.shapes.items(), parts, strict=True)
        }
        offsets = last if self.offsets else last.new_zeros(*lead, like.pieces)
        return logs, offsets.to(like.offsets.dtype)


@dataclass(frozen=True)
class Derivatives:
    """Directional derivatives of an objective along one run.

    Args:
        along: dE . v for every direction.
        value: E.
        run: the record.
        cost: what it took.
    """

    along: Tensor
    value: float
    run: Trajectory
    cost: Cost


def carry(
    task: Task,
    potential: MaxDiagonal,
    objective: Objective,
    directions: Tensor,
    *,
    lr: float,
    exact: bool,
    steps: int | None,
) -> Derivatives:
    """Run a task and differentiate the objective in the given directions.

    Args:
        task: the problem.
        potential: phi, bound.
        objective: E.
        directions: (k, H), in the potential's layout.
        lr: eta.
        exact: False takes the paper's step.
        steps: T.
    """
    began = time.perf_counter()
    objective, ahead = foreseen(objective, task, potential, lr=lr, exact=exact, steps=steps)
    walk = MirrorDescent(task, potential, lr=lr, exact=exact, steps=steps)
    leaf = learnable(potential, walk.start)
    recursion = Recursion(walk, leaf)
    by_key, offsets = Layout.of(leaf).split(directions, leaf)
    logs, metrics = recursion.by_tensor(by_key), recursion.directions(by_key)
    straight = Straight(recursion, objective)
    count = len(directions)
    z = {n: x.new_zeros(count, *x.shape) for n, x in walk.start.items()}
    zw = torch.zeros(count, leaf.pieces, dtype=offsets.dtype)
    along = torch.zeros(count, dtype=torch.float64)
    hvps = 0
    while walk.going:
        before, weights = walk.params, walk.active.weights
        loss, grads, zg = hessian_products(task, before, task.batch(walk.taken), z)
        hvps += count
        walk.step(loss, grads)
        if walk.diverged:
            break
        passage = Passage(before, grads, loss, weights, walk.active.weights)
        piece = stays(passage.before, passage.after, exact=exact)
        if piece is not None:
            along += straight.along(passage, piece, logs, z, zg)
            straight.forth(passage, piece, logs, z, zg)
            zw = torch.zeros_like(zw)  # a vertex of the simplex is constant
            continue
        if objective.runs:
            pulled = pull(recursion, objective, passage)
            along += pulled.loss * dot(z, grads) + dot(zg, pulled.grads) + zw @ pulled.weights + dot(metrics, pulled.metrics)
        z, zw = push(recursion, passage, metrics, offsets, z, zw, zg, recursion.newton(passage))
    run = walk.finish(objective.reference)
    if not run.diverged:
        ends = {n: x.detach().requires_grad_() for n, x in run.end.items()}
        final = objective.final(run, leaf, ends)
        by_log, by_offset, by_end = differentiate(final, leaf, *ends.values())
        along += dot(by_key, by_log) + offsets @ by_offset + dot(z, dict(zip(ends, by_end, strict=True)))
    value = math.inf if run.diverged else float(objective.value(run, leaf).detach())
    cost = replace(run.cost + ahead, hvps=hvps, seconds=time.perf_counter() - began)
    return Derivatives(along, value, run, cost)


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
    products = (in_turn if _convolves(loss) else batched)(grads, leaves, tangents)
    return loss.detach(), {n: g.detach() for n, g in grads.items()}, products


def batched(outputs: Params, inputs: Params, rows: Params) -> dict[str, Tensor]:
    """sum over outputs of <row, d output / d input>, for every input and all rows of cotangents at once."""
    live = [n for n, y in outputs.items() if y.requires_grad]  # a gradient can be constant
    count = len(next(iter(rows.values())))
    found: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if live:
        found = torch.autograd.grad(
            [outputs[n] for n in live],
            list(inputs.values()),
            [rows[n].contiguous() for n in live],
            allow_unused=True,
            is_grads_batched=True,
        )
    return {n: x.new_zeros(count, *x.shape) if f is None else f for (n, x), f in zip(inputs.items(), found, strict=True)}


def in_turn(outputs: Params, inputs: Params, rows: Params) -> dict[str, Tensor]:
    """What `batched` finds, one row after the other."""
    live = {n: y for n, y in outputs.items() if y.requires_grad}
    count = len(next(iter(rows.values())))
    found = {n: x.new_zeros(count, *x.shape) for n, x in inputs.items()}
    for i in range(count if live else 0):
        weights = [rows[n][i] for n in live]
        each = torch.autograd.grad(
            list(live.values()), list(inputs.values()), weights, allow_unused=True, retain_graph=i + 1 < count
        )
        for into, product in zip(found.values(), each, strict=True):
            if product is not None:
                into[i] = product
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


@dataclass(frozen=True)
class Pulled:
    """The derivatives of what one step adds to the objective.

    Args:
        loss: by the loss.
        grads: by the gradient.
        weights: by w.
        metrics: by the metrics, by tensor.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    weights: Tensor
    metrics: dict[str, Tensor]


def pull(recursion: Recursion, objective: Objective, passage: Passage) -> Pulled:
    """Differentiate what one step adds to the objective."""
    loss = passage.loss.detach().requires_grad_()
    grads = {n: g.detach().requires_grad_() for n, g in passage.grads.items()}
    weights = _weights(recursion, passage).requires_grad_()
    metrics = {n: v.detach().requires_grad_() for n, v in recursion.metrics.items()}
    with torch.enable_grad():
        term = recursion.running(objective, metrics, weights, loss, grads)
        leaves = [loss, weights, *grads.values(), *metrics.values()]
        found = torch.autograd.grad(term, leaves, allow_unused=True, materialize_grads=True)
    by_grad = dict(zip(grads, found[2:], strict=False))
    return Pulled(found[0], by_grad, found[1], dict(zip(metrics, found[2 + len(grads) :], strict=True)))


def push(
    recursion: Recursion,
    passage: Passage,
    metrics: Params,
    offsets: Tensor,
    z: Params,
    zw: Tensor,
    zg: Params,
    newton: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """The tangents after a step from those before it, for all directions at once.

    Args:
        recursion: the differentiable step.
        passage: where it is differentiated.
        metrics: the directions in D, by tensor.
        offsets: the directions in b.
        z: tangents of theta.
        zw: tangents of w.
        zg: tangents of the gradient, H z.
        newton: as `Recursion.step` has it.
    """
    leaves = _gather(recursion.metrics, recursion.offsets, passage.params, _weights(recursion, passage), passage.grads)
    leaves = {n: x.detach().requires_grad_() for n, x in leaves.items()}
    part = partial(_part, leaves)
    with torch.enable_grad():
        moved, after = recursion.step(
            part("metrics"), leaves["offsets"], part("params"), leaves["weights"], part("grads"), passage, newton
        )
        outputs = {n: y for n, y in {**moved, "": after}.items() if y.requires_grad}
        # J z from two reverse passes, u -> J'u -> J: a forward pass through torch.func costs several times as much.
        u = {n: torch.zeros_like(y, requires_grad=True) for n, y in outputs.items()}
        pulled = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), list(u.values()), create_graph=True, allow_unused=True
        )
    used = {n: p for n, p in zip(leaves, pulled, strict=True) if p is not None}
    pushed = batched(used, u, _gather(metrics, offsets, z, zw, zg))
    still = zw.new_zeros(zw.shape)
    return {n: pushed[n] for n in moved}, pushed.get("", still)


def _gather(metrics: Params, offsets: Tensor, params: Params, weights: Tensor, grads: Params) -> dict[str, Tensor]:
    """All arguments of a step under one mapping; tensors by group and name."""
    groups = {"metrics": metrics, "params": params, "grads": grads}
    named = {f"{group}/{n}": x for group, tensors in groups.items() for n, x in tensors.items()}
    return {"offsets": offsets, "weights": weights, **named}


def _part(arguments: Params, group: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{group}/"): x for n, x in arguments.items() if n.startswith(f"{group}/")}


def _weights(recursion: Recursion, passage: Passage) -> Tensor:
    return torch.tensor(passage.before, dtype=recursion.offsets.dtype)

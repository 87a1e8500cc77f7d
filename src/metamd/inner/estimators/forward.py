"""Forward mode: tangents of the run are carried along with it, so that memory does not grow with its length.

For a direction v in the space of (log_d, offsets), z_t = d theta_t . v obeys z_{t+1} = A_t z_t + B_t v, the recursion of
[Franceschi2017] and of the paper's appendix. All tangents of one step go through one vmapped Hessian-vector product.
"""

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from metamd.inner.estimators.base import (
    Estimator,
    Hypergradient,
    Setting,
    differentiate,
    given_up,
    learnable,
    size,
    split,
)
from metamd.inner.estimators.step import Passage, Recursion, dot, named, part
from metamd.inner.objectives import Objective
from metamd.inner.run import Cost, Trajectory, gradient
from metamd.potentials.base import Params
from metamd.tasks.base import Task


@dataclass(frozen=True)
class Forward(Estimator):
    """The exact gradient, one tangent for each of the H = N x groups metrics and N offsets [Franceschi2017].

    z_{t+1} = A_t z_t + B_t with A_t = I - eta D^-1 H_t. Memory is O(H numel), flat in T: for tied metrics or tiny models.

    Args:
        tangents: how many are carried at a time. With fewer than H, the run is repeated for the others.

    Example:
        >>> Forward(tangents=8)
        Forward(tangents=8)
    """

    tangents: int | None = None

    def __post_init__(self) -> None:
        if self.tangents is not None and self.tangents < 1:
            raise ValueError(f"tangents must be at least 1, got {self.tangents}. Pass None to carry all at once.")

    def estimate(self, setting: Setting, objective: Objective, generator: torch.Generator | None) -> Hypergradient:
        """Run the task, once for every `tangents` directions."""
        leaf, cost, found = learnable(setting.potential, setting.task.init()), Cost(), []
        setting, count = replace(setting, potential=leaf), size(leaf)
        for directions in torch.split(torch.eye(count, dtype=torch.float64), self.tangents or count):
            along, value, run, extra = _carry(setting, objective, directions)
            cost = cost + extra
            if run.diverged:
                return given_up(run, leaf, cost)
            found.append(along)
        grads, offsets = split(torch.cat(found), leaf)
        return Hypergradient(grads, offsets, value, run, cost)


def _carry(setting: Setting, objective: Objective, directions: Tensor) -> tuple[Tensor, float, Trajectory, Cost]:
    """Run a task and differentiate the objective in the given directions, (k, H): dE . v for each, E, the run, the cost."""
    began, ahead = time.perf_counter(), Cost()
    if objective.looks_ahead:  # its constants come from the end of a run, which has to be made beforehand
        before_it = setting.run()
        objective, ahead = objective if before_it.diverged else objective.held(before_it), before_it.cost
    descent, leaf, task = setting.descent(), setting.potential, setting.task
    recursion = Recursion(descent, leaf, objective)
    by_key, offsets = split(directions, leaf)
    logs = recursion.by_tensor(by_key)
    metrics = {n: recursion.metrics[n] * v for n, v in logs.items()}  # dD = D d log D
    count, hvps = len(directions), 0
    z = {n: x.new_zeros(count, *x.shape) for n, x in descent.start.items()}
    zw = torch.zeros(count, leaf.pieces, dtype=offsets.dtype)
    along = torch.zeros(count, dtype=torch.float64)
    while descent.going:
        before, weights = descent.params, descent.active.weights
        loss, grads, zg = hessian_products(task, before, task.batch(descent.taken), z)
        hvps += count
        descent.step(loss, grads)
        if descent.diverged:
            break
        passage = Passage(before, grads, loss, weights, descent.active.weights)
        piece = recursion.stays(passage)
        if piece is not None:
            along += recursion.along(passage, piece, logs, z, zg)
            recursion.forth(passage, piece, logs, z, zg)
            zw = torch.zeros_like(zw)  # a vertex of the simplex is constant
        else:
            tangents = named(metrics, offsets, z, zw, zg)
            added, z, zw = _between(recursion, passage, tangents)
            along += added
    run = descent.finish(objective.reference)
    value = math.inf
    if not run.diverged:
        ends = {n: x.detach().requires_grad_() for n, x in run.end.items()}
        by_log, by_offset, by_end = differentiate(objective.final(run, leaf, ends), leaf, *ends.values())
        along += dot(by_key, by_log) + offsets @ by_offset + dot(z, dict(zip(ends, by_end, strict=True)))
        value = float(objective.value(run, leaf).detach())
    return along, value, run, replace(run.cost + ahead, hvps=hvps, seconds=time.perf_counter() - began)


def _between(recursion: Recursion, passage: Passage, tangents: Params) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """A step onto, along or off a kink: what it adds to the derivatives, and the tangents of theta and w after it."""
    leaves, outputs, term = recursion.between(passage)
    by = torch.autograd.grad(term, list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
    added = dot({**tangents, "loss": dot(part(tangents, "params"), passage.grads)}, dict(zip(leaves, by, strict=True)))
    # J z from two reverse passes, u -> J'u -> J: a forward pass through torch.func costs several times as much.
    u = {n: torch.zeros_like(y, requires_grad=True) for n, y in outputs.items()}
    pulled = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), list(u.values()), create_graph=True, allow_unused=True
    )
    pushed = batched({n: p for n, p in zip(leaves, pulled, strict=True) if p is not None}, u, tangents)
    return added, pushed, pushed.pop("", torch.zeros_like(tangents["weights"]))


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

"""Forward mode: tangents of the run are carried along with it, so that memory does not grow with its length.

For a direction v in the space of (log_d, offsets), z_t = d theta_t . v obeys z_{t+1} = A_t z_t + B_t v, the recursion of
[Franceschi2017] and of the paper's appendix. All tangents of one step go through one vmapped Hessian-vector product.
"""

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metamd.hypergrad.base import differentiate, learnable
from metamd.hypergrad.recursion import Passage, Recursion
from metamd.inner import Cost, Trajectory, Walk
from metamd.objectives import Objective
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
    walk = Walk(task, potential, lr=lr, exact=exact, steps=steps)
    leaf = learnable(potential, walk.start)
    recursion = Recursion(walk, leaf)
    logs, offsets = Layout.of(leaf).split(directions, leaf)
    count = len(directions)
    z = {n: x.new_zeros(count, *x.shape) for n, x in walk.start.items()}
    zw = torch.zeros(count, leaf.pieces, dtype=offsets.dtype)
    along = torch.zeros(count, dtype=torch.float64)
    hvps = 0
    while walk.going:
        before, weights = walk.params, walk.active.weights
        loss, grads, zg = hessian_products(task, before, task.batch(walk.step), z)
        hvps += count
        walk.advance(loss, grads)
        if walk.diverged:
            break
        passage = Passage(before, grads, loss, weights, walk.active.weights)
        if objective.runs:
            pulled = pull(recursion, objective, passage)
            along += pulled.loss * dot(z, grads) + dot(zg, pulled.grads) + zw @ pulled.weights + dot(logs, pulled.log_d)
        z, zw = push(recursion, passage, logs, offsets, z, zw, zg, recursion.newton(passage))
    run = walk.finish(objective.reference)
    if not run.diverged:
        ends = {n: x.detach().requires_grad_() for n, x in run.end.items()}
        final = objective.final(run, leaf, ends)
        by_log, by_offset, by_end = differentiate(final, leaf, *ends.values())
        along += dot(logs, by_log) + offsets @ by_offset + dot(z, dict(zip(ends, by_end, strict=True)))
    value = math.inf if run.diverged else float(objective.value(run, leaf))
    cost = replace(run.cost, hvps=hvps, seconds=time.perf_counter() - began)
    return Derivatives(along, value, run, cost)


def hessian_products(
    task: Task, params: Params, batch: object, tangents: Params
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, its gradient, and the Hessian times every tangent, in one vmapped pass.

    Forward over reverse: forward over forward is silently wrong through batch norm.
    """
    evaluate = torch.func.grad_and_value(lambda p: task.loss(p, batch))
    point = dict(params)

    def along(z: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        primal, tangent = torch.func.jvp(evaluate, (point,), (z,))[:2]
        return primal[1], primal[0], tangent[0]

    loss, grads, products = torch.func.vmap(along, randomness="same")(dict(tangents))
    # The same for every tangent: torch has computed them once and expanded them.
    return loss[0], {n: g[0] for n, g in grads.items()}, products


@dataclass(frozen=True)
class Pulled:
    """The derivatives of what one step adds to the objective.

    Args:
        loss: by the loss.
        grads: by the gradient.
        weights: by w.
        log_d: by the logarithms of the metrics.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    weights: Tensor
    log_d: dict[str, Tensor]


def pull(recursion: Recursion, objective: Objective, passage: Passage) -> Pulled:
    """Differentiate what one step adds to the objective."""
    loss = passage.loss.detach().requires_grad_()
    grads = {n: g.detach().requires_grad_() for n, g in passage.grads.items()}
    weights = torch.tensor(passage.before, dtype=recursion.offsets.dtype, requires_grad=True)
    log_d = {k: v.detach().requires_grad_() for k, v in recursion.log_d.items()}
    with torch.enable_grad():
        term = recursion.running(objective, log_d, weights, loss, grads)
        leaves = [loss, weights, *grads.values(), *log_d.values()]
        found = torch.autograd.grad(term, leaves, allow_unused=True, materialize_grads=True)
    by_grad = dict(zip(grads, found[2:], strict=False))
    return Pulled(found[0], by_grad, found[1], dict(zip(log_d, found[2 + len(grads) :], strict=True)))


def push(
    recursion: Recursion,
    passage: Passage,
    logs: Params,
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
        logs: the directions in log_d.
        offsets: the directions in b.
        z: tangents of theta.
        zw: tangents of w.
        zg: tangents of the gradient, H z.
        newton: as `Recursion.step` has it.
    """
    weights = torch.as_tensor(passage.before, dtype=recursion.offsets.dtype)
    primals = (recursion.log_d, recursion.offsets, passage.params, weights, passage.grads)

    def step(*arguments: object) -> tuple[dict[str, Tensor], Tensor]:
        return recursion.step(*arguments, passage=passage, newton=newton)  # type: ignore[arg-type]

    def one(*tangents: object) -> tuple[dict[str, Tensor], Tensor]:
        return torch.func.jvp(step, primals, tangents)[1]

    return torch.func.vmap(one)(dict(logs), offsets, dict(z), zw, dict(zg))


def dot(rows: Params, by: Params) -> Tensor:
    """sum over tensors of <row, by> for every row, in float64."""
    products = [r.reshape(len(r), -1) @ by[n].reshape(-1).to(r.dtype) for n, r in rows.items()]
    return torch.stack([p.double() for p in products]).sum(0)

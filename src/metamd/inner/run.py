"""One training run by mirror descent, and the record of it that meta-learning works from."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from metamd.potentials.base import Params, Potential, mirror_step
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import Array, combine, gap_of, grouped_squares
from metamd.tasks.base import Task

BLOW_UP = 1e3
"""A run has exploded once its loss has risen by this many times 1 + |first loss|."""


@dataclass(frozen=True)
class Cost:
    """What a computation took."""

    gradients: int = 0  # evaluations
    hvps: int = 0  # Hessian-vector products
    seconds: float = 0.0  # wall-clock time

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.gradients + other.gradients, self.hvps + other.hvps, self.seconds + other.seconds)


# the training loop


class Problem(Protocol):
    """What the training loop needs of a `Task`."""

    def batch(self, step: int) -> Any:
        """The batch of step t."""

    def loss(self, params: Params, batch: Any) -> Tensor:
        """The loss on a batch, a scalar."""


class StepRule(Protocol):
    """What moves the parameters of a run."""

    @property
    def params(self) -> Params:
        """Where the next gradient is taken."""

    def step(self, loss: Tensor, grads: Params) -> str:
        """Take one step; why it could not be taken, in a sentence, or nothing."""


Until = Callable[[int, Sequence[float], Params], str]
"""Why a run is given up, in a sentence, from the step, the losses until then and the gradients; empty if it is not."""

Watch = Callable[[int, Tensor, Params], object]
"""Is given the step, the loss and the gradients of every step before it is taken."""


@dataclass(frozen=True)
class Training:
    """What the training loop did."""

    losses: tuple[float, ...]  # of the batches, before each step that was taken
    diverged: str  # why the run was given up, in a sentence; empty if it was not
    cost: Cost  # gradients and time


def not_finite(step: int, losses: Sequence[float], grads: Params) -> str:
    """The weaker rule, for runs whose loss is judged otherwise: the loss of a batch is not finite."""
    return "" if math.isfinite(losses[-1]) else f"The loss of the batch became {losses[-1]} at step {step}."


def explodes(step: int, losses: Sequence[float], grads: Params) -> str:
    """The rule by which runs are given up: a loss or gradient that is not finite, or a loss that has exploded."""
    norm = float(torch.stack(torch._foreach_norm(list(grads.values()))).norm())
    return trouble(step, losses[0], losses[-1], norm)


def train(
    task: Problem, rule: StepRule, steps: int | range, *, watch: Watch | None = None, until: Until | None = explodes
) -> Training:
    """Train a task: batch, loss and gradient at the rule's point, then its step.

    A range of steps goes on where an earlier call ended. Without `until` a run is given up by the rule alone.

    Example:
        >>> from metamd import tasks
        >>> family = tasks.quadratic((1.0, 2.0))
        >>> task = family.build(family.sample(torch.Generator().manual_seed(0)))
        >>> params = {n: x.requires_grad_() for n, x in task.init().items()}
        >>> done = train(task, OptimiserSteps(params, torch.optim.SGD(params.values(), lr=0.1)), 50)
        >>> done.losses[-1] < done.losses[0]
        True
    """
    began, losses, why = time.perf_counter(), [], ""
    for t in range(steps) if isinstance(steps, int) else steps:
        loss, grads = gradient(task, rule.params, task.batch(t))
        losses.append(loss.item())
        if watch is not None:
            watch(t, loss, grads)
        why = (until(t, losses, grads) if until is not None else "") or rule.step(loss, grads)
        if why:
            losses.pop()
            break
    cost = Cost(gradients=len(losses) + bool(why), seconds=time.perf_counter() - began)
    return Training(tuple(losses), why, cost)


def seconds_per_step(
    task: Problem,
    begin: Mapping[str, Callable[[], StepRule]],
    horizon: int,
    *,
    rounds: int = 15,
    block: int = 10,
    warm_up: int = 3,
    told: Callable[[str], object] | None = None,
) -> dict[str, float]:
    """The seconds that one step by each rule takes: the median over blocks of steps that take turns.

    Whatever else the machine does slows all of them alike; the order within a round changes from round to round. A run that
    has reached its horizon begins again, and so does one that failed. The first `warm_up` rounds do not count. Every block
    is `told`. A rule by which no step could be taken has NaN.
    """
    found: dict[str, list[float]] = {label: [] for label in begin}
    block, order, runs = min(block, horizon), list(begin), dict[str, tuple[StepRule, int]]()
    for turn in range(rounds + warm_up):
        shift = turn % len(order)
        for label in order[shift:] + order[:shift]:
            rule, before = runs.pop(label) if label in runs else (begin[label](), 0)
            began = time.perf_counter()
            done = train(task, rule, range(before, before + block), until=not_finite)
            if turn >= warm_up and done.losses:
                found[label].append((time.perf_counter() - began) / len(done.losses))
            if not done.diverged and before + 2 * block <= horizon:
                runs[label] = rule, before + block
            if told is not None:
                told(label)
    return {label: statistics.median(times) if times else math.nan for label, times in found.items()}


class Stepper(Protocol):
    """What the training loop needs of an optimiser; every `torch.optim.Optimizer` is one.

    One with `train()` and `eval()`, as Schedule-Free has them, is switched to evaluation whenever its parameters are judged.
    """

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Move the parameters by their `.grad`."""


class OptimiserSteps:
    """The steps of an optimiser, its rates multiplied by a schedule: the factor in step t."""

    def __init__(
        self, params: Mapping[str, Tensor], optimiser: Stepper, schedule: Callable[[int], float] | None = None
    ) -> None:
        self.params, self.optimiser, self.schedule = params, optimiser, schedule
        self.taken, self._rates = 0, [group["lr"] for group in optimiser.param_groups]
        self._switch("train")

    @classmethod
    def beginning(
        cls,
        start: Params,
        make: Callable[[list[tuple[str, torch.nn.Parameter]]], Stepper],
        schedule: Callable[[int], float] | None = None,
    ) -> "OptimiserSteps":
        """The steps of the optimiser that `make` makes for parameters which begin at `start`."""
        params = {n: torch.nn.Parameter(x.detach().clone()) for n, x in start.items()}
        return cls(params, make(list(params.items())), schedule)

    def step(self, loss: Tensor, grads: Params) -> str:
        """One step along these gradients."""
        for n, g in grads.items():
            self.params[n].grad = laid_out_like(self.params[n], g)
        if self.schedule is not None:
            factor = self.schedule(self.taken)
            for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        try:
            self.optimiser.step()
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # statistics that are no longer finite
            return f"The optimiser gave up at step {self.taken}: {error}"
        self.taken += 1
        return ""

    def model(self) -> dict[str, Tensor]:
        """A copy of the parameters as they are judged."""
        self._switch("eval")
        found = {n: p.detach().clone() for n, p in self.params.items()}
        self._switch("train")
        return found

    def _switch(self, mode: str) -> None:
        if hasattr(self.optimiser, mode):
            getattr(self.optimiser, mode)()


def gradient(task: Problem, params: Params, batch: Any, *, graph: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss on a batch and its gradient, zero for a parameter that the loss ignores.

    With `graph` both can be differentiated again; `params` must then require gradients.
    """
    with torch.enable_grad():
        leaves = dict(params) if graph else {n: x.detach().requires_grad_() for n, x in params.items()}
        loss = scalar_loss(task, leaves, batch)
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=graph, allow_unused=True)
    grads = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)}
    return (loss if graph else loss.detach()), grads


def scalar_loss(task: Problem, leaves: Params, batch: Any) -> Tensor:
    """The loss on a batch, which has to be a scalar with a graph."""
    loss = task.loss(leaves, batch)
    if loss.ndim or not loss.requires_grad:
        problem = f"has shape {tuple(loss.shape)}" if loss.ndim else "does not depend on the parameters"
        raise ValueError(f"task.loss must return a scalar that depends on the parameters, but it {problem}.")
    return loss


def laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides of its parameter, which `backward` sees to and `torch.autograd.grad` does not."""
    # The gradients of kernels are in channels-last memory where the images are. Torch's fused optimisers go through the
    # memory of both in order, and would pair numbers of different entries.
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def has_exploded(first: float, loss: float) -> bool:
    """Whether a loss is not a number, or `BLOW_UP` times as high above the first as that is large."""
    return not loss - first <= BLOW_UP * (1 + abs(first))


def trouble(step: int, first: float, loss: float, norm: float) -> str:
    """Why a run cannot go on, in a sentence, from its first loss, the present one and the norm of the gradient."""
    advice = "Lower lr or start from larger metrics."
    if not math.isfinite(loss):
        where = f"at step {step}" if step else "at the start, before any step was taken"
        return f"The loss became {loss} {where}. {advice if step else 'Check the data and the initialisation.'}"
    if not math.isfinite(norm):
        return f"The gradient became {norm} at step {step}. {advice}"
    if has_exploded(first, loss):
        return f"The loss rose from {first:g} to {loss:g} by step {step}. {advice}"
    return ""


# mirror descent, and the record of it


class GradientSums:
    """Sums of squared gradients in the shape of a bound potential's metrics, and by piece.

    With `products`, for one piece, it adds up G'G of the weights, from which a learned basis is computed.
    """

    def __init__(self, potential: MaxDiagonal, *, products: bool = False) -> None:
        self.potential, self.basis = potential, potential.basis
        metrics = {n: potential.metric(n) for n in potential.slots}
        self.products: dict[str, Tensor] = {}
        if products:
            sizes = {n: self.basis.places[n].sizes["right"] for n in self.basis.learnable()}
            self.products = {f"right/{n}": metrics[n].detach().new_zeros(size, size) for n, size in sizes.items()}
        self._squares = {n: d.new_zeros(d.shape[1:]) for n, d in metrics.items()}
        self._views = {n: x.view(()) if x.numel() == 1 else x for n, x in self._squares.items()}
        # sum_t w_j D_j^2 / D(w_t)^2 g_t^2, (N, ...) by tensor, if there are several pieces
        self.by_piece = {n: torch.zeros_like(d) for n, d in metrics.items()} if potential.pieces > 1 else {}
        plain = not self.by_piece and self.basis.kind == "identity"
        self._one_each = plain and all(x.ndim == 0 for x in self._views.values())
        self._counted = dict.fromkeys(metrics, 0.0)

    def add(self, grads: Params, weights: Array | None = None, norms: list[float] | None = None) -> None:
        """Count one step's gradients, taken at w; where each tensor has one metric, its norms say all, if they are known."""
        if self._one_each and norms is not None:
            for n, norm in zip(grads, norms, strict=True):
                self._counted[n] += norm * norm
            return
        for n, grad in grads.items():
            product = self.products.get(f"right/{n}")
            if product is not None:
                m = self.basis.places[n].matrix(grad).to(product.dtype)
                product.addmm_(m.mT, m)
                continue
            g, into = self.basis.into(n, grad), self._views[n]
            if self.by_piece:
                assert weights is not None
                square = grouped_squares(g, tuple(into.shape))
                into += square
                self._share(n, square, weights)
            elif into.shape == g.shape and into.dtype == g.dtype:
                into.addcmul_(g, g)
            elif into.ndim == 0 and into.dtype == g.dtype:
                into += torch.dot(g.reshape(-1), g.reshape(-1))
            else:
                into += grouped_squares(g, tuple(into.shape))

    def _share(self, name: str, square: Tensor, weights: Array) -> None:
        support = np.flatnonzero(weights)
        if len(support) == 1:  # its share is all, which is not computed in every step
            self.by_piece[name][int(support[0])] += square
            return
        d = self.potential.metric(name)
        mixed = combine(d, weights)
        for j in support:
            self.by_piece[name][j] += float(weights[j]) * (d[j] / mixed).square() * square

    def squares(self) -> dict[str, Tensor]:
        """sum_t g_t^2 by tensor, in the coordinates of the basis: of products, the diagonals of V'(G'G)V."""
        found = {n: x + self._counted[n] for n, x in self._squares.items()} if self._one_each else dict(self._squares)
        turned = {n: self.basis.conjugated(n, self.products[f"right/{n}"]) for n in found if f"right/{n}" in self.products}
        return found | {n: m.diagonal().unsqueeze(0) for n, m in turned.items()}


@dataclass(frozen=True)
class Trajectory:
    """The record of one run: theta_1 .. theta_{T+1} under theta_{t+1} = argmin <g_t, theta> + B(theta||theta_t)/lr.

    Sums of squares are by tensor name, in the coordinates of the potential's basis, summed over coordinates that share
    a metric: they broadcast against `potential.metric(name)`.
    """

    losses: Tensor  # of theta_t on the batch of step t; fewer than `steps` if the run diverged
    start: dict[str, Tensor]  # theta_1
    end: dict[str, Tensor]  # theta_{T+1}, the last finite point if the run diverged
    squares: dict[str, Tensor]  # sum_t g_t^2
    lr: float  # eta
    steps: int  # T as asked for
    diverged: str = ""  # why the run was given up, in a sentence; empty if it was not
    cost: Cost = field(default_factory=Cost)  # gradients and time, those of a reference run included
    reference: dict[str, Tensor] | None = None  # theta_*, the best known point, if one was asked for
    # the squares by piece, (N, ...): a gradient at D(w) counts w_j D_j^2 / D(w)^2 for piece j, see `local_norm`
    shares: dict[str, Tensor] = field(default_factory=dict)
    weights: Array = field(default_factory=lambda: np.ones((0, 1)))  # w_t, (T, N)
    # by how much w_t misses the largest form at theta_t; they enter a certificate as gap / lr
    gaps: Array = field(default_factory=lambda: np.zeros(0))
    switches: int = 0  # how often the set of active pieces changed
    largest_gradient: float = math.nan  # max_t |g_t|
    gradient_sum: dict[str, Tensor] | None = None  # sum_t g_t, if `certify` asked for it
    linear: float = 0.0  # sum_t <g_t, theta_t - theta_1>, if `certify` asked for it
    # for a learned basis, if asked for: sum_t G_t'G_t of the weight matrices, (n, n), under "right/name"
    products: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shares:  # a single piece has all
            object.__setattr__(self, "shares", {n: s.unsqueeze(0) for n, s in self.squares.items()})

    def regret(self, u: Params) -> float:
        """sum_t <g_t, theta_t - u>: the linearised regret against u, which bounds that of convex losses."""
        if self.gradient_sum is None:
            raise ValueError("the regret needs the sum of the gradients. Run with run_inner(..., certify=True).")
        away = sum(float((g * (u[n] - self.start[n])).sum(dtype=torch.float64)) for n, g in self.gradient_sum.items())
        return self.linear - away


class ReferenceRun(Protocol):
    """What finds a comparator theta_* for a task."""

    def run(self, task: Task, start: Params, steps: int) -> tuple[dict[str, Tensor], Cost]:
        """A point that is better than the end of a run of so many steps, and what it cost to find."""


def run_inner(
    task: Task,
    potential: Potential,
    *,
    lr: float = 1.0,
    exact: bool = True,
    steps: int | None = None,
    reference: ReferenceRun | Params | None = None,
    certify: bool = False,
    products: bool = False,
) -> Trajectory:
    """Train a task by mirror descent and record what meta-learning needs.

    Args:
        task: the problem; its own `steps` are taken unless others are given.
        potential: phi, a `MaxDiagonal`; bound to the task's tensors if it is not yet, and centred at the run's start.
        lr: eta.
        exact: False takes the paper's step.
        steps: T.
        reference: a point to compare with, or what finds one.
        certify: whether to record the sum of the gradients, from which the regret against any point follows.
        products: whether to record what a learned basis is computed from.

    Example:
        >>> from metamd import Diagonal
        >>> from metamd.tasks import Task
        >>> class Parabola(Task):
        ...     def init(self): return {"x": torch.tensor([3.0])}
        ...     def batch(self, step): return None
        ...     def loss(self, params, batch): return (params["x"] ** 2).sum()
        ...     def evaluate(self, params, split="test"): ...
        >>> run_inner(Parabola({}, steps=3), Diagonal(), lr=0.25).losses
        tensor([9.0000, 2.2500, 0.5625], dtype=torch.float64)
    """
    descent = MirrorDescent(task, potential, lr=lr, exact=exact, steps=steps, certify=certify, products=products)
    return descent.run(reference)


class MirrorDescent:
    """Mirror descent under way, a `StepRule` that records its run; the arguments are those of `run_inner`.

    It knows itself when to give up, since it needs the norms of the gradients anyway.
    """

    def __init__(
        self,
        task: Task,
        potential: Potential,
        *,
        lr: float = 1.0,
        exact: bool = True,
        steps: int | None = None,
        certify: bool = False,
        products: bool = False,
    ) -> None:
        self._began = time.perf_counter()
        self.steps = task.steps if steps is None else steps
        self.task, self.lr, self.exact = task, lr, exact
        self.start = {n: x.detach() for n, x in task.init().items()}
        self.potential = bound(potential, self.start, lr, self.steps)
        self.params = self._before = dict(self.start)
        self.active = self.potential.activate(self.params)
        self.taken, self.diverged = 0, ""
        self._losses: list[float] = []
        self._weights: list[Array] = []
        self._gaps: list[float] = [max(gap_of(self.active.weights, self.active.forms), 0.0)]
        self._largest = 0.0
        self._sums = GradientSums(self.potential, products=products)
        self._gradient_sum = {n: torch.zeros_like(x) for n, x in self.start.items()} if certify else None
        self._linear = 0.0

    @property
    def going(self) -> bool:
        """Whether there are steps left, and the run has not diverged."""
        return self.taken < self.steps and not self.diverged

    @torch.no_grad()
    def step(self, loss: Tensor, grads: Params) -> str:
        """Take one step along these gradients; a loss or gradient that is not finite, or an explosion, ends the run."""
        norms = torch.stack(torch._foreach_norm(list(grads.values()))).tolist()
        value, norm = loss.item(), math.hypot(*norms)
        self.diverged = trouble(self.taken, self._losses[0] if self._losses else value, value, norm)
        if self.diverged:
            return self.diverged
        self._losses.append(value)
        self._weights.append(self.active.weights)
        self._largest = max(self._largest, norm)
        self._sums.add(grads, self.active.weights, norms)
        if self._gradient_sum is not None:
            for n, g in grads.items():
                self._linear += float((g * (self.params[n] - self.start[n])).sum(dtype=torch.float64))
                self._gradient_sum[n] += g
        taken = mirror_step(self.params, grads, self.potential, self.lr, active=self.active, exact=self.exact)
        self._before, self.params, self.active = self.params, taken.params, taken.active or self.active
        self._gaps.append(taken.gap)
        self.taken += 1
        return ""

    def run(self, reference: ReferenceRun | Params | None = None) -> Trajectory:
        """All steps, and the record."""
        train(self.task, self, self.steps, until=None)
        return self.finish(reference)

    def finish(self, reference: ReferenceRun | Params | None = None) -> Trajectory:
        """The record of the run so far, with what `reference` finds, as `run_inner` has it."""
        finite = all_finite(self.params)
        if not self.diverged and not finite:
            self.diverged = "The last step led to parameters that are not finite. Lower lr or start from larger metrics."
        cost = Cost(gradients=len(self._losses), seconds=time.perf_counter() - self._began)
        supports = [tuple(w > 0) for w in (*self._weights, self.active.weights)]
        run = Trajectory(
            losses=torch.tensor(self._losses, dtype=torch.float64),
            start=self.start,
            end=self.params if finite else self._before,
            squares=self._sums.squares(),
            lr=self.lr,
            steps=self.steps,
            diverged=self.diverged,
            cost=cost,
            shares=self._sums.by_piece,
            weights=np.array(self._weights).reshape(-1, self.potential.pieces),
            gaps=np.array(self._gaps[: len(self._losses)]),
            switches=sum(a != b for a, b in pairwise(supports)),
            largest_gradient=self._largest,
            gradient_sum=self._gradient_sum,
            linear=self._linear,
            products=self._sums.products,
        )
        return referred(run, self.task, reference)


def referred(run: Trajectory, task: Task, reference: ReferenceRun | Params | None) -> Trajectory:
    """The record with a reference point, which is sought only if the run did not diverge."""
    if isinstance(reference, Mapping):
        return replace(run, reference={n: x.detach() for n, x in reference.items()})
    if reference is None or run.diverged:
        return run
    best, extra = reference.run(task, run.start, run.steps)
    why = "" if all_finite(best) else "The reference run diverged. Give the comparator a lower lr."
    return replace(run, reference=best, cost=run.cost + extra, diverged=why)


def local_norm(shares: Params, potential: MaxDiagonal) -> Tensor:
    r"""sum_t g_t' D(w_t)^-1 g_t from the shares of the pieces, as a function of the metrics.

    The shares S_j turn the sum into sum_j S_j / D_j. With one active piece at a time this is the sum itself; on kinks it is
    an upper bound (1/x is convex) that touches at the metrics of the run, with the right derivative there.
    """
    return torch.stack([(s / potential.metric(n)).sum(dtype=torch.float64) for n, s in shares.items()]).sum()


def bound(potential: Potential, start: Params, lr: float, steps: int) -> MaxDiagonal:
    """The potential for one run: bound to its tensors, centred at its start, the metrics evaluated once.

    Arguments with which no run can be made are refused.
    """
    if not isinstance(potential, MaxDiagonal):
        raise ValueError(
            f"run_inner needs a potential with metrics to learn, got {type(potential).__name__}. "
            "Pass Diagonal() or MaxDiagonal(pieces=3); Diagonal() with metrics of one is plain gradient descent."
        )
    if not (lr > 0 and np.isfinite(lr)):
        raise ValueError(f"lr must be positive, got {lr}. Pass lr=1.0 to use the learned step sizes as they are.")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}. It is the number of training steps of one run.")
    fit = (potential if potential.slots else potential.bind(start)).centred_at(start)
    with torch.no_grad():
        return fit.fixed({n: fit.metric(n) for n in start})


def all_finite(params: Params) -> bool:
    """Whether all numbers of all tensors are finite."""
    return all(bool(x.isfinite().all()) for x in params.values())

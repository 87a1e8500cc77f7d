"""Estimators of the gradient of a meta-objective through a run: one interface, one record.

| estimator | exact for | gradients and Hessian products | memory |
|---|---|---|---|
| `Direct` | the part of dE/dD that holds the run fixed | T gradients | flat in T |
| `ClosedForm` | the minimiser of `Regret` with the run held fixed, one piece | T gradients | flat in T |
| `Forward` | dE/dD between switches | T gradients, H T products | H times the model, flat in T |
| `Reverse` | dE/dD between switches | about 2T gradients, T products | sqrt(T) times the model |
| `Evolution` | dE/dD smoothed over a radius, in the mean | (2 pairs + 1) T gradients | flat in T |

T is the number of steps of a run, H the number of metrics and offsets.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from metamd.inner.derivatives import Recursion, TakenStep, dot, hessian_products, named, part, pushed, stays
from metamd.inner.objectives import Objective, Regret
from metamd.inner.run import Cost, MirrorDescent, Trajectory, gradient, train
from metamd.potentials.base import Active, Params, mirror_step
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task

__all__ = ["ClosedForm", "Direct", "Estimator", "Evolution", "Forward", "Hypergradient", "Reverse"]

SHARE = 2 / 3
"""Segments of `Reverse` per sqrt(T). A head takes less memory than the graph of a step, so segments may be long."""


@dataclass(frozen=True)
class Hypergradient:
    """The gradient of a meta-objective on one task."""

    grads: dict[str, Tensor]  # dE / d log_d, by key; zero if the run diverged
    offsets: Tensor  # dE / d offsets
    value: float  # E; infinite if the run diverged, so that no mean over tasks can hide it
    trajectory: Trajectory  # the run
    cost: Cost  # what it took, the run included

    @property
    def diverged(self) -> str:
        """Why the run was given up; empty if it was not."""
        return self.trajectory.diverged


Descend = Callable[[MaxDiagonal], MirrorDescent]
"""A run of the task at hand under a potential, not begun yet."""

Random = torch.Generator | None


class Estimator(ABC):
    """A way to differentiate a meta-objective through a run."""

    def __call__(
        self,
        task: Task,
        potential: MaxDiagonal,
        objective: Objective,
        *,
        lr: float = 1.0,
        exact: bool = True,
        steps: int | None = None,
        generator: Random = None,
    ) -> Hypergradient:
        """Run the task and differentiate.

        Args:
            task: the problem.
            potential: phi; bound to the task's tensors if it is not yet.
            objective: E.
            lr: eta.
            exact: False takes the paper's step, under which a run jumps where the active piece changes.
            steps: T; the task's own if not given.
            generator: where randomness comes from, for the estimators that are random.
        """
        descend = partial(MirrorDescent, task, lr=lr, exact=exact, steps=steps)
        return self.estimate(descend, potential, objective, generator)

    @abstractmethod
    def estimate(self, descend: Descend, potential: MaxDiagonal, objective: Objective, generator: Random) -> Hypergradient:
        """The same, from what makes the runs."""


@dataclass(frozen=True)
class Direct(Estimator):
    """dE/dD with g_t, w_t and theta_{T+1} held fixed: first derivatives only, at the cost of the run itself.

    Example:
        >>> Direct()
        Direct()
    """

    def estimate(self, descend: Descend, potential: MaxDiagonal, objective: Objective, generator: Random) -> Hypergradient:
        """Run the task and differentiate the record."""
        run = descend(potential).run(objective.reference)
        leaf = learnable(potential, run.start)
        if run.diverged:
            return given_up(run, leaf, run.cost)
        value = objective.value(run, leaf)
        grads, offsets, _ = differentiate(value, leaf, {})
        return Hypergradient(grads, offsets, float(value.detach()), run, run.cost)


@dataclass(frozen=True)
class ClosedForm(Estimator):
    """D_i = eta sqrt(E sum_t g_ti^2 / E delta_i^2), the minimiser of `Regret` with the runs held fixed [Khodak2019].

    Tied coordinates enter both sums together. Training the tasks and setting D, in turn, is a fixed-point solver; on a
    separable quadratic with curvatures a_i it converges to D_i = eta a_i, Newton's metric. Called like the other estimators
    it returns the direct gradient, which is zero at the minimiser.

    Example:
        >>> ClosedForm()
        ClosedForm()
    """

    def estimate(self, descend: Descend, potential: MaxDiagonal, objective: Objective, generator: Random) -> Hypergradient:
        """The direct gradient."""
        if not isinstance(objective, Regret):
            name = type(objective).__name__
            raise ValueError(f"ClosedForm minimises Regret, got {name}. Use Forward() or Reverse() for other objectives.")
        if potential.pieces > 1:
            raise ValueError(
                f"ClosedForm has a solution for one piece, got {potential.pieces}: with the active pieces held fixed, a "
                "piece that is never the largest has no best metric. Pass Diagonal(), or use Forward() or Reverse()."
            )
        return Direct().estimate(descend, potential, objective, generator)


@dataclass(frozen=True)
class Evolution(Estimator):
    """(1/pairs) sum_i (E(h + sigma v_i) - E(h - sigma v_i)) / (2 sigma) v_i, v_i normal: antithetic evolution strategies.

    Its mean is the gradient of E smoothed over a radius sigma in (log_d, offsets): it sees across switches, jumps and
    losses that cannot be differentiated twice. What the objective holds fixed is that of the unperturbed run. If a perturbed
    run diverges, so does the estimate, with that run's reason.

    Args:
        pairs: how many pairs of runs.
        sigma: the radius.

    Example:
        >>> Evolution(pairs=8, sigma=0.05)
        Evolution(pairs=8, sigma=0.05)
    """

    pairs: int = 8
    sigma: float = 0.01

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(f"pairs must be at least 1, got {self.pairs}. More of them lower the variance.")
        if not 0 < self.sigma < float("inf"):
            raise ValueError(f"sigma must be positive, got {self.sigma}. 0.01 changes every metric by about one per cent.")

    def estimate(self, descend: Descend, potential: MaxDiagonal, objective: Objective, generator: Random) -> Hypergradient:
        """Run the task 2 x pairs + 1 times."""
        if generator is None:
            raise ValueError("Evolution is random and needs a generator. Pass generator=torch.Generator().manual_seed(0).")
        centre = descend(potential).run(objective.reference)
        leaf, cost = learnable(potential, centre.start), centre.cost
        if centre.diverged:
            return given_up(centre, leaf, cost)
        held, found = objective.held(centre), torch.zeros(size(leaf), dtype=torch.float64)
        for _ in range(self.pairs):
            v = torch.randn(len(found), generator=generator, dtype=torch.float64)
            ends = []
            for sign in (1.0, -1.0):
                there, (logs, offsets) = learnable(leaf, centre.start), split(sign * self.sigma * v, leaf)
                with torch.no_grad():
                    torch._foreach_add_([*there.log_d.values(), there.offsets], [*logs.values(), offsets])
                run = descend(there).run(centre.reference)
                cost = cost + run.cost
                if run.diverged:
                    return given_up(run, leaf, cost)
                with torch.no_grad():
                    ends.append(float(held.value(run, there)))
            found += (ends[0] - ends[1]) / (2 * self.sigma * self.pairs) * v
        return Hypergradient(*split(found, leaf), float(objective.value(centre, leaf).detach()), centre, cost)


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

    def estimate(self, descend: Descend, potential: MaxDiagonal, objective: Objective, generator: Random) -> Hypergradient:
        """Run the task, once for every `tangents` directions."""
        leaf, cost, found = learnable(potential, descend(potential).start), Cost(), []
        count = size(leaf)
        if objective.looks_ahead:  # its constants come from the end of a run, which has to be made beforehand
            run = descend(leaf).run()
            if run.diverged:
                return given_up(run, leaf, run.cost)
            objective, cost = objective.held(run), run.cost
        for directions in torch.split(torch.eye(count, dtype=torch.float64), self.tangents or count):
            along, run, extra = _carry(descend(leaf), leaf, objective, directions)
            cost = cost + extra
            if run.diverged:
                return given_up(run, leaf, cost)
            found.append(along)
        return Hypergradient(*split(torch.cat(found), leaf), float(objective.value(run, leaf).detach()), run, cost)


def _carry(
    descent: MirrorDescent, leaf: MaxDiagonal, objective: Objective, directions: Tensor
) -> tuple[Tensor, Trajectory, Cost]:
    """Run a task and differentiate the objective in the given directions, (k, H): dE . v for each, the run, the cost.

    For a direction v in the space of (log_d, offsets), z_t = d theta_t . v obeys z_{t+1} = A_t z_t + B_t v. All tangents of
    one step go through one vmapped Hessian-vector product.
    """
    began, task = time.perf_counter(), descent.task
    recursion, (by_key, offsets), count = Recursion(descent, leaf, objective), split(directions, leaf), len(directions)
    logs = {n: slot.spread(by_key[slot.key].reshape(-1, leaf.pieces, *slot.stored)) for n, slot in leaf.slots.items()}
    metrics = {n: recursion.metrics[n] * v for n, v in logs.items()}  # dD = D d log D
    fixed = {"offsets": offsets, **named("metrics", metrics)}
    z = {n: x.new_zeros(count, *x.shape) for n, x in descent.start.items()}
    zw = torch.zeros_like(offsets)
    along = torch.zeros(count, dtype=torch.float64)
    # Not `inner.run.train`: the tangents go through every step with the run.
    while descent.going:
        before, weights = descent.params, descent.active.weights
        loss, grads, zg = hessian_products(task, before, task.batch(descent.taken), z)
        if descent.step(loss, grads):
            break
        taken = TakenStep(before, grads, loss, weights, descent.active.weights)
        piece = stays(weights, taken.after, exact=descent.exact)
        if piece is not None:
            along += recursion.push(taken, piece, logs, z, zg)
            zw = torch.zeros_like(zw)  # a vertex of the simplex is constant
            continue
        tangents = {"loss": dot(z, grads), "weights": zw, **named("params", z), **named("grads", zg), **fixed}
        after = pushed(*recursion.graph(taken), tangents)
        along += after["objective"]
        z, zw = part(after, "params"), after.get("weights", torch.zeros_like(zw))
    run = descent.finish(objective.reference)
    if not run.diverged:
        by_log, by_offset, by_end = by_final(objective, run, leaf)
        along += dot(by_key, by_log) + offsets @ by_offset + dot(z, by_end)
    return along, run, replace(run.cost, hvps=count * descent.taken, seconds=time.perf_counter() - began)


@dataclass(frozen=True)
class Reverse(Estimator):
    """The exact gradient for any number of metrics, from the last step to the first.

    The run is cut into segments and only the state at the head of each is kept; going back, a segment is run again with
    the graph of every gradient, but for the last, whose graphs are kept. With 2/3 sqrt(T) segments memory is
    O(sqrt(T)) and the cost about four gradients a step.

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

    def estimate(self, descend: Descend, potential: MaxDiagonal, objective: Objective, generator: Random) -> Hypergradient:
        """Run the task forwards, then go back over it."""
        began, descent = time.perf_counter(), descend(potential)
        leaf, steps = learnable(potential, descent.start), descent.steps
        segments = min(self.checkpoints or math.ceil(SHARE * math.sqrt(steps)), steps)
        cuts, heads = [i * steps // segments for i in range(segments)], []

        def watch(t: int, loss: Tensor, grads: Params) -> None:
            if t in cuts:
                heads.append((descent.params, descent.active))

        train(descent.task, descent, cuts[-1], watch=watch, until=None)
        tape = [] if descent.diverged else _segment(descent, range(cuts[-1], steps))
        run = descent.finish(objective.reference)
        if run.diverged:
            return given_up(run, leaf, run.cost)
        objective = objective.held(run) if objective.looks_ahead else objective
        adjoint = _Adjoint(Recursion(descent, leaf, objective), run)
        adjoint.back_over(tape)
        for first, end in reversed(list(pairwise(cuts))):
            adjoint.back_over(_segment(descent, range(first, end), heads.pop()))
        cost = Cost(run.cost.gradients + cuts[-1], steps - 1, time.perf_counter() - began)
        return Hypergradient(adjoint.log_d(), adjoint.offsets, float(objective.value(run, leaf).detach()), run, cost)


TapeEntry = tuple[TakenStep, dict[str, Tensor], list[GradientEdge]]
"""A step that was taken: its constants, g_t with its graph, and where that begins."""


def _segment(descent: MirrorDescent, steps: range, head: tuple[Params, Active] | None = None) -> list[TapeEntry]:
    """Steps with the graphs of their gradients: those that the run takes next, or again from the head of a segment."""
    tape: list[TapeEntry] = []
    params, active = head or (descent.params, descent.active)
    # Not `inner.run.train`: gradients keep their graphs here.
    for t in steps:
        loss, grads, edges = _gradient(descent, params, t)
        if head is None:
            if descent.step(loss, grads):
                break
            after = (descent.params, descent.active)
        else:
            with torch.no_grad():
                step = mirror_step(params, grads, descent.potential, descent.lr, active=active, exact=descent.exact)
            after = (step.params, step.active or active)
        # without theta_t where a step stays on one piece, because nothing needs it then
        alone = stays(active.weights, after[1].weights, exact=descent.exact) is not None
        constants = {n: g.detach() for n, g in grads.items()}
        taken = TakenStep({} if alone else params, constants, loss.detach(), active.weights, after[1].weights)
        tape.append((taken, grads, edges))
        params, active = after
    return tape


def _gradient(descent: MirrorDescent, params: Params, t: int) -> tuple[Tensor, dict[str, Tensor], list[GradientEdge]]:
    """The loss and its gradient with their graphs, and the edges at which these begin; the start needs no graph."""
    task = descent.task
    if not t:
        return *gradient(task, params, task.batch(t)), []
    # A graph keeps its leaves in memory; of a sum it keeps only what the gradient needs.
    zero = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        here = {n: x.detach() + zero.to(x) for n, x in params.items()}
    return *gradient(task, here, task.batch(t), graph=True), [get_gradient_edge(x) for x in here.values()]


class _Adjoint:
    """The cotangents of theta_t, w_t and E, and the gradient gathered so far."""

    def __init__(self, recursion: Recursion, run: Trajectory) -> None:
        self.recursion = recursion
        self._final, self.offsets, by_end = by_final(recursion.objective, run, recursion.potential)
        self._logs = {n: torch.zeros_like(d) for n, d in recursion.metrics.items()}
        numbers = {"weights": torch.zeros_like(self.offsets), "objective": torch.ones((), dtype=torch.float64)}
        self._after = {**numbers, **named("params", by_end)}

    def log_d(self) -> dict[str, Tensor]:
        """The gradient by the logarithms of the metrics, by key; tensors that share a key add up."""
        found = dict(self._final)
        for n, slot in self.recursion.potential.slots.items():
            found[slot.key] = found[slot.key] + slot.gather(self._logs[n])
        return found

    def back_over(self, tape: list[TapeEntry]) -> None:
        """Pull the cotangents back over the steps of a segment, which is consumed."""
        while tape:
            taken, grads, edges = tape.pop()
            params = part(self._after, "params")
            piece = stays(taken.before, taken.after, exact=self.recursion.exact)
            if piece is not None:
                by_loss, by_grads = self.recursion.pull(taken, piece, params, self._logs)
                by_weights = torch.zeros_like(self.offsets)  # a vertex of the simplex is constant
            else:
                leaves, outputs = self.recursion.graph(taken)
                given = [self._after[n] for n in outputs]
                found = torch.autograd.grad(
                    list(outputs.values()), list(leaves.values()), given, allow_unused=True, materialize_grads=True
                )
                by = dict(zip(leaves, found, strict=True))
                params, by_grads = part(by, "params"), part(by, "grads")
                by_loss, by_weights = float(by["loss"]), by["weights"]
                self.offsets = self.offsets + by["offsets"]
                for n, gathered in self._logs.items():
                    gathered.addcmul_(self.recursion.metrics[n], by[f"metrics/{n}"])
            if by_loss:
                params = {n: x.add(taken.grads[n], alpha=by_loss) for n, x in params.items()}
            live = [n for n, g in grads.items() if g.requires_grad]
            if live:  # else all gradients are constant
                given = [by_grads[n] for n in live]
                hessian = torch.autograd.grad([grads[n] for n in live], edges, given, allow_unused=True)
                params = {n: x if h is None else x + h for (n, x), h in zip(params.items(), hessian, strict=True)}
            self._after |= {"weights": by_weights, **named("params", params)}


# what estimators share


def learnable(potential: MaxDiagonal, start: Params) -> MaxDiagonal:
    """A copy of the potential, bound and centred, whose metrics are leaves to differentiate by."""
    fit = (potential if potential.slots else potential.bind(start)).centred_at(start)
    leaves = fit.with_metrics({k: v.detach().clone() for k, v in fit.log_d.items()}, fit.offsets.detach().clone())
    fit.table, fit.offsets = leaves.table, leaves.offsets
    return fit


def by_final(
    objective: Objective, run: Trajectory, potential: MaxDiagonal
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """The derivatives of the term at the end by the metrics' logarithms, by the offsets, and by theta_{T+1}."""
    ends = {n: x.detach().requires_grad_() for n, x in run.end.items()}
    return differentiate(objective.final(run, potential, ends), potential, ends)


def differentiate(
    value: Tensor, potential: MaxDiagonal, more: Params
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """The derivatives of a scalar by the metrics' logarithms, by the offsets, and by further tensors."""
    leaves = [*potential.log_d.values(), potential.offsets, *more.values()]
    if not value.requires_grad:
        found = tuple(torch.zeros_like(x) for x in leaves)
    else:
        found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    count = len(leaves) - len(more)
    return dict(zip(potential.log_d, found, strict=False)), found[count - 1], dict(zip(more, found[count:], strict=True))


def given_up(run: Trajectory, potential: MaxDiagonal, cost: Cost) -> Hypergradient:
    """What is returned for a run that diverged."""
    zeros = {k: torch.zeros_like(v.detach()) for k, v in potential.log_d.items()}
    return Hypergradient(zeros, torch.zeros_like(potential.offsets.detach()), math.inf, run, cost)


def size(potential: MaxDiagonal) -> int:
    """H, the number of metrics and of the offsets, which a single piece does not have."""
    return sum(v.numel() for v in potential.log_d.values()) + (potential.pieces if potential.pieces > 1 else 0)


def split(rows: Tensor, like: MaxDiagonal) -> tuple[dict[str, Tensor], Tensor]:
    """Vectors (..., H) as (..., N, ...) by key of log_d, in order, and (..., N) for the offsets."""
    lead, lengths = rows.shape[:-1], [v.numel() for v in like.log_d.values()]
    *parts, last = torch.split(rows, [*lengths, rows.shape[-1] - sum(lengths)], dim=-1)
    logs = {k: p.reshape(*lead, *v.shape).to(v.dtype) for (k, v), p in zip(like.log_d.items(), parts, strict=True)}
    offsets = last if like.pieces > 1 else last.new_zeros(*lead, like.pieces)
    return logs, offsets.to(like.offsets.dtype)

"""What every estimator of the hypergradient takes and returns, and the estimators that need no second derivatives."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metamd.files.learned import Moments
from metamd.inner.objectives import Objective, Regret
from metamd.inner.run import Cost, MirrorDescent, ReferenceRun, Trajectory, run_inner
from metamd.inner.sums import minimiser, moments_of
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class Hypergradient:
    """The gradient of a meta-objective on one task.

    Args:
        grads: dE / d log_d, by key; zero if the run diverged.
        offsets: dE / d offsets.
        value: E; infinite if the run diverged, so that no mean over tasks can hide it.
        trajectory: the run.
        cost: what it took, the run included.
    """

    grads: dict[str, Tensor]
    offsets: Tensor
    value: float
    trajectory: Trajectory
    cost: Cost

    @property
    def diverged(self) -> str:
        """Why the run was given up; empty if it was not."""
        return self.trajectory.diverged


@dataclass(frozen=True)
class Setting:
    """What an estimator runs: a task under a potential, with the step size, kind and number of steps."""

    task: Task
    potential: MaxDiagonal
    lr: float
    exact: bool
    steps: int | None

    def run(self, reference: ReferenceRun | Params | None = None, potential: MaxDiagonal | None = None) -> Trajectory:
        """A run, under another potential if one is given."""
        phi = potential or self.potential
        return run_inner(self.task, phi, lr=self.lr, exact=self.exact, steps=self.steps, reference=reference)

    def descent(self) -> MirrorDescent:
        """A run that has not begun."""
        return MirrorDescent(self.task, self.potential, lr=self.lr, exact=self.exact, steps=self.steps)


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
        generator: torch.Generator | None = None,
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
        return self.estimate(Setting(task, potential, lr, exact, steps), objective, generator)

    @abstractmethod
    def estimate(self, setting: Setting, objective: Objective, generator: torch.Generator | None) -> Hypergradient:
        """The same from a record."""


@dataclass(frozen=True)
class Direct(Estimator):
    """dE/dD with g_t, w_t and theta_{T+1} held fixed: first derivatives only, at the cost of the run itself.

    Example:
        >>> Direct()
        Direct()
    """

    def estimate(self, setting: Setting, objective: Objective, generator: torch.Generator | None) -> Hypergradient:
        """Run the task and differentiate the record."""
        run = setting.run(objective.reference)
        leaf = learnable(setting.potential, run.start)
        if run.diverged:
            return given_up(run, leaf, run.cost)
        value = objective.value(run, leaf)
        grads, offsets, _ = differentiate(value, leaf)
        return Hypergradient(grads, offsets, float(value.detach()), run, run.cost)


@dataclass(frozen=True)
class ClosedForm(Estimator):
    """D_i = eta sqrt(E sum_t g_ti^2 / E delta_i^2), the minimiser of `Regret` with the runs held fixed [Khodak2019].

    Tied coordinates enter both sums together. Training the tasks and setting D, in turn, is a fixed-point solver; on a
    separable quadratic with curvatures a_i it converges to D_i = eta a_i, Newton's metric. Called like the other estimators
    it returns the direct gradient, which is zero at the minimiser; `minimise` gives the minimiser for many runs.

    Example:
        >>> ClosedForm()
        ClosedForm()
    """

    def estimate(self, setting: Setting, objective: Objective, generator: torch.Generator | None) -> Hypergradient:
        """The direct gradient."""
        return Direct().estimate(setting, _regret(objective, setting.potential), generator)

    def minimise(
        self,
        runs: Sequence[Trajectory],
        potential: MaxDiagonal,
        objective: Objective,
        *,
        weights: Sequence[float] | None = None,
    ) -> dict[str, Tensor]:
        """The logarithms of the best metrics for these runs, by key; runs that diverged are left out.

        Where nothing moved or no gradient arrived the ratio says nothing, and the present metric is kept. A learned basis
        stays as it is.

        Args:
            runs: their records.
            potential: phi, bound, with the metrics to keep where the runs say nothing.
            objective: `Regret`.
            weights: of the runs; equal if not given.
        """
        regret = _regret(objective, potential)
        if weights is not None and len(weights) != len(runs):
            raise ValueError(f"there must be one weight for every run, got {len(weights)} for {len(runs)} runs.")
        if potential.basis.kind == "both":
            raise ValueError(
                "in a basis of both sides the best metric is not known by coordinate. Learn anew from Kronecker()."
            )
        shares = [1.0] * len(runs) if weights is None else list(weights)
        used = [(s, moments_of(r, potential, regret)) for s, r in zip(shares, runs, strict=True) if not r.diverged]
        if not used:
            raise ValueError(
                f"there is no run to learn from: all {len(runs)} diverged. Start from larger metrics or lower lr."
            )
        total = Moments.total([m for _, m in used], [s for s, _ in used])
        return minimiser(total, potential.log_d)


def _regret(objective: Objective, potential: MaxDiagonal) -> Regret:
    if not isinstance(objective, Regret):
        name = type(objective).__name__
        raise ValueError(f"ClosedForm minimises Regret, got {name}. Use Forward() or Reverse() for other objectives.")
    if potential.pieces > 1:
        raise ValueError(
            f"ClosedForm has a solution for one piece, got {potential.pieces}: with the active pieces held fixed, a piece "
            "that is never the largest has no best metric. Pass Diagonal(), or use Forward() or Reverse()."
        )
    return objective


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

    def estimate(self, setting: Setting, objective: Objective, generator: torch.Generator | None) -> Hypergradient:
        """Run the task 2 x pairs + 1 times."""
        if generator is None:
            raise ValueError("Evolution is random and needs a generator. Pass generator=torch.Generator().manual_seed(0).")
        centre = setting.run(objective.reference)
        leaf, cost = learnable(setting.potential, centre.start), centre.cost
        if centre.diverged:
            return given_up(centre, leaf, cost)
        held, found = objective.held(centre), torch.zeros(size(leaf), dtype=torch.float64)
        for _ in range(self.pairs):
            v = torch.randn(len(found), generator=generator, dtype=torch.float64)
            ends = []
            for sign in (1.0, -1.0):
                there = copy.deepcopy(leaf)
                logs, offsets = split(sign * self.sigma * v, leaf)
                with torch.no_grad():
                    for key, logarithm in there.log_d.items():
                        logarithm.add_(logs[key])
                    there.offsets.add_(offsets)
                run = setting.run(centre.reference, there)
                cost = cost + run.cost
                if run.diverged:
                    return given_up(run, leaf, cost)
                with torch.no_grad():
                    ends.append(float(held.value(run, there)))
            found += (ends[0] - ends[1]) / (2 * self.sigma * self.pairs) * v
        grads, offsets = split(found, leaf)
        return Hypergradient(grads, offsets, float(objective.value(centre, leaf).detach()), centre, cost)


# what estimators share


def learnable(potential: MaxDiagonal, start: Params) -> MaxDiagonal:
    """A copy of the potential, bound and centred, whose metrics are leaves to differentiate by."""
    fit = (potential if potential.slots else potential.bind(start)).centred_at(start)
    leaves = fit.with_metrics({k: v.detach().clone() for k, v in fit.log_d.items()}, fit.offsets.detach().clone())
    fit.table, fit.offsets = leaves.table, leaves.offsets
    return fit


def differentiate(value: Tensor, potential: MaxDiagonal, *more: Tensor) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    """The derivatives of a scalar by the metrics' logarithms, by the offsets, and by further tensors."""
    keys = list(potential.log_d)
    leaves = [*potential.log_d.values(), potential.offsets, *more]
    if not value.requires_grad:
        found = tuple(torch.zeros_like(x) for x in leaves)
    else:
        found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return dict(zip(keys, found, strict=False)), found[len(keys)], list(found[len(keys) + 1 :])


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

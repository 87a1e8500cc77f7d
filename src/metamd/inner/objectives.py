"""What meta-learning minimises: functions of a run and of the potential it was made with.

An objective is a sum over the steps of a run plus a term at its end,

    E = sum_t running(loss_t, g_t, D, w_t) + final(theta_{T+1}, D),

and every estimator of its gradient works from these two parts. `value` evaluates both from the record of a run, as a
function of the metrics alone: its gradient is the direct one, without the dependence of the run on the metrics.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from metamd.inner.run import Cost, OptimiserSteps, Trajectory, Watch, local_norm, train
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task

PRIOR = 1e-7
"""The strength of the prior of `Regret` if nothing else is asked, a safety net: no step size falls below 0.02 % of its
tensor's or of the model's. Networks gain from 1e-4; where curvatures differ by a thousand, that is ruinous."""


# comparators: what the regret of a run is measured against

Pseudo = Mapping[str, tuple[Tensor, Tensor]]
"""Squared displacements and squared gradients that nobody saw, by tensor, over coordinates that share a metric."""


@dataclass(frozen=True)
class End:
    """The end of the run itself, held fixed: free, but coordinates that move little starve round after round."""

    def of(self, run: Trajectory) -> Params:
        """theta_{T+1}, without its dependence on the metrics."""
        return run.end


@dataclass(frozen=True)
class Reference:
    """The end of a longer run of another optimiser, from the same start: it does not depend on D.

    The rate falls linearly to zero, so that the end is not noise.

    Args:
        optimiser: a torch optimiser; called as optimiser(params, lr=lr).
        lr: its first learning rate.
        factor: how many times longer than the run it is.
        chosen_on: hashes of the tasks that lr was chosen on, if it was.

    Example:
        >>> from metamd import Regret
        >>> Regret(comparator=Reference(torch.optim.Adam, lr=1e-3, factor=2))
        Regret(comparator=Reference(Adam, lr=0.001, factor=2), prior=0.0)
    """

    optimiser: Callable[..., Optimizer] = torch.optim.Adam
    lr: float = 1e-3
    factor: float = 2.0
    chosen_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.lr > 0 or not self.factor > 0:
            raise ValueError(f"Reference needs a positive lr and factor, got lr={self.lr}, factor={self.factor}.")

    def __repr__(self) -> str:
        name = getattr(self.optimiser, "__name__", repr(self.optimiser))
        return f"Reference({name}, lr={self.lr:g}, factor={self.factor:g})"

    def of(self, run: Trajectory) -> Params:
        """theta_* of the record."""
        if run.reference is None:
            raise ValueError("this run has no reference point. Run it with run_inner(..., reference=objective.reference).")
        return run.reference

    def run(self, task: Task, start: Params, steps: int, *, watch: Watch | None = None) -> tuple[dict[str, Tensor], Cost]:
        """Train the task from its start for `factor` times T steps; the batches beyond T are those that follow."""
        total = max(1, round(self.factor * steps))
        rule = OptimiserSteps.beginning(
            start, lambda named: self.optimiser([p for _, p in named], lr=self.lr), lambda t: 1 - t / total
        )
        done = train(task, rule, total, watch=watch, until=None)
        return rule.model(), done.cost


@dataclass(frozen=True)
class Fixed:
    """A known point.

    Args:
        point: u.
        pseudo: what a prior adds, as `Regret.pseudo` has it; that of the run at hand if not given.
    """

    point: Params
    pseudo: Pseudo | None = None

    def of(self, run: Trajectory) -> Params:
        """The point."""
        return self.point


# objectives


@dataclass(frozen=True)
class Point:
    """One step of a run as a differentiable function sees it."""

    loss: Tensor  # at theta_t
    energy: Callable[[], Tensor]  # g_t' D(w_t)^-1 g_t, evaluated when asked for
    lr: float  # eta
    steps: int  # T


class Objective:
    """A meta-objective; see the module's docstring for its two parts. An objective has to say at least one of them."""

    reference: ClassVar["Reference | None"] = None
    """What finds the comparator of a run, if it is not a part of the run."""

    looks_ahead: ClassVar[bool] = False
    """Whether what a step adds depends on constants that only the end of the run shows: it is then to be `held`."""

    def running(self, point: Point) -> Tensor:
        """What step t adds, linear in the energy; losses of many steps in one tensor give a tensor of what each adds."""
        return 0.0 * point.loss

    def final(self, run: Trajectory, potential: MaxDiagonal, end: Params) -> Tensor:
        """The term at the end, as a function of the metrics and of theta_{T+1}."""
        return torch.zeros((), dtype=torch.float64)

    def value(self, run: Trajectory, potential: MaxDiagonal) -> Tensor:
        """E of a run; its derivative by `log_d` and `offsets` is the direct gradient.

        Args:
            run: the record.
            potential: phi, bound; it is centred at the run's start here.
        """
        phi, held = potential.centred_at(run.start), self.held(run) if self.looks_ahead else self
        energy = partial(local_norm, run.shares, phi)
        return held.running(Point(run.losses, energy, run.lr, run.steps)).sum() + held.final(run, phi, run.end)

    def held(self, run: Trajectory) -> "Objective":
        """The same objective with all that its gradient does not see put to the value it has in this run."""
        return self


@dataclass(frozen=True)
class Regret(Objective):
    """The local-norm bound on the regret, with a comparator u that is held fixed.

    E = B(u||theta_1)/eta + eta/2 sum_t g_t' D(w_t)^-1 g_t  >=  sum_t <g_t, theta_t - u> for exact steps.

    Args:
        comparator: u: `End()`, `Reference(...)`, or `Fixed(point)` where the solution is known.
        prior: strength s of a prior: the squared step sizes 1/D^2 of the closed form are averaged, with the weights 1 and s,
            with those of their tensor and of the model. However little its coordinate moves, no step size is then below
            sqrt(s/2 / (1 + s)) times either. See `pseudo`.

    Where u lies on a kink of a mixture, B has no derivative by D, and the gradient is that of one of the active forms.
    """

    comparator: End | Reference | Fixed = field(default_factory=End)
    prior: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.prior < float("inf"):
            raise ValueError(f"prior must be finite and not negative, got {self.prior}. Pass prior=0.0 for none.")

    @property
    def reference(self) -> Reference | None:  # type: ignore[override]
        """The comparator's run."""
        return self.comparator if isinstance(self.comparator, Reference) else None

    def running(self, point: Point) -> Tensor:
        """eta/2 g'D(w)^-1 g."""
        return 0.5 * point.lr * point.energy()

    def final(self, run: Trajectory, potential: MaxDiagonal, end: Params) -> Tensor:
        """B(u||theta_1)/eta, and the prior."""
        u = {n: x.detach() for n, x in self.comparator.of(run).items()}
        bound = potential.divergence(u, run.start) / run.lr
        if not self.prior:
            return bound
        # sum_i mean_j [D_ji x_i / (2 eta) + eta y_i / (2 D_ji)] with the x and y of `pseudo`
        pseudo = [(x, y, potential.metric(n).double()) for n, (x, y) in self.pseudo(run, u).items()]
        terms = [(0.5 / run.lr * x * d + 0.5 * run.lr * y / d).sum() / potential.pieces for x, y, d in pseudo]
        return bound + torch.stack(terms).sum()

    def held(self, run: Trajectory) -> "Regret":
        """With the comparator of this run, and its prior."""
        u = self.comparator.of(run)
        return replace(self, comparator=Fixed(u, self.pseudo(run, u)))

    def pseudo(self, run: Trajectory, u: Params) -> Pseudo:
        """What the prior adds to every metric's squared displacement and squared gradients, by tensor.

        A coordinate with squared gradients y_i gets s y_i more. It also gets the displacement s y_i / D^2 that these would
        lead to. 1/D^2 = (q_n + q) / 2, q_n = sum delta^2 / sum g^2 over the tensor, and q the same over the model.
        """
        if isinstance(self.comparator, Fixed) and self.comparator.pseudo is not None:
            return self.comparator.pseudo
        felt = {n: float(v.sum(dtype=torch.float64)) for n, v in run.squares.items()}
        moved = {n: float((u[n] - run.start[n]).square().sum(dtype=torch.float64)) for n in felt}
        model = sum(moved.values()) / max(sum(felt.values()), sys.float_info.min)
        typical = {n: (moved[n] / max(felt[n], sys.float_info.min) + model) / 2 for n in felt}
        return {n: (self.prior * typical[n] * v.double(), self.prior * v.double()) for n, v in run.squares.items()}


@dataclass(frozen=True)
class FromLipschitz:
    """k = eta^2 T L^2 / 2, which the regret of mirror descent has in front of 1/lambda; L is the largest gradient seen."""

    def of(self, run: Trajectory) -> float:
        """k of one run."""
        return run.lr**2 * run.steps * run.largest_gradient**2 / 2


@dataclass(frozen=True)
class PaperBound(Objective):
    """The meta-objective as published [GaoMetaMD2022]: E = B(theta_{T+1}||theta_1) + k/lambda.

    The end of the run stands for the solution, and its dependence on the metrics counts (the paper's "indirect" gradient),
    so that not moving at all has the value k/lambda -> 0: it needs runs that converge, see docs/limits.md.

    Args:
        k: a number, or `FromLipschitz()`.
        strong_convexity: lambda is min |M| ("paper") or min M^2 = min D ("exact", in the Euclidean norm). If several entries
            are smallest, each gets an equal part of the gradient, as with torch.amin.
        smooth: s > 0 takes (mean_i |M_i|^(-1/s))^(-s) for min |M|: equal to it where all entries are, above it by a factor
            of at most n^s for n entries, and with a gradient for every entry. See `Normalised` for what that does.
    """

    k: float | FromLipschitz = 10.0
    strong_convexity: Literal["paper", "exact"] = "paper"
    smooth: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.k, FromLipschitz) and not self.k >= 0:
            raise ValueError(f"k must not be negative, got {self.k}. Pass k=FromLipschitz() for the value of the theory.")
        if self.strong_convexity not in ("paper", "exact"):
            raise ValueError(f'strong_convexity must be "paper" or "exact", got {self.strong_convexity!r}.')
        if not 0 <= self.smooth < math.inf:
            raise ValueError(f"smooth must be finite and not negative, got {self.smooth}. 0 takes the minimum itself.")

    def held(self, run: Trajectory) -> "PaperBound":
        """With the k of this run."""
        return replace(self, k=self._k(run))

    def _k(self, run: Trajectory) -> float:
        return self.k.of(run) if isinstance(self.k, FromLipschitz) else self.k

    def final(self, run: Trajectory, potential: MaxDiagonal, end: Params) -> Tensor:
        """The whole of it."""
        logs = torch.cat([v.double().reshape(-1) for v in potential.logarithms()])
        if self.smooth:  # log D = 2 log M
            smallest = -2 * self.smooth * (torch.logsumexp(-logs / (2 * self.smooth), 0) - math.log(len(logs)))
        else:  # one amin over everything: equal smallest entries share the gradient, also those of different tensors
            smallest = logs.amin()
        strength = (0.5 * smallest).exp() if self.strong_convexity == "paper" else smallest.exp()
        return potential.divergence(end, run.start) + self._k(run) / strength


@dataclass(frozen=True)
class TrainingLoss(Objective):
    """The mean loss over the run, what most learned optimisers minimise. It has no direct gradient."""

    def running(self, point: Point) -> Tensor:
        """loss / T."""
        return point.loss / point.steps


@dataclass(frozen=True)
class LogGap(Objective):
    """The mean over the run of asinh(gap_t / (tolerance gap_1)), gap_t the loss at step t above the lowest of the run.

    asinh(r) is log(2r) for large r, and r for small.

    `Regret` and `TrainingLoss` count losses, so that the first steps decide; here every digit of the gap counts alike, as
    it does for who waits until the gap is below a tolerance. A run that closes the gap by a constant factor in each of
    its first n steps adds about n log(1/tolerance) / 2, in T steps: E falls with the number of steps to the tolerance.

    The lowest loss and the first gap are held fixed (stop-gradient), so that not moving is no way out. It has no direct
    gradient and no closed form: for `Refine` and gradient estimators. With noisy losses the gap to the luckiest batch says
    little; take a tolerance above the noise.

    Args:
        tolerance: the share of the first gap below which digits do not count any more.
        constants: the lowest loss and the first gap, if they are not those of the run.

    Example:
        >>> LogGap(1e-6)
        LogGap(tolerance=1e-06)
    """

    looks_ahead: ClassVar[bool] = True
    tolerance: float = 1e-3
    constants: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie between 0 and 1, got {self.tolerance}. It is a share of the first gap.")

    def __repr__(self) -> str:
        return f"LogGap(tolerance={self.tolerance:g})"

    def held(self, run: Trajectory) -> "LogGap":
        """With the lowest loss and the first gap of this run."""
        if self.constants is not None:
            return self
        lowest = float(run.losses.min())
        return replace(self, constants=(lowest, max(float(run.losses[0]) - lowest, math.ulp(abs(lowest)) + 1e-300)))

    def running(self, point: Point) -> Tensor:
        """asinh(gap_t / (tolerance gap_1)) / T."""
        if self.constants is None:
            raise ValueError("LogGap needs the lowest loss of the run while it is running. Pass objective.held(run).")
        lowest, first = self.constants
        # not log(1 + ratio): other runs may go below the lowest loss of the one that is held
        return ((point.loss - lowest) / (self.tolerance * first)).asinh() / point.steps

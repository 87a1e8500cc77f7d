"""How an outer step moves the metrics, where they stay, when the steps stop, and the record of each."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from metamd.files.learned import Moments
from metamd.inner.closed_form import Iterate, learn_factors, minimiser
from metamd.inner.estimators import ClosedForm, Estimator, Reverse
from metamd.inner.objectives import PRIOR, Objective, PaperBound, Regret
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.tying import Shape

TensorSums = Mapping[str, Tensor]
"""Tensors by name, summed over tasks."""


@dataclass(frozen=True)
class OuterUpdate:
    """What an outer step led to."""

    iterate: Iterate  # the new metrics
    carried: dict[str, Tensor] = field(default_factory=dict)  # what the next update needs to know, by name
    change: float | None = None  # relative fall of the objective on the very runs of this step, if that is known


class Outer(ABC):
    """A rule for the outer step."""

    retreats = True
    """Whether metrics under which some task diverges are taken back half way; if all diverge, they always are."""

    @abstractmethod
    def update(self, now: Iterate, sums: TensorSums, carried: TensorSums, factor: float) -> OuterUpdate:
        """The metrics of the next outer step.

        Sums are over the tasks that did not diverge, their number under "tasks". `carried` comes from the update before.
        The factor says how much smaller the step shall be: 1 unless tasks have diverged.
        """


@dataclass(frozen=True)
class TrustRegion(Outer):
    """log D moves to the minimiser of the regret of this step's runs, by at most `radius` in every coordinate.

    Args:
        radius: in log D; halved whenever a task diverges.
        memory: the share with which the runs of the steps before count again, less where the metrics have changed since;
            0 learns from the last runs alone.
    """

    radius: float = math.log(10.0)
    memory: float = 0.9

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise ValueError(f"radius must be positive, got {self.radius}. It bounds the change of log D in an outer step.")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory must lie in [0, 1), got {self.memory}. 0 learns from the last runs alone.")

    def update(self, now: Iterate, sums: TensorSums, carried: TensorSums, factor: float) -> OuterUpdate:
        """To the closed form's minimiser, or as far as the region reaches."""
        kept = {n: v + carried[n] if n in carried else v for n, v in sums.items() if n != "tasks"}
        moments, half = (Moments(*({n[2:]: v for n, v in kept.items() if n[0] == s} for s in pair)) for pair in ("xy", "uv"))
        reach = factor * self.radius
        turned = learn_factors(now, moments, reach, half)
        best = minimiser(moments, {k: v for k, v in now.log_d.items() if k not in turned.log_d})
        log_d = {k: v + (best[k] - v).clamp(-reach, reach) for k, v in now.log_d.items() if k in best}
        before, after = _regret_bound(now.log_d, moments) + turned.before, _regret_bound(log_d, moments) + turned.after
        change = (before - after) / before if before > 0 else 0.0
        # What runs with another metric say about a coordinate is stale: all of it once the metric has doubled or halved.
        fresh = {k: 1 - (now.log_d[k] - v).abs()[0].double() / math.log(2.0) for k, v in log_d.items()}
        fresh |= {k: torch.tensor(1 - v / math.log(2.0), dtype=torch.float64) for k, v in turned.changes.items()}
        carried = {n: v * self.memory * fresh[n[2:]].clamp_min(0) for n, v in kept.items()} if self.memory else {}
        return OuterUpdate(now.moved(log_d | turned.log_d, basis=turned.basis), carried, change)


@dataclass(frozen=True)
class Adam(Outer):
    """Adam on log D and on the offsets: no metric can turn negative, and all move at the same pace.

    Args:
        lr: the change of log D in an outer step, roughly.
        betas: of the averages of gradients and of their squares.
    """

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr of the outer optimiser must be positive, got {self.lr}. 0.1 changes D by a tenth.")

    def update(self, now: Iterate, sums: TensorSums, carried: TensorSums, factor: float) -> OuterUpdate:
        """One step of Adam along the mean gradient of the tasks."""
        count = carried.get("count", torch.zeros((), dtype=torch.float64)) + 1
        kept, moved = {"count": count}, {}
        for name, x in {**{f"log_d/{k}": v for k, v in now.log_d.items()}, "offsets": now.offsets}.items():
            g = sums[f"gradient/{name}"] / sums["tasks"]
            m = torch.lerp(g, carried.get(f"m/{name}", torch.zeros_like(g)), self.betas[0])
            v = torch.lerp(g.square(), carried.get(f"v/{name}", torch.zeros_like(g)), self.betas[1])
            kept |= {f"m/{name}": m, f"v/{name}": v}
            scale = (v / (1 - self.betas[1] ** count)).sqrt() + 1e-12
            moved[name] = x - (factor * self.lr * m / (1 - self.betas[0] ** count) / scale).to(x.dtype)
        return OuterUpdate(now.moved({k: moved[f"log_d/{k}"] for k in now.log_d}, moved["offsets"]), kept)


@dataclass(frozen=True)
class GradientDescent(Outer):
    """M <- M - rho/n sum_i dE_i/dM with D = M^2: Algorithm 1 of the paper [GaoMetaMD2022].

    An entry that crosses zero counts by its absolute value: only its square matters. Offsets stay as they are. Where every
    task diverges, the algorithm as published has no gradient left: M goes half way back, and the next steps are smaller.

    Args:
        rho: the outer learning rate; None takes pace x M^2 / E, with the mean of M^2 at the first outer step and the largest
            objective E of the steps so far. An entry that all of E depends on has dE/dM = 2E/M: whatever the units of the
            parameters, the first step changes no entry by much more than twice the pace.
        pace: see rho.
    """

    rho: float | None = None
    pace: float = 0.05
    retreats = False

    def __post_init__(self) -> None:
        if self.rho is not None and not self.rho > 0:
            raise ValueError(f"rho must be positive, got {self.rho}. It is the outer learning rate of M; None scales it.")
        if not self.pace > 0:
            raise ValueError(f"pace must be positive, got {self.pace}. 0.05 changes M by a few per cent in an outer step.")

    def update(self, now: Iterate, sums: TensorSums, carried: TensorSums, factor: float) -> OuterUpdate:
        """One plain gradient step on M."""
        rho, kept, log_d = self.rho, dict[str, Tensor](), dict[str, Tensor]()
        if rho is None:
            value = (sums["value"] / sums["tasks"]).abs().clamp_min(1e-300)
            squares = torch.cat([v.double().exp().reshape(-1) for v in now.log_d.values()]).mean()
            kept["squares"] = carried.get("squares", squares)  # of the first outer step
            kept["value"] = torch.maximum(carried.get("value", value), value)
            rho = self.pace * float(kept["squares"] / kept["value"])
        for k, v in now.log_d.items():
            m = (0.5 * v.double()).exp()
            # dE/dM = dE/dlog D dlog D/dM = 2/M dE/dlog D
            m = m - factor * rho * 2 / m * sums[f"gradient/log_d/{k}"] / sums["tasks"]
            log_d[k] = (2 * m.abs().clamp_min(1e-18).log()).to(v.dtype)
        return OuterUpdate(now.moved(log_d), kept)


@dataclass(frozen=True)
class Normalised(Outer):
    """log M <- log M - pace g / mean |g| with g = sum_i dE_i/dlog M, each coordinate clipped: Algorithm 1 made stable.

    The plain rule explodes where gradients of coordinates differ by orders of magnitude. Here the mean move of an outer step
    is known beforehand, and no coordinate leaves a box of half-width `clip` x `pace`: a trust region in log M. Where a task
    diverges that finished before, M goes half way back and the next steps are half as long. A coordinate without any
    gradient, as all of a piece that is never active, stays. Offsets stay.

    Such steps do not descend on a minimum of many entries, as lambda of `PaperBound` is: it gives its gradient to one entry
    at a time, which the box cuts. `PaperBound(smooth=0.1)` is descended on. It then leads to where nothing moves, by a
    common factor of all metrics, unless that is held: `common=False`.

    Args:
        pace: the mean of |change of log M| over the coordinates that have a gradient, before clipping; 0.02 to 0.03 is
            stable for 150 outer steps.
        clip: the largest change of a coordinate, as a multiple of the pace.
        common: False leaves the geometric mean of every piece where it is, since a common factor is a learning rate.
    """

    pace: float = 0.025
    clip: float = 3.0
    common: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.pace < math.inf:
            raise ValueError(f"pace must be positive, got {self.pace}. 0.025 changes M by two or three per cent a step.")
        if not self.clip >= 1:
            raise ValueError(f"clip must be at least 1, got {self.clip}. It is a multiple of the mean change.")

    def update(self, now: Iterate, sums: TensorSums, carried: TensorSums, factor: float) -> OuterUpdate:
        """One step of a known length."""
        grads = {k: sums[f"gradient/log_d/{k}"] / sums["tasks"] for k in now.log_d}
        if not self.common:
            mean = _means(grads)
            grads = {k: g - _rows(mean, g) for k, g in grads.items()}
        sizes = torch.cat([g.abs().reshape(-1) for g in grads.values()])
        felt = sizes[sizes > 0]
        if not len(felt):
            return OuterUpdate(now)
        # log D = 2 log M; the direction is the same by log D as by log M
        moves = {k: -2 * factor * self.pace * (g / felt.mean()).clamp(-self.clip, self.clip) for k, g in grads.items()}
        if not self.common:  # clipping has moved the mean again
            mean = _means(moves)
            moves = {k: x - _rows(mean, x) for k, x in moves.items()}
        return OuterUpdate(now.moved({k: v + moves[k].to(v) for k, v in now.log_d.items()}))


def _means(tensors: Mapping[str, Tensor]) -> Tensor:
    """The mean of every piece over all keys, (N,)."""
    return torch.cat([x.reshape(len(x), -1) for x in tensors.values()], 1).mean(1)


def _rows(numbers: Tensor, like: Tensor) -> Tensor:
    """A number for every piece, to be subtracted from a tensor (N, ...)."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


def _regret_bound(log_d: Mapping[str, Tensor], moments: Moments) -> float:
    """sum_i (D_i x_i + y_i / D_i) / 2."""
    d = {k: v[0].double().exp() for k, v in log_d.items() if k in moments.x}
    return sum(0.5 * float((d[k] * moments.x[k] + moments.y[k] / d[k]).sum()) for k in d)


@dataclass(frozen=True)
class Stopping:
    """When a stage has converged: the objective changes by less than this, relatively, in so many outer steps in a row.

    For the closed form, the change is how much its minimiser gains on the very runs it was found from. For gradients, it is
    the change between the mean objective of the last steps and of as many before.

    Args:
        tolerance: the relative change; 0 never stops early.
        window: outer steps in a row.
    """

    tolerance: float = 1e-3
    window: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must lie in [0, 1), got {self.tolerance}. It is a relative change; 0 never stops.")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}. It counts outer steps.")


@dataclass(frozen=True)
class Refine:
    """Outer steps along the hypergradient, after the closed form.

    Args:
        steps: how many at most.
        estimator: of the hypergradient.
        outer: the rule of the outer step.
        objective: what is minimised and judged by, if not the objective of the training.
    """

    steps: int = 10
    estimator: Estimator = field(default_factory=Reverse)
    outer: Outer = field(default_factory=Adam)
    objective: Objective | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps of Refine must be at least 1, got {self.steps}. Pass refine=None for none.")
        if isinstance(self.estimator, ClosedForm) or isinstance(self.outer, TrustRegion):
            raise ValueError("Refine follows a gradient. Give it an estimator such as Reverse() and Adam() as outer rule.")


@dataclass(frozen=True)
class Unpublished:
    """What the paper leaves open, and how it is chosen on training tasks alone: see `metamd.learning.paper`.

    Args:
        shares: what k is tried at, as shares of the mean divergence between end and start where M = 1.
        paces: the mean moves of log M that are tried, rho of the stable loop.
        first: outer steps after which every pair of k and pace is judged; a third of all if not given. The best goes on for
            so many more at a time, while that lowers its loss.
        tasks: training tasks that judge; no outer step sees them.
        k: the one to take; None tries the shares.
    """

    shares: tuple[float, ...] = (0.125, 0.5, 2.0)
    paces: tuple[float, ...] = (0.025,)
    first: int | None = None
    tasks: int = 2
    k: float | None = None

    def __post_init__(self) -> None:
        for name in ("shares", "paces"):
            values = getattr(self, name)
            if not values or not all(0 < x < math.inf for x in values):
                raise ValueError(f"{name} must be positive numbers, at least one, got {values}.")
        if self.k is not None and not 0 <= self.k < math.inf:
            raise ValueError(f"k must be finite and not negative, got {self.k}.")
        for name in ("first", "tasks"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")


@dataclass(frozen=True)
class Method:
    """How the outer steps of a meta-training are made.

    Args:
        outer: the rule: `TrustRegion` for the closed form and `Adam` for gradients, if not given.
        exact: False takes the paper's inner step.
        keep: "best" judges the last metrics and the best of those before on fresh tasks; "last" does not.
        stopping: when it has converged.
        start: fresh metrics begin at "one", or at the largest "curvature" of the first tasks where they start, D =
            lambda_max, with which no first step is too long in any direction.
        spread: of the logarithms of M_j at the start, so that several pieces are not all the same.
        objective: what is minimised.
        estimator: how its gradient is found; `ClosedForm` goes to the minimum itself.
        outer_steps: how many at most.
        refine: outer steps along the hypergradient, afterwards. Several pieces need it, or an estimator of gradients.
        lr: eta, the rate of the inner runs. Only the metrics over it count, except for `PaperBound`, whose k is for M.
        unpublished: what k, pace, rate and number of outer steps of the paper's method are chosen from, if they are.
        max_norm: C: metrics are kept at ||m_j||_2 = sqrt(sum_i D_ji) <= C by projection, for a bound on new tasks that has
            its C from the start (docs/limits.md). Too small a C makes steps too long.
    """

    outer: Outer | None = None
    exact: bool = True
    keep: Literal["best", "last"] = "best"
    stopping: Stopping = field(default_factory=Stopping)
    start: Literal["one", "curvature"] = "one"
    spread: float = 0.1
    objective: Objective = field(default_factory=lambda: Regret(prior=PRIOR))
    estimator: Estimator = field(default_factory=ClosedForm)
    outer_steps: int = 10
    refine: Refine | None = None
    lr: float = 1.0
    unpublished: Unpublished | None = None
    max_norm: float | None = None

    def check(self) -> None:
        """Refuse what does not go together."""
        if self.outer_steps < 1:
            raise ValueError(f"outer_steps must be at least 1, got {self.outer_steps}. Nothing is learned without one.")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr of the inner runs must be positive, got {self.lr}.")
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ValueError(f"max_norm must be positive and finite, got {self.max_norm}. Leave it out for no bound.")
        if self.closed and not isinstance(self.objective, Regret):
            name = type(self.objective).__name__
            raise ValueError(f"ClosedForm minimises Regret, got {name}. Use estimator=Forward() or Reverse() for it.")
        if self.outer is not None and isinstance(self.outer, TrustRegion) != self.closed:
            raise ValueError(
                f"{type(self.estimator).__name__} does not go with the outer rule {type(self.outer).__name__}. "
                "TrustRegion is for ClosedForm; Adam, GradientDescent and Normalised are for gradients."
            )

        if self.unpublished is not None and not (
            isinstance(self.objective, PaperBound) and isinstance(self.outer, Normalised) and self.refine is None
        ):
            raise ValueError(
                "unpublished= chooses k of PaperBound and the pace of Normalised, without refinement. "
                "Pass **metamd.paper(), or leave it out."
            )

    @property
    def closed(self) -> bool:
        """Whether the first stage goes to the minimum itself."""
        return isinstance(self.estimator, ClosedForm)

    @property
    def rule(self) -> Outer:
        """The rule of the outer steps of the first stage."""
        return self.outer or (TrustRegion() if self.closed else Adam())

    @property
    def stages(self) -> tuple[tuple[str, int], ...]:
        """The stages, each with the largest number of its outer steps."""
        judge = [("judge", 1)] if self.keep == "best" else []
        return (("learn", self.outer_steps), *judge, *([("refine", self.refine.steps), *judge] if self.refine else []))


@dataclass(frozen=True)
class OuterStep:
    """The record of one outer step, as `meta_train(log=)` gets it."""

    step: int  # its number, from 1
    stage: str  # what it was for
    objective: float = math.nan  # mean over the tasks that finished
    bound: float = math.nan  # mean certified bound on the regret against the ends of the runs; NaN if steps were not exact
    loss: float = math.nan  # mean training loss over the runs
    change: float = math.nan  # the relative change of the objective that `Stopping` looks at
    unsettled: float = math.nan  # mean gradient at the ends relative to that at the starts, under `PaperBound`
    diverged: tuple[str, ...] = ()  # one sentence for each task that diverged
    gradients: int = 0  # gradient evaluations
    hvps: int = 0  # Hessian-vector products
    seconds: float = 0.0  # wall-clock time
    note: str = ""  # why a stage ended, if it did


def metric_norms(potential: MaxDiagonal, shapes: Mapping[str, Shape]) -> Tensor:
    """||m_j||_2 = sqrt(sum_i D_ji) over all coordinates i of the model, for every piece j; m_j = sqrt(D_j) is diag M_j.

    In a learned basis it is sqrt(trace D_j). The potential is bound to a model with tensors of these shapes.
    """
    total = torch.zeros(potential.pieces, dtype=torch.float64)
    for name, shape in zip(potential.slots, shapes.values(), strict=True):
        d = potential.metric(name).detach().double().reshape(potential.pieces, -1)
        total += d.sum(1).cpu() * (math.prod(shape) / max(d.shape[1], 1))
    return total.sqrt()


def project(iterate: Iterate, radius: float, potential: MaxDiagonal, shapes: Mapping[str, Shape]) -> Iterate:
    """The metrics with ||m_j||_2 <= radius for every piece that are nearest in the Euclidean distance between the m_j.

    The point of a ball that is nearest to one outside is on the same ray: all of log D_j falls by one number.
    """
    bound = iterate.apply(potential).bind({n: torch.zeros(s) for n, s in shapes.items()})
    fall = 2 * (metric_norms(bound, shapes) / radius).log().clamp_min(0)
    if not bool((fall > 0).any()):
        return iterate
    moved = {}
    for k, v in iterate.log_d.items():
        # Rounding must not leave the ball again: a few units in the last place further.
        slack = 4 * torch.finfo(v.dtype).eps * (1 + (float(v.abs().max()) if v.numel() else 0.0))
        down = torch.where(fall > 0, fall + slack, 0.0).to(v.device)
        moved[k] = (v.double() - down.reshape(-1, *[1] * (v.ndim - 1))).to(v.dtype)
    return iterate.moved(moved)

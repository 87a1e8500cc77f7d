"""How an outer step moves the metrics: to the closed form's minimiser, or along a gradient."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metamd.files.learned import Moments
from metamd.inner.closed_form import Iterate, learn_factors
from metamd.inner.moments import minimiser
from metamd.potentials.diagonal import MaxDiagonal

Sums = Mapping[str, Tensor]
"""Tensors by name, summed over tasks and processes."""


@dataclass(frozen=True)
class Update:
    """What an outer step led to.

    Args:
        iterate: the new metrics.
        carried: what the next update needs to know, by name.
        change: by how much the objective fell on the very runs of this step, relative to what it was, if that is known.
    """

    iterate: Iterate
    carried: dict[str, Tensor] = field(default_factory=dict)
    change: float | None = None


class Outer(ABC):
    """A rule for the outer step."""

    retreats = True
    """Whether metrics under which some task diverges are taken back half way; if all diverge, they always are."""

    @abstractmethod
    def update(self, now: Iterate, potential: MaxDiagonal, sums: Sums, carried: Sums, factor: float) -> Update:
        """The metrics of the next outer step.

        Args:
            now: the metrics of this one.
            potential: the same, as a potential.
            sums: over the tasks that did not diverge, with their number under "tasks".
            carried: from the update before.
            factor: how much smaller the step shall be, 1 unless tasks have diverged.
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

    def update(self, now: Iterate, potential: MaxDiagonal, sums: Sums, carried: Sums, factor: float) -> Update:
        """To the closed form's minimiser, or as far as the region reaches."""
        kept = {n: v + carried[n] if n in carried else v for n, v in sums.items() if n != "tasks"}
        moments, half = (Moments(*({n[2:]: v for n, v in kept.items() if n[0] == s} for s in pair)) for pair in ("xy", "uv"))
        reach = factor * self.radius
        turned = learn_factors(now, moments, reach, half)
        best = minimiser(moments, {k: v for k, v in potential.log_d.items() if k not in turned.log_d})
        log_d = {k: v + (best[k] - v).clamp(-reach, reach) for k, v in now.log_d.items() if k in best}
        before, after = _bound(now.log_d, moments) + turned.before, _bound(log_d, moments) + turned.after
        change = (before - after) / before if before > 0 else 0.0
        # What runs with another metric say about a coordinate is stale: all of it once the metric has doubled or halved.
        fresh = {k: 1 - (now.log_d[k] - v).abs()[0].double() / math.log(2.0) for k, v in log_d.items()}
        fresh |= {k: torch.tensor(1 - v / math.log(2.0), dtype=torch.float64) for k, v in turned.changes.items()}
        carried = {n: v * self.memory * fresh[n[2:]].clamp_min(0) for n, v in kept.items()} if self.memory else {}
        ordered = {k: turned.log_d[k] if k in turned.log_d else log_d[k] for k in now.log_d}
        return Update(now.moved(ordered, basis=turned.basis), carried, change)


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

    def update(self, now: Iterate, potential: MaxDiagonal, sums: Sums, carried: Sums, factor: float) -> Update:
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
        return Update(now.moved({k: moved[f"log_d/{k}"] for k in now.log_d}, moved["offsets"]), kept)


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

    def update(self, now: Iterate, potential: MaxDiagonal, sums: Sums, carried: Sums, factor: float) -> Update:
        """One plain gradient step on M."""
        kept = {} if self.rho is not None else _largest(now, sums, carried)
        rho = self.rho if self.rho is not None else self.pace * float(kept["squares"] / kept["value"])
        log_d = {}
        for k, v in now.log_d.items():
            m = (0.5 * v.double()).exp()
            # dE/dM = dE/dlog D dlog D/dM = 2/M dE/dlog D
            m = m - factor * rho * 2 / m * sums[f"gradient/log_d/{k}"] / sums["tasks"]
            log_d[k] = (2 * m.abs().clamp_min(1e-18).log()).to(v.dtype)
        return Update(now.moved(log_d), kept)


def _largest(now: Iterate, sums: Sums, carried: Sums) -> dict[str, Tensor]:
    """The mean of M^2 at the first outer step, and the largest objective so far."""
    value = (sums["value"] / sums["tasks"]).abs().clamp_min(1e-300)
    if "value" in carried:
        return {"squares": carried["squares"], "value": torch.maximum(carried["value"], value)}
    return {"squares": torch.cat([v.double().exp().reshape(-1) for v in now.log_d.values()]).mean(), "value": value}


def _bound(log_d: Mapping[str, Tensor], moments: Moments) -> float:
    """sum_i (D_i x_i + y_i / D_i) / 2."""
    d = {k: v[0].double().exp() for k, v in log_d.items() if k in moments.x}
    return sum(0.5 * float((d[k] * moments.x[k] + moments.y[k] / d[k]).sum()) for k in d)

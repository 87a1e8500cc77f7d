"""Training runs of a geometry under a usage, and what they say about online scales and schedules.

A schedule is learned from the energies |g_t|^2 of runs: it minimises a bound on the last iterate [Defazio2023]. For convex
l, any w_0 .. w_T > 0 and rates eta_t = w_t (w_{t+1} + ... + w_T) / (w_0 + ... + w_T), mirror descent has

    l(theta_T) - l(u)  <=  (|u - theta_0|^2_D + sum_t w_t^2 |g_t|^2_{D^-1}) / (2 sum_t w_t),

which w_t ~ 1/|g_t|^2 minimises: equal energies give the linear decay, gradients that shrink give a warm-up. The energies
are held fixed, as the closed form of a metric holds the gradients. But where a run fits its data they fall by hundreds of
times *because* it gets on, and the warm-up that follows from that would stop it from getting on. So the weights are taken by
tenth of the run, smoothed by medians, and raised to the power at which the largest is `SPREAD` times the smallest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from metamd.files.learned import LearnedOptimiser
from metamd.files.usage import Usage
from metamd.inner.run import all_finite, train
from metamd.learning.parts import Parts
from metamd.optimiser.averaging import tail_share
from metamd.optimiser.guard import energy
from metamd.potentials.base import Active, Move, Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import Array
from metamd.potentials.online import Online, State
from metamd.tasks.base import Task

LOOKS = 100
"""How often in a run a tail average is compared with the iterate, about."""

PHASES = 10
"""Parts of a run; a learned schedule has a number at each of their ends."""

SPREAD = 2.25
"""How many times the smallest weight of a schedule the largest may be; 1 gives the linear decay."""


@dataclass(frozen=True)
class Tally:
    """What a run with an online metric says about the scale of every key: E = (s x + y/s) / 2."""

    x: dict[str, float]  # |u - theta_1|^2 in the mean metric (its last, for sums)
    y: dict[str, float]  # sum_t r_t^2 c_t' a_t^-1 c_t, r_t the schedule


@dataclass(frozen=True)
class Outcome:
    """A training run."""

    loss: float  # the mean over its steps, of a tail average where the usage has one; infinite if it diverged
    end: dict[str, Tensor]  # the last parameters, or their tail average
    tally: Tally | None = None  # of an online metric, against a comparator
    energies: tuple[float, ...] = ()  # |g_t|^2 in the dual norm of every step's metric, if asked for


def run_usage(
    task: Task,
    potential: MaxDiagonal,
    usage: Usage,
    *,
    online: Online | None = None,
    comparator: Params | None = None,
    measure: bool = False,
) -> Outcome:
    """Train a task with a geometry, bound to its tensors, as `MetaMD` does; `comparator` is u, to tally against."""
    start = {n: x.detach().clone() for n, x in task.init().items()}
    rule = _UsageSteps(potential, usage, start, task.steps, online, measure or comparator is not None)
    apart = max(1, task.steps // LOOKS)
    looks: list[float] = []

    @torch.no_grad()
    def look(t: int, loss: Tensor, grads: Params) -> None:
        if rule.tail and t % apart == apart // 2:
            looks.append(float(task.loss(rule.x, task.batch(t))) - float(loss))

    done = train(task, rule, task.steps, watch=look)
    if done.diverged:
        return Outcome(math.inf, rule.x)
    tally = None if comparator is None else rule.tally(start, comparator)
    # of a tail average what it is better or worse than the iterates on the same batches, which are seen in every step
    mean = sum(done.losses) / task.steps + (sum(looks) / len(looks) if rule.tail else 0.0)
    finite = all_finite(rule.x)
    return Outcome(mean if finite else math.inf, rule.x, tally, tuple(rule.energies))


class _UsageSteps:
    """Steps with a bound potential as a usage says: x is judged, z the iterate behind its average.

    If they are measured, they keep the energy of every step, and what a tally of an online metric is made of.
    """

    def __init__(
        self, potential: MaxDiagonal, usage: Usage, start: Params, total: int, online: Online | None, measured: bool
    ) -> None:
        self.x, self.z = ({n: v.clone() for n, v in start.items()} for _ in range(2))
        centred = potential.centred_at(start)
        self.phi = centred.fixed({n: centred.metric(n).detach() for n in start})
        self.usage, self.total, self.tail, self.taken = usage, total, usage.averaging == "tail", 0
        self.online, self.measured = online, measured
        if online is not None and online.rule == "polar" and measured:
            # what is told of a polar step is told where its direction is found: in every one, for this
            self.online = replace(online, refresh=0)
        self.active: Active | None = None
        self.states: dict[str, State] = {n: {} for n in start}
        self.energies: list[float] = []
        self.metrics: dict[str, Tensor] = {}
        self.y: dict[str, float] = {}

    @property
    def params(self) -> Params:
        """A tail average is taken of iterates that know nothing of it."""
        return self.z if self.tail else self.x

    @torch.no_grad()
    def step(self, loss: Tensor, grads: Params) -> str:
        """One step of all tensors."""
        usage, share = self.usage, self.usage.share(self.taken, self.total)
        lr = usage.lr * share / (1 - usage.momentum)
        moves = {n: Move(g, lr) for n, g in grads.items()}
        if usage.metric == "online" and self.online is not None:
            self.energies += [0.0] * self.measured
            for n, move in moves.items():
                watch = partial(self._add, self.online, n, share) if self.measured else None
                self.online.advance(self.phi, n, self.z[n], move, self.states[n], watch)
        else:
            self.energies += [energy(self.phi, self.active, grads)] if self.measured else []
            self.active = self.phi.step(self.z, moves, active=self.active, into=self.z).active
        self.taken += 1
        for n, x in self.x.items():
            x.lerp_(self.z[n], tail_share(self.taken) if self.tail else 1 - usage.momentum)
        return ""

    def _add(self, online: Online, name: str, share: float, energy: Tensor, metric: Tensor) -> None:
        """What a step of a tensor is told to, r_t being the share."""
        key = self.phi.slots[name].key
        self.y[key] = self.y.get(key, 0.0) + share**2 * float(energy)
        self.energies[-1] += online.step_size(key) * float(energy)
        if online.rule == "sum" or name not in self.metrics:
            self.metrics[name] = metric.clone()
        else:
            self.metrics[name].add_(metric)

    def tally(self, start: Params, comparator: Params) -> Tally | None:
        """Of the steps taken with an online metric."""
        if self.online is None:
            return None
        x: dict[str, float] = {}
        for name, metric in self.metrics.items():
            mean = metric if self.online.rule == "sum" else metric / self.total
            key = self.phi.slots[name].key
            x[key] = x.get(key, 0.0) + self.online.distance(self.phi, name, comparator[name] - start[name], mean)
        return Tally(x, self.y)


def tail_loss(task: Task, params: Params, batches: int = 10) -> float:
    """The mean loss of batches that follow the run."""
    with torch.no_grad():
        return sum(float(task.loss(params, task.batch(task.steps + i))) for i in range(batches)) / batches


# scales of an online metric


def learn_scale(
    learned: LearnedOptimiser,
    solved: Sequence[tuple[Task, Params]],
    online: Online,
    lr: float,
    parts: Parts,
    *,
    rounds: int = 2,
) -> Online:
    """The scale of every key that minimises the bound (s x + y/s) / 2 over training tasks: s = sqrt(y/x).

    It holds the mean metric of the run fixed, as the closed form holds the gradients. Each task comes with the end of a
    reference run. The first scale is such that steps are as long as those of that run, whose rate is `lr`.
    """
    task = solved[0][0]
    phi, params = learned.potential.bind(task.init()), task.init()
    usage = Usage("online", momentum=0.0 if online.rule == "polar" else 0.8, schedule="linear")
    unit = {phi.slots[name].key: _unit_step(phi, name, x, online, task.steps) for name, x in params.items()}
    found = replace(online, scale={key: step / lr for key, step in unit.items()})
    for _ in range(rounds):
        runs = parts.runs(partial(_tallied, phi, usage, found), solved)
        tallies = [tally for tally in runs if tally is not None]
        if not tallies:
            found = replace(found, scale={k: 2 * s for k, s in found.scale.items()})
            continue
        x, y = ({k: sum(getattr(t, side).get(k, 0.0) for t in tallies) for k in found.scale} for side in ("x", "y"))
        found = replace(found, scale={k: math.sqrt(y[k] / x[k]) if x[k] and y[k] else s for k, s in found.scale.items()})
    return found


def _tallied(phi: MaxDiagonal, usage: Usage, online: Online, task: Task, comparator: Params) -> Tally | None:
    run = run_usage(task, phi, usage, online=online, comparator=comparator)
    return run.tally if math.isfinite(run.loss) else None


def _unit_step(potential: MaxDiagonal, name: str, x: Tensor, online: Online, steps: int) -> float:
    """How far a number of this tensor moves in a step with s = 1, roughly."""
    if online.rule == "polar" and x.ndim > 1 and x.numel():
        longer = max(x.shape[0], x.numel() // x.shape[0])
        return float((1 / potential.metric(name)[0]).mean().detach() / longer) ** 0.5
    return 1 / math.sqrt(steps) if online.rule == "sum" else 1.0


# schedules


def learn_knots(runs: Sequence[Sequence[float]], *, phases: int = PHASES, spread: float = SPREAD) -> tuple[float, ...]:
    """The learned schedule as a few numbers, at equal distances over the run, between which it is linear.

    Each run is the energies of its steps. An infinite spread gives the bound's own minimiser.

    Example:
        >>> learn_knots([[3.0] * 40], phases=4)
        (1.0, 0.75, 0.5, 0.25, 0.0)
    """
    count = min(phases, *(len(run) for run in runs))
    means = np.mean([[part.mean() for part in np.array_split(np.asarray(run, dtype=np.float64), count)] for run in runs], 0)
    if not 0 < means.min() <= means.max() < math.inf:
        means = np.ones(count)
    logs = -_smooth(np.log(means))
    logs *= min(1.0, math.log(spread) / max(float(np.ptp(logs)), 1e-12))
    later = np.append(np.cumsum(np.exp(logs - logs.max())[::-1])[::-1], 0.0)
    places = np.arange(count + 1) - 0.5  # a phase has its weight in its middle; at the ends of the run it goes on as it did
    inner = np.interp(places, np.arange(count), logs)
    if count > 1:
        inner[0], inner[-1] = 1.5 * logs[0] - 0.5 * logs[1], 1.5 * logs[-1] - 0.5 * logs[-2]
    rates = np.exp(inner - logs.max()) * later
    return tuple(float(f"{rate:.12g}") for rate in rates / rates.max())


def _smooth(values: Array) -> Array:
    """Running medians of three, with Tukey's rule at the ends: the median of the value, its neighbour and the line to it."""
    if len(values) < 4:
        return values
    found = np.array(values)
    found[1:-1] = np.median([values[:-2], values[1:-1], values[2:]], axis=0)
    found[0] = np.median([values[0], found[1], 3 * found[1] - 2 * found[2]])
    found[-1] = np.median([values[-1], found[-2], 3 * found[-2] - 2 * found[-3]])
    return found

"""One training run of a task with a geometry and a usage, and what it says about scales and schedules."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metamd.files.usage import Usage
from metamd.inner.run import train as train_task
from metamd.optimiser.averaging import blend, rate_of_iterate, tail_share
from metamd.optimiser.guard import energy
from metamd.potentials.base import Active, Move, Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.online import Online, State, Watch
from metamd.tasks.base import Task

LOOKS = 100
"""How often in a run a tail average is compared with the iterate, about."""


@dataclass(frozen=True)
class Tally:
    """What a run with an online metric says about the scale of every key: E = (s x + y/s) / 2.

    Args:
        x: |u - theta_1|^2 in the mean metric (its last, for sums).
        y: sum_t r_t^2 c_t' a_t^-1 c_t, r_t the schedule.
    """

    x: dict[str, float]
    y: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """A training run.

    Args:
        loss: the mean over its steps, of a tail average where the usage has one; infinite if it diverged.
        end: the last parameters, or their tail average.
        tally: of an online metric, against a comparator.
        energies: |g_t|^2 in the dual norm of every step's metric, if asked for.
    """

    loss: float
    end: dict[str, Tensor]
    tally: Tally | None = None
    energies: tuple[float, ...] = ()


def train(
    task: Task,
    potential: MaxDiagonal,
    usage: Usage,
    *,
    online: Online | None = None,
    comparator: Params | None = None,
    steps: int | None = None,
    measure: bool = False,
) -> Outcome:
    """Train a task with a geometry as `MetaMD` does.

    Args:
        task: the problem.
        potential: bound to its tensors.
        usage: how.
        online: the rule and its scales, where the usage is online.
        comparator: u, to tally against.
        steps: T; the task's own if not given.
        measure: whether to keep the energies.
    """
    total = task.steps if steps is None else steps
    start = {n: x.detach().clone() for n, x in task.init().items()}
    rule = _UsageSteps(potential, usage, start, total)
    rule.online, rule.energies = online, [] if measure else None
    if online is not None and (measure or comparator is not None):
        # what is told of a polar step is told where its direction is found: in every one, for this
        rule.online = replace(online, refresh=0) if online.rule == "polar" else online
        rule.sums = _Sums(rule.phi, rule.online)
    apart = max(1, total // LOOKS)
    looks: list[float] = []

    @torch.no_grad()
    def look(t: int, loss: Tensor, grads: Params) -> None:
        if rule.tail and t % apart == apart // 2:
            looks.append(float(task.loss(rule.x, task.batch(t))) - float(loss))

    done = train_task(task, rule, total, watch=look)
    if done.diverged:
        return Outcome(math.inf, rule.x)
    tally = None if rule.sums is None or comparator is None else rule.sums.tally(start, comparator, rule.states, total)
    # of a tail average what it is better or worse than the iterates on the same batches, which are seen in every step
    mean = sum(done.losses) / total + (sum(looks) / len(looks) if rule.tail else 0.0)
    finite = all(bool(v.isfinite().all()) for v in rule.x.values())
    return Outcome(mean if finite else math.inf, rule.x, tally, tuple(rule.energies or ()))


class _UsageSteps:
    """Steps with a bound potential as a usage says: x is judged, z the iterate behind its average."""

    online: Online | None = None
    sums: "_Sums | None" = None
    energies: list[float] | None = None

    def __init__(self, potential: MaxDiagonal, usage: Usage, start: Params, total: int) -> None:
        self.x, self.z = ({n: v.clone() for n, v in start.items()} for _ in range(2))
        centred = potential.centred_at(start)
        self.phi = centred.fixed({n: centred.metric(n).detach() for n in start})
        self.usage, self.total, self.tail, self.taken = usage, total, usage.averaging == "tail", 0
        self.active: Active | None = None
        self.states: dict[str, State] = {n: {} for n in start}

    @property
    def params(self) -> Params:
        """A tail average is taken of iterates that know nothing of it."""
        return self.z if self.tail else self.x

    def model(self) -> dict[str, Tensor]:
        """The average."""
        return self.x

    @torch.no_grad()
    def step(self, loss: Tensor, grads: Params) -> str:
        """One step of all tensors."""
        usage, sums, share = self.usage, self.sums, self.usage.share(self.taken, self.total)
        lr = rate_of_iterate(usage.lr * share, usage.momentum)
        moves = {n: Move(g, lr) for n, g in grads.items()}
        if usage.metric == "online" and self.online is not None:
            for n, move in moves.items():
                watch = None if sums is None else sums.adding(n, share)
                self.online.advance(self.phi, n, self.z[n], move, self.states[n], watch)
            if self.energies is not None and sums is not None:
                self.energies.append(sums.take_energy())
        else:
            if self.energies is not None:
                self.energies.append(energy(self.phi, self.active, grads))
            self.active = self.phi.step(self.z, moves, active=self.active, into=self.z).active
        self.taken += 1
        for n, x in self.x.items():
            if self.tail:
                x.lerp_(self.z[n], tail_share(self.taken))
            else:
                blend(x, self.z[n], usage.momentum)
        return ""


class _Sums:
    """What a tally is made of, during a run."""

    def __init__(self, potential: MaxDiagonal, online: Online) -> None:
        self.potential, self.online = potential, online
        self.metrics: dict[str, Tensor] = {}
        self.y: dict[str, float] = {}
        self.energy = 0.0

    def take_energy(self) -> float:
        """That of the step just taken, over all tensors."""
        taken, self.energy = self.energy, 0.0
        return taken

    def adding(self, name: str, share: float) -> Watch:
        """What a step of a tensor is told to.

        Args:
            name: of the tensor.
            share: r_t.
        """
        key = self.potential.slots[name].key

        def add(energy: Tensor, metric: Tensor) -> None:
            self.y[key] = self.y.get(key, 0.0) + share**2 * float(energy)
            self.energy += self.online.step_size(key) * float(energy)
            if self.online.rule == "sum" or name not in self.metrics:
                self.metrics[name] = metric.clone()
            else:
                self.metrics[name].add_(metric)

        return add

    def tally(self, start: Params, comparator: Params, states: Mapping[str, State], steps: int) -> Tally:
        x: dict[str, float] = {}
        for name, metric in self.metrics.items():
            mean = metric if self.online.rule == "sum" else metric / steps
            key = self.potential.slots[name].key
            far = self.online.distance(self.potential, name, comparator[name] - start[name], mean)
            x[key] = x.get(key, 0.0) + far
        return Tally(x, self.y)

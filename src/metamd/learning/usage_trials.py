"""Trying usages of a learned geometry on training tasks: runs, their scores, and the way to better ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import torch

from metamd.files.store import Result
from metamd.files.usage import Average, Schedule, Usage
from metamd.learning.parts import Parts
from metamd.learning.schedule import refined
from metamd.learning.trial import train
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.online import Online
from metamd.tasks.base import Task, config_hash

JudgedOn = Literal["train", "validation"]

Watch = Callable[[Usage, Online | None, float], None]
"""Called with every usage tried, its online metric if it has one, and its score."""

NOTHING = 1e-12
"""Losses below are as good as this, so that there is a logarithm."""

LEFT = 1e-2
"""What may be left of the first loss at the end of a run: ratios of losses far below are chance."""


FIRST = 2
"""Tasks on which metrics and momenta are chosen first, which differ by more than the rest."""

FINALISTS = 2
"""Of metrics and momenta: which of two near ones is better turns with their factors."""


@dataclass(frozen=True)
class Losses:
    """Of one run: at its start, in the mean over it, and of batches that follow it. None for all if it diverged.

    Judged on the validation split: at its start, and twice that at its end, for it is not looked at in between.
    """

    first: float | None = None
    mean: float | None = None
    end: float | None = None


class Trials:
    """Training runs of a few tasks with one usage after another; none is run twice.

    Args:
        tasks: to decide on.
        potential: bound to their tensors.
        watch: called with every usage tried, its online metric and its score.
        parts: keeps every run.
        left: share of the first loss that is added to the last one. Where losses fall below zero, all are counted from the
            lowest of their task so far, and both have `LEFT` of the first one added.
        judged_on: the split whose losses count.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        potential: MaxDiagonal,
        watch: Watch | None,
        parts: Parts,
        left: float = LEFT,
        judged_on: JudgedOn = "train",
    ) -> None:
        self.tasks, self.potential, self.watch, self.parts, self.left = tasks, potential, watch, parts, left
        self.judged_on = judged_on
        self._known: dict[tuple[int, Usage], list[Losses]] = {}
        self._lowest = [0.0] * len(tasks)

    def score(self, usage: Usage, online: Online | None, tasks: int | None = None) -> float:
        """The geometric mean over tasks of the mean loss and of that at the end, with `left`; infinite if any run diverged.

        Args:
            usage: to try.
            online: its metric, if it has one.
            tasks: how many of the tasks; all if not given.
        """
        known = self._known.setdefault((id(online), usage), [])
        wanted = self.tasks[:tasks]
        if len(known) < len(wanted):
            known += [self._losses(number, usage, online) for number in range(len(known), len(wanted))]
            if self.watch is not None:
                self.watch(usage, online, self._geometric(known))
        return self._geometric(known[: len(wanted)])

    def _geometric(self, known: Sequence[Losses]) -> float:
        return math.exp(sum(self._logarithm(number, losses) for number, losses in enumerate(known)) / len(known))

    def _logarithm(self, number: int, losses: Losses) -> float:
        if losses.first is None or losses.mean is None or losses.end is None:
            return math.inf
        zero = self._lowest[number]
        first, mean, end = losses.first - zero, losses.mean - zero, losses.end - zero
        counted = (mean + LEFT * first, end + LEFT * first) if zero < 0 else (mean, end + self.left * first)
        return 0.5 * sum(math.log(max(x, NOTHING)) for x in counted)

    def _losses(self, number: int, usage: Usage, online: Online | None) -> Losses:
        about = {"task": number, "usage": usage.to_dict(), "online": None if online is None else online.to_dict()}
        run = partial(self._run, self.tasks[number], usage, online, about)
        found = self.parts.part(f"run-{config_hash(about)}", run)
        losses = Losses(found["first"], found["mean"], found["end"])
        self._lowest[number] = min([self._lowest[number], *(x for x in (losses.mean, losses.end) if x is not None)])
        return losses

    def _run(self, task: Task, usage: Usage, online: Online | None, about: Result) -> Result:
        run = train(task, self.potential, usage, online=online)
        found = Losses()
        if math.isfinite(run.loss):
            end, first = self._loss(task, run.end), self._loss(task, task.init())
            found = Losses(first, run.loss if self.judged_on == "train" else end, end) if math.isfinite(end) else found
        return {**about, **asdict(found)}

    def _loss(self, task: Task, params: Params) -> float:
        return tail_loss(task, params) if self.judged_on == "train" else task.evaluate(params, self.judged_on).loss

    def climb(self, usage: Usage, online: Online | None, factors: Sequence[float], tasks: int | None = None) -> Usage:
        """The same usage with the factor from which neither neighbour is better.

        Args:
            usage: where to begin.
            online: its metric, if it has one.
            factors: to choose from.
            tasks: how many of the tasks; all if not given.
        """
        ordered = sorted(factors)
        place = ordered.index(nearest(usage.factor, ordered))
        usage = replace(usage, factor=ordered[place])
        for way in (-1, 1):
            while 0 <= place + way < len(ordered):
                further = replace(usage, factor=ordered[place + way])
                if not self.score(further, online, tasks) < self.score(usage, online, tasks):
                    break
                usage, place = further, place + way
        return usage

    def scheduled(self, usage: Usage, schedule: Schedule, online: Online | None) -> Usage:
        """A usage with a schedule; a learned one is refined from runs with the linear one."""
        if schedule != "learned":
            return replace(usage, schedule=schedule, knots=())
        linear = replace(usage, schedule="linear", knots=())

        def measured() -> Result:
            runs = [train(task, self.potential, linear, online=online, measure=True) for task in self.tasks]
            return {"usage": refined(linear, [run.energies for run in runs if math.isfinite(run.loss)]).to_dict()}

        about = {"usage": linear.to_dict(), "online": None if online is None else online.to_dict()}
        return Usage(**self.parts.part(f"schedule-{config_hash(about)}", measured)["usage"])


def best_usage(
    trials: Trials,
    starts: Sequence[tuple[Online | None, Usage]],
    schedules: Sequence[Schedule],
    averages: Sequence[Average],
    factors: Sequence[float],
) -> tuple[Usage, Online | None]:
    """The best of the starts, each of the finalists with its own factor, with the schedule or average that is best for it.

    Args:
        trials: tries them.
        starts: online metrics, if any, each with a usage.
        schedules: to choose from, and so are the others.
        averages: the first is that of the starts.
        factors: see there.
    """
    first: Schedule = "linear" if "linear" in schedules else schedules[0]
    begun = [(o, replace(u, averaging="constant" if u.momentum else averages[0])) for o, u in starts]
    scheduled = [(o, trials.scheduled(u, first, o)) for o, u in begun]
    ranked = sorted(scheduled, key=lambda start: trials.score(start[1], start[0], FIRST))
    climbed = [(o, trials.climb(u, o, factors)) for o, u in ranked[:FINALISTS]]
    online, usage = min(climbed, key=lambda start: trials.score(start[1], start[0]))
    others = [trials.scheduled(usage, s, online) for s in schedules if s != first]
    others += [replace(usage, averaging=a) for a in averages[1:] if not usage.momentum]
    tried = [trials.climb(u, online, factors, FIRST) for u in others]
    for other in sorted(tried, key=lambda u: trials.score(u, online, FIRST))[:1]:
        usage = min(usage, trials.climb(other, online, factors), key=lambda u: trials.score(u, online))
    return usage, online


def first_usages(online: Online | None, momenta: Sequence[float], factors: Sequence[float]) -> list[Usage]:
    """What a metric is tried with first: the bound makes steps along averaged gradients too long, several times.

    Args:
        online: the metric; None for the learned one.
        momenta: to try; polar steps have none.
        factors: to choose from.
    """
    if online is not None and online.rule == "polar":
        return [Usage("online", factor=nearest(0.5 if online.signal else 0.35, factors))]
    return [Usage("learned" if online is None else "online", b, factor=nearest(1.0, factors)) for b in momenta]


def nearest(factor: float, factors: Sequence[float]) -> float:
    """The one of them whose ratio to the factor is nearest to one."""
    return min(factors, key=lambda f: abs(math.log(f / factor)))


def tail_loss(task: Task, params: Params, batches: int = 10) -> float:
    """The mean loss of batches that follow the run.

    Args:
        task: that was trained.
        params: where it has come to.
        batches: how many.
    """
    with torch.no_grad():
        return sum(float(task.loss(params, task.batch(task.steps + i))) for i in range(batches)) / batches

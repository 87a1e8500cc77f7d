"""Trying usages of a learned geometry on training tasks: runs, their scores, and the way to better ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from metamd.online import Online
from metamd.parts import Parts
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.records import Result
from metamd.refining import refined
from metamd.tasks.base import Task, config_hash
from metamd.trial import train
from metamd.usage import Schedule, Usage

Watch = Callable[[Usage, Online | None, float], None]
"""Called with every usage tried, its online metric if it has one, and its score."""

NOTHING = 1e-12
"""Losses below are as good as this, so that there is a logarithm."""

LEFT = 1e-2
"""What may be left of the first loss at the end of a run: ratios of losses far below are chance."""


class Trials:
    """Training runs of a few tasks with one usage after another; none is run twice.

    Args:
        tasks: to decide on.
        potential: bound to their tensors.
        watch: called with every usage tried, its online metric and its score.
        parts: keeps every run.
        left: share of the first loss that is added to the last one.
    """

    def __init__(
        self, tasks: Sequence[Task], potential: MaxDiagonal, watch: Watch | None, parts: Parts, left: float = LEFT
    ) -> None:
        self.tasks, self.potential, self.watch, self.parts, self.left = tasks, potential, watch, parts, left
        self._known: dict[tuple[int, Usage], list[float]] = {}

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
            known += [self._logarithm(number, usage, online) for number in range(len(known), len(wanted))]
            if self.watch is not None:
                self.watch(usage, online, _geometric(known))
        return _geometric(known[: len(wanted)])

    def _logarithm(self, number: int, usage: Usage, online: Online | None) -> float:
        about = {"task": number, "usage": usage.to_dict(), "online": None if online is None else online.to_dict()}
        found = self.parts.part(f"run-{config_hash(about)}", partial(self._run, self.tasks[number], usage, online, about))
        return math.inf if found["logarithm"] is None else float(found["logarithm"])

    def _run(self, task: Task, usage: Usage, online: Online | None, about: Result) -> Result:
        run = train(task, self.potential, usage, online=online)
        end = tail_loss(task, run.end) + self.left * tail_loss(task, task.init()) if math.isfinite(run.loss) else math.inf
        finite = math.isfinite(run.loss) and math.isfinite(end)
        return {**about, "logarithm": 0.5 * sum(math.log(max(x, NOTHING)) for x in (run.loss, end)) if finite else None}

    def climb(self, usage: Usage, online: Online | None, factors: Sequence[float]) -> Usage:
        """The same usage with the factor from which neither neighbour is better."""
        ordered = sorted(factors)
        place = ordered.index(nearest(usage.factor, ordered))
        usage = replace(usage, factor=ordered[place])
        for way in (-1, 1):
            while 0 <= place + way < len(ordered):
                further = replace(usage, factor=ordered[place + way])
                if not self.score(further, online) < self.score(usage, online):
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


def _geometric(logarithms: Sequence[float]) -> float:
    return math.exp(sum(logarithms) / len(logarithms))


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

"""One round of an outer step: every task is run with the present metrics, and the sums are brought together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metamd.inner.closed_form import Iterate
from metamd.inner.estimators import ClosedForm
from metamd.inner.run import Cost
from metamd.learning.rounds.ball import Ball
from metamd.learning.rounds.lessons import Attempt, Lecture, Lesson, draw
from metamd.learning.rounds.state import State
from metamd.learning.rounds.workers import Workers
from metamd.tasks.base import Task, TaskFamily, derive_seed

RAISES = 12
"""How often the metrics of the first outer step are multiplied by four to find where no task diverges."""


@dataclass(frozen=True)
class Round:
    """What all tasks of an outer step said.

    Args:
        now: the metrics they were run with.
        lessons: one per task.
        sums: over the tasks that finished.
        too_far: how many tasks diverged that finish under the metrics of the step before.
        cost: of all runs.
    """

    now: Iterate
    lessons: list[Lesson]
    sums: dict[str, Tensor]
    too_far: int
    cost: Cost

    @property
    def finished(self) -> list[Lesson]:
        """The tasks that did not diverge."""
        return [lesson for lesson in self.lessons if not lesson.diverged]

    @property
    def diverged(self) -> tuple[str, ...]:
        """A sentence for each of the others."""
        return tuple(f"task {i + 1}: {lesson.diverged}" for i, lesson in enumerate(self.lessons) if lesson.diverged)

    def mean(self, field: str) -> float:
        """The mean of a number over the tasks that finished."""
        values = [getattr(lesson, field) for lesson in self.finished]
        return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Class:
    """The tasks of one outer step, spread over the processes.

    Args:
        family: where they come from.
        seed: of the meta-training.
        purpose: what they are for; tasks for one purpose are never those of another.
        step: the outer step.
        count: n.
        workers: the processes.
    """

    family: TaskFamily
    seed: int
    purpose: str
    step: int
    count: int
    workers: Workers

    def tasks(self) -> dict[int, Task]:
        """Those of this process, by number."""
        mine = self.workers.mine(self.count)
        return {i: draw(self.family, self.seed, self.purpose, self.step, i) for i in mine}

    def generator(self, task: int) -> torch.Generator:
        """For an estimator that is random."""
        return torch.Generator().manual_seed(derive_seed(self.seed, "estimate", self.step, task))

    def total(self, parts: Mapping[int, Mapping[str, Tensor]], blank: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over the tasks of all processes; a task may have none."""
        sums = {n: v.clone() for n, v in blank.items()}
        for _, part in sorted(parts.items()):
            for n, v in part.items():
                sums[n] += v.detach().double().cpu().reshape(sums[n].shape)
        return self.workers.total(sums)


def hold(room: Class, lecture: Lecture, state: State, ball: Ball, *, retreats: bool) -> Round:
    """Run all tasks of an outer step, at a scale where they finish if this is the first.

    Args:
        room: the tasks.
        lecture: how they are run.
        state: with what metrics.
        ball: where metrics may be.
        retreats: whether to ask of tasks that diverge if the last step was to blame; if all do, it is asked in any case.
    """
    tasks, now, cost = room.tasks(), state.now, Cost()
    attempts: dict[int, Attempt] = {}
    if state.good is None:
        now, attempts, cost = _find_scale(room, tasks, lecture, now, ball)
    attempts |= lecture.learn({i: task for i, task in tasks.items() if i not in attempts}, now, room.generator)
    lessons = room.workers.gather({i: lesson for i, (lesson, _) in attempts.items()}, room.count)
    sums = room.total({i: sums for i, (_, sums) in attempts.items()}, lecture.blank(now))
    too_far = 0
    if state.good is not None and (retreats or all(lesson.diverged for lesson in lessons)):
        too_far, extra = _too_far(room, tasks, lecture, lessons, state.good)
        cost = cost + extra
    found = Round(now, lessons, sums, too_far, sum((lesson.cost for lesson in lessons), cost))
    if not found.finished and not too_far:
        kept = "" if ball.radius is None else f" with max_norm = {ball.radius:g}, which may be too small"
        raise ValueError(
            f"all {room.count} tasks of outer step {room.step} diverged{kept}, so that nothing can be learned. The first: "
            f"{lessons[0].diverged}"
        )
    return found


def _find_scale(
    room: Class, tasks: Mapping[int, Task], lecture: Lecture, start: Iterate, ball: Ball
) -> tuple[Iterate, dict[int, Attempt], Cost]:
    """The smallest power of four by which the metrics are multiplied so that every task finishes that can."""
    powers: dict[int, int | None] = dict.fromkeys(tasks)
    costs = dict.fromkeys(tasks, Cost())
    kept: dict[int, Attempt] = {}
    for power in range(RAISES + 1):
        left = {i: task for i, task in tasks.items() if powers[i] is None}
        trial = ball.project(start.shifted(power * math.log(4.0)))
        if isinstance(lecture.estimator, ClosedForm):
            attempts = lecture.learn(left, trial, room.generator)
            kept |= attempts
            answers = {i: (not lesson.diverged, lesson.cost) for i, (lesson, _) in attempts.items()}
        else:
            answers = {i: lecture.survives(task, trial) for i, task in left.items()}
        for i, (fine, cost) in answers.items():
            costs[i] = costs[i] + cost
            powers[i] = power if fine else None
    found = room.workers.gather({i: (powers[i], costs[i]) for i in tasks}, room.count)
    largest = max((power for power, _ in found if power is not None), default=0)
    # A run that was made at this very scale is not made again, nor that of a task which nothing helps; it is paid for.
    same = {i: (replace(lesson, cost=Cost()), sums) for i, (lesson, sums) in kept.items() if powers[i] in (largest, None)}
    return ball.project(start.shifted(largest * math.log(4.0))), same, sum((cost for _, cost in found), Cost())


def _too_far(
    room: Class, tasks: Mapping[int, Task], lecture: Lecture, lessons: list[Lesson], good: Iterate
) -> tuple[int, Cost]:
    """How many tasks diverged that finish under the last good metrics: with the others, the task itself is to blame."""
    answers = {i: lecture.survives(task, good) for i, task in tasks.items() if lessons[i].diverged}
    blank = {i: (False, Cost()) for i in tasks}
    found = room.workers.gather(blank | answers, room.count)
    return sum(fine for fine, _ in found), sum((cost for _, cost in found), Cost())

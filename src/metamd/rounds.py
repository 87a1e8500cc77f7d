"""One round of an outer step: every task is run with the present metrics, and the sums are brought together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metamd.hypergrad import ClosedForm
from metamd.inner import Cost
from metamd.lessons import Lecture, Lesson, draw
from metamd.outer import Iterate
from metamd.state import State
from metamd.tasks.base import Task, TaskFamily, derive_seed
from metamd.workers import Workers

RAISES = 12
"""How often the metrics of the first outer step are multiplied by four to find where no task diverges."""

Attempt = tuple[Lesson, dict[str, Tensor]]


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


def hold(room: Class, lecture: Lecture, state: State, *, retreats: bool) -> Round:
    """Run all tasks of an outer step, at a scale where they finish if this is the first.

    Args:
        room: the tasks.
        lecture: how they are run.
        state: with what metrics.
        retreats: whether to ask of tasks that diverge if the last step was to blame.
    """
    tasks, now, cost = room.tasks(), state.now, Cost()
    attempts: dict[int, Attempt] = {}
    if state.good is None:
        now, attempts, cost = _find_scale(room, tasks, lecture, now)
    for i, task in tasks.items():
        if i not in attempts:
            attempts[i] = lecture.learn(task, now, room.generator(i))
    lessons = room.workers.gather({i: lesson for i, (lesson, _) in attempts.items()}, room.count)
    sums = room.total({i: sums for i, (_, sums) in attempts.items()}, lecture.blank(now))
    too_far = 0
    if retreats and state.good is not None:
        too_far, extra = _too_far(room, tasks, lecture, lessons, state.good)
        cost = cost + extra
    found = Round(now, lessons, sums, too_far, sum((lesson.cost for lesson in lessons), cost))
    if not found.finished and not too_far:
        raise ValueError(
            f"all {room.count} tasks of outer step {room.step} diverged, so that nothing can be learned. The first: "
            f"{lessons[0].diverged}"
        )
    return found


def _find_scale(
    room: Class, tasks: Mapping[int, Task], lecture: Lecture, start: Iterate
) -> tuple[Iterate, dict[int, Attempt], Cost]:
    """The smallest power of four by which the metrics are multiplied so that every task finishes that can."""
    powers: dict[int, tuple[int | None, Cost]] = {}
    kept: dict[int, Attempt] = {}
    for i, task in tasks.items():
        cost, power = Cost(), None
        for raised in range(RAISES + 1):
            trial = start.shifted(raised * math.log(4.0))
            if isinstance(lecture.estimator, ClosedForm):
                kept[i] = lecture.learn(task, trial, room.generator(i))
                fine, extra = not kept[i][0].diverged, kept[i][0].cost
            else:
                fine, extra = lecture.survives(task, trial)
            cost = cost + extra
            if fine:
                power = raised
                break
        powers[i] = (power, cost)
    found = room.workers.gather(powers, room.count)
    largest = max((p for p, _ in found if p is not None), default=0)
    # A run that was made at this very scale already is not made again, nor that of a task which nothing helps.
    same = {i: a for i, a in kept.items() if found[i][0] in (largest, None)}
    spent = sum((c for _, c in found), Cost())
    for i, row in enumerate(found):  # the cost of the lessons kept is counted with them
        if isinstance(lecture.estimator, ClosedForm) and row[0] in (largest, None) and i in same:
            same[i] = (replace(same[i][0], cost=Cost()), same[i][1])
    return start.shifted(largest * math.log(4.0)), same, spent


def _too_far(
    room: Class, tasks: Mapping[int, Task], lecture: Lecture, lessons: list[Lesson], good: Iterate
) -> tuple[int, Cost]:
    """How many tasks diverged that finish under the last good metrics: with the others, the task itself is to blame."""
    answers = {i: lecture.survives(task, good) for i, task in tasks.items() if lessons[i].diverged}
    blank = {i: (False, Cost()) for i in tasks}
    found = room.workers.gather(blank | answers, room.count)
    return sum(fine for fine, _ in found), sum((cost for _, cost in found), Cost())

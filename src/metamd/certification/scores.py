"""The score of one run of a learned optimiser on a held-out task."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from metamd.certification.training_tasks import measure
from metamd.files.learned import LearnedOptimiser
from metamd.inner.comparators import Reference
from metamd.inner.run import MirrorDescent, train
from metamd.tasks.base import SolvedTask, Task

LOOKS = 50
"""How often a run is looked at, at equal intervals."""


@dataclass(frozen=True)
class Score:
    """What one held-out run came to. What failed or did not arrive is infinite; what is not known is None.

    Args:
        steps: to the target, see `steps_to`.
        loss: after the last step, on a fixed part of the training split.
        distance: sqrt(2 B(theta_*||theta_1)), which is ||theta_* - theta_1||_D for one piece.
        regret: sum_t <g_t, theta_t - theta_*>.
        largest_gradient: max_t |g_t|.
        diverged: why the run was given up; empty if it was not.
    """

    steps: float
    loss: float
    distance: float | None
    regret: float | None
    largest_gradient: float
    diverged: str


def run_task(task: Task, learned: LearnedOptimiser, target: float, comparator: Reference | None = None) -> Score:
    """Train a task by exact mirror descent at lr = 1 and score the run.

    Args:
        task: the problem.
        learned: the geometry.
        target: the loss to count steps to.
        comparator: finds theta_*, where the task does not know it.
    """
    descent = MirrorDescent(task, learned.potential.bind(task.init()), certify=True)
    # The target is a loss, not a distance above the minimum, by which tasks that know theirs are watched.
    look = Task.monitor(task) if isinstance(task, SolvedTask) else task.monitor()
    every = max(1, descent.steps // LOOKS)
    looks = [(0, look(descent.params))]
    while descent.going:
        train(task, descent, range(descent.taken, min(descent.taken + every, descent.steps)), until=None)
        looks.append((descent.taken, look(descent.params)))
    run, solution = descent.finish(), solve(task, comparator)
    end = looks[-1][1]
    lost = bool(run.diverged) or math.isnan(end)
    regret = None if solution is None or lost else run.regret(solution)
    return Score(
        steps=math.inf if lost else steps_to(target, looks),
        loss=math.inf if lost else end,
        distance=None if solution is None else measure(descent.potential, run.start, solution).distance,
        regret=regret if solution is None else math.inf if regret is None or math.isnan(regret) else regret,
        largest_gradient=run.largest_gradient,
        diverged=run.diverged or ("The loss at the end is not a number." if lost else ""),
    )


def steps_to(target: float, looks: Sequence[tuple[int, float]]) -> float:
    """The step of the first of two looks in a row at which the loss is at or below the target; infinite if there is none.

    Args:
        target: the loss.
        looks: step and loss, in order.

    Example:
        >>> steps_to(1.0, [(0, 3.0), (10, 0.9), (20, 1.1), (30, 0.8), (40, 1.0)])
        30.0
    """
    arrived = (float(step) for (step, one), (_, two) in pairwise(looks) if one <= target and two <= target)
    return next(arrived, math.inf)


def solve(task: Task, comparator: Reference | None) -> dict[str, Tensor] | None:
    """theta_*, which does not depend on the geometry: the task's optimum, if there is one, else the comparator's, else None.

    Args:
        task: the problem.
        comparator: what finds it.
    """
    if isinstance(task, SolvedTask):
        with suppress(RuntimeError):  # a regression whose classes are separable has none
            return task.optimum()
    return None if comparator is None else comparator.run(task, task.init(), task.steps)[0]

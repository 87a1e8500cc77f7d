"""What one task teaches in an outer step: its run, and the sums that the update of the metrics needs."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from metamd.inner.closed_form import Iterate, compared, moment_shapes
from metamd.inner.estimators import ClosedForm, Estimator
from metamd.inner.moments import moments_of
from metamd.inner.objectives import Objective, PaperBound, Regret, TrainingLoss
from metamd.inner.run import Cost, Trajectory, gradient, run_inner
from metamd.inner.together import run_many
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Config, Task, TaskFamily, config_hash, derive_seed

Generators = Callable[[int], torch.Generator]

TAIL = 0.1
"""The last part of a run over which its losses are averaged to tell which end is best."""


@dataclass(frozen=True)
class Lesson:
    """What one task says about the metrics it was trained with.

    Args:
        task: the hash of its config.
        value: the objective.
        bound: on the regret against the end of the run, certified if the steps were exact.
        loss: mean training loss over the run.
        ends: the first training loss, and the mean of the last tenth of them.
        switches: how often the active pieces changed.
        unsettled: the gradient at the end of the run relative to that at its start, where that is asked for.
        diverged: why the run was given up; empty if it was not.
        cost: of all this.
    """

    task: str
    value: float
    bound: float
    loss: float
    ends: tuple[float, float]
    switches: int
    unsettled: float
    diverged: str
    cost: Cost


Attempt = tuple[Lesson, dict[str, Tensor]]
"""A lesson, and what it adds to the sums of the outer step."""


@dataclass(frozen=True)
class Lecture:
    """How a task is run and what is kept of it.

    Args:
        potential: the structure of the potential, whose metrics are given each time.
        objective: what is minimised.
        estimator: how.
        exact: False takes the paper's step.
        together: whether one task's loss serves all, so that small ones can run side by side.
    """

    potential: MaxDiagonal
    objective: Objective
    estimator: Estimator
    exact: bool
    together: bool = False

    def fit(self, iterate: Iterate, task: Task) -> MaxDiagonal:
        """The potential with these metrics for the tensors of a task."""
        return iterate.apply(self.potential).bind(task.init()).requires_grad_(False)

    def blank(self, iterate: Iterate) -> dict[str, Tensor]:
        """Sums of no task at all."""
        names = {"offsets": iterate.offsets} | {f"log_d/{k}": v for k, v in iterate.log_d.items()}
        if isinstance(self.estimator, ClosedForm):
            shapes = moment_shapes(iterate)
            sums = {f"{s}/{k}": torch.zeros(v, dtype=torch.float64) for k, v in shapes.items() for s in ("x", "y")}
            sums |= {f"{s}/{k}": torch.zeros(shapes[k], dtype=torch.float64) for k in compared(iterate) for s in ("u", "v")}
        else:
            sums = {f"gradient/{n}": torch.zeros(v.shape).double() for n, v in names.items()}
            sums["value"] = torch.zeros((), dtype=torch.float64)
        return sums | {"tasks": torch.zeros((), dtype=torch.float64)}

    def learn(self, tasks: Mapping[int, Task], iterate: Iterate, generator: Generators) -> dict[int, Attempt]:
        """Run tasks, and bring the sums of each; none of those that diverged.

        Args:
            tasks: by number.
            iterate: the metrics.
            generator: a source of randomness for every task.
        """
        if not isinstance(self.estimator, ClosedForm):
            return {i: self._differentiate(task, iterate, generator(i)) for i, task in tasks.items()}
        attempts = {}
        runs = self.runs(list(tasks.values()), iterate, products=iterate.basis.kind != "identity")
        for (i, task), (fit, run) in zip(tasks.items(), runs, strict=True):
            lesson, sums = self._lesson(task, fit, run), {}
            if not run.diverged:
                assert isinstance(self.objective, Regret)
                moments = moments_of(run, fit, self.objective)
                sums = {f"x/{k}": v for k, v in moments.x.items()} | {f"y/{k}": v for k, v in moments.y.items()}
                if i % 2:  # half of the tasks, against which the others can be held
                    sums |= {f"u/{k}": moments.x[k] for k in compared(iterate)}
                    sums |= {f"v/{k}": moments.y[k] for k in compared(iterate)}
                sums["tasks"] = torch.ones((), dtype=torch.float64)
            attempts[i] = lesson, sums
        return attempts

    def runs(
        self, tasks: list[Task], iterate: Iterate, *, products: bool = False, referred: bool = True
    ) -> list[tuple[MaxDiagonal, Trajectory]]:
        """Plain runs, side by side where that is faster, each with its potential.

        Args:
            tasks: the problems.
            iterate: the metrics.
            products: whether to record what a learned basis is computed from.
            referred: whether to make the reference runs too.
        """
        reference = self.objective.reference if referred else None
        options: dict[str, Any] = {"exact": self.exact, "reference": reference, "products": products}
        if self.together and len(tasks) > 1:
            fit = self.fit(iterate, tasks[0])
            found = run_many(tasks, fit, together=True, **options)
            return [(fit, run) for run in found]
        fits = [self.fit(iterate, task) for task in tasks]
        return [(fit, run_inner(task, fit, **options)) for fit, task in zip(fits, tasks, strict=True)]

    def _differentiate(self, task: Task, iterate: Iterate, generator: torch.Generator) -> Attempt:
        fit = self.fit(iterate, task)
        found = self.estimator(task, fit, self.objective, exact=self.exact, generator=generator)
        lesson = replace(self._lesson(task, fit, found.trajectory), cost=found.cost)
        if not lesson.diverged and not _finite(found.grads):
            lesson = replace(lesson, diverged="The hypergradient is not finite. Start from larger metrics.")
        sums = {f"gradient/log_d/{k}": v for k, v in found.grads.items()} | {"gradient/offsets": found.offsets}
        sums |= {"value": torch.tensor(lesson.value, dtype=torch.float64), "tasks": torch.ones((), dtype=torch.float64)}
        return lesson, {} if lesson.diverged else sums

    @torch.no_grad()
    def _lesson(self, task: Task, fit: MaxDiagonal, run: Trajectory) -> Lesson:
        if run.diverged:
            lost = (math.inf, math.inf)
            return Lesson(
                config_hash(task.config), math.inf, math.inf, math.inf, lost, run.switches, 0.0, run.diverged, run.cost
            )
        bound = float(Regret().value(run, fit)) + float(run.gaps.sum()) / run.lr
        unsettled, extra = 0.0, Cost()
        if isinstance(self.objective, PaperBound):
            unsettled, extra = _unsettled(task, run), Cost(gradients=2)
        return Lesson(
            config_hash(task.config),
            float(self.objective.value(run, fit)),
            bound if self.exact else math.nan,
            float(run.losses.mean()),
            ends_of(run),
            run.switches,
            unsettled,
            "",
            run.cost + extra,
        )

    def survives(self, task: Task, iterate: Iterate) -> tuple[bool, Cost]:
        """Whether a task finishes under these metrics, and what it took to see."""
        run = run_inner(task, self.fit(iterate, task), exact=self.exact)
        return not run.diverged, run.cost


def ends_of(run: Trajectory) -> tuple[float, float]:
    """The first training loss of a run, and the mean of the last tenth of them.

    Args:
        run: that finished.
    """
    return float(run.losses[0]), _tail(run)


def within_reach(ends: Sequence[tuple[float, float]]) -> float:
    """A target for the losses of later runs: nine tenths of the way from the median first loss to the worst last one.

    It is known before any held-out task is drawn, and all but unusual tasks of the family reach it.

    Args:
        ends: those of runs that finished, see `ends_of`; of one at least.

    Example:
        >>> round(within_reach([(2.0, 1.0), (4.0, 0.5), (3.0, 0.75)]), 6)
        1.2
    """
    first, last = statistics.median(first for first, _ in ends), max(last for _, last in ends)
    return last + 0.1 * max(first - last, 0.0)


def draw_config(family: TaskFamily, *purpose: int | str) -> Config:
    """A config that depends on the family and on these words alone.

    Args:
        family: where from.
        purpose: a seed, what the task is for, and its number.
    """
    return family.sample(torch.Generator().manual_seed(derive_seed(*purpose)))


def draw(family: TaskFamily, *purpose: int | str) -> Task:
    """The task of that config.

    Args:
        family: where from.
        purpose: as for `draw_config`.
    """
    return family.build(draw_config(family, *purpose))


def contest(
    lecture: Lecture, tasks: Mapping[int, Task], iterates: list[Iterate], *, by_loss: bool = False
) -> dict[int, dict[str, Any]]:
    """Run tasks with several metrics and value all of them against one comparator per task.

    The bound against the end of one's own run is smallest for metrics that hardly move. So all are compared with one point:
    the reference run's, if the objective has one, else the end with the lowest loss of all.

    Args:
        lecture: how to run.
        tasks: the problems, by number.
        iterates: the metrics.
        by_loss: value them by the mean training loss over the run instead.

    Returns:
        By task: the values by iterate, None where a run diverged, the hash of the task and the cost.
    """
    if by_loss:
        lecture = replace(lecture, objective=TrainingLoss())
    by_iterate = [lecture.runs(list(tasks.values()), iterate, referred=False) if tasks else [] for iterate in iterates]
    found = {}
    for row, (i, task) in enumerate(tasks.items()):
        entries = [runs[row] for runs in by_iterate]
        finished = [run for _, run in entries if not run.diverged]
        objective, extra = lecture.objective, Cost()
        if finished and objective.reference is not None:
            best, extra = objective.reference.run(task, finished[0].start, finished[0].steps)
            entries = [(fit, replace(run, reference=best)) for fit, run in entries]
        elif finished and (objective.looks_ahead or isinstance(objective, Regret)):
            objective = objective.held(min(finished, key=_tail))
        with torch.no_grad():
            values = [None if run.diverged else float(objective.value(run, fit)) for fit, run in entries]
        cost = sum((run.cost for _, run in entries), extra)
        found[i] = {"task": config_hash(task.config), "values": values, "cost": cost}
    return found


def _tail(run: Trajectory) -> float:
    return float(run.losses[-max(1, round(TAIL * len(run.losses))) :].mean())


def _unsettled(task: Task, run: Trajectory) -> float:
    """|g| at the end relative to |g| at the start."""
    norms = []
    for params, step in ((run.start, 0), (run.end, run.steps)):
        _, grads = gradient(task, params, task.batch(step))
        norms.append(math.sqrt(sum(float(g.square().sum(dtype=torch.float64)) for g in grads.values())))
    return norms[1] / norms[0] if norms[0] > 0 else 0.0


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors.values())

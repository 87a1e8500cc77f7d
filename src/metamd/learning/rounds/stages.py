"""The stages of a meta-training, and one outer step of each: a pure function from a state to the next."""

import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from metamd.inner.closed_form import Iterate
from metamd.inner.objectives import Regret
from metamd.inner.run import Cost
from metamd.learning.phases import blank, build_pieces, run_phases
from metamd.learning.rounds.ball import Ball
from metamd.learning.rounds.lessons import Lecture, contest, within_reach
from metamd.learning.rounds.outer import Outer
from metamd.learning.rounds.outer_steps import OuterStep, Refine, Stopping
from metamd.learning.rounds.round import Class, Round, hold
from metamd.learning.rounds.state import State
from metamd.learning.rounds.workers import Workers
from metamd.tasks.base import TaskFamily, config_hash

SHORTLIST = 2
"""How many of the metrics tried are judged, beside the last."""

ALWAYS = -sys.float_info.max
"""The loss of metrics that are judged in any case."""

StageName = Literal["learn", "judge", "pieces", "refine", "scale"]


@dataclass(frozen=True)
class Plan:
    """All that a meta-training does, but for where it is.

    Args:
        family: the tasks.
        lecture: how a task is run in the first stage.
        outer: the rule of its outer steps.
        stages: what is done, with the largest number of outer steps of each.
        pieces: N of the result.
        tasks_per_step: n.
        seed: of everything random.
        stopping: when a stage has converged.
        refine: the second stage of learning.
        workers: the processes.
        step_scales: factors on the learned steps, of which the one with the lowest training loss is kept.
        ball: where the metrics stay.
    """

    family: TaskFamily
    lecture: Lecture
    outer: Outer
    stages: tuple[tuple[StageName, int], ...]
    pieces: int
    tasks_per_step: int
    seed: int
    stopping: Stopping
    refine: Refine | None
    workers: Workers
    step_scales: tuple[float, ...] = ()
    ball: Ball = field(default_factory=Ball)

    def finished(self, state: State) -> bool:
        """Whether nothing is left to do."""
        return state.stage >= len(self.stages)

    def advance(self, state: State) -> tuple[State, OuterStep]:
        """One outer step.

        Args:
            state: where the training is.
        """
        began = time.perf_counter()
        stage, _ = self.stages[state.stage]
        if stage == "judge":
            new, record = self._judge(state)
        elif stage == "pieces":
            new, record = self._pieces(state)
        elif stage == "scale":
            new, record = self._scale(state)
        else:
            new, record = self._learn(state)
        seconds = time.perf_counter() - began
        spent = Cost(record.gradients, record.hvps, seconds)
        return replace(new, step=record.step, cost=state.cost + spent), replace(record, seconds=seconds)

    def _class(self, purpose: str, state: State) -> Class:
        return Class(self.family, self.seed, purpose, state.step + 1, self.tasks_per_step, self.workers)

    def _lecture(self, state: State) -> Lecture:
        """With the objective of the refinement from there on, if it has one of its own."""
        refining = any(name == "refine" for name, _ in self.stages[: state.stage + 1])
        if self.refine is None or self.refine.objective is None or not refining:
            return self.lecture
        return replace(self.lecture, objective=self.refine.objective)

    # learning

    def _learn(self, state: State) -> tuple[State, OuterStep]:
        stage, limit = self.stages[state.stage]
        lecture, outer = self._lecture(state), self.outer
        if stage == "refine" and self.refine is not None:
            lecture, outer = replace(lecture, estimator=self.refine.estimator), self.refine.outer
        held = hold(self._class("train", state), lecture, state, self.ball, retreats=outer.retreats)
        new, change = self._retreat(state, held) if held.too_far else self._move(state, held, lecture, outer)
        new = replace(
            new,
            done=state.done + 1,
            changes=(*state.changes, change),
            tasks=_joined(state.tasks, (lesson.task for lesson in held.lessons)),
            target=within_reach([lesson.ends for lesson in held.finished]) if held.finished else state.target,
        )
        note = self._verdict(new, limit)
        record = OuterStep(
            step=state.step + 1,
            stage=stage,
            objective=held.mean("value"),
            bound=held.mean("bound"),
            loss=held.mean("loss"),
            change=change,
            switches=sum(lesson.switches for lesson in held.lessons),
            tasks=len(held.lessons),
            unsettled=held.mean("unsettled"),
            diverged=held.diverged,
            gradients=held.cost.gradients,
            hvps=held.cost.hvps,
            note=note,
        )
        return (self._next(new, note) if note else new), record

    def _retreat(self, state: State, held: Round) -> tuple[State, float]:
        """Half way back to the last metrics under which the tasks that diverged finish, and half as far from there."""
        assert state.good is not None
        return replace(
            state, now=self.ball.project(held.now.halfway(state.good)), factor=state.factor / 2, carried={}
        ), math.inf

    def _move(self, state: State, held: Round, lecture: Lecture, outer: Outer) -> tuple[State, float]:
        now, values = held.now, (*state.values, held.mean("value"))
        update = outer.update(now, now.apply(lecture.potential), held.sums, state.carried, state.factor)
        tried = replace(now, step=state.step + 1, loss=held.mean("loss"))
        known = (*state.candidates, tried)
        places = SHORTLIST + sum(c.loss == ALWAYS for c in known)
        shortlist = sorted(known, key=lambda c: c.loss)[:places]
        new = replace(
            state,
            now=self.ball.project(update.iterate),
            good=now,
            carried=update.carried,
            factor=min(1.0, 1.5 * state.factor),
            candidates=tuple(shortlist),
            values=values,
        )
        return new, self._drift(values) if update.change is None else update.change

    def _drift(self, values: tuple[float, ...]) -> float:
        """The relative change between the means of the last values and of as many before."""
        w = self.stopping.window
        if len(values) < 2 * w:
            return math.inf
        before, after = math.fsum(values[-2 * w : -w]) / w, math.fsum(values[-w:]) / w
        return abs(after - before) / max(abs(before), sys.float_info.min)

    def _verdict(self, state: State, limit: int) -> str:
        """Why the stage ends here, or nothing."""
        recent, stop = state.changes[-self.stopping.window :], self.stopping
        if len(recent) == stop.window and max(abs(c) for c in recent) <= stop.tolerance and stop.tolerance > 0:
            return f"converged: the objective changed by at most {stop.tolerance:g} in {stop.window} outer steps in a row"
        if state.done >= limit:
            last = f", the objective still changing by {recent[-1]:.2g}" if math.isfinite(recent[-1]) else ""
            return f"stopped at the limit of {limit} outer step{'s' * (limit > 1)}{last}"
        return ""

    def _next(self, state: State, note: str) -> State:
        """The next stage, with the metrics at hand."""
        new = replace(state, stage=state.stage + 1, done=0, values=(), changes=(), carried={}, factor=1.0)
        return replace(new, notes=(*state.notes, note))

    # judging

    def _judge(self, state: State) -> tuple[State, OuterStep]:
        """The last metrics and the best of those before, on fresh tasks and against common comparators."""
        entrants = [*state.candidates, state.now]
        room = self._class("judge", state)
        best, value, record = self._contest(entrants, room, self._lecture(state), default=len(entrants) - 1, errors=2.0)
        which = f"of outer step {best.step}" if best.step else "of the last update"
        note = f"kept the metrics {which}: the objective is {value:.4g} on {self.tasks_per_step} fresh tasks"
        return self._settle(state, best, replace(record, note=note))

    def _settle(self, state: State, best: Iterate, record: OuterStep) -> tuple[State, OuterStep]:
        best = replace(best, loss=ALWAYS)
        room = self._class(record.stage, state)
        hashes = self.workers.gather({i: config_hash(t.config) for i, t in room.tasks().items()}, room.count)
        new = replace(state, now=best, good=best, candidates=(best,), tasks=_joined(state.tasks, hashes))
        return self._next(new, record.note), record

    def _contest(
        self,
        entrants: list[Iterate],
        room: Class,
        lecture: Lecture,
        *,
        default: int = 0,
        errors: float = 0.0,
        by_loss: bool = False,
    ) -> tuple[Iterate, float, OuterStep]:
        """The entrant that diverges least often, and of these the one of the smallest mean objective.

        The default gives way only to one whose mean is lower by so many standard errors of the differences by task.
        """
        rows = contest(lecture, room.tasks(), entrants, by_loss=by_loss)
        found = room.workers.gather(rows, room.count)
        finishable = [r["values"] for r in found if any(v is not None for v in r["values"])]
        if not finishable:
            raise ValueError(f"all {room.count} tasks of outer step {room.step} diverged, so that nothing can be judged.")
        columns = [[values[j] for values in finishable] for j in range(len(entrants))]
        scores = [_score(column) for column in columns]
        winner = min(range(len(entrants)), key=lambda j: scores[j])
        if scores[default][0] == scores[winner][0] and not _significant(columns[default], columns[winner], errors):
            winner = default
        cost = sum((r["cost"] for r in found), Cost())
        lost = room.count - len(finishable)
        record = OuterStep(
            step=room.step,
            stage=room.purpose,
            objective=scores[winner][1],
            tasks=room.count,
            diverged=(f"{lost} tasks diverged with all metrics.",) if lost else (),
            gradients=cost.gradients,
        )
        return entrants[winner], scores[winner][1], record

    def _scale(self, state: State) -> tuple[State, OuterStep]:
        """One factor on all steps, the one with which training tasks have the lowest mean loss, folded into the metrics."""
        entrants = [self.ball.project(state.now.shifted(-math.log(scale))) for scale in self.step_scales]
        best, value, record = self._contest(entrants, self._class("scale", state), self._lecture(state), by_loss=True)
        scale = self.step_scales[next(i for i, entrant in enumerate(entrants) if entrant is best)]
        note = f"steps times {scale:g}: the mean training loss is {value:.4g} on {self.tasks_per_step} fresh tasks"
        return self._settle(state, best, replace(record, loss=value, objective=math.nan, note=note))

    # several pieces

    def _pieces(self, state: State) -> tuple[State, OuterStep]:
        """Pieces from the phases of the runs, taken only if the regret falls on the very same tasks."""
        room, objective = self._class("pieces", state), self.lecture.objective
        assert isinstance(objective, Regret)
        runs = {}
        for i, task in room.tasks().items():
            fit = self.lecture.fit(state.now, task)
            runs[i] = run_phases(task, fit, objective, self.pieces, self.lecture.exact)
        sums = room.total({i: run.sums for i, run in runs.items()}, blank(state.now, self.pieces))
        ran = room.workers.gather({i: (not run.diverged, run.cost) for i, run in runs.items()}, room.count)
        count = sum(fine for fine, _ in ran)
        entrants = [state.now]
        if count:
            built = [self.ball.project(build_pieces(state.now, sums, count, strength)) for strength in (0.5, 1.0)]
            entrants += [pieces for pieces in built if _differ(pieces)]
        best, value, record = self._contest(entrants, room, self.lecture)
        taken = best is not state.now
        note = (
            f"{self.pieces} pieces lower the regret to {value:.4g}"
            if taken
            else f"kept one piece: {self.pieces} do not lower the regret below {value:.4g} on the same tasks"
        )
        gradients = record.gradients + sum(cost.gradients for _, cost in ran)
        new, record = self._settle(state, best, replace(record, note=note, gradients=gradients))
        if self.refine is not None and not taken and len(entrants) > 1:
            # Refinement may still make something of them; the judge after it decides between them and the one piece.
            new = replace(new, now=entrants[-1], good=entrants[-1])
        return new, record


def _differ(iterate: Iterate) -> bool:
    return any(bool((v != v[:1]).any()) for v in iterate.log_d.values())


def _score(values: list[float | None]) -> tuple[int, float]:
    finished = [v for v in values if v is not None]
    return len(values) - len(finished), math.fsum(finished) / len(finished) if finished else math.inf


def _significant(default: list[float | None], other: list[float | None], errors: float) -> bool:
    gains = [a - b for a, b in zip(default, other, strict=True) if a is not None and b is not None]
    mean = math.fsum(gains) / len(gains) if gains else 0.0
    spread = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return mean > errors * spread


def _joined(known: tuple[str, ...], seen: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*known, *seen)))

"""The stages of a meta-training, and one outer step of each: a pure function from a state to the next."""

import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from metamd.inner.closed_form import Iterate
from metamd.inner.run import Cost
from metamd.learning.rounds.outer import Ball, Outer, OuterStep, Refine, Stopping
from metamd.learning.rounds.round import Learner, Round, RoundTasks, contest, run_round, within_reach
from metamd.learning.rounds.state import State
from metamd.tasks.base import TaskFamily, config_hash, derive_seed

SHORTLIST = 2
"""How many of the metrics tried are judged, beside the last."""

ALWAYS = -sys.float_info.max
"""The loss of metrics that are judged in any case."""

StageName = Literal["learn", "judge", "refine"]


@dataclass(frozen=True)
class Plan:
    """All that a meta-training does, but for where it is.

    Args:
        family: the tasks.
        learner: how a task is run in the first stage.
        outer: the rule of its outer steps.
        stages: what is done, with the largest number of outer steps of each.
        pieces: N of the result.
        tasks_per_step: n.
        seed: of everything random.
        stopping: when a stage has converged.
        refine: the second stage of learning.
        spread: of the logarithms of M_j where pieces begin that are all the same.
        ball: where the metrics stay.
    """

    family: TaskFamily
    learner: Learner
    outer: Outer
    stages: tuple[tuple[StageName, int], ...]
    pieces: int
    tasks_per_step: int
    seed: int
    stopping: Stopping
    refine: Refine | None
    spread: float = 0.1
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
        new, record = self._judge(state) if stage == "judge" else self._learn(state)
        seconds = time.perf_counter() - began
        spent = Cost(record.gradients, record.hvps, seconds)
        return replace(new, step=record.step, cost=state.cost + spent), replace(record, seconds=seconds)

    def spread_out(self, one: Iterate) -> Iterate:
        """As many pieces as the result shall have, which differ a little: the same ones would have the same gradients."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "pieces"))
        log_d = {}
        for k, v in one.log_d.items():
            copies = v.expand(self.pieces, *v.shape[1:])
            noise = torch.randn(copies.shape, generator=generator, dtype=torch.float64)
            log_d[k] = copies + 2 * self.spread * noise.to(v)
        return one.moved(log_d, one.offsets.expand(self.pieces).clone())

    def _tasks(self, purpose: str, state: State) -> RoundTasks:
        return RoundTasks(self.family, self.seed, purpose, state.step + 1, self.tasks_per_step)

    def _learner(self, state: State) -> Learner:
        """With the objective of the refinement from there on, if it has one of its own."""
        refining = any(name == "refine" for name, _ in self.stages[: state.stage + 1])
        if self.refine is None or self.refine.objective is None or not refining:
            return self.learner
        return replace(self.learner, objective=self.refine.objective)

    # learning

    def _learn(self, state: State) -> tuple[State, OuterStep]:
        stage, limit = self.stages[state.stage]
        learner, outer = self._learner(state), self.outer
        if stage == "refine" and self.refine is not None:
            learner, outer = replace(learner, estimator=self.refine.estimator), self.refine.outer
            if len(state.now.offsets) < self.pieces:  # the closed form has learned one
                pieces = self.ball.project(self.spread_out(state.now))
                state = replace(state, now=pieces, good=pieces)
        held = run_round(self._tasks("train", state), learner, state, self.ball, retreats=outer.retreats)
        new, change = self._retreat(state, held) if held.too_far else self._move(state, held, learner, outer)
        new = replace(
            new,
            done=state.done + 1,
            changes=(*state.changes, change),
            tasks=_joined(state.tasks, (result.task for result in held.results)),
            target=within_reach([result.ends for result in held.finished]) if held.finished else state.target,
        )
        note = self._verdict(new, limit)
        record = OuterStep(
            step=state.step + 1,
            stage=stage,
            objective=held.mean("value"),
            bound=held.mean("bound"),
            loss=held.mean("loss"),
            change=change,
            switches=sum(result.switches for result in held.results),
            tasks=len(held.results),
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

    def _move(self, state: State, held: Round, learner: Learner, outer: Outer) -> tuple[State, float]:
        now, values = held.now, (*state.values, held.mean("value"))
        update = outer.update(now, now.apply(learner.potential), held.sums, state.carried, state.factor)
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
        """The last metrics and the best of those before, on fresh tasks and against common comparators.

        What diverges least often wins, and of these what has the smallest mean objective. The last metrics give way only to
        others whose mean is lower by two standard errors of the differences by task.
        """
        entrants, drawn = [*state.candidates, state.now], self._tasks("judge", state)
        tasks = list(drawn.build().values())
        rows, cost = contest(self._learner(state), tasks, entrants)
        finishable = [row for row in rows if any(v is not None for v in row)]
        if not finishable:
            raise ValueError(f"all {drawn.count} tasks of outer step {drawn.step} diverged, so that nothing can be judged.")
        columns = [[row[j] for row in finishable] for j in range(len(entrants))]
        scores = [_score(column) for column in columns]
        winner, last = min(range(len(entrants)), key=lambda j: scores[j]), len(entrants) - 1
        if scores[last][0] == scores[winner][0] and not _significant(columns[last], columns[winner], errors=2.0):
            winner = last
        best, value, lost = entrants[winner], scores[winner][1], drawn.count - len(finishable)
        which = f"of outer step {best.step}" if best.step else "of the last update"
        record = OuterStep(
            step=drawn.step,
            stage="judge",
            objective=value,
            tasks=drawn.count,
            diverged=(f"{lost} tasks diverged with all metrics.",) if lost else (),
            gradients=cost.gradients,
            note=f"kept the metrics {which}: the objective is {value:.4g} on {self.tasks_per_step} fresh tasks",
        )
        best = replace(best, loss=ALWAYS)
        seen = _joined(state.tasks, (config_hash(task.config) for task in tasks))
        return self._next(replace(state, now=best, good=best, candidates=(best,), tasks=seen), record.note), record


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

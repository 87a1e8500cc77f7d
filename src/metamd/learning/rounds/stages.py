"""The stages of a meta-training: its state between two outer steps, and one outer step as a pure function of it."""

import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from metamd.inner.closed_form import Iterate
from metamd.inner.run import Cost
from metamd.learning.rounds.outer import Method, Outer, OuterStep
from metamd.learning.rounds.round import Findings, Learner, Round, contest, draw, run_round, within_reach
from metamd.potentials.basis import Basis
from metamd.tasks.base import Task, TaskFamily, config_hash, derive_seed

SHORTLIST = 2
"""How many of the metrics tried are judged, beside the last."""

ALWAYS = -sys.float_info.max
"""The loss of metrics that are judged in any case."""

PLAIN = ("stage", "step", "factor", "target")
"""What of a state is a number or nothing."""


@dataclass(frozen=True)
class State:
    """Where a meta-training is. Everything random in the next outer step follows from the seed and from `step`."""

    now: Iterate  # the metrics that the next outer step tries
    stage: int = 0  # which part of the plan is next; its length when all is done
    step: int = 0  # outer steps done altogether
    good: Iterate | None = None  # the last metrics under which no task diverged that could be helped
    carried: Mapping[str, Tensor] = field(default_factory=dict)  # what the rule of the outer step remembers
    factor: float = 1.0  # how much smaller its steps shall be
    candidates: tuple[Iterate, ...] = ()  # metrics that may turn out to be the best
    values: tuple[float, ...] = ()  # the objective of every step of this stage that moved the metrics
    changes: tuple[float, ...] = ()  # its relative change in every step of this stage
    cost: Cost = field(default_factory=Cost)  # of everything so far
    tasks: tuple[str, ...] = ()  # the hashes of the tasks seen, in order
    target: float | None = None  # a loss that runs of the last outer step reach, see `within_reach`

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name; all numbers that may be infinite are among them, for JSON has no infinity."""
        found = {f"carried/{n}": v for n, v in self.carried.items()}
        found |= {n: torch.tensor(getattr(self, n), dtype=torch.float64) for n in ("values", "changes")}
        good = {} if self.good is None else {"good": self.good}
        for name, iterate in {
            "now": self.now,
            **good,
            **{f"candidate {i}": c for i, c in enumerate(self.candidates)},
        }.items():
            found |= {f"{name}/log_d/{k}": v for k, v in iterate.log_d.items()}
            found |= {f"{name}/basis/{k}": v for k, v in iterate.basis.factors.items()}
            found[f"{name}/offsets"] = iterate.offsets
            found[f"{name}/tried"] = torch.tensor([iterate.step, iterate.loss], dtype=torch.float64)
        return {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in found.items()}

    def facts(self) -> dict[str, Any]:
        """All the rest, in JSON's types."""
        plain = {n: getattr(self, n) for n in PLAIN}
        return {**plain, "candidates": len(self.candidates), "cost": astuple(self.cost), "tasks": self.tasks}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], basis: Basis = Basis()) -> "State":  # noqa: B008
        """The state that was taken apart; the basis is that of the run, whose learned factors are among the tensors."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}

        def iterate(name: str) -> Iterate:
            (step, loss), factors = tensors[f"{name}/tried"].tolist(), under(f"{name}/basis/")
            return Iterate(under(f"{name}/log_d/"), tensors[f"{name}/offsets"], int(step), loss, basis.with_factors(factors))

        return cls(
            iterate("now"),
            good=iterate("good") if "good/offsets" in tensors else None,
            carried=under("carried/"),
            candidates=tuple(iterate(f"candidate {i}") for i in range(facts["candidates"])),
            values=tuple(tensors["values"].tolist()),
            changes=tuple(tensors["changes"].tolist()),
            cost=Cost(*facts["cost"]),
            tasks=tuple(facts["tasks"]),
            **{n: facts[n] for n in PLAIN},
        )


@dataclass(frozen=True)
class Plan:
    """All that a meta-training does, but for where it is."""

    family: TaskFamily  # the tasks
    learner: Learner  # how a task is run in the first stage
    method: Method  # the rules, the stages, when they end
    pieces: int  # N of the result
    tasks_per_step: int  # n
    seed: int  # of everything random
    found: Findings  # what the first gradients said

    def finished(self, state: State) -> bool:
        """Whether nothing is left to do."""
        return state.stage >= len(self.method.stages)

    def left(self, state: State) -> int:
        """Outer steps to come, at most."""
        return sum(steps for _, steps in self.method.stages[state.stage :]) - len(state.changes)

    def advance(self, state: State) -> tuple[State, OuterStep]:
        """One outer step."""
        began = time.perf_counter()
        stage, _ = self.method.stages[state.stage]
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
            log_d[k] = copies + 2 * self.method.spread * noise.to(v)
        return one.moved(log_d, one.offsets.expand(self.pieces).clone())

    def _tasks(self, purpose: str, state: State) -> list[Task]:
        """Tasks for one purpose are never those of another."""
        return [draw(self.family, self.seed, purpose, state.step + 1, i) for i in range(self.tasks_per_step)]

    def _learner(self, state: State) -> Learner:
        """With the estimator and the objective of the refinement from there on."""
        refine, begun = self.method.refine, [name for name, _ in self.method.stages[: state.stage + 1]]
        if refine is None or "refine" not in begun:
            return self.learner
        return replace(self.learner, estimator=refine.estimator, objective=refine.objective or self.learner.objective)

    # learning

    def _learn(self, state: State) -> tuple[State, OuterStep]:
        stage, limit = self.method.stages[state.stage]
        learner, outer, refine = self._learner(state), self.method.rule, self.method.refine
        if stage == "refine" and refine is not None:
            outer = refine.outer
            if len(state.now.offsets) < self.pieces:  # the closed form has learned one
                pieces = learner.inside(self.spread_out(state.now))
                state = replace(state, now=pieces, good=pieces)
        tasks, purpose = dict(enumerate(self._tasks("train", state))), (self.seed, "estimate", state.step + 1)
        held = run_round(tasks, learner, state.now, state.good, retreats=outer.retreats, purpose=purpose)
        if not held.finished and not held.too_far:
            radius = self.method.max_norm
            kept = "" if radius is None else f" with max_norm = {radius:g}, which may be too small"
            raise ValueError(
                f"all {len(tasks)} tasks of outer step {state.step + 1} diverged{kept}, so that nothing can be learned. The "
                f"first: {held.results[0].diverged}"
            )
        if held.too_far and state.good is not None:
            # half way back to the last metrics under which the tasks that diverged finish, and half as far from there
            halfway = learner.inside(held.now.halfway(state.good))
            new, change = replace(state, now=halfway, factor=state.factor / 2, carried={}), math.inf
        else:
            new, change = self._move(state, held, learner, outer)
        new = replace(
            new,
            changes=(*state.changes, change),
            tasks=tuple(dict.fromkeys((*state.tasks, *(result.task for result in held.results)))),
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
            unsettled=held.mean("unsettled"),
            diverged=held.diverged,
            gradients=held.cost.gradients,
            hvps=held.cost.hvps,
            note=note,
        )
        return (self._next(new) if note else new), record

    def _move(self, state: State, held: Round, learner: Learner, outer: Outer) -> tuple[State, float]:
        now, values = held.now, (*state.values, held.mean("value"))
        update = outer.update(now, now.apply(learner.potential), held.sums, state.carried, state.factor)
        tried = replace(now, step=state.step + 1, loss=held.mean("loss"))
        known = (*state.candidates, tried)
        places = SHORTLIST + sum(c.loss == ALWAYS for c in known)
        shortlist = sorted(known, key=lambda c: c.loss)[:places]
        new = replace(
            state,
            now=learner.inside(update.iterate),
            good=now,
            carried=update.carried,
            factor=min(1.0, 1.5 * state.factor),
            candidates=tuple(shortlist),
            values=values,
        )
        return new, self._drift(values) if update.change is None else update.change

    def _drift(self, values: tuple[float, ...]) -> float:
        """The relative change between the means of the last values and of as many before."""
        w = self.method.stopping.window
        if len(values) < 2 * w:
            return math.inf
        before, after = math.fsum(values[-2 * w : -w]) / w, math.fsum(values[-w:]) / w
        return abs(after - before) / max(abs(before), sys.float_info.min)

    def _verdict(self, state: State, limit: int) -> str:
        """Why the stage ends here, or nothing."""
        recent, stop = state.changes[-self.method.stopping.window :], self.method.stopping
        if len(recent) == stop.window and max(abs(c) for c in recent) <= stop.tolerance and stop.tolerance > 0:
            return f"converged: the objective changed by at most {stop.tolerance:g} in {stop.window} outer steps in a row"
        if len(state.changes) >= limit:
            last = f", the objective still changing by {recent[-1]:.2g}" if math.isfinite(recent[-1]) else ""
            return f"stopped at the limit of {limit} outer step{'s' * (limit > 1)}{last}"
        return ""

    def _next(self, state: State) -> State:
        """The next stage, with the metrics at hand."""
        return replace(state, stage=state.stage + 1, values=(), changes=(), carried={}, factor=1.0)

    # judging

    def _judge(self, state: State) -> tuple[State, OuterStep]:
        """The last metrics and the best of those before, on fresh tasks and against common comparators.

        What diverges least often wins, and of these what has the smallest mean objective. The last metrics give way only to
        others whose mean is lower by two standard errors of the differences by task.
        """
        entrants, tasks, step = [*state.candidates, state.now], self._tasks("judge", state), state.step + 1
        rows, cost = contest(self._learner(state), tasks, entrants)
        finishable = [row for row in rows if any(v is not None for v in row)]
        if not finishable:
            raise ValueError(f"all {len(tasks)} tasks of outer step {step} diverged, so that nothing can be judged.")
        scores = []
        for values in zip(*finishable, strict=True):
            finished = [v for v in values if v is not None]
            scores.append((len(values) - len(finished), math.fsum(finished) / len(finished) if finished else math.inf))
        winner, last = min(range(len(entrants)), key=lambda j: scores[j]), len(entrants) - 1
        if scores[last][0] == scores[winner][0]:
            pairs = [(row[last], row[winner]) for row in finishable]
            gains = [a - b for a, b in pairs if a is not None and b is not None]
            spread = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
            if not gains or not math.fsum(gains) / len(gains) > 2 * spread:
                winner = last
        best, value, lost = entrants[winner], scores[winner][1], len(tasks) - len(finishable)
        which = f"of outer step {best.step}" if best.step else "of the last update"
        record = OuterStep(
            step=step,
            stage="judge",
            objective=value,
            diverged=(f"{lost} tasks diverged with all metrics.",) if lost else (),
            gradients=cost.gradients,
            note=f"kept the metrics {which}: the objective is {value:.4g} on {self.tasks_per_step} fresh tasks",
        )
        best = replace(best, loss=ALWAYS)
        seen = tuple(dict.fromkeys((*state.tasks, *(config_hash(task.config) for task in tasks))))
        return self._next(replace(state, now=best, good=best, candidates=(best,), tasks=seen)), record

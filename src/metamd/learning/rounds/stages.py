"""The stages of a meta-training: its state between two outer steps, and one outer step as a pure function of it."""

import math
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from metamd.files.learned import LearnedOptimiser, fingerprint
from metamd.files.progress import Progress
from metamd.files.store import Journal, Log
from metamd.inner.closed_form import Iterate
from metamd.inner.executor import Executor
from metamd.inner.objectives import PaperBound
from metamd.inner.run import Cost
from metamd.learning.parts import identity_of
from metamd.learning.reference import described
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

SETTLED = 1e-2
"""A run has converged, for `PaperBound`, when its gradient has fallen to this share of the first."""


class NotConvergedWarning(UserWarning):
    """Runs end before they have converged, where the objective takes their ends for solutions."""


@dataclass(frozen=True)
class State:
    """Where a meta-training is. Everything random in the next outer step follows from the seed and from `step`."""

    now: Iterate  # the metrics that the next outer step tries
    stage: int = 0  # which part of the plan is next; its length when all is done
    step: int = 0  # outer steps done altogether
    good: Iterate | None = None  # the last metrics under which every task finished, except tasks that diverge under any
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
        iterates = {"now": self.now} | ({} if self.good is None else {"good": self.good})
        for name, iterate in (iterates | {f"candidate {i}": c for i, c in enumerate(self.candidates)}).items():
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
    method: Method  # the rules, the stages, when they end
    pieces: int  # N of the result
    tasks_per_step: int  # n
    seed: int  # of everything random
    found: Findings  # what the first gradients said
    executor: Executor  # where tasks run

    def train(self, journal: Journal | None, log: Log | None) -> LearnedOptimiser:
        """All outer steps that are left, with a checkpoint after every few and when something interrupts."""
        state = self._begin()
        identity = {} if journal is None else self._identity(state)
        kept = None if journal is None else journal.resume(identity)
        state = state if kept is None else State.restore(*kept, state.now.basis)
        saved = state.step
        try:
            with Progress("outer steps", state.step + self._left(state), done=state.step) as progress:
                while self._left(state):
                    state, step = self._advance(state)
                    record = step.to_dict()
                    progress.update(state.step, step_line(record), state.step + self._left(state))
                    if journal is not None:
                        journal.note(record, state.step)
                        if state.step - saved >= journal.every or not self._left(state):
                            journal.save(state.tensors(), state.facts(), identity)
                            saved = state.step
                    if log is not None:
                        log(record, state.step)
        except BaseException:
            if journal is not None and state.step > saved:
                with suppress(OSError):  # a full disk may be why we are here
                    journal.save(state.tensors(), state.facts(), identity)
            raise
        return self._result(state)

    def _begin(self) -> State:
        """The first state: one piece for the closed form, pieces that differ a little for gradients."""
        now = Iterate.of(self.found.bound)
        if self.found.curvature and not any(bool(v.any()) for v in now.log_d.values()):
            now = now.shifted(math.log(self.found.curvature))
        if self.method.closed:
            # of several metrics, the geometric mean
            log_d = {k: v.mean(0, keepdim=True) for k, v in now.log_d.items()}
            now = now.moved(log_d, torch.zeros(1, dtype=torch.float64))
        elif self.pieces > 1 and all(bool((v == v[:1]).all()) for v in now.log_d.values()):
            now = self._spread_out(now)
        return State(self._learner(0).inside(now), cost=self.found.cost)

    def _identity(self, state: State) -> dict[str, Any]:
        """What two runs must have in common for one to continue the other."""
        method, potential = self.method, self.found.bound
        return {
            **({} if potential.basis.kind == "identity" else {"basis": repr(potential.basis)}),
            "family": identity_of(self.family),
            "potential": fingerprint(potential),
            "start": fingerprint(state.now.apply(potential)),
            **{n: repr(getattr(method, n)) for n in ("objective", "estimator", "stopping", "refine")},
            "outer": repr(method.rule),
            "exact": method.exact,
            "stages": [list(s) for s in method.stages],
            "tasks_per_step": self.tasks_per_step,
            "seed": self.seed,
            **({} if method.max_norm is None else {"max_norm": method.max_norm}),
        }

    def _result(self, state: State) -> LearnedOptimiser:
        potential, refine = state.now.apply(self.found.bound), self.method.refine
        said = repr(self.method.estimator) + (f", then {refine!r}" if refine else "")
        if potential.pieces != self.pieces:
            said = f"{said}; kept one piece, of {self.pieces} that were tried"
        cost = {"gradient_evaluations": state.cost.gradients, "hessian_vector_products": state.cost.hvps}
        return LearnedOptimiser.from_potential(
            potential.requires_grad_(True),
            model=self.found.shapes,
            **described(self.family),
            gradient_scale={k: v for k, v in self.found.scale.items() if math.isfinite(v)},
            objective=repr(self.method.objective),
            estimator=said,
            seeds=(self.seed,),
            cost={**cost, "outer_steps": state.step, "seconds": state.cost.seconds},
            task_hashes=state.tasks,
            max_norm=self.method.max_norm,
            target_loss=state.target,
        )

    def _left(self, state: State) -> int:
        """Outer steps to come, at most."""
        return sum(steps for _, steps in self.method.stages[state.stage :]) - len(state.changes)

    def _advance(self, state: State) -> tuple[State, OuterStep]:
        """One outer step."""
        began = time.perf_counter()
        stage, _ = self.method.stages[state.stage]
        new, record = self._judge(state) if stage == "judge" else self._learn(state)
        seconds = time.perf_counter() - began
        spent = Cost(record.gradients, record.hvps, seconds)
        return replace(new, step=record.step, cost=state.cost + spent), replace(record, seconds=seconds)

    def _spread_out(self, one: Iterate) -> Iterate:
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

    def _learner(self, stage: int) -> Learner:
        """With the estimator and the objective of the refinement from there on."""
        method, refine = self.method, self.method.refine
        if refine is not None and "refine" in [name for name, _ in method.stages[: stage + 1]]:
            method = replace(method, estimator=refine.estimator, objective=refine.objective or method.objective)
        return Learner(self.found.bound, method, self.found.shapes, self.family.shared_loss, self.executor)

    # learning

    def _learn(self, state: State) -> tuple[State, OuterStep]:
        stage, limit = self.method.stages[state.stage]
        learner, outer, refine = self._learner(state.stage), self.method.rule, self.method.refine
        if stage == "refine" and refine is not None:
            outer = refine.outer
            if len(state.now.offsets) < self.pieces:  # the closed form has learned one
                pieces = learner.inside(self._spread_out(state.now))
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
        note, unsettled = self._verdict(new, limit), held.mean("unsettled")
        if isinstance(learner.method.objective, PaperBound) and unsettled > SETTLED:
            warnings.warn(
                f"under PaperBound the end of a run stands for the solution, but in outer step {state.step + 1} the "
                f"gradients at the ends are still {unsettled:.2g} times the first ones: the objective then rewards not "
                "moving at all. Give the tasks more steps, or use objective=Regret().",
                NotConvergedWarning,
                stacklevel=5,
            )
        record = OuterStep(
            step=state.step + 1,
            stage=stage,
            objective=held.mean("value"),
            bound=held.mean("bound"),
            loss=held.mean("loss"),
            change=change,
            unsettled=unsettled,
            diverged=held.diverged,
            gradients=held.cost.gradients,
            hvps=held.cost.hvps,
            note=note,
        )
        return (self._next(new) if note else new), record

    def _move(self, state: State, held: Round, learner: Learner, outer: Outer) -> tuple[State, float]:
        values = (*state.values, held.mean("value"))
        update = outer.update(held.now, held.sums, state.carried, state.factor)
        known = (*state.candidates, replace(held.now, step=state.step + 1, loss=held.mean("loss")))
        places = SHORTLIST + sum(c.loss == ALWAYS for c in known)
        new = replace(
            state,
            now=learner.inside(update.iterate),
            good=held.now,
            carried=update.carried,
            factor=min(1.0, 1.5 * state.factor),
            candidates=tuple(sorted(known, key=lambda c: c.loss)[:places]),
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
        rows, cost = contest(self._learner(state.stage), tasks, entrants)
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


def step_line(record: Mapping[str, Any]) -> str:
    """One outer step in a line."""
    numbers = [f"{n} {record[n]:.4g}" for n in ("objective", "bound", "loss") if record[n] is not None]
    lost = [f"{len(record['diverged'])} diverged"] if record["diverged"] else []
    return "  ".join([f"{record['stage']} {record['step']}", *numbers, *lost])

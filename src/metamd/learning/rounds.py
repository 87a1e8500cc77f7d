"""Algorithm 1: the round of an outer step, which trains on each task, and the stages that outer steps belong to."""

import math
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from metamd.files.learned import LearnedOptimiser, fingerprint
from metamd.files.progress import Progress
from metamd.files.store import Journal, Log, as_json
from metamd.inner.closed_form import Iterate, halved_keys, moment_shapes, moments_of
from metamd.inner.executor import Executor
from metamd.inner.objectives import PaperBound, Regret
from metamd.inner.run import Cost, Trajectory, all_finite, gradient, run_inner
from metamd.inner.together import run_many
from metamd.learning.first_look import Findings, draw_task, norm_of_all
from metamd.learning.outer import Method, OuterStep, project
from metamd.learning.parts import described, identity_of
from metamd.potentials.basis import Basis
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.tying import Shape
from metamd.tasks.base import Task, TaskFamily, config_hash, derive_seed

TAIL_SHARE = 0.1
"""The last part of a run over which its losses are averaged to tell which end is best."""

RAISES = 12
"""How often the metrics of the first outer step are multiplied by four to find where no task diverges."""


# the round


@dataclass(frozen=True)
class TaskResult:
    """The result of one task with the metrics it was trained with."""

    cost: Cost  # of all this
    diverged: str  # why the run was given up; empty if it was not
    objective: float = math.inf  # its value
    bound: float = math.inf  # on the regret against the end of the run, certified if the steps were exact
    loss: float = math.inf  # mean training loss over the run
    ends: tuple[float, float] = (math.inf, math.inf)  # the first training loss, and the mean of the last tenth of them
    unsettled: float = 0.0  # the gradient at the end of the run relative to that at its start, where that is asked for
    sums: dict[str, Tensor] = field(default_factory=dict)  # what it adds to the sums of the outer step, if it finished


@dataclass(frozen=True)
class TaskRunner:
    """How a task is run and what is kept of it."""

    potential: MaxDiagonal  # the structure of the potential, whose metrics are given each time
    method: Method  # objective, estimator, kind of step, and the norm at which the metrics stay
    shapes: Mapping[str, Shape]  # of the tensors over which that norm is taken
    together: bool  # whether one task's loss serves all, so that small ones can run side by side
    executor: Executor  # where the others run
    purpose: tuple[int | str, ...]  # words that seed estimators which are random

    def fit(self, iterate: Iterate, task: Task) -> MaxDiagonal:
        """The potential with these metrics for the tensors of a task."""
        return iterate.apply(self.potential).bind(task.init()).requires_grad_(False)

    def inside(self, iterate: Iterate) -> Iterate:
        """The nearest metrics at ||m_j||_2 <= C."""
        radius = self.method.max_norm
        return iterate if radius is None else project(iterate, radius, self.potential, self.shapes)

    def total(self, results: Sequence[TaskResult], iterate: Iterate) -> dict[str, Tensor]:
        """The sums over the tasks that finished, in float64, with their number under "tasks"."""
        # zeros first: perhaps no task that finished has a certain tensor, or is in the half that is summed apart
        shapes, halved = moment_shapes(iterate) if self.method.closed else {}, halved_keys(iterate)
        named = {f"{s}/{k}": shape for k, shape in shapes.items() for s in ("xyuv" if k in halved else "xy")}
        sums = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in named.items()}
        for n, v in (pair for result in results for pair in result.sums.items()):
            sums[n] = sums.get(n, 0.0) + v.detach().double().cpu()
        return sums

    def learn(self, tasks: Mapping[int, Task], iterate: Iterate) -> dict[int, TaskResult]:
        """Run tasks, by number, and what each says."""
        if not self.method.closed:
            seeds = {i: derive_seed(*self.purpose, i) for i in tasks}
            pieces = {f"task {i}": partial(self._differentiate, task, iterate, seeds[i]) for i, task in tasks.items()}
            return dict(zip(tasks, self.executor.all(pieces).values(), strict=True))
        found = {}
        runs = self.runs(list(tasks.values()), iterate, products=iterate.basis.kind != "identity")
        for (i, task), (fit, run) in zip(tasks.items(), runs, strict=True):
            found[i] = self._result(task, fit, run)
            if not run.diverged:
                assert isinstance(self.method.objective, Regret)
                moments = moments_of(run, fit, self.method.objective)
                sums = {f"x/{k}": v for k, v in moments.x.items()} | {f"y/{k}": v for k, v in moments.y.items()}
                if i % 2:  # half of the tasks, against which the others can be held
                    sums |= {f"{h}/{k}": sums[f"{s}/{k}"] for k in halved_keys(iterate) for s, h in ("xu", "yv")}
                found[i] = replace(found[i], sums=sums | {"tasks": torch.ones(())})
        return found

    def runs(
        self, tasks: list[Task], iterate: Iterate, *, products: bool = False, referred: bool = True
    ) -> list[tuple[MaxDiagonal, Trajectory]]:
        """Plain runs, side by side where that is faster, each with its potential; `referred`: with its reference run."""
        reference = self.method.objective.reference if referred else None
        options: dict[str, Any] = {
            "lr": self.method.lr,
            "exact": self.method.exact,
            "reference": reference,
            "products": products,
        }
        if self.together and len(tasks) > 1:
            fit = self.fit(iterate, tasks[0])
            return [(fit, run) for run in run_many(tasks, fit, executor=self.executor, **options)]
        fits = [self.fit(iterate, task) for task in tasks]
        pieces = {f"task {i}": partial(run_inner, task, fits[i], **options) for i, task in enumerate(tasks)}
        return list(zip(fits, self.executor.all(pieces).values(), strict=True))

    def probe(self, tasks: Mapping[int, Task], iterate: Iterate) -> dict[int, Trajectory]:
        """Plain runs one by one, to see which tasks finish under these metrics."""
        how: dict[str, Any] = {"lr": self.method.lr, "exact": self.method.exact}
        return {i: run_inner(task, self.fit(iterate, task), **how) for i, task in tasks.items()}

    def _differentiate(self, task: Task, iterate: Iterate, seed: int) -> TaskResult:
        fit, generator = self.fit(iterate, task), torch.Generator().manual_seed(seed)
        how: dict[str, Any] = {"lr": self.method.lr, "exact": self.method.exact}
        found = self.method.estimator(task, fit, self.method.objective, **how, generator=generator)
        result = replace(self._result(task, fit, found.trajectory), cost=found.cost)
        if result.diverged:
            return result
        if not all_finite(found.grads):
            return replace(result, diverged="The hypergradient is not finite. Start from larger metrics.")
        sums = {f"gradient/log_d/{k}": v.detach() for k, v in found.grads.items()}
        sums |= {"value": torch.tensor(result.objective, dtype=torch.float64), "tasks": torch.ones(())}
        return replace(result, sums=sums | {"gradient/offsets": found.offsets.detach()})

    @torch.no_grad()
    def _result(self, task: Task, fit: MaxDiagonal, run: Trajectory) -> TaskResult:
        if run.diverged:
            return TaskResult(run.cost, run.diverged)
        paper = isinstance(self.method.objective, PaperBound)
        return TaskResult(
            cost=run.cost + Cost(gradients=2 * paper),
            diverged="",
            objective=float(self.method.objective.value(run, fit)),
            bound=float(Regret().value(run, fit)) + float(run.gaps.sum()) / run.lr if self.method.exact else math.nan,
            loss=float(run.losses.mean()),
            ends=ends_of(run),
            unsettled=_unsettled(task, run) if paper else 0.0,
        )


def ends_of(run: Trajectory) -> tuple[float, float]:
    """The first training loss of a run that finished, and the mean of the last tenth of them."""
    return float(run.losses[0]), float(run.losses[-max(1, round(TAIL_SHARE * len(run.losses))) :].mean())


def within_reach(ends: Sequence[tuple[float, float]]) -> float:
    """A target for the losses of later runs: nine tenths of the way from the median first loss to the worst last one.

    It is known before any held-out task is drawn, and all but unusual tasks of the family reach it.

    Example:
        >>> round(within_reach([(2.0, 1.0), (4.0, 0.5), (3.0, 0.75)]), 6)
        1.2
    """
    first, last = statistics.median(first for first, _ in ends), max(last for _, last in ends)
    return last + 0.1 * max(first - last, 0.0)


def _unsettled(task: Task, run: Trajectory) -> float:
    """|g| at the end relative to |g| at the start."""
    places = ((run.start, 0), (run.end, run.steps))
    first, last = (norm_of_all(gradient(task, params, task.batch(step))[1]) for params, step in places)
    return last / first if first > 0 else 0.0


@dataclass(frozen=True)
class Round:
    """What all tasks of an outer step said."""

    now: Iterate  # the metrics they were run with
    results: list[TaskResult]  # one per task
    sums: dict[str, Tensor]  # over the tasks that finished
    too_far: int  # how many tasks diverged that finish under the metrics of the step before
    cost: Cost  # of all runs

    @property
    def finished(self) -> list[TaskResult]:
        """The tasks that did not diverge."""
        return [result for result in self.results if not result.diverged]

    def mean(self, field: str) -> float:
        """The mean of a number over the tasks that finished."""
        values = [getattr(result, field) for result in self.finished]
        return statistics.fmean(values) if values else math.nan


def run_round(tasks: Mapping[int, Task], runner: TaskRunner, now: Iterate, good: Iterate | None) -> Round:
    """Run all tasks of an outer step, at a scale where they finish if this is the first: if no metrics are `good` yet.

    If the rule retreats, or if all tasks diverge, those that do are tried again with the good metrics.
    """
    now, found, cost = _find_scale(tasks, runner, now) if good is None else (now, {}, Cost())
    found |= runner.learn({i: task for i, task in tasks.items() if i not in found}, now)
    results, lost = [found[i] for i in tasks], {i: task for i, task in tasks.items() if found[i].diverged}
    cost, too_far = sum((result.cost for result in results), cost), 0
    if good is not None and (runner.method.rule.retreats or len(lost) == len(tasks)):
        again = runner.probe(lost, good).values()
        # a task that diverges under the last good metrics too is itself to blame
        too_far, cost = sum(not run.diverged for run in again), sum((run.cost for run in again), cost)
    return Round(now, results, runner.total(results, now), too_far, cost)


def _find_scale(
    tasks: Mapping[int, Task], runner: TaskRunner, start: Iterate
) -> tuple[Iterate, dict[int, TaskResult], Cost]:
    """The smallest power of four by which the metrics are multiplied so that every task finishes that can."""
    powers: dict[int, int] = {}
    kept: dict[int, TaskResult] = {}
    total = Cost()
    for power in range(RAISES + 1):
        left = {i: task for i, task in tasks.items() if i not in powers}
        trial = runner.inside(start.shifted(power * math.log(4.0)))
        run = runner.learn if runner.method.closed else runner.probe
        runs: Mapping[int, TaskResult | Trajectory] = run(left, trial)
        kept |= {i: run for i, run in runs.items() if isinstance(run, TaskResult)}
        total = sum((run.cost for run in runs.values()), total)
        powers |= {i: power for i, run in runs.items() if not run.diverged}
    largest = max(powers.values(), default=0)
    # Runs at this very scale are not made again, nor runs of a task that diverges at every scale; their cost is counted.
    same = {i: replace(result, cost=Cost()) for i, result in kept.items() if powers.get(i, largest) == largest}
    return runner.inside(start.shifted(largest * math.log(4.0))), same, total


def value_metrics(
    runner: TaskRunner, tasks: Sequence[Task], iterates: list[Iterate]
) -> tuple[list[list[float | None]], Cost]:
    """Run tasks with several metrics and value all of them against one comparator per task.

    The bound against the end of one's own run is smallest for metrics that hardly move. So all are compared with one point:
    the reference run's, if the objective has one, else the end with the lowest loss of all.
    For each task there are the values by iterate, None where a run diverged.
    """
    by_iterate = [runner.runs(list(tasks), iterate, referred=False) for iterate in iterates]
    found: list[list[float | None]] = []
    cost = Cost()
    for task, *entries in zip(tasks, *by_iterate, strict=True):
        finished = [run for _, run in entries if not run.diverged]
        objective = runner.method.objective
        if finished and objective.reference is not None:
            best, extra = objective.reference.run(task, finished[0].start, finished[0].steps)
            entries = [(fit, replace(run, reference=best)) for fit, run in entries]
            cost = cost + extra
        elif finished and (objective.looks_ahead or isinstance(objective, Regret)):
            objective = objective.held(min(finished, key=lambda run: ends_of(run)[1]))
        with torch.no_grad():
            found.append([None if run.diverged else float(objective.value(run, fit)) for fit, run in entries])
        cost = sum((run.cost for _, run in entries), cost)
    return found, cost


# the stages: the state between two outer steps, and one outer step as a pure function of it


SHORTLIST = 2
"""How many of the metrics tried are judged, beside the last."""

ALWAYS = -sys.float_info.max
"""The loss of metrics that are judged in any case."""

PLAIN = ("stage", "step", "factor", "target")
"""The fields of a state that are a number or nothing."""

CONVERGED_SHARE = 1e-2
"""A run has converged, for `PaperBound`, when its gradient has fallen to this share of the first."""


class NotConvergedWarning(UserWarning):
    """Runs end before they have converged, where the objective takes their ends for solutions."""


@dataclass(frozen=True)
class OuterState:
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
    def restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], basis: Basis = Basis()) -> "OuterState":  # noqa: B008
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
        state = state if kept is None else OuterState.restore(*kept, state.now.basis)
        saved = state.step
        try:
            with Progress("outer steps", state.step + self._left(state), done=state.step) as progress:
                while self._left(state):
                    state, step = self._advance(state)
                    record: dict[str, Any] = as_json(asdict(step))  # what is not a finite number is null
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

    def _begin(self) -> OuterState:
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
        state = OuterState(now, cost=self.found.cost)
        return replace(state, now=self._runner(state).inside(now))

    def _identity(self, state: OuterState) -> dict[str, Any]:
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
            **({} if method.lr == 1 else {"lr": method.lr}),
            **({} if method.max_norm is None else {"max_norm": method.max_norm}),
        }

    def _result(self, state: OuterState) -> LearnedOptimiser:
        potential, refine = state.now.apply(self.found.bound), self.method.refine
        kept = "" if potential.pieces == self.pieces else f"; kept one piece, of {self.pieces} that were tried"
        cost = {"gradient_evaluations": state.cost.gradients, "hessian_vector_products": state.cost.hvps}
        return LearnedOptimiser.from_potential(
            potential.requires_grad_(True),
            model=self.found.shapes,
            **described(self.family),
            gradient_scale=self.found.scale,
            objective=repr(self.method.objective),
            estimator=repr(self.method.estimator) + (f", then {refine!r}" if refine else "") + kept,
            seeds=(self.seed,),
            cost={**cost, "outer_steps": state.step, "seconds": state.cost.seconds},
            task_hashes=state.tasks,
            max_norm=self.method.max_norm,
            target_loss=state.target,
        )

    def _left(self, state: OuterState) -> int:
        """Outer steps to come, at most."""
        return sum(steps for _, steps in self.method.stages[state.stage :]) - len(state.changes)

    def _advance(self, state: OuterState) -> tuple[OuterState, OuterStep]:
        """One outer step."""
        began, step = time.perf_counter(), state.step + 1
        # tasks for one purpose are never those of another
        purpose, act = ("judge", self._judge) if self.method.stages[state.stage][0] == "judge" else ("train", self._learn)
        tasks = [draw_task(self.family, self.seed, purpose, step, i) for i in range(self.tasks_per_step)]
        new, record = act(state, tasks)
        seconds = time.perf_counter() - began
        cost = state.cost + Cost(record.gradients, record.hvps, seconds)
        seen = tuple(dict.fromkeys((*state.tasks, *(config_hash(task.config) for task in tasks))))
        return replace(new, step=step, cost=cost, tasks=seen), replace(record, seconds=seconds)

    def _spread_out(self, one: Iterate) -> Iterate:
        """As many pieces as the result shall have, which differ a little: the same ones would have the same gradients."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "pieces"))
        shapes = {k: (self.pieces, *v.shape[1:]) for k, v in one.log_d.items()}
        noise = {k: torch.randn(shape, generator=generator, dtype=torch.float64) for k, shape in shapes.items()}
        log_d = {k: v + 2 * self.method.spread * noise[k].to(v) for k, v in one.log_d.items()}
        return one.moved(log_d, one.offsets.expand(self.pieces).clone())

    def _runner(self, state: OuterState) -> TaskRunner:
        """What runs the tasks of the next outer step, with the method of the refinement from there on."""
        method, refine = self.method, self.method.refine
        if refine is not None and "refine" in [name for name, _ in method.stages[: state.stage + 1]]:
            objective = refine.objective or method.objective
            method = replace(method, estimator=refine.estimator, outer=refine.outer, objective=objective)
        purpose = self.seed, "estimate", state.step + 1
        return TaskRunner(self.found.bound, method, self.found.shapes, self.family.shared_loss, self.executor, purpose)

    # learning

    def _learn(self, state: OuterState, tasks: list[Task]) -> tuple[OuterState, OuterStep]:
        stage, limit = self.method.stages[state.stage]
        runner = self._runner(state)
        if stage == "refine" and len(state.now.offsets) < self.pieces:  # the closed form has learned one
            pieces = runner.inside(self._spread_out(state.now))
            state = replace(state, now=pieces, good=pieces)
        held = run_round(dict(enumerate(tasks)), runner, state.now, state.good)
        if not held.finished and not held.too_far:
            radius = self.method.max_norm
            kept = "" if radius is None else f" with max_norm = {radius:g}, which may be too small"
            raise ValueError(
                f"all {len(tasks)} tasks of outer step {state.step + 1} diverged{kept}, so that nothing can be learned. The "
                f"first: {held.results[0].diverged}"
            )
        if held.too_far and state.good is not None:
            # half way back to the last metrics under which the tasks that diverged finish, and half as far from there
            halfway = runner.inside(held.now.halfway(state.good))
            new, change = replace(state, now=halfway, factor=state.factor / 2, carried={}), math.inf
        else:
            new, change = self._move(state, held, runner)
        target = within_reach([result.ends for result in held.finished]) if held.finished else state.target
        new = replace(new, changes=(*state.changes, change), target=target)
        note, unsettled = self._verdict(new.changes, limit), held.mean("unsettled")
        if isinstance(runner.method.objective, PaperBound) and unsettled > CONVERGED_SHARE:
            warnings.warn(
                f"under PaperBound the end of a run stands for the solution, but in outer step {state.step + 1} the "
                f"gradients at the ends are still {unsettled:.2g} times the first ones: the objective then rewards not "
                "moving at all. Give the tasks more steps, or use objective=Regret().",
                NotConvergedWarning,
                stacklevel=5,
            )
        lost = tuple(f"task {i + 1}: {result.diverged}" for i, result in enumerate(held.results) if result.diverged)
        record = OuterStep(
            step=state.step + 1,
            stage=stage,
            objective=held.mean("objective"),
            bound=held.mean("bound"),
            loss=held.mean("loss"),
            change=change,
            unsettled=unsettled,
            diverged=lost,
            gradients=held.cost.gradients,
            hvps=held.cost.hvps,
            note=note,
        )
        return (self._next(new) if note else new), record

    def _move(self, state: OuterState, held: Round, runner: TaskRunner) -> tuple[OuterState, float]:
        values, w = (*state.values, held.mean("objective")), self.method.stopping.window
        update = runner.method.rule.update(held.now, held.sums, state.carried, state.factor)
        change = update.change
        if change is None and len(values) < 2 * w:
            change = math.inf
        elif change is None:
            before, after = statistics.fmean(values[-2 * w : -w]), statistics.fmean(values[-w:])
            change = abs(after - before) / max(abs(before), sys.float_info.min)
        known = (*state.candidates, replace(held.now, step=state.step + 1, loss=held.mean("loss")))
        places = SHORTLIST + sum(c.loss == ALWAYS for c in known)
        new = replace(
            state,
            now=runner.inside(update.iterate),
            good=held.now,
            carried=update.carried,
            factor=min(1.0, 1.5 * state.factor),
            candidates=tuple(sorted(known, key=lambda c: c.loss)[:places]),
            values=values,
        )
        return new, change

    def _verdict(self, changes: tuple[float, ...], limit: int) -> str:
        """Why the stage ends here, or nothing."""
        recent, stop = changes[-self.method.stopping.window :], self.method.stopping
        if len(recent) == stop.window and max(abs(c) for c in recent) <= stop.tolerance and stop.tolerance > 0:
            return f"converged: the objective changed by at most {stop.tolerance:g} in {stop.window} outer steps in a row"
        if len(changes) >= limit:
            last = f", the objective still changing by {recent[-1]:.2g}" if math.isfinite(recent[-1]) else ""
            return f"stopped at the limit of {limit} outer step{'s' * (limit > 1)}{last}"
        return ""

    def _next(self, state: OuterState) -> OuterState:
        """The next stage, with the metrics at hand."""
        return replace(state, stage=state.stage + 1, values=(), changes=(), carried={}, factor=1.0)

    # judging

    def _judge(self, state: OuterState, tasks: list[Task]) -> tuple[OuterState, OuterStep]:
        """The last metrics and the best of those before, on fresh tasks and against common comparators.

        The metrics that diverge least often win, and among these the ones with the smallest mean objective. The last metrics
        give way only to others whose mean is lower by two standard errors of the differences by task.
        """
        entrants, step = [*state.candidates, state.now], state.step + 1
        rows, cost = value_metrics(self._runner(state), tasks, entrants)
        finishable = [row for row in rows if any(v is not None for v in row)]
        if not finishable:
            raise ValueError(f"all {len(tasks)} tasks of outer step {step} diverged, so that nothing can be judged.")
        finished = [[v for v in values if v is not None] for values in zip(*finishable, strict=True)]
        scores = [(-len(values), statistics.fmean(values) if values else math.inf) for values in finished]
        winner, last = min(range(len(entrants)), key=scores.__getitem__), len(entrants) - 1
        if len(finished[last]) == len(finished[winner]):
            pairs = [(row[last], row[winner]) for row in finishable]
            gains = [a - b for a, b in pairs if a is not None and b is not None]
            spread = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
            if not gains or not statistics.fmean(gains) > 2 * spread:
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
        return self._next(replace(state, now=best, good=best, candidates=(best,))), record


def step_line(record: Mapping[str, Any]) -> str:
    """One outer step in a line."""
    numbers = [f"{n} {record[n]:.4g}" for n in ("objective", "bound", "loss") if record[n] is not None]
    lost = [f"{len(record['diverged'])} diverged"] if record["diverged"] else []
    return "  ".join([f"{record['stage']} {record['step']}", *numbers, *lost])

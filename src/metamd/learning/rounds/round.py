"""A first look at the tasks; then the round of an outer step, which trains on each task with the present metrics."""

import math
import statistics
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from metamd.inner.closed_form import LARGEST, Iterate, compared, moment_shapes, moments_of
from metamd.inner.derivatives import hessian_products
from metamd.inner.executor import Executor
from metamd.inner.objectives import PaperBound, Regret
from metamd.inner.run import Cost, Trajectory, all_finite, gradient, run_inner, scalar_loss
from metamd.inner.together import run_many
from metamd.learning.rounds.outer import Method, project
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.tying import Shape, Slot, some
from metamd.tasks.base import Config, Task, TaskFamily, config_hash, derive_seed

TAIL = 0.1
"""The last part of a run over which its losses are averaged to tell which end is best."""

POWERS = 20
"""Products with the Hessian that the power method takes."""

AFFORDED = 0.25
"""The share of the operations of a gradient that products with learned factors may take."""

RAISES = 12
"""How often the metrics of the first outer step are multiplied by four to find where no task diverges."""


Purpose = tuple[int | str, ...]
"""Words that everything random follows from: a seed, what it is for, and numbers."""


def draw_config(family: TaskFamily, *purpose: int | str) -> Config:
    """A config that depends on the family and on these words alone: a seed, what the task is for, and its number."""
    return family.sample(torch.Generator().manual_seed(derive_seed(*purpose)))


def draw(family: TaskFamily, *purpose: int | str) -> Task:
    """The task of that config."""
    return family.build(draw_config(family, *purpose))


# the look at the tasks before any long work: what would fail later is a sentence now


@dataclass(frozen=True)
class Findings:
    """What the first gradients of a family's tasks say."""

    bound: MaxDiagonal  # the potential, bound to the first task
    shapes: dict[str, tuple[int, ...]]  # of the first task's tensors
    scale: dict[str, float]  # root mean square of the first gradient, by key of the metric
    curvature: float | None  # the largest of the tasks' Hessians at the start, if it was asked for
    cost: Cost  # of looking


def first_look(family: TaskFamily, potential: MaxDiagonal, seed: int, count: int, *, curvature: bool = False) -> Findings:
    """Look at the start of the tasks of the first outer step, of which there are `count`."""
    if not isinstance(family, TaskFamily):
        raise TypeError(f"family must be a TaskFamily, got {type(family).__name__}. See metamd.tasks for some.")
    if isinstance(family, Sized) and not len(family):
        raise ValueError(f"the family {family.name!r} is empty. Give it at least one task to sample.")
    try:
        first = draw(family, seed, "train", 1, 0)
    except (LookupError, StopIteration, RuntimeError) as error:
        raise ValueError(f"the family {family.name!r} has no task to sample ({error!r}). Give it at least one.") from error
    start = first.init()
    if not start:
        raise ValueError(f"the tasks of {family.name!r} have no parameters. task.init() must return at least one tensor.")
    bound = affording(potential.bind(start), first)
    shapes = {n: tuple(x.shape) for n, x in start.items()}
    found: list[dict[str, Any]] = []
    for i in range(count):
        try:
            task = draw(family, seed, "train", 1, i)
            found.append(look(task, bound, shapes) | ({"curvature": largest_curvature(task, seed)} if curvature else {}))
        except ValueError as error:
            raise ValueError(f"task {i + 1} of the first {count}: {error}") from error
    finite = [row for row in found if all(map(math.isfinite, (row["loss"], *(s for s, _ in row["squares"].values()))))]
    if not finite:
        raise ValueError(
            f"the loss or its gradient is not finite (loss {found[0]['loss']}) at the start of all {count} tasks that were "
            "tried, before any step was taken. Check the data and the initialisation."
        )
    scale = gradient_scale([row["squares"] for row in finite])
    bends = [row["curvature"] for row in finite if math.isfinite(row.get("curvature", math.nan))]
    cost = Cost(gradients=count * (1 + curvature), hvps=POWERS * count * curvature)
    return Findings(bound, shapes, scale, max(bends, default=None), cost)


def squares_by_key(grads: Params, slots: Mapping[str, Slot]) -> dict[str, list[float]]:
    """The sum and the number of the squares of a gradient, by key of the metric."""
    squares: dict[str, list[float]] = {}
    for n, g in grads.items():
        pair = squares.setdefault(slots[n].key, [0.0, 0.0])
        pair[0] += float(g.square().sum(dtype=torch.float64))
        pair[1] += g.numel()
    return squares


def gradient_scale(rows: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The root mean square of the first gradients, by key of the metric: rows hold sums of squares and their numbers."""
    keys = dict.fromkeys(k for row in rows for k in row)
    totals = {k: [sum(row[k][j] for row in rows if k in row) for j in (0, 1)] for k in keys}
    return {k: math.sqrt(s / n) for k, (s, n) in totals.items() if n}


def largest_curvature(task: Task, seed: int) -> float:
    """|lambda|, the largest eigenvalue of the Hessian at the start, by the power method."""
    start = task.init()
    generator = torch.Generator().manual_seed(derive_seed(seed, "curvature"))
    tangents = {n: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for n, x in start.items()}
    found = 0.0
    for _ in range(POWERS):
        length = math.sqrt(sum(float(v.square().sum(dtype=torch.float64)) for v in tangents.values()))
        if not 0 < length < math.inf:
            break
        units = {n: (v / length).unsqueeze(0) for n, v in tangents.items()}
        _, _, products = hessian_products(task, start, task.batch(0), units)
        tangents = {n: h[0] for n, h in products.items()}
        found = math.sqrt(sum(float(h.square().sum(dtype=torch.float64)) for h in tangents.values()))
    return found


def look(task: Task, bound: MaxDiagonal, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The loss at the start, and by key the sum and the number of the squares of the first gradient."""
    start = {n: x.detach().requires_grad_() for n, x in task.init().items()}
    here = {n: tuple(x.shape) for n, x in start.items()}
    for n in sorted(set(here) | set(shapes)) if bound.tying == "parameter" else ():
        if here.get(n) != shapes.get(n):
            raise ValueError(
                f"its tensor {n!r} has the shape {here.get(n)} where the first task's has {shapes.get(n)}, and the tying "
                '"parameter" learns one metric for each entry. Use tying="role" or "tensor" for tasks of different shapes.'
            )
    slots = bound.bind(start).slots
    loss = scalar_loss(task, start, task.batch(0))
    grads = torch.autograd.grad(loss, list(start.values()), allow_unused=True)
    ignored = {n: None for n, g in zip(start, grads, strict=True) if g is None}
    if ignored:
        raise ValueError(
            f"the loss ignores {some(ignored)}, so that nothing can be learned about it. Leave such parameters out of "
            "task.init()."
        )
    squares = squares_by_key(dict(zip(start, grads, strict=True)), slots)
    return {"loss": float(loss.detach()), "squares": squares}


def affording(potential: MaxDiagonal, task: Task) -> MaxDiagonal:
    """The same potential; under `rank="auto"` its basis keeps all directions of the sides that can be afforded.

    With `LARGEST` directions a side costs two thin products, with all n of them one product of 2n operations for each number
    of the tensor. The cheapest sides come first, until a quarter of the operations of a gradient is spent. Convolutions,
    whose kernels are used at many places, leave room for more than matrices do. The potential, bound to the task's
    parameters, gets a new basis in place.
    """
    basis = potential.basis
    if basis.rank != "auto":
        return potential
    thin: dict[str, int] = {}
    whole: dict[str, int] = {}
    for place in map(basis.places.__getitem__, basis.learnable()):
        numbers, factor, n = math.prod(place.shape), f"right/{place.key}", place.sizes["right"]
        thin[factor] = thin.get(factor, 0) + 4 * numbers * min(LARGEST, n)
        whole[factor] = whole.get(factor, 0) + 2 * numbers * n
    left = AFFORDED * gradient_operations(task) - sum(thin.values())
    kept = []
    for factor in sorted(whole, key=lambda f: whole[f] - thin[f]):
        extra = whole[factor] - thin[factor]
        if extra <= max(left, 0):
            kept.append(factor)
            left -= extra
    potential.basis = basis.with_factors(basis.factors, kept)
    return potential


def gradient_operations(task: Task) -> int:
    """Multiplications and additions of loss and gradient of one batch, counted: three times those of the loss."""
    with FlopCounterMode(display=False) as counter:
        task.loss(task.init(), task.batch(0))
    return 3 * int(counter.get_total_flops())


# the round


@dataclass(frozen=True)
class TaskResult:
    """What one task says about the metrics it was trained with."""

    task: str  # the hash of its config
    cost: Cost  # of all this
    diverged: str  # why the run was given up; empty if it was not
    value: float = math.inf  # the objective
    bound: float = math.inf  # on the regret against the end of the run, certified if the steps were exact
    loss: float = math.inf  # mean training loss over the run
    ends: tuple[float, float] = (math.inf, math.inf)  # the first training loss, and the mean of the last tenth of them
    unsettled: float = 0.0  # the gradient at the end of the run relative to that at its start, where that is asked for
    sums: dict[str, Tensor] = field(default_factory=dict)  # what it adds to the sums of the outer step, if it finished


@dataclass(frozen=True)
class Learner:
    """How a task is run and what is kept of it."""

    potential: MaxDiagonal  # the structure of the potential, whose metrics are given each time
    method: Method  # objective, estimator, kind of step, and the norm at which the metrics stay
    shapes: Mapping[str, Shape]  # of the tensors over which that norm is taken
    together: bool = False  # whether one task's loss serves all, so that small ones can run side by side
    executor: Executor = field(default_factory=Executor)  # where the others run

    def fit(self, iterate: Iterate, task: Task) -> MaxDiagonal:
        """The potential with these metrics for the tensors of a task."""
        return iterate.apply(self.potential).bind(task.init()).requires_grad_(False)

    def inside(self, iterate: Iterate) -> Iterate:
        """The nearest metrics at ||m_j||_2 <= C."""
        radius = self.method.max_norm
        return iterate if radius is None else project(iterate, radius, self.potential, self.shapes)

    def total(self, results: Sequence[TaskResult], iterate: Iterate) -> dict[str, Tensor]:
        """The sums over the tasks that finished, in float64, with their number under "tasks"."""
        # zeros of the closed form's moments: it may be that no task that finished has a certain tensor, or is of one half
        shapes, halved = moment_shapes(iterate) if self.method.closed else {}, compared(iterate)
        named = {f"{s}/{k}": shape for k, shape in shapes.items() for s in ("xyuv" if k in halved else "xy")}
        sums = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in named.items()}
        for n, v in (pair for result in results for pair in result.sums.items()):
            sums[n] = sums.get(n, 0.0) + v.detach().double().cpu()
        return sums

    def learn(self, tasks: Mapping[int, Task], iterate: Iterate, purpose: Purpose) -> dict[int, TaskResult]:
        """Run tasks, by number, and what each says; the purpose seeds estimators that are random."""
        if not self.method.closed:
            pieces = {
                f"task {i}": partial(self._differentiate, task, iterate, derive_seed(*purpose, i))
                for i, task in tasks.items()
            }
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
                    sums |= {f"{h}/{k}": sums[f"{s}/{k}"] for k in compared(iterate) for s, h in ("xu", "yv")}
                found[i] = replace(found[i], sums=sums | {"tasks": torch.ones(())})
        return found

    def runs(
        self, tasks: list[Task], iterate: Iterate, *, products: bool = False, referred: bool = True
    ) -> list[tuple[MaxDiagonal, Trajectory]]:
        """Plain runs, side by side where that is faster, each with its potential; `referred`: with its reference run."""
        reference = self.method.objective.reference if referred else None
        options: dict[str, Any] = {"exact": self.method.exact, "reference": reference, "products": products}
        if self.together and len(tasks) > 1:
            fit = self.fit(iterate, tasks[0])
            return [(fit, run) for run in run_many(tasks, fit, executor=self.executor, **options)]
        fits = [self.fit(iterate, task) for task in tasks]
        pieces = {f"task {i}": partial(run_inner, task, fits[i], **options) for i, task in enumerate(tasks)}
        return list(zip(fits, self.executor.all(pieces).values(), strict=True))

    def survives(self, task: Task, iterate: Iterate) -> tuple[bool, Cost]:
        """Whether a task finishes under these metrics, and what it took to see."""
        run = run_inner(task, self.fit(iterate, task), exact=self.method.exact)
        return not run.diverged, run.cost

    def _differentiate(self, task: Task, iterate: Iterate, seed: int) -> TaskResult:
        fit, generator = self.fit(iterate, task), torch.Generator().manual_seed(seed)
        found = self.method.estimator(task, fit, self.method.objective, exact=self.method.exact, generator=generator)
        result = replace(self._result(task, fit, found.trajectory), cost=found.cost)
        if not result.diverged and not all_finite(found.grads):
            result = replace(result, diverged="The hypergradient is not finite. Start from larger metrics.")
        if result.diverged:
            return result
        sums = {f"gradient/log_d/{k}": v.detach() for k, v in found.grads.items()}
        sums["gradient/offsets"] = found.offsets.detach()
        sums |= {"value": torch.tensor(result.value, dtype=torch.float64), "tasks": torch.ones(())}
        return replace(result, sums=sums)

    @torch.no_grad()
    def _result(self, task: Task, fit: MaxDiagonal, run: Trajectory) -> TaskResult:
        result = TaskResult(config_hash(task.config), run.cost, run.diverged)
        if run.diverged:
            return result
        if isinstance(self.method.objective, PaperBound):
            result = replace(result, unsettled=_unsettled(task, run), cost=run.cost + Cost(gradients=2))
        return replace(
            result,
            value=float(self.method.objective.value(run, fit)),
            bound=float(Regret().value(run, fit)) + float(run.gaps.sum()) / run.lr if self.method.exact else math.nan,
            loss=float(run.losses.mean()),
            ends=ends_of(run),
        )


def ends_of(run: Trajectory) -> tuple[float, float]:
    """The first training loss of a run that finished, and the mean of the last tenth of them."""
    return float(run.losses[0]), float(run.losses[-max(1, round(TAIL * len(run.losses))) :].mean())


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
    norms = []
    for params, step in ((run.start, 0), (run.end, run.steps)):
        _, grads = gradient(task, params, task.batch(step))
        norms.append(math.sqrt(sum(float(g.square().sum(dtype=torch.float64)) for g in grads.values())))
    return norms[1] / norms[0] if norms[0] > 0 else 0.0


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

    @property
    def diverged(self) -> tuple[str, ...]:
        """A sentence for each of the others."""
        return tuple(f"task {i + 1}: {result.diverged}" for i, result in enumerate(self.results) if result.diverged)

    def mean(self, field: str) -> float:
        """The mean of a number over the tasks that finished."""
        values = [getattr(result, field) for result in self.finished]
        return math.fsum(values) / len(values) if values else math.nan


def run_round(
    tasks: Mapping[int, Task],
    learner: Learner,
    now: Iterate,
    good: Iterate | None,
    *,
    retreats: bool,
    purpose: Purpose,
) -> Round:
    """Run all tasks of an outer step, at a scale where they finish if this is the first: if no metrics are `good` yet.

    With `retreats`, it is asked of tasks that diverge if the last step was to blame; if all do, it is asked in any case.
    """
    found: dict[int, TaskResult] = {}
    cost, too_far = Cost(), 0
    if good is None:
        now, found, cost = _find_scale(tasks, learner, now, purpose)
    found |= learner.learn({i: task for i, task in tasks.items() if i not in found}, now, purpose)
    results = [found[i] for i in tasks]
    if good is not None and (retreats or all(result.diverged for result in results)):
        # a task that diverges under the last good metrics too is itself to blame
        answers = [learner.survives(task, good) for i, task in tasks.items() if found[i].diverged]
        too_far = sum(fine for fine, _ in answers)
        cost = sum((extra for _, extra in answers), cost)
    return Round(now, results, learner.total(results, now), too_far, sum((result.cost for result in results), cost))


def _find_scale(
    tasks: Mapping[int, Task], learner: Learner, start: Iterate, purpose: Purpose
) -> tuple[Iterate, dict[int, TaskResult], Cost]:
    """The smallest power of four by which the metrics are multiplied so that every task finishes that can."""
    powers: dict[int, int | None] = dict.fromkeys(tasks)
    kept: dict[int, TaskResult] = {}
    total = Cost()
    for power in range(RAISES + 1):
        left = {i: task for i, task in tasks.items() if powers[i] is None}
        trial = learner.inside(start.shifted(power * math.log(4.0)))
        if learner.method.closed:
            kept |= (results := learner.learn(left, trial, purpose))
            answers = {i: (not result.diverged, result.cost) for i, result in results.items()}
        else:
            answers = {i: learner.survives(task, trial) for i, task in left.items()}
        total = sum((cost for _, cost in answers.values()), total)
        powers |= {i: power for i, (fine, _) in answers.items() if fine}
    largest = max((power for power in powers.values() if power is not None), default=0)
    # A run that was made at this very scale is not made again, nor that of a task which nothing helps; it is paid for.
    same = {i: replace(result, cost=Cost()) for i, result in kept.items() if powers[i] in (largest, None)}
    return learner.inside(start.shifted(largest * math.log(4.0))), same, total


def contest(learner: Learner, tasks: Sequence[Task], iterates: list[Iterate]) -> tuple[list[list[float | None]], Cost]:
    """Run tasks with several metrics and value all of them against one comparator per task.

    The bound against the end of one's own run is smallest for metrics that hardly move. So all are compared with one point:
    the reference run's, if the objective has one, else the end with the lowest loss of all.
    For each task there are the values by iterate, None where a run diverged.
    """
    by_iterate = [learner.runs(list(tasks), iterate, referred=False) for iterate in iterates]
    found: list[list[float | None]] = []
    cost = Cost()
    for row, task in enumerate(tasks):
        entries = [runs[row] for runs in by_iterate]
        finished = [run for _, run in entries if not run.diverged]
        objective = learner.method.objective
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

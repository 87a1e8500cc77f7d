"""How a learned geometry is best used on its family: metric, momentum, schedule, average and factor, by training tasks.

The bound that a geometry minimises is for a run without momentum at a constant rate. Here runs of the family's own
training tasks decide the rest, so that nothing is left to tune on the next task.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from metamd.files.learned import LearnedOptimiser, total_cost
from metamd.files.progress import ends_with
from metamd.files.store import Journal, Result
from metamd.files.usage import Average, Metric, Schedule, Usage
from metamd.inner.executor import Executor
from metamd.inner.objectives import Reference
from metamd.inner.run import OptimiserSteps, StepRule, all_finite, seconds_per_step, train
from metamd.inner.together import Stacked, StackedSteps, small
from metamd.learning.parts import Forecast, Parts, parts_of, stage
from metamd.learning.reference import draw_tasks, reference_identity, solved, tuned_reference
from metamd.learning.score import (
    LOOKS,
    PHASES,
    SCORE,
    JudgedOn,
    RunScores,
    can_be_judged,
    judged_run,
    looked_at,
    mean_and_parts,
    run_record,
    start_of,
)
from metamd.optimiser.averaging import tail_share
from metamd.optimiser.guard import energy
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials.base import Active, Move, Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import Array
from metamd.potentials.online import OWN_AVERAGE, Online, Point, State
from metamd.tasks.base import Task, TaskFamily, config_hash
from metamd.tasks.wrapped import Counted

Prefer = Literal["steps", "seconds"]
Used = tuple[Usage, Online | None]
"""A usage, and its online metric with its scales if it has one."""

UsageWatch = Callable[[Usage, Online | None, float], None]
"""Called with every usage tried, its online metric if it has one, and its score."""

RULES = (
    Online(),
    Online("polar", beta=0.7, signal=0.95, whiten=4),
    Online("polar", beta=0.9, signal=0.95, whiten=4),
    Online("eigen", beta=0.9, refresh=2),
    Online("eigen", beta=0.98, refresh=2),
)
"""Online metrics that a usage may have, before their scales are learned."""

WHITENED = (2, 0)
"""How far polar steps may be whitened instead, where a rule says how far: less, or exactly."""

BLOCKS = (64, 32)
"""Rows that polar steps whiten together, three times, for usages that are to take few seconds.

On training tasks of an MLP and LeNet, 64 rows cost 2 to 4 % of the mean loss, and 32 rows 5 to 9 %. Directions that are
found every second step cost 8 % and save less."""

SCALED = 2
"""Tasks on which scales of online metrics are learned: what all of them have in common is corrected by the factor."""

ROUNDS = 2
"""How often a scale is learned from runs with the last one."""

FARTHEST = 40
"""Half powers of 2 that a factor may be away from 1; a climb that comes here follows rounding."""

FIRST = 2
"""Tasks on which factors are found and changes compared. Metrics and momenta differ by more and are compared on one: with
two, and with six for the better of two metrics, the usages of small networks were as good on other tasks."""

FINALISTS = 2
"""How many pairs of metric and momentum get factors of their own, and later how many schedules, averages and whitenings:
which of two near ones is better changes with their factors. (On MLPs by role, LeNets, pictures and tables, a third was never
chosen.)"""

CLIMBED = 3
"""About how many factors are tried until neither neighbour is better, to tell the time that is left."""

SPREAD = 2.25
"""How many times the smallest weight of a schedule the largest may be; 1 gives the linear decay."""


# runs under a usage


@dataclass(frozen=True)
class Tally:
    """What a run with an online metric says about the scale of every key: E = (s x + y/s) / 2."""

    x: dict[str, float]  # |u - theta_1|^2 in the mean metric (its last, for sums)
    y: dict[str, float]  # sum_t r_t^2 c_t' a_t^-1 c_t, r_t the schedule


@dataclass(frozen=True)
class UsageRun:
    """A training run."""

    loss: float  # the mean over the steps that are looked at, of a tail average where it has one; infinite if it diverged
    end: dict[str, Tensor]  # the last parameters, or their tail average
    way: tuple[float, ...] = ()  # the same by equal parts of the run
    tally: Tally | None = None  # of an online metric, against a comparator
    energies: tuple[float, ...] = ()  # |g_t|^2 in the dual norm of every step's metric, if asked for


def run_usage(
    task: Task,
    potential: MaxDiagonal,
    usage: Usage,
    *,
    online: Online | None = None,
    comparator: Params | None = None,
    measure: bool = False,
    steps: int | None = None,
) -> UsageRun:
    """Train a task with a geometry, bound to its tensors, as `MetaMD` does; `comparator` is u, to tally against."""
    steps = task.steps if steps is None else steps
    rule = steps_of(task, potential, usage, online, measure or comparator is not None, steps)
    loss, way = judged_run(task, rule, steps, (lambda: rule.x) if rule.tail else None)
    if not math.isfinite(loss) or not all_finite(rule.x):
        return UsageRun(math.inf, rule.x)
    tally = None if comparator is None else rule.tally(task.init(), comparator)
    return UsageRun(loss, rule.x, way, tally, tuple(rule.energies))


def steps_of(
    task: Task,
    potential: MaxDiagonal,
    usage: Usage,
    online: Online | None = None,
    measured: bool = False,
    steps: int | None = None,
) -> "UsageSteps":
    """The steps of a task from its start."""
    start = {n: x.detach() for n, x in task.init().items()}
    return UsageSteps(potential, usage, start, task.steps if steps is None else steps, online, measured)


class UsageSteps:
    """Steps with a bound potential as a usage says: x is judged, z the iterate behind its average.

    If they are measured, they keep the energy of every step, and what a tally of an online metric is made of.
    """

    def __init__(
        self, potential: MaxDiagonal, usage: Usage, start: Params, total: int, online: Online | None, measured: bool
    ) -> None:
        self.x, self.z = ({n: v.clone() for n, v in start.items()} for _ in range(2))
        centred = potential.centred_at(start)
        self.phi = centred.fixed({n: centred.metric(n).detach() for n in start})
        self.usage, self.total, self.tail, self.taken = usage, total, usage.averaging == "tail", 0
        self.online, self.measured = online, measured
        if online is not None and online.rule == "polar" and measured:
            # what is told of a polar step is told where its direction is found: in every one, for this
            self.online = replace(online, refresh=0)
        self.active: Active | None = None
        self.states: dict[str, State] = {n: {} for n in start}
        self.energies: list[float] = []
        self.metrics: dict[str, Tensor] = {}
        self.y: dict[str, float] = {}

    @property
    def params(self) -> Params:
        """A tail average is taken of iterates that know nothing of it."""
        return self.z if self.tail else self.x

    @torch.no_grad()
    def step(self, loss: Tensor, grads: Params) -> str:
        """One step of all tensors."""
        usage, share = self.usage, self.usage.share(self.taken, self.total)
        lr = usage.lr * share / (1 - usage.momentum)
        moves = {n: Move(g, lr) for n, g in grads.items()}
        if usage.metric == "online" and self.online is not None:
            self.energies += [0.0] * self.measured
            watch = partial(self._add, self.online, share) if self.measured else None
            self.online.advance(self.phi, [Point(n, self.z[n], move, self.states[n]) for n, move in moves.items()], watch)
        else:
            self.energies += [energy(self.phi, self.active, grads)] if self.measured else []
            self.active = self.phi.step(self.z, moves, active=self.active, into=self.z).active
        self.taken += 1
        for n, x in self.x.items():
            x.lerp_(self.z[n], tail_share(self.taken) if self.tail else 1 - usage.momentum)
        return ""

    def _add(self, online: Online, share: float, name: str, energy: Tensor, metric: Tensor) -> None:
        """Note what a step of a tensor met, r_t being the share."""
        key = self.phi.slots[name].key
        self.y[key] = self.y.get(key, 0.0) + share**2 * float(energy)
        self.energies[-1] += online.step_size(key) * float(energy)
        if online.rule == "sum" or name not in self.metrics:
            self.metrics[name] = metric.clone()
        else:
            self.metrics[name].add_(metric)

    def tally(self, start: Params, comparator: Params) -> Tally | None:
        """What the steps with an online metric say about its scales."""
        if self.online is None:
            return None
        x: dict[str, float] = {}
        for name, metric in self.metrics.items():
            mean = metric if self.online.rule == "sum" else metric / self.total
            key = self.phi.slots[name].key
            x[key] = x.get(key, 0.0) + self.online.distance(self.phi, name, comparator[name] - start[name], mean)
        return Tally(x, self.y)


def run_together(tasks: Sequence[Task], potential: MaxDiagonal, usages: Sequence[Usage]) -> list[UsageRun]:
    """The same as `run_usage` for each task with its usage, side by side; the tasks share one loss function.

    The metric is a diagonal of one piece.
    """
    stacked, steps = Stacked(tasks), tasks[0].steps
    rule = StackedSteps(stacked, potential, usages, steps, looked_at=partial(looked_at, steps=steps))
    train(stacked, rule, steps, until=None)
    outcomes = []
    for i in range(len(usages)):
        end = rule.end(i)
        finished = rule.watched.taken[i] == steps and all_finite(end)
        mean, way = mean_and_parts(np.array([values[i] for values in rule.seen])) if finished else (math.inf, ())
        outcomes.append(UsageRun(mean, end, way))
    return outcomes


# scales of an online metric


def learn_scale(
    learned: LearnedOptimiser,
    solved: Sequence[tuple[Task, Params]],
    online: Online,
    lr: float,
    parts: Parts,
    *,
    rounds: int = ROUNDS,
) -> Online:
    """The scale of every key that minimises the bound (s x + y/s) / 2 over training tasks: s = sqrt(y/x).

    It holds the mean metric of the run fixed, as the closed form holds the gradients. Each task comes with the end of a
    reference run. With the first scale, steps are as long as in that run, whose rate is `lr`.
    """
    task = solved[0][0]
    phi, params = learned.potential.bind(task.init()), task.init()
    usage = Usage("online", momentum=0.0 if online.rule == "polar" else 0.8, schedule="linear")
    unit = {phi.slots[name].key: _unit_step(phi, name, x, online, task.steps) for name, x in params.items()}
    found = replace(online, scale={key: step / lr for key, step in unit.items()})
    for _ in range(rounds):
        runs = parts.runs(partial(_tallied, phi, usage, found), solved)
        tallies = [tally for tally in runs if tally is not None]
        if not tallies:
            found = replace(found, scale={k: 2 * s for k, s in found.scale.items()})
            continue
        x, y = ({k: sum(getattr(t, side).get(k, 0.0) for t in tallies) for k in found.scale} for side in ("x", "y"))
        found = replace(found, scale={k: math.sqrt(y[k] / x[k]) if x[k] and y[k] else s for k, s in found.scale.items()})
    return found


def _tallied(phi: MaxDiagonal, usage: Usage, online: Online, task: Task, comparator: Params) -> Tally | None:
    run = run_usage(task, phi, usage, online=online, comparator=comparator)
    return run.tally if math.isfinite(run.loss) else None


def _unit_step(potential: MaxDiagonal, name: str, x: Tensor, online: Online, steps: int) -> float:
    """How far a number of this tensor moves in a step with s = 1, roughly."""
    if online.rule == "polar" and x.ndim > 1 and x.numel():
        longer = max(x.shape[0], x.numel() // x.shape[0])
        return float((1 / potential.metric(name)[0]).mean().detach() / longer) ** 0.5
    return 1 / math.sqrt(steps) if online.rule == "sum" else 1.0


# schedules


def learn_knots(runs: Sequence[Sequence[float]], *, spread: float = SPREAD) -> tuple[float, ...]:
    """The learned schedule as a few numbers, at equal distances over the run, between which it is linear.

    It minimises a bound on the last iterate by the energies |g_t|^2 of runs [Defazio2023]. For convex l, any w_0 .. w_T > 0
    and rates eta_t = w_t (w_{t+1} + ... + w_T) / (w_0 + ... + w_T), mirror descent has

        l(theta_T) - l(u)  <=  (|u - theta_0|^2_D + sum_t w_t^2 |g_t|^2_{D^-1}) / (2 sum_t w_t),

    which w_t ~ 1/|g_t|^2 minimises: equal energies give the linear decay, gradients that shrink give a warm-up. The energies
    are held fixed, as the closed form of a metric holds the gradients. But where a run fits its data they fall by hundreds
    of times *because* it gets on, and the warm-up that follows would stop it from getting on. So the weights are taken by
    tenth of the run, smoothed by medians, and raised to the power at which the largest is `spread` times the smallest.
    """
    count = min(PHASES, *(len(run) for run in runs))
    means = np.mean([[part.mean() for part in np.array_split(np.asarray(run, dtype=np.float64), count)] for run in runs], 0)
    if not 0 < means.min() <= means.max() < math.inf:
        means = np.ones(count)
    logs = -_smooth(np.log(means))
    logs *= min(1.0, math.log(spread) / max(float(np.ptp(logs)), 1e-12))
    later = np.append(np.cumsum(np.exp(logs - logs.max())[::-1])[::-1], 0.0)
    places = np.arange(count + 1) - 0.5  # a phase has its weight in its middle; at the ends of the run it goes on as it did
    inner = np.interp(places, np.arange(count), logs)
    if count > 1:
        inner[0], inner[-1] = 1.5 * logs[0] - 0.5 * logs[1], 1.5 * logs[-1] - 0.5 * logs[-2]
    rates = np.exp(inner - logs.max()) * later
    return tuple(float(f"{rate:.12g}") for rate in rates / rates.max())


def _smooth(values: Array) -> Array:
    """Running medians of three, with Tukey's rule at the ends: the median of the value, its neighbour and the line to it."""
    if len(values) < 4:
        return values
    found = np.array(values)
    found[1:-1] = np.median([values[:-2], values[1:-1], values[2:]], axis=0)
    found[0] = np.median([values[0], found[1], 3 * found[1] - 2 * found[2]])
    found[-1] = np.median([values[-1], found[-2], 3 * found[-2] - 2 * found[-3]])
    return found


# the choice


def rules_for_refresh(refresh: int) -> tuple[Online, ...]:
    """The same rules with the directions of polar steps found every so many steps, to choose a usage of cheaper steps.

    Example:
        >>> [rule.refresh for rule in rules_for_refresh(4) if rule.rule == "polar"]
        [4, 4]
    """
    return tuple(replace(rule, refresh=refresh) if rule.rule == "polar" else rule for rule in RULES)


@dataclass(frozen=True)
class Choices:
    """What a usage is chosen from, and by what.

    Args:
        metrics: "learned", "online".
        momenta: a usage with momentum has no other average.
        schedules: "linear", "constant", "quadratic", "learned". Metrics and momenta are compared with the first.
        averages: "constant", "tail". Others are tried against the first.
        factors: on the learned steps; if not given all powers of the root of 2, as far as a next one is better.
        rules: online metrics, whose scales are learned first; `RULES` if not given, for few seconds also with polar steps
            that whiten rows by blocks. The rules "polar" and "eigen" average gradients, so have no momentum too.
        judged_on: "auto" judges the end of a run on validation data of the training tasks, where they have some; "train"
            never does; "validation" looks at nothing else, for usages that generalise where low training losses do not.
        prefer: "steps" compares runs of T steps. "seconds" compares what is reached in the time of T steps of the quickest
            usage: the others take fewer steps, by the measured time of a step of `MetaMD` on this machine.
        tasks: to decide on. The end of a run is noisy: few tasks decide by chance.

    Example:
        >>> Choices().neighbour(1.0, -1)
        0.707
    """

    metrics: Sequence[Metric] = get_args(Metric)
    momenta: Sequence[float] = (0.0, 0.9)
    schedules: Sequence[Schedule] = ("linear", "constant", "quadratic", "learned")
    averages: Sequence[Average] = ("tail", "constant")
    factors: Sequence[float] | None = None
    rules: Sequence[Online] | None = None
    judged_on: JudgedOn = "auto"
    prefer: Prefer = "steps"
    tasks: int = 6

    def __post_init__(self) -> None:
        if self.judged_on not in get_args(JudgedOn):
            raise ValueError(
                f'judged_on must be "auto", "train" or "validation", got {self.judged_on!r}. Test data is for what is '
                "reported."
            )
        if self.prefer not in get_args(Prefer):
            raise ValueError(f'prefer must be "steps" or "seconds", got {self.prefer!r}.')
        known = {"metrics": get_args(Metric), "schedules": get_args(Schedule), "averages": get_args(Average)}
        for name in ("momenta", "schedules", "averages", "factors", "rules", "metrics"):
            offered = getattr(self, name)
            if offered is not None and not offered:
                raise ValueError(f"{name} must have one to choose from at least, got none. Leave it out for the usual ones.")
            wrong = [one for one in offered or () if name in known and one not in known[name]]
            if wrong:
                raise ValueError(f"{name} must be some of {', '.join(map(repr, known[name]))}; got {wrong[0]!r}.")
        if not all(0 < factor < math.inf for factor in self.factors or ()):
            raise ValueError(f"factors must be positive numbers, got {self.factors}. 1.0 takes the steps as they are.")

    @property
    def online(self) -> tuple[Online, ...]:
        """The online metrics to try, before their scales are learned."""
        if "online" not in self.metrics:
            return ()
        if self.rules is not None:
            return tuple(self.rules)
        cheaper = (replace(rule, whiten=3, block=n) for n in BLOCKS for rule in RULES if rule.rule == "polar")
        return RULES if self.prefer == "steps" else (*RULES, *cheaper)

    def nearest(self, factor: float) -> float:
        """The factor to begin with: this one, or the offered one whose ratio to it is nearest to one."""
        return min(self.factors or (factor,), key=lambda f: abs(math.log(f / factor)))

    def neighbour(self, factor: float, way: int) -> float | None:
        """The next larger factor, or the next smaller one for a way of -1; None where there is none."""
        if self.factors is not None:
            offered = sorted(self.factors)
            place = offered.index(factor) + way
            return offered[place] if 0 <= place < len(offered) else None
        place = round(2 * math.log2(factor)) + way
        return float(f"{2 ** (place / 2):.3g}") if abs(place) <= FARTHEST else None


@ends_with(LearnedOptimiser.summary)
def learn_usage(
    learned: LearnedOptimiser,
    family: TaskFamily,
    choices: Choices = Choices(),  # noqa: B008
    *,
    reference: Reference | None = None,
    seed: int = 0,
    watch: UsageWatch | None = None,
    journal: Journal | None = None,
    workers: int | Executor = 1,
    **changes: Any,
) -> LearnedOptimiser:
    """Choose metric, momentum, schedule, average and factor on training tasks; the choice is stored in the file.

    Each usage has a score, and the lowest wins. It is the mean of three logarithms: of the mean loss over the run, of the
    losses on the way, and of the loss at the end. So ratios count, wherever in the run they are:

        score = exp E (log(mean_k L_k + e) + mean_k log(L_k + e) + log(L + e)) / 3,

    L_k are the mean losses of ten equal parts of the run, each of about two steps, the same ones for all runs of a task. L
    is the loss at the end, judged as `Choices.judged_on` says. e is the standard error of the losses of ten batches at the
    start of the task plus the rounding of the first loss. So chance between batches decides nothing, and without noise every
    digit counts. Losses are counted from the smallest possible one where the task knows it, else from the lowest seen if
    that is below zero. A usage that diverges on any task is out.

    The search has three parts. Pairs of metric and momentum are compared on one task, and the best two find their factors on
    two. The better one is tried there with other schedules, averages and whitening, and the best two changes find factors
    too. On all tasks, the best change replaces it if it is better. A factor moves to its neighbour as long as that is
    better, on two tasks and in the end on all.

    Args:
        learned: the geometry.
        family: its training side; nothing else is seen.
        choices: what a usage is chosen from.
        reference: what finds the comparator that online scales are learned with; `tuned_reference` if not given.
        seed: draws the tasks.
        watch: called with every usage tried, its online metric if it has one, and its score.
        journal: where to keep the online scales and every run of a usage, so that the same call continues one that was
            stopped, to the same result.
        workers: processes that share the runs, or an `Executor`; the result does not depend on them.
        changes: fields of `Choices` by name, such as `prefer="seconds"`, `judged_on="validation"` or `tasks=2`.

    Example:
        >>> from metamd import Diagonal, meta_train, tasks
        >>> family = tasks.tabular(steps=20)
        >>> learned = meta_train(family, Diagonal(), outer_steps=1, tasks_per_step=2)
        >>> learn_usage(learned, family, tasks=1, factors=(1.0,), momenta=(0.0,)).usage.metric in ("learned", "online")
        True
    """
    if not isinstance(learned, LearnedOptimiser):
        raise TypeError(f"learned must be a LearnedOptimiser, got {type(learned).__name__}. Pass metamd.load(path).")
    choices = replace(choices, **changes)
    began, family = time.perf_counter(), Counted(family)
    finder = None
    if "online" in choices.metrics:
        finder = reference or tuned_reference(family, seed=seed, journal=journal, workers=workers)
    to_scale = draw_tasks(family, seed, "scale", min(SCALED, choices.tasks)) if finder is not None else []
    built = draw_tasks(family, seed, "usage", choices.tasks)
    choices = replace(choices, judged_on=can_be_judged(choices.judged_on, built[0]))
    settings = {
        "learned": learned.fingerprint(),
        "reference": reference_identity(finder),
        "tasks": choices.tasks,
        "seed": seed,
    }
    about: Result = {"score": SCORE, "judged_on": choices.judged_on, "prefer": choices.prefer}
    settings |= {**about, "looks": LOOKS}
    with parts_of(journal, "usage", family, settings, workers) as parts:
        metrics: list[Online | None] = [None] if "learned" in choices.metrics else []
        if finder is not None:
            with stage(family, "online scales", runs_to_scale(choices, finder) * family.steps):
                metrics += _scaled(learned, to_scale, choices.online, finder, parts)
        seconds = dict[str, float]()
        if choices.prefer == "seconds":
            offered = [*metrics, *(other for online in metrics for other in _otherwise_whitened(online))]
            seconds = _step_seconds(learned, built[0], offered, parts)
        with stage(family, "usages", runs_to_choose(choices) * family.steps) as forecast:
            trials = Trials(built, learned.potential.bind(built[0].init()), parts, choices, watch, forecast, seconds)
            usage, online = trials.best(metrics)
            value = trials.score((usage, online))
            forecast.tell(value, note=f"chosen: {usage}")
        if math.isfinite(value):
            about["seconds_per_step"] = _step_seconds(learned, built[0], [online], parts)[_kind(online)]
    if not math.isfinite(value):
        raise ValueError(f"every usage of this geometry diverged on training tasks of {family.name!r}. Learn it again.")
    seen = [*learned.header.task_hashes, *(() if finder is None else finder.chosen_on), *family.tasks]
    header = replace(
        learned.header,
        usage=usage.to_dict(),
        choice=about,
        online=_online_dict(online),
        task_hashes=tuple(dict.fromkeys(seen)),
        cost=total_cost(learned.header.cost, family.cost(began)),
    )
    return replace(learned, header=header)


def runs_to_scale(choices: Choices, reference: Reference) -> float:
    """How many runs `learn_usage` takes to learn the scales of online metrics, in the length of a task's own."""
    return min(SCALED, choices.tasks) * (reference.factor + ROUNDS * len(_bases(choices.online)))


def runs_to_choose(choices: Choices) -> float:
    """About how many runs it takes to choose a usage then: it depends on what is better."""
    polar = any(rule.rule == "polar" for rule in choices.online)
    own = sum(rule.rule in OWN_AVERAGE for rule in choices.online)
    starts = len(choices.momenta) * (len(choices.online) - own + ("learned" in choices.metrics)) + own
    few, more = min(FIRST, choices.tasks), len(choices.schedules) + len(choices.averages) - 2 + len(WHITENED) * polar
    climbed = 0 if choices.factors is not None and len(choices.factors) < 2 else CLIMBED
    met, changed = min(FINALISTS, starts), min(FINALISTS, more)
    return starts + (few - 1) * met + few * ((met + changed) * climbed + more + 1) + 2 * (choices.tasks - few)


def _scaled(
    learned: LearnedOptimiser, tasks: Sequence[Task], rules: Sequence[Online], reference: Reference, parts: Parts
) -> list[Online]:
    """The rules with their scales: one part, as all of them are learned from the same solutions."""

    bases = _bases(rules)

    def scaled() -> Result:
        ends = solved(tasks, reference, parts)
        return {"online": [learn_scale(learned, ends, rule, reference.lr, parts).to_dict() for rule in bases]}

    name = f"scales-{config_hash({'rules': [rule.to_dict() for rule in bases]})[:8]}"
    scales = [Online.from_dict(found).scale for found in parts.all({name: scaled})[name]["online"]]
    return [replace(rule, scale=scales[bases.index(_base(rule))]) for rule in rules]


def _base(rule: Online) -> Online:
    """The rule that has the same scales: runs to learn them from find all their directions, and turn no bases."""
    return Online() if rule.rule == "eigen" else replace(rule, refresh=0, whiten=0, block=0)


def _otherwise_whitened(online: Online | None) -> list[Online]:
    """The same polar rule, whitened less or more."""
    return [replace(online, whiten=n) for n in WHITENED] if online is not None and online.whiten else []


def _bases(rules: Sequence[Online]) -> list[Online]:
    return [rule for i, rule in enumerate(map(_base, rules)) if rule not in [_base(other) for other in rules[:i]]]


def _kind(online: Online | None) -> str:
    """What the time of a step depends on."""
    return "learned metric" if online is None else str(online)


def _step_seconds(learned: LearnedOptimiser, task: Task, metrics: Sequence[Online | None], parts: Parts) -> dict[str, float]:
    """The seconds of a training step of `MetaMD` with each of these metrics, a part that is kept."""

    def begun(online: Online | None) -> OptimiserSteps:
        usage = Usage("learned" if online is None else "online")
        # without what a run is watched by: a task with other gradients takes as long
        unwatched: dict[str, Any] = {"gradient_scale": {}, "horizon": None}
        header = replace(learned.header, usage=usage.to_dict(), online=_online_dict(online), **unwatched)
        given = replace(learned, header=header)
        return OptimiserSteps.beginning(task.init(), lambda named: MetaMD(named, given, steps=task.steps))

    def measured() -> Result:
        begin: dict[str, Callable[[], StepRule]] = {_kind(online): partial(begun, online) for online in metrics}
        return {"of": seconds_per_step(task, begin, task.steps, rounds=5, block=5, warm_up=1)}

    name = f"seconds-{config_hash({'of': [_kind(online) for online in metrics]})[:8]}"
    found: dict[str, float] = parts.all({name: measured})[name]["of"]
    return found


def tried_line(usage: Usage, online: Online | None, score: float) -> str:
    """A usage and its score, in a line that no other usage has."""
    return f"{usage}{'' if online is None else f' ({online})'}: score {score:.4g}"


def _online_dict(online: Online | None) -> Result | None:
    return None if online is None else online.to_dict()


class Trials:
    """Training runs of a few tasks with one usage after another; none is run twice."""

    def __init__(
        self,
        tasks: Sequence[Task],
        potential: MaxDiagonal,
        parts: Parts,
        choices: Choices = Choices(),  # noqa: B008
        watch: UsageWatch | None = None,
        forecast: Forecast | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.tasks, self.potential, self.parts, self.choices = tasks, potential, parts, choices
        self.watch, self.forecast, self.seconds = watch, forecast, seconds or {}
        # many runs of small vectors take as long as one
        diagonal = potential is not None and potential.pieces == 1 and potential.basis.kind == "identity"
        self.together = diagonal and choices.metrics == ("learned",) and parts.family.shared_loss and small(tasks)
        self._known: dict[str, Result] = {}
        self._scores: RunScores | None = None

    def best(self, metrics: Iterable[Online | None]) -> Used:
        """The best pair of metric and momentum with its own factor, and the schedule or average that is best for it."""
        schedules, averages = self.choices.schedules, self.choices.averages
        first, many = schedules[0], None if self.together else FINALISTS
        starts = [self.scheduled(used, first) for online in metrics for used in self._first(online)]
        best = self._ranked(self.climb(self._ranked(starts, 1)[:many], FIRST), FIRST)[0]
        usage, online = best
        others = [self.scheduled(best, s) for s in schedules if s != first]
        others += [(replace(usage, averaging=a), online) for a in averages[1:] if not usage.momentum]
        others += [(usage, other) for other in _otherwise_whitened(online)]
        changed = self._ranked(self.climb(self._ranked(others, FIRST)[:many], FIRST), FIRST)[:1]
        return self.climb(self._ranked([best, *changed])[:1])[0]

    def _ranked(self, pairs: Sequence[Used], tasks: int | None = None) -> list[Used]:
        """From the best to the worst on so many of the tasks, or on all."""
        self.run(pairs, tasks)
        return sorted(pairs, key=lambda used: self._score(used, tasks))

    def _first(self, online: Online | None) -> list[Used]:
        """The first usages of a metric: the bound makes steps along averaged gradients several times too long."""
        momenta, factor = list(self.choices.momenta), 1.0
        if online is not None and online.rule in OWN_AVERAGE:
            momenta = [0.0]
        if online is not None and online.rule == "polar":
            factor = 0.5 if online.signal else 0.35
        elif online is not None and online.rule == "eigen":
            factor = 2.0  # the scale is that of the rule "average", which has momentum 0.8 where it is learned
        plain = Usage("learned" if online is None else "online", factor=self.choices.nearest(factor))
        averages = ("constant" if b else self.choices.averages[0] for b in momenta)
        return [(replace(plain, momentum=b, averaging=a), online) for b, a in zip(momenta, averages, strict=True)]

    def score(self, used: Used, tasks: int | None = None) -> float:
        """The geometric mean of losses over tasks and runs, see `learn_usage`; infinite if any run diverged.

        It is over so many of the tasks; over all if that is not given.
        """
        self.run([used], tasks)
        return self._score(used, tasks)

    def run(self, pairs: Sequence[Used], tasks: int | None = None) -> None:
        """Run the first tasks with these usages, as far as it was not done."""
        self._scores = self._scores or RunScores.on(self.tasks, self.parts, start_of)
        wanted = {name: (i, used) for used in pairs for i, name in enumerate(self._names(used, tasks))}
        new = {name: run for name, run in wanted.items() if name not in self._known}
        self._known |= self._computed(new)
        for name, (i, _) in new.items():
            self._scores.see(i, self._known[name])
        for used in pairs:
            count = sum(name in new for name in self._names(used, tasks))
            if count and self.watch is not None:
                self.watch(*used, self._score(used, tasks))
            if count and self.forecast is not None:
                line = f"{tried_line(*used, self._score(used, tasks))} on {len(self.tasks[:tasks])} tasks"
                self.forecast.say(line)
                self.forecast.tell(self._score(used, tasks), note=line)

    def _about(self, number: int, used: Used) -> Result:
        about = {"task": number, "usage": used[0].to_dict(), "online": _online_dict(used[1])}
        return about | ({"steps": self._steps(number, used)} if self.seconds else {})

    def _steps(self, number: int, used: Used) -> int:
        """T, or as many steps as take the time of T steps of the quickest usage."""
        steps = self.tasks[number].steps
        return max(1, round(steps * min(self.seconds.values()) / self.seconds[_kind(used[1])])) if self.seconds else steps

    def _names(self, used: Used, tasks: int | None) -> list[str]:
        return [f"run-{config_hash(self._about(i, used))}" for i in range(len(self.tasks[:tasks]))]

    def _score(self, used: Used, tasks: int | None) -> float:
        assert self._scores is not None
        return self._scores.score([self._known[name] for name in self._names(used, tasks)])

    def _computed(self, runs: Mapping[str, tuple[int, Used]]) -> dict[str, Result]:
        """The records of these runs, by name: side by side where that is quicker, else by the executor."""
        if not self.together:
            return self.parts.all({name: partial(self._run, *run) for name, run in runs.items()})
        here = Parts(self.parts.family, self.parts.records)

        @cache
        def outcomes() -> dict[str, UsageRun]:
            missing = {name: run for name, run in runs.items() if not here.has(name)}
            tasks, usages = [self.tasks[i] for i, _ in missing.values()], [used[0] for _, used in missing.values()]
            return dict(zip(missing, run_together(tasks, self.potential, usages), strict=True))

        def recorded(name: str, number: int, used: Used) -> Result:
            return self._record(number, used, outcomes()[name])

        return here.all({name: partial(recorded, name, *run) for name, run in runs.items()})

    def _run(self, number: int, used: Used) -> Result:
        steps = self._steps(number, used)
        run = run_usage(self.tasks[number], self.potential, used[0], online=used[1], steps=steps)
        return self._record(number, used, run)

    def _record(self, number: int, used: Used, run: UsageRun) -> Result:
        """What is kept of a run."""
        found = run_record(self.tasks[number], run.loss, run.way, run.end, self.choices.judged_on)
        return {**self._about(number, used), **found}

    def climb(self, starts: Sequence[Used], tasks: int | None = None) -> list[Used]:
        """The same usages, each with the factor from which neither neighbour is better; all go on at the same time."""
        best, ways = list(starts), [[-1, 1] for _ in starts]
        while any(ways):
            further: dict[int, Used] = {}
            for i, left in enumerate(ways):
                usage, online = best[i]
                while left and (factor := self.choices.neighbour(usage.factor, left[0])) is None:
                    left.pop(0)
                if left and factor is not None:
                    further[i] = replace(usage, factor=factor), online
            for some in dict.fromkeys((FIRST, tasks)):  # what is not better on the first tasks is not tried on the others
                self.run([*further.values(), *(best[i] for i in further)], some)
                further = {i: used for i, used in further.items() if self._score(used, some) < self._score(best[i], some)}
            for i, left in enumerate(ways):
                if i in further:
                    best[i] = further[i]
                elif left:
                    left.pop(0)
        return best

    def scheduled(self, used: Used, schedule: Schedule) -> Used:
        """A usage with a schedule; a learned one is learned from runs with the linear one."""
        usage, online = used
        if schedule != "learned":
            return replace(usage, schedule=schedule, knots=()), online
        linear = replace(usage, schedule="linear", knots=())

        def measured() -> Result:
            runs = self.parts.runs(partial(_energies, self.potential, linear, online), self.tasks[:FIRST])
            finished = [energies for energies in runs if energies is not None]
            found = replace(linear, schedule="learned", knots=learn_knots(finished)) if finished else linear
            return {"usage": found.to_dict()}

        name = f"schedule-{config_hash({'usage': linear.to_dict(), 'online': _online_dict(online)})}"
        return Usage(**self.parts.all({name: measured})[name]["usage"]), online


def _energies(potential: MaxDiagonal, usage: Usage, online: Online | None, task: Task) -> tuple[float, ...] | None:
    run = run_usage(task, potential, usage, online=online, measure=True)
    return run.energies if math.isfinite(run.loss) else None

"""The protocol `once`: everybody chooses settings on training tasks, by one score and with one budget, and never again.

MetaMD learns there. A rival chooses its rate, schedule, warm-up, momentum and average by a quasi-random search, and by the
score that a usage of MetaMD is chosen by, see `metamd.learn_usage`. Nobody sees a held-out task.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Literal

import torch
from torch import nn

from metamd.comparison.training import begun, one_thread
from metamd.comparison.tuning import sobol
from metamd.files.store import SETTING_DIGITS, Journal, Records, Result, shortened
from metamd.files.usage import Schedule
from metamd.files.versions import versions
from metamd.inner.executor import Executor
from metamd.learning.parts import Forecast, Parts, parts_of
from metamd.learning.reference import draw_tasks
from metamd.learning.score import LOOKS, JudgedOn, RunScores, can_be_judged, judged_run, run_record, start_of
from metamd.learning.usage import FINALISTS, FIRST
from metamd.rivals.base import Contender, Range, Rival, Tuning
from metamd.rivals.table import averaged
from metamd.tasks.base import Task, TaskFamily, config_hash, derive_seed, require_family, seeded
from metamd.tasks.wrapped import Counted

By = Literal["score", "end"]

WARM_UPS = (0.0, 0.05, 0.1, 0.2)
"""Shares of the run over which the rate may rise from zero."""

FORGOTTEN = Range(0.01, 0.5)
"""Where 1 - m is looked for, m the momentum or Adam's beta1."""

EXPLORED = 0.6
"""The share of the budget for settings that are spread over the space; the rest is for neighbours of the best, on all
tasks."""

STRIDES = (2.0, 2**0.5)
"""Factors to the neighbours of a rate; those of usages are as near."""

EDGE = 0.1
"""The share of a range at each of its ends: if the best value lies there, the search goes on beyond."""

AGAIN = 4
"""MetaMD's second row takes another quarter of the budget: what its learning has tried is not kept in the file."""


FOR_THE_END = ", chosen for the end"
"""The end of the label of a second row, which has the setting with the lowest loss at the end of the run."""


@dataclass(frozen=True)
class Once:
    """What there is to choose settings with, the same for all rivals.

    Args:
        gradients: evaluations on training tasks that a rival may take; as many as MetaMD's learning took if not given, and
            25 settings on two tasks where that is not known.
        tasks: of the training side, to decide on; all settings are tried on two of them.
        judged_on: as for `metamd.learning.Choices`: on which data the end of a run is judged.
    """

    gradients: int | None = None
    tasks: int = 6
    judged_on: JudgedOn = "auto"

    def __post_init__(self) -> None:
        if self.tasks < 1 or (self.gradients is not None and self.gradients < 1):
            raise ValueError(f"tasks and gradients must be at least 1, got {self.tasks} and {self.gradients}.")


@dataclass(frozen=True)
class Chosen:
    """What a search on training tasks found."""

    contender: Contender  # with the best score
    for_the_end: Contender  # with the lowest loss at the end of the run
    scores: Mapping[By, float]  # theirs, over all tasks
    tried: tuple[Contender, ...]  # all settings, in the order in which they were tried
    tasks: tuple[str, ...]  # hashes of those that were seen

    @property
    def best(self) -> Contender:
        """The setting with the best score, by the name that it has in `Tuned`."""
        return self.contender


# what a rival chooses from


@dataclass(frozen=True)
class Space:
    """The settings of a rival that the search may choose."""

    rivals: tuple[Rival, ...]  # without an average, and with one
    ranges: Mapping[str, Range]  # of its hyperparameters; that of a momentum m is for 1 - m
    momentum: str  # which of them that is; empty if it has none
    schedules: tuple[Schedule, ...]

    @property
    def dimension(self) -> int:
        """Of the unit cube: the ranges, the schedule, the warm-up and the average."""
        return len(self.ranges) + 3

    def at(self, place: Sequence[float], base: Contender) -> Contender:
        """The setting at a place of the unit cube; what is not searched is as in `base`."""
        *spread, schedule, warm_up, average = place
        values = {n: r.at(u) for (n, r), u in zip(self.ranges.items(), spread, strict=True)}
        setting = {**base.setting, **{n: self.kept(n, x) for n, x in values.items()}}
        rival = self.rivals[int(average * len(self.rivals))]
        chosen = self.schedules[int(schedule * len(self.schedules))]
        return Contender(rival, setting, chosen, warm_up=WARM_UPS[int(warm_up * len(WARM_UPS))])

    def kept(self, name: str, value: float) -> float:
        """A value of a range as the setting has it, and back: a momentum m has the range of 1 - m."""
        return float(shortened(1 - value, SETTING_DIGITS)) if name == self.momentum else value

    def at_edge(self, contender: Contender) -> list[str]:
        """The hyperparameters that lie at an end of their range or beyond."""
        places = {n: r.place(self.kept(n, contender.setting[n])) for n, r in self.ranges.items()}
        return [n for n, place in places.items() if not EDGE < place < 1 - EDGE] + (
            ["warm_up"] if contender.warm_up >= WARM_UPS[-1] else []
        )

    def beyond(self, contender: Contender) -> tuple[str, ...]:
        """Those whose range had to be extended."""
        places = {n: r.place(self.kept(n, contender.setting[n])) for n, r in self.ranges.items()}
        found = [n for n, place in places.items() if not -1e-6 <= place <= 1 + 1e-6]
        return tuple(found + (["warm_up"] if contender.warm_up > WARM_UPS[-1] else []))

    def moved(self, contender: Contender, name: str, factor: float) -> Contender | None:
        """The neighbour with a hyperparameter, or 1 - m, so many times as large; None where there is none."""
        if name == "warm_up":
            warm_up = float(shortened(contender.warm_up * factor, SETTING_DIGITS))
            return replace(contender, warm_up=warm_up) if warm_up < 1 else None
        value = float(shortened(self.kept(name, contender.setting[name]) * factor, SETTING_DIGITS))
        if name == self.momentum and not 1e-4 < value <= 1:
            return None
        return replace(contender, setting={**contender.setting, name: self.kept(name, value)})


def space_of(contender: Contender, schedules: Sequence[Schedule]) -> Space:
    """What a rival chooses from: its rate and what else it is searched in but decay, momentum, schedule and average."""
    rival = contender.rival
    ranges = {n: r for n, r in rival.space.items() if n != "weight_decay"}
    # a momentum that is 0 by default is no part of what the rival is
    named = [n for n in ("momentum", "beta1") if contender.setting.get(n, 0.0) > 0]
    ranges |= dict.fromkeys(named[:1], FORGOTTEN)
    # a learned rival fits its own tensors alone, and has its own average
    own_average = bool(rival.identity) or hasattr(contender.start([("x", nn.Parameter(torch.zeros(2, 2)))]), "eval")
    allowed = tuple(s for s in schedules if s in rival.schedules) or rival.schedules
    both = (rival,) if own_average else (rival, averaged(rival))
    return Space(both, ranges, (named or [""])[0], tuple(dict.fromkeys((contender.schedule, *allowed))))


# the search


def choose_once(
    contender: Contender,
    family: TaskFamily,
    once: Once,
    *,
    schedules: Sequence[Schedule] = ("constant", "linear"),
    steps: int | None = None,
    seed: int = 0,
    records: Records | None = None,
    workers: int | Executor = 1,
) -> Chosen:
    """Choose the setting of a rival on training tasks.

    The setting that is given comes first; Sobol points of the space follow, all on two tasks. The best two of them, by the
    score and by the loss at the end, move to neighbours with another rate as long as these are better, also beyond the
    range. Another hyperparameter moves too if it lies at an end of its range. All tasks decide. The search takes no more
    gradient evaluations than there are; those of the looks at averages count too.

    Args:
        contender: the rival with the setting that comes first, its defaults for example.
        family: its training side; nothing else is seen.
        once: the budget, and by what runs are judged.
        schedules: to choose from, as far as the rival may have them.
        steps: T; the family's own if not given.
        seed: of the tasks and the points.
        records: where every run is kept, so that a search that was stopped continues.
        workers: processes that share the runs, or an `Executor`; the result does not depend on them.

    Example:
        >>> from metamd import tasks
        >>> from metamd.rivals import rival
        >>> family = tasks.quadratic((1.0, 2.0), steps=20)
        >>> found = choose_once(rival("sgd").untuned(), family, Once(gradients=2000, tasks=2))
        >>> found.contender.tuning.gradients <= 2000
        True
    """
    require_family(family)
    counted, title = Counted(family), contender.rival.title
    tasks = draw_tasks(counted, seed, "once", once.tasks)
    judged_on, steps = can_be_judged(once.judged_on, tasks[0]), family.steps if steps is None else steps
    budget = once.gradients or round(25 / EXPLORED) * FIRST * steps
    hashes = tuple(config_hash(t.config) for t in tasks)
    about: Result = {"tasks": list(hashes), "steps": steps, "judged_on": judged_on, "torch": versions()["torch"]}
    journal = None if records is None else Journal(records.folder / "once")
    forecast = Forecast(f"choosing {title} once", {"settings": budget})
    kept = parts_of(journal, contender.rival.name, counted, about, workers)
    with kept as parts, forecast.of(counted), forecast.stage("settings", budget):
        search = _Search(contender, space_of(contender, schedules), tasks, parts, judged_on, budget, steps)
        first, last = search.chosen(seed)
    best_so_far = tuple(accumulate((search.value(c, "score", FIRST) for c in search.tried), min))

    def told(c: Contender) -> Contender:
        beyond = search.space.beyond(c)
        at_edge = tuple(n for n in search.space.at_edge(c) if n not in beyond and n not in search.confirmed)
        # it has seen these tasks, as a learned file has: where they are compared on, nothing is held out
        seen = replace(c.rival, tasks=hashes, domains=family.drawn().domains)
        return replace(c, rival=seen, tuning=Tuning(counted.batches, best_so_far, at_edge, beyond))

    scores: dict[By, float] = {"score": search.value(first, "score"), "end": search.value(last, "end")}
    return Chosen(told(first), told(last), scores, tuple(search.tried), hashes)


def price(steps: int) -> int:
    """Gradient evaluations of a run, at most: its steps, the looks at an average, and the batches at its end."""
    return steps + math.ceil(steps / max(1, steps // LOOKS)) + 10


@dataclass
class _Search:
    base: Contender
    space: Space
    tasks: Sequence[Task]
    parts: Parts
    judged_on: JudgedOn
    budget: int
    steps: int
    tried: list[Contender] = field(default_factory=list)
    confirmed: set[str] = field(default_factory=set)  # hyperparameters at an end beyond which it is worse

    def __post_init__(self) -> None:
        self.scores = RunScores.on(self.tasks, self.parts, start_of)
        self.known: dict[tuple[str, int], Result] = {}

    def chosen(self, seed: int) -> tuple[Contender, Contender]:
        """The best by the score, and by the loss at the end."""
        few, every = min(FIRST, len(self.tasks)), len(self.tasks)
        if not self._affordable([self.base], few):
            raise ValueError(
                f"{self.budget} gradient evaluations do not suffice to try one setting on {few} tasks of {self.steps} "
                f"steps. Allow more (--gradients), {20 * few * self.steps} say."
            )
        kept = 2 * FINALISTS * (every - few) * self._price  # for the decision on all tasks
        count = int(min(EXPLORED * self.budget, self.budget - kept) / (few * self._price)) - 1
        # the same points for everybody, so that two of a kind choose alike
        points = sobol(self.space.dimension, count, derive_seed(seed, "once")).tolist() if count > 0 else []
        self.run([self.base], few)
        for some in _batches([self.space.at(p, self.base) for p in points]):
            self.run(some, few)
        found = []
        by: By
        for by in ("score", "end"):
            ranked = sorted(self.tried, key=lambda c: self.value(c, by, few))[:FINALISTS]
            climbed = list(dict.fromkeys(self.climb(c, by, few, kept) for c in ranked))
            kept -= FINALISTS * (every - few) * self._price
            decided = []
            for c in climbed:
                if self._affordable([c], every, kept):
                    self.run([c], every)
                    decided.append(c)
            found.append(min(decided or climbed, key=lambda c: self.value(c, by, every if decided else few)))
        return found[0], found[1]

    def climb(self, contender: Contender, by: By, tasks: int, kept: int) -> Contender:
        """The setting from which no neighbour is better, as far as the budget goes without what is kept."""
        best = contender
        names = ["lr", *(n for n in self.space.at_edge(contender) if n != "lr")]
        for name in names:
            for stride in STRIDES if name == "lr" else STRIDES[:1]:
                for factor in (stride, 1 / stride):
                    while (near := self.space.moved(best, name, factor)) is not None:
                        if not self._affordable([near], tasks, kept):
                            return best
                        self.run([near], tasks)
                        if not self.value(near, by, tasks) < self.value(best, by, tasks):
                            break
                        best = near
            self.confirmed.add(name)
        return best

    def value(self, contender: Contender, by: By, tasks: int | None = None) -> float:
        """The score of a setting, or its loss at the end, over the first tasks; infinite if a run diverged."""
        runs = [self.known[contender.key(), i] for i in range(len(self.tasks[:tasks])) if (contender.key(), i) in self.known]
        return self.scores.score(runs) if by == "score" else self.scores.end(runs)

    def run(self, contenders: Sequence[Contender], tasks: int) -> None:
        """Run the first tasks with these settings, as far as it was not done."""
        new = dict(self._missing(contenders, tasks))
        names = {(key, i): f"{key}-{config_hash(self.tasks[i].config)[:16]}" for key, i in new}
        found = self.parts.all({names[k]: partial(self._run, *pair) for k, pair in new.items()})
        for (key, i), name in names.items():
            self.known[key, i] = found[name]
            self.scores.see(i, found[name])
        keys = {c.key() for c in self.tried}
        self.tried += [c for c in dict.fromkeys(contenders) if c.key() not in keys]

    def _missing(
        self, contenders: Sequence[Contender], tasks: int
    ) -> Iterator[tuple[tuple[str, int], tuple[Contender, Task]]]:
        for c in contenders:
            for i, task in enumerate(self.tasks[:tasks]):
                if (c.key(), i) not in self.known:
                    yield (c.key(), i), (c, task)

    def _affordable(self, contenders: Sequence[Contender], tasks: int, kept: int = 0) -> bool:
        price = self._price * len(dict(self._missing(contenders, tasks)))
        return self.parts.family.batches + price + kept <= self.budget

    @property
    def _price(self) -> int:
        return price(self.steps)

    def _run(self, contender: Contender, task: Task) -> Result:
        with one_thread(), seeded(derive_seed(config_hash(task.config), "optimiser")):
            rule = begun(task, contender, self.steps)
            # one with an average of its own is judged by it
            model: Callable[[], Mapping[str, torch.Tensor]] | None = rule.model if hasattr(rule.optimiser, "eval") else None
            mean, way = judged_run(task, rule, self.steps, model)
            return {"contender": contender.describe(), **run_record(task, mean, way, rule.model(), self.judged_on)}


def _batches(contenders: Sequence[Contender]) -> Iterator[Sequence[Contender]]:
    """Eight at a time: processes share them, and the budget is looked at in between."""
    for i in range(0, len(contenders), 8):
        yield contenders[i : i + 8]

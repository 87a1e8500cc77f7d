"""What a rival is: an optimiser with a search space that was fixed beforehand; and a contender: a rival with its setting."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import nn

from metamd.files.store import SETTING_DIGITS, shortened
from metamd.files.usage import SCHEDULES, Schedule, interpolate
from metamd.inner.run import Stepper as Stepper

Setting = Mapping[str, float]
"""Hyperparameters by name."""

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Range:
    """Where a hyperparameter is looked for, on a logarithmic scale.

    Args:
        low: the smallest value.
        high: the largest.

    Example:
        >>> Range(0.001, 0.1).at(0.5)
        0.01
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(f"a range needs 0 < low < high, got low={self.low}, high={self.high}.")

    def at(self, place: float) -> float:
        """The value at a place between 0 and 1."""
        return float(shortened(self.low * (self.high / self.low) ** place, SETTING_DIGITS))

    def points(self, count: int) -> list[float]:
        """Values at equal distances, the ends among them; a single one lies in the middle."""
        return [self.at(i / (count - 1)) if count > 1 else self.at(0.5) for i in range(count)]

    def at_edge(self, value: float) -> bool:
        """Whether a value lies in the first or last fiftieth of the range, so that a better one may lie beyond."""
        return not 0.02 < self.place(value) < 0.98

    def place(self, value: float) -> float:
        """Where a value lies between the ends: 0 is the low one."""
        return math.log(value / self.low) / math.log(self.high / self.low)


@dataclass(frozen=True)
class Rival:
    """An optimiser behind one interface.

    Args:
        name: on the command line and in records.
        title: in tables.
        make: the optimiser for named parameters with a setting.
        space: where each hyperparameter is looked for, fixed before any result was seen.
        defaults: the setting without tuning, as its package or paper has it; also what is not searched.
        grid: values to try, if some were published; else `space` is divided evenly.
        schedules: those that it may be combined with.
        identity: what else decides what it computes: the fingerprint of a learned geometry, say.
        cost: gradient evaluations and seconds that were spent on learning it.
        knots: of its learned schedule, if it has one.
        domains: that it was learned on.
        tasks: hashes of those that it was learned on.
        unlearned: why it could not be learned, if so: its runs count as failed.

    Example:
        >>> def make(named, setting):
        ...     return torch.optim.Rprop([p for _, p in named], **setting)
        >>> Rival("rprop", "Rprop", make, space={"lr": Range(1e-4, 1.0)}, defaults={"lr": 1e-2}).untuned().setting
        {'lr': 0.01}
    """

    name: str
    title: str
    make: Callable[[NamedParameters, Setting], Stepper]
    space: Mapping[str, Range]
    defaults: Setting
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    schedules: tuple[Schedule, ...] = tuple(SCHEDULES)
    identity: str = ""
    cost: Mapping[str, float] = field(default_factory=dict)
    knots: tuple[float, ...] = ()
    domains: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    unlearned: str = ""

    def with_setting(self, schedule: Schedule = "constant", **setting: float) -> "Contender":
        """This rival with some hyperparameters set, the others as they are by default.

        Args:
            schedule: of the learning rate.
            setting: hyperparameters by name.
        """
        unknown = sorted(set(setting) - set(self.defaults) - set(self.space))
        if unknown:
            known = ", ".join(dict.fromkeys([*self.defaults, *self.space]))
            raise ValueError(f"{self.title} has the hyperparameters {known}; {unknown[0]!r} is none of them.")
        if schedule not in self.schedules:
            raise ValueError(f"{self.title} may have the schedules {', '.join(self.schedules)}, got {schedule!r}.")
        return Contender(self, {**self.defaults, **setting}, schedule)

    def untuned(self) -> "Contender":
        """With its defaults, as one uses it who does not tune."""
        return self.with_setting(self.schedules[0])

    def settings(self, names: Sequence[str], budget: int) -> list[dict[str, float]]:
        """At most `budget` settings on a grid: the published values of these hyperparameters, or an even division."""
        names = searched(self, names)
        if all(n in self.grid for n in names) and math.prod(len(self.grid[n]) for n in names) <= budget:
            axes: list[Sequence[float]] = [self.grid[n] for n in names]
        else:
            each = max(1, int(budget ** (1 / len(names)) + 1e-9))
            counts = [each] * len(names)
            counts[0] = max(1, budget // math.prod(counts[1:]))  # the learning rate comes first: what is left over is its
            axes = [self.space[n].points(c) for n, c in zip(names, counts, strict=True)]
        return [dict(zip(names, values, strict=True)) for values in product(*axes)]


@dataclass(frozen=True)
class Tuning:
    """What the search for a setting cost, and how it went."""

    gradients: int  # evaluations of all its trials, for each task that they were made on
    best_so_far: tuple[float, ...] = ()  # the best score after each trial
    at_edge: tuple[str, ...] = ()  # hyperparameters whose best value lies at an end of the search space, or grid
    extended: tuple[str, ...] = ()  # those whose range was extended, as the best value lies beyond

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Tuning":
        """From its entries in a record, None for what is infinite."""
        best = tuple(math.inf if x is None else float(x) for x in found["best_so_far"])
        named = [tuple(map(str, found.get(n, ()))) for n in ("at_edge", "extended")]
        return cls(int(found["gradients"]), best, *named)


@dataclass(frozen=True)
class Contender:
    """A rival with all its hyperparameters: what a training needs to know.

    Args:
        rival: the optimiser.
        setting: its hyperparameters.
        schedule: of the learning rate.
        tuning: of the search that found the setting, if there was one.
        warm_up: the share of the run over which the rate rises from zero, in equal steps.
    """

    rival: Rival
    setting: Setting
    schedule: Schedule = "constant"
    tuning: Tuning | None = field(default=None, compare=False)
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"warm_up must lie in [0, 1), a share of the run; got {self.warm_up}.")

    def __hash__(self) -> int:
        return hash(self.key())

    def start(self, named: NamedParameters) -> Stepper:
        """The optimiser before its first step."""
        return self.rival.make(named, self.setting)

    def share(self, done: float) -> float:
        """The factor on the learning rate after this share of the steps; the horizon is the same for all contenders."""
        return interpolate(self.rival.knots, done) if self.schedule == "learned" else SCHEDULES[self.schedule](done)

    def factor(self, step: int, steps: int) -> float:
        """The same in step t of T, counted from 0, warm-up included."""
        rise = min(1.0, (step + 1) / (self.warm_up * steps)) if self.warm_up else 1.0
        return rise * self.share(step / steps)

    def describe(self) -> dict[str, Any]:
        """In JSON's types, for records."""
        found: dict[str, Any] = {"rival": self.rival.name, "setting": dict(self.setting), "schedule": self.schedule}
        found |= {"warm_up": self.warm_up} if self.warm_up else {}
        return found | ({"identity": self.rival.identity} if self.rival.identity else {})

    def key(self) -> str:
        """A short name that no other contender has."""
        return contender_key(self.describe())


def contender_key(description: Mapping[str, Any]) -> str:
    """The short name of a contender, from what `Contender.describe` says."""
    text = json.dumps(description, sort_keys=True)
    return f"{description['rival']}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def searched(rival: Rival, names: Sequence[str]) -> list[str]:
    """Those of these hyperparameters that a rival has; a rival without weight decay is searched in its rate alone."""
    found = [n for n in names if n in rival.space]
    if not found:
        raise ValueError(f"{rival.title} can be searched in {', '.join(rival.space) or 'nothing'}, got {', '.join(names)}.")
    return found

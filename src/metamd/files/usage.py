"""How a learned geometry is used: which metric, momentum, schedule, and factor on its steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Metric = Literal["learned", "online"]
Schedule = Literal["constant", "linear", "quadratic", "learned"]
Average = Literal["constant", "tail"]


SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "quadratic": lambda done: (1.0 - done) ** 2,
}
"""The factor on the learning rate by the share of the steps that is done; that of a learned schedule is in its knots."""


@dataclass(frozen=True)
class Usage:
    """How to use a learned geometry.

    Args:
        metric: "learned", or "online" for the diagonal that follows the run in the learned coordinates.
        momentum: as for `MetaMD`.
        schedule: of the rate over the run: "constant", "linear" or "quadratic" to zero, 1 - t/T or its square, or "learned".
        factor: on the learned steps of z.
        knots: of a learned schedule, its values at equal distances from the first step to the end, the largest being 1; it
            is linear between them.
        averaging: "tail" for a tail average of the iterates, as for `MetaMD`; "constant" for none but the momentum's.

    Example:
        >>> Usage("learned", momentum=0.9, schedule="linear").lr
        0.1
    """

    metric: Metric = "learned"
    momentum: float = 0.0
    schedule: Schedule = "constant"
    factor: float = 1.0
    knots: tuple[float, ...] = ()
    averaging: Average = "constant"

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise ValueError(f'metric must be "learned" or "online", got {self.metric!r}.')
        if self.schedule not in get_args(Schedule):
            raise ValueError(f'schedule must be "constant", "linear", "quadratic" or "learned", got {self.schedule!r}.')
        object.__setattr__(self, "knots", tuple(self.knots))  # a header has a list
        if self.schedule == "learned" or self.knots:
            check_knots(self.schedule, self.knots)
        if self.averaging not in get_args(Average):
            raise ValueError(f'averaging must be "constant" or "tail", got {self.averaging!r}.')
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"Invalid momentum value: it must be in [0, 1), got {self.momentum}. Pass momentum=0.0 for none."
            )
        if self.averaging == "tail" and self.momentum != 0:
            raise ValueError(f'averaging="tail" has no momentum, got momentum={self.momentum}. Pass momentum=0.0.')
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be positive, got {self.factor}. Pass 1.0 for the learned steps as they are.")

    @property
    def lr(self) -> float:
        """What `MetaMD` is given: factor (1 - momentum)."""
        return round(self.factor * (1 - self.momentum), 12)

    def share(self, step: int, steps: int) -> float:
        """The schedule at step t of T, counted from 0."""
        return (
            SCHEDULES[self.schedule](step / steps) if self.schedule != "learned" else interpolate(self.knots, step / steps)
        )

    def __str__(self) -> str:
        """In words: "learned metric, momentum 0.9, linear schedule, factor 1"."""
        average = "tail average" if self.averaging == "tail" else f"momentum {self.momentum:g}"
        return f"{self.metric} metric, {average}, {self.schedule} schedule, factor {self.factor:g}"

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types, for a header."""
        found: dict[str, Any] = {
            "metric": self.metric,
            "momentum": self.momentum,
            "schedule": self.schedule,
            "factor": self.factor,
        }
        found |= {"averaging": self.averaging} if self.averaging != "constant" else {}
        return found | ({"knots": list(self.knots)} if self.knots else {})


def interpolate(knots: Sequence[float], done: float) -> float:
    """The value of a function that is linear between knots at equal distances.

    Args:
        knots: its values, at 0, ..., 1.
        done: where.

    Example:
        >>> interpolate((0.0, 1.0, 0.0), 0.75)
        0.5
    """
    place = min(max(done, 0.0), 1.0) * (len(knots) - 1)
    low = min(int(place), len(knots) - 2)
    return knots[low] + (place - low) * (knots[low + 1] - knots[low])


def check_knots(schedule: str, knots: Sequence[float]) -> None:
    """Refuse knots that are no schedule, and those of a schedule that has none."""
    if schedule != "learned":
        raise ValueError(f'a {schedule} schedule has no knots, got {len(knots)}. Pass schedule="learned" with them.')
    if len(knots) < 2 or not all(0 <= k <= 1 for k in knots) or max(knots) != 1:
        raise ValueError(
            "a learned schedule needs two knots or more between 0 and 1, the largest being 1; got "
            f"{tuple(knots)}. metamd.learn_usage(learned, family) learns them."
        )

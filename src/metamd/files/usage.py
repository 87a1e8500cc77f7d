"""How a learned geometry is used: which metric, momentum, schedule, and factor on its steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Metric = Literal["learned", "online"]
Schedule = Literal["constant", "linear", "quadratic", "learned"]
Average = Literal["constant", "tail"]


SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "quadratic": lambda done: (1.0 - done) ** 2,
}
"""The factor on the learning rate by the share of the steps that is done; a learned schedule has it in its knots."""


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
        object.__setattr__(self, "knots", tuple(self.knots))  # a header has a list
        for name, options in (("metric", Metric), ("schedule", Schedule), ("averaging", Average)):
            if (given := getattr(self, name)) not in get_args(options):
                listed = " or ".join(f'"{option}"' for option in get_args(options))
                raise ValueError(f"{name} must be {listed}, got {given!r}.")
        if self.knots and self.schedule != "learned":
            raise ValueError(
                f'a {self.schedule} schedule has no knots, got {len(self.knots)}. Pass schedule="learned" with them.'
            )
        ends = self.knots if len(self.knots) > 1 and all(0 <= k <= 1 for k in self.knots) else (0.0,)
        if self.schedule == "learned" and max(ends) != 1:
            raise ValueError(
                "a learned schedule needs two knots or more between 0 and 1, the largest being 1; got "
                f"{self.knots}. metamd.learn_usage(learned, family) learns them."
            )
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
        done = step / steps
        return interpolate(self.knots, done) if self.schedule == "learned" else SCHEDULES[self.schedule](done)

    def __str__(self) -> str:
        """In words: "learned metric, momentum 0.9, linear schedule, factor 1"."""
        average = "tail average" if self.averaging == "tail" else f"momentum {self.momentum:g}"
        return f"{self.metric} metric, {average}, {self.schedule} schedule, factor {self.factor:g}"

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types, for a header."""
        found = asdict(self) | {"knots": list(self.knots)}
        later = {"averaging": "constant", "knots": []}  # the first files do not have them
        return {name: value for name, value in found.items() if name not in later or value != later[name]}


def interpolate(knots: Sequence[float], done: float) -> float:
    """The value of a function that is linear between knots at equal distances, 0, ..., 1."""
    place = min(max(done, 0.0), 1.0) * (len(knots) - 1)
    low = min(int(place), len(knots) - 2)
    return knots[low] + (place - low) * (knots[low + 1] - knots[low])

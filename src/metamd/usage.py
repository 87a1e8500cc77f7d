"""How a learned geometry is used: which metric, momentum, schedule, and factor on its steps."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from metamd.averaging import check_averaging

Metric = Literal["learned", "online"]
Schedule = Literal["constant", "linear"]


@dataclass(frozen=True)
class Usage:
    """How to use a learned geometry.

    Args:
        metric: "learned", or "online" for the diagonal that follows the run in the learned coordinates.
        momentum: as for `MetaMD`.
        schedule: of the rate over the run: "constant", or "linear" to zero.
        factor: on the learned steps of z.

    Example:
        >>> Usage("learned", momentum=0.9, schedule="linear").lr
        0.1
    """

    metric: Metric = "learned"
    momentum: float = 0.0
    schedule: Schedule = "constant"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise ValueError(f'metric must be "learned" or "online", got {self.metric!r}.')
        if self.schedule not in get_args(Schedule):
            raise ValueError(f'schedule must be "constant" or "linear", got {self.schedule!r}.')
        check_averaging("constant", self.momentum)
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be positive, got {self.factor}. Pass 1.0 for the learned steps as they are.")

    @property
    def lr(self) -> float:
        """What `MetaMD` is given: factor (1 - momentum)."""
        return round(self.factor * (1 - self.momentum), 12)

    def share(self, step: int, steps: int) -> float:
        """The schedule at step t of T, counted from 0."""
        return 1 - step / steps if self.schedule == "linear" else 1.0

    def __str__(self) -> str:
        """In words: "learned metric, momentum 0.9, linear schedule, factor 1"."""
        return f"{self.metric} metric, momentum {self.momentum:g}, {self.schedule} schedule, factor {self.factor:g}"

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types, for a header."""
        return {"metric": self.metric, "momentum": self.momentum, "schedule": self.schedule, "factor": self.factor}

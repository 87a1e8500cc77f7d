"""A meta-objective that counts digits: the area under the logarithm of the gap that a run has left to close."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from metamd.inner.objectives import Objective, Point, Slopes
from metamd.inner.run import Trajectory
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal


@dataclass(frozen=True)
class LogGap(Objective):
    """The mean over the run of asinh(gap_t / (tolerance gap_1)), gap_t the loss at step t above the lowest of the run.

    asinh(r) is log(2r) for large r, and r for small.

    `Regret` and `TrainingLoss` count losses, so that the first steps decide; here every digit of the gap counts alike, as
    it does for who waits until the gap is below a tolerance. A run that closes the gap by a constant factor in each of
    its first n steps adds about n log(1/tolerance) / 2, in T steps: E falls with the number of steps to the tolerance.

    The lowest loss and the first gap are held fixed (stop-gradient), so that not moving is no way out. It has no direct
    gradient and no closed form: for `Refine` and gradient estimators. With noisy losses the gap to the luckiest batch says
    little; take a tolerance above the noise.

    Args:
        tolerance: the share of the first gap below which digits do not count any more.
        constants: the lowest loss and the first gap, if they are not those of the run.

    Example:
        >>> LogGap(1e-6)
        LogGap(tolerance=1e-06)
    """

    looks_ahead: ClassVar[bool] = True
    tolerance: float = 1e-3
    constants: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie between 0 and 1, got {self.tolerance}. It is a share of the first gap.")

    def __repr__(self) -> str:
        return f"LogGap(tolerance={self.tolerance:g})"

    def held(self, run: Trajectory) -> "LogGap":
        """With the lowest loss and the first gap of this run."""
        return replace(self, constants=self._constants(run))

    def _constants(self, run: Trajectory) -> tuple[float, float]:
        if self.constants is not None:
            return self.constants
        lowest = float(run.losses.min())
        return lowest, max(float(run.losses[0]) - lowest, math.ulp(abs(lowest)) + 1e-300)

    def running(self, point: Point) -> Tensor:
        """asinh(gap_t / (tolerance gap_1)) / T."""
        if self.constants is None:
            raise ValueError("LogGap needs the lowest loss of the run while it is running. Pass objective.held(run).")
        return self._term(point.loss, self.constants) / point.steps

    def _term(self, loss: Tensor, constants: tuple[float, float]) -> Tensor:
        lowest, first = constants
        ratio = (loss - lowest) / (self.tolerance * first)
        return ratio.asinh()  # not log(1 + ratio): other runs may go below the lowest loss of the one that is held

    def slopes(self, point: Point) -> Slopes:
        """Of the loss alone."""
        lowest, first = self.constants or (math.nan, math.nan)
        return Slopes(loss=1 / math.hypot(self.tolerance * first, float(point.loss) - lowest) / point.steps)

    def recorded(self, run: Trajectory, potential: MaxDiagonal) -> Tensor:
        """The mean over the recorded losses."""
        return self._term(run.losses.double(), self._constants(run)).sum() / run.steps

    def final(self, run: Trajectory, potential: MaxDiagonal, end: Params) -> Tensor:
        """Nothing."""
        return torch.zeros((), dtype=torch.float64)

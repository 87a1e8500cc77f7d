"""Counts over problems in a few numbers: median, quartiles, and how sure the median is."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from metamd.comparison.statistics import bootstrap, quantile


@dataclass(frozen=True)
class Spread:
    """The distribution of one quantity over problems; infinite values stand for runs that never arrived.

    Args:
        median: of all values.
        lower: first quartile.
        upper: third quartile.
        low: lower end of the 95 % bootstrap interval of the median (percentiles of 2,000 resamples).
        high: upper end.
        mean: infinite if one run never arrived.
        worst: the largest value.
        arrived: how many are finite.
        count: how many there are.
    """

    median: float
    lower: float
    upper: float
    low: float
    high: float
    mean: float
    worst: float
    arrived: int
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None], seed: int = 0) -> "Spread":
        """The spread of values, None for a run that never arrived.

        Args:
            values: one per problem.
            seed: of the bootstrap.

        Example:
            >>> Spread.of([3, 1, 2, None]).median
            2.5
        """
        x = np.array([np.inf if v is None else v for v in values], dtype=np.float64)
        if not x.size:
            raise ValueError("a spread needs at least one value, got none.")
        median = bootstrap(x, [0] * len(x), median=True, seed=seed)
        lower, upper = (float(quantile(x, q)) for q in (0.25, 0.75))
        finite = int(np.isfinite(x).sum())
        return cls(median.value, lower, upper, median.low, median.high, float(x.mean()), float(x.max()), finite, len(x))

    def to_json(self) -> dict[str, Any]:
        """With None for what is infinite."""
        return {k: None if v == np.inf else v for k, v in asdict(self).items()}

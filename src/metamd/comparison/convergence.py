"""Whether runs have converged: the mean training loss of the last tenth of a run over that of the tenth before."""

import math
from collections.abc import Sequence

from metamd.comparison.comparison import Comparison

CONVERGED = 0.95
"""A run has converged when the last tenth is at least this share of the tenth before: it falls by 5 % at most."""


def last_tenth(losses: Sequence[float]) -> float | None:
    """The mean loss of the last tenth of a run over that of the tenth before; None where it is no number.

    Args:
        losses: at equal distances over the run, its start first.

    Example:
        >>> last_tenth([2.3, *[1.0] * 8, 0.5, 0.5])
        1.0
        >>> last_tenth([2.3, *[1.0] * 18, 0.5, 0.5])
        0.5
    """
    tenth = max(1, len(losses) // 10)
    last, before = (sum(part) / tenth for part in (losses[-tenth:], losses[-2 * tenth : -tenth]))
    return last / before if before > 0 and math.isfinite(last) and math.isfinite(before) else None


def last_tenths(comparison: Comparison) -> dict[str, float | None]:
    """For each optimiser, with the setting that has the lowest final loss, of its mean curve over all domains.

    Args:
        comparison: over all domains.
    """
    found = {}
    for label in comparison.labels:
        runs = [o.losses for c in comparison.chosen(label, "final_loss") for o in c.outcomes]
        alike = len({len(run) for run in runs}) == 1
        found[label] = last_tenth([sum(x) / len(runs) for x in zip(*runs, strict=True)]) if alike else None
    return found

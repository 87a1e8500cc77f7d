"""What scores on held-out tasks guarantee about the next task and about the mean: functions of numbers alone.

The scores are exchangeable with that of the next task (`next_task`) or independent and of one distribution (the others). A
task that failed has an infinite score; none is left out.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from metamd.certification.statements import Statement

Scores = Sequence[float] | NDArray[np.float64]


def next_task(scores: Scores, alpha: float, quantity: str = "score") -> Statement:
    """Split conformal prediction [Vovk2005]: P(next score <= k-th smallest of m) >= 1 - alpha, k = ceil((1 - alpha)(m + 1)).

    Whatever the distribution of the scores, as long as all m + 1 of them are exchangeable. The probability is over the
    held-out tasks and the next one together: it says nothing of a single task that is named.

    Example:
        >>> next_task(range(1, 20), alpha=0.05).bound, next_task(range(1, 19), alpha=0.05).bound
        (19.0, None)
    """
    values = checked(scores, alpha)
    m = len(values)
    # (1 - alpha)(m + 1) can be an integer that floats miss by a little, to either side
    k = math.ceil(round((1 - alpha) * (m + 1), 9))
    bound, infinite = float(np.sort(values)[k - 1]) if k <= m else math.inf, int(np.isinf(values).sum())
    numbers: dict[str, float] = {"rank": k, "tasks": m, "infinite": infinite}
    confidence = 1 - alpha
    if math.isinf(bound):
        why = f"the {_ordinal(k)} smallest of {m} scores is not finite, and {infinite} are not"
        if k > m:
            why = f"{m} tasks are too few at {confidence:g}: the {_ordinal(k)} smallest score is needed"
        return Statement("next task", quantity, None, "no bound", why, confidence, numbers)
    finite = values[np.isfinite(values)]
    numbers |= {"mean": float(finite.mean()), "low": float(finite.min()), "high": float(finite.max())}
    shown = (
        f"mean{' of the others' if infinite else ''} {numbers['mean']:.4g}, {numbers['low']:.4g} to {numbers['high']:.4g}"
    )
    censored = f"{infinite} not finite, " if infinite else ""
    basis = f"{_ordinal(k)} smallest of {m} scores; {censored}{shown}; split conformal"
    return Statement("next task", quantity, bound, "holds", basis, confidence, numbers)


def mean_below(scores: Scores, cap: float, delta: float, quantity: str = "score") -> Statement:
    """A bound on E min(score, cap): the better of Hoeffding's and the empirical Bernstein bound, at delta/2 each.

    Negative scores are raised to zero, which can only raise the bound. The cap is stated before the scores are seen. The
    largest score is no such number: a rare large score that has not been seen yet would not count.

    Example:
        >>> mean_below([1.0, 2.0, 3.0, 400.0], cap=100.0, delta=0.05).numbers["clipped"]
        0.25
    """
    values = checked(scores, delta)
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be positive and finite, got {cap:g}. State what the score is capped at.")
    clipped = values.clip(0.0, cap)
    bounds = {
        "Hoeffding": hoeffding(clipped, 0.0, cap, delta / 2),
        "empirical Bernstein": empirical_bernstein(clipped, 0.0, cap, delta / 2),
    }
    method = min(bounds, key=lambda n: bounds[n])
    bound, mean, above = min(bounds[method], cap), float(clipped.mean()), float((values > cap).mean())
    basis = f"mean {mean:.5g} in the range [0, {cap:.5g}], {100 * above:.3g} % clipped; {method}"
    numbers = {"mean": mean, "cap": cap, "clipped": above, "tasks": len(values)}
    # At the cap the bound says no more than the range that was stated.
    return Statement("mean", quantity, bound, "vacuous" if bound >= cap else "holds", basis, 1 - delta, numbers)


def hoeffding(values: Scores, low: float, high: float, delta: float) -> float:
    """E x <= mean + (high - low) sqrt(ln(1/delta) / (2m)) with probability 1 - delta, x in [low, high] [Hoeffding1963]."""
    x = np.asarray(values, dtype=np.float64)
    return float(x.mean()) + (high - low) * math.sqrt(math.log(1 / delta) / (2 * len(x)))


def empirical_bernstein(values: Scores, low: float, high: float, delta: float) -> float:
    """E x <= mean + sqrt(2 V ln(2/delta) / m) + 7 (high - low) ln(2/delta) / (3 (m - 1)) [MaurerPontil2009], Theorem 4.

    V is the sample variance. It pays where that is small and m large; with one number it says nothing.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return math.inf
    spread, log = float(x.var(ddof=1)), math.log(2 / delta)
    return float(x.mean()) + math.sqrt(2 * spread * log / len(x)) + 7 * (high - low) * log / (3 * (len(x) - 1))


def clopper_pearson(count: int, tasks: int, delta: float) -> float:
    """An upper bound on a probability, from how often its event was seen: the p with P(Bin(m, p) <= count) = delta.

    [ClopperPearson1934]. Never too small; seen never in m tasks, it is 1 - delta^(1/m).

    Example:
        >>> round(clopper_pearson(0, 59, 0.05), 4)
        0.0495
    """
    if count == tasks:
        return 1.0
    low, high = count / tasks, 1.0
    while high - low > 1e-15 * high and low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _at_most(count, tasks, middle) > delta else (low, middle)
    return high


def _at_most(count: int, tasks: int, p: float) -> float:
    """P(Bin(m, p) <= count), 0 < p < 1."""
    log = math.lgamma(tasks + 1)
    terms = [
        log - math.lgamma(i + 1) - math.lgamma(tasks - i + 1) + i * math.log(p) + (tasks - i) * math.log1p(-p)
        for i in range(count + 1)
    ]
    largest = max(terms)
    return math.exp(largest) * math.fsum(math.exp(t - largest) for t in terms)


def checked(scores: Scores, delta: float) -> NDArray[np.float64]:
    """The scores as an array; what is no score and no probability is refused."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not len(values) or bool(np.isnan(values).any()):
        raise ValueError("there must be one score for each held-out task, infinite for one that failed; got none or NaN.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}. 0.05 gives statements that hold in 95 of 100 cases.")
    return values


def _ordinal(number: int) -> str:
    last = number % 10 if number % 100 not in (11, 12, 13) else 0
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"

"""Statistics of paired measurements: intervals, a test, profiles. Infinite values are runs that never arrived."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metamd.files.store import as_json
from metamd.potentials.forms import Array

RESAMPLES = 2000  # of a bootstrap: 50 of them lie beyond each end of a 95 % interval
EXACT_UP_TO = 14
"""Up to so many pairs all signs are enumerated."""

FLIPS = 20_000
"""Beyond, so many are drawn."""

LEVEL, POWER = 0.05, 0.8
"""A difference counts as decided below this p. The number of tasks is chosen to find it with this probability."""


@dataclass(frozen=True)
class Estimate:
    """A number and how sure it is."""

    value: float  # from all measurements
    low: float  # lower end of the 95 % interval
    high: float  # upper end


def bootstrap(values: Array, groups: Sequence[int], *, median: bool = False, seed: int = 0) -> Estimate:
    """The mean or the median with the 95 % percentile interval of 2,000 resamples.

    Seeds of one dataset resemble each other: where there are several groups, groups are drawn first and then values within
    each, so that the interval is about the next dataset and not about the next seed.
    """
    where = resample(groups, seed)
    drawn = np.where(where < 0, np.nan, values[where])
    if not median:
        found = np.nanmean(drawn, 1)
    elif (where < 0).any():
        found = np.array([quantile(row[~np.isnan(row)], 0.5) for row in drawn])
    else:
        found = quantile(drawn, 0.5)
    low, high = (float(quantile(found, q)) for q in (0.025, 0.975))
    return Estimate(float(quantile(values, 0.5) if median else values.mean()), low, high)


def resample(groups: Sequence[int], seed: int, resamples: int = RESAMPLES) -> NDArray[np.int64]:
    """Indices of resamples, one in each row, drawn in two stages if there are several groups; -1 is no measurement.

    A group that is drawn gives as many measurements as it has, so the rows of unequal groups differ in length.
    """
    rng, n = np.random.default_rng(seed), len(groups)
    members = [np.flatnonzero(np.asarray(groups) == g) for g in sorted(set(groups))]
    if len(members) == 1:
        return rng.integers(n, size=(resamples, n))
    sizes = np.array([len(m) for m in members])
    table = np.stack([np.pad(m, (0, sizes.max() - len(m))) for m in members])
    chosen = rng.integers(len(members), size=(resamples, len(members)))
    most = sizes[chosen][..., None]
    bound = most if sizes.min() < sizes.max() else sizes.max()
    inside = rng.integers(bound, size=(resamples, len(members), sizes.max()))
    found = np.where(np.arange(sizes.max()) < most, np.take_along_axis(table[chosen], inside, axis=2), -1)
    return found.reshape(resamples, -1)


def signed_rank_tests(pairs: Sequence[tuple[Array, Array]]) -> list[float]:
    """Two-sided p-values that paired measurements differ, of several tests on the same tasks, corrected for all of them.

    The statistic is the sum of the ranked differences with their signs. The null hypothesis is that the differences of a
    task, in all tests at once, are as likely with the opposite sign. So the signs of a task are flipped in all tests
    together, and a p-value is compared with the smallest one that a flip gives, step down [WestfallYoung1993]. Rivals that
    behave alike cost little that way, where Holm's rule counts each of them.

    With up to 14 tasks all flips are enumerated, and the tests are exact, ties and infinities included; beyond, 20,000 flips
    are drawn. A task with equal measurements, two infinities among them, says nothing. Tasks are taken as independent.

    Example:
        >>> ours, theirs = np.zeros(8), np.arange(1.0, 9.0)
        >>> signed_rank_tests([(ours, theirs), (ours, theirs + 1), (ours, -theirs)])
        [0.0078125, 0.0078125, 0.0078125]
    """
    if not pairs:
        return []
    ranks = np.stack([signed_ranks(ours, theirs) for ours, theirs in pairs])
    n = ranks.shape[1]
    if n <= EXACT_UP_TO:
        signs = np.array(list(product((1.0, -1.0), repeat=n))).reshape(-1, n)
    else:
        drawn = np.random.default_rng(0).choice((1.0, -1.0), size=(FLIPS, n))
        signs = np.vstack([np.ones(n), drawn])
    sums = np.abs(signs @ ranks.T)  # the first row has the signs that were observed
    each = np.stack([(len(x) - np.searchsorted(np.sort(x), x - 1e-9)) / len(x) for x in sums.T])
    order = np.argsort(each[:, 0], kind="stable")
    smallest = np.minimum.accumulate(each[order][::-1])[::-1]
    found = np.maximum.accumulate((smallest <= each[order, :1] + 1e-12).mean(1))
    return [float(found[place]) for place in np.argsort(order, kind="stable")]


def smallest_p(pairs: int) -> float:
    """What the tests give at least with so many pairs, however many tests there are."""
    return 2.0 ** (1 - pairs) if pairs <= EXACT_UP_TO else 1 / (1 + FLIPS)


PAIRS_TO_DECIDE = 6
"""The fewest pairs with which p can come out below `LEVEL`."""


@cache
def pairs_to_find(effect: float, others: int) -> int:
    """Pairs with which an effect is found with probability `POWER`; its unit is the standard deviation from pair to pair.

    For normal differences, by simulated signed ranks against the exact distribution of their sum. The correction is that for
    the first of the others where they have nothing in common: fewer pairs may do.

    Example:
        >>> pairs_to_find(1.0, 1), pairs_to_find(1.5, 6)
        (11, 11)
    """
    rng, normal = np.random.default_rng(0), NormalDist()
    # the t-test needs about so many, and this one more
    about = ((normal.inv_cdf(1 - LEVEL / (2 * max(others, 1))) + normal.inv_cdf(POWER)) / effect) ** 2
    pairs = max(PAIRS_TO_DECIDE, int(0.9 * about))
    while True:
        draws = rng.normal(effect, 1.0, (SIMULATED, pairs))
        ranks = np.abs(draws).argsort(1).argsort(1) + 1
        if (np.where(draws < 0, ranks, 0).sum(1) <= _critical(pairs, LEVEL / max(others, 1))).mean() >= POWER:
            return pairs
        pairs += 1


SIMULATED = 4000
"""Draws by which a power is found: to 0.013 with 95 %."""


def _critical(pairs: int, level: float) -> int:
    """The largest sum of the ranks of one sign with which the two-sided exact test stays below the level; -1 for none."""
    ways = np.zeros(pairs * (pairs + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, pairs + 1):  # with this rank, or without it
        ways[rank:] += ways[:-rank].copy()
    return int((2 * ways.cumsum() / 2.0**pairs < level).sum()) - 1


def signed_ranks(ours: Array, theirs: Array) -> Array:
    """The differences as ranks of their sizes with their signs; equal sizes share the mean rank, and no difference is 0.

    Their sum is what the test is about: negative where ours are smaller.
    """
    different, found = ours != theirs, np.zeros(len(ours))
    with np.errstate(invalid="ignore"):
        difference = ours[different] - theirs[different]
    _, where, counts = np.unique(np.abs(difference), return_inverse=True, return_counts=True)
    means = counts.cumsum() - (counts - 1) / 2
    found[different] = np.sign(difference) * means[where]
    return found


@dataclass(frozen=True)
class Profile:
    """The share of problems that an optimiser solves within tau times the best one's time, tau from 1 to 4."""

    tau: tuple[float, ...]  # the factors
    share: tuple[float, ...]  # of the problems, for each
    area: float  # under the curve over [1, 4], divided by 3: 1 is the best on every problem


def profiles(times: Mapping[str, Array]) -> dict[str, Profile]:
    """Performance profiles after Dolan and More [Dolan2002], as AlgoPerf scores them [Dahl2023].

    A problem that nobody solves counts as unsolved for everybody.
    """
    table = np.stack([np.maximum(t, 1e-9) for t in times.values()])
    best = table.min(0)
    with np.errstate(invalid="ignore"):
        ratios = np.where(np.isfinite(table), table / best, np.inf)
    tau = np.linspace(1.0, 4.0, 61)
    shares = [(row <= tau[:, None] + 1e-12).mean(1) for row in ratios]
    areas = [float(np.clip(4.0 - row, 0.0, None).mean() / 3.0) for row in ratios]
    found = zip(times, shares, areas, strict=True)
    return {label: Profile(tuple(tau.tolist()), tuple(share.tolist()), area) for label, share, area in found}


def quantile(x: Any, q: float) -> Any:
    """The mean of the two order statistics around a quantile: numpy's own interpolation makes NaN of two infinities."""
    ordered = np.sort(x, axis=-1)
    place = q * (ordered.shape[-1] - 1)
    below, above = ordered[..., int(np.floor(place))], ordered[..., int(np.ceil(place))]
    return np.where(below == above, below, 0.5 * (below + above))


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """The distribution of a count over problems, in JSON's types; None stands for a run that never arrived.

    `low` and `high` are the ends of the interval of the median, `lower` and `upper` the quartiles.
    """
    x = np.array([np.inf if v is None else v for v in values], dtype=np.float64)
    if not x.size:
        raise ValueError("a spread needs at least one value, got none.")
    median = bootstrap(x, [0] * len(x), median=True)
    found = {"median": median.value, "lower": float(quantile(x, 0.25)), "upper": float(quantile(x, 0.75))}
    found |= {"low": median.low, "high": median.high, "mean": float(x.mean()), "worst": float(x.max())}
    return as_json(found) | {"arrived": int(np.isfinite(x).sum()), "count": len(x)}

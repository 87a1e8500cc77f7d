"""A schedule learned from the energies |g_t|^2 of runs: it minimises a bound on the last iterate [Defazio2023].

For convex l, any w_0 .. w_T > 0 and rates eta_t = w_t (w_{t+1} + ... + w_T) / (w_0 + ... + w_T), mirror descent has

    l(theta_T) - l(u)  <=  (|u - theta_0|^2_D + sum_t w_t^2 |g_t|^2_{D^-1}) / (2 sum_t w_t),

which w_t ~ 1/|g_t|^2 minimises: equal energies give the linear decay, gradients that shrink give a warm-up. The energies
are held fixed, as the closed form of a metric holds the gradients. But where a run fits its data they fall by hundreds of
times *because* it gets on, and the warm-up that follows from that would stop it from getting on. So the weights are taken by
tenth of the run, smoothed by medians, and raised to the power at which the largest is `SPREAD` times the smallest.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from metamd.files.usage import Usage
from metamd.potentials.forms import Array

PHASES = 10
"""Of a run; a learned schedule has a number at each of their ends."""

SPREAD = 2.25
"""How many times the smallest weight the largest may be; 1 gives the linear decay."""


def refine(energies: Sequence[float]) -> Array:
    """The rates eta_0 .. eta_{T-1} that minimise the bound on theta_T, the largest being 1.

    Args:
        energies: |g_t|^2 at the iterates 0 .. T.

    Example:
        >>> refine([1.0, 1.0, 1.0, 1.0, 1.0])
        array([1.  , 0.75, 0.5 , 0.25])
    """
    weights = 1 / np.asarray(energies, dtype=np.float64)
    later = np.cumsum(weights[::-1])[::-1] - weights
    rates: Array = (weights * later)[:-1]
    return rates / rates.max()


def knots(runs: Sequence[Sequence[float]], *, phases: int = PHASES, spread: float = SPREAD) -> tuple[float, ...]:
    """The refined schedule as a few numbers, at equal distances over the run, between which it is linear.

    Args:
        runs: the energies of each, step by step.
        phases: how many parts of a run have a weight of their own; fewer if the runs are shorter.
        spread: see `SPREAD`; infinite for the bound's own minimiser.

    Example:
        >>> knots([[3.0] * 40], phases=4)
        (1.0, 0.75, 0.5, 0.25, 0.0)
    """
    count = min(phases, *(len(run) for run in runs))
    means = np.mean([[part.mean() for part in np.array_split(np.asarray(run, dtype=np.float64), count)] for run in runs], 0)
    if not 0 < means.min() <= means.max() < math.inf:
        means = np.ones(count)
    logs = -_smooth(np.log(means))
    logs *= min(1.0, math.log(spread) / max(float(np.ptp(logs)), 1e-12))
    later = np.append(np.cumsum(np.exp(logs - logs.max())[::-1])[::-1], 0.0)
    places = np.arange(count + 1) - 0.5  # a phase has its weight in its middle; at the ends of the run it goes on as it did
    inner = np.interp(places, np.arange(count), logs)
    if count > 1:
        inner[0], inner[-1] = 1.5 * logs[0] - 0.5 * logs[1], 1.5 * logs[-1] - 0.5 * logs[-2]
    rates = np.exp(inner - logs.max()) * later
    return tuple(float(f"{rate:.12g}") for rate in rates / rates.max())


def _smooth(values: Array) -> Array:
    """Running medians of three, with Tukey's rule at the ends: the median of the value, its neighbour and the line to it."""
    if len(values) < 4:
        return values
    found = np.array(values)
    found[1:-1] = np.median([values[:-2], values[1:-1], values[2:]], axis=0)
    found[0] = np.median([values[0], found[1], 3 * found[1] - 2 * found[2]])
    found[-1] = np.median([values[-1], found[-2], 3 * found[-2] - 2 * found[-3]])
    return found


def refined(usage: Usage, runs: Sequence[Sequence[float]]) -> Usage:
    """The same usage with the schedule that the energies of runs give; the linear one if there are none.

    Args:
        usage: of these runs.
        runs: their energies.
    """
    if not runs:
        return replace(usage, schedule="linear", knots=())
    return replace(usage, schedule="learned", knots=knots(runs))

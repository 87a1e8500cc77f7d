"""The statistics of held-out scores: coverage by simulation, oracles, and doubles that must be rejected."""

import math

import numpy as np
import pytest
from scipy import stats

from metamd.certification.statistics import clopper_pearson, empirical_bernstein, hoeffding, mean_below, next_task

DELTA = 0.05
REPEATS = 4000

DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "pareto": lambda rng, shape: rng.pareto(0.5, size=shape),  # no mean
    "cauchy": lambda rng, shape: np.abs(rng.standard_cauchy(size=shape)),
    "ties": lambda rng, shape: rng.integers(0, 4, size=shape).astype(float),
    "censored": lambda rng, shape: np.where(rng.random(shape) < 0.02, math.inf, rng.exponential(size=shape)),
}


def below(hits, level=0.999):
    """Whether the coverage is below 1 - DELTA for sure: the upper end of its one-sided binomial interval is.

    A true coverage of 1 - DELTA is called below in one of a thousand cases.
    """
    k, n = int(np.sum(hits)), len(hits)
    return k < n and float(stats.beta.ppf(level, k + 1, n - k)) < 1 - DELTA


def above(hits, level=0.999):
    """Whether it is at least 1 - DELTA for sure: the lower end is."""
    k, n = int(np.sum(hits)), len(hits)
    return float(stats.beta.ppf(1 - level, k, n - k + 1)) >= 1 - DELTA


def bound_of(statement):
    return math.inf if statement.bound is None else statement.bound


def conformal_hits(draw, m, rank=None, seed=0):
    rng = np.random.default_rng(seed)
    scores, new = draw(rng, (REPEATS, m)), draw(rng, REPEATS)
    if rank is not None:
        return new <= np.sort(scores, axis=1)[:, rank - 1]
    return new <= np.array([bound_of(next_task(row, DELTA)) for row in scores])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("m", [10, 19, 50])
def test_the_next_score_is_covered(name, m):
    hits = conformal_hits(DISTRIBUTIONS[name], m)
    assert not below(hits)
    if m == 50:  # 49 of 51 = 0.961 for scores without ties
        assert np.mean(hits) >= 1 - DELTA


@pytest.mark.parametrize("name", ["normal", "pareto", "cauchy"])
def test_a_rank_without_the_plus_one_is_rejected(name):
    wrong = math.ceil((1 - DELTA) * 50)  # 48, which covers 48 of 51 = 0.941
    rng = np.random.default_rng(1)
    scores, new = DISTRIBUTIONS[name](rng, (20_000, 50)), DISTRIBUTIONS[name](rng, 20_000)
    ordered = np.sort(scores, axis=1)
    assert below(new <= ordered[:, wrong - 1])
    assert above(new <= ordered[:, next_task(scores[0], DELTA).numbers["rank"] - 1])


def test_ranks_and_reasons():
    assert next_task(range(19), 0.05).numbers["rank"] == 19
    few = next_task(range(18), 0.05)
    assert (few.bound, few.verdict) == (None, "no bound")
    assert few.basis == "18 tasks are too few at 0.95: the 19th smallest score is needed"
    failed = next_task([1.0] * 45 + [math.inf] * 5, 0.05)
    assert (failed.bound, failed.verdict) == (None, "no bound")
    assert failed.basis == "the 49th smallest of 50 scores is not finite, and 5 are not"
    one = next_task([1.0] * 49 + [math.inf], 0.05)  # one failure in fifty is within delta
    assert (one.bound, one.verdict) == (1.0, "holds")
    assert one.basis == "49th smallest of 50 scores; 1 not finite, mean of the others 1, 1 to 1; split conformal"
    spread = next_task([1.0, 2.0, 6.0], 0.5)
    assert spread.basis == "2nd smallest of 3 scores; mean 3, 1 to 6; split conformal"
    assert {k: spread.numbers[k] for k in ("mean", "low", "high")} == {"mean": 3.0, "low": 1.0, "high": 6.0}
    ranks = {"1st": (1, 0.6), "2nd": (2, 0.4), "3rd": (3, 0.3), "11th": (11, 0.1), "21st": (21, 0.05)}
    assert all(next_task(range(m), alpha).basis.startswith(f"{name} ") for name, (m, alpha) in ranks.items())


def bernoulli(rng, shape, p=0.03):
    return np.where(rng.random(shape) < p, 1.0, 0.0)


MEANS = {
    "rare": (bernoulli, 1.0, 0.03),
    "fair": (lambda rng, shape: bernoulli(rng, shape, 0.5), 1.0, 0.5),
    "pareto": (DISTRIBUTIONS["pareto"], 10.0, None),
    "cauchy": (DISTRIBUTIONS["cauchy"], 20.0, None),
    "small": (lambda rng, shape: 0.01 * rng.random(shape), 1.0, 0.005),
}


def expectation(draw, cap, known):
    return known if known is not None else float(draw(np.random.default_rng(9), 4_000_000).clip(0, cap).mean())


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("m", [5, 50, 400])
def test_the_mean_of_capped_scores_is_covered(name, m):
    draw, cap, known = MEANS[name]
    rows = draw(np.random.default_rng(2), (REPEATS, m))
    bounds = np.array([mean_below(row, cap, DELTA).bound for row in rows])
    assert above(bounds >= expectation(draw, cap, known))


def test_the_largest_score_as_range_is_rejected():
    draw, _, known = MEANS["rare"]
    rows = draw(np.random.default_rng(3), (REPEATS, 50))
    hits = [hoeffding(row, 0.0, max(row.max(), 1e-9), DELTA) >= known for row in rows]
    assert below(hits)
    assert np.mean(hits) < 0.85  # all zero in 0.97^50 = 22 %


def test_bernstein_without_its_range_term_is_rejected():
    draw, _, known = MEANS["rare"]
    rows = draw(np.random.default_rng(3), (REPEATS, 50))
    hits = [row.mean() + math.sqrt(2 * row.var(ddof=1) * math.log(2 / DELTA) / 50) >= known for row in rows]
    assert below(hits)


def test_each_inequality_against_its_formula_and_the_better_is_taken():
    x = np.array([0.0, 1.0, 3.0, 4.0])
    assert hoeffding(x, 0, 5, 0.1) == pytest.approx(2 + 5 * math.sqrt(math.log(10) / 8))
    assert empirical_bernstein(x, 0, 5, 0.1) == pytest.approx(
        2 + math.sqrt(2 * (10 / 3) * math.log(20) / 4) + 7 * 5 * math.log(20) / 9
    )
    assert empirical_bernstein([1.0], 0, 5, 0.1) == math.inf
    rng = np.random.default_rng(0)
    many, few = mean_below(0.01 * rng.random(500), 1.0, 0.05), mean_below(0.01 * rng.random(20), 1.0, 0.05)
    assert many.basis.endswith("; empirical Bernstein")
    assert few.basis.endswith("; Hoeffding")
    assert many.bound == pytest.approx(empirical_bernstein(0.01 * np.random.default_rng(0).random(500), 0, 1, 0.025))


def test_clipping_is_counted_and_a_bound_at_the_cap_is_vacuous():
    found = mean_below([1.0, 2.0, math.inf, 30.0, -5.0], cap=10.0, delta=0.05)
    assert found.numbers["clipped"] == 0.4
    assert found.basis.startswith("mean 4.6 in the range [0, 10], 40 % clipped; ")
    assert found.numbers["mean"] == pytest.approx((1 + 2 + 10 + 10 + 0) / 5)
    assert (found.bound, found.verdict) == (10.0, "vacuous")
    assert mean_below([1.0] * 100, cap=10.0, delta=0.05).verdict == "holds"


@pytest.mark.parametrize("m", [1, 7, 50, 1000])
@pytest.mark.parametrize("delta", [0.5, 0.05, 1e-6])
def test_clopper_pearson_against_scipy(m, delta):
    for k in sorted({0, 1, m // 3, m - 1, m}):
        wanted = 1.0 if k == m else float(stats.beta.ppf(1 - delta, k + 1, m - k))
        assert clopper_pearson(k, m, delta) == pytest.approx(wanted, rel=1e-9)
    assert clopper_pearson(0, m, delta) == pytest.approx(1 - delta ** (1 / m), rel=1e-9)


def test_clopper_pearson_covers_and_the_share_itself_does_not():
    rng = np.random.default_rng(4)
    for p in (0.01, 0.1, 0.6):
        counts = rng.binomial(50, p, size=REPEATS)
        bounds = np.array([clopper_pearson(k, 50, DELTA) for k in range(51)])
        assert not below(bounds[counts] >= p)
        assert below(counts / 50 >= p)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: next_task([], 0.05), "one score for each held-out task"),
        (lambda: next_task([1.0, math.nan], 0.05), "one score for each held-out task"),
        (lambda: next_task([1.0], 1.0), "delta must lie between 0 and 1, got 1.0"),
        (lambda: mean_below([1.0], math.inf, 0.05), "cap must be positive and finite, got inf"),
    ],
)
def test_bad_input_is_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()

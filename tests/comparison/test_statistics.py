"""Intervals, tests and profiles against scipy, the textbook and simulations."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from metamd.comparison.statistics import (
    PAIRS_TO_DECIDE,
    bootstrap,
    pairs_to_find,
    profiles,
    resample,
    signed_rank_tests,
    signed_ranks,
    smallest_p,
)


def signed_rank_test(ours, theirs):
    """One test alone, for which nothing is corrected."""
    (found,) = signed_rank_tests([(ours, theirs)])
    return found


@pytest.mark.parametrize("n", [4, 9, 14])
def test_the_signed_rank_test_is_scipys(n):
    rng = np.random.default_rng(n)
    for shift in (0.0, 0.5, 1.5):
        ours, theirs = rng.normal(size=n), rng.normal(size=n) + shift
        wanted = stats.wilcoxon(ours, theirs, method="exact").pvalue
        assert signed_rank_test(ours, theirs) == pytest.approx(wanted, abs=1e-12)


def test_the_signed_rank_test_of_many_pairs_is_near_scipys():
    rng = np.random.default_rng(0)
    ours = rng.normal(size=40)
    theirs = ours + rng.normal(size=40) + 0.4
    assert signed_rank_test(ours, theirs) == pytest.approx(stats.wilcoxon(ours, theirs).pvalue, abs=0.01)


def test_infinities_and_ties_in_the_signed_rank_test():
    inf = math.inf
    assert signed_rank_test(np.array([1.0, 2.0, inf]), np.array([1.0, 2.0, inf])) == 1.0
    # arriving where the other never does is the largest difference there is
    assert signed_rank_test(np.array([1.0] * 6), np.array([inf] * 6)) == pytest.approx(2 / 64)
    ours, theirs = np.array([0.0, 2.0, 3.0, inf, inf]), np.array([3.0, 1.0, 0.0, 1.0, inf])
    assert signed_ranks(ours, theirs).tolist() == [-2.5, 1.0, 2.5, 4.0, 0.0]
    assert stats.rankdata([3.0, 1.0, 3.0, inf]).tolist() == [2.5, 1.0, 2.5, 4.0]


def slow_signed_rank_tests(pairs):
    """The step-down procedure as the book has it: loops over flips, and over the tests that are left."""
    ranks = [signed_ranks(ours, theirs) for ours, theirs in pairs]
    flips = list(product((1, -1), repeat=len(ranks[0])))
    sums = [[abs(sum(s * r for s, r in zip(flip, row, strict=True))) for flip in flips] for row in ranks]
    p = [[sum(other >= x - 1e-9 for other in row) / len(flips) for x in row] for row in sums]
    order, largest, found = sorted(range(len(p)), key=lambda k: p[k][0]), 0.0, {}
    for place, k in enumerate(order):
        smaller = sum(min(p[j][f] for j in order[place:]) <= p[k][0] for f in range(len(flips))) / len(flips)
        largest = found[k] = max(largest, smaller)
    return [found[k] for k in range(len(p))]


@pytest.mark.parametrize("shift", [0.0, 0.7, 2.0])
def test_several_tests_are_corrected_together_as_in_the_book(shift):
    rng = np.random.default_rng(3)
    ours = rng.normal(size=7)
    pairs = [(ours, ours + rng.normal(size=7) + shift * k) for k in range(4)]
    pairs.append((ours, np.where(np.arange(7) < 2, ours, math.inf)))  # equal twice
    assert signed_rank_tests(pairs) == pytest.approx(slow_signed_rank_tests(pairs))
    alone = [signed_rank_test(*pair) for pair in pairs]
    assert all(a <= both + 1e-12 for a, both in zip(alone, signed_rank_tests(pairs), strict=True))


def test_tests_that_say_the_same_cost_nothing_and_others_do():
    ours, theirs = np.zeros(8), np.arange(1.0, 9.0)
    assert signed_rank_tests([(ours, theirs)] * 12) == [2 / 256] * 12
    rng = np.random.default_rng(0)
    noise = [(ours, rng.normal(size=8)) for _ in range(11)]
    assert signed_rank_tests([(ours, theirs), *noise])[0] > 3 * 2 / 256
    assert signed_rank_tests([]) == []


def test_intervals_cover_the_mean_of_the_next_domains():
    """Domains differ: 12 of them with 3 seeds. Drawing seeds alone covers far too seldom. False alarm below 1e-3."""
    rng = np.random.default_rng(0)
    groups = [g for g in range(12) for _ in range(3)]
    covered, naive = 0, 0
    for i in range(200):
        values = np.repeat(rng.normal(size=12), 3) + 0.1 * rng.normal(size=36)
        found = bootstrap(values, groups, seed=i)
        covered += found.low <= 0 <= found.high
        found = bootstrap(values, [0] * 36, seed=i)
        naive += found.low <= 0 <= found.high
    assert covered >= 170  # nominally 95 %; twelve groups give about 91 %
    assert naive < 160


def test_resamples_keep_domains_together():
    draws = resample([0, 0, 1, 1, 2, 2], 0, resamples=50)
    assert draws.shape == (50, 6)
    pairs = draws.reshape(50, 3, 2) // 2
    assert (pairs[..., 0] == pairs[..., 1]).all()
    unequal = resample([0, 1, 1], 0, resamples=50)
    assert set(np.unique(unequal)) == {-1, 0, 1, 2}
    for row in unequal:
        drawn = sorted(x for x in row.tolist() if x >= 0)
        assert len(drawn) in (2, 3, 4), "two groups, of one or two members each"
        assert drawn.count(0) in (0, 1, 2)
        assert (len(drawn) - drawn.count(0)) % 2 == 0, "the second group comes whole or not at all"


def test_profiles_by_hand():
    inf = math.inf
    found = profiles({"a": np.array([10.0, 10.0, inf, inf]), "b": np.array([20.0, 10.0, 50.0, inf])})
    assert found["a"].share[0] == 0.5
    assert found["b"].share[0] == 0.5  # best on the second (a tie) and the third
    assert found["b"].share[-1] == 0.75
    at = dict(zip(found["b"].tau, found["b"].share, strict=True))
    assert at[2.0] == 0.75
    assert found["a"].area == pytest.approx(0.5)
    assert found["b"].area == pytest.approx((2 / 3 + 1 + 1) / 4)


@pytest.mark.parametrize("pairs", [5, 14, 15, 40])
def test_the_smallest_p_is_what_the_clearest_outcome_gives(pairs):
    ours = np.arange(1.0, pairs + 1)
    assert signed_rank_test(ours, 2 * ours) == pytest.approx(smallest_p(pairs), rel=1.01 if pairs == 15 else 1e-9)


def test_so_many_pairs_can_decide_and_one_fewer_cannot():
    """Against the test itself, on pairs that ours all wins."""
    p, before = (signed_rank_test(np.zeros(n), np.arange(1.0, n + 1)) for n in (PAIRS_TO_DECIDE, PAIRS_TO_DECIDE - 1))
    assert p < 0.05 <= before


@pytest.mark.parametrize(("effect", "others"), [(1.5, 6), (1.0, 1), (1.0, 12)])
def test_a_stated_effect_is_found_about_as_often_as_is_said(effect, others):
    """Simulated: 0.8 is asked for. Fewer than 0.7 in 200 simulations have probability 4e-4."""
    rng, pairs = np.random.default_rng(0), pairs_to_find(effect, others)
    draws = rng.normal(-effect, 1.0, (200, pairs))
    found = np.mean([others * signed_rank_test(x, np.zeros(pairs)) < 0.05 for x in draws])
    assert 0.7 < found < 0.95
    fewer = np.mean([others * signed_rank_test(x[: pairs // 2], np.zeros(pairs // 2)) < 0.05 for x in draws])
    assert fewer < 0.6, "half as many do not suffice"

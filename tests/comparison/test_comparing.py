"""Comparisons: A/A finds no winner, a planted one is found; statistics against scipy; cells that survive what kills them."""

import json
import math
import os
import signal
import socket
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from metamd import Comparison, Diagonal, Measuring, Protocol, compare, handicap, learned_rival, load, meta_train, tasks
from metamd.cli import main as cli
from metamd.comparison.comparison import Candidate, Fold, Target
from metamd.comparison.entrants import draw
from metamd.comparison.entrants import entrants as entered
from metamd.comparison.pace import geometric_mean, pace, pace_section
from metamd.comparison.page import as_markdown
from metamd.comparison.parallel import Cell, fill
from metamd.comparison.statistics import bootstrap, holm, profiles, rank, rank_sum, resample, signed_rank_test, smallest_p
from metamd.comparison.training import Outcome
from metamd.comparison.tuning import QuasiRandom
from metamd.experiments.declare import Entry, Geometry, Scale
from metamd.experiments.experiment import Experiment
from metamd.files.store import Records
from metamd.rivals import rival
from metamd.rivals.base import Tuning
from tests import processes
from tests.helpers import draws

bare = partial(Protocol, measuring=Measuring(splits=()))
QUADRATIC = tasks.quadratic((0.5, 4.0), steps=40)


# statistics


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
    assert rank(np.array([3.0, 1.0, 3.0, inf])).tolist() == [2.5, 1.0, 2.5, 4.0]
    assert stats.rankdata([3.0, 1.0, 3.0, inf]).tolist() == [2.5, 1.0, 2.5, 4.0]


def test_holm_is_the_textbooks():
    # Holm (1979): 0.01 x 4, 0.013 x 3 lifted to it, 0.03 x 2, 0.2
    assert holm([0.2, 0.01, 0.03, 0.013]) == pytest.approx([0.2, 0.04, 0.06, 0.04])
    assert holm([]) == []


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


def test_the_interval_of_a_ratio_is_over_domains_even_where_a_pair_is_missing():
    """Four domains that differ: without one of the twelve values the interval may not shrink to that of a flat draw."""
    values = np.repeat([0.5, 0.5, 2.0, 2.0], 3) * np.tile([0.99, 1.0, 1.01], 4)
    groups = [g for g in range(4) for _ in range(3)]
    whole, less = bootstrap(values, groups), bootstrap(values[1:], groups[1:])
    flat = bootstrap(values[1:], [0] * 11)
    assert less.high - less.low == pytest.approx(whole.high - whole.low, rel=0.1)
    assert flat.high - flat.low < 0.75 * (less.high - less.low)
    middle = bootstrap(values[1:], groups[1:], median=True)
    assert middle.low < 0.6 < 1.9 < middle.high


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


# comparisons of invented outcomes


def invented(losses, steps=100, failed=""):
    places = tuple(range(0, steps + 1, 10))
    ends = {} if failed else {"test": (0.1, 0.9)}
    return Outcome({"seed": 0}, {"rival": "x"}, places, tuple(losses), losses[-1], ends, steps, failed)


def curve(rate, rng, noise):
    return np.exp(-np.linspace(0, 1, 11) * rate * math.exp(noise * rng.normal())) * math.exp(0.05 * rng.normal())


def simulated(rates, rng, *, domains=6, seeds=3, noise=0.1):
    folds = []
    for d in range(domains):
        difficulty = math.exp(0.5 * rng.normal())
        entrants = {
            label: (Candidate({"rival": label}, tuple(invented(curve(r * difficulty, rng, noise)) for _ in range(seeds))),)
            for label, r in rates.items()
        }
        folds.append(Fold(str(d), entrants, dict.fromkeys(rates, 1.0), {}))
    return Comparison(tuple(folds), {}).aiming(list(rates)[-1])


def false_alarms(times):
    return stats.binom.isf(1e-3, times, 0.05)


@pytest.mark.law
def test_a_against_a_finds_no_winner():
    """Ten rivals like ours, many times: at most 5 % may be found, so that more than `false_alarms` have probability 1e-3."""
    rng, times = np.random.default_rng(0), draws(200)
    found = dict.fromkeys(("mean_loss", "final_loss", "steps_to_target"), 0)
    for _ in range(times):
        comparison = simulated(dict.fromkeys("abcdefghijk", 3.0), rng)
        for metric in found:
            found[metric] += any(d.verdict != "undecided" for d in comparison.differences(metric))
    assert max(found.values()) <= false_alarms(times)


def test_tests_that_are_not_corrected_would_find_one():
    """The law above rejects a comparison without Holm's correction: ten tests at 5 % find something in a third of all."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(100):
        c = simulated(dict.fromkeys("abcdefghijk", 3.0), rng)
        ours = c.values("a", "mean_loss")
        alarms += any(signed_rank_test(ours, c.values(x, "mean_loss")) < 0.05 for x in "bcdefghijk")
    assert alarms > false_alarms(100)


def test_a_planted_winner_is_found():
    comparison = simulated({"ours": 4.5, "worse": 3.0, "same": 4.5, "better": 6.5}, np.random.default_rng(1)).aiming("worse")
    for metric in ("mean_loss", "final_loss", "steps_to_target"):
        verdicts = {d.label: d.verdict for d in comparison.differences(metric)}
        assert verdicts["worse"] == "ahead", metric
        assert verdicts["same"] == "undecided", metric
        assert verdicts["better"] == "behind", metric
    found = {d.label: d for d in comparison.differences("final_loss")}
    assert found["worse"].low < found["worse"].ratio < found["worse"].high < 1 < found["better"].low
    rows = {r["label"]: r for r in comparison.table("steps_to_target")}
    assert rows["better"]["value"] < rows["worse"]["value"]
    areas = {k: p.area for k, p in comparison.profiles().items()}
    assert areas["better"] > areas["ours"] > areas["worse"]


def test_a_verdict_has_the_direction_of_its_test():
    """62 tiny losses and 38 large wins: the signed ranks speak for ours, and so must the verdict."""
    rng = np.random.default_rng(0)
    theirs = np.ones(100)
    ours = np.concatenate([1 + 1e-3 * rng.random(62), 0.5 * rng.random(38)])
    assert rank_sum(ours, theirs) < 0
    folds = []
    for mine, other in zip(ours, theirs, strict=True):
        both = {"ours": candidates([2.0] + [mine] * 10), "other": candidates([2.0] + [other] * 10)}
        folds.append(Fold("d", both, {}, {}))
    (found,) = Comparison(tuple(folds), {}).differences("final_loss")
    assert (found.wins, found.losses) == (38, 62)
    assert found.p < 0.05
    assert found.verdict == "ahead"


def test_a_baseline_that_fails_sets_no_target():
    good, gone = [2.0] + [0.5] * 10, [2.0] + [math.inf] * 10
    failed = replace(invented(gone), failed="it rose.")
    half = Candidate({"rival": "base"}, (failed, invented(good)))
    fold = Fold("d", {"ours": (Candidate({}, (invented(good), failed)),), "base": (half,)}, {}, {})
    found = Comparison((fold,), {}).aiming("base")
    assert found.target(fold) == 0.5, "the mean of the runs that did not fail"
    assert found.values("ours", "steps_to_target").tolist() == [10.0, math.inf]
    nothing = replace(fold, entrants={**fold.entrants, "base": (Candidate({"rival": "base"}, (failed, failed)),)})
    found = Comparison((nothing,), {}).aiming("base")
    assert math.isnan(found.target(nothing))
    assert found.values("ours", "steps_to_target").tolist() == [math.inf] * 2
    assert found.values("base", "steps_to_target").tolist() == [math.inf] * 2


def test_the_best_setting_for_a_target_has_the_smallest_median():
    """Two of three runs soon and one never, against three late ones: tables show the median, so the first is chosen."""
    soon, late, never = [2.0] + [0.1] * 10, [2.0] * 9 + [0.1] * 2, [2.0] * 11
    fast = Candidate({"rival": "r", "setting": {"lr": 1}}, (invented(soon), invented(soon), invented(never)))
    safe = Candidate({"rival": "r", "setting": {"lr": 2}}, (invented(late),) * 3)
    fold = Fold("d", {"r": (safe, fast)}, {"r": 1.0}, {})
    for metric in ("steps_to_target", "seconds_to_target"):
        assert fold.best("r", metric, 0.1) is fast
    assert fold.best("r", "mean_loss", None) is fast
    assert fold.best("r", "final_loss", None) is safe


def test_learning_is_paid_for_by_each_domains_own_steps():
    """A run of 100 steps and one of 400 that never arrive cost 250 on the mean, not as much as the first."""
    short, long = ([2.0] * 11, 100), ([2.0] * 41, 400)
    folds = []
    for losses, steps in (short, long):
        there = [2.0] + [0.1] * (len(losses) - 1)
        mine, other = (Candidate({}, (invented(x, steps),)) for x in (there, losses))
        quick = Candidate({}, (invented(there, steps),))
        costs = {"ours": {"gradient_evaluations": 240.0}}
        folds.append(Fold(str(steps), {"ours": (mine,), "slow": (other,), "base": (quick,)}, {}, costs))
    found = Comparison(tuple(folds), {}).aiming("base")
    assert found.tasks_to_pay("slow", every_task=False) == 1  # 240 / (250 - 10)
    assert Comparison(tuple(folds[:1]), {}).aiming("base").tasks_to_pay("slow", every_task=False) == 3  # 240 / (100 - 10)


def test_three_pairs_decide_nothing():
    comparison = simulated({"ours": 6.0, "worse": 2.0}, np.random.default_rng(0), domains=1, seeds=3)
    assert comparison.differences("final_loss")[0].wins == 3
    assert comparison.differences("final_loss")[0].verdict == "undecided"


def candidates(*curves):
    return tuple(Candidate({"rival": "r", "setting": {"lr": i}}, (invented(c),)) for i, c in enumerate(curves))


def test_the_best_candidate_is_chosen_for_each_metric_and_domain():
    early = [2.0, 0.5] + [0.4] * 9
    late = [2.0] + [1.5] * 8 + [0.1, 0.1]
    failed = [2.0] + [math.inf] * 10
    fold = Fold("d", {"r": candidates(early, late, failed), "base": candidates(early)}, {"r": 0.5, "base": 1.0}, {})
    other = Fold("e", {"r": candidates(failed, failed, late), "base": candidates(late)}, {"r": 0.5, "base": 1.0}, {})
    comparison = Comparison((fold, other), {}).aiming("base", 1.0)
    assert [c.contender["setting"]["lr"] for c in comparison.chosen("r", "mean_loss")] == [0, 2]
    assert [c.contender["setting"]["lr"] for c in comparison.chosen("r", "final_loss")] == [1, 2]
    assert comparison.values("r", "final_loss").tolist() == [0.1, 0.1]
    assert Target("base", 1.0).of(fold) == 0.4
    assert comparison.values("r", "steps_to_target").tolist() == [20.0, 90.0]
    assert comparison.values("r", "seconds_to_target").tolist() == [10.0, 45.0]
    assert fold.tuning_gradients("r") == 300
    assert fold.tuning_gradients("base") == 0
    with pytest.raises(ValueError, match="baseline, which sets the target, must be one of r; base"):
        comparison.aiming("adam")
    with pytest.raises(ValueError, match="share must lie in"):
        comparison.aiming("base", 0.0)
    with pytest.raises(ValueError, match="metric must be one of"):
        comparison.values("base", "beauty")


def test_when_learning_has_paid_for_itself():
    ours, theirs = [2.0] + [0.1] * 10, [2.0] * 5 + [0.1] * 6
    entrants = {"ours": candidates(ours), "rival": candidates(theirs, theirs)}
    fold = Fold("d", entrants, {}, {"ours": {"gradient_evaluations": 950.0, "hessian_vector_products": 20.0}})
    comparison = Comparison((fold,), {}).aiming("rival", 0.75)
    assert comparison.learning_gradients("ours") == 1000  # 950 + 2.5 x 20
    # to the target: 10 steps against 50; tuning: two candidates of 100 steps
    assert comparison.tasks_to_pay("rival", every_task=True) == math.ceil(1000 / (40 + 200))
    assert comparison.tasks_to_pay("rival", every_task=False) == math.ceil((1000 - 200) / 40)
    backwards = Comparison((Fold("d", {"ours": candidates(theirs), "rival": candidates(ours)}, {}, fold.costs),), {})
    assert backwards.aiming("rival").tasks_to_pay("rival", every_task=False) == math.inf


def test_the_pace_against_the_best_rival_by_hand():
    ours = [2.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05]
    low_early = [2.0, 0.4] + [0.4] * 9  # the lowest mean
    low_late = [2.0] + [1.0] * 8 + [0.1, 0.1]  # the lowest end
    dropped = [2.0] + [0.0] * 10
    rivals = {"early": candidates(low_early, low_late), "late": candidates(low_late)}
    fold = Fold("d", {"ours": candidates(ours), **rivals}, {"ours": 3.0, "early": 2.0, "late": 1.0}, {})
    (row,) = pace(Comparison((fold,), {}), ["early", "late"])
    assert row["mean_loss_of"] == "early"
    assert row["mean_loss"] == pytest.approx((sum(ours[1:]) / 10) / 0.4)
    assert row["steps"] == pytest.approx(50 / 90), "the rival is at 0.1 after 90 steps and stays there"
    assert (row["steps_of"], row["seconds_of"]) == ("early", "late"), "as soon in steps, and sooner by the clock"
    assert row["seconds"] == pytest.approx(50 * 3 / (90 * 1))
    hasty = replace(fold, entrants={**fold.entrants, "hasty": candidates([2.0] + [0.1] * 10, [2.0] + [1.0] * 10)})
    clocked = replace(hasty, seconds={**fold.seconds, "hasty": 10.0})
    (row_of_three,) = pace(Comparison((clocked,), {}), ["early", "late", "hasty"])
    assert row_of_three["steps_of"] == "early", "the first of those that end equally low"
    assert row_of_three["seconds_of"] == "late"
    (row_of_three,) = pace(
        Comparison((replace(clocked, seconds={**clocked.seconds, "hasty": 4.0}),), {}), ["early", "late", "hasty"]
    )
    assert row_of_three["seconds_of"] == "hasty"
    assert row_of_three["seconds"] == pytest.approx(50 * 3 / (10 * 4)), "at its best setting"
    assert (row["accuracy"], row["best_accuracy"]) == (90.0, 90.0)
    assert row["paid_after"] is None
    known = replace(fold, costs={"ours": {"gradient_evaluations": 1000.0}})
    (paid,) = pace(Comparison((known,), {}), ["early", "late"])
    assert paid["paid_after"] == math.ceil(1000 / (200 + 40)), "two candidates of 100 steps, and 40 steps saved"
    assert paid["paid_by_the_clock"] == math.ceil(1000 * 3 / ((200 + 90) * 2 - 50 * 3))
    (dear,) = pace(Comparison((replace(known, seconds={"ours": 30.0, "early": 2.0, "late": 1.0}),), {}), ["early", "late"])
    assert (dear["paid_after"], dear["paid_by_the_clock"]) == (paid["paid_after"], None)
    assert pace_section("the best", [dear], 1.0).rows[0][-1] == "5 tasks, never"
    (half,) = pace(Comparison((fold,), {}), ["early", "late"], 0.5)
    assert half["steps"] == pytest.approx(30 / 10)  # 0.4 is what the best rival has at half of the run, and after a tenth
    (other,) = pace(Comparison((fold,), {}), ["early", "late"], ours="late")
    assert other["mean_loss"] == pytest.approx((sum(low_late[1:]) / 10) / 0.4)
    assert (other["steps"], other["seconds"]) == (pytest.approx(90 / 90), pytest.approx(1.0)), "of late, not of ours"
    falling = list(np.linspace(2.0, 0.2, 11))
    whole = Fold("d", {"ours": candidates(ours), "rival": candidates(falling)}, {}, {})
    (row,) = pace(Comparison((whole,), {}), ["rival"])
    assert row["steps"] == pytest.approx(40 / 100), "its end is not twice below its end: a whole run"
    two = Candidate({"rival": "r"}, (invented(low_late), invented(low_late)))
    one = Candidate({"rival": "r"}, (invented(dropped),))
    screened = Fold("d", {"ours": (Candidate({}, (invented(ours),) * 2),), "late": (two, one)}, {}, {})
    (row,) = pace(Comparison((screened,), {}), ["late"])
    assert row["steps"] == pytest.approx(50 / 90), "a setting that was screened out sets no target"
    assert row["seconds"] is None
    slow = Fold("e", {"ours": candidates([2.0] * 11), "late": candidates(low_late)}, {"ours": 1.0, "late": 1.0}, {})
    (never,) = pace(Comparison((slow,), {}), ["late"])
    assert never["steps"] is None
    costly = replace(slow, costs={"ours": {"gradient_evaluations": 1000.0}})
    (unpaid,) = pace(Comparison((costly,), {}), ["late"])
    assert unpaid["paid_after"] is None, "what never arrives pays for nothing"
    assert pace_section("the best", [unpaid], 1.0).rows[0][-1] == "never"
    table = as_markdown([pace_section("the best", [row, never], 1.0)])
    assert "0.56 x (late)" in table
    assert "| 0 of 1 runs (late: 1) | never |" in table
    half_way = Candidate({}, (invented(ours), invented([2.0] * 11)))
    some = replace(screened, entrants={"ours": (half_way,), "late": (two,)}, seconds={"ours": 1.0, "late": 1.0})
    (row,) = pace(Comparison((some,), {}), ["late"])
    assert row["steps"] is None
    assert row["arrived"] == {"ours": 1, "rival": 2, "runs": 2}
    assert pace_section("the best", [row], 1.0).rows[0][2:4] == ["1 of 2 runs (late: 2)", ""]
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([0.5, None]) is None


# real comparisons


def entrants():
    learned = meta_train(QUADRATIC, Diagonal(), outer_steps=3, tasks_per_step=4)
    return {
        "MetaMD": learned_rival(learned).untuned(),
        "SGD": handicap(rival("sgd"), budget=7),
        "Adam": handicap(rival("adam"), "linear", budget=7),
        "Adam, untuned": rival("adam").untuned(),
    }


def test_a_comparison_is_its_records(tmp_path):
    who = entrants()
    found = compare(who, QUADRATIC, bare(seeds=5), folder=tmp_path).aiming("SGD")
    assert len(list((tmp_path / "cells").iterdir())) == 5 * (1 + 7 + 7 + 1) + 1  # and the seconds
    verdicts = {d.label: d.wins for d in found.differences("mean_loss")}
    assert verdicts == {"SGD": 5, "Adam": 5, "Adam, untuned": 5}
    assert found.metrics == ["mean_loss", "final_loss", "steps_to_target", "seconds_to_target"]
    again = Comparison.read(tmp_path).aiming("SGD")
    for label in found.labels:
        for metric in found.metrics:
            assert again.values(label, metric).tolist() == found.values(label, metric).tolist()
    assert again.learning_gradients("MetaMD") == found.learning_gradients("MetaMD") > 0
    # nothing is computed twice, and another rival may join
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}
    more = compare({**who, "RMSprop": rival("rmsprop").untuned()}, QUADRATIC, bare(seeds=5), folder=tmp_path)
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}
    assert {n: after[n] for n in before} == before
    assert len(after) == len(before) + 5 + 1
    assert more.values("SGD", "mean_loss").tolist() == found.values("SGD", "mean_loss").tolist()
    with pytest.raises(ValueError, match="other settings"):
        compare(who, QUADRATIC, bare(seeds=5, steps=7), folder=tmp_path)


def test_packed_records_are_the_same_comparison_and_grow(tmp_path):
    who = {"a": handicap(rival("sgd"), budget=3), "b": rival("adam").untuned()}
    found = compare(who, QUADRATIC, bare(seeds=2), folder=tmp_path)
    whole = Comparison.read(tmp_path)
    Records(tmp_path, Records.settings(tmp_path)).pack()
    assert not list((tmp_path / "cells").iterdir())
    packed = (tmp_path / "cells.jsonl").read_text()
    assert len(packed.splitlines()) == 2 * 4 + 1
    assert Comparison.read(tmp_path).folds == whole.folds
    again = compare({**who, "c": rival("rmsprop").untuned()}, QUADRATIC, bare(seeds=2), folder=tmp_path)
    assert again.values("a", "mean_loss").tolist() == found.values("a", "mean_loss").tolist()
    assert len(list((tmp_path / "cells").iterdir())) == 2 + 1, "what was packed is not run again"
    records = Records(tmp_path, Records.settings(tmp_path))
    name = json.loads(packed.splitlines()[0])["cell"]
    records.forget(name)
    assert not records.has(name)
    assert not Records(tmp_path, Records.settings(tmp_path)).has(name)
    for line in packed.splitlines():
        records.forget(json.loads(line)["cell"])
    assert Records(tmp_path, Records.settings(tmp_path)).packed == {}, "a file without cells can still be read"
    (tmp_path / "cells.jsonl").write_text(packed + "[1]\n")
    with pytest.raises(ValueError, match=r"line 10 of .* must hold a JSON object with the name of its cell"):
        Comparison.read(tmp_path)


def test_screening_runs_the_best_few_of_the_first_task_and_keeps_what_it_dropped(tmp_path):
    who = entrants()
    whole = compare(who, QUADRATIC, bare(seeds=4))
    found = compare(who, QUADRATIC, bare(seeds=4, screen=2), folder=tmp_path)
    firsts = [c.outcomes[0] for c in whole.folds[0].entrants["SGD"]]
    kept = set()
    for value in (lambda o: o.mean_loss, lambda o: o.final_loss):
        kept |= {id(o) for o in sorted(firsts, key=value)[:2]}
    sizes = [len(c.outcomes) for c in found.folds[0].entrants["SGD"]]
    assert sizes == [4 if id(o) in kept else 1 for o in firsts]
    assert found.chosen("SGD", "mean_loss")[0].contender == whole.chosen("SGD", "mean_loss")[0].contender
    spent = [sum(o.gradients for c in x.folds[0].entrants["SGD"] for o in c.outcomes) for x in (found, whole)]
    assert spent[0] < spent[1]
    assert found.folds[0].tuning_gradients("SGD") > 0.9 * whole.folds[0].tuning_gradients("SGD") > 0.9 * spent[1] / 4 - 1
    assert "first task" in found.screening
    assert not whole.screening
    again = Comparison.read(tmp_path)
    assert [len(c.outcomes) for c in again.folds[0].entrants["SGD"]] == sizes
    assert again.values("Adam", "mean_loss").tolist() == found.values("Adam", "mean_loss").tolist()
    with pytest.raises(ValueError, match="screen must be at least 1, got 0"):
        compare(who, QUADRATIC, Protocol(screen=0))
    both = {label: who[label] for label in ("SGD", "Adam")}
    first = compare(both, QUADRATIC, bare(seeds=4, screen=1))
    assert first.groups == [0] * 4, "the first label may have been screened too"
    assert first.differences("mean_loss")[0].label == "Adam"


def test_several_processes_give_what_one_gives(tmp_path):
    who = entrants()
    one = compare(who, QUADRATIC, bare(seeds=3))
    two = compare(who, QUADRATIC, bare(seeds=3), folder=tmp_path, workers=2)
    for label in one.labels:
        assert one.values(label, "mean_loss").tolist() == two.values(label, "mean_loss").tolist()


def test_runs_are_paired():
    found = compare({"a": rival("sgd").with_setting(lr=0.01), "b": rival("adam").untuned()}, QUADRATIC, bare(seeds=3))
    for one, two in zip(found.chosen("a", "mean_loss")[0].outcomes, found.chosen("b", "mean_loss")[0].outcomes, strict=True):
        assert one.config == two.config
        assert one.losses[0] == two.losses[0]


def test_a_rival_under_two_schedules_is_timed_once():
    who = {
        "a": rival("sgd").with_setting(lr=0.01),
        "b": rival("sgd").with_setting("linear", lr=0.02),
        "c": rival("adam").untuned(),
    }
    seconds = compare(who, QUADRATIC, bare(seeds=1)).folds[0].seconds
    assert seconds["a"] == seconds["b"] != seconds["c"]


def test_every_domain_has_its_seeds():
    data = {n: (torch.randn(30, 4), torch.arange(30) % 3) for n in "xyz"}
    family = tasks.supervised(lambda: torch.nn.Linear(4, 3), data, batch_size=5, steps=10)
    groups = draw(family, 2, 0)
    assert {g: len(configs) for g, configs in groups.items()} == {"x": 2, "y": 2, "z": 2}
    assert all(c["dataset"] == g for g, configs in groups.items() for c in configs)
    found = compare({"a": rival("sgd").untuned()}, family, Protocol(seeds=2))
    assert [f.group for f in found.folds] == ["x", "y", "z"]
    assert found.groups == [0, 0, 1, 1, 2, 2]
    assert "test_error" in found.metrics


def on(domain, seed):
    found = compare({"a": rival("sgd").untuned()}, QUADRATIC, bare(seeds=2, seed=seed))
    return replace(found, folds=(replace(found.folds[0], group=domain),))


def test_domains_are_joined():
    one, two = on("x", 0), on("y", 1)
    both = Comparison.join([one, two])
    assert both.values("a", "mean_loss").tolist() == [*one.values("a", "mean_loss"), *two.values("a", "mean_loss")]
    assert both.groups == [0, 0, 1, 1]
    other = compare({"b": rival("sgd").untuned()}, QUADRATIC, bare(seeds=2))
    with pytest.raises(ValueError, match=r"same optimisers are .* differ in a, b\. Bring all"):
        Comparison.join([one, other])
    in_turn = [compare(dict.fromkeys(labels, rival("sgd").untuned()), QUADRATIC, bare(seeds=2)) for labels in ("ab", "ba")]
    with pytest.raises(ValueError, match="differ in their order"):
        Comparison.join(in_turn)
    with pytest.raises(ValueError, match="nothing to join"):
        Comparison.join([])


def test_what_would_count_twice_or_under_another_protocol_is_not_joined():
    """Three copies of an undecided comparison would be a verdict, and two folders of one domain are not two domains."""
    one, two = on("x", 0), on("y", 1)
    for again in (one, on("x", 2)):
        with pytest.raises(ValueError, match="'x' is in two of these comparisons and would count as two domains"):
            Comparison.join([one, two, again])
    with pytest.raises(ValueError, match="comparisons with one protocol are required"):
        Comparison.join([replace(one, protocol="paper"), replace(two, protocol="handicap")])
    with pytest.raises(ValueError, match="comparisons with one target are required"):
        Comparison.join([replace(one, aim=Target("a")), replace(two, aim=Target("a", 0.5))])


def test_tasks_that_are_drawn_are_different_ones():
    """One problem that counts twelve times would be a verdict of twelve pairs."""
    configs = draw(tasks.rosenbrock(shift=0.1), 12, 0)["rosenbrock"]
    assert len({json.dumps(c) for c in configs}) == 12
    plain = tasks.rosenbrock()
    assert len(draw(plain, 1, 0)["rosenbrock"]) == 1
    generator = torch.Generator().manual_seed(0)
    assert len({json.dumps(plain.sample(generator)) for _ in range(20)}) == 1, "no -0 beside 0"
    with pytest.raises(ValueError, match=r"2 different tasks are required.* no other than the 1 that are there. Ask for 1"):
        draw(plain, 2, 0)


def test_a_failed_run_sets_no_pace():
    falling = list(np.linspace(2.0, 0.2, 11))
    broken = invented([2.0] + [math.inf] * 10, failed="it rose")
    ours = Candidate({}, (invented(falling), invented(falling)))
    for runs, arrived in (((invented(falling), broken), 0), ((broken, broken), 0)):
        fold = Fold("d", {"ours": (ours,), "rival": (Candidate({}, runs),)}, {"ours": 1.0, "rival": 1.0}, {})
        (row,) = pace(Comparison((fold,), {}), ["rival"])
        assert row["mean_loss"] is None, "a mean with an infinite loss is none to be a part of"
        assert row["arrived"]["rival"] == arrived
        assert pace_section("the best", [row], 1.0).rows[0][1] == "diverged (rival)"
    low_with_failure = Candidate({}, (invented([2.0] + [0.1] * 10), broken))
    whole = Candidate({}, (invented([2.0] + [1.0] * 10),) * 2)
    fold = Fold("d", {"ours": (ours,), "rival": (low_with_failure, whole)}, {}, {})
    (row,) = pace(Comparison((fold,), {}), ["rival"])
    assert row["steps"] == pytest.approx(60 / 10), "a setting with which all runs end sets the target, not one that fails"
    assert geometric_mean([0.0, 2.0]) == 0.0


def test_what_is_tuned_pays_for_its_tuning_too():
    """By the protocol `paper` everybody is tuned: learning is paid for by saved steps alone."""
    falling, ours = list(np.linspace(2.0, 0.2, 11)), [2.0] + [0.1] * 10
    tuning = Tuning(200)
    fold = Fold("d", {"ours": candidates(ours), "rival": candidates(falling)}, {"ours": 1.0, "rival": 1.0}, {})
    fold = replace(fold, costs={"ours": {"gradient_evaluations": 1000.0}}, tunings={"ours": tuning, "rival": tuning})
    (row,) = pace(Comparison((fold,), {}), ["rival"])
    assert row["paid_after"] == row["paid_by_the_clock"] == math.ceil(1000 / 90)
    alone = replace(fold, tunings={"rival": tuning})
    assert pace(Comparison((alone,), {}), ["rival"])[0]["paid_after"] == math.ceil(1000 / 290)


def test_an_optimiser_that_diverges_at_once_is_timed_and_hides_nobodys_seconds():
    wild = {"SGD": rival("sgd").with_setting(lr=0.01), "wild": rival("sgd").with_setting(lr=1e12)}
    found = compare(wild, QUADRATIC, bare(seeds=2))
    assert "seconds_to_target" in found.metrics
    assert found.folds[0].seconds["wild"] > 0
    assert set(found.values("wild", "seconds_to_target")) == {math.inf}

    def timed(seconds):
        return replace(found, folds=tuple(replace(f, seconds=seconds) for f in found.folds))

    unknown = timed({"SGD": 1.0, "wild": math.nan})
    assert "seconds_to_target" in unknown.metrics, "of runs that all failed no seconds are needed"
    assert set(unknown.values("wild", "seconds_to_target")) == {math.inf}
    assert "seconds_to_target" not in timed({"SGD": math.nan, "wild": 1.0}).metrics


def test_settings_are_screened_where_a_split_has_no_error_to_show():
    family = tasks.tabular(steps=5)
    both = [rival("sgd").with_setting(lr=x) for x in (0.1, 0.2, 0.4)]
    found = compare({"a": both}, family, Protocol(seeds=2, screen=1, measuring=Measuring(splits=("train", "test"))))
    assert found.screening


@pytest.mark.parametrize("pairs", [5, 14, 15, 40])
def test_the_smallest_p_is_what_the_clearest_outcome_gives(pairs):
    ours = np.arange(1.0, pairs + 1)
    assert signed_rank_test(ours, 2 * ours) == pytest.approx(smallest_p(pairs), rel=1.01 if pairs == 15 else 1e-9)


def test_workers_compare_without_a_folder():
    both = {"a": rival("sgd").untuned(), "b": rival("adam").untuned()}
    here, there = (compare(both, QUADRATIC, Protocol(seeds=2, steps=8), workers=n) for n in (1, 2))
    assert all(here.values(n, "mean_loss").tolist() == there.values(n, "mean_loss").tolist() for n in both)


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as silent:  # a port that is taken, and where nobody listens
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"there is no Ray cluster at '{address}'.*ray start --head"):
            fill(Records(tmp_path, {}), [Cell("a", dict)], title="t", ray=address)


def test_bad_comparisons_are_sentences():
    with pytest.raises(ValueError, match="at least one optimiser"):
        compare({}, QUADRATIC)
    with pytest.raises(ValueError, match="'x' has no contender"):
        compare({"x": []}, QUADRATIC)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        compare({"x": rival("sgd").untuned()}, QUADRATIC, workers=0)
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        compare({"x": rival("sgd").untuned()}, QUADRATIC, Protocol(seeds=0))


# cells


def test_a_killed_worker_is_replaced_and_its_cell_run_again(tmp_path):
    """The first attempt at one cell kills its own process, as the kernel does when memory is short."""

    def compute(i):
        mark = tmp_path / f"tried-{i}"
        first = not mark.exists()
        mark.touch()
        if i == 2 and first:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"i": i, "process": os.getpid()}

    cells = [Cell(f"c{i}", lambda i=i: compute(i)) for i in range(6)]
    found = fill(Records(tmp_path / "r", {}), cells, title="t", workers=2)
    assert [r["i"] for r in found.values()] == list(range(6))
    assert all(r["process"] != os.getpid() for r in found.values())


def fill_on_ray(folder):
    """A killed actor's cell is run again; the records are written here, whatever process computed them."""

    def compute(i):
        mark = folder / f"tried-{i}"
        first = not mark.exists()
        mark.touch()
        if i == 2 and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if i == 9:
            raise ValueError("nine is too many.")
        return {"i": i, "process": os.getpid()}

    cells = [Cell(f"c{i}", lambda i=i: compute(i)) for i in range(5)]
    found = fill(Records(folder / "r", {}), cells, title="t", workers=2, ray="local")
    assert [r["i"] for r in found.values()] == list(range(5))
    assert os.getpid() not in {r["process"] for r in found.values()}
    assert fill(Records(folder / "r", {}), cells, title="t", workers=2, ray="local") == found
    with pytest.raises(ValueError, match=r"^nine is too many\.$"):
        fill(Records(folder / "r", {}), [Cell("c9", lambda: compute(9))], title="t", ray="local")


def compare_on_ray(folder):
    both = {"a": rival("sgd").untuned(), "b": rival("muon").untuned()}
    rules = bare(seeds=2, steps=12)
    there = compare(both, tasks.quadratic(), rules, folder=folder, workers=2, ray="local")
    here = compare(both, tasks.quadratic(), rules)
    assert there.values("b", "mean_loss").tolist() == here.values("b", "mean_loss").tolist()


def experiment_on_ray(folder):
    """What is learned there comes here as a file."""
    family = tasks.quadratic((0.5, 1.0), steps=20)
    family.held_out = lambda: tasks.quadratic((0.5, 1.0), steps=20)
    size = Scale(("a",), None, 20, 1, 2, 1, 2, ("sgd",), ("constant",), usage_tasks=0, measuring=Measuring(splits=()))
    experiment = Experiment(
        "x", lambda size, domain: family, {"d": Geometry(Diagonal, {"MetaMD": Entry()})}, {"t": size}, {}
    )
    experiment = replace(experiment, target="SGD")
    found = {ray: experiment.compared("t", folder / str(ray), 0, 2, ray)[0][0] for ray in (None, "local")}
    files = [load(folder / where / "learned" / "a-d.safetensors").fingerprint() for where in ("None", "local")]
    assert files[0] == files[1]
    assert [p.name for p in (folder / "local" / "learned").iterdir()] == ["a-d.safetensors"], "nothing else is left here"
    assert found["local"].values("MetaMD", "mean_loss").tolist() == found[None].values("MetaMD", "mean_loss").tolist()


def tune_on_ray(folder):
    inputs, tuned = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), {}
    points = {"a": (inputs, (inputs.sum(1) > 0).long())}
    sorting = tasks.supervised(lambda: torch.nn.Linear(4, 2), points, batch_size=10, steps=5)
    for where in (None, "local"):
        records = Records(folder / f"tuning-{where}", {})
        rules = Protocol("paper", budget=3, schedules=["constant"], search=QuasiRandom)
        tuned[where] = entered({}, [rival("sgd"), rival("adam")], sorting, rules, records=records, ray=where)["Adam"].setting
    names = [sorted(p.name for p in (folder / f"tuning-{where}" / "cells").iterdir()) for where in (None, "local")]
    assert names[0] == names[1]
    assert len(names[0]) == 2 * 3 + 2
    assert tuned["local"] == tuned[None]


def all_on_ray(folder):
    # others are being tested beside it: workers are as urgent as they are, and a slow start is no error
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "600"}
    small = ["--rivals", "sgd", "--schedules", "constant", "--budget", "2", "--seeds", "1", "--steps", "10"]
    assert cli.run(["compare", "quadratic", "quadratic", "--out", str(folder / "c"), *small, "--ray", "local"]) == 0
    assert (folder / "c" / "report.html").exists()

    import ray

    assert not ray.is_initialized(), "the cluster of the command is gone"
    begun = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)  # one for all that follows
    assert begun.address_info["node_ip_address"] == "127.0.0.1", "as the command's was, in this process"
    for work in (fill_on_ray, compare_on_ray, experiment_on_ray, tune_on_ray):
        (folder / work.__name__).mkdir()
        work(folder / work.__name__)
    ray.shutdown()
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = True  # as if it had been imported before
    with pytest.raises(ValueError, match="must be out of reach of other machines"):
        fill(Records(folder / "open", {}), [Cell("a", dict)], title="t", ray="local")


def test_a_local_ray_cluster(tmp_path):
    """In a process of its own, which leaves no cluster behind, and with one cluster for nearly all: each takes seconds."""
    pytest.importorskip("ray")
    ended = processes.run(all_on_ray, tmp_path)
    assert ended.code == 0, ended.err


def test_a_cell_that_always_kills_its_process_is_given_up(tmp_path):
    cells = [Cell("good", lambda: {}), Cell("bad", lambda: os.kill(os.getpid(), signal.SIGKILL))]
    with pytest.raises(ChildProcessError, match=r"'bad' was killed 3 times \(code -9\)"):
        fill(Records(tmp_path, {}), cells, title="t", workers=2)


def test_the_sentence_of_a_cell_arrives(tmp_path):
    def bad():
        raise ValueError("lr must be positive.")

    def bug():
        raise KeyError("x")

    def full():
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="No space left on device"):
        fill(Records(tmp_path / "c", {}), [Cell("a", full), Cell("b", dict)], title="t", workers=2)
    with pytest.raises(ValueError, match=r"^lr must be positive\.$"):
        fill(Records(tmp_path / "a", {}), [Cell("a", bad), Cell("b", dict)], title="t", workers=2)
    with pytest.raises(RuntimeError, match="a: KeyError"):
        fill(Records(tmp_path / "b", {}), [Cell("a", bug), Cell("b", dict)], title="t", workers=2)
    with pytest.raises(ValueError, match="workers must be at least 1"):
        fill(Records(tmp_path / "c", {}), [], title="t", workers=0)


def fill_twelve(point, folder, workers):
    def compute(i):
        with (folder / "log").open("a") as log:
            log.write(f"{i}\n")
        return {"i": i}

    processes.arm(point)
    cells = [Cell(f"c{i}", lambda i=i: compute(i)) for i in range(12)]
    fill(Records(folder / "r", {}), cells, title="t", workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_filling_survives_ctrl_c_and_kill(tmp_path, how, workers):
    assert processes.run(fill_twelve, f"cell:3:{how}", tmp_path, workers).code != 0
    done = {p.stem for p in tmp_path.glob("r/cells/*.json")}
    assert len(done) == 3
    before = (tmp_path / "log").read_text().split()
    fill_twelve("", tmp_path, workers)
    log = (tmp_path / "log").read_text().split()
    assert {p.stem for p in tmp_path.glob("r/cells/*.json")} == {f"c{i}" for i in range(12)}
    assert not {f"c{i}" for i in log[len(before) :]} & done, "a finished cell was run twice"


def test_the_index_is_not_trusted(tmp_path):
    compare({"a": rival("sgd").untuned()}, QUADRATIC, bare(seeds=1), folder=tmp_path)
    path = tmp_path / "comparison.json"
    good = json.loads(path.read_text())
    run = good["folds"][0]["entrants"]["a"][0]["runs"][0]

    def reading(change):
        index = json.loads(json.dumps(good))
        change(index)
        path.write_text(json.dumps(index))
        return Comparison.read(tmp_path)

    reading(lambda i: None)
    for name in ("../../etc/passwd", "/etc/passwd", run + "/../x", 5, ""):
        with pytest.raises(ValueError, match="name of a record"):
            reading(lambda i, name=name: i["folds"][0]["entrants"]["a"][0].update(runs=[name]))
    with pytest.raises(ValueError, match="run all tasks"):
        reading(lambda i: i["folds"][0]["entrants"]["a"][0].update(runs=[]))
    with pytest.raises(ValueError, match="is not the index"):
        reading(lambda i: i.update(folds=5))
    with pytest.raises(ValueError, match="same optimisers"):
        reading(lambda i: i.update(folds=[]))
    with pytest.raises(ValueError, match="is not the index"):
        reading(lambda i: i["folds"][0].pop("seconds"))

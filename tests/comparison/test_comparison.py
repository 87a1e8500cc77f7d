"""What is said of outcomes: choices, targets, verdicts, costs and paces, of invented outcomes and of joined ones."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from metamd import Comparison, Protocol, compare, tasks
from metamd.comparison import figures
from metamd.comparison.comparison import Candidate, Fold, Target
from metamd.comparison.pace import geometric_mean, pace, pace_section
from metamd.comparison.page import as_markdown
from metamd.comparison.sections import sections
from metamd.comparison.statistics import bootstrap, signed_rank_tests, signed_ranks
from metamd.comparison.training import Outcome
from metamd.rivals import rival
from metamd.rivals.base import Tuning
from tests.helpers import draws
from tests.small_comparisons import bare

QUADRATIC = tasks.quadratic((0.5, 4.0), steps=40)


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
    """The law above rejects a comparison without a correction: ten tests at 5 % find something in a third of all."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(100):
        c = simulated(dict.fromkeys("abcdefghijk", 3.0), rng)
        ours = c.values("a", "mean_loss")
        alarms += any(signed_rank_tests([(ours, c.values(x, "mean_loss"))])[0] < 0.05 for x in "bcdefghijk")
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


def regression(test_losses, theirs=1.0):
    """Nine tasks: ours has lower training losses, and these test losses; no task has an accuracy."""
    runs = {"ours": [2.0] + [0.8] * 10, "theirs": [2.0] + [1.5 * theirs] * 5 + [theirs] * 5}
    entrants = {
        label: (
            Candidate(
                {"rival": label},
                tuple(
                    replace(invented(losses), ends=dict.fromkeys(SPLITS, (test_losses[label] + i, None))) for i in range(9)
                ),
            ),
        )
        for label, losses in runs.items()
    }
    return Comparison((Fold("d", entrants, dict.fromkeys(runs, 1.0), {}),), {"steps": 100}).aiming("theirs")


SPLITS = ("validation", "test")


@pytest.mark.parametrize(("ours", "verdict"), [(0.5, "ahead"), (1.5, "ahead, but test loss worse")])
def test_who_is_ahead_in_training_alone_is_said_to_be_so(ours, verdict, tmp_path, monkeypatch):
    """A regression: its losses on validation and test data are measures like the others."""
    found = regression({"ours": ours, "theirs": 1.0})
    assert found.metrics[-2:] == ["validation_loss", "test_loss"], "and no accuracy"
    for metric in ("mean_loss", "final_loss", "steps_to_target", "seconds_to_target"):
        assert found.differences(metric)[0].verdict == verdict
        assert found.table(metric)[1]["verdict"] == verdict
    assert [d.verdict for d in found.differences("test_loss")] == ["ahead" if ours < 1 else "behind"]
    monkeypatch.setattr(figures, "curves", lambda panels, path, **options: None)
    page = as_markdown(sections(found, tmp_path)[:3])
    assert f"| {verdict} |" in page
    opened = "0.64 times that of theirs, the tuned rival. This is more than chance. Its test loss is"
    assert opened in page
    far = regression({"ours": ours, "theirs": 1.0}, theirs=1e4)
    assert "mean training loss is less than 0.01 times that of theirs" in sections(far, tmp_path)[0].headline
    assert "validation loss" in page
    some = replace(found.folds[0].entrants["ours"][0].outcomes[0], ends={})
    lacking = replace(found.folds[0], entrants={**found.folds[0].entrants, "ours": (Candidate({}, (some,)),)})
    assert "test_loss" not in replace(found, folds=(lacking,)).metrics, "what one run lacks is not shown"
    with pytest.raises(ValueError, match="the loss on 'test' was not measured"):
        some.loss_on("test")


def test_functions_without_data_have_no_test_loss():
    found = compare({"a": rival("sgd").with_setting(lr=0.01)}, QUADRATIC, Protocol(seeds=1))
    assert found.metrics == ["mean_loss", "final_loss", "steps_to_target", "seconds_to_target"]


def test_a_verdict_has_the_direction_of_its_test():
    """62 tiny losses and 38 large wins: the signed ranks speak for ours, and so must the verdict."""
    rng = np.random.default_rng(0)
    theirs = np.ones(100)
    ours = np.concatenate([1 + 1e-3 * rng.random(62), 0.5 * rng.random(38)])
    assert signed_ranks(ours, theirs).sum() < 0
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
    assert fold.best("r", "mean_loss") is fast
    assert fold.best("r", "final_loss") is safe


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
    assert comparison.target(fold) == 0.4
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
        with pytest.raises(FileNotFoundError, match="there is no record"):
            reading(lambda i, name=name: i["folds"][0]["entrants"]["a"][0].update(runs=[name]))
    with pytest.raises(ValueError, match="run all tasks"):
        reading(lambda i: i["folds"][0]["entrants"]["a"][0].update(runs=[]))
    with pytest.raises(ValueError, match="is not the index"):
        reading(lambda i: i.update(folds=5))
    with pytest.raises(ValueError, match="same optimisers"):
        reading(lambda i: i.update(folds=[]))
    with pytest.raises(ValueError, match="is not the index"):
        reading(lambda i: i["folds"][0].pop("seconds"))

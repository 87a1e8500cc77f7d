"""The protocol once: two of a kind tie, a better one wins, ranges are extended, and nobody sees a held-out task."""

import json
import math
from dataclasses import replace

import pytest
import torch

from metamd import compare, tasks
from metamd.comparison.entrants import entrants, labels, unscheduled
from metamd.comparison.once import EDGE, FOR_THE_END, WARM_UPS, Chosen, Once, choose_once, price, space_of
from metamd.comparison.tuning import QuasiRandom, tune
from metamd.files.store import Records
from metamd.learning.score import RunScores, start_of
from metamd.rivals import Contender, Range, Rival, rival
from metamd.tasks.base import config_hash
from metamd.tasks.wrapped import Counted
from tests.small_comparisons import bare

STEPS = 30
QUADRATIC = tasks.quadratic((0.5, 4.0), steps=STEPS)


def named(like, name, **changes):
    """The same rival under another name."""
    return replace(like, name=name, title=name, **changes)


def slower(named_parameters, setting):
    """SGD that moves by a hundredth of its gradient, whatever the rate is: a rival that cannot be good."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=1e-4 * min(setting["lr"], 1.0))


def ours(lr=0.1):
    """A contender that has learned: 12 settings on two tasks are its cost."""
    learned = named(rival("sgd"), "MetaMD", identity="learned", cost={"gradient_evaluations": 24.0 * price(STEPS)})
    return {"MetaMD": learned.with_setting(lr=lr)}


@pytest.fixture(scope="module")
def compared():
    """Two of a kind and one that cannot be good, on sides that count what is asked of them."""
    training, held_out = Counted(QUADRATIC), Counted(tasks.quadratic((0.5, 4.0), steps=STEPS))
    sgd = rival("sgd")
    rivals = [named(sgd, "one"), named(sgd, "two"), named(sgd, "slow", make=slower)]
    rules = bare("once", seeds=6, once=Once(tasks=3))
    entered = entrants(ours(), rivals, held_out, rules, training=training)
    before = held_out.batches, dict(held_out.tasks)
    return entered, compare(entered, held_out, rules), before, (training, held_out)


def test_two_of_a_kind_tie_and_a_better_one_wins(compared):
    _, comparison, _, _ = compared
    assert comparison.labels[0] == "MetaMD"
    assert comparison.values("one", "mean_loss").tolist() == comparison.values("two", "mean_loss").tolist()
    again = replace(comparison, folds=tuple(_first(f, "one") for f in comparison.folds))
    found = {d.label: d for d in again.differences("mean_loss")}
    assert (found["two"].ties, found["two"].verdict) == (6, "undecided")
    assert found["slow"].wins == 6
    assert found["slow"].ratio < 0.5


def _first(fold, label):
    return replace(fold, entrants={label: fold.entrants[label]} | dict(fold.entrants))


def test_nobody_looks_at_held_out_tasks_and_everybody_has_the_same_budget(compared):
    entered, comparison, before, (training, held_out) = compared
    assert before == (0, {}), "choosing asks no batch of the held-out side, and builds no task of it"
    assert not set(training.tasks) & set(held_out.tasks)
    budget = 24 * price(STEPS)
    for label in ("one", "two", "slow"):
        chosen = entered[label]
        assert 0.5 * budget < chosen.tuning.gradients <= budget
        assert set(chosen.rival.tasks) == set(training.tasks), "all have seen the same tasks"
    assert entered["MetaMD"] == ours()["MetaMD"], "it has learned: nothing is chosen again"
    assert comparison.protocol == "once"
    assert comparison.metrics[:4] == ["mean_loss", "tenth_loss", "half_loss", "final_loss"]
    assert all(len(c) == 1 for f in comparison.folds for c in f.entrants.values())
    fold = comparison.folds[0]
    assert fold.tuning_gradients("one") == entered["one"].tuning.gradients


def test_a_comparison_on_tasks_that_were_seen_says_so():
    """A broken double of the protocol: settings chosen on the very tasks are not called held out."""
    found = choose_once(rival("sgd").untuned(), QUADRATIC, Once(gradients=2000, tasks=2))
    hashes = found.tasks

    class Same(tasks.TaskFamily):
        def sample(self, generator):
            return configs[int(torch.randint(2, (1,), generator=generator))]

        def build(self, config):
            return QUADRATIC.build(config)

        def describe(self):
            return {}

    counted = Counted(QUADRATIC)
    from metamd.learning.reference import draw_tasks

    configs = [t.config for t in draw_tasks(counted, 0, "once", 2)]
    assert tuple(map(config_hash, configs)) == hashes
    comparison = compare({"SGD": found.contender}, Same(QUADRATIC.name, STEPS), bare("once", seeds=2))
    assert comparison.trained_on("SGD") == [QUADRATIC.name]


def test_a_choice_at_the_edge_of_its_range_has_it_extended():
    """The best rate lies sixty times beyond the range; without room beyond it the edge is reported."""
    inside = choose_once(rival("sgd").untuned(), QUADRATIC, Once(gradients=60 * price(STEPS), tasks=2)).contender
    best = inside.setting["lr"]
    narrow = replace(rival("sgd"), space={"lr": Range(best / 600, best / 60)}, defaults={"lr": best / 600})
    found = choose_once(narrow.untuned(), QUADRATIC, Once(gradients=60 * price(STEPS), tasks=2)).contender
    assert found.setting["lr"] > best / 4
    assert found.tuning.extended == ("lr",)
    assert "lr" not in found.tuning.at_edge
    poor = choose_once(narrow.untuned(), QUADRATIC, Once(gradients=9 * price(STEPS), tasks=2)).contender
    assert "lr" in (*poor.tuning.at_edge, *poor.tuning.extended)
    assert poor.setting["lr"] < best / 4, "the budget ended before"


def test_the_score_is_that_of_usages():
    """The chosen runs again, by a loop written out: parts of the losses, of the average where there is one, and the end."""
    found = choose_once(rival("sgd").untuned(), QUADRATIC, Once(gradients=2000, tasks=2))
    scores, runs = RunScores([start_of(t) for t in seen(found)]), []
    for i, task in enumerate(seen(found)):
        (name, x), *_ = task.init().items()
        p = torch.nn.Parameter(x)
        optimiser = found.contender.start([(name, p)])
        average = hasattr(optimiser, "eval")

        def judged(of, task=task, name=name, p=p, optimiser=optimiser, average=average):
            if average:
                optimiser.eval()
            value = of({name: p.detach().clone()})
            if average:
                optimiser.train()
            return value

        losses, (group,) = [], optimiser.param_groups
        rate = group["lr"]
        for t in range(STEPS):
            losses.append(judged(lambda q, t=t, task=task: float(task.loss(q, task.batch(t)))))
            group["lr"] = rate * found.contender.factor(t, STEPS)
            p.grad = None
            task.loss({name: p}, task.batch(t)).backward()
            optimiser.step()
        way = [sum(losses[k : k + 3]) / 3 for k in range(0, STEPS, 3)]
        runs.append({"way": way, "end": judged(lambda q, task=task: task.evaluate(q, "train").loss)})
        scores.see(i, runs[-1])
    assert found.scores["score"] == pytest.approx(scores.score(runs), rel=1e-6)


def seen(found):
    from metamd.learning.reference import draw_tasks

    built = draw_tasks(QUADRATIC, 0, "once", 2)
    assert tuple(config_hash(t.config) for t in built) == found.tasks
    return built


def test_a_search_that_was_stopped_continues(tmp_path):
    once, records = Once(gradients=2000, tasks=2), Records(tmp_path, {})
    whole = choose_once(rival("adam").untuned(), QUADRATIC, once, records=records)
    cells = sorted((tmp_path / "once" / "adam" / "cells").glob("adam*.json"))
    before = {p: p.stat().st_mtime_ns for p in cells[3:]}
    for path in cells[:3]:
        path.unlink()
    again = choose_once(rival("adam").untuned(), QUADRATIC, once, records=records)
    assert {p: p.stat().st_mtime_ns for p in cells[3:]} == before, "a finished run was made twice"
    assert again.contender.describe() == whole.contender.describe()
    assert again.contender.tuning == whole.contender.tuning, "kept runs count as well"
    assert json.loads(cells[3].read_text())["gradients"] >= STEPS


def test_the_space_has_momentum_averages_schedules_and_warm_up():
    adam, free = (space_of(rival(n).untuned(), ("constant", "linear")) for n in ("adam", "schedule-free"))
    assert list(adam.ranges) == ["lr", "beta1"]
    assert [r.name for r in adam.rivals] == ["adam", "adam-averaged"]
    assert adam.schedules == ("constant", "linear")
    assert [r.name for r in free.rivals] == ["schedule-free"], "it has an average of its own"
    assert free.schedules == ("constant",)
    corner = adam.at([0.0, 0.0, 0.999, 0.999, 0.999], rival("adam").untuned())
    assert (corner.setting["lr"], corner.setting["beta1"]) == (1e-4, 0.99)
    assert (corner.schedule, corner.warm_up, corner.rival.name) == ("linear", WARM_UPS[-1], "adam-averaged")
    assert set(adam.at_edge(corner)) == {"lr", "beta1", "warm_up"}
    further = adam.moved(corner, "beta1", 0.5)
    assert further is not None
    assert adam.beyond(further) == ("beta1",)
    assert adam.moved(replace(corner, warm_up=0.6), "warm_up", 2.0) is None
    assert 0 < EDGE < 0.5


def test_warm_up_rises_to_the_schedule():
    plain = Contender(rival("sgd"), {"lr": 1.0}, "linear")
    risen = replace(plain, warm_up=0.2)
    assert [risen.factor(t, 20) for t in range(5)] == pytest.approx([0.25, 0.475, 0.675, 0.85, 0.8])
    assert plain.key() != risen.key()
    assert "warm_up" not in plain.describe()
    with pytest.raises(ValueError, match=r"warm_up must lie in \[0, 1\)"):
        replace(plain, warm_up=1.0)


def test_once_is_refused_without_training_tasks_or_evaluations():
    with pytest.raises(ValueError, match="pass training=family"):
        entrants(ours(), [rival("sgd")], QUADRATIC, bare("once"))
    with pytest.raises(ValueError, match="50 gradient evaluations do not suffice"):
        choose_once(rival("sgd").untuned(), QUADRATIC, Once(gradients=50))
    with pytest.raises(ValueError, match="tasks and gradients must be at least 1"):
        Once(tasks=0)
    assert labels(["MetaMD"], [rival("adam")], ["constant"], "once") == ["MetaMD", "Adam", "Adam, untuned"]
    assert unscheduled("Adam" + FOR_THE_END) == "Adam"


def test_a_rival_that_diverges_by_default_is_rescued_by_the_search():
    wild = replace(rival("sgd"), defaults={"lr": 1e6})
    found = choose_once(wild.untuned(), QUADRATIC, Once(gradients=30 * price(STEPS), tasks=2))
    assert math.isfinite(found.scores["score"])
    assert isinstance(found.contender.rival, Rival)


def test_tune_on_a_family_chooses_by_the_protocol():
    once = Once(gradients=2000, tasks=2)
    found = tune(rival("sgd"), QUADRATIC, once)
    wanted = choose_once(rival("sgd").untuned(), QUADRATIC, once)
    assert isinstance(found, Chosen)
    assert found.best.key() == wanted.contender.key()
    assert found.for_the_end.key() == wanted.for_the_end.key()
    assert found.tasks == wanted.tasks
    task = QUADRATIC.build(QUADRATIC.sample(torch.Generator().manual_seed(0)))
    with pytest.raises(TypeError, match=r"Once\(\) goes with a family"):
        tune(rival("sgd"), task, once)
    with pytest.raises(TypeError, match="other searches with tasks; got QuasiRandom"):
        tune(rival("sgd"), QUADRATIC, QuasiRandom(budget=2))
    with pytest.raises(ValueError, match="metric, schedule and measuring are for tasks"):
        tune(rival("sgd"), QUADRATIC, metric="final_loss")

"""The rivals take the steps of their namesakes, the loop measures what it says, and a search spends its budget."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from metamd import (
    Bayesian,
    Diagonal,
    Grid,
    Measuring,
    QuasiRandom,
    Usage,
    learned_rival,
    meta_train,
    prepare,
    tasks,
    tune,
)
from metamd.comparison.training import Outcome, step_seconds, train
from metamd.comparison.tuning import sobol
from metamd.files.store import Records
from metamd.inner import run
from metamd.inner.objectives import Reference
from metamd.rivals import RIVALS, Contender, Range, Rival, rival
from metamd.rivals.optimisers import MuonAndAdamW
from metamd.tasks.models import LeNet

BARE = Measuring(splits=())


def small_network():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )


def images(seed=0, count=120):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    means = torch.randn(4, 1, 6, 6, generator=generator)
    return means[labels] + 0.5 * torch.randn(count, 1, 6, 6, generator=generator), labels


FAMILY = tasks.supervised(small_network, {"a": images(0), "b": images(1)}, batch_size=20, steps=20)


def task_of(family=FAMILY, seed=0):
    return family.build(family.sample(torch.Generator().manual_seed(seed)))


# the catalogue


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_trains_a_network_and_repeats_itself(name):
    # a rate in the middle of its range
    contender = RIVALS[name].with_setting(lr=RIVALS[name].space["lr"].at(0.6))
    first, second = (train(task_of(), contender, steps=15) for _ in range(2))
    assert first == second
    assert not first.failed
    assert first.final_loss < first.losses[0]
    assert first.gradients == 15 * RIVALS[name].gradients
    assert Outcome.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_the_ranges_are_those_of_the_page_of_reproduction():
    """They were fixed beforehand: what is changed here is changed for every record."""
    usual = (1e-4, 1)
    others = {"sgd": (1e-3, 10), "hypergradient": (1e-3, 10), "prodigy": (0.1, 10), "dadapt": (0.1, 10)}
    others |= dict.fromkeys(("soap", "soap-averaged", "schedule-free"), (1e-4, 0.1)) | {"schedule-free-sgd": (1e-2, 30)}
    assert {n: (r.space["lr"].low, r.space["lr"].high) for n, r in RIVALS.items()} == dict.fromkeys(RIVALS, usual) | others
    decoupled = ("adamw", "adamw-averaged", "muon", "muon-averaged")
    decays = {n: r.space["weight_decay"] for n, r in RIVALS.items() if "weight_decay" in r.space}
    assert {n for n, x in decays.items() if (x.low, x.high) == (1e-5, 1)} == set(decoupled)
    assert all((x.low, x.high) == (1e-6, 1e-2) for n, x in decays.items() if n not in decoupled)


def test_the_first_points_of_bayesian_search_are_five_of_sobols():
    pytest.importorskip("botorch")
    rival, history = RIVALS["adam"], []
    for count in range(7):
        proposed, sobols = (s.propose(rival, history) for s in (Bayesian(seed=3), QuasiRandom(seed=3)))
        assert (proposed == sobols) is (count < 5)
        history.append((proposed, abs(math.log(proposed["lr"] / 0.01))))
    assert (Bayesian().initial, Bayesian().beta) == (5, 4.0)


@pytest.mark.parametrize("name", RIVALS)
def test_the_search_space_holds_the_default_rate_and_the_published_grid(name):
    found = RIVALS[name]
    assert found.space["lr"].low <= found.defaults["lr"] <= found.space["lr"].high
    assert set(found.grid) <= set(found.space)


def test_a_torch_rival_is_its_namesake():
    task = task_of()
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    optimiser = torch.optim.SGD(params.values(), lr=0.05, momentum=0.9)
    for t in range(20):
        optimiser.param_groups[0]["lr"] = 0.05 * (1 - t / 20)
        optimiser.zero_grad()
        task.loss(params, task.batch(t)).backward()
        optimiser.step()
    end = task.evaluate({n: p.detach() for n, p in params.items()}, "test")
    found = train(task, rival("sgdm").with_setting("linear", lr=0.05))
    assert found.ends["test"][0] == pytest.approx(end.loss, rel=1e-4)
    other = train(task, rival("sgdm").with_setting("constant", lr=0.05))
    assert other.ends["test"][0] != pytest.approx(end.loss, rel=1e-4)


def test_muon_sees_a_convolution_as_a_matrix_of_the_same_memory():
    model = small_network()
    named = list(model.named_parameters())
    before = {n: p.detach().clone() for n, p in named}
    both = MuonAndAdamW(named, {"lr": 0.01, "weight_decay": 0.0, "momentum": 0.0})
    for _, p in named:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    both.step()
    moved = {n: p.detach() - before[n] for n, p in named}
    # an orthogonalised step has singular values near one, up to Newton-Schulz's tolerance and the rate
    values = torch.linalg.svdvals(moved["0.weight"].flatten(1))
    assert values.max() / values.min() < 2.5
    # the last layer is AdamW's: its first step is the sign of the gradient times the rate
    torch.testing.assert_close(moved["5.weight"].abs(), torch.full_like(moved["5.weight"], 0.01), rtol=1e-3, atol=0)


def test_schedule_free_is_judged_at_its_average():
    """The parameters that the loop evaluates are the package's own in evaluation mode."""
    import schedulefree

    task = task_of()
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    optimiser = schedulefree.AdamWScheduleFree(params.values(), lr=0.01)
    optimiser.train()
    for t in range(20):
        optimiser.zero_grad()
        task.loss(params, task.batch(t)).backward()
        optimiser.step()
    training_mode = task.monitor()({n: p.detach() for n, p in params.items()})
    optimiser.eval()
    wanted = task.monitor()({n: p.detach() for n, p in params.items()})
    found = train(task, rival("schedule-free").with_setting(lr=0.01)).final_loss
    assert found == pytest.approx(wanted, rel=1e-3)
    assert abs(found - training_mode) > 10 * abs(found - wanted)


def test_a_rival_is_judged_by_its_tail_average_and_takes_the_same_steps():
    """By hand, from the iterates of torch's own Adam."""
    task = task_of()
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    optimiser, mean = torch.optim.Adam(params.values(), lr=0.01), {}
    for t in range(20):
        optimiser.zero_grad()
        task.loss(params, task.batch(t)).backward()
        optimiser.step()
        share = 10 / (t + 10)
        mean = {n: p.detach() * share + mean.get(n, 0.0) * (1 - share) for n, p in params.items()}
    found = train(task, rival("adam-averaged").with_setting(lr=0.01))
    assert found.final_loss == pytest.approx(task.monitor()(mean), rel=1e-3)
    plain = train(task, rival("adam").with_setting(lr=0.01))
    assert plain.final_loss != pytest.approx(found.final_loss, rel=1e-3)
    assert plain.batch_loss == found.batch_loss, "gradients are taken where Adam takes them"


def test_an_averaged_rival_has_modes():
    x = nn.Parameter(torch.ones(2))
    optimiser = rival("sgdm-averaged").with_setting(lr=0.1).start([("x", x)])
    for _ in range(3):
        x.grad = torch.ones(2)
        optimiser.step()
    iterate = x.detach().clone()
    for switch in (optimiser.eval, optimiser.eval):
        switch()
    assert not torch.equal(x, iterate)
    with pytest.raises(RuntimeError, match=r"Call train\(\) first"):
        optimiser.step()
    for switch in (optimiser.train, optimiser.train):
        switch()
    assert torch.equal(x, iterate)


def test_our_tail_average_is_what_a_comparison_judges():
    family = tasks.tabular(steps=20)
    learned = meta_train(family, Diagonal(), outer_steps=1, tasks_per_step=2)
    task = task_of(family)
    ends = {}
    for averaging in ("constant", "tail"):
        header = replace(learned.header, usage=Usage(schedule="linear", averaging=averaging).to_dict())
        found = replace(learned, header=header)
        ends[averaging] = train(task, learned_rival(found).untuned(), measuring=BARE)
        params = {n: nn.Parameter(x) for n, x in task.init().items()}
        optimiser, schedule = prepare(params.items(), found, steps=20)
        for t in range(20):
            optimiser.zero_grad()
            task.loss(params, task.batch(t)).backward()
            optimiser.step()
            schedule.step()
        optimiser.eval()
        judged = task.monitor()({n: p.detach() for n, p in params.items()})
        assert ends[averaging].final_loss == pytest.approx(judged, rel=1e-5)
    assert ends["constant"].batch_loss == ends["tail"].batch_loss
    assert ends["constant"].final_loss != ends["tail"].final_loss


def lenet_task():
    """A network whose images are in channels-last memory, and so the gradients of its kernels."""
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(60, 1, 28, 28, generator=generator), torch.randint(10, (60,), generator=generator))
    return task_of(tasks.supervised(LeNet, {"noise": data}, batch_size=20, steps=30))


def by_backward(task, make):
    """The same by hand: `backward`, which gives gradients the layout of their parameters, and no fused step."""
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    optimiser = make(params.values())
    for step in range(task.steps):
        optimiser.zero_grad()
        task.loss(params, task.batch(step)).backward()
        optimiser.step()
    return task.monitor()({n: p.detach() for n, p in params.items()})


CONVOLVED = {
    "sgd": (0.1, partial(torch.optim.SGD, lr=0.1)),
    "sgdm": (0.1, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adam": (0.002, partial(torch.optim.Adam, lr=0.002)),
    "adamw": (0.002, partial(torch.optim.AdamW, lr=0.002, weight_decay=0.0)),
    "rmsprop": (0.01, partial(torch.optim.RMSprop, lr=0.01)),
}


@pytest.mark.parametrize("name", CONVOLVED)
def test_rivals_train_convolutions_as_they_do_by_hand(name, monkeypatch):
    lr, make = CONVOLVED[name]
    task, contender = lenet_task(), rival(name).with_setting(lr=lr, weight_decay=0.0)
    wanted = by_backward(task, partial(make, foreach=False))
    assert train(task, contender, measuring=BARE).final_loss == pytest.approx(wanted, rel=1e-4)
    monkeypatch.setattr(run, "laid_out_like", lambda parameter, gradient: gradient)
    astray = train(task, contender, measuring=BARE).final_loss
    assert (astray != pytest.approx(wanted, rel=1e-3)) == (name != "rmsprop"), "fused steps take entries for one another"


def test_a_reference_run_is_the_same_with_a_fused_optimiser():
    task = lenet_task()
    ends = [Reference(partial(torch.optim.Adam, fused=fused), 0.01).run(task, task.init(), 5)[0] for fused in (False, True)]
    for name, end in ends[0].items():
        torch.testing.assert_close(ends[1][name], end, rtol=1e-4, atol=1e-6)


def test_a_learned_geometry_is_one_more_rival():
    family = tasks.quadratic((0.5, 4.0), steps=30)
    learned = meta_train(family, Diagonal(), outer_steps=3, tasks_per_step=4)
    ours = learned_rival(learned)
    task = family.build(family.sample(torch.Generator().manual_seed(9)))
    plain = train(task, ours.untuned(), measuring=BARE)
    best = tune(rival("sgd"), task, Grid(names=["lr"], budget=15), measuring=BARE)
    assert plain.mean_loss < best.score
    assert ours.cost["gradient_evaluations"] > 0
    assert ours.untuned().describe()["identity"].startswith(learned.fingerprint())
    assert ours.untuned().setting == {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0}
    assert learned_rival(learned, exact=False).identity != ours.identity
    half = train(task, ours.with_setting(lr=0.5), measuring=BARE)
    assert half.losses != plain.losses
    usage = Usage(momentum=0.5, schedule="linear", factor=0.8)
    grid = learned_rival(learned, usage=usage).settings(["lr"], 5)
    assert [s["lr"] for s in grid] == [0.8, 0.08, 0.24, 2.4, 8.0], "around what the usage says"
    assert learned_rival(learned, usage=usage).space["lr"] == Range(0.08, 8.0)
    used = train(task, learned_rival(learned, usage=usage).untuned(), measuring=BARE)
    assert used.final_loss == pytest.approx(by_hand(task, learned, usage), rel=1e-9)
    heavy = train(task, ours.with_setting("linear", momentum=0.5), measuring=BARE)
    assert heavy.final_loss < heavy.losses[0]


def by_hand(task, learned, usage):
    """The loss above the minimum after a run as `prepare` sets it up."""
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    header = replace(learned.header, usage=usage.to_dict())
    optimiser, schedule = prepare(params.items(), replace(learned, header=header), steps=task.steps)
    for t in range(task.steps):
        optimiser.zero_grad()
        task.loss(params, task.batch(t)).backward()
        optimiser.step()
        schedule.step()
    end = {n: p.detach() for n, p in params.items()}
    return task.evaluate(end, "train").loss - task.minimum()


def test_settings_and_names_are_checked():
    with pytest.raises(ValueError, match="there is no rival 'adamm'"):
        rival("adamm")
    with pytest.raises(ValueError, match="'rate' is none of them"):
        rival("adam").with_setting(rate=1.0)
    with pytest.raises(ValueError, match="may have the schedules constant, got 'linear'"):
        rival("schedule-free").with_setting("linear")
    with pytest.raises(ValueError, match="0 < low < high"):
        Range(1.0, 0.1)
    with pytest.raises(ValueError, match="can be searched in lr, weight_decay, got beta1"):
        tune(rival("adam"), task_of(), QuasiRandom(names=["beta1"]))
    assert Range(1e-3, 1.0).points(4) == [0.001, 0.01, 0.1, 1.0]
    assert Range(1e-3, 1.0).at_edge(1.0)
    assert not Range(1e-3, 1.0).at_edge(0.1)


def test_a_package_that_is_not_there_is_a_sentence(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    with pytest.raises(ValueError, match=r"pip install 'metamd\[rivals\]'"):
        train(task_of(), rival("prodigy").untuned())


def test_contenders_have_keys_of_their_own():
    adam = rival("adam")
    keys = {adam.with_setting(s, lr=lr).key() for s in ("constant", "linear") for lr in (0.1, 0.2)}
    assert len(keys) == 4
    assert adam.with_setting(lr=0.1).key() == Contender(adam, {**adam.defaults, "lr": 0.1}).key()


# the loop and what it measures


def test_the_loss_is_measured_on_fixed_examples_at_fixed_places():
    task = task_of()
    found = train(task, rival("sgd").with_setting(lr=1e-3), steps=23, measuring=Measuring(every=10, examples=30))
    assert found.places == (0, 10, 20, 23)
    assert found.losses[0] == pytest.approx(task.monitor(30)(task.init()), rel=1e-6)
    assert found.mean_loss == pytest.approx(sum(found.losses[1:]) / 3)
    assert set(found.ends) == {"validation", "test"}
    assert 0 <= found.accuracy("test") <= 1
    assert train(task, rival("sgd").with_setting(lr=1e-3), steps=23, measuring=BARE).ends == {}


def test_monitors_of_tasks_on_the_same_data_look_at_the_same_examples():
    one, two = (FAMILY.build({"family": "supervised", "dataset": "a", "init_seed": s, "batch_seed": s}) for s in (0, 1))
    params = one.init()
    assert one.monitor(30)(params) == two.monitor(30)(params)
    assert one.monitor(30)(params) != one.monitor(31)(params)
    # every example: the training split as a whole, except for the batch norm's statistics
    assert one.monitor(10**6)(params) == pytest.approx(one.evaluate(params, "train").loss, rel=0.05)
    with pytest.raises(ValueError, match="at least 1"):
        one.monitor(0)


def test_watching_a_run_does_not_change_it():
    task, contender = task_of(), rival("adam").with_setting(lr=0.01)
    often, seldom = (train(task, contender, measuring=Measuring(every=k)) for k in (1, 20))
    assert often.final_loss == seldom.final_loss
    assert often.batch_loss == seldom.batch_loss


def test_threads_and_the_global_generator_stay_as_they_were():
    torch.manual_seed(5)
    wanted, threads = torch.random.get_rng_state(), torch.get_num_threads()
    train(task_of(), rival("adam").untuned(), steps=2)
    assert torch.equal(torch.random.get_rng_state(), wanted)
    assert torch.get_num_threads() == threads


def test_divergence_is_an_outcome():
    found = train(task_of(tasks.quadratic()), rival("sgd").with_setting(lr=10.0), steps=200, measuring=BARE)
    assert "rose from" in found.failed
    assert found.final_loss == found.mean_loss == found.batch_loss == math.inf
    assert math.isfinite(found.losses[0])
    assert found.gradients < 200
    assert found.accuracy("test") == 0.0
    assert found.steps_to(1e300) == math.inf  # nothing after the start
    assert Outcome.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


class Explodes:
    """An optimiser whose statistics stop being finite."""

    def __init__(self, named, setting):
        self.param_groups = [{"lr": 1.0}]

    def step(self):
        torch.linalg.cholesky(-torch.eye(2))


def test_a_decomposition_that_fails_is_an_outcome_and_a_bug_is_not():
    broken = Rival("explodes", "Explodes", Explodes, {"lr": Range(0.1, 1)}, {"lr": 1.0})
    assert "gave up at step 0" in train(task_of(), broken.untuned(), steps=3).failed
    wrong = Rival("wrong", "Wrong", lambda named, setting: torch.optim.SGD([], lr=1.0), {"lr": Range(0.1, 1)}, {"lr": 1.0})
    with pytest.raises(ValueError, match="empty parameter list"):
        train(task_of(), wrong.untuned(), steps=3)


def outcome(losses, every=10):
    places = tuple(range(0, every * len(losses), every))
    return Outcome({}, {"rival": "x"}, places, tuple(losses), 0.0, {}, 0)


@pytest.mark.parametrize(
    ("losses", "target", "wanted"),
    [
        ((3.0, 2.0, 1.0, 1.0), 1.0, 20.0),  # at it counts
        ((3.0, 1.0, 2.0, 1.0, 0.5), 1.0, 30.0),  # once below is luck
        ((3.0, 2.0, 1.0), 1.0, math.inf),  # nothing confirms the last one
        ((1.0, 1.0), 1.0, 0.0),
        ((3.0, 0.5, math.inf, 0.5), 1.0, math.inf),
    ],
)
def test_a_target_is_reached_when_two_evaluations_in_a_row_say_so(losses, target, wanted):
    assert outcome(losses).steps_to(target) == wanted


def test_seconds_of_steps_are_taken_in_turns():
    slow = Rival("slow", "Slow", Slow, {"lr": Range(0.1, 1)}, {"lr": 0.1})
    both, blocks = {"slow": slow.untuned(), "sgd": rival("sgd").untuned()}, []
    found = step_seconds(task_of(), both, rounds=3, block=2, warm_up=1, advance=blocks.append)
    assert blocks == ["slow", "sgd", "sgd", "slow"] * 2, "one call after each block, whether it counts or not"
    assert found["slow"] > found["sgd"] > 0
    assert Slow.turns == 8


class Slow:
    turns = 0

    def __init__(self, named, setting):
        self.param_groups = [{"lr": 1.0}]

    def step(self):
        Slow.turns += 1
        torch.linalg.svd(torch.ones(200, 200))


@pytest.mark.parametrize(
    "change",
    [
        {"losses": [1.0]},
        {"losses": "<script>"},
        {"losses": [True] * 3},
        {"places": [0, 0, 1]},
        {"places": None},
        {"ends": {"test": 3}},
        {"contender": 5},
        {"gradients": "many"},
        {"gradients": -5},
        {"ends": {"test": [0.1, 7.5]}},
    ],
    ids=str,
)
def test_records_that_do_not_hold_together_are_refused(change):
    good = train(task_of(), rival("sgd").untuned(), steps=20).to_json()
    Outcome.from_json(good)
    with pytest.raises(ValueError, match="record of a training"):
        Outcome.from_json(good | change)


# searching


def valley(optimum):
    """A rival on which only lr and weight_decay matter, and their best values are known."""

    class Step:
        def __init__(self, named, setting):
            self.params, self.setting = [p for _, p in named], setting
            self.param_groups = [{"lr": setting["lr"]}]

        def step(self):
            distance = sum(math.log10(self.setting[n] / v) ** 2 for n, v in optimum.items())
            with torch.no_grad():
                for p in self.params:
                    p.fill_(math.sqrt(distance))

    space = {"lr": Range(1e-5, 0.1), "weight_decay": Range(1e-6, 1e-2)}
    return Rival("valley", "Valley", Step, space, {"lr": 1e-3, "weight_decay": 1e-4})


class Height(tasks.Task):
    """The loss is the square of the parameter."""

    def init(self):
        return {"x": torch.ones(1)}

    def batch(self, step):
        return None

    def loss(self, params, batch):
        return (params["x"] ** 2).sum()

    def evaluate(self, params, split="test"):
        return tasks.Evaluation(float(params["x"] ** 2))


OPTIMUM = {"lr": 3e-3, "weight_decay": 2e-5}
HEIGHT = Height({"family": "height"}, 2)


@pytest.mark.parametrize("search", [Grid(25), QuasiRandom(25), Bayesian(15)], ids=lambda s: s.name)
def test_a_search_comes_near_a_known_optimum_within_its_budget(search):
    found = tune(valley(OPTIMUM), HEIGHT, search, metric="final_loss", measuring=BARE)
    assert len(found.trials) == search.budget
    assert found.gradients == 2 * search.budget
    # the space is 4 x 4 decades: a grid of 5 x 5 comes within half a decade in each coordinate
    assert found.score < (0.06 if search.name == "bayesian" else 0.6)
    assert found.best_so_far == sorted(found.best_so_far, reverse=True)
    assert found.best_so_far[-1] == found.score
    assert not found.at_edge


def test_bayesian_search_beats_the_points_it_starts_from_in_most_places():
    """The same number of quasi-random points, in three valleys."""
    better = 0
    for i in range(3):
        there = {"lr": 10 ** (-4.5 + i), "weight_decay": 10 ** (-2.5 - i)}
        both = (Bayesian(13), QuasiRandom(13))
        bayes, sobols = (tune(valley(there), HEIGHT, s, metric="final_loss", measuring=BARE).score for s in both)
        better += bayes < sobols
    assert better == 3


def test_grids_are_the_papers_where_they_fit_and_even_elsewhere():
    adam = rival("adam")
    assert len(adam.settings(["lr", "weight_decay"], 25)) == 15
    assert {s["lr"] for s in adam.settings(["lr", "weight_decay"], 25)} == {0.3, 0.2, 0.1, 0.01, 0.001}
    assert {s["lr"] for s in rival("sgd").settings(["lr", "weight_decay"], 25)} == {0.1, 0.05, 0.01, 0.005, 0.001}
    assert len(adam.settings(["lr", "weight_decay"], 10)) == 9  # 3 x 3
    assert len(rival("soap").settings(["lr"], 25)) == 25
    assert len(tune(valley(OPTIMUM), HEIGHT, Grid(budget=3, names=["lr"]), measuring=BARE).trials) == 3


def test_sobol_points_cover_better_than_chance():
    points = sobol(2, 32, 0)
    assert torch.equal(points[:5], sobol(2, 5, 0))
    assert not torch.equal(points, sobol(2, 32, 1))
    for axis in points.T:
        assert set((axis * 16).long().tolist()) == set(range(16))  # one in every sixteenth, which random points never have


def test_failed_trials_count_and_lose():
    family = tasks.quadratic((1.0, 2.0), steps=100)
    sgd = Rival("sgd", "SGD", RIVALS["sgd"].make, {"lr": Range(0.01, 100)}, {"lr": 0.01})
    for search in (Grid(8, ["lr"]), QuasiRandom(8, ["lr"]), Bayesian(8, ["lr"], initial=3)):
        found = tune(sgd, task_of(family), search, measuring=BARE)
        failed = [t for t in found.trials if t.score == math.inf]
        assert len(found.trials) == 8
        assert failed, "the range reaches far into divergence"
        assert found.best.setting["lr"] < 1


def test_a_best_value_at_the_edge_is_said():
    found = tune(valley({"lr": 1.0}), HEIGHT, Grid(budget=9, names=["lr"]), metric="final_loss", measuring=BARE)
    assert found.best.setting["lr"] == 0.1
    assert found.at_edge == ["lr"]
    published = replace(valley({"lr": 1e-3}), grid={"lr": (0.01, 0.02, 0.03)})
    found = tune(published, HEIGHT, Grid(budget=9, names=["lr"]), metric="final_loss", measuring=BARE)
    assert found.best.setting["lr"] == 0.01
    assert found.at_edge == ["lr"], "the end of the grid, in the middle of the space"


def test_trials_are_records_and_a_search_continues(tmp_path):
    def search(budget, folder):
        records = Records(tmp_path / folder, {"what": "search"})
        return tune(valley(OPTIMUM), HEIGHT, Bayesian(budget=8), measuring=BARE, records=records)

    whole = search(8, "a")
    files = sorted((tmp_path / "a" / "cells").iterdir())
    assert len(files) == 8
    for name in [f.name for f in files][5:]:
        (tmp_path / "a" / "cells" / name).unlink()
    kept = files[0].stat().st_mtime_ns
    again = search(8, "a")
    assert [t.contender.setting for t in again.trials] == [t.contender.setting for t in whole.trials]
    assert files[0].stat().st_mtime_ns == kept


def test_bad_searches_are_sentences():
    with pytest.raises(ValueError, match="at least one task"):
        tune(rival("adam"), [])
    with pytest.raises(ValueError, match="budget must be at least 1"):
        tune(rival("adam"), task_of(), QuasiRandom(budget=0))
    with pytest.raises(ValueError, match="metric must be one of mean_loss"):
        tune(rival("adam"), task_of(), metric="accuracy")
    with pytest.raises(ValueError, match="initial >= 1"):
        Bayesian(initial=0)
    with pytest.raises(ValueError, match="every and examples"):
        Measuring(every=0)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        train(task_of(), rival("adam").untuned(), steps=0)

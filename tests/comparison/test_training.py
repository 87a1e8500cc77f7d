"""The training that every comparison is made of: what it measures, when it fails, and how long a step takes."""

import json
import math
from dataclasses import replace

import pytest
import torch

from metamd import Diagonal, Measuring, MetaMD, meta_train, tasks
from metamd.comparison.training import LOSS_DIGITS, Outcome, step_seconds, train_contender
from metamd.files.progress import Progress
from metamd.rivals import Range, Rival, learned_rival, rival
from tests.small_comparisons import BARE
from tests.small_images import FAMILY, task_of


def test_the_loss_is_measured_on_fixed_examples_at_fixed_places():
    task = task_of()
    found = train_contender(task, rival("sgd").with_setting(lr=1e-3), steps=23, measuring=Measuring(every=10, examples=30))
    assert found.places == (0, 10, 20, 23)
    assert found.losses[0] == pytest.approx(task.monitor(30)(task.init()), rel=5e-5)
    assert found.mean_loss == pytest.approx(sum(found.losses[1:]) / 3)
    assert set(found.ends) == {"validation", "test"}
    assert 0 <= found.accuracy("test") <= 1
    assert train_contender(task, rival("sgd").with_setting(lr=1e-3), steps=23, measuring=BARE).ends == {}


def test_test_data_are_looked_at_on_the_way_without_changing_the_run():
    task, contender = task_of(), rival("sgd").with_setting(lr=1e-2)
    found = train_contender(task, contender, steps=20, measuring=Measuring(every=20, looks=(7, 20, 50)))
    assert found.places == (0, 7, 20), "a look beyond the last step is left out"
    assert found.looks == {"7": {"loss": found.looks["7"]["loss"]}, "20": {"loss": found.loss_on("test")}}
    short = train_contender(task, contender, steps=7, measuring=Measuring(every=20))
    assert found.looks["7"]["loss"] == short.loss_on("test")
    assert Outcome.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert "looks" not in short.to_json()
    assert "looks" not in Measuring().settings()
    with pytest.raises(ValueError, match="looks must be at least 1"):
        Measuring(looks=(0,))


def test_a_run_by_metamd_is_recorded_with_its_certificate():
    """By hand: the ball around the start with the run's end on its edge, and the sums of its gradients."""
    family = tasks.logistic(4, steps=15)
    task = family.build(family.sample(torch.Generator().manual_seed(3)))
    learned = meta_train(family, Diagonal(), outer_steps=2, tasks_per_step=2)
    found = train_contender(task, learned_rival(learned).untuned(), measuring=BARE)
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    optimiser = MetaMD(params.items(), learned, steps=task.steps)
    path, total, losses = 0.0, {n: torch.zeros_like(x, dtype=torch.float64) for n, x in params.items()}, []
    for t in range(task.steps):
        optimiser.zero_grad()
        loss = task.loss(params, task.batch(t))
        loss.backward()
        losses.append(loss.item())
        for n, x in params.items():
            path += float((x.grad.double() * (x.detach() - task.init()[n]).double()).sum())
            total[n] += x.grad.double()
        optimiser.step()
    metrics = {n: learned.potential.bind(task.init()).metric(n)[0].detach().double() for n in params}
    away = {n: (x.detach() - task.init()[n]).double() for n, x in params.items()}
    radius = math.sqrt(sum(float((metrics[n] * d.square()).sum()) for n, d in away.items()))
    dual = math.sqrt(sum(float((g.square() / metrics[n]).sum()) for n, g in total.items()))
    wanted = {"bound": (path + radius * dual) / task.steps, "radius": radius, "lowest": min(losses)}
    assert found.certificate == pytest.approx(wanted, rel=10.0 ** (1 - LOSS_DIGITS))  # as many as a record keeps
    assert Outcome.from_json(json.loads(json.dumps(found.to_json()))) == found
    older = {k: v for k, v in found.to_json().items() if k != "certificate"}
    assert Outcome.from_json(older) == replace(found, certificate={}), "a record of an earlier version"
    assert "certificate" not in train_contender(task, rival("sgd").with_setting(lr=0.1), measuring=BARE).to_json()


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
    often, seldom = (train_contender(task, contender, measuring=Measuring(every=k)) for k in (1, 20))
    assert often.final_loss == seldom.final_loss
    assert often.batch_loss == seldom.batch_loss


def test_threads_and_the_global_generator_stay_as_they_were():
    torch.manual_seed(5)
    wanted, threads = torch.random.get_rng_state(), torch.get_num_threads()
    train_contender(task_of(), rival("adam").untuned(), steps=2)
    assert torch.equal(torch.random.get_rng_state(), wanted)
    assert torch.get_num_threads() == threads


def test_divergence_is_an_outcome():
    found = train_contender(task_of(tasks.quadratic()), rival("sgd").with_setting(lr=10.0), steps=200, measuring=BARE)
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
    assert "gave up at step 0" in train_contender(task_of(), broken.untuned(), steps=3).failed
    wrong = Rival("wrong", "Wrong", lambda named, setting: torch.optim.SGD([], lr=1.0), {"lr": Range(0.1, 1)}, {"lr": 1.0})
    with pytest.raises(ValueError, match="empty parameter list"):
        train_contender(task_of(), wrong.untuned(), steps=3)


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


def test_seconds_of_steps_are_taken_in_turns(monkeypatch):
    slow = Rival("slow", "Slow", Slow, {"lr": Range(0.1, 1)}, {"lr": 0.1})
    both, blocks = {"slow": slow.untuned(), "sgd": rival("sgd").untuned()}, []
    monkeypatch.setattr(Progress, "advance", lambda progress, label: blocks.append(label))
    found = step_seconds(task_of(), both, rounds=3, block=2, warm_up=1)
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
    good = train_contender(task_of(), rival("sgd").untuned(), steps=20).to_json()
    Outcome.from_json(good)
    with pytest.raises(ValueError, match="record of a training"):
        Outcome.from_json(good | change)

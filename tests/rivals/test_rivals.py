"""The rivals take the steps of their namesakes, and their tables are as published."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from metamd import (
    Diagonal,
    Grid,
    QuasiRandom,
    Usage,
    learned_rival,
    meta_train,
    prepare,
    tasks,
    tune,
)
from metamd.comparison.training import Outcome, train_contender
from metamd.inner import run
from metamd.inner.objectives import Reference
from metamd.rivals import RIVALS, Contender, Range, rival
from metamd.rivals.optimisers import MuonAndAdamW
from metamd.tasks.models import LeNet
from tests.small_comparisons import BARE
from tests.small_images import small_network, task_of


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_trains_a_network_and_repeats_itself(name):
    # a rate in the middle of its range
    contender = RIVALS[name].with_setting(lr=RIVALS[name].space["lr"].at(0.6))
    first, second = (train_contender(task_of(), contender, steps=15) for _ in range(2))
    assert first == second
    assert not first.failed
    assert first.final_loss < first.losses[0]
    assert first.gradients == 15
    assert Outcome.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_the_ranges_are_those_of_the_page_of_reproduction():
    """They were fixed beforehand: what is changed here is changed for every record."""
    usual = (1e-4, 1)
    others = {"sgd": (1e-3, 10), "hypergradient": (1e-3, 10), "prodigy": (0.1, 10), "dadapt": (0.1, 10)}
    others |= dict.fromkeys(("soap", "soap-averaged", "schedule-free"), (1e-4, 0.1)) | {"schedule-free-sgd": (1e-2, 30)}
    assert {n: (r.space["lr"].low, r.space["lr"].high) for n, r in RIVALS.items()} == dict.fromkeys(RIVALS, usual) | others
    decoupled = ("adamw", "adamw-averaged", "muon", "muon-averaged", "lora-plus")
    decays = {n: r.space["weight_decay"] for n, r in RIVALS.items() if "weight_decay" in r.space}
    assert {n for n, x in decays.items() if (x.low, x.high) == (1e-5, 1)} == set(decoupled)
    assert all((x.low, x.high) == (1e-6, 1e-2) for n, x in decays.items() if n not in decoupled)


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
    found = train_contender(task, rival("sgdm").with_setting("linear", lr=0.05))
    assert found.ends["test"][0] == pytest.approx(end.loss, rel=1e-4)
    other = train_contender(task, rival("sgdm").with_setting("constant", lr=0.05))
    assert other.ends["test"][0] != pytest.approx(end.loss, rel=1e-4)


def test_l_bfgs_ends_a_quadratic_in_a_few_gradients_and_takes_over_from_adam():
    """With as many pairs as dimensions its direction is Newton's; Adam alone is far from the end by then."""
    scales = torch.tensor([1.0, 3.0, 10.0, 30.0], dtype=torch.float64)

    def gap(name, steps, **setting):
        x = nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimiser = rival(name).with_setting(**setting).start([("x", x)])
        for _ in range(steps):
            (x.grad,) = torch.autograd.grad(0.5 * (scales * x.square()).sum(), x)
            optimiser.step()
        return float(0.5 * (scales * x.detach().square()).sum())

    assert gap("lbfgs", 30) < 1e-9
    assert gap("adam-lbfgs", 35, lr=0.01, switch=5.0) < 1e-9
    assert gap("adam-lbfgs", 35, lr=0.01, switch=2000.0) == gap("adam", 35, lr=0.01) > 1


def test_lora_plus_moves_the_matrices_b_sixteen_times_as_far():
    """Of our adapters and of peft's; the first step of Adam is the rate, without decay."""
    names = ["w.a", "w.b", "model.w.lora_A.default.weight", "model.w.lora_B.default.weight", "b.weight"]
    named = [(n, nn.Parameter(torch.zeros(2, 2))) for n in names]
    optimiser = rival("lora-plus").with_setting(lr=0.01).start(named)
    for _, p in named:
        p.grad = torch.ones(2, 2)
    optimiser.step()
    moved = {n: -float(p.detach().mean()) for n, p in named}
    far = {n: pytest.approx(0.16 if n in ("w.b", "model.w.lora_B.default.weight") else 0.01, rel=1e-4) for n in names}
    assert moved == far


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
    found = train_contender(task, rival("schedule-free").with_setting(lr=0.01)).final_loss
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
    found = train_contender(task, rival("adam-averaged").with_setting(lr=0.01))
    assert found.final_loss == pytest.approx(task.monitor()(mean), rel=1e-3)
    plain = train_contender(task, rival("adam").with_setting(lr=0.01))
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
        ends[averaging] = train_contender(task, learned_rival(found).untuned(), measuring=BARE)
        params = {n: nn.Parameter(x) for n, x in task.init().items()}
        optimiser, schedule = prepare(params.items(), found, steps=20)
        for t in range(20):
            optimiser.zero_grad()
            task.loss(params, task.batch(t)).backward()
            optimiser.step()
            schedule.step()
        optimiser.eval()
        judged = task.monitor()({n: p.detach() for n, p in params.items()})
        assert ends[averaging].final_loss == pytest.approx(judged, rel=5e-5)
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
    assert train_contender(task, contender, measuring=BARE).final_loss == pytest.approx(wanted, rel=1e-4)
    monkeypatch.setattr(run, "laid_out_like", lambda parameter, gradient: gradient)
    astray = train_contender(task, contender, measuring=BARE).final_loss
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
    plain = train_contender(task, ours.untuned(), measuring=BARE)
    best = tune(rival("sgd"), task, Grid(names=["lr"], budget=15), measuring=BARE)
    assert plain.mean_loss < best.best_so_far[-1]
    assert ours.cost["gradient_evaluations"] > 0
    assert ours.untuned().describe()["identity"].startswith(learned.fingerprint())
    assert ours.untuned().setting == {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0}
    assert learned_rival(learned, exact=False).identity != ours.identity
    half = train_contender(task, ours.with_setting(lr=0.5), measuring=BARE)
    assert half.losses != plain.losses
    usage = Usage(momentum=0.5, schedule="linear", factor=0.8)
    grid = learned_rival(learned, usage=usage).settings(["lr"], 5)
    assert [s["lr"] for s in grid] == [0.8, 0.08, 0.24, 2.4, 8.0], "around what the usage says"
    assert learned_rival(learned, usage=usage).space["lr"] == Range(0.08, 8.0)
    used = train_contender(task, learned_rival(learned, usage=usage).untuned(), measuring=BARE)
    assert used.final_loss == pytest.approx(by_hand(task, learned, usage), rel=5e-5)
    heavy = train_contender(task, ours.with_setting("linear", momentum=0.5), measuring=BARE)
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
    with pytest.raises(ValueError, match=r"pip install '\.\[rivals\]'"):
        train_contender(task_of(), rival("prodigy").untuned())


def test_contenders_have_keys_of_their_own():
    adam = rival("adam")
    keys = {adam.with_setting(s, lr=lr).key() for s in ("constant", "linear") for lr in (0.1, 0.2)}
    assert len(keys) == 4
    assert adam.with_setting(lr=0.1).key() == Contender(adam, {**adam.defaults, "lr": 0.1}).key()

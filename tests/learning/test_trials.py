"""Learned schedules: the closed form against brute force, the bound it minimises, and its way into files and runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import metamd
from metamd import Kronecker, LearnedOptimiser, Usage, learn_usage, meta_train, prepare
from metamd.comparison.training import train_contender as compete
from metamd.files.header import Header
from metamd.files.usage import interpolate
from metamd.learning.usage import SPREAD, learn_knots, run_usage
from metamd.rivals import learned_rival
from metamd.tasks import tabular
from tests.certified_runs import Loss


def rates_of(weights):
    """eta_t = w_t (w_{t+1} + ... + w_T) / (w_0 + ... + w_T), one by one."""
    return np.array([w * sum(weights[t + 1 :]) / sum(weights) for t, w in enumerate(weights)][:-1])


def best_rates(energies):
    """The closed form: those of w = 1/e, the largest being 1."""
    found = rates_of(1 / np.asarray(energies))
    return found / found.max()


def brute_force(energies, distance):
    """The rates of the weights that a solver finds for the bound (D^2 + sum w^2 e) / (2 sum w)."""

    def bound(logs):
        w = np.exp(logs)
        value = (distance**2 + (w**2 * energies).sum()) / (2 * w.sum())
        slope = w * (2 * w * energies / (2 * w.sum()) - value / w.sum())
        return value, slope

    found = minimize(bound, np.zeros(len(energies)), jac=True, method="BFGS", options={"gtol": 1e-12, "maxiter": 10000})
    return rates_of(np.exp(found.x))


def test_the_closed_form_is_the_minimiser_of_the_bound():
    rng = np.random.default_rng(0)
    for _ in range(40):
        energies = np.exp(rng.normal(size=rng.integers(2, 12)))
        found = brute_force(energies, distance=float(np.exp(rng.normal())))
        np.testing.assert_allclose(best_rates(energies), found / found.max(), rtol=1e-4, atol=1e-6)
        wrong = rates_of(1 / np.sqrt(energies))  # a root too many
        assert len(energies) < 4 or not np.allclose(wrong / wrong.max(), found / found.max(), rtol=1e-2)


def last_iterate(rng, schedule):
    """l(theta_T) - l(u) of a run on a convex function in a random metric, and the bound for it; weights are guessed."""
    size, count = int(rng.integers(1, 30)), int(rng.integers(2, 15))
    loss, still, d = Loss(rng, size), np.zeros(size), np.exp(rng.normal(size=size))
    weights = np.exp(rng.normal(size=count) + 2 * rng.normal())
    theta, u = rng.normal(size=size), [loss.centre, rng.normal(size=size)][rng.integers(2)]
    total = (d * (u - theta) ** 2).sum()
    for w, eta in zip(weights, np.append(schedule(weights), 0.0), strict=True):
        g = loss.grad(theta, still)
        total += w**2 * (g * g / d).sum()
        last, theta = loss.value(theta, still), theta - eta * g / d
    return last - loss.value(u, still), total / (2 * weights.sum())


def test_the_bound_on_the_last_iterate_holds_for_convex_functions():
    rng = np.random.default_rng(1)
    pairs = [last_iterate(rng, rates_of) for _ in range(3000)]
    assert all(gap <= bound * (1 + 1e-9) + 1e-12 for gap, bound in pairs)
    # without the decay, nothing is promised for the last iterate
    constant = [last_iterate(rng, lambda w: w[:-1]) for _ in range(3000)]
    assert any(gap > bound for gap, bound in constant)


@pytest.mark.parametrize("steps", [1, 7, 10, 33, 500])
def test_equal_energies_give_exactly_the_linear_decay(steps):
    found = Usage(momentum=0.9, schedule="learned", knots=learn_knots([[2.5] * steps, [7.0] * steps]))
    linear = Usage(momentum=0.9, schedule="linear")
    for t in range(steps):
        assert found.share(t, steps) == pytest.approx(linear.share(t, steps), abs=1e-11)
    np.testing.assert_allclose(best_rates([3.0] * (steps + 1)), [linear.share(t, steps) for t in range(steps)])


def test_a_few_numbers_stand_for_the_closed_form():
    """Energies that change slowly: the knots lie on the rates of every step."""
    steps = 1000
    for change in (-1.5, -0.5, 0.7, 1.5):
        energies = np.exp(change * np.linspace(0, 1, steps + 1))
        found = learn_knots([energies[:-1]], spread=math.inf)
        assert max(abs(interpolate(found, t / steps) - eta) for t, eta in enumerate(best_rates(energies))) < 0.06
        wrong = learn_knots([energies[:-1]], spread=1.0)
        assert max(abs(interpolate(wrong, t / steps) - eta) for t, eta in enumerate(best_rates(energies))) > 0.06


def test_outliers_and_falling_energies_are_held():
    """One wild phase changes nothing; energies that fall by a thousand times still leave the first steps a rate."""
    calm = np.ones(100)
    wild = calm.copy()
    wild[40:50] = 1e6
    assert learn_knots([wild]) == learn_knots([calm])
    falling = np.exp(-7 * np.linspace(0, 1, 200))
    held, free = learn_knots([falling]), learn_knots([falling], spread=math.inf)
    assert free[0] < 0.01
    assert held[0] > 0.5
    assert max(held) == max(free) == 1
    assert held[-1] == free[-1] == 0
    for broken in ([0.0] * 20, [math.inf] * 20):
        assert learn_knots([broken]) == learn_knots([calm])
    assert SPREAD > 1


@pytest.fixture(scope="module")
def learned():
    return meta_train(tabular(steps=30), Kronecker(), outer_steps=2, tasks_per_step=3, seed=0)


def test_it_travels_with_the_file_and_drives_every_kind_of_run(learned, tmp_path):
    """`prepare`, the runs that usages are chosen by, and the contender of a comparison take the same steps."""
    usage = Usage(momentum=0.5, schedule="learned", factor=0.7, knots=(0.25, 1.0, 0.5, 0.0))
    replace(learned, header=replace(learned.header, usage=usage.to_dict())).save(tmp_path / "scheduled.safetensors")
    again = metamd.load(tmp_path / "scheduled.safetensors")
    assert again.usage == usage
    assert Header.from_json(again.header.to_json()) == again.header
    family = tabular(steps=30)
    task = family.build(family.sample(torch.Generator().manual_seed(3)))
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    optimiser, schedule = prepare(params.items(), again, steps=30)
    rates, losses = [], []
    for t in range(30):
        optimiser.zero_grad()
        loss = task.loss(params, task.batch(t))
        loss.backward()
        losses.append(float(loss.detach()))
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    assert rates == pytest.approx([usage.lr * np.interp(t / 30, np.linspace(0, 1, 4), usage.knots) for t in range(30)])
    outcome = run_usage(task, again.potential.bind(task.init()), usage)
    assert outcome.loss == pytest.approx(np.mean(losses), rel=1e-5)
    rival = learned_rival(again)
    assert rival.schedules == ("learned", "constant", "linear", "quadratic")
    assert compete(task, rival.untuned()).batch_loss == pytest.approx(np.mean(losses), rel=1e-4)  # five digits
    assert compete(task, rival.with_setting("linear")).batch_loss != pytest.approx(np.mean(losses), rel=1e-5)
    other = replace(usage, knots=(0.25, 1.0, 0.4, 0.0))
    assert learned_rival(again, usage=other).untuned().key() != rival.untuned().key()


@pytest.mark.parametrize("metric", ["learned", "online"])
def test_learn_usage_offers_one_from_runs_of_the_linear_decay(learned, metric):
    tried = {}
    options = {"momenta": (0.0,), "factors": (1.0,), "tasks": 2, "rules": (metamd.Online("sum"),)}
    learn_usage(learned, tabular(steps=30), metrics=(metric,), watch=lambda u, _, v: tried.update({u: v}), **options)
    assert [u.schedule for u in tried] == ["linear", "constant", "quadratic", "learned", "linear"]
    assert [u.averaging for u in tried] == ["tail", "tail", "tail", "tail", "constant"]
    (offered,) = (u for u in tried if u.schedule == "learned")
    assert len(offered.knots) == 11
    assert offered.knots[-1] == 0
    only = learn_usage(learned, tabular(steps=30), metrics=(metric,), schedules=("learned",), averages=("tail",), **options)
    assert only.usage == offered


def test_the_energies_of_a_run_are_those_of_the_definition(learned):
    family = tabular(steps=5)
    task = family.build(family.sample(torch.Generator().manual_seed(4)))
    phi = learned.potential.bind(task.init())
    online = metamd.Online("sum", scale={slot.key: 50.0 for slot in phi.slots.values()})
    grads = torch.autograd.grad(
        task.loss(p := {n: x.clone().requires_grad_() for n, x in task.init().items()}, task.batch(0)), list(p.values())
    )
    turned = {n: phi.basis.into(n, g) for n, g in zip(p, grads, strict=True)}
    plain = sum(float((c * c / phi.metric(n)[0].detach()).sum()) for n, c in turned.items())
    assert run_usage(task, phi, Usage(), measure=True).energies[0] == pytest.approx(plain, rel=1e-5)
    first = sum(float(c.abs().sum()) for c in turned.values()) / 50  # c^2 / (s |c|)
    found = run_usage(task, phi, Usage("online"), online=online, measure=True)
    assert len(found.energies) == 5
    assert found.energies[0] == pytest.approx(first, rel=1e-4)
    assert run_usage(task, phi, Usage()).energies == ()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Usage(schedule="learned"), r"two knots or more .* got \(\)\. metamd\.learn_usage"),
        (lambda: Usage(schedule="learned", knots=(0.5, 0.2)), "the largest being 1"),
        (lambda: Usage(schedule="learned", knots=(1.0, math.nan)), "between 0 and 1"),
        (lambda: Usage(schedule="learned", knots=(1.0, -0.1)), "between 0 and 1"),
        (lambda: Usage(schedule="linear", knots=(1.0, 0.0)), "a linear schedule has no knots, got 2"),
    ],
)
def test_knots_that_are_no_schedule_are_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("knots", "sentence"),
    [
        ("1, 0", "the knots of usage must be a list"),
        ([1.0, "0"], "the knots of usage must be a list of finite numbers"),
        ([1.0, True], "the knots of usage must be a list of finite numbers"),
        ([1.0, 2.0], "the largest being 1"),
        ([], "two knots or more"),
    ],
)
def test_a_header_with_broken_knots_is_refused(learned, knots, sentence):
    plain = json.loads(learned.header.to_json())
    plain["usage"] = {**Usage(schedule="linear").to_dict(), "schedule": "learned", "knots": knots}
    with pytest.raises(ValueError, match=sentence):
        Header.from_json(json.dumps(plain))
    with pytest.raises(ValueError, match=sentence):
        LearnedOptimiser.from_potential(learned.potential, usage=plain["usage"])

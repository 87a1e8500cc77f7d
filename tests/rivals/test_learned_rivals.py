"""Rivals that learn: formulas against slow ones, gradients against finite differences, and that learning helps."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from metamd import Protocol, compare, tasks
from metamd.cli import main as cli
from metamd.comparison.training import train_contender
from metamd.inner import run
from metamd.rivals import LEARNERS, RIVALS
from metamd.rivals.learned import PerCoordinate, aruba, lstm, meta_sgd, schedule, source
from metamd.rivals.optimisers import HypergradientSGD
from tests.small_comparisons import BARE
from tests.small_tasks import Quadratic, Separable

F64 = torch.float64
QUADRATIC = tasks.quadratic((0.5, 4.0), steps=40)


def unseen(family=QUADRATIC, count=5):
    generator = torch.Generator().manual_seed(77)
    return [family.build(family.sample(generator)) for _ in range(count)]


def mean_loss(contender, tasks_):
    return sum(train_contender(t, contender, measuring=BARE).mean_loss for t in tasks_) / len(tasks_)


@pytest.mark.parametrize("name", [n for n in LEARNERS if n != "lstm"])
def test_what_is_learned_beats_where_it_began(name, tmp_path):
    """All begin as SGD, or as SGD with momentum, at one fixed rate."""
    learner = LEARNERS[name]
    found = learner.rival(QUADRATIC, 0, tmp_path / "x.safetensors")
    again = learner.rival(QUADRATIC, 0, tmp_path / "x.safetensors")
    assert found.identity == again.identity
    assert found.cost == again.cost
    assert found.cost["gradient_evaluations"] > 0
    momentum = name == "learned-schedule"
    first = RIVALS["sgdm" if momentum else "sgd"].with_setting(lr=schedule.FIRST_RATE if momentum else 0.05)
    held_out = unseen()
    assert mean_loss(found.untuned(), held_out) < mean_loss(first, held_out)
    assert mean_loss(found.untuned(), held_out) == mean_loss(again.untuned(), held_out)
    assert learner.rival(QUADRATIC, 1).identity != found.identity


# ARUBA


def test_arubas_sums_are_those_of_a_loop():
    task = Separable(seed=3, steps=7)
    rates = {"x": torch.tensor([0.1, 0.02, 0.05], dtype=F64)}
    rule = aruba.FixedRates(task.init(), rates)
    run.train(task, rule, 7)
    x, total = task.init()["x"], torch.zeros(3, dtype=F64)
    for _ in range(7):
        g = task.a * (x - task.c)
        total += g**2
        x = x - rates["x"] * g
    torch.testing.assert_close(rule.params["x"], x)
    torch.testing.assert_close(rule.squares["x"], total)


def test_aruba_lowers_its_rate_after_a_run_that_diverged(monkeypatch):
    monkeypatch.setattr(aruba, "FIRST_RATE", 4.0**20)
    with pytest.raises(ValueError, match=r"ARUBA diverged on all 10 tasks, with rates down to 1\.04858e\+06\."):
        aruba.learn_aruba(QUADRATIC, 0)


def test_aruba_approaches_its_rule_on_a_family_of_one_curvature():
    """Distances and gradients of separable tasks: the rates order as the inverse curvatures do."""
    tensors, _ = aruba.learn_aruba(tasks.quadratic((0.2, 1.0, 5.0), coupling=0.0, steps=60), 0)
    rates = (tensors["b/theta"] / tensors["G/theta"]).sqrt()
    assert rates[0] > rates[1] > rates[2]
    assert rates[2] < 2 / 10  # the Hessian is 2Q, so that this is where gradient descent becomes unstable


def test_aruba_plus_adds_the_squares_of_its_own_run():
    p = nn.Parameter(torch.tensor([1.0, -2.0], dtype=F64))
    b, total = torch.tensor([0.5, 0.3], dtype=F64), torch.tensor([2.0, 1.0], dtype=F64)
    optimiser = aruba.RunningRates([("p", p)], {"b/p": b, "G/p": total}, {"lr": 0.7})
    wanted, squares = p.detach().clone(), total.clone()
    for k in range(4):
        g = torch.tensor([1.0 + k, -0.5 * k], dtype=F64)
        p.grad = g.clone()
        optimiser.step()
        squares += g**2
        wanted -= 0.7 * (b / squares).sqrt() * g
    torch.testing.assert_close(p.detach(), wanted)
    torch.testing.assert_close(total, torch.tensor([2.0, 1.0], dtype=F64))  # what was learned stays as it was


# Meta-SGD


def test_meta_sgds_gradient_is_that_of_finite_differences():
    task = Quadratic(seed=1, wave=0.3)
    start = task.init()
    logs = {n: torch.full_like(x, 0.1).log().requires_grad_() for n, x in start.items()}
    _, loss = meta_sgd.unrolled(task, start, logs, 2, 4)
    found = torch.autograd.grad(loss, list(logs.values()))
    step = 1e-5
    for n, g in zip(logs, found, strict=True):
        for i in range(len(g)):
            ends = []
            for sign in (1, -1):
                moved = {k: v.detach().clone() for k, v in logs.items()}
                moved[n][i] += sign * step
                ends.append(float(meta_sgd.unrolled(task, start, moved, 2, 4)[1].detach()))
            assert float(g[i]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-9)


def test_rates_of_another_model_are_refused():
    p = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="do not fit the parameter 'p'"):
        PerCoordinate([("p", p)], {"p": torch.ones(3)}, {"lr": 1.0})
    with pytest.raises(ValueError, match="do not fit the parameter 'p'"):
        PerCoordinate([("p", p)], {}, {"lr": 1.0})


# hypergradient descent


def test_the_rate_follows_the_gradient_of_the_loss_with_respect_to_it():
    """d f(theta - lr g)/d lr at the present rate, by finite differences; the wrong sign would be caught."""
    task = Quadratic(seed=2, wave=0.2)
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    optimiser = HypergradientSGD(list(params.items()), {"lr": 0.05, "beta": 0.01})

    def loss_at(lr, start, grads):
        return float(task.loss({n: start[n] - lr * grads[n] for n in start}, task.batch(0)))

    def take():
        start = {n: p.detach().clone() for n, p in params.items()}
        found = torch.autograd.grad(task.loss(params, task.batch(0)), list(params.values()))
        for p, g in zip(params.values(), found, strict=True):
            p.grad = g
        rate = optimiser.param_groups[0]["lr"]
        optimiser.step()
        return start, dict(zip(params, found, strict=True)), rate

    start, grads, rate = take()
    assert optimiser.param_groups[0]["lr"] == rate  # the first step knows no gradient before it
    slope = (loss_at(rate + 1e-6, start, grads) - loss_at(rate - 1e-6, start, grads)) / 2e-6
    take()
    assert optimiser.param_groups[0]["lr"] == pytest.approx(rate - 0.01 * slope, rel=1e-6)


# the learned schedule


def test_the_schedules_gradient_is_that_of_finite_differences():
    task = Quadratic(seed=4, steps=12, wave=0.2, noise=0.1)
    logs = torch.tensor([0.02, 0.05, 0.01, 0.03], dtype=F64).log()
    loss, slope, cost = schedule.loss_and_slopes(task, logs)
    assert cost.gradients == 12 + schedule.JUDGES
    assert cost.hvps == 3 * (1 + 2 + 3 + 4)
    for k in range(4):
        ends = []
        for sign in (1, -1):
            moved = logs.clone()
            moved[k] += sign * 1e-5
            ends.append(float(schedule.loss_and_slopes(task, moved)[0]))
        assert float(slope[k]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-9)
    assert math.isfinite(float(loss))


def test_the_scheduled_optimiser_takes_the_steps_that_were_differentiated():
    task = Quadratic(seed=4, steps=12)
    rates = torch.tensor([0.02, 0.05, 0.01, 0.03], dtype=F64)
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    optimiser = schedule.Scheduled(list(params.items()), {"rates": rates, "steps": torch.tensor(12.0)}, {"lr": 1.0})
    for t in range(12):
        for p, g in zip(
            params.values(), torch.autograd.grad(task.loss(params, task.batch(t)), list(params.values())), strict=True
        ):
            p.grad = g
        optimiser.step()
    judged = [task.loss(params, task.batch(t)).detach() for t in range(12, 12 + schedule.JUDGES)]
    assert float(schedule.loss_and_slopes(task, rates.log())[0]) == pytest.approx(
        float(torch.stack(judged).mean()), rel=1e-9
    )


# the LSTM


def test_an_lstm_learns_to_descend(monkeypatch):
    monkeypatch.setattr(lstm, "TASKS", 30)
    learner = LEARNERS["lstm"]
    found = learner.rival(QUADRATIC, 0)
    for task in unseen(count=2):
        outcome = train_contender(task, found.untuned(), measuring=BARE)
        assert outcome.final_loss < 0.5 * outcome.losses[0]
    monkeypatch.setattr(lstm, "TASKS", 0)
    untrained = learner.rival(QUADRATIC, 0)
    held_out = unseen()
    assert mean_loss(found.untuned(), held_out) < 0.7 * mean_loss(untrained.untuned(), held_out)


def test_gradients_are_prepared_as_published():
    """log|g|/p and its sign for large ones, -1 and e^p g for small ones; continuous where they meet."""
    found = lstm.prepared(torch.tensor([1.0, -math.exp(-5), math.exp(-10), 0.0, -math.exp(-12)]))
    wanted = torch.tensor([[0.0, 1.0], [-0.5, -1.0], [-1.0, 1.0], [-1.0, 0.0], [-1.0, -math.exp(-2)]])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


# in comparisons


def test_learned_rivals_enter_comparisons_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "q.safetensors"
    assert cli.run(["train", "quadratic", "--out", str(out), "--steps", "30", "--outer-steps", "1", "--tasks", "2"]) == 0
    args = ["compare", str(out), "quadratic", "--rivals", "aruba", "aruba-plus", "sgd", "--budget", "2", "--seeds", "1"]
    args += ["--steps", "30", "--out", str(tmp_path / "c"), "--json", "--protocol", "handicap"]
    capsys.readouterr()
    assert cli.run(args) == 0
    first = capsys.readouterr().out
    assert cli.run(args) == 0
    assert capsys.readouterr().out == first
    code = source(tasks.quadratic(steps=30), 0)
    found = {p.name for p in (tmp_path / "c" / "learned").iterdir()}
    assert found == {f"{n}-{code}.safetensors" for n in ("aruba", "aruba-plus")}


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" * 100])
def test_a_damaged_file_of_a_learned_rival_is_a_sentence(damage, tmp_path):
    path = tmp_path / "aruba.safetensors"
    LEARNERS["aruba"].rival(QUADRATIC, 0, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"cannot be loaded: .* Delete it to learn it anew"):
        LEARNERS["aruba"].rival(QUADRATIC, 0, path)
    save_file({"theta": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"but no learned rival\. Delete it to learn it anew"):
        LEARNERS["aruba"].rival(QUADRATIC, 0, path)


def test_what_was_learned_on_another_family_is_never_taken(tmp_path):
    """A file that lies there may have seen what is held out now."""
    path = tmp_path / "aruba.safetensors"
    first = LEARNERS["aruba"].rival(QUADRATIC, 0, path)
    assert LEARNERS["aruba"].rival(QUADRATIC, 0, path).identity == first.identity
    for family, seed in ((tasks.quadratic((0.3, 9.0), steps=QUADRATIC.steps), 0), (QUADRATIC, 1)):
        with pytest.raises(ValueError, match="was learned on another family or with another seed"):
            LEARNERS["aruba"].rival(family, seed, path)


def test_their_learning_is_counted():
    found = LEARNERS["aruba"].rival(QUADRATIC)
    compared = compare({"a": found.untuned(), "b": RIVALS["sgd"].untuned()}, QUADRATIC, Protocol(seeds=1, measuring=BARE))
    assert compared.learning_gradients("a") == found.cost["gradient_evaluations"] > 0

"""The metric that follows a run in learned coordinates."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch

from metamd import (
    Diagonal,
    Euclidean,
    Kronecker,
    MaxDiagonal,
    MetaMD,
    Online,
    Usage,
    prepare,
)
from metamd.inner.run import gradient
from metamd.potentials.online import KEPT
from metamd.tasks import quadratic
from tests.helpers import equal_parameters, small_model
from tests.helpers import train as fit


def scales(model, rate):
    return {n: 1 / rate for n, _ in model.named_parameters()}


def distance(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("online", "theirs"),
    [
        (Online("average", 0.99, 1e-8), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.99), eps=1e-8)),
        (Online("sum", epsilon=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-10)),
    ],
)
def test_in_the_parameters_own_coordinates_the_rules_are_torchs(online, theirs):
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    rule = Online(online.rule, online.beta, online.epsilon, scales(model, 0.01))
    fit(model, MetaMD(model.named_parameters(), Diagonal(), metric=rule), 40)
    fit(other, theirs(other.parameters()), 40)
    assert distance(model, other) < 1e-12
    fit(model, MetaMD(model.named_parameters(), Diagonal(), metric=rule), 3)
    assert distance(model, other) > 1e-4, "a run that went on agrees with one that did not"


def turned(model, seed=0):
    """A Kronecker potential with a random orthogonal basis for every weight."""
    g = torch.Generator().manual_seed(seed)
    shapes = {n: p.shape for n, p in model.named_parameters() if p.ndim == 2}
    factors = {f"right/{n}": torch.linalg.qr(torch.randn(s[1], s[1], generator=g).double())[0] for n, s in shapes.items()}
    fresh = Kronecker().bind(list(model.named_parameters()))
    log_d = {k: torch.zeros_like(v) for k, v in fresh.log_d.items()}
    potential = MaxDiagonal(1, tying="tensor", basis=fresh.basis.with_factors(factors)).with_metrics(log_d)
    return potential, factors


def test_in_a_learned_basis_it_is_the_rule_on_the_turned_problem():
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    potential, factors = turned(model)
    rule = Online("average", 0.9, scale=scales(model, 0.02))
    fit(model, MetaMD(model.named_parameters(), potential, metric=rule), 25)

    class Turned(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for n, p in other.named_parameters():
                v = factors.get(f"right/{n}")
                state = self.state[p]
                c = p.grad if v is None else p.grad @ v
                state["t"] = state.get("t", 0) + 1
                state["s"] = 0.9 * state.get("s", 0) + 0.1 * c * c
                u = c / ((state["s"] / (1 - 0.9 ** state["t"])).sqrt() + 1e-8)
                p.sub_(0.02 * (u if v is None else u @ v.T))

    fit(other, Turned(other.parameters(), {}), 25)
    assert distance(model, other) < 1e-11


def test_momentum_schedules_and_weight_decay_work_with_it():
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    rule = Online(scale=scales(model, 0.01))
    optimiser = MetaMD(model.named_parameters(), Diagonal(), metric=rule, momentum=0.9, weight_decay=0.1, lr=0.1)
    fit(model, optimiser, 10)
    z = {n: p.detach().clone() for n, p in other.named_parameters()}
    x, states = dict(z), {n: {} for n in z}
    for t in range(10):
        g = torch.Generator().manual_seed(t)
        inputs = torch.randn(16, 5, generator=g).double()
        target = torch.stack([inputs[:, 0] + inputs[:, 1], inputs[:, 2] * inputs[:, 3], inputs[:, 4].sin()], 1)
        leaves = {n: v.clone().requires_grad_() for n, v in x.items()}
        loss = (torch.func.functional_call(other, leaves, (inputs,)) - target).square().mean()
        for n, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            (a,) = rule.metrics([grad], [states[n]])
            z[n] = 0.9 * z[n] - 0.01 * grad / a
            x[n] = 0.9 * x[n] + 0.1 * z[n]
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), x[n], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["average", "sum", "polar", "eigen"])
def test_resume_and_copies_are_bit_exact(rule):
    model = small_model()
    potential, _ = turned(model)
    options = {"metric": Online(rule, scale=scales(model, 0.01)), "momentum": 0.8}
    optimiser = MetaMD(model.named_parameters(), potential, **options)
    fit(model, optimiser, 10)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small_model(seed=9)
    resumed = MetaMD(other.named_parameters(), potential, **options)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimiser"])
    twins = [(other, resumed), copy.deepcopy((model, optimiser)), pickle.loads(pickle.dumps((model, optimiser)))]
    for m, o in [(model, optimiser), *twins]:
        fit(m, o, 10, first=10)
    assert all(equal_parameters(model, m) for m, _ in twins)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rule",
    [
        Online("average"),
        Online("sum"),
        Online("polar"),
        Online("polar", signal=0.9),
        Online("polar", signal=0.9, refresh=4),
        Online("eigen", beta=0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("basis", [False, True])
def test_half_precision_is_finite_and_resumes_bit_exactly(rule, dtype, basis):
    model = small_model(dtype=dtype)
    options = {"metric": replace(rule, scale=scales(model, 0.01)), "momentum": 0.8}
    geometry = turned(model)[0] if basis else Diagonal()
    optimiser = MetaMD(model.named_parameters(), geometry, **options)
    fit(model, optimiser, 10)
    assert all(p.isfinite().all() for p in model.parameters())
    for state in optimiser.state.values():
        assert {state[key].dtype for key in KEPT if key in state} == {torch.float32}
    other = copy.deepcopy(model)
    resumed = MetaMD(other.named_parameters(), geometry, **options)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    fit(model, optimiser, 10, first=10)
    fit(other, resumed, 10, first=10)
    assert equal_parameters(model, other)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in KEPT:
            assert key not in optimiser.state[p] or torch.equal(optimiser.state[p][key], resumed.state[q][key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up_what_it_could_not_hold(dtype):
    x = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimiser = MetaMD([("x", x)], Diagonal(), metric=Online("sum", scale={"x": 1e4}))
    for _ in range(2000):
        x.grad = torch.ones_like(x)
        optimiser.step()
    assert torch.equal(optimiser.state[x]["squares"], torch.full((3,), 2000.0))


@pytest.mark.parametrize("rule", ["average", "sum"])
def test_coordinates_without_gradient_stay_where_they_are_in_half_precision(rule):
    x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    x.grad = torch.tensor([1e-4, 0.0, 1.0], dtype=torch.float16)
    MetaMD([("x", x)], Diagonal(), metric=Online(rule, scale={"x": 100.0})).step()
    torch.testing.assert_close(x.detach().float(), torch.tensor([-0.01, 0.0, -0.01]), rtol=1e-3, atol=0)


def test_the_identity_of_growing_metrics_holds_along_an_online_run():
    """Regret = 1/2 sum |u - theta_t|^2 in H_t - H_{t-1} + 1/2 sum g'H_t^-1 g - 1/2 |u - theta_{T+1}|^2 in H_T, any rule."""
    for rule in ("sum", "average"):
        task = quadratic().build(quadratic().sample(torch.Generator().manual_seed(1)))
        x, state, online = task.init()["theta"], {}, Online(rule, 0.9, scale={"theta": 1.0})
        u = torch.tensor([0.3, -0.2], dtype=torch.float64)
        before, regret, bound = torch.zeros(2).double(), 0.0, 0.0
        for t in range(30):
            g = gradient(task, {"theta": x}, task.batch(t))[1]["theta"]
            (h,) = online.metrics([g], [state])
            regret += float(g @ (x - u))
            bound += 0.5 * float(((u - x) ** 2) @ (h - before)) + 0.5 * float((g * g / h).sum())
            x, before = x - g / h, h
        assert regret == pytest.approx(bound - 0.5 * float(((u - x) ** 2) @ before), rel=1e-9)
        if rule == "sum":
            assert regret <= bound


def test_a_missing_scale_is_said_before_anything_moves():
    model = small_model()
    online = Online("sum", scale={"0.weight": 100.0, "0.bias": 100.0})
    with pytest.raises(ValueError, match=r"there is none for '2\.weight'.*; there are those of '0\.weight', '0\.bias'"):
        MetaMD(model.named_parameters(), Diagonal(), metric=online)
    known = Diagonal().bind(model[0].named_parameters("0"))
    lenient = known.with_metrics(known.log_d).bind(model.named_parameters(), missing="euclidean")
    with pytest.raises(ValueError, match=r"there is none for '2\.weight'"):
        MetaMD(model.named_parameters(), lenient, metric=online)
    optimiser = MetaMD(model[0].named_parameters("0"), Diagonal(), metric=online)
    with pytest.raises(ValueError, match=r"there is none for '2\.weight'"):
        optimiser.add_param_group({"params": list(model[2].named_parameters("2"))})
    fit(model, optimiser, 2)
    assert len(optimiser.param_groups) == 1


def test_a_frozen_tensor_needs_no_scale_until_it_is_trained():
    model = small_model()
    model[2].requires_grad_(False)
    optimiser = MetaMD(model.named_parameters(), Diagonal(), metric=Online(scale={"0.weight": 100.0, "0.bias": 100.0}))
    fit(model, optimiser, 2)
    model[2].requires_grad_(True)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"there is none for '2\.weight'"):
        fit(model, optimiser, 1)
    assert equal_parameters(model, before)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Online("mean"), 'rule must be "sum", "average", "polar" or "eigen", got'),
        (lambda: Online("polar", refresh=-1), "refresh must be a number of steps, or 0 for every one; got -1"),
        (lambda: Online(beta=1.0), "beta must lie between 0 and 1, got 1.0"),
        (lambda: Online(epsilon=0.0), "epsilon must be positive"),
        (lambda: Online(scale={"a": -1.0}), "the scale of 'a' must be positive and finite, got -1.0"),
        (lambda: Online().step_size("a"), "there is no online scale for 'a'"),
        (lambda: Usage("other"), 'metric must be "learned" or "online"'),
        (lambda: Usage(schedule="cosine"), 'schedule must be "constant" or "linear" or "quadratic" or "learned"'),
        (lambda: Usage(factor=0.0), "factor must be positive"),
        (lambda: Usage(averaging="anytime"), 'averaging must be "constant" or "tail", got \'anytime\''),
        (lambda: Usage(averaging="tail", momentum=0.9), "has no momentum"),
        (lambda: MetaMD(small_model().named_parameters(), Diagonal(), metric="online"), "learns the scales"),
        (
            lambda: MetaMD(small_model().named_parameters(), Euclidean(), metric=Online()),
            "an online metric needs a potential with coordinates",
        ),
        (lambda: prepare([], "quadratic", steps=0), "steps must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()

"""Certificates in use: options of the optimiser, saving, edits from outside, comparators, what they refuse to say."""

import copy
import io
import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from metamd import Diagonal, Euclidean, MaxDiagonal, MetaMD, PNorm
from metamd.optimiser.certificate import Sums
from metamd.potentials.base import Move
from metamd.potentials.online import Online
from tests.helpers import equal_parameters, random_basis, random_geometry, small_model, train


def recorded(model, optimiser):
    """Gradients and parameters of every step from now on, in float64."""
    steps = []

    def look(*_):
        named = list(model.named_parameters())
        steps.append({n: (p.grad.double().clone(), p.detach().double().clone()) for n, p in named if p.grad is not None})

    optimiser.register_step_pre_hook(look)
    return steps


def regret(steps, reference, rates=None):
    rates = rates or [1.0] * len(steps)
    return sum(
        s * float((g * (x - reference[n].double())).sum())
        for s, step in zip(rates, steps, strict=True)
        for n, (g, x) in step.items()
    )


def near(model, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {n: (p.detach() + 0.2 * torch.randn(p.shape, generator=g).to(p.dtype)) for n, p in model.named_parameters()}


OPTIONS = {
    "one piece": {"pieces": 1},
    "mixture": {"pieces": 3},
    "origin": {"pieces": 3, "centre": "origin"},
    "by role": {"pieces": 2, "tying": "role"},
    "by channel": {"pieces": 2, "tying": "channel"},
}
RUNS = [{}, {"momentum": 0.9}, {"exact": False}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", RUNS, ids=str)
@pytest.mark.parametrize("geometry", OPTIONS)
def test_realised_regret_is_that_of_the_gradients_used(dtype, options, geometry):
    model = small_model(dtype=dtype)
    optimiser = MetaMD(
        model.named_parameters(), random_geometry(model, **OPTIONS[geometry]), lr=0.1, certify=True, **options
    )
    steps = recorded(model, optimiser)
    train(model, optimiser, 25)
    reference = near(model)
    certificate = optimiser.certificate(reference)
    exact = dtype == torch.float64 or ("exact" in options and OPTIONS[geometry]["pieces"] > 1)
    assert certificate.realised == pytest.approx(regret(steps, reference), rel=1e-9 if exact else 1e-4, abs=1e-3)
    assert certificate.guaranteed == (certificate.uncovered == 0)
    assert certificate.realised <= certificate.identity <= certificate.bound * (1 + 1e-4) or certificate.uncovered
    assert certificate.steps == 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pieces", [1, 2])
def test_learned_coordinates(dtype, pieces):
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(27, 2)).to(dtype)
    geometry = random_basis(dict(model.named_parameters()), pieces=pieces)
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.02, weight_decay=0.1, certify=True)
    start, steps = copy.deepcopy(model), recorded(model, optimiser)
    for t in range(15):
        x = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(t)).to(dtype)
        optimiser.zero_grad()
        (model(x) - x.sum((1, 2, 3), keepdim=True)[:, :, 0, 0]).square().mean().backward()
        optimiser.step()
    certificate = optimiser.certificate(start)
    assert certificate.guaranteed
    assert certificate.realised <= certificate.identity <= certificate.bound * (1 + 1e-4)
    assert certificate.bound <= certificate.published
    if pieces == 1:
        phi = geometry

        def pulled(n, x):  # wd D x
            return 0.1 * phi.basis.out_of(n, phi.metric(n)[0].detach() * phi.basis.into(n, x))

        ridge = [{n: (g + pulled(n, x), x) for n, (g, x) in step.items()} for step in steps]
        assert certificate.realised == pytest.approx(regret(ridge, start.state_dict()), rel=1e-4)


def test_learned_coordinates_with_an_average():
    """The whole inequality from its terms: B(u || start) + 1/2 sum |lr g|^2 less the lag, with dense matrices."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    phi = random_basis({"p": p}, pieces=1)
    phi = phi.bind([("p", p)])
    eye = torch.eye(12, dtype=torch.float64).view(12, 3, 4)
    d = torch.stack([phi.basis.out_of("p", phi.metric("p")[0].detach() * phi.basis.into("p", e)).flatten() for e in eye])
    torch.testing.assert_close(d, d.T)
    scale, centre = torch.randn(2, 12, dtype=torch.float64)
    rate = 0.5 / float(torch.linalg.eigvals(torch.linalg.solve(d, (scale**2).diag())).real.max())
    lr = rate * (1 - 0.8)
    optimiser = MetaMD([("p", p)], phi, lr=lr, certify=True, momentum=0.8)
    start = z = p.detach().flatten().clone()
    u = centre
    realised = bound = losses = 0.0
    for _ in range(20):
        x = p.detach().flatten().clone()
        g = scale**2 * (x - centre)
        p.grad = g.view(3, 4).clone()
        optimiser.step()
        realised += float(g @ (x - u))
        bound += float(0.5 * rate * g @ torch.linalg.solve(d, g) - g @ (z - x))
        losses += float(0.5 * (scale * (x - centre)).square().sum())
        z = z - rate * torch.linalg.solve(d, g)
        torch.testing.assert_close(p.detach().flatten(), x + (1 - 0.8) * (z - x), rtol=1e-9, atol=1e-11)
    bound += float(0.5 * (u - start) @ d @ (u - start)) / rate
    found = optimiser.certificate([u.view(3, 4)])
    assert found.realised == pytest.approx(realised, rel=1e-9)
    assert found.bound == pytest.approx(bound, rel=1e-9)
    assert losses <= found.realised <= found.bound


def test_the_comparison_above_rejects_a_telescoped_sum_of_half_precision():
    """Where bfloat16 swallows every step, the parameters say that nothing happened; the kept sum knows better."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimiser = MetaMD([p], Euclidean(), lr=1e-4, certify=True)
    for _ in range(100):
        p.grad = torch.full((4,), 0.5, dtype=torch.bfloat16)
        optimiser.step()
    assert torch.equal(p.detach(), torch.ones(4, dtype=torch.bfloat16))
    certificate = optimiser.certificate([torch.zeros(4)])
    assert certificate.realised == pytest.approx(100 * 0.5 * 4, rel=1e-12)
    del optimiser.state[p]["certificate_sum"]
    assert optimiser.certificate([torch.zeros(4)]).realised == pytest.approx(0)


def test_sums_over_100_000_steps_of_bfloat16_are_not_lost():
    """The largest bfloat16 sum of ones is 256; a float32 sum of these products would be off in the fifth digit."""
    p = nn.Parameter(torch.tensor([1.0, -3.0], dtype=torch.bfloat16))
    potential, store = Diagonal(tying="tensor").bind({"p": p}), {}
    sums = Sums(potential=potential.fixed({"p": torch.ones(1, 1)}))
    grads = [torch.tensor([1.0, k], dtype=torch.bfloat16) for k in (0.333984375, 3.015625)]
    for t in range(100_000):
        sums.observe(np.ones(1), {"p": Move(grads[t % 2], 1e-6)}, {"p": p}, {"p": store})
    assert sums.steps == 100_000
    assert torch.allclose(store["certificate_sum"], 5e4 * 1e-6 * (grads[0].double() + grads[1].double()), rtol=1e-7)
    energy = 5e4 * 1e-12 * sum(float((g.double() ** 2).sum()) for g in grads)
    assert sums.rows["p"].energy == pytest.approx(energy, rel=1e-6)


# saving


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{"pieces": 1}, {"pieces": 3}, {"pieces": 3, "centre": "origin"}], ids=str)
@pytest.mark.parametrize("kind", [{}, {"momentum": 0.9}, {"exact": False}], ids=str)
def test_a_resumed_run_has_the_certificate_of_an_uninterrupted_one(dtype, options, kind):
    model = small_model(dtype=dtype)
    geometry = random_geometry(model, **options)
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.2, weight_decay=0.01, certify=True, **kind)
    train(model, optimiser, 15)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small_model(seed=9, dtype=dtype)
    resumed = MetaMD(other.named_parameters(), geometry, certify=True, **kind)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimiser"])
    reference = near(model)
    assert resumed.certificate(reference) == optimiser.certificate(reference)
    train(model, optimiser, 15, first=15)
    train(other, resumed, 15, first=15)
    assert equal_parameters(model, other)
    assert resumed.certificate(reference) == optimiser.certificate(reference)
    assert resumed.certificate(reference).steps == 30


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_with_the_same_certificate(copier):
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.2, certify=True)
    train(model, optimiser, 10)
    other, copied = copier((model, optimiser))
    train(model, optimiser, 10, first=10)
    reference = near(model)
    assert copied.certificate(reference).steps == 10
    train(other, copied, 10, first=10)
    assert copied.certificate(reference) == optimiser.certificate(reference)


def test_a_run_continued_from_a_state_dict_without_sums_begins_again():
    model = small_model()
    plain = MetaMD(model.named_parameters(), random_geometry(model), lr=0.2)
    train(model, plain, 10)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.2, certify=True)
    optimiser.load_state_dict(plain.state_dict())
    train(model, optimiser, 5, first=10)
    certificate = optimiser.certificate(near(model))
    assert (certificate.steps, certificate.restarts, certificate.guaranteed) == (5, 1, True)
    assert "without certify=True" in str(certificate)
    other = MetaMD(model.named_parameters(), random_geometry(model), lr=0.2, certify=True, exact=False)
    other.load_state_dict(optimiser.state_dict())
    train(model, other, 5, first=15)
    assert "the run was continued with exact=False" in str(other.certificate(near(model)))
    assert "certificate" in optimiser.state_dict()["param_groups"][0]
    plain.load_state_dict(optimiser.state_dict())
    assert "certificate" not in plain.state_dict()["param_groups"][0], "the sums of earlier steps would be taken for all"


def test_online_metrics_have_no_certificate():
    model = small_model()
    online = Online("sum", scale={n: 20.0 for n, _ in model.named_parameters()})
    with pytest.raises(ValueError, match=r"certify=True covers the learned metric, .* got an online metric"):
        MetaMD(model.named_parameters(), Diagonal(), metric=online, certify=True)
    optimiser = MetaMD(model.named_parameters(), Diagonal(), lr=0.1, certify=True)
    train(model, optimiser, 2)
    state = optimiser.state_dict()
    for group in state["param_groups"]:  # as the version that certified such runs wrote it
        group["certificate"] = json.dumps({**json.loads(group["certificate"]), "rule": "sum 0123", "momenta": [0.0]})
    plain = MetaMD(model.named_parameters(), Diagonal(), lr=0.1)
    plain.load_state_dict(state)
    train(model, plain, 1)
    with pytest.raises(ValueError, match="has the certificate of an online metric"):
        optimiser.load_state_dict(state)
    train(model, optimiser, 1)  # it is as it was


# edits from outside


@pytest.mark.parametrize("options", [{"pieces": 1}, {"pieces": 3}, {"pieces": 3, "centre": "origin"}], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_edit_from_outside_restarts_the_certificate_and_says_so(options, momentum):
    model = small_model(dtype=torch.float64)
    geometry = random_geometry(model, **options)
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.1, momentum=momentum, certify=True)
    train(model, optimiser, 10)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    steps = recorded(model, optimiser)
    train(model, optimiser, 12, first=10)
    reference = near(model)
    certificate = optimiser.certificate(reference)
    assert (certificate.steps, certificate.restarts, certificate.guaranteed) == (12, 1, True)
    assert certificate.realised == pytest.approx(regret(steps, reference), rel=1e-9)
    assert "restarted 1 times, last because a parameter was changed or added from outside" in str(certificate)


def test_an_edit_that_torch_does_not_count_is_found_in_the_sums():
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model, pieces=1), lr=0.1, certify=True)
    train(model, optimiser, 10)
    assert optimiser.certificate(near(model)).guaranteed
    model[0].weight.data = model[0].weight.data * 1.5
    train(model, optimiser, 10, first=10)
    certificate = optimiser.certificate(near(model))
    assert not certificate.guaranteed
    assert "no guarantee: start, end and gradients of the run do not fit together" in str(certificate)


def test_parameters_changed_after_the_last_step_are_refused():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.1, certify=True)
    train(model, optimiser, 5)
    best = copy.deepcopy(model.state_dict())
    assert optimiser.certificate(best).steps == 5
    model.load_state_dict({n: x + 1 for n, x in best.items()})
    with pytest.raises(ValueError, match=r"'0\.weight' was changed after the last step"):
        optimiser.certificate(best)


# comparators


def test_a_reference_may_be_given_in_several_ways():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.1, certify=True)
    train(model, optimiser, 5)
    other = small_model(seed=1)
    first = optimiser.certificate(other.state_dict())
    wrapped = {f"module._orig_mod.{n}": x for n, x in other.state_dict().items()} | {"extra": torch.zeros(1)}
    for reference in (other, list(other.parameters()), other.parameters(), wrapped):
        assert optimiser.certificate(reference) == first
    with pytest.raises(ValueError, match=r"has no tensor '0\.bias'; it has '0\.weight'"):
        optimiser.certificate({"0.weight": other[0].weight})
    with pytest.raises(ValueError, match="has 1 tensors, but the optimiser has 4 parameters"):
        optimiser.certificate([other[0].weight])
    with pytest.raises(ValueError, match=r"'0\.weight' in shape \(3,\), but the parameter has \(8, 5\)"):
        optimiser.certificate({**other.state_dict(), "0.weight": torch.zeros(3)})
    for wrong in (3, "model.pt", [1.0, 2.0]):
        with pytest.raises(TypeError, match=r"a reference must be a state_dict, a module, or tensors"):
            optimiser.certificate(wrong)


def test_what_is_missing_is_said():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.1, certify=True)
    with pytest.raises(ValueError, match="no step was taken yet"):
        optimiser.certificate(model)
    train(model, optimiser, 1)
    for arguments in ({}, {"reference": model, "radius": 1.0}):
        with pytest.raises(ValueError, match="a reference or a radius, and not both"):
            optimiser.certificate(**arguments)
    with pytest.raises(ValueError, match="radius must be finite and not negative, got -1"):
        optimiser.certificate(radius=-1)
    with pytest.raises(ValueError, match="Build MetaMD with certify=True"):
        MetaMD(model.named_parameters(), Euclidean()).certificate(model)
    with pytest.raises(ValueError, match=r"potential of quadratic forms .* got PNorm"):
        MetaMD(model.named_parameters(), PNorm(1.5), certify=True)


@pytest.mark.parametrize("options", [{"pieces": 1}, {"pieces": 3}, {"pieces": 3, "centre": "origin"}], ids=str)
def test_a_radius_covers_every_comparator_within_it(options):
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model, **options), lr=0.1, certify=True)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimiser, 20)
    phi = optimiser.potential
    directions = [near(model, seed) for seed in range(20)]
    rho = max(float(2 * phi.divergence(u, start).detach()) ** 0.5 for u in directions)
    ball = optimiser.certificate(radius=rho)
    assert ball.guaranteed
    assert ball.identity is None
    assert "every u within the radius" in str(ball)
    singles = [optimiser.certificate(u) for u in directions]
    assert max(c.realised for c in singles) <= ball.realised
    assert max(c.bound for c in singles) <= ball.bound * (1 + 1e-12)
    if options["pieces"] == 1:
        # The worst comparator is known: start - rho D^-1 sum g / |sum g|. It attains the largest regret.
        total = {n: phi.metric(n)[0] * (start[n] - p.detach()) for n, p in model.named_parameters()}
        length = sum(float((s**2 / phi.metric(n)[0]).sum()) for n, s in total.items()) ** 0.5
        worst = {n: start[n] - rho / length * s / phi.metric(n)[0] for n, s in total.items()}
        assert optimiser.certificate(worst).realised == pytest.approx(ball.realised, rel=1e-10)
        assert ball.realised <= ball.bound


# the variants


def grouped(model, lrs, pieces):
    named = list(model.named_parameters())
    groups = [{"params": named[:2], "lr": lrs[0]}, {"params": named[2:], "lr": lrs[1]}]
    return MetaMD(groups, random_geometry(model, pieces=pieces), certify=True)


def test_rates_of_groups_are_metrics_for_one_piece_and_scales_of_gradients_for_several():
    model = small_model(dtype=torch.float64)
    one = grouped(model, (0.1, 0.3), 1)
    steps = recorded(model, one)
    train(model, one, 15)
    reference = near(model)
    certificate = one.certificate(reference)
    assert certificate.realised == pytest.approx(regret(steps, reference), rel=1e-9)
    assert "bounds the regret of l when the losses are convex" in certificate.holds
    model = small_model(dtype=torch.float64)
    several = grouped(model, (0.1, 0.3), 3)
    steps = recorded(model, several)
    train(model, several, 15)
    reference = near(model)
    certificate = several.certificate(reference)
    scaled = [{n: (g * (1 / 3 if n.startswith("0.") else 1.0), x) for n, (g, x) in step.items()} for step in steps]
    assert certificate.realised == pytest.approx(regret(scaled, reference), rel=1e-9)
    assert certificate.guaranteed
    assert "not the regret of a loss" in certificate.holds
    assert "scaled" in certificate.form


def test_schedules_weigh_the_steps():
    model = small_model(dtype=torch.float64)
    optimiser = grouped(model, (0.1, 0.3), 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda t: max(0.0, min(t, 10 - t)) / 5)  # begins and ends at 0
    steps, rates = recorded(model, optimiser), []
    for t in range(11):
        rates.append(optimiser.param_groups[0]["lr"])
        train(model, optimiser, 1, first=t)
        schedule.step()
    reference = near(model)
    certificate = optimiser.certificate(reference)
    weights = [r / np.mean(rates[1:-1]) for r in rates]
    assert certificate.steps == 9
    assert certificate.realised == pytest.approx(regret(steps, reference, weights), rel=1e-9)
    assert "weighted by lr_t / mean lr" in certificate.form
    assert "Unweighted, B(u || z_t) would be needed" in certificate.holds
    optimiser.param_groups[0]["lr"] = 1.0  # one group alone leaves the common schedule
    train(model, optimiser, 1, first=11)
    assert "not the regret of a loss" in optimiser.certificate(near(model)).holds


def test_maximising_certifies_the_negative_loss():
    p = nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.float64))
    optimiser = MetaMD([p], MaxDiagonal(2), lr=0.1, maximize=True, certify=True)
    reference, total = torch.ones(2, dtype=torch.float64), 0.0
    for _ in range(10):
        optimiser.zero_grad()
        gain = -(p - reference).square().sum()
        gain.backward()
        total -= gain.item()
        optimiser.step()
    certificate = optimiser.certificate([reference])
    assert total <= certificate.realised <= certificate.bound
    assert "regret of -l" in certificate.holds


def test_weight_decay_is_part_of_what_is_certified():
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model, pieces=1), lr=0.1, weight_decay=0.5, certify=True)
    steps = recorded(model, optimiser)
    train(model, optimiser, 20)
    reference, d = near(model), {n: optimiser.potential.metric(n)[0] for n, _ in model.named_parameters()}
    ridge = [{n: (g + 0.5 * d[n] * x, x) for n, (g, x) in step.items()} for step in steps]
    certificate = optimiser.certificate(reference)
    assert certificate.realised == pytest.approx(regret(ridge, reference), rel=1e-9)
    assert "l + wd/2 |theta|^2_D" in certificate.holds


@pytest.mark.parametrize(
    ("options", "rate", "formula"),
    [
        ({"momentum": 0.9}, 0.2, "B(u || start)/eta + eta/2 sum |g_t|^2_(t,*) + lag"),
        ({}, 0.02, "B(u || start)/lr + lr/2 sum |g_t|^2_(t,*)"),
    ],
)
def test_the_printed_formula_gives_the_printed_bound(options, rate, formula):
    curvature = torch.tensor([1.0, 3.0], dtype=torch.float64)
    x = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimiser = MetaMD([("x", x)], Diagonal(), lr=0.02, certify=True, **options)
    start, squares, lag = x.detach().clone(), 0.0, 0.0
    for _ in range(20):
        optimiser.zero_grad()
        (curvature * x * x / 2).sum().backward()
        z = optimiser.state[x].get("z", x.detach())
        squares, lag = squares + float(x.grad @ x.grad), lag + float(x.grad @ (x.detach() - z))
        optimiser.step()
    certificate = optimiser.certificate([torch.zeros(2, dtype=torch.float64)])
    assert certificate.lag == pytest.approx(lag)
    bound = float(start @ start) / 2 / rate + rate / 2 * squares + lag
    printed = str(certificate).splitlines()
    words, number = printed[1].split(" = ")
    assert words.split(maxsplit=1)[1].rstrip() == formula
    assert float(number) == pytest.approx(bound, rel=1e-4)
    assert any("eta = lr/(1 - momentum)" in line for line in printed) == ("eta" in formula)
    assert any(line.startswith("  lag  ") for line in printed) == ("lag" in formula)


def test_frozen_late_and_absent_tensors():
    for centre in ("start", "origin"):
        model = small_model(dtype=torch.float64)
        model[0].requires_grad_(False)
        optimiser = MetaMD(model.named_parameters(), random_geometry(model, centre=centre), lr=0.1, certify=True)
        steps = recorded(model, optimiser)
        train(model, optimiser, 10)
        reference = near(model)
        certificate = optimiser.certificate(reference)
        assert certificate.realised == pytest.approx(regret(steps, reference), rel=1e-9)
        assert certificate.guaranteed
        assert sum(p.bound for p in certificate.per_layer.values()) == pytest.approx(certificate.bound)
        model[0].requires_grad_(True)
        train(model, optimiser, 10, first=10)
        certificate = optimiser.certificate(near(model))
        assert certificate.guaranteed
        # Centred at the start, a tensor that joins stands at the centre; elsewhere it shifts the forms.
        assert certificate.steps == (20 if centre == "start" else 10)
        assert ("got its first gradient after the run had begun" in str(certificate)) == (centre == "origin")


def test_pieces_that_change_while_a_tensor_is_absent_restart_the_certificate():
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.3, certify=True)
    train(model, optimiser, 20)
    assert (optimiser._active.weights > 0).sum() > 1
    x = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimiser.zero_grad()
    model(x).square().mean().backward()
    model[0].bias.grad = None
    optimiser.step()
    train(model, optimiser, 3, first=20)
    certificate = optimiser.certificate(near(model))
    assert (certificate.steps, certificate.restarts, certificate.guaranteed) == (3, 1, True)
    assert "had no gradient" in certificate.restarted


def test_a_tensor_that_joins_off_centre_restarts_the_certificate():
    """After a restart the centre is not where the tensors stand, and their part of y moves with the weights."""
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.3, certify=True)
    train(model, optimiser, 10)
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    model[2].requires_grad_(False)
    optimiser.zero_grad()
    train(model, optimiser, 5, first=10)
    assert (optimiser.certificate(near(model)).steps, optimiser.certificate(near(model)).guaranteed) == (5, True)
    model[2].requires_grad_(True)
    train(model, optimiser, 5, first=15)
    certificate = optimiser.certificate(near(model))
    assert (certificate.steps, certificate.restarts, certificate.guaranteed) == (5, 2, True)


def test_what_a_convex_loss_has_to_do_with_it_is_said_for_partial_runs_and_games():
    model = small_model(dtype=torch.float64)
    named = list(model.named_parameters())
    model[0].requires_grad_(False)
    optimiser = MetaMD(named, random_geometry(model, pieces=1), lr=0.1, certify=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.9)
    for t in range(4):
        model[0].requires_grad_(t > 1)
        train(model, optimiser, 1, first=t)
        schedule.step()
    certificate = optimiser.certificate(near(model))
    assert "did not depend on a tensor while it had no gradient" in certificate.holds
    assert "scaled" not in certificate.form
    game = MetaMD(
        [{"params": named[:2]}, {"params": named[2:], "maximize": True}], random_geometry(model), 0.1, certify=True
    )
    train(model, game, 3)
    assert "a game, not the regret of a loss" in game.certificate(near(model)).holds


def test_clipping_safeguard_and_added_groups():
    model, extra = small_model(dtype=torch.float64), nn.Linear(3, 1).double()
    optimiser = MetaMD(model.named_parameters(), MaxDiagonal(2), lr=0.1, certify=True, safeguard=True)
    steps = recorded(model, optimiser)
    for t in range(10):
        optimiser.zero_grad()
        model(torch.randn(8, 5, dtype=torch.float64)).square().mean().mul(10.0**t).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimiser.step()
    certificate = optimiser.certificate(near(model))
    assert certificate.guaranteed
    assert certificate.realised <= certificate.bound
    assert all(sum(float((g * g).sum()) for g, _ in step.values()) <= 9.001 for step in steps)
    optimiser.add_param_group({"params": [(f"extra.{n}", p) for n, p in extra.named_parameters()]})
    extra(torch.ones(3, dtype=torch.float64)).sum().backward()
    optimiser.step()
    named = {**dict(model.named_parameters()), **{f"extra.{n}": p for n, p in extra.named_parameters()}}
    assert optimiser.certificate(named).guaranteed


def test_euclidean_is_one_metric_of_ones():
    certificates = []
    for geometry in (Euclidean(), Diagonal()):
        model = small_model(dtype=torch.float64)
        optimiser = MetaMD(model.named_parameters(), geometry, lr=0.1, weight_decay=0.1, certify=True)
        train(model, optimiser, 10)
        certificates.append(optimiser.certificate(small_model(seed=2, dtype=torch.float64)))
    one, two = certificates
    assert one.bound == pytest.approx(two.bound, rel=1e-12)
    assert one.realised == pytest.approx(two.realised, rel=1e-12)
    assert one.published == pytest.approx(one.bound)  # all metrics are the smallest


def test_fused_steps_have_the_certificate_of_plain_ones():
    found = []
    for fused in (False, True):
        model = small_model(dtype=torch.float64)
        optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.2, fused=fused, certify=True)
        train(model, optimiser, 40)
        found.append(optimiser.certificate(small_model(seed=2, dtype=torch.float64)))
    plain, fused = found
    assert fused.guaranteed
    assert fused.bound == pytest.approx(plain.bound, rel=1e-6)
    assert fused.realised == pytest.approx(plain.realised, rel=1e-6)


def test_large_tensors_are_summed_in_chunks():
    p = nn.Parameter(torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0)))
    g = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(1))
    optimiser = MetaMD([p], MaxDiagonal(2), lr=0.5, certify=True)
    start = p.detach().clone()
    for _ in range(2):
        p.grad = g.clone()
        optimiser.step()
    certificate = optimiser.certificate([start])
    assert certificate.realised == pytest.approx(-0.5 * float(g.double().square().sum()), rel=1e-6)
    assert certificate.bound == pytest.approx(0.5 * float(g.double().square().sum()), rel=1e-6)


def test_it_prints_what_is_guaranteed():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.1, certify=True)
    train(model, optimiser, 30)
    text = str(optimiser.certificate(near(model)))
    assert text.startswith("regret certificate (exact mirror descent, T = 30)\n")
    for part in (
        "bound      B(u || start)/lr + lr/2 sum |g_t|^2_(t,*)",
        "realised   sum <g_t, x_t - u>",
        "ratio 0.",
        "steps not covered (piece changed under the paper's step): 0",
        "holds for u, any gradients; bounds the regret of l when the losses are convex",
    ):
        assert part in text

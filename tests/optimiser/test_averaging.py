"""Momentum as primal averaging: against torch's own, against slow recursions, and the inequalities that it keeps."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch

from metamd import Diagonal, Euclidean, MaxDiagonal, MetaMD, NegativeEntropy, PNorm
from metamd.optimiser.averaging import TAIL
from tests.helpers import equal_parameters, random_geometry, small_model, train

KINDS = [{"momentum": 0.9}, {"averaging": "tail"}]


def distance(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_euclidean_with_momentum_is_torchs_sgd_with_momentum(momentum):
    ours, theirs = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    train(ours, MetaMD(ours.named_parameters(), Euclidean(), lr=0.05, momentum=momentum), 60)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=momentum), 60)
    assert distance(ours, theirs) < 1e-12


def test_under_a_schedule_every_gradient_keeps_the_rate_of_its_step_and_decay_is_taken_at_the_iterate():
    ours, other, theirs = (small_model(dtype=torch.float64) for _ in range(3))
    optimiser = MetaMD(ours.named_parameters(), Euclidean(), lr=0.05, momentum=0.9, weight_decay=0.1)

    class Velocities(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for p in other.parameters():
                v = self.state[p].get("v", torch.zeros_like(p))
                z = p + 9 * v  # x + m/(1 - m) v
                self.state[p]["v"] = v = 0.9 * v - self.param_groups[0]["lr"] * (p.grad + 0.1 * z)
                p.add_(v)

    torchs = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for model, opt in ((ours, optimiser), (other, Velocities(other.parameters(), {})), (theirs, torchs)):
        for first, lr in ((0, 0.05), (10, 0.005)):
            opt.param_groups[0]["lr"] = lr
            train(model, opt, 10, first=first)
    assert distance(ours, other) < 1e-12
    assert distance(ours, theirs) > 1e-3


def test_the_comparison_with_torch_rejects_the_rate_of_the_iterate():
    ours, theirs = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    train(ours, MetaMD(ours.named_parameters(), Euclidean(), lr=0.005, momentum=0.9), 60)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), 60)
    assert distance(ours, theirs) > 1e-3


def test_one_piece_with_momentum_is_the_heavy_ball_in_its_metric():
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    geometry = random_geometry(model, pieces=1)
    train(model, MetaMD(model.named_parameters(), geometry, lr=0.02, momentum=0.9), 40)
    metrics = {n: geometry.bind(list(other.named_parameters())).metric(n)[0].detach() for n, _ in other.named_parameters()}

    class HeavyBall(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for n, p in other.named_parameters():
                v = self.state[p].get("v", torch.zeros_like(p))
                self.state[p]["v"] = v = 0.9 * v - 0.02 * p.grad / metrics[n]
                p.add_(v)

    train(other, HeavyBall(other.parameters(), {}), 40)
    assert distance(model, other) < 1e-12


def _entropic(z, g, rate):
    w = z * np.exp(-rate * g)
    return w / w.sum()


def _p_norm(z, g, rate, p=1.5):
    """Through the dual point: |z|^(p-1) sign(z) |z|_p^(2-p) - rate g, and back with the conjugate exponent."""

    def mirrored(x, p):
        return np.sign(x) * np.abs(x) ** (p - 1) * (np.abs(x) ** p).sum() ** ((2 - p) / p)

    return mirrored(mirrored(z, p) - rate * g, p / (p - 1))


@pytest.mark.parametrize(
    ("phi", "start", "move"),
    [
        (NegativeEntropy(), [0.2, 0.5, 0.3], _entropic),
        (NegativeEntropy("orthant"), [0.2, 1.5, 0.3], lambda z, g, rate: z * np.exp(-rate * g)),
        (PNorm(1.5), [0.2, -1.5, 0.3], _p_norm),
    ],
    ids=["simplex", "orthant", "p-norm"],
)
def test_momentum_of_the_classical_potentials_is_the_recursion_of_primal_averaging(phi, start, move):
    """x+ = m x + (1 - m) z+, where z takes the mirror step of rate lr/(1 - m) with the gradient at x."""
    m, lr, target = 0.8, 0.04, np.array([0.6, 0.1, 0.3])
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimiser = MetaMD([("p", p)], phi, lr=lr, momentum=m)
    x = z = np.array(start)
    for _ in range(30):
        p.grad = p.detach() - torch.from_numpy(target)
        optimiser.step()
        z = move(z, x - target, lr / (1 - m))
        x = m * x + (1 - m) * z
        np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-10, atol=1e-12)
    assert np.abs(x - z).max() > 1e-4, "an average that is its iterate shows nothing"


def test_the_default_rate_moves_the_iterate_by_the_learned_steps():
    model, other = small_model(), small_model()
    geometry = random_geometry(model)
    assert MetaMD(model.named_parameters(), geometry).param_groups[0]["lr"] == 1.0
    optimiser = MetaMD(model.named_parameters(), geometry, momentum=0.75)
    assert optimiser.param_groups[0]["lr"] == 0.25
    plain = MetaMD(other.named_parameters(), geometry)
    train(model, optimiser, 1)
    train(other, plain, 1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(optimiser.state[p]["z"], q.detach())


def test_groups_with_a_momentum_of_their_own_take_the_learned_steps_too():
    model = small_model()
    weight = [("2.weight", model[2].weight)]
    groups = [{"params": list(model[0].named_parameters("0"))}, {"params": weight, "momentum": 0.0}]
    optimiser = MetaMD(groups, Diagonal(), momentum=0.9)
    optimiser.add_param_group({"params": [("2.bias", model[2].bias)], "momentum": 0.5})
    assert [group["lr"] for group in optimiser.param_groups] == pytest.approx([0.1, 1.0, 0.5])
    assert [g["lr"] / (1 - g["momentum"]) for g in optimiser.param_groups] == pytest.approx([1.0] * 3)
    copied = copy.deepcopy(optimiser)
    copied.add_param_group({"params": [("more", torch.nn.Parameter(torch.zeros(1)))], "momentum": 0.2})
    assert copied.param_groups[-1]["lr"] == pytest.approx(0.8)
    chosen = MetaMD([{"params": weight, "momentum": 0.0}], Diagonal(), lr=0.3, momentum=0.9)
    assert chosen.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("options", KINDS)
def test_the_parameters_are_the_average_that_the_recursion_gives(options, pieces):
    """By brute force: every iterate is kept, and the average is recomputed from all of them."""
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model, pieces), lr=0.1, **options)
    (p, *_) = model.parameters()
    iterates, beta = [p.detach().clone()], options.get("momentum", 0.0)
    for t in range(1, 31):
        train(model, optimiser, 1, first=t)
        iterates.append(optimiser.state[p].get("z", p).detach().clone())
        if options.get("averaging") == "tail":  # the number of ways to choose k + 1 of t + k, the largest of which is s + k
            shares = [0.0, *(math.comb(s + TAIL - 1, TAIL) / math.comb(t + TAIL, TAIL + 1) for s in range(1, t + 1))]
        else:
            shares = [beta**t, *((1 - beta) * beta ** (t - s) for s in range(1, t + 1))]
        average = sum(c * z for c, z in zip(shares, iterates, strict=True))
        point = iterates[-1] if options.get("averaging") == "tail" else average
        torch.testing.assert_close(p.detach(), point, rtol=1e-10, atol=1e-12)
    optimiser.eval()
    torch.testing.assert_close(p.detach(), average, rtol=1e-10, atol=1e-12)
    assert float((average - torch.stack(iterates).mean(0)).abs().max()) > 1e-6 or options.get("averaging") != "tail"
    optimiser.train()
    torch.testing.assert_close(p.detach(), point, rtol=1e-10, atol=1e-12)


def test_a_tail_average_takes_part_in_nothing():
    """The iterates are those of plain steps, bit for bit, whether somebody looks at the average or not."""
    plain, judged = small_model(), small_model()
    train(plain, MetaMD(plain.named_parameters(), Euclidean(), lr=0.05), 20)
    optimiser = MetaMD(judged.named_parameters(), Euclidean(), lr=0.05, averaging="tail")
    optimiser.eval()  # before the first step there is nothing to average
    optimiser.train()
    for t in range(20):
        train(judged, optimiser, 1, first=t)
        optimiser.eval()
        optimiser.eval()
        optimiser.train()
    assert equal_parameters(plain, judged)
    optimiser.eval()
    assert not equal_parameters(plain, judged)


def test_a_tail_average_is_nearer_to_the_minimum_where_noise_keeps_iterates_away():
    """x^2/2 with noisy gradients at a rate of 1/2: iterates have a variance of 1/3, by hand eta/(2 - eta)."""
    g = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(torch.ones(4000, dtype=torch.float64))
    optimiser = MetaMD([x], Euclidean(), lr=0.5, averaging="tail")
    for _ in range(200):
        x.grad = x.detach() + torch.randn(4000, generator=g, dtype=torch.float64)
        optimiser.step()
    assert float(x.detach().square().mean()) == pytest.approx(1 / 3, rel=0.1)
    optimiser.eval()
    assert float(x.detach().square().mean()) < 0.1


def test_a_tail_average_of_half_precision_is_kept_in_float32():
    """In bfloat16 an average of steps that are smaller than its rounding would stand still."""
    x = torch.nn.Parameter(torch.full((3,), 1.0, dtype=torch.bfloat16))
    optimiser = MetaMD([x], Euclidean(), lr=2.0**-8, averaging="tail")
    seen = []
    for _ in range(40):
        x.grad = torch.ones_like(x)
        optimiser.step()
        seen.append(float(x.detach()[0]))
    mean = optimiser.state[x]["mean"]
    shares = [math.comb(s + TAIL - 1, TAIL) / math.comb(40 + TAIL, TAIL + 1) for s in range(1, 41)]
    assert mean.dtype == torch.float32
    torch.testing.assert_close(
        mean, torch.full((3,), sum(c * v for c, v in zip(shares, seen, strict=True))), rtol=1e-5, atol=0
    )


def test_the_certificate_of_a_run_with_a_tail_average_is_that_of_its_iterates():
    f, u = convex(0)
    found = []
    for options in ({}, {"averaging": "tail"}):
        x = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
        optimiser = MetaMD([("x", x)], Diagonal(), lr=0.1, certify=True, **options)
        for _ in range(10):
            optimiser.zero_grad()
            f(x).backward()
            optimiser.step()
        found.append(optimiser.certificate([u]))
        if options:
            optimiser.eval()
            average = x.detach().clone()
            found.append(optimiser.certificate([u]))
            assert torch.equal(x, average), "the parameters are as they were"
    assert found[0].mirror == found[1].mirror == found[2].mirror
    assert found[0].realised == found[1].realised == found[2].realised <= found[0].mirror.bound


@pytest.mark.parametrize("options", KINDS)
def test_a_cycle_of_momenta_runs_and_resumes_bit_exactly(options):
    model, steps = small_model(), 20
    optimiser = MetaMD(model.named_parameters(), Diagonal(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=steps)
    for t in range(steps - 1):
        train(model, optimiser, 1, first=t)
        schedule.step()
        if t == 10:
            other = copy.deepcopy(model)
            resumed = MetaMD(other.named_parameters(), Diagonal(), lr=0.1, **options)
            cycle = torch.optim.lr_scheduler.OneCycleLR(resumed, 0.1, total_steps=steps)
            resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
            cycle.load_state_dict(schedule.state_dict())
        elif t > 10:
            train(other, resumed, 1, first=t)
            cycle.step()
    optimiser.eval()
    resumed.eval()
    assert equal_parameters(model, other)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("momentum", [1.0, -0.1, 1.5])
def test_a_momentum_without_an_average_is_refused_before_anything_moves(momentum):
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), Diagonal(), lr=0.1, momentum=0.9)
    train(model, optimiser, 3)
    before = copy.deepcopy(model)
    optimiser.param_groups[0]["momentum"] = momentum
    with pytest.raises(ValueError, match="must be"):
        train(model, optimiser, 1)
    assert equal_parameters(model, before)


def convex(seed, dimension=6):
    """A least-squares loss and its minimiser."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(2 * dimension, dimension, generator=g, dtype=torch.float64)
    b = torch.randn(2 * dimension, generator=g, dtype=torch.float64)
    solution = torch.linalg.lstsq(a, b[:, None]).solution[:, 0]
    return lambda x: 0.5 * (a @ x - b).square().mean(), solution


def bounded_run(seed, steps=40, **options):
    """f(x_1) .. f(x_T), f(u), and B(u||z_1)/eta + eta/2 sum g'D(w)^-1 g of a run in a random mixture."""
    f, u = convex(seed)
    x = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    fresh = MaxDiagonal(3, centre="origin").bind({"x": x})
    g = torch.Generator().manual_seed(seed)
    phi = fresh.with_metrics({"x": 0.7 * torch.randn(3, 6, generator=g, dtype=torch.float64)}).bind({"x": x})
    optimiser = MetaMD([("x", x)], phi, **options)
    momentum = options.get("momentum", 0.0)
    eta = options["lr"] / (1 - momentum)
    bound, losses = float(phi.divergence({"x": u}, {"x": x.detach()}).detach()) / eta, []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = f(x)
        loss.backward()
        losses.append(float(loss.detach()))
        w = optimiser._active.weights if optimiser._active else phi.activate({"x": x.detach()}).weights
        d = torch.tensor(w) @ phi.metric("x").detach()
        bound += eta / 2 * float((x.grad.square() / d).sum())
        optimiser.step()
    return losses, float(f(u)), bound


def test_constant_momentum_keeps_its_inequality_on_convex_losses_and_needs_the_extra_term():
    short = []
    for seed in range(60):
        beta = (0.5, 0.9, 0.99)[seed % 3]
        losses, best, bound = bounded_run(seed, lr=(0.1, 1.0, 1.0, 3.0)[seed % 4] * (1 - beta), momentum=beta)
        regret = sum(loss - best for loss in losses)
        assert regret + beta / (1 - beta) * (losses[-1] - losses[0]) <= bound * (1 + 1e-9)
        short.append(regret <= bound)
    assert not all(short), "the term beta/(1-beta)(f(x_T) - f(x_1)) could be dropped: the runs are too tame to test it"


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_and_copies_are_bit_exact(options, dtype):
    model = small_model(dtype=dtype)
    geometry = random_geometry(model)
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.2, weight_decay=0.01, **options)
    train(model, optimiser, 20)
    optimiser.eval()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small_model(seed=9, dtype=dtype)
    resumed = MetaMD(other.named_parameters(), geometry, lr=99.0, **options)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimiser"])
    twins = [(other, resumed), copy.deepcopy((model, optimiser)), pickle.loads(pickle.dumps((model, optimiser)))]
    for m, o in [(model, optimiser), *twins]:
        o.train()
        train(m, o, 20, first=20)
    assert all(equal_parameters(model, m) for m, _ in twins)
    for _, o in [(model, optimiser), *twins]:
        o.eval()
    assert all(equal_parameters(model, m) for m, _ in twins)
    if "mean" in (kept := optimiser.state[next(model.parameters())]):
        means = [o.state[next(m.parameters())]["mean"] for m, o in twins]
        assert all(torch.equal(kept["mean"], mean) for mean in means), "not rounded to half precision on the way"


def test_a_state_dict_from_before_momentum_still_loads():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), Diagonal(), lr=0.1)
    train(model, optimiser, 5)
    old = optimiser.state_dict()
    for group in old["param_groups"]:
        for key in ("momentum", "training"):
            del group[key]
    other = copy.deepcopy(model)
    resumed = MetaMD(other.named_parameters(), Diagonal(), lr=0.1)
    resumed.load_state_dict(old)
    train(model, optimiser, 5, first=5)
    train(other, resumed, 5, first=5)
    assert equal_parameters(model, other)


@pytest.mark.parametrize("options", KINDS)
def test_after_an_outside_edit_the_average_begins_again_there(options):
    model, other = small_model(), small_model(seed=5)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model, pieces=1), lr=0.1, **options)
    train(model, optimiser, 20)
    model.load_state_dict(other.state_dict())
    fresh = MetaMD(other.named_parameters(), random_geometry(model, pieces=1), lr=0.1, **options)
    train(model, optimiser, 10, first=20)
    train(other, fresh, 10, first=20)
    assert equal_parameters(model, other)
    optimiser.eval()
    fresh.eval()
    assert equal_parameters(model, other)


@pytest.mark.parametrize("resumed", [False, True])
def test_what_is_loaded_in_eval_mode_is_where_training_goes_on(resumed):
    """Back to the best parameters so far, say: the iterates of before do not come back."""
    model, other = small_model(), small_model(seed=5)
    geometry, options = random_geometry(model, pieces=1), {"lr": 0.1, "averaging": "tail"}
    optimiser = MetaMD(model.named_parameters(), geometry, **options)
    train(model, optimiser, 20)
    optimiser.eval()
    if resumed:
        saved, optimiser = optimiser.state_dict(), MetaMD(model.named_parameters(), geometry, **options)
        optimiser.load_state_dict(saved)
    model.load_state_dict(other.state_dict())
    optimiser.train()
    assert equal_parameters(model, other)
    fresh = MetaMD(other.named_parameters(), geometry, **options)
    train(model, optimiser, 10, first=20)
    train(other, fresh, 10, first=20)
    optimiser.eval()
    fresh.eval()
    assert equal_parameters(model, other)


def test_a_conversion_in_eval_mode_that_changes_no_value_is_no_edit():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), Euclidean(), lr=0.1, averaging="tail")
    train(model, optimiser, 5)
    before = copy.deepcopy(model)
    optimiser.eval()
    for p in model.parameters():
        p.detach().mul_(1.0)  # counts as a change for torch
    optimiser.train()
    assert equal_parameters(model, before)
    train(model, optimiser, 1, first=5)
    assert optimiser.state[model[0].weight]["since"] == 0, "the average goes on"


def test_the_average_of_a_parameter_that_is_frozen_comes_to_where_it_stays():
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), Euclidean(), lr=0.1, averaging="tail")
    train(model, optimiser, 10)
    frozen = model[0].weight.requires_grad_(False).detach().clone()
    train(model, optimiser, 200, first=10)
    optimiser.eval()
    torch.testing.assert_close(model[0].weight.detach(), frozen, rtol=1e-9, atol=1e-9)
    assert not torch.equal(model[2].weight, optimiser.state[model[2].weight]["z"])


def test_a_state_that_lost_its_iterates_on_the_way_is_refused():
    """As torch.distributed.checkpoint leaves it, which asks an optimiser in train mode what to read."""
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), Euclidean(), lr=0.1, averaging="tail")
    train(model, optimiser, 3)
    optimiser.eval()
    del optimiser.state[model[0].weight]["z"]
    with pytest.raises(RuntimeError, match=r"has lost its iterates.*Call opt.train\(\) before such a checkpoint"):
        optimiser.train()


def test_a_parameter_without_gradient_stays_where_it_is():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.1, momentum=0.9)
    train(model, optimiser, 5)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    train(model, optimiser, 5, first=5)
    assert torch.equal(model[0].weight, before)


def test_groups_have_momenta_of_their_own():
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    ours = MetaMD(
        [{"params": list(model[0].named_parameters())}, {"params": list(model[2].named_parameters("2")), "momentum": 0.0}],
        Euclidean(),
        lr=0.05,
        momentum=0.9,
    )
    theirs = torch.optim.SGD(
        [{"params": other[0].parameters()}, {"params": other[2].parameters(), "momentum": 0.0}], lr=0.05, momentum=0.9
    )
    train(model, ours, 30)
    train(other, theirs, 30)
    assert distance(model, other) < 1e-12
    assert "z" not in ours.state[model[2].weight]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"momentum": 1.0}, "Invalid momentum value: it must be at least 0 and below 1, got 1.0"),
        ({"momentum": -0.1, "lr": 0.1}, "Invalid momentum value"),
        ({"averaging": "polyak"}, "averaging must be one of constant, tail; got 'polyak'"),
        ({"averaging": "anytime"}, "got 'anytime'. Earlier versions also had"),
        ({"averaging": "tail", "momentum": 0.9}, r"has no momentum: the weights of its average are t\^9"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        MetaMD(small_model().named_parameters(), Euclidean(), **options)


def test_a_step_in_eval_mode_is_refused():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), Euclidean(), lr=0.1, averaging="tail")
    train(model, optimiser, 3)
    optimiser.eval()
    with pytest.raises(RuntimeError, match=r"Call opt.train\(\) first"):
        train(model, optimiser, 1)


def pair():
    return [torch.nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (1.0, 5.0)]


def pull(optimiser, params):
    for p in params:
        p.grad = torch.ones_like(p)
    optimiser.step()


def test_a_parameter_that_somebody_changes_does_not_take_the_momentum_of_the_others():
    """torch's SGD leaves the others alone as well; before, all of them lost it in every such step."""
    (a, b), (c, d) = pair(), pair()
    ours, theirs = MetaMD([a, b], Euclidean(), lr=0.1, momentum=0.9), torch.optim.SGD([c, d], lr=0.1, momentum=0.9)
    for _ in range(30):
        for optimiser, params in ((ours, (a, b)), (theirs, (c, d))):
            pull(optimiser, params)
            with torch.no_grad():
                params[1].clamp_(-10, 10)
    torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)
    assert float(b.detach()) > float(d.detach()), "its own begins again"


@pytest.mark.parametrize("options", KINDS)
def test_a_parameter_that_joins_leaves_the_averages_of_the_others_as_they_are(options):
    """As two optimisers would do it, of which the second begins later; through a state_dict too."""
    (a, b), (c, d) = pair(), pair()
    together = MetaMD([("a", a)], Euclidean(), lr=0.1, **options)
    first, second = MetaMD([("c", c)], Euclidean(), lr=0.1, **options), MetaMD([("d", d)], Euclidean(), lr=0.1, **options)
    for step in range(12):
        if step == 4:
            together.add_param_group({"params": [("b", b)]})
        if step == 8:
            saved = together.state_dict()
            together = MetaMD([{"params": [("a", a)]}, {"params": [("b", b)]}], Euclidean(), lr=0.1, **options)
            together.load_state_dict(saved)
        pull(together, [a, b] if step >= 4 else [a])
        pull(first, [c])
        if step >= 4:
            pull(second, [d])
    for optimiser in (together, first, second):
        optimiser.eval()
    torch.testing.assert_close((a, b), (c, d), rtol=1e-12, atol=1e-12)

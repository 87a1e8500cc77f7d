"""The rule "polar": all directions of an averaged gradient with the same length, in learned coordinates."""

import copy
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from metamd import Diagonal, Kronecker, LearnedOptimiser, MaxDiagonal, MetaMD, Online, Usage, prepare
from metamd.learning.usage import run_usage as trial
from metamd.potentials.base import Move
from metamd.potentials.basis import Basis
from metamd.potentials.online import SUMMED, Point, ordinary
from metamd.potentials.whitening import POLYNOMIALS
from metamd.tasks import tabular
from tests.helpers import small_model, train


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def polar(c):
    """U V' of a singular value decomposition."""
    u, _, vh = torch.linalg.svd(c, full_matrices=False)
    return u @ vh


def learned(weight, *, sides="right", rank=None):
    """A bound potential with a random metric in a random basis, and D^-1/2 as a function of a matrix."""
    rows, columns = weight.shape[0], weight[0].numel()
    kept = columns if rank is None else rank
    factors = {"right/w": torch.linalg.qr(random(columns, columns, seed=1))[0][:, :kept].contiguous()}
    if sides == "both":
        factors["left/w"] = torch.linalg.qr(random(rows, rows, seed=2))[0]
    potential = MaxDiagonal(1, tying="tensor", basis=Basis(sides, factors=factors)).bind({"w": weight})
    log_d = {"w": random(*potential.log_d["w"].shape, seed=3)}
    potential = potential.with_metrics(log_d).bind({"w": weight})

    def halved(m):
        root = potential.metric("w")[0].detach().sqrt()
        moved = potential.basis.into("w", m.reshape(weight.shape)) / root
        return potential.basis.out_of("w", moved).reshape(rows, columns)

    return potential, halved


def moved(potential, weight, grads, online):
    """How far the last of these gradients moves a weight."""
    x, state = weight.clone(), {}
    for grad in grads:
        before = x.clone()
        with torch.no_grad():
            online.advance(potential, [Point("w", x, Move(grad, 1.0), state)])
    return before - x


SHAPES = [
    ((3, 7), {}),
    ((7, 3), {}),
    ((4, 4), {}),
    ((1, 5), {}),
    ((3, 7), {"rank": 2}),
    ((5, 2, 3), {}),
    ((4, 6), {"sides": "both"}),
]


@pytest.mark.parametrize(("shape", "options"), SHAPES)
def test_a_step_is_the_polar_factor_in_learned_coordinates(shape, options):
    weight, grads = random(*shape), [random(*shape, seed=s) for s in (5, 6, 7)]
    potential, halved = learned(weight, **options)
    average = torch.zeros(shape, dtype=torch.float64)
    for grad in grads:
        average = 0.8 * average + 0.2 * grad
    ahead = 0.8 * average + 0.2 * grads[-1]
    expected = halved(polar(halved(ahead))).reshape(shape) / 50
    step = moved(potential, weight, grads, Online("polar", 0.8, scale={"w": 50.0}))
    torch.testing.assert_close(step, expected, rtol=1e-8, atol=1e-10)
    other = polar(ahead.reshape(shape[0], -1)).reshape(shape) / 50
    assert (step - other).abs().max() > 1e-4, "the learned metric makes no difference"


def whitened(c, iterations):
    """U f(s) V', f the composition of the polynomials by numbers, s over the root of the norm of C C'."""
    u, s, vh = torch.linalg.svd(c, full_matrices=False)
    s = s / torch.linalg.matrix_norm(c @ c.mT).sqrt()
    for a, b, d in POLYNOMIALS[iterations]:
        s = s * (a + b * s**2 + d * s**4)
    return (u * s) @ vh


@pytest.mark.parametrize(("shape", "options"), SHAPES)
@pytest.mark.parametrize("iterations", [1, 3, 5])
def test_iterations_whiten_as_far_as_their_polynomials_do(shape, options, iterations):
    weight, grad = random(*shape), random(*shape, seed=5)
    potential, halved = learned(weight, **options)
    step = moved(potential, weight, [grad], Online("polar", 0.8, scale={"w": 50.0}, whiten=iterations))
    expected, other = (halved(whitened(halved(0.36 * grad), k)).reshape(shape) / 50 for k in (iterations, 2))
    torch.testing.assert_close(step, expected, rtol=1e-8, atol=1e-10)
    assert shape[0] == 1 or (step - other).abs().max() > 1e-6, "two iterations do the same"


@pytest.mark.parametrize("iterations", [0, 3])
@pytest.mark.parametrize(("shape", "block", "count"), [((6, 7), 3, 2), ((7, 9), 3, 3), ((9, 4), 2, 2), ((5, 2, 3), 4, 2)])
def test_rows_are_whitened_by_blocks(shape, block, count, iterations):
    weight, grad = random(*shape), random(*shape, seed=5)
    potential, _ = learned(weight)
    step = moved(potential, weight, [grad], Online("polar", 0.8, scale={"w": 50.0}, whiten=iterations, block=block))
    rows, root = shape[0], potential.metric("w")[0].detach().sqrt()
    c = potential.basis.into("w", 0.36 * grad) / root
    wide = rows <= c.shape[1]
    parts = (c if wide else c.mT).split(math.ceil(min(c.shape) / count))
    assert len(parts) == count
    turned = torch.cat([whitened(part, iterations) if iterations else polar(part) for part in parts])
    expected = potential.basis.out_of("w", (turned if wide else turned.mT) / root).reshape(shape) / 50
    torch.testing.assert_close(step, expected, rtol=1e-7, atol=1e-9)
    whole = moved(potential, weight, [grad], Online("polar", 0.8, scale={"w": 50.0}, whiten=iterations))
    assert (step - whole).abs().max() > 1e-4


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_of(model, optimiser, inputs):
    for _ in range(3):
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        with Calls() as calls:
            optimiser.step()
    return calls.count


@pytest.mark.parametrize(("checked", "reads"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("averaging", ["tail", "constant"])
def test_python_reads_no_number_back_in_a_step(checked, reads, averaging):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    rule = Online("polar", 0.9, scale={n: 50.0 for n, _ in model.named_parameters()}, signal=0.9, whiten=4)
    options = {"metric": rule, "check_finite": checked, "averaging": averaging}
    count = calls_of(model, MetaMD(model.named_parameters(), Kronecker(), **options), random(16, 6).float())
    assert count["_local_scalar_dense"] == reads
    assert count["is_nonzero"] == 0
    plain = MetaMD(model.named_parameters(), Kronecker(), safeguard=True)
    assert calls_of(model, plain, random(16, 6).float())["_local_scalar_dense"] > 0, "the count sees reads"


@pytest.mark.parametrize("block", [0, 4])
def test_the_whole_step_is_one_graph_that_is_traced_a_few_times(block):
    """Counts of steps become symbols after the first steps: no graph for each of them."""
    runs = []
    basis = Kronecker().bind(list(small_model().named_parameters())).basis
    sizes = {f"right/{place.key}": place.sizes["right"] for place in basis.places.values()}
    some = {key: torch.linalg.qr(random(n, 2))[0].float() for key, n in sizes.items()}
    for compiled in (False, True):
        model = small_model()
        scales = {n: 50.0 for n, _ in model.named_parameters()}
        rule = Online("polar", 0.7, scale=scales, signal=0.9, whiten=3, block=block)
        potential = MaxDiagonal(1, tying="tensor", basis=basis.with_factors(some)).bind(list(model.named_parameters()))
        potential = potential.with_metrics({k: random(*d.shape).float() for k, d in potential.log_d.items()})
        potential = potential.bind(list(model.named_parameters()))
        learned = replace(
            LearnedOptimiser.from_potential(potential),
            header=replace(
                LearnedOptimiser.from_potential(potential).header,
                usage=Usage("online", schedule="linear", factor=0.5, averaging="tail").to_dict(),
                online=rule.to_dict(),
            ),
        )
        optimiser = MetaMD(model.named_parameters(), learned, steps=20, check_finite=False)
        if compiled:
            torch._dynamo.reset()
            optimiser.step = torch.compile(optimiser.step, fullgraph=True, backend="eager")
        train(model, optimiser, 12)
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_step_of_many_weights_takes_few_calls():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    rule = Online("polar", 0.9, scale={n: 50.0 for n, _ in model.named_parameters()}, signal=0.9, whiten=4)
    potential = Kronecker().bind(list(model.named_parameters()))
    optimiser = MetaMD(model.named_parameters(), potential, metric=rule, check_finite=False, averaging="tail")
    count = calls_of(model, optimiser, random(8, 16).float())
    of_iteration = sum(count[name] for name in ("bmm", "baddbmm", "mm", "addmm"))
    views = sum(
        count[name] for name in ("view", "detach", "unbind", "t", "transpose", "expand", "reshape", "diagonal", "alias")
    )
    assert (sum(count.values()) - of_iteration - views) / 12 < 10


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (4, 2, 3)])
def test_the_size_of_a_gradient_does_not_matter_until_it_is_as_small_as_epsilon(shape):
    weight, grad = random(*shape).float(), random(*shape, seed=5).float()
    potential = Kronecker().bind({"w": weight})
    online = Online("polar", 0.8, scale={"w": 50.0})
    usual = moved(potential, torch.zeros_like(weight), [grad], online)
    for factor in (1e-6, 1e-4, 1e15, 1e30):
        torch.testing.assert_close(moved(potential, torch.zeros_like(weight), [factor * grad], online), usual)
    largest = 0.2 * (1 + 0.8) * grad.abs().max()
    for factor in (1e-9, 1e-15, 1e-25):  # squares of these would underflow
        expected = usual * largest * factor / online.epsilon
        step = moved(potential, torch.zeros_like(weight), [factor * grad], online)
        torch.testing.assert_close(step, expected, rtol=1e-4, atol=0)
    for nothing in (0.0, 1e-44):
        step = moved(potential, torch.zeros_like(weight), [nothing * grad], online)
        assert step.isfinite().all()
        assert step.abs().max() < 1e-30


def test_weights_stay_where_they_are_when_nothing_is_left_to_learn():
    torch.manual_seed(0)
    inputs, labels = torch.randn(8, 6), torch.arange(8) % 4
    model = nn.Linear(6, 4)
    rule = Online("polar", 0.7, scale={"weight": 1.0, "bias": 10.0})
    optimiser = MetaMD(model.named_parameters(), Kronecker(), metric=rule)
    lengths = []
    for _ in range(80):
        before = model.weight.detach().clone()
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimiser.step()
        lengths.append(float((model.weight.detach() - before).norm()))
    assert loss.item() == 0
    assert lengths[-1] < 0.1 * lengths[0]


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 2, 3)])
def test_with_a_signal_a_step_is_as_long_as_gradients_agree(shape):
    """Against the shares by hand: |m_t| / (1 - b^t) over the root of the averaged squared lengths, at most 1."""
    weight, beta, signal = random(*shape, seed=4), 0.8, 0.9
    potential, _ = learned(weight)
    grads = [random(*shape, seed=10 + i) + 0.5 * random(*shape, seed=5) for i in range(12)]
    plain, followed = (Online("polar", beta, scale={"w": 50.0}, signal=x) for x in (0.0, signal))
    shares, mean, lengths = [], torch.zeros(shape, dtype=torch.float64), 0.0
    for t, grad in enumerate(grads, start=1):
        mean, lengths = beta * mean + (1 - beta) * grad, signal * lengths + (1 - signal) * float(grad.square().sum())
        share = float(mean.norm()) / (1 - beta**t) / (lengths / (1 - signal**t)) ** 0.5
        shares.append(min(share, 1.0))
        whole, part = (moved(potential, weight, grads[:t], online) for online in (plain, followed))
        torch.testing.assert_close(part, shares[-1] * whole, rtol=1e-9, atol=1e-12)
    assert shares[0] == pytest.approx(1.0)
    assert min(shares) < 0.8, "noise shortens the steps"
    same = moved(potential, weight, [grads[0]] * 5, followed)
    torch.testing.assert_close(same, moved(potential, weight, [grads[0]] * 5, plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**80])
def test_the_share_of_signal_does_not_depend_on_the_size_of_gradients(factor):
    """In float32, where the squares of these gradients would be lost or overflow."""
    weight = random(6, 5).float()
    potential = Kronecker().bind({"w": weight})
    rule = Online("polar", 0.8, epsilon=1e-37, scale={"w": 1.0}, signal=0.9)
    grads = [random(6, 5, seed=10 + i).float() for i in range(8)]
    assert not 0 < float((factor * grads[0]).square().sum()) < float("inf")
    step = moved(potential, weight, [factor * grad for grad in grads], rule)
    torch.testing.assert_close(step, moved(potential, weight, grads, rule), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(step, moved(potential, weight, grads, replace(rule, signal=0.0)), rtol=0.2)


@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**80])
def test_a_checked_step_measures_lengths_in_float32_where_they_are_ordinary(size):
    """Its one look at the gradients says so; beyond, they are measured as in a step that is not checked."""
    moved, asked = [], []
    for checked in (True, False):
        model = nn.Linear(6, 5)
        with torch.no_grad():
            for p, x in zip(model.parameters(), (random(5, 6), random(5, seed=1)), strict=True):
                p.copy_(x)
        rule = Online("polar", 0.8, epsilon=1e-37, scale={"weight": 1e3, "bias": 1e3}, signal=0.9)
        optimiser = MetaMD(model.named_parameters(), Kronecker(), metric=rule, check_finite=checked)
        for seed in range(6):
            for p in model.parameters():
                p.grad = size * random(*p.shape, seed=seed).float()
            with Calls() as calls:
                optimiser.step()
        moved.append(model.weight.detach().clone())
        asked.append(calls.count["_foreach_norm"])
    torch.testing.assert_close(*moved, rtol=1e-6, atol=1e-7)
    assert asked == [2 if size == 1 else 3, 2]


def test_lengths_are_ordinary_where_float32_can_square_them():
    finite = [torch.tensor(x) for x in (1.0, 1e-12, 1e12)]
    assert ordinary(finite)
    for other in (0.0, 1e-17, 1e17, math.inf, math.nan):
        assert not ordinary([*finite, torch.tensor(other)])
    rule, grads = Online("polar", signal=0.9), [torch.ones(3), torch.ones(2).bfloat16()]
    assert [x.dtype for x in rule.lengths(grads, narrow=True)] == [torch.float32] * 2
    assert [x.dtype for x in rule.lengths(grads)] == [torch.float64] * 2
    for wide in (torch.ones(3).double(), torch.ones(SUMMED + 1)):
        assert {x.dtype for x in rule.lengths([*grads, wide], narrow=True)} == {torch.float64}


@pytest.mark.parametrize(
    ("beta", "mean", "share"), [(0.9, 0.0, 0.2294), (0.7, 0.0, 0.4201), (0.9, 0.5, 0.4920), (0.9, 9.0, 0.9942)]
)
def test_shares_of_noise_and_of_signal_are_those_of_the_manual(beta, mean, share):
    """sqrt((m^2 + k v) / (m^2 + v)), k = (1 - beta)/(1 + beta), for an entry of mean m and variance v = 1."""
    k = (1 - beta) / (1 + beta)
    assert share == pytest.approx(((mean**2 + k) / (mean**2 + 1)) ** 0.5, abs=1e-4)
    weight = torch.zeros(40, 50, dtype=torch.float64)
    potential = Kronecker().bind({"w": weight})
    grads = [mean + random(40, 50, seed=i) for i in range(60)]
    followed, plain = (
        moved(potential, weight, grads, Online("polar", beta, scale={"w": 1.0}, signal=s)) for s in (0.9, 0.0)
    )
    assert float(followed.norm() / plain.norm()) == pytest.approx(share, rel=0.03)


def test_scales_are_learned_from_the_steps_that_are_taken():
    """What `watch` is told is the metric H/s of the step, share and all: a_t step = M D^-1, and the energy <M, step>."""
    weight, told = random(4, 6), []
    potential, halved = learned(weight)
    rule, state, x = Online("polar", 0.8, scale={"w": 1.0}, signal=0.9), {}, weight.clone()
    for seed in range(5):
        grad, before = random(4, 6, seed=seed), x.clone()
        with torch.no_grad():
            rule.advance(potential, [Point("w", x, Move(grad, 1.0), state)], lambda _, *found: told.append(found))
    step, ahead = before - x, 0.8 * state["average"] + 0.2 * grad
    energy, metric = told[-1]
    torch.testing.assert_close(metric @ step, halved(halved(ahead)))
    assert float(energy) == pytest.approx(float((ahead * step).sum()))
    whole = float(torch.linalg.svdvals(halved(ahead)).sum())
    assert float(energy) < 0.8 * whole, "noise has shortened the step"


def test_without_any_gradient_nothing_moves():
    weight = random(4, 3)
    rule = Online("polar", 0.8, scale={"w": 1.0}, signal=0.9)
    assert not moved(learned(weight)[0], weight, [torch.zeros(4, 3).double()] * 3, rule).any()
    told = []
    nothing = Move(torch.zeros(4, 3).double(), 1.0)
    rule.advance(learned(weight)[0], [Point("w", weight.clone(), nothing, {})], lambda _, *found: told.extend(found))
    assert all(x.isfinite().all() for x in told)


@pytest.mark.parametrize("refresh", [0, 4])
def test_a_run_with_a_signal_resumes_bit_for_bit(refresh):
    scales = {"0.weight": 20.0, "0.bias": 20.0, "2.weight": 20.0, "2.bias": 20.0}
    rule = Online("polar", 0.9, scale=scales, signal=0.99, refresh=refresh)
    one, two = small_model(), small_model()
    first, second = (MetaMD(m.named_parameters(), Diagonal(tying="tensor"), metric=rule) for m in (one, two))
    train(one, first, 4 if not refresh else 47)
    two.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(one, first, 4)
    train(two, second, 4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    kept = first.state[one[0].weight]
    assert kept["length"] > 0
    assert ("direction" in kept) == (refresh > 0)


# directions that are taken again


def found_at(refresh, steps):
    """Steps, counted from 1, in which a direction is found: every one of the first 14, then every second, and so on."""
    found = [1]
    for t in range(2, steps + 1):
        if t - found[-1] >= min(refresh, 1 + t // 15):
            found.append(t)
    return found


def test_directions_are_found_more_often_at_the_start_of_a_run():
    assert found_at(3, 40) == [*range(1, 15), 16, 18, 20, 22, 24, 26, 28, 31, 34, 37, 40]
    assert found_at(2, 20) == [*range(1, 15), 16, 18, 20]
    assert found_at(1, 9) == list(range(1, 10))


@pytest.mark.parametrize(("refresh", "signal"), [(2, 0.0), (3, 0.9), (5, 0.9)])
def test_a_direction_is_taken_again_at_the_length_that_is_right_then(refresh, signal):
    """Against directions by singular value decomposition, of the steps in which one is found."""
    shape, beta, steps = (3, 7), 0.8, 71
    weight = random(*shape)
    potential, halved = learned(weight)
    grads = [random(*shape, seed=10 + t) + 0.5 * random(*shape, seed=5) for t in range(steps)]
    rule = Online("polar", beta, scale={"w": 50.0}, signal=signal, refresh=refresh)
    x, state, average, lengths = weight.clone(), {}, torch.zeros(shape, dtype=torch.float64), 0.0
    taken = []
    for t, grad in enumerate(grads, start=1):
        before = x.clone()
        with torch.no_grad():
            rule.advance(potential, [Point("w", x, Move(grad, 1.0), state)])
        average = beta * average + (1 - beta) * grad
        lengths = signal * lengths + (1 - signal) * float(grad.square().sum())
        share = min(1.0, float(average.norm()) / (1 - beta**t) / (lengths / (1 - signal**t)) ** 0.5) if signal else 1.0
        if t in found_at(refresh, steps):
            direction = halved(polar(halved(beta * average + (1 - beta) * grad)))
        torch.testing.assert_close(before - x, share * direction / 50, rtol=1e-7, atol=1e-10)
        taken.append((before - x) / share)
    changes = [t for t in range(2, steps + 1) if not torch.allclose(taken[t - 1], taken[t - 2], rtol=1e-6)]
    assert [1, *changes] == found_at(refresh, steps)
    assert steps not in changes
    other = moved(potential, weight, grads, replace(rule, refresh=0))
    assert not torch.allclose(before - x, other, rtol=1e-2), "found in every step it would be another one"


def test_found_in_every_step_is_what_it_is_without_a_refresh():
    weight, grads = random(4, 6).float(), [random(4, 6, seed=t).float() for t in range(20)]
    potential, rule = Kronecker().bind({"w": weight}), Online("polar", scale={"w": 1.0}, signal=0.9)
    each = [moved(potential, weight, grads, replace(rule, refresh=refresh)) for refresh in (0, 1, 2)]
    assert torch.equal(each[0], each[1])
    assert not torch.equal(each[0], each[2])


def test_another_refresh_goes_on_with_the_averages_of_a_run():
    scales = {n: 20.0 for n, _ in small_model().named_parameters()}
    rule = Online("polar", 0.9, scale=scales, signal=0.9)
    for before, after in [(0, 3), (3, 0), (3, 5)]:
        model = small_model()
        optimiser = MetaMD(model.named_parameters(), Kronecker(), metric=replace(rule, refresh=before))
        train(model, optimiser, 20)
        averages = [optimiser.state[p]["average"].clone() for p in model.parameters()]
        other = MetaMD(model.named_parameters(), Kronecker(), metric=replace(rule, refresh=after))
        with pytest.warns(UserWarning, match="of a run in another metric"):
            other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
        assert all(torch.equal(other.state[p]["average"], a) for p, a in zip(model.parameters(), averages, strict=True))
        train(model, other, 5)
        assert all(p.isfinite().all() for p in model.parameters())


def test_what_is_measured_of_polar_steps_is_measured_in_every_one():
    task = tabular(steps=40).build(tabular(steps=40).sample(torch.Generator().manual_seed(0)))
    potential = Kronecker().bind(task.init())
    rule = Online("polar", scale={s.key: 100.0 for s in potential.slots.values()}, signal=0.9)
    runs = [
        trial(task, potential, Usage("online"), online=replace(rule, refresh=refresh), measure=True) for refresh in (0, 4)
    ]
    assert runs[0].energies == runs[1].energies
    assert len(runs[0].energies) == 40
    lazily = trial(task, potential, Usage("online"), online=replace(rule, refresh=4))
    assert lazily.loss != runs[0].loss, "a run that is not measured takes them again"


@pytest.mark.parametrize("wrong", [{"signal": 1.0}, {"signal": -0.1}, {"rule": "average", "signal": 0.9}])
def test_a_signal_that_is_none_is_a_sentence(wrong):
    with pytest.raises(ValueError, match="signal must lie in"):
        Online(**{"rule": "polar"} | wrong)


@pytest.mark.parametrize("wrong", [{"whiten": 9}, {"whiten": 2.0}, {"rule": "sum", "whiten": 2}, {"block": -1}])
def test_iterations_and_blocks_that_are_none_are_a_sentence(wrong):
    with pytest.raises(ValueError, match=f"{next(k for k in wrong if k != 'rule')} must be a number of"):
        Online(**{"rule": "polar"} | wrong)


def test_a_metric_for_every_number_has_one_too():
    for shape in [(3, 7), (7, 3), (4, 2, 3)]:
        weight, grad = random(*shape), random(*shape, seed=5)
        potential = Diagonal().bind({"w": weight}).with_metrics({"w": random(1, *shape, seed=3)}).bind({"w": weight})
        root = potential.metric("w")[0].detach().sqrt()
        expected = polar((grad / root).reshape(shape[0], -1)).reshape(shape) / root
        step = moved(potential, weight, [grad], Online("polar", 0.9, scale={"w": 1.0}))
        torch.testing.assert_close(step, expected, rtol=1e-8, atol=1e-10)


def test_no_step_of_its_length_descends_further():
    """It maximises <M, step> over |step D^1/2| <= 1 in the spectral norm, and the value is what `watch` is told."""
    weight, grad = random(4, 6), random(4, 6, seed=5)
    potential, halved = learned(weight)
    told = []
    online, state = Online("polar", 0.9, scale={"w": 1.0}), {}
    x = weight.clone()
    with torch.no_grad():
        online.advance(potential, [Point("w", x, Move(grad, 1.0), state)], lambda _, *found: told.append(found))
    best = float((0.19 * grad * (weight - x)).sum())  # the average after one step, looked ahead: 0.9 x 0.1 + 0.1
    (energy, root), c = told[0], halved(0.19 * grad)
    assert best == pytest.approx(float(energy))
    assert best == pytest.approx(float(torch.linalg.svdvals(c).sum()))
    torch.testing.assert_close(root @ root, c @ c.mT)
    for seed in range(200):
        other = random(4, 6, seed=seed)
        other = halved(other / torch.linalg.matrix_norm(other, 2))
        assert float((0.19 * grad * other).sum()) < best
    delta = random(4, 6, seed=9)
    scaled = potential.basis.into("w", delta) * potential.metric("w")[0].detach().sqrt()
    assert online.distance(potential, "w", delta, root) == pytest.approx(float((scaled.mT @ root @ scaled).trace()))


def test_without_a_metric_it_is_torchs_muon_up_to_its_iteration():
    """Muon's five iterations give singular values between about 0.7 and 1.2 instead of 1: the directions agree."""
    model, other = nn.Linear(7, 4, bias=False), nn.Linear(7, 4, bias=False)
    other.load_state_dict(model.state_dict())
    ours = MetaMD(model.named_parameters(), Diagonal(), metric=Online("polar", 0.9, scale={"weight": 100.0}))
    theirs = torch.optim.Muon(other.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.0)
    for t in range(5):
        inputs, start = random(16, 7, seed=t).float(), model.weight.detach().clone()
        steps = []
        for m, o in [(model, ours), (other, theirs)]:
            before = m.weight.detach().clone()
            o.zero_grad()
            m(inputs).square().mean().backward()
            o.step()
            steps.append((m.weight.detach() - before).flatten())
        other.load_state_dict(model.state_dict())
        assert torch.cosine_similarity(*steps, dim=0) > 0.95
        assert not torch.equal(start, model.weight)
    shuffled = steps[1][torch.randperm(28, generator=torch.Generator().manual_seed(0))]
    assert torch.cosine_similarity(steps[0], shuffled, dim=0) < 0.9


def test_gradients_that_are_zero_or_of_low_rank_give_finite_steps():
    weight = random(4, 6).float()
    potential, _ = learned(weight)
    potential = potential.with_metrics({"w": potential.log_d["w"].detach().float()}).bind({"w": weight})
    online = Online("polar", 0.9, scale={"w": 1.0})
    assert torch.equal(moved(potential, weight, [torch.zeros(4, 6)], online), torch.zeros(4, 6))
    thin = random(4, 1).float() @ random(1, 6).float()
    step = moved(potential, weight, [thin], online)
    lengths = torch.linalg.svdvals(potential.basis.into("w", step) * potential.metric("w")[0].detach().sqrt())
    assert 0.9 < lengths[0] < 1.1
    assert lengths[1] < 0.1


def test_biases_follow_the_average_of_their_squares():
    model = small_model(dtype=torch.float64)
    scales = {n: 100.0 for n, _ in model.named_parameters()}
    twin = small_model(dtype=torch.float64)
    train(model, MetaMD(model.named_parameters(), Diagonal(), metric=Online("polar", 0.9, scale=scales)), 1)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if p.ndim == 1:  # one step: the corrected averages are the gradient and its square
            torch.testing.assert_close((q - p).detach().abs(), torch.full_like(p, 0.01), rtol=1e-5, atol=1e-9, msg=name)


def test_an_empty_weight_is_left_alone():
    for potential in (Diagonal(), Kronecker()):
        for shape in ((0, 4), (4, 0), (0, 2, 3), (0,)):
            weight = nn.Parameter(torch.zeros(shape))
            weight.grad = torch.zeros(shape)
            MetaMD([("w", weight)], potential, metric=Online("polar", scale={"w": 1.0})).step()
            assert weight.shape == shape


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "rule",
    [
        Online("polar"),
        Online("polar", signal=0.9),
        Online("polar", signal=0.9, refresh=2),
        Online("polar", signal=0.9, whiten=3),
        Online("average"),
    ],
    ids=str,
)
def test_an_unchecked_gradient_that_is_not_finite_leaves_nan_behind_and_no_half_taken_step(broken, rule):
    for potential in (Diagonal(), Kronecker()):
        model = small_model()
        online = replace(rule, scale={n: 100.0 for n, _ in model.named_parameters()})
        optimiser = MetaMD(model.named_parameters(), potential, metric=online, check_finite=False)
        for _ in range(3):
            optimiser.zero_grad()
            model(torch.ones(2, 5)).sum().backward()
            model[0].weight.grad[0, 0] = broken
            before = model[2].bias.detach().clone()
            optimiser.step()
            assert model[0].weight.isnan().any()
            assert not torch.equal(model[2].bias, before), "the tensors after it moved"
        with pytest.raises(RuntimeError, match="is not finite; nothing was changed"):
            MetaMD(model.named_parameters(), potential, metric=online).step()


@pytest.mark.parametrize("steps", [0, 10.5, math.nan, math.inf, "10"])
def test_a_run_is_prepared_for_a_number_of_steps(steps):
    model = nn.Linear(2, 1)
    learned = LearnedOptimiser.from_potential(Diagonal().bind(dict(model.named_parameters())))
    with pytest.raises(ValueError, match=f"steps must be a whole number of at least 1, got {steps!r}"):
        prepare(model.named_parameters(), learned, steps=steps)

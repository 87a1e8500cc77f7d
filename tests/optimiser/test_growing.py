"""Certificates of metrics that grow with the run, over thousands of convex runs, and the faults they must not miss."""

import copy
import io
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from metamd import Diagonal, Kronecker, MaxDiagonal, MetaMD, Online
from metamd.optimiser.certificate import growing
from metamd.optimiser.certificate.ledger import start_of
from tests.certified_runs import AVERAGES, Loss
from tests.helpers import small_model, train

BUNDLES, RUNS = 80, 40  # 3,200 runs


@dataclass
class OneRun:
    """A tensor with a loss of its own, and everything that happened to it."""

    param: torch.nn.Parameter
    loss: Loss
    basis: np.ndarray
    scale: float
    decay: float
    steps: list = field(default_factory=list)

    def turned(self, x):
        return x.reshape(self.param.shape) @ self.basis

    def definition(self, u):
        """Bound and realised regret from the definitions, term by term; the regret of the losses; the size of the terms."""
        rate = np.mean([s["lr"] for s in self.steps])
        squares, before = np.zeros(self.param.shape), np.zeros(self.param.shape)
        bound = realised = losses = size = 0.0
        for s in self.steps:
            c = self.turned(s["g"])
            squares = squares + c * c
            h = self.scale * (np.sqrt(squares) + 1e-8)
            z, x, at = (self.turned(p) for p in (s["z"], s["x"], u))
            v = s["lr"] * (c + self.decay * h * z)
            lag = s["lr"] * (c * (z - x)).sum()
            bound += 0.5 * ((h - before) * (at - z) ** 2).sum() + 0.5 * (v * v / h).sum() - lag
            realised += (v * (z - at)).sum() - lag
            losses += s["lr"] * (self.loss.value(s["x"], s["shift"]) - self.loss.value(u, s["shift"]))
            size += np.abs(v).sum() * (np.abs(z).max() + np.abs(x).max() + np.abs(at).max())
            before = h
        size += (before * (np.abs(self.turned(u)) + np.abs(z)) ** 2).sum()
        return bound / rate, realised / rate, None if self.decay else losses / rate, size / rate

    def comparator(self, rng):
        anywhere = self.loss.centre + rng.normal(size=self.param.numel()) * np.exp(2 * rng.normal())
        return [self.loss.centre, self.steps[-1]["z"], anywhere][rng.integers(3)]


def random_bundle(seed, runs=RUNS):
    """Many runs in one optimiser: the tensors share the schedule and the average, nothing else."""
    rng = np.random.default_rng(seed)
    found, bases = {}, {}
    for i in range(runs):
        rows, columns = (int(x) for x in rng.integers(1, 6, size=2))
        basis = np.linalg.qr(rng.normal(size=(columns, columns)))[0]
        param = torch.nn.Parameter(torch.from_numpy(rng.normal(size=(rows, columns))))
        scale, decay = float(np.exp(2 * rng.normal())), float(rng.integers(2) * 0.3 * rng.random())
        found[f"run{i}"] = OneRun(param, Loss(rng, rows * columns), basis, scale, decay)
        bases[f"right/run{i}"] = torch.from_numpy(basis)
    named = {n: run.param for n, run in found.items()}
    fresh = Kronecker().bind(named)
    potential = MaxDiagonal(1, tying="tensor", basis=fresh.basis.with_factors(bases)).with_metrics(
        {k: torch.zeros_like(v) for k, v in fresh.log_d.items()}
    )
    average, count = AVERAGES[rng.integers(len(AVERAGES))], int(rng.integers(1, 9))
    schedule = np.ones(count) if rng.integers(2) else rng.permutation(np.linspace(1, 0.1, count))
    rates = {n: float(np.exp(rng.normal())) for n in found}
    groups = [{"params": [(n, p)], "weight_decay": found[n].decay} for n, p in named.items()]
    online = Online("sum", scale={n: run.scale for n, run in found.items()})
    optimiser = MetaMD(groups, potential, metric=online, certify=True, **average)
    share = 1 - average.get("momentum", 0.0) if "averaging" not in average else 1.0
    for factor in schedule:
        for group, (n, p) in zip(optimiser.param_groups, named.items(), strict=True):
            x, shift, run = p.detach().numpy().reshape(-1).copy(), rng.normal(size=p.numel()), found[n]
            z = optimiser.state[p]["z"].numpy().reshape(-1).copy() if "z" in optimiser.state[p] else x
            g = run.loss.grad(x, shift)
            p.grad, group["lr"] = torch.from_numpy(g).reshape(p.shape), rates[n] * float(factor)
            run.steps.append({"x": x, "z": z, "g": g, "lr": group["lr"] / share, "shift": shift})
        optimiser.step()
    return optimiser, found


def broken_laws(seed):
    """The laws that the certificates of a bundle break; none if all is right."""
    optimiser, runs = random_bundle(seed)
    rng = np.random.default_rng(seed + 10**6)
    at = {n: run.comparator(rng) for n, run in runs.items()}
    c = optimiser.certificate({n: torch.from_numpy(u).reshape(runs[n].param.shape) for n, u in at.items()})
    found = {n: run.definition(at[n]) for n, run in runs.items()}
    total = 1e-10 * sum(size for *_, size in found.values())
    broken = [] if c.guaranteed else ["it is said to hold"]
    if not c.realised - total <= c.identity <= c.bound + total <= c.published + 2 * total <= c.lipschitz + 3 * total:
        broken.append("realised, identity, bound, published bounds come in this order")
    if abs(sum(p.bound for p in c.per_layer.values()) - c.bound) > total:
        broken.append("layers add up")
    for n, (bound, realised, losses, size) in found.items():
        share, near = c.per_layer[n], 1e-10 * size
        if abs(share.bound - bound) > near or abs(share.realised - realised) > near:
            broken.append("equal to the definitions")
        if share.realised > share.bound + near or (losses is not None and losses > share.bound + near):
            broken.append("the bound holds")
    return broken


def test_thousands_of_random_convex_runs_obey_the_laws():
    for seed in range(BUNDLES):
        assert broken_laws(seed) == [], seed


def test_bounds_are_approached():
    ratios = []
    for seed in range(10):
        optimiser, runs = random_bundle(seed)
        certificate = optimiser.certificate([torch.from_numpy(r.loss.centre).reshape(r.param.shape) for r in runs.values()])
        ratios += [layer.realised / layer.bound for layer in certificate.per_layer.values()]
    assert np.mean(np.array(ratios) > 0.5) > 0.1, "bounds that are never approached say little"


# the faults


def stale_metric(self, name, move, param, store, before, energy, a, real=growing.Growth._observe):
    """Takes the norms of the step before, which has not seen the present gradient."""
    if before is not None:
        c, a = self.potential.basis.into(name, move.grad), before
        energy = (c * c / a.clamp_min(1e-30)).sum()
    real(self, name, move, param, store, before, energy, a)


def forgotten_growth(self, name, move, param, store, before, energy, a, real=growing.Growth._observe):
    """Leaves out the distances in H_t - H_{t-1}, as if the metric had stayed as it was."""
    real(self, name, move, param, store, a if before is not None else None, energy, a)


def whole_metric(self, name, move, param, store, before, energy, a, real=growing.Growth._observe):
    """Counts H_t in every step, instead of what has been added to it."""
    real(self, name, move, param, store, None, energy, a)


@pytest.mark.parametrize("fault", [stale_metric, forgotten_growth, whole_metric])
def test_the_laws_reject_wrong_sums(fault, monkeypatch):
    assert not any(broken_laws(seed) for seed in range(8))
    monkeypatch.setattr(growing.Growth, "_observe", fault)
    broken = [broken_laws(seed) for seed in range(8)]
    assert sum("it is said to hold" in laws for laws in broken) >= 5, "the certificate does not notice by itself"
    assert sum("equal to the definitions" in laws for laws in broken) >= 5


def test_the_laws_reject_a_metric_that_shrinks(monkeypatch):
    """An average in the place of the sum: the sums are right, but the comparator's distances count with both signs."""

    def shrinking(self, state):
        return (state["squares"] / state["counted"] ** 2).sqrt().add_(self.epsilon)

    monkeypatch.setattr(Online, "grown", shrinking)
    assert any("equal to the definitions" in broken_laws(seed) for seed in range(8))


# single runs


def options(model, rate=0.05, **more):
    return {"metric": Online("sum", scale={n: 1 / rate for n, _ in model.named_parameters()}), "certify": True, **more}


def near(model, seed=0, size=0.3):
    g = torch.Generator().manual_seed(seed)
    return {n: p.detach() + size * torch.randn(p.shape, generator=g).to(p.dtype) for n, p in model.named_parameters()}


def numbers(c):
    return (c.steps, c.bound, c.realised, c.identity, c.published, c.lipschitz, c.guaranteed, c.restarts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_run_has_the_same_certificate(dtype):
    model = small_model(dtype=dtype)
    u = near(model)
    optimiser = MetaMD(model.named_parameters(), Diagonal(), **options(model, momentum=0.8, weight_decay=0.1))
    train(model, optimiser, 10)
    file = io.BytesIO()
    torch.save(optimiser.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    resumed = MetaMD(other.named_parameters(), Diagonal(), **options(model, momentum=0.8, weight_decay=0.1))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    copied, of_copy = copy.deepcopy((model, optimiser))
    for m, o in ((model, optimiser), (other, resumed), (copied, of_copy)):
        train(m, o, 10, first=10)
    whole = optimiser.certificate(u)
    assert whole.guaranteed
    assert whole.steps == 20
    assert numbers(resumed.certificate(u)) == numbers(of_copy.certificate(u)) == numbers(whole)


def test_what_begins_a_new_run():
    """Parameters changed from outside, or another metric after resuming."""
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), Diagonal(), **options(model))
    train(model, optimiser, 10)
    saved = copy.deepcopy(optimiser.state_dict())
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    train(model, optimiser, 5, first=10)
    found = optimiser.certificate(near(model))
    assert (found.steps, found.restarts, found.guaranteed) == (5, 1, True)
    assert found.identity == pytest.approx(found.bound)
    other = MetaMD(model.named_parameters(), Diagonal(), **options(model, rate=0.1))
    with pytest.warns(UserWarning, match="of a run in another metric"):
        other.load_state_dict(saved)
    train(model, other, 5, first=10)
    found = other.certificate(near(model))
    assert (found.steps, found.restarts, found.guaranteed) == (5, 1, True)
    assert "another metric" in found.restarted
    plain = MetaMD(model.named_parameters(), Diagonal(), certify=True)
    with pytest.warns(UserWarning, match="of a run in another metric"):
        plain.load_state_dict(saved)
    train(model, plain, 2, first=10)
    assert plain.certificate(near(model)).restarts == 1


def test_steps_without_a_rate_and_tensors_that_join_later():
    """A metric grows in steps at lr = 0 too, and what it grows by counts."""
    model = small_model(dtype=torch.float64)
    named = list(model.named_parameters())
    model[2].requires_grad_(False)
    optimiser = MetaMD(named, Diagonal(), **options(model))
    for t, lr in enumerate([0.0, 1.0, 0.5, 0.0, 0.0, 1.0, 0.0, 0.7, 0.0]):
        model[2].requires_grad_(t > 4)
        optimiser.zero_grad()
        optimiser.param_groups[0]["lr"] = lr
        train(model, optimiser, 1, first=t)
    found = optimiser.certificate(near(model))
    assert (found.steps, found.guaranteed, found.restarts) == (4, True, 0)
    assert found.identity == pytest.approx(found.bound, rel=1e-9)
    assert "did not depend on a tensor while it had no gradient" in found.holds
    assert "weighted by lr_t" in found.form


def test_a_change_that_torch_does_not_count_is_found_out():
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), Diagonal(), **options(model))
    train(model, optimiser, 10)
    model[0].weight.data.mul_(1.5)
    train(model, optimiser, 10, first=10)
    found = optimiser.certificate(near(model))
    assert not found.guaranteed
    assert "do not fit together" in str(found)


def test_a_radius_covers_every_comparator_and_is_attained():
    """The largest bound over an ellipsoid, against the comparators that ascent from many points finds."""
    model = small_model(dtype=torch.float64)
    g = torch.Generator().manual_seed(3)
    logs = {n: torch.randn(1, *p.shape, generator=g).double() for n, p in model.named_parameters()}
    optimiser = MetaMD(model.named_parameters(), Diagonal().with_metrics(logs), **options(model))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimiser, 30)
    metrics = {n: x[0].exp() for n, x in logs.items()}

    def on_the_border(w, radius):
        length = sum(float((metrics[n] * w[n] ** 2).sum()) for n in w) ** 0.5
        return {n: radius * x / length for n, x in w.items()}

    for radius in (1e-3, 0.3, 20.0):
        ball = optimiser.certificate(radius=radius)
        best = best_regret = -np.inf
        for seed in range(6):
            w = on_the_border({n: x - start[n] for n, x in near(model, seed).items()}, radius)
            for _ in range(25):  # power iteration on the ellipsoid: to where the gradient points
                found = optimiser.certificate({n: start[n] + w[n] for n in w})
                best, best_regret = max(best, found.bound), max(best_regret, found.realised)
                slope = {n: _slope(optimiser, n, w[n]) / metrics[n] for n in w}
                w = on_the_border(slope, radius)
        assert best <= ball.bound <= 1.02 * best + 1e-12
        assert best_regret <= ball.realised <= ball.bound <= ball.published <= ball.lipschitz
    assert optimiser.certificate(radius=0).bound == pytest.approx(optimiser.certificate(start).bound)
    twice = MetaMD(model.named_parameters(), MaxDiagonal(2), **options(model))
    train(model, twice, 2)
    with pytest.raises(ValueError, match="has 2 pieces"):
        twice.certificate(radius=1.0)


def _slope(optimiser, name, w):
    """The gradient of the bound with respect to w, from the optimiser's own state."""
    p = next(p for n, p, _ in optimiser._places.values() if n == name)
    store = optimiser.state[p]
    h = 20.0 * (store["squares"].sqrt() + 1e-8)
    return h * w - (h * (p.detach() - start_of(store)) + store["certificate_sum"])


def test_adagrads_own_bound_on_the_gradients():
    """sum c_t^2 / a_t <= 2 a_T, so that at a constant rate the bound is (D^2 s/2 + lr^2/s) tr a_T / lr [Duchi2011]."""
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), Diagonal(), **options(model, rate=0.05))
    train(model, optimiser, 40)
    roots = sum(float(optimiser.state[p]["squares"].sqrt().sum()) for p in model.parameters())
    energy = sum(layer.gradients for layer in optimiser.certificate(near(model)).per_layer.values())
    assert 0.3 * 0.05 * roots < energy <= 0.05 * roots


def test_what_has_no_certificate_is_said():
    model = small_model()
    scale = {n: 100.0 for n, _ in model.named_parameters()}
    for online, sentence in [
        (Online("average", scale=scale), "rule 'average' it may, so that distances to the comparator count with both signs"),
        (Online("sum", scale=scale, refresh=5), "refresh=5 turns those of the output side"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            MetaMD(model.named_parameters(), Diagonal(), metric=online, certify=True)
    half = small_model(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="needs parameters in float32 or float64"):
        MetaMD(half.named_parameters(), Diagonal(), metric=Online("sum", scale=scale), certify=True)

"""The certificate of any run against losses: no model of the ball beats it, and the worst one attains it."""

import math

import numpy as np
import pytest
import torch

from metamd import Diagonal, Euclidean, MaxDiagonal, MetaMD, certify_run
from metamd.optimiser import certificate as module
from metamd.optimiser.certificate import RunSums, Seen
from metamd.potentials import forms
from metamd.potentials.online import Online
from tests.certified_runs import OURS, TORCH, random_run, random_tail_run
from tests.helpers import draws, random_basis

RUNS = draws(10_000)  # 1,000, and 10,000 under -m slow


def as_reference(u):
    return [torch.from_numpy(part) for part in np.split(u, [2])]


def broken_laws(run, seed):
    """Which laws the certificate of a run breaks, for a random ball and models of it."""
    rng = np.random.default_rng(seed + 10**6)
    radius = float(np.exp(rng.normal()))
    found = run.certificate(radius=radius)
    tolerance = 1e-9 * run.size() * (1 + radius)
    models = [run.start + d * radius / max(run.norm(d), 1e-300) for d in rng.normal(size=(6, 5))]
    models += [run.start, run.start + (run.loss.centre - run.start) * min(1, radius / run.norm(run.loss.centre - run.start))]
    ways = sum(s * g for _, g, _, s in run.points) / run.metrics()  # from the start against the gradients, in each piece
    models += [run.start - d * radius / max(run.norm(d), 1e-300) for d in ways]
    regrets = [run.regret(u) for u in models]
    named = run.certificate(as_reference(models[0]), radius=radius)
    steps = len(run.points)
    laws = {
        "no model of the ball beats it": max(regrets) <= found.bound + tolerance,
        "the reference's regret is at most its linearised one": regrets[0] <= named.realised + tolerance,
        "that is at most the bound": named.realised <= named.bound + tolerance,
        "it is one over the gradients": math.isclose(
            named.realised, sum(s * g @ (x - models[0]) for x, g, _, s in run.points), rel_tol=1e-9, abs_tol=tolerance
        ),
        "every gradient is counted": found.steps <= steps <= 2 * found.steps,
        "rounding is small": 0 <= found.rounding <= tolerance,
        "layers add up": abs(math.fsum(p.bound for p in found.per_layer.values()) + found.rounding - found.bound)
        <= tolerance,
    }
    if found.mirror is not None:
        laws["never above the bound of mirror descent for the same ball"] = (
            found.bound <= found.mirror.bound + tolerance <= found.mirror.published + 2 * tolerance
        )
        laws["nor Theorem 1 above its Lipschitz form"] = found.mirror.published <= found.mirror.lipschitz + tolerance
        laws["mirror descent against the model"] = named.realised <= named.mirror.bound + tolerance
    return [law for law, holds in laws.items() if not holds]


@pytest.mark.law
def test_no_run_is_beaten_by_a_model_of_its_ball():
    seen, mirrored = set(), 0
    for seed in range(RUNS):
        run = random_run(seed)
        assert broken_laws(run, seed) == [], run.about
        seen.add(run.about.partition(", seed")[0])
        mirrored += run.certificate(radius=1.0).mirror is not None
    assert seen >= {*TORCH, *OURS}
    assert mirrored > RUNS / 50


def test_the_laws_are_about_every_optimiser_of_torch():
    known = {
        name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    run = {type(make([("x", torch.nn.Parameter(torch.zeros(2)))], 0.1)).__name__ for make in TORCH.values()}
    assert known - run == {"Optimizer", "Muon", "SparseAdam"}, "Muon is in the law of matrices; sparse gradients are refused"


@pytest.mark.law
def test_plain_mirror_descent_is_found_to_be_that():
    for seed in range(RUNS // 4):
        run = random_run(seed)
        if run.plain:
            assert run.certificate(as_reference(run.start)).mirror is not None, run.about


def worst_model(run, radius):
    """argmin <G, u> over the ball max_j |u - c|_{D_j} <= radius: c - t D(w)^-1 G, w by a search that zooms into a grid."""
    total, d = sum(s * g for _, g, _, s in run.points), run.metrics()
    free, middle, width = len(d) - 1, np.full(len(d) - 1, 0.5), 0.5
    best = np.eye(len(d))[0]
    for _ in range(24 if free else 0):  # a convex function of w: the grid around the best point shrinks to a half each time
        sides = [np.clip(np.linspace(m - width, m + width, 9), 0, 1) for m in middle]
        points = np.stack(np.meshgrid(*sides), -1).reshape(-1, free)
        weights = np.append(points, 1 - points.sum(1, keepdims=True), 1)[points.sum(1) <= 1]
        best = weights[np.argmin((total**2 / (weights @ d)).sum(1))] if len(weights) else best
        middle, width = best[:free], width / 2
    x = total / (best @ d)
    return run.start - radius * x / run.norm(x), radius * math.sqrt(total @ x)


def attains(run, radius):
    """Whether the regret of linear losses against the worst model of the ball is what the certificate says."""
    bound = run.certificate(radius=radius).bound
    u, gain = worst_model(run, radius)
    assert run.norm(u - run.start) <= radius * (1 + 1e-12)
    return -1e-9 * run.size() <= bound - run.regret(u) <= 1e-4 * gain + 1e-9 * run.size()


@pytest.mark.law
def test_linear_losses_attain_it_at_the_worst_model():
    for seed in range(max(40, RUNS // 20)):
        run = random_run(seed, linear=True)
        assert attains(run, 0.7), run.about


def gap(run, model, u):
    """f(model) - f(u), for the one loss of all steps."""
    shift = run.points[0][2]
    return run.loss.value(model, shift) - run.loss.value(u, shift)


@pytest.mark.law
def test_the_model_of_eval_is_beaten_by_none_of_its_ball_and_linear_losses_attain_it():
    later = 0
    for seed in range(draws(500)):
        run, model = random_tail_run(seed)
        average = run.certificate(radius=0.7).average
        u, _ = worst_model(run, 0.7)
        for other in (u, run.start, 2 * run.start - u):
            assert gap(run, model, other) <= average + 1e-9 * run.size(), run.about
        run, model = random_tail_run(seed, linear=True)
        average, (u, gain) = run.certificate(radius=0.7).average, worst_model(run, 0.7)
        slack = 1e-4 * gain / len(run.points) + 1e-9 * run.size()
        assert -1e-9 * run.size() <= average - gap(run, model, u) <= slack, run.about
        _, newest = random_tail_run(seed, linear=True, certify=False)
        later += abs(average - gap(run, newest, u)) > slack
    assert later > 0.9 * draws(500), "the average with the newest iterate is told apart"


MATRICES = {
    "Muon": lambda x, lr, phi: torch.optim.Muon([("x", x)], lr=lr, weight_decay=0.0),
    "SGD": lambda x, lr, phi: torch.optim.SGD([("x", x)], lr=lr),
    "exact": lambda x, lr, phi: MetaMD([("x", x)], phi, lr, momentum=0.5),
    "polar": lambda x, lr, phi: MetaMD([("x", x)], phi, metric=Online("polar", scale={"x": 3.0}), averaging="tail"),
    "eigen": lambda x, lr, phi: MetaMD([("x", x)], phi, metric=Online("eigen", scale={"x": 3.0})),
}


@pytest.mark.law
def test_no_run_on_matrices_is_beaten_by_a_model_of_its_ball():
    """Muon, and polar and eigen steps on weights; balls are Euclidean, or in learned coordinates with their dense matrix."""
    for seed in range(draws(400)):
        g = torch.Generator().manual_seed(seed)
        start, centre = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(2))
        x = torch.nn.Parameter(start.clone())
        phi = random_basis({"x": start}, pieces=1, seed=seed)
        lr, name = float(torch.rand((), generator=g)), sorted(MATRICES)[seed % 5]
        eye = torch.eye(12, dtype=torch.float64).view(12, 3, 4)
        d = torch.stack([phi.basis.out_of("x", phi.metric("x")[0].detach() * phi.basis.into("x", e)).flatten() for e in eye])
        learned = seed // 5 % 2 == 1
        optimiser = MATRICES[name](x, lr, phi)
        run, points = certify_run(optimiser, phi if learned else Euclidean()), []
        for _ in range(8):
            slopes = torch.rand(3, 4, generator=g, dtype=torch.float64)
            points.append((x.detach().clone(), slopes))
            optimiser.zero_grad()
            (slopes * (x - centre).square()).sum().backward()
            optimiser.step()
        bound = run.certificate(radius=1.0).bound
        for way in (*torch.randn(5, 12, generator=g, dtype=torch.float64), (centre - start).flatten()):
            u = start + (way / ((way @ d @ way).sqrt() if learned else way.norm())).view(3, 4)
            regret = sum((w * ((x - centre).square() - (u - centre).square())).sum() for x, w in points)
            assert regret <= bound + 1e-9, (name, seed)
        assert any((w * (x - centre)).abs().sum() > 0 for x, w in points)


# the faults


class Dropped(RunSums):
    """Forgets the second step."""

    def add(self, seen, **options):
        if self.steps == 1 and not self.reason:
            self.reason = "dropped"
            self.steps += 1
            return
        super().add(seen, **options)


class AtTheAverage(RunSums):
    """Takes the mean of the present point and the start for where the gradient was taken."""

    def add(self, seen, **options):
        moved = []
        for s in seen:
            start = module._start(s.store) if module.SUM in s.store else s.param.detach()
            moved.append(Seen(s.name, (s.param.detach() + start) / 2, s.grad, s.store, s.ascent, s.share))
        super().add(moved, **options)


class StaleStart(RunSums):
    """Takes the second point for the start."""

    def add(self, seen, **options):
        if self.steps == 1:
            for s in seen:
                s.store.pop("start", None)
                s.store[module.START] = s.param.detach().clone()
        super().add(seen, **options)


def count_broken(seeds, **options):
    return sum(bool(broken_laws(random_run(seed, **options), seed)) for seed in seeds)


def count_missed(seeds, **options):
    return sum(not attains(random_run(seed, linear=True, **options), 0.7) for seed in seeds)


@pytest.mark.parametrize("sums", [Dropped, AtTheAverage, StaleStart])
def test_the_laws_reject_wrong_sums(sums):
    seeds = range(60)
    assert count_broken(seeds) == count_missed(seeds) == 0
    assert count_broken(seeds, sums=sums) + count_missed(seeds, sums=sums) > 10


def test_the_laws_reject_the_primal_norm(monkeypatch):
    def primal(self, dual):
        return {n: (self.basis.into(n, y.double()).square() * self.metric(n).double()[0]).sum() for n, y in dual.items()}

    monkeypatch.setattr(MaxDiagonal, "dual_squares", primal)
    linear = sum(
        run.regret(worst_model(run, 0.7)[0]) > run.certificate(radius=0.7).bound + 1e-6
        for run in (random_run(seed, linear=True) for seed in range(60))
    )
    assert linear > 5


# what it is made of


def test_the_dual_norm_is_dual_to_the_norm():
    """N*(G) = max <G, delta> / N(delta): random directions stay below, the solver's own attains it."""
    rng = np.random.default_rng(0)
    for pieces in (1, 2, 4):
        params = {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
        fresh = MaxDiagonal(pieces, tying="channel").bind(params)
        phi = fresh.with_metrics({k: torch.from_numpy(rng.normal(size=v.shape)) for k, v in fresh.log_d.items()}).bind(
            params
        )
        g = {n: torch.from_numpy(rng.normal(size=tuple(x.shape))) for n, x in params.items()}
        dual = math.sqrt(sum(float(q) for q in phi.dual_squares(g).values()))
        for _ in range(300):
            delta = {n: torch.from_numpy(rng.normal(size=tuple(x.shape))) for n, x in params.items()}
            assert sum(float((g[n] * delta[n]).sum()) for n in g) <= dual * phi.norm(delta) * (1 + 1e-12)
        d = {n: phi.metric(n).detach() for n in params}
        flat = np.concatenate([d[n].expand(pieces, *params[n].shape).reshape(pieces, -1).numpy() for n in params], 1)
        y = np.concatenate([g[n].reshape(-1).numpy() for n in params])

        def evaluate(w, flat=flat, y=y):
            x = y / (w @ flat)
            return 0.5 * flat @ x**2, (flat * x**2 / (w @ flat)) @ flat.T

        w = forms.solve_weights(evaluate, np.full(pieces, 1 / pieces), np.zeros(pieces), tolerance=1e-12).weights
        x = y / (w @ flat)
        worst = dict(zip(params, map(torch.from_numpy, np.split(x, [6])), strict=True))
        worst = {n: v.reshape(params[n].shape) for n, v in worst.items()}
        assert sum(float((g[n] * worst[n]).sum()) for n in g) == pytest.approx(dual * phi.norm(worst), rel=1e-5)


def test_the_solver_never_raises_the_dual_objective():
    """h(w; y) = 1/2 y'D(w)^-1 y - <w, b> of what it returns, against that of what it was given."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, size = int(rng.integers(2, 6)), int(rng.integers(1, 40))
        d, y, b = np.exp(2 * rng.normal(size=(n, size))), rng.normal(size=size), rng.normal(size=n) * rng.integers(2)

        def h(w, d=d, y=y, b=b):
            return 0.5 * (y**2 / (w @ d)).sum() - w @ b

        def evaluate(w, d=d, y=y):
            x = y / (w @ d)
            return 0.5 * d @ x**2, (d * x**2 / (w @ d)) @ d.T

        w = rng.dirichlet(np.full(n, 0.5)) if rng.integers(2) else np.eye(n)[rng.integers(n)]
        found = forms.solve_weights(evaluate, w, b, tolerance=1e-12)
        assert h(found.weights) <= h(w) + 1e-12 * (1 + abs(h(w)))


# the paper's bounds, where they hold


def test_one_piece_is_tight_at_its_own_end():
    """B(u || end) = 0 there: every inequality of the proof is an equality."""
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    phi = Diagonal().with_metrics({"p": torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)})
    opt = MetaMD([("p", p)], phi, 0.3, certify=True)
    for t in range(50):
        p.grad = p.detach() + torch.sin(torch.arange(3.0, dtype=torch.float64) + t)
        opt.step()
    c = opt.certificate([p])
    assert c.realised == pytest.approx(c.mirror.bound, rel=1e-12)
    assert c.mirror.published > 1.2 * c.mirror.bound


def paper_case(exact):
    """Two pieces, l = |theta - (2, 2)|^2 from (2, 1): the piece changes once."""
    theta, optimum = torch.nn.Parameter(torch.tensor([2.0, 1.0], dtype=torch.float64)), torch.full((2,), 2.0)
    logs = torch.log(torch.tensor([[4.0, 0.25], [0.25, 4.0]], dtype=torch.float64))
    phi = MaxDiagonal(2, centre="origin").with_metrics({"theta": logs})
    opt, regret = MetaMD([("theta", theta)], phi, lr=0.5, certify=True, exact=exact), 0.0
    for _ in range(4):
        opt.zero_grad()
        loss = (theta - optimum).square().sum()
        loss.backward()
        regret += loss.item()
        opt.step()
    return opt, regret, optimum


def test_the_papers_step_has_no_bound_of_the_paper_but_the_ball():
    """The local-norm bound would have been below 9, and the regret is above."""
    opt, regret, optimum = paper_case(exact=False)
    found = opt.certificate([optimum], radius=2.0)
    assert regret > 9
    assert found.mirror is None
    assert "the piece changed under the paper's step" in str(found)
    assert regret <= found.realised <= found.bound
    opt, regret, optimum = paper_case(exact=True)
    exact = opt.certificate([optimum])
    assert regret <= exact.realised <= exact.mirror.bound

"""The inner loop against an obvious one, the bound it must satisfy, and runs that go wrong."""

import math

import numpy as np
import pytest
import torch

from metamd import Diagonal, Euclidean, MaxDiagonal, mirror_step
from metamd.inner.objectives import Fixed, Regret
from metamd.inner.run import GradientSums, gradient, local_norm, run_inner
from metamd.potentials.forms import combine
from tests.small_tasks import F64, BecomesNaN, ConvNet, Logistic, Quadratic, Separable, TanhNet, potential_for

SETTINGS = {
    "one piece": (Quadratic(1, 12), {"pieces": 1}),
    "kinks": (Quadratic(2, 12, wave=0.1), {"pieces": 3, "centre": "origin"}),
    "offsets": (Quadratic(3, 12), {"pieces": 3, "offsets": 0.3}),
    "channel": (TanhNet(0, 7), {"pieces": 2, "tying": "channel"}),
    "tensor": (TanhNet(0, 7), {"pieces": 1, "tying": "tensor"}),
    "role": (TanhNet(0, 7), {"pieces": 1, "tying": "role"}),
    "convolution": (ConvNet(0, 5), {"pieces": 2, "tying": "column"}),
}
settings = pytest.mark.parametrize("name", SETTINGS)


def obvious(task, potential, lr):
    """The loop written out: every point, gradient and weight of the run."""
    params, path = task.init(), []
    potential = potential.centred_at(params)
    active = potential.activate(params)
    for t in range(task.steps):
        loss, grads = gradient(task, params, task.batch(t))
        path.append((params, grads, active.weights, float(loss)))
        with torch.no_grad():
            step = mirror_step(params, grads, potential, lr, active=active)
        params, active = step.params, step.active
    return path, params


def sum_of(potential, path, lr=1.0):
    return sum(float((g[n] ** 2 / combine(potential.metric(n).detach(), w)).sum()) for _, g, w, _ in path for n in g)


@settings
def test_the_run_is_the_obvious_loop(name):
    task, options = SETTINGS[name]
    phi = potential_for(task, **options)
    path, end = obvious(task, phi, 0.7)
    run = run_inner(task, phi, lr=0.7)
    assert not run.diverged
    assert run.losses.tolist() == pytest.approx([p[3] for p in path], rel=1e-12)
    assert all(torch.allclose(run.end[n], end[n], rtol=1e-12, atol=1e-12) for n in end)
    assert np.allclose(run.weights, [p[2] for p in path], atol=1e-9)
    assert run.largest_gradient == pytest.approx(
        max(math.sqrt(sum(float((g**2).sum()) for g in p[1].values())) for p in path)
    )
    assert run.cost.gradients == task.steps
    assert local_norm(run.shares, phi).item() == pytest.approx(sum_of(phi, path), rel=1e-10)


@settings
def test_squares_are_in_the_shape_of_the_metrics(name):
    task, options = SETTINGS[name]
    phi = potential_for(task, **options)
    path, _ = obvious(task, phi, 0.7)
    for n, squares in run_inner(task, phi, lr=0.7).squares.items():
        expected = sum((p[1][n] ** 2).sum_to_size(phi.metric(n).shape[1:]) for p in path)
        assert torch.allclose(squares, expected, rtol=1e-12)


def test_kinks_happen_in_these_settings():
    # otherwise the tests above would not see mixed weights
    task, options = SETTINGS["kinks"]
    run = run_inner(task, potential_for(task, **options), lr=0.7)
    assert run.switches > 0
    assert (run.weights.max(1) < 1).any()


def shares(sums):
    return sums.by_piece or {n: s.unsqueeze(0) for n, s in sums.squares().items()}


def shares_bound_the_sum(sums, task, options):
    """The shares give the local-norm sum at the run's metrics, and an upper bound on it at any others."""
    phi = potential_for(task, **options)
    path, _ = obvious(task, phi, 0.7)
    collected = sums(phi)
    with torch.no_grad():
        for _, grads, weights, _ in path:
            collected.add(grads, weights)
        here = float(local_norm(shares(collected), phi))
        exact = here == pytest.approx(sum_of(phi, path), rel=1e-10)
        others = [potential_for(task, seed=s, **options) for s in range(1, 6)]
        above = all(float(local_norm(shares(collected), o)) >= sum_of(o, path) * (1 - 1e-10) for o in others)
    return exact and above


class PlainShares(GradientSums):
    """Shares by weight alone: right on vertices, wrong on kinks."""

    def _share(self, name, square, weights):
        for j, w in enumerate(weights):
            self.by_piece[name][j] += float(w) * square


@settings
def test_shares_bound_the_sum(name):
    assert shares_bound_the_sum(GradientSums, *SETTINGS[name])


def test_plain_shares_are_rejected():
    assert not shares_bound_the_sum(PlainShares, *SETTINGS["kinks"])


# the bound


def bound_holds(seed, *, exact=True, factor=1.0):
    """sum <g_t, theta_t - u> <= B(u||theta_1)/eta + eta/2 sum g'D(w_t)^-1 g + sum gap/eta, for a random u."""
    g = torch.Generator().manual_seed(seed)
    size = int(torch.randint(2, 40, (), generator=g))
    task = Logistic(seed, 15, size) if seed % 2 else Quadratic(seed, 15, size + 2, noise=0.5)
    centre = "origin" if seed % 3 else "start"
    phi = potential_for(task, 3, seed, log=0.5, spread=1.0, offsets=0.2 * (seed % 5 == 0), centre=centre)
    run = run_inner(task, phi, lr=0.6, exact=exact, certify=True)
    u = {n: x + torch.randn(x.shape, generator=g, dtype=F64) for n, x in run.end.items()}
    bound = float(Regret(Fixed(u)).value(run, phi).detach()) + float(run.gaps.sum()) / run.lr
    b = bound - 0.5 * run.lr * local_norm(run.shares, phi).item() * (1 - factor)
    return run.diverged or run.regret(u) <= b + 1e-9 * abs(b)


def test_the_bound_holds_on_every_convex_run():
    assert all(bound_holds(seed) for seed in range(60))


def test_the_bound_rejects_a_smaller_one_and_the_papers_step():
    assert not all(bound_holds(seed, factor=0.5) for seed in range(60))
    assert not all(bound_holds(seed, exact=False) for seed in range(60))


def test_regret_against_a_point_is_the_sum_over_the_path():
    task, options = SETTINGS["kinks"]
    phi = potential_for(task, **options)
    path, end = obvious(task, phi, 0.7)
    expected = sum(float((g[n] * (x[n] - end[n])).sum()) for x, g, _, _ in path for n in g)
    assert run_inner(task, phi, lr=0.7, certify=True).regret(end) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match="certify=True"):
        run_inner(task, phi, lr=0.7).regret(end)


# runs that go wrong


def test_a_nan_is_reported():
    run = run_inner(BecomesNaN(4), Diagonal(), lr=0.01)
    assert "nan at step 4" in run.diverged
    assert len(run.losses) == 4
    assert bool(run.losses.isfinite().all())
    assert all(bool(x.isfinite().all()) for x in run.end.values())
    assert "at the start" in run_inner(BecomesNaN(0), Diagonal(), lr=0.01).diverged


def test_an_explosion_is_reported():
    run = run_inner(Separable(0, 500), Diagonal(), lr=1.0)
    assert "rose from" in run.diverged
    assert len(run.losses) < 100


def test_an_infinite_gradient_is_reported():
    class Root(Separable):
        def loss(self, params, batch):
            return (params["x"] - params["x"].detach()).abs().sqrt().sum() + params["x"].sum()

    assert "gradient became" in run_inner(Root(), MaxDiagonal(3), lr=0.1).diverged


def test_a_last_step_to_infinity_is_reported():
    class Steep(Separable):
        def loss(self, params, batch):
            return 1e100 * params["x"].sum()

    run = run_inner(Steep(steps=1), Diagonal(), lr=1e250)
    assert "last step" in run.diverged
    assert all(bool(x.isfinite().all()) for x in run.end.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"steps": 0}, "steps must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        run_inner(Separable(), Diagonal(), **options)


def test_a_potential_without_metrics_is_refused():
    with pytest.raises(ValueError, match="metrics to learn"):
        run_inner(Separable(), Euclidean())


def test_a_loss_that_is_no_scalar_or_constant_is_refused():
    class Vector(Separable):
        def loss(self, params, batch):
            return params["x"] ** 2

    class Constant(Separable):
        def loss(self, params, batch):
            return torch.zeros(())

    with pytest.raises(ValueError, match="shape"):
        run_inner(Vector(), Diagonal())
    with pytest.raises(ValueError, match="does not depend"):
        run_inner(Constant(), Diagonal())


def test_a_parameter_that_the_loss_ignores_stays():
    class Half(Separable):
        def init(self):
            return {**super().init(), "idle": torch.ones(2, dtype=F64)}

    run = run_inner(Half(), Diagonal(), lr=0.05)
    assert torch.equal(run.end["idle"], torch.ones(2, dtype=F64))
    assert float(run.squares["idle"].sum()) == 0


def test_a_run_leaves_the_potential_and_the_task_as_they_were():
    task = Quadratic(0, 5)
    phi = potential_for(task, 3)
    before = {k: v.detach().clone() for k, v in phi.log_d.items()}
    first = run_inner(task, phi, lr=0.5)
    again = run_inner(task, phi, lr=0.5)
    assert all(torch.equal(phi.log_d[k], v) for k, v in before.items())
    assert torch.equal(first.losses, again.losses)

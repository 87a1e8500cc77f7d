"""The norm of the metrics and the projection onto its ball."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from metamd import Diagonal, Journal, MaxDiagonal, Refine, cli, load, meta_train, tasks
from metamd.norms import Ball, coordinates, metric_norms
from metamd.outer import Iterate

SHAPES = {"first.weight": (4, 3), "first.bias": (4,), "last.weight": (2, 4), "scale": ()}


def iterate(pieces, tying, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    potential = MaxDiagonal(pieces, tying=tying).bind({n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()})
    log_d = {k: torch.randn(v.shape, generator=g, dtype=torch.float64).to(dtype) for k, v in potential.log_d.items()}
    return Iterate(log_d, torch.zeros(pieces, dtype=torch.float64)), potential


def spelled_out(now, potential):
    """sqrt(sum D) with every coordinate of the model written out, by piece."""
    fit = now.apply(potential).bind({n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()})
    total = torch.zeros(len(now.offsets), dtype=torch.float64)
    for n, s in SHAPES.items():
        total += fit.metric(n).double().expand(len(now.offsets), *s).reshape(len(now.offsets), -1).sum(1)
    return total.sqrt()


@pytest.mark.parametrize("tying", ["parameter", "channel", "column", "tensor", "role"])
def test_the_norm_counts_every_coordinate(tying):
    now, potential = iterate(2, tying)
    assert torch.allclose(metric_norms(now.log_d, coordinates(potential, SHAPES)), spelled_out(now, potential))


@pytest.mark.parametrize("tying", ["parameter", "channel", "role"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_projection_is_inside_and_leaves_the_inside_alone(tying, dtype):
    now, potential = iterate(3, tying, dtype=dtype)
    counts = coordinates(potential, SHAPES)
    norms = metric_norms(now.log_d, counts)
    radius = float(norms.sort().values[1])  # one piece is outside, one on the sphere, one inside
    found = metric_norms(Ball(radius, counts).project(now).log_d, counts)
    assert bool((found <= radius).all())
    assert torch.allclose(found, norms.clamp_max(radius), rtol=1e-5)
    assert Ball(2 * float(norms.max()), counts).project(now) is now
    assert Ball(None, counts).project(now) is now


@pytest.mark.parametrize("tying", ["parameter", "channel", "role"])
def test_the_projection_is_the_nearest_point(tying):
    """Against scipy: minimise sum_i count_i (m_i - m0_i)^2 over sum_i count_i m_i^2 <= C^2."""
    now, potential = iterate(1, tying)
    counts = coordinates(potential, SHAPES)
    weights = np.concatenate([np.full(v.numel(), counts[k]) for k, v in now.log_d.items()])
    m0 = np.concatenate([(0.5 * v).exp().flatten().numpy() for v in now.log_d.values()])
    radius = 0.6 * math.sqrt(weights @ m0**2)
    inside = {"type": "ineq", "fun": lambda m: radius**2 - weights @ m**2, "jac": lambda m: -2 * weights * m}
    best = minimize(
        lambda m: weights @ (m - m0) ** 2,
        0.5 * m0,
        jac=lambda m: 2 * weights * (m - m0),
        constraints=[inside],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    ours = Ball(radius, counts).project(now)
    m = np.concatenate([(0.5 * v).exp().flatten().numpy() for v in ours.log_d.values()])
    assert np.allclose(m, best.x, rtol=1e-4)
    clipped = m0.clip(max=math.sqrt(radius**2 / weights.sum()))  # a double that is inside, and farther away
    assert weights @ (clipped - m0) ** 2 > weights @ (m - m0) ** 2 + 1e-6


@pytest.mark.parametrize(
    "options", [{}, {"refine": Refine(2)}, {"potential": MaxDiagonal(3)}], ids=["closed", "refine", "pieces"]
)
def test_meta_training_stays_inside_and_says_so(options, tmp_path):
    family, potential = tasks.quadratic((1.0, 1.0), coupling=0.05, steps=30), options.get("potential", Diagonal())
    options = {n: v for n, v in options.items() if n != "potential"}
    free = meta_train(family, potential, outer_steps=4, tasks_per_step=4, **options)
    counts = {"theta": 1.0}
    bound = 0.9 * float(metric_norms(free.potential.log_d, counts).max())
    kept = meta_train(family, potential, outer_steps=4, tasks_per_step=4, max_norm=bound, **options)
    assert bool((metric_norms(kept.potential.log_d, counts) <= bound).all())
    kept.save(tmp_path / "x.safetensors")
    assert load(tmp_path / "x.safetensors").header.max_norm == bound
    assert free.header.max_norm is None


def test_no_iterate_is_ever_outside(monkeypatch):
    """Also not those of the first scale, which is found by raising the metrics, nor the candidates."""
    seen = []
    apply = Iterate.apply

    def watched(self, potential):
        seen.append(float(metric_norms(self.log_d, {"theta": 1.0}).max()))
        return apply(self, potential)

    monkeypatch.setattr(Iterate, "apply", watched)
    meta_train(tasks.quadratic(steps=40), MaxDiagonal(2), outer_steps=3, tasks_per_step=4, max_norm=5.0)
    assert len(seen) > 10
    assert max(seen) <= 5.0


def test_a_ball_without_any_stable_metric_is_refused():
    with pytest.raises(ValueError, match=r"diverged.*with max_norm = 0.5, which may be too small"):
        meta_train(tasks.quadratic(steps=200), Diagonal(), outer_steps=2, tasks_per_step=2, max_norm=0.5)
    with pytest.raises(ValueError, match="max_norm must be positive and finite, got 0"):
        meta_train(tasks.quadratic(steps=20), Diagonal(), outer_steps=2, tasks_per_step=2, max_norm=0)


def test_another_bound_does_not_continue_a_run(tmp_path):
    options = {"outer_steps": 2, "tasks_per_step": 2, "journal": Journal(tmp_path / "run")}
    family = tasks.quadratic(steps=30)
    one = meta_train(family, Diagonal(), max_norm=6.0, **options)
    assert meta_train(family, Diagonal(), max_norm=6.0, **options).header.target_loss == one.header.target_loss
    with pytest.raises(ValueError, match="another configuration: max_norm"):
        meta_train(family, Diagonal(), max_norm=7.0, **options)


def test_from_the_command_line(tmp_path):
    out = tmp_path / "x.safetensors"
    quick = ["--steps", "20", "--outer-steps", "2", "--tasks", "2", "--max-norm", "6.5"]
    assert cli.run(["train", "quadratic", "--out", str(out), *quick]) == 0
    assert load(out).header.max_norm == 6.5

"""The weights of the active pieces against a brute-force solver in extended precision."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metamd.potentials import forms as simplex
from tests.helpers import brute_force_weights, draws


def problem(seed, pieces, size, spread, offsets, start="vertex"):
    rng = np.random.default_rng(seed)
    d = 10.0 ** rng.uniform(-spread / 2, spread / 2, (pieces, size))
    y = rng.normal(size=size) * 10 ** rng.uniform(-2, 2)
    b = rng.normal(size=pieces) * 10 ** rng.uniform(-2, 2) if offsets else np.zeros(pieces)
    w = np.eye(pieces)[rng.integers(pieces)] if start == "vertex" else rng.dirichlet(np.ones(pieces))
    return d, y, b, w


def evaluator(d, y, seen=None):
    def evaluate(w):
        dw = w @ d
        x = y / dw
        if seen is not None:
            seen.append(w)
        return (d * x * x).sum(1) / 2, (d * x * x / dw) @ d.T

    return evaluate


def h(d, y, b, w):
    return 0.5 * (y * y / (w @ d)).sum() - w @ b


@pytest.mark.law
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 10, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_agrees_with_brute_force(pieces, size):
    for k in range(draws(30)):
        seed = k + pieces + size  # a tenth has all spreads, offsets and starts among its sizes and pieces
        spread = (0.5, 2, 8)[seed % 3]
        d, y, b, w = problem(100 * pieces + seed, pieces, size, spread, seed % 2 == 0, ("vertex", "inside")[seed % 4 // 2])
        found = simplex.solve_weights(evaluator(d, y), w, b, tolerance=1e-15)
        _, x, missed = brute_force_weights(d, y, b)
        assert missed < 1e-15, "the oracle itself did not converge"
        assert np.abs((y / (found.weights @ d) - x) / x).max() < 1e-10


def test_brute_force_comparison_rejects_a_projected_gradient_step_solver():
    """The comparison above can fail: a solver that stops after a few gradient steps is far off."""
    d, y, b, w = problem(3, 3, 10, 2, False, "inside")
    for _ in range(20):
        q, _ = evaluator(d, y)(w)
        w = w * np.exp(0.1 * q / q.max())
        w /= w.sum()
    _, x, _ = brute_force_weights(d, y, b)
    assert np.abs((y / (w @ d) - x) / x).max() > 1e-3


def test_optimal_points_lie_on_kinks_and_off_them():
    """The catalogue above covers both: optima at a vertex and optima inside a face."""
    supports = set()
    for seed in range(40):
        d, y, b, w = problem(seed, 3, (1, 3, 100)[seed % 3], 2, seed % 2 == 0)
        supports.add(int((simplex.solve_weights(evaluator(d, y), w, b, tolerance=1e-15).weights > 0).sum()))
    assert supports == {1, 2, 3}


@given(
    seed=st.integers(0, 10**6),
    pieces=st.integers(1, 5),
    size=st.integers(1, 50),
    spread=st.floats(0, 8),
    offsets=st.booleans(),
)
@pytest.mark.law
@example(seed=0, pieces=3, size=3, spread=1.1794627807221372e-10, offsets=False)  # its model has a singular matrix
@settings(max_examples=draws(300))
def test_h_never_increases_and_weights_stay_in_the_simplex(seed, pieces, size, spread, offsets):
    d, y, b, w = problem(seed, pieces, size, spread, offsets, "inside")
    found = simplex.solve_weights(evaluator(d, y), w, b, tolerance=1e-15)
    assert (found.weights >= 0).all()
    assert abs(found.weights.sum() - 1) < 1e-12
    assert h(d, y, b, found.weights) <= h(d, y, b, w) + 1e-12 * (abs(h(d, y, b, w)) + np.abs(b).max())


def test_monotonicity_check_rejects_undamped_newton():
    """Without the line search h does increase: the law above would see it."""
    worse = 0
    for seed in range(200):
        d, y, b, w = problem(seed, 3, 5, 8, False, "inside")
        q, hessian = evaluator(d, y)(w)
        v = simplex.model_minimiser(hessian, q + b, w)
        worse += h(d, y, b, v) > h(d, y, b, w) * (1 + 1e-9)
    assert worse > 0


def test_equal_pieces_and_zero_dual_need_no_solve():
    d = np.ones((3, 4))
    for y in (np.zeros(4), np.ones(4)):
        found = simplex.solve_weights(evaluator(d, y), np.array([0.0, 1.0, 0.0]), np.zeros(3), tolerance=1e-15)
        assert found.iterations == 0


def test_gap_bounds_the_distance_to_the_minimum():
    for seed in range(50):
        d, y, b, w = problem(seed, 4, 20, 2, True, "inside")
        q, _ = evaluator(d, y)(w)
        best, _, _ = brute_force_weights(d, y, b)
        lowest = h(d, y, b, best.astype(float))
        assert h(d, y, b, w) - lowest <= simplex.gap_of(w, q + b) + 1e-9 * abs(lowest)


def test_model_minimiser_against_enumeration_of_faces():
    """The active-set method against the best of all faces of the simplex."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        n = int(rng.integers(1, 6))
        root = rng.normal(size=(n, n))
        hessian, forms, w = root @ root.T + 0.01 * np.eye(n), rng.normal(size=n), rng.dirichlet(np.ones(n))

        def model(v, hessian=hessian, forms=forms, w=w):
            return 0.5 * (v - w) @ hessian @ (v - w) - forms @ (v - w)

        best = np.inf
        for mask in range(1, 2**n):
            on = [i for i in range(n) if mask >> i & 1]
            kkt = np.block([[hessian[np.ix_(on, on)], np.ones((len(on), 1))], [np.ones((1, len(on))), np.zeros((1, 1))]])
            v = np.zeros(n)
            v[on] = np.linalg.solve(kkt, np.append((forms + hessian @ w)[on], 1.0))[:-1]
            if (v >= 0).all():
                best = min(best, model(v))
        assert model(simplex.model_minimiser(hessian, forms, w)) <= best + 1e-9

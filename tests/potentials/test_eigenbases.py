"""Eigenbases that follow both sides of a weight, against an obvious loop."""

import pytest
import torch

from metamd import Diagonal, MetaMD, Online
from metamd.potentials import eigenbases
from metamd.potentials.eigenbases import FOLLOWED, LEAST, SQUARED, turned_step

BETA, EPSILON = 0.9, 1e-8


def gradients(steps, rows=4, columns=6, dtype=torch.float64):
    """Gradients whose sides have strong directions that no axis is along."""
    g = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, n, generator=g, dtype=dtype) for n in (rows, columns))
    return [left @ torch.randn(rows, columns, generator=g, dtype=dtype) @ right for _ in range(steps)]


def slow(grads, every, carry=True):
    """The directions, number by number, of a weight whose own coordinates are the learned ones."""
    rows, columns = grads[0].shape
    u, v = torch.eye(rows).double(), torch.eye(columns).double()
    squares, mean = torch.zeros(rows, columns).double(), torch.zeros(rows, columns).double()
    left, right = torch.zeros(rows, rows).double(), torch.zeros(columns, columns).double()
    found = []
    for t, g in enumerate(grads):
        for i in range(rows):
            for j in range(columns):
                squares[i, j] = SQUARED * squares[i, j] + (1 - SQUARED) * (u[:, i] @ g @ v[:, j]) ** 2
        left = SQUARED * left + (1 - SQUARED) * sum(torch.outer(c, c) for c in g.T)
        right = SQUARED * right + (1 - SQUARED) * sum(torch.outer(r, r) for r in g)
        if t % every == 0:
            for at, products in enumerate((left, right)):
                old = (u, v)[at]
                new = torch.linalg.qr((products + LEAST * products.trace() * torch.eye(len(old))) @ old)[0]
                if carry:  # the variances of sums of uncorrelated numbers
                    weights = torch.tensor([[(a @ b) ** 2 for b in old.T] for a in new.T])
                    squares = weights @ squares if at == 0 else squares @ weights.T
                u, v = (new, v) if at == 0 else (u, new)
        mean = BETA * mean + (1 - BETA) * g
        ahead = (1 - BETA) * g + BETA * mean
        metric = (squares / (1 - SQUARED ** (t + 1))).sqrt() + EPSILON
        found.append(u @ ((u.T @ ahead @ v) / metric) @ v.T)
    return found


def taken(grads, online):
    """The directions of `MetaMD`."""
    x = torch.nn.Parameter(torch.zeros_like(grads[0]))
    optimiser = MetaMD([("x", x)], Diagonal(), metric=online)
    found = []
    for g in grads:
        before, x.grad = x.detach().clone(), g.clone()
        optimiser.step()
        found.append((before - x.detach()) * online.scale["x"])
    return found


@pytest.mark.parametrize("every", [1, 3])
def test_steps_are_those_of_the_obvious_loop(every):
    grads = gradients(12)
    online = Online("eigen", BETA, EPSILON, {"x": 50.0}, refresh=every)
    for found, wanted in zip(taken(grads, online), slow(grads, every), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def test_the_law_of_steps_rejects_squares_that_stay_behind():
    grads = gradients(12)
    found, wrong = taken(grads, Online("eigen", BETA, EPSILON, {"x": 50.0}))[-1], slow(grads, 1, carry=False)[-1]
    assert float((found - wrong).norm()) > 0.05 * float(wrong.norm())


def test_squares_are_carried_as_variances_of_uncorrelated_numbers():
    state = {}
    for g in gradients(5):
        turned_step(state, g, g, epsilon=EPSILON, turn=False)
    squares = state["squares"].clone()
    for side in ("rows", "columns"):
        eigenbases._turn(state, side)
    # both sides together, as one covariance of all numbers
    both = torch.kron(state["rows basis"].T.contiguous(), state["columns basis"].T.contiguous())
    covariance = both @ torch.diag(squares.flatten()) @ both.T
    torch.testing.assert_close(state["squares"].flatten(), covariance.diagonal())


def test_bases_become_eigenvectors_and_stay_orthogonal():
    state, grads = {}, gradients(1, dtype=torch.float32)
    for _ in range(300):
        turned_step(state, grads[0], grads[0], epsilon=EPSILON, turn=True)
    for side in ("rows", "columns"):
        basis, products = state[f"{side} basis"], state[f"{side} products"]
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), atol=1e-5, rtol=0)
        turned = basis.T @ products @ basis
        assert float((turned - torch.diag(turned.diagonal())).norm()) < 1e-3 * float(turned.norm())


def test_a_gradient_of_zero_and_one_that_is_not_a_number_end_no_run():
    state = {}
    zero = torch.zeros(3, 5)
    found, _ = turned_step(state, zero, zero, epsilon=EPSILON, turn=True)
    assert not found.any()
    found, _ = turned_step(state, zero + torch.nan, zero, epsilon=EPSILON, turn=True)
    assert found.shape == zero.shape


def test_a_long_side_keeps_its_coordinates():
    state, g = {}, torch.ones(3, FOLLOWED + 1)
    turned_step(state, g, g, epsilon=EPSILON, turn=True)
    assert "columns basis" not in state
    assert state["rows basis"].shape == (3, 3)


def test_a_weight_without_numbers_and_a_kernel_are_taken():
    shapes = {"none": (0, 3), "kernel": (4, 2, 3, 3), "vector": (5,), "number": ()}
    params = {n: torch.nn.Parameter(torch.ones(shape)) for n, shape in shapes.items()}
    optimiser = MetaMD(params.items(), Diagonal(), metric=Online("eigen", scale=dict.fromkeys(shapes, 10.0)))
    for p in params.values():
        p.grad = torch.full_like(p, 0.5)
    optimiser.step()
    assert all(bool((p < 1).all()) for p in params.values())

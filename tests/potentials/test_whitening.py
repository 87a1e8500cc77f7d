"""The polynomials that stand for an inverse root, and the root itself."""

import numpy as np
import pytest
import torch

from metamd.potentials import whitening
from metamd.potentials.whitening import MOST, POLYNOMIALS, REACH, _minimax, inverse_root, inverse_roots


def composed(iterations, x):
    for a, b, c in POLYNOMIALS[iterations]:
        x = x * (a + b * x**2 + c * x**4)
    return x


@pytest.mark.parametrize("iterations", range(1, MOST + 1))
def test_what_is_reached_is_near_one_and_what_is_not_is_short(iterations):
    reach = REACH[iterations - 1]
    assert np.abs(composed(iterations, np.linspace(reach, 1, 20_000)) - 1).max() < 0.08
    below = composed(iterations, np.linspace(0, reach, 1000))
    assert below[0] == 0
    assert below.min() >= 0
    assert below.max() < 1.08
    assert composed(iterations, np.array(reach / 10)) < 0.5


@pytest.mark.parametrize("low", [0.4, 0.1, 0.01])
def test_no_other_quintic_is_nearer_to_one(low):
    x, rng = np.linspace(low, 1, 5000), np.random.default_rng(0)
    powers = np.stack([x, x**3, x**5])
    *best, deviation = _minimax(low, 1.0)
    assert np.abs(best @ powers - 1).max() == pytest.approx(deviation, rel=1e-6)
    for _ in range(200):
        other = np.array(best) + 0.01 * rng.standard_normal(3) * np.abs(best)
        assert np.abs(other @ powers - 1).max() > deviation


@pytest.mark.parametrize("iterations", [0, 4])
def test_roots_are_found_together_as_they_are_alone(iterations):
    c = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = inverse_root(c @ c.mT, iterations)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], inverse_root((c @ c.mT)[i : i + 1], iterations))
    exact = together @ (c @ c.mT) @ together
    error = (exact - torch.eye(5, dtype=torch.float64)).abs().max()
    assert error < (1e-10 if not iterations else 0.2)


@pytest.mark.parametrize("iterations", [1, 3, 5])
def test_eigenvalues_and_products_give_the_same(iterations, monkeypatch):
    c = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_products = inverse_root(c @ c.mT, iterations)
    monkeypatch.setattr(whitening, "BY_EIGENVALUES", (6,) * (MOST + 1))
    torch.testing.assert_close(inverse_root(c @ c.mT, iterations), by_products)
    assert not torch.allclose(inverse_root(c @ c.mT, 0), by_products, rtol=1e-3)


@pytest.mark.parametrize("iterations", [0, 3])
def test_roots_of_similar_sizes_are_found_together_and_are_what_they_are_alone(iterations, monkeypatch):
    generator, asked = torch.Generator().manual_seed(0), []
    factors = [
        torch.randn(b, n, 2 * n, generator=generator).double() for b, n in [(1, 3), (2, 20), (1, 24), (1, 200), (3, 20)]
    ]
    products = [c @ c.mT for c in factors]
    monkeypatch.setattr(whitening, "inverse_root", lambda a, k: asked.append(a.shape) or inverse_root(a, k))
    found = inverse_roots(products, iterations)
    for root, product in zip(found, products, strict=True):
        torch.testing.assert_close(root, inverse_root(product, iterations), rtol=1e-9, atol=1e-12)
    together = [(1, 200, 200), (7, 24, 24)]  # zeros cost less than calls, but not beside a matrix of 200
    assert [tuple(x) for x in asked] == (together if iterations else [(1, 200, 200), (1, 24, 24), (5, 20, 20), (1, 3, 3)])
    mixed = inverse_roots([products[0], products[0].float()], iterations)
    assert [x.dtype for x in mixed] == [torch.float64, torch.float32]

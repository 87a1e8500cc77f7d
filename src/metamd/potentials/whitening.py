"""A^-1/2 of the products A = C C' of a weight: exactly by eigenvalues, or as far as a few iterations of products reach.

An iteration maps every singular value x of C by an odd polynomial x (a + b x^2 + c x^4), so that after a few of them those
above a `REACH` are near one and those below are still short. The polynomials are the best for that: each deviates least
from one on the interval that those before it have left [Amsel2025]. They act on A alone, with Z the product of all
(a + b R + c R^2) so far and R = Z A Z: four products of the size of A in an iteration, whatever the other side of C is.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

REACH = (0.4, 0.1, 0.025, 0.006, 0.0014)
"""After 1, 2, ... iterations: the shortest direction that is brought to 1 +- 0.07, as a share of the bound on the longest.

Each is about as short as that deviation allows. A sixth would reach what float32 loses in the products."""

MOST = len(REACH)


def _minimax(low: float, high: float) -> tuple[float, float, float, float]:
    """a, b, c of the odd quintic that is nearest to one on an interval, and by how much it deviates there.

    By Remez's exchange: it deviates equally, with alternating signs, at both ends and at its two extrema in between.
    """
    inner = ((3 * low + high) / 4, (low + 3 * high) / 4)
    for _ in range(12):  # it converges quadratically
        x = np.array([low, *inner, high])
        a, b, c, deviation = np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1), np.ones(4))
        root = math.sqrt(9 * b * b - 20 * a * c)  # of the derivative a + 3 b x^2 + 5 c x^4
        inner = (math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c)))
    return float(a), float(b), float(c), float(deviation)


def _composition(reach: float, iterations: int) -> tuple[tuple[float, float, float], ...]:
    """The coefficients (a, b, c) of every iteration."""
    low, high, found = reach, 1.0, []
    for _ in range(iterations):
        a, b, c, deviation = _minimax(low, high)
        found.append((a, b, c))
        low, high = 1 - deviation, 1 + deviation
    return tuple(found)


POLYNOMIALS = ((), *(_composition(reach, k) for k, reach in enumerate(REACH, start=1)))
"""The coefficients (a, b, c) of every iteration, by their number."""


BY_EIGENVALUES = (0, math.inf, math.inf, 768, 384, 256)
"""Rows from which eigenvalues are found sooner than the products of so many iterations, on one thread of a CPU.

They take as long as 33 products at 128 rows, 15 at 256, 10 at 512, 8 at 1024. Three iterations are 9 products, five 17."""


CALLS = 4_000_000
"""Multiplications that take as long as calling torch for the products of one size more, on one thread of a CPU."""


def inverse_roots(products: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """A^-1/2 of many positive semidefinite matrices, (batch, n, n) each; those of one size, or of similar ones, together."""
    found = list(products)
    groups: list[list[int]] = []
    for kind in dict.fromkeys(a.dtype for a in products):
        first = len(groups)
        for i in sorted((i for i, a in enumerate(products) if a.dtype == kind), key=lambda i: -products[i].shape[-1]):
            if len(groups) > first and _joins(products[i], products[groups[-1][0]].shape[-1], iterations):
                groups[-1].append(i)
            else:
                groups.append([i])
    for group in groups:
        size, begin = products[group[0]].shape[-1], 0
        # zeros beside a matrix change neither its norm nor what polynomials make of it
        parts = [pad(a, (0, size - a.shape[-1]) * 2) if a.shape[-1] < size else a for a in (products[i] for i in group)]
        roots = inverse_root(parts[0] if len(group) == 1 else torch.cat(parts), iterations)
        for i in group:
            count, own, _ = products[i].shape
            found[i], begin = roots[begin : begin + count, :own, :own], begin + count
    return found


def _joins(a: Tensor, large: int, iterations: int) -> bool:
    """Whether the roots of matrices are found sooner together with larger ones, zeros filling them up."""
    count, small, _ = a.shape
    if small == large or large >= BY_EIGENVALUES[iterations]:
        return small == large
    return count * (4 * iterations - 3) * (large**3 - small**3) < CALLS


def inverse_root(products: Tensor, iterations: int) -> Tensor:
    """A^-1/2 of positive semidefinite matrices (batch, n, n), by so many iterations; by eigenvalues for 0.

    By eigenvalues, directions lost in rounding, of a length below the root of the precision, are left small. What is not
    finite gives NaN: torch would refuse it when other tensors have moved already.
    """
    limits = torch.finfo(products.dtype)
    # the Frobenius norm bounds the largest eigenvalue
    bound = torch.linalg.vector_norm(products, dim=(-2, -1), keepdim=True).clamp_min_(limits.tiny)
    if iterations and (products.shape[-1] < BY_EIGENVALUES[iterations] or products.device.type != "cpu"):
        r, z = products / bound, products
        for i, (a, b, c) in enumerate(POLYNOMIALS[iterations]):
            p = torch.baddbmm(r, r, r, beta=b, alpha=c)
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            z = torch.bmm(p, z) if i else p
            r = torch.bmm(torch.bmm(p, r), p) if i < iterations - 1 else r
        return z.mul_(bound.rsqrt_())
    broken = products.sum((-2, -1), keepdim=True) * 0  # NaN if anything is not finite, else zero
    values, vectors = torch.linalg.eigh(products.nan_to_num(0.0, 0.0, 0.0))
    if iterations:  # the same polynomials, number by number
        x2, inverse = values.clamp_min(0) / bound.squeeze(-1), bound.squeeze(-1).rsqrt()
        for a, b, c in POLYNOMIALS[iterations]:
            factor = a + b * x2 + c * x2.square()
            x2, inverse = x2 * factor.square(), inverse * factor
    else:
        inverse = values.maximum((limits.eps * values[..., -1:]).clamp_min(limits.tiny)).rsqrt()
    return ((vectors * inverse.unsqueeze(-2)) @ vectors.mT).add_(broken)

"""Symmetric positive definite matrices: geometric means, and the geodesics on which the regret bound is convex."""

import torch
from torch import Tensor


def geometric_mean(a: Tensor, b: Tensor) -> Tensor:
    """A # B = A^1/2 (A^-1/2 B A^-1/2)^1/2 A^1/2, the middle of the geodesic between two positive definite matrices.

    Args:
        a: A.
        b: B.

    Example:
        >>> geometric_mean(torch.eye(2).double() * 4, torch.eye(2).double() * 9)
        tensor([[6., 0.],
                [0., 6.]], dtype=torch.float64)
    """
    # A = C C': A # B = C (C^-1 B C^-T)^1/2 C'
    c = torch.linalg.cholesky(a)
    inner = torch.linalg.solve_triangular(c, torch.linalg.solve_triangular(c, b, upper=False).mT, upper=False)
    return symmetric(c @ root(inner) @ c.mT)


def best_metric(x: Tensor, y: Tensor) -> Tensor:
    """X^-1 # Y, the minimiser D of tr(D X) + tr(D^-1 Y): the positive definite solution of D X D = Y.

    Args:
        x: X, positive definite.
        y: Y, positive semi-definite.

    Example:
        >>> best_metric(torch.eye(2).double() * 4, torch.eye(2).double() * 9)
        tensor([[1.5000, 0.0000],
                [0.0000, 1.5000]], dtype=torch.float64)
    """
    # X = C C': D = C^-T (C' Y C)^1/2 C^-1, so that X is never inverted
    c = torch.linalg.cholesky(x)
    half = torch.linalg.solve_triangular(c.mT, root(c.mT @ y @ c), upper=True)
    return symmetric(torch.linalg.solve_triangular(c.mT, half.mT, upper=True))


def root(a: Tensor) -> Tensor:
    """The positive semi-definite square root; eigenvalues that rounding made negative count as zero."""
    values, vectors = torch.linalg.eigh(symmetric(a))
    return symmetric((vectors * values.clamp_min(0).sqrt()) @ vectors.mT)


def symmetric(a: Tensor) -> Tensor:
    """Without what rounding left of asymmetry."""
    return 0.5 * (a + a.mT)


def towards(now: tuple[Tensor, Tensor], best: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """The way from D to another metric along the geodesic, every direction's logarithm by at most `reach`.

    With D^-1/2 B D^-1/2 = Q diag(e) Q' the result is D^1/2 Q diag(clamp(log e)) Q' D^1/2; between metrics that commute
    this limits the change of each log d on its own.

    Args:
        now: V and d of D = V diag(d) V'.
        best: B.
        reach: the largest change of a logarithm.

    Returns:
        The metric, and the changes of logarithms that were made.
    """
    vectors, d = now
    half, back = vectors * d.sqrt(), vectors / d.sqrt()
    values, turned = torch.linalg.eigh(symmetric(back.mT @ best @ back))
    logs = values.clamp_min(torch.finfo(values.dtype).tiny).log().clamp(-reach, reach)
    spanned = half @ turned
    return symmetric((spanned * logs.exp()) @ spanned.mT), logs

"""The arithmetic of phi(x) = max_j (1/2 x'D_j x + b_j) over named tensors: reductions to N or N x N numbers.

Tied coordinates share their metric, so a tensor enters every form through the sums of its squares over tied groups. These
have the metric's shape, not the tensor's: under any tying but "parameter" the weights are found at next to no cost.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from metamd.potentials.base import Params
from metamd.potentials.simplex import Array, Solution, solve
from metamd.potentials.tying import Shape

_JOIN_LIMIT = 2**20
_CHUNK = 2**16

Total = Callable[[Mapping[str, Tensor]], Array]
"""Adds contributions by tensor name; where tensors are sharded over processes, over the processes too."""


def local_total(contributions: Mapping[str, Tensor]) -> Array:
    """The sum over tensors, on one process that holds them all."""
    parts = list(contributions.values())
    return torch.stack([p.to(parts[0].device) for p in parts]).sum(0).cpu().numpy()


def widen(x: Tensor) -> Tensor:
    """Half precision as float32: squares of bfloat16 keep three digits otherwise."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def grouped_squares(x: Tensor, shape: Shape) -> Tensor:
    """The sums of x^2 over the coordinates that share a metric."""
    x = widen(x)
    return (x * x).sum_to_size(shape)


def half_forms(squares: Tensor, d: Tensor) -> Tensor:
    """1/2 x'D_j x of one tensor for every piece j, in float64."""
    return 0.5 * (d.to(squares.dtype).reshape(len(d), -1) @ squares.reshape(-1)).double()


def combine(d: Tensor, weights: Array) -> Tensor:
    """D(w) = sum_j w_j D_j; the piece itself, without a copy, where w is a vertex."""
    if d.shape[0] == 1:
        return d[0]
    support = np.flatnonzero(weights)
    if len(support) == 1:
        return d[int(support[0])]
    w = torch.as_tensor(weights, dtype=d.dtype, device=d.device)
    return torch.tensordot(w, d, dims=1)


def _joinable(squares: Params) -> bool:
    """Whether many small tensors may be handled as one: it saves calls, and copies little."""
    kinds = {(s.dtype, s.device) for s in squares.values()}
    return len(kinds) == 1 and sum(s.numel() for s in squares.values()) <= _JOIN_LIMIT


def _joined(squares: Params, metrics: Params, pieces: int) -> tuple[Params, Params]:
    rows = torch.cat([d.reshape(pieces, -1) for d in metrics.values()], 1)
    return {"": torch.cat([squares[n].reshape(-1) for n in metrics])}, {"": rows}


def find_weights(
    squares: Params, metrics: Params, weights: Array, offsets: Array, *, total: Total, tolerance: float
) -> Solution:
    """The weights of the exact step from the trial point that the present weights lead to.

    The trial x~ = D(w)^-1 y stands for the dual point: with any other weights v the point is x(v) = D(w)/D(v) x~, so that
    nothing but squares and metrics is needed.

    Args:
        squares: grouped squares of the trial point, by tensor.
        metrics: D_1 .. D_N by tensor.
        weights: w.
        offsets: b, with the forms of whatever is held still.
        total: how contributions of tensors are added.
        tolerance: see `solve`.
    """
    pieces = len(weights)
    metrics = {n: d.to(squares[n].dtype) for n, d in metrics.items()}
    if total is local_total and _joinable(squares):
        squares, metrics = _joined(squares, metrics, pieces)
    # In chunks that stay in the cache; the sums over chunks, in float64, lose nothing either.
    parts = {n: _chunks(squares[n], d, weights) for n, d in metrics.items()}

    def evaluate(w: Array) -> tuple[Array, Array]:
        sums = total(
            {n: torch.stack([_reductions(r, before, s, w) for r, before, s in chunks]).sum(0) for n, chunks in parts.items()}
        )
        return sums[:pieces], sums[pieces:].reshape(pieces, pieces)

    return solve(evaluate, weights, offsets, tolerance=tolerance)


def _chunks(squares: Tensor, d: Tensor, weights: Array) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Parts of the metrics, of D(w), and of the squares of the trial point, that go together."""
    rows = torch.split(d.reshape(len(d), -1), _CHUNK, 1)
    parts = torch.split(squares.reshape(-1), _CHUNK)
    return [(r, combine(r, weights), s) for r, s in zip(rows, parts, strict=True)]


def _reductions(rows: Tensor, before: Tensor, squares: Tensor, w: Array) -> Tensor:
    """q_j = 1/2 x'D_j x and H_jk = x'D_j D(w)^-1 D_k x at x = D(before)/D(w) x~, in one vector."""
    dw = combine(rows, w)
    s = squares * (before / dw).square()
    hessian = (rows * (s / dw)) @ rows.T
    return torch.cat([0.5 * (rows @ s), hessian.reshape(-1)]).double()

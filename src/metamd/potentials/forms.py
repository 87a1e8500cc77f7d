"""The arithmetic of phi(x) = max_j (1/2 x'D_j x + b_j) over named tensors, and the weights of its active pieces.

Tied coordinates share their metric, so a tensor enters every form through the sums of its squares over tied groups. These
have the metric's shape, not the tensor's: under any tying but "parameter" the weights are found at next to no cost.

The exact mirror step from the dual point y is x = D(w)^-1 y, where w minimises

    h(w) = 1/2 y' D(w)^-1 y - <w, b>,    D(w) = sum_j w_j D_j,    w in the simplex,

so that phi*(y) = min_w h(w). `solve_weights` sees N numbers or an N x N matrix; the vectors stay with `Evaluate`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metamd.potentials.base import HALVINGS, Params

Array = NDArray[np.float64]

Evaluate = Callable[[Array], tuple[Array, Array]]
"""w -> (q, H) at x = D(w)^-1 y: q_j = 1/2 x'D_j x, so that grad h = -(q + b), and the Hessian H_jk = x'D_j D(w)^-1 D_k x."""

Total = Callable[[Mapping[str, Tensor]], Array]
"""Adds contributions by tensor name; where tensors are sharded over processes, over the processes too."""

MAX_ITERATIONS = 200  # of Newton's method; a solution that stops here says its gap
_JOIN_LIMIT = 2**20  # numbers that are worth copying into one tensor
_BLOCK = 2**16  # numbers that stay in the cache


@dataclass(frozen=True)
class Solution:
    """Where the solver stopped: h(weights) is never above h of the weights it was given."""

    weights: Array  # w, a point of the simplex
    forms: Array  # q_j + b_j at x = D(w)^-1 y; they are equal on the support of w at the minimum
    gap: float  # max_j (q_j + b_j) - <w, q + b> >= 0, by which h(w) can exceed its minimum at most
    iterations: int  # Newton steps taken


def local_total(contributions: Mapping[str, Tensor]) -> Array:
    """The sum over tensors, on one process that holds them all."""
    parts = list(contributions.values())
    return torch.stack([p.to(parts[0].device) for p in parts]).sum(0).cpu().numpy()


def widen(x: Tensor) -> Tensor:
    """Half precision as float32: squares of bfloat16 keep three digits otherwise."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def grouped_squares(x: Tensor, shape: Sequence[int]) -> Tensor:
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


def find_weights(
    squares: Params, metrics: Params, weights: Array, offsets: Array, *, total: Total, tolerance: float
) -> Solution:
    """The weights of the exact step from the trial point that the present weights w lead to.

    The trial x~ = D(w)^-1 y stands for the dual point: with any other weights v the point is x(v) = D(w)/D(v) x~, so that
    nothing is needed but the metrics and the grouped squares of the trial point. `offsets` is b plus the forms of the
    tensors that do not move.
    """
    pieces = len(weights)
    rows = {n: d.to(squares[n].dtype).reshape(pieces, -1) for n, d in metrics.items()}
    flat = {n: squares[n].reshape(-1) for n in metrics}
    one_kind = len({(s.dtype, s.device) for s in flat.values()}) == 1
    if total is local_total and one_kind and sum(s.numel() for s in flat.values()) <= _JOIN_LIMIT:
        # many small tensors are handled as one: it saves calls, and copies little
        rows, flat = {"": torch.cat(list(rows.values()), 1)}, {"": torch.cat(list(flat.values()))}
    # In chunks that stay in the cache; the sums over chunks, in float64, lose nothing either.
    chunks = {n: zip(torch.split(d, _BLOCK, 1), torch.split(flat[n], _BLOCK), strict=True) for n, d in rows.items()}
    parts = {n: [(r, combine(r, weights), s) for r, s in pairs] for n, pairs in chunks.items()}

    def evaluate(w: Array) -> tuple[Array, Array]:
        sums = total({n: torch.stack([_reductions(*part, w) for part in found]).sum(0) for n, found in parts.items()})
        return sums[:pieces], sums[pieces:].reshape(pieces, pieces)

    return solve_weights(evaluate, weights, offsets, tolerance=tolerance)


def _reductions(rows: Tensor, before: Tensor, squares: Tensor, w: Array) -> Tensor:
    """q_j = 1/2 x'D_j x and H_jk = x'D_j D(w)^-1 D_k x at x = D(before)/D(w) x~, in one vector."""
    dw = combine(rows, w)
    s = squares * (before / dw).square()
    hessian = (rows * (s / dw)) @ rows.T
    return torch.cat([0.5 * (rows @ s), hessian.reshape(-1)]).double()


# the convex problem over the simplex


def gap_of(weights: Array, forms: Array) -> float:
    """max_j F_j - <w, F>: zero exactly when w is supported on the largest forms."""
    return float(forms.max() - weights @ forms)


def solve_weights(evaluate: Evaluate, weights: Array, offsets: Array, *, tolerance: float) -> Solution:
    """Minimise h over the simplex by Newton's method, never increasing h.

    Each step minimises the quadratic model of h over the whole simplex and then halves its way back until h has fallen. A
    segment between two points of the simplex stays inside it, so no projection is needed. It starts at `weights`, for
    example those of the previous step, and ends at a gap of `tolerance` relative to the forms.
    """
    w, iterations = weights, 0
    q, hessian = evaluate(w)
    while True:
        forms = q + offsets
        gap = gap_of(w, forms)
        found = None
        if gap > tolerance * (w @ q + np.abs(offsets).max() + np.finfo(np.float64).tiny) and iterations < MAX_ITERATIONS:
            found = _line_search(evaluate, w, q, offsets, model_minimiser(hessian, forms, w) - w)
        if found is None:  # the gap is closed, or the model promises less than rounding can show
            return Solution(w, forms, gap, iterations)
        w, q, hessian = found
        iterations += 1


def _slope(forms: Array, direction: Array) -> float:
    """-<grad h, direction>. The direction sums to zero only up to rounding, so a common part of the forms goes first."""
    return float((forms - forms.max()) @ direction)


def _line_search(
    evaluate: Evaluate, w: Array, q: Array, offsets: Array, direction: Array
) -> tuple[Array, Array, Array] | None:
    h = float(w @ (q - offsets))
    slope = _slope(q + offsets, direction)
    length = 1.0
    for _ in range(HALVINGS):
        # Both ends are in the simplex; clipping removes the rounding below zero, which D(w) would feel as a pole.
        trial = np.clip(w + length * direction, 0.0, None)
        trial /= trial.sum()
        q_trial, hessian = evaluate(trial)
        fell = float(trial @ (q_trial - offsets)) < h - 1e-4 * length * slope
        # h is convex: while it still slopes down at the trial, it fell all the way there, even where rounding hides it.
        if np.isfinite(q_trial).all() and (fell or _slope(q_trial + offsets, direction) >= 0):
            return trial, q_trial, hessian
        length /= 2
    return None


def model_minimiser(hessian: Array, forms: Array, w: Array) -> Array:
    """argmin over the simplex of 1/2 (v-w)'H(v-w) - <F, v-w>, by a primal active-set method from w."""
    v = w.copy()
    support = v > 0
    support[int(np.argmax(forms))] = True
    for _ in range(4 * len(w) + 4):
        residual = forms - hessian @ (v - w)
        p, multiplier = _equality_step(hessian, residual, support, int(np.argmax(v)))
        blocked = support & (p < 0) & (v + p < 0)
        if blocked.any():
            ratios = np.where(blocked, v / np.where(blocked, -p, 1.0), np.inf)
            first = int(np.argmin(ratios))
            v = np.clip(v + ratios[first] * p, 0.0, None)
            v[first] = 0.0
            support[first] = False
            continue
        v = np.clip(v + p, 0.0, None)
        reduced = np.where(support, -np.inf, forms - hessian @ (v - w) - multiplier)
        enters = int(np.argmax(reduced))
        if reduced[enters] <= 1e-12 * (abs(multiplier) + np.abs(forms).max()):
            break
        support[enters] = True
    return v / v.sum()


def _equality_step(hessian: Array, residual: Array, support: NDArray[np.bool_], pivot: int) -> tuple[Array, float]:
    """The step p on the support with sum p = 0 that solves the model there, and the multiplier of the sum.

    The pivot's weight is eliminated: with p_pivot = -(sum of the others) the others see a positive definite matrix.
    """
    p = np.zeros_like(residual)
    others = np.flatnonzero(support & (np.arange(len(p)) != pivot))
    if len(others):
        cross = hessian[others, pivot]
        reduced = hessian[np.ix_(others, others)] - cross - cross[:, None] + hessian[pivot, pivot]
        scale = 1 / np.sqrt(np.maximum(np.diag(reduced), 1e-30 * np.trace(hessian) + 1e-150))
        # The ridge turns a direction without curvature (equal pieces, few parameters) into a long step to the boundary.
        matrix = reduced * scale * scale[:, None] + 1e-12 * np.eye(len(others))
        slopes = (residual[others] - residual[pivot]) * scale
        try:
            p[others] = np.linalg.solve(matrix, slopes) * scale
        except np.linalg.LinAlgError:  # pieces that are equal but for rounding: what is left of the curvature is noise
            p[others] = np.linalg.lstsq(matrix, slopes)[0] * scale
        p[pivot] = -p[others].sum()
    return p, float(residual[pivot] - hessian[pivot] @ p)

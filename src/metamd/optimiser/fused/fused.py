"""The steps of N diagonal metrics in single passes over memory, with a largest form that is found lazily but exactly.

A step with piece j reads theta, g and D_j. To see whether j has the largest form afterwards one would have to read the
centre and all other metrics, which is most of the memory there is. Instead, the norms |x|_k of x = theta - c are bounded:
a move d shortens |x|_j by |d|_j at most and lengthens |x|_k by |d|_k at most, and over a chunk of coordinates

    |d|_k^2 = sum D_k d^2 <= min(max(D_k/D_j) sum e, |D_k/D_j|_2 |e|_2),    e = D_j d^2,

where what depends on metrics alone is computed once. The forms are computed only where these bounds cannot tell.
"""

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch

from metamd.optimiser.fused.native import Passes
from metamd.potentials.base import Move, Params
from metamd.potentials.simplex import Array, Evaluate

AHEAD = 1.25  # how much longer than the last move the next one is expected to be at most
MARGINS = {torch.float32: 1e-5, torch.float64: 1e-12}  # what rounding of the forms can hide, relative to their size


class FusedDiagonals:
    """The `FusedPass` of given diagonal metrics, for float32 and float64 on the CPU.

    It needs a C compiler, which it calls once per process. Metrics, centre and offsets are taken as they are now: make a
    new one after a change to them.

    Args:
        metrics: D_1 .. D_N by tensor, (N, ...) each and broadcastable against it.
        start: c by tensor; empty where the centre is the origin.
        offsets: b.

    Example:
        >>> x = {"x": torch.tensor([1.0, 2.0])}
        >>> fused = FusedDiagonals({"x": torch.tensor([[1.0, 1.0], [2.0, 4.0]])}, {}, np.zeros(2))
        >>> fused.advance(x, {"x": Move(torch.tensor([1.0, 1.0]))}, np.array([0.0, 1.0]), np.array([2.5, 9.0]))
        array([1.65625, 6.375  ])
        >>> x["x"]
        tensor([0.5000, 1.7500])
    """

    def __init__(self, metrics: Params, start: Params, offsets: Array) -> None:
        self._passes = Passes(metrics, start, len(offsets))
        self._offsets = np.array(offsets, dtype=np.float64)
        self._margin = max((MARGINS[d.dtype] for d in metrics.values()), default=0.0)
        self._lengths = np.full(len(offsets), np.inf)  # |d|_k of the last move, to guess whether laziness will do
        self.lazy_steps = self.full_steps = 0  # how often the bounds sufficed, and how often forms were computed
        self._known: tuple[Array, Array, Array] | None = None  # what `evaluate` would find at the weights of the trial

    def advance(self, params: Params, moves: Mapping[str, Move], weights: Array, forms: Array) -> Array:
        """Write the trial step into the parameters that have a move; return the forms after it, or bounds that decide."""
        b, piece = self._offsets, int(np.argmax(weights)) if weights.max() == 1 else -1
        self._known = None
        if piece >= 0 and decided(drift(forms, b, piece, AHEAD * self._lengths), piece, self._margin):
            self._lengths = np.sqrt(self._passes.follow(params, moves, piece))
            bounds = drift(forms, b, piece, self._lengths)
            if decided(bounds, piece, self._margin):
                self.lazy_steps += 1
                return bounds
            self.full_steps += 1
            return self.forms(params, params)
        self.full_steps += 1
        doubled, hessian, lengths = self._passes.advance(params, moves, weights, piece)
        self._lengths = np.sqrt(lengths) if piece >= 0 else np.full(len(b), np.inf)
        if len(moves) == len(params):
            self._known = weights, doubled / 2, hessian
        return doubled / 2 + b

    def forms(self, params: Params, names: Collection[str]) -> Array:
        """1/2 sum D_k (theta - c)^2 + b_k over the named tensors, computed exactly."""
        any_weights = np.eye(len(self._offsets))[0]
        return self._passes.evaluate(params, names, any_weights, any_weights)[0] / 2 + self._offsets

    def evaluate(self, params: Params, names: Collection[str], weights: Array) -> Evaluate:
        """The reductions that `solve` needs, from the trial point that the given weights led to."""
        known = self._known

        def reductions(w: Array) -> tuple[Array, Array]:
            if known is not None and (known[0] == w).all():
                return known[1], known[2]
            doubled, hessian = self._passes.evaluate(params, names, weights, w)
            return doubled / 2, hessian

        return reductions

    def rescale(self, params: Params, names: Collection[str], before: Array, after: Array) -> None:
        """theta <- D(before)/D(after) (theta - c) + c for the named tensors, in place."""
        self._passes.rescale(params, names, before, after)


def drift(forms: Array, offsets: Array, piece: int, lengths: Array) -> Array:
    """Bounds of the forms after a move: below for one piece, above for all others.

    F_j' >= 1/2 max(0, |x|_j - |d|_j)^2 + b_j and F_k' <= 1/2 (|x|_k + |d|_k)^2 + b_k, with |x|_k = sqrt(2 (F_k - b_k)).

    Args:
        forms: F, or bounds in the same sense.
        offsets: b.
        piece: j.
        lengths: |d|_k, or upper bounds.
    """
    after = np.empty_like(forms)
    for k, (form, b, length) in enumerate(zip(forms.tolist(), offsets.tolist(), lengths.tolist(), strict=True)):
        norm = math.sqrt(2 * max(form - b, 0.0))
        norm = max(norm - length, 0.0) if k == piece else norm + length
        after[k] = norm * norm / 2 + b
    return after


def decided(forms: Array, piece: int, margin: float) -> bool:
    """Whether a lower bound of one form exceeds the upper bounds of all others by more than rounding.

    Args:
        forms: the bounds.
        piece: the one that is bounded below.
        margin: what rounding can hide, relative to the largest form.
    """
    bounds = forms.tolist()
    least = margin * max(map(abs, bounds))
    return all(bounds[piece] - bound > least for k, bound in enumerate(bounds) if k != piece)  # NaN decides nothing

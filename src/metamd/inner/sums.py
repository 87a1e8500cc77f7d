"""What a run adds up to: squared gradients in the shape of the metrics, products for a learned basis, and its moments.

The moments of runs are two sums, from which the best metric follows; they add up over runs and files.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metamd.files.learned import Moments
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import combine, grouped_squares

if TYPE_CHECKING:
    from metamd.inner.objectives import Regret
    from metamd.inner.run import Trajectory

Array = NDArray[np.float64]


class GradientSums:
    """Sums of squared gradients in the shape of a potential's metrics, and by piece.

    Args:
        potential: the bound potential.
        products: whether to add up G'G of the weight matrices, which a learned basis is computed from; for one piece.
    """

    def __init__(self, potential: MaxDiagonal, *, products: bool = False) -> None:
        self.potential, self.basis = potential, potential.basis
        metrics = {n: potential.metric(n) for n in potential.slots}
        self.products: dict[str, Tensor] = {}
        if products:
            sizes = {n: self.basis.places[n].sizes["right"] for n in self.basis.learnable()}
            self.products = {f"right/{n}": metrics[n].detach().new_zeros(size, size) for n, size in sizes.items()}
        self._squares = {n: d.new_zeros(d.shape[1:]) for n, d in metrics.items()}
        self._views = {n: scalar(x) for n, x in self._squares.items()}
        # sum_t w_j D_j^2 / D(w_t)^2 g_t^2, (N, ...) by tensor, if there are several pieces
        self.by_piece = {n: torch.zeros_like(d) for n, d in metrics.items()} if potential.pieces > 1 else {}
        plain = not self.by_piece and self.basis.kind == "identity"
        self._one_each = plain and all(x.ndim == 0 for x in self._views.values())
        self._counted = dict.fromkeys(metrics, 0.0)

    def add(self, grads: Params, weights: Array | None = None, norms: list[float] | None = None) -> None:
        """Count one step's gradients, taken at w; where each tensor has one metric, its norms say all, if they are known."""
        if self._one_each and norms is not None:
            for n, norm in zip(grads, norms, strict=True):
                self._counted[n] += norm * norm
            return
        for n, grad in grads.items():
            product = self.products.get(f"right/{n}")
            if product is not None:
                m = self.basis.places[n].matrix(grad).to(product.dtype)
                product.addmm_(m.mT, m)
                continue
            g, into = self.basis.into(n, grad), self._views[n]
            if self.by_piece:
                assert weights is not None
                square = grouped_squares(g, tuple(into.shape))
                into += square
                self._share(n, square, weights)
            elif into.shape == g.shape and into.dtype == g.dtype:
                into.addcmul_(g, g)
            elif into.ndim == 0 and into.dtype == g.dtype:
                into += torch.dot(g.reshape(-1), g.reshape(-1))
            else:
                into += grouped_squares(g, tuple(into.shape))

    def _share(self, name: str, square: Tensor, weights: Array) -> None:
        support = np.flatnonzero(weights)
        if len(support) == 1:  # its share is all, which is not computed in every step
            self.by_piece[name][int(support[0])] += square
            return
        d = self.potential.metric(name)
        mixed = combine(d, weights)
        for j in support:
            self.by_piece[name][j] += float(weights[j]) * (d[j] / mixed).square() * square

    def squares(self) -> dict[str, Tensor]:
        """sum_t g_t^2 by tensor, in the coordinates of the basis: of products, the diagonals of V'(G'G)V."""
        found = {n: x + self._counted[n] for n, x in self._squares.items()} if self._one_each else dict(self._squares)
        turned = {n: self.basis.conjugated(n, self.products[f"right/{n}"]) for n in found if f"right/{n}" in self.products}
        return found | {n: m.diagonal().unsqueeze(0) for n, m in turned.items()}


def scalar(x: Tensor) -> Tensor:
    """A tensor with one number without dimensions, as a view; others as they are."""
    return x.view(()) if x.numel() == 1 else x


# moments


def moments_of(run: "Trajectory", potential: MaxDiagonal, objective: "Regret") -> Moments:
    """The moments of a run against the objective's comparator, with its prior."""
    u = objective.comparator.of(run)
    pseudo = objective.pseudo(run, u) if objective.prior else {}
    rates = {n: float(a.sum() / b.sum()) if bool(b.any()) else 0.0 for n, (a, b) in pseudo.items()}
    x: dict[str, Tensor] = {}
    y: dict[str, Tensor] = {}
    basis = potential.basis
    matrices = basis.learnable() if run.products else []
    for n, slot in potential.slots.items():
        delta = (u[n] - run.start[n]).double()
        if n in matrices:
            # Y counts 1 + prior times, and X is given the displacements that prior Y would have led to
            key, m, products = f"right/{slot.key}", basis.places[n].matrix(delta), run.products[f"right/{n}"].double()
            here = (m.mT @ m + objective.prior * rates.get(n, 0.0) * products) / run.lr
            there = (1 + objective.prior) * products * run.lr
        else:
            key, more = slot.key, pseudo.get(n, (0.0, 0.0))
            here = slot.gather((grouped_squares(basis.into(n, delta), slot.shape) + more[0]) / run.lr)
            there = slot.gather((run.squares[n].double() + more[1]) * run.lr)
        x[key], y[key] = (here, there) if key not in x else (x[key] + here, y[key] + there)
    return Moments(x, y)


def minimiser(moments: Moments, present: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """log D_i = (log y_i - log x_i) / 2, by key, one piece each.

    Where nothing moved or no gradient arrived the ratio says nothing, and the logarithm of the present metric is kept.
    """
    found = {}
    for key, kept in present.items():
        if key not in moments.x:  # it has a matrix
            continue
        x, y = moments.x[key], moments.y[key]
        known = (x > 0) & (y > 0)
        logs = 0.5 * (torch.where(known, y, 1.0).log() - torch.where(known, x, 1.0).log())
        found[key] = torch.where(known, logs, kept.detach()[0].to(logs.dtype)).to(kept.dtype).unsqueeze(0)
    return found

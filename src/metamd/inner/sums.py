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
from metamd.potentials.basis import Learned
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
        products: whether to add up what a learned basis is computed from; for one piece.
    """

    def __init__(self, potential: MaxDiagonal, *, products: bool = False) -> None:
        self.potential = potential
        self._products = Products(potential) if products and isinstance(potential.basis, Learned) else None
        metrics = {n: potential.metric(n) for n in potential.slots}
        self._squares = {n: d.new_zeros(d.shape[1:]) for n, d in metrics.items()}
        self._views = {n: scalar(x) for n, x in self._squares.items()}
        self._pieces = {n: torch.zeros_like(d) for n, d in metrics.items()} if potential.pieces > 1 else {}
        plain = not self._pieces and self._products is None and potential.basis.kind == "identity"
        self._one_each = plain and all(x.ndim == 0 for x in self._views.values())
        self._counted = dict.fromkeys(metrics, 0.0)

    def add(self, grads: Params, weights: Array | None = None, norms: list[float] | None = None) -> None:
        """Count one step's gradients, taken at w; where each tensor has one metric, its norms say all, if they are known."""
        if self._one_each and norms is not None:
            for n, norm in zip(grads, norms, strict=True):
                self._counted[n] += norm * norm
            return
        if self._products is not None:
            self._products.add(grads)
        for n, grad in grads.items():
            if self._products is not None and self._products.knows_squares(n):
                continue
            g, into = self.potential.basis.into(n, grad), self._views[n]
            if self._pieces:
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
        if len(support) == 1:
            self._pieces[name][int(support[0])] += square
            return
        d = self.potential.metric(name)
        mixed = combine(d, weights)
        for j in support:
            self._pieces[name][j] += float(weights[j]) * (d[j] / mixed).square() * square

    def squares(self) -> dict[str, Tensor]:
        """sum_t g_t^2 by tensor."""
        if self._products is not None:
            return self._squares | self._products.squares()
        if not self._one_each:
            return self._squares
        return {n: x + self._counted[n] for n, x in self._squares.items()}

    def products(self) -> dict[str, Tensor]:
        """As `Trajectory` has them; none if they were not asked for."""
        return {} if self._products is None else self._products.sums

    def by_piece(self) -> dict[str, Tensor]:
        """sum_t w_j D_j^2 / D(w_t)^2 g_t^2, (N, ...) by tensor."""
        return self._pieces or {n: s.unsqueeze(0) for n, s in self.squares().items()}


def scalar(x: Tensor) -> Tensor:
    """A tensor with one number without dimensions, as a view; others as they are."""
    return x.view(()) if x.numel() == 1 else x


class Products:
    """sum_t G_t'G_t of every weight matrix whose basis can be learned, by "right/name"."""

    def __init__(self, potential: MaxDiagonal) -> None:
        assert isinstance(potential.basis, Learned)
        self.basis = potential.basis
        self.sums: dict[str, Tensor] = {}
        for name in self.basis.learnable():
            size, like = self.basis.places[name].sizes["right"], potential.log_d[self.basis.places[name].key]
            self.sums[f"right/{name}"] = like.detach().new_zeros(size, size)

    def knows_squares(self, name: str) -> bool:
        """Whether the squares in the coordinates follow from the products, so that nobody needs to add them up."""
        return f"right/{name}" in self.sums

    def add(self, grads: Params) -> None:
        """Count one step's gradients."""
        for name, grad in grads.items():
            if (into := self.sums.get(f"right/{name}")) is not None:
                m = self.basis.places[name].matrix(grad).to(into.dtype)
                into.addmm_(m.mT, m)

    def squares(self) -> dict[str, Tensor]:
        """The diagonals of V'(G'G)V, (1, n) by tensor: the sums of squares in the coordinates of the basis."""
        names = (n for n in self.basis.places if self.knows_squares(n))
        turned = {n: self.basis.conjugated(n, self.sums[f"right/{n}"]) for n in names}
        return {n: m.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) for n, m in turned.items()}


# moments


def moments_of(run: "Trajectory", potential: MaxDiagonal, objective: "Regret") -> Moments:
    """The moments of a run against the objective's comparator, with its prior."""
    u = objective.comparator.of(run)
    pseudo = objective.pseudo(run, u) if objective.prior else {}
    rates = {n: float(a.sum() / b.sum()) if bool(b.any()) else 0.0 for n, (a, b) in pseudo.items()}
    x: dict[str, Tensor] = {}
    y: dict[str, Tensor] = {}
    basis = potential.basis
    matrices = basis.learnable() if run.products and isinstance(basis, Learned) else []
    for n, slot in potential.slots.items():
        delta = (u[n] - run.start[n]).double()
        if n in matrices and isinstance(basis, Learned):
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

    Where nothing moved or no gradient arrived the ratio says nothing, and the present metric is kept.

    Args:
        moments: summed over runs.
        present: the logarithms of the metrics to keep there, (1, ...) each; their types are those of the result.
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

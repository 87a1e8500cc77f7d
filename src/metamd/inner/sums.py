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
    """sum_t G_t'G_t of every weight matrix whose basis can be learned, with the other side's metric between.

    Of a side that learns a number per column and no basis, the diagonal alone.
    """

    def __init__(self, potential: MaxDiagonal) -> None:
        assert isinstance(potential.basis, Learned)
        self.basis, self.metrics = potential.basis, side_metrics(potential)
        self.sums: dict[str, Tensor] = {}
        for name, sides in self.basis.turning().items():
            for side in sides:
                size = self.basis.places[name].sizes[side]
                self.sums[f"{side}/{name}"] = self.metrics[f"right/{name}"].new_zeros(size, size)
        self.diagonals = {f"{side}/{name}" for name, sides in self.basis.scaling().items() for side in sides}
        for key in self.diagonals:
            self.sums[key] = self.metrics[key].new_zeros(len(self.metrics[key]))

    def knows_squares(self, name: str) -> bool:
        """Whether the squares in the coordinates follow from the products, so that nobody needs to add them up."""
        return self.basis.sides == "right" and f"right/{name}" in self.sums

    def add(self, grads: Params) -> None:
        """Count one step's gradients."""
        for name, grad in grads.items():
            if name not in self.basis.places:
                continue
            m = self.basis.places[name].matrix(grad)
            if self.basis.sides == "right":
                _add(self.sums.get(f"right/{name}"), m.mT, m)
                continue
            for side, other in (("right", "left"), ("left", "right")):
                between = self.basis.scaled(name, other, m, 1 / self.metrics[f"{other}/{name}"])
                if f"{side}/{name}" in self.diagonals:
                    self.sums[f"{side}/{name}"] += (m * between).sum(-2)
                    continue
                pair = (m.mT, between) if side == "right" else (between, m.mT)
                _add(self.sums.get(f"{side}/{name}"), *pair)

    def squares(self) -> dict[str, Tensor]:
        """The diagonals of V'(G'G)V, (1, n) by tensor: the sums of squares in the coordinates of the basis."""
        found = {}
        for name in self.basis.places:
            if self.knows_squares(name):
                turned = self.basis.conjugated(name, "right", self.sums[f"right/{name}"])
                found[name] = turned.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        return found


def side_metrics(potential: MaxDiagonal) -> dict[str, Tensor]:
    """The diagonals of the metric's factors by "side/name", of a bound potential of one piece in a learned basis."""
    assert isinstance(potential.basis, Learned)
    found = {}
    for name, place in potential.basis.places.items():
        left, right = potential.slots[name].split(potential.log_d[place.key][0].detach())
        found[f"right/{name}"] = right.exp()
        if left is not None:
            found[f"left/{name}"] = left.exp()
    return found


def _add(into: Tensor | None, a: Tensor, b: Tensor) -> None:
    if into is not None:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


# moments


def moments_of(run: "Trajectory", potential: MaxDiagonal, objective: "Regret") -> Moments:
    """The moments of a run against the objective's comparator, with its prior."""
    u = objective.comparator.of(run)
    pseudo = objective.pseudo(run, u) if objective.prior else {}
    rates = {n: float(a.sum() / b.sum()) if bool(b.any()) else 0.0 for n, (a, b) in pseudo.items()}
    x: dict[str, Tensor] = {}
    y: dict[str, Tensor] = {}
    matrices = MatrixMoments(potential) if run.products else None
    for n, slot in potential.slots.items():
        start = run.start[n]
        if matrices is not None and matrices.knows(n):
            matrices.add(n, run, (u[n] - start).double(), objective.prior, rates[n] if rates else 0.0)
            continue
        delta = potential.basis.into(n, (u[n] - start).double())
        more = pseudo.get(n, (0.0, 0.0))
        here = (grouped_squares(delta, slot.shape) + more[0]) / run.lr
        there = (run.squares[n].double() + more[1]) * run.lr
        x[slot.key] = x.get(slot.key, 0) + slot.gather(here)
        y[slot.key] = y.get(slot.key, 0) + slot.gather(there)
    return Moments(x, y) if matrices is None else Moments(x | matrices.x, y | matrices.y)


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


class MatrixMoments:
    """The matrices of a run by "side/key", added up over the tensors that share a basis.

    Args:
        potential: as the run was made with: bound, of one piece, in a learned basis.
    """

    def __init__(self, potential: MaxDiagonal) -> None:
        assert isinstance(potential.basis, Learned)
        self.basis, self.metrics = potential.basis, side_metrics(potential)
        self.x: dict[str, Tensor] = {}
        self.y: dict[str, Tensor] = {}

    def knows(self, name: str) -> bool:
        """Whether factors, or the numbers of a side of their own, can be learned for this tensor."""
        return bool(self.basis.turning().get(name) or self.basis.scaling().get(name))

    def add(self, name: str, run: "Trajectory", delta: Tensor, prior: float, rate: float) -> None:
        """Count one tensor of a run.

        Args:
            name: of the tensor.
            run: the record, with its products.
            delta: u - theta_1, in float64.
            prior: its strength s: Y counts 1 + s times, and X is given the displacements that s Y would have led to.
            rate: the squared step size with which, as `typical_rates` has it.
        """
        place = self.basis.places[name]
        m = place.matrix(delta)
        scaling = self.basis.scaling()[name]
        for side in (*self.basis.turning()[name], *scaling):
            other = "left" if side == "right" else "right"
            rows = m if side == "right" else m.mT
            between, weight, weight_back = rows, float(len(rows)), float(len(rows))
            if f"{other}/{name}" in self.metrics:
                d = self.metrics[f"{other}/{name}"].double()
                scaled = self.basis.scaled(name, other, m, d)
                between = scaled if side == "right" else scaled.mT
                weight, weight_back = float(d.sum()), float((1 / d).sum())
            key = f"{side}/{place.key}"
            products = run.products[f"{side}/{name}"].double()
            moved = (rows * between).sum(0) if side in scaling else rows.mT @ between
            x = (moved + prior * rate * weight / weight_back * products) / run.lr
            y = (1 + prior) * products * run.lr
            self.x[key] = self.x[key] + x if key in self.x else x
            self.y[key] = self.y[key] + y if key in self.y else y

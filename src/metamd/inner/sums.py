"""What the gradients of a run add up to: squares in the shape of the metrics, products for a learned basis."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import combine, grouped_squares
from metamd.potentials.kronecker import Learned

Array = NDArray[np.float64]


class GradientSums:
    """Sums of squared gradients in the shape of a potential's metrics, by phase and by piece.

    Args:
        potential: the bound potential.
        phases: the number of phases.
        products: whether to add up what a learned basis is computed from; for one piece.
    """

    def __init__(self, potential: MaxDiagonal, phases: int, *, products: bool = False) -> None:
        self.potential = potential
        self._products = Products(potential, phases) if products and isinstance(potential.basis, Learned) else None
        metrics = {n: potential.metric(n) for n in potential.slots}
        self._phases = {n: d.new_zeros(phases, *d.shape[1:]) for n, d in metrics.items()}
        self._rows = [{n: scalar(x[i]) for n, x in self._phases.items()} for i in range(phases)]
        self._pieces = {n: torch.zeros_like(d) for n, d in metrics.items()} if potential.pieces > 1 else None
        plain = self._pieces is None and self._products is None and potential.basis.kind == "identity"
        self._one_each = plain and all(x.ndim == 0 for x in self._rows[0].values())
        self._counted = [dict.fromkeys(metrics, 0.0) for _ in range(phases)]

    def add(self, grads: Params, weights: Array, phase: int, norms: list[float] | None = None) -> None:
        """Count one step's gradients.

        Args:
            grads: by tensor.
            weights: w that they were taken at.
            phase: that the step belongs to.
            norms: of the gradients, if they are known: where each has one metric, nothing else is needed.
        """
        if self._one_each and norms is not None:
            counted = self._counted[phase]
            for n, norm in zip(grads, norms, strict=True):
                counted[n] += norm * norm
            return
        rows = [self._rows[phase][n] for n in grads]
        if self._products is not None:
            self._products.add(grads, phase)
        for (n, grad), into in zip(grads.items(), rows, strict=True):
            if self._products is not None and self._products.knows_squares(n):
                continue
            g = self.potential.basis.into(n, grad)
            if self._pieces is None and into.shape == g.shape and into.dtype == g.dtype:
                into.addcmul_(g, g)
                continue
            if self._pieces is None and into.numel() == 1 and into.dtype == g.dtype:
                into += torch.dot(g.reshape(-1), g.reshape(-1))
                continue
            square = grouped_squares(g, tuple(into.shape))
            into += square
            if self._pieces is not None:
                self._share(n, square, weights)

    def _share(self, name: str, square: Tensor, weights: Array) -> None:
        assert self._pieces is not None
        support = np.flatnonzero(weights)
        if len(support) == 1:
            self._pieces[name][int(support[0])] += square
            return
        d = self.potential.metric(name)
        mixed = combine(d, weights)
        for j in support:
            self._pieces[name][j] += float(weights[j]) * (d[j] / mixed).square() * square

    def by_phase(self) -> dict[str, Tensor]:
        """sum_t g_t^2, (phases, ...) by tensor."""
        if self._products is not None:
            return self._phases | self._products.squares()
        if not self._one_each:
            return self._phases
        return {n: x + x.new_tensor([c[n] for c in self._counted]).view_as(x) for n, x in self._phases.items()}

    def products(self) -> dict[str, Tensor]:
        """As `Trajectory` has them; none if they were not asked for."""
        return {} if self._products is None else self._products.sums

    def by_piece(self) -> dict[str, Tensor]:
        """sum_t w_j D_j^2 / D(w_t)^2 g_t^2, (N, ...) by tensor."""
        return self._pieces or {n: s.sum(0, keepdim=True) for n, s in self.by_phase().items()}


def scalar(x: Tensor) -> Tensor:
    """A tensor with one number without dimensions, as a view; others as they are."""
    return x.view(()) if x.numel() == 1 else x


class Products:
    """sum_t G_t'G_t of every weight matrix whose basis can be learned, by phase; with the other side's metric between.

    Of a side that learns a number per column and no basis, the diagonal alone.

    Args:
        potential: the bound potential, of one piece, in a learned basis.
        phases: the number of phases.
    """

    def __init__(self, potential: MaxDiagonal, phases: int) -> None:
        assert isinstance(potential.basis, Learned)
        self.basis, self.phases = potential.basis, phases
        self.metrics = side_metrics(potential)
        self.sums: dict[str, Tensor] = {}
        for name, sides in self.basis.turning().items():
            for side in sides:
                size = self.basis.places[name].sizes[side]
                self.sums[f"{side}/{name}"] = self.metrics[f"right/{name}"].new_zeros(phases, size, size)
        self.diagonals = {f"{side}/{name}" for name, sides in self.basis.scaling().items() for side in sides}
        for key in self.diagonals:
            self.sums[key] = self.metrics[key].new_zeros(phases, len(self.metrics[key]))

    def knows_squares(self, name: str) -> bool:
        """Whether the squares in the coordinates follow from the products, so that nobody needs to add them up."""
        return self.basis.sides == "right" and f"right/{name}" in self.sums

    def add(self, grads: Params, phase: int) -> None:
        """Count one step's gradients."""
        for name, grad in grads.items():
            if name not in self.basis.places:
                continue
            m = self.basis.places[name].matrix(grad)
            if self.basis.sides == "right":
                _add(self.sums.get(f"right/{name}"), phase, m.mT, m)
                continue
            for side, other in (("right", "left"), ("left", "right")):
                between = self.basis.scaled(name, other, m, 1 / self.metrics[f"{other}/{name}"])
                if f"{side}/{name}" in self.diagonals:
                    self.sums[f"{side}/{name}"][..., phase, :] += (m * between).sum(-2)
                    continue
                pair = (m.mT, between) if side == "right" else (between, m.mT)
                _add(self.sums.get(f"{side}/{name}"), phase, *pair)

    def squares(self) -> dict[str, Tensor]:
        """The diagonals of V'(G'G)V, (phases, 1, n) by tensor: the sums of squares in the coordinates of the basis."""
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


def _add(into: Tensor | None, phase: int, a: Tensor, b: Tensor) -> None:
    if into is None:
        return
    a, b = a.to(into.dtype), b.to(into.dtype)
    if a.ndim == 2:
        into[phase].addmm_(a, b)
    else:
        into[..., phase, :, :] += a @ b

"""What runs say about one diagonal metric, as two sums that can be added up over runs, nights and files."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metamd.files.learned import Moments
from metamd.inner.sums import side_metrics
from metamd.potentials.forms import grouped_squares
from metamd.potentials.kronecker import Learned

if TYPE_CHECKING:
    from metamd.inner.objectives import Regret
    from metamd.inner.run import Trajectory
    from metamd.potentials.diagonal import MaxDiagonal


def moments_of(run: "Trajectory", potential: "MaxDiagonal", objective: "Regret") -> Moments:
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
        there = (run.squares[n].double().sum(0) + more[1]) * run.lr
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

    def __init__(self, potential: "MaxDiagonal") -> None:
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
            products = run.products[f"{side}/{name}"].double().sum(0)
            moved = (rows * between).sum(0) if side in scaling else rows.mT @ between
            x = (moved + prior * rate * weight / weight_back * products) / run.lr
            y = (1 + prior) * products * run.lr
            self.x[key] = self.x[key] + x if key in self.x else x
            self.y[key] = self.y[key] + y if key in self.y else y

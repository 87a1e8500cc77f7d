"""What runs say about one diagonal metric, as two sums that can be added up over runs, nights and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metamd.potentials.mixture import grouped_squares

if TYPE_CHECKING:
    from metamd.inner import Trajectory
    from metamd.objectives import Regret
    from metamd.potentials.diagonal import MaxDiagonal


@dataclass(frozen=True)
class Moments:
    """What one run says about every metric: E = sum_i (D_i x_i + y_i / D_i) / 2.

    Args:
        x: the squared displacements delta_i^2 / eta, by key, summed over tied coordinates.
        y: the squared gradients eta sum_t g_ti^2, likewise.
    """

    x: dict[str, Tensor]
    y: dict[str, Tensor]

    @classmethod
    def of(cls, run: "Trajectory", potential: "MaxDiagonal", objective: "Regret") -> "Moments":
        """The moments of a run against the objective's comparator, with its prior."""
        u = objective.comparator.of(run)
        means = objective.prior_of(run, u)
        x: dict[str, Tensor] = {}
        y: dict[str, Tensor] = {}
        for n, slot in potential.slots.items():
            start = run.start[n]
            delta = potential.basis.into(n, (u[n] - start).double())
            squares = run.squares[n].double().sum(0)
            tied = start.numel() / max(squares.numel(), 1)
            here = (grouped_squares(delta, slot.shape) + tied * means[0]) / run.lr
            there = (squares + tied * means[1]) * run.lr
            x[slot.key] = x.get(slot.key, 0) + here.reshape(slot.stored)
            y[slot.key] = y.get(slot.key, 0) + there.reshape(slot.stored)
        return cls(x, y)

    @classmethod
    def total(cls, moments: "Sequence[Moments]", weights: Sequence[float]) -> "Moments":
        """The weighted sum, over every key that any of them has.

        Args:
            moments: of the runs.
            weights: one for each.
        """
        sums: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for weight, one in zip(weights, moments, strict=True):
            for into, part in zip(sums, (one.x, one.y), strict=True):
                for key, value in part.items():
                    into[key] = into[key] + weight * value if key in into else weight * value
        return cls(*sums)

    def minimiser(self, present: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """log D_i = (log y_i - log x_i) / 2, by key, one piece each.

        Where nothing moved or no gradient arrived the ratio says nothing, and the present metric is kept.

        Args:
            present: the logarithms of the metrics to keep there, (1, ...) each; their types are those of the result.
        """
        found = {}
        for key, kept in present.items():
            x, y = self.x[key], self.y[key]
            known = (x > 0) & (y > 0)
            logs = 0.5 * (torch.where(known, y, 1.0).log() - torch.where(known, x, 1.0).log())
            found[key] = torch.where(known, logs, kept.detach()[0].to(logs.dtype)).to(kept.dtype).unsqueeze(0)
        return found

"""The size of the metrics, and keeping it below a bound that was stated before any task was seen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metamd.inner.closed_form import Iterate
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.tying import Shape


def metric_norms(potential: MaxDiagonal, shapes: Mapping[str, Shape]) -> Tensor:
    """||m_j||_2 = sqrt(sum_i D_ji) over all coordinates i of the model, for every piece j; m_j = sqrt(D_j) is diag M_j.

    In a learned basis it is sqrt(trace D_j).

    Args:
        potential: bound to a model.
        shapes: of the model's tensors, in their order.

    Example:
        >>> potential = MaxDiagonal(1, tying="channel").with_metrics({"w": torch.tensor([[1.0, 4.0]]).log()})
        >>> metric_norms(potential.bind({"w": torch.zeros(2, 5)}), {"w": (2, 5)})
        tensor([5.], dtype=torch.float64)
    """
    total = torch.zeros(potential.pieces, dtype=torch.float64)
    for name, shape in zip(potential.slots, shapes.values(), strict=True):
        d = potential.metric(name).detach().double().reshape(potential.pieces, -1)
        total += d.sum(1).cpu() * (math.prod(shape) / max(d.shape[1], 1))
    return total.sqrt()


@dataclass(frozen=True)
class Ball:
    """The metrics with ||m_j||_2 <= C for every piece: where `meta_train(max_norm=C)` stays.

    Args:
        radius: C; None for all metrics.
        potential: the structure of the potential.
        shapes: of the model's tensors.

    Example:
        >>> inside = Ball(1.0, MaxDiagonal(1), {"x": (4,)}).project(Iterate({"x": torch.zeros(1, 4)}, torch.zeros(1)))
        >>> inside.log_d["x"].exp()
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    radius: float | None = None
    potential: MaxDiagonal = field(default_factory=MaxDiagonal)
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.radius is not None and not 0 < self.radius < math.inf:
            raise ValueError(f"max_norm must be positive and finite, got {self.radius}. Leave it out for no bound.")

    def norms(self, iterate: Iterate) -> Tensor:
        """||m_j||_2 of these metrics."""
        model = {n: torch.zeros(s) for n, s in self.shapes.items()}
        return metric_norms(iterate.apply(self.potential).bind(model), self.shapes)

    def project(self, iterate: Iterate) -> Iterate:
        """The nearest metrics inside, nearest in the Euclidean distance between the m_j.

        The point of a ball that is nearest to one outside is on the same ray: all of log D_j falls by one number.

        Args:
            iterate: the metrics.
        """
        if self.radius is None:
            return iterate
        fall = 2 * (self.norms(iterate) / self.radius).log().clamp_min(0)
        if not bool((fall > 0).any()):
            return iterate
        moved = {k: _lower(v, fall / iterate.basis.terms(k)) for k, v in iterate.log_d.items()}
        return iterate.moved(moved)


def _lower(log_d: Tensor, fall: Tensor) -> Tensor:
    # Rounding must not leave the ball again: a few units in the last place further.
    largest = float(log_d.detach().abs().max()) if log_d.numel() else 0.0
    slack = 4 * torch.finfo(log_d.dtype).eps * (1 + largest)
    down = torch.where(fall > 0, fall + slack, 0.0).to(log_d.device)
    return (log_d.double() - down.reshape(-1, *[1] * (log_d.ndim - 1))).to(log_d.dtype)

"""The exact gradient by forward mode."""

from dataclasses import dataclass

import torch

from metamd.inner.estimators.base import Estimator, Hypergradient, given_up, learnable
from metamd.inner.estimators.tangents import Layout, carry
from metamd.inner.objectives import Objective
from metamd.inner.run import Cost
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class Forward(Estimator):
    """The exact gradient, one tangent for each of the H = N x groups metrics and N offsets [Franceschi2017].

    z_{t+1} = A_t z_t + B_t with A_t = I - eta D^-1 H_t. Memory is O(H numel), flat in T: for tied metrics or tiny models.

    Args:
        tangents: how many are carried at a time. With fewer than H, the run is repeated for the others.

    Example:
        >>> Forward(tangents=8)
        Forward(tangents=8)
    """

    tangents: int | None = None

    def __post_init__(self) -> None:
        if self.tangents is not None and self.tangents < 1:
            raise ValueError(f"tangents must be at least 1, got {self.tangents}. Pass None to carry all at once.")

    def __call__(
        self,
        task: Task,
        potential: MaxDiagonal,
        objective: Objective,
        *,
        lr: float = 1.0,
        exact: bool = True,
        steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Hypergradient:
        """Run the task, once for every `tangents` directions."""
        leaf = learnable(potential, task.init())
        layout, cost = Layout.of(leaf), Cost()
        size = len(layout)
        found = []
        for first in range(0, size, self.tangents or size):
            rows = torch.arange(first, min(first + (self.tangents or size), size))
            directions = torch.zeros(len(rows), size, dtype=torch.float64)
            directions[torch.arange(len(rows)), rows] = 1.0
            part = carry(task, leaf, objective, directions, lr=lr, exact=exact, steps=steps)
            cost = cost + part.cost
            if part.run.diverged:
                return given_up(part.run, leaf, cost)
            found.append(part.along)
        grads, offsets = layout.split(torch.cat(found), leaf)
        return Hypergradient(grads, offsets, part.value, part.run, cost)

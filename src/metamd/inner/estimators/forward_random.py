"""An unbiased gradient from a few random tangents."""

from dataclasses import dataclass

import torch

from metamd.inner.estimators.base import Estimator, Hypergradient, given_up, learnable, needs_generator
from metamd.inner.estimators.tangents import Layout, carry
from metamd.inner.objectives import Objective
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class ForwardRandom(Estimator):
    """(1/k) sum_i (dE . v_i) v_i with entries of v_i of +-1 at random: its mean is the gradient [Baydin2022].

    Memory O(k numel), flat in T; the variance is about H/k times the squared gradient.

    Args:
        tangents: k.

    Example:
        >>> ForwardRandom(tangents=4)
        ForwardRandom(tangents=4)
    """

    tangents: int = 1

    def __post_init__(self) -> None:
        if self.tangents < 1:
            raise ValueError(f"tangents must be at least 1, got {self.tangents}. More of them lower the variance.")

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
        """Run the task once, with k tangents."""
        leaf = learnable(potential, task.init())
        layout = Layout.of(leaf)
        source = needs_generator(generator, self)
        signs = torch.randint(2, (self.tangents, len(layout)), generator=source, dtype=torch.float64)
        directions = 2 * signs - 1
        part = carry(task, leaf, objective, directions, lr=lr, exact=exact, steps=steps)
        if part.run.diverged:
            return given_up(part.run, leaf, part.cost)
        grads, offsets = layout.split(part.along @ directions / self.tangents, leaf)
        return Hypergradient(grads, offsets, part.value, part.run, part.cost)

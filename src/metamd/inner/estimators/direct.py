"""The direct gradient: how the objective changes with the metrics if the run stays as it was."""

from dataclasses import dataclass

import torch

from metamd.inner.estimators.base import Estimator, Hypergradient, differentiate, given_up, learnable
from metamd.inner.objectives import Objective
from metamd.inner.run import run_inner
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class Direct(Estimator):
    """dE/dD with g_t, w_t and theta_{T+1} held fixed: first derivatives only, at the cost of the run itself.

    Example:
        >>> Direct()
        Direct()
    """

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
        """Run the task and differentiate the record."""
        run = run_inner(task, potential, lr=lr, exact=exact, steps=steps, reference=objective.reference)
        leaf = learnable(potential, run.start)
        if run.diverged:
            return given_up(run, leaf, run.cost)
        value = objective.value(run, leaf)
        grads, offsets, _ = differentiate(value, leaf)
        return Hypergradient(grads, offsets, float(value.detach()), run, run.cost)

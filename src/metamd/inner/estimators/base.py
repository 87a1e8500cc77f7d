"""What every estimator of the hypergradient takes and returns."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from metamd.inner.objectives import Objective
from metamd.inner.run import Cost, Trajectory, run_inner
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class Hypergradient:
    """The gradient of a meta-objective on one task.

    Args:
        grads: dE / d log_d, by key; zero if the run diverged.
        offsets: dE / d offsets.
        value: E; infinite if the run diverged, so that no mean over tasks can hide it.
        trajectory: the run.
        cost: what it took, the run included.
    """

    grads: dict[str, Tensor]
    offsets: Tensor
    value: float
    trajectory: Trajectory
    cost: Cost

    @property
    def switches(self) -> int:
        """How often the active pieces changed; pathwise derivatives do not see by how much a switch itself moves."""
        return self.trajectory.switches

    @property
    def diverged(self) -> str:
        """Why the run was given up; empty if it was not."""
        return self.trajectory.diverged


class Estimator(ABC):
    """A way to differentiate a meta-objective through a run."""

    @abstractmethod
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
        """Run the task and differentiate.

        Args:
            task: the problem.
            potential: phi; bound to the task's tensors if it is not yet.
            objective: E.
            lr: eta.
            exact: False takes the paper's step, under which a run jumps where the active piece changes.
            steps: T; the task's own if not given.
            generator: where randomness comes from, for the estimators that are random.
        """


def learnable(potential: MaxDiagonal, start: Params) -> MaxDiagonal:
    """A copy of the potential, bound and centred, whose metrics are leaves to differentiate by."""
    fit = (potential if potential.slots else potential.bind(start)).centred_at(start)
    leaves = fit.with_metrics({k: v.detach().clone() for k, v in fit.log_d.items()}, fit.offsets.detach().clone())
    fit.table, fit.offsets = leaves.table, leaves.offsets
    return fit


def differentiate(value: Tensor, potential: MaxDiagonal, *more: Tensor) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    """The derivatives of a scalar by the metrics' logarithms, by the offsets, and by further tensors."""
    keys = list(potential.log_d)
    leaves = [*potential.log_d.values(), potential.offsets, *more]
    if not value.requires_grad:
        found = tuple(torch.zeros_like(x) for x in leaves)
    else:
        found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return dict(zip(keys, found, strict=False)), found[len(keys)], list(found[len(keys) + 1 :])


def given_up(run: Trajectory, potential: MaxDiagonal, cost: Cost) -> Hypergradient:
    """What is returned for a run that diverged."""
    zeros = {k: torch.zeros_like(v.detach()) for k, v in potential.log_d.items()}
    return Hypergradient(zeros, torch.zeros_like(potential.offsets.detach()), float("inf"), run, cost)


def foreseen(
    objective: Objective, task: Task, potential: MaxDiagonal, *, lr: float, exact: bool, steps: int | None
) -> tuple[Objective, Cost]:
    """The objective with the constants it takes from the end of a run; a run is made beforehand if it needs any."""
    if not objective.looks_ahead:
        return objective, Cost()
    run = run_inner(task, potential, lr=lr, exact=exact, steps=steps)
    return objective if run.diverged else objective.held(run), run.cost


def needs_generator(generator: torch.Generator | None, estimator: object) -> torch.Generator:
    """The generator, or a sentence."""
    if generator is None:
        name = type(estimator).__name__
        raise ValueError(f"{name} is random and needs a generator. Pass generator=torch.Generator().manual_seed(0).")
    return generator

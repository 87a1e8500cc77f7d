"""What the regret of a run is measured against: its own end, the end of another optimiser's longer run, or a known point."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from metamd.inner.run import Cost, OptimiserSteps, Trajectory, Watch, train
from metamd.potentials.base import Params
from metamd.tasks.base import Task

Pseudo = Mapping[str, tuple[Tensor, Tensor]]
"""Squared displacements and squared gradients that nobody saw, by tensor, over coordinates that share a metric."""


@dataclass(frozen=True)
class End:
    """The end of the run itself, held fixed: free, but coordinates that move little starve round after round."""

    def of(self, run: Trajectory) -> Params:
        """theta_{T+1}, without its dependence on the metrics."""
        return run.end


@dataclass(frozen=True)
class Reference:
    """The end of a longer run of another optimiser, from the same start: what D was used cannot move it.

    The rate falls linearly to zero, so that the end is not noise.

    Args:
        optimiser: a torch optimiser; called as optimiser(params, lr=lr).
        lr: its first learning rate.
        factor: how many times longer than the run it is.
        chosen_on: hashes of the tasks that lr was chosen on, if it was.

    Example:
        >>> from metamd import Regret
        >>> Regret(comparator=Reference(torch.optim.Adam, lr=1e-3, factor=2))
        Regret(comparator=Reference(Adam, lr=0.001, factor=2), prior=0.0)
    """

    optimiser: Callable[..., Optimizer] = torch.optim.Adam
    lr: float = 1e-3
    factor: float = 2.0
    chosen_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.lr > 0 or not self.factor > 0:
            raise ValueError(f"Reference needs a positive lr and factor, got lr={self.lr}, factor={self.factor}.")

    def __repr__(self) -> str:
        name = getattr(self.optimiser, "__name__", repr(self.optimiser))
        return f"Reference({name}, lr={self.lr:g}, factor={self.factor:g})"

    def of(self, run: Trajectory) -> Params:
        """theta_* of the record."""
        if run.reference is None:
            raise ValueError("this run has no reference point. Run it with run_inner(..., reference=objective.reference).")
        return run.reference

    def run(self, task: Task, start: Params, steps: int, *, watch: Watch | None = None) -> tuple[dict[str, Tensor], Cost]:
        """Train the task from its start; the batches of steps beyond T are those that follow.

        Args:
            task: the problem.
            start: theta_1.
            steps: T.
            watch: sees every step.
        """
        params = {n: x.detach().clone().requires_grad_() for n, x in start.items()}
        total = max(1, round(self.factor * steps))
        optimiser = self.optimiser(list(params.values()), lr=self.lr)
        steps_of = OptimiserSteps(params, optimiser, lambda t: 1 - t / total)
        done = train(task, steps_of, total, watch=watch, until=None)
        return steps_of.model(), done.cost


@dataclass(frozen=True)
class Fixed:
    """A known point.

    Args:
        point: u.
        pseudo: what a prior adds, as `Regret.pseudo` has it; that of the run at hand if not given.
    """

    point: Params
    pseudo: "Pseudo | None" = None

    def of(self, run: Trajectory) -> Params:
        """The point."""
        return self.point

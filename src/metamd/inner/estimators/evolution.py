"""The gradient of a smoothed objective from values alone."""

import copy
from dataclasses import dataclass

import torch

from metamd.inner.estimators.base import Estimator, Hypergradient, given_up, learnable, needs_generator
from metamd.inner.estimators.tangents import Layout
from metamd.inner.objectives import Objective
from metamd.inner.run import run_inner
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class Evolution(Estimator):
    """(1/pairs) sum_i (E(h + sigma v_i) - E(h - sigma v_i)) / (2 sigma) v_i, v_i normal: antithetic evolution strategies.

    Its mean is the gradient of E smoothed over a radius sigma in (log_d, offsets): it sees across switches, jumps and
    losses that cannot be differentiated twice. What the objective holds fixed is that of the unperturbed run. If a perturbed
    run diverges, so does the estimate, with that run's reason.

    Args:
        pairs: how many pairs of runs.
        sigma: the radius.

    Example:
        >>> Evolution(pairs=8, sigma=0.05)
        Evolution(pairs=8, sigma=0.05)
    """

    pairs: int = 8
    sigma: float = 0.01

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(f"pairs must be at least 1, got {self.pairs}. More of them lower the variance.")
        if not 0 < self.sigma < float("inf"):
            raise ValueError(f"sigma must be positive, got {self.sigma}. 0.01 changes every metric by about one per cent.")

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
        """Run the task 2 x pairs + 1 times."""
        source = needs_generator(generator, self)
        centre = run_inner(task, potential, lr=lr, exact=exact, steps=steps, reference=objective.reference)
        leaf, cost = learnable(potential, centre.start), centre.cost
        if centre.diverged:
            return given_up(centre, leaf, cost)
        held, layout = objective.held(centre), Layout.of(leaf)
        found = torch.zeros(len(layout), dtype=torch.float64)
        for _ in range(self.pairs):
            v = torch.randn(len(layout), generator=source, dtype=torch.float64)
            ends = []
            for sign in (1.0, -1.0):
                there = _moved(leaf, *layout.split(sign * self.sigma * v, leaf))
                run = run_inner(task, there, lr=lr, exact=exact, steps=steps, reference=centre.reference)
                cost = cost + run.cost
                if run.diverged:
                    return given_up(run, leaf, cost)
                with torch.no_grad():
                    ends.append(float(held.value(run, there)))
            found += (ends[0] - ends[1]) / (2 * self.sigma * self.pairs) * v
        grads, offsets = layout.split(found, leaf)
        return Hypergradient(grads, offsets, float(objective.value(centre, leaf).detach()), centre, cost)


@torch.no_grad()
def _moved(potential: MaxDiagonal, logs: Params, offsets: torch.Tensor) -> MaxDiagonal:
    new = copy.deepcopy(potential)
    for key, leaf in new.log_d.items():
        leaf.add_(logs[key])
    new.offsets.add_(offsets)
    return new

"""The minimiser of the regret bound for one piece: no derivative, no outer learning rate."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metamd.files.learned import Moments
from metamd.inner.estimators.base import Estimator, Hypergradient
from metamd.inner.estimators.direct import Direct
from metamd.inner.moments import minimiser, moments_of
from metamd.inner.objectives import Objective, Regret
from metamd.inner.run import Trajectory
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task


@dataclass(frozen=True)
class ClosedForm(Estimator):
    """D_i = eta sqrt(E sum_t g_ti^2 / E delta_i^2), the minimiser of `Regret` with the runs held fixed [Khodak2019].

    Tied coordinates enter both sums together. Training the tasks and setting D, in turn, is a fixed-point solver; on a
    separable quadratic with curvatures a_i it converges to D_i = eta a_i, Newton's metric. Called like the other estimators
    it returns the direct gradient, which is zero at the minimiser; `minimise` gives the minimiser for many runs.

    Example:
        >>> ClosedForm()
        ClosedForm()
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
        """Run the task."""
        _regret(objective, potential)
        return Direct()(task, potential, objective, lr=lr, exact=exact, steps=steps)

    def minimise(
        self,
        runs: Sequence[Trajectory],
        potential: MaxDiagonal,
        objective: Objective,
        *,
        weights: Sequence[float] | None = None,
    ) -> dict[str, Tensor]:
        """The logarithms of the best metrics for these runs, by key; runs that diverged are left out.

        Where nothing moved or no gradient arrived the ratio says nothing, and the present metric is kept. A learned basis
        stays as it is.

        Args:
            runs: their records.
            potential: phi, bound, with the metrics to keep where the runs say nothing.
            objective: `Regret`.
            weights: of the runs; equal if not given.
        """
        regret = _regret(objective, potential)
        if weights is not None and len(weights) != len(runs):
            raise ValueError(f"there must be one weight for every run, got {len(weights)} for {len(runs)} runs.")
        if potential.basis.kind == "both":
            raise ValueError(
                "in a basis of both sides the best metric is not known coordinate by coordinate. Learn it by meta_train."
            )
        shares = [1.0] * len(runs) if weights is None else list(weights)
        used = [(s, moments_of(r, potential, regret)) for s, r in zip(shares, runs, strict=True) if not r.diverged]
        if not used:
            raise ValueError(
                f"there is no run to learn from: all {len(runs)} diverged. Start from larger metrics or lower lr."
            )
        total = Moments.total([m for _, m in used], [s for s, _ in used])
        return minimiser(total, potential.log_d)


def _regret(objective: Objective, potential: MaxDiagonal) -> Regret:
    if not isinstance(objective, Regret):
        name = type(objective).__name__
        raise ValueError(f"ClosedForm minimises Regret, got {name}. Use Forward() or Reverse() for other objectives.")
    if potential.pieces > 1:
        raise ValueError(
            f"ClosedForm has a solution for one piece, got {potential.pieces}: with the active pieces held fixed, a piece "
            "that is never the largest has no best metric. Pass Diagonal(), or use Forward() or Reverse()."
        )
    return objective

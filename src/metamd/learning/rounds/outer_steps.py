"""What is said about the outer steps: when they stop, how they are refined, and the record of each."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from metamd.inner.estimators import ClosedForm, Estimator, Reverse
from metamd.inner.objectives import Objective
from metamd.learning.rounds.outer import Adam, Outer, TrustRegion


@dataclass(frozen=True)
class Stopping:
    """When a stage has converged: the objective changes by less than this, relatively, in so many outer steps in a row.

    For the closed form, the change is how much its minimiser gains on the very runs it was found from. For gradients, it is
    the change between the mean objective of the last steps and of as many before.

    Args:
        tolerance: the relative change; 0 never stops early.
        window: outer steps in a row.
    """

    tolerance: float = 1e-3
    window: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must lie in [0, 1), got {self.tolerance}. It is a relative change; 0 never stops.")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}. It counts outer steps.")


@dataclass(frozen=True)
class Refine:
    """Outer steps along the hypergradient, after the closed form.

    Args:
        steps: how many at most.
        estimator: of the hypergradient.
        outer: the rule of the outer step.
        objective: what is refined, and judged by afterwards, if it is not that of the training.
    """

    steps: int = 10
    estimator: Estimator = field(default_factory=Reverse)
    outer: Outer = field(default_factory=Adam)
    objective: Objective | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps of Refine must be at least 1, got {self.steps}. Pass refine=None for none.")
        if isinstance(self.estimator, ClosedForm) or isinstance(self.outer, TrustRegion):
            raise ValueError("Refine follows a gradient. Give it an estimator such as Reverse() and Adam() as outer rule.")


@dataclass(frozen=True)
class OuterStep:
    """What happened in one outer step.

    Args:
        step: its number, from 1.
        stage: what it was for.
        objective: mean over the tasks that finished.
        bound: mean certified bound on the regret against the ends of the runs; NaN where steps were not exact.
        loss: mean training loss over the runs.
        change: the relative change of the objective that `Stopping` looks at.
        switches: how often active pieces changed, over all tasks.
        tasks: how many there were.
        unsettled: mean gradient at the ends of the runs relative to that at their starts, under `PaperBound`.
        diverged: one sentence for each task that diverged.
        gradients: gradient evaluations.
        hvps: Hessian-vector products.
        seconds: wall-clock time.
        note: why a stage ended, if it did.
    """

    step: int
    stage: str
    objective: float = math.nan
    bound: float = math.nan
    loss: float = math.nan
    change: float = math.nan
    switches: int = 0
    tasks: int = 0
    unsettled: float = math.nan
    diverged: tuple[str, ...] = ()
    gradients: int = 0
    hvps: int = 0
    seconds: float = 0.0
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types: what is not a finite number is null."""
        plain = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in asdict(self).items()}
        return plain | {"diverged": list(self.diverged)}

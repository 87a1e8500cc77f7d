"""A meta-training as part of an experiment: what was learned or why nothing was, and what was warned about."""

import warnings
from collections.abc import Mapping
from typing import Any

from metamd.comparison.parallel import own_warnings
from metamd.experiments.synthetic import race
from metamd.experiments.synthetic.race import Problems
from metamd.files.learned import LearnedOptimiser
from metamd.files.store import Result
from metamd.learning.meta import meta_train
from metamd.tasks.base import TaskFamily

Training = tuple[LearnedOptimiser | str, list[str]]
"""What was learned, or why nothing could be; and the names of the warnings."""


def train(family: TaskFamily, options: Mapping[str, Any], seed: int) -> Training:
    """Meta-train; a training that diverges for good is a result, not a failure.

    Args:
        family: the tasks.
        options: of `meta_train`.
        seed: of everything random.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: LearnedOptimiser | str = meta_train(family, **options, seed=seed)
        except ValueError as error:
            found = str(error)
    return found, own_warnings(caught)


def raced(
    problems: Problems, training: Training, tolerances: Mapping[str, float], limit: int, *, exact: bool = True
) -> Result:
    """Count the iterations of what was learned on test problems.

    Args:
        problems: they are not those of the training.
        training: what was learned.
        tolerances: by name.
        limit: the most iterations.
        exact: False takes the paper's step.
    """
    geometry, warned = training
    if isinstance(geometry, str):
        return {"failed": geometry, "warnings": warned}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entries = race.learned(problems, geometry, list(tolerances.values()), limit, exact=exact)
    return {
        "iterations": {name: entry.counts for name, entry in zip(tolerances, entries, strict=True)},
        "metrics": metrics_of(geometry),
        "cost": {k: v for k, v in (geometry.header.cost or {}).items() if k != "seconds"},
        "warnings": sorted({*warned, *own_warnings(caught)}),
        "path": entries[0].path,
    }


def metrics_of(geometry: LearnedOptimiser) -> list[list[float]]:
    """The metrics of the only tensor, by piece.

    Args:
        geometry: of a family with one tensor.
    """
    return next(v.detach().exp().tolist() for v in geometry.potential.log_d.values())

"""The default recipe for networks, which `meta_train`, `metamd train` and the experiments call alike."""

import time
from dataclasses import replace
from typing import Any

from metamd.files.learned import LearnedOptimiser, total_cost
from metamd.files.store import Journal
from metamd.inner.executor import Executor
from metamd.inner.objectives import Reference
from metamd.learning.reference import learn_from_reference, tuned_reference
from metamd.learning.usage import Choices, learn_usage
from metamd.potentials.diagonal import Kronecker, MaxDiagonal
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Counted


def has_weights(family: TaskFamily) -> bool:
    """Whether its tasks train matrices, such as the weights of a network, and not vectors alone."""
    return any(x.ndim > 1 for x in family.example().values())


def learn_network(
    family: TaskFamily,
    potential: MaxDiagonal | None = None,
    *,
    reference: Reference | None = None,
    tasks: int = 8,
    choices: Choices | None = Choices(),  # noqa: B008
    seed: int = 0,
    journal: Journal | None = None,
    workers: int | Executor = 1,
) -> LearnedOptimiser:
    """Learned coordinates from runs of a tuned Adam, and the best usage of them, on training tasks alone.

    Args:
        family: of networks.
        potential: what is learned; `Kronecker(rank="auto")` if not given.
        reference: the optimiser whose runs are learned from; `tuned_reference` if not given.
        tasks: half as many runs as are learned from.
        choices: what a usage is chosen from; None chooses none.
        seed: of everything random.
        journal: where finished parts are kept, so that the same call continues one that was stopped, to the same result:
            each rate of the reference, the geometry, the online scales, and each run of a usage.
        workers: processes that share the runs, or an `Executor`; the result does not depend on them.
    """
    began, counted = time.perf_counter(), Counted(family)
    kept: dict[str, Any] = {"seed": seed, "journal": journal, "workers": workers}
    reference = reference or tuned_reference(counted, **kept)
    tuning = counted.cost(began)
    shape = Kronecker(rank="auto") if potential is None else potential
    learned = learn_from_reference(family, shape, reference=reference, tasks=2 * tasks, **kept)
    learned = replace(learned, header=replace(learned.header, cost=total_cost(learned.header.cost, tuning)))
    return learned if choices is None else learn_usage(learned, family, choices, reference=reference, **kept)

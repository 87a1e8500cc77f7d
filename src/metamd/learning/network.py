"""What `meta_train` does with a family alone: the ways that the experiments of docs/results.md speak for."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from metamd.files.learned import LearnedOptimiser, total_cost
from metamd.files.store import Journal
from metamd.inner.comparators import Reference
from metamd.inner.estimators import Forward, Reverse
from metamd.inner.objectives import PRIOR, LogGap
from metamd.learning.reference import learn_from_reference
from metamd.learning.rounds.outer import Adam, Refine
from metamd.learning.usage import RULES, learn_usage, tuned_reference
from metamd.learning.usage_trials import JudgedOn, Watch
from metamd.potentials.diagonal import Kronecker, MaxDiagonal
from metamd.potentials.online import Online
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Counted

FEW = 16
"""Metrics up to which forward mode is taken, which has a tangent for each."""


def has_weights(family: TaskFamily) -> bool:
    """Whether its tasks train matrices, such as the weights of a network, and not vectors alone.

    Args:
        family: one task of it is built.
    """
    return any(x.ndim > 1 for x in family.example().values())


def refinement(family: TaskFamily) -> Refine | None:
    """How a diagonal learned for it is refined, if at all: by digits where those count, as the regret counts losses.

    Args:
        family: of vectors.
    """
    if not family.counts_digits:
        return None
    few = sum(x.numel() for x in family.example().values()) <= FEW
    return Refine(12, Forward() if few else Reverse(), Adam(0.05), LogGap(1e-12))


def learn_network(
    family: TaskFamily,
    *,
    potential: MaxDiagonal | None = None,
    reference: Reference | None = None,
    prior: float = PRIOR,
    tasks: int = 8,
    seed: int = 0,
    usage: bool = True,
    judged_on: JudgedOn = "train",
    rules: Sequence[Online] = RULES,
    watch: Watch | None = None,
    journal: Journal | None = None,
) -> LearnedOptimiser:
    """Learned coordinates from runs of a tuned Adam, and the best usage of them, on training tasks alone.

    Args:
        family: of networks.
        potential: what is learned; `Kronecker(rank="auto")` if not given.
        reference: whose runs are learned from; `tuned_reference` if not given.
        prior: as for `Regret`.
        tasks: half as many runs as are learned from.
        seed: of everything random.
        usage: whether to choose one.
        judged_on: as for `learn_usage`.
        rules: as for `learn_usage`.
        watch: as for `learn_usage`.
        journal: where finished parts are kept, so that the same call continues one that was stopped, to the same result:
            each rate of the reference, the geometry, the online scales, and each run of a usage. Of several processes,
            which all do the same, the first one writes.
    """
    began, counted = time.perf_counter(), Counted(family)
    reference = reference or tuned_reference(counted, seed=seed, journal=journal)
    tuning = counted.cost(began)
    shape = Kronecker(rank="auto") if potential is None else potential
    learned = learn_from_reference(
        family, shape, reference=reference, tasks=2 * tasks, prior=prior, seed=seed, journal=journal
    )
    learned = replace(learned, header=replace(learned.header, cost=total_cost(learned.header.cost, tuning)))
    if not usage:
        return learned
    options: dict[str, Any] = {"judged_on": judged_on, "rules": rules, "seed": seed, "watch": watch, "journal": journal}
    return learn_usage(learned, family, reference=reference, **options)

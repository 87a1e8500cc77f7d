"""What `meta_train` does with a family alone: the ways that the experiments of docs/results.md speak for."""

from metamd.choosing import Watch, learn_usage, tuned_reference
from metamd.following import learn_from_reference
from metamd.gap import LogGap
from metamd.hypergrad import Forward, Reverse
from metamd.learned import LearnedOptimiser
from metamd.outer import Adam
from metamd.outer_steps import Refine
from metamd.potentials.kronecker import Kronecker
from metamd.tasks.base import TaskFamily

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


def learn_network(family: TaskFamily, *, tasks: int = 8, seed: int = 0, watch: Watch | None = None) -> LearnedOptimiser:
    """Learned coordinates from runs of a tuned Adam, and the best usage of them, on training tasks alone.

    Args:
        family: of networks.
        tasks: half as many runs as are learned from.
        seed: of everything random.
        watch: as for `learn_usage`.
    """
    reference = tuned_reference(family, seed=seed)
    learned = learn_from_reference(family, Kronecker(rank="auto"), reference=reference, tasks=2 * tasks, seed=seed)
    return learn_usage(learned, family, reference=reference, seed=seed, watch=watch)

"""How many directions `rank="auto"` may keep: all of a side where that is cheap beside the gradient of a batch."""

import math

from torch.utils.flop_counter import FlopCounterMode

from metamd.inner.closed_form import LARGEST
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.kronecker import Learned
from metamd.tasks.base import Task

AFFORDED = 0.25
"""The share of the operations of a gradient that products with learned factors may take."""


def affording(potential: MaxDiagonal, task: Task) -> MaxDiagonal:
    """The same potential; under `rank="auto"` its basis keeps all directions of the sides that can be afforded.

    With `LARGEST` directions a side costs two thin products, with all n of them one product of 2n operations for each number
    of the tensor. The cheapest sides come first, until a quarter of the operations of a gradient is spent. Convolutions,
    whose kernels are used at many places, leave room for more than matrices do.

    Args:
        potential: bound to the task's parameters, for the caller alone: its basis is replaced.
        task: one of the family, of which a batch is drawn.
    """
    basis = potential.basis
    if not isinstance(basis, Learned) or basis.rank != "auto":
        return potential
    thin: dict[str, int] = {}
    whole: dict[str, int] = {}
    for name, sides in basis.turning().items():
        place = basis.places[name]
        numbers = math.prod(place.shape)
        for side in sides:
            factor, n = f"{side}/{place.key}", place.sizes[side]
            thin[factor] = thin.get(factor, 0) + 4 * numbers * min(LARGEST, n)
            whole[factor] = whole.get(factor, 0) + 2 * numbers * n
    left = AFFORDED * gradient_operations(task) - sum(thin.values())
    kept = []
    for factor in sorted(whole, key=lambda f: whole[f] - thin[f]):
        extra = whole[factor] - thin[factor]
        if extra <= max(left, 0):
            kept.append(factor)
            left -= extra
    potential.basis = basis.keeping(kept)
    return potential


def gradient_operations(task: Task) -> int:
    """Multiplications and additions of loss and gradient of one batch, counted: three times those of the loss.

    Args:
        task: its first batch is drawn.
    """
    with FlopCounterMode(display=False) as counter:
        task.loss(task.init(), task.batch(0))
    return 3 * int(counter.get_total_flops())

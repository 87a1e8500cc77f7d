"""What two families must have in common for one learning to continue the other's."""

import torch
from torch import Tensor

from metamd.files.store import Result
from metamd.inner.run import gradient
from metamd.tasks.base import TaskFamily
from metamd.tasks.counted import uncounted


def identity_of(family: TaskFamily) -> Result:
    """What a family says of itself, and the loss and gradients at the start of one task, to three digits.

    A description has shapes and data in it, and nothing of the functions that a model and a loss are made by.

    Args:
        family: any.
    """
    family = uncounted(family)
    task = family.build(family.sample(torch.Generator().manual_seed(0)))
    loss, grads = gradient(task, task.init(), task.batch(0))
    lengths = [_rounded(torch.linalg.vector_norm(g)) for g in grads.values()]
    return {"name": family.name, **family.describe(), "first": {"loss": _rounded(loss), "gradients": lengths}}


def _rounded(x: Tensor) -> str:
    return f"{float(x):.3g}"

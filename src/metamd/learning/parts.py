"""The folder of one stage of a learning, and what tells a family of tasks from others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metamd.files.store import Journal, Parts, Records, Result
from metamd.inner.run import gradient
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Counted, uncounted


@contextmanager
def parts_of(journal: Journal | None, stage: str, family: Counted, settings: Mapping[str, Any]) -> Iterator[Parts]:
    """The parts of one stage of a learning, in a folder of their own.

    Args:
        journal: where; None keeps nothing.
        stage: the name of the folder.
        family: counts the gradients.
        settings: all that the parts depend on beside the family, in JSON's types. A folder with others is refused.
    """
    if journal is None:
        yield Parts(family)
        return
    folder = Path(journal.folder) / stage
    about = {"family": identity_of(family), **settings}
    with Journal(folder).opened():
        yield Parts(family, Records(folder, about))


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

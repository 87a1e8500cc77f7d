"""The finished parts of a learning, kept in a folder so that the same call continues one that was stopped."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from metamd.files.store import Journal, Records, Result
from metamd.inner.run import gradient
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Counted, uncounted


class Savable(Protocol):
    """What writes itself to a file."""

    def save(self, path: Path, /) -> None:
        """Write it whole or not at all."""


Saved = TypeVar("Saved", bound=Savable)


class Parts:
    """Finished parts by name, each with its cost: read if it is kept, else computed and kept.

    What a part has cost that is read is added to the count of the family, so that a learning which was stopped says in the
    end what one that was not would have said.

    Args:
        family: counts the gradients.
        records: where parts are kept; None computes all of them.
    """

    def __init__(self, family: Counted, records: Records | None = None) -> None:
        self.family, self.records = family, records

    def part(self, name: str, compute: Callable[[], Result]) -> Result:
        """The part of that name.

        Args:
            name: a file name without its ending.
            compute: makes it, in JSON's types and without infinities.
        """
        if self.records is None:
            return compute()
        if self.records.has(name):
            return self._read(name)
        found = self._measured(compute)
        return self.records.cell(name, lambda: found)

    def file(self, name: str, compute: Callable[[], Saved], read: Callable[[Path], Saved]) -> Saved:
        """The part of that name, as a file of its own.

        Args:
            name: the file's, without its ending.
            compute: makes it.
            read: reads it.
        """
        if self.records is None:
            return compute()
        path = self.records.folder / f"{name}.safetensors"
        if self.records.has(name) and path.exists():
            self._read(name)
            return read(path)
        found: list[Saved] = []

        def saved() -> Result:
            found.append(compute())
            found[0].save(path)
            return {}

        cost = self._measured(saved)
        self.records.forget(name)
        self.records.cell(name, lambda: cost)
        return found[0]

    def _measured(self, compute: Callable[[], Result]) -> Result:
        before, began = self.family.batches, time.perf_counter()
        found = compute()
        return {**found, "gradients": self.family.batches - before, "seconds": time.perf_counter() - began}

    def _read(self, name: str) -> Result:
        assert self.records is not None
        found = self.records.cell(name, dict)
        gradients, seconds = found.get("gradients"), found.get("seconds")
        if not isinstance(gradients, int) or not isinstance(seconds, int | float):
            raise ValueError(f"{str(self.records.path(name))!r} must say what it has cost. Delete it to compute it again.")
        self.family.spent(gradients, seconds)
        return found


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

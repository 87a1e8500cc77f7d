"""The parts of a learning: computed here or in other processes, counted, and kept so that the same call continues."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from metamd.files.learned import LearnedOptimiser, LearnedStart
from metamd.files.store import Journal, Records, Result
from metamd.inner.executor import Executor
from metamd.inner.run import gradient
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Counted, uncounted

T = TypeVar("T")
Saved = TypeVar("Saved", LearnedOptimiser, LearnedStart)


class Parts:
    """Finished parts by name, each with its cost: read if it is kept, else computed and kept.

    The family counts the gradients of all parts: those computed in another process, and those of a kept part when it is
    read. So a learning that was stopped, or that had several workers, states the cost of one that was not or had none.
    """

    def __init__(self, family: Counted, records: Records | None = None, workers: int | Executor = 1) -> None:
        self.family, self.records = family, records
        self.executor = Executor.of(workers)

    def runs(self, compute: Callable[..., T], tasks: Sequence[Any], label: str = "") -> list[T]:
        """What a function returns for each of several tasks, or tuples of arguments; nothing is kept."""
        arguments = [task if isinstance(task, tuple) else (task,) for task in tasks]
        pieces = {f"{i}": partial(compute, *given) for i, given in enumerate(arguments)}
        found = {name: result for name, result, _ in self._computed(pieces, label)}
        return [found[name] for name in pieces]

    def all(self, pieces: Mapping[str, Callable[[], Result]], label: str = "") -> dict[str, Result]:
        """The parts of these names, made by the functions given in JSON's types; those that are missing are computed."""
        there = {} if self.records is None else {name: self._read(name) for name in pieces if self.records.has(name)}
        missing = {name: compute for name, compute in pieces.items() if name not in there}
        for name, found, cost in self._computed(missing, label, len(there)):
            there[name] = found if self.records is None else self.records.cell(name, partial(dict, found, **cost))
        return {name: there[name] for name in pieces}

    def file(self, name: str, compute: Callable[[], Saved], read: Callable[[Path], Saved]) -> Saved:
        """The part of that name, as a file of its own."""
        if self.records is None:
            return compute()
        path = self.records.folder / f"{name}.safetensors"
        if self.records.has(name) and path.exists():
            self._read(name)
            return read(path)
        found, cost = _measured(self.family, compute)
        found.save(path)
        self.records.path(name).unlink(missing_ok=True)
        self.records.write(name, cost)
        return found

    def _computed(self, pieces: Mapping[str, Callable[[], T]], label: str, done: int = 0) -> Iterator[tuple[str, T, Result]]:
        """Every name, result and cost as they come in."""
        measured = {name: partial(_measured, self.family, compute) for name, compute in pieces.items()}
        before = self.family.batches
        for name, (found, cost) in self.executor.results(measured, label, done=done):
            here = self.family.batches - before  # nothing, if another process drew the batches
            self.family.spent(cost["gradients"] - here, 0.0)
            yield name, found, cost
            before = self.family.batches

    def _read(self, name: str) -> Result:
        assert self.records is not None
        found = self.records.read(name)
        gradients, seconds = found.get("gradients"), found.get("seconds")
        if not isinstance(gradients, int) or not isinstance(seconds, int | float):
            raise ValueError(f"{str(self.records.path(name))!r} must say what it has cost. Delete it to compute it again.")
        self.family.spent(gradients, seconds)
        return found


def _measured(family: Counted, compute: Callable[[], T]) -> tuple[T, Result]:
    before, began = family.batches, time.perf_counter()
    found = compute()
    return found, {"gradients": family.batches - before, "seconds": time.perf_counter() - began}


@contextmanager
def parts_of(
    journal: Journal | None, stage: str, family: Counted, settings: Mapping[str, Any], workers: int | Executor = 1
) -> Iterator[Parts]:
    """The parts of one stage of a learning, in a folder of its own; a folder with other settings is refused."""
    if journal is None:
        yield Parts(family, None, workers)
        return
    folder = Path(journal.folder) / stage
    about = {"family": identity_of(family), **settings}
    with Journal(folder).opened():
        yield Parts(family, Records(folder, about), workers)


def identity_of(family: TaskFamily) -> Result:
    """What a family says of itself, and the loss and gradients at the start of one task, to three digits.

    A description has shapes and data in it, and nothing of the functions that a model and a loss are made by.
    """
    family = uncounted(family)
    task = family.build(family.sample(torch.Generator().manual_seed(0)))
    loss, grads = gradient(task, task.init(), task.batch(0))
    lengths = [f"{float(torch.linalg.vector_norm(g)):.3g}" for g in grads.values()]
    return {"name": family.name, **family.describe(), "first": {"loss": f"{float(loss):.3g}", "gradients": lengths}}


def described(family: TaskFamily) -> dict[str, Any]:
    """What a header says of a family."""
    about = family.describe()
    size = about.get("batch_size")
    return {
        "family": {"name": family.name, **about},
        "horizon": family.steps,
        "batch_size": size if isinstance(size, int) and size > 0 else None,
    }

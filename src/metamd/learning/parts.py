"""The parts of a learning: computed here or in other processes, counted, and kept so that the same call continues."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from metamd.files.learned import LearnedOptimiser, LearnedStart
from metamd.files.progress import Progress
from metamd.files.store import Journal, Log, Records, Result, as_json
from metamd.inner.executor import Executor
from metamd.inner.run import gradient
from metamd.learning.outer import OuterStep
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Counted, uncounted

T = TypeVar("T")
Kept = TypeVar("Kept", LearnedOptimiser, LearnedStart)


class Forecast:
    """How far a learning is, in gradients: those that were taken, and those expected of its stages.

    It follows what the family counts. Its stages are given with what they are expected to take; a stage that is done counts
    as what it took.
    """

    def __init__(self, label: str, stages: Mapping[str, float], log: Log | None = None) -> None:
        self.label, self.expected, self.log = label, dict(stages), log
        self._progress = Progress(label, sum(stages.values()))
        self._stage, self._before, self._told = "", 0.0, 0

    @contextmanager
    def of(self, family: Counted) -> Iterator["Forecast"]:
        """Shown while this family is learned from."""
        with self._progress:
            family.watcher = self
            try:
                yield self
                self._progress.update(self._progress.done, self._stage, self._progress.done)  # no more than this
            finally:
                family.watcher = None

    @contextmanager
    def stage(self, name: str, gradients: float) -> Iterator["Forecast"]:
        """A stage, which takes about so many."""
        self._stage, self._before = name, self._progress.done
        self.expected[name] = gradients
        yield self
        self.expected[name] = self._progress.done - self._before
        self._stage = ""

    @property
    def shown(self) -> bool:
        """Whether somebody sees it."""
        return self._progress.shown

    def say(self, line: str) -> None:
        """Print a line where progress is shown."""
        self._progress.say(line)

    def tell(self, objective: float, diverged: Sequence[str] = (), note: str = "") -> None:
        """Tell the log what came out, in the form of an outer step."""
        self._told += 1
        if self.log is not None:
            seen = OuterStep(self._told, self._stage, objective, diverged=tuple(diverged), note=note)
            self.log(as_json(asdict(seen)), self._told)

    def count(self, gradients: int, seconds: float) -> None:
        """Count gradients, and those of a kept part with the seconds that it took."""
        done = self._progress.done
        if seconds:
            self._progress.skip(gradients)
        total = sum(taken for name, taken in self.expected.items() if name != self._stage)
        total += max(self.expected.get(self._stage, 0.0), done + gradients - self._before)
        self._progress.update(done + gradients, self._stage, total)


@contextmanager
def stage(family: Counted, name: str, gradients: float) -> Iterator[Forecast]:
    """A stage of what is learned from this family: in its forecast, or alone."""
    inner: TaskFamily = family
    while isinstance(inner, Counted):
        if isinstance(inner.watcher, Forecast):
            with inner.watcher.stage(name, gradients) as forecast:
                yield forecast
            return
        inner = inner.family
    with Forecast(name, {}).of(family) as alone, alone.stage(name, gradients) as forecast:
        yield forecast


class Parts:
    """Finished parts by name, each with its cost: read if it is kept, else computed and kept.

    The family counts the gradients of all parts, also of those that another process computes or that are read. So a learning
    that was stopped, or that had several workers, states the cost of one that was not or had none.
    """

    def __init__(self, family: Counted, records: Records | None = None, workers: int | Executor = 1) -> None:
        self.family, self.records = family, records
        self.executor = Executor.of(workers)

    def runs(self, compute: Callable[..., T], tasks: Sequence[Any]) -> list[T]:
        """What a function returns for each of several tasks, or tuples of arguments; nothing is kept."""
        arguments = [task if isinstance(task, tuple) else (task,) for task in tasks]
        pieces = {f"{i}": partial(compute, *given) for i, given in enumerate(arguments)}
        found = {name: result for name, result, _ in self._computed(pieces)}
        return [found[name] for name in pieces]

    def all(self, pieces: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
        """The parts of these names, made by the functions given in JSON's types; those that are missing are computed."""
        there = {} if self.records is None else {name: self._read(name) for name in pieces if self.records.has(name)}
        missing = {name: compute for name, compute in pieces.items() if name not in there}
        for name, found, cost in self._computed(missing):
            there[name] = found if self.records is None else self.records.cell(name, partial(dict, found, **cost))
        return {name: there[name] for name in pieces}

    def has(self, name: str) -> bool:
        """Whether a part is kept."""
        return self.records is not None and self.records.has(name)

    def file(self, name: str, compute: Callable[[], Kept], read: Callable[[Path], Kept]) -> Kept:
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

    def _computed(self, pieces: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, T, Result]]:
        """Every name, result and cost as they come in."""
        measured = {name: partial(_measured, self.family, compute) for name, compute in pieces.items()}
        before = self.family.batches
        for name, (found, cost) in self.executor.results(measured):
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

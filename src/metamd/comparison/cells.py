"""Filling a table cell by cell; a cell that is there already is not computed again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from metamd.files.store import Records, Result
from metamd.inner.executor import Executor


@dataclass(frozen=True)
class Cell:
    """One result of an experiment."""

    name: str  # of its record
    compute: Callable[[], Any]  # makes it, on another machine perhaps
    # puts files that came with it into their places, where the records are, and returns what the record is to hold
    keep: Callable[[Any], Result] = lambda made: made


def fill(records: Records | None, cells: Iterable[Cell], *, title: str, workers: int | Executor = 1) -> dict[str, Result]:
    """All results by name, in the order of the cells; each is written as soon as it is there, unless records is None."""
    todo = {cell.name: cell for cell in cells}
    found = {} if records is None else {name: records.read(name) for name in todo if records.has(name)}
    missing = {name: cell.compute for name, cell in todo.items() if name not in found}
    for name, made in Executor.of(workers).results(missing, title, done=len(found)):
        found[name] = todo[name].keep(made)
        if records is not None:
            records.write(name, found[name])
            found[name] = records.read(name)
    return {name: found[name] for name in todo}

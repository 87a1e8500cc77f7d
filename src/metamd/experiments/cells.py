"""Filling a table cell by cell, with a bar on standard error; what is there already is not computed again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from warnings import WarningMessage

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from metamd.records import Records, Result


@dataclass(frozen=True)
class Cell:
    """One result of an experiment.

    Args:
        name: of its record.
        compute: makes it.
    """

    name: str
    compute: Callable[[], Result]


def fill(records: Records, cells: Iterable[Cell], *, title: str) -> dict[str, Result]:
    """All results by name, in the order of the cells.

    Args:
        records: where they are kept.
        cells: what there is to compute.
        title: in front of the bar.
    """
    todo = list(cells)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    results = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=len(todo))
        for cell in todo:
            bar.update(task, description=f"{title}: {cell.name}")
            results[cell.name] = records.cell(cell.name, cell.compute)
            bar.advance(task)
        bar.update(task, description=title)
    return results


def own_warnings(caught: Iterable[WarningMessage]) -> list[str]:
    """The kinds of MetaMD's own warnings among those caught: they belong to a result.

    Args:
        caught: by `warnings.catch_warnings(record=True)`.
    """
    return sorted({w.category.__name__ for w in caught if w.category.__module__.startswith("metamd")})

"""Filling a table cell by cell, on one or several processes; what is there already is not computed again."""

import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from warnings import WarningMessage

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from metamd.files.store import Records, Result

ATTEMPTS = 3
"""So often a cell is begun whose process is killed; then something is wrong with it and not with the machine."""


@dataclass(frozen=True)
class Cell:
    """One result of an experiment.

    Args:
        name: of its record.
        compute: makes it, on another machine perhaps.
        keep: puts files that came with it into their places, where the records are, and returns what the record is to hold.
    """

    name: str
    compute: Callable[[], Result]
    keep: Callable[[Result], Result] | None = None

    def kept(self, made: Result) -> Result:
        """What its record holds.

        Args:
            made: by `compute`.
        """
        return made if self.keep is None else self.keep(made)

    def result(self) -> Result:
        """Computed and kept here."""
        return self.kept(self.compute())


def fill(
    records: Records, cells: Iterable[Cell], *, title: str, workers: int = 1, ray: str | None = None
) -> dict[str, Result]:
    """All results by name, in the order of the cells.

    Several processes, one thread each, share what is loaded already. A cell whose process dies is begun again. Without
    `fork`, as on Windows, there is one process.

    Args:
        records: where they are kept.
        cells: what there is to compute.
        title: in front of the bar.
        workers: processes, at most.
        ray: address of a Ray cluster to compute on instead, or "local".
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    todo = list(cells)
    missing = [cell for cell in todo if not records.has(cell.name)]
    with progress(title, len(todo), len(todo) - len(missing)) as advance:
        if ray is not None and missing:
            from metamd.comparison.ray_cells import fill_with_ray

            fill_with_ray(records, missing, address=ray, workers=workers, advance=advance)
        elif workers > 1 and len(missing) > 1 and "fork" in multiprocessing.get_all_start_methods():
            _Pool(records, missing, workers).run(advance)
        else:
            for cell in missing:
                records.cell(cell.name, cell.result)
                advance(cell.name)
    return {cell.name: records.cell(cell.name, cell.result) for cell in todo}


@contextmanager
def progress(title: str, total: int, done: int = 0, *, redrawn: bool = True) -> Iterator[Callable[[str], None]]:
    """A bar on standard error with the time that is left; what it gives is called with the name of each part that is done.

    Args:
        title: in front of the bar.
        total: parts.
        done: of them, already.
        redrawn: whether a thread redraws it all the time; if not, it is drawn between parts, and takes no time from them.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, speed_estimate_period=600, auto_refresh=redrawn) as bar:
        task = bar.add_task(title, total=total, completed=done)

        def advance(name: str) -> None:
            bar.update(task, description=f"{title}: {name}", advance=1, refresh=not redrawn)

        yield advance
        bar.update(task, description=title)


class _Pool:
    """Processes that take one cell after another; one that dies is replaced, and its cell begun again."""

    def __init__(self, records: Records, cells: Sequence[Cell], workers: int) -> None:
        self.records, self.cells, self.workers = records, cells, workers
        self.waiting = deque(range(len(cells)))
        self.begun: Counter[int] = Counter()
        self.free: list[_Worker] = []
        self.busy: dict[_Worker, int] = {}

    def run(self, advance: Callable[[str], None]) -> None:
        """Until all cells are there."""
        try:
            while self.waiting or self.busy:
                while self.waiting and len(self.busy) < self.workers:
                    self._give(self.free.pop() if self.free else _Worker(self.records, self.cells))
                ready = set(wait([w.pipe for w in self.busy]))
                for worker in [w for w in self.busy if w.pipe in ready]:
                    self._take(worker, advance)
        finally:
            for worker in [*self.free, *self.busy]:
                worker.end()

    def _give(self, worker: "_Worker") -> None:
        cell = self.waiting.popleft()
        self.begun[cell] += 1
        self.busy[worker] = cell
        with suppress(OSError):  # it has died since; that shows when its answer is taken
            worker.pipe.send(cell)

    def _take(self, worker: "_Worker", advance: Callable[[str], None]) -> None:
        cell = self.busy.pop(worker)
        name = self.cells[cell].name
        try:
            trouble = worker.pipe.recv()
        except (EOFError, OSError):  # killed
            worker.end()
            if self.records.has(name):
                advance(name)
            elif self.begun[cell] < ATTEMPTS:
                self.waiting.appendleft(cell)
            else:
                raise ChildProcessError(
                    f"the process of {name!r} was killed {ATTEMPTS} times (code {worker.process.exitcode}). Is there memory "
                    "enough? Fewer workers need less."
                ) from None
            return
        self.free.append(worker)
        if trouble is not None:
            raise ValueError(trouble[1]) if trouble[0] else RuntimeError(f"{name}: {trouble[1]}")
        advance(name)


class _Worker:
    """One process and the pipe to it. Its memory is the parent's at the time of the fork, the cells among it."""

    def __init__(self, records: Records, cells: Sequence[Cell]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(records, cells, theirs, self.pipe), daemon=True)
        sys.stdout.flush()
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Kill it; what it has not written yet is computed again."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(records: Records, cells: Sequence[Cell], pipe: Connection, parents: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    import torch

    torch.set_num_threads(1)
    parents.close()  # so that the parent's death shows as the end of the pipe
    trouble: tuple[bool, str] | None
    while True:
        try:
            cell = cells[pipe.recv()]
        except (EOFError, OSError):
            os._exit(0)  # nothing of the parent's may be flushed or closed twice
        try:
            records.cell(cell.name, cell.result)
            trouble = None
        except (ValueError, OSError) as error:
            trouble = True, str(error)
        except BaseException as error:
            trouble = False, repr(error)
        with suppress(OSError):
            pipe.send(trouble)


def own_warnings(caught: Iterable[WarningMessage]) -> list[str]:
    """The kinds of MetaMD's own warnings among those caught: they belong to a result.

    Args:
        caught: by `warnings.catch_warnings(record=True)`.
    """
    return sorted({w.category.__name__ for w in caught if w.category.__module__.startswith("metamd")})

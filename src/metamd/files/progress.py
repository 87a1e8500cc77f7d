"""One display of progress for every long verb: a bar on a terminal, a few lines elsewhere, nothing when asked."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

Shown = Literal["terminal", "always", "never"]
"""Where progress is shown: on a terminal alone, also as lines in files and pipes, or nowhere."""

PAUSE = 10.0
"""Seconds between two lines in a file or a pipe; the last line comes at once."""

_shown: ContextVar[Shown] = ContextVar("metamd.progress", default="terminal")
_screen: Any = None  # rich's display, shared by nested bars: two would draw over each other


@contextmanager
def showing(shown: Shown) -> Iterator[None]:
    """Say where progress is shown within a block; the command line says "always", workers say "never".

    Example:
        >>> with showing("never"), Progress("tasks", 3) as progress:
        ...     progress.advance()
    """
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


class Progress:
    """How far a piece of work is, on standard error.

    No thread redraws it. So it takes no time from steps that are timed, and no lock of it is held at a fork.

    Args:
        label: in front of the count; nothing is shown without one.
        total: of the count; None if it is not known.
        done: how much was done before.
        unit: "bytes" counts in megabytes.
    """

    def __init__(self, label: str, total: float | None = None, *, done: float = 0, unit: str = "") -> None:
        self.label, self.total, self.done, self.unit = label, total, done, unit
        self._first, self._owner = done, False
        self._task: Any = None
        self._lines = 0.0

    def __enter__(self) -> "Progress":
        global _screen
        self._began = self._drawn = time.monotonic()
        shown = _shown.get() if self.label else "never"
        terminal = shown != "never" and sys.stderr.isatty()
        self._plain = shown == "always" and not terminal
        if terminal:
            if _screen is None:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
                from rich.progress import Progress as Screen

                columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
                console = Console(stderr=True, markup=False, highlight=False)
                _screen, self._owner = (
                    Screen(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, auto_refresh=False),
                    True,
                )
                _screen.start()
            self._task = _screen.add_task(self.label, total=self.total, completed=self.done, count=self._count())
            self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        global _screen
        if self._task is not None:
            self._draw()
            if not self._owner:
                _screen.remove_task(self._task)
        if self._owner:
            _screen.stop()
            _screen = None
        if self._plain and error[0] is None and self.done > self._lines:
            self._print()

    def advance(self, note: str = "", count: float = 1) -> None:
        """Count what is done; a note says what it was."""
        self.update(self.done + count, note)

    def update(self, done: float, note: str = "", total: float | None = None) -> None:
        """Set the count, and the total where it became known."""
        self.done, self.total = done, self.total if total is None else total
        if self._task is not None:
            label = f"{self.label}: {note}" if note else self.label
            _screen.update(self._task, completed=done, total=self.total, description=label, count=self._count())
            if time.monotonic() - self._drawn > 0.1:
                self._draw()
        elif self._plain and self._is_due():
            self._print()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._task is not None:
            _screen.console.print(line, soft_wrap=True)
        elif self._plain:
            print(line, file=sys.stderr, flush=True)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        _screen.refresh()

    def _is_due(self) -> bool:
        """At most ten lines in all, after a pause each; where the total is not known, one for each doubling."""
        step = self.total / 10 if self.total else max(self._lines, 1.0)
        return self.done - self._lines >= step and time.monotonic() - self._drawn >= PAUSE

    def _print(self) -> None:
        self._lines, self._drawn = self.done, time.monotonic()
        spent, made = time.monotonic() - self._began, self.done - self._first
        left = f", {_clock(spent / made * (self.total - self.done))} left" if self.total and made > 0 else ""
        time_of = f" in {_clock(spent)}" if self.done == self.total else left
        print(f"{self.label}: {self._count()}{time_of}", file=sys.stderr, flush=True)

    def _count(self) -> str:
        done, total = (x if x is None else _amount(x, self.unit) for x in (self.done, self.total))
        return f"{done}" if total is None else f"{done} of {total}"


def _amount(value: float, unit: str) -> str:
    return f"{value / 1e6:.1f} MB" if unit == "bytes" else f"{value:g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(round(seconds), 0), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"

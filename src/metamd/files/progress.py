"""One display of progress for every long verb: a bar on a terminal, a few lines elsewhere, nothing when asked."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

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


P = ParamSpec("P")
R = TypeVar("R")
_nested: ContextVar[int] = ContextVar("metamd.verbs", default=0)


def ends_with(sentence: Callable[[Any], str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Print a sentence on a terminal after a long verb, but none after the verbs that it calls.

    The sentence says what was done and what to do next. The command line has sentences of its own.
    """

    def decorate(verb: Callable[P, R]) -> Callable[P, R]:
        @wraps(verb)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            token = _nested.set(_nested.get() + 1)
            try:
                found = verb(*args, **kwargs)
            finally:
                _nested.reset(token)
            if not _nested.get() and _shown.get() == "terminal" and sys.stderr.isatty():
                print(sentence(found), file=sys.stderr, flush=True)
            return found

        return called

    return decorate


class Progress:
    """How far a piece of work is, on standard error; nothing is shown without a label."""

    # No thread redraws it. So it takes no time from steps that are timed, and no lock of it is held at a fork.
    def __init__(self, label: str, total: float | None = None, *, done: float = 0) -> None:
        self.label, self.total, self.done = label, total, done
        self._first, self._printed = done, 0.0
        self._task: Any = None

    def __enter__(self) -> "Progress":
        global _screen
        self._began = self._drawn = time.monotonic()
        shown = _shown.get() if self.label else "never"
        terminal = shown != "never" and sys.stderr.isatty()
        self._lines, self._owner = shown == "always" and not terminal, terminal and _screen is None
        if self._owner:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Screen

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
            console = Console(stderr=True, markup=False, highlight=False)
            _screen = Screen(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, auto_refresh=False)
            _screen.start()
        if terminal:
            self._task = _screen.add_task(self.label, total=self.total, completed=self.done, count=self._count())
            _screen.refresh()
        return self

    def __exit__(self, *error: object) -> None:
        global _screen
        if self._task is not None:
            _screen.refresh()
        if self._owner:
            _screen.stop()
            _screen = None
        elif self._task is not None:
            _screen.remove_task(self._task)
        if self._lines and error[0] is None and self.done > self._printed:
            self._print()

    @property
    def shown(self) -> bool:
        """Whether somebody sees it."""
        return self._lines or self._task is not None

    def advance(self, note: str = "", count: float = 1) -> None:
        """Count what is done; a note says what it was."""
        self.update(self.done + count, note)

    def skip(self, count: float) -> None:
        """Count what was done before, which says nothing about the time that is left."""
        self._first += count
        self.done += count
        if self._task is not None:
            _screen.reset(self._task, completed=self.done, count=self._count())

    def update(self, done: float, note: str = "", total: float | None = None) -> None:
        """Set the count, and the total where it became known."""
        self.done, self.total = done, self.total if total is None else total
        waited = time.monotonic() - self._drawn
        if self._task is not None:
            label = f"{self.label}: {note}" if note else self.label
            _screen.update(self._task, completed=done, total=self.total, description=label, count=self._count())
            if waited > 0.1:
                self._drawn = time.monotonic()
                _screen.refresh()
        # At most ten lines in all, after a pause each; where the total is not known, one for each doubling.
        step = self.total / 10 if self.total else max(self._printed, 1.0)
        if self._lines and done - self._printed >= step and waited >= PAUSE:
            self._print()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._task is not None:
            _screen.console.print(line, soft_wrap=True)
        elif self._lines:
            print(line, file=sys.stderr, flush=True)

    def _print(self) -> None:
        self._printed, self._drawn = self.done, time.monotonic()
        spent, made = self._drawn - self._began, self.done - self._first
        ending = f" in {timedelta(seconds=round(spent))}" if self.done == self.total else ""
        if self.total and not ending and made > 0:
            ending = f", {timedelta(seconds=round(max(spent / made * (self.total - self.done), 0.0)))} left"
        self.say(f"{self.label}: {self._count()}{ending}")

    def _count(self) -> str:
        return f"{self.done:g}" if self.total is None else f"{self.done:g} of {self.total:g}"

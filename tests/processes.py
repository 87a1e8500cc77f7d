"""Processes of the tests: begun quickly, ended at a stated point of their work, and never judged by a clock.

A function runs in a fresh process that is forked from one which has imported torch: no test pays for that import again.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from metamd.files import container

ROOT = Path(__file__).parents[1]

PATIENCE = 1200
"""Seconds after which a process counts as hung. A busy machine may take as long as it needs until then."""

PRELOADED = ["torch", "matplotlib.pyplot", "metamd.comparison.compare", "metamd.cli.main", "tests.processes"]


def environment(**changes: str) -> dict[str, str]:
    """For a new interpreter: the same modules are found, and it has one thread."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1", **changes}


class Ended(NamedTuple):
    """A process that has ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str


@dataclass
class Child:
    """A process under way, and the folder that has what it writes."""

    process: Any
    folder: Path

    def finish(self) -> Ended:
        """Wait for its end."""
        self.process.join(PATIENCE)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        ended = Ended(self.process.exitcode, *((self.folder / name).read_text() for name in ("out", "err")))
        shutil.rmtree(self.folder)
        return ended

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Wait until something has happened that the process does."""
        limit = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.is_alive(), f"the process ended before: {self.finish()}"
            assert time.monotonic() < limit, "the process hangs"
            time.sleep(0.01)

    def kill(self) -> Ended:
        """End it at once."""
        self.process.kill()
        return self.finish()


def begin(target: Callable[..., Any], *args: Any) -> Child:
    """Run a function of a module in a fresh process."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    folder = Path(tempfile.mkdtemp(prefix="metamd-test-"))
    for name in ("out", "err"):
        (folder / name).touch()
    child = Child(forks.Process(target=_enter, args=(folder, dict(os.environ), target, args)), folder)
    child.process.start()
    return child


def run(target: Callable[..., Any], *args: Any) -> Ended:
    """Run it to its end."""
    return begin(target, *args).finish()


def _enter(folder: Path, variables: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for descriptor, name in ((1, "out"), (2, "err")):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    target(*args)


def command(point: str, *words: object) -> None:
    """The `metamd` command, which ends at a point: see `arm`."""
    arm(point)
    from metamd.cli.main import main

    main([str(word) for word in words])


class Countdown:
    """Called for the K-th time, it sends a signal to its own process."""

    def __init__(self, count: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.left, self.how, self.process = count, how, os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self.process:
            return  # a worker of the process that is meant
        self.left -= 1
        if self.left == 0:
            os.kill(self.process, self.how)


def arm(point: str) -> None:
    """Place a signal at a point, "KIND:K" or "KIND:K:SIGINT"; kills, if no signal is named.

    Kinds: "write" in the middle of the K-th write of a file, after its data and before its rename; "renamed" right after
    it; "cell" right after the K-th file in a folder called `cells`.
    """
    kind, _, rest = point.partition(":")
    count, _, how = rest.partition(":")
    strike = Countdown(int(count or 0), signal.Signals[how or "SIGKILL"])
    if kind in ("write", "renamed", "cell"):
        fsync = os.fsync

        def struck(descriptor: int) -> None:
            place = Path(f"/proc/self/fd/{descriptor}").resolve()
            if kind == "write" and place.suffix == ".tmp":
                strike()
            fsync(descriptor)
            if place.is_dir() and (kind == "renamed" or (kind == "cell" and place.name == "cells")):
                strike()

        container.os.fsync = struck
    elif kind:
        raise ValueError(point)

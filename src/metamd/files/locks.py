"""A lock between processes that the system releases when its holder dies, even by SIGKILL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path` exclusively, waiting for whoever has it.

    The file stays behind: removing it would let two processes hold two files of one name.

    Args:
        path: the lock file; its folder is made if need be.
        wait: whether to wait; otherwise a lock that another process holds is a `BlockingIOError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _acquire(file.fileno(), wait)
        try:
            yield
        finally:
            _release(file.fileno())


if sys.platform == "win32":
    import msvcrt
    import time

    def _acquire(descriptor: int, wait: bool) -> None:
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if not wait:
                    raise BlockingIOError(*error.args) from None
                time.sleep(0.1)

    def _release(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _acquire(descriptor: int, wait: bool) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _release(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)

"""Fetch official files: several mirrors, a bounded and checked download, one process at a time per file.

A download is written to a `.part` file and moved into place only when its checksums agree, so a file that
exists under its own name is whole; whatever a killed process left in the `.part` file is overwritten by the
next one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from metamd.data.archives import decompress
from metamd.data.records import DataError, RemoteFile
from metamd.files.locks import locked

CHUNK = 2**16


def download(
    file: RemoteFile,
    folder: Path,
    *,
    rounds: int = 3,
    timeout: float = 30.0,
    pause: float = 1.0,
    progress: bool = False,
) -> Path:
    """The path of an official file in `folder`, fetched from the first mirror that serves it whole.

    Args:
        file: what to fetch and what it must be.
        folder: where to keep it.
        rounds: how often to go through the mirrors; one that served a wrong file is not asked again.
        timeout: seconds to wait for a connection, and for each next piece of the file.
        pause: seconds before the second round, doubled before each further one.
        progress: draw a bar on standard error.
    """
    target = folder / file.name
    with locked(folder / f"{file.name}.lock"):
        if target.exists():
            if mismatch(file, target) is None:
                return target
            target.unlink()
        failures: dict[str, str] = {}
        urls = list(file.urls)
        for turn in range(rounds):
            if turn and urls:
                time.sleep(pause * 2 ** (turn - 1))
            for url in tuple(urls):
                reason, again = _attempt(file, url, target, timeout, progress)
                if reason is None:
                    return target
                failures[url] = reason
                if not again:
                    urls.remove(url)
    tried = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
    raise DataError(
        f"{file.name} could not be fetched ({tried}). Try again later, or save the official file as {target} yourself."
    )


def mismatch(file: RemoteFile, path: Path) -> str | None:
    """Why `path` is not the official file, or None when it is.

    The official bytes are accepted, and so is a file compressed anew whose content is the official content.

    Args:
        file: what the file must be.
        path: the file.
    """
    md5, sha256 = _checksums(path)
    if md5 == file.md5 and file.sha256 in (None, sha256):
        return None
    if file.content_sha256 is not None and file.content_size is not None:
        try:
            content = decompress(path, file.content_size)
        except DataError:
            content = b""
        if hashlib.sha256(content).hexdigest() == file.content_sha256:
            return None
    size = path.stat().st_size
    wanted = "" if file.size is None else f" and {file.size} bytes"
    return f"wrong checksum: required md5 {file.md5}{wanted}, got {md5} and {size} bytes"


def _checksums(path: Path) -> tuple[str, str]:
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(2**20):
            md5.update(chunk)
            sha256.update(chunk)
    return md5.hexdigest(), sha256.hexdigest()


def partial(target: Path) -> Path:
    """Where a download is written until it is checked; the suffix stays, as it says how to decompress it."""
    return target.with_name(f"{target.stem}.part{target.suffix}")


def _attempt(file: RemoteFile, url: str, target: Path, timeout: float, progress: bool) -> tuple[str | None, bool]:
    """Fetch once: (why it failed or None, whether asking this mirror again may help)."""
    part = partial(target)
    try:
        _transfer(file, url, part, timeout, progress)
        reason = mismatch(file, part)
        if reason is None:
            part.replace(target)
        return reason, False
    except DataError as error:
        return str(error), False
    except OSError as error:  # requests' own exceptions are OSErrors too, without an errno
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise  # the disk, not the mirror
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"the server answered {status}" if status else _plainly(error)
        return reason, status is None or status >= 500 or status in (408, 429)
    finally:
        part.unlink(missing_ok=True)


def _plainly(error: OSError) -> str:
    """What went wrong, without the layers that requests and urllib3 wrap around it."""
    cause = error.args[0] if error.args and isinstance(error.args[0], Exception) else error
    cause = getattr(cause, "reason", cause)
    return str(cause).rsplit(": ", 1)[-1] or type(cause).__name__


def _transfer(file: RemoteFile, url: str, part: Path, timeout: float, progress: bool) -> None:
    try:
        import pooch
    except ImportError as error:
        raise DataError("Downloading needs pooch. Install it with: pip install 'metamd[data]'") from error
    # A server that sends a .gz file "gzip-encoded" would have it decompressed on the way; identity prevents
    # that.
    headers = {"Accept-Encoding": "identity", "User-Agent": "metamd"}
    with part.open("wb") as stream, _bar(file.name, progress) as bar:
        fetch = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=timeout, headers=headers)
        fetch(url, _Bounded(stream, file.largest), None)
        stream.flush()
        os.fsync(stream.fileno())


class _Bounded:
    """A file that refuses to grow beyond a limit, so that an endless answer cannot fill the disk."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.stream, self.left, self.limit = stream, limit, limit

    def write(self, chunk: bytes) -> int:
        self.left -= len(chunk)
        if self.left < 0:
            raise DataError(f"the server sent more than the {self.limit} bytes expected")
        return self.stream.write(chunk)

    def flush(self) -> None:
        """Nothing: flushing once at the end is enough."""


@contextmanager
def _bar(name: str, shown: bool) -> Iterator[Any]:
    if not shown:
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as display:
        yield _Bar(display)


class _Bar:
    """rich's progress bar behind the four names that pooch calls."""

    def __init__(self, display: Any) -> None:
        self.display, self.task = display, display.add_task("", total=None)

    @property
    def total(self) -> float | None:
        return self.display.tasks[0].total

    @total.setter
    def total(self, size: int) -> None:
        self.display.update(self.task, total=size or None)

    def update(self, size: int) -> None:
        self.display.advance(self.task, size)

    def reset(self) -> None:
        self.display.update(self.task, completed=0)

    def close(self) -> None:
        self.display.refresh()

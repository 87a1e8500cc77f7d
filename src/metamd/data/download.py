"""Fetch official files: several mirrors, a bounded and checked download.

A download is written to a `.part` file and moved into place when its checksums agree. A file under its own name is thus
whole. The next process overwrites what a killed one left in the `.part` file. `loading.fetch` lets in one at a time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from metamd.data.decoders import decompress
from metamd.data.registry import DataError, RemoteFile
from metamd.files.limits import open_regular
from metamd.files.progress import Progress
from metamd.files.text import install

CHUNK = 2**16


def download(file: RemoteFile, folder: Path, *, rounds: int = 3, timeout: float = 30.0, pause: float = 1.0) -> Path:
    """The path of an official file in `folder`, fetched from the first mirror that serves it whole.

    A mirror that served a wrong file is not asked again. The `timeout` is for a connection and for every 64 KiB of the
    file, so that a mirror which sends a byte now and then is left. The `pause` comes before the second round through the
    mirrors, and doubles before each further one.
    """
    target = folder / file.name
    folder.mkdir(parents=True, exist_ok=True)
    if target.exists() and mismatch(file, target) is None:
        return target
    failures: dict[str, str] = {}
    urls = list(file.urls)
    for turn in range(rounds):
        if turn and urls:
            time.sleep(pause * 2 ** (turn - 1))
        for url in tuple(urls):
            reason, again = _attempt(file, url, target, timeout)
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
    """
    with open_regular(path) as stream:
        md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        stream.seek(0)
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
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


def _attempt(file: RemoteFile, url: str, target: Path, timeout: float) -> tuple[str | None, bool]:
    """Fetch once: (why it failed or None, whether asking this mirror again may help)."""
    part = target.with_name(f"{target.stem}.part{target.suffix}")  # the suffix says how to decompress it
    try:
        _transfer(file, url, part, timeout)
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


def _transfer(file: RemoteFile, url: str, part: Path, timeout: float) -> None:
    try:
        import requests
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise DataError(f"Downloading needs requests. {install('data')}") from error
    # A server that sends a .gz file "gzip-encoded" would have it decompressed on the way; identity prevents that.
    headers = {"Accept-Encoding": "identity", "User-Agent": "metamd"}
    size = None if file.size is None else file.size / 1e6
    with part.open("wb") as stream, Progress(f"{file.name}, MB", size) as progress:
        bounded = _Bounded(stream, file.largest, progress)
        with requests.get(url, stream=True, timeout=timeout, headers=headers) as response:
            response.raise_for_status()
            try:
                for piece in _pieces(response.raw, timeout):
                    bounded.write(piece)
            except HTTPError as error:
                raise OSError(error) from None
        stream.flush()
        os.fsync(stream.fileno())


def _pieces(raw: Any, timeout: float) -> Iterator[bytes]:
    """The body as it comes. The timeout of a connection is for one byte, and a read waits for a chunk: a drip is neither."""
    since, came = time.monotonic(), 0
    while piece := raw.read1(CHUNK):
        yield piece
        came += len(piece)
        if came >= CHUNK:
            since, came = time.monotonic(), 0
        elif time.monotonic() - since > timeout:
            raise OSError(f"timed out, the server sent {came} bytes in {timeout:g} s")


class _Bounded:
    """A file that refuses to grow beyond a limit, so that an endless answer cannot fill the disk."""

    def __init__(self, stream: IO[bytes], limit: int, progress: Progress) -> None:
        self.stream, self.left, self.limit, self.progress = stream, limit, limit, progress

    def write(self, chunk: bytes) -> None:
        self.left -= len(chunk)
        if self.left < 0:
            raise DataError(f"the server sent more than the {self.limit} bytes expected")
        self.progress.update((self.limit - self.left) / 1e6)
        self.stream.write(chunk)

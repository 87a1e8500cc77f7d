"""A loopback server that can misbehave, the bytes of official-looking files, and what tests of real data need."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from metamd.data.raw_files import find_file
from metamd.data.registry import Dataset, RemoteFile, SplitRecord, file_set

Answer = Callable[[BaseHTTPRequestHandler], None]
DIGITS = tuple("0123456789")


needs_data = pytest.mark.skipif(not os.environ.get("METAMD_DATA"), reason="METAMD_DATA is not set")


def needs_files(*names: str) -> None:
    """Skip a test whose published files are not all at hand."""
    for name in names:
        there = [find_file(name, file.name) for file in file_set(name).files]
        if not os.environ.get("METAMD_OFFICIAL") or None in there:
            pytest.skip(f"{name} is not in METAMD_OFFICIAL")


# --- a server ---


@dataclass
class Loopback:
    """Answers by path, and the paths asked for."""

    url: str
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def serve(self, name: str, answer: Answer) -> str:
        self.answers[f"/{name}"] = answer
        return f"{self.url}/{name}"


@contextmanager
def loopback() -> Iterator[Loopback]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            with suppress(ConnectionError):  # the client was killed or gave up, as some tests intend
                state.answers.get(self.path, status(404))(self)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    state = Loopback(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def whole(content: bytes) -> Answer:
    return lambda handler: _send(handler, [content], len(content))


def truncated(content: bytes) -> Answer:
    return lambda handler: _send(handler, [content[: len(content) // 2]], len(content))


def slow(content: bytes, pieces: int = 20, pause: float = 0.05) -> Answer:
    step = max(1, len(content) // pieces)
    parts = [content[i : i + step] for i in range(0, len(content), step)]
    return lambda handler: _send(handler, parts, len(content), pause)


def halting(content: bytes, event: threading.Event) -> Answer:
    """The first half, and the second one when something has happened."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        half = len(content) // 2
        _send(handler, [content[:half]], len(content))
        event.wait()
        handler.wfile.write(content[half:])

    return answer


def stalled(content: bytes, state: Loopback) -> Answer:
    """The first half, and no more until the server closes."""
    return halting(content, state.closing)


def dripping(state: Loopback) -> Answer:
    """A byte now and then, without end, until the client hangs up or the server closes."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not state.closing.wait(0.02):
            handler.wfile.write(b"x")
            handler.wfile.flush()

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    """No length announced and ever more bytes, until the client hangs up."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(10_000):
        handler.wfile.write(bytes(2**16))


def status(code: int) -> Answer:
    return lambda handler: handler.send_error(code)


def in_turn(*answers: Answer) -> Answer:
    """The first answer to the first request, and so on; the last one ever after."""
    left = list(answers)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


def _send(handler: BaseHTTPRequestHandler, parts: list[bytes], length: int, pause: float = 0.0) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()
    for part in parts:
        handler.wfile.write(part)
        handler.wfile.flush()
        time.sleep(pause)


# --- files ---


def remote(name: str, content: bytes, *urls: str, packed: bool = True) -> RemoteFile:
    """The record of a file with this content; `packed` records the decompressed content too."""
    inside = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(Path(name).suffix) if packed else None
    extra = {}
    if inside and not name.endswith(".tar.gz"):
        raw = inside(content)
        extra = {"content_sha256": hashlib.sha256(raw).hexdigest(), "content_size": len(raw)}
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return RemoteFile(name, urls, md5, hashlib.sha256(content).hexdigest(), len(content), **extra)


def idx_bytes(array: np.ndarray) -> bytes:
    kind = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}[array.dtype.str[1:]]
    header = bytes([0, 0, kind, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def libsvm_bytes(values: np.ndarray, labels: np.ndarray) -> bytes:
    rows = (
        f"{label} " + " ".join(f"{i}:{v:.6f}" for i, v in enumerate(row, 1)) + " \n"
        for row, label in zip(values, labels, strict=True)
    )
    return "".join(rows).encode()


def cifar_bytes(images: np.ndarray, labels: np.ndarray) -> bytes:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), 3072)
    return np.concatenate([labels[:, None].astype(np.uint8), planes], 1).tobytes()


def stl_bytes(images: np.ndarray) -> bytes:
    return images.transpose(0, 3, 2, 1).tobytes()


def tar_gz(members: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, inside in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(inside)
            archive.addfile(info, io.BytesIO(inside))
    return content.getvalue()


def pictures(count: int, *shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), (np.arange(count) % 10).astype(np.uint8)


# --- datasets ---


def dataset(
    name: str, recipe: str, shape: tuple[int, ...], splits: dict[str, SplitRecord], stored: tuple[int, ...] | None = None
) -> Dataset:
    return Dataset(
        name=name,
        title=name.upper(),
        shape=shape,
        classes=DIGITS,
        licence="made by a test",
        homepage="http://127.0.0.1",
        splits=splits,
        recipe=recipe,
        stored=stored or shape,
    )

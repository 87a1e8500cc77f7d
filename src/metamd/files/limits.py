"""What a reader accepts: every limit in one place, and files opened so that none of them can hang.

A limit is checked against what a file claims, before that much is read. docs/promises.md has the same numbers as a table.
It needs no torch, as `metamd data list` does not.
"""

import os
import stat
from io import BufferedReader
from pathlib import Path

HEADER_LIMIT = 8 * 2**20
"""The largest safetensors header that is read, in bytes; metadata and our own header are inside it."""

TENSORS_LIMIT = 20_000
"""The most tensors in one file."""

DATA_LIMIT = 64 * 2**30
"""The most bytes of tensors in one file, and of arrays in one .npz file."""

KEYS_LIMIT = 200_000
"""The most keys in one JSON text: four for every tensor, and as many for the header."""

JSON_LIMIT = 64 * 2**20
"""The largest JSON file that is read, in bytes: a result, or the settings of a run."""

LOG_LIMIT = 2**30
"""The largest log of a meta-training that is read, in bytes."""

ARCHIVE_LIMIT = 2**30
"""The most bytes that the archive of an experiment may unpack to."""

SENTENCE_LIMIT = 1_000
"""The longest refusal, in characters."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; a pipe or a device, which could wait or go on for ever, is refused."""
    if path.is_dir():
        raise IsADirectoryError("it is a directory. Name the file inside it.")
    # Without O_NONBLOCK, opening a pipe waits until somebody writes to it.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    if path.exists() and not path.is_file():  # a device may do something when it is opened
        raise ValueError("it must be a regular file, and it is a pipe or a device. Copy it to a file first.")
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it has changed since
        file.close()
        raise ValueError("it must be a regular file, and it is a pipe or a device. Copy it to a file first.")
    return file


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a regular file that has at most so many."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has {size:,} bytes, where at most {limit:,} are read.")
        return file.read(limit)

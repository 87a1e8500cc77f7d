"""From official files to arrays: gzip, bzip2 and tar; idx, LIBSVM text, MATLAB, CIFAR-10 binary, STL-10 binary.

Each decoder checks the header and the size before it builds an array, and refuses with a sentence. None of
them reads a pickle, and none extracts a file to disk.
"""

from __future__ import annotations

import bz2
import gzip
import math
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metamd.data.registry import DataError

OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def decompress(path: Path, limit: int) -> bytes:
    """The bytes inside a `.gz` or `.bz2` file, refused when there are more than `limit`."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as stream:
            content: bytes = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete {path.suffix} file ({error}). Delete it and fetch it again.") from error
    if len(content) > limit:
        raise DataError(f"{path} holds more than the {limit} bytes expected of it, so it was not read. Delete it.")
    return content


def tar_members(path: Path, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Named members of a `.tar.gz` file, each of which must have exactly the given size."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                if member.name in sizes:
                    size, stream = sizes[member.name], archive.extractfile(member) if member.isreg() else None
                    if stream is None or member.size != size:
                        raise DataError(
                            f"{member.name} in {path} must be a file of {size} bytes, got {member.size}. "
                            "Delete the archive and fetch it again."
                        )
                    found[member.name] = stream.read(size)
                if len(found) == len(sizes):
                    return found
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete .tar.gz file ({error}). Delete it and fetch it again.") from error
    missing = ", ".join(sorted(sizes.keys() - found.keys()))
    raise DataError(f"{path} must hold {missing} and does not. Delete it and fetch it again.")


def idx(content: bytes, what: str = "the idx file") -> NDArray[Any]:
    """Decode an idx file: two zero bytes, type, number of dimensions, dimensions, values (big-endian)."""
    if len(content) < 4 or content[:2] != b"\x00\x00" or content[2] not in IDX_TYPES or content[3] == 0:
        raise DataError(f"{what} must start with an idx header, got {content[:4].hex(' ') or 'nothing'}. Fetch it again.")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{what} ends inside its idx header after {len(content)} bytes. Fetch it again.")
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    dtype = np.dtype(IDX_TYPES[content[2]])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise DataError(f"{what} declares {shape} values in {expected} bytes, got {len(content)} bytes. Fetch it again.")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


def class_labels(labels: NDArray[Any], classes: int, what: str = "the label file") -> NDArray[np.uint8]:
    """Labels as uint8 in `0 .. classes - 1`; of QMNIST's table of eight columns the first is the class."""
    column = labels[:, 0] if labels.ndim == 2 and labels.shape[1] > 0 else labels
    if column.ndim != 1 or not np.issubdtype(column.dtype, np.integer):
        raise DataError(f"{what} must hold one whole number per example, got {labels.dtype} of shape {labels.shape}.")
    if column.size and not (column.min() >= 0 and column.max() < classes):
        found = f"{column.min()} to {column.max()}"
        raise DataError(f"{what} must hold classes 0 to {classes - 1}, got {found}. It is damaged or another dataset's.")
    return column.astype(np.uint8)


def usps(content: bytes, what: str = "the USPS file") -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Decode USPS from LIBSVM text, `label index:value ...` with indices from 1; what is left out is zero.

    Values in [-1, 1] become `trunc((v + 1) / 2 * 255)`, labels 1-10 become 0-9. In double precision: in single precision,
    which torchvision uses, one pixel of the test set rounds up from 123.9999975 to 124 before it is truncated.
    """
    rows = [line.split() for line in content.splitlines() if line.strip()]
    if not rows:
        raise DataError(f"{what} is empty. Fetch it again.")
    values, labels = np.zeros((len(rows), 256)), np.zeros(len(rows), np.int64)
    for number, row in enumerate(rows):
        try:
            labels[number] = int(row[0])
            pairs = [field.split(b":", 1) for field in row[1:]]
            indices = [int(index) for index, _ in pairs]
            entries = [float(value) for _, value in pairs]
        except ValueError as error:
            raise DataError(f"Line {number + 1} of {what} is not 'label index:value ...' ({error}).") from error
        if indices and not (min(indices) >= 1 and max(indices) <= 256):
            raise DataError(f"Line {number + 1} of {what} must use indices 1 to 256, got {max(indices)}.")
        values[number, np.array(indices, np.intp) - 1] = entries
    # Written as "not all inside" so that a nan is refused too.
    if not (np.abs(values) <= 1).all():
        raise DataError(f"{what} must hold pixel values from -1 to 1, got {np.abs(values).max()}. Fetch it again.")
    pixels = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
    return pixels, class_labels(labels - 1, 10, what)


def svhn(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Decode SVHN's MATLAB file into (number, 32, 32, 3) images and labels; its class 10 is the digit 0."""
    from scipy.io import loadmat, whosmat

    try:
        # The declared shapes are checked before anything is decompressed.
        declared = {name: (shape, kind) for name, shape, kind in whosmat(path)}
        shape, kind = declared.get("X", ((), "absent"))
        if kind != "uint8" or len(shape) != 4 or shape[:3] != (32, 32, 3):
            raise DataError(f"{path} must hold X, uint8 of shape (32, 32, 3, number), got {kind} {shape}.")
        if declared.get("y", ((), ""))[0] != (shape[3], 1):
            raise DataError(f"{path} must hold y of shape ({shape[3]}, 1), got {declared.get('y')}.")
        content = loadmat(path, variable_names=["X", "y"])
    except DataError:
        raise
    except Exception as error:  # scipy raises whatever its parser met: TypeError, IndexError, zlib.error, ...
        raise DataError(f"{path} is not a readable MATLAB 5 file ({error}). Delete it and fetch it again.") from error
    labels = content["y"][:, 0].astype(np.int64)
    images = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
    return images, class_labels(np.where(labels == 10, 0, labels), 10, str(path))


def cifar10(batches: list[bytes], what: str = "the CIFAR-10 file") -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Decode CIFAR-10's binary version: per image a label byte, then 1024 red, 1024 green, 1024 blue bytes."""
    for batch in batches:
        if not batch or len(batch) % 3073:
            raise DataError(f"{what} must hold a multiple of 3073 bytes, got {len(batch)}. Fetch it again.")
    rows = np.concatenate([np.frombuffer(batch, np.uint8).reshape(-1, 3073) for batch in batches])
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), class_labels(rows[:, 0], 10, what)


def stl10(images: bytes, labels: bytes, what: str = "the STL-10 file") -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Decode STL-10's binary files into (number, 96, 96, 3) images and labels 0-9; they store columns first."""
    side = 96
    if not images or len(images) != len(labels) * 3 * side * side:
        expected = len(labels) * 3 * side * side
        raise DataError(f"{what} must hold {expected} bytes for {len(labels)} labels, got {len(images)}. Fetch it again.")
    planes = np.frombuffer(images, np.uint8).reshape(-1, 3, side, side)
    classes = np.frombuffer(labels, np.uint8).astype(np.int64) - 1
    return np.ascontiguousarray(planes.transpose(0, 3, 2, 1)), class_labels(classes, 10, what)

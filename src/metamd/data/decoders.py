"""From official files to one canonical form per dataset: gzip, bzip2 and tar; idx, LIBSVM text, MATLAB, CIFAR-10, STL-10.

| dataset | canonical form | how |
|---|---|---|
| MNIST, QMNIST, KMNIST, FashionMNIST | 28x28 grey | as the files hold it |
| USPS | 28x28 grey | `enlarge_to_28`: bilinear from 16x16, in exact integer arithmetic |
| SVHN | 28x28 grey | `shrink`: Pillow's `convert("L")`, then its BILINEAR filter, from 32x32 RGB |
| CIFAR-10 | 32x32 RGB | as the files hold it |
| STL-10 | 32x32 RGB | `shrink`: Pillow's BOX filter (the mean of 3x3 pixels) from 96x96 RGB |

Each decoder checks headers and sizes before it builds an array, and refuses with a sentence. None of them reads a pickle,
and none extracts a file to disk.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import math
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metamd.data.registry import DataError, Dataset
from metamd.files.text import install

ImagesAndLabels = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Images and labels."""

OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

TEXT_LIMIT = 64 * 2**20
"""More than the text of any LIBSVM file read here (USPS train: about 25 MB)."""


def decode(record: Dataset, split: str, folder: Path) -> ImagesAndLabels:
    """The images and labels of one split as an `.npz` file stores them, from the official files in `folder`."""
    split_record = record.splits[split]
    count, expected = split_record.count, (split_record.count, *record.stored)
    try:
        images, labels = RECIPES[record.recipe](split, count, *(folder / file.name for file in split_record.files))
    except ImportError as error:
        raise DataError(f"Decoding {record.title} needs {error.name}. {install('data')}") from error
    if images.shape != expected or labels.shape != (count,):
        raise DataError(
            f"{record.name} {split} must decode to images {expected} with as many labels, got {images.shape} "
            f"and {labels.shape}. Delete {folder} and fetch it again."
        )
    return images, labels


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


def idx(content: bytes, what: str) -> NDArray[Any]:
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


def class_labels(labels: NDArray[Any], classes: int, what: str) -> NDArray[np.uint8]:
    """Labels as uint8 in `0 .. classes - 1`; of QMNIST's table of eight columns the first is the class."""
    column = labels[:, 0] if labels.ndim == 2 and labels.shape[1] > 0 else labels
    if column.ndim != 1 or not np.issubdtype(column.dtype, np.integer):
        raise DataError(f"{what} must hold one whole number per example, got {labels.dtype} of shape {labels.shape}.")
    if column.size and not (column.min() >= 0 and column.max() < classes):
        found = f"{column.min()} to {column.max()}"
        raise DataError(f"{what} must hold classes 0 to {classes - 1}, got {found}. It is damaged or another dataset's.")
    return column.astype(np.uint8)


def mnist(split: str, count: int, images: Path, labels: Path) -> ImagesAndLabels:
    """Decode idx files of 28x28 grey images and of their labels."""
    pixels = idx(decompress(images, 16 + count * 784), images.name)
    # QMNIST's labels are eight int32 columns; nothing read here is wider.
    table = idx(decompress(labels, 16 + count * 32), labels.name)
    if pixels.dtype.itemsize != 1:
        raise DataError(f"{images.name} must hold bytes, got {pixels.dtype}. Delete it and fetch it again.")
    return pixels, class_labels(table, 10, labels.name)


def usps(split: str, count: int, path: Path) -> ImagesAndLabels:
    """Decode USPS from LIBSVM text, `label index:value ...` with indices from 1; what is left out is zero.

    Values in [-1, 1] become `trunc((v + 1) / 2 * 255)`, labels 1-10 become 0-9. In double precision: in single precision,
    which torchvision uses, one pixel of the test set rounds up from 123.9999975 to 124 before it is truncated.
    """
    rows = [line.split() for line in decompress(path, TEXT_LIMIT).splitlines() if line.strip()]
    if not rows:
        raise DataError(f"{path} is empty. Fetch it again.")
    values, labels = np.zeros((len(rows), 256)), np.zeros(len(rows), np.int64)
    for number, row in enumerate(rows):
        try:
            labels[number] = int(row[0])
            pairs = [field.split(b":", 1) for field in row[1:]]
            indices = [int(index) for index, _ in pairs]
            entries = [float(value) for _, value in pairs]
        except ValueError as error:
            raise DataError(f"Line {number + 1} of {path} is not 'label index:value ...' ({error}).") from error
        if indices and not (min(indices) >= 1 and max(indices) <= 256):
            raise DataError(f"Line {number + 1} of {path} must use indices 1 to 256, got {max(indices)}.")
        values[number, np.array(indices, np.intp) - 1] = entries
    # Written as "not all inside" so that a nan is refused too.
    if not (np.abs(values) <= 1).all():
        raise DataError(f"{path} must hold pixel values from -1 to 1, got {np.abs(values).max()}. Fetch it again.")
    pixels = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
    return pixels, class_labels(labels - 1, 10, str(path))


def svhn(split: str, count: int, path: Path) -> ImagesAndLabels:
    """Decode SVHN's MATLAB file of 32x32 images; its class 10 is the digit 0."""
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
    return shrink(images, 28, "L", "BILINEAR"), class_labels(np.where(labels == 10, 0, labels), 10, str(path))


def cifar10(split: str, count: int, path: Path) -> ImagesAndLabels:
    """Decode CIFAR-10's binary version: per image a label byte, then 1024 red, 1024 green, 1024 blue bytes."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    sizes = {f"cifar-10-batches-bin/{name}.bin": count // len(names) * 3073 for name in names}
    batches = tar_members(path, sizes)
    rows = np.frombuffer(b"".join(batches[name] for name in sizes), np.uint8).reshape(-1, 3073)
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), class_labels(rows[:, 0], 10, path.name)


def stl10(split: str, count: int, path: Path) -> ImagesAndLabels:
    """Decode STL-10's binary files of 96x96 images, which store columns first and count classes from 1."""
    images, labels = f"stl10_binary/{split}_X.bin", f"stl10_binary/{split}_y.bin"
    content = tar_members(path, {images: count * 3 * 96 * 96, labels: count})
    planes = np.frombuffer(content[images], np.uint8).reshape(-1, 3, 96, 96)
    classes = np.frombuffer(content[labels], np.uint8).astype(np.int64) - 1
    large = np.ascontiguousarray(planes.transpose(0, 3, 2, 1))
    return shrink(large, 32, "RGB", "BOX"), class_labels(classes, 10, path.name)


# resizing


def canonical(name: str, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The canonical images from those that a `.npz` file stores; only USPS is stored in another form."""
    return enlarge_to_28(images) if name == "usps" else images


def digest(array: NDArray[np.uint8]) -> str:
    """The sha256 of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def enlarge_to_28(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    r"""Enlarge 16x16 grey images to 28x28 by bilinear interpolation between pixel centres, rounded once.

    The centre of output pixel $i$ lies at $(i + \tfrac12)\tfrac{16}{28} - \tfrac12 = (8i - 3)/14$ input pixels. Every
    weight is thus a multiple of 1/14, and the result is exact before the one rounding. Beyond the border the edge pixel
    repeats. No library routine is used, since their fixed-point roundings change between versions.
    """
    weights = np.zeros((28, 16), np.int32)
    for i in range(28):
        left, remainder = divmod(8 * i - 3, 14)
        weights[i, max(left, 0)] += 14 - remainder
        weights[i, min(left + 1, 15)] += remainder
    enlarged = np.empty((len(images), 28, 28), np.uint8)
    for start in range(0, len(images), 1024):
        block = images[start : start + 1024].astype(np.int32)
        total = np.einsum("yi,nij,xj->nyx", weights, block, weights, optimize=True)
        enlarged[start : start + 1024] = (total + 98) // 196
    return enlarged


def shrink(images: NDArray[np.uint8], side: int, mode: str, name: str) -> NDArray[np.uint8]:
    """Convert images to a mode of Pillow, and shrink them with one of its filters, which rounds after each dimension.

    So BOX is the mean of each 3x3 block of STL-10, except that about one value in ten moves by one grey level.
    """
    from PIL import Image

    by = Image.Resampling[name]
    return np.stack([np.asarray(Image.fromarray(image).convert(mode).resize((side, side), by)) for image in images])


RECIPES: dict[str, Callable[..., ImagesAndLabels]] = {
    "idx": mnist,
    "libsvm": usps,
    "svhn": svhn,
    "cifar10": cifar10,
    "stl10": stl10,
}
"""How the files of a split become arrays: functions of the split's name, its count and its files."""

"""One canonical form per dataset, from its official files or from what an `.npz` file stores.

| dataset | canonical form | how |
|---|---|---|
| MNIST, QMNIST, KMNIST, FashionMNIST | 28x28 grey | as the files hold it |
| USPS | 28x28 grey | `enlarge`: bilinear from 16x16, in exact integer arithmetic |
| SVHN | 28x28 grey | `shrink_svhn`: Pillow's `convert("L")`, then its BILINEAR filter, from 32x32 RGB |
| CIFAR-10 | 32x32 RGB | as the files hold it |
| STL-10 | 32x32 RGB | `shrink_stl10`: Pillow's BOX filter (the mean of 3x3 pixels) from 96x96 RGB |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from metamd.data import decoders
from metamd.data.decoders import decompress, tar_members
from metamd.data.registry import DataError, Dataset

Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Images and labels."""

TEXT_LIMIT = 64 * 2**20
"""More than the text of any LIBSVM file read here (USPS train: about 25 MB)."""


def canonical(name: str, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The canonical images from those that a `.npz` file stores; only USPS is stored in another form."""
    return enlarge(images) if name == "usps" else images


def digest(array: NDArray[np.uint8]) -> str:
    """The sha256 of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def enlarge(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
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


def shrink_svhn(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Turn 32x32 RGB images into 28x28 grey ones: Pillow's `convert("L")`, then its BILINEAR filter."""
    return _resized(images, 28, "L", "BILINEAR")


def shrink_stl10(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Shrink 96x96 RGB images to 32x32 with Pillow's BOX filter.

    That is the mean of each 3x3 block, except that Pillow rounds after each dimension. The rounding moves about one value
    in ten by one grey level.
    """
    return _resized(images, 32, "RGB", "BOX")


def _resized(images: NDArray[np.uint8], side: int, mode: str, name: str) -> NDArray[np.uint8]:
    from PIL import Image

    by = Image.Resampling[name]
    return np.stack([np.asarray(Image.fromarray(image).convert(mode).resize((side, side), by)) for image in images])


# from official files


def decode(record: Dataset, split: str, folder: Path) -> Arrays:
    """The images and labels of one split as an `.npz` file stores them, from the official files in `folder`."""
    split_record = record.splits[split]
    count, expected = split_record.count, (split_record.count, *record.stored_shape)
    try:
        images, labels = RECIPES[record.recipe](split, count, *(folder / file.name for file in split_record.files))
    except ImportError as error:
        raise DataError(
            f"Decoding {record.title} needs {error.name}. Install it with: pip install 'metamd[data]'"
        ) from error
    if images.shape != expected or labels.shape != (count,):
        raise DataError(
            f"{record.name} {split} must decode to images {expected} with as many labels, got {images.shape} "
            f"and {labels.shape}. Delete {folder} and fetch it again."
        )
    return images, labels


def _idx(split: str, count: int, images: Path, labels: Path) -> Arrays:
    pixels = decoders.idx(decompress(images, 16 + count * 784), images.name)
    # QMNIST's labels are eight int32 columns; nothing read here is wider.
    table = decoders.idx(decompress(labels, 16 + count * 32), labels.name)
    if pixels.dtype.itemsize != 1:
        raise DataError(f"{images.name} must hold bytes, got {pixels.dtype}. Delete it and fetch it again.")
    return pixels, decoders.class_labels(table, 10, labels.name)


def _libsvm(split: str, count: int, path: Path) -> Arrays:
    return decoders.usps(decompress(path, TEXT_LIMIT), path.name)


def _svhn(split: str, count: int, path: Path) -> Arrays:
    images, labels = decoders.svhn(path)
    return shrink_svhn(images), labels


def _cifar10(split: str, count: int, path: Path) -> Arrays:
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    sizes = {f"cifar-10-batches-bin/{name}.bin": count // len(names) * 3073 for name in names}
    batches = tar_members(path, sizes)
    return decoders.cifar10([batches[name] for name in sizes], path.name)


def _stl10(split: str, count: int, path: Path) -> Arrays:
    images, labels = f"stl10_binary/{split}_X.bin", f"stl10_binary/{split}_y.bin"
    content = tar_members(path, {images: count * 3 * 96 * 96, labels: count})
    large, classes = decoders.stl10(content[images], content[labels], path.name)
    return shrink_stl10(large), classes


RECIPES: dict[str, Callable[..., Arrays]] = {
    "idx": _idx,
    "libsvm": _libsvm,
    "svhn": _svhn,
    "cifar10": _cifar10,
    "stl10": _stl10,
}
"""How the files of a split become arrays: functions of the split's name, its count and its files."""

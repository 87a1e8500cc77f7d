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
from metamd.data.archives import decompress, tar_members
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
    from PIL import Image

    grey = np.empty((len(images), 28, 28), np.uint8)
    for i, image in enumerate(images):
        small = Image.fromarray(image).convert("L").resize((28, 28), Image.Resampling.BILINEAR)
        grey[i] = np.asarray(small)
    return grey


def shrink_stl10(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Shrink 96x96 RGB images to 32x32 with Pillow's BOX filter.

    That is the mean of each 3x3 block, except that Pillow rounds after each dimension. The rounding moves about one value
    in ten by one grey level.
    """
    from PIL import Image

    small = np.empty((len(images), 32, 32, 3), np.uint8)
    for i, image in enumerate(images):
        small[i] = np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BOX))
    return small


# from official files


def decode(record: Dataset, split: str, folder: Path) -> Arrays:
    """The images and labels of one split as an `.npz` file stores them, from the official files in `folder`."""
    try:
        images, labels = RECIPES[record.recipe](record, split, folder)
    except ImportError as error:
        raise DataError(
            f"Decoding {record.title} needs {error.name}. Install it with: pip install 'metamd[data]'"
        ) from error
    count = record.splits[split].count
    if images.shape != (count, *record.stored_shape) or labels.shape != (count,):
        expected = (count, *record.stored_shape)
        raise DataError(
            f"{record.name} {split} must decode to images {expected} with as many labels, got {images.shape} "
            f"and {labels.shape}. Delete {folder} and fetch it again."
        )
    return images, labels


def _idx(record: Dataset, split: str, folder: Path) -> Arrays:
    images_file, labels_file = record.splits[split].files
    count = record.splits[split].count
    images = decoders.idx(decompress(folder / images_file.name, 16 + count * 784), images_file.name)
    # QMNIST's labels are eight int32 columns; nothing read here is wider.
    table = decoders.idx(decompress(folder / labels_file.name, 16 + count * 32), labels_file.name)
    if images.dtype.itemsize != 1:
        raise DataError(f"{images_file.name} must hold bytes, got {images.dtype}. Delete it and fetch it again.")
    return images, decoders.class_labels(table, len(record.classes), labels_file.name)


def _libsvm(record: Dataset, split: str, folder: Path) -> Arrays:
    (file,) = record.splits[split].files
    return decoders.usps(decompress(folder / file.name, file.content_size or TEXT_LIMIT), file.name)


def _svhn(record: Dataset, split: str, folder: Path) -> Arrays:
    (file,) = record.splits[split].files
    images, labels = decoders.svhn(folder / file.name)
    return shrink_svhn(images), labels


def _cifar10(record: Dataset, split: str, folder: Path) -> Arrays:
    (file,) = record.splits[split].files
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    size = record.splits[split].count // len(names) * 3073
    sizes = {f"cifar-10-batches-bin/{name}.bin": size for name in names}
    batches = tar_members(folder / file.name, sizes)
    return decoders.cifar10([batches[name] for name in sizes], file.name)


def _stl10(record: Dataset, split: str, folder: Path) -> Arrays:
    (file,) = record.splits[split].files
    count = record.splits[split].count
    images, labels = f"stl10_binary/{split}_X.bin", f"stl10_binary/{split}_y.bin"
    content = tar_members(folder / file.name, {images: count * 3 * 96 * 96, labels: count})
    large, classes = decoders.stl10(content[images], content[labels], file.name)
    return shrink_stl10(large), classes


RECIPES: dict[str, Callable[[Dataset, str, Path], Arrays]] = {
    "idx": _idx,
    "libsvm": _libsvm,
    "svhn": _svhn,
    "cifar10": _cifar10,
    "stl10": _stl10,
}

"""From a folder of official files to the arrays of one split, in the form that an `.npz` file stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from metamd.data import canonical, decoders
from metamd.data.archives import decompress, tar_members
from metamd.data.records import DataError, Dataset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]

TEXT_LIMIT = 64 * 2**20
"""More than the text of any LIBSVM file read here (USPS train: about 25 MB)."""


def decode(record: Dataset, split: str, folder: Path) -> Arrays:
    """The images and labels of one split, from the official files in `folder`.

    Args:
        record: which dataset.
        split: `"train"` or `"test"`.
        folder: where its official files are.
    """
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
    return canonical.shrink_svhn(images), labels


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
    return canonical.shrink_stl10(large), classes


RECIPES: dict[str, Callable[[Dataset, str, Path], Arrays]] = {
    "idx": _idx,
    "libsvm": _libsvm,
    "svhn": _svhn,
    "cifar10": _cifar10,
    "stl10": _stl10,
}

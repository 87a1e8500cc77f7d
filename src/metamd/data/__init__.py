"""Real data by name: checked downloads, an offline folder, and one canonical form per dataset.

    images, labels = metamd.data.load("kmnist", split="train")

Grey datasets give uint8 images (number, 28, 28), colour ones (number, 32, 32, 3); labels are int64. The
search goes through the folder METAMD_DATA, the cache, and the official files. torch is imported by `load`
alone. Texts, photographs and other files come as they were published: `metamd.data.files("kodak")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metamd.data.folders import image_folder
from metamd.data.loading import find_split, load_arrays
from metamd.data.raw_files import files
from metamd.data.registry import DataError, Dataset, FileSet, Provenance, dataset, datasets, file_sets

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DataError",
    "Dataset",
    "FileSet",
    "Provenance",
    "available",
    "dataset",
    "datasets",
    "file_sets",
    "files",
    "image_folder",
    "load",
    "provenance",
]


def load(name: str, split: str = "train", *, download: bool = True) -> tuple[Tensor, Tensor]:
    """Load one split of a dataset in its canonical form: images (uint8) and labels (int64).

    Args:
        name: which dataset, one of `datasets()`.
        split: `"train"` or `"test"`.
        download: fetch what is neither in METAMD_DATA nor in the cache; METAMD_OFFLINE=1 forbids it everywhere.
    """
    import torch

    (images, labels), _ = load_arrays(name, split, fetch_missing=download)
    return torch.from_numpy(images), torch.from_numpy(labels.astype("int64"))


def provenance(name: str, split: str = "train", *, download: bool = True) -> Provenance:
    """Where a split comes from, how many images it has, and whether it is official, partial or rebuilt.

    Args:
        name: which dataset, one of `datasets()`.
        split: `"train"` or `"test"`.
        download: fetch what is neither in METAMD_DATA nor in the cache.
    """
    return load_arrays(name, split, fetch_missing=download)[1]


def available() -> tuple[str, ...]:
    """The datasets whose splits are all at hand, in METAMD_DATA or in the cache, without any download."""
    return tuple(name for name, record in datasets().items() if all(find_split(name, s) for s in record.splits))

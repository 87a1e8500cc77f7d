"""The `.npz` files of decoded splits: where they are, how they are written, what is accepted from one.

A file is `<dataset>-<split>.npz` with `images` (uint8) and `labels`. Those in the cache have their sha256 in
a file beside them, in the format of `sha256sum`.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from metamd.data.archives import zip_members
from metamd.data.records import DataError, Dataset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HEADER = 4096
"""Room for the header of an `.npy` file."""

UNRECORDED = "not one of the recorded arrays; vouched for by the checksum beside it"


def offline_folder() -> Path | None:
    """The folder that METAMD_DATA names, or None when it is not set."""
    value = os.environ.get("METAMD_DATA")
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise DataError(f"METAMD_DATA must name a folder of .npz files, got {value}, which is none. Correct or unset it.")
    return folder


def cache_folder() -> Path:
    """Where fetched data is kept: METAMD_CACHE, else `metamd` under XDG_CACHE_HOME or `~/.cache`."""
    value = os.environ.get("METAMD_CACHE")
    if value:
        return Path(value).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "metamd"


def split_file(folder: Path, name: str, split: str) -> Path:
    """The `.npz` file of one split in a folder."""
    return folder / f"{name}-{split}.npz"


def checksum_file(path: Path) -> Path:
    """The file that holds the sha256 of `path`."""
    return path.with_name(f"{path.name}.sha256")


def find(name: str, split: str) -> Path | None:
    """The `.npz` file of a split: in METAMD_DATA, else in the cache, else None.

    In the cache a file without its checksum is what an interrupted write left, and counts as absent.
    """
    folder = offline_folder()
    if folder is not None and split_file(folder, name, split).exists():
        return split_file(folder, name, split)
    cached = split_file(cache_folder(), name, split)
    return cached if cached.exists() and checksum_file(cached).exists() else None


def in_cache(path: Path) -> bool:
    """Whether a file is one that `fetch` wrote."""
    return path.parent == cache_folder()


def check_sum(path: Path) -> bool:
    """Whether a checksum stands beside `path`; one that differs is refused.

    Args:
        path: the `.npz` file.
    """
    beside = checksum_file(path)
    if not beside.exists():
        return False
    words = beside.read_text(encoding="utf-8", errors="replace").split()
    required = words[0] if words else "nothing"
    with path.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != required:
        raise DataError(
            f"{path} must have the sha256 {required} that stands in {beside.name}, got {got}. Delete both "
            "files and fetch or copy them again."
        )
    return True


def read_npz(path: Path, record: Dataset, split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The stored images and labels of one split, with their types, shapes and classes checked.

    Args:
        path: the `.npz` file.
        record: which dataset it must hold.
        split: which split of it.
    """
    import numpy as np

    from metamd.data.decoders import class_labels

    most = record.splits[split].count
    pixels = math.prod(record.stored_shape)
    members = zip_members(path, {"images.npy": most * pixels + HEADER, "labels.npy": most * 8 + HEADER})
    try:
        images = np.load(io.BytesIO(members["images.npy"]), allow_pickle=False)
        labels = np.load(io.BytesIO(members["labels.npy"]), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise DataError(f"{path} holds an array that cannot be read ({error}). Delete it and make it again.") from error
    if images.dtype != np.uint8 or images.shape[1:] != record.stored_shape or labels.shape != images.shape[:1]:
        expected = " x ".join(map(str, record.stored_shape))
        raise DataError(
            f"{path} must hold uint8 images of {expected} with one label each, got {images.dtype} "
            f"{images.shape} and labels {labels.shape}. Make it again as docs/data.md says."
        )
    if not len(images):
        raise DataError(f"{path} holds no image at all. Delete it and make it again.")
    return images, class_labels(labels, len(record.classes), str(path))


def stored_count(path: Path) -> int:
    """How many examples an `.npz` file holds, from the header of its labels alone.

    Args:
        path: the `.npz` file.
    """
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive, archive.open("labels.npy") as stream:
            np.lib.format.read_magic(stream)
            shape, _, _ = np.lib.format.read_array_header_1_0(stream)
            return int(shape[0])
    except (zipfile.BadZipFile, KeyError, ValueError, IndexError, OSError) as error:
        raise DataError(f"{path} is not a readable .npz file ({error}). Delete it and make it again.") from error


def write_npz(path: Path, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
    """Write one split and then its checksum, each whole or not at all.

    Args:
        path: the `.npz` file.
        images: its images, as stored.
        labels: its labels.
    """
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, images=images, labels=labels)
    # Without this, a crash between the two writes would leave the old checksum beside the new file.
    checksum_file(path).unlink(missing_ok=True)
    _replace(path, content.getvalue())
    line = f"{hashlib.sha256(content.getvalue()).hexdigest()}  {path.name}\n"
    _replace(checksum_file(path), line.encode())


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

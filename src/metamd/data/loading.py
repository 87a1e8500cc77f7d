"""The splits at hand, and how missing ones are fetched: METAMD_DATA first, then the cache, then the official files.

A split is a file `<dataset>-<split>.npz` with `images` (uint8) and `labels`. Those in the cache have their sha256 in
a file beside them, in the format of `sha256sum`.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from metamd.data import registry
from metamd.data.decoders import ImagesAndLabels, canonical, class_labels, decode, digest
from metamd.data.registry import DataError, Dataset, Form, Provenance
from metamd.files.limits import DATA_LIMIT, open_regular, read_regular
from metamd.files.text import brief

_OF_PYTHON = (KeyError, ValueError, EOFError, OSError, MemoryError, NotImplementedError, SyntaxError)
UNREADABLE = (zipfile.BadZipFile, zlib.error, *_OF_PYTHON)
"""What reading a broken .npz file raises."""

UNRECORDED = "not one of the recorded arrays; vouched for by the checksum beside it"


def load_arrays(name: str, split: str, *, fetch_missing: bool = True) -> tuple[ImagesAndLabels, Provenance]:
    """The canonical images and labels of a split, and where they came from: METAMD_DATA, the cache or the official files."""
    registry.split_of(name, split)
    path = find_split(name, split)
    if path is None:
        if not fetch_missing or os.environ.get("METAMD_OFFLINE"):
            record, folder = registry.dataset(name), offline_folder()
            note = f" {record.note}" if record.note else ""
            raise DataError(
                f"{record.title} {split} is required and there is no {name}-{split}.npz in METAMD_DATA "
                f"({folder or 'not set'}) or in the cache ({cache_folder()}).{note} Run `metamd data fetch {name}` where "
                "there is a network."
            )
        (path,) = fetch(name, [split])
    return read_split(path, name, split)


def read_split(path: Path, name: str, split: str) -> tuple[ImagesAndLabels, Provenance]:
    """The canonical arrays in an `.npz` file, refused unless recorded or vouched for by a checksum beside it."""
    record = registry.dataset(name)
    vouched = check_sum(path)
    images, labels = read_npz(path, record, split)
    images = canonical(name, images)
    form = recognise(record, split, images, labels)
    if form is None and not vouched:
        raise DataError(
            f"{path} holds none of the recorded arrays of {record.title} {split}: it is damaged or "
            f"somebody's own. Make it again, or vouch for your own data with `sha256sum {path.name} > "
            f"{path.name}.sha256`."
        )
    official = record.splits[split].count
    status, note = (form.status, form.note) if form else ("unrecorded", UNRECORDED)
    if path.parent == cache_folder() and len(images) == official:
        # Only `fetch` writes there, from files whose checksums it has compared.
        status, note = "official", ""
    return (images, labels), Provenance(name, split, str(path), len(images), official, status, note)


def recognise(record: Dataset, split: str, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Form | None:
    """The recorded form that canonical arrays are, or None; images recorded for another are refused."""
    digests = digest(images), digest(labels)
    for form in record.splits[split].forms:
        if (form.images_sha256, form.labels_sha256) == digests:
            return form
    # So MNIST posing as QMNIST is noticed.
    for other in registry.datasets().values():
        for key, known in other.splits.items():
            if any(form.images_sha256 == digests[0] for form in known.forms) and (other.name, key) != (record.name, split):
                raise DataError(
                    f"The images offered as {record.title} {split} are those of {other.name} {key}. Load that by its name."
                )
    return None


def fetch(name: str, splits: list[str], *, force: bool = False) -> list[Path]:
    """Download, decode and cache splits of a dataset; the official files are removed once they are decoded.

    Splits that come from one archive are made together. What is in the cache is fetched again if `force` says so.
    """
    from metamd.data.download import download  # imports torch, which listing what is at hand does without

    record = registry.dataset(name)
    asked = {file.name for split in splits for file in registry.split_of(name, split).files}
    together = [key for key, split in record.splits.items() if asked & {file.name for file in split.files}]
    with locked_cache(name) as cache:
        wanted = [split for split in together if force or not _is_whole(split_file(cache, name, split))]
        folder = cache / "files" / name
        for file in {file.name: file for split in wanted for file in record.splits[split].files}.values():
            download(file, folder)
        for split in wanted:
            images, labels = decode(record, split, folder)
            form = recognise(record, split, canonical(name, images), labels)
            if form is None and any(known.status == "official" for known in record.splits[split].forms):
                raise DataError(
                    f"The official files of {record.title} {split} decoded to other arrays than the recorded ones, "
                    "so they were not kept. Please report this with the versions of metamd and numpy."
                )
            write_npz(split_file(cache, name, split), images, labels)
        shutil.rmtree(folder, ignore_errors=True)
    return [split_file(cache, name, split) for split in splits]


@contextmanager
def locked_cache(name: str) -> Iterator[Path]:
    """The cache folder, in which nobody else writes this dataset or set of files meanwhile."""
    from metamd.files.store import locked

    cache = cache_folder()
    try:
        with locked(cache / "locks" / f"{name}.lock"):
            yield cache
    except OSError as error:
        raise DataError(
            f"The cache folder {cache} must be writable and have room, got: {error}. Set METAMD_CACHE to another folder."
        ) from error


def _is_whole(path: Path) -> bool:
    try:
        return path.exists() and check_sum(path)
    except DataError:
        return False


# files


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


def find_split(name: str, split: str) -> Path | None:
    """The `.npz` file of a split: in METAMD_DATA, else in the cache, else None.

    In the cache a file without its checksum is what an interrupted write left, and counts as absent.
    """
    folder = offline_folder()
    if folder is not None and split_file(folder, name, split).exists():
        return split_file(folder, name, split)
    cached = split_file(cache_folder(), name, split)
    return cached if cached.exists() and checksum_file(cached).exists() else None


def check_sum(path: Path) -> bool:
    """Whether a checksum stands beside an `.npz` file; one that differs is refused."""
    beside = checksum_file(path)
    if not beside.exists():
        return False
    try:
        words = read_regular(beside, 2**16).decode(errors="replace").split()
        required = brief(words[0], 80) if words else "nothing"
        with open_regular(path) as stream:
            got = hashlib.file_digest(stream, "sha256").hexdigest()
    except ValueError as error:
        raise DataError(f"{path} and {beside.name} must be files that can be read: {error}") from None
    if got != required:
        raise DataError(
            f"{path} must have the sha256 {required} that stands in {beside.name}, got {got}. Delete both "
            "files and fetch or copy them again."
        )
    return True


def check_claims(stream: IO[bytes], limit: int = DATA_LIMIT) -> None:
    """Refuse an `.npz` file whose arrays claim to be larger than so many bytes, before any of it is unpacked."""
    with zipfile.ZipFile(stream) as archive:
        claimed = sum(member.file_size for member in archive.infolist())
        sizes = [_claimed(archive, member) for member in archive.infolist() if member.filename.endswith(".npy")]
    if max(claimed, *sizes, 0) > limit:
        raise ValueError(f"its arrays would have {max(claimed, *sizes, 0):,} bytes, where at most {limit:,} are read")
    stream.seek(0)


def _claimed(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """The bytes that the header of an array says it has."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    return int(math.prod(shape)) * int(dtype.itemsize)


def stored(path: Path, *names: str, limit: int = DATA_LIMIT) -> list[NDArray[Any]]:
    """Arrays of an `.npz` file as they are, if they have at most so many bytes."""
    try:
        with open_regular(path) as stream:
            check_claims(stream, limit)
            with np.lib.npyio.NpzFile(stream, allow_pickle=False) as found:
                return [np.asarray(found[name]) for name in names]
    except UNREADABLE as error:
        raise DataError(
            f"{path} must be a readable .npz file with {' and '.join(names)} ({brief(str(error), 300)}). Delete it and make "
            "it again."
        ) from error


def read_npz(path: Path, record: Dataset, split: str) -> ImagesAndLabels:
    """The stored images and labels of one split, with their types, shapes and classes checked."""
    most = record.splits[split].count
    # labels of up to 8 columns and 8 bytes, and what the archive adds
    images, labels = stored(path, "images", "labels", limit=most * (math.prod(record.stored) * 8 + 64) + 2**16)
    as_stored = images.dtype == np.uint8 and images.shape[1:] == record.stored and len(images) <= most
    if not as_stored or labels.shape != images.shape[:1]:
        expected = " x ".join(map(str, record.stored))
        raise DataError(
            f"{path} must hold uint8 images of {expected} with one label each, at most {most}, got {images.dtype} "
            f"{images.shape} and labels {labels.shape}. Make it again as docs/data.md says."
        )
    if not len(images):
        raise DataError(f"{path} holds no image at all. Delete it and make it again.")
    return images, class_labels(labels, len(record.classes), str(path))


def write_npz(path: Path, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
    """Write one split and then its checksum, each whole or not at all."""
    from metamd.files.container import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, images=images, labels=labels)
    # Without this, a crash between the two writes would leave the old checksum beside the new file.
    checksum_file(path).unlink(missing_ok=True)
    write_atomically(path, content.getvalue())
    line = f"{hashlib.sha256(content.getvalue()).hexdigest()}  {path.name}\n"
    write_atomically(checksum_file(path), line.encode())

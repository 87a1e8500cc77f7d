"""Find, fetch and check a split: METAMD_DATA first, then the cache, then the official files."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from metamd.data import canonical, recipes, registry, store
from metamd.data.download import download
from metamd.data.records import DataError, Dataset, Form, Provenance
from metamd.files.locks import locked

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def load_arrays(name: str, split: str, *, fetch_missing: bool = True) -> tuple[Arrays, Provenance]:
    """The canonical images and labels of a split, and where they came from.

    Args:
        name: which dataset.
        split: `"train"` or `"test"`.
        fetch_missing: whether to download what is found nowhere.
    """
    registry.split_of(name, split)
    path = store.find(name, split)
    if path is None:
        if not fetch_missing or os.environ.get("METAMD_OFFLINE"):
            raise DataError(_absent(name, split))
        fetch(name, [split], progress=sys.stderr.isatty())
        path = store.split_file(store.cache_folder(), name, split)
    return read(path, name, split)


def _absent(name: str, split: str) -> str:
    record = registry.dataset(name)
    folder = store.offline_folder()
    here = f"in METAMD_DATA ({folder})" if folder else "in METAMD_DATA (not set)"
    note = f" {record.note}" if record.note else ""
    return (
        f"{record.title} {split} is required and there is no {name}-{split}.npz {here} or in the cache "
        f"({store.cache_folder()}).{note} Run `metamd data fetch {name}` where there is a network."
    )


def read(path: Path, name: str, split: str) -> tuple[Arrays, Provenance]:
    """The canonical arrays in an `.npz` file, refused unless recorded or vouched for by a checksum beside it.

    Args:
        path: the `.npz` file.
        name: which dataset it must hold.
        split: which split of it.
    """
    record = registry.dataset(name)
    vouched = store.check_sum(path)
    images, labels = store.read_npz(path, record, split)
    images = canonical.canonical(name, images)
    form = recognise(record, split, images, labels)
    if form is None and not vouched:
        raise DataError(
            f"{path} holds none of the recorded arrays of {record.title} {split}: it is damaged or "
            f"somebody's own. Make it again, or vouch for your own data with `sha256sum {path.name} > "
            f"{path.name}.sha256`."
        )
    provenance = _provenance(record, split, path, len(images), form)
    return (images, labels), provenance


def recognise(record: Dataset, split: str, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Form | None:
    """The recorded form that canonical arrays are, or None; images recorded for another are refused.

    Args:
        record: which dataset they should be.
        split: which split of it.
        images: the canonical images.
        labels: the labels.
    """
    digest, label_digest = canonical.digest(images), canonical.digest(labels)
    for form in record.splits[split].forms:
        if (form.images_sha256, form.labels_sha256) == (digest, label_digest):
            return form
    owner = registry.owner_of(digest)
    if owner is not None and owner != (record.name, split):
        whose = " ".join(owner)
        raise DataError(f"The images offered as {record.title} {split} are those of {whose}. Load that by its name.")
    return None


def _provenance(record: Dataset, split: str, path: Path, count: int, form: Form | None) -> Provenance:
    official = record.splits[split].count
    status, note = (form.status, form.note) if form else ("unrecorded", store.UNRECORDED)
    if store.in_cache(path) and count == official:
        # Only `fetch` writes there, from files whose checksums it has compared.
        status, note = "official", ""
    return Provenance(record.name, split, str(path), count, official, status, note)


def fetch(name: str, splits: list[str], *, force: bool = False, progress: bool = False) -> list[Path]:
    """Download, decode and cache splits of a dataset; the official files are removed once they are decoded.

    Args:
        name: which dataset.
        splits: which splits of it; splits that come from one archive are made together.
        force: fetch again what is already in the cache.
        progress: draw bars on standard error.
    """
    try:
        return _fetch(registry.dataset(name), splits, force, progress)
    except OSError as error:
        raise DataError(
            f"The cache folder {store.cache_folder()} must be writable and have room, got: {error}. "
            "Set METAMD_CACHE to another folder."
        ) from error


def _fetch(record: Dataset, splits: list[str], force: bool, progress: bool) -> list[Path]:
    cache, name = store.cache_folder(), record.name
    with locked(cache / "locks" / f"{name}.lock"):
        wanted = [s for s in _together(record, splits) if force or not _cached(record, s)]
        files = {file.name: file for split in wanted for file in record.splits[split].files}
        folder = cache / "files" / name
        for file in files.values():
            download(file, folder, progress=progress)
        for split in wanted:
            images, labels = recipes.decode(record, split, folder)
            _check_decoded(record, split, images, labels)
            store.write_npz(store.split_file(cache, name, split), images, labels)
        shutil.rmtree(folder, ignore_errors=True)
    return [store.split_file(cache, name, split) for split in splits]


def _together(record: Dataset, splits: list[str]) -> list[str]:
    files = {file.name for split in splits for file in registry.split_of(record.name, split).files}
    return [key for key, split in record.splits.items() if files & {file.name for file in split.files}]


def _cached(record: Dataset, split: str) -> bool:
    path = store.split_file(store.cache_folder(), record.name, split)
    if not path.exists() or not store.checksum_file(path).exists():
        return False
    try:
        return store.check_sum(path)
    except DataError:
        return False


def _check_decoded(record: Dataset, split: str, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
    form = recognise(record, split, canonical.canonical(record.name, images), labels)
    recorded = any(known.status == "official" for known in record.splits[split].forms)
    if recorded and form is None:
        raise DataError(
            f"The official files of {record.title} {split} decoded to other arrays than the recorded ones, "
            "so they were not kept. Please report this with the versions of metamd and numpy."
        )

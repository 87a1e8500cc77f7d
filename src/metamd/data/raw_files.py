"""Files that are kept as they were published: where they are, and how missing ones are fetched.

A file is refused unless its checksums are the recorded ones, so its decoder knows every byte beforehand.
"""

from __future__ import annotations

import os
from pathlib import Path

from metamd.data import registry
from metamd.data.loading import cache_folder, locked_cache, offline_folder
from metamd.data.registry import DataError, RemoteFile


def files(name: str, *, download: bool = True) -> dict[str, Path]:
    """The checked files of a set, by their names: from METAMD_DATA, METAMD_OFFICIAL, the cache, or the official places.

    Args:
        name: which set, one of `file_sets()`.
        download: fetch what is nowhere at hand; METAMD_OFFLINE=1 forbids it everywhere.
    """
    from metamd.data.download import mismatch  # imports torch, which listing what is at hand does without

    record, found = registry.file_set(name), dict[str, Path]()
    for file in record.files:
        path = find_file(name, file.name)
        if path is None:
            if not download or os.environ.get("METAMD_OFFLINE") or not file.urls:
                note = f" {record.note}" if record.note else ""
                raise DataError(
                    f"{file.name} of {record.title} is required, and there is no {name}/{file.name} in METAMD_DATA, in "
                    f"METAMD_OFFICIAL or in the cache ({cache_folder()}).{note} "
                    + (f"Run `metamd data fetch {name}` where there is a network." if file.urls else "Copy it there.")
                )
            path = fetch_file(name, file)
        elif why := mismatch(file, path):
            raise DataError(f"{path} must be the official file: {why}. Delete it and fetch or copy it again.")
        found[file.name] = path
    return found


def fetch_files(name: str, *, force: bool = False) -> list[Path]:
    """Download all files of a set into the cache; what is there and whole is downloaded again if `force` says so."""
    record = registry.file_set(name)
    if missing := [file.name for file in record.files if not file.urls]:
        raise DataError(f"{', '.join(missing)} of {record.title} cannot be downloaded. {record.note}")
    for file in record.files if force else ():
        (cache_folder() / name / file.name).unlink(missing_ok=True)
    return [fetch_file(name, file) for file in record.files]


def fetch_file(name: str, file: RemoteFile) -> Path:
    """Download one file of a set into the cache, where it stays as it is."""
    from metamd.data.download import download

    with locked_cache(name) as cache:
        return download(file, cache / name)


def find_file(name: str, file: str) -> Path | None:
    """The path of one file of a set where it is at hand, whatever its content; else None."""
    official = os.environ.get("METAMD_OFFICIAL")
    folders = [offline_folder(), Path(official).expanduser() if official else None, cache_folder()]
    paths = [folder / name / file for folder in folders if folder is not None]
    return next((path for path in paths if path.exists()), None)

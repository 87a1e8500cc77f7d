"""The datasets that can be loaded: what is known of them, read from `registry.toml` into frozen records.

Hosts move: each file lists several addresses, and the checksum, not the host, decides what is accepted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

Status = Literal["official", "derived", "rebuilt", "partial", "unrecorded"]
"""How a pair of arrays relates to the official files.

official    decoded from files whose official checksum was equal
derived     resized from such files; another version of the resizing routine may round differently
rebuilt     made from another source, with the evidence in the note; the official checksum was not checkable
partial     a leading part of the official data
unrecorded  none of the recorded arrays, vouched for by a checksum file: a user's own
"""


class DataError(ValueError):
    """Data that is missing, malformed or not what was asked for; the message says what to do."""


@dataclass(frozen=True)
class RemoteFile:
    """An official file: where it is served and what it must be.

    `sha256` and `size` are None where only the md5 is published. `content_sha256` and `content_size` describe
    the decompressed bytes, so that a mirror which compressed them anew is still recognised.
    """

    name: str
    urls: tuple[str, ...]
    md5: str
    sha256: str | None = None
    size: int | None = None
    content_sha256: str | None = None
    content_size: int | None = None

    @property
    def largest(self) -> int:
        """How many bytes a download may write before it is refused."""
        if self.size is None:
            return 64 * 2**20
        # A mirror that compressed the file anew may be larger; a file without recorded content may not.
        return self.size if self.content_sha256 is None else 2 * self.size + 2**16


@dataclass(frozen=True)
class Form:
    """A pair of canonical arrays that a split is known to have, by the sha256 of their bytes."""

    count: int
    images_sha256: str
    labels_sha256: str
    status: Status
    note: str = ""


@dataclass(frozen=True)
class SplitRecord:
    """One split: how many examples its official files hold, which files, and the arrays seen of it."""

    count: int
    files: tuple[RemoteFile, ...]
    forms: tuple[Form, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """One dataset: its canonical image shape, the shape that `.npz` files store, its licence, source and splits."""

    name: str
    title: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    classes: tuple[str, ...]
    licence: str
    homepage: str
    splits: Mapping[str, SplitRecord]
    recipe: str
    note: str = ""

    @property
    def download_size(self) -> int | None:
        """The bytes of all official files together, or None where one of them is not known."""
        files = {file.name: file for split in self.splits.values() for file in split.files}
        sizes = [file.size for file in files.values()]
        return None if None in sizes else sum(size for size in sizes if size is not None)


@dataclass(frozen=True)
class FileSet:
    """Files that are kept as they were published: texts, pictures, a solution, a model."""

    name: str
    title: str
    licence: str
    homepage: str
    files: tuple[RemoteFile, ...]
    note: str = ""

    @property
    def size(self) -> int:
        """The bytes of all files together."""
        return sum(file.size or 0 for file in self.files)


@dataclass(frozen=True)
class Provenance:
    """Where a loaded split came from; a table says `status` and `note` wherever a number rests on it."""

    name: str
    split: str
    path: str
    count: int
    official_count: int
    status: Status
    note: str


@cache
def datasets() -> Mapping[str, Dataset]:
    """The record of every dataset of images with labels, by name."""
    return MappingProxyType({name: _dataset(name, entry) for name, entry in _table().items() if "splits" in entry})


@cache
def file_sets() -> Mapping[str, FileSet]:
    """The record of every set of files, by name."""
    return MappingProxyType({name: _file_set(name, entry) for name, entry in _table().items() if "files" in entry})


def file_set(name: str) -> FileSet:
    """The record of one set of files, by name."""
    if name not in file_sets():
        raise DataError(f"No set of files is called {name!r}. Choose one of: {', '.join(file_sets())}.")
    return file_sets()[name]


def dataset(name: str) -> Dataset:
    """The record of one dataset, by name."""
    if name not in datasets():
        raise DataError(f"No dataset is called {name!r}. Choose one of: {', '.join(datasets())}.")
    return datasets()[name]


def split_of(name: str, split: str) -> SplitRecord:
    """The record of one split, by name."""
    splits = dataset(name).splits
    if split not in splits:
        raise DataError(f"{name} has no split {split!r}. Choose one of: {', '.join(splits)}.")
    return splits[split]


def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("metamd.data").joinpath("registry.toml").read_text(encoding="utf-8"))


def _remote_files(files: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> tuple[RemoteFile, ...]:
    """The records of files, each of which may be on all hosts and at addresses of its own."""
    places = [(*(host + file["name"] for host in hosts), *file.get("urls", ())) for file in files]
    return tuple(RemoteFile(**{**file, "urls": urls}) for file, urls in zip(files, places, strict=True))


def _file_set(name: str, entry: Mapping[str, Any]) -> FileSet:
    plain = {key: value for key, value in entry.items() if key not in ("hosts", "files")}
    return FileSet(name=name, files=_remote_files(entry["files"], entry.get("hosts", ())), **plain)


def _dataset(name: str, entry: Mapping[str, Any]) -> Dataset:
    hosts, splits = entry["hosts"], {}
    for key, split in entry["splits"].items():
        files, forms = _remote_files(split.get("files", ()), hosts), split.get("forms", ())
        splits[key] = SplitRecord(split["count"], files, tuple(Form(**form) for form in forms))
    plain = {"stored": entry["shape"]} | {key: value for key, value in entry.items() if key not in ("hosts", "splits")}
    plain |= {key: tuple(plain[key]) for key in ("shape", "stored", "classes")}
    return Dataset(name=name, splits=MappingProxyType(splits), **plain)

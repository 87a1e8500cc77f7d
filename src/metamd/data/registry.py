"""The datasets that can be loaded, read from `registry.toml` into frozen records.

Hosts move: each file lists several addresses, and the checksum, not the host, decides what is accepted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from metamd.data.records import DataError, Dataset, Form, RemoteFile, Split


@cache
def datasets() -> Mapping[str, Dataset]:
    """Every dataset's record, by name."""
    table = tomllib.loads(resources.files("metamd.data").joinpath("registry.toml").read_text(encoding="utf-8"))
    return MappingProxyType({name: _dataset(name, entry) for name, entry in table.items()})


def dataset(name: str) -> Dataset:
    """The record of one dataset, by name."""
    if name not in datasets():
        raise DataError(f"No dataset is called {name!r}. Choose one of: {', '.join(datasets())}.")
    return datasets()[name]


def split_of(name: str, split: str) -> Split:
    """The record of one split, by name."""
    splits = dataset(name).splits
    if split not in splits:
        raise DataError(f"{name} has no split {split!r}. Choose one of: {', '.join(splits)}.")
    return splits[split]


def owner_of(images_sha256: str) -> tuple[str, str] | None:
    """The dataset and split whose recorded images have this sha256: so MNIST posing as QMNIST is noticed."""
    for record in datasets().values():
        for key, split in record.splits.items():
            if any(form.images_sha256 == images_sha256 for form in split.forms):
                return record.name, key
    return None


def _dataset(name: str, entry: Mapping[str, Any]) -> Dataset:
    hosts = tuple(entry["hosts"])
    return Dataset(
        name=name,
        title=entry["title"],
        shape=tuple(entry["shape"]),
        stored=tuple(entry["stored"]) if "stored" in entry else None,
        classes=tuple(entry["classes"]),
        licence=entry["licence"],
        homepage=entry["homepage"],
        recipe=entry["recipe"],
        note=entry.get("note", ""),
        splits=MappingProxyType({key: _split(value, hosts) for key, value in entry["splits"].items()}),
    )


def _split(entry: Mapping[str, Any], hosts: tuple[str, ...]) -> Split:
    files = tuple(_file(file, hosts) for file in entry.get("files", ()))
    return Split(entry["count"], files, tuple(Form(**form) for form in entry.get("forms", ())))


def _file(entry: Mapping[str, Any], hosts: tuple[str, ...]) -> RemoteFile:
    urls = *(host + entry["name"] for host in hosts), *entry.get("urls", ())
    return RemoteFile(**{**entry, "urls": urls})

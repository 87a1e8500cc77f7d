"""Tiny datasets of every kind, as official-looking files on a loopback server and as the arrays they hold."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import metamd.data as data
from metamd.data import decoders, registry
from metamd.data.registry import Dataset, FileSet, Form, SplitRecord
from tests.loopback import (
    cifar_bytes,
    dataset,
    idx_bytes,
    libsvm_bytes,
    loopback,
    pictures,
    remote,
    stl_bytes,
    tar_gz,
    whole,
)

COUNT = {"train": 10, "test": 5}
GREY, COLOUR = (28, 28), (32, 32, 3)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty cache, no METAMD_DATA and a server; the folder stands for the machine."""
    for name in ("METAMD_DATA", "METAMD_OFFICIAL", "METAMD_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("METAMD_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def server():
    with loopback() as state:
        yield state


# --- official-looking files of every kind, and what they must decode to ---


def idx_files(split, wide=False):
    images, labels = pictures(COUNT[split], *GREY, seed=len(split))
    table = np.repeat(labels[:, None].astype(np.int32), 8, 1) if wide else labels
    files = {
        f"{split}-images.gz": gzip.compress(idx_bytes(images)),
        f"{split}-labels.gz": gzip.compress(idx_bytes(table)),
    }
    return files, images, labels


def usps_files(split):
    values = np.random.default_rng(3).uniform(-1, 1, (COUNT[split], 256)).round(6)
    labels = np.arange(COUNT[split]) % 10
    stored = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
    return (
        {f"usps-{split}.bz2": bz2.compress(libsvm_bytes(values, labels + 1))},
        decoders.enlarge_to_28(stored),
        labels,
    )


def svhn_files(split):
    images, labels = pictures(COUNT[split], 32, 32, 3)
    content = io.BytesIO()
    savemat(content, {"X": images.transpose(1, 2, 3, 0), "y": np.where(labels == 0, 10, labels)[:, None]})
    return {f"{split}.mat": content.getvalue()}, decoders.shrink(images, 28, "L", "BILINEAR"), labels


def cifar_files(split):
    parts = {key: pictures(COUNT[key], *COLOUR, seed=len(key)) for key in COUNT}
    members = {"cifar-10-batches-bin/test_batch.bin": cifar_bytes(*parts["test"])}
    for i in range(5):
        batch = cifar_bytes(*(part[2 * i : 2 * i + 2] for part in parts["train"]))
        members[f"cifar-10-batches-bin/data_batch_{i + 1}.bin"] = batch
    return {"cifar.tar.gz": tar_gz(members)}, *parts[split]


def stl_files(split):
    parts = {key: pictures(COUNT[key], 96, 96, 3, seed=len(key)) for key in COUNT}
    members = {}
    for key, (images, labels) in parts.items():
        members[f"stl10_binary/{key}_X.bin"] = stl_bytes(images)
        members[f"stl10_binary/{key}_y.bin"] = (labels + 1).tobytes()
    images, labels = parts[split]
    return {"stl.tar.gz": tar_gz(members)}, decoders.shrink(images, 32, "RGB", "BOX"), labels


KINDS = {
    "mnist": ("idx", GREY, idx_files, None),
    "qmnist": ("idx", GREY, lambda split: idx_files(split, wide=True), None),
    "usps": ("libsvm", GREY, usps_files, (16, 16)),
    "svhn": ("svhn", GREY, svhn_files, None),
    "cifar10": ("cifar10", COLOUR, cifar_files, None),
    "stl10": ("stl10", COLOUR, stl_files, None),
}


def publish(name, server, monkeypatch, forms=lambda split: ()) -> Dataset:
    """Put a tiny dataset of one kind on the server and in the registry."""
    recipe, shape, make, stored = KINDS[name]
    splits = {}
    for split in COUNT:
        files = [remote(key, body, server.serve(key, whole(body))) for key, body in make(split)[0].items()]
        splits[split] = SplitRecord(COUNT[split], tuple(files), forms(split))
    record = dataset(name, recipe, shape, splits, stored=stored)
    monkeypatch.setattr(registry, "datasets", lambda: {name: record})
    monkeypatch.setattr(data, "datasets", lambda: {name: record})
    return record


def form_of(name, split, status="official", note=""):
    _, images, labels = KINDS[name][2](split)
    digests = decoders.digest(images), decoders.digest(labels.astype(np.uint8))
    return Form(len(images), *digests, status, note)


def put(folder, name, split, images, labels, vouch=False, **more):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{split}.npz"
    np.savez(path, images=images, labels=labels, **more)
    if vouch:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n")
    return path


@pytest.fixture
def tiny(place, server, monkeypatch):
    """MNIST in the registry with recorded arrays, METAMD_DATA set, and its train images and labels."""
    notes = {"train": "the first few", "test": ""}
    status = {"train": "partial", "test": "official"}
    publish("mnist", server, monkeypatch, lambda s: (form_of("mnist", s, status[s], notes[s]),))
    monkeypatch.setenv("METAMD_DATA", str(place / "npz"))
    (place / "npz").mkdir()
    return idx_files("train")[1:]


def publish_files(folder, monkeypatch, **sets):
    """Put sets of files into the registry and into METAMD_DATA: by set the content of every file."""
    records = {}
    for name, contents in sets.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, body in contents.items():
            (folder / name / file).write_bytes(body)
        files = tuple(remote(file, body, f"http://nowhere.invalid/{file}") for file, body in contents.items())
        records[name] = FileSet(name, f"{name} of a test", "made by a test", "http://nowhere.invalid", files)
    monkeypatch.setattr(registry, "file_sets", lambda: records)
    monkeypatch.setenv("METAMD_DATA", str(folder))
    return records


# --- every dataset in METAMD_DATA ---


SHAPES = {
    "mnist": (28, 28),
    "kmnist": (28, 28),
    "fashionmnist": (28, 28),
    "usps": (16, 16),
    "svhn": (28, 28),
    "cifar10": (32, 32, 3),
    "stl10": (32, 32, 3),
}
MANY = {"train": 200, "test": 60}
"""Images of each split."""


def made(count, shape, seed):
    """Blurred class-dependent patterns: something that can be learned."""
    rng = np.random.default_rng(seed)
    labels = (rng.permutation(count) % 10).astype(np.uint8)
    patterns = np.random.default_rng(5).integers(0, 150, (10, *shape))
    return (patterns[labels] + rng.integers(0, 100, (count, *shape))).astype(np.uint8), labels


def fill(folder, names=tuple(SHAPES)):
    for i, name in enumerate(names):
        for j, (split, count) in enumerate(MANY.items()):
            put(folder, name, split, *made(count, SHAPES[name], 10 * i + j), vouch=True)


@pytest.fixture
def tiny_data(place, monkeypatch):
    """Every dataset but QMNIST, 200 + 60 made images each."""
    fill(place / "npz")
    monkeypatch.setenv("METAMD_DATA", str(place / "npz"))
    monkeypatch.setenv("METAMD_OFFLINE", "1")
    return place / "npz"


# --- files as they are published ---


def photograph(number, shape=(10, 14)):
    """A gradient with a tone of its own: something smooth to fit."""
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    pixels = np.stack([10 * rows, 255 - 9 * columns, np.full(shape, 8 * number)], 2).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def days_of(machine, count=230):
    """Weeks that repeat with some noise, and a few days missing."""
    generator = np.random.default_rng(machine)
    days = 20 + 3 * (np.arange(count) % 7) + generator.normal(size=count)
    days[generator.choice(count, 5, replace=False)] = np.nan
    return days


def series():
    """The file of all of them."""
    content = io.BytesIO()
    days = np.stack([days_of(machine) for machine in range(111)])
    np.savez(content, series=days, names=np.array([f"NN5-{i:03d}" for i in range(1, 112)]))
    return content.getvalue()

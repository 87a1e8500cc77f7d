"""The real data, where it is at hand: counts, classes and checksums against what is published.

Set METAMD_DATA to a folder of `<dataset>-<split>.npz` files. Set METAMD_OFFICIAL to a folder of official
files, `<dataset>/<file>`, to run the whole download on them from a loopback server with the real checksums.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import metamd.data as data
from metamd.data import decoders, loading, registry
from tests.loopback import cifar_bytes, idx_bytes, loopback, needs_data, tar_gz, whole

pytestmark = pytest.mark.real_data
needs_official = pytest.mark.skipif(not os.environ.get("METAMD_OFFICIAL"), reason="METAMD_OFFICIAL is not set")

SIX = [6000] * 10
HISTOGRAMS = {
    ("mnist", "train"): [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    ("mnist", "test"): [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ("fashionmnist", "train"): SIX,
    ("fashionmnist", "test"): [1000] * 10,
    ("kmnist", "train"): SIX,
    ("kmnist", "test"): [1000] * 10,
    ("usps", "train"): [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644],
    ("usps", "test"): [359, 264, 198, 166, 200, 160, 170, 147, 166, 177],
    ("svhn", "train"): [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659],
    ("svhn", "test"): [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595],
    ("cifar10", "train"): [1989, 1981, 2042, 2011, 2009, 1925, 2038, 2027, 2012, 1966],
    ("cifar10", "test"): [1000] * 10,
    ("stl10", "train"): [500] * 10,
    ("stl10", "test"): [800] * 10,
}
STATUS = {"usps-train": "rebuilt", "svhn": "rebuilt", "cifar10-train": "partial", "cifar10-test": "rebuilt"}


def at_hand(name: str, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    if loading.find_split(name, split) is None:
        pytest.skip(f"{name}-{split}.npz is not in METAMD_DATA")
    return data.load(name, split, download=False)


@needs_data
@pytest.mark.parametrize(("name", "split"), HISTOGRAMS)
def test_counts_and_classes_are_the_published_ones(name, split):
    images, labels = at_hand(name, split)
    came = data.provenance(name, split)
    if came.status == "unrecorded":
        pytest.skip(f"{name}-{split}.npz is somebody's own")
    assert images.shape[1:] == data.dataset(name).shape
    if came.status != "official" or name != "cifar10":
        assert torch.bincount(labels, minlength=10).tolist() == HISTOGRAMS[name, split]
    assert images.flatten(1).float().std(1).min() > 0  # no blank image


@needs_data
@pytest.mark.parametrize(("name", "split"), HISTOGRAMS)
def test_what_is_rebuilt_or_partial_says_so(name, split):
    at_hand(name, split)
    came = data.provenance(name, split)
    expected = STATUS.get(f"{name}-{split}", STATUS.get(name, "derived" if name == "stl10" else "official"))
    assert came.status in (expected, "official", "unrecorded")
    assert bool(came.note) == (came.status != "official")


@needs_data
@pytest.mark.parametrize("name", ["mnist", "fashionmnist", "kmnist"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_arrays_are_the_content_of_the_official_idx_files(name, split):
    images, labels = at_hand(name, split)
    image_file, label_file = data.dataset(name).splits[split].files
    content = idx_bytes(images.numpy())
    assert hashlib.sha256(content).hexdigest() == image_file.content_sha256
    assert hashlib.sha256(idx_bytes(labels.numpy().astype(np.uint8))).hexdigest() == label_file.content_sha256
    assert np.array_equal(decoders.idx(content, name), images.numpy())
    changed = content[:-1] + bytes([content[-1] ^ 1])
    assert hashlib.sha256(changed).hexdigest() != image_file.content_sha256


@needs_data
def test_cifar_written_as_batches_has_the_noted_md5_and_decodes_to_itself(tmp_path):
    archive = tmp_path / "cifar.tar.gz"
    noted = {
        ("train", 0): "5dd7e06a14cb22eb9f671a540d1b7c25",
        ("train", 1): "5ea93a67294ea407fff1d09f752e9692",
        ("test", 0): "803d5f7f4d78ea53de84dbe85f74fb6d",
    }
    for (split, batch), md5 in noted.items():
        images, labels = (t.numpy()[10000 * batch :][:10000] for t in at_hand("cifar10", split))
        content = cifar_bytes(images, labels)
        assert hashlib.md5(content, usedforsecurity=False).hexdigest() == md5
        archive.write_bytes(tar_gz({"cifar-10-batches-bin/test_batch.bin": content}))
        assert np.array_equal(decoders.cifar10("test", 10000, archive)[0], images)


@needs_data
@pytest.mark.parametrize(
    ("split", "sha256"),
    [
        ("train", "0cd44363fdaae70fdc79bc8a500aef0436bf2476db3292726814afed629d40dc"),
        ("test", "fb12a5783a605f75bc6f5b9f2724596ce2eb5dd4dd82a14f6863c2d66e52560e"),
    ],
)
def test_stl_labels_are_the_content_of_the_official_files(split, sha256):
    _, labels = at_hand("stl10", split)
    assert hashlib.sha256((labels + 1).to(torch.uint8).numpy().tobytes()).hexdigest() == sha256


@needs_data
def test_qmnist_is_not_among_the_data():
    if loading.find_split("qmnist", "train") is not None:
        pytest.skip("QMNIST was fetched on this machine")
    assert "qmnist" not in data.available()
    with pytest.raises(data.DataError, match="MNIST is not a substitute"):
        data.load("qmnist", download=False)


OFFICIAL = [
    ("mnist", "train"),
    ("mnist", "test"),
    ("fashionmnist", "test"),
    ("kmnist", "test"),
    ("usps", "test"),
]


@needs_official
@pytest.mark.parametrize(("name", "split"), OFFICIAL)
def test_official_files_go_the_whole_way_with_the_real_checksums(name, split, tmp_path, monkeypatch):
    folder = Path(os.environ["METAMD_OFFICIAL"]) / name
    record = data.dataset(name)
    monkeypatch.setenv("METAMD_CACHE", str(tmp_path))
    with loopback() as server:

        def local(file):
            return replace(file, urls=(server.serve(file.name, whole((folder / file.name).read_bytes())),))

        here = replace(record.splits[split], files=tuple(local(file) for file in record.splits[split].files))
        splits = {**record.splits, split: here}
        monkeypatch.setattr(registry, "datasets", lambda: {name: replace(record, splits=splits)})
        (path,) = loading.fetch(name, [split])
    (_, labels), came = loading.read_split(path, name, split)
    assert (came.status, came.note) == ("official", "")  # equal to the recorded arrays, byte for byte
    assert np.bincount(labels).tolist() == HISTOGRAMS[name, split]


@needs_official
def test_qmnist_labels_agree_with_mnist_where_they_must(tmp_path):
    from metamd.data.decoders import decompress
    from metamd.data.download import mismatch

    folder = Path(os.environ["METAMD_OFFICIAL"])
    for split, other in (("train", "train-labels-idx1-ubyte.gz"), ("test", "t10k-labels-idx1-ubyte.gz")):
        file = data.dataset("qmnist").splits[split].files[1]
        assert mismatch(file, folder / "qmnist" / file.name) is None
        table = decoders.idx(decompress(folder / "qmnist" / file.name, 2_000_000), "idx")
        mnist = decoders.idx(decompress(folder / "mnist" / other, 100_000), "idx")
        classes = decoders.class_labels(table, 10, "qmnist")
        assert table.shape == (60000, 8)
        assert np.array_equal(classes[: len(mnist)], mnist)

"""Where a split is looked for, what is accepted there and everything that is refused."""

# pytest finds imported fixtures by name.
# ruff: noqa: F401, F811
from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import metamd.data as data
from metamd.cli import data as commands
from metamd.cli.options import Data, DataFetch, DataList
from metamd.data import decoders, registry
from metamd.data.registry import DataError, Form, SplitRecord
from tests.loopback import dataset, pictures
from tests.tiny_datasets import GREY, idx_files, place, put, server, tiny

# --- METAMD_DATA, the cache, and their order ---


def test_metamd_data_comes_before_the_cache_and_says_what_it_is(tiny, place, server):
    put(place / "npz", "mnist", "train", *tiny)
    assert torch.equal(data.load("mnist")[0], torch.from_numpy(tiny[0]))
    came = data.provenance("mnist")
    assert (came.status, came.note, came.count, came.official_count) == ("partial", "the first few", 10, 10)
    assert came.path == str(place / "npz" / "mnist-train.npz")
    assert server.asked == []
    (place / "npz" / "mnist-train.npz").unlink()
    assert data.provenance("mnist").path == str(place / "cache" / "mnist-train.npz")


def test_a_damaged_file_in_metamd_data_is_refused_and_not_passed_over(tiny, place, server):
    images = tiny[0].copy()
    images[3, 14, 14] ^= 1
    put(place / "npz", "mnist", "train", images, tiny[1])
    with pytest.raises(DataError, match="holds none of the recorded arrays of MNIST train"):
        data.load("mnist")
    labels = tiny[1].copy()
    labels[0] = 5
    put(place / "npz", "mnist", "train", tiny[0], labels)
    with pytest.raises(DataError, match="holds none of the recorded arrays of MNIST train"):
        data.load("mnist")
    assert server.asked == []


def test_ones_own_data_needs_a_checksum_and_is_said_to_be_unrecorded(tiny, place):
    images, labels = pictures(4, *GREY, seed=9)
    path = put(place / "npz", "mnist", "train", images, labels, vouch=True)
    assert len(data.load("mnist")[0]) == 4
    assert data.provenance("mnist").status == "unrecorded"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match=r"must have the sha256 \w+ that stands in mnist-train.npz.sha256, got"):
        data.load("mnist")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"images": np.zeros((4, 28, 28), np.int16)},
            "must hold uint8 images of 28 x 28 with one label each",
        ),
        (
            {"images": np.zeros((4, 28, 27), np.uint8)},
            "must hold uint8 images of 28 x 28 with one label each",
        ),
        ({"labels": np.zeros(3, np.uint8)}, r"and labels \(3,\)"),
        ({"labels": np.full(4, 10, np.uint8)}, "must hold classes 0 to 9, got 10 to 10"),
        ({"images": np.array([None] * 4)}, "must be a readable .npz file .*allow_pickle=False"),
        ({"images": np.zeros((16, 28, 28), np.uint8)}, r"at most 10, got uint8 \(16, 28, 28\)"),
        (
            {"images": np.zeros((0, 28, 28), np.uint8), "labels": np.zeros(0, np.uint8)},
            "holds no image at all",
        ),
    ],
)
def test_arrays_of_another_kind_are_refused(tiny, place, change, sentence):
    good = {"images": np.zeros((4, 28, 28), np.uint8), "labels": np.zeros(4, np.uint8)}
    put(place / "npz", "mnist", "train", **(good | change), vouch=True)
    with pytest.raises(DataError, match=sentence):
        data.load("mnist")


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04 cut short"])
def test_files_that_are_no_npz_are_refused(tiny, place, content, capsys):
    (place / "npz" / "mnist-train.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"must be a readable .npz file with images and labels"):
        data.load("mnist")
    commands.run(Data(DataList(json=True)))
    wrong = json.loads(capsys.readouterr().out)["datasets"][0]
    assert wrong["status"] == "wrong"
    assert "must be a readable .npz file with labels" in wrong["note"]


def test_a_cached_file_is_checked_against_its_checksum(tiny, place):
    data.load("mnist")
    path = place / "cache" / "mnist-train.npz"
    path.write_bytes(path.read_bytes().replace(b"images", b"imagez"))
    with pytest.raises(DataError, match=r"must have the sha256 .* Delete both files"):
        data.load("mnist")
    commands.run(Data(DataFetch("mnist", split="train")))  # sees that it is damaged and makes it again
    assert len(data.load("mnist")[0]) == 10


def test_a_cached_file_without_its_checksum_counts_as_absent(tiny, place, server):
    data.load("mnist")
    asked = len(server.asked)
    (place / "cache" / "mnist-train.npz.sha256").unlink()
    data.load("mnist")
    assert len(server.asked) == 2 * asked


def test_absent_data_without_download_is_one_clear_sentence(tiny, place, server, monkeypatch):
    with pytest.raises(DataError, match=r"MNIST train is required .* Run `metamd data fetch mnist`"):
        data.load("mnist", download=False)
    monkeypatch.setenv("METAMD_OFFLINE", "1")
    with pytest.raises(DataError, match="MNIST train is required"):
        data.load("mnist")
    assert server.asked == []
    monkeypatch.setenv("METAMD_DATA", str(place / "nowhere"))
    with pytest.raises(DataError, match="METAMD_DATA must name a folder"):
        data.load("mnist")


def test_names_and_splits_that_do_not_exist_are_refused():
    with pytest.raises(DataError, match=r"No dataset is called 'imagenet'. Choose one of: mnist"):
        data.load("imagenet")
    with pytest.raises(DataError, match=r"mnist has no split 'valid'. Choose one of: train, test"):
        data.load("mnist", "valid")


# --- QMNIST is never MNIST ---


def test_qmnist_is_absent_until_fetched_and_says_so(place):
    with pytest.raises(DataError, match=r"QMNIST train is required .* MNIST is not a substitute"):
        data.load("qmnist", download=False)


def test_mnist_offered_as_qmnist_is_refused_even_when_vouched_for(place, monkeypatch):
    images, labels = pictures(10, *GREY)
    form = Form(10, decoders.digest(images), decoders.digest(labels), "official")
    known = {
        "mnist": dataset("mnist", "idx", GREY, {"train": SplitRecord(10, (), (form,))}),
        "qmnist": dataset("qmnist", "idx", GREY, {"train": SplitRecord(10, ())}),
    }
    monkeypatch.setattr(registry, "datasets", lambda: known)
    monkeypatch.setenv("METAMD_DATA", str(place / "npz"))
    put(place / "npz", "qmnist", "train", images, labels, vouch=True)
    with pytest.raises(DataError, match="The images offered as QMNIST train are those of mnist train"):
        data.load("qmnist")
    put(place / "npz", "qmnist", "train", images[::-1], labels, vouch=True)
    assert len(data.load("qmnist")[0]) == 10


def test_a_test_split_offered_as_the_training_split_is_refused(tiny, place):
    put(place / "npz", "mnist", "train", *idx_files("test")[1:], vouch=True)
    with pytest.raises(DataError, match="The images offered as MNIST train are those of mnist test"):
        data.load("mnist")

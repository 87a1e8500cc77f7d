"""The whole way from official-looking files on a server to tensors, by one process and by two."""

# pytest finds imported fixtures by name.
# ruff: noqa: F401, F811
from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import metamd.data as data
from metamd.data import decoders, loading, registry
from metamd.data.registry import DataError, Form, SplitRecord
from metamd.files import container
from metamd.files.store import locked
from tests import processes
from tests.loopback import dataset, remote, slow, whole
from tests.tiny_datasets import COUNT, GREY, KINDS, form_of, idx_files, place, publish, put, server, tiny

# --- download, decode, cache, load ---


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("split", COUNT)
def test_every_kind_of_file_is_fetched_decoded_and_loaded(name, split, place, server, monkeypatch):
    publish(name, server, monkeypatch)
    _, images, labels = KINDS[name][2](split)
    got_images, got_labels = data.load(name, split)
    assert got_images.dtype == torch.uint8
    assert got_labels.dtype == torch.int64
    assert torch.equal(got_images, torch.from_numpy(images))
    assert got_labels.tolist() == labels.tolist()
    asked = len(server.asked)
    again, _ = data.load(name, split)
    assert torch.equal(again, got_images)
    assert len(server.asked) == asked  # the second time from the cache
    assert data.provenance(name, split).status == "official"
    assert not (place / "cache" / "files" / name).exists()


@pytest.mark.parametrize(("name", "package"), [("svhn", "scipy.io"), ("stl10", "PIL")])
def test_a_missing_package_is_named(name, package, place, server, monkeypatch):
    publish(name, server, monkeypatch)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"needs {package}\. In a clone of the repository, run: pip install '\.\[data\]'"):
        data.load(name)


def test_arrays_fetched_from_official_files_are_official_even_where_only_a_rebuilt_form_is_recorded(
    place, server, monkeypatch
):
    publish("svhn", server, monkeypatch, lambda split: (form_of("svhn", split, "rebuilt", "by hand"),))
    data.load("svhn", "train")
    assert data.provenance("svhn", "train").status == "official"
    path = loading.split_file(loading.cache_folder(), "svhn", "train")
    put(place / "npz", "svhn", "train", **np.load(path))
    monkeypatch.setenv("METAMD_DATA", str(place / "npz"))
    assert data.provenance("svhn", "train").note == "by hand"


def test_splits_of_one_archive_are_fetched_together_and_others_apart(place, server, monkeypatch):
    publish("cifar10", server, monkeypatch)
    data.load("cifar10", "train")
    data.load("cifar10", "test")
    assert server.asked == ["/cifar.tar.gz"]
    publish("mnist", server, monkeypatch)
    data.load("mnist", "test")
    assert server.asked[1:] == ["/test-images.gz", "/test-labels.gz"]
    assert data.available() == ()
    data.load("mnist", "train")
    assert data.available() == ("mnist",)


def test_files_that_decode_to_other_arrays_than_recorded_are_not_kept(place, server, monkeypatch):
    publish("mnist", server, monkeypatch, lambda split: (form_of("mnist", split),))
    assert data.provenance("mnist", "train").status == "official"
    loading.split_file(loading.cache_folder(), "mnist", "train").unlink()
    wrong = Form(10, "0" * 64, "0" * 64, "official")
    publish("mnist", server, monkeypatch, lambda split: (wrong,))
    with pytest.raises(DataError, match="decoded to other arrays than the recorded ones"):
        data.load("mnist", "train")
    assert not loading.split_file(loading.cache_folder(), "mnist", "train").exists()


def test_a_count_other_than_the_recorded_one_is_refused(place, server, monkeypatch):
    publish("mnist", server, monkeypatch)
    monkeypatch.setitem(COUNT, "train", 9)
    record = registry.dataset("mnist")
    assert record.splits["train"].count == 10
    files, _, _ = idx_files("train")
    short = tuple(remote(key, body, server.serve(key, whole(body))) for key, body in files.items())
    splits = {**record.splits, "train": SplitRecord(10, short)}
    monkeypatch.setattr(registry, "datasets", lambda: {"mnist": dataset("mnist", "idx", GREY, splits)})
    with pytest.raises(DataError, match=r"must decode to images \(10, 28, 28\) .*, got \(9, 28, 28\)"):
        data.load("mnist", "train")


# --- several processes, and a cache that cannot be written ---


def load_here(url):
    """Load a dataset in a process of its own, which says when it asks for a lock."""
    flock = fcntl.flock
    fcntl.flock = lambda *args: (print("asking", flush=True), flock(*args))[1]
    files = [remote(key, body, f"{url}/{key}") for key, body in idx_files("train")[0].items()]
    record = dataset("mnist", "idx", GREY, {"train": SplitRecord(COUNT["train"], tuple(files))})
    registry.datasets = lambda: {"mnist": record}
    (images, _), _ = loading.load_arrays("mnist", "train")
    print(decoders.digest(images))


def test_two_processes_that_load_at_once_share_one_download(place, server):
    files, images, _ = idx_files("train")
    for key, body in files.items():
        server.serve(key, slow(body, pieces=5, pause=0.05))
    both = [processes.begin(load_here, server.url) for _ in range(2)]
    assert [p.finish().out.split()[-1] for p in both] == [decoders.digest(images)] * 2
    assert sorted(server.asked) == ["/train-images.gz", "/train-labels.gz"]
    names = sorted(p.name for p in (place / "cache").iterdir() if p.is_file())
    assert names == ["mnist-train.npz", "mnist-train.npz.sha256"]


def test_a_process_waits_while_another_one_makes_the_dataset(place, server):
    files, images, _ = idx_files("train")
    for key, body in files.items():
        server.serve(key, whole(body))
    with locked(place / "cache" / "locks" / "mnist.lock"):
        other = processes.begin(load_here, server.url)
        other.wait_for(lambda: "asking" in (other.folder / "out").read_text())
        assert server.asked == []
        assert other.process.is_alive()
    assert other.finish().out.split()[-1] == decoders.digest(images)


def test_a_crash_between_a_file_and_its_checksum_leaves_no_wrong_pair(tiny, place, monkeypatch):
    data.load("mnist")
    path = place / "cache" / "mnist-train.npz"
    real = container.write_atomically

    def crash(target, content):
        if target.suffix == ".sha256":
            raise KeyboardInterrupt
        real(target, content)

    monkeypatch.setattr(container, "write_atomically", crash)
    with pytest.raises(KeyboardInterrupt):
        loading.write_npz(path, tiny[0][::-1], tiny[1])
    assert path.exists()
    assert loading.find_split("mnist", "train") is None  # absent, rather than beside a checksum that is another file's


def test_a_cache_that_cannot_be_written_is_one_clear_sentence(place, server, monkeypatch):
    publish("mnist", server, monkeypatch)
    (place / "file").write_text("in the way")
    monkeypatch.setenv("METAMD_CACHE", str(place / "file" / "cache"))
    with pytest.raises(DataError, match=r"The cache folder .* must be writable .* Set METAMD_CACHE"):
        data.load("mnist")


def test_a_full_disk_is_not_blamed_on_the_mirror(place, server, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    publish("mnist", server, monkeypatch)
    monkeypatch.setattr("metamd.data.download.os.fsync", full)
    with pytest.raises(DataError, match=r"must be writable and have room, got: .*No space left on device"):
        data.load("mnist")
    assert len(server.asked) == 1

"""`metamd data list | fetch | verify | path`, and the registry that they print."""

# pytest finds imported fixtures by name.
# ruff: noqa: F401, F811
from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import metamd.data as data
from metamd.cli import data as commands
from metamd.cli.options import Data, DataFetch, DataList, DataPath, DataVerify
from metamd.data import registry
from metamd.data.registry import DataError
from metamd.files.progress import showing
from tests.tiny_datasets import place, put, server, tiny


@pytest.fixture
def answer(capsys):
    """What an action says as JSON."""

    def ask(action, *words, **options):
        commands.run(Data(action(*words, json=True, **options)))
        return next(iter(json.loads(capsys.readouterr().out).values()))

    return ask


def test_list_says_what_is_partial_and_what_is_absent(tiny, place, capsys, answer):
    put(place / "npz", "mnist", "train", *tiny)
    assert [(r["split"], r["where"], r["status"]) for r in answer(DataList)] == [
        ("train", "METAMD_DATA", "partial"),
        ("test", "absent", "absent"),
    ]
    commands.run(Data(DataList()))
    text = capsys.readouterr().out
    assert re.search(r"mnist +train +10 of 10 +28x28 +METAMD_DATA +partial +the first few", text)
    assert "MNIST: made by a test" in text


def test_list_calls_a_file_of_unknown_size_unrecorded_and_a_fetched_one_official(tiny, place, answer):
    put(place / "npz", "mnist", "train", tiny[0][:3], tiny[1][:3])
    answer(DataFetch, "mnist", split="test")
    assert [(r["where"], r["status"], r["count"]) for r in answer(DataList)] == [
        ("METAMD_DATA", "unrecorded", 3),
        ("cache", "official", 5),
    ]


def test_fetch_prints_what_it_fetched_and_fetches_again_when_forced(tiny, server, capsys, answer):
    with showing("always"):
        commands.run(Data(DataFetch("mnist")))
    out, err = capsys.readouterr()
    assert "mnist        train     10  official" in out
    assert "train-images.gz" in err
    asked = len(server.asked)
    assert [row["count"] for row in answer(DataFetch, "mnist")] == [10, 5]
    assert len(server.asked) == asked
    answer(DataFetch, "mnist", force=True)
    assert len(server.asked) == 2 * asked


def test_verify_names_the_damaged_split(tiny, place, capsys, answer):
    with pytest.raises(DataError, match="There is nothing to verify"):
        answer(DataVerify)
    capsys.readouterr()
    put(place / "npz", "mnist", "train", *tiny)
    assert [row["ok"] for row in answer(DataVerify)] == [True]
    put(place / "npz", "mnist", "train", tiny[0][::-1], tiny[1])
    with pytest.raises(DataError, match=r"1 of 1 splits are wrong; the first: .*none of the recorded arrays"):
        answer(DataVerify, "mnist")
    assert [row["status"] for row in json.loads(capsys.readouterr().out)["verified"]] == ["wrong"]


def test_path_is_that_of_the_file_or_of_the_cache(tiny, place, answer):
    assert answer(DataPath) == str(place / "cache")
    with pytest.raises(DataError, match=r"mnist train is not at hand. Run `metamd data fetch mnist` first"):
        answer(DataPath, "mnist")
    put(place / "npz", "mnist", "train", *tiny)
    assert answer(DataPath, "mnist") == str(place / "npz" / "mnist-train.npz")


def test_listing_imports_neither_torch_nor_the_extra_packages(tmp_path):
    script = (
        "import sys; from metamd.cli.main import run; run(['data', 'list', '--json']); "
        "print(sorted({'torch', 'pooch', 'scipy', 'PIL', 'requests'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert len(json.loads(done.stdout)["datasets"]) == 16


# --- the registry itself ---


def test_every_file_has_several_hosts_and_well_formed_checksums():
    for record in registry.datasets().values():
        assert set(record.splits) == {"train", "test"}
        assert len(record.classes) == 10
        for split in record.splits.values():
            for file in split.files:
                assert len(set(file.urls)) >= 2
                assert all(re.fullmatch(r"https?://\S+/" + re.escape(file.name), url) for url in file.urls)
                assert re.fullmatch("[0-9a-f]{32}", file.md5)
                for sha in (file.sha256, file.content_sha256):
                    assert sha is None or re.fullmatch("[0-9a-f]{64}", sha)
            for form in split.forms:
                assert form.count <= split.count
                assert (form.status == "partial") == (form.count < split.count)
                assert (form.status == "official") == (form.note == "")


def test_no_two_splits_share_their_images():
    digests = [f.images_sha256 for r in registry.datasets().values() for s in r.splits.values() for f in s.forms]
    assert len(digests) == len(set(digests)) == 14


def test_records_cannot_be_changed():
    with pytest.raises(TypeError):
        registry.datasets()["mnist"] = None
    with pytest.raises(AttributeError):
        data.dataset("mnist").licence = "mine"


def test_download_sizes_add_up():
    assert data.dataset("mnist").download_size == 9912422 + 28881 + 1648877 + 4542
    assert data.dataset("cifar10").download_size == 170_052_171  # one archive for both splits
    assert data.dataset("usps").download_size == 6_579_383 + 1_831_726

"""Files that are kept as they were published: found, checked, fetched, and listed."""

# pytest finds imported fixtures by name.
# ruff: noqa: F401, F811
from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest

import metamd.data as data
from metamd.cli import data as commands
from metamd.cli.options import Data, DataFetch, DataList, DataPath, DataVerify
from metamd.data import registry
from metamd.data.raw_files import fetch_files, find_file
from metamd.data.registry import DataError
from tests.loopback import needs_files, remote, whole
from tests.tiny_datasets import place, publish_files, server

CONTENT = {"one.txt": b"first", "two.txt": b"second"}


def answer(capsys, action):
    commands.run(Data(action))
    return json.loads(capsys.readouterr().out)


def test_files_at_hand_are_checked_and_given_by_name(place, monkeypatch):
    publish_files(place / "npz", monkeypatch, texts=CONTENT)
    found = data.files("texts", download=False)
    assert {name: path.read_bytes() for name, path in found.items()} == CONTENT
    (place / "npz" / "texts" / "two.txt").write_bytes(b"sEcond")
    with pytest.raises(DataError, match=r"two.txt must be the official file: wrong checksum.*Delete it"):
        data.files("texts", download=False)


def test_a_mirror_of_official_files_comes_after_metamd_data(place, monkeypatch):
    publish_files(place / "npz", monkeypatch, texts=CONTENT)
    (place / "npz").rename(place / "mirror")
    (place / "npz").mkdir()
    assert find_file("texts", "one.txt") is None
    monkeypatch.setenv("METAMD_OFFICIAL", str(place / "mirror"))
    assert find_file("texts", "one.txt") == place / "mirror" / "texts" / "one.txt"
    assert find_file("texts", "two.txt") == place / "mirror" / "texts" / "two.txt"


def test_missing_files_are_fetched_checked_and_kept(place, server, monkeypatch, capsys):
    records = publish_files(place / "npz", monkeypatch, texts=CONTENT)
    monkeypatch.delenv("METAMD_DATA")
    urls = {name: server.serve(name, whole(body)) for name, body in CONTENT.items()}
    records["texts"] = replace(
        records["texts"], files=tuple(remote(name, body, urls[name]) for name, body in CONTENT.items())
    )
    with pytest.raises(DataError, match=r"one.txt of texts of a test is required.*Run `metamd data fetch texts`"):
        data.files("texts", download=False)
    assert data.files("texts")["two.txt"] == place / "cache" / "texts" / "two.txt"
    assert len(server.asked) == 2
    fetched = answer(capsys, DataFetch("texts", json=True))["fetched"]
    assert [row["status"] for row in fetched] == ["official", "official"]
    assert len(server.asked) == 2
    fetch_files("texts", force=True)
    assert len(server.asked) == 4


def test_what_cannot_be_downloaded_says_where_it_comes_from(place, monkeypatch):
    records = publish_files(place / "npz", monkeypatch, texts=CONTENT)
    monkeypatch.delenv("METAMD_DATA")
    files = tuple(replace(file, urls=()) for file in records["texts"].files)
    records["texts"] = replace(records["texts"], files=files, note="Converted by hand.")
    for ask in (data.files, fetch_files):
        with pytest.raises(DataError, match=r"one.txt.*Converted by hand."):
            ask("texts")
    with pytest.raises(DataError, match=r"No set of files is called 'nothing'. Choose one of: texts"):
        data.files("nothing")


def test_commands_list_verify_and_find_sets(place, monkeypatch, capsys):
    publish_files(place / "npz", monkeypatch, texts=CONTENT)
    listed = answer(capsys, DataList(json=True))["files"]
    assert [(row["name"], row["files"], row["here"], row["bytes"]) for row in listed] == [("texts", 2, 2, 11)]
    commands.run(Data(DataList()))
    assert re.search(r"texts +2 +0.0 +2  texts of a test", capsys.readouterr().out)
    assert len(answer(capsys, DataVerify("texts", json=True))["verified"]) == 2
    assert answer(capsys, DataPath("texts", json=True))["path"] == str(place / "npz" / "texts")
    (place / "npz" / "texts" / "one.txt").write_bytes(b"other")
    with pytest.raises(DataError, match="1 of 2 splits are wrong"):
        commands.run(Data(DataVerify("texts")))


def test_every_set_of_the_registry_is_complete():
    assert list(registry.file_sets()) == ["kodak", "stories260k", "shakespeare", "speeches", "nn5", "burgers"]
    assert not set(registry.file_sets()) & set(registry.datasets())
    for record in registry.file_sets().values():
        assert record.licence
        assert record.homepage.startswith("http")
        for file in record.files:
            assert file.size
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert re.fullmatch("[0-9a-f]{32}", file.md5)
            assert all(re.fullmatch(r"https?://\S+", url) for url in file.urls)
            assert file.urls or record.note


@pytest.mark.real_data
@pytest.mark.parametrize("name", registry.file_sets())
def test_files_of_the_mirror_are_the_recorded_ones(name):
    needs_files(name)
    assert len(data.files(name, download=False)) == len(registry.file_set(name).files)

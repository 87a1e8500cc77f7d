"""Compressed files, tars and zips: what is read, and the bombs, liars and climbers that are refused."""

from __future__ import annotations

import bz2
import gzip
import io
import tarfile
import zipfile

import numpy as np
import pytest

from metamd.data.archives import decompress, tar_members, zip_members
from metamd.data.registry import DataError
from tests.data_fixtures import tar_gz


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_compressed_bombs_and_broken_files_are_refused(tmp_path, suffix, pack):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(pack(bytes(1000)))
    assert decompress(path, 1000) == bytes(1000)
    with pytest.raises(DataError, match="more than the 999 bytes expected"):
        decompress(path, 999)
    path.write_bytes(pack(bytes(50_000_000)))  # some 50 kB or less on disk
    with pytest.raises(DataError, match="more than the 1000 bytes expected"):
        decompress(path, 1000)
    for broken in (b"not compressed at all", pack(bytes(1000))[:-6]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="is not a complete"):
            decompress(path, 1000)


def test_tar_members_are_read_by_name_and_exact_size(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar_gz({"d/readme": b"hello", "d/one": b"1", "d/two": b"22"}))
    assert tar_members(path, {"d/two": 2, "d/one": 1}) == {"d/one": b"1", "d/two": b"22"}
    with pytest.raises(DataError, match=r"d/two in .* must have 3 bytes, got 2"):
        tar_members(path, {"d/two": 3})
    with pytest.raises(DataError, match="must hold d/three and does not"):
        tar_members(path, {"d/three": 3})


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "d/../../evil", "..\\evil", "c:\\evil"])
def test_members_that_leave_their_folder_are_refused(tmp_path, name):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar_gz({name: b"x", "d/one": b"1"}))
    with pytest.raises(DataError, match="a member that leaves its folder"):
        tar_members(path, {"d/one": 1})
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, b"x")
        archive.writestr("d/one", b"1")
    with pytest.raises(DataError, match="a member that leaves its folder"):
        zip_members(tmp_path / "a.zip", {"d/one": 1})


def test_tar_links_are_refused(tmp_path):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        link = tarfile.TarInfo("d/one")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (tmp_path / "a.tar.gz").write_bytes(content.getvalue())
    with pytest.raises(DataError, match="is not an ordinary file"):
        tar_members(tmp_path / "a.tar.gz", {"d/one": 0})


def test_tar_bombs_and_broken_tars_are_refused(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar_gz({"d/one": bytes(30_000_000)}))
    with pytest.raises(DataError, match="must have 10 bytes, got 30000000"):
        tar_members(path, {"d/one": 10})
    path.write_bytes(tar_gz({f"d/{i}": b"" for i in range(1200)}))
    with pytest.raises(DataError, match="more than 1000 members"):
        tar_members(path, {"d/one": 10})
    for broken in (b"nothing", tar_gz({"d/one": bytes(np.random.default_rng(0).bytes(9999))})[:5000]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="is not a complete"):
            tar_members(path, {"d/one": 9999})


def test_zip_bombs_are_refused_even_when_the_directory_lies(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("one", bytes(20_000_000))
    with pytest.raises(DataError, match=r"one in .* holds more than 100 bytes"):
        zip_members(path, {"one": 100})
    lie = path.read_bytes().replace((20_000_000).to_bytes(4, "little"), (50).to_bytes(4, "little"))
    assert lie != path.read_bytes()
    path.write_bytes(lie)
    with pytest.raises(DataError, match=r"one in|is not a complete zip file"):
        zip_members(path, {"one": 100})
    path.write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="is not a complete zip file"):
        zip_members(path, {"one": 100})

"""Downloads from a loopback server that is whole, slow, stalled, wrong or gone, in one process and in
several."""

from __future__ import annotations

import gzip
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from metamd.data.download import download, mismatch
from metamd.data.registry import DataError, RemoteFile
from metamd.files.progress import showing
from metamd.files.store import locked
from tests import processes
from tests.loopback import (
    dripping,
    endless,
    in_turn,
    loopback,
    remote,
    slow,
    stalled,
    status,
    truncated,
    whole,
)

CONTENT = gzip.compress(np.random.default_rng(0).bytes(200_000), mtime=0)
CORRUPT = CONTENT[:1000] + bytes([CONTENT[1000] ^ 1]) + CONTENT[1001:]
NAME, PART = "digits.gz", "digits.part.gz"


@pytest.fixture
def server():
    with loopback() as state:
        yield state


def quick(file: RemoteFile, folder: Path, **options) -> Path:
    return download(file, folder, **{"rounds": 1, "timeout": processes.PATIENCE, "pause": 0.01, **options})


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# --- one process ---


def test_a_whole_file_is_fetched_once_and_then_found(server, tmp_path):
    file = remote(NAME, CONTENT, server.serve("a", whole(CONTENT)))
    assert quick(file, tmp_path).read_bytes() == CONTENT
    assert quick(file, tmp_path) == tmp_path / NAME
    assert server.asked == ["/a"]
    assert leftovers(tmp_path) == [NAME]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(404), "the server answered 404"),
        (status(503), "the server answered 503"),
        (truncated(CONTENT), "[0-9]+ more expected|IncompleteRead"),
        (whole(CONTENT[:-7]), r"wrong checksum: required md5 \w+ and 200083 bytes, got \w+ and 200076 bytes"),
        (whole(CORRUPT), "wrong checksum"),
        (whole(CONTENT + b"x" * 10), "wrong checksum"),
        (whole(b""), "wrong checksum: .* and 0 bytes"),
        (endless, "the server sent more than the [0-9]+ bytes expected"),
    ],
)
def test_a_bad_mirror_is_named_with_its_reason_and_nothing_is_kept(server, tmp_path, answer, reason):
    file = remote(NAME, CONTENT, server.serve("bad", answer))
    with pytest.raises(DataError, match=reason) as caught:
        quick(file, tmp_path)
    assert f"{server.url}/bad" in str(caught.value)
    assert str(tmp_path / NAME) in str(caught.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("answer", [status(404), truncated(CONTENT), whole(CORRUPT), endless])
def test_the_next_mirror_is_asked_when_one_is_bad(server, tmp_path, answer):
    urls = server.serve("bad", answer), server.serve("good", whole(CONTENT))
    assert quick(remote(NAME, CONTENT, *urls), tmp_path).read_bytes() == CONTENT
    assert server.asked == ["/bad", "/good"]


def test_a_passing_fault_is_retried_and_a_wrong_file_is_not(server, tmp_path):
    passing = server.serve("passing", in_turn(status(503), truncated(CONTENT), whole(CONTENT)))
    wrong = server.serve("wrong", whole(CORRUPT))
    gone = server.serve("gone", status(404))
    assert quick(remote(NAME, CONTENT, passing, wrong, gone), tmp_path, rounds=3).read_bytes() == CONTENT
    assert server.asked == ["/passing", "/wrong", "/gone", "/passing", "/passing"]


def test_a_slow_server_is_waited_for_and_a_stalled_one_is_left(server, tmp_path):
    patient = remote(NAME, CONTENT, server.serve("slow", slow(CONTENT, pieces=5, pause=0.05)))
    assert quick(patient, tmp_path / "slow").read_bytes() == CONTENT
    stuck = remote(NAME, CONTENT, server.serve("stuck", stalled(CONTENT, server)))
    with pytest.raises(DataError, match="timed out"):
        quick(stuck, tmp_path / "stuck", timeout=0.2)


def test_a_dripping_mirror_is_left_for_the_next(server, tmp_path):
    """A byte comes before every timeout of the connection, and the file would never end."""
    urls = server.serve("drip", dripping(server)), server.serve("good", whole(CONTENT))
    assert quick(remote(NAME, CONTENT, *urls), tmp_path / "next", timeout=0.3).read_bytes() == CONTENT
    with pytest.raises(DataError, match=r"timed out, the server sent [0-9]+ bytes in 0\.3 s"):
        quick(remote(NAME, CONTENT, urls[0]), tmp_path / "alone", timeout=0.3)


def test_no_server_at_all_is_said_in_a_sentence(tmp_path):
    with socket.socket() as silent:  # a port that is taken, and where nobody listens
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a"
        with pytest.raises(DataError, match="Connection refused") as caught:
            quick(remote(NAME, CONTENT, url), tmp_path)
    assert len(str(caught.value)) < 400


def test_a_damaged_file_in_place_is_replaced(server, tmp_path):
    (tmp_path / NAME).write_bytes(CORRUPT)
    file = remote(NAME, CONTENT, server.serve("a", whole(CONTENT)))
    assert quick(file, tmp_path).read_bytes() == CONTENT


def test_a_mirror_that_compressed_anew_is_recognised_by_its_content(server, tmp_path):
    anew = gzip.compress(gzip.decompress(CONTENT), 1, mtime=7)
    assert anew != CONTENT
    url = server.serve("anew", whole(anew))
    assert quick(remote(NAME, CONTENT, url), tmp_path / "a").read_bytes() == anew
    with pytest.raises(DataError, match="wrong checksum"):
        quick(remote(NAME, CONTENT, url, packed=False), tmp_path / "b")
    other = gzip.compress(gzip.decompress(CONTENT)[:-1] + b"x")
    with pytest.raises(DataError, match="wrong checksum"):
        quick(remote(NAME, CONTENT, server.serve("other", whole(other))), tmp_path / "c")


def test_the_md5_alone_is_not_enough_where_a_sha256_is_known(tmp_path):
    path = tmp_path / "file.mat"
    path.write_bytes(b"content")
    file = remote("file.mat", b"content")
    assert mismatch(file, path) is None
    assert mismatch(replace(file, sha256=None), path) is None
    assert mismatch(replace(file, sha256="0" * 64), path) is not None
    assert mismatch(replace(file, md5="0" * 32), path) is not None


def test_a_server_that_labels_the_file_as_gzip_encoded_is_asked_not_to(server, tmp_path):
    seen = {}

    def answer(handler):
        seen["encoding"] = handler.headers["Accept-Encoding"]
        whole(CONTENT)(handler)

    quick(remote(NAME, CONTENT, server.serve("a", answer)), tmp_path)
    assert seen == {"encoding": "identity"}


def test_the_bar_goes_to_standard_error(server, tmp_path, capsys):
    with showing("always"):
        quick(remote(NAME, CONTENT, server.serve("a", whole(CONTENT))), tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    assert NAME in err


# --- several processes ---


def download_here(file: RemoteFile, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    download(file, folder, rounds=1, timeout=processes.PATIENCE)


def child(file: RemoteFile, folder: Path) -> processes.Child:
    return processes.begin(download_here, file, folder)


def test_a_process_killed_in_mid_download_leaves_nothing_that_harms(server, tmp_path):
    url = server.serve("a", in_turn(stalled(CONTENT, server), whole(CONTENT)))
    file = remote(NAME, CONTENT, url)
    part = tmp_path / PART
    victim = child(file, tmp_path)
    victim.wait_for(lambda: server.asked)
    assert victim.kill().code == -signal.SIGKILL
    assert part.exists()  # what the victim left
    assert not (tmp_path / NAME).exists()
    assert child(file, tmp_path).finish().code == 0
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert leftovers(tmp_path) == [NAME]


def test_a_longer_leftover_does_not_shine_through(server, tmp_path):
    (tmp_path / PART).write_bytes(b"x" * 3 * len(CONTENT))
    file = remote(NAME, CONTENT, server.serve("a", whole(CONTENT)))
    assert quick(file, tmp_path).read_bytes() == CONTENT


def take_lock(path: Path) -> None:
    with locked(path, wait=False):
        print("in")


def test_the_lock_excludes_another_process(tmp_path):
    with locked(tmp_path / "l"):
        assert "BlockingIOError" in processes.run(take_lock, tmp_path / "l").err
    assert processes.run(take_lock, tmp_path / "l").out == "in\n"


def test_requests_missing_is_said_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "requests", None)
    with pytest.raises(DataError, match=r"pip install '\.\[data\]'"):
        quick(remote(NAME, CONTENT, "http://127.0.0.1:9/a"), tmp_path)

"""Narrow terminals, closed outputs, full disks, modes of files, folders that may not run code."""

import os
import resource
import shutil
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import metamd
from metamd.cli.main import run
from metamd.comparison.figures import drawing
from metamd.data import registry
from metamd.files.container import write_atomically
from metamd.optimiser import fused
from tests.frozen.problems import path_of
from tests.processes import PATIENCE


def command(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "metamd", *words], stderr=subprocess.PIPE, text=True, timeout=PATIENCE, **options
    )


# modes


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_update_keeps_the_mode_of_the_file(mode, tmp_path, capsys):
    path = tmp_path / "file.safetensors"
    shutil.copy(path_of("recorded-column"), path)
    path.chmod(mode)
    assert run(["update", str(path), str(path_of("run-parameter"))]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_new_files(tmp_path):
    write_atomically(tmp_path / "ours", b"x")
    (tmp_path / "plain").write_bytes(b"x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_is_private_is_private_while_it_is_written(tmp_path, monkeypatch):
    path, seen = tmp_path / "ours", []
    path.write_bytes(b"old")
    path.chmod(0o600)
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(stat.S_IMODE(os.fstat(fd).st_mode)))
    write_atomically(path, b"new")
    assert seen[0] == 0o600


# terminals and outputs


@pytest.mark.parametrize("columns", ["1", "5", "wide"])
def test_help_ends_in_a_narrow_terminal(columns):
    done = command("train", "--help", stdout=subprocess.PIPE, env={**os.environ, "COLUMNS": columns})
    assert done.returncode == 0, done.stderr
    assert "metamd" in done.stdout


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("inspect",)])
def test_a_closed_standard_output_is_no_traceback(words):
    done = command(*words, preexec_fn=lambda: os.close(1))
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [("--version",), ("--help",), ("inspect",)])
def test_a_full_standard_output_is_a_sentence(words):
    with Path("/dev/full").open("w") as full:
        done = command(*words, stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("metamd: the standard output cannot be written")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# full disks


@contextmanager
def full_disk(size=1000):
    """A disk on which no file may have more than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_the_file_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "file.safetensors"
    learned = metamd.LearnedOptimiser.from_potential(metamd.Diagonal().bind({"x": torch.zeros(1000)}))
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(OSError, match="large") as caught:
        learned.save(path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.safetensors"]


def test_a_command_on_a_full_disk_says_what_to_do(tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    with full_disk():
        code = run(["update", str(path_of("recorded-column")), str(path_of("run-parameter")), "--out", str(out)])
    assert code == 2
    err = capsys.readouterr().err
    assert repr(str(out)) in err
    assert "make space, and run the command again" in err
    assert not out.exists()


@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_a_full_disk_leaves_no_empty_figure(ending, tmp_path):
    path = tmp_path / f"figure.{ending}"

    def draw():
        with drawing(path, (2, 2), 1, 1) as (_, grid):
            grid[0, 0].plot([0, 1])

    with full_disk(), pytest.raises(OSError, match="large") as caught:
        draw()
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
    draw()
    assert path.stat().st_size > 1000


# a folder in which nothing may run


NOEXEC = """
from metamd.optimiser import fused
fused.FLAGS = ("-shared", "-fPIC", "-O0")
try:
    fused.build()
except RuntimeError as error:
    print(error)
"""


def test_a_temporary_folder_that_may_not_run_code_is_named(tmp_path):
    """In a name space of its own, in which the file system is gone with the process."""
    mount = 'mount -t tmpfs -o noexec,size=8m tmpfs "$TMPDIR" || exit 77; exec "$0" -c "$1"'
    if shutil.which("unshare") is None:
        pytest.skip("this system cannot mount in a name space of its own")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, sys.executable, NOEXEC],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if "not permitted" in done.stderr or done.returncode == 77:
        pytest.skip("this user may not mount a file system")
    assert "may not run code (noexec). Point the environment variable TMPDIR to another folder" in done.stdout, done.stderr
    assert str(tmp_path) in done.stdout


def test_a_library_that_cannot_be_mapped_names_the_folder(monkeypatch):
    """The same without the rights to mount."""

    def refused(path):
        raise OSError(f"{path}: failed to map segment from shared object: Operation not permitted")

    monkeypatch.setattr(fused.ctypes, "CDLL", refused)
    monkeypatch.setenv("CC", shutil.which("true") or "true")  # a compiler that is always done
    with pytest.raises(RuntimeError, match=r"may not run code.*TMPDIR"):
        fused.build.__wrapped__()


# the registry


def test_every_file_of_the_registry_has_a_sha256():
    files = [f for d in registry.datasets().values() for s in d.splits.values() for f in s.files]
    assert files
    assert all(f.sha256 is not None and len(f.sha256) == 64 for f in files)

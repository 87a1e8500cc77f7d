import errno
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

import metamd
from metamd.files import container
from tests import processes
from tests.learned_files import learned, same


def plain_write(path, data):
    """The broken double: writes in place."""
    with Path(path).open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        file.write(data[len(data) // 2 :])


def keeps_the_old(path, write):
    """The law: when a write fails, the old file is there and nothing else."""
    old = learned(horizon=1)
    old.save(path)
    with pytest.raises(OSError, match="No space left"):
        write(path, b"new" * 10_000)
    assert list(path.parent.iterdir()) == [path]
    assert same(metamd.load(path), old)


@pytest.mark.parametrize("stage", ["replace", "fsync"])
def test_a_failed_save_keeps_the_old_file(stage, tmp_path, monkeypatch):
    real = {"replace": Path.replace, "fsync": os.fsync}[stage]
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) > {"replace": 1, "fsync": 2}[stage]:  # the first save goes through
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(*((Path, "replace", fail) if stage == "replace" else (os, "fsync", fail)))
    keeps_the_old(tmp_path / "x.st", container.write_atomically)


def test_the_law_of_failed_saves_rejects_a_plain_write(tmp_path):
    def cut(path, data):
        plain_write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match="cannot be loaded"):
        keeps_the_old(tmp_path / "x.st", cut)


def test_an_interrupt_while_saving_leaves_no_temporary(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        learned().save(tmp_path / "x.st")
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed_and_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    learned().save(tmp_path / "link")
    (tmp_path / "other").touch()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_mode == (tmp_path / "other").stat().st_mode


def save_with_little_space(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        learned(horizon=2).save(path)
    except OSError as error:
        sys.exit(str(error))  # what it prints lies in a file too, and a traceback is longer than that may be


def test_a_full_disk_keeps_the_old_file(tmp_path):
    learned(horizon=1).save(tmp_path / "x.st")
    ended = processes.run(save_with_little_space, tmp_path / "x.st")
    assert ended.code == 1
    assert f"[Errno 27] File too large: '{tmp_path / 'x.st'}'" in ended.err
    assert metamd.load(tmp_path / "x.st").header.horizon == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x.st"]


def save_until(line, path, write, horizon):
    """Save, and be killed when the writing function comes to its line of that number; 0 comes before them all."""

    def follow(frame, event, argument):
        if frame.f_code is not write.__code__:
            return None
        return lambda frame, event, argument: event == "line" and passed()

    passed = processes.Countdown(line + 1)
    container.write_atomically = write
    found = learned(horizon=horizon)
    sys.settrace(follow)
    found.save(path)


def killed_at_every_line(path, write):
    """Kill a process at each line of a function that writes files: how many kills there were, and broke the file."""
    broken = 0
    for kills, horizon in enumerate(range(2, 40)):
        ended = processes.run(save_until, kills, path, write, horizon)
        try:
            found = metamd.load(path)
            broken += found.header.horizon not in (horizon - 1, horizon)
        except ValueError:
            broken += 1
        if ended.code == 0:
            return kills, broken
        assert ended.code == -signal.SIGKILL, ended.err
        learned(horizon=horizon).save(path)
    raise AssertionError("the function never ends")


def test_a_killed_process_never_leaves_a_broken_file(tmp_path):
    learned(horizon=1).save(tmp_path / "x.st")
    kills, broken = killed_at_every_line(tmp_path / "x.st", container.write_atomically)
    assert kills > 8
    assert broken == 0


def test_the_law_of_kills_rejects_a_plain_write(tmp_path):
    learned(horizon=1).save(tmp_path / "x.st")
    kills, broken = killed_at_every_line(tmp_path / "x.st", plain_write)
    assert 0 < broken < kills

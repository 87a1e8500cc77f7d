"""Processes that are really killed, at several points, and continue to the very same result."""

import json
import resource
import signal
from dataclasses import replace

import pytest

from metamd import Diagonal, Journal, load, meta_train
from metamd.files.container import read
from metamd.learning.rounds import OuterState
from tests import processes
from tests.meta_families import small
from tests.meta_worker import STEPS, train, work


def header_without_time(learned):
    plain = learned.header.to_dict()
    return plain | {"cost": {k: v for k, v in plain["cost"].items() if k != "seconds"}}


def log_without_time(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing interrupts, in a process of its own as the others are."""
    folder = tmp_path_factory.mktemp("whole")
    ended = processes.run(work, folder)
    assert ended.code == 0, ended.err
    return folder, load(folder / "learned.safetensors")


POINTS = ["log:4", "loss:70", "loss:300", "write:1", "write:6", "renamed:2"]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_continues_to_the_very_same_result(point, tmp_path, whole):
    killed = processes.run(work, tmp_path, point)
    assert killed.code == -signal.SIGKILL, killed.err
    assert not (tmp_path / "learned.safetensors").exists()
    before = OuterState.restore(*_parts(tmp_path)).step if (tmp_path / "checkpoint.safetensors").exists() else 0
    noted = len(log_without_time(tmp_path))
    assert noted - before in (0, 1), "more than the outer step under way was lost"
    ended = processes.run(work, tmp_path)
    assert ended.code == 0, ended.err
    learned = load(tmp_path / "learned.safetensors")
    assert learned.fingerprint() == whole[1].fingerprint()
    assert header_without_time(learned) == header_without_time(whole[1])
    assert log_without_time(tmp_path) == log_without_time(whole[0])
    assert not list(tmp_path.glob(".*.tmp")), "what a kill left behind is cleaned up"


def _parts(folder):
    metadata, tensors = read(folder / "checkpoint.safetensors")
    return tensors, json.loads(metadata["metamd.checkpoint"])["state"]


def test_kills_hit_while_a_checkpoint_was_written(tmp_path):
    """The points named write: really leave a half-made file, so that the law above is about something."""
    processes.run(work, tmp_path, "write:2")
    assert list(tmp_path.glob(".*.tmp"))


class Stop(Exception):  # noqa: N818
    """Ends a run after its fifth outer step."""


def stop(record, step):
    if step == 5:
        raise Stop


def test_every_k_steps_loses_at_most_k(tmp_path, whole):
    with pytest.raises(Stop):
        train(tmp_path, stop, every=3)
    assert OuterState.restore(*_parts(tmp_path)).step == 5, "an exception, unlike a kill, leaves time for a checkpoint"
    assert train(tmp_path, every=3).fingerprint() == whole[1].fingerprint()
    assert [line["step"] for line in log_without_time(tmp_path)] == list(range(1, STEPS + 1))


def test_a_finished_run_is_not_run_again(tmp_path, whole):
    calls = []
    first = train(whole[0], lambda r, s: calls.append(s))
    assert calls == []
    assert first.fingerprint() == whole[1].fingerprint()


def test_resumption_that_forgets_something_would_be_seen(tmp_path, whole):
    """The comparison can fail: without Adam's averages the continued run ends elsewhere."""
    with pytest.raises(Stop):
        train(tmp_path, stop)
    restore = OuterState.restore

    def forgetful(*parts):
        return replace(restore(*parts), carried={})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OuterState, "restore", forgetful)
        train(tmp_path)
    assert log_without_time(tmp_path) != log_without_time(whole[0])


def train_until_the_disk_is_full(folder):
    def log(record, step):
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    train(folder, log)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, whole):
    ended = processes.run(train_until_the_disk_is_full, tmp_path)
    assert ended.code == 1
    assert "OSError" in ended.err
    assert OuterState.restore(*_parts(tmp_path)).step == 2
    assert train(tmp_path).fingerprint() == whole[1].fingerprint()


def test_two_runs_on_one_folder_are_refused(tmp_path):
    first = processes.begin(work, tmp_path, "hang:1")
    try:
        first.wait_for((tmp_path / "log.jsonl").exists)
        with pytest.raises(OSError, match="another run is writing"):
            train(tmp_path)
    finally:
        first.kill()
    assert train(tmp_path).header.cost["outer_steps"] == STEPS, "the lock dies with its holder"


@pytest.mark.parametrize(("changes", "name"), [({"seed": 1}, "seed"), ({"tasks_per_step": 2}, "tasks_per_step")])
def test_a_checkpoint_of_another_configuration_is_refused(changes, name, whole):
    with pytest.raises(ValueError, match=f"other settings: {name} is"):
        train(whole[0], **changes)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    journal = Journal(tmp_path)
    options = {"outer_steps": 1, "tasks_per_step": 2, "journal": journal}
    meta_train(small(20), Diagonal(), **options)
    data = bytearray(journal.checkpoint.read_bytes())
    data[-3] ^= 1
    journal.checkpoint.write_bytes(data)
    with pytest.raises(ValueError, match="does not match its checksum"):
        meta_train(small(20), Diagonal(), **options)
    journal.checkpoint.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"cannot be loaded.*Delete the checkpoint"):
        meta_train(small(20), Diagonal(), **options)


def test_an_unwritable_folder_is_a_sentence_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        meta_train(small(20), Diagonal(), journal=Journal(tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match="every must be at least 1"):
        Journal(tmp_path, every=0)


def test_a_torn_line_of_the_log_is_dropped(tmp_path):
    journal = Journal(tmp_path)
    options = {"outer_steps": 1, "tasks_per_step": 2, "journal": journal}
    meta_train(small(20), Diagonal(), **options)
    with journal.log.open("a") as file:
        file.write('{"step": 9, "obj')
    meta_train(small(20), Diagonal(), **options)
    assert [json.loads(line)["step"] for line in journal.log.read_text().splitlines()] == [1, 2]

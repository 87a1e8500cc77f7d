import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import metamd
from metamd.files import container
from tests.learned_files import learned, same


def plain_write(path, data):
    """The broken double: writes in place. About every second kill finds its file half written; 25 kills in a row that
    do not are less likely than 1 in 10^6."""
    with Path(path).open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        time.sleep(0.03)
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


LIMITED = """
import resource, sys
from tests.learned_files import learned, same
import metamd
learned(horizon=1).save(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    learned(horizon=2).save(sys.argv[1])
except OSError as error:
    print("refused", error.strerror)
print(metamd.load(sys.argv[1]).header.horizon)
"""

KILLED = """
import os, random, signal, sys, time
from tests.learned_files import learned
from metamd import LearnedOptimiser, MaxDiagonal, load
from metamd.files import container
from metamd.files import learned as module
import torch
path, writer = sys.argv[1:]
if writer == "plain":
    from tests.files.test_saving import plain_write
    module.write_atomically = plain_write
both = [LearnedOptimiser.from_potential(MaxDiagonal(2).with_metrics({"x": torch.zeros(2, n)}), horizon=n)
        for n in (300_000, 200_000)]
both[0].save(path)
rng, broken = random.Random(0), 0
for _ in range(25):
    child = os.fork()
    if child == 0:
        while True:
            for one in both:
                one.save(path)
    time.sleep(rng.uniform(0.005, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        found = load(path)
        broken += found.header.tensors["x"] != (2, found.header.horizon)
    except ValueError:
        broken += 1
print(broken)
"""


def in_process(script, *args):
    here = str(Path(__file__).parents[1])
    paths = os.pathsep.join([here, *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script, *map(str, args)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_full_disk_keeps_the_old_file(tmp_path):
    out = in_process(LIMITED, tmp_path / "x.st")
    assert out[0] == "refused"
    assert out[-1] == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["x.st"]


def test_a_killed_process_never_leaves_a_broken_file(tmp_path):
    assert in_process(KILLED, tmp_path / "x.st", "atomic") == ["0"]


def test_the_law_of_kills_rejects_a_plain_write(tmp_path):
    assert int(in_process(KILLED, tmp_path / "x.st", "plain")[0]) > 0

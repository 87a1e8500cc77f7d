"""Real torchrun, two processes: the result of one, uneven tasks, one writer, and a killed worker that comes back."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metamd import load
from metamd.learning.rounds.workers import Workers
from tests.meta_worker import OPTIONS, STEPS

ROOT = Path(__file__).parents[2]


def launch(folder, point="", restarts=0, processes=2):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    flags = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *flags, "-m", "tests.meta_worker", str(folder)]
    with open(folder / "output", "w+") as output:  # noqa: PTH123
        run = subprocess.Popen(
            [*command, point], cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            run.wait(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return run.returncode, (folder / "output").read_text()


def launch_until_connected(parent, *arguments, **options):
    """Launch in a fresh folder, up to three times: gloo now and then fails to connect, or waits for ever, under load."""
    for attempt in range(3):
        folder = parent / str(attempt)
        folder.mkdir()
        code, output = launch(folder, *arguments, **options)
        if code == 0:
            break
    return folder, code, output


def close(a, b, tolerance=1e-9):
    """Sums of float64 in another order differ by some 1e-16 of their size; eight outer steps may amplify that."""
    pairs = [(v.detach(), b.potential.log_d[k].detach()) for k, v in a.potential.log_d.items()]
    return all(x.shape == y.shape and torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in pairs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.meta_worker", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return load(folder / "learned.safetensors")


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_two_processes_give_the_result_of_one(tmp_path, alone):
    assert OPTIONS["tasks_per_step"] % 2, "an even number would not test uneven counts"
    folder, code, output = launch_until_connected(tmp_path)
    assert code == 0, output[-3000:]
    both = load(folder / "learned.safetensors")
    assert close(both, alone)
    assert both.header.task_hashes == alone.header.task_hashes
    assert both.header.cost["gradient_evaluations"] == alone.header.cost["gradient_evaluations"]
    assert steps(folder) == list(range(1, STEPS + 1)), "one process alone writes the log"
    shifted = both.potential.with_metrics({k: v + 1e-6 for k, v in both.potential.log_d.items()})
    assert not close(type(both)(both.header, shifted), alone), "the comparison can fail"


def test_a_killed_worker_comes_back_from_the_checkpoint(tmp_path, alone):
    folder, code, output = launch_until_connected(tmp_path, "loss:200", restarts=5)
    assert (folder / "struck").exists()
    assert code == 0, output[-3000:]
    assert close(load(folder / "learned.safetensors"), alone)
    assert steps(folder) == list(range(1, STEPS + 1))


def test_without_restarts_the_kill_ends_the_run(tmp_path):
    """The kill of the test above is real."""
    code, _ = launch(tmp_path, "loss:200")
    assert code != 0
    assert not (tmp_path / "learned.safetensors").exists()


def test_tasks_are_dealt_out_once_each():
    for size in (1, 2, 3, 5):
        dealt = sorted(i for rank in range(size) for i in Workers(rank, size).mine(4))
        assert dealt == [0, 1, 2, 3]


def test_alone_nothing_is_sent():
    one = Workers.present()
    assert (one.rank, one.size) == (0, 1)
    sums = one.total({"x": torch.ones(2)})
    assert sums["x"].dtype == torch.float64
    assert one.gather({0: "a", 1: "b"}, 2) == ["a", "b"]
    assert one.share("it") == "it"

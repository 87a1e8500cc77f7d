"""Pieces of work give the same results in this process and in several; what kills a worker is reported in a sentence."""

import os
import signal

import pytest
import torch

from metamd import Diagonal, tasks
from metamd.inner.executor import Executor
from metamd.inner.run import run_inner


def losses(seed):
    family = tasks.tabular(steps=4)
    task = family.build(family.sample(torch.Generator().manual_seed(seed)))
    return run_inner(task, Diagonal().bind(task.init()), lr=0.1).losses


def test_the_results_do_not_depend_on_the_form():
    pieces = {f"seed {s}": lambda s=s: losses(s) for s in range(4)}
    here, there = (Executor(workers).all(pieces) for workers in (1, 2))
    assert list(here) == list(there) == list(pieces)
    assert all(torch.equal(here[name], there[name]) for name in pieces)


def test_workers_compute_after_a_parent_with_threads():
    """Threads do not survive a fork: a worker that used the parent's would wait for them for ever."""

    def piece():
        x = torch.ones(300, 300, requires_grad=True)
        (x @ x).relu().sum().backward()
        return float(x.grad.sum())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        here = piece(), float(torch.ones(10**6).sum())
        assert Executor(2).all({"a": piece, "b": piece}) == {"a": here[0], "b": here[0]}
    finally:
        torch.set_num_threads(before)


def test_results_arrive_as_they_are_finished():
    found = Executor(2).results({"a": lambda: 1, "b": lambda: 2, "c": lambda: os.getpid()})
    assert {name: result if name != "c" else result != os.getpid() for name, result in found} == {"a": 1, "b": 2, "c": True}


def test_a_piece_inside_a_worker_computes_there():
    def inner():
        return Executor(2).all({"x": os.getpid, "y": os.getpid})

    for found in Executor(2).all({"a": inner, "b": inner}).values():
        assert found["x"] == found["y"] != os.getpid()


def test_a_killed_worker_is_replaced_and_one_that_is_always_killed_is_reported(tmp_path):
    def once():
        mark = tmp_path / "tried"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    assert Executor(2).all({"once": once, "b": lambda: 1}) == {"once": "done", "b": 1}
    with pytest.raises(ChildProcessError, match=r"'bad' was killed 3 times \(code -9\)"):
        Executor(2).all({"bad": lambda: os.kill(os.getpid(), signal.SIGKILL), "b": lambda: 1})


def test_what_goes_wrong_in_a_worker_arrives_as_a_sentence():
    def refused():
        raise ValueError("lr must be positive.")

    def bug():
        raise KeyError("x")

    with pytest.raises(ValueError, match=r"^lr must be positive\.$"):
        Executor(2).all({"a": refused, "b": dict})
    with pytest.raises(RuntimeError, match="a: KeyError"):
        Executor(2).all({"a": bug, "b": dict})
    with pytest.raises(RuntimeError, match="a: its result cannot be sent"):
        Executor(2).all({"a": lambda: lambda: 0, "b": dict})
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        Executor(0)


def test_a_caller_that_stops_ends_the_workers():
    found = Executor(2).results({"a": os.getpid, "b": os.getpid, "c": lambda: signal.pause()})
    seen = [next(found)[1]]
    found.close()
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)

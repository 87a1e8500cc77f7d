"""A meta-training in a process of its own, which kills itself for good at a stated point.

python -m tests.meta_worker FOLDER [POINT]. Points: log:K after outer step K; loss:K at the K-th loss; write:K in the middle
of the K-th write, after its data and before its rename; renamed:K right after it; hang:K waits after outer step K.
"""

import os
import signal
import sys
import time
from pathlib import Path

from metamd import Forward, Journal, MaxDiagonal, Method, Refine, Stopping, meta_train
from metamd.files import container
from metamd.learning.rounds.outer import Adam
from metamd.tasks import quadratic
from metamd.tasks.synthetic import _QuadraticTask

OPTIONS = {
    "outer_steps": 3,
    "tasks_per_step": 3,
    "method": Method(stopping=Stopping(0.0)),
    "refine": Refine(2, Forward(), Adam(0.05)),
}
STEPS = 7  # three to learn, judge, two to refine, judge


def family():
    return quadratic(steps=20)


def train(folder, log=None, every=1, **changes):
    return meta_train(family(), MaxDiagonal(2), journal=Journal(folder, every=every), log=log, **(OPTIONS | changes))


class Countdown:
    def __init__(self, count):
        self.left = count

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(point):
    """Place the kill; the callback for the log, if it is there."""
    kind, _, count = point.partition(":")
    strike = Countdown(int(count or 0))
    if kind == "loss":
        loss = _QuadraticTask.loss
        _QuadraticTask.loss = lambda *a: (strike(), loss(*a))[1]
    elif kind == "write":
        fsync = os.fsync

        def struck(fd):
            if Path(f"/proc/self/fd/{fd}").resolve().suffix == ".tmp":
                strike()
            fsync(fd)

        container.os.fsync = struck
    elif kind == "renamed":
        sync = container._sync_directory
        container._sync_directory = lambda d: (strike(), sync(d))
    elif kind == "log":
        return lambda record, step: strike()
    elif kind == "hang":
        return lambda record, step: time.sleep(300) if step == int(count) else None
    return None


if __name__ == "__main__":
    folder, point = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    train(folder, arm(point)).save(Path(folder) / "learned.safetensors")

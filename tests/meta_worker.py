"""A meta-training in a process of its own, which kills itself for good at a stated point.

Points: log:K after outer step K; loss:K at the K-th loss; hang:K waits after outer step K; those of `processes.arm`.
"""

import time
import warnings
from pathlib import Path

from metamd import Forward, Journal, MaxDiagonal, Method, Refine, Stopping, meta_train
from metamd.learning.outer import Adam
from metamd.tasks import quadratic
from metamd.tasks.synthetic import _QuadraticTask
from tests import processes
from tests.processes import Countdown

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


def arm(point):
    """Place the kill; the callback for the log, if it is there."""
    kind, _, count = point.partition(":")
    strike = Countdown(int(count or 0))
    if kind == "loss":
        loss = _QuadraticTask.loss
        _QuadraticTask.loss = lambda *a: (strike(), loss(*a))[1]
    elif kind == "log":
        return lambda record, step: strike()
    elif kind == "hang":
        return lambda record, step: hang() if step == int(count) else None
    else:
        processes.arm(point)
    return None


def hang():
    while True:
        time.sleep(1)


def work(folder, point=""):
    """Learn and save, or be killed at the point."""
    warnings.simplefilter("ignore")
    train(folder, arm(point)).save(Path(folder) / "learned.safetensors")

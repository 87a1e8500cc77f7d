"""The default learning for networks in a process of its own, which kills itself for good at a stated point.

python -m tests.network_worker FOLDER [POINT]. Points: batch:K at the K-th batch; write:K in the middle of the K-th write,
after its data and before its rename.
"""

import os
import sys
from pathlib import Path

from metamd import Journal, meta_train
from metamd.files import container
from metamd.tasks import tabular
from tests.meta_worker import Countdown


def family():
    return tabular(steps=4)


def train(journal=None, seed=0, of=None):
    return meta_train(of or family(), tasks_per_step=1, seed=seed, journal=journal)


def struck_family(point):
    """The family, whose tasks or whose writes end the process at a point."""
    kind, _, count = point.partition(":")
    strike, found = Countdown(int(count or 0)), family()
    build, fsync = found.build, os.fsync

    def struck(config):
        task = build(config)
        batch = task.batch
        task.batch = lambda step: (strike(), batch(step))[1]
        return task

    if kind == "batch":
        found.build = struck
    elif kind == "write":
        container.os.fsync = lambda fd: (strike(), fsync(fd))[1]
    return found


if __name__ == "__main__":
    folder, point = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    train(Journal(folder / "run"), of=struck_family(point)).save(folder / "0.safetensors")

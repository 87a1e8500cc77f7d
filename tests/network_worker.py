"""The default learning for networks in a process of its own, which kills itself for good at a stated point.

Points: batch:K at the K-th batch; those of `processes.arm`.
"""

import warnings

from metamd import Journal, meta_train
from metamd.tasks import tabular
from tests import processes


def family():
    return tabular(steps=4)


def train(journal=None, seed=0, of=None):
    return meta_train(of or family(), tasks_per_step=1, seed=seed, journal=journal)


def struck_family(count):
    """The family, whose tasks end the process at a batch."""
    strike, found = processes.Countdown(count), family()
    build = found.build

    def struck(config):
        task = build(config)
        batch = task.batch
        task.batch = lambda step: (strike(), batch(step))[1]
        return task

    found.build = struck
    return found


def work(folder, point=""):
    """Learn and save, or be killed at the point."""
    warnings.simplefilter("ignore")
    kind, _, count = point.partition(":")
    if kind != "batch":
        processes.arm(point)
    of = struck_family(int(count)) if kind == "batch" else family()
    train(Journal(folder / "run"), of=of).save(folder / "0.safetensors")

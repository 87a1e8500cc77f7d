"""`metamd reproduce by-the-clock`: how often polar steps should find their directions, in steps and in seconds.

The 3-layer MLP on rotated MNIST, where a gradient takes a millisecond and finding directions several. One file for each
held-out angle, as `rotated-mnist-mlp` learns it, is used with its directions found in every step, and every second, fourth
and eighth; another has its usage chosen for directions that are found every fourth step. The rivals are those whose steps
are cheap, with linear decay.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from metamd.comparison.comparison import Comparison
from metamd.comparison.figures import learning_curves
from metamd.comparison.pace import geometric_mean
from metamd.comparison.sections import Section
from metamd.experiments.experiment import Entry, Experiment, Geometry, Scale
from metamd.experiments.rotated_mnist_mlp import ANGLES, rotated
from metamd.files.store import Result
from metamd.learning.usage import rules_for_refresh
from metamd.potentials import Kronecker

__all__ = ["EXPERIMENT", "SCALES", "sections"]

CHEAP = ("sgdm", "adam", "adamw")
OFTEN = {"MetaMD": Entry(), **{f"MetaMD, refresh {k}": Entry(refresh=k) for k in (2, 4, 8)}}
FOURTH = {"MetaMD, learned for refresh 4": Entry(refresh=4)}
EVERY_FOURTH = tuple(rule for rule in rules_for_refresh(4) if rule.rule == "polar")

SCALES = {
    "smoke": Scale(
        ("45",), 200, steps=10, tasks_per_step=1, seeds=1, budget=2, rivals=("adam",), schedules=("linear",), usage_tasks=0
    ),
    "cpu": Scale(ANGLES, 10_000, outer_steps=2, tasks_per_step=4, rivals=CHEAP, schedules=("linear",), screen=3),
    "paper": Scale(ANGLES, 10_000, steps=5000, seeds=10, outer_steps=20, rivals=CHEAP, schedules=("linear",)),
}


def _curves(comparison: Comparison, labels: Sequence[str], folder: Path) -> None:
    """Of all ways in which the file is used, not of the first alone."""
    learning_curves(comparison, [*OFTEN, *FOURTH], folder)


EXPERIMENT = Experiment(
    "by-the-clock",
    rotated,
    {
        "kronecker": Geometry(partial(Kronecker, rank="auto"), OFTEN, choose_usage=True, follow=1.0),
        "fourth": Geometry(
            partial(Kronecker, rank="auto"),
            FOURTH,
            choose_usage=True,
            choices={"metrics": ("online",), "rules": EVERY_FOURTH},
            follow=1.0,
        ),
    },
    SCALES,
    {},
    draw=_curves,
)


def sections(rows: list[Result]) -> list[Section]:
    """One line for every way: ratios to the best rival of each angle, geometric means, and test accuracy."""
    found = []
    for title, each in rows[0]["pace"].items():
        label = title.partition(", by ")[2] or rows[0]["label"]
        ratios = [geometric_mean([row[k] for row in each]) for k in ("mean_loss", "steps", "seconds")]
        ours, theirs = (sum(row[k] for row in each) / len(each) for k in ("accuracy", "best_accuracy"))
        ways = ["not in all runs" if x is None else f"{x:.2f} x" for x in ratios]
        found.append([label, *ways, f"{ours:.2f} (best rival {theirs:.2f})"])
    columns = ["", "mean loss", "steps to the final loss of the best rival", "seconds", "test accuracy, %"]
    return [Section(columns=columns, rows=found)]

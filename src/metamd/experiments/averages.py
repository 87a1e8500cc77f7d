"""`metamd reproduce averages`: what a tail average of the iterates is worth, to MetaMD and to its rivals.

The 3-layer MLP on rotated MNIST with two angles held out; one file for each, as `rotated-mnist-mlp` learns it. Its runs are
judged by their average, if the file recommends that, and by their iterates; so are those of the rivals, with linear decay.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from metamd.comparison.comparison import Comparison
from metamd.comparison.figures import learning_curves
from metamd.comparison.sections import Section, formatted
from metamd.experiments.experiment import Entry, Experiment, Geometry, Scale
from metamd.experiments.rotated_mnist_mlp import ANGLES, rotated
from metamd.files.store import Result
from metamd.potentials import Kronecker

__all__ = ["EXPERIMENT", "SCALES", "sections"]

OURS = {"MetaMD": Entry(), "MetaMD, by its iterates": Entry(averaging="constant")}
BOTH = ("adam", "adam-averaged", "soap", "soap-averaged")

SCALES = {
    "smoke": Scale(
        ("45",),
        200,
        steps=10,
        tasks_per_step=1,
        seeds=1,
        budget=2,
        rivals=("adam", "adam-averaged"),
        schedules=("linear",),
        usage_tasks=0,
    ),
    "cpu": Scale(("0", "45"), 10_000, outer_steps=2, tasks_per_step=4, rivals=BOTH, schedules=("linear",), screen=3),
    "paper": Scale(ANGLES, 10_000, steps=5000, seeds=10, outer_steps=20, rivals=BOTH, schedules=("linear",)),
}


def _curves(comparison: Comparison, labels: Sequence[str], folder: Path) -> None:
    """Of both ways in which the file is judged."""
    learning_curves(comparison, list(OURS), folder)


EXPERIMENT = Experiment(
    "averages",
    rotated,
    {
        "kronecker": Geometry(
            partial(Kronecker, rank="auto"),
            OURS,
            choose_usage=True,
            follow=1.0,
        ),
    },
    SCALES,
    {},
    draw=_curves,
)


def sections(rows: list[Result]) -> list[Section]:
    """One line for everybody: losses, steps to the target, and test accuracy on the mean of the angles."""
    found = []
    for row in rows:
        losses = [formatted(row[m]["value"], ".3g", "diverged") for m in ("mean_loss", "final_loss")]
        accuracy = sum(row["accuracy"].values()) / len(row["accuracy"])
        steps = formatted(row["steps_to_target"]["value"], missing="never")
        found.append([row["label"], *losses, steps, f"{accuracy:.2f}"])
    return [Section(columns=["", "mean loss", "final loss", "steps to target", "test accuracy, %"], rows=found)]

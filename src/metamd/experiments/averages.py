"""`metamd reproduce averages`: what a tail average of the iterates is worth, to MetaMD and to its rivals.

The 3-layer MLP on rotated MNIST with two angles held out; one file for each, as `rotated-mnist-mlp` learns it. Its runs are
judged by their average, if the file recommends that, and by their iterates; so are those of the rivals, with linear decay.
"""

from functools import partial

from metamd.experiments.leave_one_out import Entry, Experiment, Geometry, Scale, markdown
from metamd.experiments.rotated_mnist_mlp import ANGLES, rotated
from metamd.potentials import Kronecker

__all__ = ["EXPERIMENT", "SCALES", "markdown"]

BOTH = ("adam", "adam-averaged", "soap", "soap-averaged")

SCALES = {
    "smoke": Scale(
        ("45",),
        200,
        steps=20,
        tasks_per_step=2,
        seeds=2,
        budget=3,
        rivals=("adam", "adam-averaged"),
        schedules=("linear",),
        usage_tasks=0,
    ),
    "cpu": Scale(("0", "45"), 10_000, outer_steps=2, tasks_per_step=4, rivals=BOTH, schedules=("linear",), screen=3),
    "paper": Scale(ANGLES, 10_000, steps=5000, seeds=10, outer_steps=20, rivals=BOTH, schedules=("linear",)),
}

EXPERIMENT = Experiment(
    "averages",
    rotated,
    {
        "kronecker": Geometry(
            partial(Kronecker, rank="auto"),
            {"MetaMD": Entry(), "MetaMD, by its iterates": Entry(averaging="constant")},
            choose_usage=True,
            follow=1.0,
        ),
    },
    SCALES,
    {},
)

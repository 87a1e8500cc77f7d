"""`metamd reproduce constant-rates`: what the best rivals of LeNet come to at a constant rate, beside linear decay.

The table of `diverse-digits-lenet` has its rivals with linear decay. Here are two of them with both, the best that the paper
has and the best of all, each with as many rates as there.
"""

from functools import partial

from metamd.experiments.averages import markdown
from metamd.experiments.curves import learning_curves
from metamd.experiments.diverse_digits_lenet import HERE, digits
from metamd.experiments.leave_one_out import Entry, Experiment, Geometry, Scale
from metamd.potentials import Kronecker

__all__ = ["EXPERIMENT", "SCALES", "markdown"]

BEST = ("adam", "soap")

SCALES = {
    "smoke": Scale(
        ("usps",), 100, steps=10, outer_steps=1, tasks_per_step=2, seeds=1, budget=3, rivals=("adam",), usage_tasks=0
    ),
    "cpu": Scale(
        ("kmnist", "fashionmnist"),
        10_000,
        outer_steps=2,
        tasks_per_step=4,
        rivals=BEST,
        usage_tasks=4,
        screen=3,
    ),
    "paper": Scale(HERE, None, outer_steps=20, seeds=10, rivals=BEST),
}

EXPERIMENT = Experiment(
    "constant-rates",
    digits,
    {"kronecker": Geometry(partial(Kronecker, rank="auto"), {"MetaMD": Entry()}, choose_usage=True, follow=1.0)},
    SCALES,
    {},
    draw=partial(learning_curves, every_schedule=True),
)

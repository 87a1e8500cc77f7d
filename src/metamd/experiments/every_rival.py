"""`metamd reproduce every-rival`: the hand-made rivals of `metamd compare`, all of them, on the MLP of `rotated-mnist-mlp`.

Two angles are held out in turn. The tables of the other experiments have what the paper has and the best of what has come
since.
"""

from dataclasses import replace

from metamd.comparison.figures import mean_losses
from metamd.experiments.averages import sections
from metamd.experiments.bayesian import GEOMETRIES
from metamd.experiments.bayesian import SCALES as BAYESIAN
from metamd.experiments.experiment import MODERN, Experiment, Scale
from metamd.experiments.rotated_mnist_mlp import ANGLES, rotated

__all__ = ["EXPERIMENT", "SCALES", "sections"]

OTHERS = ("nesterov", "adagrad", "shampoo", "schedule-free-sgd", "dadapt")
"""Those that are in no other table."""

EVERY = ("sgd", *MODERN, *OTHERS)

SCALES = {
    "smoke": replace(BAYESIAN["smoke"], budget=2, rivals=("adam", *OTHERS), protocol="handicap"),
    "cpu": Scale(("0", "45"), 10_000, outer_steps=2, tasks_per_step=4, rivals=EVERY, screen=3),
    "paper": Scale(ANGLES, 10_000, steps=5000, seeds=10, outer_steps=20, rivals=EVERY),
}

EXPERIMENT = Experiment("every-rival", rotated, GEOMETRIES, SCALES, {}, draw=mean_losses)

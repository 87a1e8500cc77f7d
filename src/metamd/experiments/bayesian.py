"""`metamd reproduce bayesian`: the paper's protocol with its Bayesian optimisation, on the MLP of `rotated-mnist-mlp`.

Everybody, MetaMD included, is tuned in learning rate and weight decay for validation accuracy: 25 settings, a Gaussian
process with an RBF kernel, the upper confidence bound. The paper does so for LeNet and ResNet18 and has grids for the MLP
[GaoMetaMD2022]; here a training takes a second.
"""

from functools import partial

from metamd.experiments.experiment import Entry, Experiment, Geometry, Scale, sections
from metamd.experiments.rotated_mnist_mlp import ANGLES, rotated
from metamd.potentials import Kronecker

__all__ = ["EXPERIMENT", "SCALES", "sections"]

GEOMETRIES = {
    "kronecker": Geometry(partial(Kronecker, rank="auto"), {"MetaMD": Entry()}, choose_usage=True, follow=1.0),
}
"""The default of `metamd train` alone."""

SCALES = {
    "smoke": Scale(
        ("45",),
        200,
        steps=10,
        outer_steps=1,
        tasks_per_step=1,
        seeds=1,
        budget=7,  # two more than a search by Bayesian optimisation draws at random
        rivals=("adam",),
        schedules=("linear",),
        protocol="paper",
        usage_tasks=0,
    ),
    "cpu": Scale(("0", "45"), 5000, steps=200, outer_steps=2, tasks_per_step=4, protocol="paper", usage_tasks=4),
    "paper": Scale(ANGLES, 10_000, outer_steps=20, seeds=10, protocol="paper"),
}

EXPERIMENT = Experiment("bayesian", rotated, GEOMETRIES, SCALES, {})

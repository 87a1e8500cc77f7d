"""`metamd reproduce bayesian-lenet`: the paper's protocol with its Bayesian optimisation, on a dataset of its LeNet table.

As `bayesian`, with the runs of `diverse-digits-lenet`: 500 steps, and what the paper compares with there [GaoMetaMD2022].
"""

from dataclasses import replace

from metamd.experiments.bayesian import GEOMETRIES
from metamd.experiments.bayesian import SCALES as OF_MLP
from metamd.experiments.diverse_digits_lenet import EXPERIMENT as LENET
from metamd.experiments.diverse_digits_lenet import digits
from metamd.experiments.experiment import Experiment, Scale, sections

__all__ = ["EXPERIMENT", "SCALES", "sections"]

SCALES = {
    "smoke": replace(OF_MLP["smoke"], domains=("usps",), images=100, steps=4),
    "cpu": Scale(("kmnist",), 10_000, outer_steps=2, tasks_per_step=4, protocol="paper", usage_tasks=4),
    "paper": LENET.scales["paper"],
}

EXPERIMENT = Experiment("bayesian-lenet", digits, GEOMETRIES, SCALES, LENET.published)

"""`metamd reproduce learned-rivals`: MetaMD against other optimisers that are learned on the family.

Rotated MNIST with a 3-layer MLP, runs of 100 steps. Everybody learns from the same angles; the learned rivals then have the
best of several factors on their steps for the very runs that are shown, MetaMD has nothing tuned. Adam and SGD-M are there
for orientation.
"""

from dataclasses import replace

from metamd.comparison.pace import standings
from metamd.experiments.declare import Scale, coordinates
from metamd.experiments.experiment import Experiment
from metamd.experiments.paper_tables import ANGLES, BOTH, ONE_ANGLE, rotated

LEARNED = ("meta-sgd", "aruba", "aruba-plus", "learned-schedule", "lstm", "hypergradient")
RIVALS = (*LEARNED, "sgdm", "adam")

EXPERIMENTS = (
    Experiment(
        "learned-rivals",
        rotated,
        {"kronecker": coordinates(BOTH)},
        {
            "smoke": replace(
                ONE_ANGLE, images=100, steps=6, budget=1, rivals=(*LEARNED, "adam"), usage_tasks=1, batch_size=20
            ),
            "cpu": Scale(("0", "45"), 1000, steps=100, tasks_per_step=4, budget=9, rivals=RIVALS, screen=3),
            "paper": Scale(ANGLES, 10_000, seeds=10, rivals=RIVALS),
        },
        sections=standings,
    ),
)

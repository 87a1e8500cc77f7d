"""`metamd reproduce learned-rivals`: MetaMD against other optimisers that are learned on the family.

Rotated MNIST with a 3-layer MLP, runs of 100 steps. Everybody learns from the same angles; the learned rivals then have the
best of several factors on their steps for the very runs that are shown, MetaMD has nothing tuned. Adam and SGD-M are there
for orientation.
"""

from metamd import tasks
from metamd.comparison.pace import standings
from metamd.comparison.sections import Section
from metamd.experiments.experiment import Entry, Experiment, Geometry, Scale
from metamd.files.store import Result
from metamd.files.usage import Usage
from metamd.potentials import Kronecker
from metamd.tasks.vision.families import ImageFamily

__all__ = ["EXPERIMENT", "SCALES", "sections"]

LEARNED = ("meta-sgd", "aruba", "aruba-plus", "learned-schedule", "lstm", "hypergradient")
ANGLES = ("0", "15", "30", "45", "60", "75")

SCALES = {
    "smoke": Scale(
        ("45",),
        100,
        steps=6,
        tasks_per_step=1,
        seeds=1,
        budget=1,
        rivals=(*LEARNED, "adam"),
        schedules=("linear",),
        usage_tasks=1,
        batch_size=20,
    ),
    "cpu": Scale(("0", "45"), 1000, steps=100, tasks_per_step=4, budget=9, rivals=(*LEARNED, "sgdm", "adam"), screen=3),
    "paper": Scale(ANGLES, 10_000, seeds=10, rivals=(*LEARNED, "sgdm", "adam")),
}


def _family(scale: Scale, hold_out: str) -> ImageFamily:
    return tasks.rotated_mnist(hold_out=float(hold_out), images=scale.images, batch_size=scale.batch_size, steps=scale.steps)


def _kronecker() -> Geometry:
    entries = {"MetaMD": Entry(), "MetaMD, plain": Entry(Usage())}
    return Geometry(lambda: Kronecker(rank="auto"), entries, choose_usage=True, follow=1.0)


EXPERIMENT = Experiment("learned-rivals", _family, {"kronecker": _kronecker()}, SCALES, {})


def sections(rows: list[Result]) -> list[Section]:
    """The table of the results page."""
    return standings(rows)

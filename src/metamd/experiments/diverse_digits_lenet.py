"""`metamd reproduce diverse-digits-lenet`: the paper's table of LeNet on the diverse digits [GaoMetaMD2022].

Each dataset is held out in turn, T = 500. QMNIST takes part where its images are at hand.
"""

from functools import partial

from metamd import tasks
from metamd.comparison.training import Measuring
from metamd.experiments.experiment import MODERN, Entry, Experiment, Geometry, Scale, sections
from metamd.files.usage import Usage
from metamd.potentials import Diagonal, Kronecker
from metamd.tasks.vision.families import ImageFamily

__all__ = ["EXPERIMENT", "SCALES", "sections"]

DATASETS = ("mnist", "qmnist", "kmnist", "fashionmnist", "usps", "svhn")
HERE = tuple(d for d in DATASETS if d != "qmnist")
"""Those that the mirror has."""

PUBLISHED = {
    "SGD": (96.44, 96.23, 87.61, 88.95, 92.73, 85.44),
    "SGD-M": (98.47, 97.21, 92.54, 86.44, 95.37, 86.26),
    "Adam": (98.49, 98.10, 93.20, 87.36, 93.68, 87.07),
    "RMSprop": (98.65, 98.30, 93.14, 87.45, 95.43, 87.01),
    "MetaMD": (98.64, 98.41, 93.81, 87.72, 95.61, 87.59),
}

SCALES = {
    "smoke": Scale(
        ("usps",),
        100,
        steps=4,
        outer_steps=1,
        tasks_per_step=1,
        seeds=1,
        budget=2,
        rivals=("adam",),
        schedules=("linear",),
        usage_tasks=0,
    ),
    "cpu": Scale(
        HERE,
        10_000,
        outer_steps=2,
        tasks_per_step=4,
        rivals=("sgd", *MODERN),
        usage_tasks=4,
        screen=3,
    ),
    "paper": Scale(
        DATASETS,
        None,
        outer_steps=20,
        rivals=("sgd", "sgdm", "rmsprop", "adam"),
        protocol="paper",
        measuring=Measuring(every=100),
        test_steps=20_000,
    ),
}


def digits(scale: Scale, hold_out: str) -> ImageFamily:
    """LeNet's family with a dataset held out.

    Args:
        scale: how many images and steps.
        hold_out: the dataset.
    """
    return tasks.diverse_digits(hold_out=hold_out, model="lenet", images=scale.images, batch_size=100, steps=scale.steps)


EXPERIMENT = Experiment(
    "diverse-digits-lenet",
    digits,
    {
        "kronecker": Geometry(
            partial(Kronecker, rank="auto"),
            {"MetaMD": Entry(), "MetaMD, plain": Entry(Usage())},
            choose_usage=True,
            follow=1.0,
        ),
        "diagonal": Geometry(Diagonal, {"MetaMD, diagonal": Entry(Usage())}),
    },
    SCALES,
    {label: dict(zip(DATASETS, values, strict=True)) for label, values in PUBLISHED.items()},
)

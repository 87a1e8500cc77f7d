"""`metamd reproduce resnet18-cifar10`: ResNet18 on CIFAR-10, learned on STL-10 and the diverse digits [GaoMetaMD2022].

The paper trains the full width to convergence. A CPU cannot: at the scale `cpu` the width is 16, a run has 500 steps of 25
images, the geometry is learned from reference runs of Adam alone, with polar steps whose length is chosen on training tasks,
and the rivals have seven rates with each schedule, of which the best go on from the first seed to the others. The paper's
accuracies stand beside ours for orientation.
"""

from functools import partial

from metamd import tasks
from metamd.comparison.training import Measuring
from metamd.experiments.experiment import Entry, Experiment, Geometry, Scale, sections
from metamd.files.usage import Usage
from metamd.inner.objectives import Reference
from metamd.potentials import Kronecker
from metamd.potentials.online import Online
from metamd.tasks.vision.families import ImageFamily

__all__ = ["EXPERIMENT", "SCALES", "sections"]

PUBLISHED = {"SGD-M": 91.43, "Adam": 91.29, "AdamW": 92.64, "MetaMD": 93.74}

SCALES = {
    "smoke": Scale(
        ("cifar10",),
        60,
        steps=3,
        tasks_per_step=1,
        seeds=1,
        budget=1,
        rivals=("adam",),
        schedules=("linear",),
        usage_tasks=0,
        batch_size=10,
        width=8,
        measuring=Measuring(every=3, examples=20, splits=("test",)),
    ),
    "cpu": Scale(
        ("cifar10",),
        4000,
        tasks_per_step=2,
        budget=7,
        rivals=("sgdm", "adam", "adamw", "muon"),
        screen=1,
        usage_tasks=2,
        batch_size=25,
        width=16,
        measuring=Measuring(every=50, examples=500, splits=("test",)),
    ),
    "paper": Scale(
        ("cifar10",),
        None,
        tasks_per_step=7,
        rivals=("sgdm", "adam", "adamw"),
        protocol="paper",
        measuring=Measuring(every=100),
        test_steps=20_000,
    ),
}


def _family(scale: Scale, hold_out: str) -> ImageFamily:
    return tasks.images(
        hold_out=hold_out, width=scale.width, images=scale.images, batch_size=scale.batch_size, steps=scale.steps
    )


EXPERIMENT = Experiment(
    "resnet18-cifar10",
    _family,
    {
        "kronecker": Geometry(
            partial(Kronecker, rank="auto"),
            {"MetaMD": Entry(), "MetaMD, plain": Entry(Usage(momentum=0.9, schedule="linear"))},
            choose_usage=True,
            choices={"metrics": ("online",), "rules": (Online("polar", beta=0.9, signal=0.95),), "schedules": ("linear",)},
            follow=1.0,
            reference=Reference(lr=2e-3, factor=1.0),
        ),
    },
    SCALES,
    {label: {"cifar10": value} for label, value in PUBLISHED.items()},
)

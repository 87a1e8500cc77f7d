"""`metamd reproduce rotated-mnist-mlp`: the paper's table of a 3-layer MLP on rotated MNIST [GaoMetaMD2022].

Five angles to learn from, the sixth to compare on, each in turn. With 10,000 images a domain the accuracies are about those
of the paper, which does not say how many it had.

The paper trains its inner loop to convergence by a criterion that it does not publish. Ours: the mean training loss of the
last tenth of a run is within 5 % of that of the tenth before. The 500 steps of the scale `cpu`, five epochs, do not meet it:
in its records the tuned rivals still fall by 6 % and more there, with linear decay (Adam and SGD-M by a tenth and more), and
without weight decay their losses go on to zero. The scale `paper`, whose grids all have a weight decay, has 5,000 steps,
fifty epochs; `last_tenth` in summary.json says for every optimiser whether that was enough.
"""

from functools import partial

from metamd import tasks
from metamd.comparison.training import Measuring
from metamd.experiments.experiment import MODERN, Entry, Experiment, Geometry, Scale, sections
from metamd.files.usage import Usage
from metamd.potentials import Diagonal, Kronecker
from metamd.tasks.vision.families import ImageFamily

__all__ = ["EXPERIMENT", "SCALES", "sections"]

ANGLES = ("0", "15", "30", "45", "60", "75")

PUBLISHED = {
    "SGD": (92.23, 91.91, 92.57, 92.89, 92.73, 92.36),
    "SGD-M": (94.77, 94.64, 94.66, 94.67, 94.60, 94.47),
    "Adam": (92.96, 93.29, 93.51, 93.69, 93.67, 92.98),
    "RMSprop": (92.48, 93.56, 92.77, 93.58, 93.43, 93.14),
    "MetaMD": (95.22, 95.18, 95.44, 95.34, 95.51, 95.12),
}

SCALES = {
    "smoke": Scale(
        ("0", "45"), 200, steps=10, outer_steps=1, tasks_per_step=1, seeds=1, budget=2, rivals=("sgd", "adam"), usage_tasks=0
    ),
    "cpu": Scale(ANGLES, 10_000, outer_steps=2, tasks_per_step=4, rivals=("sgd", *MODERN), screen=3),
    "paper": Scale(
        ANGLES,
        10_000,
        steps=5000,
        seeds=10,
        outer_steps=20,
        rivals=("sgd", "sgdm", "rmsprop", "adam"),
        protocol="paper",
        search="grid",
        measuring=Measuring(every=50),
    ),
}


def rotated(scale: Scale, hold_out: str) -> ImageFamily:
    """The MLP's family with an angle held out.

    Args:
        scale: how many images and steps.
        hold_out: the angle.
    """
    angles = [float(a) for a in ANGLES]
    return tasks.rotated_mnist(
        angles=angles, hold_out=float(hold_out), model="mlp", images=scale.images, batch_size=100, steps=scale.steps
    )


EXPERIMENT = Experiment(
    "rotated-mnist-mlp",
    rotated,
    {
        "kronecker": Geometry(
            partial(Kronecker, rank="auto"),
            {"MetaMD": Entry(), "MetaMD, plain": Entry(Usage())},
            choose_usage=True,
            follow=1.0,
        ),
        "tensor": Geometry(
            partial(Diagonal, tying="tensor"), {"MetaMD, one number per tensor": Entry()}, choose_usage=True, follow=1.0
        ),
        "diagonal": Geometry(Diagonal, {"MetaMD, diagonal": Entry(Usage())}),
    },
    SCALES,
    {label: dict(zip(ANGLES, values, strict=True)) for label, values in PUBLISHED.items()},
)

"""`metamd reproduce adapt-rotated-mnist`: a model trained at 45 degrees is adapted to other angles in 100 steps.

Every task begins at the same model, the regime of nightly retrains and of one model per customer. Nine angles to learn
from, the tenth to compare on, each in turn; the rivals begin at the same model.
`adapt-rotated-mnist-learned` is the same from the learned start, the mean of the solutions on the nine angles, which the
rivals are given too.
"""

from collections.abc import Mapping
from functools import partial

from metamd import tasks
from metamd.experiments.declare import Family
from metamd.experiments.experiment import MODERN, Entry, Experiment, Geometry, Scale, sections
from metamd.files.learned import LearnedStart
from metamd.files.usage import Usage
from metamd.inner.objectives import Reference, Regret
from metamd.learning.reference import learn_start
from metamd.potentials import Diagonal, Kronecker
from metamd.tasks.vision.families import ADAPTED
from metamd.tasks.wrapped import SharedStart

__all__ = ["EXPERIMENT", "SCALES", "sections"]

ANGLES = tuple(str(a) for a in ADAPTED)

SCALES = {
    "smoke": Scale(
        ("0",),
        60,
        steps=10,
        outer_steps=1,
        tasks_per_step=1,
        seeds=2,
        budget=2,
        rivals=("sgdm", "adam"),
        usage_tasks=0,
        batch_size=20,
    ),
    "cpu": Scale(ANGLES, 5000, steps=100, outer_steps=4, tasks_per_step=9, rivals=MODERN, screen=3),
    "paper": Scale(ANGLES, 5000, steps=100, outer_steps=8, tasks_per_step=18, seeds=10, rivals=MODERN),
}


def _family(scale: Scale, hold_out: str) -> SharedStart:
    return tasks.adapt_rotated_mnist(
        hold_out=float(hold_out), images=scale.images, batch_size=scale.batch_size, steps=scale.steps
    )


def _start(scale: Scale, family: Family) -> LearnedStart:
    return learn_start(family, reference=Reference(lr=2e-3, factor=2), tasks=2 * scale.tasks_per_step)


def adaptation(name: str, scales: Mapping[str, Scale], *, learned_start: bool) -> Experiment:
    """The experiment from one of the two starts.

    Args:
        name: of the experiment.
        scales: by name.
        learned_start: whether tasks begin at the mean of the training tasks' solutions instead of the pretrained model.
    """
    regret = Regret(comparator=Reference(lr=2e-3, factor=2))
    return Experiment(
        name,
        _family,
        {
            "kronecker": Geometry(
                partial(Kronecker, rank="auto"),
                {"MetaMD": Entry(), "MetaMD, plain": Entry(Usage())},
                choose_usage=True,
                follow=2.0,
            ),
            "diagonal": Geometry(Diagonal, {"MetaMD, diagonal": Entry(Usage())}, objective=regret),
        },
        scales,
        {},
        share=0.5,
        start=_start if learned_start else None,
    )


EXPERIMENT = adaptation("adapt-rotated-mnist", SCALES, learned_start=False)

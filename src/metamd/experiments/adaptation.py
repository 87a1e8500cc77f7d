"""`metamd reproduce adaptation`: a model trained at 45 degrees is adapted to other angles in 100 steps.

Every task begins at the same model, the regime of nightly retrains and of one model per customer. Nine angles to learn
from, the tenth to compare on, each in turn; the rivals begin at the same model. The variant `learned-start` begins at the
mean of the solutions on the nine angles instead, which the rivals are given too.
"""

from dataclasses import replace

from metamd import tasks
from metamd.experiments.declare import Family, Scale, coordinates
from metamd.experiments.experiment import Experiment
from metamd.experiments.paper_tables import BOTH, DIAGONAL, MODERN, SMOKE
from metamd.files.learned import LearnedStart
from metamd.inner.objectives import Reference, Regret
from metamd.learning.reference import learn_start
from metamd.tasks.vision import ADAPTED
from metamd.tasks.wrapped import SharedStart

ADAPTATION_ANGLES = tuple(str(a) for a in ADAPTED)
LONGER_REFERENCE = Reference(lr=2e-3, factor=2)


def _adaptation_family(scale: Scale, hold_out: str) -> SharedStart:
    return tasks.adapt_rotated_mnist(hold_out=float(hold_out), **scale.data)


def _learned_start(scale: Scale, family: Family) -> LearnedStart:
    return learn_start(family, reference=LONGER_REFERENCE, tasks=2 * scale.tasks_per_step)


GIVEN = Experiment(
    "adaptation",
    _adaptation_family,
    {
        "kronecker": replace(coordinates(BOTH), longer=2),
        "diagonal": replace(DIAGONAL, options={"objective": Regret(comparator=LONGER_REFERENCE)}),
    },
    {
        "smoke": replace(SMOKE, domains=("0",), images=60, seeds=2, rivals=("sgdm", "adam"), batch_size=20),
        "cpu": Scale(ADAPTATION_ANGLES, 5000, steps=100, outer_steps=4, tasks_per_step=9, rivals=MODERN, screen=3),
        "paper": Scale(ADAPTATION_ANGLES, 5000, steps=100, outer_steps=8, tasks_per_step=18, seeds=10, rivals=MODERN),
    },
    share=0.5,
)

EXPERIMENTS = (GIVEN, replace(GIVEN, variant="learned-start", start=_learned_start))

"""`metamd reproduce paper-preset`: the paper's own method on the networks of its tables, as it comes [GaoMetaMD2022].

Three diagonals centred at the origin, the paper's step, its objective, plain gradient descent on M. Its k is not published:
once 7, which gives the published numbers on quadratics, and once what the theory has, eta^2 T L^2 / 2. The gradient is
`Reverse`'s, which equals the forward mode that the paper names up to rounding. One domain of each model is held out; models,
data and runs are those of the other experiments, so that rivals are the same there.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from metamd.experiments.declare import Family
from metamd.experiments.diverse_digits_lenet import digits
from metamd.experiments.experiment import Entry, Experiment, Geometry, Scale, sections
from metamd.experiments.rotated_mnist_linear import linear
from metamd.experiments.rotated_mnist_mlp import rotated
from metamd.files.usage import Usage
from metamd.inner.estimators import Reverse
from metamd.inner.objectives import FromLipschitz
from metamd.learning.meta import paper
from metamd.potentials import MaxDiagonal
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Variant

__all__ = ["EXPERIMENT", "SCALES", "sections"]

FAMILIES = {"linear": linear, "mlp": rotated, "lenet": digits}
HELD_OUT = ("linear 0", "mlp 45", "lenet kmnist")
RIVALS = ("sgd", "sgdm", "adam")

SCALES = {
    "smoke": Scale(("linear 0",), 1000, steps=5, outer_steps=1, tasks_per_step=1, seeds=1, budget=2, rivals=("sgd", "adam")),
    "cpu": Scale(HELD_OUT, 10_000, outer_steps=15, tasks_per_step=2, rivals=RIVALS, screen=3),
    "paper": Scale(HELD_OUT, None, outer_steps=300, tasks_per_step=5, rivals=RIVALS, protocol="paper"),
}


def _family(scale: Scale, held_out: str) -> Family:
    """Of a model with a domain held out; the linear model has runs twice as long, with a tenth of the images."""
    model, domain = held_out.split()
    if model == "linear":
        scale = replace(scale, steps=2 * scale.steps, images=1000 if scale.images is None else scale.images // 10)
    return FAMILIES[model](scale, domain)


def _sides(scale: Scale, held_out: str, family: Family) -> Mapping[str, TaskFamily]:
    return {held_out: Variant(family.held_out(), held_out)}


def preset(label: str, k: float | FromLipschitz = 7.0, rounds: int = 1) -> Geometry:
    """The paper's method as a geometry.

    Args:
        label: how it enters.
        k: of its objective.
        rounds: outer steps, as a multiple of the scale's.
    """
    options = paper(k, estimator=Reverse())
    potential, objective = options.pop("potential"), options.pop("objective")
    del options["outer_steps"]
    return Geometry(
        partial(MaxDiagonal, potential.pieces, centre=potential.centre),
        {label: Entry(Usage(), exact=False)},
        objective=objective,
        options=options,
        rounds=rounds,
        same_tasks=True,
    )


EXPERIMENT = Experiment(
    "paper-preset",
    _family,
    {
        "seven": preset("paper's preset, k = 7"),
        "theory": preset("paper's preset, k of the theory", FromLipschitz()),
    },
    SCALES,
    {},
    sides=_sides,
)

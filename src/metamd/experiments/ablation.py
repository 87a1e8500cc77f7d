"""`metamd reproduce ablation`: each objective, estimator, potential and usage, and the paper's preset against ours.

Rotated MNIST with a 3-layer MLP, at angles that no other experiment has, since the default is chosen by what is seen here:
37.5 degrees are held out, and what holds there may be claimed of the angles of the other tables. Runs of 100 steps. Every
geometry is learned three times, with other tasks; intervals are over these trainings and the test runs of each. The closed
form has the outer steps of the scale; gradients are followed for five times as many from the largest curvature, with Adam on
log D. The paper's preset is plain gradient descent, with `Reverse` for the gradient, which equals the forward mode that it
names up to rounding.

The variant `paper-preset` has the paper's own method on the networks of its tables, as it comes [GaoMetaMD2022]: three
diagonals centred at the origin, the paper's step, its objective, plain gradient descent on M. Its k is not published: once
7, which gives the published numbers on quadratics, and once what the theory has, eta^2 T L^2 / 2. One domain of each model
is held out; models, data and runs are those of the other experiments, so that rivals are the same there.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from metamd import tasks
from metamd.comparison.entrants import ENDINGS, Protocol
from metamd.comparison.figures import mean_losses
from metamd.comparison.pace import standings
from metamd.experiments.declare import (
    COORDINATES,
    PAPERS_STEP,
    PLAIN,
    Entrant,
    Family,
    Geometry,
    Scale,
    coordinates,
    held_out,
)
from metamd.experiments.experiment import Experiment
from metamd.experiments.paper_tables import ONE_ANGLE, digits, linear, rotated
from metamd.files.usage import Usage
from metamd.inner.estimators import Direct, Estimator, Evolution, Forward, Reverse
from metamd.inner.objectives import FromLipschitz, Objective, PaperBound, Reference, Regret, TrainingLoss
from metamd.learning.meta import paper
from metamd.learning.outer import Adam, Method
from metamd.learning.usage import RULES
from metamd.potentials import Diagonal, Kronecker, MaxDiagonal
from metamd.potentials.online import Online
from metamd.potentials.tying import TyingName
from metamd.tasks.base import TaskFamily
from metamd.tasks.vision import ImageFamily
from metamd.tasks.wrapped import Variant

ABLATION_ANGLES = (7.5, 22.5, 37.5, 52.5, 67.5, 82.5)
HELD_OUT_ANGLE = 37.5
TRAININGS = ("training-1", "training-2", "training-3")

SCALES = {
    "smoke": replace(ONE_ANGLE, domains=TRAININGS[:1], images=100, steps=6, batch_size=50),
    "cpu": Scale(
        TRAININGS,
        1000,
        steps=100,
        outer_steps=3,
        tasks_per_step=3,
        usage_tasks=4,
        budget=9,
        rivals=("sgdm", "adam", "muon", "soap"),
    ),
    "paper": Scale(TRAININGS, 1000, outer_steps=20, rivals=("sgdm", "adam"), protocol="paper", search="grid"),
}


def _ablation_family(scale: Scale, training: str) -> ImageFamily:
    return tasks.rotated_mnist(angles=ABLATION_ANGLES, hold_out=HELD_OUT_ANGLE, **scale.data)


def _named(scale: Scale, name: str, family: Family) -> Mapping[str, TaskFamily]:
    """The held-out side under the name of the repetition, or of the model and the domain."""
    return {name: Variant(held_out(family), name)}


REGRET = Regret(comparator=Reference(lr=3e-3, factor=1.0))
GRADIENT_STEPS = 5
"""Outer steps along a gradient, for one of the closed form."""


def _by_gradient(label: str, objective: Objective, estimator: Estimator, tying: TyingName = "parameter") -> Geometry:
    """One diagonal learned by following a gradient."""
    options = {"objective": objective, "estimator": estimator, "method": Method(Adam(lr=0.2), start="curvature")}
    return Geometry(Diagonal(tying=tying), {label: PLAIN}, options=options, rounds=GRADIENT_STEPS, same_tasks=True)


def _closed(label: str, potential: MaxDiagonal, objective: Objective = REGRET) -> Geometry:
    return Geometry(potential, {label: PLAIN}, options={"objective": objective}, same_tasks=True)


def _used(label: str, potential: MaxDiagonal = COORDINATES, **choices: Any) -> Geometry:
    """A geometry from runs of Adam, with the best usage among the choices."""
    return replace(coordinates({label: Entrant()}, potential, **choices), same_tasks=True)


def preset(label: str, k: float | FromLipschitz = 7.0, rounds: int = 1) -> Geometry:
    """The paper's method as a geometry, with so many times the outer steps of the scale."""
    options = paper(k, estimator=Reverse(), stable=False)
    del options["outer_steps"]
    return Geometry(options.pop("potential"), {label: PAPERS_STEP}, options=options, rounds=rounds, same_tasks=True)


MOMENTA = {
    f"Kronecker, {said}{ENDINGS[schedule]}": Entrant(Usage(momentum=momentum, schedule=schedule))
    for said, momentum in {"plain": 0.0, "momentum 0.9": 0.9}.items()
    for schedule in Protocol.schedules
}
BY_POLAR: dict[str, Any] = {"metrics": ("online",), "rules": tuple(Online("polar", beta=beta) for beta in (0.7, 0.9))}
BY_SIGNAL: dict[str, Any] = {"metrics": ("online",), "rules": tuple(rule for rule in RULES if rule.signal)}

ABLATION = Experiment(
    "ablation",
    _ablation_family,
    {
        "default": _used("MetaMD"),
        "used-constant": _used("MetaMD, constant rate", schedules=("constant",)),
        "used-linear": _used("MetaMD, linear decay", schedules=("linear",)),
        "used-schedule": _used("MetaMD, learned schedule", schedules=("learned",)),
        "used-quadratic": _used("MetaMD, quadratic decay", schedules=("quadratic",)),
        "used-iterates": _used("MetaMD, judged by its iterates", averages=("constant",)),
        "used-learned": _used("Kronecker, best usage of the learned metric", metrics=("learned",)),
        "used-average": _used("Kronecker, rule average", metrics=("online",), rules=(Online(),)),
        "used-whole": _used("Kronecker of all directions, rule polar, signal", Kronecker(rank=None), **BY_SIGNAL),
        "used-few": _used("Kronecker of 8 directions, rule polar, signal", Kronecker(rank=8), **BY_SIGNAL),
        "used-plain-signal": _used("one number per tensor, rule polar, signal", Diagonal(tying="tensor"), **BY_SIGNAL),
        "used-polar": _used("Kronecker, rule polar", **BY_POLAR),
        "used-plain-polar": _used("one number per tensor, rule polar", Diagonal(tying="tensor"), **BY_POLAR),
        "used-diagonal": _used("diagonal, best usage of the learned metric", Diagonal(), metrics=("learned",)),
        "kronecker": Geometry(COORDINATES, MOMENTA, options={"objective": REGRET}, same_tasks=True),
        "diagonal": _closed("diagonal, regret to a reference", Diagonal()),
        "end": _closed("diagonal, regret to the run's end", Diagonal(), Regret()),
        "prior": _closed("diagonal, regret to the run's end, prior 1e-4", Diagonal(), Regret(prior=1e-4)),
        "column": _closed("diagonal by column", Diagonal(tying="column")),
        "tensor": _closed("diagonal by tensor", Diagonal(tying="tensor")),
        "regret-direct": _by_gradient("regret, Direct", REGRET, Direct()),
        "regret-reverse": _by_gradient("regret, Reverse", REGRET, Reverse()),
        "loss-reverse": _by_gradient("training loss, Reverse", TrainingLoss(), Reverse()),
        "paper-reverse": _by_gradient("paper's bound, Reverse", PaperBound(), Reverse()),
        "paper-preset": preset("paper's preset", rounds=GRADIENT_STEPS),
        "paper-short": preset("paper's preset, a fifth of the outer steps"),
        "tensor-reverse": _by_gradient("by tensor, training loss, Reverse", TrainingLoss(), Reverse(), "tensor"),
        "tensor-forward": _by_gradient("by tensor, training loss, Forward", TrainingLoss(), Forward(), "tensor"),
        "tensor-evolution": _by_gradient("by tensor, training loss, Evolution(2)", TrainingLoss(), Evolution(2), "tensor"),
    },
    SCALES,
    sides=_named,
    own_tasks=True,
    draw=mean_losses,
    sections=standings,
)

FAMILIES_BY_MODEL: dict[str, Callable[[Scale, str], Family]] = {"linear": linear, "mlp": rotated, "lenet": digits}
HELD_OUT_OF_EACH = ("linear 0", "mlp 45", "lenet kmnist")
PRESET_RIVALS = ("sgd", "sgdm", "adam")


def _of_each_model(scale: Scale, held_out: str) -> Family:
    """The family of a model; the linear one has runs twice as long, with a tenth of the images."""
    model, domain = held_out.split()
    if model == "linear":
        scale = replace(scale, steps=2 * scale.steps, images=1000 if scale.images is None else scale.images // 10)
    return FAMILIES_BY_MODEL[model](scale, domain)


PAPER_PRESET = Experiment(
    "ablation",
    _of_each_model,
    {"seven": preset("paper's preset, k = 7"), "theory": preset("paper's preset, k of the theory", FromLipschitz())},
    {
        "smoke": replace(ONE_ANGLE, domains=("linear 0",), images=1000, steps=5, rivals=("sgd", "adam")),
        "cpu": Scale(HELD_OUT_OF_EACH, 10_000, outer_steps=15, tasks_per_step=2, rivals=PRESET_RIVALS, screen=3),
        "paper": Scale(HELD_OUT_OF_EACH, None, outer_steps=300, tasks_per_step=5, rivals=PRESET_RIVALS, protocol="paper"),
    },
    variant="paper-preset",
    sides=_named,
)

EXPERIMENTS = (ABLATION, PAPER_PRESET)

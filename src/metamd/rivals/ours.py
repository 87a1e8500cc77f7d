"""MetaMD as one more contender, so that it goes through the same loop and the same search as its rivals."""

from typing import Any

from metamd.averaging import AveragingName
from metamd.learned import LearnedOptimiser
from metamd.optimiser import MetaMD
from metamd.rivals.base import Named, Range, Rival, Setting
from metamd.rivals.classical import DECAY

COSTS = ("gradient_evaluations", "hessian_vector_products", "seconds")


def learned_rival(
    learned: LearnedOptimiser,
    *,
    name: str = "metamd",
    title: str = "MetaMD",
    exact: bool = True,
    averaging: AveragingName = "constant",
) -> Rival:
    """A learned geometry behind the interface of the rivals; by default with nothing tuned: lr is MetaMD's own default.

    Args:
        learned: the geometry.
        name: in records.
        title: in tables.
        exact: False takes the paper's step.
        averaging: as for `MetaMD`.
    """

    def make(named: Named, setting: Setting) -> MetaMD:
        options: dict[str, Any] = dict(setting)
        return MetaMD(named, learned, **options, exact=exact, averaging=averaging, check_finite=False)

    how = ("" if exact else ", the paper's step") + ("" if averaging == "constant" else f", {averaging}")
    return Rival(
        name,
        title,
        make,
        {"lr": Range(0.1, 10), "weight_decay": DECAY},
        {"weight_decay": 0.0, "momentum": 0.9 if averaging == "schedule-free" else 0.0},
        {"lr": (1.0, 0.3, 0.5, 0.7, 1.5), "weight_decay": (0.001, 0.0001, 0.0005)},
        identity=learned.fingerprint() + how,
        cost={k: v for k, v in learned.header.cost.items() if k in COSTS},
    )

"""Rivals from maintained packages, imported when they are used: pip install 'metamd[rivals]'."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from metamd.rivals.base import Named, Range, Rival, Setting, Stepper
from metamd.rivals.classical import DECAY, arguments


def fetched(module: str, name: str, **fixed: Any) -> Callable[[Named, Setting], Stepper]:
    """The `make` of a rival whose class lives in a package that may not be installed.

    Args:
        module: the package.
        name: of the class.
        fixed: arguments that are not searched.
    """

    def make(named: Named, setting: Setting) -> Stepper:
        try:
            optimiser = getattr(import_module(module), name)
        except ModuleNotFoundError:
            raise ValueError(
                f"{name} comes with the package {module}, which is not installed. Run: pip install 'metamd[rivals]'"
            ) from None
        found: Stepper = optimiser([p for _, p in named], **arguments(setting), **fixed)
        return found

    return make


_KOZISTR, _FACTOR = "pytorch_optimizer", Range(0.1, 10)

_SHAMPOO = {"start_preconditioning_step": 10, "preconditioning_compute_steps": 10, "block_size": 256}
"""The class's own defaults start after 25 steps and renew the roots every 1,000: nothing for runs of 500."""

PACKAGES = [
    Rival(
        "soap",
        "SOAP",
        fetched(_KOZISTR, "SOAP", precondition_frequency=10),
        {"lr": Range(1e-4, 0.1), "weight_decay": DECAY},
        {"lr": 3e-3, "weight_decay": 0.0, "beta1": 0.95, "beta2": 0.95},
    ),
    Rival(
        "shampoo",
        "Shampoo",
        fetched(_KOZISTR, "ScalableShampoo", **_SHAMPOO),
        {"lr": Range(1e-4, 1), "weight_decay": DECAY},
        {"lr": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999},
    ),
    Rival(
        "schedule-free",
        "Schedule-Free AdamW",
        fetched("schedulefree", "AdamWScheduleFree"),
        {"lr": Range(1e-4, 0.1), "weight_decay": DECAY},
        {"lr": 2.5e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999},
        schedules=("constant",),
    ),
    Rival(
        "schedule-free-sgd",
        "Schedule-Free SGD",
        fetched("schedulefree", "SGDScheduleFree"),
        {"lr": Range(1e-2, 30), "weight_decay": DECAY},
        {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.9},
        schedules=("constant",),
    ),
    Rival(
        "prodigy",
        "Prodigy",
        fetched("prodigyopt", "Prodigy"),
        {"lr": _FACTOR, "weight_decay": DECAY},
        {"lr": 1.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999},
    ),
    Rival(
        "dadapt",
        "D-Adaptation",
        fetched(_KOZISTR, "DAdaptAdam"),
        {"lr": _FACTOR, "weight_decay": DECAY},
        {"lr": 1.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999},
    ),
]

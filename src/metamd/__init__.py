"""MetaMD: learn an optimiser for a family of training problems and use it as a `torch.optim.Optimizer`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metamd._version import __version__ as __version__

if TYPE_CHECKING:
    from metamd import comparison as comparison
    from metamd import data as data
    from metamd import learning as learning
    from metamd import rivals as rivals
    from metamd import tasks as tasks
    from metamd.certification.certification import certify
    from metamd.certification.statements import HeldOutCertificate
    from metamd.comparison.compare import compare
    from metamd.comparison.comparison import Comparison
    from metamd.comparison.tuning import tune
    from metamd.files.learned import LearnedOptimiser, load
    from metamd.files.recorded_run import Run
    from metamd.inner import estimators as estimators
    from metamd.inner import objectives as objectives
    from metamd.inner.fleet import fleet
    from metamd.learning.meta import meta_train, paper
    from metamd.learning.recorded import learn, update
    from metamd.learning.recorder import Recorder
    from metamd.learning.reference import learn_start
    from metamd.learning.usage import learn_usage
    from metamd.optimiser.certificate import Certificate, certify_run
    from metamd.optimiser.frameworks import as_optimizer_class
    from metamd.optimiser.guard import OffFamilyWarning
    from metamd.optimiser.optimiser import MetaMD, prepare
    from metamd.potentials import (
        Diagonal,
        Euclidean,
        Kronecker,
        MaxDiagonal,
        NegativeEntropy,
        PNorm,
        Potential,
        bregman,
        mirror_step,
    )
    from metamd.tasks import models as models

_PUBLIC = {
    "metamd.potentials": (
        "Diagonal",
        "Euclidean",
        "Kronecker",
        "MaxDiagonal",
        "NegativeEntropy",
        "PNorm",
        "Potential",
        "bregman",
        "mirror_step",
    ),
    "metamd.files.learned": ("LearnedOptimiser", "load"),
    "metamd.files.recorded_run": ("Run",),
    "metamd.optimiser.certificate": ("Certificate", "certify_run"),
    "metamd.optimiser.frameworks": ("as_optimizer_class",),
    "metamd.optimiser.guard": ("OffFamilyWarning",),
    "metamd.optimiser.optimiser": ("MetaMD", "prepare"),
    "metamd.inner.fleet": ("fleet",),
    "metamd.learning.meta": ("meta_train", "paper"),
    "metamd.learning.recorded": ("learn", "update"),
    "metamd.learning.recorder": ("Recorder",),
    "metamd.learning.reference": ("learn_start",),
    "metamd.learning.usage": ("learn_usage",),
    "metamd.certification.certification": ("certify",),
    "metamd.certification.statements": ("HeldOutCertificate",),
    "metamd.comparison.compare": ("compare",),
    "metamd.comparison.comparison": ("Comparison",),
    "metamd.comparison.tuning": ("tune",),
}
"""The names of `__all__`, by the module that defines them."""

_SUBMODULES = {
    "comparison": "metamd.comparison",
    "data": "metamd.data",
    "estimators": "metamd.inner.estimators",
    "learning": "metamd.learning",
    "models": "metamd.tasks.models",
    "objectives": "metamd.inner.objectives",
    "rivals": "metamd.rivals",
    "tasks": "metamd.tasks",
}
"""The modules of `__all__`, by the name under which `metamd` has them."""

_ELSEWHERE = {
    "metamd.potentials.online": ("Online",),
    "metamd.files.progress": ("showing",),
    "metamd.files.store": ("Journal",),
    "metamd.files.usage": ("Usage",),
    "metamd.certification.statements": ("Stated",),
    "metamd.inner.executor": ("Executor",),
    "metamd.inner.estimators": ("ClosedForm", "Direct", "Evolution", "Forward", "Reverse"),
    "metamd.inner.objectives": ("LogGap", "PaperBound", "Regret", "TrainingLoss"),
    "metamd.learning": (
        "GradientDescent",
        "Method",
        "Normalised",
        "NotConvergedWarning",
        "Refine",
        "Stopping",
        "TrustRegion",
        "Unpublished",
        "learn_from_reference",
        "tuned_reference",
    ),
    "metamd.rivals": ("Contender", "Rival", "learned_rival"),
    "metamd.comparison": ("Bayesian", "Grid", "Measuring", "Protocol", "QuasiRandom", "handicap"),
}
"""Records that other names take, and names that earlier versions listed here. They are documented with their module."""

_HOME = {name: module for table in (_PUBLIC, _ELSEWHERE) for module, names in table.items() for name in names}

__all__ = [
    "Certificate",
    "Comparison",
    "Diagonal",
    "Euclidean",
    "HeldOutCertificate",
    "Kronecker",
    "LearnedOptimiser",
    "MaxDiagonal",
    "MetaMD",
    "NegativeEntropy",
    "OffFamilyWarning",
    "PNorm",
    "Potential",
    "Recorder",
    "Run",
    "as_optimizer_class",
    "bregman",
    "certify",
    "certify_run",
    "compare",
    "comparison",
    "data",
    "estimators",
    "fleet",
    "learn",
    "learn_start",
    "learn_usage",
    "learning",
    "load",
    "meta_train",
    "mirror_step",
    "models",
    "objectives",
    "paper",
    "prepare",
    "rivals",
    "tasks",
    "tune",
    "update",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: a name is fetched when it is used, so that `metamd --help` stays instant.
    if name in _SUBMODULES:
        return import_module(_SUBMODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'metamd' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_HOME, "__version__"])

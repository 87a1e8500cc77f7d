"""MetaMD: learn an optimiser for a family of training problems and use it as a `torch.optim.Optimizer`."""

from importlib import import_module
from typing import TYPE_CHECKING

from metamd._version import __version__

if TYPE_CHECKING:
    from metamd import data as data
    from metamd import rivals as rivals
    from metamd import tasks as tasks
    from metamd.certification.certification import certify
    from metamd.certification.statements import HeldOutCertificate
    from metamd.comparison.compare import compare, handicap
    from metamd.comparison.comparison import Comparison
    from metamd.comparison.search import Bayesian, Grid, QuasiRandom
    from metamd.comparison.training import Measuring
    from metamd.comparison.tuning import tune
    from metamd.files.journal import Journal
    from metamd.files.learned import LearnedOptimiser, load
    from metamd.files.recorded_run import Run
    from metamd.files.usage import Usage
    from metamd.inner.estimators import ClosedForm, Direct, Evolution, Forward, Reverse
    from metamd.inner.objectives import LogGap, PaperBound, Regret, TrainingLoss
    from metamd.learning.meta import Method, NotConvergedWarning, meta_train, paper
    from metamd.learning.recorded import learn
    from metamd.learning.recorder import Recorder
    from metamd.learning.reference import learn_from_reference
    from metamd.learning.rounds.outer import GradientDescent, Refine, Stopping, TrustRegion
    from metamd.learning.usage import learn_start, learn_usage, tuned_reference
    from metamd.optimiser.certificate.record import Certificate
    from metamd.optimiser.guard import OffFamilyWarning
    from metamd.optimiser.optimiser import MetaMD
    from metamd.optimiser.recommended import prepare
    from metamd.potentials import Diagonal, Euclidean, Kronecker, MaxDiagonal, NegativeEntropy, PNorm, Potential, bregman
    from metamd.potentials.online import Online
    from metamd.potentials.step import mirror_step
    from metamd.rivals.base import Contender, Rival
    from metamd.rivals.ours import learned_rival
    from metamd.tasks import models as models

_HOME = {
    "Certificate": "optimiser.certificate.record",
    "Diagonal": "potentials",
    "Euclidean": "potentials",
    "Kronecker": "potentials",
    "LearnedOptimiser": "files.learned",
    "MaxDiagonal": "potentials",
    "NegativeEntropy": "potentials",
    "PNorm": "potentials",
    "Potential": "potentials",
    "bregman": "potentials",
    "MetaMD": "optimiser.optimiser",
    "mirror_step": "potentials.step",
    "OffFamilyWarning": "optimiser.guard",
    "load": "files.learned",
    "GradientDescent": "learning.rounds.outer",
    "TrustRegion": "learning.rounds.outer",
    "Refine": "learning.rounds.outer",
    "Stopping": "learning.rounds.outer",
    "Journal": "files.journal",
    "Method": "learning.meta",
    "NotConvergedWarning": "learning.meta",
    "meta_train": "learning.meta",
    "paper": "learning.meta",
    "PaperBound": "inner.objectives",
    "Regret": "inner.objectives",
    "LogGap": "inner.objectives",
    "TrainingLoss": "inner.objectives",
    "ClosedForm": "inner.estimators",
    "Direct": "inner.estimators",
    "Evolution": "inner.estimators",
    "Forward": "inner.estimators",
    "Reverse": "inner.estimators",
    "Recorder": "learning.recorder",
    "Run": "files.recorded_run",
    "learn": "learning.recorded",
    "Bayesian": "comparison.search",
    "Comparison": "comparison.comparison",
    "Contender": "rivals",
    "Grid": "comparison.search",
    "Measuring": "comparison.training",
    "QuasiRandom": "comparison.search",
    "Rival": "rivals",
    "compare": "comparison.compare",
    "handicap": "comparison.compare",
    "learned_rival": "rivals",
    "tune": "comparison.tuning",
    "Online": "potentials.online",
    "Usage": "files.usage",
    "learn_from_reference": "learning.reference",
    "learn_start": "learning.usage",
    "learn_usage": "learning.usage",
    "tuned_reference": "learning.usage",
    "prepare": "optimiser.recommended",
    "HeldOutCertificate": "certification.statements",
    "certify": "certification.certification",
}
_SUBMODULES = {"data": "data", "models": "tasks.models", "rivals": "rivals", "tasks": "tasks"}

__all__ = [
    "Bayesian",
    "Certificate",
    "ClosedForm",
    "Comparison",
    "Contender",
    "Diagonal",
    "Direct",
    "Euclidean",
    "Evolution",
    "Forward",
    "GradientDescent",
    "Grid",
    "HeldOutCertificate",
    "Journal",
    "Kronecker",
    "LearnedOptimiser",
    "LogGap",
    "MaxDiagonal",
    "Measuring",
    "MetaMD",
    "Method",
    "NegativeEntropy",
    "NotConvergedWarning",
    "OffFamilyWarning",
    "Online",
    "PNorm",
    "PaperBound",
    "Potential",
    "QuasiRandom",
    "Recorder",
    "Refine",
    "Regret",
    "Reverse",
    "Rival",
    "Run",
    "Stopping",
    "TrainingLoss",
    "TrustRegion",
    "Usage",
    "__version__",
    "bregman",
    "certify",
    "compare",
    "handicap",
    "learn",
    "learn_from_reference",
    "learn_start",
    "learn_usage",
    "learned_rival",
    "load",
    "meta_train",
    "mirror_step",
    "paper",
    "prepare",
    "tune",
    "tuned_reference",
]


def __getattr__(name: str) -> object:
    # torch takes seconds to import: a name is fetched when it is used, so that `metamd --help` stays instant.
    if name in _SUBMODULES:
        return import_module(f"metamd.{_SUBMODULES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module 'metamd' has no attribute {name!r}")
    return getattr(import_module(f"metamd.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])

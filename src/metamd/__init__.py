"""MetaMD: learn an optimiser for a family of training problems and use it as a `torch.optim.Optimizer`."""

from importlib import import_module
from typing import TYPE_CHECKING

from metamd._version import __version__

if TYPE_CHECKING:
    from metamd import data as data
    from metamd import models as models
    from metamd import rivals as rivals
    from metamd import tasks as tasks
    from metamd.certificate import Certificate
    from metamd.certification import certify
    from metamd.choosing import learn_start, learn_usage, tuned_reference
    from metamd.comparing import compare, handicap
    from metamd.comparison import Comparison
    from metamd.following import learn_from_reference
    from metamd.gap import LogGap
    from metamd.guard import OffFamilyWarning
    from metamd.hypergrad import ClosedForm, Direct, Evolution, Forward, ForwardDiagonal, ForwardRandom, Reverse
    from metamd.journal import Journal
    from metamd.learned import LearnedOptimiser, load
    from metamd.meta import Method, NotConvergedWarning, meta_train, paper
    from metamd.mirror import mirror_step
    from metamd.objectives import PaperBound, Regret, TrainingLoss
    from metamd.online import Online
    from metamd.optimiser import MetaMD
    from metamd.ordinary import learn
    from metamd.outer import GradientDescent, TrustRegion
    from metamd.outer_steps import Refine, Stopping
    from metamd.potentials import Diagonal, Euclidean, Kronecker, MaxDiagonal, NegativeEntropy, PNorm, Potential, bregman
    from metamd.ready import prepare
    from metamd.recorder import Recorder
    from metamd.rivals.base import Contender, Rival
    from metamd.rivals.ours import learned_rival
    from metamd.runs import Run
    from metamd.search import Bayesian, Grid, QuasiRandom
    from metamd.statements import HeldOutCertificate
    from metamd.training import Measuring
    from metamd.tuning import tune
    from metamd.usage import Usage

_HOME = {
    "Certificate": "certificate",
    "Diagonal": "potentials",
    "Euclidean": "potentials",
    "Kronecker": "potentials",
    "LearnedOptimiser": "learned",
    "MaxDiagonal": "potentials",
    "NegativeEntropy": "potentials",
    "PNorm": "potentials",
    "Potential": "potentials",
    "bregman": "potentials",
    "MetaMD": "optimiser",
    "mirror_step": "mirror",
    "OffFamilyWarning": "guard",
    "load": "learned",
    "GradientDescent": "outer",
    "TrustRegion": "outer",
    "Refine": "outer_steps",
    "Stopping": "outer_steps",
    "Journal": "journal",
    "Method": "meta",
    "NotConvergedWarning": "meta",
    "meta_train": "meta",
    "paper": "meta",
    "PaperBound": "objectives",
    "Regret": "objectives",
    "LogGap": "gap",
    "TrainingLoss": "objectives",
    "ClosedForm": "hypergrad",
    "Direct": "hypergrad",
    "Evolution": "hypergrad",
    "Forward": "hypergrad",
    "ForwardDiagonal": "hypergrad",
    "ForwardRandom": "hypergrad",
    "Reverse": "hypergrad",
    "Recorder": "recorder",
    "Run": "runs",
    "learn": "ordinary",
    "Bayesian": "search",
    "Comparison": "comparison",
    "Contender": "rivals",
    "Grid": "search",
    "Measuring": "training",
    "QuasiRandom": "search",
    "Rival": "rivals",
    "compare": "comparing",
    "handicap": "comparing",
    "learned_rival": "rivals",
    "tune": "tuning",
    "Online": "online",
    "Usage": "usage",
    "learn_from_reference": "following",
    "learn_start": "choosing",
    "learn_usage": "choosing",
    "tuned_reference": "choosing",
    "prepare": "ready",
    "HeldOutCertificate": "statements",
    "certify": "certification",
}
_SUBMODULES = ("data", "models", "rivals", "tasks")

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
    "ForwardDiagonal",
    "ForwardRandom",
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
        return import_module(f"metamd.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'metamd' has no attribute {name!r}")
    return getattr(import_module(f"metamd.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])

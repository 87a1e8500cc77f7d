"""MetaMD: learn an optimiser for a family of training problems and use it as a `torch.optim.Optimizer`."""

from importlib import import_module
from typing import TYPE_CHECKING

from metamd._version import __version__

if TYPE_CHECKING:
    from metamd import data as data
    from metamd import models as models
    from metamd import rivals as rivals
    from metamd import tasks as tasks
    from metamd.comparing import compare, handicap
    from metamd.comparison import Comparison
    from metamd.guard import OffFamilyWarning
    from metamd.hypergrad import ClosedForm, Direct, Evolution, Forward, ForwardDiagonal, ForwardRandom, Reverse
    from metamd.journal import Journal
    from metamd.learned import LearnedOptimiser, load
    from metamd.meta import Method, NotConvergedWarning, meta_train, paper
    from metamd.objectives import PaperBound, Regret, TrainingLoss
    from metamd.optimiser import MetaMD, mirror_step
    from metamd.ordinary import learn
    from metamd.outer import GradientDescent, TrustRegion
    from metamd.outer_steps import Refine, Stopping
    from metamd.potentials import Diagonal, Euclidean, Kronecker, MaxDiagonal, NegativeEntropy, PNorm, Potential, bregman
    from metamd.recorder import Recorder
    from metamd.rivals.base import Contender, Rival
    from metamd.rivals.ours import learned_rival
    from metamd.runs import Run
    from metamd.search import Bayesian, Grid, QuasiRandom
    from metamd.training import Measuring
    from metamd.tuning import tune

_HOME = {
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
    "mirror_step": "optimiser",
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
}
_SUBMODULES = ("data", "models", "rivals", "tasks")

__all__ = [
    "Bayesian",
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
    "Journal",
    "Kronecker",
    "LearnedOptimiser",
    "MaxDiagonal",
    "Measuring",
    "MetaMD",
    "Method",
    "NegativeEntropy",
    "NotConvergedWarning",
    "OffFamilyWarning",
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
    "__version__",
    "bregman",
    "compare",
    "handicap",
    "learn",
    "learned_rival",
    "load",
    "meta_train",
    "mirror_step",
    "paper",
    "tune",
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

"""Estimators of the gradient of a meta-objective through a run: one interface, one record."""

from metamd.hypergrad.base import Estimator, Hypergradient
from metamd.hypergrad.closed_form import ClosedForm, Moments
from metamd.hypergrad.direct import Direct
from metamd.hypergrad.evolution import Evolution
from metamd.hypergrad.forward import Forward
from metamd.hypergrad.forward_diagonal import ForwardDiagonal
from metamd.hypergrad.forward_random import ForwardRandom
from metamd.hypergrad.reverse import Reverse

__all__ = [
    "ClosedForm",
    "Direct",
    "Estimator",
    "Evolution",
    "Forward",
    "ForwardDiagonal",
    "ForwardRandom",
    "Hypergradient",
    "Moments",
    "Reverse",
]

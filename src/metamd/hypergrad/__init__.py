"""Estimators of the gradient of a meta-objective through a run: one interface, one record."""

from metamd.hypergrad.base import Estimator, Hypergradient
from metamd.hypergrad.direct import Direct
from metamd.hypergrad.forward import Forward
from metamd.hypergrad.forward_random import ForwardRandom
from metamd.hypergrad.reverse import Reverse

__all__ = ["Direct", "Estimator", "Forward", "ForwardRandom", "Hypergradient", "Reverse"]

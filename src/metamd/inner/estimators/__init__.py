"""Estimators of the gradient of a meta-objective through a run: one interface, one record."""

from metamd.inner.estimators.base import Estimator, Hypergradient
from metamd.inner.estimators.closed_form import ClosedForm
from metamd.inner.estimators.direct import Direct
from metamd.inner.estimators.evolution import Evolution
from metamd.inner.estimators.forward import Forward
from metamd.inner.estimators.reverse import Reverse

__all__ = [
    "ClosedForm",
    "Direct",
    "Estimator",
    "Evolution",
    "Forward",
    "Hypergradient",
    "Reverse",
]

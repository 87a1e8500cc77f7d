"""Estimators of the gradient of a meta-objective through a run: one interface, one record.

| estimator | exact for | gradients and Hessian products | memory |
|---|---|---|---|
| `Direct` | the part of dE/dD that holds the run fixed | T gradients | flat in T |
| `ClosedForm` | the minimiser of `Regret` with the run held fixed, one piece | T gradients | flat in T |
| `Forward` | dE/dD between switches | T gradients, H T products | H times the model, flat in T |
| `Reverse` | dE/dD between switches | about 2T gradients, T products | sqrt(T) times the model |
| `Evolution` | dE/dD smoothed over a radius, in the mean | (2 pairs + 1) T gradients | flat in T |

T is the number of steps of a run, H the number of metrics and offsets.
"""

from metamd.inner.estimators.base import ClosedForm, Direct, Estimator, Evolution, Hypergradient
from metamd.inner.estimators.forward import Forward
from metamd.inner.estimators.reverse import Reverse

__all__ = ["ClosedForm", "Direct", "Estimator", "Evolution", "Forward", "Hypergradient", "Reverse"]

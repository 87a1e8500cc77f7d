"""The same tasks for everybody: training, tuning, statistics, figures, pages; and the choices of `compare` and `tune`."""

from metamd.comparison.compare import handicap
from metamd.comparison.search import Bayesian, Grid, QuasiRandom
from metamd.comparison.training import Measuring

__all__ = ["Bayesian", "Grid", "Measuring", "QuasiRandom", "handicap"]

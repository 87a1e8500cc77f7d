"""The same tasks for everybody: training, tuning, statistics, figures, pages; and the choices of `compare` and `tune`."""

from metamd.comparison.entrants import Protocol, handicap
from metamd.comparison.training import Measuring
from metamd.comparison.tuning import Bayesian, Grid, QuasiRandom

__all__ = ["Bayesian", "Grid", "Measuring", "Protocol", "QuasiRandom", "handicap"]

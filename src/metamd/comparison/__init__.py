"""The same tasks for everybody: training, tuning, statistics, figures, pages; and the choices of `compare` and `tune`."""

from metamd.comparison.entrants import Protocol, handicap
from metamd.comparison.once import Chosen, Once, choose_once
from metamd.comparison.training import Measuring
from metamd.comparison.tuning import Bayesian, Grid, QuasiRandom

__all__ = ["Bayesian", "Chosen", "Grid", "Measuring", "Once", "Protocol", "QuasiRandom", "choose_once", "handicap"]

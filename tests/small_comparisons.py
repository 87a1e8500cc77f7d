"""How tests compare on problems without data: nothing is evaluated at the end."""

from functools import partial

from metamd.comparison.entrants import Protocol
from metamd.comparison.training import Measuring

BARE = Measuring(splits=())
bare = partial(Protocol, measuring=BARE)

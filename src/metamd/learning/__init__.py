"""From runs to a learned-optimiser file: `meta_train` and `learn`, and the choices that are passed to them."""

from metamd.learning.meta import learn_network
from metamd.learning.outer import GradientDescent, Method, Normalised, Refine, Stopping, TrustRegion, Unpublished
from metamd.learning.reference import learn_from_reference, tuned_reference
from metamd.learning.rounds import NotConvergedWarning
from metamd.learning.usage import Choices

__all__ = [
    "Choices",
    "GradientDescent",
    "Method",
    "Normalised",
    "NotConvergedWarning",
    "Refine",
    "Stopping",
    "TrustRegion",
    "Unpublished",
    "learn_from_reference",
    "learn_network",
    "tuned_reference",
]

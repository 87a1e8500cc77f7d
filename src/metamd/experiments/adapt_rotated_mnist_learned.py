"""`metamd reproduce adapt-rotated-mnist-learned`: as `adapt-rotated-mnist`, with everybody at the learned start."""

from metamd.experiments.adapt_rotated_mnist import SCALES, adaptation, markdown

__all__ = ["EXPERIMENT", "SCALES", "markdown"]

EXPERIMENT = adaptation("adapt-rotated-mnist-learned", SCALES, learned_start=True)

"""`metamd reproduce adapt-rotated-mnist-learned`: as `adapt-rotated-mnist`, with everybody at the learned start."""

from metamd.experiments.adapt_rotated_mnist import SCALES, adaptation, sections

__all__ = ["EXPERIMENT", "SCALES", "sections"]

EXPERIMENT = adaptation("adapt-rotated-mnist-learned", SCALES, learned_start=True)

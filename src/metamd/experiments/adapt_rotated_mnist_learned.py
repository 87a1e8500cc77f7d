"""`metamd reproduce adapt-rotated-mnist-learned`: as `adapt-rotated-mnist`, with everybody at the learned start.

At the scale `cpu` four of the ten angles are held out in turn.
"""

from dataclasses import replace

from metamd.experiments.adapt_rotated_mnist import SCALES as GIVEN
from metamd.experiments.adapt_rotated_mnist import adaptation, markdown

__all__ = ["EXPERIMENT", "SCALES", "markdown"]

SCALES = GIVEN | {"cpu": replace(GIVEN["cpu"], domains=("0", "30", "60", "90"))}

EXPERIMENT = adaptation("adapt-rotated-mnist-learned", SCALES, learned_start=True)

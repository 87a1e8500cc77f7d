"""`metamd reproduce adapt-rotated-mnist-learned`: as `adapt-rotated-mnist`, with everybody at the learned start."""

from pathlib import Path

from metamd.experiments.adapt_rotated_mnist import SCALES, adaptation, markdown
from metamd.records import Result

__all__ = ["EXPERIMENT", "SCALES", "markdown", "run"]

EXPERIMENT = adaptation("adapt-rotated-mnist-learned", learned_start=True)


def run(scale: str, folder: Path, seed: int, workers: int = 1, ray: str | None = None) -> Result:
    """Fill the table; what is in the folder already is kept.

    Args:
        scale: a name in `SCALES`.
        folder: for records and learned files.
        seed: of everything random.
        workers: processes.
        ray: address of a Ray cluster.
    """
    return EXPERIMENT.run(scale, folder, seed, workers, ray)

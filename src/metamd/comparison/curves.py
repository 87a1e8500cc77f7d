"""Learning curves of a comparison: one panel for all domains together, and one for each."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metamd.comparison import figures
from metamd.comparison.comparison import Comparison
from metamd.comparison.entrants import UNTUNED, unscheduled
from metamd.comparison.loss_curves import panels


def learning_curves(comparison: Comparison, ours: Sequence[str], folder: Path) -> None:
    """Draw `curves.png`: the training loss over the steps, of ours and of tuned rivals with the better of their schedules.

    In the panel over all domains the band is the 95 % bootstrap interval of the mean over all runs; in that of a domain it
    reaches from the smallest to the largest of its runs. A curve ends where one of its runs was given up.

    Args:
        comparison: what is shown.
        ours: the labels of ours that are shown, the first as a line and the others dashed.
        folder: where the image goes.
    """
    shown = [*ours, *best_schedules(comparison)]
    found = panels(comparison, shown, dashed=ours[1:])
    figures.curves(found, folder / "curves.png", xlabel="step", ylabel="training loss")


def mean_losses(comparison: Comparison, ours: Sequence[str], folder: Path) -> None:
    """Draw `losses.png`: the mean training loss of every run, for many optimisers whose curves would hide each other.

    Args:
        comparison: what is shown.
        ours: the labels of ours that are shown, with full dots.
        folder: where the image goes.
    """
    strips = []
    for label in [*ours, *best_schedules(comparison)]:
        values = comparison.values(label, "mean_loss").tolist()
        strips.append(figures.Strip(label, [x if np.isfinite(x) else None for x in values], label in ours))
    groups = {"a dot per run": strips}
    figures.strips(groups, folder / "losses.png", xlabel="mean training loss", missed="diverged")


def best_schedules(comparison: Comparison) -> list[str]:
    """The label of every tuned rival, under the schedule with which its mean loss is smaller.

    Args:
        comparison: of rivals with one schedule or several.
    """
    found: dict[str, str] = {}
    for label in _tuned(comparison):
        rival = unscheduled(label)
        if rival not in found or _mean_loss(comparison, label) < _mean_loss(comparison, found[rival]):
            found[rival] = label
    return list(found.values())


def _tuned(comparison: Comparison) -> list[str]:
    return [x for x in comparison.labels if not x.endswith(UNTUNED) and not _is_learned(comparison, x)]


def _is_learned(comparison: Comparison, label: str) -> bool:
    return str(comparison.folds[0].entrants[label][0].contender["rival"]).startswith("metamd")


def _mean_loss(comparison: Comparison, label: str) -> float:
    return float(comparison.values(label, "mean_loss").mean())

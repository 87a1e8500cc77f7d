"""The training losses of a comparison over the steps, as curves with bands: for all domains together, and for each."""

from collections.abc import Collection, Sequence

import numpy as np

from metamd.comparison.comparison import Comparison
from metamd.comparison.figures import Curve, banded

ALL = "all domains"


def panels(
    comparison: Comparison, labels: Sequence[str], *, dashed: Collection[str] = (), intervals: bool = False
) -> dict[str, list[Curve]]:
    """The curves of each panel by its title, as `metamd.figures.curves` draws them.

    With several domains that were watched at the same steps the first panel is of all, and its band the 95 % bootstrap
    interval of the mean over all runs, domains drawn first. A curve ends where one of its runs was given up.

    Args:
        comparison: what is shown.
        labels: of the optimisers.
        dashed: those whose lines are dashed.
        intervals: whether the band of a domain is the same interval of the mean over its runs; if not, it reaches from the
            smallest of them to the largest.
    """
    each = {label: comparison.curve(label) for label in labels}
    found: dict[str, list[Curve]] = {}
    if has_all(comparison, labels):
        found[ALL] = []
        for label in labels:
            places = next(iter(each[label].values()))[0]
            losses = np.concatenate([losses for _, losses in each[label].values()])
            found[ALL] += banded(label, places, losses, comparison.groups, dashed=label in dashed)
    for fold in comparison.folds:
        found[fold.group] = []
        for label in labels:
            places, losses = each[label][fold.group]
            groups = [0] * len(losses) if intervals else None
            found[fold.group] += banded(label, places, losses, groups, dashed=label in dashed)
    return found


def has_all(comparison: Comparison, labels: Sequence[str]) -> bool:
    """Whether there is a panel of all domains: there are several, and they were watched at the same steps.

    Args:
        comparison: what is shown.
        labels: of the optimisers.
    """
    places = {places for label in labels for places, _ in comparison.curve(label).values()}
    return len(comparison.folds) > 1 and len(places) == 1

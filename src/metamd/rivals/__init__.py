"""Optimisers to compare with, behind one interface."""

from metamd.rivals.base import SCHEDULES, Contender, Range, Rival, Schedule, Setting, Stepper
from metamd.rivals.classical import CLASSICAL
from metamd.rivals.ours import learned_rival
from metamd.rivals.packages import PACKAGES

RIVALS: dict[str, Rival] = {r.name: r for r in [*CLASSICAL, *PACKAGES]}
"""The hand-designed ones by name."""

__all__ = ["RIVALS", "SCHEDULES", "Contender", "Range", "Rival", "Schedule", "Setting", "Stepper", "learned_rival", "rival"]


def rival(name: str) -> Rival:
    """A hand-designed rival by its name.

    Args:
        name: one of `RIVALS`.

    Example:
        >>> rival("adam").with_setting("linear", lr=0.003).describe()["setting"]["lr"]
        0.003
    """
    if name not in RIVALS:
        raise ValueError(f"there is no rival {name!r}. There are {', '.join(RIVALS)}.")
    return RIVALS[name]

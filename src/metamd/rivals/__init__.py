"""Optimisers to compare with, behind one interface."""

from metamd.files.usage import SCHEDULES, Schedule
from metamd.inner.run import Stepper
from metamd.rivals.base import Contender, Range, Rival, Setting
from metamd.rivals.learned import Learner
from metamd.rivals.learned.aruba import ARUBA, ARUBA_PLUS
from metamd.rivals.learned.lstm import LSTM
from metamd.rivals.learned.meta_sgd import META_SGD
from metamd.rivals.learned.schedule import SCHEDULE
from metamd.rivals.ours import learned_rival
from metamd.rivals.table import RIVALS

LEARNERS: dict[str, Learner] = {r.name: r for r in (META_SGD, ARUBA, ARUBA_PLUS, SCHEDULE, LSTM)}
"""Those that are learned on the family first, by name: `LEARNERS["aruba"].rival(family)`."""

__all__ = [
    "LEARNERS",
    "RIVALS",
    "SCHEDULES",
    "Contender",
    "Learner",
    "Range",
    "Rival",
    "Schedule",
    "Setting",
    "Stepper",
    "known_rival",
    "learned_rival",
    "rival",
]


def rival(name: str) -> Rival:
    """A rival that needs no learning, by its name.

    Args:
        name: one of `RIVALS`.

    Example:
        >>> rival("adam").with_setting("linear", lr=0.003).describe()["setting"]["lr"]
        0.003
    """
    if name not in RIVALS:
        raise ValueError(f"there is no rival {name!r}. There are {', '.join((*RIVALS, *LEARNERS))}.")
    return RIVALS[name]


def known_rival(name: str) -> Rival | Learner:
    """One of `RIVALS` or `LEARNERS` by its name."""
    return LEARNERS[name] if name in LEARNERS else rival(name)

"""The names in the help of commands, from what is declared: importing this takes seconds, as torch comes with it."""

import inspect
from collections.abc import Iterable

from metamd.cli.options import Compare, Reproduce, TaskOptions, Train
from metamd.experiments import EXPERIMENTS
from metamd.rivals import LEARNERS, RIVALS
from metamd.tasks import FAMILIES


def fill() -> None:
    """Put the names into the docstrings that help is made of; a second time changes nothing."""
    names = {"families": listed(FAMILIES), "wide": listed(name for name in FAMILIES if "width" in options_of(name))}
    names |= {"rivals": rivals(), "experiments": listed(dict.fromkeys(name for name, _ in EXPERIMENTS))}
    names |= {"variants": variants()}
    for command in (TaskOptions, Train, Compare, Reproduce):
        command.__doc__ = (command.__doc__ or "").format(**names)


def options_of(family: str) -> Iterable[str]:
    """The arguments of a family that has a name."""
    return inspect.signature(FAMILIES[family]).parameters


def rivals() -> str:
    """Those that need no learning, with a tail average and without, and those that are learned."""
    averaged = [name for name in RIVALS if name.endswith("-averaged")]
    others = [name for name in RIVALS if name not in averaged]
    return f"{listed(others)}; judged by a tail average: {listed(averaged)}; learned first: {listed(LEARNERS)}"


def variants() -> str:
    """Those of each experiment that has some."""
    each = {name: [v for known, v in EXPERIMENTS if known == name and v] for name, _ in EXPERIMENTS}
    return "; ".join(f"of {name}: {listed(found)}" for name, found in each.items() if found)


def listed(names: Iterable[str]) -> str:
    """Names as a list in a sentence.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b or c'
    """
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last

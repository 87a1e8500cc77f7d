"""`prepare`: a learned optimiser as its file recommends, with the schedule outside."""

from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from metamd.files.learned import LearnedOptimiser
from metamd.optimiser.binding import opened
from metamd.optimiser.optimiser import MetaMD


def takes_polar_steps(learned: LearnedOptimiser) -> bool:
    """Whether polar steps are what the file recommends."""
    return learned.usage.metric == "online" and learned.online is not None and learned.online.rule == "polar"


def refreshed(learned: LearnedOptimiser, refresh: int) -> LearnedOptimiser:
    """The same learned optimiser, whose polar steps find their directions every so many steps."""
    online = learned.online
    if online is None or not takes_polar_steps(learned):
        raise ValueError(
            f"refresh says how often the directions of polar steps are found, but this file recommends the {learned.usage}. "
            "Leave refresh out."
        )
    if type(refresh) is not int or refresh < 1:
        raise ValueError(f"refresh must be a number of steps, 1 or more; got {refresh!r}. Pass refresh=4, say.")
    return replace(learned, header=replace(learned.header, online=replace(online, refresh=refresh).to_dict()))


def prepare(
    params: Iterable[Any],
    learned: LearnedOptimiser | str | PathLike[str],
    *,
    steps: int,
    refresh: int | None = None,
    **options: Any,
) -> tuple[MetaMD, LRScheduler]:
    """The pair (optimiser, scheduler) that takes the steps of `MetaMD(params, learned, steps=steps)`.

    The schedule is outside: call `scheduler.step()` after every `optimiser.step()`.

    Where the file recommends a tail average, call `optimiser.eval()` before the model is used and `optimiser.train()` before
    going on: the parameters are the average in between. Nothing is lost where that is forgotten but the average.

    Args:
        params: `model.named_parameters()`, as for `MetaMD`.
        learned: what `load` gives, or what it takes: a path, or the name of a shipped one. One without a `usage` is used
            plainly.
        steps: how many times `schedule.step()` will be called: the length of the run.
        refresh: how often a file that recommends polar steps finds their directions: 4 makes a step of a small network half
            as long, and takes a few more of them. What the file says if not given, which is every step.
        options: of `MetaMD`; they win over recommended ones.

    Example:
        >>> import metamd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> learned = metamd.LearnedOptimiser.from_potential(metamd.Diagonal().bind(dict(model.named_parameters())))
        >>> opt, schedule = prepare(model.named_parameters(), learned, steps=100)
    """
    found = opened(learned)
    if not isinstance(found, LearnedOptimiser):
        raise TypeError(f"learned must be a LearnedOptimiser or a path, got {type(found).__name__}. Pass metamd.load(path).")
    found = found if refresh is None else refreshed(found, refresh)
    optimiser = MetaMD(params, found, steps=steps, **options)
    return optimiser, optimiser.scheduler()

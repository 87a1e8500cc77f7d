"""A learned optimiser as it is best used on its family, in one line."""

import math
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from metamd.files.learned import LearnedOptimiser, load
from metamd.files.usage import Usage
from metamd.optimiser.optimiser import MetaMD


def takes_polar_steps(learned: LearnedOptimiser) -> bool:
    """Whether polar steps are what the file recommends.

    Args:
        learned: the file.
    """
    return learned.usage.metric == "online" and learned.online is not None and learned.online.rule == "polar"


def refreshed(learned: LearnedOptimiser, refresh: int) -> LearnedOptimiser:
    """The same learned optimiser, whose polar steps find their directions every so many steps.

    Args:
        learned: one with a usage by polar steps.
        refresh: 1 finds them in every step.
    """
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
    """The optimiser with the momentum, the metric and the schedule that the file says are best, ready for a run.

    Where the file recommends a tail average, call `optimiser.eval()` before the model is used and `optimiser.train()` before
    going on: the parameters are the average in between. Nothing is lost where that is forgotten but the average.

    Args:
        params: `model.named_parameters()`, as for `MetaMD`.
        learned: what `load` gives, or what it takes: a path, or the name of a shipped one. One without a `usage` is used
            plainly.
        steps: how many times `schedule.step()` will be called: the length of the run.
        refresh: how often a file that recommends polar steps finds their directions: 4 makes a step of a small network half
            as long, and takes a few more of them. What the file says if not given, which is every step.
        options: of `MetaMD`, where you want others. With another momentum, or another average, lr still is the one at which
            the learned steps are taken; so it is for groups with a momentum of their own.

    Example:
        >>> import metamd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> learned = metamd.LearnedOptimiser.from_potential(metamd.Diagonal().bind(dict(model.named_parameters())))
        >>> opt, schedule = prepare(model.named_parameters(), learned, steps=100)
    """
    if not isinstance(steps, int | float) or not 1 <= steps < math.inf:
        raise ValueError(f"steps must be at least 1, got {steps}. It is the number of training steps of the run.")
    if isinstance(learned, str | PathLike):
        learned = load(learned)
    if not isinstance(learned, LearnedOptimiser):
        raise TypeError(
            f"learned must be a LearnedOptimiser or a path, got {type(learned).__name__}. Pass metamd.load(path)."
        )
    learned = learned if refresh is None else refreshed(learned, refresh)
    usage = learned.usage
    params = list(params)
    own = options.get("momentum") or any(isinstance(p, dict) and p.get("momentum") for p in params)
    average = "constant" if own else usage.averaging  # a tail average has no momentum
    chosen: dict[str, Any] = {"momentum": usage.momentum, "metric": usage.metric, "averaging": average, **options}

    def rate(momentum: float) -> float:
        return Usage(momentum=momentum, factor=usage.factor).lr if chosen["averaging"] == "constant" else usage.factor

    if "lr" not in options:
        chosen["lr"] = rate(chosen["momentum"])
        params = [{"lr": rate(p["momentum"]), **p} if isinstance(p, dict) and "momentum" in p else p for p in params]
    optimiser = MetaMD(params, learned, **chosen)
    return optimiser, LambdaLR(optimiser, lambda t: usage.share(min(t, steps - 1), steps))

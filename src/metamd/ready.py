"""A learned optimiser as it is best used on its family, in one line."""

from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from metamd.learned import LearnedOptimiser, load
from metamd.optimiser import MetaMD


def prepare(
    params: Iterable[Any], learned: LearnedOptimiser | str | PathLike[str], *, steps: int, **options: Any
) -> tuple[MetaMD, LRScheduler]:
    """The optimiser with the momentum, the metric and the schedule that the file says are best, ready for a run.

    Args:
        params: `model.named_parameters()`, as for `MetaMD`.
        learned: what `load` gives, or what it takes: a path, or the name of a shipped one. One without a `usage` is used
            plainly.
        steps: how many times `schedule.step()` will be called: the length of the run.
        options: of `MetaMD`, where you want others. With another momentum, or another average, lr still is the one at which
            the learned steps are taken; so it is for groups with a momentum of their own.

    Example:
        >>> import metamd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> learned = metamd.LearnedOptimiser.from_potential(metamd.Diagonal().bind(dict(model.named_parameters())))
        >>> opt, schedule = prepare(model.named_parameters(), learned, steps=100)
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}. It is the number of training steps of the run.")
    if isinstance(learned, str | PathLike):
        learned = load(learned)
    if not isinstance(learned, LearnedOptimiser):
        raise TypeError(
            f"learned must be a LearnedOptimiser or a path, got {type(learned).__name__}. Pass metamd.load(path)."
        )
    usage = learned.usage
    chosen: dict[str, Any] = {"momentum": usage.momentum, "metric": usage.metric, **options}

    def rate(momentum: float) -> float:
        return replace(usage, momentum=momentum).lr if options.get("averaging", "constant") == "constant" else usage.factor

    if "lr" not in options:
        chosen["lr"] = rate(chosen["momentum"])
        params = [{"lr": rate(p["momentum"]), **p} if isinstance(p, dict) and "momentum" in p else p for p in params]
    optimiser = MetaMD(params, learned, **chosen)
    return optimiser, LambdaLR(optimiser, lambda t: usage.share(min(t, steps - 1), steps))

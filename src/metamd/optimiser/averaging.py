"""Averages x of the mirror-descent iterates z: momentum, and the tail average.

Momentum keeps the guarantee: gradients are taken at x, an average of the iterates with constant weights,

    z_{t+1} = argmin <g(x_t), z> + B(z||z_t)/eta,    x_{t+1} = m x_t + (1 - m) z_{t+1},    x_1 = z_1.

With one quadratic piece this is heavy-ball momentum. Under momentum lr has torch's meaning, the rate of the first step of
x, so that eta = lr/(1 - m). See docs/optimiser.md.

A tail average takes part in nothing: gradients are taken at z, and the model is judged by x with the weight
c_t = (k + 1)/(t + k) on the newest iterate, the average of the iterates with weights about t^k [Shamir2013]. In a certified
run x leaves out the newest iterate: no gradient was taken there yet, and nothing can be said of the loss there.
"""

from collections.abc import Iterable
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from metamd.files.usage import Average
from metamd.potentials.sharding import local

TAIL = 9
"""k of a tail average: the last 7 % of the steps have half of the weight."""


def require_number(name: str, value: Any) -> None:
    """Refuse an option that is no number."""
    if not isinstance(value, Real | Tensor):
        raise TypeError(f"{name} must be a number, got {value!r}. Pass {name}=0.0 for none.")


def check_averaging(averaging: str, momentum: float) -> None:
    """Refuse what no average can be made of."""
    if averaging not in get_args(Average):
        raise ValueError(
            f"averaging must be one of {', '.join(get_args(Average))}; got {averaging!r}. Earlier versions also had "
            '"anytime" and "schedule-free".'
        )
    require_number("momentum", momentum)
    if not 0 <= momentum < 1:
        raise ValueError(
            f"Invalid momentum value: it must be at least 0 and below 1, got {momentum}. Pass momentum=0.0 for none."
        )
    if averaging == "tail" and momentum != 0:
        raise ValueError(
            f'averaging="tail" has no momentum: the weights of its average are t^{TAIL}. Got momentum={momentum}; '
            "pass momentum=0.0."
        )


def tail_share(step: int) -> float:
    """c_t = (k + 1)/(t + k) of a tail average, the weight of the newest iterate; t counts from 1.

    Example:
        >>> tail_share(1), tail_share(11)
        (1.0, 0.5)
    """
    return (TAIL + 1) / (step + TAIL)


def follow(params: Iterable[tuple[Tensor, dict[str, Any]]], step: int, *, ahead: bool = False) -> None:
    """After step t of the run, the tail averages of parameters move towards them; they begin there, in float32 at least.

    A certified run does so `ahead` of step t + 1. Its average then ends at the newest point that has had a gradient.
    """
    moving: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for param, store in params:
        if "mean" not in store:
            wide = torch.promote_types(param.dtype, torch.float32)
            store["mean"], store["since"] = param.detach().to(wide, copy=True), step - (not ahead)
            continue
        if store["mean"].device != param.device:
            store["mean"] = store["mean"].to(param.device)
        means, points = moving.setdefault(store["since"], ([], []))
        means.append(local(store["mean"]))
        points.append(local(param) if param.dtype == means[-1].dtype else local(param).to(means[-1].dtype))
    for since, (means, points) in moving.items():
        torch._foreach_lerp_(means, points, tail_share(step - since))


def last_share(store: dict[str, Any], steps: int) -> float:
    """The weight that a tail average which ends at the newest gradient has given to the point of that gradient."""
    return tail_share(steps - store["since"]) if steps > store["since"] else 1.0


def to_average(param: Tensor, store: dict[str, Any]) -> None:
    """Put the tail average of a parameter in its place, and keep the iterate."""
    store["z"] = param.detach().clone()
    local(param).copy_(local(store["mean"]))


def to_iterate(param: Tensor, store: dict[str, Any]) -> None:
    """From a tail average back to its iterate; where somebody has put other values, training goes on from those."""
    if "z" not in store:
        raise RuntimeError(
            "this state was taken in eval mode and has lost its iterates: torch.distributed.checkpoint does not bring them "
            "to an optimiser in train mode. Call opt.train() before such a checkpoint is taken."
        )
    z, mean = local(store.pop("z")), local(store["mean"])
    if torch.equal(local(param), mean.to(param.dtype)):
        local(param).copy_(z)
    else:
        del store["mean"]

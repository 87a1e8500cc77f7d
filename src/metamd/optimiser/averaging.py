"""Momentum that keeps the guarantee: gradients are taken at an average x of the mirror-descent iterates z.

    z_{t+1} = argmin <g(x_t), z> + B(z||z_t)/eta,    x_{t+1} = (1 - c_t) x_t + c_t z_{t+1},    x_1 = z_1.

With a constant c and one quadratic piece this is heavy-ball momentum; with c_t = 1/(t + 1) the last x is the average of
an online-to-batch conversion, at any time; Schedule-Free takes its gradients between x and z. See docs/optimiser.md.

A tail average takes part in nothing: gradients are taken at z, and x with c_t = (k + 1)/(t + k), the average of the iterates
with weights about t^k [Shamir2013], is what the model is judged by.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from metamd.potentials.sharding import local

AveragingName = Literal["constant", "anytime", "schedule-free", "tail"]

WITH_MODES = ("schedule-free", "tail")
"""Averages that are not in the parameters during training: `opt.eval()` puts them there."""

TAIL = 9
"""k of a tail average: the last 7 % of the steps have half of the weight."""


def check_averaging(averaging: str, momentum: float) -> None:
    """Refuse what no average can be made of."""
    if averaging not in get_args(AveragingName):
        raise ValueError(f"averaging must be one of {', '.join(get_args(AveragingName))}; got {averaging!r}.")
    if not 0 <= momentum < 1:
        raise ValueError(
            f"Invalid momentum value: it must be at least 0 and below 1, got {momentum}. Pass momentum=0.0 for none."
        )
    if averaging == "schedule-free" and momentum == 0:
        raise ValueError(
            'averaging="schedule-free" takes gradients between the average and the iterate, momentum being the weight of '
            "the average: it must be above 0. Pass momentum=0.9."
        )
    if averaging in ("anytime", "tail") and momentum != 0:
        weights = "1/t" if averaging == "anytime" else f"t^{TAIL}"
        raise ValueError(
            f'averaging="{averaging}" has no momentum: the weights of its average are {weights}. Got momentum={momentum}; '
            "pass momentum=0.0."
        )


def check_groups(groups: Sequence[Mapping[str, Any]], averaging: AveragingName) -> None:
    """Refuse a rate or a momentum that was set during the run and that no step can be taken with.

    Args:
        groups: the optimiser's.
        averaging: the kind of weights.
    """
    for group in groups:
        if not math.isfinite(group["lr"]):
            raise ValueError(f"lr must be finite, got {group['lr']}: a scheduler or an edit of param_groups set it.")
    _check_momenta(groups, averaging)


def _check_momenta(groups: Sequence[Mapping[str, Any]], averaging: AveragingName) -> None:
    if averaging not in ("anytime", "tail"):  # which do not use it
        for group in groups:
            check_averaging(averaging, group["momentum"])


def is_averaged(group: Mapping[str, Any], averaging: AveragingName) -> bool:
    """Whether gradients of a group are taken at averages."""
    return averaging in ("anytime", "schedule-free") or (averaging == "constant" and group["momentum"] > 0)


def open_iterates(groups: Sequence[Mapping[str, Any]], state: Any, averaging: AveragingName, steps: int) -> None:
    """Give every averaged parameter that has a gradient its iterate z, which begins where the parameter is.

    Args:
        groups: the optimiser's.
        state: the optimiser's, by parameter.
        averaging: the kind of weights.
        steps: that were taken before; weights that depend on their number count from there.
    """
    for group in groups:
        if is_averaged(group, averaging):
            for p in group["params"]:
                if p.grad is not None:
                    kept = state[p].get("z")
                    if kept is None and averaging != "constant":
                        state[p]["since"] = steps
                    state[p]["z"] = p.detach().clone() if kept is None else kept.to(p.device)


def begin_again(changed: Iterable[dict[str, Any]], stores: Iterable[dict[str, Any]], since: int) -> None:
    """Forget iterates and averages of parameters that somebody changed; the others go on counting from where they did.

    Args:
        changed: the optimiser's state of those.
        stores: that of all.
        since: where those count from that do not say it.
    """
    for store in changed:
        store.pop("z", None)
        store.pop("mean", None)
    for store in stores:
        if "z" in store:
            store.setdefault("since", since)


def rate_of_iterate(lr: float, momentum: float, averaging: AveragingName) -> float:
    """The rate at which z moves. Under constant momentum lr has torch's meaning: that of the first step of x."""
    return lr / (1 - momentum) if averaging == "constant" else lr


def rate_of_learned_steps(momentum: float, averaging: AveragingName) -> float:
    """The lr with which z takes the learned steps as they are."""
    return 1.0 - momentum if averaging == "constant" else 1.0


def lift(y: Tensor, z: Tensor, step: int, momentum: float, store: dict[str, Any]) -> None:
    """Before step t of Schedule-Free: the part of the next gradient point that the present one carries, in place of it.

    With y = (1 - m) z + m x the next point is (1 - c) m' x + (1 - m' + m' c) z+, c = 1/(t + 1), where m' is the momentum
    now and m that of y: the average x stays what it is when the momentum is changed during the run.

    Args:
        y: the parameter.
        z: the iterate before the step.
        step: t, from 1.
        momentum: m'.
        store: the optimiser's state of the parameter, which knows m.
    """
    before = store.get("momentum", momentum)
    kept = (1 - 1 / (step + 1)) * (momentum / before)
    y.mul_(kept).sub_(z, alpha=kept * (1 - before))
    store["momentum"] = momentum


def blend(x: Tensor, z: Tensor, step: int, momentum: float, averaging: AveragingName) -> None:
    """After step t: x moves towards the new z, in place.

    Args:
        x: the parameter.
        z: the iterate after the step.
        step: t, from 1.
        momentum: the weight that the average keeps; of Schedule-Free, where between z and x gradients are taken.
        averaging: the kind of weights.
    """
    if averaging == "schedule-free":
        x.add_(z, alpha=1 - momentum + momentum / (step + 1))
    else:
        x.lerp_(z, 1 - momentum if averaging == "constant" else 1 / (step + 1))


def tail_share(step: int) -> float:
    """c_t = (k + 1)/(t + k) of a tail average: the weight of the newest iterate.

    Args:
        step: t, from 1.

    Example:
        >>> tail_share(1), tail_share(11)
        (1.0, 0.5)
    """
    return (TAIL + 1) / (step + TAIL)


def follow(param: Tensor, store: dict[str, Any], step: int) -> None:
    """After step t: the tail average of a parameter moves towards it; it begins there, in float32 at least.

    Args:
        param: the iterate.
        store: the optimiser's state of it.
        step: t, from 1, of the run.
    """
    if "mean" not in store:
        wide = torch.promote_types(param.dtype, torch.float32)
        store["mean"], store["since"] = param.detach().to(wide, copy=True), step - 1
        return
    store["mean"] = store["mean"].to(param.device)
    mean = local(store["mean"])
    mean.lerp_(local(param).to(mean.dtype), tail_share(step - store["since"]))


def to_averages(groups: Sequence[Mapping[str, Any]], state: Any, averaging: AveragingName) -> None:
    """Put averages in the place of the points where gradients are taken: of Schedule-Free, x for y = (1 - m) z + m x.

    Args:
        groups: the optimiser's.
        state: the optimiser's, by parameter.
        averaging: the kind of weights.
    """
    for group in groups:
        for p in group["params"]:
            if "mean" in state[p]:
                state[p]["z"] = p.detach().clone()
                local(p).copy_(local(state[p]["mean"]))
            elif averaging == "schedule-free" and "z" in state[p]:
                momentum = state[p].get("momentum", group["momentum"])
                local(p).lerp_(local(state[p]["z"]), 1 - 1 / momentum)


def _to_iterate(param: Tensor, store: dict[str, Any]) -> None:
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


def to_gradient_points(groups: Sequence[Mapping[str, Any]], state: Any, averaging: AveragingName) -> None:
    """The way back; of Schedule-Free with the momentum of now.

    Args:
        groups: the optimiser's.
        state: the optimiser's, by parameter.
        averaging: the kind of weights.
    """
    _check_momenta(groups, averaging)
    for group in groups:
        for p in group["params"]:
            if "mean" in state[p]:
                _to_iterate(p, state[p])
            elif "z" in state[p]:
                state[p]["momentum"] = group["momentum"]
                local(p).lerp_(local(state[p]["z"]), 1 - group["momentum"])

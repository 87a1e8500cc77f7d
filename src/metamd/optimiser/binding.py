"""How an optimiser's parameters meet a geometry: options, names, metrics where the parameters are, and what is refused."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from metamd.files.learned import LearnedOptimiser, load
from metamd.files.usage import Average, Metric, Usage
from metamd.optimiser.averaging import require_number
from metamd.potentials.base import Params, Potential
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import widen
from metamd.potentials.online import KEPT, Online
from metamd.potentials.sharding import any_process, is_sharded, local_metric, shard_dims, spread_like, total_for
from metamd.potentials.tying import Shape, clean_names, some


def opened(geometry: LearnedOptimiser | Potential | str | PathLike[str]) -> tuple[Potential, LearnedOptimiser | None]:
    """The potential of a geometry, and the learned file that it is from, if any."""
    found = load(geometry) if isinstance(geometry, str | PathLike) else geometry
    if isinstance(found, LearnedOptimiser):
        return found.potential, found
    if isinstance(found, Potential):
        return found, None
    raise TypeError(
        f"geometry must be a LearnedOptimiser or a Potential, got {type(found).__name__}. "
        "Use metamd.load(path), or a potential such as metamd.Euclidean()."
    )


def opened_file(learned: LearnedOptimiser | str | PathLike[str]) -> LearnedOptimiser:
    """The learned file itself; a potential alone is refused."""
    potential, found = opened(learned)
    if found is None:
        raise TypeError(
            f"learned must be a LearnedOptimiser or a path, got {type(potential).__name__}. Pass metamd.load(path)."
        )
    return found


# options: those that were given, then those that the file recommends


@dataclass(frozen=True)
class Options:
    """How `MetaMD` uses its geometry."""

    metric: Metric | Online
    momentum: float  # of groups without one of their own
    averaging: Average
    given_lr: float | Tensor | None = None
    usage: Usage | None = None  # what the file recommends, where it is used so
    steps: int | None = None  # the length of the schedule that is inside, if there is one
    about: str = ""  # what `print` says about the recommended usage

    @property
    def recommended(self) -> bool:
        """Whether the run is set up as a file recommends, where that is more than plain use."""
        return self.steps is not None and self.usage not in (None, Usage())

    @property
    def factor(self) -> float | None:
        """The factor on the learned steps, of a run that is set up as a file recommends."""
        if not self.recommended or self.usage is None:
            return None
        return self.usage.factor if self.given_lr is None else float(self.given_lr) / (1 - self.momentum)

    def rate_of(self, momentum: float) -> float | Tensor:
        """The lr of a group without one of its own: by default, the one at which z takes the learned steps."""
        if self.given_lr is not None:
            return self.given_lr
        factor = 1.0 if self.usage is None else self.usage.factor
        if self.averaging != "constant":
            return factor
        # a recommended rate is rounded as `Usage.lr` is, so that it reads 0.1 and not 0.09999999999999998
        return 1.0 - momentum if self.usage is None else Usage(momentum=momentum, factor=factor).lr

    def share(self, step: int) -> float:
        """The factor of the schedule at step t, counted from 0; after the end it stays that of the last step."""
        if self.usage is None or self.steps is None:
            return 1.0
        return self.usage.share(min(step, self.steps - 1), self.steps)


SHORT = 0.05
"""An lr below this share of the recommended one is taken for the learning rate of another optimiser: it would stop
training."""


def choose(learned: LearnedOptimiser | None, steps: int | None, params: Iterable[Any], given: Mapping[str, Any]) -> Options:
    """The options of a run: those that were given, and with `steps` those that the file recommends for all others."""
    require_number("momentum", given.get("momentum", 0.0))
    recommends = learned is not None and learned.header.usage is not None
    usage = Usage() if learned is None else learned.usage
    plain: dict[str, Any] = {"metric": "learned", "momentum": 0.0, "averaging": "constant"}
    kept = {"given_lr": given.get("lr"), **{k: given[k] for k in plain if k in given}}
    if steps is None:
        if usage != Usage() and "metric" not in given:
            warnings.warn(
                f"this learned file recommends more than its metric: {usage}. Write MetaMD(params, learned, steps=N), with "
                'the number of steps of the run, to use it so. Pass metric="learned" to use the metric alone.',
                stacklevel=3,
            )
        about = f"\nThe learned file recommends: {usage}. MetaMD(params, learned, steps=T) uses it so." if recommends else ""
        return Options(**{**plain, **kept, "about": about})
    if isinstance(steps, bool) or not isinstance(steps, int | float) or not 1 <= steps < math.inf or steps != int(steps):
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}: the training steps of the run.")
    if learned is None:
        raise ValueError(
            f"steps={steps} sets up what a learned file recommends, but a potential alone recommends nothing. "
            "Leave steps out, and use a torch scheduler for a schedule."
        )
    lr = given.get("lr")
    if recommends and isinstance(lr, Real) and 0 < float(lr) < SHORT * usage.lr:
        warnings.warn(
            f"lr={lr} is a factor on the learned step sizes, and the file recommends {usage.lr:g}: steps are "
            f"{usage.lr / float(lr):.3g} times shorter. Leave lr out. There is no learning rate to choose.",
            stacklevel=3,
        )
    own = given.get("momentum") or any(isinstance(p, dict) and p.get("momentum") for p in params)
    average = "constant" if own else usage.averaging  # a tail average has no momentum
    about = f"\nUsed as the learned file recommends for {steps} steps: {usage}" if recommends else ""
    about = about or f"\nThe learned file recommends nothing, and is used plainly for {steps} steps"
    about += f"; {', '.join(sorted(given))} as given." if recommends and given else "."
    advised = {"metric": usage.metric, "momentum": usage.momentum, "averaging": average}
    return Options(**{**advised, **kept, "usage": usage, "steps": steps, "about": about})


# names: those that were given, else those of the file's model


def with_names(params: Any, potential: Potential, learned: LearnedOptimiser | None) -> Any:
    """The parameters or groups as torch takes them; those without names get the names of the file's model.

    They are matched by order and shape. Every group must keep the order of the model, and one assignment alone must fit.
    """
    if not isinstance(params, list) or not isinstance(potential, MaxDiagonal) or not len(potential.table):
        return params  # metrics of other potentials are not found by name
    groups = params if params and all(isinstance(p, dict) for p in params) else [{"params": params}]
    if any(isinstance(g["params"], set) for g in groups):
        return params  # torch refuses them
    lists = [[g["params"]] if isinstance(g["params"], Tensor) else list(g["params"]) for g in groups]
    groups = [{**g, "params": ps} for g, ps in zip(groups, lists, strict=True)]  # a generator can be read once
    tensors = [p for ps in lists for p in ps]
    if not tensors or any("param_names" in g for g in groups) or not all(isinstance(p, Tensor) for p in tensors):
        return groups if tensors else params
    model = {} if learned is None else learned.header.model
    if not model:
        raise ValueError(
            "a learned geometry finds its metrics by the names of the parameters, but these have none, and no model is "
            f"recorded to match them with. {_NAMES}"
        )
    shapes = [[tuple(p.shape) for p in ps] for ps in lists]
    found = assignments(list(model.values()), shapes)
    if len(found) != 1:
        raise ValueError(_no_assignment(model, shapes, found))
    names: list[list[str]] = [[] for _ in groups]
    for name, i in zip(model, found[0], strict=True):
        names[i].append(name)
    return [{**g, "param_names": n} for g, n in zip(groups, names, strict=True)]


_NAMES = "Pass model.named_parameters(), or groups whose params are (name, parameter) pairs."

_LOOKED_AT = 10_000
"""So many partial assignments are looked at; groups that allow more are taken for ambiguous."""


def assignments(model: Sequence[Shape], groups: Sequence[Sequence[Shape]]) -> list[list[int]]:
    """The ways to deal the tensors of a model out to groups that keep its order: none, the only one, or two of several.

    A way says of every tensor which group it is in.

    Example:
        >>> assignments([(3, 2), (3,), (3,)], [[(3, 2)], [(3,), (3,)]])
        [[0, 1, 1]]
        >>> assignments([(3,), (3,)], [[(3,)], [(3,)]])
        [[1, 0], [0, 1]]
    """
    if sorted(model) != sorted(shape for group in groups for shape in group):
        return []
    found: list[list[int]] = []
    # A state is how many tensors each group has by now. What can follow does not depend on how the state was reached.
    begin = (0,) * len(groups)
    stack: list[tuple[tuple[int, ...], list[int]]] = [(begin, [])]
    seen: set[tuple[int, ...]] = set()
    leads: set[tuple[int, ...]] = set()  # states that the first way passes
    while stack and len(found) < 2:
        taken, path = stack.pop()
        if len(path) == len(model) or taken in leads:
            found.append(path + (found[0][len(path) :] if found else []))
            state = list(begin)
            for i in found[0]:
                leads.add(tuple(state))
                state[i] += 1
        elif taken not in seen:
            seen.add(taken)
            if len(seen) > _LOOKED_AT:
                return [[], []]
            for i, group in enumerate(groups):
                if taken[i] < len(group) and group[taken[i]] == model[len(path)]:
                    stack.append(((*taken[:i], taken[i] + 1, *taken[i + 1 :]), [*path, i]))
    return found


def _no_assignment(model: Mapping[str, Shape], groups: Sequence[Sequence[Shape]], found: Sequence[Sequence[int]]) -> str:
    """Why parameters without names cannot be matched."""
    rule = "parameters without names are matched by order and shape with the model that the file was learned on"
    if found:
        where = "many tensors" if not found[0] else ""
        for (name, shape), i, j in zip(model.items(), *found, strict=False):
            if i != j and not where:
                where = f"{name!r} of shape {shape} may be in group {min(i, j)} or in group {max(i, j)}"
        return f"{rule}, but there is more than one way: {where}. {_NAMES}"
    given = [shape for group in groups for shape in group]
    said = f"which has {len(model)} tensors, {some(model)}"
    if len(given) != len(model):
        return f"{rule}, {said}, but {len(given)} came. Pass all parameters of the model, frozen ones too. {_NAMES}"
    if len(groups) > 1:
        return f"{rule}, {said}, but the groups do not fit: each must keep the order of the model. {_NAMES}"
    wrong = next((n, s, g) for (n, s), g in zip(model.items(), given, strict=True) if s != g)
    return f"{rule}, but where it has {wrong[0]!r} of shape {wrong[1]}, there is a tensor of shape {wrong[2]}. {_NAMES}"


def named_parameters(param_groups: Sequence[Mapping[str, Any]], potential: Potential) -> dict[str, Tensor]:
    """All parameters by cleaned name; unnamed ones are counted through, where names do not matter."""
    pairs: list[tuple[str, Tensor]] = []
    for group in param_groups:
        names = group.get("param_names") or [str(len(pairs) + i) for i in range(len(group["params"]))]
        pairs += zip(names, group["params"], strict=True)
    return clean_names(pairs, potential.rename if isinstance(potential, MaxDiagonal) else None)


def without_unknown_frozen(named: Mapping[str, Tensor], potential: Potential) -> dict[str, Tensor]:
    """The parameters without those that are frozen and that nothing was learned for: the base of a model with adapters."""
    # Roles are read off the order of all layers, so there none may be missing.
    if not isinstance(potential, MaxDiagonal) or not potential.slots or potential.tying == "role":
        return dict(named)
    return {n: p for n, p in named.items() if p.requires_grad or n in potential.slots}


def fit(
    potential: Potential, named: Params, starts: Params, online: Online | None, *, fused: bool, order: Sequence[str]
) -> Potential:
    """The potential with its metrics evaluated for these parameters, on their devices and in their shards."""
    if not isinstance(potential, MaxDiagonal):
        return potential.bind(named)
    known = {n: named[n] for n in order if n in named}
    bound = potential.bind(known if len(known) == len(named) else named, missing=potential.missing)
    with torch.no_grad():
        metrics = {n: _metric_of(bound.metric(n).to(widen(p).dtype), p, online) for n, p in named.items()}
    for name, p in named.items():
        _check_whole(bound, online, name, p, fused=fused)
    kernel = None
    if fused and bound.pieces > 1:
        from metamd.optimiser.fused import FusedDiagonals

        kernel = FusedDiagonals(metrics, starts, bound.offsets.detach().cpu().numpy())
    bound = bound.centred_at(starts).fixed(metrics, total_for(named), kernel)
    for name, p in named.items():
        if _gathers(online, p):
            bound.basis.prepare(name, metrics[name])
    return bound


def _gathers(online: Online | None, param: Tensor) -> bool:
    """Whether the steps of a parameter are found for the whole of it, on every process that has a part."""
    return online is not None and online.rule == "polar" and param.ndim > 1


def _metric_of(d: Tensor, param: Tensor, online: Online | None) -> Tensor:
    """The part of a metric that the steps of a parameter need on this process, on its device."""
    return d.to(param.device) if _gathers(online, param) else local_metric(d, param)


def _check_whole(bound: MaxDiagonal, online: Online | None, name: str, param: Tensor, *, fused: bool) -> None:
    """Refuse what steps in a learned basis cannot do, and shards that cut through what a step looks at as a whole."""
    kind, cut = bound.basis.kind, shard_dims(param)
    if fused and kind != "identity":
        raise ValueError(
            "fused=True is for diagonal metrics, but this geometry has a learned basis, whose steps are matrix products. "
            "Leave fused=False."
        )
    if fused and bound.pieces > 1 and is_sharded(param):
        raise ValueError(
            "fused=True needs whole tensors on one process, but these are sharded. Leave fused=False: the plain "
            "step adds up over processes."
        )
    if _gathers(online, param):
        return
    if online is not None and online.rule == "eigen" and is_sharded(param):
        raise ValueError(
            f'the rule "eigen" follows both sides of a weight, and {name!r} is sharded. Choose a usage without it: '
            'metamd.learn_usage(learned, family, rules=[metamd.Online("polar", beta=0.9, signal=0.95, whiten=4)]).'
        )
    if kind != "identity" and cut and (kind == "both" or cut != {0}) and param.ndim > 1:
        raise ValueError(
            f"the basis of {name!r} needs whole {'tensors' if kind == 'both' else 'rows'} on one process, "
            f"but its dimensions {sorted(cut)} are sharded. Shard dimension 0 alone, or not at all."
        )


def online_metric(metric: Metric | Online, potential: Potential, learned: LearnedOptimiser | None) -> Online | None:
    """The rule that the diagonal follows the run by; None where it does not."""
    if metric == "learned":
        return None
    found = learned.online if metric == "online" and learned is not None else metric
    if not isinstance(found, Online):
        raise ValueError(
            'metric must be "learned", "online" for a learned file that has online scales, or metamd.Online(...); got '
            f"{metric!r}. metamd.learn_usage(learned, family) learns the scales."
        )
    if not isinstance(potential, MaxDiagonal):
        raise ValueError("an online metric needs a potential with coordinates, such as Diagonal() or Kronecker().")
    return found


def check_scales(online: Online | None, potential: Potential, names: Iterable[str]) -> None:
    """Refuse parameters that an online metric has no scale for."""
    if online is None or not isinstance(potential, MaxDiagonal):
        return
    for name in names:
        key = potential.slots[name].key
        if key not in online.scale:
            raise ValueError(
                f"an online metric needs a scale for every parameter that is trained, but there is none for {name!r} (key "
                f"{key!r}); there are those of {some(online.scale)}. Learn them with metamd.learn_usage(learned, family), "
                f"or pass metamd.Online(..., scale={{{key!r}: 100.0, ...}})."
            )


def share_state(state: dict[str, Any], param: Tensor) -> None:
    """Make what an online metric keeps of a sharded parameter a shard too; checkpoints would take it for a whole."""
    if is_sharded(param):
        for key in KEPT:
            if key in state and key != "length" and not is_sharded(state[key]):
                state[key] = spread_like(state[key], param)


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse options of a group that no step can be taken with."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(lr.shape)}. Give each group its own lr instead.")
    if not isinstance(lr, Real | Tensor):
        raise TypeError(f"lr must be a number or a tensor of one, got {lr!r}. Pass lr=1.0, say.")
    if not 0 <= float(lr) < float("inf"):
        raise ValueError(
            f"Invalid learning rate: lr must be finite and not negative, got {float(lr)}. "
            "Pass lr=1.0 to use the learned step sizes as they are."
        )
    require_number("weight_decay", group["weight_decay"])
    if not 0 <= group["weight_decay"] < float("inf"):
        raise ValueError(
            f"Invalid weight_decay value: it must be finite and not negative, got {group['weight_decay']}. "
            "Pass weight_decay=0.0 for none."
        )


def are_finite(grads: Params) -> bool:
    """Whether gradients certainly have no NaN and no infinity."""
    # The sum is the fastest look at every number, and no NaN or infinity cancels in it; it may overflow, so that a second
    # look decides. Unlike a norm it uses all threads.
    sums = [g.sum(dtype=None if g.dtype == torch.float64 else torch.float32) for g in grads.values()]
    return bool(torch.isfinite(torch.stack([s.to(sums[0]) for s in sums])).all())


def refuse_nonfinite(named: Params, grads: Params, *, known: bool) -> None:
    """Refuse NaN and infinite gradients, on all processes if one has them; `known` says that there are none here."""
    names = [] if known else [n for n, g in grads.items() if not bool(torch.isfinite(g).all())]
    if any_process(bool(names), named):
        where = f"the gradient of {names[0]!r} (and of {len(names) - 1} more)" if names else "a gradient elsewhere"
        raise RuntimeError(
            f"{where} is not finite; nothing was changed. Lower lr or clip the gradients; under mixed precision step "
            "through a GradScaler, which skips such steps. check_finite=False turns this check off."
        )

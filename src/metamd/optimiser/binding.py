"""How an optimiser's parameters meet a geometry: names, options of groups, metrics where the parameters are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metamd.files.learned import LearnedOptimiser, fingerprint
from metamd.files.usage import Metric
from metamd.optimiser.averaging import AveragingName, check_averaging, rate_of_learned_steps
from metamd.optimiser.guard import FamilyWatch
from metamd.potentials.base import Params, Potential
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import widen
from metamd.potentials.online import KEPT, Online
from metamd.potentials.sharding import any_process, is_sharded, local, local_metric, shard_dims, spread_like, total_for
from metamd.potentials.tying import clean_names, some


def unwrap(geometry: LearnedOptimiser | Potential) -> tuple[Potential, FamilyWatch | None]:
    """The potential of a geometry, and who watches over the family that it was learned on."""
    if isinstance(geometry, Potential):
        return geometry, None
    if isinstance(geometry, LearnedOptimiser):
        return geometry.potential, FamilyWatch(geometry.header.horizon, geometry.header.gradient_scale)
    raise TypeError(
        f"geometry must be a LearnedOptimiser or a Potential, got {type(geometry).__name__}. "
        "Use metamd.load(path), or a potential such as metamd.Euclidean()."
    )


def recommended(geometry: LearnedOptimiser | Potential) -> str:
    """A line about the usage that a file recommends, which `MetaMD` leaves to `prepare`; empty without one."""
    if not isinstance(geometry, LearnedOptimiser) or geometry.header.usage is None:
        return ""
    return f"\nThe learned file recommends: {geometry.usage}. metamd.prepare(params, learned, steps=T) sets it up."


def geometry_code(potential: Potential) -> str:
    """The geometry in a few letters."""
    return fingerprint(potential) if isinstance(potential, MaxDiagonal) else repr(potential)


def piece_count(potential: Potential) -> int:
    """N; 0 for a potential without pieces."""
    return potential.pieces if isinstance(potential, MaxDiagonal) else 0


def named_parameters(param_groups: Sequence[Mapping[str, Any]], potential: Potential) -> dict[str, Tensor]:
    """All parameters by cleaned name; unnamed ones are counted through, where names do not matter."""
    pairs: list[tuple[str, Tensor]] = []
    for group in param_groups:
        names = group.get("param_names")
        if names is None and isinstance(potential, MaxDiagonal) and len(potential.table):
            raise ValueError(
                "a learned geometry finds its metrics by the names of the parameters, but these have none. "
                "Pass model.named_parameters(), or groups whose params are (name, parameter) pairs."
            )
        pairs += zip(names or [str(len(pairs) + i) for i in range(len(group["params"]))], group["params"], strict=True)
    rename = potential.rename if isinstance(potential, MaxDiagonal) else None
    return clean_names(pairs, rename)


def layer_order(geometry: LearnedOptimiser | Potential) -> tuple[str, ...]:
    """The names of a model's tensors in the order of its layers, which roles are read off; empty if nobody knows it."""
    potential = geometry.potential if isinstance(geometry, LearnedOptimiser) else geometry
    if isinstance(potential, MaxDiagonal) and potential.slots:
        return tuple(potential.slots)
    return tuple(geometry.header.model) if isinstance(geometry, LearnedOptimiser) else ()


def fit(potential: Potential, named: Params, starts: Params, *, fused: bool = False, order: Sequence[str] = ()) -> Potential:
    """The potential with its metrics evaluated for these parameters, on their devices and in their shards.

    Args:
        potential: phi.
        named: the parameters.
        starts: where those that have moved started, the local part of each.
        fused: whether the compiled kernel takes the steps.
        order: the names in the order of the layers; parameter groups may have another.
    """
    if not isinstance(potential, MaxDiagonal):
        return potential.bind(named)
    known = {n: named[n] for n in order if n in named}
    bound = potential.bind(known if len(known) == len(named) else named, missing=potential.missing)
    with torch.no_grad():
        metrics = {n: local_metric(bound.metric(n).to(widen(p).dtype), p) for n, p in named.items()}
    if bound.basis.kind != "identity":
        _check_basis(bound, named, fused=fused)
    kernel = None
    if fused and bound.pieces > 1:
        from metamd.optimiser.fused.fused import FusedDiagonals

        if any(is_sharded(p) for p in named.values()):
            raise ValueError(
                "fused=True needs whole tensors on one process, but these are sharded. Leave fused=False: the plain "
                "step adds up over processes."
            )
        kernel = FusedDiagonals(metrics, starts, bound.offsets.detach().cpu().numpy())
    return bound.centred_at(starts).fixed(metrics, total_for(named), kernel)


def _check_basis(bound: MaxDiagonal, named: Params, *, fused: bool) -> None:
    """Refuse what steps in a learned basis cannot do: the kernel, and shards that cut through what a factor acts on."""
    if fused:
        raise ValueError(
            "fused=True is for diagonal metrics, but this geometry has a learned basis, whose steps are matrix products. "
            "Leave fused=False."
        )
    for name, p in named.items():
        cut = shard_dims(p)
        if cut and (bound.basis.kind == "both" or cut != {0}) and p.ndim > 1:
            raise ValueError(
                f"the basis of {name!r} needs whole {'tensors' if bound.basis.kind == 'both' else 'rows'} on one process, "
                f'but its dimensions {sorted(cut)} are sharded. Shard dimension 0 alone with sides="right", or not at all.'
            )


def online_metric(metric: Metric | Online, geometry: LearnedOptimiser | Potential) -> Online | None:
    """The rule that the diagonal follows the run by; None where it does not.

    Args:
        metric: what was asked for.
        geometry: the file or potential, which must have coordinates, and scales if none were given.
    """
    if metric == "learned":
        return None
    found = geometry.online if metric == "online" and isinstance(geometry, LearnedOptimiser) else metric
    if not isinstance(found, Online):
        raise ValueError(
            'metric must be "learned", "online" for a learned file that has online scales, or metamd.Online(...); got '
            f"{metric!r}. metamd.learn_usage(learned, family) learns the scales."
        )
    if not isinstance(geometry if isinstance(geometry, Potential) else geometry.potential, MaxDiagonal):
        raise ValueError("an online metric needs a potential with coordinates, such as Diagonal() or Kronecker().")
    return found


def check_whole(online: Online | None, named: Params) -> None:
    """Refuse sharded weights where a rule looks at whole ones."""
    for name, p in named.items():
        if online is not None and (online.rule == "polar" or online.refresh) and p.ndim > 1 and is_sharded(p):
            raise ValueError(
                f"this online metric needs whole weights on one process, but {name!r} is sharded. Use metric='learned', or "
                'metamd.Online("average").'
            )


def check_scales(online: Online | None, potential: Potential, names: Iterable[str]) -> None:
    """Refuse parameters that an online metric has no scale for.

    Args:
        online: the rule and its scales.
        potential: bound to the parameters.
        names: of those that are to move.
    """
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
    """Make what an online metric keeps of a sharded parameter a shard too: a checkpoint would take it for a whole otherwise.

    Args:
        state: of the parameter.
        param: the parameter.
    """
    if is_sharded(param):
        for key in KEPT:
            if key in state and not is_sharded(state[key]):
                state[key] = spread_like(state[key], param)


def settle_group(group: dict[str, Any], averaging: AveragingName, *, learned_steps: bool) -> None:
    """Refuse options of a group that no step can be taken with.

    Args:
        group: its options.
        averaging: the kind of average.
        learned_steps: whether its lr is the one at which the learned steps are taken as they are.
    """
    check_averaging(averaging, group["momentum"])
    if learned_steps:
        group["lr"] = rate_of_learned_steps(group["momentum"], averaging)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(lr.shape)}. Give each group its own lr instead.")
    if not 0 <= float(lr) < float("inf"):
        raise ValueError(
            f"Invalid learning rate: lr must be finite and not negative, got {float(lr)}. "
            "Pass lr=1.0 to use the learned step sizes as they are."
        )
    if not 0 <= group["weight_decay"] < float("inf"):
        raise ValueError(
            f"Invalid weight_decay value: it must be finite and not negative, got {group['weight_decay']}. "
            "Pass weight_decay=0.0 for none."
        )


def refuse_unusual(name: str, grad: Tensor) -> None:
    """Refuse a sparse or complex gradient."""
    if grad.is_sparse or grad.is_complex():
        kind = "sparse" if grad.is_sparse else "complex"
        raise RuntimeError(
            f"MetaMD needs dense real gradients, but that of {name!r} is {kind}. "
            "Build the layer without sparse=True, or give this parameter to torch.optim.SparseAdam."
        )


def refuse_nonfinite(named: Params, grads: Params) -> None:
    """Refuse NaN and infinite gradients, on all processes if one has them."""
    # The Euclidean norm is the fastest look at every number; it may overflow, so that a second look decides.
    norms = torch._foreach_norm(list(grads.values()))
    names = []
    if not bool(torch.isfinite(torch.stack([n.to(norms[0]) for n in norms])).all()):
        names = [n for n, g in grads.items() if not bool(torch.isfinite(g).all())]
    if any_process(bool(names), named):
        where = f"the gradient of {names[0]!r} (and of {len(names) - 1} more)" if names else "a gradient elsewhere"
        raise RuntimeError(
            f"{where} is not finite; nothing was changed. Lower lr or clip the gradients; under mixed precision step "
            "through a GradScaler, which skips such steps. check_finite=False turns this check off."
        )


def refuse_edited(named: Params, versions: Mapping[str, int], stores: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to look for the end of a run in parameters that were changed after its last step.

    Args:
        named: the parameters.
        versions: how often each had been changed when the step was done; empty if that is not known.
        stores: the optimiser's state of each; an iterate `z` is the end itself.
    """
    for n, p in named.items():
        if versions and "z" not in stores[n] and local(p)._version != versions.get(n):
            raise ValueError(
                f"the parameter {n!r} was changed after the last step, so that the end of the run is lost. Ask for the "
                "certificate before loading or changing parameters; the reference may be any state_dict."
            )

"""Parameters that are spread over processes (DTensor, FSDP2): local pieces of tensors, and sums over processes."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metamd.potentials.forms import Total, local_total

WHOLE = (Tensor, torch.nn.Parameter)
"""Types that are certainly no DTensor. The question is asked dozens of times in every step."""


def is_sharded(x: Tensor) -> bool:
    """Whether a tensor is a DTensor. If its module was never imported, there is none."""
    if type(x) in WHOLE:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def shard_dims(x: Tensor) -> set[int]:
    """The dimensions along which a tensor is cut over processes."""
    return {p.dim for p in x.placements if p.is_shard()} if is_sharded(x) else set()  # type: ignore[attr-defined]


def local(x: Tensor) -> Tensor:
    """The part of a tensor on this process, as a view of it; the tensor itself if it is not spread."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def version(x: Tensor) -> int:
    """How often a tensor was written to; a DTensor and its part on this process count apart."""
    return x._version + local(x)._version if is_sharded(x) else x._version


def local_metric(d: Tensor, like: Tensor) -> Tensor:
    """The part of a metric (N, ...) that belongs to this process's part of the tensor it is for, on its device."""
    d = d.to(like.device)
    if not is_sharded(like):
        return d
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.placement_types import Shard

    placements = [
        Shard(p.dim + 1) if isinstance(p, Shard) and d.shape[p.dim + 1] == like.shape[p.dim] > 1 else Replicate()
        for p in like.placements  # type: ignore[attr-defined]
    ]
    return distribute_tensor(d, like.device_mesh, placements).to_local()  # type: ignore[attr-defined]


def local_part(x: Tensor, like: Tensor) -> Tensor:
    """The part of a tensor, whole or sharded, that belongs to this process's part of a parameter, on its device."""
    if is_sharded(x) or not is_sharded(like):
        return local(x).to(local(like).device)
    return local_metric(x[None], like)[0]


def spread_like(part: Tensor, param: Tensor) -> Tensor:
    """This process's part of a tensor, or of its matrix, as a DTensor that is sharded like a parameter.

    Checkpoints then save the whole tensor.
    """
    from torch.distributed.tensor import DTensor

    shape = param.shape if part.ndim == param.ndim else torch.Size((param.shape[0], math.prod(param.shape[1:])))
    stride = torch.empty(shape, device="meta").stride()
    placed = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part.contiguous(), *placed, run_check=False, shape=shape, stride=stride)


def gathered(part: Tensor, param: Tensor) -> Tensor:
    """The whole of a tensor that is sharded like a parameter, on every process, from the part that each of them has."""
    return spread_like(part, param).full_tensor() if is_sharded(param) else part  # type: ignore[attr-defined]


def total_for(params: Mapping[str, Tensor]) -> Total:
    """How contributions by tensor name are added: shards over their processes, the rest here."""
    if not any(_shard_groups(x) for x in params.values()):
        return local_total
    return lambda contributions: local_total(sum_shards(contributions, params))


def sum_shards(parts: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contributions by tensor, all of one shape, each added over the processes that hold shards of its tensor."""
    groups = {n: _shard_groups(params[n]) for n in parts}
    whole = dict(parts)
    for key in sorted(set(groups.values()) - {()}, key=str):
        names = [n for n in parts if groups[n] == key]
        device = local(params[names[0]]).device
        rows = _all_reduce(torch.stack([parts[n] for n in names]).to(device), key)
        whole.update(zip(names, rows.to(parts[names[0]].device), strict=True))
    return whole


def any_process(flag: bool, params: Mapping[str, Tensor]) -> bool:
    """Whether the flag is up on any process that holds a part of the parameters."""
    devices = {groups: x.device for x in params.values() if (groups := _shard_groups(x))}
    if not devices:
        return flag
    raised = torch.tensor(float(flag))
    for key in sorted(devices, key=str):
        raised = _all_reduce(raised.to(devices[key]), key)
    return bool(raised > 0)


def _shard_groups(x: Tensor) -> tuple[Any, ...]:
    """The groups of processes over which a tensor is cut; none for a whole one."""
    if not is_sharded(x):
        return ()
    return tuple(x.device_mesh.get_group(i) for i, p in enumerate(x.placements) if p.is_shard())  # type: ignore[attr-defined]


def _all_reduce(x: Tensor, groups: tuple[Any, ...]) -> Tensor:
    for group in groups:
        torch.distributed.all_reduce(x, group=group)
    return x

"""What a state_dict holds of a run, and going on from it: what is refused, warned of, and kept from being rounded."""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from metamd.files.text import shown
from metamd.files.usage import Average
from metamd.optimiser.certificate import AVERAGED, START, SUM
from metamd.potentials.base import Params
from metamd.potentials.forms import Array
from metamd.potentials.online import KEPT, Online
from metamd.potentials.sharding import local, local_metric, sum_shards

SHARED = ("step", "weights", "safeguard", "pieces", "geometry")
"""Whole-model state. It lies in every param group, where state_dict, distributed checkpoints and low precision keep it."""

FORMER = ("products", "turn")
"""The keys that earlier versions kept for the output side of a weight."""


@dataclass(frozen=True)
class Kind:
    """What must agree for a state_dict to be continued, in a few letters each, as the state_dict has it."""

    pieces: int  # N of the geometry, 0 for one without pieces
    geometry: str  # its fingerprint
    metric: str  # see `metric_code`
    averaging: str
    steps: int | None = None  # the length of the schedule inside, if there is one


def metric_code(online: Online | None) -> str:
    """The metric in a few letters: the rule, what else is followed, and a fingerprint of all its numbers."""
    if online is None:
        return "learned"
    numbers = hashlib.sha256(json.dumps(online.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
    return f"{online.rule}{'-signal' if online.signal else ''} {numbers}"


@dataclass(frozen=True)
class Saved:
    """A state_dict that can be continued: the dict itself, and what it says of the whole model."""

    state_dict: dict[str, Any]
    steps: int
    training: bool
    record: "PieceRecord"
    weights: Array
    safeguard: list[float]
    other: list[str]  # in which respects it is of another run, as sentences


def read_state(state_dict: Mapping[str, Any], kind: Kind, param_groups: Sequence[Mapping[str, Any]]) -> Saved:
    """Read a state_dict that is to be continued with these groups, or refuse it; nothing is changed by that.

    The parameters keep the names that they have: metrics are found by them.
    """
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups) or not isinstance(state, dict):
        raise ValueError(
            "this is not a state_dict of an optimiser: it must have a dict under 'state' and a list of dicts under "
            "'param_groups'. Pass what opt.state_dict() gave."
        )
    saved: dict[str, Any] = groups[0] if groups else {}
    other = refuse_foreign(saved, kind)
    try:
        found = Saved(
            {**state_dict, "param_groups": _named_as_here(groups, param_groups)},
            steps=int(saved["step"]),
            training=bool(saved.get("training", True)),
            record=PieceRecord.decode(saved["pieces"]),
            weights=saved["weights"].reshape(kind.pieces).cpu().double().numpy(),
            safeguard=[float(x) for x in saved["safeguard"].reshape(2)],
            other=other,
        )
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the state of the whole model must be as `state_dict` wrote it, but it cannot be read ({shown(str(error))}). "
            "Load another checkpoint, or start a new run from the parameters."
        ) from None
    pairs = [(g, h) for g, h in zip(groups, param_groups, strict=False) if len(g["params"]) == len(h["params"])]
    _check_order(pairs)
    for theirs, ours in pairs:
        names = ours.get("param_names") or [str(i) for i in range(len(ours["params"]))]
        for i, name, p in zip(theirs["params"], names, ours["params"], strict=True):
            _check_tensors(state.get(i, {}), name, p)
    return found


def _named_as_here(groups: list[dict[str, Any]], param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [{"param_names": g["param_names"]} if "param_names" in g else {} for g in param_groups]
    return [{**g, **name} for g, name in zip(groups, names, strict=False)] + groups[len(names) :]


def _check_order(pairs: list[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
    """Refuse the same names in another order: torch goes by place, and would give a state to the wrong parameter."""
    if any(isinstance(i, str) for theirs, _ in pairs for i in theirs["params"]):
        return  # torch.distributed.checkpoint has gone by names already
    theirs, ours = ([name for pair in pairs for name in pair[side].get("param_names", ())] for side in (0, 1))
    if theirs != ours and sorted(theirs) == sorted(ours):
        first = next(i for i, name in enumerate(ours) if theirs[i] != name)
        raise ValueError(
            f"this state_dict lists the same parameters in another order: it has {theirs[first]!r} where this optimiser has "
            f"{ours[first]!r}, and torch loads by place. Build MetaMD with the parameters in the order of the run, or load "
            "by name in a hook of opt.register_load_state_dict_pre_hook."
        )


def _check_tensors(store: Any, name: str, param: Tensor) -> None:
    """Refuse a state that cannot be one of this parameter."""
    if not isinstance(store, dict):
        raise ValueError(f"the state of {name!r} must be a dict, got {shown(store)}.")
    for key in ("z", "mean", "start", START, SUM, AVERAGED, SEEN):
        value = store.get(key, param)
        if not isinstance(value, Tensor):
            raise ValueError(f"{key!r} in the state of {name!r} must be a tensor, got {shown(value)}.")
        if value.shape != (param.shape if key != SEEN or value is param else ()):
            raise ValueError(
                f"the parameter {name!r} has the shape {tuple(param.shape)}, but {key!r} in its state has "
                f"{tuple(value.shape)}. Build the model and the optimiser as those of the run."
            )


def refuse_foreign(saved: Mapping[str, Any], kind: Kind) -> list[str]:
    """Refuse the state of another optimiser, of other pieces or averages; say where it is of another geometry or metric."""
    missing = [key for key in SHARED if key not in saved]
    if missing:
        raise ValueError(
            f"this is not a state_dict of MetaMD: its param groups lack {', '.join(missing)}. "
            "Load it into the optimiser that it was taken from."
        )
    averaging, steps = saved.get("averaging", kind.averaging), saved.get("steps")
    theirs, ours = (
        f"a schedule of {n} steps inside" if n is not None else "no schedule inside" for n in (steps, kind.steps)
    )
    pieces = saved["weights"].numel() if isinstance(saved["weights"], Tensor) else kind.pieces
    refused = (
        (
            pieces != kind.pieces,
            f"{pieces} pieces, but this optimiser's geometry has {kind.pieces}. Build MetaMD with the "
            "geometry that the run used.",
        ),
        (
            averaging not in get_args(Average),
            f"averaging={averaging!r}, which this version no longer has. Start a new run from the parameters, or finish the "
            "run with the version that began it.",
        ),
        (
            averaging != kind.averaging,
            f"averaging={averaging!r}, but this optimiser has {kind.averaging!r}, and its averages would be wrong. Build "
            f"MetaMD with averaging={averaging!r}, or start a new run from the parameters.",
        ),
        (
            (steps is None) != (kind.steps is None),  # the lr of a group is a constant with a schedule inside, else moves
            f"{theirs}, but this optimiser has {ours}: its rates would be wrong. Build the optimiser as that of the run: "
            "MetaMD(..., steps=N), or metamd.prepare.",
        ),
    )
    for wrong, sentence in refused:
        if wrong:
            raise ValueError(f"this state_dict is of a run with {sentence}")
    other = []
    if steps != kind.steps:
        other.append(f"this state_dict is of a run with {theirs}, and will be continued with {ours}.")
    return other + [
        f"this state_dict is of a run in another {what}: the continued run will not be the one that was "
        f"interrupted. Build MetaMD with the {what} that the run used, if that was meant."
        for what in ("geometry", "metric")
        if saved.get(what, getattr(kind, what)) != getattr(kind, what)
    ]


SEEN = "seen"
"""The key of a parameter's digest in its state: what it was when the state was taken."""

EDITED = -1
"""The digest of a parameter that somebody had changed before the state was taken: it is that of no parameter."""

_CHUNK, _MIX, _ROW = 2**20, 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51


def digests(named: Params) -> dict[str, int]:
    """A number for the type and the bits of every parameter; the same whether it is whole or cut over processes.

    Integers are added, so that the order does not matter; each is multiplied by a number that belongs to its place.
    """
    sums = {}
    for name, p in named.items():
        x = local(p.detach())
        bits = (
            x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]).reshape(x.shape or (1,))
        )
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        places = []
        for i, n in enumerate(p.shape):
            along = torch.arange(n).reshape([1] + [n if j == i else 1 for j in range(p.ndim)])
            places.append(local_metric(along, p)[0] * (_ROW >> i))
        rows = max(1, _CHUNK // max(1, bits[:1].numel()))
        for low in range(0, len(bits), rows):  # in chunks: whole tensors of integers would need twice the memory
            v = bits[low : low + rows].to(torch.int64) * _MIX
            v = (v ^ (v >> 29)) * _MIX
            place = sum((at[low : low + rows] if i == 0 else at for i, at in enumerate(places)), torch.ones_like(total))
            total += (v * (2 * place + 1)).sum()
        sums[name] = total.cpu()
    whole = sum_shards(sums, named)
    return {n: (zlib.crc32(str(p.dtype).encode()) % 2**7 << 56) | int(whole[n]) % 2**56 for n, p in named.items()}


def differs(was: int, now: int) -> bool:
    """Whether a parameter has been changed. Where its type has, that cannot be told, and counts as no."""
    return was == EDITED or (was >> 56 == now >> 56 and was != now)


def mend_state(state_dict: Mapping[str, Any], kind: Kind, groups: Sequence[Mapping[str, Any]], state: Any) -> None:
    """Undo what loading does to sums of half-precision parameters: torch rounds all state to the parameter's dtype.

    What an online metric kept under another rule means something else: it is forgotten, and begins anew.
    """
    rules = {code.split()[0] for code in (state_dict["param_groups"][0].get("metric", kind.metric), kind.metric)}
    forgotten = (*KEPT, *FORMER, "counted", "found") if len(rules) > 1 else ()
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    for i, p in zip(ids, (p for group in groups for p in group["params"]), strict=True):
        saved = state_dict["state"].get(i, {})
        for key in (SUM, AVERAGED, SEEN, "mean", *KEPT):
            if key in saved:
                dtype = saved[key].dtype if key in (SUM, AVERAGED, SEEN) else torch.promote_types(p.dtype, torch.float32)
                state[p][key] = saved[key].detach().clone().to(p.device, dtype)
        for key in forgotten:
            state.get(p, {}).pop(key, None)


@dataclass
class PieceRecord:
    """The active piece of every step, kept as runs of equal ones so that a million steps stay small."""

    runs: list[list[int]] = field(default_factory=list)  # [piece, steps]; "0x2 2x1" is the text for pieces 0, 0, 2

    def append(self, piece: int) -> None:
        """Note the piece of one more step."""
        if self.runs and self.runs[-1][0] == piece:
            self.runs[-1][1] += 1
        else:
            self.runs.append([piece, 1])

    def expand(self) -> Tensor:
        """One integer per step."""
        pieces = torch.tensor([p for p, _ in self.runs], dtype=torch.int64)
        return pieces.repeat_interleave(torch.tensor([n for _, n in self.runs], dtype=torch.int64))

    def encode(self) -> str:
        """The runs as text, for a state_dict: a leaf of any length, which distributed checkpoints need."""
        return " ".join(f"{p}x{n}" for p, n in self.runs)

    @classmethod
    def decode(cls, text: str) -> "PieceRecord":
        """The record that was encoded."""
        return cls([[int(x) for x in run.split("x")] for run in text.split()])

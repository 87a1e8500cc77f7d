"""What a state_dict holds of a run, and going on from it: what is refused, warned of, and kept from being rounded."""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from metamd.files.usage import Average
from metamd.optimiser.certificate import SUM
from metamd.potentials.online import KEPT, Online

SHARED = ("step", "weights", "safeguard", "pieces", "geometry")
"""Whole-model state. It lies in every param group, where state_dict, distributed checkpoints and low precision keep it."""

FORMER = ("products", "turn")
"""What earlier versions kept where the output side of a weight was followed."""


@dataclass(frozen=True)
class Kind:
    """What a run is one of, in a few letters each, as its state_dict says it; one of another kind means something else."""

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


def refuse_foreign(state_dict: Mapping[str, Any], kind: Kind) -> None:
    """Refuse the state_dict of another optimiser, of other pieces or averages; warn of one of another geometry or metric."""
    saved = state_dict["param_groups"][0] if state_dict.get("param_groups") else {}
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
    refused = (
        (
            len(saved["weights"]) != kind.pieces,
            f"{len(saved['weights'])} pieces, but this optimiser's geometry has {kind.pieces}. Build MetaMD with the "
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
    if steps != kind.steps:
        warnings.warn(f"this state_dict is of a run with {theirs}, and will be continued with {ours}.", stacklevel=3)
    for what in ("geometry", "metric"):
        if saved.get(what, getattr(kind, what)) != getattr(kind, what):
            warnings.warn(
                f"this state_dict is of a run in another {what}: the continued run will not be the one that was "
                f"interrupted. Build MetaMD with the {what} that the run used, if that was meant.",
                stacklevel=3,
            )


def mend_state(state_dict: Mapping[str, Any], kind: Kind, groups: Sequence[Mapping[str, Any]], state: Any) -> None:
    """Undo what loading does to sums of half-precision parameters: torch rounds all state to the parameter's dtype.

    What an online metric kept under another rule means something else: it is forgotten, and begins anew.
    """
    rules = {code.split()[0] for code in (state_dict["param_groups"][0].get("metric", kind.metric), kind.metric)}
    forgotten = (*KEPT, *FORMER, "counted", "found") if len(rules) > 1 else ()
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    for i, p in zip(ids, (p for group in groups for p in group["params"]), strict=True):
        saved = state_dict["state"].get(i, {})
        for key in (SUM, "mean", *KEPT):
            if key in saved:
                dtype = saved[key].dtype if key == SUM else torch.promote_types(p.dtype, torch.float32)
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

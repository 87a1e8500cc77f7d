"""Going on with a run from its state_dict: what is refused, what is warned of, and what torch's loading would round."""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metamd.optimiser.certificate.sums import SUM
from metamd.potentials.online import KEPT, Online

SHARED = ("step", "weights", "safeguard", "pieces", "geometry")
"""Whole-model state. It lies in every param group, where state_dict, distributed checkpoints and low precision keep it."""


@dataclass(frozen=True)
class Kind:
    """What a run is one of, in a few letters each; a state_dict of another kind means something else.

    Args:
        pieces: N of the geometry, 0 for one without pieces.
        geometry: its fingerprint.
        metric: "learned", or the rule that it follows the run by and a fingerprint of its numbers; see `metric_code`.
        averaging: the kind of average.
    """

    pieces: int
    geometry: str
    metric: str
    averaging: str

    def shared(self) -> dict[str, str]:
        """What a state_dict says about it."""
        return {"geometry": self.geometry, "metric": self.metric, "averaging": self.averaging}


def metric_code(online: Online | None) -> str:
    """The metric in a few letters: the rule, what else is followed, and a fingerprint of all its numbers."""
    if online is None:
        return "learned"
    numbers = hashlib.sha256(json.dumps(online.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
    turned = online.refresh and online.rule != "polar"  # polar averages are the same however often a direction is found
    return f"{online.rule}{'-refreshed' if turned else ''}{'-signal' if online.signal else ''} {numbers}"


def refuse_foreign(state_dict: Mapping[str, Any], kind: Kind) -> None:
    """Refuse the state_dict of another optimiser, of other pieces or averages; warn of one of another geometry or metric.

    Args:
        state_dict: what is to be loaded; one from before metrics and averages were noted has none to compare.
        kind: of the optimiser.
    """
    saved = state_dict["param_groups"][0] if state_dict.get("param_groups") else {}
    missing = [key for key in SHARED if key not in saved]
    if missing:
        raise ValueError(
            f"this is not a state_dict of MetaMD: its param groups lack {', '.join(missing)}. "
            "Load it into the optimiser that it was taken from."
        )
    if len(saved["weights"]) != kind.pieces:
        raise ValueError(
            f"this state_dict is of a run with {len(saved['weights'])} pieces, but this optimiser's geometry has "
            f"{kind.pieces}. Build MetaMD with the geometry that the run used."
        )
    averaging = saved.get("averaging", kind.averaging)
    if averaging != kind.averaging:
        raise ValueError(
            f"this state_dict is of a run with averaging={averaging!r}, but this optimiser has {kind.averaging!r}, and its "
            f"averages would be wrong. Build MetaMD with averaging={averaging!r}, or start a new run from the parameters."
        )
    for what in ("geometry", "metric"):
        if saved.get(what, getattr(kind, what)) != getattr(kind, what):
            warnings.warn(
                f"this state_dict is of a run in another {what}: the continued run will not be the one that was "
                f"interrupted. Build MetaMD with the {what} that the run used, if that was meant.",
                stacklevel=3,
            )


def forget_metric(state_dict: Mapping[str, Any], kind: Kind, state: Any) -> None:
    """Forget what an online metric kept under another rule, for which it means something else: it begins anew.

    Args:
        state_dict: what was loaded.
        kind: of the optimiser.
        state: the optimiser's, by parameter.
    """
    rules = (code.split()[0] for code in (state_dict["param_groups"][0].get("metric", kind.metric), kind.metric))
    if len(set(rules)) > 1:
        for store in state.values():
            for key in (*KEPT, "counted", "found"):
                store.pop(key, None)


def keep_wide(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], state: Any) -> None:
    """Undo what loading does to sums of half-precision parameters: torch rounds all state to the parameter's dtype.

    Args:
        state_dict: what was loaded.
        groups: the optimiser's.
        state: the optimiser's, by parameter.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    for i, p in zip(ids, (p for group in groups for p in group["params"]), strict=True):
        saved = state_dict["state"].get(i, {})
        for key in (SUM, "mean", *KEPT):
            if key in saved:
                dtype = saved[key].dtype if key == SUM else torch.promote_types(p.dtype, torch.float32)
                state[p][key] = saved[key].detach().clone().to(p.device, dtype)

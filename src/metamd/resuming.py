"""Going on with a run from its state_dict: what is refused, what is warned of, and what torch's loading would round."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from metamd.ledger import SUM
from metamd.online import KEPT

SHARED = ("step", "weights", "safeguard", "pieces", "geometry")
"""Whole-model state. It lies in every param group, where state_dict, distributed checkpoints and low precision keep it."""


def refuse_foreign(state_dict: Mapping[str, Any], pieces: int, geometry: str) -> None:
    """Refuse the state_dict of another optimiser or of other pieces; warn of one of another geometry.

    Args:
        state_dict: what is to be loaded.
        pieces: N of the optimiser's geometry, 0 for one without pieces.
        geometry: its fingerprint.
    """
    saved = state_dict["param_groups"][0] if state_dict.get("param_groups") else {}
    missing = [key for key in SHARED if key not in saved]
    if missing:
        raise ValueError(
            f"this is not a state_dict of MetaMD: its param groups lack {', '.join(missing)}. "
            "Load it into the optimiser that it was taken from."
        )
    if len(saved["weights"]) != pieces:
        raise ValueError(
            f"this state_dict is of a run with {len(saved['weights'])} pieces, but this optimiser's geometry has "
            f"{pieces}. Build MetaMD with the geometry that the run used."
        )
    if saved["geometry"] != geometry:
        warnings.warn(
            "this state_dict is of a run in another geometry: the continued run will not be the one that was "
            "interrupted. Build MetaMD with the geometry that the run used, if that was meant.",
            stacklevel=3,
        )


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
        for key in (SUM, *KEPT):
            if key in saved:
                dtype = saved[key].dtype if key == SUM else torch.promote_types(p.dtype, torch.float32)
                state[p][key] = saved[key].detach().clone().to(p.device, dtype)

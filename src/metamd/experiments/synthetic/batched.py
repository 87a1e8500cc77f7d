"""Rivals for many small problems and many settings at once.

The arithmetic is that of the rival of `metamd.rivals`, with one row for every (setting, problem); the tests hold the two
against each other. The optimiser itself would need a Python call per setting and step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metamd import rivals
from metamd.rivals.base import Rival, Stepper

EPS = 1e-8
"""torch.optim's."""

Setting = dict[str, float]
State = dict[str, Tensor]
Rule = Callable[[Tensor, State, Mapping[str, Tensor], int], Tensor]
"""The displacement from (gradient, state, settings, steps taken before); it updates the state, rows that start at zero."""


@dataclass(frozen=True)
class BatchedRival:
    """An optimiser and the grids on which it is tuned, fixed before any result was seen.

    Args:
        name: for tables.
        rule: its step.
        namesake: the same as an optimiser.
        others: the further hyperparameters by name: torch's default first, then what else is tried.
    """

    name: str
    rule: Rule
    namesake: Rival | None
    others: Mapping[str, tuple[float, ...]]

    def grid(self, rates: Mapping[str, Any], *, everything: bool) -> list[Setting]:
        """All settings to try.

        Args:
            rates: `low` and `high`, powers of ten, and `per_decade`.
            everything: whether to vary the other hyperparameters too.
        """
        count = round((rates["high"] - rates["low"]) * rates["per_decade"]) + 1
        lrs = np.logspace(rates["low"], rates["high"], count).tolist()
        others = [values if everything else values[:1] for values in self.others.values()]
        return [dict(zip(("lr", *self.others), values, strict=True)) for values in product(lrs, *others)]

    def torch(self, theta: torch.nn.Parameter, setting: Setting) -> Stepper:
        """The namesake with this setting.

        Args:
            theta: what it moves.
            setting: one of the grid.
        """
        if self.namesake is None:
            raise ValueError(f"{self.name} has no namesake among the rivals. Use the rule.")
        return self.namesake.with_setting("constant", **setting).start([("theta", theta)])


def _sgd(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    return setting["lr"] * grad


def _momentum(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    state["buffer"] = setting["momentum"] * state.get("buffer", 0.0) + grad
    return setting["lr"] * state["buffer"]


def _adam(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    b1, b2, t = setting["beta1"], setting["beta2"], steps + 1
    state["mean"] = b1 * state.get("mean", 0.0) + (1 - b1) * grad
    state["square"] = b2 * state.get("square", 0.0) + (1 - b2) * grad.square()
    scale = (state["square"] / (1 - b2**t)).sqrt() + EPS
    return setting["lr"] / (1 - b1**t) * state["mean"] / scale


def _rmsprop(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    alpha = setting["alpha"]
    state["square"] = alpha * state.get("square", 0.0) + (1 - alpha) * grad.square()
    state["buffer"] = setting["momentum"] * state.get("buffer", 0.0) + grad / (state["square"].sqrt() + EPS)
    return setting["lr"] * state["buffer"]


def _diagonal(grad: Tensor, state: State, setting: Mapping[str, Tensor], steps: int) -> Tensor:
    return grad / torch.cat([d for _, d in sorted(setting.items())], 1)


RIVALS = {
    "sgd": BatchedRival("SGD", _sgd, rivals.rival("sgd"), {}),
    "sgd-m": BatchedRival("SGD-M", _momentum, rivals.rival("sgdm"), {"momentum": (0.9, 0.5, 0.7, 0.8, 0.95, 0.97, 0.99)}),
    "adam": BatchedRival(
        "Adam", _adam, rivals.rival("adam"), {"beta1": (0.9, 0.0, 0.5, 0.8, 0.95), "beta2": (0.999, 0.5, 0.9, 0.99, 0.9999)}
    ),
    "rmsprop": BatchedRival(
        "RMSprop",
        _rmsprop,
        rivals.rival("rmsprop"),
        {"alpha": (0.99, 0.5, 0.9, 0.999, 0.9999), "momentum": (0.0, 0.5, 0.8, 0.9, 0.95)},
    ),
}

DIAGONAL = BatchedRival("one diagonal", _diagonal, None, {})
"""Mirror descent in one fixed diagonal metric; its settings are `d0`, `d1`, ... ."""

"""Rivals that are judged by the tail average of their iterates, as MetaMD may be: it is nobody's privilege."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from metamd.optimiser.averaging import follow, to_average, to_iterate
from metamd.rivals.base import Named, Rival, Setting, Stepper


class Averaged:
    """An optimiser beside which the tail average of its parameters is kept; `eval()` puts it in their place.

    Args:
        optimiser: takes the steps.
        params: what it trains.
    """

    def __init__(self, optimiser: Stepper, params: Sequence[nn.Parameter]) -> None:
        self.optimiser, self.param_groups = optimiser, optimiser.param_groups
        self.taken, self._training = 0, True
        self.state: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in params}

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, and move the averages towards where it led."""
        if not self._training:
            raise RuntimeError("this optimiser is in eval mode: its parameters are averages now. Call train() first.")
        self.optimiser.step()
        self.taken += 1
        for p, store in self.state.items():
            follow(p, store, self.taken)

    @torch.no_grad()
    def eval(self) -> None:
        """Put the averages into the parameters."""
        if self._training:
            for p, store in self.state.items():
                if "mean" in store:
                    to_average(p, store)
            self._training = False

    @torch.no_grad()
    def train(self) -> None:
        """Put the iterates back."""
        if not self._training:
            for p, store in self.state.items():
                if "mean" in store:
                    to_iterate(p, store)
            self._training = True


def averaged(rival: Rival) -> Rival:
    """The same rival, judged by the tail average of its iterates.

    Args:
        rival: one without modes of its own.

    Example:
        >>> from metamd.rivals import rival
        >>> averaged(rival("adam")).name
        'adam-averaged'
    """

    def make(named: Named, setting: Setting) -> Averaged:
        return Averaged(rival.make(named, setting), [p for _, p in named])

    return replace(rival, name=f"{rival.name}-averaged", title=f"{rival.title}, averaged", make=make)

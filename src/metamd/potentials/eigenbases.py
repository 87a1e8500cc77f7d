"""Eigenbases of both sides of a weight, which follow the run: where neither side is known from the family [Vyas2024].

With C_t the gradient of a weight in learned coordinates, L_t and R_t the averages of C C' and C'C, and U, V orthogonal with
columns near their eigenvectors, the squares of the turned coordinates

    S_t = b S_{t-1} + (1 - b) (U' C_t V)^2

are those of Adam's rule there, and a step goes along U ((U' A V) / sqrt(S_t / (1 - b^t))) V', A an average of gradients.

When U becomes W, every new coordinate is a sum of old ones with the weights W'U. If the old ones are uncorrelated, the mean
square of the sum is the sum of their mean squares with squared weights: S -> (W'U)^2 S. So S is always in the present bases,
which may change in every step. (SOAP changes them every ten steps, and keeps S as it is.)
"""

from typing import Any

import torch
from torch import Tensor

SQUARED = 0.95
"""b: what averages of squares and products keep of themselves in a step, as SOAP has it."""

FOLLOWED = 256
"""The longest side whose eigenvectors are followed; a longer one keeps its learned coordinates."""

LEAST = 1e-6
"""Directions whose products are smaller than this share of all are not told apart; float32 rounds at a tenth of it."""

SIDES = (("rows", -2), ("columns", -1))
"""The sides of a matrix, and their dimensions."""

FOUND = tuple(f"{side} {what}" for side, _ in SIDES for what in ("products", "basis"))
"""What the state of a weight has beside its squares."""


def turned_step(state: dict[str, Any], c: Tensor, ahead: Tensor, *, epsilon: float, turn: bool) -> tuple[Tensor, Tensor]:
    """The direction of a step in learned coordinates, and the metric sqrt(S) in the turned ones.

    Args:
        state: what a weight carries from step to step, empty at first; there may be dimensions of several runs in front.
        c: the coordinates of its gradient, a matrix.
        ahead: the coordinates of the averaged gradient that the step follows.
        epsilon: added to the root.
        turn: whether this step updates the bases.
    """
    if "squares" not in state:
        state["squares"], state["counted"] = torch.zeros_like(c), 0
        for side, at in SIDES:
            if (n := c.shape[at]) <= FOLLOWED:
                state[f"{side} products"] = c.new_zeros(*c.shape[:-2], n, n)
                state[f"{side} basis"] = torch.eye(n, dtype=c.dtype, device=c.device).expand(*c.shape[:-2], n, n).clone()
    state["counted"] += 1
    state["squares"].lerp_(turned(state, c).square_(), 1 - SQUARED)
    for side, products in (("rows", c @ c.mT), ("columns", c.mT @ c)):
        if f"{side} products" in state:
            state[f"{side} products"].lerp_(products, 1 - SQUARED)
            if turn:
                _turn(state, side)
    metric = (state["squares"] / (1 - SQUARED ** state["counted"])).sqrt_().add_(epsilon)
    return turned(state, turned(state, ahead).div_(metric), back=True), metric


def turned(state: dict[str, Any], m: Tensor, *, back: bool = False) -> Tensor:
    """U'mV, or U m V' on the way back."""
    rows, columns = state.get("rows basis"), state.get("columns basis")
    m = m.clone() if rows is None else (rows if back else rows.mT) @ m
    return m if columns is None else m @ (columns.mT if back else columns)


def _turn(state: dict[str, Any], side: str) -> None:
    """One step of orthogonal iteration towards the eigenvectors of the products; the squares are carried over."""
    old, products = state[f"{side} basis"], state[f"{side} products"]
    # Directions without any gradient stay where they are: without the share of all others rounding would choose new ones.
    shift = LEAST * products.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    new = torch.linalg.qr(products @ old + shift * old)[0]
    weights = (new.mT @ old).square_()
    state["squares"] = weights @ state["squares"] if side == "rows" else state["squares"] @ weights.mT
    state[f"{side} basis"] = new

"""The metric adapted during the run, in learned coordinates: the basis is learned, the diagonal in it is not.

With c = V'g the coordinates of a gradient, H_t = s a_t is the metric of step t, theta <- theta - lr V (c / H_t), where

    a_t = sqrt(sum_{r <= t} c_r^2)                       rule "sum", AdaGrad's [Duchi2011]
    a_t = sqrt(average of c_r^2, beta a step)            rule "average", Adam's [Kingma2015]

and s, a number per tensor, is learned: see `metamd.choosing`. No eigendecomposition is made during a run, unless `refresh`
asks for a basis of the output side as well: hidden units are exchangeable from task to task, so that a family knows the
input side of a weight and not the other. That one is then estimated during the run, as SOAP does on both sides [Vyas2024].
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from metamd.potentials.base import Move
from metamd.potentials.diagonal import MaxDiagonal

Rule = Literal["sum", "average"]

State = dict[str, Any]
"""What a tensor carries from step to step: the `squares` of its coordinates, how many were `counted`, and, where the output
side is followed too, the average `products` of its rows and the `turn`, an orthonormal basis of them."""

FOLLOW = 0.95
"""What the average of the rows' products keeps of itself in each step."""

LIMIT = 512
"""Rows above which the output side of a weight is not followed."""


@dataclass(frozen=True)
class Online:
    """How the diagonal follows the run, and at which scale.

    Args:
        rule: "sum" of all squared coordinates so far, or exponential "average".
        beta: what an average keeps of itself in each step.
        epsilon: added to the root, so that coordinates without gradients stay where they are.
        scale: s by metric key.
        refresh: follow the output side of weights too, and renew its basis every so many steps; 0 leaves it as it is.

    Example:
        >>> Online("average", scale={"weight": 200.0}).step_size("weight")
        0.005
    """

    rule: Rule = "average"
    beta: float = 0.99
    epsilon: float = 1e-8
    scale: Mapping[str, float] = field(default_factory=dict)
    refresh: int = 0

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f'rule must be "sum" or "average", got {self.rule!r}.')
        if not 0 < self.beta < 1:
            raise ValueError(f"beta must lie between 0 and 1, got {self.beta}. Pass beta=0.99, say.")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}. Pass epsilon=1e-8, say.")
        if type(self.refresh) is not int or self.refresh < 0:
            raise ValueError(f"refresh must be a number of steps, or 0 for never; got {self.refresh!r}.")
        for key, value in self.scale.items():
            if not 0 < value < math.inf:
                raise ValueError(f"the scale of {key!r} must be positive and finite, got {value}.")

    def step_size(self, key: str) -> float:
        """1/s: how far a coordinate moves in a step in which its gradient is as large as usual."""
        if key not in self.scale:
            raise ValueError(f"there is no online scale for {key!r}. Learn it with metamd.learn_usage on this family.")
        return 1 / self.scale[key]

    def metric(self, coordinates: Tensor, state: State) -> Tensor:
        """a_t, the present gradient included; the state is brought up to date.

        Args:
            coordinates: c.
            state: of this tensor; empty at the first step.
        """
        if "squares" not in state:
            state["squares"], state["counted"] = torch.zeros_like(coordinates), 0
        state["counted"] += 1
        squares = state["squares"]
        if self.rule == "sum":
            squares.addcmul_(coordinates, coordinates)
            return squares.sqrt().add_(self.epsilon)
        squares.lerp_(coordinates.square(), 1 - self.beta)
        return (squares / (1 - self.beta ** state["counted"])).sqrt_().add_(self.epsilon)

    def turn(self, coordinates: Tensor, state: State) -> Tensor | None:
        """The basis of the output side, brought up to date with the present gradient; None where it is not followed.

        It is renewed by one step of orthogonal iteration, and the squares are kept as they are.

        Args:
            coordinates: V'g, (rows, columns).
            state: of this tensor.
        """
        if not self.refresh or coordinates.ndim != 2 or not 1 < coordinates.shape[0] <= LIMIT:
            return None
        products = coordinates @ coordinates.mT
        if "products" not in state:
            state["products"] = (1 - FOLLOW) * products
            state["turn"] = torch.linalg.eigh(state["products"])[1]
        else:
            state["products"].lerp_(products, 1 - FOLLOW)
            if state["counted"] % self.refresh == 0:
                state["turn"] = torch.linalg.qr(state["products"] @ state["turn"])[0]
        basis: Tensor = state["turn"]
        return basis

    def advance(self, potential: MaxDiagonal, name: str, x: Tensor, move: Move, state: State) -> tuple[Tensor, Tensor]:
        """Take the step of one tensor in place.

        Args:
            potential: bound; its basis and its keys are used, its metrics are not.
            name: of the tensor.
            x: the tensor.
            move: gradient, step size and decay.
            state: of this tensor.

        Returns:
            c and a_t.
        """
        coordinates = potential.basis.into(name, move.grad)
        turn = self.turn(coordinates, state)
        if turn is not None:
            coordinates = turn.mT @ coordinates
        metric = self.metric(coordinates, state)
        if isinstance(move.decay, Tensor) or move.decay != 0:
            x.mul_(1 - move.decay)
        moved = coordinates / metric
        moved = potential.basis.out_of(name, moved if turn is None else turn @ moved).reshape(x.shape)
        x.sub_(moved.to(x.dtype), alpha=float(move.lr) * self.step_size(potential.slots[name].key))
        return coordinates, metric

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types, for a header."""
        fixed = {"rule": self.rule, "beta": self.beta, "epsilon": self.epsilon, "refresh": self.refresh}
        return {**fixed, "scale": dict(self.scale)}

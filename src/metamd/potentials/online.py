"""The metric adapted during the run, in learned coordinates: the basis is learned, the diagonal in it is not.

With c = V'g the coordinates of a gradient, H_t = s a_t is the metric of step t, theta <- theta - lr V (c / H_t), where

    a_t = sqrt(sum_{r <= t} c_r^2)                       rule "sum", AdaGrad's [Duchi2011]
    a_t = sqrt(average of c_r^2, beta a step)            rule "average", Adam's [Kingma2015]

and s, a number per tensor, is learned: see `metamd.learn_usage`. Hidden units are exchangeable from task to task, so that a
family knows the input side of a weight and not the other. Rule "polar" gives the output side a whole metric: with M_t the
average of the gradients G_t of a weight and D the learned metric of its inputs,

    theta <- theta - lr/s (C C')^-1/2 C D^-1/2,  C = A D^-1/2,  A = (1 - beta) G_t + beta M_t,

so that H_t = s (C C')^1/2 x D: steepest descent by the spectral norm of theta D^1/2. For D = 1 it is Muon [Jordan2024]. With
a `signal` the step is multiplied by the share of signal in the gradients of the weight, and H_t divided by it. With a
`refresh` the direction, which takes most of the time, is found every so many steps and taken again in between.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from metamd.potentials.base import Move
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import widen
from metamd.potentials.sharding import local

Rule = Literal["sum", "average", "polar"]

State = dict[str, Any]
"""What a tensor carries from step to step: the `squares` of its coordinates, and how many were `counted`; for the rule
"polar", the `average` of its gradients, with a signal their usual `length`, and the `direction` that is taken again, `found`
so many steps into the run. Half precision has them in float32."""

KEPT = ("squares", "average", "length", "direction")
"""The tensors among them. Of sharded parameters `MetaMD` keeps the first two as shards of tensors that are spread alike."""

Watch = Callable[[Tensor, Tensor], None]
"""Called with the energy c' a_t^-1 c and the metric a_t of a step."""

SQUARES = 0.99
"""What the squares of a tensor that is no matrix keep of themselves in each step, under the rule "polar"."""

SETTLED = 15
"""Steps after which directions are found every second step instead of every one, then every third, up to `refresh`."""


@dataclass(frozen=True)
class Online:
    """How the diagonal follows the run, and at which scale.

    Args:
        rule: "sum" of all squared coordinates so far, their exponential "average", or "polar": all directions of a weight's
            averaged gradient are taken with the same length, in learned coordinates.
        beta: what an average keeps of itself in each step; that of the gradients for "polar".
        epsilon: added to the root, so that coordinates without gradients stay where they are. Under the rule "polar" a
            weight whose gradient has no entry as large as this moves by as much less.
        scale: s by metric key.
        refresh: under the rule "polar", find the direction of a weight every so many steps and take it again in between, at
            the length that is right then: cheaper steps, of which more are needed; 0 finds it in every step. At the start of
            a run, where directions change most, it is found more often.
        signal: what the average of the squared lengths of a weight's gradients keeps of itself in each step, under the rule
            "polar": a weight then moves by the share of signal in its gradients, the length of their average over the root
            of that of their squares. Where gradients agree, as at the start of a run, steps are several times longer than
            where noise is left. 0 for steps of the same length throughout.

    Example:
        >>> Online("average", scale={"weight": 200.0}).step_size("weight")
        0.005
    """

    rule: Rule = "average"
    beta: float = 0.99
    epsilon: float = 1e-8
    scale: Mapping[str, float] = field(default_factory=dict)
    refresh: int = 0
    signal: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f'rule must be "sum", "average" or "polar", got {self.rule!r}.')
        if not 0 < self.beta < 1:
            raise ValueError(f"beta must lie between 0 and 1, got {self.beta}. Pass beta=0.99, say.")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}. Pass epsilon=1e-8, say.")
        if type(self.refresh) is not int or self.refresh < 0:
            raise ValueError(f"refresh must be a number of steps, or 0 for every one; got {self.refresh!r}.")
        if self.refresh and self.rule != "polar":
            raise ValueError(f'refresh is for the rule "polar", got {self.refresh} for {self.rule!r}. Leave it out.')
        if not 0 <= self.signal < 1 or (self.signal and self.rule != "polar"):
            raise ValueError(
                f'signal must lie in [0, 1), and is for the rule "polar"; got {self.signal} for {self.rule!r}. Leave it out.'
            )
        for key, value in self.scale.items():
            if not 0 < value < math.inf:
                raise ValueError(f"the scale of {key!r} must be positive and finite, got {value}.")

    def step_size(self, key: str) -> float:
        """1/s: how far a coordinate moves in a step in which its gradient is as large as usual."""
        if key not in self.scale:
            raise ValueError(f"there is no online scale for {key!r}. Learn it with metamd.learn_usage on this family.")
        return 1 / self.scale[key]

    def metric(self, coordinates: Tensor, state: State) -> Tensor:
        """a_t of coordinates c, the present gradient included; the state, empty at first, is brought up to date."""
        if "squares" not in state:
            state["squares"], state["counted"] = torch.zeros_like(coordinates), 0
        state["counted"] += 1
        squares = local(state["squares"])
        if self.rule == "sum":
            squares.addcmul_(coordinates, coordinates)
            return squares.sqrt().add_(self.epsilon)
        beta = SQUARES if self.rule == "polar" else self.beta
        squares.lerp_(coordinates.square(), 1 - beta)
        return (squares / (1 - beta ** state["counted"])).sqrt_().add_(self.epsilon)

    def advance(
        self, potential: MaxDiagonal, name: str, x: Tensor, move: Move, state: State, watch: Watch | None = None
    ) -> None:
        """Take the step of one tensor in place; `watch` is told what the step met, before the tensor moves.

        Of the potential the basis and the keys are used, and, for the rule "polar", the metric of its first piece.
        """
        grad, share = widen(move.grad), 1.0
        if self.rule != "polar":  # V (c / a_t)
            coordinates = potential.basis.into(name, grad)
            metric = self.metric(coordinates, state)
            moved = coordinates / metric
            if watch is not None:
                watch((coordinates * moved).sum(), metric)
            moved = potential.basis.out_of(name, moved)
        elif grad.ndim < 2:  # a vector beside polar steps: its average gradient over the root of the average square
            average, metric = _average(grad, state, self.beta), self.metric(grad, state)
            if watch is not None:
                watch((grad.square() / metric).sum(), metric)
            moved, share = grad.lerp(average, self.beta).div_(metric), 1 / (1 - self.beta ** (state["counted"] + 1))
        else:
            moved, share = polar_step(self, potential, name, grad, state, watch)
        size = float(move.lr) * self.step_size(potential.slots[name].key) * share
        move.decayed(x, x).sub_(moved.reshape(x.shape), alpha=size)

    def distance(self, potential: MaxDiagonal, name: str, delta: Tensor, metric: Tensor) -> float:
        """|delta|^2 in a metric a, such as the mean of those that `watch` was given."""
        c = potential.basis.into(name, delta)
        if self.rule == "polar" and delta.ndim > 1:
            c = (c * potential.metric(name)[0].detach().sqrt()).reshape(delta.shape[0], -1)
            return float((c * (metric @ c if len(c) <= c.shape[1] else c @ metric)).sum())
        return float((c.square() * metric).sum())

    def __str__(self) -> str:
        """The rule and its numbers but for the scales, in words."""
        renewed = f", direction found every {self.refresh} steps" if self.refresh else ""
        return f"{self.rule} rule, beta {self.beta:g}{f', signal {self.signal:g}' if self.signal else ''}{renewed}"

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Online":
        """What `to_dict` gave, of this version or an earlier one."""
        if found.get("rule") in ("sum", "average"):
            # Earlier versions could turn the output side of weights every `refresh` steps. Scales were learned in both
            # coordinates alike, and the turn gained nothing: such a file is used in its learned coordinates alone.
            found = {**found, "refresh": 0}
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types, for a header."""
        fixed = {"rule": self.rule, "beta": self.beta, "epsilon": self.epsilon, "refresh": self.refresh}
        return {**fixed, "scale": dict(self.scale)} | ({"signal": self.signal} if self.signal else {})


def _power_of_two(size: Tensor) -> Tensor:
    """A number near this one that nothing is rounded in a division by; never zero."""
    known = size.clamp(torch.finfo(size.dtype).tiny, torch.finfo(size.dtype).max)
    return known.log2().floor().exp2()


def _length(x: Tensor) -> float:
    """|x|, as long as it is a number at all."""
    found, limits = float(torch.linalg.vector_norm(x)), torch.finfo(x.dtype)
    if limits.tiny**0.25 < found < limits.max**0.25:  # no square that counts was lost
        return found
    scale = _power_of_two(x.abs().amax())
    return float(torch.linalg.vector_norm(x / scale)) * float(scale)


def _average(grad: Tensor, state: State, beta: float) -> Tensor:
    """M_t, the average of the gradients of a tensor, the present one included."""
    if "average" not in state:
        state["average"] = torch.zeros_like(grad)
    return local(state["average"]).lerp_(grad, 1 - beta)


def polar_step(
    online: Online, potential: MaxDiagonal, name: str, grad: Tensor, state: State, watch: Watch | None = None
) -> tuple[Tensor, float]:
    """The direction (C C')^-1/2 C D^-1/2 of a weight, C = A D^-1/2, and the share of it that is taken.

    Beside torch's Muon: M_t and A are its two `lerp`s, and `inverse_root` takes the place of its Newton-Schulz iteration.
    """
    average = _average(grad, state, online.beta)  # M_t
    if not grad.numel():
        return grad, 1.0
    due, share = _due(online, state), _signal_share(online, grad, average, state)
    if not due:
        return state["direction"], share
    ahead = grad.lerp(average, online.beta)  # A, Nesterov's
    size = ahead.abs().amax()
    scale = _power_of_two(size)  # the products of small gradients would be lost, those of large ones overflow
    a, full, rows = ahead / scale, (size / online.epsilon).clamp_max(1), ahead.shape[0]
    d, known = potential.metric(name)[0], max(share, torch.finfo(scale.dtype).tiny)
    # the energy and the metric of the gradient as it is, not over the scale; the metric is over the share
    told = watch and (lambda energy, metric: watch(scale * energy * share, scale / known * metric))
    if d.ndim == 2 and d.shape[0] == 1 and rows <= math.prod(ahead.shape[1:]):
        # the metric is of the columns: C C' = A D^-1 A' and C D^-1/2 = A D^-1, one product with D^-1 for both
        b = potential.basis.descend(name, torch.zeros_like(a), a, d, -1.0, None).reshape(rows, -1)
        direction = inverse_root(b @ a.reshape(rows, -1).mT, full, told) @ b
    else:
        coordinates, root = potential.basis.into(name, a), d.sqrt()
        c = (coordinates / root).reshape(rows, -1)
        wide = rows <= c.shape[1]
        c = inverse_root(c @ c.mT, full, told) @ c if wide else c @ inverse_root(c.mT @ c, full, told)
        direction = potential.basis.out_of(name, c.reshape(coordinates.shape) / root)
    if online.refresh > 1:
        state["direction"] = direction
    return direction, share


def _due(online: Online, state: State) -> bool:
    """Count a step; whether its direction is to be found, and that of an earlier step not taken again."""
    if online.signal or online.refresh:
        state["counted"] = state.get("counted", 0) + 1
    if online.refresh < 2:
        return True
    interval = min(online.refresh, 1 + state["counted"] // SETTLED)
    if "direction" in state and state["counted"] - state["found"] < interval:
        return False
    state["found"] = state["counted"]
    return True


def _signal_share(online: Online, grad: Tensor, average: Tensor, state: State) -> float:
    """The share of signal in the gradients of a weight; 1 at the first step and where it is not followed."""
    if not online.signal:
        return 1.0
    if "length" not in state:
        state["length"] = grad.new_zeros(())
    count, kept = state["counted"], state["length"]
    # a root mean square, whose squares are never formed: they would be lost or overflow where lengths are not
    length = math.hypot(math.sqrt(online.signal) * float(kept), math.sqrt(1 - online.signal) * _length(grad))
    kept.fill_(length)
    usual = max(length / math.sqrt(1 - online.signal**count), torch.finfo(grad.dtype).tiny)
    return min(_length(average) / (1 - online.beta**count) / usual, 1.0)


def inverse_root(products: Tensor, full: Tensor, watch: Watch | None) -> Tensor:
    """A^-1/2 of A = C C', times `full`, by eigenvalues: the one place where they are found.

    Directions lost in rounding, of a length below the root of the precision, are left small. What is not finite gives NaN:
    torch would refuse it when other tensors have moved already.
    """
    if not math.isfinite(float(products.detach().sum())) and not bool(products.isfinite().all()):
        values, vectors = torch.full_like(products[0], math.nan), torch.full_like(products, math.nan)
    else:
        values, vectors = torch.linalg.eigh(products)
    limits = torch.finfo(products.dtype)
    roots = values.maximum((limits.eps * values[-1]).clamp_min(limits.tiny)).sqrt()
    if watch is not None:
        watch(values.clamp_min(0).sqrt().sum(), (vectors * values.clamp_min(0).sqrt()) @ vectors.mT)
    return (vectors * (full / roots)) @ vectors.mT

"""The metric adapted during the run, in learned coordinates: the basis is learned, the diagonal in it is not.

With c = V'g the coordinates of a gradient, H_t = s a_t is the metric of step t, theta <- theta - lr V (c / H_t), where

    a_t = sqrt(sum_{r <= t} c_r^2)                       rule "sum", AdaGrad's [Duchi2011]
    a_t = sqrt(average of c_r^2, beta a step)            rule "average", Adam's [Kingma2015]

and s, a number per tensor, is learned: see `metamd.learn_usage`. Hidden units are exchangeable from task to task, so that a
family knows the input side of a weight and not the other. Rule "polar" gives the output side a whole metric: with M_t the
average of the gradients G_t of a weight and D the learned metric of its inputs,

    theta <- theta - lr/s (C C')^-1/2 C D^-1/2,  C = A D^-1/2,  A = (1 - beta) G_t + beta M_t,

so that H_t = s (C C')^1/2 x D: steepest descent by the spectral norm of theta D^1/2. For D = 1 it is Muon [Jordan2024]. With
`whiten` iterations a polynomial of C C' takes the place of its inverse root, see `metamd.potentials.whitening`. With a
`block` the rows of C are whitened by so many together, which costs less. With a `signal` the step is multiplied by the share
of signal in the gradients of the weight, and H_t divided by it. With a `refresh` the direction, which takes most of the
time, is found every so many steps and taken again in between.

Rule "eigen" is the rule "average" along the eigenvectors of both sides of a weight's gradients, which it follows from the
learned coordinates on, with the averaged gradient A of the rule "polar": SOAP's [Vyas2024], see
`metamd.potentials.eigenbases`. It serves families whose hidden units have nothing in common, where steps without noise
become small.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from metamd.potentials.base import Move
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.eigenbases import FOUND, SQUARED, turned, turned_step
from metamd.potentials.forms import widen
from metamd.potentials.sharding import gathered, is_sharded, local, local_part, sum_shards
from metamd.potentials.whitening import MOST, inverse_roots

Rule = Literal["sum", "average", "polar", "eigen"]

OWN_AVERAGE = ("polar", "eigen")
"""The rules that average gradients themselves: they take no momentum."""

State = dict[str, Any]
"""What a tensor carries from step to step: the `squares` of its coordinates, and how many were `counted`; for the rule
"polar", the `average` of its gradients, with a signal their usual `length`, and the `direction` that is taken again, `found`
so many steps into the run; for the rule "eigen" the average, and the products and bases of both sides. Half precision has
them in float32."""

KEPT = ("squares", "average", "length", "direction", *FOUND)
"""The tensors among them. For a sharded parameter `MetaMD` keeps all but the length as shards too. The rule "eigen" takes no
sharded parameters."""

Watch = Callable[[str, Tensor, Tensor], None]
"""Called with the name of a tensor, the energy c' a_t^-1 c and the metric a_t of its step."""

SQUARES = 0.99
"""What the squares of a tensor that is no matrix keep of themselves in each step, under the rule "polar"."""

SETTLED = 15
"""Steps after which directions are found every second step instead of every one, then every third, up to `refresh`."""


@dataclass(slots=True)
class Point:
    """One tensor in one step of an online metric."""

    name: str
    x: Tensor  # it is moved in place
    move: Move
    state: State
    param: Tensor | None = None  # what x is this process's part of, where it may be sharded

    @property
    def whole(self) -> Tensor:
        """The tensor that x is, or that it is a part of."""
        return self.x if self.param is None else self.param

    @property
    def in_place(self) -> bool:
        """Whether Python knows the numbers of the move, and nothing decays."""
        return not isinstance(self.move.lr, Tensor) and not isinstance(self.move.decay, Tensor) and self.move.decay == 0

    def subtract(self, direction: Tensor, size: float | Tensor) -> None:
        """x <- (1 - decay) x - size direction."""
        x = self.move.decayed(self.x, self.x)
        direction = direction.reshape(x.shape)
        if isinstance(size, Tensor):
            x.sub_(direction * size)
        else:
            x.sub_(direction, alpha=size)


@dataclass(frozen=True)
class Online:
    """How the diagonal follows the run, and at which scale.

    Args:
        rule: "sum" of all squared coordinates so far, their exponential "average", "polar": all directions of a weight's
            averaged gradient are taken with the same length, in learned coordinates; or "eigen": the average along the
            eigenvectors of both sides of a weight, which follow the run.
        beta: what an average keeps of itself in each step; that of the gradients for "polar" and "eigen".
        epsilon: added to the root, so that coordinates without gradients stay where they are. Under the rule "polar" a
            weight whose gradient has no entry as large as this moves by as much less.
        scale: s by metric key.
        refresh: under the rule "polar", find the direction of a weight every so many steps and take it again in between, at
            the length that is right then: cheaper steps, of which more are needed; 0 finds it in every step. At the start of
            a run, where directions change most, it is found more often. Under the rule "eigen" the bases follow the run
            every so many steps.
        signal: what the average of the squared lengths of a weight's gradients keeps of itself in each step, under the rule
            "polar": a weight then moves by the share of signal in its gradients, the length of their average over the root
            of that of their squares. Where gradients agree, as at the start of a run, steps are several times longer than
            where noise is left. 0 for steps of the same length throughout.
        whiten: under the rule "polar", how far the directions of a weight are brought to one length: by so many iterations
            of matrix products, which leave the shortest directions short, each more reaching about four times shorter ones.
            0 brings all of them to one length, by eigenvalues.
        block: under the rule "polar", the most rows of a weight that are whitened together (columns, of a weight with more
            rows than columns). Blocks of 64 make a step of a wide layer cheaper, and a little worse; 0 for all of them.

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
    whiten: int = 0
    block: int = 0

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f'rule must be "sum", "average", "polar" or "eigen", got {self.rule!r}.')
        if not 0 < self.beta < 1:
            raise ValueError(f"beta must lie between 0 and 1, got {self.beta}. Pass beta=0.99, say.")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}. Pass epsilon=1e-8, say.")
        if type(self.refresh) is not int or self.refresh < 0:
            raise ValueError(f"refresh must be a number of steps, or 0 for every one; got {self.refresh!r}.")
        if self.refresh and self.rule not in OWN_AVERAGE:
            raise ValueError(
                f'refresh is for the rules "polar" and "eigen", got {self.refresh} for {self.rule!r}. Leave it out.'
            )
        if not 0 <= self.signal < 1 or (self.signal and self.rule != "polar"):
            raise ValueError(
                f'signal must lie in [0, 1), and is for the rule "polar"; got {self.signal} for {self.rule!r}. Leave it out.'
            )
        if type(self.whiten) is not int or not 0 <= self.whiten <= MOST or (self.whiten and self.rule != "polar"):
            raise ValueError(
                f'whiten must be a number of iterations from 0 to {MOST}, and is for the rule "polar"; got {self.whiten!r} '
                f"for {self.rule!r}. Leave it out."
            )
        if type(self.block) is not int or self.block < 0 or (self.block and self.rule != "polar"):
            raise ValueError(
                f'block must be a number of rows, or 0 for all, and is for the rule "polar"; got {self.block!r} for '
                f"{self.rule!r}. Leave it out."
            )
        for key, value in self.scale.items():
            if not 0 < value < math.inf:
                raise ValueError(f"the scale of {key!r} must be positive and finite, got {value}.")

    def step_size(self, key: str) -> float:
        """1/s: how far a coordinate moves in a step in which its gradient is as large as usual."""
        if key not in self.scale:
            raise ValueError(f"there is no online scale for {key!r}. Learn it with metamd.learn_usage on this family.")
        return 1 / self.scale[key]

    def metrics(self, coordinates: list[Tensor], states: Sequence[State]) -> list[Tensor]:
        """a_t of the coordinates c of tensors, the present gradients included; the states, empty at first, are updated."""
        for c, state in zip(coordinates, states, strict=True):
            if "squares" not in state:
                state["squares"], state["counted"] = torch.zeros_like(c), 0
            state["counted"] += 1
        squares = [local(state["squares"]) for state in states]
        if self.rule == "sum":
            torch._foreach_addcmul_(squares, coordinates, coordinates)
            found = torch._foreach_sqrt(squares)
        else:
            beta = {"polar": SQUARES, "eigen": SQUARED}.get(self.rule, self.beta)
            torch._foreach_lerp_(squares, torch._foreach_mul(coordinates, coordinates), 1 - beta)
            found = torch._foreach_div(squares, [1 - beta ** state["counted"] for state in states])
            torch._foreach_sqrt_(found)
        torch._foreach_add_(found, self.epsilon)
        return list(found)

    def lengths(self, grads: list[Tensor], *, narrow: bool = False) -> list[Tensor] | None:
        """The lengths of gradients; None where no step asks for them.

        They are in float64 where the device has it. Narrow ones are found several times sooner, in float32 where the
        gradients are; whoever takes them looks whether they are `ordinary`.
        """
        if not self.signal or not grads:
            return None
        narrow = narrow and all(g.dtype != torch.float64 and g.numel() <= SUMMED for g in grads)
        return list(torch._foreach_norm(grads, 2, torch.float32 if narrow else _wide(grads[0])))

    def advance(
        self,
        potential: MaxDiagonal,
        points: Sequence[Point],
        watch: Watch | None = None,
        lengths: Sequence[Tensor] | None = None,
    ) -> None:
        """Take one step of all these tensors in place; `watch` is told what the step met, before a tensor moves.

        It uses the basis and the keys of the potential, and for the rule "polar" the metric of its first piece. `lengths`
        are the lengths of the gradients, if they are known.
        """
        if self.rule == "polar":
            for device in {p.x.device: None for p in points}:
                here = [i for i, p in enumerate(points) if p.x.device == device]
                known = None if lengths is None else [lengths[i] for i in here]
                polar_step(self, potential, [points[i] for i in here], watch, known)
            return
        if self.rule == "eigen":
            for p in points:
                _eigen_step(self, potential, p, watch)
            return
        coordinates = [potential.basis.into(p.name, widen(p.move.grad)) for p in points]
        metrics = self.metrics(coordinates, [p.state for p in points])
        for p, c, metric in zip(points, coordinates, metrics, strict=True):
            moved = c / metric
            if watch is not None:
                watch(p.name, (c * moved).sum(), metric)
            p.subtract(potential.basis.out_of(p.name, moved), self.size(potential, p))

    def size(self, potential: MaxDiagonal, point: Point) -> float | Tensor:
        """lr/s of a tensor in this step."""
        return point.move.lr * self.step_size(potential.slots[point.name].key)

    def distance(self, potential: MaxDiagonal, name: str, delta: Tensor, metric: Tensor) -> float:
        """|delta|^2 in a metric a, such as the mean of those that `watch` was given."""
        c = potential.basis.into(name, delta)
        if self.rule == "polar" and delta.ndim > 1:
            c = (c * potential.metric(name)[0].detach().sqrt()).reshape(delta.shape[0], -1)
            return float((c * (metric @ c if len(c) <= c.shape[1] else c @ metric)).sum())
        return float((c.square() * metric).sum())

    def __str__(self) -> str:
        """The rule and its numbers but for the scales, in words."""
        said = [f"{self.rule} rule", f"beta {self.beta:g}"]
        said += [f"signal {self.signal:g}"] * bool(self.signal) + [f"whitened {self.whiten} times"] * bool(self.whiten)
        said += [f"blocks of {self.block}"] * bool(self.block)
        found = "bases follow" if self.rule == "eigen" else "direction found"
        return ", ".join(said + [f"{found} every {self.refresh} steps"] * bool(self.refresh))

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
        later = {"signal": self.signal, "whiten": self.whiten, "block": self.block}  # the first files do not have them
        return {**fixed, "scale": dict(self.scale)} | {name: value for name, value in later.items() if value}


def polar_step(
    online: Online, potential: MaxDiagonal, points: Sequence[Point], watch: Watch | None, lengths: Sequence[Tensor] | None
) -> None:
    """A step of the rule "polar" for all tensors of a device. Python reads no number back, for which a GPU would wait.

    Beside torch's Muon: M_t and A are its two `lerp`s, and `inverse_roots` take the place of its Newton-Schulz iteration.
    """
    beta, grads = online.beta, [widen(p.move.grad) for p in points]
    for p, g in zip(points, grads, strict=True):
        if "average" not in p.state:
            p.state["average"] = torch.zeros_like(g)
    averages = [local(p.state["average"]) for p in points]
    torch._foreach_lerp_(averages, grads, 1 - beta)  # M_t
    ahead = torch._foreach_lerp(grads, averages, beta)  # A, Nesterov's

    vectors = [i for i, g in enumerate(grads) if g.ndim < 2]
    if vectors:
        moved, of, along = [points[i] for i in vectors], [grads[i] for i in vectors], [ahead[i] for i in vectors]
        _follow_squares(online, potential, moved, of, along, watch)
    weights = [i for i, p in enumerate(points) if p.whole.ndim > 1 and p.whole.numel()]
    if not weights:
        return
    due = [_due(online, points[i].state) for i in weights]
    shares = None
    if online.signal:
        known = lengths or online.lengths(grads) or []
        moved, of, now = [points[i] for i in weights], [averages[i] for i in weights], [known[i] for i in weights]
        shares = _signal_shares(online, moved, of, now)
    found = [at for at, new in enumerate(due) if new]
    # a sharded weight is gathered when its turn comes, so that no process holds more than one of them whole
    alone = [[at] for at in found if is_sharded(points[weights[at]].whole)]
    for batch in filter(None, [[at for at in found if not is_sharded(points[weights[at]].whole)], *alone]):
        here = [points[weights[at]] for at in batch]
        wholes = [gathered(ahead[weights[at]], points[weights[at]].whole) for at in batch]
        part = shares if shares is None or len(batch) == len(weights) else torch.stack([shares[at] for at in batch])
        _whiten(online, potential, here, wholes, part, watch)
    for at, new in enumerate(due):
        if not new:
            p = points[weights[at]]
            size = online.size(potential, p)
            p.subtract(local(p.state["direction"]), size if shares is None else size * shares[at])


def _eigen_step(online: Online, potential: MaxDiagonal, point: Point, watch: Watch | None) -> None:
    """A step of the rule "eigen" for one tensor."""
    # the average of gradients begins at zero and is not corrected for that: the first steps are short
    state, basis, grad = point.state, potential.basis, widen(point.move.grad)
    average = state.setdefault("average", torch.zeros_like(grad)).lerp_(grad, 1 - online.beta)
    c, ahead = basis.into(point.name, grad), basis.into(point.name, grad.lerp(average, online.beta))
    if point.x.ndim < 2 or not point.x.numel():
        (metric,) = online.metrics([c], [state])
        direction = ahead.div_(metric)
    else:
        c, ahead, turn = c.reshape(len(c), -1), ahead.reshape(len(c), -1), turns(online, state)
        direction, metric = turned_step(state, c, ahead, epsilon=online.epsilon, turn=turn)
    if watch is not None:
        watch(point.name, (turned(state, c).square() / metric).sum(), metric)
    point.subtract(basis.out_of(point.name, direction), online.size(potential, point))


def turns(online: Online, state: State) -> bool:
    """Whether the bases of a weight follow its products in the step that comes, under the rule "eigen"."""
    return bool(state.get("counted", 0) % max(1, online.refresh) == 0)


def _follow_squares(
    online: Online,
    potential: MaxDiagonal,
    points: list[Point],
    grads: list[Tensor],
    ahead: list[Tensor],
    watch: Watch | None,
) -> None:
    """Move vectors, beside weights: by their average gradient over the root of the average square."""
    metrics = online.metrics(grads, [p.state for p in points])
    sizes = [online.size(potential, p) / (1 - online.beta ** (p.state["counted"] + 1)) for p in points]
    if watch is not None:
        for p, g, metric in zip(points, grads, metrics, strict=True):
            watch(p.name, (g.square() / metric).sum(), metric)
    if all(p.in_place and p.x.dtype == a.dtype for p, a in zip(points, ahead, strict=True)):
        torch._foreach_addcdiv_([p.x for p in points], ahead, metrics, [-size for size in sizes])
        return
    for p, a, metric, size in zip(points, ahead, metrics, sizes, strict=True):
        p.subtract(a.div_(metric), size)


def _whiten(
    online: Online,
    potential: MaxDiagonal,
    points: list[Point],
    ahead: list[Tensor],
    shares: Tensor | None,
    watch: Watch | None,
) -> None:
    """Move weights by their shares of (C C')^-1/2 C D^-1/2, C = A D^-1/2; A is overwritten."""
    sizes = torch.stack([a.amax() for a in torch._foreach_abs(ahead)])
    # products of small gradients would be lost, and those of large ones overflow; a power of two rounds nothing
    powers = sizes.clamp_min(max(torch.finfo(a.dtype).tiny for a in ahead)).log2_().floor_().exp2_()
    torch._foreach_mul_(ahead, list(powers.reciprocal().unbind()))
    sides = [_sides(online, potential, p.name, a) for p, a in zip(points, ahead, strict=True)]
    roots = inverse_roots([side.products for side in sides], online.whiten)
    if watch is not None:
        told = sizes.new_ones(len(points)) if shares is None else shares
        for p, side, root, power, share in zip(points, sides, roots, powers, told, strict=True):
            # the energy and the metric of the gradient as it is, not over its power; the metric is over the share
            energy, metric = (side.products * root).sum() * side.factor, torch.linalg.inv(root) * side.factor
            metric = torch.block_diag(*metric)[: side.rows, : side.rows]  # type: ignore[no-untyped-call]
            known = share.clamp_min(torch.finfo(root.dtype).tiny)
            watch(p.name, (power * share) * energy, (power / known).to(metric.dtype) * metric)
    factors = sizes.div_(online.epsilon).clamp_max_(1)
    if any(isinstance(side.factor, Tensor) for side in sides):
        one = factors.new_ones(())
        factors = factors * torch.stack([side.factor if isinstance(side.factor, Tensor) else one for side in sides])
    kept = online.refresh > 1 or is_sharded(points[0].whole)  # the share is not in a direction that is taken again
    torch._foreach_mul_(roots, list((factors if kept or shares is None else factors * shares).unbind()))
    for at, (p, side, root) in enumerate(zip(points, sides, roots, strict=True)):
        size = online.size(potential, p)
        if not kept:
            side.move(p, root, size)
            continue
        direction = local_part(side.out(root).reshape(p.whole.shape), p.whole)
        if online.refresh > 1:
            p.state["direction"] = direction
        p.subtract(direction, size if shares is None else size * shares[at])


@dataclass(slots=True)
class _Sides:
    """A weight as a step sees it: the root of its `products` stands on the left of `right`, block by block."""

    products: Tensor  # c C C' of every block, (blocks, n, n), c a number
    right: Tensor  # c C D^-1/2, (blocks, n, columns); c C itself where D^-1/2 is not of the columns alone
    factor: float | Tensor  # c^-1/2, by which root and direction are too long
    rows: int  # of the weight; the last block may have some more, which are zero
    finish: Callable[[Tensor], Tensor] | None  # from (C C')^-1/2 C to the direction, where D^-1/2 is missing

    def out(self, root: Tensor) -> Tensor:
        """The direction, as a matrix or in the shape of the weight."""
        found = torch.bmm(root, self.right).flatten(0, 1)[: self.rows]
        return found if self.finish is None else self.finish(found)

    def move(self, point: Point, root: Tensor, size: float | Tensor) -> None:
        """x <- (1 - decay) x - size root right, in one product where memory allows it."""
        x, decay, right = point.x, point.move.decay, self.right
        fits = self.finish is None and right.shape[0] * right.shape[1] == self.rows and x.dtype == right.dtype
        if not fits or isinstance(size, Tensor) or isinstance(decay, Tensor) or not x.is_contiguous():
            point.subtract(self.out(root), size)
        else:
            x.view(right.shape).baddbmm_(root, right, beta=1 - decay, alpha=-size)


def _sides(online: Online, potential: MaxDiagonal, name: str, a: Tensor) -> _Sides:
    rows, basis, d = a.shape[0], potential.basis, potential.metric(name)[0]
    if d.ndim == 2 and d.shape[0] == 1 and rows <= math.prod(a.shape[1:]):
        # the metric is of the columns: C C' = A D^-1 A' and C D^-1/2 = A D^-1, one product with D^-1 for both
        inverse, factor = basis.divided(name, a, d)
        left, right = (_blocks(m, online.block) for m in (a.reshape(rows, -1), inverse))
        return _Sides(torch.bmm(right, left.mT), right, factor, rows, None)
    coordinates, root = basis.into(name, a), d.sqrt()
    c = (coordinates / root).reshape(rows, -1)
    wide = rows <= c.shape[1]

    def finish(whitened: Tensor) -> Tensor:
        found = whitened if wide else whitened.mT
        return basis.out_of(name, found.reshape(coordinates.shape) / root)

    c = _blocks(c if wide else c.mT, online.block)
    return _Sides(torch.bmm(c, c.mT), c, 1.0, min(rows, coordinates.numel() // rows), finish)


def _blocks(m: Tensor, most: int) -> Tensor:
    """The rows of a matrix in blocks of equal size, at most so many each, as (blocks, n, columns)."""
    rows, columns = m.shape
    count = math.ceil(rows / most) if most else 1
    missing = -rows % count
    return (torch.nn.functional.pad(m, (0, 0, 0, missing)) if missing else m).reshape(count, -1, columns)


def _wide(x: Tensor) -> torch.dtype:
    """The type for lengths, whose squares are lost or overflow in float32 where they themselves are not."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def ordinary(lengths: Sequence[Tensor]) -> bool:
    """Whether lengths are finite, and their squares in float32 neither lost nor infinite; Python reads one number."""
    return float(torch.stack(list(lengths)).log2_().abs_().amax()) < ORDINARY


SUMMED = 2**18
"""So many squares are added up in float32: torch's norm of 100,000 numbers is off by 3e-7, that of 4 million by 8e-5."""

ORDINARY = 50.0
"""Lengths between 2^-50 and 2^50 are ordinary: float32 squares parts of 2^-13 of them."""


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


def _signal_shares(online: Online, points: list[Point], averages: list[Tensor], lengths: list[Tensor]) -> Tensor:
    """The shares of signal in the gradients of weights; 1 at the first step."""
    states = [p.state for p in points]
    for state, average in zip(states, averages, strict=True):
        if "length" not in state:
            state["length"] = average.new_zeros(())
    kept, counts = [state["length"] for state in states], [state["counted"] for state in states]
    short = _whole(torch.stack(torch._foreach_norm(averages, 2, lengths[0].dtype)), points)
    # the root of the average of the squared lengths, which is kept in the type of the gradients
    now = _whole(torch.stack(lengths), points).mul_((1 - online.signal) ** 0.5)
    usual = torch.hypot(torch.stack(kept).mul_(online.signal**0.5), now)
    torch._foreach_copy_(kept, list(usual.unbind()))
    share = short.div_(usual.clamp_min_(torch.finfo(averages[0].dtype).tiny))
    # what averages that begin at zero have seen after t steps is 1 - beta^t of it
    seen = [(1 - online.signal**count) ** 0.5 / (1 - online.beta**count) for count in counts]
    # counts are symbols in a compiled step, and torch's compiler confuses those that it takes for equal
    if not torch.compiler.is_compiling() and all(count == counts[0] for count in counts):
        share.mul_(seen[0])
    else:
        share = torch.stack(torch._foreach_mul(list(share.unbind()), seen))
    return share.clamp_max_(1.0)


def _whole(lengths: Tensor, points: list[Point]) -> Tensor:
    """The lengths of tensors, from those of the parts on this process."""
    if not any(is_sharded(p.whole) for p in points):
        return lengths
    squares = lengths.to(_wide(lengths)).square_()
    parts = {p.name: square for p, square in zip(points, squares, strict=True)}
    return torch.stack(list(sum_shards(parts, {p.name: p.whole for p in points}).values())).sqrt_()

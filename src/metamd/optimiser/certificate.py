"""The certificate of a run: what its own gradients say against every model near its start, whatever the optimiser did.

Gradients g_t of f_t are taken at x_t, and c is the start. A run keeps, tensor by tensor and in float64,

    P = sum_t <g_t, x_t>,    G = sum_t g_t,    and S = sum_t <g_t, x_t - c> = P - <G, c>.

For convex f_t and every u, sum_t (f_t(x_t) - f_t(u)) <= sum_t <g_t, x_t - u> = S - <G, u - c>. The largest value over the
ball N(u - c) <= rho is S + rho N*(G), N* the dual norm. Nothing is assumed of the steps. Where they were plain mirror
descent, the bounds of the paper stand beside it. Proofs are in docs/concepts/certificates.md.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from metamd.files.header import Header
from metamd.files.learned import LearnedOptimiser
from metamd.files.text import shown
from metamd.optimiser import binding
from metamd.potentials.base import Active, Moves, Params, Potential
from metamd.potentials.classical import Euclidean
from metamd.potentials.diagonal import Diagonal, MaxDiagonal
from metamd.potentials.forms import Array, combine
from metamd.potentials.sharding import any_process, is_sharded, local, local_part, sum_shards
from metamd.potentials.tying import Rename, clean_name, some

START, SUM, AVERAGED = "certificate_start", "certificate_sum", "certificate_averaged"
"""Where the state of a parameter keeps its start, if that is not the potential's centre; G; and the tail average of G."""

VERSION = 3
"""Of the text in a state_dict. The first had the sums of mirror descent alone; the second S, and another tail average."""

Reference = Mapping[str, Tensor] | nn.Module | Iterable[Tensor]
Scale = float | Tensor | Callable[[], float | Tensor]
_UNSAVED = {"header", "mirror", "passes"}
_CHUNK = 2**18  # numbers that are taken at once, so that they stay near the processor and two float64 copies are small
_ROUNDOFF = 2.0**-53


class Seen(NamedTuple):
    """A parameter in a step, with the gradient that was taken where it is."""

    name: str
    param: Tensor
    grad: Tensor | None
    store: dict[str, Any]  # where its tensors are kept
    ascent: bool = False  # whether the optimiser maximises
    share: float | None = None  # the weight of this point in the tail average of the parameters, which ends here


@dataclass
class RunSums:
    """The sums of a run, one object for every optimiser; tensors of a parameter's size lie in its `store`.

    `add` is called once for every gradient, before the step; it reads nothing back from the device.
    """

    steps: int | Tensor = 0  # T; a tensor where the device decides which steps are skipped
    names: list[str] = field(default_factory=list)  # of the tensors that had a gradient
    table: Tensor = field(
        default_factory=lambda: torch.zeros(2, dtype=torch.float64)
    )  # sum |g|^2 and sum |x|^2 of all tensors, and P of each
    averages: Tensor = field(
        default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64)
    )  # of each, P under the weights of the tail average, and 1 if it has all points of that
    seen: dict[str, int] = field(default_factory=dict)  # in how many steps a tensor had a gradient
    weight: Tensor | float = 0.0  # the sum of the known factors
    losses: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float64)
    )  # the sum of those that are known, weighted by the factors
    counted: int = 0  # how many losses were known
    scaled: bool = False  # whether the factors of the gradients are known
    ascent: bool = False  # whether some tensor was maximised
    descent: bool = False  # whether some tensor was minimised
    reason: str = ""  # why earlier steps of the run do not count; empty if they do
    mirror: "MirrorSums | None" = None  # for the paper's bounds, while the steps are those of plain mirror descent
    square: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))  # |g_t|^2 of the last step
    header: Header | None = None  # of the file, with its radius; not saved
    passes: "tuple[Any, list[_Pass]] | None" = (
        None  # room in which `add` works, and what it is for; neither saved nor copied
    )

    @torch.no_grad()
    def add(
        self,
        seen: Sequence[Seen],
        *,
        scale: float | Tensor | None = None,
        loss: Any = None,
        idle: bool = False,
        taken: int | Tensor = 1,
    ) -> None:
        """Count one gradient; of an `idle` step, whose rates are zero, if it is one.

        Zero gradients at zero rates are the empty step that torch's checkpoints take. A warm-up may begin at rate zero too.
        `taken` is 0 where a loss scaler skips the step.
        """
        factor = _factor(scale) * taken
        moving = [s for s in seen if s.grad is not None]
        if any(SUM not in s.store and s.name in self.seen for s in seen):
            self._restart(seen, "the state of a parameter was lost")
        for s in moving:
            if SUM not in s.store:
                _open(s.store, s.param, averaged=s.share is not None)
        if not moving or (idle and not _any_gradient(moving)):
            return
        key = [(id(p := s.param), p.device, p.shape, s.ascent) for s in moving]
        if self.passes is None or self.passes[0] != key:
            _to_params(seen)
            self.passes = key, _passes(moving)
        found = _products(moving, self.passes[1])
        self.square = found[0]
        names = [s.name for s in moving]
        if names != self.names and (new := [n for n in names if n not in self.seen]):
            self.names += new
            self.table = torch.cat([self.table.to(found), found.new_zeros(len(new))])
            self.averages = torch.cat([self.averages.to(found), found.new_zeros(len(new), 2)])
        self.seen.update({n: self.seen.get(n, 0) + 1 for n in names})
        self.table = self.table.to(found.device)
        if names == self.names:
            self.table += found
        else:
            self.table[[0, 1, *(2 + self.names.index(n) for n in names)]] += found
        self._follow(seen, names, found)
        self.ascent = self.ascent or any(s.ascent for s in moving)
        self.descent = self.descent or not all(s.ascent for s in moving)
        # A closure may return anything; one of several processes knows the loss of its own part of the batch alone.
        if not _is_one_of_many() and (isinstance(loss, Real) or (isinstance(loss, Tensor) and loss.numel() == 1)):
            self.losses, self.counted = _plus(self.losses, _weighted(loss, factor)), self.counted + 1
        self.scaled = scale is not None
        self.weight = _plus(self.weight, factor)
        self.steps = self.steps + taken

    def _follow(self, seen: Sequence[Seen], moving: list[str], found: Tensor) -> None:
        """Give P of a step, and G of tensors that had no gradient, the weights of a tail average of the parameters."""
        groups: dict[float, list[Seen]] = {}  # nearly always one
        for s in seen:
            if s.share is not None and s.name in self.seen and AVERAGED in s.store:
                groups.setdefault(s.share, []).append(s)
        for share, group in groups.items():
            if resting := [local(s.store[AVERAGED]) for s in group if s.grad is None]:
                torch._foreach_mul_(resting, 1 - share)
            names = [s.name for s in group]
            self.averages = self.averages.to(found.device)
            if names == moving == self.names:
                self.averages[:, 0].lerp_(found[2:], share)
            else:
                known, none = dict(zip(moving, found[2:], strict=True)), found.new_zeros(())
                rows = [self.names.index(n) for n in names]
                path = torch.stack([known.get(n, none) for n in names])
                self.averages[rows, 0] = torch.lerp(self.averages[rows, 0], path, share)
            if share == 1:  # the average begins here
                self.averages[[self.names.index(n) for n in names], 1] = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "passes"}

    # saving

    def encode(self) -> str:
        """All numbers as text, for a state_dict: no digit is lost, and no optimiser casts it."""
        plain = {k: v for k, v in vars(self).items() if k not in _UNSAVED}
        kept = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in plain.items()}
        mirror = None if self.mirror is None else self.mirror.encode()
        return json.dumps({"version": VERSION, **kept, "mirror": mirror})

    def resumed(self, saved: str | None, steps: int) -> Self:
        """The sums with which a run goes on after so many steps; `saved` is None where it was saved without any."""
        fresh = type(self)(header=self.header, mirror=self.mirror and MirrorSums())
        try:
            kept = {} if saved is None else dict(json.loads(saved))
            if kept.pop("version", 1) != VERSION:
                if steps:
                    fresh.reason = "the run was continued from a state_dict without these sums"
                    fresh.mirror = None
                return fresh
            mirror = kept.pop("mirror")
            rows = len(kept["names"])
            tensors = {"losses": (), "square": (), "table": (2 + rows,), "averages": (rows, 2)}
            kept["weight"] = float(kept["weight"])
            kept |= {k: torch.tensor(kept[k], dtype=torch.float64).reshape(shape) for k, shape in tensors.items()}
            if kept.keys() != vars(fresh).keys() - _UNSAVED or set(kept["seen"]) != set(kept["names"]):
                raise ValueError("other fields")
            fresh.__dict__.update(kept)
            fresh.mirror = None if mirror is None or self.mirror is None else MirrorSums.decode(mirror)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
            raise ValueError(
                "the sums of a certificate must be as state_dict wrote them, but they cannot be read "
                f"({shown(str(error))}). Load another checkpoint."
            ) from None
        return fresh

    def _restart(self, seen: Sequence[Seen], reason: str) -> None:
        """Begin anew, where sums of earlier steps no longer belong together."""
        forget_stores(s.store for s in seen)
        self.__dict__.update(vars(RunSums(header=self.header, reason=reason)))

    def forget(self, reason: str) -> None:
        """After an edit from outside: the sums go on, for they assume nothing of the steps, but mirror descent has ended."""
        if self.steps and self.mirror is not None:
            self.mirror.broken = reason


def is_idle(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the rates of all groups are zero; one that is a tensor on another device is not read."""
    rates = [group.get("lr", 1.0) for group in groups]
    return all(r.device.type == "cpu" and not r.any() if isinstance(r, Tensor) else r == 0 for r in rates)


def _any_gradient(moving: Sequence[Seen]) -> bool:
    found = any(bool(local(s.grad).any()) for s in moving if s.grad is not None)
    return any_process(found, {s.name: s.param for s in moving})


def _is_one_of_many() -> bool:
    """Whether other processes train too; their gradients are in the mean, and their losses are not known here."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _factor(scale: Any) -> float | Tensor:
    """The factor of a gradient, one if none is given; one that is a tensor is not read, and NaN if it is negative."""
    if isinstance(scale, Tensor):
        return torch.where(scale >= 0, scale.double(), math.nan)
    if scale is not None and not isinstance(scale, Real):
        raise TypeError(f"the scale of a gradient must be a number, got {shown(scale)}. Pass the factor of norm clipping.")
    factor = 1.0 if scale is None else float(scale)
    if not 0 <= factor < math.inf:
        raise ValueError(f"the scale of a gradient must be finite and not negative, got {factor}. Leave it out for 1.")
    return factor


def _weighted(loss: Any, factor: float | Tensor) -> Any:
    """A loss times its factor; zero where that is zero, for a step that was skipped may have no loss."""
    loss = loss.detach().reshape(()) if isinstance(loss, Tensor) else loss
    return torch.where(factor > 0, loss * factor, 0.0) if isinstance(factor, Tensor) else loss * factor


def forget_stores(stores: Iterable[dict[str, Any]]) -> None:
    """Drop the tensors of sums that no longer count."""
    for store in stores:
        for key in (START, SUM, AVERAGED):
            store.pop(key, None)


def _plus(total: Any, term: Any) -> Any:
    """A sum in float64 that stays where its terms are."""
    if isinstance(term, Tensor):
        return (total.to(term.device) if isinstance(total, Tensor) else total) + term.detach()
    return total + term


def _open(store: dict[str, Any], param: Tensor, *, averaged: bool) -> None:
    """Remember where a tensor starts; the potential's centre serves, if that is the same point."""
    if not ("start" in store and torch.equal(local(store["start"]), local(param))):
        store[START] = param.detach().clone()
    for key in (SUM, AVERAGED) if averaged else (SUM,):
        store[key] = torch.zeros_like(param.detach(), dtype=torch.float64, memory_format=torch.contiguous_format)


def _start(store: Mapping[str, Any]) -> Tensor:
    return store[START] if START in store else store["start"]


@dataclass
class _Pass:
    """Pieces of tensors that are taken at once, and room for their gradients and points in float64."""

    pieces: list[tuple[int, int, int]]  # which tensor, from where, to where
    whole: bool  # whether they are all tensors, none of them cut
    flat: Tensor  # (2, size)
    grads: list[Tensor]  # views of it, a piece each, in the shape of the tensor if that is whole
    points: list[Tensor]
    pairs: list[tuple[Tensor, Tensor]]  # the same without a shape
    ascent: list[Tensor]  # those of `grads` whose sign is turned

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The pieces of all tensors, as views."""
        if self.whole:
            return list(tensors)
        whole = ((tensors[i], low, high) for i, low, high in self.pieces)
        return [x if high - low == x.numel() else x.reshape(-1)[low:high] for x, low, high in whole]


def _passes(moving: Sequence[Seen]) -> list[_Pass]:
    """How tensors are taken, in pieces of at most `_CHUNK` numbers; all passes of a device share their room."""
    found: list[list[tuple[int, int, int]]] = []
    room, kind, parts = 0, None, [local(s.param) for s in moving]
    for i, (s, x) in enumerate(zip(moving, parts, strict=True)):
        for low in range(0, x.numel(), _CHUNK):
            high, own = min(low + _CHUNK, x.numel()), (x.device, is_sharded(s.param))
            if high - low > room or own != kind:
                found.append([])
                room, kind = _CHUNK, own
            found[-1].append((i, low, high))
            room -= high - low
    rooms: dict[torch.device, Tensor] = {}
    for device in {x.device for x in parts}:
        sizes = [sum(h - low for _, low, h in p) for p in found if parts[p[0][0]].device == device]
        rooms[device] = torch.zeros(2 * max(sizes, default=0), dtype=torch.float64, device=device)
    return [_pass(pieces, moving, parts, rooms[parts[pieces[0][0]].device]) for pieces in found]


def _pass(pieces: list[tuple[int, int, int]], moving: Sequence[Seen], parts: Sequence[Tensor], room: Tensor) -> _Pass:
    sizes = [high - low for _, low, high in pieces]
    flat = room[: 2 * sum(sizes)].view(2, -1)
    shapes = [parts[i].shape if size == parts[i].numel() else (size,) for (i, _, _), size in zip(pieces, sizes, strict=True)]
    sides = [side.split(sizes) for side in flat]
    grads, points = ([x.view(shape) for x, shape in zip(side, shapes, strict=True)] for side in sides)
    ascent = [g for (i, _, _), g in zip(pieces, grads, strict=True) if moving[i].ascent]
    whole = [p[0] for p in pieces] == list(range(len(moving))) and all(low == 0 for _, low, _ in pieces)
    whole = whole and sizes == [x.numel() for x in parts]
    return _Pass(pieces, whole, flat, grads, points, list(zip(*sides, strict=True)), ascent)


def _products(moving: Sequence[Seen], passes: Sequence[_Pass]) -> Tensor:
    """|g|^2 and |x|^2 of all tensors together, and <g, x> of each; G has g added to it.

    All is in float64, where products of narrower numbers are exact.
    """
    device = moving[0].param.device
    grads, points = [local(s.grad) for s in moving if s.grad is not None], [local(s.param) for s in moving]
    totals = [local(s.store[SUM]) for s in moving]
    shares = {s.share for s in moving if AVERAGED in s.store}
    means = [local(s.store.get(AVERAGED, g)) for s, g in zip(moving, totals, strict=True)] if shares else []
    found = []
    for p in passes:
        torch._foreach_copy_(p.grads, p.take(grads))
        torch._foreach_copy_(p.points, p.take(points))
        if p.ascent:
            torch._foreach_neg_(p.ascent)
        torch._foreach_add_(p.take(totals), p.grads)
        for share in shares:
            at = [k for k, (i, _, _) in enumerate(p.pieces) if AVERAGED in moving[i].store and moving[i].share == share]
            if at and share is not None:
                here = p.take(means)
                torch._foreach_lerp_([here[k] for k in at], [p.grads[k] for k in at], share)
        g, x = p.flat
        found.append(torch.stack([torch.dot(g, g), torch.dot(x, x), *(torch.dot(*pair) for pair in p.pairs)]))
    if len(passes) == 1 and passes[0].whole and not is_sharded(moving[0].param):
        return found[0]
    device = moving[0].param.device
    parts = {s.name: torch.zeros(3, dtype=torch.float64, device=device) for s in moving}
    for p, numbers in zip(passes, found, strict=True):
        numbers = numbers.to(device)
        parts[moving[p.pieces[0][0]].name][:2] += numbers[:2]  # a pass is of tensors that are all cut, or all whole
        for (i, _, _), number in zip(p.pieces, numbers[2:], strict=True):
            parts[moving[i].name][2] += number
    rows = torch.stack(list(sum_shards(parts, {s.name: s.param for s in moving}).values()))
    return torch.cat([rows[:, :2].sum(0), rows[:, 2]])


def _to_params(seen: Sequence[Seen]) -> None:
    """Bring G and its tail average to the devices of the parameters, which may have moved."""
    for s in seen:
        for key in (SUM, AVERAGED):
            if key in s.store and s.store[key].device != s.param.device:
                s.store[key] = s.store[key].to(s.param.device)


# plain mirror descent, for which the paper's bounds hold


@dataclass
class MirrorSums:
    """What Theorem 1 and the local-norm bound need beside S and G: those of exact mirror descent at one constant rate.

    Let y_t be the dual point, h(w; y) = 1/2 y'D(w)^-1 y - <w, b>, and let no step raise h: h(w_{t+1}; y_{t+1}) <= h(w_t;
    y_{t+1}). The solver guarantees that even where it stops early. Then

        sum_t <g_t, z_t - u>  <=  B(u||z_1)/lr + lr/2 sum_t g_t'D(w_t)^-1 g_t.

    Proof: h(w_t; .) is a quadratic with gradient z_t - c at y_t. Expand h(w_t; y_{t+1}) around y_t, replace it by the
    smaller h(w_{t+1}; y_{t+1}), add up, and subtract <y_1 - y_{T+1}, u - c>. What is left is not negative by Fenchel's
    inequality.
    """

    rate: Any = 0.0  # lr of all tensors in all steps; zero before the first
    energy: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float64)
    )  # sum g_t' D(w_t)^-1 g_t, of several pieces
    largest: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))  # max |g_t|^2
    weights: list[float] = field(default_factory=lambda: [1.0])  # w_1, the active pieces at the start
    last: list[float] = field(default_factory=lambda: [1.0])  # w_{T+1}
    names: list[str] = field(default_factory=list)  # the tensors of every step
    broken: str = ""  # why the run is not plain mirror descent; empty while it is
    piece: Any = None  # metrics of the piece that is active alone, as views, and what they are of; neither saved nor copied

    @torch.no_grad()
    def before(self, phi: MaxDiagonal, active: Active | None, moves: Moves, seen: Sequence[Seen], square: Tensor) -> None:
        """Count a step that is about to be taken; |g_t|^2 is known already."""
        rates, decays = {move.lr for move in moves.values()}, {move.decay for move in moves.values()}
        if not self.broken and any(isinstance(x, Tensor) for x in (*rates, *decays)):
            self.broken = "the rate is a tensor, which is not read"
        if self.broken or rates == {0.0}:
            return
        weights = np.ones(1) if active is None else active.weights
        if not self.rate:
            self.rate, self.names, self.weights = max(rates), list(moves), weights.tolist()
        self.broken = self._reason(phi, moves, seen, rates, decays)
        if self.broken:
            return
        if phi.pieces > 1:  # one piece has it from S and the end of the run, see `Ball._mirror`
            energies = self._energies(phi, {n: move.grad for n, move in moves.items()}, weights)
            if any(is_sharded(s.param) for s in seen):
                named = {s.name: s.param for s in seen if s.name in moves}
                energies = list(sum_shards(dict(zip(moves, energies, strict=True)), named).values())
            energies = [e if e.device == square.device else e.to(square.device) for e in energies]
            self.energy = self.energy.to(square.device) + torch.stack(energies).sum(dtype=torch.float64)
        self.largest = torch.maximum(self.largest.to(square.device), square)
        self.last = weights.tolist()

    def _reason(
        self, phi: MaxDiagonal, moves: Moves, seen: Sequence[Seen], rates: set[float | Tensor], decays: set[float | Tensor]
    ) -> str:
        """Why a step is none of plain mirror descent."""
        if rates != {self.rate}:
            return "the rate changed, or was not the same for all tensors"
        if self.rate < 0:
            return "some tensor was maximised"
        if any(decays):
            return "the weights decayed"
        if any("z" in s.store for s in seen):
            return "gradients were taken at averages of the iterates"
        if list(moves) != self.names or (phi.pieces > 1 and not phi.keeps_start and len(moves) < len(seen)):
            return "a tensor had no gradient"
        if any(s.param.dtype not in (torch.float32, torch.float64) for s in seen if s.grad is not None):
            return "half precision rounds the steps"
        return ""

    def _energies(self, phi: MaxDiagonal, grads: Params, weights: Array) -> list[Tensor]:
        """g'D(w)^-1 g of this process's part of every tensor."""
        key = (list(grads), weights.tolist())
        if self.piece is not None and self.piece[0] is phi and self.piece[1] == key:
            metrics = self.piece[2]
        else:
            metrics = [combine(phi.metric(n), weights) for n in grads]
            views = np.count_nonzero(weights) == 1 and all(phi.metric(n) is phi.metric(n) for n in grads)
            self.piece = (phi, key, metrics) if views else None
        turned = [phi.basis.into(n, g) for n, g in grads.items()]
        energies = torch._foreach_div(turned, metrics)
        torch._foreach_mul_(energies, turned)
        return [e.sum() for e in energies]

    def after(self, active: Active | None, *, exact: bool) -> None:
        """Look at the active pieces after the step."""
        if active is None or len(active.weights) == 1 or not self.rate:
            return
        if not exact and active.weights.tolist() != self.last:
            self.broken = self.broken or "the piece changed under the paper's step, which is no mirror step then"
        self.last = active.weights.tolist()

    def encode(self) -> dict[str, Any]:
        """In JSON's types."""
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in self.__getstate__().items()}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "piece"}

    @classmethod
    def decode(cls, saved: Mapping[str, Any]) -> "MirrorSums":
        """What `encode` gave."""
        tensors = {k: torch.tensor(saved[k], dtype=torch.float64) for k in ("energy", "largest")}
        return cls(**{**saved, **tensors})


# the certificate


@dataclass(frozen=True)
class Layer:
    """One tensor's part of a certificate; the bounds of all tensors add up to the whole."""

    path: float  # S, sum <g_t, x_t - c>
    dual: float  # N*(G)
    bound: float | None  # its share of the bound against the ball
    realised: float | None  # its share of the linearised regret against the reference


@dataclass(frozen=True)
class MirrorBounds:
    """The paper's bounds on sum <g_t, x_t - u>, for plain mirror descent; with a radius for all u in the ball."""

    bound: float  # B(u || start)/lr + lr/2 sum |g_t|^2 in the local dual norms
    published: float  # Theorem 1 as printed, with the Euclidean norm and lambda = min D
    lipschitz: float  # the same with the largest gradient of the run for every gradient


@dataclass(frozen=True)
class Certificate:
    """What the gradients of a run guarantee against other models. `print` says it in words.

    Args:
        steps: T, the gradients that were counted.
        bound: sum_t (f_t(x_t) - f_t(u)) is at most this for every u in the ball, if the f_t are convex; it bounds
            sum_t <g_t, x_t - u> always. None without a ball.
        realised: sum_t <g_t, x_t - u> against the reference, the linearised regret; None without one.
        radius: rho of the ball N(u - start) <= rho, or one for every tensor.
        norm: N in words.
        source: where the radius is from, with its probability; empty if it was given.
        rounding: what rounding of the sums may have changed; it is in `bound`.
        weight: the sum of the factors of the gradients; T if none were given.
        per_layer: the parts of the tensors.
        mirror: the bounds of the paper, if the run was plain mirror descent.
        average: f(mean) - f(u) is at most this for the tail average, the model that `opt.eval()` gives, and every u in the
            ball, if every step had the same convex loss f. None without such an average or a ball.
        mean_loss: of the run, if it is known, weighted as the bound is.
        guaranteed: whether anything is; not so if the sums are not finite.
        conditions: what the statement rests on, in sentences.
        expected: what the file says to expect of the next task, in sentences. It needs no convexity.
    """

    steps: int
    bound: float | None
    realised: float | None
    radius: float | Mapping[str, float] | None
    norm: str
    source: str
    rounding: float
    weight: float
    per_layer: dict[str, Layer]
    mirror: MirrorBounds | None
    average: float | None
    mean_loss: float | None
    guaranteed: bool
    conditions: tuple[str, ...]
    expected: tuple[str, ...] = ()

    @property
    def mean(self) -> float | None:
        """The bound by step: how far the mean loss of any u in the ball can lie below that of the run."""
        return None if self.bound is None else self.bound / self.weight

    @property
    def says_nothing(self) -> bool:
        """Whether losses that are never negative obey the bound by themselves."""
        return self.mean is not None and self.mean_loss is not None and self.mean >= self.mean_loss >= 0

    def sentences(self) -> list[str]:
        """What `print` shows, a sentence or two for each statement."""
        found = list(self.expected)
        if not self.guaranteed:
            return [*found, "No guarantee: the sums are not finite, so the run diverged."]
        if self.mean is not None:
            far = f"distance {self.radius:.4g}" if isinstance(self.radius, float) else "the radius of every tensor"
            batches = (
                "weighted by their factors, on this run's own batches" if self._weighted else "on this run's own batches"
            )
            below = f"more than {self.mean:.4g} below" if self.mean >= 0 else f"less than {-self.mean:.4g} above"
            found.append(
                f"No model within {far} of the start{f' ({self.source})' if self.source else ''} would have had a mean "
                f"loss, {batches}, {below} this run's, if the loss were convex. In general this bounds the linearised "
                f"loss. Distances are in {self.norm}."
            )
            if self.says_nothing:
                found.append(f"For losses >= 0 that says nothing here: the run's own mean loss is {self.mean_loss:.4g}.")
            elif self.mean_loss is None:
                found.append("For losses >= 0 it says something only if it is below the run's own mean loss.")
        if self.average is not None:
            found.append(
                f"If every step had the same convex loss, and no gradient was scaled, no such model is more than "
                f"{self.average:.4g} below the tail average, which opt.eval() puts into the model, rounded to its type."
            )
        if self.realised is not None:
            found.append(f"The linearised regret against the reference, sum <g_t, x_t - u>, is {self.realised:.5g}.")
        if self.mirror is not None:
            m = self.mirror
            found.append(
                f"The paper's bounds on sum <g_t, x_t - u>, for plain mirror descent: local norms {m.bound:.5g}, "
                f"Theorem 1 as published {m.published:.5g}, with max |g_t| {m.lipschitz:.5g}."
            )
        return [*found, *self.conditions]

    @property
    def _weighted(self) -> bool:
        return self.weight != self.steps

    def __str__(self) -> str:
        total = "" if self.bound is None else f", sum bound {self.bound:.5g}, of which rounding {self.rounding:.2g}"
        return "\n".join([f"regret certificate (T = {self.steps}{total})", *(f"  {text}" for text in self.sentences())])


CLIPPED = (
    "If gradients were clipped in norm or scaled, the sum bound is weighted by the clipping. The mean then needs the "
    "factors, which certify_run(scale=) takes."
)
NOTHING = "After clipping by value or per tensor nothing follows."
ELSEWHERE = (
    "Gradients must have been taken at the parameters of the step, which SAM and closures that evaluate elsewhere do not. "
    "Steps that AMP skips are not counted. Nothing follows for the parameters after the last step alone, "
    "or for averages that other code keeps."
)


class Ball:
    """A run whose certificate is asked for: its sums, its parameters and their stores, and the norm of the ball."""

    def __init__(self, sums: RunSums, potential: Potential, named: Params, stores: Mapping[str, dict[str, Any]]) -> None:
        self.sums, self.named, self.stores, self.steps = sums, named, stores, int(sums.steps)
        self.names = [n for n in named if n in sums.seen]  # the others have u = start
        self.learned = isinstance(potential, MaxDiagonal)
        self.phi = potential if isinstance(potential, MaxDiagonal) else euclidean_metric(named)
        self.square, self.size, *paths = sums.table.tolist()  # sum |g|^2, sum |x|^2, P of every tensor
        self.products: dict[str, float] = dict(zip(sums.names, paths, strict=True))
        self.averages: dict[str, list[float]] = dict(zip(sums.names, sums.averages.tolist(), strict=True))
        self.total = {n: local(stores[n][SUM]) for n in self.names}  # G
        self.starts = {n: local(_start(stores[n])).to(self.total[n]) for n in self.names}  # c
        self.paths = self._against(self.starts, self.total, self.products)  # S

    def _against(self, point: Params, total: Params, products: Mapping[str, float]) -> dict[str, float]:
        """P - <G, u> by tensor."""
        found = sum_shards({n: (g * point[n]).sum() for n, g in total.items()}, self.named)
        return {n: products[n] - float(x) for n, x in found.items()}

    @torch.no_grad()
    def certificate(
        self, reference: Reference | None, radius: float | Mapping[str, float] | None, mean_loss: float | None
    ) -> Certificate:
        """The certificate against every u in the ball, against the reference, or both."""
        sums = self.sums
        if not self.steps:
            raise ValueError("there is nothing to certify: no gradient was counted yet. Train first, then ask for it.")
        radius, source = self._radius(radius, given=reference is not None)
        u = None if reference is None else reference_tensors(reference, self.named, self.phi.rename)
        duals = self._dual_norms(self.total, radius)
        norm = math.sqrt(sum(q**2 for q in duals.values()))
        bound = average = None
        shares: dict[str, float] = {}
        away = None if u is None else {n: local_part(u[n], self.named[n]).to(g) for n, g in self.total.items()}
        rounding = self._rounding(radius, away)
        if radius is not None:
            shares = {n: self.paths[n] + _share(n, radius, duals, norm) for n in self.names}
            bound = math.fsum(shares.values()) + rounding
            average = self._average(radius, 2 * rounding)  # each sum is multiplied besides; the weights are at most one
        realised = None if away is None else self._against(away, self.total, self.products)
        layers = {
            n: Layer(self.paths[n], duals[n], shares.get(n), None if realised is None else realised[n]) for n in self.names
        }
        weight = float(sums.weight)
        if weight == 0:
            raise ValueError("there is nothing to certify: the factors of all gradients are zero. Check what scale= gives.")
        mean_loss = self._mean_loss(mean_loss, weight)
        regret = None if realised is None else math.fsum(realised.values())
        values = [x for x in (bound, regret, norm, weight) if x is not None]
        return Certificate(
            steps=self.steps,
            bound=bound,
            realised=regret,
            radius=radius,
            norm="the learned metric" if self.learned else "the Euclidean norm",
            source=source,
            rounding=rounding,
            weight=weight,
            per_layer=layers,
            mirror=self._mirror(u, radius),
            average=average,
            mean_loss=mean_loss,
            guaranteed=all(map(math.isfinite, values)),
            conditions=self._conditions(u),
            expected=() if sums.header is None else sums.header.expected,
        )

    def _radius(
        self, radius: float | Mapping[str, float] | None, *, given: bool
    ) -> tuple[float | dict[str, float] | None, str]:
        """The radius that was given, or the one of the file, with where it is from."""
        known, source = None if self.sums.header is None else self.sums.header.radius, ""
        if radius is None:
            if given:
                return None, ""
            if known is None:
                raise ValueError(
                    "a certificate needs a radius or a reference, and no file has given a radius. Run metamd certify FILE "
                    "FAMILY, which finds one on held-out tasks, or pass radius= or reference=model.state_dict()."
                )
            radius, source = known.by_tensor, known.source
        if isinstance(radius, Mapping):
            radius = {clean_name(str(n), self.phi.rename): r for n, r in radius.items()}
        numbers: list[Any] = list(radius.values()) if isinstance(radius, Mapping) else [radius]
        if not all(isinstance(r, Real) or (isinstance(r, Tensor) and r.numel() == 1) for r in numbers):
            raise TypeError(f"radius must be a number, or one for every tensor, got {shown(radius)}. Pass radius=1.0, say.")
        if not all(0 <= float(r) < math.inf for r in numbers):
            raise ValueError(f"radius must be finite and not negative, got {shown(radius)}. Take it from held-out tasks.")
        if not isinstance(radius, Mapping):
            return float(radius), source
        missing = [n for n in self.names if n not in radius]
        if missing:
            raise ValueError(
                f"the radius must name every tensor that was trained, but {missing[0]!r} is missing; it has {some(radius)}. "
                "Pass one number for the whole model, or find the radius anew with metamd certify."
            )
        return {n: float(radius[n]) for n in self.names}, source

    def _mean_loss(self, given: Any, weight: float) -> float | None:
        """The mean of the losses that the statement is about, weighted as they are; None where it is not known."""
        sums = self.sums
        if given is None:
            given = float(sums.losses) / weight if sums.counted == self.steps else math.nan
        if not isinstance(given, Real | Tensor):
            raise TypeError(f"mean_loss must be a number, got {shown(given)}. Pass the mean of the losses of the run.")
        if not math.isfinite(given) or (sums.ascent and sums.descent):
            return None
        return -float(given) if sums.ascent else float(given)

    # the terms

    def _dual_norms(self, total: Params, radius: float | Mapping[str, float] | None) -> dict[str, float]:
        """N*_l(G_l) by tensor; for one ball around all tensors under the weights of the whole."""
        if isinstance(radius, Mapping) and self.phi.pieces > 1:
            squares = {n: self.phi.dual_squares({n: g})[n] for n, g in total.items()}
        else:
            squares = self.phi.dual_squares(total)
        return {n: math.sqrt(float(q)) for n, q in sum_shards(squares, self.named).items()}

    def _rounding(self, radius: float | Mapping[str, float] | None, u: Params | None) -> float:
        """A bound on what float64 sums can be off by, and learned coordinates that are not quite orthogonal."""
        steps, phi = self.steps, self.phi
        units = (max(self.named[n].numel() for n in self.names) + steps + 8) * _ROUNDOFF
        # products and squares below the smallest normal number may be lost
        lost = sum(self.named[n].numel() for n in self.names) * steps * 2.0**-1022
        square, size = self.square + lost, self.size + lost
        length = units * math.sqrt(steps * square)  # of what G is off by: sqrt(steps * square) is above sum |g_t|
        far = max(self._length(self.starts), 0.0 if u is None else self._length(u))
        found = units * math.sqrt(square * size) + 2 * length * far + lost
        lengths = sum_shards({n: g.square().sum() for n, g in self.total.items()}, self.named)
        for n in self.names:
            rho = radius.get(n, 0.0) if isinstance(radius, Mapping) else radius or 0.0
            found += rho / math.sqrt(phi.least(n)) * (length + 2 * _skew(phi, n) * math.sqrt(float(lengths[n])))
        return found

    def _length(self, point: Params) -> float:
        squares = sum_shards({n: x.square().sum() for n, x in point.items()}, self.named)
        return math.sqrt(sum(float(x) for x in squares.values()))

    def _average(self, radius: float | Mapping[str, float], rounding: float) -> float | None:
        """The bound for the tail average, whose points all had the same weights in all tensors."""
        whole = all(self.averages[n][1] == 1 and "mean" in self.stores[n] for n in self.names)
        if not whole or len({self.stores[n]["since"] for n in self.names}) > 1:
            return None
        total = {n: local(self.stores[n][AVERAGED]) for n in self.names}
        duals = self._dual_norms(total, radius)
        paths = self._against(self.starts, total, {n: row[0] for n, row in self.averages.items()})
        norm = math.sqrt(sum(q**2 for q in duals.values()))
        return math.fsum(paths[n] + _share(n, radius, duals, norm) for n in self.names) + rounding

    def _mirror(self, u: Params | None, radius: float | Mapping[str, float] | None) -> MirrorBounds | None:
        """The paper's bounds, if the end of the run is where mirror descent with its gradients leads."""
        m, phi = self.sums.mirror, self.phi
        if m is None or m.broken or not m.rate or self.sums.reason or not self._telescopes(m):
            return None
        if u is not None:
            points = {n: local_part(u[n], self.named[n]).double() for n in self.names}
            away = {n: x - local(_start(self.stores[n])).double() for n, x in points.items()}
            centred = {n: x - phi.start[n].double() if n in phi.start else x for n, x in points.items()}
            weights, at = np.array(m.weights), phi.half_squares(centred) + phi.offsets.detach().cpu().numpy()
            far = float(weights @ phi.half_squares(away) + at.max() - weights @ at)
        elif radius is not None and (phi.pieces == 1 or phi.keeps_start):
            far = sum(r**2 for r in radius.values()) / 2 if isinstance(radius, Mapping) else radius**2 / 2
        else:
            return None
        energy, square, least = float(m.energy), self.square, phi.strong_convexity().constant
        if phi.pieces == 1:  # 1/2 |x_{t+1} - c|^2_D = 1/2 |x_t - c|^2_D - lr <g, x_t - c> + lr^2/2 |g|^2_{D^-1}, added up
            ends = {n: local(self._iterate(n)).double() - local(_start(self.stores[n])).double() for n in self.names}
            path = math.fsum(self.paths.values())
            energy = max(2 / m.rate * (path + float(phi.half_squares(ends)[0]) / m.rate), 0.0)
        half, largest = m.rate / 2, self.steps * float(m.largest)
        far /= m.rate
        return MirrorBounds(far + half * energy, far + half * square / least, far + half * largest / least)

    def _telescopes(self, m: MirrorSums) -> bool:
        """Whether y_{T+1} = y_1 - lr G, up to the rounding of the steps."""
        phi, parts = self.phi, {}
        for n in self.names:
            d, start = phi.metric(n).double(), local(_start(self.stores[n])).double()
            centre = phi.start[n].double() if n in phi.start else torch.zeros_like(start)
            turn = [phi.basis.into(n, x) for x in (start - centre, local(self._iterate(n)).double() - centre)]
            first, last = (combine(d, np.array(w)) * x for w, x in zip((m.weights, m.last), turn, strict=True))
            moved = m.rate * phi.basis.into(n, local(self.stores[n][SUM]))
            size = combine(d, np.array(m.last)) * phi.basis.into(n, local(self.named[n]).double())
            parts[n] = torch.stack([x.square().sum() for x in (first - moved - last, first, last, moved, size)])
        table = np.sqrt(np.stack([row.cpu().numpy() for row in sum_shards(parts, self.named).values()]))
        wide = all(self.named[n].dtype == torch.float64 for n in self.names)
        unit = 2.0**-53 if wide else 2.0**-24
        slack = math.sqrt(unit) * table[:, 1:4].sum() + 64 * unit * math.sqrt(self.steps) * table[:, 4].sum()
        return bool(table[:, 0].sum() <= slack)

    def _iterate(self, name: str) -> Tensor:
        """The last point of the run; in eval mode of a tail average it lies in the store."""
        found: Tensor = self.stores[name].get("z", self.named[name])
        return found

    # the words

    def _conditions(self, u: Params | None) -> tuple[str, ...]:
        sums, found = self.sums, []
        still = [n for n in self.named if n not in self.names]
        where = f"; here {some(dict.fromkeys(still))} had none" if still else ""
        found.append(
            f"Compared models agree with the start in tensors without a gradient, and with this model in those outside the "
            f"optimiser{where}."
        )
        if u is not None and (moved := [n for n in still if self._differs(n, u[n])]):
            found.append(
                f"The reference differs there, in {some(dict.fromkeys(moved))}: the number is for the reference with "
                "these tensors as this model has them."
            )
        if partial := [n for n in self.names if sums.seen.get(n, 0) < self.steps]:
            found.append(f"Losses of steps in which {some(dict.fromkeys(partial))} had no gradient must not depend on it.")
        if sums.ascent:
            both = "The signs of the groups differ: a game, and not the regret of one loss."
            found.append(both if sums.descent else "The loss was maximised: the statement is about its negative.")
        weights = "Losses are weighted by the factors that were given." if sums.scaled else CLIPPED
        found += [f"{weights} {NOTHING}", ELSEWHERE]
        if sums.mirror is not None and sums.mirror.broken:
            found.append(f"The paper's bounds for plain mirror descent do not apply: {sums.mirror.broken}.")
        if sums.reason:
            found.append(f"Earlier steps do not count: {sums.reason}.")
        return tuple(found)

    def _differs(self, name: str, u: Tensor) -> bool:
        param = self.named[name]
        return not torch.equal(local_part(u, param).to(local(param)), local(self._iterate(name)))


def _skew(phi: MaxDiagonal, name: str) -> float:
    """By how much the learned coordinates of a tensor miss orthogonality: |V'V - I|."""
    if name not in phi.basis.places:
        return 0.0
    sides = (phi.basis.factors.get(f"{side}/{phi.basis.places[name].key}") for side in ("left", "right"))
    factors = [v.double() for v in sides if v is not None]
    found = sum(float((v.mT @ v - torch.eye(v.shape[1], dtype=v.dtype, device=v.device)).norm()) for v in factors)
    # |V^-1 G - V'G| <= e/(1 - e) sqrt(1 + e) |G|, e the norm of V'V - 1: below 2 e |G| for such e
    return found if found < 0.25 else math.inf


def _share(name: str, radius: float | Mapping[str, float], duals: Mapping[str, float], norm: float) -> float:
    """A tensor's part of rho N*(G), which is rho N*_l^2 / N* in one ball around all tensors."""
    if isinstance(radius, Mapping):
        return radius[name] * duals[name]
    return radius * duals[name] ** 2 / norm if norm else 0.0


def euclidean_metric(named: Params) -> MaxDiagonal:
    """The Euclidean norm as a metric of ones."""
    ones = {
        n: torch.ones((1,) * (1 + p.ndim), dtype=torch.promote_types(p.dtype, torch.float32), device=local(p).device)
        for n, p in named.items()
    }
    return Diagonal(tying="tensor").bind(named).fixed(ones)


def reference_tensors(reference: Reference, named: Params, rename: Rename | None = None) -> dict[str, Tensor]:
    """The comparator u by the names of the optimiser's parameters; `rename` says how these differ from the model's."""
    if isinstance(reference, nn.Module):
        reference = dict(reference.named_parameters())
    if isinstance(reference, Mapping):
        found = {clean_name(n, rename): x for n, x in reference.items()}
    else:
        tensors = list(reference) if isinstance(reference, Iterable) else [reference]
        if not all(isinstance(x, Tensor) for x in tensors):
            raise TypeError(
                "a reference must be a state_dict, a module, or tensors in the order of the parameters, got "
                f"{type(reference).__name__}. Pass reference=model.state_dict()."
            )
        if len(tensors) != len(named):
            raise ValueError(
                f"the reference has {len(tensors)} tensors, but the optimiser has {len(named)} parameters. Pass one for "
                "each, in their order, or a state_dict."
            )
        found = dict(zip(named, tensors, strict=True))
    for n, p in named.items():
        if n not in found:
            advice = "Pass the state_dict of a model with the parameters of this one."
            if list(named) == [str(i) for i in range(len(named))]:
                advice = (
                    "The optimiser's parameters have no names: build it with model.named_parameters(), or pass "
                    "reference=list(model.parameters())."
                )
            raise ValueError(f"the reference has no tensor {n!r}; it has {some(found)}. {advice}")
        if found[n].shape != p.shape:
            raise ValueError(
                f"the reference has {n!r} in shape {tuple(found[n].shape)}, but the parameter has {tuple(p.shape)}. Pass "
                "the state_dict of the same model."
            )
        if not bool(local(found[n]).isfinite().all()):
            raise ValueError(f"the reference must be finite, but {n!r} is not. Pass a model that did not diverge.")
    return {n: found[n].detach() for n in named}


# any optimiser of torch


class Certified:
    """A run that has a certificate: one of `MetaMD` itself, or of any optimiser that `certify_run` watches."""

    def certificate(
        self,
        reference: Reference | None = None,
        *,
        radius: float | Mapping[str, float] | None = None,
        mean_loss: float | None = None,
    ) -> Certificate:
        """What is guaranteed for the run so far, whatever the options. `MetaMD` needs `certify=True`.

        Args:
            reference: a model u to compare with: a state_dict, a module, or tensors in the order of the parameters.
            radius: every u with N(u - start) <= radius is compared with, N the learned metric; a mapping has a radius for
                every tensor. Without one and without a reference it is what the file found on held-out tasks.
            mean_loss: of the run, to say whether the bound says anything; known already where steps have a closure, unless
                several processes train.
        """
        return self._ball().certificate(reference, radius, mean_loss)

    def _ball(self) -> Ball:
        raise NotImplementedError


def certificate_within(run: Certified, model: Reference) -> Certificate:
    """The certificate against every model that is no farther from the start than this one."""
    ball = run._ball()
    u = reference_tensors(model, ball.named, ball.phi.rename)
    away = {n: local_part(u[n], ball.named[n]).double() - c for n, c in ball.starts.items()}
    return ball.certificate(model, ball.phi.norm(away), None)


class CertifiedRun(Certified):
    """The certificate of an optimiser that `certify_run` watches."""

    def __init__(self, optimiser: Optimizer, potential: Potential | None, sums: RunSums, scale: Scale | None) -> None:
        self._optimiser, self._potential, self._sums, self._scale = optimiser, potential, sums, scale
        self._stores: dict[str, dict[str, Any]] = {}
        self._named: dict[str, Tensor] = {}
        self._ids: list[int] = []
        self._bound()  # a geometry that does not fit is refused now, and not after the run
        self._hook: RemovableHandle | None = optimiser.register_step_pre_hook(self._before)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_hook": self._hook is not None, "_named": {}, "_ids": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Copies of an optimiser have no hooks: the copy of the run must watch the copy of the optimiser.
        self._hook = self._optimiser.register_step_pre_hook(self._before) if self._hook else None

    def _ball(self) -> Ball:
        return Ball(self._sums, self._bound(), self._find_names(), self._stores)

    def _bound(self) -> Potential:
        """The potential with its metrics for the parameters."""
        if self._potential is None:
            return getattr(self._optimiser, "potential", Euclidean())  # MetaMD has one, bound already
        named = binding.without_unknown_frozen(self._find_names(), self._potential)
        return binding.fit(self._potential, named, {}, None, fused=False, order=())

    def state_dict(self) -> dict[str, Any]:
        """The sums, to go on with in another process."""
        return {"sums": self._sums.encode(), "stores": {n: dict(store) for n, store in self._stores.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the sums of a `state_dict`, for parameters of the same names."""
        named = self._find_names()
        stores = state_dict.get("stores") if isinstance(state_dict, Mapping) else None
        if not isinstance(stores, Mapping) or not all(isinstance(s, Mapping) for s in stores.values()):
            raise ValueError("this is not what state_dict of a certified run gave: it must have 'sums' and 'stores'.")
        unknown = sorted(set(stores) - set(named))
        if unknown:
            raise ValueError(
                f"these sums are of a run with a parameter {unknown[0]!r}, but the optimiser has {some(named)}. Build it "
                "with the same parameters first."
            )
        sums = self._sums.resumed(state_dict.get("sums"), 1)
        for n, p in named.items():
            for key in (START, SUM) if n in sums.seen else ():
                x = stores.get(n, {}).get(key)
                if not isinstance(x, Tensor) or x.shape != p.shape:
                    raise ValueError(
                        f"the sums of {n!r} must have a tensor {key!r} of its shape {tuple(p.shape)}. Load the state of "
                        "a run of this model."
                    )
        self._sums = sums
        self._stores = {n: {k: x.detach().clone() for k, x in s.items()} for n, s in stores.items()}

    def remove(self) -> None:
        """Stop counting."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _find_names(self) -> dict[str, Tensor]:
        ids = [id(p) for group in self._optimiser.param_groups for p in group["params"]]
        if ids != self._ids:
            own: Potential = getattr(self._optimiser, "_potential", Euclidean())
            potential = own if self._potential is None else self._potential
            self._named, self._ids = binding.named_parameters(self._optimiser.param_groups, potential), ids
        return self._named

    def _before(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a step: count its gradient, or every gradient that its closure will find."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._count(None)
            return None

        def counted() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._count(loss)
            return loss

        return ((args[0], counted, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": counted})

    @torch.no_grad()
    def _count(self, loss: Any) -> None:
        named, optimiser = self._find_names(), self._optimiser
        # GradScaler leaves the unscaling, and the decision to skip, to optimisers that can do it themselves.
        loss_scale, found_inf = (getattr(optimiser, name, None) for name in ("grad_scale", "found_inf"))
        groups = [group for group in optimiser.param_groups for _ in group["params"]]
        seen = []
        for (name, p), group in zip(named.items(), groups, strict=True):
            grad = p.grad
            if grad is not None and (grad.is_sparse or grad.is_complex()):
                raise RuntimeError(
                    f"certify_run needs dense real gradients, but that of {name!r} is "
                    f"{'sparse' if grad.is_sparse else 'complex'}. Build the layer without sparse=True, or remove() the "
                    "certificate."
                )
            if grad is not None and found_inf is not None:
                grad = torch.where(found_inf.to(grad.device) > 0, torch.zeros_like(grad), grad)
            seen.append(Seen(name, p, grad, self._stores.setdefault(name, {}), bool(group.get("maximize", False))))
        scale = self._scale() if callable(self._scale) else self._scale
        taken: int | Tensor = 1 if found_inf is None else (found_inf <= 0).sum()
        if loss_scale is not None:
            scale = loss_scale.double() * (1.0 if scale is None else scale)
        self._sums.add(seen, scale=scale, loss=loss, idle=is_idle(groups), taken=taken)


def certify_run(
    optimiser: Optimizer,
    geometry: LearnedOptimiser | Potential | str | PathLike[str] | None = None,
    *,
    scale: Scale | None = None,
) -> CertifiedRun:
    """Certify the run of any torch optimiser from now on: SGD, Adam, L-BFGS, MetaMD.

    Before every step it adds up sum <g, x - start> and sum g in float64. `certificate` then bounds how much better any model
    near the start could have done. Nothing is assumed of the steps.

    Args:
        optimiser: whose steps are counted. Where a step has a closure, every evaluation counts as one.
        geometry: whose metric measures the distance from the start, as for `MetaMD`. Its names need
            `model.named_parameters()` in the optimiser. Euclidean if not given; for `MetaMD` its own, and the radius of its
            file.
        scale: the factor that the gradients of a step were multiplied by, by norm clipping or loss scaling: a number, or a
            function that gives the present one. The losses are weighted by it.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = torch.optim.Adam([x], lr=0.1)
        >>> run = certify_run(opt)
        >>> for _ in range(100):
        ...     opt.zero_grad()
        ...     (x**2).sum().backward()
        ...     opt.step()
        >>> certificate = run.certificate(radius=3.0)
        >>> round(certificate.mean, 1)  # the mean loss was at most so far above that of any x in [0, 6]
        2.0
    """
    # Accelerate's wrapper is an optimiser by its type alone: it has no hooks.
    if not isinstance(optimiser, Optimizer) or not hasattr(optimiser, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"certify_run needs a torch optimiser, got {type(optimiser).__name__}. Pass what takes the steps, which a "
            "wrapper has as .optimizer."
        )
    if geometry is None:
        return CertifiedRun(optimiser, None, RunSums(header=getattr(optimiser, "_header", None)), scale)
    potential, learned = binding.opened(geometry)
    return CertifiedRun(optimiser, potential, RunSums(header=None if learned is None else learned.header), scale)

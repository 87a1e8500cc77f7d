"""N diagonal metrics in a basis, and the maximum of their quadratic forms: the paper's learnable potential."""

import copy
import math
from collections.abc import Collection, Mapping
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from metamd.potentials.base import ALONE, Active, Centre, Moves, Named, Params, Potential, Step, StrongConvexity
from metamd.potentials.basis import LIMIT, Basis, Rank, Shrinkage
from metamd.potentials.forms import (
    Array,
    Solution,
    Total,
    combine,
    find_weights,
    gap_of,
    grouped_squares,
    half_forms,
    local_total,
    widen,
)
from metamd.potentials.tying import Rename, Slot, TyingName, clean_names, match, some

Missing = Literal["error", "euclidean"]


class FusedPass(Protocol):
    """The step in place, in few passes over memory, for the metrics, centre and offsets it was made for."""

    def advance(self, params: Params, moves: Moves, weights: Array, forms: Array) -> Array:
        """Write the trial step into the parameters that have a move, and return the forms after it.

        At a vertex the forms, given and returned, may be bounds. They are returned only where the active piece stays.
        """

    def settle(self, params: Params, moving: Collection[str], weights: Array, *, tolerance: float) -> Solution:
        """Take the trial step that the weights led to on to the weights w+ that are right, in place."""


class MaxDiagonal(Potential):
    r"""phi(theta) = max_j (1/2 (theta - c)' D_j (theta - c) + b_j), with N diagonal metrics D_j > 0.

    The exact mirror step is theta+ = c + D(w+)^-1 y with y = D(w)(theta - c) - lr g and D(w) = sum_j w_j D_j, where w
    weighs the active pieces. While one piece stays active this is theta - lr D_j^-1 g, the paper's step; where it
    changes, w+ solves a convex problem with N unknowns.

    Args:
        pieces: N.
        tying: which coordinates share a metric: "parameter" (none), "channel" (an output channel), "column" (an input
            column), "tensor", or "role" (all tensors of one role, such as the hidden weights).
        centre: c is the "start" of the run, or the "origin" as in the paper.
        basis: the coordinates in which the D_j are diagonal; see `Kronecker` for learned ones.

    The logarithms of the metrics are learned, so that no metric can turn negative: `log_d` maps keys to tensors of shape
    (N, ...), `offsets` holds b. A potential must be bound to the tensors of a model before it can be evaluated.

    Example:
        >>> x = {"x": torch.tensor([1.0, 2.0])}
        >>> phi = MaxDiagonal(pieces=2, centre="origin").bind(x)
        >>> with torch.no_grad():
        ...     phi.log_d["x"][1] = torch.log(torch.tensor([4.0, 0.5]))
        >>> phi.value(x)
        tensor(3., dtype=torch.float64, grad_fn=<MaxBackward1>)
    """

    def __init__(
        self,
        pieces: int = 3,
        *,
        tying: TyingName = "parameter",
        centre: Centre = "start",
        basis: Basis = Basis(),  # noqa: B008
    ) -> None:
        if type(pieces) is not int:
            raise TypeError(f"pieces must be a whole number of metrics, got {pieces!r}. Pass pieces=1 for a single one.")
        if pieces < 1:
            raise ValueError(f"pieces must be at least 1, got {pieces}. One piece is a single diagonal metric.")
        if tying not in get_args(TyingName):
            raise ValueError(f"tying must be one of {', '.join(get_args(TyingName))}; got {tying!r}.")
        if centre not in get_args(Centre):
            raise ValueError(f'centre must be "start" or "origin", got {centre!r}.')
        super().__init__()
        self.pieces, self.tying, self.centre = pieces, tying, centre
        self.offsets = nn.Parameter(torch.zeros(pieces, dtype=torch.float64))
        self.table = nn.ParameterDict()
        self.basis = basis
        self.slots: dict[str, Slot] = {}
        self.missing: Missing = "error"
        self.rename: Rename | None = None
        self.start: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] | None = None
        self.add_up: Total = local_total
        self._fused: FusedPass | None = None

    # what is learned

    @property
    def log_d(self) -> dict[str, nn.Parameter]:
        """The learned logarithms of the metrics, by key: (N, ...) each."""
        return {unescape(k): v for k, v in self.table.items()}

    def with_metrics(self, log_d: Params, offsets: Tensor | None = None) -> "MaxDiagonal":
        """The same potential with other metrics; `bind` it to a model next.

        Args:
            log_d: logarithms of the metrics by key, (N, ...) each.
            offsets: b; zero if not given.
        """
        new = MaxDiagonal(self.pieces, tying=self.tying, centre=self.centre, basis=self.basis)
        for key, value in log_d.items():
            if value.ndim == 0 or len(value) != self.pieces:
                raise ValueError(
                    f"log_d[{key!r}] must have one row for each of the {self.pieces} pieces, got shape {tuple(value.shape)}."
                )
            new.table[escape(key)] = value if isinstance(value, nn.Parameter) else nn.Parameter(value)
        if offsets is not None:
            new.offsets = offsets if isinstance(offsets, nn.Parameter) else nn.Parameter(offsets.double())
        return new

    def bind(self, named: Named, *, rename: Rename | None = None, missing: Missing = "error") -> "MaxDiagonal":
        """A new potential for the tensors of a model; this one stays as it is.

        Metrics that were not learned yet start at one. Learned ones must fit: every tensor needs its metric and every
        metric its tensor (by role, a model may lack some roles).

        Args:
            named: the model's named parameters, in the order of its layers.
            rename: maps names of the model to names of the metrics, after wrapper prefixes are stripped.
            missing: "euclidean" gives tensors without a metric D = 1, a plain gradient step, and ignores metrics without
                a tensor.
        """
        if missing not in get_args(Missing):
            raise ValueError(f'missing must be "error" or "euclidean", got {missing!r}.')
        tensors = clean_names(list(named.items() if isinstance(named, Mapping) else named), rename)
        new = self.with_metrics(self.log_d, self.offsets)
        shapes = {n: tuple(x.shape) for n, x in tensors.items()}
        new.slots = self.basis.slots(self.tying, shapes)
        new.missing, new.rename = missing, rename
        if len(self.table):
            stored = {k: tuple(v.shape[1:]) for k, v in self.log_d.items()}
            match(self.tying, new.slots, shapes, stored, lenient=missing == "euclidean")
        new.basis = self.basis.placed(new.slots, shapes)
        for name, slot in new.slots.items():
            if escape(slot.key) not in new.table:
                zeros = torch.zeros((self.pieces, *slot.stored), dtype=widen(tensors[name]).dtype)
                new.table[escape(slot.key)] = nn.Parameter(zeros.to(tensors[name].device))
        return new.centred_at({n: x.detach().clone() for n, x in tensors.items()})

    def centred_at(self, start: Params) -> "MaxDiagonal":
        """The same potential with its centre at these parameters, if it is one that is centred at the start.

        One piece needs no centre: its divergence and its step are the same for all.
        """
        new = copy.copy(self)
        new._parameters, new._modules = dict(self._parameters), dict(self._modules)
        new.start = dict(start) if self.keeps_start else {}
        return new

    def fixed(self, metrics: Params, total: Total = local_total, fused: FusedPass | None = None) -> "MaxDiagonal":
        """The same potential with its metrics D, by tensor, evaluated once where an optimiser needs them."""
        new = self.centred_at(self.start)
        new._fixed, new.add_up, new._fused = dict(metrics), total, fused
        new.basis = self.basis.prepared(new._fixed)
        return new

    def metric(self, name: str) -> Tensor:
        """D_1 .. D_N of one tensor, (N, ...) and broadcastable against it."""
        if self._fixed is not None:
            return self._fixed[name]
        if name not in self.slots:
            raise ValueError(
                f"this MaxDiagonal has no metric for {name!r}: it is bound to {some(self.slots)}. "
                "Call potential.bind(named_parameters) first and use the potential that it returns."
            )
        slot = self.slots[name]
        return slot.spread(self.table[escape(slot.key)]).exp()

    # the potential

    def forms(self, params: Params) -> Tensor:
        """1/2 (theta - c)' D_j (theta - c) + b_j for every piece, in float64."""
        total = torch.stack(list(self._parts(params).values())).sum(0)
        return total + self.offsets.to(total.device)

    def value(self, params: Params) -> Tensor:
        """max_j of the forms."""
        return self.forms(params).max()

    def mirror(self, params: Params, active: Active | None = None) -> dict[str, Tensor]:
        """y = D(w)(theta - c), w the weights of the active pieces: the given ones, or the piece with the largest form."""
        weights = (active or self.activate(params)).weights
        return {n: self._rotated(n, combine(self.metric(n), weights), self._shifted(n, x)) for n, x in params.items()}

    def inverse(self, dual: Params, start: Params | None = None) -> dict[str, Tensor]:
        """theta = c + D(w)^-1 y with the weights that minimise 1/2 y'D(w)^-1 y - <w, b>."""
        first = np.eye(self.pieces)[0]
        trial = {n: self._from_centre(n, self._rotated(n, 1 / combine(self.metric(n), first), y)) for n, y in dual.items()}
        held = {n: x for n, x in (start or {}).items() if n not in dual}
        return self._settle({**held, **trial}, first, dual, None).params

    def divergence(self, u: Params, v: Params) -> Tensor:
        """1/2 |u - v|^2_D(w) + [phi(u) - 1/2 (u-c)'D(w)(u-c) - <w, b>], w the weights at v."""
        along = [half_forms(self._squares(n, u[n] - v[n]), self.metric(n)) for n in u]
        forms = self.forms(u)
        weights = torch.as_tensor(self.activate(v).weights, dtype=torch.float64, device=forms.device)
        return weights @ torch.stack(along).sum(0) + (forms.max() - weights @ forms)

    @property
    def keeps_start(self) -> bool:
        """Whether a run has to remember where it started."""
        return self.centre == "start" and self.pieces > 1

    def strong_convexity(self) -> StrongConvexity:
        """The smallest metric of all, in the Euclidean norm. (The paper has min M, the root of it.)"""
        return StrongConvexity(min(float(v.detach().min().exp()) for v in self.logarithms() if v.numel()), "l2")

    def logarithms(self) -> list[Tensor]:
        """log D of all coordinates that have one of their own, as functions of what is stored."""
        if self.basis.kind == "both" and self.slots:  # a sum over rows and columns
            return [slot.spread(self.table[escape(slot.key)]) for slot in self.slots.values()]
        return list(self.table.values())

    # the norm N = max_j |.|_{D_j}, and its dual: forms without offsets are half the squares of |.|_{D_j}

    @torch.no_grad()
    def half_squares(self, delta: Params) -> Array:
        """1/2 |delta|^2 in every D_j, over all tensors and processes."""
        return self.add_up({n: half_forms(self._squares(n, x), self.metric(n)) for n, x in delta.items()})

    def least(self, name: str) -> float:
        """The smallest metric of a tensor, over all its shards; one for a tensor without numbers."""
        slot = self.slots[name]
        logs = slot.spread(self.table[escape(slot.key)].detach())
        return float(logs.min().exp()) if logs.numel() else 1.0

    def norm(self, delta: Params) -> float:
        """N(delta) of a displacement."""
        return math.sqrt(2 * float(self.half_squares(delta).max()))

    @torch.no_grad()
    def dual_squares(self, dual: Params) -> dict[str, Tensor]:
        """G_l' D_l(w)^-1 G_l by tensor, in float64, of this process's part: their sum is N*(G)^2.

        N*(G)^2 = min_w G'D(w)^-1 G over the simplex, which the solver of the exact step finds; any w is above it.
        """
        turned = {n: self.basis.into(n, y.double()) for n, y in dual.items()}
        metrics = {n: self.metric(n).double() for n in dual}
        weights = np.full(self.pieces, 1 / self.pieces)
        if self.pieces > 1:
            trial = {n: grouped_squares(y / combine(metrics[n], weights), metrics[n].shape[1:]) for n, y in turned.items()}
            found = find_weights(trial, metrics, weights, np.zeros(self.pieces), total=self.add_up, tolerance=1e-12)
            weights = found.weights
        return {n: (y.square() / combine(metrics[n], weights)).sum() for n, y in turned.items()}

    # the step

    def activate(self, params: Params, near: Active | None = None) -> Active:
        """The active pieces at a point: the weights of `near` while they are valid there, else the largest form alone."""
        if self.pieces == 1:
            return ALONE
        forms = self._forms(params)
        if near is not None and gap_of(near.weights, forms) <= _slack(params) * _size(forms):
            return Active(near.weights, forms)
        return Active(np.eye(self.pieces)[int(np.argmax(forms))], forms)

    def step(
        self, params: Params, moves: Moves, *, active: Active | None = None, exact: bool = True, into: Params | None = None
    ) -> Step:
        """The mirror step: a trial with the active weights, then, if the pieces changed, the weights that are right.

        With `exact=False` it is the paper's: theta - lr D_j^-1 g with the piece j of the largest form before the step.
        """
        active = active or self.activate(params)
        weights = active.weights if exact else np.eye(self.pieces)[int(np.argmax(active.forms))]
        if self._fused is not None and into is not None:
            trial = {**params, **{n: into[n] for n in moves}}
            forms = self._fused.advance(trial, moves, weights, active.forms)
        else:
            trial = dict(params)  # with the present weights: (1 - decay) theta - lr D(w)^-1 g
            for name, move in moves.items():
                out = None if into is None else into[name]
                x, d = move.decayed(params[name], out), combine(self.metric(name), weights)
                trial[name] = self.basis.descend(name, x, move.grad, d, move.lr, out)
            if self.pieces == 1:
                return Step(trial, active)
            forms = self._forms(trial)
        if not exact:
            return Step(trial, Active(np.eye(self.pieces)[int(np.argmax(forms))], forms))
        gap = gap_of(weights, forms)
        if gap <= _tolerance(trial) * _size(forms):
            return Step(trial, Active(weights, forms), gap=max(gap, 0.0))
        return self._settle(trial, weights, moves, into)

    def _settle(self, trial: dict[str, Tensor], weights: Array, moving: Collection[str], into: Params | None) -> Step:
        """Find the right weights w+ for the dual point that the trial stands for, and rescale it by D(w)/D(w+)."""
        tolerance = _tolerance(trial)
        if self._fused is not None and into is not None:
            found = self._fused.settle(trial, moving, weights, tolerance=tolerance)
            return Step(trial, Active(found.weights, found.forms), found.iterations, max(found.gap, 0.0))
        with torch.no_grad():
            held = {n: x for n, x in trial.items() if n not in moving}
            offsets = self._forms(held) if held else self._offsets()
            squares = {n: self._squares(n, self._shifted(n, trial[n])) for n in moving}
            metrics = {n: self.metric(n) for n in moving}
            found = find_weights(squares, metrics, weights, offsets, total=self.add_up, tolerance=tolerance)
        for n in moving:  # differentiable, where nobody writes in place
            d = self.metric(n)
            ratio = combine(d, weights) / combine(d, found.weights)
            moved = self._from_centre(n, self._rotated(n, ratio, self._shifted(n, trial[n])))
            trial[n] = moved.to(trial[n].dtype) if into is None else into[n].copy_(moved)
        return Step(trial, Active(found.weights, found.forms), found.iterations, max(found.gap, 0.0))

    # one tensor

    def _shifted(self, name: str, x: Tensor) -> Tensor:
        """theta - c."""
        return x - self.start[name] if name in self.start else x

    def _from_centre(self, name: str, x: Tensor) -> Tensor:
        return x + self.start[name] if name in self.start else x

    def _rotated(self, name: str, d: Tensor, x: Tensor) -> Tensor:
        """V diag(d) V' x."""
        return self.basis.out_of(name, d * self.basis.into(name, x))

    def _squares(self, name: str, delta: Tensor) -> Tensor:
        return grouped_squares(self.basis.into(name, delta), self.metric(name).shape[1:])

    def _parts(self, params: Params) -> dict[str, Tensor]:
        return {n: half_forms(self._squares(n, self._shifted(n, x)), self.metric(n)) for n, x in params.items()}

    def _forms(self, params: Params) -> Array:
        """The forms as plain numbers, over all processes."""
        with torch.no_grad():
            return self._offsets() + self.add_up(self._parts(params))

    def _offsets(self) -> Array:
        return self.offsets.detach().cpu().numpy()


def Diagonal(*, tying: TyingName = "parameter", centre: Centre = "start") -> MaxDiagonal:  # noqa: N802
    """phi(theta) = 1/2 (theta - c)' D (theta - c): the one-piece `MaxDiagonal`, with its step theta - lr D^-1 g."""
    return MaxDiagonal(1, tying=tying, centre=centre)


def Kronecker(  # noqa: N802
    pieces: int = 1,
    *,
    rank: Rank = None,
    tying: TyingName = "tensor",
    centre: Centre = "start",
    shrinkage: Shrinkage = (0.1, 0.001),
    limit: int = LIMIT,
) -> MaxDiagonal:
    """phi(W) = max_j (1/2 tr(W D_j W') + b_j): `MaxDiagonal` in a learned orthogonal basis of every weight matrix.

    D_j = V diag(d_j) V' acts on the input side of a weight (out, in); the kernel of a convolution is a matrix with
    in-channels x kernel columns. Vectors, such as biases, have one number each. In the basis all is as for `MaxDiagonal`:
    pieces, offsets, the exact step, the divergence.

    Args:
        pieces: N; they share the basis.
        rank: how many leading directions have a number of their own; all others share one. "auto" weighs what directions
            gain against what they cost in a step, None keeps all.
        tying: "tensor", or "role" to share basis and metric between tensors of one role and input size, so that they fit
            models of another width.
        centre: as for `MaxDiagonal`.
        shrinkage: what is added to the diagonals of the two moment matrices that D is computed from, as shares of the mean;
            "auto" takes those with which half of the tasks give the lowest bound on the other half.
        limit: sides longer than this keep the identity, and a number for every column.

    Example:
        >>> phi = Kronecker().bind({"fc.weight": torch.zeros(3, 5), "fc.bias": torch.zeros(3)})
        >>> {k: tuple(v.shape) for k, v in phi.log_d.items()}
        {'fc.weight': (1, 5), 'fc.bias': (1,)}
    """
    basis = Basis("right", rank=rank, shrinkage=shrinkage, limit=limit)
    return MaxDiagonal(pieces, tying=tying, centre=centre, basis=basis)


_PREFIX = "log_d:"


def escape(key: str) -> str:
    """A key that torch takes as a parameter's name: without dots, and unlike any attribute of a module."""
    return _PREFIX + key.replace("~", "~0").replace(".", "~1")


def unescape(key: str) -> str:
    """The key that was escaped."""
    return key.removeprefix(_PREFIX).replace("~1", ".").replace("~0", "~")


def _tolerance(params: Params) -> float:
    """The gap that rounding of the forms leaves, relative to their size."""
    return 4 * max(torch.finfo(widen(x).dtype).eps for x in params.values())


def _slack(params: Params) -> float:
    """The gap up to which weights at hand are kept: what a solve, or rounding of the parameters after it, can leave."""
    return max(1000 * _tolerance(params), 8 * max(torch.finfo(x.dtype).eps for x in params.values()))


def _size(forms: Array) -> float:
    return float(np.abs(forms).max()) + np.finfo(np.float64).tiny

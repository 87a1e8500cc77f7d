"""The sums of a run that its regret certificate needs, taken along in float64 while the run goes on.

A step moves the dual point by v_t = lr g_t + lr wd D(w_t) z_t, so that y_{t+1} = y_t - v_t. Each tensor keeps sum |v_t|^2
in the local dual norm and in the Euclidean one, and sum <v_t, z_t - start>. Gradients at an average x_t add
sum <lr g_t, z_t - x_t>. sum v_t is y_1 - y_{T+1} and needs no buffer, unless half precision or the paper's step break
that. The proofs are in docs/concepts/certificates.md.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from metamd.potentials.base import Active, Move, Params, Potential
from metamd.potentials.classical import Euclidean
from metamd.potentials.diagonal import Diagonal, MaxDiagonal
from metamd.potentials.forms import Array, combine
from metamd.potentials.sharding import is_sharded, local, sum_shards

START, SUM = "certificate_start", "certificate_sum"
"""Where the state of a parameter keeps theta_1, if that is not its centre, and sum v_t, where that is kept."""

Stores = Mapping[str, dict[str, Any]]
_CHUNK = 2**16  # numbers that stay in the cache: about 1 MB for the four rows of a chunk in float32
_SAME = 1e-12  # rates that differ by rounding alone


@dataclass
class Row:
    """The sums of one tensor."""

    energy: float = 0.0  # sum v'D(w_t)^-1 v
    square: float = 0.0  # sum v'v
    path: float = 0.0  # sum <v, z_t - start>
    lag: float = 0.0  # sum <lr g, z_t - x_t>; zero unless gradients are taken at an average
    rate: float = 0.0  # the first lr that was not zero; later ones are multiples of it


@dataclass
class Sums:
    """The sums of a run since it began, or since its parameters were last changed from outside.

    An optimiser binds its potential, calls `before` and `after` around every step, and saves `encode()`.
    """

    paper: bool = False  # whether the run takes the paper's step
    steps: int = 0  # T
    rows: dict[str, Row] = field(default_factory=dict)  # of the tensors that had a gradient
    weights: list[float] = field(default_factory=list)  # w_1, the active pieces at the start
    factors: float = 0.0  # sum lr_t / lr_1
    squared_rates: float = 0.0  # sum lr_t^2, the largest rate of each step counting
    lipschitz: float = 0.0  # the largest |v_t|^2 / lr_t^2
    constant: bool = True  # whether no rate ever changed
    proportional: bool = True  # whether the rates of all tensors changed by the same factors
    equal: bool = True  # whether all tensors had the same rate in every step
    decay: float = 0.0  # the largest weight decay
    ascent: bool = False  # whether some tensor was maximised
    descent: bool = False  # whether some tensor was minimised
    partial: bool = False  # whether some tensor had no gradient, or no rate, in a step in which others had
    uncovered: int = 0  # steps in which the piece changed under the paper's step
    restarts: int = 0  # how often the sums began again
    reason: str = ""  # why they last did
    potential: MaxDiagonal | None = None  # phi, with its metrics evaluated; neither saved nor copied
    last: tuple[Array, frozenset[str]] = (np.ones(1), frozenset())  # w_t and the tensors of the step that is being taken

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "potential": None}  # bound anew, with the optimiser

    def bind(self, bound: Potential, named: Params) -> None:
        """Take the optimiser's potential, as one of quadratic forms: the theorem's local norms need these."""
        if isinstance(bound, Euclidean):
            ones = {
                n: torch.ones((1,) * (1 + p.ndim), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
                for n, p in named.items()
            }
            bound = Diagonal(tying="tensor").bind(named).fixed(ones)
        if not isinstance(bound, MaxDiagonal):
            raise ValueError(
                f"certify=True needs a potential of quadratic forms (Diagonal, MaxDiagonal, Kronecker, Euclidean), got "
                f"{type(bound).__name__}. For others there is no guarantee to print: leave certify=False."
            )
        self.potential = bound

    def restart(self, reason: str) -> None:
        """Forget the sums: what follows is a run of its own. Before the first step there is nothing to forget."""
        if self.steps:
            fresh = Sums(self.paper, restarts=self.restarts + 1, reason=reason, potential=self.potential)
            self.__dict__.update(vars(fresh))

    # during the run

    def before(self, active: Active | None, moves: Mapping[str, Move], named: Params, stores: Stores) -> None:
        """Count a step that is about to be taken. `moves` has the tensors with a gradient, which was taken at `named`."""
        weights = np.ones(1) if active is None else active.weights
        if active is not None and self.paper:
            weights = np.eye(len(active.forms))[int(np.argmax(active.forms))]
        self.observe(weights, moves, named, stores)
        self.last = weights, frozenset(moves)

    def observe(self, weights: Array, moves: Mapping[str, Move], named: Params, stores: Stores) -> None:
        """Add up a step under weights w_t; a step whose rates are all zero is none."""
        phi = self.potential
        assert phi is not None
        rates = {n: abs(float(move.lr)) for n, move in moves.items()}
        if max(rates.values()) == 0:
            return
        joining = [n for n in moves if n not in self.rows]
        shifted = [n for n in joining if not _at_centre(stores[n], named[n])]
        if self.steps and shifted and phi.pieces > 1:
            self.restart(f"{shifted[0]!r} got its first gradient after the run had begun")
            joining = list(moves)
        if not self.steps:
            self.weights = [float(w) for w in weights]
        self.partial = self.partial or bool(self.steps and joining)
        for n in joining:
            # Half precision rounds iterates as coarsely as steps move them.
            coarse = named[n].dtype not in (torch.float32, torch.float64)
            _open(stores[n], named[n], keep_sum=coarse or (self.paper and phi.pieces > 1))
        self._note(rates, moves)
        terms = _numbers({n: _terms(phi, n, weights, m, named[n], stores[n]) for n, m in moves.items()})
        if any(is_sharded(named[n]) for n in moves):
            parts = {n: torch.tensor(row, dtype=torch.float64) for n, row in terms.items()}
            terms = {n: row.tolist() for n, row in sum_shards(parts, named).items()}
        self.add(terms, max(rates.values()))

    def _note(self, rates: Mapping[str, float], moves: Mapping[str, Move]) -> None:
        """What the rates and decays of a step change in what can be claimed."""
        top = max(rates.values())
        factor = max(
            (rate / self.rows[n].rate for n, rate in rates.items() if n in self.rows and self.rows[n].rate), default=1.0
        )
        for n, rate in rates.items():
            known = n in self.rows
            row = self.rows.setdefault(n, Row())
            if rate > 0 and row.rate == 0:
                row.rate = rate / (factor or 1.0)
                self.proportional = self.proportional and not known and factor > 0
        factors = [rate / self.rows[n].rate for n, rate in rates.items() if self.rows[n].rate > 0]
        self.factors += max(factors)
        self.constant = self.constant and all(abs(f - 1) <= _SAME for f in factors)
        self.proportional = self.proportional and max(factors) - min(factors) <= _SAME * max(factors)
        self.equal = self.equal and top - min(rates.values()) <= _SAME * top
        self.squared_rates += top**2
        self.partial = self.partial or len(moves) < len(self.rows) or min(rates.values()) == 0
        for n, move in moves.items():
            if rates[n] > 0:
                self.decay = max(self.decay, float(move.decay) / rates[n])
                self.ascent, self.descent = self.ascent or float(move.lr) < 0, self.descent or float(move.lr) > 0

    def add(self, terms: Mapping[str, list[float]], top: float) -> None:
        """Add energy, square, path and lag of every tensor in a step whose largest rate is `top`."""
        squares = 0.0
        for n, (energy, square, path, lag) in terms.items():
            row = self.rows[n]
            row.energy, row.square = row.energy + energy, row.square + square
            row.path, row.lag = row.path + path, row.lag + lag
            squares += square
        self.lipschitz = max(self.lipschitz, squares / top**2)
        self.steps += 1

    def after(self, active: Active | None) -> None:
        """Look at the active pieces after the step."""
        weights, moved = self.last
        if active is None or len(weights) == 1 or bool((active.weights == weights).all()):
            return
        if self.paper:
            self.uncovered += 1
            return
        still = [n for n in self.rows if n not in moved]
        if still:
            # It was held where it is, and its part of y changed with the weights: that is not a mirror step of phi.
            self.restart(f"the active pieces changed in a step in which {still[0]!r} had no gradient")

    # saving

    def encode(self) -> str:
        """All sums as text, for a state_dict; numbers keep every digit."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("potential", "last")}
        return json.dumps({**kept, "rows": {n: asdict(row) for n, row in self.rows.items()}})

    def resumed(self, saved: str | None, steps: int) -> Self:
        """The sums with which a run goes on after so many steps; `saved` is None where it was saved without any."""
        fresh = replace(self, **vars(Sums(self.paper, potential=self.potential)))
        if saved is None:
            reason = "the run was continued from a state_dict without certify=True"
            return replace(fresh, restarts=min(steps, 1), reason=reason if steps else "")
        kept = json.loads(saved)
        if kept.get("rule"):
            raise ValueError(
                "this state_dict has the certificate of an online metric, and certify=True covers the learned metric alone. "
                "Build MetaMD with certify=False to go on with the run."
            )
        # An earlier version kept sums for online metrics beside these.
        rows = {n: Row(**{f.name: row[f.name] for f in fields(Row)}) for n, row in kept.pop("rows").items()}
        known = {f.name for f in fields(self)}
        found = replace(fresh, rows=rows, **{name: value for name, value in kept.items() if name in known})
        if found.paper != self.paper:
            found.restart(f"the run was continued with exact={not self.paper}")
            found.paper = self.paper
        return found


def iterate(param: Tensor, store: Mapping[str, Any]) -> Tensor:
    """z, the point that the mirror step moves: the parameter itself without averaging."""
    z: Tensor = store.get("z", param)
    return z


def start_of(store: Mapping[str, Any]) -> Tensor:
    """theta_1 of the sums: their own copy, or the centre of the potential."""
    start: Tensor = store[START] if START in store else store["start"]
    return start


def _at_centre(store: Mapping[str, Any], param: Tensor) -> bool:
    """Whether a tensor stands at the centre of the potential, which is where it started."""
    return "start" in store and torch.equal(local(store["start"]), local(iterate(param, store)))


def _open(store: dict[str, Any], param: Tensor, *, keep_sum: bool) -> None:
    """Remember where a tensor starts. The potential's centre serves, if that is the same point."""
    z = iterate(param, store)
    store.pop(START, None)
    store.pop(SUM, None)
    if not _at_centre(store, param):
        store[START] = z.detach().clone()
    if keep_sum:
        store[SUM] = torch.zeros_like(z.detach(), dtype=torch.float64)


Terms = tuple[list[float], list[Tensor]]
"""Four factors, and for every chunk of a tensor the four numbers that they belong to."""


def _terms(potential: MaxDiagonal, name: str, weights: Array, move: Move, param: Tensor, store: Mapping[str, Any]) -> Terms:
    """|v|^2 in the local dual norm, |v|^2, <v, z - start>, <lr g, z - x>, of the part of one tensor on this process."""
    lr, decay, kept = float(move.lr), float(move.decay), store.get(SUM)
    x, z = local(param), local(iterate(param, store))
    points = [move.grad, z, local(start_of(store)), *([x] if z is not x else [])]
    metric = combine(potential.metric(name), weights)
    dtype = metric.dtype if kept is None else torch.float64  # half precision, or steps that the sum alone remembers
    turned = [potential.basis.into(name, point.to(dtype)) for point in points]
    if metric.numel() > 1:
        metric = metric.expand(turned[0].shape)
    rows = [row.reshape(-1) for row in (*turned, metric)]
    scale = 1.0 if decay else lr  # the v below, times this, is v
    products, moved = [], []
    for low in range(0, x.numel(), _CHUNK):
        # In chunks that stay in the cache: single precision is enough within one, the chunks are added in float64.
        here = rows if x.numel() <= _CHUNK else [row[low : low + _CHUNK] if len(row) > 1 else row for row in rows]
        g, at, start, *query, d = here
        v = g * lr + at * d * decay if decay else g
        products += [torch.dot(v, v / d), torch.dot(v, v), torch.dot(v, at - start)]
        products.append(torch.dot(g, at - query[0]) if query else products[-1])
        moved.append(v)
    if kept is not None and moved:
        local(kept).add_(potential.basis.out_of(name, torch.cat(moved).reshape(turned[0].shape)), alpha=scale)
    return [scale**2, scale**2, scale, lr if len(points) > 3 else 0.0], products


def _numbers(terms: Mapping[str, Terms]) -> dict[str, list[float]]:
    """The terms of every tensor as numbers, fetched at once."""
    products = [p for _, parts in terms.values() for p in parts]
    same = len({(p.dtype, p.device) for p in products}) < 2
    numbers = torch.stack(products if same else [p.double().cpu() for p in products]).tolist() if products else []
    found, low = {}, 0
    for name, (factors, parts) in terms.items():
        mine, low = numbers[low : low + len(parts)], low + len(parts)
        found[name] = [f * sum(mine[i::4]) for i, f in enumerate(factors)]
    return found

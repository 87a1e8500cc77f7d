"""The sums of a run that its regret certificate needs, taken along in float64 while the run goes on.

A step moves the dual point by v_t = lr g_t + lr wd D(w_t) z_t, so that y_{t+1} = y_t - v_t. Kept per tensor are sum |v_t|^2
in the local dual norm and in the Euclidean one, sum <v_t, z_t - start>, and sum <lr g_t, z_t - x_t> for gradients that are
taken at an average x_t. sum v_t is y_1 - y_{T+1} and needs no buffer, unless half precision or the paper's step break that:
see `needs_sum`. The proofs are in docs/concepts/certificates.md.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from metamd.potentials.base import Active, Move, Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import combine
from metamd.potentials.sharding import is_sharded, local, sum_shards
from metamd.potentials.simplex import Array

START, SUM = "certificate_start", "certificate_sum"
"""Where the state of a parameter keeps theta_1, if that is not its centre, and sum v_t, where that is kept."""

Stores = Mapping[str, dict[str, Any]]
_CHUNK = 2**16
_SAME = 1e-12  # rates that differ by rounding alone


@dataclass
class Row:
    """The sums of one tensor.

    Args:
        energy: sum v'D(w_t)^-1 v.
        square: sum v'v.
        path: sum <v, z_t - start>.
        lag: sum <lr g, z_t - x_t>; zero unless gradients are taken at an average.
        rate: the first lr that was not zero; later ones are multiples of it.
        spread: sum |z_t - start|^2 in H_t - H_{t-1}, of a metric that grows.
        reach: the largest coordinate of any z_t - start, likewise.
    """

    energy: float = 0.0
    square: float = 0.0
    path: float = 0.0
    lag: float = 0.0
    rate: float = 0.0
    spread: float = 0.0
    reach: float = 0.0


@dataclass
class Ledger:
    """What a run has accumulated since it began, or since its parameters were last changed from outside.

    Args:
        paper: whether it takes the paper's step.
        steps: T.
        rows: the sums by tensor that had a gradient.
        weights: w_1, the active pieces at the start.
        factors: sum lr_t / lr_1.
        squared_rates: sum lr_t^2, the largest rate of each step counting.
        lipschitz: the largest |v_t|^2 / lr_t^2.
        constant: whether no rate ever changed.
        proportional: whether the rates of all tensors changed by the same factors.
        equal: whether all tensors had the same rate in every step.
        decay: the largest weight decay.
        ascent: whether some tensor was maximised.
        descent: whether some tensor was minimised.
        partial: whether some tensor had no gradient, or no rate, in a step in which others had.
        uncovered: steps in which the piece changed under the paper's step.
        restarts: how often it began again.
        reason: why it last did.
        rule: by which the metric grows, in words; empty for one that stays as it is.
        momenta: the two smallest of those that any tensor had in any step; one, if it was the same throughout.
    """

    paper: bool = False
    steps: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    factors: float = 0.0
    squared_rates: float = 0.0
    lipschitz: float = 0.0
    constant: bool = True
    proportional: bool = True
    equal: bool = True
    decay: float = 0.0
    ascent: bool = False
    descent: bool = False
    partial: bool = False
    uncovered: int = 0
    restarts: int = 0
    reason: str = ""
    rule: str = ""
    momenta: list[float] = field(default_factory=list)

    def restart(self, reason: str) -> None:
        """Forget the sums: what follows is a run of its own. Before the first step there is nothing to forget."""
        if self.steps:
            self.__dict__.update(vars(Ledger(self.paper, restarts=self.restarts + 1, reason=reason, rule=self.rule)))

    def observe(
        self,
        potential: MaxDiagonal,
        weights: Array,
        moves: Mapping[str, Move],
        rates: Mapping[str, float],
        named: Params,
        stores: Stores,
    ) -> None:
        """Count a step, before it is taken; one whose rates are all zero is none.

        Args:
            potential: phi, with its metrics evaluated.
            weights: w_t.
            moves: gradients, rates and decays of the tensors that have a gradient.
            rates: the rates of these.
            named: the parameters, where the gradients were taken.
            stores: the optimiser's state of each; `z` is where the mirror step is taken from, if not from the parameter.
        """
        if max(rates.values()) == 0:
            return
        joining = [n for n in moves if n not in self.rows]
        shifted = [n for n in joining if not _at_centre(stores[n], named[n])]
        if self.steps and shifted and potential.pieces > 1:
            self.restart(f"{shifted[0]!r} got its first gradient after the run had begun")
            joining = list(moves)
        if not self.steps:
            self.weights = [float(w) for w in weights]
        self.enter(joining, moves, rates, named, stores, keep_sums=self.paper and potential.pieces > 1)
        terms = _numbers({n: _terms(potential, n, weights, m, named[n], stores[n]) for n, m in moves.items()})
        if any(is_sharded(named[n]) for n in moves):
            parts = {n: torch.tensor(row, dtype=torch.float64) for n, row in terms.items()}
            terms = {n: row.tolist() for n, row in sum_shards(parts, named).items()}
        self.add(terms, max(rates.values()))

    def enter(
        self,
        joining: Sequence[str],
        moves: Mapping[str, Move],
        rates: Mapping[str, float],
        named: Params,
        stores: Stores,
        *,
        keep_sums: bool,
    ) -> None:
        """Remember where the tensors that join start, and note the rates of the step.

        Args:
            joining: those with their first gradient.
            moves: see `observe`, and so are the others.
            rates: see there.
            named: see there.
            stores: see there.
            keep_sums: whether sum v_t cannot be read off the end of the run.
        """
        self.partial = self.partial or bool(self.steps and joining)
        for n in joining:
            _open(stores[n], named[n], keep_sum=needs_sum(named[n], keep_sums))
        self._note_rates(rates)
        self._note_moves(rates, moves)

    def _note_rates(self, rates: Mapping[str, float]) -> None:
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

    def _note_moves(self, rates: Mapping[str, float], moves: Mapping[str, Move]) -> None:
        self.partial = self.partial or len(moves) < len(self.rows) or min(rates.values()) == 0
        for n, move in moves.items():
            if rates[n] > 0:
                self.decay = max(self.decay, float(move.decay) / rates[n])
                self.ascent, self.descent = self.ascent or float(move.lr) < 0, self.descent or float(move.lr) > 0

    def note_momenta(self, momenta: Iterable[float]) -> None:
        """Note the momenta of a step's tensors."""
        self.momenta = sorted({*self.momenta, *momenta})[:2]

    def add(self, terms: Mapping[str, list[float]], top: float) -> None:
        """Add up a step.

        Args:
            terms: energy, square, path and lag, by tensor.
            top: its largest rate.
        """
        squares = 0.0
        for n, (energy, square, path, lag) in terms.items():
            row = self.rows[n]
            row.energy, row.square = row.energy + energy, row.square + square
            row.path, row.lag = row.path + path, row.lag + lag
            squares += square
        self.lipschitz = max(self.lipschitz, squares / top**2)
        self.steps += 1

    def close(self, before: Array, after: Active | None, moves: Mapping[str, Move]) -> None:
        """Look at a step after it was taken.

        Args:
            before: w_t.
            after: the active pieces now.
            moves: the tensors that moved.
        """
        if after is None or len(before) == 1 or bool((after.weights == before).all()):
            return
        if self.paper:
            self.uncovered += 1
            return
        still = [n for n in self.rows if n not in moves]
        if still:
            # It was held where it is, and its part of y changed with the weights: that is not a mirror step of phi.
            self.restart(f"the active pieces changed in a step in which {still[0]!r} had no gradient")

    def encode(self) -> str:
        """All of it as text, for a state_dict; numbers keep every digit."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Ledger":
        """The ledger that was encoded."""
        kept = json.loads(text)
        return cls(**{**kept, "rows": {n: Row(**row) for n, row in kept["rows"].items()}})


def needs_sum(param: Tensor, always: bool = False) -> bool:
    """Whether sum v_t has to be kept: half precision rounds iterates as coarsely as steps move them.

    Args:
        param: the parameter.
        always: whether steps do not telescope anyway, as the paper's.
    """
    return always or param.dtype not in (torch.float32, torch.float64)


def iterate(param: Tensor, store: Mapping[str, Any]) -> Tensor:
    """z, the point that the mirror step moves: the parameter itself without averaging."""
    z: Tensor = store.get("z", param)
    return z


def start_of(store: Mapping[str, Any]) -> Tensor:
    """theta_1 of the ledger: its own copy, or the centre of the potential."""
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

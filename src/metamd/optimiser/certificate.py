"""The regret certificate of a run: the sums that are taken along in float64 while it goes on, and the bounds they give.

A step moves the dual point by v_t = lr g_t + lr wd D(w_t) z_t, so that y_{t+1} = y_t - v_t. Each tensor keeps sum |v_t|^2
in the local dual norm and in the Euclidean one, and sum <v_t, z_t - start>. Gradients at an average x_t add
sum <lr g_t, z_t - x_t>. sum v_t is y_1 - y_{T+1} and needs no buffer, unless half precision or the paper's step break
that. The theorems and their proofs are in docs/concepts/certificates.md.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from metamd.files.usage import Average
from metamd.potentials.base import Active, Move, Moves, Params, Potential
from metamd.potentials.classical import Euclidean
from metamd.potentials.diagonal import Diagonal, MaxDiagonal
from metamd.potentials.forms import Array, combine, grouped_squares, half_forms
from metamd.potentials.sharding import is_sharded, local, local_part, sum_shards
from metamd.potentials.tying import Rename, clean_name, some

START, SUM = "certificate_start", "certificate_sum"
"""Where the state of a parameter keeps theta_1, if that is not its centre, and sum v_t, where that is kept."""

SHARED = "(shared)"
"""The row of `Certificate.per_layer` for what belongs to no tensor: offsets, tensors that never moved, rounding."""

Reference = Mapping[str, Tensor] | nn.Module | Iterable[Tensor]
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

    def before(self, active: Active | None, moves: Moves, named: Params, stores: Stores) -> None:
        """Count a step that is about to be taken. `moves` has the tensors with a gradient, which was taken at `named`."""
        weights = np.ones(1) if active is None else active.weights
        if active is not None and self.paper:
            weights = np.eye(len(active.forms))[int(np.argmax(active.forms))]
        self.observe(weights, moves, named, stores)
        self.last = weights, frozenset(moves)

    def observe(self, weights: Array, moves: Moves, named: Params, stores: Stores) -> None:
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

    def _note(self, rates: Mapping[str, float], moves: Moves) -> None:
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
        elif still := [n for n in self.rows if n not in moved]:
            # It was held where it is, and its part of y changed with the weights: that is not a mirror step of phi.
            self.restart(f"the active pieces changed in a step in which {still[0]!r} had no gradient")

    # saving

    def encode(self) -> str:
        """All sums as text, for a state_dict; numbers keep every digit."""
        return json.dumps({k: v for k, v in vars(self).items() if k not in ("potential", "last")}, default=vars)

    def resumed(self, saved: str | None, steps: int) -> Self:
        """The sums with which a run goes on after so many steps; `saved` is None where it was saved without any."""
        fresh = type(self)(self.paper, potential=self.potential)
        if saved is None:
            if steps:
                fresh.restarts, fresh.reason = 1, "the run was continued from a state_dict without certify=True"
            return fresh
        kept = json.loads(saved)
        if kept.get("rule"):
            raise ValueError(
                "this state_dict has the certificate of an online metric, and certify=True covers the learned metric alone. "
                "Build MetaMD with certify=False to go on with the run."
            )
        # An earlier version kept sums for online metrics beside these.
        kept["rows"] = {n: Row(**{f.name: row[f.name] for f in fields(Row)}) for n, row in kept["rows"].items()}
        found = type(self)(**{k: v for k, v in kept.items() if k in vars(fresh)})
        found.potential = self.potential
        if found.paper != self.paper:
            found.restart(f"the run was continued with exact={not self.paper}")
            found.paper = self.paper
        return found


def _start(store: Mapping[str, Any]) -> Tensor:
    """theta_1 of the sums: their own copy, or the centre of the potential."""
    return store[START] if START in store else store["start"]


def _at_centre(store: Mapping[str, Any], param: Tensor) -> bool:
    """Whether a tensor stands at the centre of the potential, which is where it started."""
    return "start" in store and torch.equal(local(store["start"]), local(store.get("z", param)))


def _open(store: dict[str, Any], param: Tensor, *, keep_sum: bool) -> None:
    """Remember where a tensor starts. The potential's centre serves, if that is the same point."""
    z = store.get("z", param)
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
    x, z = local(param), local(store.get("z", param))
    points = [move.grad, z, local(_start(store)), *([x] if z is not x else [])]
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


# the certificate


@dataclass(frozen=True)
class Layer:
    """One tensor's share of a certificate; the shares add up to the whole."""

    bound: float
    realised: float
    distance: float  # the part of the bound that B(u || start) gives
    gradients: float  # the part of the bound that the gradients give


@dataclass(frozen=True)
class Certificate:
    """What is guaranteed for a run of mirror descent against a comparator u, and what happened.

    Args:
        steps: T, since the last restart.
        bound: B(u || start)/lr + lr/2 sum |g_t|^2 in the local dual norms; it holds if `guaranteed`. For averages, `lag`
            is added, and eta = lr/(1 - momentum), the rate of the iterates, takes the place of lr.
        realised: sum <g_t, x_t - u>; with a radius, the largest that any u within it could give.
        identity: realised + B(u || end)/lr, which is B(u || start)/lr + sum B(z_t || z_{t+1})/lr; None with a radius.
        published: Theorem 1 as printed, with the Euclidean norm and lambda = min D.
        lipschitz: the same with the largest gradient norm L of the run for every gradient.
        guaranteed: whether the theorem covers this run.
        form: which variant of the theorem it is.
        holds: what the bound is about, or why there is none.
        uncovered: steps in which the piece changed under the paper's step.
        restarts: how often the certificate began again because the parameters were changed from outside.
        restarted: why it last did.
        per_layer: the shares of the tensors.
        averaging: the weights of the average at which gradients were taken; None for gradients at the iterates.
        lag: sum <g_t, x_t - z_t>, for gradients at an average x_t of the iterates z_t.
    """

    steps: int
    bound: float
    realised: float
    identity: float | None
    published: float
    lipschitz: float
    guaranteed: bool
    form: str
    holds: str
    uncovered: int
    restarts: int
    restarted: str
    per_layer: dict[str, Layer]
    averaging: Average | None = None
    lag: float = 0.0

    @property
    def ratio(self) -> float:
        """Realised over bound; NaN where the bound is not positive."""
        return self.realised / self.bound if self.bound > 0 else math.nan

    def __str__(self) -> str:
        """The certificate in a few lines."""
        ball = self.identity is None
        u, rate = "every u within the radius" if ball else "u", "lr" if self.averaging is None else "eta"
        lag = "" if self.averaging is None else " + lag"
        rows: list[tuple[str, str, float | None]] = [
            ("bound", f"B(u || start)/{rate} + {rate}/2 sum |g_t|^2_(t,*){lag}", self.bound),
            ("realised", "sum <g_t, x_t - u>" + (", the largest" if ball else ""), self.realised),
            ("identity", f"realised + B(u || end)/{rate}", self.identity),
            ("Theorem 1", f"as published, |g_t|^2 / min D{lag and ',' + lag}", self.published),
            ("Lipschitz", "the same with max |g_t|", self.lipschitz),
            ("lag", "sum <g_t, x_t - z_t>, x_t the average", self.lag if lag else None),
        ]
        width = max(44, *(len(formula) for _, formula, _ in rows))
        lines = [f"  {name:<10} {formula:<{width}} = {value:>10.5g}" for name, formula, value in rows if value is not None]
        lines[1] += "" if math.isnan(self.ratio) else f"     ratio {self.ratio:.2f}"
        lines.insert(0, f"regret certificate ({self.form}, T = {self.steps})")
        if self.averaging is not None:
            lines.append("  eta = lr/(1 - momentum), the rate of the iterates z_t")
        lines.append(f"  steps not covered (piece changed under the paper's step): {self.uncovered}")
        if self.restarts:
            lines.append(f"  restarted {self.restarts} times, last because {self.restarted}: earlier steps do not count")
        lines.append(f"  holds for {u}, {self.holds}" if self.guaranteed else f"  no guarantee: {self.holds}")
        return "\n".join(lines)


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
            raise ValueError(
                f"the reference has no tensor {n!r}; it has {some(found)}. Pass the state_dict of a model with the "
                "parameters of this one."
            )
        if found[n].shape != p.shape:
            raise ValueError(
                f"the reference has {n!r} in shape {tuple(found[n].shape)}, but the parameter has {tuple(p.shape)}. Pass "
                "the state_dict of the same model."
            )
    return {n: found[n].detach() for n in named}


# from the sums to the certificate


class CertifiedRun:
    """A run whose certificate is asked for: its sums, its parameters, their states, and the active pieces at the end."""

    def __init__(self, sums: Sums, named: Params, stores: Stores, active: Active | None, averaging: Average) -> None:
        assert sums.potential is not None
        self.sums, self.phi, self.named, self.stores = sums, sums.potential, named, stores
        self.first, self.last = np.array(sums.weights), np.ones(1) if active is None else active.weights
        self.names = list(sums.rows)  # the tensors that had a gradient; the comparator counts for them alone
        self.iterates = {n: stores[n].get("z", p) for n, p in named.items()}
        self.averaging = averaging if averaging != "tail" and any("z" in stores[n] for n in self.names) else None
        # Where sum v_t was kept, it need not be what the end of the run says.
        self.keeps_sums = any(SUM in stores[n] for n in self.names)
        # Whether all tensors have the same weights over time, so that the weighted sum is one of the gradients themselves.
        # One piece is a sum over tensors, and a rate of their own is a metric of their own; pieces share one rate.
        self.is_regret = sums.proportional and (self.phi.pieces == 1 or sums.equal)
        wide = all(named[n].dtype == torch.float64 for n in self.names)
        self.precision = 2.0**-53 if wide else 2.0**-24  # unit roundoff of the steps; the sums are float64

    def certificate(self, reference: Reference | None = None, radius: float | None = None) -> Certificate:
        """The certificate against u = `reference`, or against every u with B(u || start) <= radius^2/2."""
        if (reference is None) == (radius is None):
            raise ValueError("a certificate needs a reference or a radius, and not both. Pass reference=model.state_dict().")
        if radius is not None and not 0 <= radius < math.inf:
            raise ValueError(f"radius must be finite and not negative, got {radius}. Take it from held-out tasks.")
        sums = self.sums
        if not sums.steps:
            raise ValueError(
                "there is nothing to certify: no step was taken yet, or none since the certificate began again. Train "
                "first, then ask for it."
            )
        terms = self._measure(None if reference is None else reference_tensors(reference, self.named, self.phi.rename))
        # The mean rate of every tensor, by which regret is counted; a common one where the claim is on scaled gradients.
        own = np.array([sums.rows[n].rate for n in self.names])
        own = np.append(own, own.max()) if self.is_regret else np.full(len(own) + 1, own.max())
        rates = own * sums.factors / sums.steps
        rates = np.where(rates > 0, rates, rates.max())
        t = {key: value / rates for key, value in terms.items()}
        bound, realised = t["distance"] + t["energy"] - t["lag"], t["path"] - t["product"] - t["lag"]
        identity = float((realised + t["remaining"]).sum())
        rounding = max(identity - float(bound.sum()), 0.0) if self.keeps_sums and not sums.paper else 0.0
        bound[-1] += rounding
        t["energy"][-1] += rounding
        reason = self._failure(t, float(bound.sum()), identity)
        far, late, total = float(t["distance"].sum()), float(t["lag"].sum()), float(realised.sum())
        if radius is not None:
            far = radius**2 / 2 / float(rates.min())
            total += radius * math.sqrt((terms["dual"] / rates**2).sum())
        least = self.phi.strong_convexity().constant
        published = far + float(t["square"].sum()) / least
        lipschitz = far + sums.lipschitz * sums.squared_rates / 2 / float(rates.min()) / least
        shares = zip([*self.names, SHARED], bound, realised, t["distance"], t["energy"], strict=True)
        layers = {n: Layer(*map(float, row)) for n, *row in shares if n != SHARED or any(row)}
        return Certificate(
            steps=sums.steps,
            bound=far + float(t["energy"].sum()) - late,
            realised=total,
            identity=None if radius is not None else identity,
            published=published + rounding - late,
            lipschitz=lipschitz + rounding - late,
            guaranteed=not reason,
            form=self._form(),
            holds=reason or self._holds(),
            uncovered=sums.uncovered,
            restarts=sums.restarts,
            restarted=sums.reason,
            per_layer={} if radius is not None else layers,
            averaging=self.averaging,
            lag=-late if late else 0.0,
        )

    # the terms

    @torch.no_grad()
    def _measure(self, reference: Params | None) -> dict[str, Array]:
        """All terms by tensor; the last row is SHARED. Without a comparator, u is the start.

        The sums hold energy, square, path and lag. Start, end and comparator give B(u || start), B(u || end),
        <sum v, u - start>, |sum v|^2, and its rounding.
        """
        sums, phi, first, last = self.sums, self.phi, self.first, self.last
        kept = np.array([(r.energy / 2, r.square / 2, r.path, r.lag) for r in (*sums.rows.values(), Row())])
        ends: Params = {}
        if self.keeps_sums:
            ends, last = self._where_sums_lead()
        rows = {n: self._row(n, None if reference is None else reference[n], ends.get(n)) for n in self.names}
        resting = [n for n in self.iterates if n not in rows and self._counts(n)]
        still = {n: self._half_forms(n, self._from_centre(n, self.iterates[n])).cpu() for n in resting}
        table = np.stack([row.numpy() for row in sum_shards(rows, self.named).values()])
        table = np.concatenate([table, np.zeros((1, table.shape[1]))])
        at, near, far, rest = np.split(table, [phi.pieces, 2 * phi.pieces, 3 * phi.pieces], axis=1)
        held = (row.numpy() for row in sum_shards(still, self.named).values())
        at[-1] = phi.offsets.detach().cpu().numpy() + sum(held, np.zeros(phi.pieces))
        product, dual, norm = rest.T
        lengths = np.sqrt(norm) * np.sqrt(2 * (near @ first + far @ last))
        return {
            **dict(zip(("energy", "square", "path", "lag"), kept.T, strict=True)),
            "distance": _divergence(at, near, first),
            "remaining": _divergence(at, far, last),
            "product": product,
            "dual": dual,
            "rounding": 16 * self.precision * math.sqrt(sums.steps) * lengths,
        }

    def _where_sums_lead(self) -> tuple[Params, Array]:
        """The point of the dual point y_1 - sum v_t, which need not be the parameters: a step with all gradients at once."""
        phi, first = self.phi, self.first
        start = {n: local(_start(self.stores[n])).double() for n in self.names}
        still = {n: local(p).double() for n, p in self.iterates.items() if n not in start and self._counts(n)}
        wide = phi.fixed({n: phi.metric(n).double() for n in self.named}, phi.add_up)
        wide = wide.centred_at({n: c.double() for n, c in phi.start.items()})
        total = {n: Move(self._total(n)) for n in start}
        step = wide.step({**still, **start}, total, active=Active(first, first))
        return step.params, first if step.active is None else step.active.weights

    def _total(self, name: str) -> Tensor:
        """Sum v_t of one tensor: what was kept, or y_1 - y_{T+1}."""
        phi, store = self.phi, self.stores[name]
        if SUM in store:
            return local(store[SUM])
        d, ends = phi.metric(name).double(), ((_start(store), self.first), (self.iterates[name], self.last))
        before, after = (combine(d, w) * phi.basis.into(name, self._from_centre(name, x)) for x, w in ends)
        return phi.basis.out_of(name, before - after)

    def _row(self, name: str, reference: Tensor | None, end: Tensor | None) -> Tensor:
        """1/2 |.|^2 in every D_j of u - c, u - start, u - end; <sum v, u - start>; |sum v|^2 and |u|^2 at the start."""
        into, start = self.phi.basis.into, local(_start(self.stores[name])).double()
        end = local(self.iterates[name]).double() if end is None else end
        u = start if reference is None else local_part(reference, self.named[name]).double()
        total, mixed = into(name, self._total(name)), combine(self.phi.metric(name).double(), self.first)
        norms = (total.square() / mixed).sum(), (into(name, u).square() * mixed).sum()
        others = torch.stack([(total * into(name, u - start)).sum(), *norms])
        forms = [self._half_forms(name, x) for x in (self._from_centre(name, u), u - start, u - end)]
        return torch.cat([*forms, others]).cpu()

    def _from_centre(self, name: str, x: Tensor) -> Tensor:
        x, start = local(x).double(), self.phi.start
        return x - start[name].double() if name in start else x

    def _half_forms(self, name: str, x: Tensor) -> Tensor:
        d = self.phi.metric(name).double()
        return half_forms(grouped_squares(self.phi.basis.into(name, x), d.shape[1:]), d)

    def _counts(self, name: str) -> bool:
        """Whether a tensor that stays where it is shifts the forms of the pieces against each other."""
        return self.phi.pieces > 1 and (not self.phi.keeps_start or name in self.phi.start)

    # what is claimed

    def _failure(self, t: Mapping[str, Array], bound: float, identity: float) -> str:
        """Why the theorem does not cover the run; empty if it does.

        The identity holds for any iterates, and for mirror descent it lies below the bound, on it for one piece. Where it
        does not, the steps were not those that the sums belong to.
        """
        sums = self.sums
        if sums.uncovered:
            return (
                f"the piece changed in {sums.uncovered} of {sums.steps} steps of the paper's step, which is no mirror step "
                "then. The identity above holds for any iterates; exact=True keeps the bound."
            )
        if not math.isfinite(bound) or not math.isfinite(identity):
            return "the sums are not finite: the run diverged."
        size = sum(float(np.abs(t[key]).sum()) for key in ("distance", "remaining", "energy", "path", "product"))
        slack = math.sqrt(self.precision) * size + float(t["rounding"].sum())
        one_piece = self.phi.pieces == 1 and not self.keeps_sums
        if identity - bound <= slack and not (one_piece and bound - identity > slack):
            return ""
        if self.keeps_sums:
            return (
                "half precision rounded the parameters too coarsely for these steps. The identity above holds nevertheless."
            )
        return (
            "start, end and gradients of the run do not fit together. Was a parameter changed through p.data, which torch "
            "does not count, or the optimiser's state loaded beside another model?"
        )

    def _form(self) -> str:
        sums = self.sums
        parts = {
            "the paper's step" if sums.paper and self.phi.pieces > 1 else "exact mirror descent": True,
            "steps weighted by lr_t / mean lr": not sums.constant,
            "gradients scaled by the lr of their group": not self.is_regret,
            "weight decay": sums.decay,
            f"{self.averaging} averaging": self.averaging,
        }
        return ", ".join(part for part, has in parts.items() if has)

    def _holds(self) -> str:
        sums = self.sums
        loss = ("-l" if sums.ascent else "l") + (" + wd/2 |theta|^2_D" if sums.decay else "")
        claim = f"any gradients; bounds the regret of {loss} when the losses are convex"
        if sums.partial:
            claim += " and did not depend on a tensor while it had no gradient or no lr"
        if not self.is_regret:
            claim = "any gradients, scaled by the lr of their group: not the regret of a loss, for pieces share one lr"
        elif sums.ascent and sums.descent:
            claim = "any gradients, with the sign of their group: a game, not the regret of a loss"
        if self.averaging and sums.decay:
            claim += ", the decay's part taken at the iterates"
        if not sums.constant:
            claim += ". Unweighted, B(u || z_t) would be needed at every change of lr"
        return claim


def _divergence(at: Array, near: Array, weights: Array) -> Array:
    """B(u || v) = 1/2 |u - v|^2_D(w) + [phi(u) - <w, F(u)>] with w the weights at v, row by row, from F(u) and F(u - v)."""
    largest = np.eye(len(weights))[int(np.argmax(at.sum(0)))]
    return near @ weights + at @ (largest - weights)

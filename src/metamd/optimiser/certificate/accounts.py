"""From the sums of a run to its certificate: the theorems of docs/concepts/certificates.md, evaluated in float64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metamd.optimiser.averaging import AveragingName
from metamd.optimiser.certificate import growing
from metamd.optimiser.certificate.certificate import SHARED, Certificate, Layer, Reference, reference_tensors
from metamd.optimiser.certificate.ledger import SUM, Ledger, Row, Stores, iterate, start_of
from metamd.potentials.base import Active, Move, Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import combine, grouped_squares, half_forms
from metamd.potentials.online import Online
from metamd.potentials.sharding import local, local_part, sum_shards
from metamd.potentials.simplex import Array


@dataclass(frozen=True)
class Evidence:
    """A run as its certificate sees it.

    Args:
        ledger: its sums.
        potential: phi, with its metrics evaluated.
        named: the parameters.
        stores: the optimiser's state of each.
        weights: the active pieces now.
        averaging: the weights of the average, if there is one.
        averaged_steps: how many steps that is over.
        online: the rule of a metric that grew during the run; pieces are not used then.
    """

    ledger: Ledger
    potential: MaxDiagonal
    named: Params
    stores: Stores
    weights: Array
    averaging: AveragingName = "constant"
    averaged_steps: int = 0
    online: Online | None = None

    @property
    def pieces(self) -> int:
        """N, of which a growing metric has one."""
        return 1 if self.online is not None else self.potential.pieces

    @property
    def names(self) -> list[str]:
        """The tensors that had a gradient; the comparator counts for them alone."""
        return list(self.ledger.rows)

    def iterates(self) -> dict[str, Tensor]:
        """z of every tensor, also of those whose average is in the parameter just now."""
        return {n: iterate(p, self.stores[n]) for n, p in self.named.items()}

    @property
    def averaged(self) -> bool:
        """Whether gradients are taken at averages of the iterates."""
        return self.averaging != "tail" and any("z" in self.stores[n] for n in self.names)

    @property
    def keeps_sums(self) -> bool:
        """Whether sum v_t was kept instead of being read off the end, since the two differ."""
        return self.online is None and any(SUM in self.stores[n] for n in self.names)

    @property
    def is_regret(self) -> bool:
        """Whether all tensors have the same weights over time, so that the weighted sum is one of the gradients themselves.

        One piece is a sum over tensors, and a rate of their own is a metric of their own; pieces share one rate.
        """
        return self.ledger.proportional and (self.pieces == 1 or self.ledger.equal)


def certify_run(evidence: Evidence, reference: Reference | None = None, radius: float | None = None) -> Certificate:
    """The certificate of a run against a comparator, or against all within a radius of the start.

    Args:
        evidence: the run.
        reference: u.
        radius: rho; every u with B(u || start) <= rho^2/2 is a comparator.
    """
    if (reference is None) == (radius is None):
        raise ValueError("a certificate needs a reference or a radius, and not both. Pass reference=model.state_dict().")
    if radius is not None and not 0 <= radius < math.inf:
        raise ValueError(f"radius must be finite and not negative, got {radius}. Take it from held-out tasks.")
    if not evidence.ledger.steps:
        raise ValueError(
            "there is nothing to certify: no step was taken yet, or none since the certificate began again. Train first, "
            "then ask for it."
        )
    u = None if reference is None else reference_tensors(reference, evidence.named, evidence.potential.rename)
    if evidence.online is None:
        return _issue(evidence, {**_sums(evidence), **_measure(evidence, u)}, radius)
    if radius is not None and evidence.potential.pieces > 1:
        raise ValueError(
            f"a radius needs one norm when the metric follows the run, but this geometry has {evidence.potential.pieces} "
            "pieces. Pass reference=u instead."
        )
    run = growing.tensors(evidence.ledger, evidence.potential, evidence.online, evidence.named, evidence.stores)
    precision = _precision(evidence) * math.sqrt(evidence.ledger.steps)
    terms = growing.measure(run, evidence.potential, evidence.named, u or float(radius or 0), precision)
    ball = math.inf if radius is None else growing.largest_distance(run, _rates(evidence), radius, evidence.named)
    return _issue(evidence, {**_sums(evidence), **terms}, radius, ball)


# the terms, by tensor; the last row is SHARED

Terms = Mapping[str, Array]


def _sums(evidence: Evidence) -> dict[str, Array]:
    """What the ledger holds."""
    rows = [evidence.ledger.rows[n] for n in evidence.names] + [Row()]
    return {
        "energy": np.array([row.energy / 2 for row in rows]),
        "square": np.array([row.square / 2 for row in rows]),
        "path": np.array([row.path for row in rows]),
        "lag": np.array([row.lag for row in rows]),
    }


@torch.no_grad()
def _measure(evidence: Evidence, reference: Mapping[str, Tensor] | None) -> dict[str, Array]:
    """What start, end and comparator give: B(u || start), B(u || end), <sum v, u - start>, |sum v|^2, and its rounding.

    Without a comparator, u is the start.
    """
    phi, names = evidence.potential, evidence.names
    first, last = np.array(evidence.ledger.weights), evidence.weights
    ends: Params = {}
    if evidence.keeps_sums:
        ends, last = _where_sums_lead(evidence)
    rows = {n: _row(evidence, n, None if reference is None else reference[n], ends.get(n)) for n in names}
    still = {n: _resting(phi, n, p) for n, p in evidence.iterates().items() if n not in rows and _counts(phi, n)}
    offsets = phi.offsets.detach().cpu().numpy() + sum(
        (row.numpy() for row in sum_shards(still, evidence.named).values()), np.zeros(phi.pieces)
    )
    table = np.stack([row.numpy() for row in sum_shards(rows, evidence.named).values()])
    table = np.concatenate([table, np.zeros((1, table.shape[1]))])
    at, near, far, rest = np.split(table, [phi.pieces, 2 * phi.pieces, 3 * phi.pieces], axis=1)
    at[-1] = offsets
    product, dual, norm = rest.T
    lengths = np.sqrt(norm) * np.sqrt(2 * (near @ first + far @ last))
    return {
        "distance": _divergence(at, near, first),
        "remaining": _divergence(at, far, last),
        "product": product,
        "dual": dual,
        "rounding": 16 * _precision(evidence) * math.sqrt(evidence.ledger.steps) * lengths,
    }


def _where_sums_lead(evidence: Evidence) -> tuple[Params, Array]:
    """The point of the dual point y_1 - sum v_t, which need not be the parameters: a step with all gradients at once."""
    phi, stores, first = evidence.potential, evidence.stores, np.array(evidence.ledger.weights)
    start = {n: local(start_of(stores[n])).double() for n in evidence.names}
    still = {n: local(p).double() for n, p in evidence.iterates().items() if n not in start and _counts(phi, n)}
    wide = phi.fixed({n: phi.metric(n).double() for n in evidence.named}, phi.add_up)
    wide = wide.centred_at({n: c.double() for n, c in phi.start.items()})
    total = {n: Move(_total(evidence, n, phi.metric(n).double())) for n in start}
    step = wide.step({**still, **start}, total, active=Active(first, first))
    return step.params, first if step.active is None else step.active.weights


def _total(evidence: Evidence, name: str, d: Tensor) -> Tensor:
    """Sum v_t of one tensor: what was kept, or y_1 - y_{T+1}."""
    phi, store = evidence.potential, evidence.stores[name]
    if SUM in store:
        kept: Tensor = local(store[SUM])
        return kept
    ends = (start_of(store), evidence.ledger.weights), (iterate(evidence.named[name], store), evidence.weights)
    duals = [combine(d, np.asarray(w)) * phi.basis.into(name, _from_centre(phi, name, x)) for x, w in ends]
    return phi.basis.out_of(name, duals[0] - duals[1])


def _from_centre(phi: MaxDiagonal, name: str, x: Tensor) -> Tensor:
    x = local(x).double()
    return x - phi.start[name].double() if name in phi.start else x


def _row(evidence: Evidence, name: str, reference: Tensor | None, end: Tensor | None) -> Tensor:
    """1/2 |.|^2 in every D_j of u - c, u - start, u - end; then <sum v, u - start>, and |sum v|^2 and |u|^2 at the start."""
    phi, store, param = evidence.potential, evidence.stores[name], evidence.named[name]
    d, into = phi.metric(name).double(), phi.basis.into
    start = local(start_of(store)).double()
    end = local(iterate(param, store)).double() if end is None else end
    u = start if reference is None else local_part(reference, param).double()
    total, mixed = into(name, _total(evidence, name, d)), combine(d, np.array(evidence.ledger.weights))
    norms = (total.square() / mixed).sum(), (into(name, u).square() * mixed).sum()
    others = torch.stack([(total * into(name, u - start)).sum(), *norms])
    forms = [_halves(phi, name, d, x) for x in (_from_centre(phi, name, u), u - start, u - end)]
    return torch.cat([*forms, others]).cpu()


def _resting(phi: MaxDiagonal, name: str, param: Tensor) -> Tensor:
    """The forms of a tensor that stays where it is."""
    return _halves(phi, name, phi.metric(name).double(), _from_centre(phi, name, param)).cpu()


def _halves(phi: MaxDiagonal, name: str, d: Tensor, x: Tensor) -> Tensor:
    return half_forms(grouped_squares(phi.basis.into(name, x), tuple(d.shape[1:])), d)


def _counts(phi: MaxDiagonal, name: str) -> bool:
    """Whether a tensor that stays where it is shifts the forms of the pieces against each other."""
    return phi.pieces > 1 and (not phi.keeps_start or name in phi.start)


def _precision(evidence: Evidence) -> float:
    return 2.0**-53 if all(evidence.named[n].dtype == torch.float64 for n in evidence.names) else 2.0**-24


def _divergence(at: Array, near: Array, weights: Array) -> Array:
    """B(u || v) = 1/2 |u - v|^2_D(w) + [phi(u) - <w, F(u)>] with w the weights at v, row by row.

    Args:
        at: the forms F(u).
        near: those of u - v.
        weights: w.
    """
    largest = np.eye(len(weights))[int(np.argmax(at.sum(0)))]
    return near @ weights + at @ (largest - weights)


# the certificate


def _rates(evidence: Evidence) -> Array:
    """The mean rate of every tensor, by which regret is counted; a common one where the claim is about scaled gradients."""
    ledger = evidence.ledger
    own = np.array([ledger.rows[n].rate for n in evidence.names])
    own = np.append(own, own.max()) if evidence.is_regret else np.full(len(own) + 1, own.max())
    rates = own * ledger.factors / ledger.steps
    return np.where(rates > 0, rates, rates.max())


def _published(evidence: Evidence, t: Terms, rates: Array, far: float) -> tuple[float, float]:
    """The bounds in print: Theorem 1 and its Lipschitz form; AdaGrad's with a diameter for each tensor, or one for all."""
    if evidence.online is not None:
        energy = float(t["energy"].sum())
        return float(t["diameter"].sum()) + energy, float(t["widest"].sum()) + energy
    ledger, least = evidence.ledger, evidence.potential.strong_convexity().constant
    crude = ledger.lipschitz * ledger.squared_rates / 2 / float(rates.min())
    return far + float(t["square"].sum()) / least, far + crude / least


def _issue(evidence: Evidence, terms: Terms, radius: float | None, ball: float = math.inf) -> Certificate:
    ledger, rates = evidence.ledger, _rates(evidence)
    t = {key: value / rates for key, value in terms.items()}
    bound, realised = t["distance"] + t["energy"] - t["lag"], t["path"] - t["product"] - t["lag"]
    identity = float((realised + t["remaining"]).sum())
    rounding = max(identity - float(bound.sum()), 0.0) if evidence.keeps_sums and not ledger.paper else 0.0
    for key in (bound, t["energy"]):
        key[-1] += rounding
    reason = _failure(evidence, t, float(bound.sum()), identity)
    far, late, total = float(t["distance"].sum()), float(t["lag"].sum()), float(realised.sum())
    if radius is not None:
        far = radius**2 / 2 / float(rates.min()) if evidence.online is None else min(ball, float(t["diameter"].sum()))
        total += radius * math.sqrt((terms["dual"] / rates**2).sum())
    published, lipschitz = _published(evidence, t, rates, far)
    shares = zip([*evidence.names, SHARED], bound, realised, t["distance"], t["energy"], strict=True)
    layers = {n: Layer(*(float(x) for x in row)) for n, *row in shares if n != SHARED or any(row)}
    return Certificate(
        steps=ledger.steps,
        bound=far + float(t["energy"].sum()) - late,
        realised=total,
        identity=None if radius is not None else identity,
        published=published + rounding - late,
        lipschitz=lipschitz + rounding - late,
        last=(far + float(t["energy"].sum())) / ledger.steps if _converts(evidence) else None,
        guaranteed=not reason,
        form=_form(evidence),
        holds=reason or _holds(evidence),
        uncovered=ledger.uncovered,
        restarts=ledger.restarts,
        restarted=ledger.reason,
        per_layer={} if radius is not None else layers,
        metric="learned" if evidence.online is None else "online",
        averaging=evidence.averaging if evidence.averaged else None,
        lag=-late if late else 0.0,
    )


def _failure(evidence: Evidence, t: Terms, bound: float, identity: float) -> str:
    """Why the theorem does not cover the run; empty if it does.

    The identity holds for any iterates, and for mirror descent it lies below the bound, on it for one piece. Where it does
    not, the steps were not those that the sums belong to.
    """
    ledger = evidence.ledger
    if ledger.uncovered:
        return (
            f"the piece changed in {ledger.uncovered} of {ledger.steps} steps of the paper's step, which is no mirror step "
            "then. The identity above holds for any iterates; exact=True keeps the bound."
        )
    if not math.isfinite(bound) or not math.isfinite(identity):
        return "the sums are not finite: the run diverged."
    size = sum(float(np.abs(t[key]).sum()) for key in ("distance", "remaining", "energy", "path", "product"))
    slack = math.sqrt(_precision(evidence)) * size + float(t["rounding"].sum())
    one_piece = evidence.pieces == 1 and not evidence.keeps_sums
    if identity - bound <= slack and not (one_piece and bound - identity > slack):
        return ""
    if evidence.keeps_sums:
        return "half precision rounded the parameters too coarsely for these steps. The identity above holds nevertheless."
    return (
        "start, end and gradients of the run do not fit together. Was a parameter changed through p.data, which torch does "
        "not count, or the optimiser's state loaded beside another model?"
    )


def _converts(evidence: Evidence) -> bool:
    """Whether the average's own loss is bounded: weights 1/t, one constant rate for all, nothing but the loss.

    The gradients of Schedule-Free must lie on the line from the average to the iterate, which needs one momentum for all.
    """
    ledger = evidence.ledger
    on_line = evidence.averaging == "anytime" or (evidence.averaging == "schedule-free" and len(ledger.momenta) < 2)
    weighted = on_line and evidence.averaged_steps == ledger.steps
    return weighted and evidence.is_regret and ledger.constant and not ledger.decay and not ledger.partial


def _form(evidence: Evidence) -> str:
    ledger = evidence.ledger
    plain = "exact mirror descent" if evidence.online is None else "mirror descent in a growing metric"
    parts = ["the paper's step" if ledger.paper and evidence.pieces > 1 else plain]
    if not ledger.constant:
        parts.append("steps weighted by lr_t / mean lr")
    if not evidence.is_regret:
        parts.append("gradients scaled by the lr of their group")
    if ledger.decay:
        parts.append("weight decay")
    if evidence.averaged:
        parts.append(f"{evidence.averaging} averaging")
    return ", ".join(parts)


def _holds(evidence: Evidence) -> str:
    ledger = evidence.ledger
    loss = "-l" if ledger.ascent else "l"
    if ledger.decay:
        loss = f"{loss} + wd/2 |theta|^2_{'D' if evidence.online is None else 'H_t'}"
    claim = f"any gradients; bounds the regret of {loss} when the losses are convex"
    if ledger.partial:
        claim += " and did not depend on a tensor while it had no gradient or no lr"
    if not evidence.is_regret:
        claim = "any gradients, scaled by the lr of their group: not the regret of a loss, for pieces share one lr"
    elif ledger.ascent and ledger.descent:
        claim = "any gradients, with the sign of their group: a game, not the regret of a loss"
    if evidence.averaged and ledger.decay:
        claim += ", the decay's part taken at the iterates"
    if not ledger.constant:
        unweighted = "B(u || z_t)" if evidence.online is None else "another sum over u - z_t"
        claim += f". Unweighted, {unweighted} would be needed at every change of lr"
    return claim

"""From the sums of a run to its certificate: the theorems of docs/concepts/certificates.md, evaluated in float64."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from metamd.optimiser.averaging import AveragingName
from metamd.optimiser.certificate.record import SHARED, Certificate, Layer, Reference, reference_tensors
from metamd.optimiser.certificate.sums import SUM, Row, Stores, Sums, iterate, start_of
from metamd.potentials.base import Active, Move, Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import Array, combine, grouped_squares, half_forms
from metamd.potentials.sharding import local, local_part, sum_shards


class CertifiedRun:
    """A run whose certificate is asked for: its sums, its parameters, their states, and the active pieces at the end."""

    def __init__(
        self, sums: Sums, named: Params, stores: Stores, active: Active | None, averaging: AveragingName = "constant"
    ) -> None:
        assert sums.potential is not None
        self.sums, self.potential, self.named, self.stores = sums, sums.potential, named, stores
        self.weights = np.ones(1) if active is None else active.weights
        self.names = list(sums.rows)  # the tensors that had a gradient; the comparator counts for them alone
        self.iterates = {n: iterate(p, stores[n]) for n, p in named.items()}
        self.averaging = averaging if averaging != "tail" and any("z" in stores[n] for n in self.names) else None
        # Where sum v_t was kept, it need not be what the end of the run says.
        self.keeps_sums = any(SUM in stores[n] for n in self.names)
        # Whether all tensors have the same weights over time, so that the weighted sum is one of the gradients themselves.
        # One piece is a sum over tensors, and a rate of their own is a metric of their own; pieces share one rate.
        self.is_regret = sums.proportional and (self.potential.pieces == 1 or sums.equal)
        wide = all(named[n].dtype == torch.float64 for n in self.names)
        self.precision = 2.0**-53 if wide else 2.0**-24  # unit roundoff of the steps; the sums are float64

    def certificate(self, reference: Reference | None = None, radius: float | None = None) -> Certificate:
        """The certificate against u = `reference`, or against every u with B(u || start) <= radius^2/2."""
        if (reference is None) == (radius is None):
            raise ValueError("a certificate needs a reference or a radius, and not both. Pass reference=model.state_dict().")
        if radius is not None and not 0 <= radius < math.inf:
            raise ValueError(f"radius must be finite and not negative, got {radius}. Take it from held-out tasks.")
        if not self.sums.steps:
            raise ValueError(
                "there is nothing to certify: no step was taken yet, or none since the certificate began again. Train "
                "first, then ask for it."
            )
        u = None if reference is None else reference_tensors(reference, self.named, self.potential.rename)
        return _issue(self, {**_sums(self), **_measure(self, u)}, radius)


# the terms, by tensor; the last row is SHARED

Terms = Mapping[str, Array]


def _sums(run: CertifiedRun) -> dict[str, Array]:
    """What the sums hold."""
    rows = [run.sums.rows[n] for n in run.names] + [Row()]
    table = np.array([(row.energy / 2, row.square / 2, row.path, row.lag) for row in rows])
    return dict(zip(("energy", "square", "path", "lag"), table.T, strict=True))


@torch.no_grad()
def _measure(run: CertifiedRun, reference: Mapping[str, Tensor] | None) -> dict[str, Array]:
    """What start, end and comparator give: B(u || start), B(u || end), <sum v, u - start>, |sum v|^2, and its rounding.

    Without a comparator, u is the start.
    """
    phi, names = run.potential, run.names
    first, last = np.array(run.sums.weights), run.weights
    ends: Params = {}
    if run.keeps_sums:
        ends, last = _where_sums_lead(run)
    rows = {n: _row(run, n, None if reference is None else reference[n], ends.get(n)) for n in names}
    resting = [n for n in run.iterates if n not in rows and _counts(phi, n)]
    still = {n: _half_forms(phi, n, _from_centre(phi, n, run.iterates[n])).cpu() for n in resting}
    offsets = phi.offsets.detach().cpu().numpy() + sum(
        (row.numpy() for row in sum_shards(still, run.named).values()), np.zeros(phi.pieces)
    )
    table = np.stack([row.numpy() for row in sum_shards(rows, run.named).values()])
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
        "rounding": 16 * run.precision * math.sqrt(run.sums.steps) * lengths,
    }


def _where_sums_lead(run: CertifiedRun) -> tuple[Params, Array]:
    """The point of the dual point y_1 - sum v_t, which need not be the parameters: a step with all gradients at once."""
    phi, stores, first = run.potential, run.stores, np.array(run.sums.weights)
    start = {n: local(start_of(stores[n])).double() for n in run.names}
    still = {n: local(p).double() for n, p in run.iterates.items() if n not in start and _counts(phi, n)}
    wide = phi.fixed({n: phi.metric(n).double() for n in run.named}, phi.add_up)
    wide = wide.centred_at({n: c.double() for n, c in phi.start.items()})
    total = {n: Move(_total(run, n)) for n in start}
    step = wide.step({**still, **start}, total, active=Active(first, first))
    return step.params, first if step.active is None else step.active.weights


def _total(run: CertifiedRun, name: str) -> Tensor:
    """Sum v_t of one tensor: what was kept, or y_1 - y_{T+1}."""
    phi, store = run.potential, run.stores[name]
    if SUM in store:
        kept: Tensor = local(store[SUM])
        return kept
    d, ends = phi.metric(name).double(), ((start_of(store), run.sums.weights), (run.iterates[name], run.weights))
    duals = [combine(d, np.asarray(w)) * phi.basis.into(name, _from_centre(phi, name, x)) for x, w in ends]
    return phi.basis.out_of(name, duals[0] - duals[1])


def _from_centre(phi: MaxDiagonal, name: str, x: Tensor) -> Tensor:
    x = local(x).double()
    return x - phi.start[name].double() if name in phi.start else x


def _row(run: CertifiedRun, name: str, reference: Tensor | None, end: Tensor | None) -> Tensor:
    """1/2 |.|^2 in every D_j of u - c, u - start, u - end; then <sum v, u - start>, and |sum v|^2 and |u|^2 at the start."""
    phi, into = run.potential, run.potential.basis.into
    start = local(start_of(run.stores[name])).double()
    end = local(run.iterates[name]).double() if end is None else end
    u = start if reference is None else local_part(reference, run.named[name]).double()
    total, mixed = into(name, _total(run, name)), combine(phi.metric(name).double(), np.array(run.sums.weights))
    norms = (total.square() / mixed).sum(), (into(name, u).square() * mixed).sum()
    others = torch.stack([(total * into(name, u - start)).sum(), *norms])
    forms = [_half_forms(phi, name, x) for x in (_from_centre(phi, name, u), u - start, u - end)]
    return torch.cat([*forms, others]).cpu()


def _half_forms(phi: MaxDiagonal, name: str, x: Tensor) -> Tensor:
    d = phi.metric(name).double()
    return half_forms(grouped_squares(phi.basis.into(name, x), tuple(d.shape[1:])), d)


def _counts(phi: MaxDiagonal, name: str) -> bool:
    """Whether a tensor that stays where it is shifts the forms of the pieces against each other."""
    return phi.pieces > 1 and (not phi.keeps_start or name in phi.start)


def _divergence(at: Array, near: Array, weights: Array) -> Array:
    """B(u || v) = 1/2 |u - v|^2_D(w) + [phi(u) - <w, F(u)>] with w the weights at v, row by row, from F(u) and F(u - v)."""
    largest = np.eye(len(weights))[int(np.argmax(at.sum(0)))]
    return near @ weights + at @ (largest - weights)


# the certificate


def _rates(run: CertifiedRun) -> Array:
    """The mean rate of every tensor, by which regret is counted; a common one where the claim is about scaled gradients."""
    sums = run.sums
    own = np.array([sums.rows[n].rate for n in run.names])
    own = np.append(own, own.max()) if run.is_regret else np.full(len(own) + 1, own.max())
    rates = own * sums.factors / sums.steps
    return np.where(rates > 0, rates, rates.max())


def _issue(run: CertifiedRun, terms: Terms, radius: float | None) -> Certificate:
    sums, rates = run.sums, _rates(run)
    t = {key: value / rates for key, value in terms.items()}
    bound, realised = t["distance"] + t["energy"] - t["lag"], t["path"] - t["product"] - t["lag"]
    identity = float((realised + t["remaining"]).sum())
    rounding = max(identity - float(bound.sum()), 0.0) if run.keeps_sums and not sums.paper else 0.0
    bound[-1] += rounding
    t["energy"][-1] += rounding
    reason = _failure(run, t, float(bound.sum()), identity)
    far, late, total = float(t["distance"].sum()), float(t["lag"].sum()), float(realised.sum())
    if radius is not None:
        far = radius**2 / 2 / float(rates.min())
        total += radius * math.sqrt((terms["dual"] / rates**2).sum())
    least = run.potential.strong_convexity().constant
    published = far + float(t["square"].sum()) / least
    lipschitz = far + sums.lipschitz * sums.squared_rates / 2 / float(rates.min()) / least
    shares = zip([*run.names, SHARED], bound, realised, t["distance"], t["energy"], strict=True)
    layers = {n: Layer(*(float(x) for x in row)) for n, *row in shares if n != SHARED or any(row)}
    return Certificate(
        steps=sums.steps,
        bound=far + float(t["energy"].sum()) - late,
        realised=total,
        identity=None if radius is not None else identity,
        published=published + rounding - late,
        lipschitz=lipschitz + rounding - late,
        guaranteed=not reason,
        form=_form(run),
        holds=reason or _holds(run),
        uncovered=sums.uncovered,
        restarts=sums.restarts,
        restarted=sums.reason,
        per_layer={} if radius is not None else layers,
        averaging=run.averaging,
        lag=-late if late else 0.0,
    )


def _failure(run: CertifiedRun, t: Terms, bound: float, identity: float) -> str:
    """Why the theorem does not cover the run; empty if it does.

    The identity holds for any iterates, and for mirror descent it lies below the bound, on it for one piece. Where it does
    not, the steps were not those that the sums belong to.
    """
    sums = run.sums
    if sums.uncovered:
        return (
            f"the piece changed in {sums.uncovered} of {sums.steps} steps of the paper's step, which is no mirror step "
            "then. The identity above holds for any iterates; exact=True keeps the bound."
        )
    if not math.isfinite(bound) or not math.isfinite(identity):
        return "the sums are not finite: the run diverged."
    size = sum(float(np.abs(t[key]).sum()) for key in ("distance", "remaining", "energy", "path", "product"))
    slack = math.sqrt(run.precision) * size + float(t["rounding"].sum())
    one_piece = run.potential.pieces == 1 and not run.keeps_sums
    if identity - bound <= slack and not (one_piece and bound - identity > slack):
        return ""
    if run.keeps_sums:
        return "half precision rounded the parameters too coarsely for these steps. The identity above holds nevertheless."
    return (
        "start, end and gradients of the run do not fit together. Was a parameter changed through p.data, which torch does "
        "not count, or the optimiser's state loaded beside another model?"
    )


def _form(run: CertifiedRun) -> str:
    sums = run.sums
    parts = {
        "the paper's step" if sums.paper and run.potential.pieces > 1 else "exact mirror descent": True,
        "steps weighted by lr_t / mean lr": not sums.constant,
        "gradients scaled by the lr of their group": not run.is_regret,
        "weight decay": sums.decay,
        f"{run.averaging} averaging": run.averaging,
    }
    return ", ".join(part for part, has in parts.items() if has)


def _holds(run: CertifiedRun) -> str:
    sums = run.sums
    loss = ("-l" if sums.ascent else "l") + (" + wd/2 |theta|^2_D" if sums.decay else "")
    claim = f"any gradients; bounds the regret of {loss} when the losses are convex"
    if sums.partial:
        claim += " and did not depend on a tensor while it had no gradient or no lr"
    if not run.is_regret:
        claim = "any gradients, scaled by the lr of their group: not the regret of a loss, for pieces share one lr"
    elif sums.ascent and sums.descent:
        claim = "any gradients, with the sign of their group: a game, not the regret of a loss"
    if run.averaging and sums.decay:
        claim += ", the decay's part taken at the iterates"
    if not sums.constant:
        claim += ". Unweighted, B(u || z_t) would be needed at every change of lr"
    return claim

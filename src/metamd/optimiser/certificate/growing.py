"""The sums and the terms of a certificate for a metric H_t that grows during the run, such as `Online` with rule "sum".

A step is z_{t+1} = z_t - H_t^-1 v_t in the coordinates of the basis. With H_0 = 0, for any gradients and every u,

    sum <v_t, z_t - u> = 1/2 sum |u - z_t|^2_(H_t - H_{t-1}) + 1/2 sum v_t'H_t^-1 v_t - 1/2 |u - z_{T+1}|^2_(H_T).

The first sum is a quadratic in u, whose coefficients are H_T, sum (H_t - H_{t-1}) z_t = H_T z_{T+1} + sum v_t and a number:
one buffer, sum v_t, makes it exact for every comparator afterwards. The proofs are in docs/concepts/certificates.md.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metamd.optimiser.certificate.ledger import SUM, Ledger, Stores, iterate, start_of
from metamd.optimiser.checkpoint import metric_code
from metamd.potentials.base import Move, Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.online import Online, Watch
from metamd.potentials.sharding import is_sharded, local, local_part, sum_shards
from metamd.potentials.simplex import Array


def check_rule(online: Online) -> str:
    """The rule in a few letters; refused if the metric can shrink or turn, for which no theorem here gives a bound.

    Args:
        online: the rule and its scales.
    """
    if online.refresh:
        raise ValueError(
            f"certify=True needs coordinates that stay as they are, but refresh={online.refresh} turns those of the output "
            "side, and a metric that turns shrinks in some directions. Pass Online(refresh=0), or leave certify=False."
        )
    if online.rule != "sum":
        raise ValueError(
            'certify=True needs an online metric that never shrinks, as that of rule "sum"; under rule '
            f"{online.rule!r} it may, so that distances to the comparator count with both signs and no bound on them bounds "
            'the regret. Pass Online("sum"), metric="learned", or leave certify=False.'
        )
    return metric_code(online)


# during the run


class Growth:
    """Adds one step in a growing metric to a ledger: made before the step, told of every tensor, closed after.

    Args:
        ledger: where the sums are kept.
        potential: whose coordinates are used.
        online: the rule and its scales.
        moves: what the tensors with a gradient are asked to do.
        rates: their rates.
        named: the parameters, where the gradients were taken.
        stores: the optimiser's state of each.
    """

    def __init__(
        self,
        ledger: Ledger,
        potential: MaxDiagonal,
        online: Online,
        moves: Mapping[str, Move],
        rates: Mapping[str, float],
        named: Params,
        stores: Stores,
    ) -> None:
        self.ledger, self.potential, self.online, self.named = ledger, potential, online, named
        self.top = max(rates.values())
        self.joining = [n for n in moves if n not in ledger.rows]
        if self.top > 0:
            ledger.enter(self.joining, moves, rates, named, stores, keep_sums=True)
        self.parts: dict[str, Tensor] = {}
        # Here, since averages may move the parameter before the step is taken.
        self.lags = {n: _lag(m, named[n], stores[n]) for n, m in moves.items()}

    def watch(self, name: str, move: Move, param: Tensor, store: dict[str, Any]) -> Watch | None:
        """What is told of the step before the tensor moves; None before its first step with a rate.

        Args:
            name: of the tensor.
            move: what it is asked to do.
            param: the parameter.
            store: the optimiser's state of it, from before the step.
        """
        if name not in self.ledger.rows:
            return None
        return partial(self._observe, name, move, param, store, None if name in self.joining else self.online.grown(store))

    def _observe(
        self, name: str, move: Move, param: Tensor, store: dict[str, Any], before: Tensor | None, energy: Tensor, a: Tensor
    ) -> None:
        lr, decay, basis = float(move.lr), float(move.decay), self.potential.basis
        scale = self.online.scale[self.potential.slots[name].key]
        z = local(iterate(param, store)).detach()
        moved, kept, h = z - local(start_of(store)), local(store[SUM]), scale * a
        away, growth = basis.into(name, moved), h if before is None else h - scale * before
        kept.add_(move.grad, alpha=lr)
        if decay:
            pull = decay * h * basis.into(name, z)
            v = lr * basis.into(name, move.grad) + pull
            kept.add_(basis.out_of(name, pull).reshape(kept.shape))
            sums = [_sum(v, v / h), _sum(v, v), _sum(v, away)]
        else:
            sums = [energy.double() * lr**2 / scale, _sum(move.grad, move.grad) * lr**2, _sum(move.grad, moved) * lr]
        reach = away.abs().max() if away.numel() else away.new_zeros(())
        self.parts[name] = torch.stack([*sums, _sum(growth * away, away), reach.double(), self.lags[name]]).cpu()

    def close(self) -> None:
        """Add the step to the ledger; one whose rates are all zero only lets the metric grow."""
        parts = sum_shards(self.parts, self.named)  # of largest coordinates too: no smaller than the largest of all
        rows = {n: row.tolist() for n, row in parts.items()}
        for n, (_, _, _, spread, reach, _) in rows.items():
            row = self.ledger.rows[n]
            row.spread, row.reach = row.spread + spread, max(row.reach, reach)
        if self.top > 0:
            self.ledger.add({n: [*row[:3], row[5]] for n, row in rows.items()}, self.top)


def _lag(move: Move, param: Tensor, store: Mapping[str, Any]) -> Tensor:
    """<lr g, z - x>."""
    x, z = local(param).detach(), local(iterate(param, store)).detach()
    if x is z or "z" not in store:
        return torch.zeros((), dtype=torch.float64)
    return float(move.lr) * _sum(move.grad, z - x)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)


# after the run


@dataclass(frozen=True)
class Grown:
    """One tensor of a run in a growing metric, in coordinates and float64.

    Args:
        h: H_T.
        start: theta_1.
        end: z_{T+1} - start.
        total: sum v_t.
        metric: D of the potential, in which radii are measured.
        spread: sum |z_t - start|^2 in H_t - H_{t-1}.
        reach: the largest coordinate of any z_t - start.
    """

    h: Tensor
    start: Tensor
    end: Tensor
    total: Tensor
    metric: Tensor
    spread: float
    reach: float

    @property
    def slope(self) -> Tensor:
        """sum (H_t - H_{t-1}) (z_t - start), by summation by parts."""
        return self.h * self.end + self.total

    def row(self, w: Tensor) -> Tensor:
        """The numbers that depend on u = start + w: see `measure`."""
        rest, h = w - self.end, self.h
        numbers = [
            0.5 * (h * rest * rest).sum(),
            0.5 * (h * self.end * self.end).sum(),
            (self.total * w).sum(),
            (self.total.square() / self.metric).sum(),
            (h * (self.start + w).square()).sum(),
            (h * w * w).sum(),
            h.sum(),
            w.abs().max() + self.reach if w.numel() else h.sum(),
        ]
        return torch.stack(numbers).cpu()

    def within(self, radius: float) -> float:
        """How large a coordinate of u - z_t can be, for |u - start|_D <= radius."""
        return radius / math.sqrt(float(self.metric.min())) + self.reach if self.h.numel() else 0.0


def tensors(ledger: Ledger, potential: MaxDiagonal, online: Online, named: Params, stores: Stores) -> dict[str, Grown]:
    """The tensors of a run, as its certificate needs them.

    Args:
        ledger: its sums.
        potential: phi.
        online: the rule.
        named: the parameters.
        stores: the optimiser's state of each.
    """
    found = {}
    for n, row in ledger.rows.items():
        store, into = stores[n], partial(potential.basis.into, n)
        start, end = local(start_of(store)).double(), local(iterate(named[n], store)).detach().double()
        h = online.scale[potential.slots[n].key] * online.grown(dict(store)).double()
        metric = potential.metric(n)[0].detach().double().expand(h.shape)
        found[n] = Grown(h, into(start), into(end - start), into(local(store[SUM])), metric, row.spread, row.reach)
    return found


def measure(
    run: Mapping[str, Grown], potential: MaxDiagonal, named: Params, reference: Params | float, precision: float
) -> dict[str, Array]:
    """The terms of `metamd.accounts` for a growing metric, by tensor and one row for what they share, which is nothing.

    Args:
        run: its tensors.
        potential: phi.
        named: the parameters.
        reference: u; or a radius, and then u is the start, but diameters are those of the ball.
        precision: of the arithmetic of the steps.
    """
    rows = {}
    for n, tensor in run.items():
        w = torch.zeros_like(tensor.h)
        if not isinstance(reference, float):
            w = potential.basis.into(n, local_part(reference[n], named[n]).double()) - tensor.start
        rows[n] = tensor.row(w)
        if isinstance(reference, float):
            rows[n][-1] = tensor.within(reference)
    table = np.stack([row.numpy() for row in sum_shards(rows, named).values()] + [np.zeros(8)])
    remaining, moved, product, dual, norm, near, trace, largest = table.T
    spread = np.array([tensor.spread for tensor in run.values()] + [0.0])
    return {
        "distance": remaining - moved - product + spread / 2,
        "remaining": remaining,
        "product": product,
        "dual": dual,
        "diameter": largest**2 / 2 * trace,
        "widest": largest.max() ** 2 / 2 * trace,
        "rounding": 16 * precision * np.sqrt(norm) * np.sqrt(near + 2 * remaining),
    }


def largest_distance(run: Mapping[str, Grown], rates: Array, radius: float, named: Params) -> float:
    """1/2 sum |u - z_t|^2_(H_t - H_{t-1}) / lr at most, over all u with |u - start|_D <= radius.

    A quadratic over an ellipsoid: for every l > max H/(lr D), the largest value of 1/2 w'H w - <b, w> is at most
    l radius^2/2 + 1/2 sum b^2/(l D - H), and the smallest of these is the value itself.

    Args:
        run: its tensors.
        rates: of each.
        radius: rho.
        named: the parameters.
    """
    if any(is_sharded(named[n]) for n in run):
        raise ValueError(
            "a radius needs whole tensors when the metric follows the run, but these are sharded. Pass reference=u instead."
        )
    pairs = list(zip(run.values(), rates, strict=False))
    fixed = sum(t.spread / 2 / r for t, r in pairs)
    steepest = max(float((t.h / t.metric).max()) / r for t, r in pairs)
    across = math.sqrt(sum(float((t.slope.square() / t.metric).sum()) / r**2 for t, r in pairs))
    values = [radius**2 * steepest / 2 + radius * across, *_duals(pairs, steepest, radius)]
    return min(values) + fixed


def _duals(pairs: list[tuple[Grown, float]], steepest: float, radius: float) -> Iterator[float]:
    """Lagrange's bound at multipliers that come close to the steepest and go far beyond."""
    for power in range(-24, 25):
        multiplier = steepest * (1 + 2.0**power)
        dual = sum(float((t.slope.square() / (r * (multiplier * r * t.metric - t.h))).sum()) for t, r in pairs)
        yield multiplier * radius**2 / 2 + dual / 2

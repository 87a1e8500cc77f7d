"""How a learned basis is found: the best metric of every weight matrix in closed form, and the basis it is diagonal in."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metamd.files.learned import Moments
from metamd.inner.objectives import Regret
from metamd.inner.run import Trajectory
from metamd.potentials.basis import Basis, Orthogonal, Rank
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import grouped_squares

TOLERATED = 0.05
"""The share of the bound that `rank="auto"` gives away at most, if `LARGEST_RANK` allows it."""

LARGEST_RANK = 24
"""The largest rank that `rank="auto"` takes where it does not keep all directions. Two products with r columns take 2r/(3b)
of the operations of a gradient from b examples; at b = 100 this is a sixth, and of the time about a quarter, since thin
products are slower."""

NO_MOMENTS = Moments({}, {})

DEFAULT = (0.1, 0.001)  # shares of X and of Y without a second half of tasks to choose them
CANDIDATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), (1e-4, 1e-3, 1e-2, 1e-1)
"""Shares of X and of Y that `shrinkage="auto"` tries: first the shares of X, with the default of Y."""


@dataclass(frozen=True)
class Iterate:
    """Metrics on the way, and how they did on the tasks they were first tried on."""

    log_d: dict[str, Tensor]  # logarithms of the metrics by key, (N, ...) each
    offsets: Tensor  # b
    step: int = 0  # the outer step that tried them; 0 before that
    loss: float = math.inf  # mean training loss over its runs, infinite if some of them diverged
    basis: Basis = field(default_factory=Basis)  # the coordinates in which they are metrics

    @classmethod
    def of(cls, potential: MaxDiagonal) -> "Iterate":
        """The metrics of a potential."""
        log_d = {k: v.detach().clone() for k, v in potential.log_d.items()}
        return cls(log_d, potential.offsets.detach().clone(), basis=potential.basis)

    def apply(self, potential: MaxDiagonal) -> MaxDiagonal:
        """The potential with these metrics, and as many pieces as they have; not bound yet."""
        new = MaxDiagonal(len(self.offsets), tying=potential.tying, centre=potential.centre, basis=self.basis)
        return new.with_metrics(self.log_d, self.offsets).requires_grad_(False)

    def moved(self, log_d: dict[str, Tensor], offsets: Tensor | None = None, basis: Basis | None = None) -> "Iterate":
        """Other metrics, not tried yet, with the same offsets and in the same basis unless others are given."""
        ordered = {k: log_d[k] for k in self.log_d}
        return Iterate(ordered, self.offsets if offsets is None else offsets, basis=basis or self.basis)

    def shifted(self, by: float) -> "Iterate":
        """All metrics, and the offsets with them, multiplied by exp(by): the same potential times a number."""
        return self.moved({k: v + by for k, v in self.log_d.items()}, self.offsets * math.exp(by))

    def halfway(self, other: "Iterate") -> "Iterate":
        """The geometric mean of two metrics; for weights it is diagonal in a basis of its own."""
        offsets = torch.lerp(self.offsets, other.offsets, 0.5)
        log_d = {k: torch.lerp(v, other.log_d[k], 0.5) for k, v in self.log_d.items() if v.shape == other.log_d[k].shape}
        factors = dict(self.basis.factors)
        for key in _keys(self.basis):
            d, vectors = torch.linalg.eigh(matrix_geometric_mean(_metric(self, key).matrix, _metric(other, key).matrix))
            middle = FullMetric(vectors, d)
            # Any moments that this metric is best for tell which directions lead: X = D^-1 and Y = D.
            inverse, rank = FullMetric(vectors, 1 / d), self.basis.rank_of(f"right/{key}")
            columns, numbers = _truncated(middle, inverse.matrix, middle.matrix, rank)
            factors[f"right/{key}"] = columns.float().contiguous()
            log_d[key] = numbers.log().to(self.log_d[key].dtype).unsqueeze(0)
        return self.moved(log_d, offsets, self.basis.with_factors(factors))


@dataclass(frozen=True)
class Turned:
    """Metrics of the weight matrices in a new basis."""

    log_d: dict[str, Tensor]  # by key
    basis: Basis
    changes: dict[str, float]  # the root mean square change of log D, by factor
    before: float  # the bound of the matrices
    after: float


@dataclass(frozen=True)
class FullMetric:
    """D = Q diag(d) Q' on the input side of a weight matrix."""

    vectors: Tensor
    d: Tensor

    @property
    def matrix(self) -> Tensor:
        """D."""
        return (self.vectors * self.d) @ self.vectors.mT

    def bound(self, x: Tensor, y: Tensor) -> float:
        """(tr D X + tr D^-1 Y) / 2."""
        a, b = (((m @ self.vectors) * self.vectors).sum(0) for m in (x, y))
        return 0.5 * float((self.d * a + b / self.d).sum())


# the moments of runs: two sums, from which the best metric follows; they add up over runs and files


def moments_of(run: Trajectory, potential: MaxDiagonal, objective: Regret) -> Moments:
    """The moments of a run against the objective's comparator, with its prior."""
    u = objective.comparator.of(run)
    pseudo = objective.pseudo(run, u) if objective.prior else {}
    rates = {n: float(a.sum() / b.sum()) if bool(b.any()) else 0.0 for n, (a, b) in pseudo.items()}
    x: dict[str, Tensor] = {}
    y: dict[str, Tensor] = {}
    basis = potential.basis
    matrices = basis.learnable() if run.products else []
    for n, slot in potential.slots.items():
        delta = (u[n] - run.start[n]).double()
        if n in matrices:
            # Y counts 1 + prior times, and X is given the displacements that prior Y would have led to
            key, m, products = f"right/{slot.key}", basis.places[n].matrix(delta), run.products[f"right/{n}"].double()
            here = (m.mT @ m + objective.prior * rates.get(n, 0.0) * products) / run.lr
            there = (1 + objective.prior) * products * run.lr
        else:
            key, more = slot.key, pseudo.get(n, (0.0, 0.0))
            here = slot.gather((grouped_squares(basis.into(n, delta), slot.shape) + more[0]) / run.lr)
            there = slot.gather((run.squares[n].double() + more[1]) * run.lr)
        x[key], y[key] = (here, there) if key not in x else (x[key] + here, y[key] + there)
    return Moments(x, y)


def minimiser(moments: Moments, present: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """log D_i = (log y_i - log x_i) / 2, by key, one piece each.

    Where nothing moved or no gradient arrived the ratio says nothing, and the logarithm of the present metric is kept.
    """
    found = {}
    for key, kept in present.items():
        if key not in moments.x:  # it has a matrix
            continue
        x, y = moments.x[key], moments.y[key]
        known = (x > 0) & (y > 0)
        logs = 0.5 * (torch.where(known, y, 1.0).log() - torch.where(known, x, 1.0).log())
        found[key] = torch.where(known, logs, kept.detach()[0].to(logs.dtype)).to(kept.dtype).unsqueeze(0)
    return found


def moment_shapes(iterate: Iterate) -> dict[str, tuple[int, ...]]:
    """The shapes of what runs say about these metrics: (n, n) by "right/key" where a basis is learned."""
    shapes = {k: tuple(v.shape[1:]) for k, v in iterate.log_d.items()}
    for place in map(iterate.basis.places.__getitem__, iterate.basis.learnable()):
        shapes.pop(place.key, None)
        shapes[f"right/{place.key}"] = (place.sizes["right"],) * 2
    return shapes


def halved_keys(iterate: Iterate) -> list[str]:
    """The keys of matrices for which half of the tasks are also summed apart: all under `shrinkage="auto"`, else none."""
    auto = iterate.basis.shrinkage == "auto"
    return [k for k in moment_shapes(iterate) if k not in iterate.log_d] if auto else []


def learn_factors(now: Iterate, moments: Moments, reach: float, half: Moments = NO_MOMENTS) -> Turned:
    """Move all weights to the minimisers X^-1 # Y of the bound, in the bases where these are diagonal.

    No direction's log D changes by more than `reach`. For `shrinkage="auto"`, `half` has the moments of every other run.
    """
    basis = now.basis
    log_d: dict[str, Tensor] = {}
    changes: dict[str, float] = {}
    factors, before, after = dict(basis.factors), 0.0, 0.0
    for key in _keys(basis):
        factor, present = f"right/{key}", _metric(now, key)
        x, y = moments.x[factor], moments.y[factor]
        shares = basis.shrinkage
        if shares == "auto":
            shares = best_shares(x, y, half.x[factor], half.y[factor]) if factor in half.x else DEFAULT
        raised = _raised(x, shares[0]), _raised(y, shares[1])
        known = float(x.trace()) > 0 and float(y.trace()) > 0  # where nothing moved, nothing is said
        new, changes[factor] = towards(present, best_metric(*raised), reach) if known else (present, 0.0)
        columns, numbers = _truncated(new, *raised, basis.rank_of(factor))
        factors[factor] = columns.float().contiguous()
        log_d[key] = numbers.log().to(now.log_d[key].dtype).unsqueeze(0)
        before, after = before + present.bound(x, y), after + _whole(columns, numbers).bound(x, y)
    return Turned(log_d, basis.with_factors(factors), changes, before, after)


def best_iterate(now: Iterate, moments: Moments) -> Iterate:
    """The metrics with the lowest bound, however far from those at hand; weights are in new bases."""
    turned = learn_factors(now, moments, math.inf)
    log_d = minimiser(moments, {k: v for k, v in now.log_d.items() if k not in turned.log_d}) | turned.log_d
    return now.moved(log_d, basis=turned.basis)


def best_shares(x: Tensor, y: Tensor, x_half: Tensor, y_half: Tensor) -> tuple[float, float]:
    """The shares of their mean diagonals to add to X and Y: those with the lowest bound on tasks that were not learned from.

    D is computed from half of the tasks and its bound tr(D X) + tr(D^-1 Y) from the other half, both ways.
    """
    halves = [(x_half, y_half), (x - x_half, y - y_half)]
    if any(not float(m.trace()) > 0 for half in halves for m in half):
        return DEFAULT

    def bound(shares: tuple[float, float]) -> float:
        total = 0.0
        for here, there in (halves, halves[::-1]):
            d = best_metric(_raised(here[0], shares[0]), _raised(here[1], shares[1]))
            total += float((d * there[0]).sum() + torch.trace(torch.linalg.solve(d, there[1])))
        return total

    first = min(((share, DEFAULT[1]) for share in CANDIDATES[0]), key=bound)
    return min(((first[0], share) for share in CANDIDATES[1]), key=bound)


def _raised(m: Tensor, share: float) -> Tensor:
    level = max(float(m.diagonal().mean()) * share, torch.finfo(torch.float64).tiny)
    return m + level * torch.eye(len(m), dtype=m.dtype, device=m.device)


def _truncated(metric: FullMetric, x: Tensor, y: Tensor, rank: Rank) -> tuple[Tensor, Tensor]:
    """The leading columns, and their d followed by one number for all the rest; all columns if rank is None.

    A direction leads if the bound grows much when it shares its number with the rest: by c x + y/c - 2 sqrt(x y), x and y
    the moments along it. Which directions share, and their c, are found in turn.
    """
    n = len(metric.d)
    if rank is None or (rank != "auto" and rank >= n):
        return metric.vectors, metric.d
    a, b = (((m @ metric.vectors) * metric.vectors).sum(0).clamp_min(0) for m in (x, y))
    for r in range(min(n, LARGEST_RANK) + 1) if rank == "auto" else [rank]:
        order, c, lost = _leading(metric.d, a, b, r)
        if rank == "auto" and lost <= TOLERATED * float((metric.d * a + b / metric.d).sum()):
            break
    kept = order[:r]
    if r == n:
        return metric.vectors, metric.d
    return metric.vectors[:, kept], torch.cat([metric.d[kept], c.reshape(1)])


def _leading(d: Tensor, a: Tensor, b: Tensor, r: int) -> tuple[Tensor, Tensor, float]:
    """The directions in the order in which they lead, the number c of all but the first r, and what sharing it loses."""
    own = d * a + b / d
    rest = torch.arange(len(d), device=d.device)
    order, c, lost = rest, d.mean(), math.inf
    for _ in range(10):
        total = a[rest].sum(), b[rest].sum()
        level = (total[1] / total[0]).sqrt() if total[0] > 0 and total[1] > 0 else d[rest].log().mean().exp()
        level = level.clamp(d[rest].min(), d[rest].max())
        excess = level * a + b / level - own
        trial = excess.argsort(descending=True)
        left = float(excess[trial[r:]].sum())
        if left >= lost:
            break
        order, c, lost, rest = trial, level, left, trial[r:]
    return order, c, lost


def _whole(columns: Tensor, numbers: Tensor) -> FullMetric:
    """The metric that leading columns and numbers stand for."""
    n, r = columns.shape
    q = Orthogonal(columns).into(torch.eye(n, dtype=columns.dtype, device=columns.device))
    d = torch.cat([numbers[:r], numbers[-1:].expand(n - r)])
    return FullMetric(q, d)


def _keys(basis: Basis) -> list[str]:
    return list(dict.fromkeys(basis.places[n].key for n in basis.learnable()))


def _metric(iterate: Iterate, key: str) -> FullMetric:
    """The metric of a weight in float64."""
    d, columns = iterate.log_d[key][0].detach().double().cpu().exp(), iterate.basis.factors.get(f"right/{key}")
    if columns is None:
        return FullMetric(torch.eye(len(d), dtype=torch.float64), d)
    return _whole(columns.double().cpu(), d)


# symmetric positive definite matrices: geometric means, and the geodesics on which the regret bound is convex


def matrix_geometric_mean(a: Tensor, b: Tensor) -> Tensor:
    """A # B = A^1/2 (A^-1/2 B A^-1/2)^1/2 A^1/2, the middle of the geodesic between two positive definite matrices.

    Example:
        >>> matrix_geometric_mean(torch.eye(2).double() * 4, torch.eye(2).double() * 9)
        tensor([[6., 0.],
                [0., 6.]], dtype=torch.float64)
    """
    # A = C C': A # B = C (C^-1 B C^-T)^1/2 C'
    c = torch.linalg.cholesky(a)
    inner = torch.linalg.solve_triangular(c, torch.linalg.solve_triangular(c, b, upper=False).mT, upper=False)
    return symmetric(c @ root(inner) @ c.mT)


def best_metric(x: Tensor, y: Tensor) -> Tensor:
    """X^-1 # Y, the minimiser D of tr(D X) + tr(D^-1 Y): the positive definite solution of D X D = Y.

    X is positive definite, Y positive semi-definite.

    Example:
        >>> best_metric(torch.eye(2).double() * 4, torch.eye(2).double() * 9)
        tensor([[1.5000, 0.0000],
                [0.0000, 1.5000]], dtype=torch.float64)
    """
    # X = C C': D = C^-T (C' Y C)^1/2 C^-1, so that X is never inverted
    c = torch.linalg.cholesky(x)
    half = torch.linalg.solve_triangular(c.mT, root(c.mT @ y @ c), upper=True)
    return symmetric(torch.linalg.solve_triangular(c.mT, half.mT, upper=True))


def root(a: Tensor) -> Tensor:
    """The positive semi-definite square root; eigenvalues that rounding made negative count as zero."""
    values, vectors = torch.linalg.eigh(symmetric(a))
    return symmetric((vectors * values.clamp_min(0).sqrt()) @ vectors.mT)


def symmetric(a: Tensor) -> Tensor:
    """Without what rounding left of asymmetry."""
    return 0.5 * (a + a.mT)


def towards(now: FullMetric, best: Tensor, reach: float) -> tuple[FullMetric, float]:
    """The way from D = V diag(d) V' to B along the geodesic, no logarithm changed by more than `reach`, and their change.

    With D^-1/2 B D^-1/2 = Q diag(e) Q' the result is D^1/2 Q diag(clamp(log e)) Q' D^1/2; between metrics that commute
    this limits the change of each log d on its own. The change is the root mean square.
    """
    half, back = now.vectors * now.d.sqrt(), now.vectors / now.d.sqrt()
    values, turned = torch.linalg.eigh(symmetric(back.mT @ best @ back))
    logs = values.clamp_min(torch.finfo(values.dtype).tiny).log().clamp(-reach, reach)
    spanned = half @ turned
    d, vectors = torch.linalg.eigh(symmetric((spanned * logs.exp()) @ spanned.mT))
    return FullMetric(vectors, d.clamp_min(d.max() * torch.finfo(torch.float64).eps)), float(logs.square().mean().sqrt())

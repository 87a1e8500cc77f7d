"""Steps that stay on one piece, theta+ = theta - eta D_j^-1 g, differentiated by hand: a few passes over the model.

Most steps are of this kind, all of them with one piece; the others go through `Recursion.step`. With r = eta / D_j and
e = g'D_j^-1 g the derivatives are

    d theta+ = dz - r (dg - g d log D_j),    de = 2/eta r g dg - 1/eta r g^2 d log D_j.
"""

from functools import partial

import torch
from torch import Tensor

from metamd.inner.estimators.recursion import Passage, Recursion
from metamd.inner.objectives import Objective, Point, Slopes
from metamd.potentials.base import Params
from metamd.potentials.forms import grouped_squares

FEW = 4
"""Tangents up to which a loop over those that a metric concerns is faster than one pass over all."""


class Straight:
    """The derivatives of steps on one piece, both ways; forwards, in the same directions at every step.

    Args:
        recursion: the run's constants.
        objective: E.
    """

    def __init__(self, recursion: Recursion, objective: Objective) -> None:
        self.recursion, self.objective = recursion, objective
        self._rates: dict[int, dict[str, Tensor]] = {}
        self._floats: dict[int, list[float]] = {}
        self._slopes: Slopes | None = None
        self._touched: dict[tuple[str, int], list[int]] = {}

    def rates(self, piece: int) -> dict[str, Tensor]:
        """-eta / D_j by tensor, divided once."""
        if piece not in self._rates:
            r = self.recursion
            self._rates[piece] = {n: -r.lr / d[piece] for n, d in r.metrics.items()}
        return self._rates[piece]

    def _numbers(self, piece: int) -> list[float]:
        """The same where every tensor has one rate: multiplying by numbers takes less time. Empty where one has more."""
        if piece not in self._floats:
            rates = self.rates(piece).values()
            self._floats[piece] = [r.item() for r in rates] if all(r.numel() == 1 for r in rates) else []
        return self._floats[piece]

    def slopes(self, passage: Passage, piece: int) -> Slopes:
        """How the step's contribution to the objective changes with its loss and energy, which is found if asked for."""
        if self._slopes is not None:
            return self._slopes
        r = self.recursion
        found = self.objective.slopes(Point(passage.loss, partial(self._energy, passage, piece), r.lr, r.steps))
        self._slopes = found if self.objective.steady else None
        return found

    def _energy(self, passage: Passage, piece: int) -> Tensor:
        parts = []
        for n, g in self.recursion.into(passage.grads).items():
            d = self.recursion.metrics[n][piece]
            parts.append((grouped_squares(g, tuple(d.shape)) / d).sum(dtype=torch.float64))
        return torch.stack(parts).sum()

    def back(
        self, passage: Passage, piece: int, slopes: Slopes, cotangents: tuple[Tensor, ...], logs: list[Tensor]
    ) -> list[Tensor]:
        """The cotangents of the gradient from those of theta_{t+1}; those of log D_j are added to `logs`.

        Args:
            passage: the step.
            piece: j.
            slopes: of the objective.
            cotangents: of theta_{t+1}, in the order of the gradients.
            logs: likewise.
        """
        basis, rates = self.recursion.basis, self.rates(piece)
        s = slopes.energy / self.recursion.lr
        if not s and basis.kind == "identity":
            grads, numbers = list(passage.grads.values()), self._numbers(piece)
            if numbers and all(c.dtype == g.dtype for c, g in zip(cotangents, grads, strict=True)):
                for number, into, c, g in zip(numbers, logs, cotangents, grads, strict=True):
                    into.sub_(torch.dot(c.reshape(-1), g.reshape(-1)), alpha=number)
                return [c * number for c, number in zip(cotangents, numbers, strict=True)]
            found = list(torch._foreach_mul(cotangents, [rates[n] for n in passage.grads]))
            _subtract(logs, found, grads)
            return [c if c.dtype == g.dtype else c.to(g.dtype) for c, g in zip(found, grads, strict=True)]
        found = []
        for (n, grad), cotangent, into in zip(passage.grads.items(), cotangents, logs, strict=True):
            g, p, r = basis.into(n, grad), basis.into(n, cotangent), rates[n]
            c = (torch.sub(p, g, alpha=s) if s else p) * r
            _subtract([into], [c], [g])
            c = torch.addcmul(c, g, r, value=-s) if s else c
            found.append(basis.out_of(n, c).to(grad.dtype))
        return found

    def along(self, passage: Passage, piece: int, logs: Params, z: Params, zg: Params) -> Tensor:
        """The derivatives of what the step adds to the objective, for all directions at once.

        Args:
            passage: the step.
            piece: j.
            logs: the directions in log D, (k, N, ...) by tensor.
            z: tangents of theta_t, (k, ...).
            zg: tangents of the gradient, H z.
        """
        slopes = self.slopes(passage, piece)
        count = len(next(iter(z.values())))
        found = torch.zeros(count, dtype=torch.float64)
        if slopes.loss:
            found += slopes.loss * dot(z, passage.grads)
        if slopes.energy:
            s, rates, basis = slopes.energy / self.recursion.lr, self.rates(piece), self.recursion.basis
            grads = self.recursion.into(passage.grads)
            pull = {n: basis.out_of(n, rates[n] * g) for n, g in grads.items()}
            energy = {n: rates[n] * grouped_squares(g, tuple(rates[n].shape)) for n, g in grads.items()}
            found += s * dot({n: v[:, piece] for n, v in logs.items()}, energy) - 2 * s * dot(zg, pull)
        return found

    def forth(self, passage: Passage, piece: int, logs: Params, z: Params, zg: Params) -> None:
        """The tangents of theta_{t+1}, written over those of theta_t.

        Args:
            passage: the step.
            piece: j.
            logs: as for `along`, and so are the others.
            z: is overwritten.
            zg: H z.
        """
        basis, rates = self.recursion.basis, self.rates(piece)
        for n, grad in passage.grads.items():
            if basis.kind == "identity":
                z[n].addcmul_(zg[n], rates[n])
            else:
                z[n] += torch.func.vmap(lambda h, n=n: basis.out_of(n, rates[n] * basis.into(n, h)))(zg[n])
            moves, directions = rates[n] * basis.into(n, grad), logs[n][:, piece]
            rows = self._rows(n, piece, directions)
            if len(rows) > FEW and basis.kind == "identity":
                z[n].addcmul_(moves, directions, value=-1)
                continue
            for i in rows:
                z[n][i].sub_(basis.out_of(n, moves * directions[i]))

    def _rows(self, name: str, piece: int, directions: Tensor) -> list[int]:
        """The directions that change this metric: of those that change one each, most leave it alone."""
        if (name, piece) not in self._touched:
            self._touched[name, piece] = directions.flatten(1).any(1).nonzero().flatten().tolist()
        return self._touched[name, piece]


def _subtract(from_: list[Tensor], a: list[Tensor], b: list[Tensor]) -> None:
    """Take away the sums of a b over tied coordinates, of every tensor."""
    if all(x.shape == y.shape for x, y in zip(from_, a, strict=True)):
        torch._foreach_addcmul_(from_, a, b, value=-1)
        return
    sums = []
    for x, y, z in zip(from_, a, b, strict=True):
        if x.ndim:
            sums.append((y * z).sum_to_size(x.shape))
        else:
            sums.append(torch.dot(y.reshape(-1), (z if z.dtype == y.dtype else z.to(y.dtype)).reshape(-1)))
    torch._foreach_sub_(from_, sums)


def dot(rows: Params, by: Params) -> Tensor:
    """sum over tensors of <row, by> for every row, in float64."""
    products = [r.reshape(len(r), -1) @ by[n].reshape(-1).to(r.dtype) for n, r in rows.items()]
    return torch.stack([p.double() for p in products]).sum(0)

"""The coordinates in which a potential is diagonal: the parameters themselves, or a learned basis of every weight matrix."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from metamd.potentials.base import descend
from metamd.potentials.forms import widen
from metamd.potentials.tying import Shape, Slot, TyingName, roles, stored_shape, tied_shape

BasisKind = Literal["identity", "right", "both"]
Rank = int | Literal["auto"] | None
Shrinkage = tuple[float, float] | Literal["auto"]

LIMIT = 2048
"""Rows or columns above which a side of a matrix keeps the identity: a full factor of 2048 has 4 million numbers."""


class Orthogonal:
    """An orthogonal matrix Q with r given columns U; any other columns complete them.

    If all columns are given, Q = U. Otherwise Q = I - Y T Y' is a product of r Householder reflections: applying it takes
    O(r) operations per number, and r columns are stored. (Its first columns are those of U up to sign.)
    """

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns  # U, (n, r) with r <= n, orthonormal
        self.size, self.rank = columns.shape
        self.full = self.rank == self.size  # whether all columns are given
        self._found: tuple[Tensor, Tensor, Tensor] | None = None

    def into(self, x: Tensor, *, back: bool = False) -> Tensor:
        """The coordinates x Q of rows x; on the way back, the rows x Q' of coordinates x."""
        if self.full:
            return x @ (self.columns.mT if back else self.columns)
        y, ty, ty_back = self.compact()
        return x - (x @ y) @ (ty_back if back else ty)

    def divide(self, x: Tensor, d: Tensor) -> Tensor:
        """x Q diag(d)^-1 Q' for rows x; d has one number for all columns that are not given."""
        if self.full:
            return (x @ self.columns / d) @ self.columns.mT
        # I = U U' + (I - U U'), and d is the same everywhere on the second part
        given, rest = d[..., : self.rank], d[..., self.rank :][..., :1]
        return x / rest + ((x @ self.columns) * (1 / given - 1 / rest)) @ self.columns.mT

    def compact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Y, T Y' and T' Y' of Q = I - Y T Y', the compact form of the reflections that reduce U, found once."""
        if self._found is None:
            packed, tau = torch.geqrf(self.columns.detach().double())
            y = torch.tril(packed, -1) + torch.eye(self.size, self.rank, dtype=packed.dtype, device=packed.device)
            products, t = y.mT @ y, torch.zeros(self.rank, self.rank, dtype=packed.dtype, device=packed.device)
            for i in range(self.rank):
                t[:i, i] = -tau[i] * (t[:i, :i] @ products[:i, i])
                t[i, i] = tau[i]
            kind = self.columns.dtype
            self._found = y.to(kind), (t @ y.mT).to(kind), (t.mT @ y.mT).to(kind)
        return self._found


@dataclass(frozen=True)
class Place:
    """A weight of a model as a matrix: the first dimension is the rows, all others are the columns."""

    key: str
    shape: Shape

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The lengths of the two sides that a factor can act on."""
        return {"left": self.shape[0], "right": math.prod(self.shape[1:])}

    def matrix(self, x: Tensor) -> Tensor:
        """The tensor as (..., rows, columns); a part of the rows will do, and there may be dimensions in front."""
        if x.ndim == len(self.shape) == 2:
            return x
        return x.reshape(*x.shape[: x.ndim - len(self.shape)], -1, self.sizes["right"])

    def tensor(self, m: Tensor) -> Tensor:
        """The matrix in the shape of the tensor."""
        return m if m.ndim == len(self.shape) == 2 else m.reshape(*m.shape[:-2], -1, *self.shape[1:])


@dataclass(frozen=True)
class Inverse:
    """D^-1 on the right of a matrix, ready to be applied: one product, or two thin ones."""

    matrix: Tensor  # V diag(d)^-1 V' itself; or, for r columns U, diag(1/d - 1/c) U'
    columns: Tensor | None = None  # U, if they are not all
    rest: Tensor | None = None  # c, the number of all other directions, (1, 1)
    over: tuple[Tensor, Tensor] | None = None  # diag(c/d - 1) U', so that c M D^-1 = M + M U diag(c/d - 1) U', and c^-1/2

    def __call__(self, m: Tensor) -> Tensor:
        """M D^-1."""
        if self.columns is None or self.rest is None:
            return m @ self.matrix
        return torch.addmm(m / self.rest, m @ self.columns, self.matrix)


class Basis:
    """An orthogonal change of coordinates V per tensor, under which D acts as a diagonal.

    Without one, the parameters themselves are the coordinates, as in the paper. A learned basis has a V for every weight
    matrix, on the right, the input side; in files of earlier versions on the left as well. `factors` maps "right/key" or
    "left/key" to orthonormal columns (n, r); a side without one has the identity. `rank`, `shrinkage` and `limit` are those
    of `Kronecker`: they say how factors are learned. Factors in `whole` keep all directions, whatever the rank.
    """

    def __init__(
        self,
        kind: BasisKind = "identity",
        *,
        rank: Rank = None,
        shrinkage: Shrinkage = (0.1, 0.001),
        limit: int = LIMIT,
        factors: Mapping[str, Tensor] | None = None,
        whole: Iterable[str] = (),
    ) -> None:
        if kind not in get_args(BasisKind):
            raise ValueError(f'kind must be "identity", "right" or "both", got {kind!r}.')
        if rank is not None and rank != "auto" and (type(rank) is not int or rank < 1):
            raise ValueError(f'rank must be an integer of at least 1, "auto", or None for all directions; got {rank!r}.')
        if shrinkage != "auto" and (
            not isinstance(shrinkage, tuple) or len(shrinkage) != 2 or not all(0 < s < math.inf for s in shrinkage)
        ):
            raise ValueError(f'shrinkage must be two positive numbers, such as (0.1, 0.001), or "auto"; got {shrinkage!r}.')
        if type(limit) is not int or limit < 1:
            raise ValueError(f"limit must be an integer of at least 1, got {limit!r}. It bounds the size of a factor.")
        self.kind, self.whole = kind, frozenset(whole)
        self.rank, self.shrinkage, self.limit = rank, shrinkage, limit
        self.factors = dict(factors or {})
        self.places: dict[str, Place] = {}  # of the weights that have a V
        self._here: dict[tuple[Any, ...], Orthogonal] = {}
        self._metrics: Mapping[str, Tensor] = {}
        self._inverses: dict[tuple[str, int], Inverse] = {}

    def slots(self, tying: TyingName, shapes: Mapping[str, Shape]) -> dict[str, Slot]:
        """Where every tensor of a model finds its metric: names are cleaned already, in the order of the layers.

        In a learned basis there is a number per column (and per row, on both sides), or one for a tensor that is no matrix.
        """
        keys = roles(shapes) if tying == "role" else {n: n for n in shapes}
        if self.kind == "identity":
            return {n: Slot(keys[n], stored_shape(tying, s), tied_shape(tying, s)) for n, s in shapes.items()}
        if tying not in ("tensor", "role"):
            raise ValueError(
                f'in a learned basis the tying must be "tensor" or "role", got {tying!r}: its coordinates are not those of '
                "the parameters."
            )
        return {n: self._slot(keys[n], shape, shared=tying == "role") for n, shape in shapes.items()}

    def _slot(self, key: str, shape: Shape, *, shared: bool) -> Slot:
        if len(shape) < 2 or not math.prod(shape):
            return Slot(key, (), (1,) * len(shape))
        rows, columns, two = shape[0], math.prod(shape[1:]), self.kind == "both"
        key = f"{key}/{f'{rows}x' if two else ''}{columns}" if shared else key
        left, right = self._numbers(f"left/{key}", rows) if two else 0, self._numbers(f"right/{key}", columns)
        return Slot(key, (left + right,), (rows if two else 1, columns), (left, right))

    def _numbers(self, factor: str, size: int) -> int:
        """How many numbers a side stores: one for each given column, and one for the rest."""
        return min(self.factors[factor].shape[1] + 1, size) if factor in self.factors else size

    def placed(self, slots: Mapping[str, Slot], shapes: Mapping[str, Shape]) -> "Basis":
        """The same basis for the tensors of a model."""
        new = self.with_factors(self.factors)
        for name, slot in slots.items():
            if slot.sides is None:
                continue
            new.places[name] = Place(slot.key, shapes[name])
            for side, size in new.places[name].sizes.items():
                factor = f"{side}/{slot.key}"
                if factor in self.factors and len(self.factors[factor]) != size:
                    raise ValueError(
                        f"the basis {factor!r} was learned for {len(self.factors[factor])} coordinates, but the tensor "
                        f"{name!r} has {size} there. Learn it for models of this size."
                    )
        return new

    def with_factors(self, factors: Mapping[str, Tensor], whole: Iterable[str] | None = None) -> "Basis":
        """The same basis with other factors; those in `whole` keep all directions when they are learned."""
        how: dict[str, Any] = {"rank": self.rank, "shrinkage": self.shrinkage, "limit": self.limit}
        new = Basis(self.kind, **how, factors=factors, whole=self.whole if whole is None else whole)
        new.places = dict(self.places)
        return new

    def rank_of(self, factor: str) -> Rank:
        """How many directions a factor is to keep."""
        return None if factor in self.whole else self.rank

    def prepared(self, metrics: Mapping[str, Tensor]) -> "Basis":
        """The same basis for a run with these metrics; it keeps the inverses V diag(d_j)^-1 V' that steps have needed."""
        new = self.with_factors(self.factors)
        new._metrics = dict(metrics)
        return new

    def learnable(self) -> list[str]:
        """The names of the weights for which a factor can be learned: those with few enough columns."""
        if self.kind == "both":
            raise ValueError("a basis of both sides is no longer learned, only used. Learn anew from Kronecker().")
        return [n for n, p in self.places.items() if p.sizes["right"] <= self.limit]

    # coordinates

    def into(self, name: str, x: Tensor) -> Tensor:
        """V'x as (..., rows, columns); a tensor that is no matrix stays as it is."""
        if name not in self.places:
            return x
        m = self.places[name].matrix(widen(x))
        left, right = self._at("left", name, m), self._at("right", name, m)
        m = m if right is None else right.into(m)
        return m if left is None else left.into(m.mT).mT

    def out_of(self, name: str, x: Tensor) -> Tensor:
        """V x, in the shape of the parameter."""
        if name not in self.places:
            return x
        left, right = self._at("left", name, x), self._at("right", name, x)
        m = x if right is None else right.into(x, back=True)
        m = m if left is None else left.into(m.mT, back=True).mT
        return self.places[name].tensor(m)

    def descend(self, name: str, x: Tensor, grad: Tensor, d: Tensor, lr: float | Tensor, out: Tensor | None) -> Tensor:
        """x - lr V diag(d)^-1 V' grad, written to `out` if there is one; where V = 1 in one pass."""
        place = self.places.get(name)
        if place is None or not any(f"{side}/{place.key}" in self.factors for side in place.sizes):
            d = d if place is None else place.tensor(d)
            if isinstance(lr, Tensor):
                return torch.sub(x, lr * grad / d, out=out).to(x.dtype)
            return torch.addcdiv(x, grad, d, value=-lr, out=out).to(x.dtype)
        m = place.matrix(widen(grad))
        inverse = self._inverse(name, m, d)
        if inverse is not None and x.dtype == m.dtype and not isinstance(lr, Tensor):
            return self._subtract(place, x, m, inverse, lr, out)
        if inverse is not None:
            moved = inverse(m).reshape(grad.shape)
        elif self.kind == "right" and (right := self._at("right", name, m)) is not None:
            moved = right.divide(m, d).reshape(grad.shape)
        else:
            moved = self.out_of(name, self.into(name, grad) / d)
        return descend(x, moved, lr, out).to(x.dtype)

    def divided(self, name: str, x: Tensor, d: Tensor) -> tuple[Tensor, float | Tensor]:
        """c x V diag(d)^-1 V' as a matrix, and c^-1/2; d is the metric of the first piece, a number per column.

        c is 1 if the basis has all directions. Otherwise it is the metric of the directions that are left, on which c D^-1
        is the identity.
        """
        place = self.places.get(name)
        m = x.reshape(x.shape[0], -1) if place is None else place.matrix(x)
        right = None if place is None else self._at("right", name, m)
        if right is None:
            return m / d, 1.0
        if name not in self._metrics or d.dtype != m.dtype:
            return right.divide(m, d), 1.0
        inverse = self._kept_inverse(name, 0, m)
        if inverse.columns is None or inverse.over is None:
            return m @ inverse.matrix, 1.0
        thin, root = inverse.over
        return torch.addmm(m, m @ inverse.columns, thin), root

    def prepare(self, name: str, like: Tensor) -> None:
        """Compute what steps need of a tensor's factors beforehand: `torch.compile` would have too much to trace."""
        right = self._at("right", name, like) if name in self.places else None
        if right is not None and not right.full:
            right.compact()
        if right is not None and self.kind == "right" and name in self._metrics:
            self._kept_inverse(name, 0, like)

    @staticmethod
    def _subtract(place: Place, x: Tensor, m: Tensor, inverse: Inverse, lr: float, out: Tensor | None) -> Tensor:
        """x - lr D^-1 m, without a temporary of that size where the memory layout allows it."""
        base, whole = place.matrix(x), place.matrix(out) if out is not None and out.is_contiguous() else None
        if inverse.columns is not None and inverse.rest is not None:
            thin = m @ inverse.columns
            base, m = torch.addcdiv(base, m, inverse.rest, value=-lr, out=whole), thin
        moved = torch.addmm(base, m, inverse.matrix, alpha=-lr, out=whole)
        if out is None:
            return place.tensor(moved)
        return out.copy_(place.tensor(moved)) if whole is None else out

    def conjugated(self, name: str, products: Tensor) -> Tensor:
        """V' S V of symmetric matrices (..., n, n), V on the right."""
        factor = self._at("right", name, products)
        return products if factor is None else factor.into(factor.into(products).mT)

    def _inverse(self, name: str, m: Tensor, d: Tensor) -> Inverse | None:
        """V diag(d)^-1 V' on the right of a matrix, if d is one of the metrics that stay for the whole run."""
        if self.kind == "both" or m.ndim > 2 or d.dtype != m.dtype:  # the model was converted to another type since
            return None
        for piece, known in enumerate(self._metrics.get(name, ())):
            if known.data_ptr() == d.data_ptr():
                return self._kept_inverse(name, piece, m)
        return None

    def _kept_inverse(self, name: str, piece: int, like: Tensor) -> Inverse:
        """V diag(d_j)^-1 V' of a metric that stays for the whole run, found when it is first asked for."""
        if (name, piece) not in self._inverses:
            d, right = self._metrics[name][piece], self._at("right", name, like)
            assert right is not None
            if right.full:
                found = Inverse(right.divide(torch.eye(right.size, dtype=d.dtype, device=d.device), d))
            else:
                rest = d[:, right.rank : right.rank + 1].contiguous()
                thin = (1 / d[0, : right.rank] - 1 / rest[0])[:, None] * right.columns.mT
                over = rest * thin, rest.reshape(()).rsqrt()
                found = Inverse(thin, right.columns.contiguous(), rest, over)
            self._inverses[name, piece] = found
        return self._inverses[name, piece]

    def _at(self, side: str, name: str, like: Tensor) -> Orthogonal | None:
        """A factor in the type and on the device of a tensor."""
        factor = f"{side}/{self.places[name].key}"
        if factor not in self.factors:
            return None
        here = factor, like.dtype, like.device
        if here not in self._here:
            self._here[here] = Orthogonal(self.factors[factor].to(like.device, like.dtype))
        return self._here[here]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": {}, "_inverses": {}}  # they are found again

    def __repr__(self) -> str:  # as records of earlier versions have it
        if self.kind == "identity":
            return "Identity()"
        learning = f"rank={self.rank!r}, shrinkage={self.shrinkage!r}, limit={self.limit}"
        return f"Learned({self.kind!r}, {learning}, {len(self.factors)} factors)"

"""The coordinates in which a potential is diagonal: the interface, the parameters themselves, and orthogonal matrices."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from metamd.potentials.tying import Shape, Slot, TyingName, slots


class Basis(Protocol):
    """An orthogonal change of coordinates per tensor, under which D acts as a diagonal."""

    kind: str

    def slots(self, tying: TyingName, shapes: Mapping[str, Shape]) -> dict[str, Slot]:
        """Where every tensor of a model finds its metric."""
        ...

    def placed(self, slots: Mapping[str, Slot], shapes: Mapping[str, Shape]) -> "Basis":
        """The same basis for the tensors of a model; this one stays as it is."""
        ...

    def prepared(self, metrics: Mapping[str, Tensor]) -> "Basis":
        """The same basis for a run in which these metrics, by name, stay as they are."""
        ...

    def factors(self) -> dict[str, Tensor]:
        """What was learned, by side and key: orthonormal columns each."""
        ...

    def with_factors(self, factors: Mapping[str, Tensor]) -> "Basis":
        """Other factors for the same tensors."""
        ...

    def into(self, name: str, x: Tensor) -> Tensor:
        """V'x: the coordinates of a displacement."""
        ...

    def out_of(self, name: str, x: Tensor) -> Tensor:
        """V x: back to the parameters."""
        ...

    def descend(self, name: str, x: Tensor, grad: Tensor, d: Tensor, lr: float | Tensor, out: Tensor | None) -> Tensor:
        """x - lr V diag(d)^-1 V' grad, written to `out` if there is one."""
        ...


class Identity:
    """The parameters themselves: the paper's diagonal metrics."""

    kind = "identity"

    def slots(self, tying: TyingName, shapes: Mapping[str, Shape]) -> dict[str, Slot]:
        """Those of the tying."""
        return slots(tying, shapes)

    def placed(self, slots: Mapping[str, Slot], shapes: Mapping[str, Shape]) -> "Identity":
        """Itself: it fits every tensor."""
        return self

    def prepared(self, metrics: Mapping[str, Tensor]) -> "Identity":
        """Itself."""
        return self

    def factors(self) -> dict[str, Tensor]:
        """Nothing was learned."""
        return {}

    def with_factors(self, factors: Mapping[str, Tensor]) -> "Identity":
        """Itself."""
        return self

    def into(self, name: str, x: Tensor) -> Tensor:
        """X, unchanged."""
        return x

    def out_of(self, name: str, x: Tensor) -> Tensor:
        """X, unchanged."""
        return x

    def descend(self, name: str, x: Tensor, grad: Tensor, d: Tensor, lr: float | Tensor, out: Tensor | None) -> Tensor:
        """x - lr grad / d in one pass."""
        if isinstance(lr, Tensor):
            return torch.sub(x, lr * grad / d, out=out).to(x.dtype)
        moved = torch.addcdiv(x, grad, d, value=-lr, out=out)
        return moved if moved.dtype == x.dtype else moved.to(x.dtype)

    def __repr__(self) -> str:
        return "Identity()"


class Orthogonal:
    """An orthogonal matrix Q of which r columns U are given; the others complete them, whichever way.

    With all columns given, Q = U. With fewer, Q = I - Y T Y' is a product of r Householder reflections, so that applying it
    takes O(r) operations per number, and no others than r columns are stored. (Its first columns are those of U up to
    sign.)

    Args:
        columns: U, (n, r) with r <= n, orthonormal.
    """

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns
        self.size, self.rank = columns.shape
        self._reflections: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def full(self) -> bool:
        """Whether all columns are given."""
        return self.rank == self.size

    def into(self, x: Tensor) -> Tensor:
        """Rows x Q: their coordinates."""
        if self.full:
            return x @ self.columns
        y, ty, _ = self._compact()
        return x - (x @ y) @ ty

    def out_of(self, x: Tensor) -> Tensor:
        """Rows x Q': back from coordinates."""
        if self.full:
            return x @ self.columns.mT
        y, _, ty = self._compact()
        return x - (x @ y) @ ty

    def divide(self, x: Tensor, d: Tensor) -> Tensor:
        """Rows x Q diag(d)^-1 Q', where d is one number for all columns that are not given.

        Args:
            x: the rows, (..., n).
            d: broadcastable against them.
        """
        if self.full:
            return (x @ self.columns / d) @ self.columns.mT
        # I = U U' + (I - U U'), of which the second part has the same d everywhere
        given, rest = d[..., : self.rank], d[..., self.rank :][..., :1]
        return x / rest + ((x @ self.columns) * (1 / given - 1 / rest)) @ self.columns.mT

    def _compact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Y, T Y' and T' Y' of Q = I - Y T Y', the compact form of the reflections that reduce U."""
        if self._reflections is None:
            packed, tau = torch.geqrf(self.columns.detach().double())
            y = torch.tril(packed, -1) + torch.eye(self.size, self.rank, dtype=packed.dtype, device=packed.device)
            products, t = y.mT @ y, torch.zeros(self.rank, self.rank, dtype=packed.dtype, device=packed.device)
            for i in range(self.rank):
                t[:i, i] = -tau[i] * (t[:i, :i] @ products[:i, i])
                t[i, i] = tau[i]
            kind = self.columns.dtype
            self._reflections = y.to(kind), (t @ y.mT).to(kind), (t.mT @ y.mT).to(kind)
        return self._reflections

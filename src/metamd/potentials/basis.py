"""The coordinates in which a potential is diagonal: the parameters themselves, or learned ones that share its slot."""

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

    def terms(self, key: str) -> int:
        """How many of the stored numbers add up to one logarithm of this metric."""
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

    def terms(self, key: str) -> int:
        """One."""
        return 1

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

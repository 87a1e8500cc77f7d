"""The coordinates in which a potential is diagonal. The identity is the only basis so far; learned ones share its slot."""

from typing import Protocol

import torch
from torch import Tensor


class Basis(Protocol):
    """An orthogonal change of coordinates per tensor, under which D acts as a diagonal."""

    kind: str

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
        return torch.addcdiv(x, grad, d, value=-lr, out=out).to(x.dtype)

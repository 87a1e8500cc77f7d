"""The potentials of the textbooks: Euclidean, negative entropy, p-norm. Each is a sum over tensors."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from metamd.potentials.base import Active, Moves, Params, Potential, Step, StrongConvexity, descend


class Euclidean(Potential):
    """phi(theta) = 1/2 |theta|^2: mirror descent is gradient descent, bit for bit `torch.optim.SGD`.

    Example:
        >>> Euclidean().value({"x": torch.tensor([3.0, 4.0])})
        tensor(12.5000)
    """

    def value(self, params: Params) -> Tensor:
        """1/2 |theta|^2."""
        return _total(0.5 * (x * x).sum() for x in params.values())

    def mirror(self, params: Params) -> dict[str, Tensor]:
        """The identity."""
        return dict(params)

    def inverse(self, dual: Params, start: Params | None = None) -> dict[str, Tensor]:
        """The identity."""
        return dict(dual)

    def divergence(self, u: Params, v: Params) -> Tensor:
        """1/2 |u - v|^2."""
        return self.value({n: u[n] - v[n] for n in u})

    def strong_convexity(self) -> StrongConvexity:
        """1 in the Euclidean norm."""
        return StrongConvexity(1.0, "l2")

    def step(
        self, params: Params, moves: Moves, *, active: Active | None = None, exact: bool = True, into: Params | None = None
    ) -> Step:
        """theta+ = (1 - decay) theta - lr g, as torch.optim.SGD writes it."""
        moved = dict(params)
        for name, move in moves.items():
            out = None if into is None else into[name]
            moved[name] = descend(move.decayed(params[name], out), move.grad, move.lr, out)
        return Step(moved)


class NegativeEntropy(Potential):
    """phi(theta) = sum theta log theta: mirror descent is exponentiated gradient [Kivinen1997].

    On the simplex, each row along the last dimension of a tensor is a probability vector, and the step is
    theta+ = softmax(log theta - lr g). On the positive orthant, phi = sum (theta log theta - theta) and
    theta+ = theta exp(-lr g).

    Args:
        domain: "simplex" or "orthant".

    Example:
        >>> p = {"p": torch.tensor([0.25, 0.75])}
        >>> NegativeEntropy().inverse(NegativeEntropy().mirror(p))["p"]
        tensor([0.2500, 0.7500])
    """

    def __init__(self, domain: Literal["simplex", "orthant"] = "simplex") -> None:
        if domain not in ("simplex", "orthant"):
            raise ValueError(f'domain must be "simplex" or "orthant", got {domain!r}. Rows that sum to one are a simplex.')
        super().__init__()
        self.domain = domain

    def value(self, params: Params) -> Tensor:
        """sum theta log theta, less sum theta on the orthant."""
        drop = 0.0 if self.domain == "simplex" else 1.0
        return _total((torch.special.xlogy(x, x) - drop * x).sum() for x in params.values())

    def mirror(self, params: Params) -> dict[str, Tensor]:
        """1 + log theta on the simplex, log theta on the orthant."""
        return {n: x.log() + (1.0 if self.domain == "simplex" else 0.0) for n, x in params.items()}

    def inverse(self, dual: Params, start: Params | None = None) -> dict[str, Tensor]:
        """Softmax over the last dimension on the simplex, exp on the orthant."""
        # softmax, not exp / sum: exp overflows
        return {n: y.softmax(-1) if self.domain == "simplex" else y.exp() for n, y in dual.items()}

    def divergence(self, u: Params, v: Params) -> Tensor:
        """The Kullback-Leibler divergence sum u log(u/v) - u + v."""
        return _total((torch.special.xlogy(u[n], u[n] / v[n]) - u[n] + v[n]).sum() for n in u)

    def strong_convexity(self) -> StrongConvexity:
        """1 in the l1 norm on a simplex [Pinsker]; on the whole orthant there is no positive constant."""
        return StrongConvexity(1.0, "l1 of each row") if self.domain == "simplex" else StrongConvexity(0.0, "l1")

    def check(self, params: Params) -> None:
        """Entries must be positive, and rows must sum to one on the simplex."""
        for name, x in params.items():
            if not bool((x > 0).all()):
                raise ValueError(
                    f"NegativeEntropy needs positive parameters, but {name!r} has an entry of {float(x.min()):g}. "
                    "Initialise it inside the domain, or use another potential for it."
                )
            if self.domain == "simplex":
                off = float((x.sum(-1) - 1).abs().max())
                if off > 100 * torch.finfo(x.dtype).eps * x.shape[-1] ** 0.5:
                    raise ValueError(
                        f"NegativeEntropy on the simplex needs rows that sum to one, but {name!r} has a row off by "
                        f'{off:.2g}. Divide it by its sum, or use NegativeEntropy(domain="orthant").'
                    )


class PNorm(Potential):
    """phi(theta) = 1/2 |theta|_p^2 per tensor, 1 < p <= 2: mirror descent for sparse solutions [Gentile2003].

    The inverse mirror map is the mirror map of the conjugate exponent q = p / (p - 1).

    Args:
        p: the exponent; p = 2 is Euclidean, p = 1 + 1/log(dimension) suits sparse solutions.

    Example:
        >>> x = {"x": torch.tensor([1.0, -2.0, 0.0])}
        >>> PNorm(1.5).inverse(PNorm(1.5).mirror(x))["x"].round(decimals=4)
        tensor([ 1., -2.,  0.])
    """

    def __init__(self, p: float) -> None:
        if not isinstance(p, int | float):
            raise TypeError(f"p must be a number in (1, 2], got {p!r}. Pass p=1.5, say.")
        if not 1 < p <= 2:
            raise ValueError(f"p must be in (1, 2], got {p}. Only there is 1/2 |x|_p^2 strongly convex; p = 2 is Euclidean.")
        super().__init__()
        self.p = float(p)

    def value(self, params: Params) -> Tensor:
        """Half the squared p-norms."""
        return _total(0.5 * torch.linalg.vector_norm(x, self.p) ** 2 for x in params.values())

    def mirror(self, params: Params) -> dict[str, Tensor]:
        """sign(theta) |theta|^(p-1) |theta|_p^(2-p)."""
        return {n: _norm_gradient(x, self.p) for n, x in params.items()}

    def inverse(self, dual: Params, start: Params | None = None) -> dict[str, Tensor]:
        """The mirror map of the conjugate exponent."""
        return {n: _norm_gradient(y, self.p / (self.p - 1)) for n, y in dual.items()}

    def strong_convexity(self) -> StrongConvexity:
        """p - 1 in the p-norm of each tensor."""
        return StrongConvexity(self.p - 1, f"l{self.p:g} of each tensor")


def _norm_gradient(x: Tensor, p: float) -> Tensor:
    """The gradient of 1/2 |x|_p^2, 0 at 0; x is scaled first, so that powers neither overflow nor vanish."""
    scale = x.abs().amax().clamp(min=torch.finfo(x.dtype).tiny)
    unit = x / scale
    norm = torch.linalg.vector_norm(unit, p).clamp(min=torch.finfo(x.dtype).tiny)
    return scale * norm * unit.sign() * (unit.abs() / norm) ** (p - 1)


def _total(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()

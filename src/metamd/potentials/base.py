"""What every potential offers, and the records that pass between potentials and the optimiser."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Params = Mapping[str, Tensor]
Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Centre = Literal["start", "origin"]
Function = Callable[[Tensor], Tensor]

_MAX_ITERATIONS = 100  # of Newton's method, which needs about ten where it works at all
HALVINGS = 60  # of a step that does not descend: 2^-60 of it is lost in the rounding of float64


@dataclass(frozen=True)
class StrongConvexity:
    """phi(u) >= phi(v) + <grad phi(v), u - v> + constant/2 |u - v|^2 in the named norm."""

    constant: float  # lambda; 0 where phi is convex only
    norm: str  # in words


@dataclass(frozen=True)
class Move:
    """The move of one tensor in a step: y <- (1 - decay) y - lr grad."""

    grad: Tensor
    lr: float | Tensor = 1.0  # negative to maximise; a 0-dim tensor keeps `torch.compile` from compiling again
    decay: float | Tensor = 0.0  # lr times weight decay

    def decayed(self, x: Tensor, out: Tensor | None) -> Tensor:
        """(1 - decay) x, written to `out` if there is one; x itself where nothing decays."""
        if isinstance(self.decay, Tensor) or self.decay != 0:
            return torch.mul(x, 1 - self.decay, out=out)
        return x


Moves = Mapping[str, Move]


def descend(x: Tensor, direction: Tensor, lr: float | Tensor, out: Tensor | None) -> Tensor:
    """x - lr direction, written to `out` if there is one; the alpha of `torch.add` cannot be a tensor."""
    if isinstance(lr, Tensor):
        return torch.sub(x, lr * direction, out=out)
    return torch.add(x, direction, alpha=-lr, out=out)


@dataclass(frozen=True)
class Active:
    """Which pieces of a mixture are active at the current point."""

    weights: NDArray[np.float64]  # w, a point of the simplex supported on the largest forms
    forms: NDArray[np.float64]  # 1/2 x'D_j x + b_j, one per piece

    @property
    def piece(self) -> int:
        """The piece with the largest weight."""
        return int(np.argmax(self.weights))


ALONE = Active(np.ones(1), np.zeros(1))
"""The one piece of a potential that has no others."""


@dataclass(frozen=True)
class Step:
    """The outcome of one mirror step.

    Args:
        params: the new parameters, by name.
        active: the active pieces at the new point; None for potentials without pieces.
        iterations: Newton steps that the choice of pieces took; 0 when the vertex check sufficed.
        gap: by how much the weights miss the largest form, 0 when exact; it enters the regret certificate.
    """

    params: dict[str, Tensor]
    active: Active | None = None
    iterations: int = 0
    gap: float = 0.0


class Potential(nn.Module, ABC):
    """A strictly convex function phi of named tensors, whose Bregman divergence measures the length of a step.

    A potential of your own needs `value` alone: `mirror` then comes from autograd and `inverse` from a safeguarded
    Newton-CG solve, the general "mirror loop" of the paper.

    Example:
        >>> class Quartic(Potential):
        ...     def value(self, params):
        ...         return sum((x**4 / 4 + x**2 / 2).sum() for x in params.values())
        >>> x = {"x": torch.tensor([1.0, -2.0], dtype=torch.float64)}
        >>> Quartic().inverse(Quartic().mirror(x))["x"]
        tensor([ 1., -2.], dtype=torch.float64)
    """

    @abstractmethod
    def value(self, params: Params) -> Tensor:
        """phi(theta), a scalar."""

    def mirror(self, params: Params) -> dict[str, Tensor]:
        """y = grad phi(theta)."""
        return torch.func.grad(lambda p: self.value(p))(dict(params))

    def inverse(self, dual: Params, start: Params | None = None) -> dict[str, Tensor]:
        """theta = grad phi*(y), the minimiser of phi(theta) - <y, theta>.

        Args:
            dual: y.
            start: where an iterative solve begins; tensors that y does not name keep the values that they have here.
        """
        return minimise(self.value, dual, start if start is not None else dual)

    def divergence(self, u: Params, v: Params) -> Tensor:
        """B(u||v) = phi(u) - phi(v) - <grad phi(v), u - v>."""
        y = self.mirror(v)
        return self.value(u) - self.value(v) - sum(((u[n] - v[n]) * y[n]).sum() for n in u)

    def strong_convexity(self) -> StrongConvexity:
        """The constant lambda of phi and the norm it holds in."""
        return StrongConvexity(0.0, "l2")

    def step(
        self, params: Params, moves: Moves, *, active: Active | None = None, exact: bool = True, into: Params | None = None
    ) -> Step:
        """theta+ = grad phi*((1 - decay) grad phi(theta) - lr g); tensors without a move stay where they are.

        Args:
            params: theta.
            moves: gradient, step size and decay by name.
            active: the `active` of the previous step, for potentials with pieces.
            exact: whether the step is the exact minimiser; potentials without pieces know no other.
            into: tensors to write the result to, so that nothing large is allocated.
        """
        y = self.mirror(params)
        dual = {n: y[n] * (1 - m.decay) - m.lr * m.grad for n, m in moves.items()}
        moved = self.inverse(dual, params)
        return Step({**params, **(moved if into is None else {n: into[n].copy_(moved[n]) for n in moves})})

    def check(self, params: Params) -> None:
        """Refuse, with a sentence, parameters outside the domain of phi."""

    def bind(self, named: Named) -> "Potential":
        """Fit the potential to the tensors of a model; one without metrics fits them all."""
        return self


def bregman(potential: Potential, u: Params | Tensor, v: Params | Tensor) -> Tensor:
    """B(u||v) = phi(u) - phi(v) - <grad phi(v), u - v>, for named tensors or for a single one.

    Args:
        potential: phi.
        u: the first point.
        v: the point at which phi is linearised.

    Example:
        >>> from metamd import Euclidean
        >>> bregman(Euclidean(), torch.tensor([3.0, 4.0]), torch.zeros(2))
        tensor(12.5000)
    """
    if isinstance(u, Tensor) and isinstance(v, Tensor):
        u, v = {"x": u}, {"x": v}
    if isinstance(u, Tensor) or isinstance(v, Tensor) or u.keys() != v.keys():
        raise ValueError("bregman needs two tensors, or two mappings with the same names. Pass u and v in the same form.")
    return potential.divergence(u, v)


def mirror_step(
    params: Params,
    grads: Params,
    potential: Potential,
    lr: float | Tensor = 1.0,
    *,
    weight_decay: float = 0.0,
    active: Active | None = None,
    exact: bool = True,
) -> Step:
    """One step of mirror descent, theta+ = argmin <g, theta> + B(theta||theta_t)/lr, as a pure function.

    Args:
        params: theta_t, by name.
        grads: g; tensors that it does not name stay where they are.
        potential: phi, bound to these tensors if it has metrics.
        lr: eta.
        weight_decay: decoupled decay, y <- (1 - lr weight_decay) y - lr g for a potential centred at the origin.
        active: the `active` of the previous step; without it the active pieces are found first.
        exact: False takes the paper's step, which is exact only while the active piece does not change.

    Example:
        >>> from metamd import Euclidean
        >>> mirror_step({"x": torch.ones(2)}, {"x": torch.tensor([1.0, 2.0])}, Euclidean(), lr=0.5).params["x"]
        tensor([0.5000, 0.0000])
    """
    moves = {n: Move(g, lr, lr * weight_decay) for n, g in grads.items()}
    return potential.step(params, moves, active=active, exact=exact)


# the general mirror loop: theta = argmin phi(theta) - <y, theta> for a phi known only by its value


def minimise(value: Callable[..., Tensor], dual: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Minimise phi(theta) - <y, theta> by Newton's method with conjugate gradients and a halving line search.

    It begins at `start`, inside the domain of phi; tensors that y does not name are held.
    """
    names = list(dual)
    y = torch.cat([dual[n].reshape(-1) for n in names])
    x = torch.cat([start[n].detach().reshape(-1) for n in names]).to(y.dtype)

    def unpack(flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [dual[n].numel() for n in names])
        return {n: p.view_as(dual[n]) for n, p in zip(names, parts, strict=True)}

    def objective(flat: Tensor) -> Tensor:
        return value({**start, **unpack(flat)}) - y @ flat

    if not torch.isfinite(objective(x)):
        raise ArithmeticError(
            "the potential's value is not finite at the starting point. Pass a start inside its domain, or define inverse()."
        )
    gradient_of = torch.func.grad(objective)
    eps = torch.finfo(y.dtype).eps
    for _ in range(_MAX_ITERATIONS):
        gradient = gradient_of(x)
        if gradient.norm() <= 8 * eps * (y.norm() + (gradient + y).norm()):
            return unpack(x)
        # The Hessian is symmetric, so that its product from the left serves; reverse mode reaches every operation.
        step = _conjugate_gradients(torch.func.vjp(gradient_of, x)[1], -gradient)
        moved = _armijo_step(objective, gradient_of, x, step, gradient)
        if moved is None:
            # At the accuracy of the value itself a gradient this small is a minimum, a larger one a failure.
            if gradient.norm() <= eps**0.5 * (1 + y.norm()):
                return unpack(x)
            break
        x = moved
    raise ArithmeticError(
        "the inverse mirror map did not converge: phi(theta) - <y, theta> has no minimum that Newton's method finds. "
        "Check that value() is strictly convex and differentiable, or define inverse()."
    )


def _conjugate_gradients(product: Callable[[Tensor], tuple[Tensor, ...]], b: Tensor) -> Tensor:
    x, r = torch.zeros_like(b), b.clone()
    p, rr = r.clone(), r @ r
    # The accuracy asked for grows as the gradient falls: quadratic convergence without solving early systems exactly.
    target = rr * torch.clamp(rr.sqrt(), max=0.25) ** 2 * 1e-4
    for _ in range(2 * len(b) + 10):
        (hp,) = product(p)
        curvature = p @ hp
        if not curvature > 0:
            return x if bool(x.any()) else b
        alpha = rr / curvature
        x, r = x + alpha * p, r - alpha * hp
        rr, previous = r @ r, rr
        if rr <= target:
            break
        p = r + (rr / previous) * p
    return x


def _armijo_step(objective: Function, gradient_of: Function, x: Tensor, step: Tensor, gradient: Tensor) -> Tensor | None:
    f, slope = objective(x), gradient @ step
    for k in range(HALVINGS):
        trial = x + 0.5**k * step
        f_trial = objective(trial)
        if torch.isfinite(f_trial) and (f_trial < f + 1e-4 * 0.5**k * slope or gradient_of(trial) @ step <= 0):
            # A convex objective that still slopes down at the trial fell all the way, even where rounding hides it.
            return trial if not torch.equal(trial, x) else None
    return None

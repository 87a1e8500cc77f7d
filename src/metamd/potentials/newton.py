"""The general mirror loop: theta = argmin phi(theta) - <y, theta> for a phi known only by its value."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

_MAX_ITERATIONS = 100
_HALVINGS = 60


def minimise(value: Callable[..., Tensor], dual: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Minimise phi(theta) - <y, theta> by Newton's method with conjugate gradients and a halving line search.

    Args:
        value: phi, a function of named tensors.
        dual: y; the tensors to solve for.
        start: the first iterate, inside the domain of phi; tensors that `dual` does not name are held.

    Raises:
        ArithmeticError: if phi is not finite at the start, or no step decreases the objective before it is stationary.
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
        step = _conjugate_gradients(partial(_hessian_product, gradient_of, x), -gradient)
        moved = _line_search(objective, gradient_of, x, step, gradient)
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


def _hessian_product(gradient_of: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    # The Hessian is symmetric, so that its product from the left serves; reverse mode reaches every operation.
    return torch.func.vjp(gradient_of, x)[1](v)[0]


def _conjugate_gradients(product: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    x, r = torch.zeros_like(b), b.clone()
    p, rr = r.clone(), r @ r
    # The accuracy asked for grows as the gradient falls: quadratic convergence without solving early systems exactly.
    target = rr * torch.clamp(rr.sqrt(), max=0.25) ** 2 * 1e-4
    for _ in range(2 * len(b) + 10):
        hp = product(p)
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


def _line_search(
    objective: Callable[[Tensor], Tensor],
    gradient_of: Callable[[Tensor], Tensor],
    x: Tensor,
    step: Tensor,
    gradient: Tensor,
) -> Tensor | None:
    f, slope = objective(x), gradient @ step
    for k in range(_HALVINGS):
        trial = x + 0.5**k * step
        f_trial = objective(trial)
        if torch.isfinite(f_trial) and (f_trial < f + 1e-4 * 0.5**k * slope or gradient_of(trial) @ step <= 0):
            # A convex objective that still slopes down at the trial fell all the way, even where rounding hides it.
            return trial if not torch.equal(trial, x) else None
    return None

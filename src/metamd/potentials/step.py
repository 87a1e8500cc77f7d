"""`mirror_step`, one step of mirror descent as a pure function, and `Stepping`, many of them."""

import torch
from torch import Tensor

from metamd.potentials.base import Active, Move, Params, Potential, Step
from metamd.potentials.diagonal import MaxDiagonal


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


class Stepping:
    """`mirror_step` again and again with metrics that stay: one piece in the parameters' own coordinates takes one call."""

    def __init__(self, potential: MaxDiagonal, start: Params, lr: float, *, exact: bool = True) -> None:
        self.potential, self.lr, self.exact = potential, lr, exact
        self._metrics: dict[str, Tensor] = {}
        if potential.pieces == 1 and potential.basis.kind == "identity":
            single = {n: potential.metric(n)[0] for n in start}
            self._metrics = single if all(single[n].dtype == x.dtype for n, x in start.items()) else {}
        one_each = self._metrics and all(d.numel() == 1 for d in self._metrics.values())
        self._rates = {n: -lr / d.item() for n, d in self._metrics.items()} if one_each else {}

    def __call__(self, params: Params, grads: Params, active: Active) -> Step:
        """One step from theta_t with these gradients, which name all tensors, and the active pieces there."""
        if not self._metrics:
            return mirror_step(params, grads, self.potential, self.lr, active=active, exact=self.exact)
        if self._rates:  # a number is faster than a tensor that is spread over another
            return Step({n: torch.add(params[n], g, alpha=self._rates[n]) for n, g in grads.items()}, active)
        at, metrics = [params[n] for n in grads], [self._metrics[n] for n in grads]
        moved = torch._foreach_addcdiv(at, list(grads.values()), metrics, value=-self.lr)
        return Step(dict(zip(grads, moved, strict=True)), active)

"""`mirror_step`, one step of mirror descent as a pure function."""

from torch import Tensor

from metamd.potentials.base import Active, Move, Params, Potential, Step


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
        >>> import torch
        >>> from metamd import Euclidean
        >>> mirror_step({"x": torch.ones(2)}, {"x": torch.tensor([1.0, 2.0])}, Euclidean(), lr=0.5).params["x"]
        tensor([0.5000, 0.0000])
    """
    moves = {n: Move(g, lr, lr * weight_decay) for n, g in grads.items()}
    return potential.step(params, moves, active=active, exact=exact)

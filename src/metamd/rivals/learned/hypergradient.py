"""Hypergradient descent: the learning rate follows the gradient of the loss with respect to it [Baydin2018].

lr_t = lr_{t-1} + beta <g_t, g_{t-1}>,  theta <- theta - lr_t g_t
"""

from typing import Any

import torch

from metamd.rivals.base import Named, Range, Rival, Setting


class HypergradientSGD:
    """SGD whose rate is learned as it goes.

    Args:
        named: the parameters.
        setting: `lr` to begin with, and `beta`, the rate of the rate.
    """

    def __init__(self, named: Named, setting: Setting) -> None:
        self.params, self.beta = [p for _, p in named], setting["beta"]
        self.param_groups: list[dict[str, Any]] = [{"lr": setting["lr"], "params": self.params}]
        self.before: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self) -> None:
        """One step of the rate and one of the parameters; the rate does not fall below zero."""
        grads = [p.grad for p in self.params if p.grad is not None]
        group = self.param_groups[0]
        if self.before is not None:
            along = float(sum((g * h).sum() for g, h in zip(grads, self.before, strict=True)))
            group["lr"] = max(0.0, group["lr"] + self.beta * along)
        for p, g in zip(self.params, grads, strict=True):
            p.sub_(g, alpha=group["lr"])
        self.before = grads


HYPERGRADIENT = Rival(
    "hypergradient",
    "Hypergradient descent",
    HypergradientSGD,
    {"lr": Range(1e-3, 10), "beta": Range(1e-6, 1e-1)},
    {"lr": 1e-3, "beta": 1e-3},
    schedules=("constant",),
)

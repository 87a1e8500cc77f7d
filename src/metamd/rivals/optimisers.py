"""Optimisers that neither torch.optim nor a package has in this form.

Muon with AdamW, L-BFGS with one gradient a step, LoRA+, a rate that is learned on the way, averages.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Adam, AdamW, Muon

from metamd.inner.run import Stepper
from metamd.optimiser.averaging import follow, to_average, to_iterate
from metamd.rivals.base import NamedParameters, Setting


class MuonAndAdamW:
    """Muon on the weights with two or more axes, AdamW on the rest and on the last layer.

    torch's Muon takes matrices only; a convolution is shown to it as output channels x (input channels x kernel), a view
    of the same memory.
    """

    def __init__(self, named: NamedParameters, setting: Setting) -> None:
        hidden = [p for _, p in named if p.ndim >= 2][:-1]
        self.views = [(p, nn.Parameter(p.detach().flatten(1))) for p in hidden]
        chosen = {id(p) for p in hidden}
        rest = [p for _, p in named if id(p) not in chosen]
        both: dict[str, Any] = {"lr": setting["lr"], "weight_decay": setting["weight_decay"]}
        self.parts: list[torch.optim.Optimizer] = [AdamW(rest, **both, fused=True)]
        if hidden:
            # with this adjustment one rate serves both parts
            flat = [v for _, v in self.views]
            self.parts.append(Muon(flat, **both, momentum=setting["momentum"], adjust_lr_fn="match_rms_adamw"))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """One step of both parts."""
        for p, view in self.views:
            view.grad = None if p.grad is None else p.grad.flatten(1)
        for part in self.parts:
            part.step()


class OneGradientLBFGS:
    """L-BFGS [LiuNocedal1989] that takes one gradient a step: its direction, at a fixed rate, without a line search.

    The first step has length lr in the 1-norm at most, as torch has it.
    """

    def __init__(self, named: NamedParameters, setting: Setting) -> None:
        how: dict[str, Any] = {"lr": setting["lr"], "history_size": 50, "tolerance_grad": 0.0, "tolerance_change": 0.0}
        # with one iteration torch calls the closure once, where the gradient is known already, and uses no value of it
        self.optimiser = LBFGS([p for _, p in named], max_iter=1, **how)
        self.param_groups = self.optimiser.param_groups

    def step(self) -> None:
        """One step along the direction."""
        self.optimiser.step(lambda: 0.0)  # type: ignore[no-untyped-call]


class AdamThenLBFGS:
    """Adam for `switch` steps, then L-BFGS at rate 1, as networks for equations are often trained."""

    def __init__(self, named: NamedParameters, setting: Setting) -> None:
        betas = setting["beta1"], setting["beta2"]
        self.first = Adam([p for _, p in named], lr=setting["lr"], betas=betas, fused=True)
        self.second = OneGradientLBFGS(named, {"lr": 1.0})
        self.param_groups = [*self.first.param_groups, *self.second.param_groups]
        self.taken, self.switch = 0, round(setting["switch"])

    def step(self) -> None:
        """One step of the part whose turn it is."""
        (self.first if self.taken < self.switch else self.second).step()
        self.taken += 1


UPPER = re.compile(r"(^|\.)(b|lora_B\..*)$")
"""Names of the matrices B of adapters, in `metamd.tasks.speakers` and in peft."""


class LoraPlus(AdamW):
    """AdamW with a rate `ratio` times as large for the matrices B of adapters, LoRA+ [Hayou2024]; the ratio of peft is 16.

    Where no parameter is one it is AdamW.
    """

    def __init__(self, named: NamedParameters, setting: Setting) -> None:
        apart: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, p in named:
            apart[UPPER.search(name) is not None].append(p)
        rates = {False: setting["lr"], True: setting["ratio"] * setting["lr"]}
        groups = [{"params": params, "lr": rates[upper]} for upper, params in apart.items() if params]
        betas = setting["beta1"], setting["beta2"]
        super().__init__(groups, betas=betas, weight_decay=setting["weight_decay"], fused=True)


class HypergradientSGD:
    """SGD whose rate follows the gradient of the loss with respect to it [Baydin2018]; it does not fall below zero.

    lr_t = lr_{t-1} + beta <g_t, g_{t-1}>,  theta <- theta - lr_t g_t
    """

    def __init__(self, named: NamedParameters, setting: Setting) -> None:
        self.params, self.beta = [p for _, p in named], setting["beta"]
        self.param_groups: list[dict[str, Any]] = [{"lr": setting["lr"], "params": self.params}]
        self.before: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self) -> None:
        """One step of the rate and one of the parameters."""
        grads = [p.grad for p in self.params if p.grad is not None]
        group = self.param_groups[0]
        if self.before is not None:
            along = float(sum((g * h).sum() for g, h in zip(grads, self.before, strict=True)))
            group["lr"] = max(0.0, group["lr"] + self.beta * along)
        for p, g in zip(self.params, grads, strict=True):
            p.sub_(g, alpha=group["lr"])
        self.before = grads


class Averaged:
    """An optimiser beside which the tail average of its parameters is kept; `eval()` puts it in their place."""

    def __init__(self, optimiser: Stepper, params: Sequence[nn.Parameter]) -> None:
        self.optimiser, self.param_groups = optimiser, optimiser.param_groups
        self.taken, self._training = 0, True
        self.state: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in params}

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, and move the averages towards where it led."""
        if not self._training:
            raise RuntimeError("this optimiser is in eval mode: its parameters are averages now. Call train() first.")
        self.optimiser.step()
        self.taken += 1
        follow(self.state.items(), self.taken)

    def eval(self) -> None:
        """Put the averages into the parameters."""
        self._switch(training=False)

    def train(self) -> None:
        """Put the iterates back."""
        self._switch(training=True)

    @torch.no_grad()
    def _switch(self, *, training: bool) -> None:
        if self._training is not training:
            for p, store in self.state.items():
                if "mean" in store:
                    (to_iterate if training else to_average)(p, store)
            self._training = training

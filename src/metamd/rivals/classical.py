"""The optimisers of torch.optim, in their fastest form on CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, RMSprop

from metamd.rivals.base import Named, Range, Rival, Setting, Stepper

DECAY = Range(1e-6, 1e-2)
"""Of the weight decay, of every rival."""

DECAYS = (0.001, 0.0001, 0.0005)
RATES = (0.1, 0.05, 0.01, 0.005, 0.001)
PAPER = {"lr": RATES, "weight_decay": DECAYS}
PAPER_ADAM = {"lr": (0.3, 0.2, 0.1, 0.01, 0.001), "weight_decay": DECAYS}
"""The grids of the paper's appendix [GaoMetaMD2022], for SGD, SGD-M and RMSprop, and for Adam."""


def arguments(setting: Setting) -> dict[str, Any]:
    """A setting as torch.optim's keyword arguments: beta1 and beta2 make betas.

    Args:
        setting: hyperparameters by name.
    """
    found: dict[str, Any] = dict(setting)
    if "beta1" in found:
        found["betas"] = (found.pop("beta1"), found.pop("beta2"))
    return found


def maker(optimiser: Callable[..., Stepper], **fixed: Any) -> Callable[[Named, Setting], Stepper]:
    """The `make` of a rival that is one torch optimiser.

    Args:
        optimiser: its class.
        fixed: arguments that are not searched.
    """
    return lambda named, setting: optimiser([p for _, p in named], **arguments(setting), **fixed)


class MuonAndAdamW:
    """Muon on the weights with two or more axes, AdamW on the rest and on the last layer.

    torch's Muon takes matrices only; a convolution is shown to it as output channels x (input channels x kernel), a view
    of the same memory.

    Args:
        named: the parameters.
        setting: `lr` and `weight_decay` of both, `momentum` of Muon.
    """

    def __init__(self, named: Named, setting: Setting) -> None:
        wide = [p for _, p in named if p.ndim >= 2]
        hidden = wide[:-1]
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


_FAST = {"fused": True}

CLASSICAL = [
    Rival(
        "sgd",
        "SGD",
        maker(SGD, **_FAST),
        {"lr": Range(1e-3, 10), "weight_decay": DECAY},
        {"lr": 1e-3, "weight_decay": 0.0},
        PAPER,
    ),
    Rival(
        "sgdm",
        "SGD-M",
        maker(SGD, **_FAST),
        {"lr": Range(1e-4, 1), "weight_decay": DECAY},
        {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.9},
        PAPER,
    ),
    Rival(
        "nesterov",
        "Nesterov",
        maker(SGD, nesterov=True, **_FAST),
        {"lr": Range(1e-4, 1), "weight_decay": DECAY},
        {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.9},
        PAPER,
    ),
    Rival(
        "adam",
        "Adam",
        maker(Adam, **_FAST),
        {"lr": Range(1e-4, 1), "weight_decay": DECAY},
        {"lr": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999},
        PAPER_ADAM,
    ),
    Rival(
        "adamw",
        "AdamW",
        maker(AdamW, **_FAST),
        {"lr": Range(1e-4, 1), "weight_decay": Range(1e-5, 1.0)},
        {"lr": 1e-3, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999},
        PAPER_ADAM,
    ),
    Rival(
        "rmsprop",
        "RMSprop",
        maker(RMSprop, foreach=True),
        {"lr": Range(1e-4, 1), "weight_decay": DECAY},
        {"lr": 1e-2, "weight_decay": 0.0, "alpha": 0.99, "momentum": 0.0},
        PAPER,
    ),
    Rival(
        "adagrad",
        "AdaGrad",
        maker(Adagrad, **_FAST),
        {"lr": Range(1e-4, 1), "weight_decay": DECAY},
        {"lr": 1e-2, "weight_decay": 0.0},
        PAPER,
    ),
    Rival(
        "muon",
        "Muon + AdamW",
        MuonAndAdamW,
        {"lr": Range(1e-4, 1), "weight_decay": Range(1e-5, 1.0)},
        {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95},
    ),
]

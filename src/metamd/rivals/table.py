"""The rivals that need no learning: each with its class, the ranges in which it is tuned, and its setting without tuning.

The ranges were fixed before any result was seen. They contain the published grids, and the default rate of every rival. The
defaults are those of torch.optim and of the packages, except where a comment says otherwise.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import optim

from metamd.files.text import install
from metamd.inner.run import Stepper
from metamd.rivals.base import NamedParameters, Range, Rival, Setting
from metamd.rivals.optimisers import AdamThenLBFGS, Averaged, HypergradientSGD, LoraPlus, MuonAndAdamW, OneGradientLBFGS

DECAY = Range(1e-6, 1e-2)
"""The range of the weight decay where it is a part of the gradient."""

DECOUPLED = Range(1e-5, 1.0)
"""The range of the weight decay where it is multiplied with the learning rate."""

_DECAYS = (0.001, 0.0001, 0.0005)
PAPER_GRID = {"lr": (0.1, 0.05, 0.01, 0.005, 0.001), "weight_decay": _DECAYS}
PAPER_GRID_ADAM = {"lr": (0.3, 0.2, 0.1, 0.01, 0.001), "weight_decay": _DECAYS}
"""The grids of the paper's appendix [GaoMetaMD2022], for SGD, SGD-M and RMSprop, and for Adam."""


def built(optimiser: Callable[..., Stepper] | str, **fixed: Any) -> Callable[[NamedParameters, Setting], Stepper]:
    """The `make` of a rival that is one class of torch's interface, or "package.Class", imported when it is used.

    Hyperparameters are its keyword arguments, as `fixed` are; beta1 and beta2 make betas.
    """

    def make(named: NamedParameters, setting: Setting) -> Stepper:
        arguments: dict[str, Any] = {**setting, **fixed}
        if "beta1" in arguments:
            arguments["betas"] = (arguments.pop("beta1"), arguments.pop("beta2"))
        if not isinstance(optimiser, str):
            return optimiser([p for _, p in named], **arguments)
        package, name = optimiser.rsplit(".", 1)
        try:
            found: Callable[..., Stepper] = getattr(import_module(package), name)
        except ModuleNotFoundError:
            raise ValueError(
                f"{name} comes with the package {package}, which is not installed. {install('rivals')}"
            ) from None
        return found([p for _, p in named], **arguments)

    return make


def _rival(
    name: str,
    title: str,
    make: Callable[[NamedParameters, Setting], Stepper],
    rates: Range,
    grid: Mapping[str, tuple[float, ...]] | None = None,
    decays: Range = DECAY,
    /,
    **defaults: float,
) -> Rival:
    """A rival that is tuned in learning rate and weight decay; without decay by default."""
    setting = {"lr": defaults["lr"], "weight_decay": 0.0, **defaults}
    return Rival(name, title, make, {"lr": rates, "weight_decay": decays}, setting, grid or {})


_USUAL, _SMALL, _FACTOR = Range(1e-4, 1), Range(1e-4, 0.1), Range(0.1, 10)
_ADAM, _ADAMW = {"beta1": 0.9, "beta2": 0.999}, built(optim.AdamW, fused=True)

_TORCH = [  # in their fastest form on CPU
    _rival("sgd", "SGD", built(optim.SGD, fused=True), Range(1e-3, 10), PAPER_GRID, lr=1e-3),
    _rival("sgdm", "SGD-M", built(optim.SGD, fused=True), _USUAL, PAPER_GRID, lr=1e-3, momentum=0.9),
    _rival("nesterov", "Nesterov", built(optim.SGD, nesterov=True, fused=True), _USUAL, PAPER_GRID, lr=1e-3, momentum=0.9),
    _rival("adam", "Adam", built(optim.Adam, fused=True), _USUAL, PAPER_GRID_ADAM, lr=1e-3, **_ADAM),
    _rival("adamw", "AdamW", _ADAMW, _USUAL, PAPER_GRID_ADAM, DECOUPLED, lr=1e-3, weight_decay=0.01, **_ADAM),
    _rival("rmsprop", "RMSprop", built(optim.RMSprop, foreach=True), _USUAL, PAPER_GRID, lr=1e-2, alpha=0.99, momentum=0.0),
    _rival("adagrad", "AdaGrad", built(optim.Adagrad, fused=True), _USUAL, PAPER_GRID, lr=1e-2),
    _rival("muon", "Muon + AdamW", MuonAndAdamW, _USUAL, None, DECOUPLED, lr=1e-3, weight_decay=0.1, momentum=0.95),
    _rival("lora-plus", "LoRA+", LoraPlus, _USUAL, None, DECOUPLED, lr=1e-3, weight_decay=0.01, ratio=16.0, **_ADAM),
]

# SOAP and Shampoo renew their bases every 10 steps. Shampoo's own defaults start after 25 steps and renew the roots every
# 1,000: nothing for runs of 500.
_SOAP = built("pytorch_optimizer.SOAP", precondition_frequency=10)
_SHAMPOO = built(
    "pytorch_optimizer.ScalableShampoo", start_preconditioning_step=10, preconditioning_compute_steps=10, block_size=256
)
_FREE, _FREE_SGD = built("schedulefree.AdamWScheduleFree"), built("schedulefree.SGDScheduleFree")

_PACKAGES = [
    _rival("soap", "SOAP", _SOAP, _SMALL, lr=3e-3, beta1=0.95, beta2=0.95),
    _rival("shampoo", "Shampoo", _SHAMPOO, _USUAL, lr=1e-3, **_ADAM),
    _rival("schedule-free", "Schedule-Free AdamW", _FREE, _SMALL, lr=2.5e-3, **_ADAM),
    _rival("schedule-free-sgd", "Schedule-Free SGD", _FREE_SGD, Range(1e-2, 30), lr=1.0, momentum=0.9),
    # the rate of the next two is a factor on the one that they find
    _rival("prodigy", "Prodigy", built("prodigyopt.Prodigy"), _FACTOR, lr=1.0, **_ADAM),
    _rival("dadapt", "D-Adaptation", built("pytorch_optimizer.DAdaptAdam"), _FACTOR, lr=1.0, **_ADAM),
]

_SPACE, _SETTING = {"lr": Range(1e-3, 10), "beta": Range(1e-6, 1e-1)}, {"lr": 1e-3, "beta": 1e-3}
# L-BFGS has no weight decay; that it takes over from Adam half way through a run of 1,000 steps is its default
_LBFGS = Rival("lbfgs", "L-BFGS", OneGradientLBFGS, {"lr": _USUAL}, {"lr": 1.0})
_SWITCHED = {"lr": _USUAL, "switch": Range(20, 2000)}
_ADAM_LBFGS = Rival("adam-lbfgs", "Adam, then L-BFGS", AdamThenLBFGS, _SWITCHED, {"lr": 1e-3, "switch": 500.0, **_ADAM})

_HYPERGRADIENT = Rival("hypergradient", "Hypergradient descent", HypergradientSGD, _SPACE, _SETTING)


def averaged(rival: Rival) -> Rival:
    """The same rival, one without modes of its own, judged by the tail average of its iterates, as MetaMD may be."""
    return replace(
        rival,
        name=f"{rival.name}-averaged",
        title=f"{rival.title}, averaged",
        make=lambda named, setting: Averaged(rival.make(named, setting), [p for _, p in named]),
    )


RIVALS: dict[str, Rival] = {r.name: r for r in (*_TORCH, *_PACKAGES, _LBFGS, _ADAM_LBFGS, _HYPERGRADIENT)}
"""Those that need no learning, by name."""

for _name in ("schedule-free", "schedule-free-sgd", "hypergradient"):  # their own way takes the place of a schedule
    RIVALS[_name] = replace(RIVALS[_name], schedules=("constant",))

RIVALS |= {r.name: r for r in (averaged(RIVALS[name]) for name in ("sgdm", "adam", "adamw", "muon", "soap"))}

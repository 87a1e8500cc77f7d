"""How a supervised family trains, and what can be found out about its model before anything is trained."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from metamd.tasks.sources import Splits
from metamd.tasks.stochastic import HashedDropout, seeded, use_batch_statistics

LossFn = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What all tasks of a supervised family share.

    Args:
        make_model: a new model at every call.
        loss_fn: of (outputs, targets), averaged over the batch.
        batch_size: examples per step.
        steps: T.
    """

    make_model: Callable[[], nn.Module]
    loss_fn: LossFn
    batch_size: int
    steps: int

    def make(self, seed: int) -> nn.Module:
        """A new model, initialised from a seed; the caller's generators are left alone."""
        with seeded(seed):
            return self.make_model()

    def loss(self, model: "Called", params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a model as a function of its parameters."""
        if "seed" in batch:
            with HashedDropout(batch["seed"]):
                outputs = model(params, batch["inputs"])
        else:
            outputs = model(params, batch["inputs"])
        return _twice_differentiable(self.loss_fn)(outputs, batch["targets"])


class Called:
    """A model as a function of its trained parameters, and of its inputs.

    What `torch.func.functional_call` does, but where the parameters are is looked up once, and not at every call.

    Args:
        model: which; a parameter with several names is given by the first, and found under all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        names = {p: name for name, p in trained(model).items()}
        self._places = [
            (module._parameters, leaf, names[p])
            for module in model.modules()
            for leaf, p in module._parameters.items()
            if p is not None and p in names
        ]

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor) -> Any:
        """The outputs; all trained parameters must be given."""
        own = [where[leaf] for where, leaf, _ in self._places]
        try:
            for where, leaf, name in self._places:
                where[leaf] = params[name]  # type: ignore[assignment]
            return self.model(inputs)
        finally:
            for (where, leaf, _), p in zip(self._places, own, strict=True):
                where[leaf] = p


@dataclass(frozen=True)
class Findings:
    """What `inspect` found.

    Args:
        dropout: whether the model has dropout.
        shared_loss: whether models differ in nothing but the trained parameters.
        dtype: of the first parameter.
    """

    dropout: bool
    shared_loss: bool
    dtype: torch.dtype


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def inspect(recipe: Recipe, data: Mapping[str, Splits]) -> Findings:
    """Make models and run one on a few examples, so that whatever does not fit is said before any training."""
    model, other = _make_checked(recipe)
    params = trained(model)
    dtype = next(iter(params.values())).dtype
    same = all(torch.equal(a, b) for a, b in zip(_fixed(model), _fixed(other), strict=True))
    splits = next(iter(data.values()))
    batch = {
        k: (part[:4].to(dtype) if part.is_floating_point() else part[:4]).to(next(iter(params.values())).device)
        for k, part in zip(("inputs", "targets"), splits["train"], strict=True)
    }
    dropout = _try(recipe, use_batch_statistics(model), batch, data)
    return Findings(dropout, same, dtype)


def _twice_differentiable(loss_fn: LossFn) -> LossFn:
    # Forward-over-reverse through the mean of mse_loss raises in torch (pytorch issue 123996); averaging outside does not.
    if loss_fn is F.mse_loss or (isinstance(loss_fn, nn.MSELoss) and loss_fn.reduction == "mean"):
        return lambda outputs, targets: F.mse_loss(outputs, targets, reduction="none").mean()
    return loss_fn


def _make_checked(recipe: Recipe) -> tuple[nn.Module, nn.Module]:
    if isinstance(recipe.make_model, nn.Module):
        raise TypeError("make_model must be a function that makes a new model, got a model. Pass lambda: MyModel(...).")
    model, again, other = recipe.make(0), recipe.make(0), recipe.make(1)
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model must return a torch.nn.Module, got {type(model).__name__}.")
    if model is again:
        raise ValueError(
            "make_model must make a new model at every call, got the same one twice. Pass lambda: MyModel(...)."
        )
    if not trained(model):
        raise ValueError("make_model must return a model with parameters that require a gradient, got none.")
    one, two, three = ({n: p.shape for n, p in trained(m).items()} for m in (model, again, other))
    if not one == two == three:
        raise ValueError("make_model must give parameters of the same names and shapes at every call, got others.")
    if not all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)):
        raise ValueError(
            "make_model must draw from torch's global generator alone: under one seed it gave two different models. "
            "Do not pass a generator of your own, nor draw from numpy."
        )
    return model, other


@torch.no_grad()
def _try(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor], data: Mapping[str, Splits]) -> bool:
    """Run a model on a few examples; whether it has dropout. A model that is not a pure function is refused."""
    before = [b.clone() for b in model.buffers()]
    mode, name = HashedDropout(torch.tensor(0)), next(iter(data))
    with _explained(batch, name), seeded(1), mode:
        outputs = functional_call(model, trained(model), (batch["inputs"],))
    _check_labels(recipe, outputs, batch["targets"], data)
    with _explained(batch, name):
        loss = recipe.loss_fn(outputs, batch["targets"])
        with seeded(2):
            again = recipe.loss(Called(model), trained(model), {**batch, "seed": torch.tensor(0)})
    _check_pure(loss, again, before, list(model.buffers()))
    return mode.calls > 0


@contextmanager
def _explained(batch: Mapping[str, Tensor], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        raise ValueError(
            f"The model and the loss must run on a batch of dataset {name!r} (inputs {tuple(batch['inputs'].shape)}, "
            f"{batch['inputs'].dtype}). Convert the data or change the model; torch says: {e}"
        ) from e


def _check_pure(loss: Any, again: Any, before: list[Tensor], after: list[Tensor]) -> None:
    if not isinstance(loss, Tensor) or loss.dim():
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return a tensor without dimensions, got {got}. Average over the batch.")
    if not torch.allclose(loss, again, rtol=1e-5, equal_nan=True):  # averages may differ in the last digit
        raise ValueError(
            "The model's forward pass must be a function of its parameters and inputs, but it draws random numbers. "
            "Dropout layers and F.dropout are looked after; set other noise, as dropout inside attention, to zero."
        )
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise ValueError(
            "The model's forward pass changes its buffers, so the loss depends on past calls. Batch norms are looked "
            "after; put other such layers into eval mode in make_model."
        )


def _check_labels(recipe: Recipe, outputs: Any, targets: Tensor, data: Mapping[str, Splits]) -> None:
    if recipe.loss_fn is not F.cross_entropy or targets.is_floating_point() or outputs.dim() < 2:
        return
    for name, splits in data.items():
        largest = max(int(targets.max()) for _, targets in splits.values())
        if largest >= outputs.shape[1]:
            raise ValueError(
                f"The model must have an output for each class: it has {outputs.shape[1]}, and dataset {name!r} has the "
                f"label {largest}. Make a model with {largest + 1} outputs."
            )


def _fixed(model: nn.Module) -> list[Tensor]:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return [*frozen, *model.buffers()]

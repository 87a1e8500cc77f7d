"""A model as a pure function of its parameters: initial weights, dropout and batch norms follow from task and step."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from metamd.tasks.base import seeded
from metamd.tasks.sources import Splits

LossFn = Callable[[Any, Tensor], Tensor]

_GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio: spreads consecutive numbers
_SPATIAL: dict[Callable[..., Any], int] = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}


# what is random or remembers something inside a model


class HashedDropout(TorchFunctionMode):
    """A mode in which dropout masks are a hash of (seed of the step, which dropout of the forward pass, position).

    No generator is involved. The mask of a step is the same at any time and on any device, and `torch.func` sees ordinary
    arithmetic, even under vmap over seeds.
    """

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed, self.calls = seed.to(torch.int32), 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dropout by hash; everything else as it is."""
        kwargs = kwargs or {}
        if func not in _SPATIAL:
            return func(*args, **kwargs)
        return self._dropout(_SPATIAL[func], *args, **kwargs)

    def _dropout(self, spatial: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        self.calls += 1
        if p == 1:
            return torch.zeros_like(input)
        kept = input.dim() - spatial
        shape = tuple(input.shape[:kept]) + (1,) * spatial  # whole channels are dropped together
        mask = hashed_uniform(self.seed + (self.calls * _GOLDEN) % 2**31, shape, input.device) >= p
        return input * mask.to(input.dtype) / (1 - p)


def hashed_uniform(seed: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers in [0, 1), a pure function of the seed (int32) and the position: murmur3's finaliser, twice."""
    position = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=device)
    bits = _mix(_mix(position ^ _mix(seed)) + seed)
    return ((bits & 0xFFFFFF).to(torch.float32) / 2**24).reshape(shape)


def use_batch_statistics(model: nn.Module, keep: Container[nn.Module] = ()) -> nn.Module:
    """Take running statistics away from the norms that train: they would make the loss depend on past calls."""
    for norm in tracking_norms(model):
        if norm not in keep:
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return model


def calibrate(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Switch a model to evaluation, its batch norms with the statistics of these batches under its present weights."""
    norms = [norm for norm in tracking_norms(model) if isinstance(norm, _BatchNorm)]
    use_batch_statistics(model, keep=norms).eval()  # an instance norm has the instance's own statistics at any time
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over all batches
        norm.train()
    for inputs in batches:
        model(inputs)
    model.eval()


def tracking_norms(model: nn.Module) -> list[_NormBase]:
    """The norms that would update running statistics in a forward pass; those put into eval mode are left alone."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]


def _mix(h: Tensor) -> Tensor:
    # The masks undo the sign that an arithmetic shift drags in.
    h = (h ^ ((h >> 16) & 0xFFFF)) * -0x7A143595
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return h ^ ((h >> 16) & 0xFFFF)


# models as functions


@dataclass(frozen=True)
class Recipe:
    """What all tasks of a supervised family share; `loss_fn` takes (outputs, targets) and averages over the batch."""

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
        with HashedDropout(batch["seed"]) if "seed" in batch else nullcontext():
            outputs = model(params, batch["inputs"])
        # Forward-over-reverse through the mean of mse_loss raises in torch (pytorch issue 123996); a mean outside does not.
        if self.loss_fn is F.mse_loss or (isinstance(self.loss_fn, nn.MSELoss) and self.loss_fn.reduction == "mean"):
            return F.mse_loss(outputs, batch["targets"], reduction="none").mean()
        return self.loss_fn(outputs, batch["targets"])


class Called:
    """A model as a function of its trained parameters, and of its inputs.

    It does what `torch.func.functional_call` does, but looks up once where the parameters are, and not at every call. A
    parameter with several names is given by the first, and found under all.
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


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers with a fraction in the dtype of the model."""
    return x.to(dtype) if x.is_floating_point() else x


def inspect(recipe: Recipe, data: Mapping[str, Splits]) -> tuple[bool, bool, torch.dtype]:
    """Make models and run one on a few examples, so that whatever does not fit is said before any training.

    Returns whether the model has dropout, whether models differ in the trained parameters alone, and their dtype.
    """
    model, other = _make_checked(recipe)
    first = next(iter(trained(model).values()))
    same = all(torch.equal(a, b) for a, b in zip(_fixed(model), _fixed(other), strict=True))
    batch = {
        k: in_dtype(part[:4], first.dtype).to(first.device)
        for k, part in zip(("inputs", "targets"), next(iter(data.values()))["train"], strict=True)
    }
    return _has_dropout(recipe, use_batch_statistics(model), batch, data), same, first.dtype


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
def _has_dropout(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor], data: Mapping[str, Splits]) -> bool:
    """Run a model on a few examples; refuse one that is not a pure function."""
    before = [b.clone() for b in model.buffers()]
    mode, name = HashedDropout(torch.tensor(0)), next(iter(data))
    with _explained(batch, name), seeded(1), mode:
        outputs = model(batch["inputs"])
    _check_labels(recipe, outputs, batch["targets"], data)
    with _explained(batch, name):
        loss = recipe.loss_fn(outputs, batch["targets"])
        with seeded(2):
            again = recipe.loss(Called(model), trained(model), {**batch, "seed": torch.tensor(0)})
    if not isinstance(loss, Tensor) or loss.dim():
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return a tensor without dimensions, got {got}. Average over the batch.")
    if not torch.allclose(loss, again, rtol=1e-5, equal_nan=True):  # averages may differ in the last digit
        raise ValueError(
            "The model's forward pass must be a function of its parameters and inputs, but it draws random numbers. "
            "Dropout layers and F.dropout are looked after; set other noise, as dropout inside attention, to zero."
        )
    if not all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True)):
        raise ValueError(
            "The model's forward pass changes its buffers, so the loss depends on past calls. Batch norms are looked "
            "after; put other such layers into eval mode in make_model."
        )
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
    return [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]

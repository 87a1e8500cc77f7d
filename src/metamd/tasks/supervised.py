"""Any model on any data: the model is a pure function of its parameters.

Initial weights, dropout and batch norms follow from the task and the step alone.
"""

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from metamd.tasks.base import (
    Config,
    Drawn,
    Evaluation,
    Shuffle,
    Split,
    Task,
    TaskFamily,
    check_config,
    derive_seed,
    domain_of,
    draw_seed,
    seeded,
)
from metamd.tasks.sources import Rows, Shares, Source, Splits, hash_of_data, read_all

LossFn = Callable[[Any, Tensor], Tensor]

_GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio: spreads consecutive numbers
_SPATIAL: dict[Callable[..., Any], int] = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}

_CALIBRATED_AT_ONCE = 1000
"""Examples whose statistics a batch norm takes together."""

_EVALUATED_AT_ONCE = 250
"""Examples whose maps stay in the processor's cache: LeNet takes two thirds of the time that it takes with 1,000 at once."""


# randomness and state inside a model


class HashedDropout(TorchFunctionMode):
    """A mode in which dropout masks are a hash of (seed of the step, which dropout of the forward pass, position)."""

    # No generator: a step has one mask on any device, and torch.func sees arithmetic, even under vmap over seeds.
    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed, self.calls = seed.to(torch.int32), 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dropout by hash; everything else as it is."""
        change = partial(self._dropout, _SPATIAL[func]) if func in _SPATIAL else func
        return change(*args, **kwargs or {})

    def _dropout(self, spatial: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        self.calls += 1
        if p == 1:
            return torch.zeros_like(input)
        shape = (*input.shape[: input.dim() - spatial], *(1,) * spatial)  # whole channels are dropped together
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

    def loss(self, model: "FunctionalModel", params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a model as a function of its parameters."""
        with HashedDropout(batch["seed"]) if "seed" in batch else nullcontext():
            outputs = model(params, batch["inputs"])
        # Forward-over-reverse through the mean of mse_loss raises in torch (pytorch issue 123996); a mean outside does not.
        if self.loss_fn is F.mse_loss or (isinstance(self.loss_fn, nn.MSELoss) and self.loss_fn.reduction == "mean"):
            return F.mse_loss(outputs, batch["targets"], reduction="none").mean()
        return self.loss_fn(outputs, batch["targets"])


class FunctionalModel:
    """A model as a function of its trained parameters and its inputs: `functional_call` with the places looked up once."""

    # A parameter with several names is given by the first, and found under all.
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


def inspect_model(recipe: Recipe, data: Mapping[str, Splits]) -> tuple[bool, bool, torch.dtype]:
    """Make models and run one on a few examples, so that whatever does not fit is said before any training.

    Returns whether the model has dropout, whether models differ in the trained parameters alone, and their dtype.
    """
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
    first = next(iter(trained(model).values()))
    fixed = [[*(p for p in m.parameters() if not p.requires_grad), *m.buffers()] for m in (model, other)]
    same = all(torch.equal(a, b) for a, b in zip(*fixed, strict=True))
    inputs, targets = (in_dtype(part[:4], first.dtype).to(first.device) for part in next(iter(data.values()))["train"])
    batch = {"inputs": inputs, "targets": targets}
    return _has_dropout(recipe, use_batch_statistics(model), batch, data), same, first.dtype


@torch.no_grad()
def _has_dropout(recipe: Recipe, model: nn.Module, batch: Mapping[str, Tensor], data: Mapping[str, Splits]) -> bool:
    """Run a model on a few examples; refuse one that is not a pure function."""
    before = [b.clone() for b in model.buffers()]
    mode, name = HashedDropout(torch.tensor(0)), next(iter(data))
    with _explained(batch, name), seeded(1), mode:
        outputs = model(batch["inputs"])
    if recipe.loss_fn is F.cross_entropy or isinstance(recipe.loss_fn, nn.CrossEntropyLoss):
        for key, splits in data.items():
            for _, targets in splits.values():
                _check_classes(key, targets, outputs)
    classified = recipe.loss_fn is F.cross_entropy and not batch["targets"].is_floating_point() and outputs.dim() > 1
    for key, splits in data.items() if classified else ():
        largest = max(int(targets.max()) for _, targets in splits.values())
        if largest >= outputs.shape[1]:
            raise ValueError(
                f"The model must have an output for each class: it has {outputs.shape[1]}, and dataset {key!r} has the "
                f"label {largest}. Make a model with {largest + 1} outputs."
            )
    with _explained(batch, name):
        loss = recipe.loss_fn(outputs, batch["targets"])
        with seeded(2):
            again = recipe.loss(FunctionalModel(model), trained(model), {**batch, "seed": torch.tensor(0)})
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


def _check_classes(name: str, targets: Tensor, outputs: Any) -> None:
    """Refuse numbers where cross entropy takes classes: of one output it is zero, whatever the numbers are."""
    if not isinstance(targets, Tensor) or not targets.is_floating_point() or not isinstance(outputs, Tensor):
        return
    fits = outputs.dim() > 1 and outputs.shape[1] > 1 and targets.shape[1:] == outputs.shape[1:]
    if fits and bool((targets >= 0).all()) and bool(((targets.sum(1) - 1).abs() < 1e-3).all()):
        return
    raise ValueError(
        f"The loss is cross entropy, whose targets are classes, or a probability for each class; the targets of dataset "
        f"{name!r} are other numbers ({targets.dtype}, shape {tuple(targets.shape)}). For regression, pass "
        "loss_fn=torch.nn.functional.mse_loss. Labels must be integers: targets.long()."
    )


@contextmanager
def _explained(batch: Mapping[str, Tensor], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        raise ValueError(
            f"The model and the loss must run on a batch of dataset {name!r} (inputs {tuple(batch['inputs'].shape)}, "
            f"{batch['inputs'].dtype}). Convert the data or change the model; torch says: {e}"
        ) from e


# tasks


def check_batch_size(batch_size: int, examples: int, name: str) -> None:
    """Refuse a batch that is larger than the training split."""
    if not 1 <= batch_size <= examples:
        raise ValueError(
            f"batch_size must lie between 1 and the {examples} training examples of {name!r}, got {batch_size}. "
            f"Pass batch_size={min(examples, 32)}, say."
        )


class SupervisedTask(Task):
    """One training of one model; a batch is {inputs, targets}, and {seed} where the model has dropout."""

    def __init__(
        self, config: Config, recipe: Recipe, splits: Mapping[Split, tuple[Rows, Rows]], *, dropout: bool = False
    ) -> None:
        super().__init__(config, recipe.steps)
        check_batch_size(recipe.batch_size, len(splits["train"][1]), domain_of(config))
        self.recipe, self.dropout = recipe, dropout
        self.splits: Mapping[Split, tuple[Rows, Rows]] = splits
        self.model = use_batch_statistics(recipe.make(config["init_seed"]))
        self._functional = FunctionalModel(self.model)
        self.device = next(self.model.parameters()).device
        self.shuffle = Shuffle(len(splits["train"][0]), recipe.batch_size, derive_seed(config["batch_seed"], "order"))

    def init(self) -> dict[str, Tensor]:
        """What `make_model` draws under the config's seed."""
        return {name: p.detach().clone() for name, p in trained(self.model).items()}

    def batch(self, step: int) -> dict[str, Tensor]:
        """Some of the training examples."""
        rows = self.shuffle.indices(step)
        inputs, targets = (self._rows(part, rows) for part in self.splits["train"])
        if not self.dropout:
            return {"inputs": inputs, "targets": targets}
        seed = torch.tensor(derive_seed(self.config["batch_seed"], "dropout", step), dtype=torch.int32)
        return {"inputs": inputs, "targets": targets, "seed": seed}

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of the model with these parameters."""
        return self.recipe.loss(self._functional, params, batch)

    @torch.no_grad()
    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """Loss and accuracy in evaluation mode; accuracy where targets are classes and outputs have a number for each."""
        if split not in self.splits:
            raise ValueError(f"This task has the splits {', '.join(self.splits)}, got {split!r}. Give the dataset one.")
        inputs, targets = self.splits[split]
        if misfits := sorted(set(params) ^ set(trained(self.model))):
            raise ValueError(f"Parameters by the names of init() are required; too many or missing: {', '.join(misfits)}.")
        # A new model, because the running statistics of this one were taken away.
        model = self.recipe.make(self.config["init_seed"])
        for name, p in model.named_parameters():
            if name in params:
                p.copy_(params[name])
        examples = self.splits["train"][0]
        calibrate(model, (self._rows(examples, rows) for rows in chunks(len(examples), _CALIBRATED_AT_ONCE)))
        loss, right, answers = 0.0, 0, 0
        for rows in chunks(len(inputs), _EVALUATED_AT_ONCE):
            outputs, wanted = model(self._rows(inputs, rows)), self._rows(targets, rows)
            loss += float(self.recipe.loss_fn(outputs, wanted)) * len(rows) / len(inputs)
            labels = not wanted.is_floating_point() and not wanted.is_complex()
            if labels and isinstance(outputs, Tensor) and outputs.dim() == wanted.dim() + 1:
                right, answers = right + int((outputs.argmax(1) == wanted).sum()), answers + wanted.numel()
        return Evaluation(loss, right / answers if answers else None)

    def monitor(self, examples: int = 2000) -> Callable[[Mapping[str, Tensor]], float]:
        """The loss on some training examples in evaluation mode, except that batch norms use these examples' statistics."""
        if examples < 1:
            raise ValueError(f"examples must be at least 1, got {examples}. 2000 is usual.")
        rows = len(self.splits["train"][0])
        # The same examples for all tasks on the same data.
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(derive_seed("monitor", rows)))[:examples]
        model = self.recipe.make(self.config["init_seed"])
        at_once = _CALIBRATED_AT_ONCE if any(tracking_norms(model)) else _EVALUATED_AT_ONCE
        called = FunctionalModel(use_batch_statistics(model).eval())
        parts = [[self._rows(part, chosen[i]) for part in self.splits["train"]] for i in chunks(len(chosen), at_once)]

        @torch.no_grad()
        def loss(params: Mapping[str, Tensor]) -> float:
            found = [self.recipe.loss_fn(called(params, inputs), targets) * len(targets) for inputs, targets in parts]
            return float(torch.stack(found).sum()) / len(chosen)

        return loss

    def _rows(self, part: Rows, rows: Tensor) -> Tensor:
        # index_select copies whole rows; indexing goes by elements, and takes five times as long
        found = part.index_select(0, rows.to(part.device)) if isinstance(part, Tensor) else part[rows]
        return found.to(self.device)


def chunks(examples: int, size: int) -> tuple[Tensor, ...]:
    """All examples in order, in parts of nearly equal length: a last part of one would have no variance."""
    return torch.arange(examples).tensor_split(-(-examples // size))


# families


def supervised(
    make_model: Callable[[], nn.Module],
    datasets: Mapping[str, Source | Mapping[Split, Source]],
    loss_fn: LossFn = F.cross_entropy,
    *,
    batch_size: int = 100,
    steps: int = 500,
    shares: Shares = (0.8, 0.1, 0.1),
    split_seed: int = 0,
    hold_out: str | Sequence[str] = (),
    name: str = "supervised",
) -> "Supervised":
    """Train a model on one of several datasets: a task is a dataset, an initialisation and an order of the batches.

    The model is read once and called as a function of its parameters. During training, batch norms use the statistics of
    the batch; `evaluate` computes them anew from the training split. Dropout masks are a function of the task and the step.
    Parameters that do not require a gradient stay what `make_model` made them. Every task has its own initialisation;
    `starting_at` gives all of them one.

    Args:
        make_model: makes a new model at every call; its initial weights are drawn from torch's global generator, which is
            seeded per task meanwhile and left as it was.
        datasets: by name: (inputs, targets) tensors, a torch Dataset, the path of an `.npz` file with `inputs` and
            `targets`, or of a folder of images with a sub-folder per class; or a mapping with one of these for `"train"`
            and, if wanted, `"validation"` and `"test"`. All of it is held in memory. Numbers with a fraction are converted
            to the dtype of the model's parameters.
        loss_fn: of (outputs, targets), averaged over the batch.
        batch_size: examples per step.
        steps: T.
        shares: of training, validation and test in datasets that come without splits.
        split_seed: decides which examples these are.
        hold_out: names of the datasets that training never sees, for `held_out()`.
        name: of the family, for tables and configs.

    Example:
        >>> inputs, targets = torch.randn(50, 4), torch.arange(50) % 3
        >>> family = supervised(lambda: nn.Linear(4, 3), {"mine": (inputs, targets)}, batch_size=10, steps=20)
        >>> task = family.build(family.sample(torch.Generator().manual_seed(0)))
        >>> {name: tuple(p.shape) for name, p in task.init().items()}
        {'weight': (3, 4), 'bias': (3,)}
    """
    data = read_all(datasets, shares, split_seed)
    for key, splits in data.items():
        check_batch_size(batch_size, len(splits["train"][0]), key)
    kept = [hold_out] if isinstance(hold_out, str) else list(hold_out)
    if unknown := [key for key in kept if key not in data]:
        raise ValueError(f"hold_out must name datasets, got {unknown[0]!r}. There are {', '.join(data)}.")
    if len(kept) == len(data):
        raise ValueError("hold_out names every dataset, so there is none to learn from. Leave one out.")
    return Supervised(name, Recipe(make_model, loss_fn, batch_size, steps), data, kept)


class DatasetFamily(TaskFamily):
    """Tasks that each train a model on one of several named datasets."""

    kind = "dataset"
    """The word for a dataset, also in configs."""
    task: type[SupervisedTask] = SupervisedTask
    """The class of the tasks."""
    dropout = False

    def __init__(self, name: str, recipe: Recipe, names: Sequence[str], *, shared_loss: bool = True) -> None:
        super().__init__(name, recipe.steps, shared_loss=shared_loss)
        self.recipe, self.domains = recipe, tuple(names)

    @abstractmethod
    def splits(self, name: str) -> Mapping[Split, tuple[Rows, Rows]]:
        """The data of a dataset."""

    def sample(self, generator: torch.Generator) -> Config:
        """A dataset, and seeds of the initialisation and of the batches."""
        name = self.domains[int(torch.randint(len(self.domains), (1,), generator=generator))]
        seeds = {"init_seed": draw_seed(generator), "batch_seed": draw_seed(generator)}
        return {"family": self.name, self.kind: name, **seeds}

    def build(self, config: Config) -> SupervisedTask:
        """The task of a config; a dataset of another family is refused, or of the other side."""
        check_config(config, self.name, self.kind, "init_seed", "batch_seed")
        name = config[self.kind]
        if name not in self.domains:
            raise ValueError(
                f"The config asks for the {self.kind} {name!r}; this family has {', '.join(self.domains)}. "
                f"Build it with the family or side that sampled it."
            )
        return self.task(config, self.recipe, self.splits(name), dropout=self.dropout)

    def drawn(self) -> Drawn:
        """One of the datasets, whole, and seeds."""
        which = f"one of the {self.kind}s" if len(self.domains) > 1 else f"the {self.kind}"
        names = ", ".join(self.domains)
        return Drawn(f"{which} {names}", "all its training examples", "drawn anew", "drawn anew", self.domains)


class TwoSides(DatasetFamily):
    """A family with one list of domains to learn from and another that is held out whole."""

    kind = "domain"

    def __init__(self, name: str, recipe: Recipe, sides: tuple[Sequence[str], Sequence[str]]) -> None:
        super().__init__(name, recipe, sides[0])
        self.sides = sides

    def held_out(self) -> Self:
        """The held-out side: the domains that learning never sees."""
        other = copy(self)
        other.domains = tuple(self.sides[1])
        return other


class Supervised(DatasetFamily):
    """See `supervised`."""

    def __init__(self, name: str, recipe: Recipe, data: Mapping[str, Splits], hold_out: Sequence[str] = ()) -> None:
        self.dropout, shared_loss, dtype = inspect_model(recipe, data)
        self.data: dict[str, Splits] = {
            key: {split: (in_dtype(x, dtype), in_dtype(y, dtype)) for split, (x, y) in splits.items()}
            for key, splits in data.items()
        }
        known = [key for key in data if key not in hold_out]
        super().__init__(name, recipe, known, shared_loss=shared_loss)
        self.hold_out = tuple(hold_out) or None

    def splits(self, name: str) -> Splits:
        """A dataset, held in memory."""
        return self.data[name]

    def held_out(self) -> Self:
        """The held-out side: the datasets that learning never sees."""
        if self.hold_out is None:
            raise ValueError(f"{self.name} holds out no dataset. Pass supervised(..., hold_out=[their names]).")
        other = copy(self)
        other.domains = self.hold_out
        return other

    def describe(self) -> dict[str, Any]:
        """The settings, the parameters' shapes, and the size and fingerprint of every dataset of this side."""
        data = {
            key: {"examples": {split: len(inputs) for split, (inputs, _) in splits.items()}, "hash": hash_of_data(splits)}
            for key, splits in ((key, self.data[key]) for key in self.domains)
        }
        shapes = {name: list(p.shape) for name, p in self.example().items()}
        settings = {"batch_size": self.recipe.batch_size, "steps": self.steps, "start": "fresh"}
        kept = {} if self.hold_out is None else {"hold_out": list(self.hold_out)}
        return {"family": self.name, "datasets": data, "shapes": shapes, **settings, **kept}

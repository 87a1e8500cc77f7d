"""Any model on any data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
)
from metamd.tasks.functional import (
    Called,
    LossFn,
    Recipe,
    calibrate,
    in_dtype,
    inspect,
    tracking_norms,
    trained,
    use_batch_statistics,
)
from metamd.tasks.sources import Rows, Shares, Source, Splits, fingerprint, read_all

_CALIBRATED_AT_ONCE = 1000
"""Examples whose statistics a batch norm takes together."""

_EVALUATED_AT_ONCE = 250
"""Examples of which a network's maps stay near the processor: LeNet takes two thirds of the time of 1,000 at once."""


def supervised(
    make_model: Callable[[], nn.Module],
    datasets: Mapping[str, Source | Mapping[Split, Source]],
    loss_fn: LossFn = F.cross_entropy,
    *,
    batch_size: int = 100,
    steps: int = 500,
    shares: Shares = (0.8, 0.1, 0.1),
    split_seed: int = 0,
    name: str = "supervised",
) -> TaskFamily:
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
        name: of the family, for tables and configs.

    Example:
        >>> inputs, targets = torch.randn(50, 4), torch.arange(50) % 3
        >>> family = supervised(lambda: nn.Linear(4, 3), {"mine": (inputs, targets)}, batch_size=10, steps=20)
        >>> task = family.build(family.sample(torch.Generator().manual_seed(0)))
        >>> {name: tuple(p.shape) for name, p in task.init().items()}
        {'weight': (3, 4), 'bias': (3,)}
    """
    recipe = Recipe(make_model, loss_fn, batch_size, steps)
    data = read_all(datasets, shares, split_seed)
    for key, splits in data.items():
        check_batch_size(batch_size, len(splits["train"][0]), key)
    return Supervised(name, recipe, data)


def check_batch_size(batch_size: int, examples: int, name: str) -> None:
    """Refuse a batch that is larger than the training split."""
    if not 1 <= batch_size <= examples:
        raise ValueError(
            f"batch_size must lie between 1 and the {examples} training examples of {name!r}, got {batch_size}. "
            f"Pass batch_size={min(examples, 32)}, say."
        )


class DatasetFamily(TaskFamily):
    """Tasks that each train a model on one of several named datasets, from an initialisation of their own.

    `splits` gives the data of a dataset by its name.
    """

    kind = "dataset"
    """What a dataset is called, in configs too."""
    dropout = False

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        names: Sequence[str],
        splits: Callable[[str], Mapping[Split, tuple[Rows, Rows]]],
        *,
        shared_loss: bool,
    ) -> None:
        super().__init__(name, recipe.steps, shared_loss=shared_loss)
        self.recipe, self.domains, self.splits = recipe, tuple(names), splits

    def sample(self, generator: torch.Generator) -> Config:
        """A dataset, and seeds of the initialisation and of the batches."""
        name = self.domains[int(torch.randint(len(self.domains), (1,), generator=generator))]
        seeds = {"init_seed": draw_seed(generator), "batch_seed": draw_seed(generator)}
        return {"family": self.name, self.kind: name, **seeds}

    def build(self, config: Config) -> "SupervisedTask":
        """The task of a config; a dataset of another family is refused, or of the other side."""
        check_config(config, self.name, self.kind, "init_seed", "batch_seed")
        name = config[self.kind]
        if name not in self.domains:
            raise ValueError(
                f"The config asks for the {self.kind} {name!r}; this family has {', '.join(self.domains)}. "
                f"Build it with the family or side that sampled it."
            )
        return SupervisedTask(config, self.recipe, self.splits(name), dropout=self.dropout)

    def drawn(self) -> Drawn:
        """One of the datasets, whole, and seeds."""
        which = f"one of the {self.kind}s" if len(self.domains) > 1 else f"the {self.kind}"
        names = ", ".join(self.domains)
        return Drawn(f"{which} {names}", "all its training examples", "drawn anew", "drawn anew", self.domains)


class Supervised(DatasetFamily):
    """See `supervised`."""

    def __init__(self, name: str, recipe: Recipe, data: Mapping[str, Splits]) -> None:
        self.dropout, shared_loss, dtype = inspect(recipe, data)
        self.data: dict[str, Splits] = {
            key: {split: (in_dtype(x, dtype), in_dtype(y, dtype)) for split, (x, y) in splits.items()}
            for key, splits in data.items()
        }
        super().__init__(name, recipe, list(data), self.data.__getitem__, shared_loss=shared_loss)

    def describe(self) -> dict[str, Any]:
        """The settings, the parameters' shapes, and the size and fingerprint of every dataset."""
        data = {
            key: {"examples": {split: len(inputs) for split, (inputs, _) in splits.items()}, "hash": fingerprint(splits)}
            for key, splits in self.data.items()
        }
        shapes = {name: list(p.shape) for name, p in self.example().items()}
        settings = {"batch_size": self.recipe.batch_size, "steps": self.steps, "start": "fresh"}
        return {"family": self.name, "datasets": data, "shapes": shapes, **settings}


class SupervisedTask(Task):
    """One training of one model; a batch is {inputs, targets}, and {seed} where the model has dropout."""

    def __init__(
        self, config: Config, recipe: Recipe, splits: Mapping[Split, tuple[Rows, Rows]], *, dropout: bool = False
    ) -> None:
        super().__init__(config, recipe.steps)
        check_batch_size(recipe.batch_size, len(splits["train"][1]), domain_of(config))
        self.recipe, self.splits, self.dropout = recipe, splits, dropout
        self.model = use_batch_statistics(recipe.make(config["init_seed"]))
        self._called = Called(self.model)
        self.device = next(self.model.parameters()).device
        self.shuffle = Shuffle(len(splits["train"][0]), recipe.batch_size, derive_seed(config["batch_seed"], "order"))

    def init(self) -> dict[str, Tensor]:
        """What `make_model` draws under the config's seed."""
        return {name: p.detach().clone() for name, p in trained(self.model).items()}

    def batch(self, step: int) -> dict[str, Tensor]:
        """Some of the training examples."""
        rows = self.shuffle.indices(step)
        batch = {k: self._rows(part, rows) for k, part in zip(("inputs", "targets"), self.splits["train"], strict=True)}
        if self.dropout:
            batch["seed"] = torch.tensor(derive_seed(self.config["batch_seed"], "dropout", step), dtype=torch.int32)
        return batch

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of the model with these parameters."""
        return self.recipe.loss(self._called, params, batch)

    @torch.no_grad()
    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """Loss and accuracy in evaluation mode; accuracy where targets are classes and outputs have a number for each."""
        if split not in self.splits:
            raise ValueError(f"This task has the splits {', '.join(self.splits)}, got {split!r}. Give the dataset one.")
        inputs, targets = self.splits[split]
        misfits = sorted(set(params) ^ set(trained(self.model)))
        if misfits:
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
        called = Called(use_batch_statistics(model).eval())
        parts = [[self._rows(part, chosen[i]) for part in self.splits["train"]] for i in chunks(len(chosen), at_once)]

        @torch.no_grad()
        def loss(params: Mapping[str, Tensor]) -> float:
            found = [self.recipe.loss_fn(called(params, inputs), targets) * len(targets) for inputs, targets in parts]
            return float(torch.stack(found).sum()) / len(chosen)

        return loss

    def _rows(self, part: Rows, rows: Tensor) -> Tensor:
        rows = rows.to(part.device)
        # index_select copies whole rows; indexing goes by elements, and takes five times as long
        return (part.index_select(0, rows) if isinstance(part, Tensor) else part[rows]).to(self.device)


def chunks(examples: int, size: int) -> tuple[Tensor, ...]:
    """All examples in order, in parts of nearly equal length: a last part of one would have no variance."""
    return torch.arange(examples).tensor_split(-(-examples // size))

"""Many small models of one shape, each on data of its own, trained side by side: `fleet`."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metamd.files.learned import LearnedOptimiser, load
from metamd.files.progress import Progress
from metamd.inner.run import all_finite, train
from metamd.inner.together import Stacked, StackedOptimiser, StackedSteps
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Split, derive_seed
from metamd.tasks.sources import Source, Splits, kind_of, read_all
from metamd.tasks.supervised import LossFn, Recipe, SupervisedTask, inspect_model

SIDE_BY_SIDE = 256
"""Models that are trained together: more of them gain nothing, and their results come later."""

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad)
"""Optimisers of torch that move every number by itself, so that stacked models know nothing of each other."""

Stepped = StackedSteps | StackedOptimiser


@dataclass(frozen=True)
class Fitted:
    """One model of a fleet.

    Args:
        name: of its data.
        params: what was trained, by name, averages included; `model.load_state_dict(params, strict=False)` takes them. Empty
            for a model that was set aside.
        losses: of its batches, before each step.
        failed: why it was set aside, in a sentence; empty if it was not.
    """

    name: str
    params: Mapping[str, Tensor] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    failed: str = ""


def fleet(
    make_model: Callable[[], nn.Module],
    datasets: Mapping[str, Source | Mapping[Split, Source]],
    learned: LearnedOptimiser | str | PathLike[str] | Callable[..., torch.optim.Optimizer],
    *,
    steps: int,
    batch_size: int = 32,
    loss_fn: LossFn = F.cross_entropy,
    seed: int = 0,
) -> Iterator[Fitted]:
    """Train a model on each of many datasets, side by side, each as it would train alone.

    All models have one shape. A step of 256 of them is a step of one stacked model: every tensor has one more dimension, and
    the products of all models are one call. Data that are not finite, have another shape or too few examples are set aside
    and named, and so are models that diverge. The others go on.

    Args:
        make_model: makes a new model at every call, as for `metamd.tasks.supervised`.
        datasets: by name, as for `metamd.tasks.supervised`; all examples are trained on, or those of the split "train".
        learned: a learned file, its path or its name, used as it recommends; a start that it carries is where models begin.
            Or an optimiser of torch that moves every number by itself, `partial(torch.optim.Adam, lr=1e-3)`.
        steps: T, of each model.
        batch_size: examples per step of each model.
        loss_fn: of (outputs, targets), averaged over the batch.
        seed: of the initialisations and of the orders of the batches.

    Returns:
        An iterator of `Fitted`, one for each dataset: first those that could not begin, then as they are finished.

    Example:
        >>> from functools import partial
        >>> series = {str(i): (torch.randn(40, 3), torch.randn(40, 1)) for i in range(5)}
        >>> adam = partial(torch.optim.Adam, lr=0.01)
        >>> fits = fleet(lambda: nn.Linear(3, 1), series, adam, steps=20, loss_fn=F.mse_loss)
        >>> [(fit.name, len(fit.losses)) for fit in fits][:2]
        [('0', 20), ('1', 20)]
    """
    if not isinstance(steps, int) or steps < 1 or batch_size < 1:
        raise ValueError(f"steps and batch_size must be whole numbers of at least 1, got {steps!r} and {batch_size!r}.")
    if not isinstance(datasets, Mapping) or not datasets:
        raise ValueError("datasets must map names to data, at least one. Pass datasets={'mine': (inputs, targets)}.")
    if isinstance(learned, str | PathLike):
        learned = load(learned)
    if not isinstance(learned, LearnedOptimiser):
        _check_elementwise(learned)
    data, refused = _readable(datasets, batch_size)
    recipe = Recipe(make_model, loss_fn, batch_size, steps)
    dropout = False
    if data:
        name, splits = next(iter(data.items()))
        dropout, alike, _ = inspect_model(recipe, {name: splits})
        if not alike:
            raise ValueError(
                "models of a fleet may differ in the parameters that are trained alone, but make_model draws frozen "
                "parameters or buffers too. Make these the same at every call."
            )
    build = partial(fleet_task, recipe, steps=steps, seed=seed, dropout=dropout)
    if data:
        _rule(learned, Stacked([build(*next(iter(data.items())))]), steps)  # what does not fit the model is refused here
    return _fits(learned, data, refused, build, steps)


def fleet_task(recipe: Recipe, name: str, splits: Splits, *, steps: int, seed: int, dropout: bool = False) -> SupervisedTask:
    """The task that one model of a fleet is trained on."""
    seeds = {what: derive_seed(seed, what, name) for what in ("init_seed", "batch_seed")}
    return SupervisedTask({"family": "fleet", "dataset": name, **seeds}, recipe, splits, dropout=dropout)


def _fits(
    learned: Any, data: dict[str, Splits], refused: dict[str, str], build: Callable[..., SupervisedTask], steps: int
) -> Iterator[Fitted]:
    for name, why in refused.items():
        yield Fitted(name, failed=why)
    names = list(data)
    chunks = [names[i : i + SIDE_BY_SIDE] for i in range(0, len(names), SIDE_BY_SIDE)]
    with Progress(f"training {len(names)} models", steps * len(names)) as progress:
        for chunk in chunks:
            stacked = Stacked([build(name, data.pop(name)) for name in chunk])
            rule = _rule(learned, stacked, steps)
            before, count = progress.done, len(chunk)
            train(stacked, rule, steps, until=None, watch=lambda *_, n=count: progress.advance(count=n))
            progress.advance(count=before + steps * count - progress.done)  # some may have ended sooner
            for i, name in enumerate(chunk):
                yield _fitted(name, rule, i, steps)


def _rule(learned: Any, stacked: Stacked, steps: int) -> Stepped:
    """How stacked tasks are moved."""
    if not isinstance(learned, LearnedOptimiser):
        return StackedOptimiser(stacked, learned, steps)
    potential = learned.potential.bind(stacked.tasks[0].init())
    if not isinstance(potential, MaxDiagonal):
        raise ValueError(f"a fleet needs learned metrics, got {type(potential).__name__}. Pass a file of metamd.meta_train.")
    usage = learned.usage
    online = learned.online if usage.metric == "online" else None
    return StackedSteps(stacked, potential, [usage] * len(stacked.tasks), steps, online, start=learned.start)


def _fitted(name: str, rule: Stepped, i: int, steps: int) -> Fitted:
    taken, why = int(rule.watched.taken[i]), rule.watched.why[i]
    end, losses = rule.end(i), tuple(rule.watched.losses[:taken, i].tolist())
    if not why and (taken < steps or not all_finite(end)):
        why = f"The parameters are not finite after {taken} steps. Lower lr or start from larger metrics."
    return Fitted(name, {} if why else end, losses, why)


def _readable(
    datasets: Mapping[str, Source | Mapping[Split, Source]], batch_size: int
) -> tuple[dict[str, Splits], dict[str, str]]:
    """The datasets that can be trained on together, and why the others cannot, in sentences."""
    data, refused = dict[str, Splits](), dict[str, str]()
    for name, source in datasets.items():
        given: Mapping[Split, Source] = source if isinstance(source, Mapping) else {"train": source}
        try:
            splits = read_all({name: given}, (1.0, 0.0, 0.0), 0)[name]
        except (ValueError, TypeError, OSError) as error:
            refused[name] = str(error)
            continue
        if len(splits["train"][0]) < batch_size:
            refused[name] = f"{name!r} has {len(splits['train'][0])} examples, fewer than a batch of {batch_size}."
        else:
            data[name] = splits
    kinds = {name: kind_of(splits["train"]) for name, splits in data.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else ""
    for name, kind in kinds.items():
        if kind != usual:
            refused[name] = f"{name!r} has {kind}, and most have {usual}."
            del data[name]
    return data, refused


def _check_elementwise(make: object) -> None:
    made = make.func if isinstance(make, partial) else make
    if made not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise TypeError(
            f"learned must be a learned file, its path or its name, or one of torch's {known}, as in "
            f"partial(torch.optim.Adam, lr=1e-3); got {getattr(made, '__name__', made)!r}."
        )

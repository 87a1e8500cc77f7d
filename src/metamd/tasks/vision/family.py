"""Families of image domains with a training side and a held-out side."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from metamd.tasks.base import Config, Drawn, TaskFamily, check_config, draw_seed
from metamd.tasks.models import MODELS
from metamd.tasks.recipe import Recipe
from metamd.tasks.shared_start import SharedStart
from metamd.tasks.supervised import SupervisedTask
from metamd.tasks.vision.domains import Collection


@dataclass(frozen=True)
class Training:
    """How the tasks of an image family train: cross-entropy of a model of the paper.

    Args:
        model: a name in `metamd.models.MODELS`.
        batch_size: images per step.
        steps: T.
        options: further arguments of the model.
    """

    model: str
    batch_size: int
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, shape: tuple[int, int, int], classes: int) -> Recipe:
        """The recipe for images of one shape.

        Args:
            shape: channels, height and width.
            classes: how many.
        """
        recipe = Recipe(_maker(self.model, shape, classes, self.options), F.cross_entropy, self.batch_size, self.steps)
        recipe.make(0)  # refuses options that do not fit, before any data is read
        return recipe

    def describe(self) -> dict[str, Any]:
        """The settings."""
        return {"model": self.model, **self.options, "batch_size": self.batch_size, "steps": self.steps}


class ImageFamily(TaskFamily):
    """Tasks that each train a model on one domain of a collection, from an initialisation of their own.

    The training side samples every domain but the held-out one, and refuses to build it; `held_out()` is the other side.

    Args:
        name: of the family.
        collection: the domains.
        training: how a task trains.
        how: what else `describe` says.
        hold_out: the domain kept from training, or None.
        held: whether this is the held-out side.
    """

    def __init__(
        self,
        name: str,
        collection: Collection,
        training: Training,
        how: Mapping[str, Any],
        *,
        hold_out: str | None,
        held: bool = False,
    ) -> None:
        # The batch has all that tells tasks apart, and the models have no state of their own.
        super().__init__(name, training.steps, shared_loss=True)
        everything = tuple(collection.preparations)
        if hold_out is not None and hold_out not in everything:
            absent = how.get("absent", {}).get(hold_out)
            reason = f" {hold_out} is left out: {absent}." if absent else ""
            raise ValueError(f"hold_out must be one of {', '.join(everything)}, got {hold_out!r}.{reason}")
        if hold_out is not None and len(everything) < 2:
            raise ValueError(f"Holding out {hold_out!r} leaves no domain to train on. Name more domains.")
        self.collection, self.training, self.how, self.hold_out, self.held = collection, training, how, hold_out, held
        self.domains = (hold_out,) if held and hold_out else tuple(d for d in everything if d != hold_out)
        self.recipe = training.recipe(collection.shape, 10)

    def held_out(self, steps: int | None = None) -> "ImageFamily":
        """The held-out side: tasks on the held-out domain, with the same images in memory.

        Args:
            steps: of its tasks, if they are not as long as those of the training side.
        """
        if self.hold_out is None:
            raise ValueError(f"{self.name} was made with hold_out=None, so there is no held-out side. Name a domain.")
        return self._side(self.hold_out, held=True, steps=steps)

    def sample(self, generator: torch.Generator) -> Config:
        """A domain of this side, and seeds of the initialisation and of the batches."""
        domain = self.domains[int(torch.randint(len(self.domains), (1,), generator=generator))]
        seeds = {"init_seed": draw_seed(generator), "batch_seed": draw_seed(generator)}
        return {"family": self.name, "domain": domain, **seeds}

    def build(self, config: Config) -> SupervisedTask:
        """The task of a config; one of the other side is refused."""
        check_config(config, self.name, "domain", "init_seed", "batch_seed")
        if config["domain"] not in self.domains:
            raise ValueError(
                f"This side of {self.name} has the domains {', '.join(self.domains)}, and the config asks for "
                f"{config['domain']!r}. Build it with the side that sampled it."
            )
        domain = self.collection.domain(config["domain"])
        check_batch_size(self.training.batch_size, len(domain.rows["train"]), config["domain"])
        return SupervisedTask(config, self.recipe, domain)

    def describe(self) -> dict[str, Any]:
        """The settings, and for every dataset how much of it is there and whether it is official."""
        sides = {"domains": list(self.domains), "hold_out": self.hold_out}
        return {"family": self.name, **sides, **self.training.describe(), **self.how, **self.collection.describe()}

    def drawn(self) -> Drawn:
        """A domain of this side, with all its images, and seeds."""
        which = f"{'one of the domains' if len(self.domains) > 1 else 'the domain'} {', '.join(self.domains)}"
        return Drawn(which, "all training images of the domain", "drawn anew", "drawn anew", self.domains)

    def _side(self, hold_out: str, held: bool, steps: int | None = None) -> "ImageFamily":
        training = self.training if steps is None else replace(self.training, steps=steps)
        return ImageFamily(self.name, self.collection, training, self.how, hold_out=hold_out, held=held)


Domains = TypeVar("Domains", ImageFamily, SharedStart)


def leave_one_out(family: Domains) -> Iterator[Domains]:
    """The family with each of its domains held out in turn; all of them share the images in memory, and the start.

    Args:
        family: of image domains, whatever it holds out itself.
    """
    inner = family.family if isinstance(family, SharedStart) else family
    if not isinstance(inner, ImageFamily):
        raise TypeError(f"leave_one_out needs a family of image domains, got {inner.name!r}.")
    for domain in inner.collection.preparations:
        side = inner._side(domain, held=False)
        yield SharedStart(side, family._start) if isinstance(family, SharedStart) else side


def check_batch_size(batch_size: int, images: int, name: str) -> None:
    """Refuse a batch that is larger than the training split."""
    if not 1 <= batch_size <= images:
        raise ValueError(
            f"batch_size must lie between 1 and the {images} training images of {name!r}, got {batch_size}. "
            f"Pass batch_size={min(images, 32)}, say."
        )


def _maker(model: str, shape: tuple[int, int, int], classes: int, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}.")
    if model == "lenet" and shape[1:] != (28, 28):
        raise ValueError("LeNet takes images of 28x28, and these are 32x32. Pass model='resnet18'.")
    first = math.prod(shape) if model in ("linear", "mlp") else shape[0]
    return partial(MODELS[model], first, classes, **options)

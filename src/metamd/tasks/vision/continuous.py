"""Rotated MNIST at any angle with any few of its classes: as many tasks as one likes."""

import math
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from metamd.tasks.base import Config, Drawn, Split, TaskFamily, check_config, derive_seed, draw_seed
from metamd.tasks.supervised import SupervisedTask
from metamd.tasks.vision.domains import Domain, Source, choose
from metamd.tasks.vision.families import ROTATION
from metamd.tasks.vision.family import Training, check_batch_size
from metamd.tasks.vision.pixels import rotate

Side = Literal["training", "held-out"]


def rotated_mnist_continuous(
    *,
    angles: tuple[float, float] = (0.0, 360.0),
    classes: int = 5,
    model: str = "mlp",
    images: int | None = 1000,
    batch_size: int = 100,
    steps: int = 500,
) -> "RotatedContinuous":
    """MNIST at an angle drawn uniformly, with a random few of the ten digits and some of their images.

    With five classes there are 252 sets of them, at any angle each. The images are divided in two halves by a fixed seed:
    training tasks draw from one, tasks of `held_out()` from the other, so a held-out task has no image that any training
    task had. Within a side tasks are independent draws of one distribution and may share images.

    Args:
        angles: the least and the greatest, in degrees, counter-clockwise.
        classes: how many digits a task tells apart.
        model: `"linear"`, `"mlp"`, `"lenet"` or `"resnet18"`.
        images: training images of a task, balanced over its digits, where there are so many; None for all.
        batch_size: images per step.
        steps: T.
    """
    if not (all(map(math.isfinite, angles)) and angles[0] <= angles[1]):
        raise ValueError(f"angles must be the least and the greatest angle, got {angles}. Pass angles=(0, 90), say.")
    if not 2 <= classes <= 10:
        raise ValueError(f"classes must lie between 2 and the 10 digits, got {classes}. Pass classes=5, say.")
    if images is not None and images < 1:
        raise ValueError(f"images must be at least 1, got {images}. Leave it out for all of them.")
    return RotatedContinuous(angles, classes, images, Training(model, batch_size, steps), Halves(), "training")


class Halves:
    """MNIST, loaded when first asked for, and its two halves, which no image is in both of."""

    @cached_property
    def source(self) -> Source:
        """All of it."""
        return Source.load("mnist")

    @cached_property
    def rows(self) -> dict[Side, dict[str, Tensor]]:
        """The rows of each half, by official split."""
        parts = {}
        for split, labels in self.source.labels.items():
            seed = derive_seed("halves", split)
            parts[split] = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tensor_split(2)
        return {"training": {s: p[0] for s, p in parts.items()}, "held-out": {s: p[1] for s, p in parts.items()}}


class RotatedContinuous(TaskFamily):
    """See `rotated_mnist_continuous`.

    Args:
        angles: the least and the greatest.
        classes: how many digits a task has.
        images: training images of a task, or None for all.
        training: how a task trains.
        halves: the images.
        side: which half this family's tasks draw from.
    """

    def __init__(
        self,
        angles: tuple[float, float],
        classes: int,
        images: int | None,
        training: Training,
        halves: Halves,
        side: Side,
    ) -> None:
        super().__init__("rotated-mnist-continuous", training.steps, shared_loss=True)
        self.angles, self.classes, self.images, self.training = angles, classes, images, training
        self.halves, self.side = halves, side
        self.recipe = training.recipe((1, 28, 28), classes)

    def held_out(self) -> "RotatedContinuous":
        """The held-out side: the same distribution on the half of the images that training tasks never draw from."""
        return RotatedContinuous(self.angles, self.classes, self.images, self.training, self.halves, "held-out")

    def sample(self, generator: torch.Generator) -> Config:
        """An angle, some digits, and seeds of the images, of the initialisation and of the batches."""
        low, high = self.angles
        angle = low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))
        digits = torch.randperm(10, generator=generator)[: self.classes].sort().values.tolist()
        seeds = {key: draw_seed(generator) for key in ("data_seed", "init_seed", "batch_seed")}
        return {"family": self.name, "side": self.side, "angle": angle, "classes": digits, **seeds}

    def build(self, config: Config) -> SupervisedTask:
        """The task of a config; one of the other side is refused."""
        check_config(config, self.name, "side", "angle", "classes", "data_seed", "init_seed", "batch_seed")
        if config["side"] != self.side or len(config["classes"]) != self.classes:
            raise ValueError(
                f"This family has {self.side} tasks with {self.classes} classes, and the config is of a {config['side']} "
                f"task with {len(config['classes'])}. Build it with the side that sampled it."
            )
        rows = self._rows(config)
        check_batch_size(self.training.batch_size, len(rows["train"]), self.name)
        prepare = partial(rotate, angle=config["angle"])
        domain = Domain(self.halves.source, rows, prepare, 1, classes=config["classes"])
        return SupervisedTask(config, self.recipe, domain)

    def describe(self) -> dict[str, Any]:
        """The settings, and how much of MNIST is there and whether it is official."""
        task = {"angles": list(self.angles), "classes": self.classes, "images": self.images}
        how = {
            "preparation": ROTATION,
            "held_out": "the same distribution on the other half of MNIST's training and test images",
            "normalisation": "mean 0 and deviation 1, from the task's training images",
        }
        datasets = {"mnist": self.halves.source.origin()}
        return {"family": self.name, "side": self.side, **task, **self.training.describe(), **how, "datasets": datasets}

    def drawn(self) -> Drawn:
        """An angle, digits and images of this half, and seeds."""
        domain = f"an angle and {self.classes} digits of MNIST drawn anew"
        return Drawn(domain, f"images drawn anew from the {self.side} half", "drawn anew", "drawn anew")

    def _rows(self, config: Config) -> dict[Split, Tensor]:
        wanted = torch.tensor(config["classes"])
        labels = self.halves.source.labels
        mine = {s: rows[torch.isin(labels[s][rows], wanted)] for s, rows in self.halves.rows[self.side].items()}
        train, validation = choose(labels["train"][mine["train"]], self.images, config["data_seed"])
        return {"train": mine["train"][train], "validation": mine["train"][validation], "test": mine["test"]}

"""Families of image classification: rotated digits, diverse digits, and colour images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metamd import data
from metamd.models import MODELS, Norm
from metamd.tasks.base import Config, Task, TaskFamily, check_config, draw_seed
from metamd.tasks.domains import Collection, Recipe
from metamd.tasks.pixels import enlarge, rotate

ANGLES = (0, 15, 30, 45, 60, 75)
DIGITS = ("mnist", "qmnist", "kmnist", "fashionmnist", "usps", "svhn")
ABSENT = "its images are not at hand; `metamd data fetch qmnist` adds it, and no other dataset stands in for it"


def rotated_mnist(
    *,
    angles: Sequence[float] = ANGLES,
    hold_out: float | None = None,
    model: str = "mlp",
    images: int | None = 1000,
    batch_size: int = 100,
    steps: int = 500,
) -> "ImageFamily":
    """MNIST turned by a few angles, each of which is a domain.

    All angles turn the same chosen images, as is usual for this benchmark: the held-out angle is new to whoever learns
    from the others, its digits are not. Test images are MNIST's own test images, which no training split ever has.

    Args:
        angles: in degrees, counter-clockwise; every one is a domain.
        hold_out: the angle that training never sees, for `held_out()`; None holds out none.
        model: `"linear"`, `"mlp"`, `"lenet"` or `"resnet18"`.
        images: training images per domain, balanced over the digits; None for all.
        batch_size: images per step.
        steps: T.
    """
    recipes = {_angle(a): Recipe("mnist", partial(rotate, angle=a)) for a in angles}
    collection = Collection(recipes, (1, 28, 28), images=images, seed=0)
    settings = {"preparation": "rotated counter-clockwise, bilinear (torch grid_sample), black beyond the border"}
    held = None if hold_out is None else _angle(hold_out)
    return ImageFamily("rotated-mnist", collection, held, _model(model, collection.shape), batch_size, steps, settings)


def diverse_digits(
    *,
    hold_out: str | None = "svhn",
    model: str = "lenet",
    images: int | None = None,
    batch_size: int = 100,
    steps: int = 500,
) -> "ImageFamily":
    """MNIST, QMNIST, KMNIST, FashionMNIST, USPS and SVHN at 28x28 grey; each dataset is a domain.

    QMNIST is left out where its images are not at hand, and `describe()` says so.

    Args:
        hold_out: the dataset that training never sees, for `held_out()`; None holds out none.
        model: `"linear"`, `"mlp"`, `"lenet"` or `"resnet18"`.
        images: training images per domain, balanced over the classes, where there are so many; None for all.
        batch_size: images per step.
        steps: T.
    """
    here, absent = _digits()
    collection = Collection({n: Recipe(n, _same) for n in here}, (1, 28, 28), images=images, seed=0)
    settings = {"preparation": "28x28 grey, as metamd.data gives it", "absent": absent}
    return ImageFamily("diverse-digits", collection, hold_out, _model(model, collection.shape), batch_size, steps, settings)


def images(
    *,
    hold_out: str | None = "cifar10",
    model: str = "resnet18",
    width: int = 64,
    norm: Norm = "batch",
    images: int | None = None,
    batch_size: int = 100,
    steps: int = 500,
) -> "ImageFamily":
    """CIFAR-10, STL-10 and the diverse digits at 32x32 with three channels; each dataset is a domain.

    Digits are enlarged from 28x28 to 32x32 (bilinear, between pixel centres) and their grey is repeated in the three
    channels.

    Args:
        hold_out: the dataset that training never sees, for `held_out()`; None holds out none.
        model: `"resnet18"`, `"linear"` or `"mlp"`.
        width: channels of ResNet18's first stage.
        norm: ResNet18's normalisation, `"batch"` or `"group"`.
        images: training images per domain, balanced over the classes, where there are so many; None for all.
        batch_size: images per step.
        steps: T.
    """
    digits, absent = _digits()
    recipes = {name: Recipe(name, _same) for name in ("cifar10", "stl10")}
    recipes |= {name: Recipe(name, partial(enlarge, side=32)) for name in digits}
    collection = Collection(recipes, (3, 32, 32), images=images, seed=0)
    options = {"width": width, "norm": norm} if model == "resnet18" else {}
    settings = {
        "preparation": "32x32; digits enlarged from 28x28, bilinear (torch interpolate), grey repeated in three channels",
        "absent": absent,
    }
    made = _model(model, collection.shape, **options)
    return ImageFamily("images", collection, hold_out, made, batch_size, steps, settings)

"""Families of image classification: rotated digits, diverse digits, and colour images."""

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from metamd import data
from metamd.tasks.models import Norm
from metamd.tasks.vision.domains import Collection, Preparation
from metamd.tasks.vision.family import ImageFamily, Training
from metamd.tasks.vision.pixels import enlarge, rotate

ANGLES = (0, 15, 30, 45, 60, 75)
DIGITS = ("mnist", "qmnist", "kmnist", "fashionmnist", "usps", "svhn")
ROTATION = "rotated counter-clockwise about the centre, bilinear (torch grid_sample), black beyond the border"
ABSENT = "its images are not at hand; `metamd data fetch qmnist` adds it, and no other dataset stands in for it"


def rotated_mnist(
    *,
    angles: Sequence[float] = ANGLES,
    hold_out: float | None = None,
    model: str = "mlp",
    width: int | None = None,
    images: int | None = 1000,
    batch_size: int = 100,
    steps: int = 500,
) -> ImageFamily:
    """MNIST turned by a few angles, each of which is a domain.

    All angles turn the same chosen images, as is usual for this benchmark: the held-out angle is new to whoever learns
    from the others, its digits are not. Test images are MNIST's own test images, which no training split ever has.

    Args:
        angles: in degrees, counter-clockwise; every one is a domain.
        hold_out: the angle that training never sees, for `held_out()`; None holds out none.
        model: `"linear"`, `"mlp"`, `"lenet"` or `"resnet18"`.
        width: of the hidden layers of an MLP, 128 if not given, or of ResNet18.
        images: training images per domain, balanced over the digits; None for all.
        batch_size: images per step.
        steps: T.
    """
    preparations = {_angle(a): Preparation("mnist", partial(rotate, angle=a)) for a in angles}
    collection = Collection(preparations, (1, 28, 28), images=images, seed=0)
    how = {"preparation": ROTATION}
    held = None if hold_out is None else _angle(hold_out)
    if width is not None and model not in ("mlp", "resnet18"):
        raise ValueError(f"width is for the models 'mlp' and 'resnet18', and {model!r} has none. Leave it out.")
    training = Training(model, batch_size, steps, {} if width is None else {"width": width})
    return ImageFamily("rotated-mnist", collection, training, how, hold_out=held)


def diverse_digits(
    *,
    hold_out: str | None = "svhn",
    model: str = "lenet",
    images: int | None = None,
    batch_size: int = 100,
    steps: int = 500,
) -> ImageFamily:
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
    collection = Collection({n: Preparation(n, _same) for n in here}, (1, 28, 28), images=images, seed=0)
    how = {"preparation": "28x28 grey, as metamd.data gives it", "absent": absent}
    return ImageFamily("diverse-digits", collection, Training(model, batch_size, steps), how, hold_out=hold_out)


def images(
    *,
    hold_out: str | None = "cifar10",
    model: str = "resnet18",
    width: int = 64,
    norm: Norm = "batch",
    images: int | None = None,
    batch_size: int = 100,
    steps: int = 500,
) -> ImageFamily:
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
    preparations = {name: Preparation(name, _same) for name in ("cifar10", "stl10")}
    preparations |= {name: Preparation(name, partial(enlarge, side=32)) for name in digits}
    collection = Collection(preparations, (3, 32, 32), images=images, seed=0)
    options = {"width": width, "norm": norm} if model == "resnet18" else {}
    how = {
        "preparation": "32x32; digits enlarged from 28x28, bilinear (torch interpolate), grey repeated in three channels",
        "absent": absent,
    }
    return ImageFamily("images", collection, Training(model, batch_size, steps, options), how, hold_out=hold_out)


def _angle(angle: float) -> str:
    if not math.isfinite(angle):
        raise ValueError(f"An angle must be a finite number of degrees, got {angle}.")
    return f"{angle:.12g}"


def _same(pixels: Tensor) -> Tensor:
    return pixels


def _digits() -> tuple[list[str], dict[str, str]]:
    """The digit datasets to use, and why another one is not among them."""
    absent = {} if "qmnist" in data.available() else {"qmnist": ABSENT}
    return [name for name in DIGITS if name not in absent], absent

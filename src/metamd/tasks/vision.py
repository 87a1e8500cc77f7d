"""Families of image classification: rotated digits, diverse digits, colour images, and models adapted to other angles.

A domain is a dataset in memory as uint8, with disjoint splits, rotated or enlarged, and normalised when it is read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from metamd import data
from metamd.data.loading import load_arrays
from metamd.tasks.base import Config, Drawn, Shuffle, Split, TaskFamily, check_config, derive_seed, draw_seed
from metamd.tasks.models import MODELS
from metamd.tasks.supervised import DatasetFamily, Recipe, SupervisedTask
from metamd.tasks.wrapped import SharedStart

ANGLES = (0, 15, 30, 45, 60, 75)
ADAPTED = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90)
DIGIT_DATASETS = ("mnist", "qmnist", "kmnist", "fashionmnist", "usps", "svhn")
ROTATION = "rotated counter-clockwise about the centre, bilinear (torch grid_sample), black beyond the border"
ABSENT = "its images are not at hand; `metamd data fetch qmnist` adds it, and no other dataset stands in for it"

VALIDATION_SHARE = 10
"""One in so many images of the official training split is for validation."""

SPLIT_SEED = 0
"""Chooses the validation images of every domain."""

BLOCK = 4096
"""Images turned or enlarged at once: bounds the memory of the float copy."""


# domains


def rotate(images: Tensor, angle: float) -> Tensor:
    """Rotate uint8 images counter-clockwise about their centre: bilinear, black beyond the border, rounded once."""
    return _by_blocks(images, images.shape[-1], partial(turned, angle=angle))


def turned(images: Tensor, angle: float) -> Tensor:
    """The same rotation of images (n, channels, rows, columns) of real numbers, without rounding."""
    radians = math.radians(angle)
    cosine, sine = math.cos(radians), math.sin(radians)
    # Maps an output position to the input position it is read from: the inverse rotation, y pointing down.
    inverse = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    # On pixel centres, so that 0 degrees is the identity and 90 degrees is torch.rot90.
    grid = F.affine_grid(inverse[None], [1, *images.shape[1:]], align_corners=False)
    return F.grid_sample(images, grid.expand(len(images), -1, -1, -1), mode="bilinear", align_corners=False)


def enlarge(images: Tensor, side: int) -> Tensor:
    """Enlarge uint8 images to side x side: torch's bilinear `interpolate` between pixel centres, rounded once."""
    return _by_blocks(images, side, lambda x: F.interpolate(x, size=(side, side), mode="bilinear", align_corners=False))


def _by_blocks(images: Tensor, side: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    made = images.new_empty((*images.shape[:2], side, side))
    for start in range(0, len(images), BLOCK):
        made[start : start + BLOCK] = change(images[start : start + BLOCK].float()).round_().to(torch.uint8)
    return made


def moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel of uint8 images, (channels, 1, 1)."""
    count = images.numel() // images.shape[1]
    # Sums of a histogram are exact, need no float copy, and do not depend on the order of the images.
    values = torch.arange(256, dtype=torch.float64)
    tables = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    mean = tables @ values / count
    deviation = (tables @ values**2 / count - mean**2).clamp_min(0).sqrt()
    if not bool((deviation > 0).all()):
        raise ValueError("Training images must not all be one flat colour, got a deviation of 0. Check the data.")
    return mean.float()[:, None, None], deviation.float()[:, None, None]


@dataclass(frozen=True)
class NormalisedImages:
    """Images kept as uint8, a quarter of the memory, and read a few at a time, normalised by the moments of a channel."""

    pixels: Tensor
    moments: tuple[Tensor, Tensor]
    channels: int

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: Tensor) -> Tensor:
        mean, deviation = self.moments
        normal = self.pixels.index_select(0, rows).float().sub_(mean).div_(deviation)
        # A grey channel is repeated for a model that takes more.
        return normal.expand(-1, self.channels, -1, -1) if normal.shape[1] != self.channels else normal


@dataclass(frozen=True)
class ImageSource:
    """A dataset as loaded, by official split: uint8 images (number, channels, height, width), int64 labels."""

    images: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    origin: Mapping[str, Mapping[str, Any]]  # what a table must say of a split; no path, which differs by machine

    @classmethod
    def load(cls, name: str) -> "ImageSource":
        """Both official splits of a dataset of `metamd.data`."""
        images, labels, origin = {}, {}, {}
        for split in ("train", "test"):
            (pixels, classes), came = load_arrays(name, split)
            tensor = torch.from_numpy(pixels)
            images[split] = tensor[:, None] if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2).contiguous()
            labels[split] = torch.from_numpy(classes.astype("int64"))
            counts = {"images": came.count, "official_images": came.official_count}
            origin[split] = {**counts, "status": came.status, "note": came.note}
        return cls(images, labels, origin)


def choose_images(labels: Tensor, images: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of training images, at most `images` with balanced classes, and of validation images, a fixed tenth."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    share = max(1, len(labels) // VALIDATION_SHARE)
    validation, rest = order[:share], order[share:]
    if images is None:
        return rest, validation
    # An order whose every beginning has its classes as balanced as they can be.
    here = labels[rest]
    by_class, counts = here.argsort(stable=True), here.bincount()
    place_in_class = torch.arange(len(here)) - (counts.cumsum(0) - counts)[here[by_class]]
    return rest[by_class[place_in_class.argsort(stable=True)][:images]], validation


class Domain(Mapping[Split, tuple[NormalisedImages, Tensor]]):
    """One dataset as tasks see it: images and labels by split, prepared when first asked for, and then kept.

    `rows` says which of the official training images make a split, or which of the official test images make the test
    split. `prepare` turns uint8 images into uint8 images. `classes` are labelled 0, 1, ... in their order.
    """

    def __init__(
        self,
        source: ImageSource,
        rows: Mapping[Split, Tensor],
        prepare: Callable[[Tensor], Tensor],
        channels: int,
        *,
        classes: Sequence[int] | None = None,
    ) -> None:
        self.source, self.rows, self.prepare, self.channels, self.classes = source, rows, prepare, channels, classes
        self._splits: dict[Split, tuple[NormalisedImages, Tensor]] = {}

    def __getitem__(self, split: Split) -> tuple[NormalisedImages, Tensor]:
        if split not in self._splits:
            official = "test" if split == "test" else "train"  # validation is a part of the official training images
            labels = self.source.labels[official][self.rows[split]]
            if self.classes is not None:
                labels = (labels[:, None] == torch.tensor(self.classes)).int().argmax(1)
            pixels = self.prepare(self.source.images[official][self.rows[split]])
            # Mean and deviation of the training images alone, as prepared.
            found = moments(pixels) if split == "train" else self["train"][0].moments
            self._splits[split] = NormalisedImages(pixels, found, self.channels), labels
        return self._splits[split]

    def __iter__(self) -> Iterator[Split]:
        return iter(get_args(Split))

    def __len__(self) -> int:
        return len(get_args(Split))


Preparation = tuple[str, Callable[[Tensor], Tensor]]
"""How a domain is made: from which dataset, and by which preparation of its uint8 images."""


class ImageDomains:
    """Named domains of one shape (channels, height, width), each prepared when first asked for, and then kept in memory."""

    def __init__(self, preparations: Mapping[str, Preparation], shape: tuple[int, int, int], images: int | None) -> None:
        if images is not None and images < 1:
            raise ValueError(f"images must be at least 1, got {images}. Leave it out for all of them.")
        if not preparations:
            raise ValueError("A family needs at least one domain, got none. Name some.")
        self.preparations, self.shape, self.images = preparations, shape, images
        self._sources: dict[str, ImageSource] = {}
        self._domains: dict[str, Domain] = {}

    def source(self, dataset: str) -> ImageSource:
        """A dataset of `metamd.data`, loaded once."""
        if dataset not in self._sources:
            self._sources[dataset] = ImageSource.load(dataset)
        return self._sources[dataset]

    def domain(self, name: str) -> Domain:
        """A domain by its name, one of `preparations`."""
        if name not in self._domains:
            dataset, prepare = self.preparations[name]
            source = self.source(dataset)
            train, validation = choose_images(source.labels["train"], self.images, SPLIT_SEED)
            test = torch.arange(len(source.labels["test"]))
            rows: dict[Split, Tensor] = {"train": train, "validation": validation, "test": test}
            self._domains[name] = Domain(source, rows, prepare, self.shape[0])
        return self._domains[name]

    def describe(self) -> dict[str, Any]:
        """The domains' sizes and what is known of their datasets, in JSON's types."""
        return {
            "training_images": {name: len(self.domain(name).rows["train"]) for name in self.preparations},
            "split_seed": SPLIT_SEED,
            "normalisation": "mean 0 and deviation 1 per channel and domain, from its training images",
            "datasets": {name: self.source(name).origin for name, _ in self.preparations.values()},
        }


# families of a few domains


def rotated_mnist(
    *,
    angles: Sequence[float] = ANGLES,
    hold_out: float | None = None,
    model: str = "mlp",
    width: int | None = None,
    images: int | None = 1000,
    batch_size: int = 100,
    steps: int = 500,
) -> "ImageFamily":
    """MNIST turned by a few angles, each of which is a domain.

    All angles turn the same chosen images, as is usual for this benchmark. The held-out angle is new to a file that was
    learned from the others, but its digits are not. Test images are MNIST's own test images, which no training split ever
    has.

    Args:
        angles: in degrees, counter-clockwise; every one is a domain.
        hold_out: the angle that training never sees, for `held_out()`; None holds out none.
        model: `"linear"`, `"mlp"`, `"lenet"` or `"resnet18"`.
        width: of the hidden layers of an MLP, 128 if not given, or of ResNet18.
        images: training images per domain, balanced over the digits; None for all.
        batch_size: images per step.
        steps: T.
    """
    preparations: dict[str, Preparation] = {_angle(a): ("mnist", partial(rotate, angle=a)) for a in angles}
    collection = ImageDomains(preparations, (1, 28, 28), images)
    held = None if hold_out is None else _angle(hold_out)
    if width is not None and model not in ("mlp", "resnet18"):
        raise ValueError(f"width is for the models 'mlp' and 'resnet18', and {model!r} has none. Leave it out.")
    training = ImageTraining(model, batch_size, steps, {} if width is None else {"width": width})
    return ImageFamily("rotated-mnist", collection, training, {"preparation": ROTATION}, hold_out=held)


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
    collection = ImageDomains({n: (n, _same) for n in here}, (1, 28, 28), images)
    how = {"preparation": "28x28 grey, as metamd.data gives it", "absent": absent}
    return ImageFamily("diverse-digits", collection, ImageTraining(model, batch_size, steps), how, hold_out=hold_out)


def images(
    *,
    hold_out: str | None = "cifar10",
    model: str = "resnet18",
    width: int = 64,
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
        images: training images per domain, balanced over the classes, where there are so many; None for all.
        batch_size: images per step.
        steps: T.
    """
    digits, absent = _digits()
    preparations: dict[str, Preparation] = {name: (name, _same) for name in ("cifar10", "stl10")}
    preparations |= {name: (name, partial(enlarge, side=32)) for name in digits}
    collection = ImageDomains(preparations, (3, 32, 32), images)
    options = {"width": width, "norm": "batch"} if model == "resnet18" else {}
    how = {
        "preparation": "32x32; digits enlarged from 28x28, bilinear (torch interpolate), grey repeated in three channels",
        "absent": absent,
    }
    return ImageFamily("images", collection, ImageTraining(model, batch_size, steps, options), how, hold_out=hold_out)


def _angle(angle: float) -> str:
    if not math.isfinite(angle):
        raise ValueError(f"An angle must be a finite number of degrees, got {angle}.")
    return f"{angle:.12g}"


def _same(pixels: Tensor) -> Tensor:
    return pixels


def _digits() -> tuple[list[str], dict[str, str]]:
    """The digit datasets to use, and why another one is not among them."""
    absent = {} if "qmnist" in data.available() else {"qmnist": ABSENT}
    return [name for name in DIGIT_DATASETS if name not in absent], absent


@dataclass(frozen=True)
class ImageTraining:
    """How the tasks of an image family train: cross-entropy of one of `metamd.tasks.models.MODELS`."""

    model: str
    batch_size: int
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, shape: tuple[int, int, int], classes: int) -> Recipe:
        """The recipe for images of so many channels, rows and columns, and for so many classes."""
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}.")
        if self.model == "lenet" and shape[1:] != (28, 28):
            raise ValueError("LeNet takes images of 28x28, and these are 32x32. Pass model='resnet18'.")
        first = math.prod(shape) if self.model in ("linear", "mlp") else shape[0]
        make_model = partial(MODELS[self.model], first, classes, **self.options)
        recipe = Recipe(make_model, F.cross_entropy, self.batch_size, self.steps)
        recipe.make(0)  # refuses options that do not fit, before any data is read
        return recipe

    def describe(self) -> dict[str, Any]:
        """The settings."""
        return {"model": self.model, **self.options, "batch_size": self.batch_size, "steps": self.steps}


class ImageFamily(DatasetFamily):
    """Tasks on every domain of a collection but the held-out one, or on that one alone; `how` is for `describe`."""

    kind = "domain"

    def __init__(
        self,
        name: str,
        collection: ImageDomains,
        training: ImageTraining,
        how: Mapping[str, Any],
        *,
        hold_out: str | None,
        held: bool = False,
    ) -> None:
        everything = tuple(collection.preparations)
        if hold_out is not None and hold_out not in everything:
            absent = how.get("absent", {}).get(hold_out)
            reason = f" {hold_out} is left out: {absent}." if absent else ""
            raise ValueError(f"hold_out must be one of {', '.join(everything)}, got {hold_out!r}.{reason}")
        if hold_out is not None and len(everything) < 2:
            raise ValueError(f"Holding out {hold_out!r} leaves no domain to train on. Name more domains.")
        domains = (hold_out,) if held and hold_out else tuple(d for d in everything if d != hold_out)
        # The batch has all that tells tasks apart, and the models have no state of their own.
        super().__init__(name, training.recipe(collection.shape, 10), domains)
        self.collection, self.training, self.how, self.hold_out = collection, training, how, hold_out

    def splits(self, name: str) -> "Domain":
        """A domain of the collection."""
        return self.collection.domain(name)

    def held_out(self, steps: int | None = None) -> "ImageFamily":
        """The held-out side: tasks on the held-out domain, with the same images in memory, and so many steps if given."""
        if self.hold_out is None:
            raise ValueError(f"{self.name} was made with hold_out=None, so there is no held-out side. Name a domain.")
        return self._side(self.hold_out, held=True, steps=steps)

    def describe(self) -> dict[str, Any]:
        """The settings, and for every dataset how much of it is there and whether it is official."""
        sides = {"domains": list(self.domains), "hold_out": self.hold_out}
        return {"family": self.name, **sides, **self.training.describe(), **self.how, **self.collection.describe()}

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
        yield family.of(side) if isinstance(family, SharedStart) else side


# rotated MNIST at any angle


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

    Five classes make 252 sets, at any angle each. A fixed seed divides the images in two halves. Training tasks draw from
    one half and tasks of `held_out()` from the other, so that a held-out task has no image of a training task. Within a
    side, tasks are independent draws of one distribution and may share images.

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
    return RotatedContinuous(angles, classes, images, ImageTraining(model, batch_size, steps))


class RotatedContinuous(TaskFamily):
    """See `rotated_mnist_continuous`; `side` says which half of the images its tasks draw from."""

    def __init__(self, angles: tuple[float, float], classes: int, images: int | None, training: ImageTraining) -> None:
        super().__init__("rotated-mnist-continuous", training.steps, shared_loss=True)
        self.collection = ImageDomains({"mnist": ("mnist", _same)}, (1, 28, 28), images)
        self.angles, self.classes, self.training = angles, classes, training
        self.side: Literal["training", "held-out"] = "training"
        self.recipe = training.recipe((1, 28, 28), classes)

    def held_out(self) -> "RotatedContinuous":
        """The held-out side: the same distribution on the half of the images that training tasks never draw from."""
        other = copy(self)
        other.side = "held-out"
        return other

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
        source, wanted, rows = self.collection.source("mnist"), torch.tensor(config["classes"]), {}
        for split, labels in source.labels.items():
            generator = torch.Generator().manual_seed(derive_seed("halves", split))
            half = torch.randperm(len(labels), generator=generator).tensor_split(2)[self.side == "held-out"]
            rows[split] = half[torch.isin(labels[half], wanted)]
        chosen = choose_images(source.labels["train"][rows["train"]], self.collection.images, config["data_seed"])
        train, validation = (rows["train"][part] for part in chosen)
        splits: dict[Split, Tensor] = {"train": train, "validation": validation, "test": rows["test"]}
        domain = Domain(source, splits, partial(rotate, angle=config["angle"]), 1, classes=config["classes"])
        return SupervisedTask(config, self.recipe, domain)

    def describe(self) -> dict[str, Any]:
        """The settings, and how much of MNIST is there and whether it is official."""
        task = {"angles": list(self.angles), "classes": self.classes, "images": self.collection.images}
        how = {
            "preparation": ROTATION,
            "held_out": "the same distribution on the other half of MNIST's training and test images",
            "normalisation": "mean 0 and deviation 1, from the task's training images",
        }
        datasets = {"mnist": self.collection.source("mnist").origin}
        return {"family": self.name, "side": self.side, **task, **self.training.describe(), **how, "datasets": datasets}

    def drawn(self) -> Drawn:
        """An angle, digits and images of this half, and seeds."""
        domain = f"an angle and {self.classes} digits of MNIST drawn anew"
        return Drawn(domain, f"images drawn anew from the {self.side} half", "drawn anew", "drawn anew")


# a model trained at one angle and adapted to others


def adapt_rotated_mnist(
    *,
    pretrained_at: float = 45.0,
    angles: Sequence[float] = ADAPTED,
    hold_out: float | None = None,
    model: str = "mlp",
    images: int | None = 5000,
    batch_size: int = 100,
    steps: int = 100,
    pretraining_steps: int = 500,
) -> SharedStart:
    """Rotated MNIST whose tasks all begin at one model, which was trained at another angle on images that no task has.

    The model is trained when the first task is built (Adam, rate 0.001 falling linearly to zero), in a second or two.

    Args:
        pretrained_at: the angle that the model was trained at, in degrees.
        angles: what it is adapted to; every one is a domain.
        hold_out: the angle that training never sees, for `held_out()`; None holds out none.
        model: `"linear"`, `"mlp"`, `"lenet"` or `"resnet18"`.
        images: training images per domain, at most 40,000, so that some are left for the model.
        batch_size: images per step.
        steps: T.
        pretraining_steps: of the model.
    """
    if images is None or not 1 <= images <= 40_000:
        raise ValueError(f"images must lie between 1 and 40,000, so that some are left to pretrain on; got {images}.")
    if pretraining_steps < 1:
        raise ValueError(f"pretraining_steps must be at least 1, got {pretraining_steps}.")
    family = rotated_mnist(angles=angles, hold_out=hold_out, model=model, images=images, batch_size=batch_size, steps=steps)
    family.name = "adapt-rotated-mnist"
    family.how = {
        **family.how,
        "pretrained_at": pretrained_at,
        "pretraining_steps": pretraining_steps,
        "pretraining": "Adam, rate 0.001 falling linearly to zero, on images that no task has",
    }
    return SharedStart(family, partial(pretrain, family, pretrained_at, pretraining_steps))


def pretrain(family: ImageFamily, angle: float, steps: int) -> dict[str, Tensor]:
    """The parameters of a model trained at an angle, on the training images that the family's tasks leave."""
    source, recipe = family.collection.source("mnist"), family.recipe
    rows = torch.arange(len(source.labels["train"]))
    left = rows[~torch.isin(rows, torch.cat(choose_images(source.labels["train"], family.collection.images, SPLIT_SEED)))]
    domain = Domain(source, {"train": left}, partial(rotate, angle=angle), family.collection.shape[0])
    images, labels = domain["train"]
    model = recipe.make(derive_seed("pretrained"))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    order = Shuffle(len(labels), recipe.batch_size, derive_seed("pretraining"))
    # Not `inner.run.train`: tasks are below it, and this loop makes the start of one.
    for t in range(steps):
        rows = order.indices(t)
        optimiser.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}

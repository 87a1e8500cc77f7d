"""Image domains: datasets in memory as uint8, with disjoint splits, rotated or enlarged, and normalised when read."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from metamd.data.loading import load_arrays
from metamd.tasks.base import Split

VALIDATION_SHARE = 10
"""One in so many images of the official training split is for validation."""

SPLIT_SEED = 0
"""Chooses the validation images of every domain."""

BLOCK = 4096
"""Images turned or enlarged at once: bounds the memory of the float copy."""


def rotate(images: Tensor, angle: float) -> Tensor:
    """Rotate uint8 images counter-clockwise about their centre: bilinear, black beyond the border, rounded once.

    The grid is torch's `affine_grid` and the interpolation its `grid_sample`, on pixel centres, so that 0 degrees is
    the identity and 90 degrees is `torch.rot90`.
    """
    radians = math.radians(angle)
    cosine, sine = math.cos(radians), math.sin(radians)
    # Maps an output position to the input position it is read from: the inverse rotation, y pointing down.
    inverse = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    grid = F.affine_grid(inverse[None], [1, *images.shape[1:]], align_corners=False)

    def turn(block: Tensor) -> Tensor:
        return F.grid_sample(block, grid.expand(len(block), -1, -1, -1), mode="bilinear", align_corners=False)

    return _by_blocks(images, images.shape[-1], turn)


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
class Pictures:
    """Images kept as uint8, a quarter of the memory, and read a few at a time as floats of mean 0 and deviation 1.

    Mean and deviation are those of training images, by channel. A grey channel is repeated for a model that takes more.
    """

    pixels: Tensor
    moments: tuple[Tensor, Tensor]
    channels: int

    @property
    def device(self) -> torch.device:
        """Where the pixels are."""
        return self.pixels.device

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: Tensor) -> Tensor:
        mean, deviation = self.moments
        normal = self.pixels.index_select(0, rows).float().sub_(mean).div_(deviation)
        return normal.expand(-1, self.channels, -1, -1) if normal.shape[1] != self.channels else normal


@dataclass(frozen=True)
class Source:
    """A dataset as loaded, by official split: uint8 images (number, channels, height, width), int64 labels.

    `origin` is what a table must say of each split, in JSON's types; it has no path, which differs by machine.
    """

    images: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    origin: Mapping[str, Mapping[str, Any]]

    @classmethod
    def load(cls, name: str) -> "Source":
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


def choose(labels: Tensor, images: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Disjoint indices of training and validation images, a pure function of the arguments.

    Validation is a random tenth, the same whatever `images` is. Training takes the rest, or `images` of it with the classes
    as balanced as they can be: 1,000 of MNIST have 100 of each digit.
    """
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


class Domain(Mapping[Split, tuple[Pictures, Tensor]]):
    """One dataset as tasks see it: images and labels by split, prepared when first asked for, and then kept.

    `rows` says which of the official training images make a split, or which of the official test images make the test
    split. `prepare` turns uint8 images into uint8 images. `classes` are labelled 0, 1, ... in their order.
    """

    def __init__(
        self,
        source: Source,
        rows: Mapping[Split, Tensor],
        prepare: Callable[[Tensor], Tensor],
        channels: int,
        *,
        classes: Sequence[int] | None = None,
    ) -> None:
        self.source, self.rows, self.prepare, self.channels, self.classes = source, rows, prepare, channels, classes
        self._splits: dict[Split, tuple[Pictures, Tensor]] = {}

    def __getitem__(self, split: Split) -> tuple[Pictures, Tensor]:
        if split not in self._splits:
            pixels, labels = self._rows(split)
            # Mean and deviation of the training images alone, as prepared.
            found = moments(pixels) if split == "train" else self["train"][0].moments
            self._splits[split] = Pictures(pixels, found, self.channels), labels
        return self._splits[split]

    def __iter__(self) -> Iterator[Split]:
        return iter(get_args(Split))

    def __len__(self) -> int:
        return len(get_args(Split))

    def _rows(self, split: Split) -> tuple[Tensor, Tensor]:
        official = "test" if split == "test" else "train"  # validation is a part of the official training images
        labels = self.source.labels[official][self.rows[split]]
        if self.classes is not None:
            numbers = torch.full((max(self.classes) + 1,), -1)
            numbers[list(self.classes)] = torch.arange(len(self.classes))
            labels = numbers[labels]
        return self.prepare(self.source.images[official][self.rows[split]]), labels


Preparation = tuple[str, Callable[[Tensor], Tensor]]
"""How a domain is made: from which dataset, and by which preparation of its uint8 images."""


class Collection:
    """Named domains of one shape (channels, height, width), each prepared when first asked for, and then kept in memory.

    A domain with fewer training images than `images` gives all of its own.
    """

    def __init__(self, preparations: Mapping[str, Preparation], shape: tuple[int, int, int], images: int | None) -> None:
        if images is not None and images < 1:
            raise ValueError(f"images must be at least 1, got {images}. Leave it out for all of them.")
        if not preparations:
            raise ValueError("A family needs at least one domain, got none. Name some.")
        self.preparations, self.shape, self.images = preparations, shape, images
        self._sources: dict[str, Source] = {}
        self._domains: dict[str, Domain] = {}

    def source(self, dataset: str) -> Source:
        """A dataset of `metamd.data`, loaded once."""
        if dataset not in self._sources:
            self._sources[dataset] = Source.load(dataset)
        return self._sources[dataset]

    def domain(self, name: str) -> Domain:
        """A domain by its name, one of `preparations`."""
        if name not in self._domains:
            dataset, prepare = self.preparations[name]
            source = self.source(dataset)
            train, validation = choose(source.labels["train"], self.images, SPLIT_SEED)
            rows: dict[Split, Tensor] = {"train": train, "validation": validation}
            rows["test"] = torch.arange(len(source.labels["test"]))
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

"""Domains: datasets in memory as uint8, with disjoint splits, and what is known of where they come from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from metamd.data.loading import load_arrays
from metamd.data.records import Provenance
from metamd.tasks.base import Split
from metamd.tasks.vision.pixels import Normaliser

VALIDATION_SHARE = 10
"""One in so many images of the official training split is for validation."""


@dataclass(frozen=True)
class Source:
    """A dataset as loaded: the official training images and the official test images.

    Args:
        name: as in `metamd.data`.
        images: uint8, (number, channels, height, width), by official split.
        labels: int64, by official split.
        provenance: of each official split.
    """

    name: str
    images: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    provenance: tuple[Provenance, ...]

    @classmethod
    def load(cls, name: str) -> "Source":
        """Load both official splits of a dataset.

        Args:
            name: as in `metamd.data`.
        """
        images, labels, provenance = {}, {}, []
        for split in ("train", "test"):
            (pixels, classes), came = load_arrays(name, split)
            tensor = torch.from_numpy(pixels)
            images[split] = tensor[:, None] if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2).contiguous()
            labels[split] = torch.from_numpy(classes.astype("int64"))
            provenance.append(came)
        return cls(name, images, labels, tuple(provenance))

    def origin(self) -> dict[str, dict[str, Any]]:
        """What a table must say of each official split, in JSON's types; no path, which differs by machine."""
        return {
            came.split: {
                "images": came.count,
                "official_images": came.official_count,
                "status": came.status,
                "note": came.note,
            }
            for came in self.provenance
        }


def choose(labels: Tensor, images: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Disjoint indices of training and validation images, a pure function of the arguments.

    Validation is a random tenth, the same whatever `images` is. With a number of images, training takes that many of
    the rest with the classes as balanced as they can be (1,000 of MNIST: 100 of each digit).

    Args:
        labels: of the official training split.
        images: how many training images, if there are so many; None for all that are not for validation.
        seed: fixes the choice.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    share = max(1, len(labels) // VALIDATION_SHARE)
    validation, rest = order[:share], order[share:]
    if images is None:
        return rest, validation
    return rest[_balanced(labels[rest])[:images]], validation


def _balanced(labels: Tensor) -> Tensor:
    """An order whose every beginning has its classes as balanced as they can be."""
    by_class = labels.argsort(stable=True)
    counts = labels.bincount()
    starts = counts.cumsum(0) - counts
    place_in_class = torch.arange(len(labels)) - starts[labels[by_class]]
    return by_class[place_in_class.argsort(stable=True)]


@dataclass(frozen=True)
class Pictures:
    """Images kept as uint8, which take a quarter of the memory, and given as normalised floats, a few at a time.

    Args:
        pixels: uint8, (number, channels, height, width).
        normaliser: makes the floats.
    """

    pixels: Tensor
    normaliser: Normaliser

    @property
    def device(self) -> torch.device:
        """Where the pixels are."""
        return self.pixels.device

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.normaliser(self.pixels.index_select(0, rows))


class Domain(Mapping[Split, tuple[Pictures, Tensor]]):
    """One dataset as tasks see it: images and labels by split, prepared when first asked for, and then kept.

    Args:
        source: the dataset.
        rows: which images make a split: of the official training images or, for the test split, of the official test ones.
        prepare: turns uint8 images into uint8 images: a rotation, say.
        channels: what the model takes.
        classes: those that the images are of, labelled 0, 1, ... in this order; None leaves the labels as they are.
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
            pixels = self._train_pixels if split == "train" else self._pixels(split)
            self._splits[split] = Pictures(pixels, self.normaliser), self._labels(split)
        return self._splits[split]

    def __iter__(self) -> Iterator[Split]:
        return iter(get_args(Split))

    def __len__(self) -> int:
        return len(get_args(Split))

    @cached_property
    def normaliser(self) -> Normaliser:
        """From the training images alone, as prepared."""
        return Normaliser.of(self._train_pixels, self.channels)

    @cached_property
    def _train_pixels(self) -> Tensor:
        return self._pixels("train")

    def _pixels(self, split: Split) -> Tensor:
        return self.prepare(self.source.images[official(split)][self.rows[split]])

    def _labels(self, split: Split) -> Tensor:
        labels = self.source.labels[official(split)][self.rows[split]]
        if self.classes is None:
            return labels
        numbers = torch.full((max(self.classes) + 1,), -1)
        numbers[list(self.classes)] = torch.arange(len(self.classes))
        return numbers[labels]


def official(split: Split) -> str:
    """The official split that the images of a split come from: validation is a part of the training images."""
    return "test" if split == "test" else "train"


@dataclass(frozen=True)
class Preparation:
    """How a domain is made: from which dataset, and by which preparation of its uint8 images."""

    dataset: str
    prepare: Callable[[Tensor], Tensor]


class Collection:
    """Named domains of one shape, each loaded and prepared when first asked for, and then kept in memory.

    Args:
        preparations: how each domain is made, by its name.
        shape: channels, height and width that the model sees.
        images: training images per domain; None for all. A domain with fewer gives all of its own.
        seed: of the splits.
    """

    def __init__(
        self, preparations: Mapping[str, Preparation], shape: tuple[int, int, int], *, images: int | None, seed: int
    ) -> None:
        if images is not None and images < 1:
            raise ValueError(f"images must be at least 1, got {images}. Leave it out for all of them.")
        if not preparations:
            raise ValueError("A family needs at least one domain, got none. Name some.")
        self.preparations, self.shape, self.images, self.seed = preparations, shape, images, seed
        self._sources: dict[str, Source] = {}
        self._domains: dict[str, Domain] = {}

    def source(self, dataset: str) -> Source:
        """A dataset, loaded once.

        Args:
            dataset: as in `metamd.data`.
        """
        if dataset not in self._sources:
            self._sources[dataset] = Source.load(dataset)
        return self._sources[dataset]

    def domain(self, name: str) -> Domain:
        """A domain by its name.

        Args:
            name: one of `preparations`.
        """
        if name not in self._domains:
            made = self.preparations[name]
            source = self.source(made.dataset)
            train, validation = choose(source.labels["train"], self.images, self.seed)
            rows: dict[Split, Tensor] = {"train": train, "validation": validation}
            rows["test"] = torch.arange(len(source.labels["test"]))
            self._domains[name] = Domain(source, rows, made.prepare, self.shape[0])
        return self._domains[name]

    def describe(self) -> dict[str, Any]:
        """The domains' sizes and what is known of their datasets, in JSON's types."""
        return {
            "training_images": {name: len(self.domain(name).rows["train"]) for name in self.preparations},
            "split_seed": self.seed,
            "normalisation": "mean 0 and deviation 1 per channel and domain, from its training images",
            "datasets": {name: self.source(name).origin() for name in {r.dataset: None for r in self.preparations.values()}},
        }

"""A network per picture: pixel coordinates in, colours out (a coordinate network, an implicit representation)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metamd.data.decoders import shrink
from metamd.data.raw_files import files
from metamd.tasks.base import Evaluation, Split
from metamd.tasks.sources import Arrays
from metamd.tasks.supervised import Recipe, SupervisedTask, TwoSides

LEARNED, HELD_OUT = range(1, 17), range(17, 25)
"""The numbers of the Kodak pictures that are learned from, and of those that are held out."""

Model = Literal["siren", "fourier"]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Siren(nn.Module):
    """Layers of sines, the first with frequency 30: f(x) = W_n sin(30 (.. sin(30 (W_1 x + b_1)))) + b_n [Sitzmann2020].

    Args:
        width: of the hidden layers.
        depth: how many of them.
        frequency: omega_0, the factor inside every sine.
    """

    def __init__(self, width: int = 64, depth: int = 3, frequency: float = 30.0) -> None:
        super().__init__()
        self.frequency = frequency
        self.hidden = nn.ModuleList(nn.Linear(n, width) for n in (2, *[width] * (depth - 1)))
        self.output = nn.Linear(width, 3)
        # As published, sec. 3.2: the input of every sine then has unit variance, and biases as torch draws them.
        for layer in (*self.hidden, self.output):
            inputs = layer.weight.shape[1]
            bound = 1 / inputs if inputs == 2 else math.sqrt(6 / inputs) / frequency
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, places: Tensor) -> Tensor:
        """A colour for every place."""
        for layer in self.hidden:
            places = torch.sin(self.frequency * layer(places))
        return self.output(places)


class FourierFeatures(nn.Module):
    """An MLP with ReLU on sines and cosines of random projections of the place, which stay as they are [Tancik2020].

    Args:
        width: of the hidden layers, and the number of features.
        depth: how many hidden layers.
        scale: standard deviation of the projections, in half periods over the picture.
    """

    projections: Tensor

    def __init__(self, width: int = 64, depth: int = 2, scale: float = 6.0) -> None:
        super().__init__()
        # One draw for all models, since features are a part of the architecture: tasks then share what a weight means.
        drawn = torch.randn(width // 2, 2, generator=torch.Generator().manual_seed(0))
        self.register_buffer("projections", math.pi * scale * drawn)
        self.hidden = nn.ModuleList(nn.Linear(n, width) for n in (2 * (width // 2), *[width] * (depth - 1)))
        self.output = nn.Linear(width, 3)

    def forward(self, places: Tensor) -> Tensor:
        """A colour for every place."""
        waves = places @ self.projections.T
        features = torch.cat([waves.sin(), waves.cos()], 1)
        for layer in self.hidden:
            features = F.relu(layer(features))
        return self.output(features)


PICTURE_MODELS: dict[str, Callable[..., nn.Module]] = {"siren": Siren, "fourier": FourierFeatures}


class PictureTask(SupervisedTask):
    """One fit; every batch is the whole picture."""

    def batch(self, step: int) -> dict[str, Tensor]:
        """All pixels."""
        inputs, targets = self.splits["train"]
        rows = torch.arange(len(inputs))
        return {"inputs": inputs[rows], "targets": targets[rows]}

    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """Mean squared error and PSNR on all pixels, whatever the split: a fit has nothing else to be judged on."""
        loss = super().evaluate(params, "train").loss
        return Evaluation(loss, None, {"PSNR, dB": psnr(loss)})

    def monitor(self, examples: int = 2000) -> Callable[[Mapping[str, Tensor]], float]:
        """The loss on all pixels, so that it is the PSNR of the picture."""
        return super().monitor(len(self.splits["train"][0]))


def pictures(*, model: Model = "siren", width: int = 64, side: int = 64, steps: int = 200) -> "PictureFamily":
    """Fit a coordinate network to one picture of the Kodak suite: a task is a picture and an initialisation.

    Pictures 1 to 16 are learned from, 17 to 24 are for `held_out()`. Each is cut to its central square and resized to
    `side` by the mean of the pixels (Pillow's BOX filter). Every step sees all pixels, with colours from -1 to 1. The loss
    is the mean squared error, and `evaluate` adds the PSNR: 10 log10(4 / loss).

    Args:
        model: `"siren"` or `"fourier"`, an MLP on Fourier features.
        width: of the hidden layers.
        side: rows and columns of the picture.
        steps: T.
    """
    if model not in get_args(Model):
        raise ValueError(f"model must be one of {', '.join(get_args(Model))}, got {model!r}.")
    if not 1 <= side <= 512:
        raise ValueError(f"side must lie between 1 and 512, the shorter side of the pictures, got {side}.")
    if width < 2:
        raise ValueError(f"width must be at least 2, got {width}. Pass width=64, say.")
    return PictureFamily(KODAK, model, width, side, steps)


@dataclass(frozen=True)
class Suite:
    """Photographs to fit.

    Args:
        name: of the dataset.
        sides: names of those that are learned from, and of those that are held out.
        squares: all of them with so many rows and columns, as uint8 pixels (side * side, 3), by name.
        preparation: what that did to them.
    """

    name: str
    sides: tuple[Sequence[str], Sequence[str]]
    squares: Callable[[int], Mapping[str, Pixels]]
    preparation: str


class PictureFamily(TwoSides):
    """A family of a suite of photographs; see `pictures`."""

    task = PictureTask

    def __init__(self, suite: Suite, model: Model, width: int, side: int, steps: int) -> None:
        recipe = Recipe(partial(PICTURE_MODELS[model], width), F.mse_loss, side * side, steps)
        super().__init__("pictures", recipe, suite.sides)
        self.suite, self.model, self.width, self.side = suite, model, width, side

    @cached_property
    def colours(self) -> dict[str, Tensor]:
        """The pixels of every picture, (side * side, 3), from -1 to 1."""
        return {
            name: torch.from_numpy(picture).float() / 127.5 - 1 for name, picture in self.suite.squares(self.side).items()
        }

    def splits(self, name: str) -> Mapping[Split, Arrays]:
        """The places and colours of a picture."""
        return {"train": (places(self.side), self.colours[name])}

    def describe(self) -> dict[str, Any]:
        """The settings, and what is done to the pictures."""
        settings = {"model": self.model, "width": self.width, "side": self.side, "steps": self.steps}
        about = {"preparation": self.suite.preparation, "dataset": self.suite.name}
        return {"family": self.name, "domains": list(self.domains), **settings, **about}


def psnr(loss: float) -> float:
    """The peak signal-to-noise ratio in dB, of a mean squared error of colours from -1 to 1."""
    return 10 * math.log10(4 / loss) if loss > 0 else math.inf


def places(side: int) -> Tensor:
    """The centres of side x side pixels, row by row, in (-1, 1): (side * side, 2)."""
    centres = (2 * torch.arange(side) + 1) / side - 1
    return torch.cartesian_prod(centres, centres)


def kodak_squares(side: int) -> dict[str, Pixels]:
    """The central square of every Kodak picture, by the name of its file."""
    from PIL import Image

    found = {}
    for name, path in files("kodak").items():
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        height, wide = pixels.shape[:2]
        short = min(height, wide)
        top, left = (height - short) // 2, (wide - short) // 2
        square = np.ascontiguousarray(pixels[top : top + short, left : left + short])
        found[name.removesuffix(".png")] = shrink(square[None], side, "RGB", "BOX")[0].reshape(-1, 3)
    return found


KODAK = Suite(
    "kodak",
    ([f"kodim{number:02d}" for number in LEARNED], [f"kodim{number:02d}" for number in HELD_OUT]),
    kodak_squares,
    "central square, resized by the mean of the pixels (Pillow, BOX)",
)

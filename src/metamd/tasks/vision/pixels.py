"""What is done to images before a model sees them: rotation, enlargement, normalisation."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 4096
"""Images turned or enlarged at once: bounds the memory of the float copy."""


def rotate(images: Tensor, angle: float) -> Tensor:
    """Rotate uint8 images counter-clockwise about their centre: bilinear, black beyond the border, rounded once.

    The grid is torch's `affine_grid` and the interpolation its `grid_sample`, on pixel centres, so that 0 degrees is
    the identity and 90 degrees is `torch.rot90`.

    Args:
        images: uint8, (number, channels, height, width), with height equal to width.
        angle: in degrees.
    """
    radians = math.radians(angle)
    cosine, sine = math.cos(radians), math.sin(radians)
    # Maps an output position to the input position it is read from: the inverse rotation, y pointing down.
    inverse = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    grid = F.affine_grid(inverse[None], [1, *images.shape[1:]], align_corners=False)
    turned = torch.empty_like(images)
    for start in range(0, len(images), BLOCK):
        block = images[start : start + BLOCK].float()
        sampled = F.grid_sample(block, grid.expand(len(block), -1, -1, -1), mode="bilinear", align_corners=False)
        turned[start : start + BLOCK] = sampled.round_().to(torch.uint8)
    return turned


def enlarge(images: Tensor, side: int) -> Tensor:
    """Enlarge uint8 images to side x side: torch's bilinear `interpolate` between pixel centres, rounded once.

    Args:
        images: uint8, (number, channels, height, width).
        side: the new height and width.
    """
    large = images.new_empty((*images.shape[:2], side, side))
    for start in range(0, len(images), BLOCK):
        block = F.interpolate(images[start : start + BLOCK].float(), size=(side, side), mode="bilinear", align_corners=False)
        large[start : start + BLOCK] = block.round_().to(torch.uint8)
    return large


@dataclass(frozen=True)
class Normaliser:
    """Turns uint8 images into floats of mean 0 and deviation 1 per channel, as some training images had them.

    Args:
        mean: of every channel, (channels, 1, 1).
        deviation: likewise.
        channels: what the model takes; a single grey channel is repeated.
    """

    mean: Tensor
    deviation: Tensor
    channels: int

    @classmethod
    def of(cls, images: Tensor, channels: int) -> "Normaliser":
        """The normaliser of these images.

        Args:
            images: uint8, (number, channels, height, width).
            channels: what the model takes.
        """
        count = images.numel() // images.shape[1]
        # Sums of a histogram are exact, need no float copy, and do not depend on the order of the images.
        values = torch.arange(256, dtype=torch.float64)
        tables = torch.stack(
            [torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])]
        ).double()
        mean = tables @ values / count
        deviation = (tables @ values**2 / count - mean**2).clamp_min(0).sqrt()
        if not bool((deviation > 0).all()):
            raise ValueError("Training images must not all be one flat colour, got a deviation of 0. Check the data.")
        return cls(mean.float()[:, None, None], deviation.float()[:, None, None], channels)

    def __call__(self, images: Tensor) -> Tensor:
        """Float32 images, (number, channels, height, width)."""
        normal = images.float().sub_(self.mean).div_(self.deviation)
        return normal.expand(-1, self.channels, -1, -1) if normal.shape[1] != self.channels else normal

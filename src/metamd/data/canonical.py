"""One canonical form per dataset, derived the same way whatever the source.

| dataset | canonical form | how |
|---|---|---|
| MNIST, QMNIST, KMNIST, FashionMNIST | 28x28 grey | as the files hold it |
| USPS | 28x28 grey | `enlarge`: bilinear from 16x16, in exact integer arithmetic |
| SVHN | 28x28 grey | `shrink_svhn`: Pillow's `convert("L")`, then its BILINEAR filter, from 32x32 RGB |
| CIFAR-10 | 32x32 RGB | as the files hold it |
| STL-10 | 32x32 RGB | `shrink_stl10`: Pillow's BOX filter (the mean of 3x3 pixels) from 96x96 RGB |
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def canonical(name: str, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The canonical images from those that a `.npz` file stores; only USPS is stored in another form."""
    return enlarge(images) if name == "usps" else images


def digest(array: NDArray[np.uint8]) -> str:
    """The sha256 of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def enlarge(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    r"""Enlarge 16x16 grey images to 28x28 by bilinear interpolation between pixel centres, rounded once.

    The centre of output pixel $i$ lies at $(i + \tfrac12)\tfrac{16}{28} - \tfrac12 = (8i - 3)/14$ input
    pixels, so every weight is a multiple of 1/14 and the result is exact before the one rounding; beyond the
    border the edge pixel repeats. No library routine is used: their fixed-point roundings change between
    versions.

    Args:
        images: grey images, (number, 16, 16).
    """
    weights = _bilinear_fourteenths()
    enlarged = np.empty((len(images), 28, 28), np.uint8)
    for start in range(0, len(images), 1024):
        block = images[start : start + 1024].astype(np.int32)
        total = np.einsum("yi,nij,xj->nyx", weights, block, weights, optimize=True)
        enlarged[start : start + 1024] = (total + 98) // 196
    return enlarged


def _bilinear_fourteenths() -> NDArray[np.int32]:
    weights = np.zeros((28, 16), np.int32)
    for i in range(28):
        left, remainder = divmod(8 * i - 3, 14)
        weights[i, max(left, 0)] += 14 - remainder
        weights[i, min(left + 1, 15)] += remainder
    return weights


def shrink_svhn(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Turn 32x32 RGB images into 28x28 grey ones: Pillow's `convert("L")`, then its BILINEAR filter.

    Args:
        images: colour images, (number, 32, 32, 3).
    """
    from PIL import Image

    grey = np.empty((len(images), 28, 28), np.uint8)
    for i, image in enumerate(images):
        small = Image.fromarray(image).convert("L").resize((28, 28), Image.Resampling.BILINEAR)
        grey[i] = np.asarray(small)
    return grey


def shrink_stl10(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Shrink 96x96 RGB images to 32x32 with Pillow's BOX filter.

    That is the mean of each 3x3 block, except that Pillow rounds after each dimension, which moves about one
    value in ten by one grey level.

    Args:
        images: colour images, (number, 96, 96, 3).
    """
    from PIL import Image

    small = np.empty((len(images), 32, 32, 3), np.uint8)
    for i, image in enumerate(images):
        small[i] = np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BOX))
    return small

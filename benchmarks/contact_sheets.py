"""Draw a small contact sheet per dataset and of MNIST turned by 30 degrees, a column per class, from the data at hand.

python benchmarks/contact_sheets.py docs/figures
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import metamd.data as data
from metamd.data.loading import load_arrays
from metamd.tasks.vision import rotate

ROWS = 5
GAP = 2
ANGLE = 30


def sheet(images: np.ndarray, labels: np.ndarray, classes: int) -> Image.Image:
    """The first ROWS training images of every class, a class per column, on white."""
    height, width = images.shape[1:3]
    canvas = np.full((ROWS * (height + GAP), classes * (width + GAP), *images.shape[3:]), 255, np.uint8)
    for column in range(classes):
        for row, image in enumerate(images[labels == column][:ROWS]):
            top, left = row * (height + GAP), column * (width + GAP)
            canvas[top : top + height, left : left + width] = image
    return Image.fromarray(canvas[:-GAP, :-GAP])


def save(picture: Image.Image, path: Path) -> None:
    if picture.mode == "RGB":
        picture = picture.quantize(96)  # a palette keeps the colour sheets small
    picture.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in data.available():
        (images, labels), _ = load_arrays(name, "train", fetch_missing=False)
        save(sheet(images, labels, len(data.dataset(name).classes)), folder / f"data-{name}.png")
    if "mnist" in data.available():
        images, labels = (tensor[:1000] for tensor in data.load("mnist", download=False))
        turned = rotate(images[:, None], ANGLE)[:, 0].numpy()
        save(sheet(turned, labels.numpy(), 10), folder / f"rotated-mnist-{ANGLE}.png")


if __name__ == "__main__":
    main()

"""A user's own images: one sub-folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from metamd.data.registry import DataError
from metamd.files.limits import open_regular
from metamd.files.text import install

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

GREY, COLOUR = ("1", "L"), ("LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow's modes that turn into 8 bits of grey, or of red, green and blue, without loss of range."""


def image_folder(path: str | Path) -> tuple[Tensor, Tensor]:
    """Read a folder of images, a class per sub-folder: float images in [0, 1] and their classes.

    Classes are numbered in the alphabetical order of their names. The images are (number, channels, height, width): three
    channels if any file has colour, one otherwise. All must have one size. Files are read in the order of their names;
    hidden files are left out.

    Args:
        path: the folder.
    """
    import numpy as np
    import torch

    folder = Path(path)
    files = [(file, label) for label, name in enumerate(folder_classes(folder)) for file in _files(folder / name)]
    first = _open_image(files[0][0])
    pictures = [first, *(_open_image(file, first.size) for file, _ in files[1:])]
    mode = "L" if all(picture.mode in GREY for picture in pictures) else "RGB"
    pixels = np.stack([np.asarray(picture.convert(mode)) for picture in pictures])
    images = torch.from_numpy(pixels.reshape(*pixels.shape[:3], -1)).permute(0, 3, 1, 2)
    return images.float().div(255).contiguous(), torch.tensor([label for _, label in files])


def folder_classes(path: str | Path) -> list[str]:
    """The sub-folders of a folder of images: its classes, in alphabetical order."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"A folder of images with a sub-folder per class is required, got {folder}, which is none.")
    found = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not found:
        raise DataError(f"{folder} must have a sub-folder per class, and has none. Put the images into such folders.")
    return found


def _files(folder: Path) -> list[Path]:
    files = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    if not files:
        raise DataError(f"{folder} must hold images of its class, and is empty. Add some, or remove the folder.")
    return files


def _open_image(file: Path, size: tuple[int, int] | None = None) -> Image:
    """An image of the given size; its header is enough to refuse a file of another size or kind."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise DataError(f"Reading images needs Pillow. {install('data')}") from error
    try:
        with open_regular(file) as stream, Image.open(stream) as picture:
            if size in (None, picture.size) and picture.mode in GREY + COLOUR:
                return picture.copy()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as an image ({error}). Repair or remove it.") from error
    if picture.mode not in GREY + COLOUR:
        raise DataError(f"{file} has {picture.mode!r} pixels, and 8 bits per channel are required. Convert it first.")
    (width, height), first = picture.size, size or picture.size
    raise DataError(
        f"All images must have one size: the first has {first[0]}x{first[1]}, {file} has {width}x{height}. "
        "Resize them to one size first."
    )

"""A user's data, whatever its form, as tensors in disjoint splits."""

import hashlib
from collections.abc import Mapping, Sized
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from metamd.data.folders import folder_classes, image_folder
from metamd.data.loading import UNREADABLE, check_claims
from metamd.files.limits import open_regular
from metamd.files.text import brief, shown
from metamd.tasks.base import Split, derive_seed, seeded

Arrays = tuple[Tensor, Tensor]
"""Inputs and targets, one row per example."""

Splits = Mapping[Split, Arrays]


class Rows(Protocol):
    """What a task needs of its inputs or targets: tensors have it, and so has what makes rows when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


Source = Dataset[Any] | tuple[Tensor, Tensor] | str | PathLike[str]
Shares = tuple[float, float, float]

_PAIRS = [("inputs", "targets"), ("images", "labels"), ("x", "y"), ("X", "y")]


def read_all(datasets: Mapping[str, Source | Mapping[Split, Source]], shares: Shares, seed: int) -> dict[str, Splits]:
    """Every dataset in memory, checked against the others, and split by shares and a seed where it comes without splits."""
    if not isinstance(datasets, Mapping):
        raise TypeError(
            f"datasets must map names to data, got {type(datasets).__name__}. Pass datasets={{'mine': (inputs, targets)}}."
        )
    if not datasets:
        raise ValueError("datasets must name at least one dataset, got none. Pass datasets={'mine': (inputs, targets)}.")
    numbers = isinstance(shares, tuple | list) and len(shares) == 3 and all(isinstance(x, int | float) for x in shares)
    if not numbers or min(shares) < 0 or shares[0] <= 0 or abs(sum(shares) - 1) > 1e-9:
        raise ValueError(f"shares must be three fractions that sum to 1, got {shares}. Pass shares=(0.8, 0.1, 0.1), say.")
    _check_folders(datasets)
    data = {name: _split(source, name, shares, seed) for name, source in datasets.items()}
    kinds = {name: sorted({kind_of(arrays) for arrays in splits.values()}) for name, splits in data.items()}
    first = next(iter(kinds))
    for name, found in kinds.items():
        if found != kinds[first] or len(found) > 1:
            raise ValueError(
                f"All datasets of a family must have examples of one kind: {first!r} has {' and '.join(kinds[first])}, "
                f"{name!r} has {' and '.join(found)}. Resize or convert them, or make two families."
            )
    return data


def hash_of_data(splits: Splits) -> str:
    """A short hash of all numbers of a dataset, to tell apart data that go by the same name."""
    digest = hashlib.blake2b(digest_size=8)
    for arrays in splits.values():
        for tensor in arrays:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_source(source: Source, name: str) -> Arrays:
    """One source as inputs and targets; a Dataset is read once, which freezes its augmentations."""
    if isinstance(source, str | PathLike):
        path = Path(source)
        pair: tuple[Any, ...] = image_folder(path) if path.is_dir() else _read_npz(path, name)
    elif isinstance(source, TensorDataset):
        pair = source.tensors
    elif isinstance(source, Dataset):
        pair = _stack(source, name)
    elif isinstance(source, tuple | list):
        pair = tuple(source)
    else:
        raise TypeError(
            f"Dataset {name!r} must be (inputs, targets), a torch Dataset, or the path of an .npz file or of a folder of "
            f"images, got {type(source).__name__}."
        )
    if len(pair) != 2:
        raise ValueError(f"Dataset {name!r} must have two parts, inputs and targets, got {len(pair)}.")
    inputs, targets = (_tensor(part, name) for part in pair)
    if len(inputs) != len(targets):
        raise ValueError(
            f"Dataset {name!r} must have one target per input, got {len(inputs)} inputs and {len(targets)} targets."
        )
    if not len(inputs):
        raise ValueError(f"Dataset {name!r} must have examples, got none.")
    for what, part in (("inputs", inputs), ("targets", targets)):
        if part.is_floating_point() or part.is_complex():
            bad = ~part.reshape(len(part), -1).isfinite().all(1)
            if bool(bad.any()):
                raise ValueError(
                    f"The {what} of dataset {name!r} must be finite, but {int(bad.sum())} of {len(part)} examples have "
                    f"missing or infinite values, the first at row {int(bad.nonzero()[0])}. Fill them, or leave these out."
                )
    return inputs, targets


def _check_folders(datasets: Mapping[str, Source | Mapping[Split, Source]]) -> None:
    """Refuse folders with different classes: a label would mean one thing here and another there."""
    parts = [part for given in datasets.values() for part in (given.values() if isinstance(given, Mapping) else [given])]
    folders = [Path(part) for part in parts if isinstance(part, str | PathLike) and Path(part).is_dir()]
    classes = {folder: folder_classes(folder) for folder in folders}
    for folder, found in classes.items():
        if found != classes[folders[0]]:
            raise ValueError(
                f"All folders of a family must have the same classes: {folders[0]} has {', '.join(classes[folders[0]])}, "
                f"{folder} has {', '.join(found)}. Give every folder the same sub-folders, or make two families."
            )


def _split(source: Source | Mapping[Split, Source], name: str, shares: Shares, seed: int) -> Splits:
    if isinstance(source, Mapping):
        if not {"train"} <= set(source) <= set(get_args(Split)):
            raise ValueError(
                f"The splits of dataset {name!r} must be 'train' and, if there are any, 'validation' and 'test', "
                f"got {sorted(map(str, source))}."
            )
        return {split: read_source(part, f"{name}, {split}") for split, part in source.items()}
    inputs, targets = read_source(source, name)
    rows = divide(len(inputs), shares, derive_seed(seed, name))
    return {split: (inputs[i], targets[i]) for split, i in rows.items() if len(i)}


def divide(examples: int, shares: tuple[float, float, float], seed: int) -> dict[Split, Tensor]:
    """Disjoint sets of examples for training, validation and test, in shares that sum to 1."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(derive_seed(seed, "splits", examples)))
    validation, test = round(shares[1] * examples), round(shares[2] * examples)
    parts = order.tensor_split([examples - validation - test, examples - test])
    return dict(zip(get_args(Split), parts, strict=True))


def _tensor(part: Any, name: str) -> Tensor:
    if isinstance(part, np.ndarray) and part.dtype.kind in "USO":
        raise TypeError(
            f"Dataset {name!r} must hold numbers, got an array of {part.dtype}. Number the classes, as in "
            "numpy.unique(labels, return_inverse=True)[1]."
        )
    if isinstance(part, np.ndarray):
        part = torch.from_numpy(part)
    if not isinstance(part, Tensor):
        raise TypeError(f"Dataset {name!r} must hold tensors, got {type(part).__name__}. Convert it with torch.tensor.")
    if not part.dim():
        raise ValueError(f"Dataset {name!r} must hold tensors with a row per example, got a single number.")
    return part.detach()


def _read_npz(path: Path, name: str) -> tuple[Any, ...]:
    if path.suffix != ".npz" or not path.is_file():
        raise ValueError(
            f"Dataset {name!r} must be a folder of images or an existing .npz file, got {path}. Write it with numpy.savez."
        )
    try:
        with open_regular(path) as stream:
            check_claims(stream)
            with np.lib.npyio.NpzFile(stream, allow_pickle=False) as arrays:
                held = sorted(arrays)
                for pair in _PAIRS:
                    if set(pair) <= set(held):
                        return tuple(arrays[k] for k in pair)
    except UNREADABLE as error:
        raise ValueError(
            f"Dataset {name!r} must be a whole .npz file of numbers, but {path} cannot be read ({brief(str(error), 300)}). "
            "Write it again with numpy.savez."
        ) from None
    raise ValueError(f"Dataset {name!r} must hold arrays 'inputs' and 'targets', got {shown(held)} in {path}.")


def _stack(dataset: Dataset[Any], name: str) -> tuple[Any, ...]:
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"Dataset {name!r} must have a length, got {type(dataset).__name__}. List its examples first.")
    # Augmentations draw from the global generator, which is the caller's.
    with seeded(derive_seed("stack", name)):
        items = [dataset[i] for i in range(len(cast(Sized, dataset)))]
    try:
        pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in items]
        return tuple(torch.stack(part) for part in zip(*pairs, strict=True)) if pairs else (torch.empty(0), torch.empty(0))
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(
            f"Every item of dataset {name!r} must be an (input, target) pair of tensors or numbers of one shape: {e}"
        ) from e


def kind_of(arrays: Arrays) -> str:
    """What the examples of a dataset are, in words."""
    said = (f"{tuple(x.shape[1:])} of {x.dtype}" for x in arrays)
    return "inputs {} with targets {}".format(*said).replace("torch.", "")

"""How learned metrics map onto the tensors of a model: which numbers are shared, and which tensor reads which."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

TyingName = Literal["parameter", "channel", "column", "tensor", "role"]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Rename = Mapping[str, str] | Callable[[str], str]

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, FSDP1 and activation checkpointing put into a name, wherever they wrap."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor finds its metric.

    In a learned basis log D is a sum over the rows and the columns of a matrix, and `sides` says how many numbers each of
    them stores; the last of a side stands for all coordinates that are left.
    """

    key: str  # the name of the metric in the table; several tensors share one under the tying "role"
    stored: Shape  # the shape in the table, for one piece
    shape: Shape  # the shape that broadcasts against the coordinates of the tensor
    sides: tuple[int, int] | None = None  # None where the stored numbers are the metric's own

    def spread(self, stored: Tensor) -> Tensor:
        """Logarithms as they are stored, (..., *stored), in the shape of the metric, (..., *shape).

        Example:
            >>> Slot("w", (2,), (1, 4), (0, 2)).spread(torch.tensor([3.0, 5.0]))
            tensor([[3., 5., 5., 5.]])
        """
        if self.sides is None:
            return stored.reshape((*stored.shape[: stored.ndim - len(self.stored)], *self.shape))
        left, right = torch.split(stored, list(self.sides), -1)
        right = _repeat_last(right, self.shape[1]).unsqueeze(-2)
        return _repeat_last(left, self.shape[0]).unsqueeze(-1) + right if self.sides[0] else right

    def gather(self, values: Tensor) -> Tensor:
        """The adjoint of `spread`: numbers in the metric's shape, added up over the coordinates that share one."""
        if self.sides is None:
            return values.reshape((*values.shape[: values.ndim - len(self.shape)], *self.stored))
        sums = []
        for i, count in enumerate(self.sides):
            if count:
                x = values.sum(-1 - i)
                sums.append(torch.cat([x[..., : count - 1], x[..., count - 1 :].sum(-1, keepdim=True)], -1))
        return torch.cat(sums, -1)


def _repeat_last(x: Tensor, length: int) -> Tensor:
    short = length - x.shape[-1]
    return x if short == 0 else torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1)


def stored_shape(tying: TyingName, shape: Shape) -> Shape:
    """The numbers one piece keeps for a tensor: all, one per output channel, one per input column, or a single one.

    Example:
        >>> stored_shape("channel", (16, 3, 5, 5)), stored_shape("column", (16, 3, 5, 5)), stored_shape("tensor", (16, 3))
        ((16,), (3, 5, 5), ())
    """
    return {"parameter": shape, "channel": shape[:1], "column": shape[1:]}.get(tying, ())


def tied_shape(tying: TyingName, shape: Shape) -> Shape:
    """The stored shape with ones where the tensor's dimensions are shared, so that it broadcasts.

    Example:
        >>> tied_shape("channel", (16, 3, 5, 5)), tied_shape("column", (16, 3, 5, 5)), tied_shape("tensor", (16, 3))
        ((16, 1, 1, 1), (1, 3, 5, 5), (1, 1))
    """
    stored = stored_shape(tying, shape)
    shared = (1,) * (len(shape) - len(stored))
    return stored + shared if tying == "channel" else shared + stored


def roles(shapes: Shapes) -> dict[str, str]:
    """The role of every tensor: first, hidden or last layer, weight or bias; norm weight or bias; other.

    Read off names, shapes and order alone: a matrix or a kernel is a weight; a vector beside one is its bias; a vector
    called `weight`, and the bias beside it, belong to a normalisation. The only weight of a linear model is its last.

    Example:
        >>> roles({"0.weight": (8, 4), "0.bias": (8,), "1.weight": (8,), "2.weight": (2, 8)})
        {'0.weight': 'first.weight', '0.bias': 'first.bias', '1.weight': 'norm.weight', '2.weight': 'last.weight'}
    """
    matrices = [n for n, s in shapes.items() if len(s) > 1]
    place = dict.fromkeys(matrices, "hidden") | dict.fromkeys(matrices[:1], "first") | dict.fromkeys(matrices[-1:], "last")
    layer_of = {n.rpartition(".")[0]: n for n in matrices}
    found = {}
    for name, shape in shapes.items():
        layer, _, leaf = name.rpartition(".")
        if len(shape) > 1:
            found[name] = f"{place[name]}.weight"
        elif layer in layer_of:
            found[name] = f"{place[layer_of[layer]]}.bias" if "bias" in leaf else "other"
        elif leaf == "weight" or f"{layer}.weight" in shapes:
            found[name] = f"norm.{'weight' if leaf == 'weight' else 'bias'}"
        else:
            found[name] = "other"
    return found


def match(tying: TyingName, wanted: Mapping[str, Slot], shapes: Shapes, stored: Shapes, *, lenient: bool) -> None:
    """Refuse a model that learned metrics do not fit: a tensor without a metric, another shape, a metric without a tensor.

    `stored` has the shapes of the metrics for one piece, by key. If `lenient`, tensors and metrics may be alone.
    """
    for name, slot in wanted.items():
        if slot.key in stored and stored[slot.key] != slot.stored:
            would = _fitting(stored[slot.key], shapes[name])
            hint = f"It would fit under the tying {' or '.join(map(repr, would))}." if would else "No tying makes them fit."
            raise ValueError(
                f"the tensor {name!r} of shape {shapes[name]} needs a metric of shape {slot.stored} under the tying "
                f"{tying!r}, but the one at hand has shape {stored[slot.key]}. {hint} A geometry learned by role fits other "
                "widths and depths."
            )
        if slot.key not in stored and not lenient:
            raise ValueError(_no_metric(name, shapes[name], slot, stored))
    unused = sorted(set(stored) - {s.key for s in wanted.values()})
    if unused and tying != "role" and not lenient:
        raise ValueError(
            f"the metric {unused[0]!r} of shape {stored[unused[0]]} (and {len(unused) - 1} more) has no tensor in this "
            f"model, which has {some(shapes)}. Pass all parameters of the model (frozen ones cost nothing), map names "
            'with bind(params, rename=...), or ignore such metrics with bind(params, missing="euclidean").'
        )


def _no_metric(name: str, shape: Shape, slot: Slot, stored: Shapes) -> str:
    if slot.key != name:
        return (
            f"the tensor {name!r} of shape {shape} has the role {slot.key!r}, for which nothing was learned (there are "
            f'{some(stored)}). Use bind(params, missing="euclidean") for plain gradient steps there.'
        )
    fits = [f"{k!r} under the tying {t!r}" for k, s in stored.items() for t in _fitting(s, shape)]
    hint = f" By its shape it could read {' or '.join(fits[:3])}." if fits else ""
    return (
        f"the tensor {name!r} of shape {shape} has no metric; there are {some(stored)}.{hint} Map names with "
        f"MetaMD(params, metamd.load(file).bind(params, rename={_renaming(name, stored)}), ...). Or pass bind "
        'missing="euclidean", for plain gradient steps there.'
    )


def _renaming(name: str, stored: Shapes) -> str:
    """What `rename=` could be: the prefix that is too much or missing, where that is all."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        if ".".join(parts[i:]) in stored:
            return f"lambda name: name.removeprefix({'.'.join(parts[:i]) + '.'!r})"
    for key in stored:
        if key.endswith(f".{name}"):
            return f"lambda name: {key.removesuffix(name)!r} + name"
    return "..."


def _fitting(stored: Shape, shape: Shape) -> list[TyingName]:
    return [t for t in get_args(TyingName) if t != "role" and stored_shape(t, shape) == stored]


def some(names: Mapping[str, object]) -> str:
    """The first few names, for a sentence."""
    listed = ", ".join(repr(n) for n in list(names)[:4])
    return f"{listed or 'none'}{', ...' if len(names) > 4 else ''}"


def clean_name(name: str, rename: Rename | None = None) -> str:
    """The name of a tensor without what wrappers put around it, then renamed.

    Example:
        >>> clean_name("module._orig_mod.fc.weight")
        'fc.weight'
    """
    parts = [p for p in name.split(".") if p not in WRAPPER_PARTS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    clean = ".".join(parts)
    return rename(clean) if callable(rename) else (rename or {}).get(clean, clean)


def clean_names(named: Sequence[tuple[str, Tensor]], rename: Rename | None = None) -> dict[str, Tensor]:
    """Cleaned names to tensors; two tensors under one name are refused."""
    cleaned: dict[str, Tensor] = {}
    for name, tensor in named:
        if not isinstance(name, str):
            raise TypeError(f"names of parameters must be texts, got {name!r}. Pass model.named_parameters().")
        clean = clean_name(name, rename)
        if clean in cleaned:
            raise ValueError(
                f"two tensors are called {clean!r} once wrapper prefixes and rename= are applied (the second was {name!r}). "
                "Give rename= a mapping that keeps them apart."
            )
        cleaned[clean] = tensor
    return cleaned

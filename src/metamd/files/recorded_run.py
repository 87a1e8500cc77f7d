"""The record of one ordinary training run, and its file: what the closed form needs, and nothing of the data."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from metamd.files.container import AGAIN, DTYPES, Kind, Tensors, checksum, shapes, strict_json
from metamd.files.header import CHECKS, finite, must, optional, record, table, weight
from metamd.files.learned import check_shapes
from metamd.files.text import shown
from metamd.files.versions import versions
from metamd.potentials.tying import Shape, TyingName, stored_shape, tied_shape

RUN = Kind("recorded run", "metamd.run", "metamd.run.checksum")
RUN_VERSIONS = (1, 2)
"""The versions that are read; a run without anything that the second one brought is written as the first."""

RMS, LENGTHS = "gradient_rms", "lengths"
PARTS = ("start/", "end/", "squares/")
PRODUCTS = "products/"
COLUMNS = 1024
"""Weights with more columns record the squares of every column instead of products."""

_FIELDS = {
    "name": CHECKS["objective"],
    "tying": CHECKS["tying"],
    "phases": CHECKS["pieces"],
    "steps": CHECKS["pieces"],
    "batch_size": CHECKS["batch_size"],
    "optimiser": CHECKS["objective"],
    "versions": CHECKS["versions"],
}
_LATER = {"factor": optional(weight), "score": optional(finite)}
_header = record(
    _FIELDS
    | _LATER
    | {
        "schema_version": must(
            "be 1 or 2", lambda value: type(value) is int and value in RUN_VERSIONS, " A newer metamd may read it."
        ),
        "model": lambda name, rows: CHECKS["model"](name, table("model", rows)),
    },
    _LATER,
)


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """What was recorded of one training run.

    Args:
        start: theta_1 by tensor name, in the order of the layers.
        end: theta_{T+1}.
        squares: sum_t g_t^2 by tensor name, (1, ...), over coordinates that share a metric. Runs that earlier versions
            recorded have several rows, one for each part of the run.
        gradient_rms: root mean square of each tensor's first gradient; zero where none came.
        steps: T.
        tying: which coordinates share a metric.
        batch_size: examples per gradient, if it was said.
        name: what sentences call it.
        optimiser: the class that trained, for the reader.
        versions: library to version.
        products: sum_t G_t'G_t of every weight by tensor name, (n, n) for n columns, estimated from some of the steps; for
            weights with more than 1,024 columns the diagonal alone, (n,). Empty where a tying was recorded instead.
        lengths: how long the steps of the optimiser itself were: the root mean square of the change of every tensor,
            (k, tensors), at k equal distances over the run.
        factor: on the learned steps, where a file was used as it recommends.
        score: how good the run was, lower being better, if that was said.
    """

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    squares: dict[str, Tensor]
    gradient_rms: dict[str, float]
    steps: int
    tying: TyingName = "parameter"
    batch_size: int | None = None
    name: str = ""
    optimiser: str = ""
    versions: dict[str, str] = field(default_factory=versions)
    products: dict[str, Tensor] = field(default_factory=dict)
    lengths: Tensor | None = None
    factor: float | None = None
    score: float | None = None

    @property
    def model(self) -> dict[str, Shape]:
        """Names and shapes of its tensors."""
        return shapes(self.start)

    @property
    def phases(self) -> int:
        """How many rows the sums have."""
        return len(next(iter(self.squares.values())))

    @cached_property
    def diverged(self) -> str:
        """Why nothing can be learned from it, in a sentence; empty if it stayed finite."""
        parts = {"gradient": self.squares, "end": self.end, "start": self.start, "product of gradients": self.products}
        found = ((what, name) for what, part in parts.items() for name, x in part.items() if not bool(x.isfinite().all()))
        return next((f"The {what} of {name!r} is not finite." for what, name in found), "")

    def tied_squares(self, tying: TyingName) -> dict[str, Tensor]:
        """The sums in the broadcastable shapes of a tying at least as coarse as the recorded one."""
        if tying not in COARSER[self.tying]:
            raise ValueError(
                f"{self.label} was recorded with the tying {self.tying!r}, from which {tying!r} cannot be computed. Pass "
                f"tying={self.tying!r}, or record with Recorder(optimiser, tying={tying!r})."
            )
        recorded, wanted = ({n: tied_shape(t, shape) for n, shape in self.model.items()} for t in (self.tying, tying))
        rows = self.phases
        return {n: x.reshape(rows, *recorded[n]).sum_to_size(rows, *wanted[n]) for n, x in self.squares.items()}

    @property
    def label(self) -> str:
        """What a sentence calls it."""
        return f"the run {shown(self.name)}" if self.name else "a run without a name"

    def fingerprint(self) -> str:
        """A digest of what was recorded; the same run has the same one, whatever it is called."""
        return checksum(json.dumps([self.steps, self.tying]), self._tensors())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all. A run that diverged is written too; `metamd.learn` refuses it.

        Args:
            path: where; conventionally `*.run.safetensors`.
        """
        said = {n: getattr(self, n) for n in _FIELDS}
        later = {n: getattr(self, n) for n in _LATER if getattr(self, n) is not None}
        version = 2 if later or self.products or self.lengths is not None else 1
        model = [{"name": n, "shape": list(s)} for n, s in self.model.items()]
        text = json.dumps({"schema_version": version, **said, **later, "model": model}, allow_nan=False)
        RUN.write(Path(path), text, self._tensors(), _digest(self, text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Run":
        """Read a file that `save` wrote; it is treated as hostile, as a learned optimiser is.

        Args:
            path: where.
        """
        return RUN.read(Path(path), _assemble, _digest)

    def _tensors(self) -> Tensors:
        parts = zip(PARTS, (self.start, self.end, self.squares), strict=True)
        held = {f"{prefix}{n}": x.detach().cpu() for prefix, part in parts for n, x in part.items()}
        held |= {f"{PRODUCTS}{n}": x.detach().cpu() for n, x in self.products.items()}
        held |= {} if self.lengths is None else {LENGTHS: self.lengths}
        held = {n: (x if x.dtype in DTYPES else x.float()).clone().contiguous() for n, x in held.items()}
        return held | {RMS: torch.tensor([self.gradient_rms[n] for n in self.start], dtype=torch.float64)}

    def __repr__(self) -> str:
        count = sum(x.numel() for x in self.start.values())
        named = f"{self.name!r}, " if self.name else ""
        return f"Run({named}{self.optimiser}, {self.steps} steps, {len(self.start)} tensors, {count:,} numbers)"


COARSER: dict[TyingName, tuple[TyingName, ...]] = {
    "parameter": ("parameter", "channel", "column", "tensor", "role"),
    "channel": ("channel", "tensor", "role"),
    "column": ("column", "tensor", "role"),
    "tensor": ("tensor", "role"),
    "role": ("tensor", "role"),
}
"""Which tyings can be computed from sums recorded under one. (By role, too, a tensor is recorded by itself.)"""


def _digest(run: Run, text: str) -> str:
    return checksum(f"{run.fingerprint()}\n{text}", {})


def _assemble(text: str, tensors: Tensors) -> Run:
    said = _header("its header", strict_json(text, "its header"))
    said |= {name: said[name] or "" for name in ("name", "optimiser")}
    version = said.pop("schema_version")
    model, phases = said.pop("model"), said.pop("phases")
    if not model:
        raise ValueError(f"model must name one tensor at least, got none. {AGAIN}")
    wanted = {f"{part}{n}": shape for part in PARTS[:2] for n, shape in model.items()}
    wanted |= {f"squares/{n}": (phases, *stored_shape(said["tying"], shape)) for n, shape in model.items()}
    products = {n: shape for n, shape in products_shapes(model).items() if f"{PRODUCTS}{n}" in tensors}
    if version > 1:
        if products and len(products) < len(products_shapes(model)):
            raise ValueError(f"it has products of some weights, and of others none. {AGAIN}")
        wanted |= {f"{PRODUCTS}{n}": shape for n, shape in products.items()}
        wanted |= {LENGTHS: (*tensors[LENGTHS].shape[:1], len(model))} if LENGTHS in tensors else {}
    check_shapes(wanted | {RMS: (len(model),)}, tensors)
    start, end, squares = ({n: tensors[f"{prefix}{n}"] for n in model} for prefix in PARTS)
    said |= {"products": {n: tensors[f"{PRODUCTS}{n}"] for n in products}} if version > 1 else {}
    said |= {"lengths": tensors[LENGTHS]} if version > 1 and LENGTHS in tensors else {}
    rms = dict(zip(model, tensors[RMS].double().tolist(), strict=True))
    diagonals = [x.diagonal() if x.ndim > 1 else x for x in said.get("products", {}).values()]
    lengths = [said["lengths"]] if "lengths" in said else []
    if any(bool((v < 0).any()) for v in (tensors[RMS], *squares.values(), *diagonals, *lengths)):
        raise ValueError(f"sums of squares must not be negative. {AGAIN}")
    return Run(start, end, squares, rms, **said)


def products_shapes(model: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes of the products of gradients that are recorded, by the names of the weights."""
    weights = {n: torch.Size(shape) for n, shape in model.items() if len(shape) > 1}
    columns = {n: shape[1:].numel() for n, shape in weights.items() if shape.numel()}
    return {n: (size, size) if size <= COLUMNS else (size,) for n, size in columns.items()}

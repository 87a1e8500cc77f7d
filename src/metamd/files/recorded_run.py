"""The record of one ordinary training run, and its file: what the closed form needs, and nothing of the data."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metamd.files.container import AGAIN, Container, pack, read_checked, shown, strict_json, write_atomically
from metamd.files.header import CHECKS
from metamd.files.learned import DTYPES, absorb, versions
from metamd.potentials.tying import Shape, TyingName, stored_shape, tied_shape

RUN_KEY, CHECKSUM_KEY = "metamd.run", "metamd.run.checksum"
RUN_VERSION = 1
RMS = "gradient_rms"
PARTS = ("start/", "end/", "squares/")
_FIELDS = {
    "name": CHECKS["objective"],
    "tying": CHECKS["tying"],
    "phases": CHECKS["pieces"],
    "steps": CHECKS["pieces"],
    "batch_size": CHECKS["batch_size"],
    "optimiser": CHECKS["objective"],
    "versions": CHECKS["versions"],
}


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """What was recorded of one training run.

    Args:
        start: theta_1 by tensor name, in the order of the layers.
        end: theta_{T+1}.
        squares: sum_t g_t^2 by tensor name, (phases, ...), over coordinates that share a metric.
        gradient_rms: root mean square of each tensor's first gradient; zero where none came.
        steps: T.
        tying: which coordinates share a metric.
        batch_size: examples per gradient, if it was said.
        name: what sentences call it.
        optimiser: the class that trained, for the reader.
        versions: library to version.
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

    @property
    def model(self) -> dict[str, Shape]:
        """Names and shapes of its tensors."""
        return {n: tuple(x.shape) for n, x in self.start.items()}

    @property
    def phases(self) -> int:
        """Into how many parts of equal length the sums are divided."""
        return len(next(iter(self.squares.values())))

    @cached_property
    def diverged(self) -> str:
        """Why nothing can be learned from it, in a sentence; empty if it stayed finite."""
        for what, tensors in (("gradient", self.squares), ("end", self.end), ("start", self.start)):
            for name, value in tensors.items():
                if not bool(value.isfinite().all()):
                    return f"The {what} of {name!r} is not finite."
        return ""

    def tied_squares(self, tying: TyingName) -> dict[str, Tensor]:
        """The sums in the broadcastable shapes of a tying at least as coarse as the recorded one."""
        if tying not in COARSER[self.tying]:
            raise ValueError(
                f"{self.label} was recorded with the tying {self.tying!r}, from which {tying!r} cannot be computed. Pass "
                f"tying={self.tying!r}, or record with Recorder(optimiser, tying={tying!r})."
            )
        found = {}
        for name, sums in self.squares.items():
            shape = self.model[name]
            whole = sums.reshape(len(sums), *tied_shape(self.tying, shape))
            found[name] = whole.sum_to_size(len(sums), *tied_shape(tying, shape))
        return found

    @property
    def label(self) -> str:
        """What a sentence calls it."""
        return f"the run {shown(self.name)}" if self.name else "a run without a name"

    def fingerprint(self) -> str:
        """A digest of what was recorded; the same run has the same one, whatever it is called."""
        digest = blake2b(json.dumps([self.steps, self.tying]).encode(), digest_size=16)
        absorb(digest, self._tensors())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all. A run that diverged is written too, and refused by whoever learns.

        Args:
            path: where; conventionally `*.run.safetensors`.
        """
        said = {n: getattr(self, n) for n in _FIELDS}
        model = [{"name": n, "shape": list(s)} for n, s in self.model.items()]
        text = json.dumps({"schema_version": RUN_VERSION, **said, "model": model}, allow_nan=False)
        metadata = {RUN_KEY: text, CHECKSUM_KEY: _checksum(text, self.fingerprint())}
        write_atomically(Path(path), pack(self._tensors(), metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Run":
        """Read a file that `save` wrote; it is treated as hostile, as a learned optimiser is.

        Args:
            path: where.
        """
        container = read_checked(Path(path))
        try:
            return _assemble(container)
        except ValueError as error:
            raise ValueError(f"{shown(str(path))} cannot be loaded: {error}") from None

    def _tensors(self) -> dict[str, Tensor]:
        parts = zip(PARTS, (self.start, self.end, self.squares), strict=True)
        held = {f"{prefix}{n}": x.detach().cpu() for prefix, part in parts for n, x in part.items()}
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


def _checksum(text: str, content: str) -> str:
    return blake2b(f"{content}\n{text}".encode(), digest_size=16).hexdigest()


def _assemble(container: Container) -> Run:
    metadata, tensors = container.metadata, container.tensors
    if set(metadata) != {RUN_KEY, CHECKSUM_KEY}:
        raise ValueError(
            f"its metadata must have the entries {RUN_KEY!r} and {CHECKSUM_KEY!r}, got {shown(sorted(metadata))}: it is a "
            "safetensors file, but no recorded run."
        )
    said, model = _header(metadata[RUN_KEY])
    _check_shapes(said, model, tensors)
    start, end, squares = ({n: tensors[f"{prefix}{n}"] for n in model} for prefix in PARTS)
    rms = dict(zip(model, tensors[RMS].double().tolist(), strict=True))
    said.pop("phases")  # the shape of the sums says it
    if any(bool((v < 0).any()) for v in (tensors[RMS], *squares.values())):
        raise ValueError(f"sums of squares must not be negative. {AGAIN}")
    run = Run(start, end, squares, rms, **said)
    if metadata[CHECKSUM_KEY] != _checksum(metadata[RUN_KEY], run.fingerprint()):
        raise ValueError(f"its content does not match its checksum. {AGAIN}")
    return run


def _header(text: str) -> tuple[dict[str, Any], dict[str, Shape]]:
    plain = strict_json(text, "the header of the run")
    if not isinstance(plain, dict) or set(plain) != {"schema_version", "model", *_FIELDS}:
        raise ValueError(f"the header of a run must have exactly schema_version, model, {', '.join(_FIELDS)}.")
    if type(plain["schema_version"]) is not int or plain["schema_version"] != RUN_VERSION:
        raise ValueError(
            f"schema_version of a run must be {RUN_VERSION}, got {shown(plain['schema_version'])}. A newer metamd may "
            "read it."
        )
    said = {name: check(name, plain[name]) for name, check in _FIELDS.items()}
    for name in ("name", "optimiser"):
        said[name] = said[name] or ""
    rows = plain["model"]
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) and set(r) == {"name", "shape"} for r in rows):
        raise ValueError(f"model must be a list of {{'name', 'shape'}}, got {shown(rows)}.")
    if not all(isinstance(r["name"], str) for r in rows) or len({r["name"] for r in rows}) < len(rows):
        raise ValueError(f"model must give every tensor a name of its own, got {shown(rows)}.")
    return said, CHECKS["model"]("model", {r["name"]: r["shape"] for r in rows})


def _check_shapes(said: Mapping[str, Any], model: Mapping[str, Shape], tensors: Mapping[str, Tensor]) -> None:
    wanted: dict[str, Shape] = {RMS: (len(model),)}
    for name, shape in model.items():
        wanted |= {f"start/{name}": shape, f"end/{name}": shape}
        wanted[f"squares/{name}"] = (said["phases"], *stored_shape(said["tying"], shape))
    found = {n: tuple(x.shape) for n, x in tensors.items()}
    for name in sorted(set(wanted) ^ set(found)):
        where = "is missing" if name in wanted else "is not announced by its header"
        raise ValueError(f"the tensor {shown(name)} {where}. {AGAIN}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(
                f"the tensor {shown(name)} must have the shape {shown(shape)}, got {shown(found[name])}. {AGAIN}"
            )

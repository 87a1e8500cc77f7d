"""The record of one ordinary training run, and its file: what the closed form needs, and nothing of the data."""

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from metamd.files.container import AGAIN, DTYPES, Kind, Tensors, checksum, shapes, strict_json
from metamd.files.header import CHECKS, must, record, table
from metamd.files.learned import check_shapes
from metamd.files.text import shown
from metamd.files.versions import versions
from metamd.potentials.tying import Shape, TyingName, stored_shape, tied_shape

RUN = Kind("recorded run", "metamd.run", "metamd.run.checksum")
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
_header = record(
    _FIELDS
    | {
        "schema_version": must(
            f"be {RUN_VERSION}", lambda value: type(value) is int and value == RUN_VERSION, " A newer metamd may read it."
        ),
        "model": lambda name, rows: CHECKS["model"](name, table("model", rows)),
    }
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
        return shapes(self.start)

    @property
    def phases(self) -> int:
        """How many rows the sums have."""
        return len(next(iter(self.squares.values())))

    @cached_property
    def diverged(self) -> str:
        """Why nothing can be learned from it, in a sentence; empty if it stayed finite."""
        parts = {"gradient": self.squares, "end": self.end, "start": self.start}
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
        """Write the file whole or not at all. A run that diverged is written too, and refused by whoever learns.

        Args:
            path: where; conventionally `*.run.safetensors`.
        """
        said = {n: getattr(self, n) for n in _FIELDS}
        model = [{"name": n, "shape": list(s)} for n, s in self.model.items()]
        text = json.dumps({"schema_version": RUN_VERSION, **said, "model": model}, allow_nan=False)
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
    del said["schema_version"]
    model, phases = said.pop("model"), said.pop("phases")
    if not model:
        raise ValueError(f"model must name one tensor at least, got none. {AGAIN}")
    wanted = {f"{part}{n}": shape for part in PARTS[:2] for n, shape in model.items()}
    wanted |= {f"squares/{n}": (phases, *stored_shape(said["tying"], shape)) for n, shape in model.items()}
    check_shapes(wanted | {RMS: (len(model),)}, tensors)
    start, end, squares = ({n: tensors[f"{prefix}{n}"] for n in model} for prefix in PARTS)
    rms = dict(zip(model, tensors[RMS].double().tolist(), strict=True))
    if any(bool((v < 0).any()) for v in (tensors[RMS], *squares.values())):
        raise ValueError(f"sums of squares must not be negative. {AGAIN}")
    return Run(start, end, squares, rms, **said)

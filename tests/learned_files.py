"""Learned optimisers and their files, whole and taken apart, for the tests."""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from metamd import LearnedOptimiser, MaxDiagonal, Online, Usage
from metamd.files.header import Header
from metamd.potentials.basis import Basis

SHAPES = {"fc1.weight": (4, 3), "fc1.bias": (4,), "fc2.weight": (2, 4), "fc2.bias": (2,)}
TYINGS = ("parameter", "channel", "column", "tensor", "role")


def model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def learned(
    pieces: int = 2, tying: Any = "parameter", dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> LearnedOptimiser:
    """A learned optimiser with random metrics."""
    generator = torch.Generator().manual_seed(seed)
    bound = MaxDiagonal(pieces, tying=tying).bind(model())
    log_d = {k: torch.randn(v.shape, generator=generator).to(dtype) for k, v in bound.log_d.items()}
    offsets = torch.randn(pieces, generator=generator, dtype=torch.float64)
    return LearnedOptimiser.from_potential(bound.with_metrics(log_d, offsets), **fields)


def turned(
    pieces: int = 2, sides: Any = "right", rank: int | None = None, seed: int = 0, tying: Any = "tensor", **fields: Any
) -> LearnedOptimiser:
    """A learned optimiser in a random basis, with random metrics."""
    generator = torch.Generator().manual_seed(seed)
    blank = MaxDiagonal(pieces, tying=tying, basis=Basis(sides)).bind(model())
    factors = {}
    for place in blank.basis.places.values():
        for side in ("left", "right") if sides == "both" else ("right",):
            n = place.sizes[side]
            q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
            factors[f"{side}/{place.key}"] = q[:, : rank or n].float().contiguous()
    basis = blank.basis.with_factors(factors)
    bound = MaxDiagonal(pieces, tying=tying, basis=basis).bind(model())
    log_d = {k: torch.randn(v.shape, generator=generator) for k, v in bound.log_d.items()}
    offsets = torch.randn(pieces, generator=generator, dtype=torch.float64)
    return LearnedOptimiser.from_potential(bound.with_metrics(log_d, offsets), **fields)


def same(a: LearnedOptimiser, b: LearnedOptimiser) -> bool:
    """Equal headers, and metrics and offsets equal bit by bit. (Compared here without the library's fingerprint.)"""
    left, right = ({**x.potential.log_d, "offsets/": x.potential.offsets, **x.potential.basis.factors} for x in (a, b))
    return (
        a.header == b.header
        and list(left) == list(right)
        and all(v.dtype == right[k].dtype and torch.equal(v, right[k]) for k, v in left.items())
    )


class Parts:
    """A file taken apart, to be changed and put together again without anybody's checks."""

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[:8], "little")
        self.table: dict[str, Any] = json.loads(data[8 : 8 + length])
        self.data = bytearray(data[8 + length :])

    def header(self, **changes: Any) -> None:
        """Change fields of the MetaMD header; `...` removes one."""
        metadata = self.table["__metadata__"]
        fields = {**json.loads(metadata["metamd"]), **changes}
        metadata["metamd"] = json.dumps({k: v for k, v in fields.items() if v is not ...})

    def numbers(self, name: str, values: list[float]) -> None:
        """Overwrite the first numbers of a tensor."""
        entry = self.table[name]
        raw = torch.tensor(values, dtype={"F64": torch.float64, "F32": torch.float32}[entry["dtype"]]).numpy().tobytes()
        self.data[entry["data_offsets"][0] : entry["data_offsets"][0] + len(raw)] = raw

    def join(self, text: str | None = None) -> bytes:
        """The file, with another text in place of its header if given."""
        header = (json.dumps(self.table) if text is None else text).encode("utf-8", "surrogatepass")
        return len(header).to_bytes(8, "little") + header + bytes(self.data)

    def copy(self) -> "Parts":
        return copy.deepcopy(self)


def file_bytes(path: Path, optimiser: LearnedOptimiser) -> bytes:
    optimiser.save(path)
    return path.read_bytes()


def full_header() -> Header:
    """A header with every field filled."""
    optimiser = turned(
        model=SHAPES,
        family={"name": "quadratic", "dimensions": [2, 3], "noise": None},
        horizon=100,
        batch_size=32,
        gradient_scale={"fc1.weight": 0.25, "fc2.bias": 0.0},
        objective="Regret()",
        estimator="ClosedForm()",
        seeds=(0, 7),
        task_hashes=("0" * 31 + "f",),
        cost={"gradient_evaluations": 1000, "seconds": 1.5},
        held_out={"loss": {"mean": 0.1, "tasks": 20}},
        learned_from={
            "prior": 0.1,
            "runs": [{"name": "monday", "fingerprint": "ab", "steps": 9, "batch_size": None, "weight": 0.5}],
        },
        max_norm=12.5,
        target_loss=-0.25,
        usage=Usage("online", 0.8, "linear", 1.4).to_dict(),
        choice={"score": "area under the logarithm of the loss", "judged_on": "auto"},
        online=Online("sum", scale={"fc1.weight": 20.0}).to_dict(),
    )
    return optimiser.with_start(model()).header

"""The learned-optimiser file: the metrics of a potential in safetensors, with a JSON header that says where from."""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from metamd._version import __version__
from metamd.files.container import AGAIN, Container, pack, read_checked, shown, write_atomically
from metamd.files.costs import total_cost
from metamd.files.header import SCHEMA_VERSIONS, Header
from metamd.files.shipped import locate
from metamd.files.start import LearnedStart
from metamd.files.usage import Usage
from metamd.potentials.base import Named
from metamd.potentials.basis import Identity
from metamd.potentials.diagonal import MaxDiagonal, Missing
from metamd.potentials.kronecker import Learned
from metamd.potentials.online import Online
from metamd.potentials.tying import Rename, Shape

HEADER_KEY, CHECKSUM_KEY = "metamd", "metamd.checksum"
MOMENTS, START = ("moments/x/", "moments/y/"), "start/"
ORTHONORMAL = 1e-3
"""How far the products of a basis's columns may be from those of orthonormal ones; float32 leaves about 1e-6."""

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Moments:
    """What one run says about every metric: E = sum_i (D_i x_i + y_i / D_i) / 2.

    In a learned basis, weight matrices have matrices: E = (tr D X + tr D^-1 Y) / 2 under "right/key" with X = delta' delta /
    eta and Y = eta sum_t G_t'G_t; with factors on both sides L or L^-1 stands between, and "left/key" has those of L. Of a
    side without a factor they are the diagonals.

    Args:
        x: the squared displacements delta_i^2 / eta, by key, summed over tied coordinates.
        y: the squared gradients eta sum_t g_ti^2, likewise.
    """

    x: dict[str, Tensor]
    y: dict[str, Tensor]

    @classmethod
    def total(cls, moments: "Sequence[Moments]", weights: Sequence[float]) -> "Moments":
        """The weighted sum, over every key that any of them has."""
        sums: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for weight, one in zip(weights, moments, strict=True):
            for into, part in zip(sums, (one.x, one.y), strict=True):
                for key, value in part.items():
                    into[key] = into[key] + weight * value if key in into else weight * value
        return cls(*sums)


@dataclass(frozen=True, eq=False, repr=False)
class LearnedOptimiser:
    """A learned potential and the header that says what it was learned on.

    Args:
        header: structure and provenance.
        potential: the metrics; `MetaMD` binds them to its parameters if they are not bound yet.
        moments: the sums over runs that the metrics were computed from, kept so that later runs can be added to them;
            `dataclasses.replace(learned, moments=None)` is a third of the size and as good for training.
        start: parameters that the family's tasks are best begun at, if they were learned; see `with_start`.

    Example:
        >>> potential = MaxDiagonal(pieces=2).bind({"x": torch.zeros(3)})
        >>> learned = LearnedOptimiser.from_potential(potential, horizon=100, family={"name": "quadratic"})
        >>> learned
        LearnedOptimiser(max-diagonal, 2 pieces, tying='parameter', centre='start', 1 tensor, 6 numbers, horizon=100)
    """

    header: Header
    potential: MaxDiagonal
    moments: Moments | None = None
    start: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        held = _structure(self.potential) | _tables(self.potential)
        for name, value in held.items():
            said = getattr(self.header, name)
            if said != value:
                raise ValueError(
                    f"the header says {name} = {shown(said)}, but the potential has {shown(value)}. Make both agree with "
                    "LearnedOptimiser.from_potential(potential, ...)."
                )
        if self.moments is not None and self.header.learned_from is None:
            raise ValueError("moments need a header that says which runs they are of: give it learned_from=.")
        if self.header.start != {n: tuple(x.shape) for n, x in (self.start or {}).items()}:
            raise ValueError("the header must announce the learned start. Make both agree with learned.with_start(start).")

    @classmethod
    def from_potential(cls, potential: MaxDiagonal, **provenance: Any) -> "LearnedOptimiser":
        """Describe a potential: structure and library versions are read off, the rest is given.

        Args:
            potential: with metrics, bound or not.
            provenance: any other field of `Header`, such as `family`, `horizon` or `gradient_scale`.
        """
        known = {"model": _model(potential), "versions": versions()}
        structure = _structure(potential) | _tables(potential)
        return cls(Header(**{**known, **provenance, **structure}), potential)

    def bind(self, named: Named, *, rename: Rename | None = None, missing: Missing = "error") -> "LearnedOptimiser":
        """The same learned optimiser with its potential bound to the tensors of a model; this one stays as it is.

        Args:
            named: the model's named parameters, in the order of its layers.
            rename: maps names of the model to names of the metrics.
            missing: "euclidean" gives tensors without a metric plain gradient steps. The metrics are then no longer those
                that the moments are of, which are left out.
        """
        bound = self.potential.bind(named, rename=rename, missing=missing)
        tables: dict[str, Any] = _tables(bound)
        header = replace(self.header, **tables)
        moments = self.moments if header.tensors == self.header.tensors else None
        return LearnedOptimiser(header, bound, moments, self.start)

    def with_start(self, start: Mapping[str, Tensor], tasks: Iterable[str] = ()) -> "LearnedOptimiser":
        """The same with a start that is kept in the file; docs/shared-start.md says how a model begins there.

        Args:
            start: parameters by name. What `learn_start` finds also knows its tasks, so that none of them is held out
                later, and its cost, which is added to that of learning.
            tasks: hashes of the tasks that another start was learned on.
        """
        other = [n for n, x in start.items() if self.header.model.get(n, tuple(x.shape)) != tuple(x.shape)]
        other += [n for n in self.header.model if n not in start]
        if other:
            raise ValueError(
                f"the start must have every parameter of the model that this was learned on, in its shape, but {other[0]!r} "
                "is missing or has another shape. Pass what metamd.learn_start(family) gives."
            )
        kept = {n: x.detach().cpu().clone() for n, x in start.items()}
        shapes = {n: tuple(x.shape) for n, x in kept.items()}
        known = start if isinstance(start, LearnedStart) else LearnedStart({})
        hashes = tuple(dict.fromkeys([*self.header.task_hashes, *known.tasks, *tasks]))
        cost = total_cost(self.header.cost, known.cost)
        newest = replace(self.header, schema_version=SCHEMA_VERSIONS[-1])  # older ones have no start
        return replace(self, start=kept, header=replace(newest, start=shapes, task_hashes=hashes, cost=cost))

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that it was learned on, as far as its header names them."""
        about = self.header.family or {}
        found = about.get("domains") or about.get("datasets")
        return tuple(map(str, found)) if isinstance(found, list | dict) else ()

    @property
    def usage(self) -> Usage:
        """How it is best used on its family; plainly, unless `learn_usage` has found out more."""
        return Usage(**self.header.usage or {})

    @property
    def online(self) -> Online | None:
        """The rule and the scales of its online metric, if they were learned."""
        return None if self.header.online is None else Online.from_dict(self.header.online)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all: a crash, a full disk or a kill leaves what was there before.

        Args:
            path: where; conventionally `*.safetensors`.
        """
        tensors, moments = _tensors(self.potential), _moment_tensors(self.moments)
        check_metrics(tensors)
        check_factors(self.potential.basis.factors())
        _check_moments(self.header, moments)
        others = moments | _start_tensors(self.start)
        _check_start(others)
        text = self.header.to_json()
        Header.from_json(text)  # what is saved can be loaded
        metadata = {HEADER_KEY: text, CHECKSUM_KEY: _checksum(text, self.fingerprint(), others)}
        write_atomically(Path(path), pack({**tensors, **others}, metadata))

    def fingerprint(self) -> str:
        """The fingerprint of the geometry; what the header says about its origin does not enter."""
        return fingerprint(self.potential)

    def __repr__(self) -> str:
        header, count = self.header, sum(v.numel() for v in self.potential.log_d.values())
        parts = [
            header.potential,
            f"{header.pieces} piece{'s' * (header.pieces > 1)}",
            f"tying={header.tying!r}",
            f"centre={header.centre!r}",
            f"{len(header.tensors)} tensor{'s' * (len(header.tensors) > 1)}",
            f"{count:,} number{'s' * (count != 1)}",
        ]
        if header.horizon is not None:
            parts.append(f"horizon={header.horizon}")
        if header.usage is not None:
            parts.append(f"recommended: {self.usage}")
        return f"LearnedOptimiser({', '.join(parts)})"


def load(path_or_name: str | os.PathLike[str]) -> LearnedOptimiser:
    """Read a learned optimiser: a path, or the name of one shipped with the package.

    The file is treated as hostile: sizes, types and values are checked before they are used, nothing in it is executed,
    and what does not hold is a `ValueError` that says so.

    Args:
        path_or_name: a text of lower-case letters, digits and hyphens is a name; anything else is a path.

    Example:
        >>> load("no-such-optimiser")
        Traceback (most recent call last):
        FileNotFoundError: no learned optimiser 'no-such-optimiser' is shipped with metamd ...
    """
    path = locate(path_or_name)
    container = read_checked(path)
    try:
        return _assemble(container)
    except ValueError as error:
        raise ValueError(f"{shown(str(path))} cannot be loaded: {error}") from None


def _assemble(container: Container) -> LearnedOptimiser:
    """Hold the tensors against the header and make the potential of them."""
    metadata, tensors = container.metadata, container.tensors
    if set(metadata) != {HEADER_KEY, CHECKSUM_KEY}:
        raise ValueError(
            f"its metadata must have the entries {HEADER_KEY!r} and {CHECKSUM_KEY!r}, got {shown(sorted(metadata))}: it is "
            "a safetensors file, but no learned optimiser."
        )
    header = Header.from_json(metadata[HEADER_KEY])
    moments = {n: v for n, v in tensors.items() if n.startswith(MOMENTS)} if header.learned_from else {}
    tensors = {n: v for n, v in tensors.items() if n not in moments}
    _check_shapes(header, tensors)
    _check_start(tensors)
    start = {n: tensors.pop(f"{START}{n}") for n in header.start}
    check_metrics(tensors)
    _check_moments(header, moments)
    log_d = {k: tensors[f"log_d/{k}"] for k in header.tensors}
    # The offsets have the shape (pieces,) by now, so that `pieces` is no larger than the file.
    factors = {k: tensors[f"basis/{k}"] for k in header.factors}
    check_factors(factors)
    basis = Identity() if header.basis == "identity" else Learned(header.basis, factors=factors)  # type: ignore[arg-type]
    blank = MaxDiagonal(header.pieces, tying=header.tying, centre=header.centre, basis=basis)
    potential = blank.with_metrics(log_d, tensors["offsets"])
    others = moments | _start_tensors(start)
    if metadata[CHECKSUM_KEY] != _checksum(metadata[HEADER_KEY], fingerprint(potential), others):
        raise ValueError(f"its content does not match its checksum. {AGAIN}")
    x, y = ({k: moments[f"{prefix}{k}"] for k in header.tensors} if moments else {} for prefix in MOMENTS)
    return LearnedOptimiser(header, potential, Moments(x, y) if moments else None, start or None)


def _check_shapes(header: Header, tensors: Mapping[str, Tensor]) -> None:
    wanted = {"offsets": (header.pieces,)} | {f"log_d/{k}": s for k, s in header.tensors.items()}
    wanted |= {f"basis/{k}": s for k, s in header.factors.items()} | {f"{START}{n}": s for n, s in header.start.items()}
    for name in sorted(set(wanted) - set(tensors)):
        raise ValueError(f"the tensor {shown(name)}, which its header announces, is missing. {AGAIN}")
    for name in sorted(set(tensors) - set(wanted)):
        raise ValueError(f"it holds a tensor {shown(name)} that its header does not announce. {AGAIN}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"the tensor {shown(name)} must have the shape {shown(shape)} its header announces, got "
                f"{shown(tuple(tensors[name].shape))}. {AGAIN}"
            )


def check_metrics(tensors: Mapping[str, Tensor]) -> None:
    """Refuse metrics that give no step: every log D finite, D = exp(log D) and 1/D finite and positive in its own type.

    Args:
        tensors: `offsets` and `log_d/<key>`, as in the file.
    """
    for name, value in tensors.items():
        if name.startswith("basis/"):  # `check_factors` looks at them
            continue
        if value.dtype not in DTYPES:
            raise ValueError(f"{shown(name)} must be float64, float32 or bfloat16, got {value.dtype}. Convert it first.")
        if name == "offsets" and value.dtype != torch.float64:
            raise ValueError(f"'offsets' must be float64, got {value.dtype}. Convert them with offsets.double().")
        if not value.numel():
            continue
        ends = torch.stack(value.aminmax())  # exp is monotone, and a NaN anywhere shows in both ends
        if not bool(torch.isfinite(ends).all()):
            raise ValueError(f"{shown(name)} must be finite, but it contains NaN or infinity.")
        d = ends.exp()
        usable = torch.isfinite(d) & (d > 0) & torch.isfinite(1 / d) & (1 / d > 0)
        if name != "offsets" and not bool(usable.all()):
            raise ValueError(
                f"{shown(name)} holds log D = {float(ends[~usable][0]):.4g}, for which the metric D = exp(log D) or the "
                f"step size 1/D is zero or infinite in {DTYPES[value.dtype]}. Metrics must be positive and finite."
            )


def check_factors(factors: Mapping[str, Tensor]) -> None:
    """Refuse a basis whose columns are not orthonormal: its metrics would not be those that the file states.

    Args:
        factors: (n, r) each, by side and key.
    """
    for name, columns in factors.items():
        if columns.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"the basis {shown(name)} must be float32 or float64, got {columns.dtype}.")
        off = (columns.mT @ columns - torch.eye(columns.shape[1], dtype=columns.dtype)).abs()
        if off.numel() and not float(off.max()) <= ORTHONORMAL:
            raise ValueError(f"the columns of the basis {shown(name)} must be orthonormal, but they are not. {AGAIN}")


def _start_tensors(start: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    return {f"{START}{n}": x.contiguous() for n, x in (start or {}).items()}


def _check_start(tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if name.startswith(START) and (value.dtype not in DTYPES or not bool(value.isfinite().all())):
            raise ValueError(f"{shown(name)} must be finite numbers in float64, float32 or bfloat16. {AGAIN}")


def _check_moments(header: Header, moments: Mapping[str, Tensor]) -> None:
    if not moments:
        return
    wanted = {f"{prefix}{k}": s[1:] for prefix in MOMENTS for k, s in header.tensors.items()}
    if header.pieces != 1 or {n: tuple(v.shape) for n, v in moments.items()} != wanted:
        raise ValueError(f"moments must be of one piece and have the shapes of its metrics, for all of them. {AGAIN}")
    for name, value in moments.items():
        if value.dtype not in DTYPES or not bool((value.isfinite() & (value >= 0)).all()):
            raise ValueError(f"{shown(name)} must hold finite numbers >= 0 in float64, float32 or bfloat16.")


def fingerprint(potential: MaxDiagonal) -> str:
    """A digest of the geometry: equal for equal metrics, offsets and structure, whatever it is bound to.

    Args:
        potential: with metrics, bound or not.

    Example:
        >>> phi = MaxDiagonal(pieces=2).bind({"x": torch.zeros(3)})
        >>> fingerprint(phi) == fingerprint(phi.bind({"x": torch.ones(3)}))
        True
    """
    digest = blake2b(json.dumps(_structure(potential), sort_keys=True).encode(), digest_size=16)
    absorb(digest, _tensors(potential))
    return digest.hexdigest()


def absorb(digest: "blake2b", tensors: Mapping[str, Tensor]) -> None:
    """Add tensors to a digest: names, types, shapes and bytes, in the order of the names.

    Args:
        digest: what is updated.
        tensors: on the CPU and contiguous.
    """
    for name, value in sorted(tensors.items()):
        digest.update(json.dumps([name, DTYPES.get(value.dtype, str(value.dtype)), list(value.shape)]).encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)


def versions() -> dict[str, str]:
    """The versions of the libraries that decide what a run computes."""
    return {
        "metamd": __version__,
        "torch": str(torch.__version__),
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def _checksum(text: str, geometry: str, moments: Mapping[str, Tensor]) -> str:
    digest = blake2b(f"{geometry}\n{text}".encode(), digest_size=16)
    absorb(digest, moments)
    return digest.hexdigest()


def _structure(potential: MaxDiagonal) -> dict[str, Any]:
    return {
        "potential": "max-diagonal",
        "basis": potential.basis.kind,
        "pieces": potential.pieces,
        "tying": potential.tying,
        "centre": potential.centre,
    }


def _tables(potential: MaxDiagonal) -> dict[str, dict[str, Shape]]:
    """The shapes of all that was learned."""
    log_d, factors = potential.log_d, potential.basis.factors()
    return {
        "tensors": {k: tuple(v.shape) for k, v in log_d.items()},
        "factors": {k: tuple(v.shape) for k, v in factors.items()},
    }


def _model(potential: MaxDiagonal) -> dict[str, Shape]:
    """Names and shapes of the tensors a potential is bound to, where it knows them."""
    if potential.tying == "parameter":
        return {n: slot.stored for n, slot in potential.slots.items()}
    return {n: tuple(x.shape) for n, x in potential.start.items()}


def _tensors(potential: MaxDiagonal) -> dict[str, Tensor]:
    """What the file stores, on the CPU and with memory of its own."""
    held = {"offsets": potential.offsets.double()} | {f"log_d/{k}": v for k, v in potential.log_d.items()}
    held |= {f"basis/{k}": v for k, v in potential.basis.factors().items()}
    return {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in held.items()}


def _moment_tensors(moments: Moments | None) -> dict[str, Tensor]:
    if moments is None:
        return {}
    held = {f"{prefix}{k}": v for prefix, part in zip(MOMENTS, (moments.x, moments.y), strict=True) for k, v in part.items()}
    return {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in held.items()}

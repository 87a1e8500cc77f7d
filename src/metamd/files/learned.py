"""What is learned, and its file: the metrics of a potential, a header that says where from, and a learned start."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metamd.files import hub
from metamd.files.container import AGAIN, DTYPES, Kind, Tensors, checksum, shapes, strict_json
from metamd.files.header import CHECKS, Header, record, text_list
from metamd.files.shipped import locate
from metamd.files.text import shown
from metamd.files.usage import Usage
from metamd.files.versions import versions
from metamd.potentials.base import Named
from metamd.potentials.basis import Basis
from metamd.potentials.diagonal import MaxDiagonal, Missing
from metamd.potentials.online import Online
from metamd.potentials.tying import Rename, Shape

LEARNED, START = Kind("learned optimiser", "metamd"), Kind("learned start", "metamd.start", described=False)
MOMENTS = ("moments/x/", "moments/y/")
ORTHONORMAL = 1e-3
"""How far U'U of a basis may be from the identity; float32 leaves about 1e-6."""


@dataclass(frozen=True)
class Moments:
    """What one run says about every metric: E = sum_i (D_i x_i + y_i / D_i) / 2.

    In a learned basis, a weight has two matrices under "right/key": E = (tr D X + tr D^-1 Y) / 2 with X = delta' delta / eta
    and Y = eta sum_t G_t'G_t. In files with factors on both sides, L or L^-1 stands between, and "left/key" has the matrices
    of L. A side without a factor has their diagonals alone.

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


def total_cost(*costs: Mapping[str, float]) -> dict[str, float]:
    """The sum of several costs, such as `header.cost`, entry by entry."""
    names = dict.fromkeys(name for cost in costs for name in cost)
    return {name: sum(cost.get(name, 0) for cost in costs) for name in names}


class LearnedStart(Tensors):
    """Parameters by name, as `metamd.learn_start` finds them, with the tasks and the cost that they were learned from.

    Args:
        params: by name.
        tasks: hashes of the tasks that they were learned on.
        cost: of learning them, as headers have it.
    """

    def __init__(
        self, params: Mapping[str, Tensor], tasks: Iterable[str] = (), cost: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(params)
        self.tasks, self.cost = tuple(tasks), dict(cost or {})

    def save(self, path: str | Path) -> None:
        """Write it whole or not at all.

        Args:
            path: where; conventionally `*.safetensors`.
        """
        # safetensors has an order of its own
        text = json.dumps({"names": list(self), "tasks": list(self.tasks), "cost": self.cost}, allow_nan=False)
        START.write(Path(path), text, _copied(self))

    @classmethod
    def load(cls, path: str | Path) -> "LearnedStart":
        """Read what `save` wrote; nothing in it is executed.

        Args:
            path: of the file.
        """

        def assemble(text: str, tensors: Tensors) -> LearnedStart:
            fields = {"names": text_list, "tasks": text_list, "cost": CHECKS["cost"]}
            said = record(fields)("its record", strict_json(text, "its record"))
            if sorted(said["names"]) != sorted(tensors):
                raise ValueError(f"its record must name every tensor once, got {shown(said['names'])}. {AGAIN}")
            return cls({n: tensors[n] for n in said["names"]}, said["tasks"], said["cost"])

        return START.read(Path(path), assemble)


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
        for name, value in (_structure(self.potential) | _tables(self.potential)).items():
            if (said := getattr(self.header, name)) != value:
                raise ValueError(
                    f"the header says {name} = {shown(said)}, but the potential has {shown(value)}. Make both agree with "
                    "LearnedOptimiser.from_potential(potential, ...)."
                )
        if self.moments is not None and self.header.learned_from is None:
            raise ValueError("moments need a header that says which runs they are of: give it learned_from=.")
        if self.header.start != shapes(self.start or {}):
            raise ValueError("the header must announce the learned start. Make both agree with learned.with_start(start).")

    @classmethod
    def from_potential(cls, potential: MaxDiagonal, **provenance: Any) -> "LearnedOptimiser":
        """Describe a potential: structure and library versions are read off, the rest is given.

        Args:
            potential: with metrics, bound or not.
            provenance: any other field of `Header`, such as `family`, `horizon` or `gradient_scale`.
        """
        model = shapes(potential.start)
        if potential.tying == "parameter":  # then it knows the tensors without a start too
            model = {n: slot.stored for n, slot in potential.slots.items()}
        said = {"model": model, "versions": versions(), **provenance}
        return cls(Header(**said | _structure(potential) | _tables(potential)), potential)

    def bind(self, named: Named, *, rename: Rename | None = None, missing: Missing = "error") -> "LearnedOptimiser":
        """The same learned optimiser with its potential bound to the tensors of a model; this one stays as it is.

        Args:
            named: the model's named parameters, in the order of its layers.
            rename: maps names of the model to names of the metrics.
            missing: "euclidean" gives tensors without a metric plain gradient steps. The moments, which belong to all
                metrics of the file, are then left out.
        """
        bound = self.potential.bind(named, rename=rename, missing=missing)
        header = replace(self.header, **_tables(bound))
        return LearnedOptimiser(header, bound, self.moments if header.tensors == self.header.tensors else None, self.start)

    def with_start(self, start: Mapping[str, Tensor]) -> "LearnedOptimiser":
        """The same with a start that is kept in the file; docs/fine-tuning.md says how a model begins there.

        Args:
            start: parameters by name. A `LearnedStart`, which `learn_start` finds, also knows its tasks, so that none of
                them is held out later, and its cost, which is added to that of learning.
        """
        given = shapes(start)
        if other := [n for n, shape in self.header.model.items() if given.get(n) != shape]:
            raise ValueError(
                f"the start must have every parameter of the model that this was learned on, in its shape, but {other[0]!r} "
                "is missing or has another shape. Pass what metamd.learn_start(family) gives."
            )
        kept = {n: x.detach().cpu().clone() for n, x in start.items()}
        known = start if isinstance(start, LearnedStart) else LearnedStart({})
        hashes = tuple(dict.fromkeys([*self.header.task_hashes, *known.tasks]))
        cost = total_cost(self.header.cost, known.cost)
        return replace(self, start=kept, header=replace(self.header, start=given, task_hashes=hashes, cost=cost))

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that it was learned on, as far as its header names them."""
        about = self.header.family or {}
        found = about.get("domains") or about.get("datasets")
        return tuple(map(str, found)) if isinstance(found, list | dict) else ()

    @property
    def usage(self) -> Usage:
        """How it is best used on its family, as `learn_usage` found; plainly if that was not asked."""
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
        tensors, others = _tensors(self.potential), _other_tensors(self.moments, self.start)
        _check(self.header, tensors | others)
        text = self.header.to_json()
        Header.from_json(text)  # what is saved can be loaded
        LEARNED.write(Path(path), text, tensors | others, _digest(self, text))

    @classmethod
    def from_pretrained(
        cls,
        folder_or_name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> "LearnedOptimiser":
        """Read one from a folder that `save_pretrained` wrote, or from the Hugging Face Hub; `load` reads the file.

        Args:
            folder_or_name: a folder, "owner/name" of a repository, the name of a shipped file, or a path.
            revision: of the repository: a branch, tag or commit.
            token: of the Hub, for a private repository.
            cache_dir: where downloads are kept; the Hub's own place if not given.
            local_files_only: download nothing.
        """
        options = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        return load(hub.file_of(folder_or_name, **options))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the file as metamd.safetensors into a folder, with a card for readers; `from_pretrained` reads it.

        Args:
            folder: made if it is not there.
        """
        hub.write(self, folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload a learned optimiser",
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Upload the file and a card to the Hugging Face Hub; returns the address of the commit.

        Args:
            repo_id: "owner/name" of a repository, which is made if it is not there.
            commit_message: of the upload.
            private: whether a new repository is private; as the owner has it by default.
            token: of the Hub; that of `hf auth login` if not given.
        """
        return hub.push(self, repo_id, message=commit_message, private=private, token=token)

    def fingerprint(self) -> str:
        """The fingerprint of the geometry; what the header says about its origin does not enter."""
        return fingerprint(self.potential)

    def summary(self) -> str:
        """What it is, and what to do with it, in two lines."""
        steps = self.header.horizon or "T"
        return (
            f"Learned {self}.\nlearned.save(path) keeps it; opt = metamd.MetaMD(model.named_parameters(), path, "
            f"steps={steps}) uses it."
        )

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
    return LEARNED.read(locate(path_or_name), _assemble, _digest)


def _digest(learned: LearnedOptimiser, text: str) -> str:
    return checksum(f"{learned.fingerprint()}\n{text}", _other_tensors(learned.moments, learned.start))


def _assemble(text: str, tensors: Tensors) -> LearnedOptimiser:
    """Hold the tensors against the header and make the potential of them."""
    header = Header.from_json(text)
    _check(header, tensors)
    log_d, factors, start = (
        {k: tensors[f"{prefix}/{k}"] for k in names}
        for prefix, names in (("log_d", header.tensors), ("basis", header.factors), ("start", header.start))
    )
    # The offsets have the shape (pieces,) by now, so that `pieces` is no larger than the file.
    basis = Basis(header.basis, factors=factors)  # type: ignore[arg-type]
    blank = MaxDiagonal(header.pieces, tying=header.tying, centre=header.centre, basis=basis)
    potential = blank.with_metrics(log_d, tensors["offsets"])
    moments = None
    if any(name.startswith(MOMENTS) for name in tensors):
        keys = run_moment_shapes(header)
        moments = Moments(*({k: tensors[f"{prefix}{k}"] for k in keys} for prefix in MOMENTS))
    return LearnedOptimiser(header, potential, moments, start or None)


def _check(header: Header, tensors: Tensors) -> None:
    """Refuse tensors that the header does not announce, and values that are not finite or give no step."""
    wanted = {"offsets": (header.pieces,)} | {f"log_d/{k}": s for k, s in header.tensors.items()}
    wanted |= {f"basis/{k}": s for k, s in header.factors.items()} | {f"start/{n}": s for n, s in header.start.items()}
    if header.learned_from and any(name.startswith(MOMENTS) for name in tensors):
        if header.pieces != 1:
            raise ValueError(f"moments must be of one piece, got {header.pieces}. {AGAIN}")
        wanted |= {f"{prefix}{k}": s for prefix in MOMENTS for k, s in run_moment_shapes(header).items()}
    check_shapes(wanted, tensors)
    for name, value in tensors.items():
        part = name.partition("/")[0]
        if value.dtype not in DTYPES:
            raise ValueError(f"{shown(name)} must be float64, float32 or bfloat16, got {value.dtype}. Convert it first.")
        if part == "offsets" and value.dtype != torch.float64:
            raise ValueError(f"'offsets' must be float64, got {value.dtype}. Convert them with offsets.double().")
        if part == "basis":
            if value.dtype == torch.bfloat16:
                raise ValueError(f"the basis {shown(name)} must be float32 or float64, got {value.dtype}.")
            off = (value.mT @ value - torch.eye(value.shape[1], dtype=value.dtype)).abs()
            if off.numel() and not float(off.max()) <= ORTHONORMAL:  # other columns have other metrics than the file states
                raise ValueError(f"the columns of the basis {shown(name)} must be orthonormal, but they are not. {AGAIN}")
        elif value.numel():
            ends = torch.stack(value.aminmax())  # exp is monotone, and a NaN anywhere shows in both ends
            if not bool(torch.isfinite(ends).all()):
                raise ValueError(f"{shown(name)} must be finite, but it contains NaN or infinity.")
            if part == "moments" and "/right/" in name:
                ends = torch.stack(value.diagonal().aminmax())
            if part == "moments" and bool(ends[0] < 0):
                raise ValueError(f"{shown(name)} must hold numbers >= 0, got {float(ends[0]):.4g}.")
            d = ends.exp()
            usable = torch.isfinite(d) & (d > 0) & torch.isfinite(1 / d) & (1 / d > 0)
            if part == "log_d" and not bool(usable.all()):
                raise ValueError(
                    f"{shown(name)} holds log D = {float(ends[~usable][0]):.4g}, for which the metric D = exp(log D) or the "
                    f"step size 1/D is zero or infinite in {DTYPES[value.dtype]}. Metrics must be positive and finite."
                )


def run_moment_shapes(header: Header) -> dict[str, Shape]:
    """The shapes of the moments of recorded runs by key: matrices by "right/key", for weights in learned coordinates."""
    whole = {factor: (n, n) for factor, (n, _) in header.factors.items()}
    return {**whole, **{k: s[1:] for k, s in header.tensors.items() if f"right/{k}" not in whole}}


def check_shapes(wanted: Mapping[str, Shape], tensors: Tensors) -> None:
    """Refuse tensors that are not those which a header announces."""
    found = shapes(tensors)
    for name in sorted(set(wanted) - set(found)):
        raise ValueError(f"the tensor {shown(name)}, which its header announces, is missing. {AGAIN}")
    for name in sorted(set(found) - set(wanted)):
        raise ValueError(f"it holds a tensor {shown(name)} that its header does not announce. {AGAIN}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(
                f"the tensor {shown(name)} must have the shape {shown(shape)} its header announces, got "
                f"{shown(found[name])}. {AGAIN}"
            )


def fingerprint(potential: MaxDiagonal) -> str:
    """A digest of the geometry: equal for equal metrics, offsets and structure, whatever it is bound to."""
    return checksum(json.dumps(_structure(potential), sort_keys=True), _tensors(potential))


def _structure(potential: MaxDiagonal) -> dict[str, Any]:
    return {
        "potential": "max-diagonal",
        "basis": potential.basis.kind,
        "pieces": potential.pieces,
        "tying": potential.tying,
        "centre": potential.centre,
    }


def _tables(potential: MaxDiagonal) -> dict[str, Any]:
    """The shapes of all that was learned."""
    return {"tensors": shapes(potential.log_d), "factors": shapes(potential.basis.factors)}


def _tensors(potential: MaxDiagonal) -> Tensors:
    """What the file stores of the geometry."""
    held = {"offsets": potential.offsets.double()} | {f"log_d/{k}": v for k, v in potential.log_d.items()}
    return _copied(held | {f"basis/{k}": v for k, v in potential.basis.factors.items()})


def _other_tensors(moments: Moments | None, start: Mapping[str, Tensor] | None) -> Tensors:
    """What the file stores beside the geometry."""
    parts = () if moments is None else zip(MOMENTS, (moments.x, moments.y), strict=True)
    held = {f"{prefix}{k}": v for prefix, part in parts for k, v in part.items()}
    return _copied(held | {f"start/{n}": x for n, x in (start or {}).items()})


def _copied(tensors: Mapping[str, Tensor]) -> Tensors:
    """On the CPU and with memory of their own, as safetensors asks."""
    return {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in tensors.items()}

"""The header of a learned-optimiser file: what was learned, on which model and family, how, and at what cost."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args

import torch

from metamd._version import __version__
from metamd.files.container import naturals, shown, strict_json
from metamd.files.usage import Usage
from metamd.potentials.base import Centre
from metamd.potentials.basis import Basis, Identity, Learned
from metamd.potentials.online import Online
from metamd.potentials.tying import Shape, TyingName, match, some

SCHEMA_VERSIONS = (1, 2, 3)
"""The versions of the header this library reads; it writes the last."""

SINCE = {
    **{"learned_from": 2, "task_hashes": 2},
    **{"factors": 3, "max_norm": 3, "online": 3, "start": 3, "target_loss": 3, "usage": 3},
}
"""Fields that older versions do not have."""

POTENTIALS = ("max-diagonal",)
BASES = ("identity", "right", "both")
TABLES = {"tensors": "key", "model": "name", "factors": "key", "start": "name"}
"""Fields that map names to shapes; in JSON they are lists, since the order of a model's layers matters."""


@dataclass(frozen=True)
class Header:
    """What a learned-optimiser file says about itself. Every field is checked and copied when it is made.

    Args:
        pieces: N, the number of metrics.
        tying: which coordinates share a metric.
        centre: what the metrics measure distances from.
        tensors: the shape of the logarithms of the metrics by key, (N, ...) each.
        potential: the kind of potential.
        basis: the coordinates in which it is diagonal: "identity", or learned on the "right" or on "both" sides of weights.
        schema_version: the version of this list of fields.
        model: names and shapes of the tensors it was learned on, in the order of the layers.
        family: the family of tasks it was learned on.
        horizon: T, the steps of the runs it was learned on.
        batch_size: examples per gradient in those runs.
        gradient_scale: root mean square of the gradient at the start of a run, by key of the metric.
        objective: what was minimised.
        estimator: how its gradient was estimated.
        seeds: of the meta-training.
        task_hashes: `metamd.tasks.config_hash` of every task that was used, so that none of them is held out later.
        versions: library to version.
        cost: what learning it took, such as `gradient_evaluations` and `seconds`.
        held_out: metrics on tasks that were not used to learn it.
        learned_from: for a geometry learned from recorded runs, the strength of the `prior` and the `runs`, each with its
            name, fingerprint, steps, batch size and weight.
        factors: the shapes of the learned basis, (n, r) by "right/key" and "left/key": r orthonormal columns.
        usage: how it is best used on its family: `Usage` as a dictionary.
        online: the rule and the scales of its online metric: `Online` as a dictionary.
        start: names and shapes of the learned start, if there is one.
        max_norm: C, if the metrics were kept at ||m_j||_2 <= C while they were learned.
        target_loss: a loss that training tasks reached, fixed before any held-out task is drawn.

    Example:
        >>> header = Header(pieces=1, tying="parameter", centre="start", tensors={"x": (1, 2)}, horizon=100)
        >>> Header.from_json(header.to_json()) == header
        True
    """

    pieces: int
    tying: TyingName
    centre: Centre
    tensors: dict[str, Shape]
    potential: str = "max-diagonal"
    basis: str = "identity"
    schema_version: int = SCHEMA_VERSIONS[-1]
    model: dict[str, Shape] = field(default_factory=dict)
    family: dict[str, Any] | None = None
    horizon: int | None = None
    batch_size: int | None = None
    gradient_scale: dict[str, float] = field(default_factory=dict)
    objective: str | None = None
    estimator: str | None = None
    seeds: tuple[int, ...] = ()
    task_hashes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, Any] = field(default_factory=dict)
    learned_from: dict[str, Any] | None = None
    factors: dict[str, Shape] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    online: dict[str, Any] | None = None
    start: dict[str, Shape] = field(default_factory=dict)
    max_norm: float | None = None
    target_loss: float | None = None

    def __post_init__(self) -> None:
        check_version(self.schema_version)
        for f in fields(self):
            if f.name in CHECKS:
                object.__setattr__(self, f.name, CHECKS[f.name](f.name, getattr(self, f.name)))
        self._check_agreement()

    def _check_agreement(self) -> None:
        if not self.tensors:
            raise ValueError("tensors must name at least one metric, got none. Bind the potential to a model first.")
        for key, shape in self.tensors.items():
            if shape[:1] != (self.pieces,):
                raise ValueError(
                    f"the metric {shown(key)} must have one row for each of the {self.pieces} pieces, got shape {shape}."
                )
        for name, since in SINCE.items():
            if self.schema_version < since and getattr(self, name) not in (None, (), {}):
                raise ValueError(
                    f"{name} needs schema_version {since}, got {self.schema_version}. Leave out schema_version=."
                )
        unknown = sorted(set(self.gradient_scale) - set(self.tensors))
        if unknown:
            raise ValueError(f"gradient_scale has {shown(unknown[0])}, but the metrics are {some(self.tensors)}.")
        foreign = sorted(set((self.online or {"scale": {}})["scale"]) - set(self.tensors))
        if foreign:
            raise ValueError(f"the scale of online has {shown(foreign[0])}, but the metrics are {some(self.tensors)}.")
        if any(v < 0 for v in self.gradient_scale.values()):
            raise ValueError(f"gradient_scale must not be negative, got {shown(self.gradient_scale)}.")
        self._check_basis()
        stored = {k: s[1:] for k, s in self.tensors.items()}
        match(self.tying, self._blank_basis().slots(self.tying, self.model), self.model, stored, lenient=True)

    def _check_basis(self) -> None:
        sides = {"identity": (), "right": ("right",), "both": ("left", "right")}[self.basis]
        if sides and self.schema_version < SINCE["factors"]:
            raise ValueError(f"the basis {self.basis!r} needs schema_version 3, got {self.schema_version}.")
        for name, shape in self.factors.items():
            side, _, key = name.partition("/")
            if side not in sides or key not in self.tensors:
                raise ValueError(f"the basis {self.basis!r} of these metrics cannot have the factor {shown(name)}.")
            if len(shape) != 2 or not 0 <= shape[1] <= shape[0]:
                raise ValueError(f"the factor {shown(name)} must have at most as many columns as rows, got shape {shape}.")
        for key, shape in self.tensors.items():
            known = [self.factors[f"{s}/{key}"] for s in sides if f"{s}/{key}" in self.factors]
            numbers = sum(min(r + 1, n) for n, r in known)
            if known and (len(shape) != 2 or (len(known) == len(sides) and shape[1] != numbers)):
                raise ValueError(
                    f"the metric {shown(key)} of shape {shape} does not fit its basis, for which each piece needs {numbers} "
                    "numbers."
                )

    def _blank_basis(self) -> Basis:
        """A basis of the factors' shapes, without their numbers."""
        if self.basis == "identity":
            return Identity()
        return Learned(self.basis, factors={k: torch.empty(s, device="meta") for k, s in self.factors.items()})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The header in plain JSON types, structural fields first."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if self.schema_version >= SINCE.get(f.name, 1)}
        for name, word in TABLES.items():
            if name not in plain:
                continue
            plain[name] = [{word: k, "shape": list(s)} for k, s in plain[name].items()]
        plain |= {name: list(plain[name]) for name in ("seeds", "task_hashes") if name in plain}
        return {"schema_version": plain.pop("schema_version"), **plain}

    def to_json(self) -> str:
        """The header as JSON text; equal headers give equal text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Header":
        """Read a header from untrusted JSON text, refusing what this version of the schema does not know.

        Args:
            text: what `to_json` gave.
        """
        plain = strict_json(text, "the header")
        if not isinstance(plain, dict):
            raise ValueError(f"the header must be a JSON object, got {shown(plain)}.")
        check_version(plain.get("schema_version"))
        version = plain["schema_version"]
        here = [f for f in fields(cls) if version >= SINCE.get(f.name, 1)]
        known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in here}
        required = {name for name, needed in known.items() if needed} | {"potential", "basis"}
        for name in sorted(set(plain) - set(known)):
            raise ValueError(f"the header has a field {shown(name)} that its schema version does not know. Remove it.")
        for name in sorted(required - set(plain)):
            raise ValueError(f"the header lacks the field {name!r}, which every learned optimiser needs.")
        for name, word in TABLES.items():
            if name in known:
                plain[name] = _table(name, word, plain.get(name, []))
        return cls(**plain)


def check_version(version: object) -> None:
    """Refuse a header of a version that this library does not know.

    Args:
        version: what the header says.
    """
    if type(version) is not int or version not in SCHEMA_VERSIONS:
        raise ValueError(
            f"schema_version must be {_either(SCHEMA_VERSIONS)}, which metamd {__version__} reads; got "
            f"{shown(version)}. A newer metamd may read it: pip install --upgrade metamd."
        )


def _either(versions: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, versions[:-1]))} or {versions[-1]}"


def _table(name: str, word: str, rows: object) -> dict[str, Any]:
    """{name: shape} from a list of {word: name, "shape": [...]}."""
    found: dict[str, Any] = {}
    if not isinstance(rows, list):
        raise ValueError(f"{name} must be a list of {{{word!r}, 'shape'}}, got {shown(rows)}.")
    for row in rows:
        if not isinstance(row, dict) or set(row) != {word, "shape"} or not isinstance(row[word], str):
            raise ValueError(f"{name} must be a list of {{{word!r}, 'shape'}}, got the row {shown(row)}.")
        if row[word] in found:
            raise ValueError(f"{name} lists {shown(row[word])} twice; every name may appear once.")
        found[row[word]] = row["shape"]
    return found


# One check per field: (name, value) -> the value, copied and in its plain type.


def _one_of(options: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in options:
            raise ValueError(f"{name} must be {' or '.join(map(repr, options))}, got {shown(value)}.")
        return value

    return check


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value < 2**63:
        raise ValueError(f"{name} must be an integer of at least 1, got {shown(value)}.")
    return value


def _shapes(name: str, value: Any) -> dict[str, Shape]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must map names to shapes, got {shown(value)}.")
    for key, shape in value.items():
        if not isinstance(key, str) or not naturals(list(shape) if isinstance(shape, tuple) else shape):
            raise ValueError(f"{name} must map names to shapes of integers >= 0, got {shown(key)}: {shown(shape)}.")
    return {k: tuple(s) for k, s in value.items()}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {shown(value)}. Pass repr(...) of an object.")
    return value


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _seeds(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(s) is int and abs(s) < 2**64 for s in value):
        raise ValueError(f"{name} must be a list of integers, got {shown(value)}.")
    return tuple(value)


def _hashes(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(h, str) and re.fullmatch("[0-9a-f]{32}", h) for h in value):
        raise ValueError(f"{name} must be a list of hashes of 32 hexadecimal digits, got {shown(value)}.")
    return tuple(value)


def _plain(name: str, value: Any) -> dict[str, Any]:
    """A copy in JSON's own types, so that what is read back equals what was given."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary, got {shown(value)}.")
    try:
        return strict_json(json.dumps(dict(value), allow_nan=False), name)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must hold only texts, finite numbers, lists and dictionaries ({error}).") from None


def _numbers(name: str, value: Any) -> dict[str, float]:
    plain = _plain(name, value)
    for key, number in plain.items():
        if type(number) not in (int, float) or abs(number) > sys.float_info.max:
            raise ValueError(f"{name} must map names to numbers, got {shown(key)}: {shown(number)}.")
    return plain


def _texts(name: str, value: Any) -> dict[str, str]:
    plain = _plain(name, value)
    for key, text in plain.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} must map names to texts, got {shown(key)}: {shown(text)}.")
    return plain


def _learned_from(name: str, value: Any) -> dict[str, Any]:
    plain = _plain(name, value)
    if set(plain) != {"prior", "runs"} or not isinstance(plain["runs"], list) or not plain["runs"]:
        raise ValueError(f"{name} must have a prior and a list of runs, got {shown(plain)}.")
    if type(plain["prior"]) not in (int, float) or not 0 <= plain["prior"] <= sys.float_info.max:
        raise ValueError(f"the prior of {name} must be a number >= 0, got {shown(plain['prior'])}.")
    for row in plain["runs"]:
        if not isinstance(row, dict) or set(row) != set(_RUN):
            raise ValueError(f"each run of {name} must have {', '.join(_RUN)}; got {shown(row)}.")
        for key, check in _RUN.items():
            check(f"the {key} of a run in {name}", row[key])
    return plain


def _record(kind: type[Usage] | type[Online]) -> Callable[[str, Any], dict[str, Any]]:
    """What a dataclass takes, and nothing else."""

    def check(name: str, value: Any) -> dict[str, Any]:
        plain, blank = _plain(name, value), kind().to_dict()
        if kind is Usage and "knots" in plain:
            plain["knots"] = tuple(_finite(f"a knot of {name}", k) for k in _list(f"the knots of {name}", plain["knots"]))
            blank["knots"] = ()
        if kind is Usage and "averaging" in plain:
            blank["averaging"] = "constant"
        if kind is Online and "signal" in plain:
            blank["signal"] = 0.0
        if set(plain) != set(blank):
            raise ValueError(f"{name} must have {', '.join(blank)}; got {shown(plain)}.")
        for key, default in blank.items():
            if type(plain[key]) is int and type(default) is float:
                plain[key] = float(plain[key])
            if type(plain[key]) is not type(default):
                raise ValueError(f"the {key} of {name} must be of type {type(default).__name__}, got {shown(plain[key])}.")
        if "scale" in plain:
            plain["scale"] = {k: float(v) for k, v in _numbers(f"the scale of {name}", plain["scale"]).items()}
        made = Online.from_dict(plain) if kind is Online else kind(**plain)
        return made.to_dict()

    return check


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {shown(value)}.")
    return value


def _weight(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be a positive number, got {shown(value)}.")
    return float(value)


def _finite(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number, got {shown(value)}.")
    return float(value)


_RUN: dict[str, Callable[[str, Any], Any]] = {
    "name": _text,
    "fingerprint": _text,
    "steps": _positive,
    "batch_size": _optional(_positive),
    "weight": _weight,
}

CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "pieces": _positive,
    "tying": _one_of(get_args(TyingName)),
    "centre": _one_of(get_args(Centre)),
    "tensors": _shapes,
    "potential": _one_of(POTENTIALS),
    "basis": _one_of(BASES),
    "model": _shapes,
    "family": _optional(_plain),
    "horizon": _optional(_positive),
    "batch_size": _optional(_positive),
    "gradient_scale": _numbers,
    "objective": _optional(_text),
    "estimator": _optional(_text),
    "seeds": _seeds,
    "task_hashes": _hashes,
    "versions": _texts,
    "cost": _numbers,
    "held_out": _plain,
    "learned_from": _optional(_learned_from),
    "factors": _shapes,
    "usage": _optional(_record(Usage)),
    "online": _optional(_record(Online)),
    "start": _shapes,
    "max_norm": _optional(_weight),
    "target_loss": _optional(_finite),
}

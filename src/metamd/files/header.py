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
from metamd.potentials.basis import Basis
from metamd.potentials.online import Online
from metamd.potentials.tying import Shape, TyingName, match, some

SCHEMA_VERSIONS = (1, 2, 3)
"""The versions of the header that this library reads; it writes the one that was read, or the first that has all fields."""

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
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        needed = [since for name, since in SINCE.items() if getattr(self, name) not in (None, (), {})]
        object.__setattr__(self, "schema_version", max(self.schema_version, *needed, 3 if self.basis != "identity" else 1))
        self._check_agreement()

    def _check_agreement(self) -> None:
        if not self.tensors:
            raise ValueError("tensors must name at least one metric, got none. Bind the potential to a model first.")
        for key, shape in self.tensors.items():
            if shape[:1] != (self.pieces,):
                raise ValueError(
                    f"the metric {shown(key)} must have one row for each of the {self.pieces} pieces, got shape {shape}."
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
        return Basis(self.basis, factors={k: torch.empty(s, device="meta") for k, s in self.factors.items()})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The header in plain JSON types, structural fields first."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, word in TABLES.items():
            plain[name] = [{word: k, "shape": list(s)} for k, s in plain[name].items()]
        plain |= {name: list(plain[name]) for name in ("seeds", "task_hashes")}
        return {"schema_version": plain.pop("schema_version")} | {
            name: value for name, value in plain.items() if SINCE.get(name, 1) <= self.schema_version
        }

    def to_json(self) -> str:
        """The header as JSON text; equal headers give equal text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Header":
        """Read a header from untrusted JSON text, refusing what no version of the schema knows.

        Args:
            text: what `to_json` gave.
        """
        plain = strict_json(text, "the header")
        if not isinstance(plain, dict):
            raise ValueError(f"the header must be a JSON object, got {shown(plain)}.")
        CHECKS["schema_version"]("schema_version", plain.get("schema_version"))
        for name in sorted(set(plain) - {f.name for f in fields(cls)}):
            raise ValueError(f"the header has a field {shown(name)} that no schema version knows. Remove it.")
        required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        for name in sorted((required | {"potential", "basis"}) - set(plain)):
            raise ValueError(f"the header lacks the field {name!r}, which every learned optimiser needs.")
        return cls(**plain | {name: table(name, word, plain.get(name, [])) for name, word in TABLES.items()})


def table(name: str, word: str, rows: object) -> dict[str, Any]:
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
Check = Callable[[str, Any], Any]


def _must(
    what: str, holds: Callable[[Any], bool], advice: str = "", copy: Callable[[Any], Any] = lambda value: value
) -> Check:
    """The check that a value is what the words say."""

    def check(name: str, value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"{name} must be {what}, got {shown(value)}.{advice}")
        return copy(value)

    return check


def _one_of(options: tuple[str, ...]) -> Check:
    return _must(" or ".join(map(repr, options)), lambda value: isinstance(value, str) and value in options)


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _all(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(holds, value))


_positive = _must("an integer of at least 1", lambda value: type(value) is int and 1 <= value < 2**63)
_text = _must("a text", lambda value: isinstance(value, str), " Pass repr(...) of an object.")
_finite = _must("a finite number", _number, copy=float)
_weight = _must("a positive number", lambda value: _number(value) and value > 0, copy=float)
_seeds = _must("a list of integers", lambda value: _all(value, lambda s: type(s) is int and abs(s) < 2**64), copy=tuple)
_hashes = _must(
    "a list of hashes of 32 hexadecimal digits",
    lambda value: _all(value, lambda h: isinstance(h, str) and re.fullmatch("[0-9a-f]{32}", h) is not None),
    copy=tuple,
)


def _shapes(name: str, value: Any) -> dict[str, Shape]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must map names to shapes, got {shown(value)}.")
    for key, shape in value.items():
        if not isinstance(key, str) or not naturals(list(shape) if isinstance(shape, tuple) else shape):
            raise ValueError(f"{name} must map names to shapes of integers >= 0, got {shown(key)}: {shown(shape)}.")
    return {k: tuple(s) for k, s in value.items()}


def _plain(name: str, value: Any) -> dict[str, Any]:
    """A copy in JSON's own types, so that what is read back equals what was given."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary, got {shown(value)}.")
    try:
        return strict_json(json.dumps(dict(value), allow_nan=False), name)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must hold only texts, finite numbers, lists and dictionaries ({error}).") from None


def _mapping(what: str, holds: Callable[[Any], bool]) -> Check:
    def check(name: str, value: Any) -> dict[str, Any]:
        plain = _plain(name, value)
        for key, item in plain.items():
            if not holds(item):
                raise ValueError(f"{name} must map names to {what}, got {shown(key)}: {shown(item)}.")
        return plain

    return check


_numbers = _mapping("numbers", _number)


def _learned_from(name: str, value: Any) -> dict[str, Any]:
    plain = _plain(name, value)
    if set(plain) != {"prior", "runs"} or not isinstance(plain["runs"], list) or not plain["runs"]:
        raise ValueError(f"{name} must have a prior and a list of runs, got {shown(plain)}.")
    if not _number(plain["prior"]) or plain["prior"] < 0:
        raise ValueError(f"the prior of {name} must be a number >= 0, got {shown(plain['prior'])}.")
    for row in plain["runs"]:
        if not isinstance(row, dict) or set(row) != set(_RUN):
            raise ValueError(f"each run of {name} must have {', '.join(_RUN)}; got {shown(row)}.")
        for key, check in _RUN.items():
            check(f"the {key} of a run in {name}", row[key])
    return plain


_RUN: dict[str, Check] = {
    "name": _text,
    "fingerprint": _text,
    "steps": _positive,
    "batch_size": _optional(_positive),
    "weight": _weight,
}


def _record(kind: type[Usage] | type[Online]) -> Check:
    """What a dataclass takes, and nothing else; fields that `to_dict` leaves out at their defaults may be missing."""

    def check(name: str, value: Any) -> dict[str, Any]:
        plain, always = _plain(name, value), kind().to_dict()
        usual = {f.name: getattr(kind(), f.name) for f in fields(kind)}
        if not set(always) <= set(plain) <= set(usual):
            raise ValueError(f"{name} must have {', '.join(always)}; got {shown(plain)}.")
        for key, given in plain.items():
            what = f"the {key} of {name}"
            if key == "scale":
                plain[key] = {k: float(v) for k, v in _numbers(what, given).items()}
            elif key == "knots":
                plain[key] = _must("a list of finite numbers", lambda knots: _all(knots, _number), copy=tuple)(what, given)
            elif isinstance(usual[key], float):
                plain[key] = _finite(what, given)
            elif type(given) is not type(usual[key]):
                raise ValueError(f"{what} must be of type {type(usual[key]).__name__}, got {shown(given)}.")
        return (Online.from_dict(plain) if kind is Online else kind(**plain)).to_dict()

    return check


CHECKS: dict[str, Check] = {
    "schema_version": _must(
        f"1, 2 or 3, which metamd {__version__} reads",
        lambda value: type(value) is int and value in SCHEMA_VERSIONS,
        " A newer metamd may read it: pip install --upgrade metamd.",
    ),
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
    "versions": _mapping("texts", lambda value: isinstance(value, str)),
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

"""The header of a learned-optimiser file: what was learned, on which model and family, how, and at what cost."""

import json
import math
import re
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args

import torch

from metamd._version import __version__
from metamd.files.container import strict_json
from metamd.files.text import brief, one_line, shown
from metamd.files.usage import Usage
from metamd.potentials.base import Centre
from metamd.potentials.basis import Basis
from metamd.potentials.online import Online
from metamd.potentials.tying import Shape, TyingName, match, some

SCHEMA_VERSIONS = (1, 2, 3, 4, 5, 6)
"""The versions of the header that this library reads; it writes the one that was read, or the first that has all fields."""

_THIRD = ("factors", "max_norm", "online", "start", "target_loss", "usage")
SINCE = {"learned_from": 2, "task_hashes": 2, **dict.fromkeys(_THIRD, 3), "choice": 4}
"""Fields that older versions do not have."""

SIDES: dict[str, tuple[str, ...]] = {"identity": (), "right": ("right",), "both": ("left", "right")}
"""The sides of weights on which a basis is learned."""

TABLES = {"tensors": "key", "model": "name", "factors": "key", "start": "name"}
"""Fields that map names to shapes; in JSON they are lists, since the order of a model's layers matters."""


@dataclass(frozen=True)
class Radius:
    """How far solutions lie from their starts: N_l(solution - start) <= quantile scales[l] for all tensors l together.

    N_l is the learned metric of the tensor. The quantile is split conformal, so that the next task obeys it with probability
    `confidence`, over the held-out tasks and the next one.
    """

    quantile: float
    scales: Mapping[str, float]  # by name of the tensor, fixed on other tasks
    confidence: float
    tasks: int  # m, the held-out tasks
    reference: str  # what found the solutions, in words

    def __post_init__(self) -> None:
        numbers = [self.confidence, self.quantile, *self.by_tensor.values(), *self.scales.values()]
        counts = type(self.tasks) is int and self.tasks > 0 and self.confidence <= 1 and isinstance(self.reference, str)
        if not all(type(x) is float and 0 <= x < math.inf for x in numbers) or not counts:
            raise ValueError("a radius must have numbers that are finite and not negative. Make one with metamd certify.")

    @property
    def by_tensor(self) -> dict[str, float]:
        """rho_l by tensor."""
        return {n: self.quantile * s for n, s in self.scales.items()}

    @property
    def source(self) -> str:
        """Where it is from, in words."""
        return (
            f"with probability {100 * self.confidence:.3g} % over {self.tasks} held-out tasks and this one, its reference "
            f"solution, {brief(one_line(self.reference), 200)}, lies there"
        )


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
            name, fingerprint, steps, batch size and weight; the `trials` of factors, each with its `score`, None where the
            run diverged; and the `reach`, how far runs went.
        factors: the shapes of the learned basis, (n, r) by "right/key" and "left/key": r orthonormal columns.
        usage: how it is best used on its family: `Usage` as a dictionary.
        choice: what the usage was chosen by: the `score`, the data that runs were `judged_on`, whether few steps or few
            seconds were to `prefer`, and the `seconds_per_step` of training with it, on the machine that learned it. Of the
            paper's method: what was `tried` (k, pace, outer steps, best rate, loss), and the `rule` of choosing.
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
    schema_version: int = 3
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
    choice: dict[str, Any] | None = None
    online: dict[str, Any] | None = None
    start: dict[str, Shape] = field(default_factory=dict)
    max_norm: float | None = None
    target_loss: float | None = None

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        needed = [since for name, since in SINCE.items() if getattr(self, name) not in (None, (), {})]
        if self.learned_from is not None and (self.basis != "identity" or "trials" in self.learned_from):
            needed.append(5)  # recorded runs gave metrics of the parameters alone, and no trials
        if self.online is not None and self.online["rule"] == "eigen":
            needed.append(6)
        object.__setattr__(self, "schema_version", max(self.schema_version, *needed, 3 if self.basis != "identity" else 1))
        if not self.tensors:
            raise ValueError("tensors must name at least one metric, got none. Bind the potential to a model first.")
        for key, shape in self.tensors.items():
            if shape[:1] != (self.pieces,):
                raise ValueError(
                    f"the metric {shown(key)} must have one row for each of the {self.pieces} pieces, got shape {shape}."
                )
        scales = {"gradient_scale": self.gradient_scale, "the scale of online": (self.online or {"scale": {}})["scale"]}
        for what, scale in scales.items():
            if unknown := sorted(set(scale) - set(self.tensors)):
                raise ValueError(f"{what} has {shown(unknown[0])}, but the metrics are {some(self.tensors)}.")
        sides = SIDES[self.basis]
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
        empty = {k: torch.empty(s, device="meta") for k, s in self.factors.items()}  # its shapes, without the numbers
        basis = Basis(self.basis, factors=empty)  # type: ignore[arg-type]
        stored = {k: s[1:] for k, s in self.tensors.items()}
        match(self.tying, basis.slots(self.tying, self.model), self.model, stored, lenient=True)

    @property
    def radius(self) -> Radius | None:
        """What the last certificate in the file says of the distance of solutions; None if it says nothing."""
        found = self._certificate()[1].get("radius")
        try:
            return Radius(**found) if isinstance(found, Mapping) else None
        except (TypeError, ValueError, AttributeError):
            return None

    @property
    def expected(self) -> tuple[str, ...]:
        """What the last certificate in the file says of training the next task, in a sentence; else how to find it."""
        place, made = self._certificate()
        rows = made.get("statements")
        found = [
            f"{brief(one_line(row['quantity']), 200)} <= {row['bound']:.4g} with probability {100 * row['confidence']:.3g} %"
            for row in (rows if isinstance(rows, list) else ())
            if isinstance(row, Mapping) and (row.get("about"), row.get("verdict")) == ("next task", "holds")
            if _number(row.get("bound")) and _number(row.get("confidence")) and isinstance(row.get("quantity"), str)
            if not row["quantity"].startswith("distance")  # of solutions: the radius has it
        ]
        if not found:
            return ("metamd certify FILE FAMILY finds what to expect of training as the file recommends, convex or not.",)
        opening = f"To expect of training on {brief(one_line(place), 200)} as the file recommends, convex or not:"
        return (f"{opening} {'; '.join(found)}.",)

    def _certificate(self) -> tuple[str, Mapping[str, Any]]:
        """The last certificate: what it is about, and its content."""
        made = self.held_out.get("certificates")
        place, last = list(made.items())[-1] if isinstance(made, Mapping) and made else ("", {})
        return str(place), last if isinstance(last, Mapping) else {}

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
        """Read a header from untrusted JSON text, refusing what no version of the schema knows."""
        plain = strict_json(text, "the header")
        if not isinstance(plain, dict):
            raise ValueError(f"the header must be a JSON object, got {shown(plain)}.")
        CHECKS["schema_version"]("schema_version", plain.get("schema_version"))
        for name in sorted(set(plain) - {f.name for f in fields(cls)}):
            raise ValueError(f"the header has a field {shown(name)} that no schema version knows. Remove it.")
        required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        for name in sorted((required | {"potential", "basis"}) - set(plain)):
            raise ValueError(f"the header lacks the field {name!r}, which every learned optimiser needs.")
        return cls(**plain | {name: table(name, plain.get(name, [])) for name in TABLES})


def table(name: str, rows: object) -> dict[str, Any]:
    """{name: shape} from a list of {word: name, "shape": [...]}."""
    found: dict[str, Any] = {}
    word = TABLES[name]
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, dict) or set(row) != {word, "shape"} or not isinstance(row[word], str):
            raise ValueError(f"{name} must be a list of {{{word!r}, 'shape'}}, got the row {shown(row)}.")
        if row[word] in found:
            raise ValueError(f"{name} lists {shown(row[word])} twice; every name may appear once.")
        found[row[word]] = row["shape"]
    return found


# One check per field: (name, value) -> the value, copied and in its plain type.
Check = Callable[[str, Any], Any]


def must(
    what: str, holds: Callable[[Any], bool], advice: str = "", copy: Callable[[Any], Any] = lambda value: value
) -> Check:
    """The check that a value is what the words say."""

    def check(name: str, value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"{name} must {what}, got {shown(value)}.{advice}")
        return copy(value)

    return check


def record(checks: Mapping[str, Check], later: Container[str] = (), copy: Callable[[Any], Any] = dict) -> Check:
    """The check of a dictionary with these fields and no others; those that came later may be missing."""

    def check(name: str, value: Any) -> Any:
        plain, needed = _plain(name, value), [key for key in checks if key not in later]
        if not set(needed) <= set(plain) <= set(checks):
            raise ValueError(f"{name} must have {', '.join(needed)}; got {shown(plain)}.")
        return copy({key: checks[key](f"the {key} of {name}", given) for key, given in plain.items()})

    return check


def _one_of(*options: str) -> Check:
    return must(f"be {' or '.join(map(repr, options))}", lambda value: isinstance(value, str) and value in options)


def optional(check: Check) -> Check:
    """The same check of a value that may be None."""
    return lambda name, value: None if value is None else check(name, value)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _list(what: str, holds: Callable[[Any], bool]) -> Check:
    return must(f"be a list of {what}", lambda value: isinstance(value, list | tuple) and all(map(holds, value)), copy=tuple)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _plain(name: str, value: Any) -> dict[str, Any]:
    """A copy in JSON's own types, so that what is read back equals what was given."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary, got {shown(value)}.")
    try:
        return strict_json(json.dumps(dict(value), allow_nan=False), name)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must hold only texts, finite numbers, lists and dictionaries ({error}).") from None


def _each(check: Check) -> Check:
    """The check of a list that is not empty, item by item."""
    return lambda name, value: [check(f"each of {name}", item) for item in _filled(name, value)]


def _mapping(what: str, holds: Callable[[Any], bool]) -> Check:
    whole = must(f"map names to {what}", lambda plain: all(map(holds, plain.values())))
    return lambda name, value: whole(name, _plain(name, value))


_positive = must("be an integer of at least 1", lambda value: type(value) is int and 1 <= value < 2**63)
_count = optional(_positive)
_text = must("be a text", lambda value: isinstance(value, str), " Pass repr(...) of an object.")
finite = must("be a finite number", _number, copy=float)
_not_negative = must("be a number >= 0", lambda value: _number(value) and value >= 0)
weight = must("be a positive number", lambda value: _number(value) and value > 0, copy=float)
_numbers = _mapping("numbers", _number)
_sizes = _mapping("numbers >= 0", lambda value: _number(value) and value >= 0)
_shapes = must(
    "map names to shapes of integers >= 0",
    lambda value: isinstance(value, Mapping) and all(isinstance(k, str) and _is_shape(s) for k, s in value.items()),
    copy=lambda value: {k: tuple(s) for k, s in value.items()},
)
_filled = must("be a list that is not empty", lambda value: isinstance(value, list) and len(value) > 0)
_knots = _list("finite numbers", _number)
_integer = must("be an integer", lambda value: type(value) is int)
_steps = must("be an integer >= 0", lambda value: type(value) is int and value >= 0)
text_list = _list("texts", lambda value: isinstance(value, str))

_run = record({"name": _text, "fingerprint": _text, "steps": _positive, "batch_size": _count, "weight": weight})
_trial = record({"factor": weight, "score": optional(finite)})
_reach = record({"weight": weight, "squares": _sizes})
_learned_from = {"prior": _not_negative, "runs": _each(_run), "trials": _each(_trial), "reach": _reach}
_usage = {"metric": _text, "momentum": finite, "schedule": _text, "factor": finite, "averaging": _text, "knots": _knots}
_online = {"rule": _text, "beta": finite, "epsilon": finite, "refresh": _integer, "scale": _numbers}
_online |= {"signal": finite, "whiten": _integer, "block": _integer}
_tried = record({"k": _not_negative, "pace": _not_negative, "outer_steps": _steps, "rate": weight, "loss": optional(finite)})
_choice = {"score": _text, "judged_on": _text, "prefer": _text, "seconds_per_step": weight, "rule": _text}
_choice |= {"tried": _each(_tried)}

CHECKS: dict[str, Check] = {
    "schema_version": must(
        f"be 1, 2, 3, 4, 5 or 6, which metamd {__version__} reads",
        lambda value: type(value) is int and value in SCHEMA_VERSIONS,
        " A newer metamd may read it.",
    ),
    "pieces": _positive,
    "tying": _one_of(*get_args(TyingName)),
    "centre": _one_of(*get_args(Centre)),
    "tensors": _shapes,
    "potential": _one_of("max-diagonal"),
    "basis": _one_of(*SIDES),
    "model": _shapes,
    "family": optional(_plain),
    "horizon": _count,
    "batch_size": _count,
    "gradient_scale": _sizes,
    "objective": optional(_text),
    "estimator": optional(_text),
    "seeds": _list("integers", lambda value: type(value) is int and abs(value) < 2**64),
    "task_hashes": _list(
        "hashes of 32 hexadecimal digits",
        lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
    ),
    "versions": _mapping("texts", lambda value: isinstance(value, str)),
    "cost": _numbers,
    "held_out": _plain,
    "learned_from": optional(record(_learned_from, ("trials", "reach"))),
    "factors": _shapes,
    "usage": optional(record(_usage, ("averaging", "knots"), lambda found: Usage(**found).to_dict())),
    "choice": optional(record(_choice, ("prefer", "seconds_per_step", "rule", "tried"))),
    "online": optional(record(_online, ("signal", "whiten", "block"), lambda found: Online.from_dict(found).to_dict())),
    "start": _shapes,
    "max_norm": optional(weight),
    "target_loss": optional(finite),
}

"""The record of what is guaranteed about new tasks, and how it reads."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from textwrap import fill
from typing import Any, Literal

from metamd.files.header import Radius
from metamd.files.learned import LearnedOptimiser
from metamd.files.store import as_json
from metamd.tasks.base import Drawn

About = Literal["next task", "mean", "share", "training tasks"]
Verdict = Literal["holds", "no bound", "vacuous", "does not apply", "as printed; not a valid bound"]

HEADINGS: dict[About, str] = {
    "next task": "the next task",
    "mean": "the mean over tasks",
    "share": "the share of tasks",
    "training tasks": "the expectation over tasks, from the training tasks",
}

WORDS = {"domain": "domain", "data": "data", "initialisation": "initialisation", "batches": "batch order"}
"""What a task is, as `Drawn` has it."""


@dataclass(frozen=True)
class Stated:
    """What has to be stated before the held-out tasks are seen; what is left out makes no statement.

    Args:
        target: the loss to count steps to; the file's `target_loss` if not given.
        theory: whether to add the bounds of the paper, for plain mirror descent; so it is if any of the following is stated.
        regret_cap: b, for a bound on the mean of min(regret, b) and on the share of tasks above.
        radius: r, on ||theta_* - theta_1||_2 of every task that can be drawn, for the bound from the training tasks.
        reach: r on the largest coordinate of theta_* - theta_1 instead, for models with many.

    Example:
        >>> Stated(target=0.1, regret_cap=2000.0).regret_cap
        2000.0
    """

    target: float | None = None
    regret_cap: float | None = None
    radius: float | None = None
    reach: float | None = None
    theory: bool = False

    def __post_init__(self) -> None:
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target must be a finite loss, got {self.target}.")
        for name, value in (("regret_cap", self.regret_cap), ("radius", self.radius), ("reach", self.reach)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}. Leave it out to state none.")
            if value is not None and value > 1e100:  # bounds have its square
                raise ValueError(f"{name} must be at most 1e100, got {value}. Leave it out to state none.")
            if value is not None:
                object.__setattr__(self, "theory", True)


@dataclass(frozen=True)
class Statement:
    """One guarantee, or why there is none."""

    about: About  # the next task, the mean over tasks, a share of them, or the mean as the training tasks tell it
    quantity: str  # what is bounded
    bound: float | None  # from above; None where nothing is said
    verdict: Verdict  # "vacuous": it is true and says no more than the range that was stated
    basis: str  # how it was found, or why there is nothing
    confidence: float  # the probability with which it holds
    numbers: Mapping[str, float] = field(default_factory=dict)  # what it was computed from

    def __str__(self) -> str:
        value = "" if self.bound is None else f" <= {self.bound:.5g}"
        verdict = "" if self.verdict == "holds" else f"  {self.verdict.upper() if self.bound is None else self.verdict}"
        return f"{self.quantity}{value}{verdict}  [{self.basis}]"


@dataclass(frozen=True)
class HeldOutCertificate:
    """What runs on held-out tasks guarantee about the tasks to come. `print` it.

    Args:
        family: the name of the family.
        fingerprint: of the geometry.
        tasks: m, the held-out tasks.
        diverged: how many of them diverged; their scores count as infinite.
        steps: T of every run.
        seed: the held-out tasks were drawn from.
        delta: each statement holds with probability 1 - delta.
        target: the loss that steps are counted to.
        task: what one task was.
        statements: the guarantees, and those that there are not.
        assumptions: what they rest on.
        across_domains: what follows for other domains.
        reason: why the first task that diverged did; empty if none did, and in files of earlier versions.
        radius: how far solutions lie from their starts, for the certificate of a run; None in files of earlier versions.
        scores: the numbers of all tasks, by what they are of, for a figure; infinite where a run failed.
    """

    family: str
    fingerprint: str
    tasks: int
    diverged: int
    steps: int
    seed: int
    delta: float
    target: float
    task: Drawn
    statements: tuple[Statement, ...]
    assumptions: tuple[str, ...]
    across_domains: str
    reason: str = ""
    radius: Radius | None = None
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def of(self, about: About, quantity: str = "") -> Statement:
        """The first statement about this whose quantity begins so.

        Args:
            about: the kind of statement.
            quantity: how its quantity begins.
        """
        found = [s for s in self.statements if s.about == about and s.quantity.startswith(quantity)]
        if not found:
            known = "; ".join(f"{s.about}: {s.quantity}" for s in self.statements)
            raise ValueError(f"there is no statement about {about!r} {quantity!r}. There are {known}.")
        return found[0]

    def into(self, learned: LearnedOptimiser) -> LearnedOptimiser:
        """The learned optimiser with this certificate in its header, beside those of other families; `save` keeps it.

        Runs with `certify=True` then take its radius, and lead with what it says of the next task.

        Args:
            learned: what was certified.
        """
        if learned.fingerprint() != self.fingerprint:
            raise ValueError(
                "this certificate is of another learned optimiser. Certify this one: metamd.certify(learned, family)."
            )
        header = learned.header
        known = {k: v for k, v in certificates(header.held_out).items() if k != self.place}
        others = {k: v for k, v in header.held_out.items() if k != "certificate"}
        held_out = {**others, "certificates": {**known, self.place: self.to_dict()}}
        return replace(learned, header=replace(header, held_out=held_out))

    @property
    def place(self) -> str:
        """What it is about, in short: the family, and the domains if there are any. A file keeps one for each."""
        return self.family + (f": {', '.join(self.task.domains)}" if self.task.domains else "")

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "HeldOutCertificate":
        """The record of what `to_dict` gave; a file is not trusted, and what is no certificate is a `ValueError`."""
        try:
            drawn = Drawn(**{**plain["task"], "domains": tuple(plain["task"]["domains"])})
            statements = tuple(Statement(**s) for s in plain["statements"])
            made: dict[str, Any] = {"task": drawn, "statements": statements, "assumptions": tuple(plain["assumptions"])}
            made["radius"] = Radius(**plain["radius"]) if plain.get("radius") is not None else None
            said = plain.get("scores", {})
            made["scores"] = {str(n): tuple(math.inf if x is None else float(x) for x in v) for n, v in said.items()}
            found = cls(**{**plain, **made})
            str(found)  # numbers are numbers and texts are texts
            if not {s.about for s in found.statements} <= set(HEADINGS):
                raise ValueError("a statement is about something unknown")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"this is no held-out certificate ({error!r}). Make one with metamd certify.") from None
        return found

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types: what is not a finite number is null."""
        return dict(as_json(asdict(self)))

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def paragraphs(self) -> list[str]:
        """What `print` shows, a text for each statement and each assumption, for a page."""
        parts = [f"{heading}: {text}" for heading, texts in self._parts() for text in texts]
        return [*self._opening(), *parts, self.across_domains]

    def _opening(self) -> list[str]:
        why = f". The first: {self.reason}" if self.reason else ""
        return [
            f"held-out certificate: {self.family}, {self.tasks} task{'s' * (self.tasks != 1)}, T = {self.steps}, "
            f"each statement at {100 * (1 - self.delta):g} %",
            f"{self.diverged} of {self.tasks} diverged; a task that did counts as infinite{why}",
        ]

    def _parts(self) -> list[tuple[str, list[str]]]:
        """Texts with their headings."""
        found = [(heading, [str(s) for s in self.statements if s.about == about]) for about, heading in HEADINGS.items()]
        task = [f"{word}: {getattr(self.task, name)}" for name, word in WORDS.items()]
        return [*found, ("a task", task), ("assumed", list(self.assumptions))]

    def __str__(self) -> str:
        first, second = self._opening()
        lines = [first, _wrapped(second, "  ")]
        for heading, texts in self._parts():
            lines += [f"  {heading}:"] * bool(texts)
            lines += [_wrapped(text, "    ") for text in texts]
        return "\n".join([*lines, _wrapped(self.across_domains, "  ")])


def certificates(held_out: object) -> dict[str, Any]:
    """The certificates in the `held_out` of a header, by what they are about; earlier versions kept a single one."""
    if not isinstance(held_out, Mapping):
        return {}
    found, single = held_out.get("certificates"), held_out.get("certificate")
    old = {str(single.get("family")): single} if isinstance(single, Mapping) else {}
    return {**old, **(found if isinstance(found, Mapping) else {})}


def readable(held_out: object) -> tuple[dict[str, HeldOutCertificate], dict[str, Any]]:
    """The certificates in the `held_out` of a header that can be read, and what else it says."""
    said = held_out if isinstance(held_out, Mapping) else {"": held_out}
    found, rest = {}, {k: v for k, v in said.items() if k not in ("certificate", "certificates")}
    for place, plain in certificates(held_out).items():
        try:
            found[place] = HeldOutCertificate.from_dict(plain)
        except ValueError:
            rest[place] = plain
    return found, rest


def _wrapped(text: str, indent: str) -> str:
    return fill(text, 120, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)

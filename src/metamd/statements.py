"""The record of what is guaranteed about new tasks, and how it reads."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any, Literal

from metamd.tasks.base import Drawn

About = Literal["next task", "mean", "share", "training tasks"]
Verdict = Literal["holds", "no bound", "vacuous", "does not apply", "as printed; not a valid bound"]

HEADINGS: dict[About, str] = {
    "next task": "the next task",
    "mean": "the mean over tasks",
    "share": "the share of tasks",
    "training tasks": "the expectation over tasks, from the training tasks",
}


@dataclass(frozen=True)
class Statement:
    """One guarantee, or why there is none.

    Args:
        about: the next task, the mean over tasks, a share of them, or the mean as the training tasks tell it.
        quantity: what is bounded.
        bound: from above; None where nothing is said.
        verdict: whether it says anything. "vacuous": it is true and says no more than the range that was stated.
        basis: how it was found, or why there is nothing.
        confidence: the probability with which it holds.
        numbers: what it was computed from.
    """

    about: About
    quantity: str
    bound: float | None
    verdict: Verdict
    basis: str
    confidence: float
    numbers: Mapping[str, float] = field(default_factory=dict)

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

    def of(self, about: About, quantity: str = "") -> Statement:
        """The first statement about this whose quantity begins so.

        Args:
            about: the kind of statement.
            quantity: how its quantity begins.
        """
        found = [s for s in self.statements if s.about == about and s.quantity.startswith(quantity)]
        if not found:
            raise ValueError(f"there is no statement about {about!r} {quantity!r}. There are {self._quantities()}.")
        return found[0]

    def _quantities(self) -> str:
        return "; ".join(f"{s.about}: {s.quantity}" for s in self.statements)

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types: what is not a finite number is null."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        sure = f"{100 * (1 - self.delta):g} %"
        lines = [
            f"held-out certificate: {self.family}, {self.tasks} task{'s' * (self.tasks != 1)}, T = {self.steps}, "
            f"each statement at {sure}",
            f"  {self.diverged} of {self.tasks} diverged; a task that did counts as infinite",
        ]
        for about, heading in HEADINGS.items():
            here = [s for s in self.statements if s.about == about]
            lines += [f"  {heading}:"] * bool(here)
            lines += [_wrapped(str(s), "    ") for s in here]
        lines += ["  a task:"]
        words = {"domain": "domain", "data": "data", "initialisation": "initialisation", "batches": "batch order"}
        lines += [f"    {word}: {getattr(self.task, name)}" for name, word in words.items()]
        lines += ["  assumed:", *(_wrapped(text, "    ") for text in self.assumptions)]
        return "\n".join([*lines, _wrapped(self.across_domains, "  ")])


def _wrapped(text: str, indent: str) -> str:
    return fill(text, 120, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


def _finite(value: Any) -> Any:
    """The same without infinities and tuples, which JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value

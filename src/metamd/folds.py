"""The outcomes of one held-out domain: candidates, the best of them, and the target that a baseline sets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metamd.records import Result, read_cell, read_packed
from metamd.rivals.base import contender_key
from metamd.tasks.base import Config, config_hash
from metamd.training import Outcome
from metamd.tuning import METRICS

TO_TARGET = ("steps_to_target", "seconds_to_target")

HVP = 2.5
"""Gradient evaluations that a Hessian-vector product costs, measured on LeNet and the MLP."""


@dataclass(frozen=True)
class Candidate:
    """One setting of an optimiser on the tasks of a fold.

    Args:
        contender: what `Contender.describe` says.
        outcomes: one per task; of the first tasks alone for a setting that was screened out.
    """

    contender: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Fold:
    """The tasks of one held-out domain.

    Args:
        group: the domain.
        entrants: the candidates of each optimiser by label.
        seconds: of one step, by label.
        costs: of learning it, by label: `gradient_evaluations`, `hessian_vector_products` and `seconds`.
        trained: labels of optimisers that were learned on this domain, for which it is not held out.
    """

    group: str
    entrants: Mapping[str, tuple[Candidate, ...]]
    seconds: Mapping[str, float]
    costs: Mapping[str, Mapping[str, float]]
    trained: tuple[str, ...] = ()

    def best(self, label: str, metric: str, target: float | None) -> Candidate:
        """The candidate with the smallest mean of a metric, a run that failed or never arrived counted as very large.

        Those that were screened out are not asked.

        Args:
            label: of the optimiser.
            metric: a name in `METRICS` or `TO_TARGET`.
            target: the training loss to reach, for the latter.
        """
        if len(self.entrants[label]) == 1:
            return self.entrants[label][0]
        worst = 1e6
        return min(
            self.finished(label),
            key=lambda c: sum(min(self.value(o, label, metric, target), worst) for o in c.outcomes),
        )

    def finished(self, label: str) -> list[Candidate]:
        """The candidates that were run on all tasks."""
        return [c for c in self.entrants[label] if len(c.outcomes) == self.tasks(label)]

    def tasks(self, label: str) -> int:
        """How many tasks there are."""
        return max(len(c.outcomes) for c in self.entrants[label])

    def value(self, outcome: Outcome, label: str, metric: str, target: float | None) -> float:
        """One number of one training.

        Args:
            outcome: of the training.
            label: of the optimiser.
            metric: what is asked.
            target: the training loss to reach.
        """
        if metric in METRICS:
            return math.inf if outcome.failed and "loss" in metric else METRICS[metric](outcome)
        if metric not in TO_TARGET or target is None:
            raise ValueError(f"metric must be one of {', '.join([*METRICS, *TO_TARGET])}, got {metric!r}.")
        seconds = 1.0 if metric == "steps_to_target" else self.seconds.get(label, math.nan)
        return outcome.steps_to(target) * seconds

    def learning_gradients(self, label: str) -> float:
        """Gradient evaluations of learning an optimiser; zero where no cost is known, a Hessian-vector product is `HVP`."""
        cost = self.costs.get(label, {})
        return cost.get("gradient_evaluations", 0) + HVP * cost.get("hessian_vector_products", 0)

    def tuning_gradients(self, label: str) -> int:
        """Gradient evaluations that it takes to try all candidates on a task of this fold; none where nothing was chosen."""
        found = self.entrants[label]
        if len(found) == 1:
            return 0
        return round(sum(sum(o.gradients for o in c.outcomes) / len(c.outcomes) for c in found))


@dataclass(frozen=True)
class Target:
    """The training loss to reach on a domain: what an optimiser has, on the mean over its seeds, after a part of the run.

    Args:
        baseline: label of that optimiser, with the candidate that has the best mean loss there.
        share: of the steps. At 1 the baseline itself arrives in about half of its runs, for it must stay below the target.
    """

    baseline: str
    share: float = 0.75

    def of(self, fold: Fold) -> float:
        """The loss on one domain.

        Args:
            fold: of that domain.
        """
        losses = []
        for outcome in fold.best(self.baseline, "mean_loss", None).outcomes:
            place = max(i for i, step in enumerate(outcome.places) if step <= self.share * outcome.places[-1])
            losses.append(outcome.losses[place])
        return math.fsum(losses) / len(losses)


def cell_name(contender: Mapping[str, Any], config: Config) -> str:
    """The name of the record of one training.

    Args:
        contender: its description.
        config: of the task.
    """
    return f"{contender_key(contender)}-{config_hash(config)[:16]}"


def read_fold(folder: Path, found: Mapping[str, Any]) -> Fold:
    """A fold from the records of its runs.

    Args:
        folder: of the comparison.
        found: what the index says of it; nothing of it is trusted.
    """
    entrants, packed = {}, read_packed(folder)
    for label, candidates in found["entrants"].items():
        entrants[str(label)] = tuple(
            Candidate(dict(c["contender"]), tuple(_outcome(folder, packed, name) for name in c["runs"])) for c in candidates
        )
    sizes = {max((len(c.outcomes) for c in cs), default=0) for cs in entrants.values()}
    if len(sizes) != 1 or 0 in sizes or not all(c.outcomes for cs in entrants.values() for c in cs):
        raise ValueError(f"every optimiser must have run all tasks of {found['group']!r}.")
    seconds = {str(k): math.nan if v is None else float(v) for k, v in found["seconds"].items()}
    costs = {str(k): {str(n): float(x) for n, x in v.items()} for k, v in found["costs"].items()}
    return Fold(str(found["group"]), entrants, seconds, costs, tuple(map(str, found.get("trained", ()))))


def _outcome(folder: Path, packed: Mapping[str, Result], name: Any) -> Outcome:
    if not isinstance(name, str) or not name or not set(name) <= _NAME:
        raise ValueError(f"the name of a record must consist of letters, digits and hyphens, got {name!r}.")
    return Outcome.from_json(packed[name] if name in packed else read_cell(folder, name))


_NAME = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")

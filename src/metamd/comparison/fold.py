"""The outcomes of one held-out domain: candidates, the best of them, and the target that a baseline sets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from metamd.comparison.training import Outcome
from metamd.comparison.tuning import METRICS
from metamd.files.store import Result, read_cell, read_packed
from metamd.rivals.base import Tuning, contender_key
from metamd.tasks.base import Config, config_hash

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

    def loss_after(self, share: float) -> float:
        """After a part of the run, on the mean of the runs that did not fail; NaN, which nobody reaches, if all did.

        Args:
            share: of the steps.
        """
        runs = [o for o in self.outcomes if not o.failed]
        return math.fsum(o.loss_after(share) for o in runs) / len(runs) if runs else math.nan


@dataclass(frozen=True)
class Fold:
    """The tasks of one held-out domain.

    Args:
        group: the domain.
        entrants: the candidates of each optimiser by label.
        seconds: of one step, by label.
        costs: of learning it, by label: `gradient_evaluations`, `hessian_vector_products` and `seconds`.
        trained: labels of optimisers that were learned on this domain, for which it is not held out.
        tunings: by label, how a setting was found that was not chosen among candidates here.
    """

    group: str
    entrants: Mapping[str, tuple[Candidate, ...]]
    seconds: Mapping[str, float]
    costs: Mapping[str, Mapping[str, float]]
    trained: tuple[str, ...] = ()
    tunings: Mapping[str, Tuning] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Of every run."""
        return next(iter(self.entrants.values()))[0].outcomes[0].places[-1]

    def best(self, label: str, metric: str, target: float | None) -> Candidate:
        """The candidate with the smallest mean of a metric, a run that failed or never arrived counted as very large.

        For steps and seconds to a target it is the smallest median, as that is what tables show, and the mean decides among
        equals. Those that were screened out are not asked.

        Args:
            label: of the optimiser.
            metric: a name in `METRICS` or `TO_TARGET`.
            target: the training loss to reach, for the latter.
        """
        if len(self.entrants[label]) == 1:
            return self.entrants[label][0]

        def badness(candidate: Candidate) -> tuple[float, float]:
            values = [min(self.value(o, label, metric, target), 1e6) for o in candidate.outcomes]
            return median(values) if metric in TO_TARGET else 0.0, sum(values)

        return min(self.finished(label), key=badness)

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
        steps = outcome.steps_to(target)
        return steps if metric == "steps_to_target" or steps == math.inf else steps * self.seconds.get(label, math.nan)

    def is_timed(self, label: str) -> bool:
        """Whether the seconds of a step are known, or are not needed as every run failed.

        Args:
            label: of the optimiser.
        """
        known = math.isfinite(self.seconds.get(label, math.nan))
        return known or all(o.failed for c in self.entrants[label] for o in c.outcomes)

    def learning_gradients(self, label: str) -> float:
        """Gradient evaluations of learning an optimiser; zero where no cost is known, a Hessian-vector product is `HVP`."""
        cost = self.costs.get(label, {})
        return cost.get("gradient_evaluations", 0) + HVP * cost.get("hessian_vector_products", 0)

    def tuning_gradients(self, label: str) -> int:
        """Gradient evaluations that the search for a setting takes on a task of this fold; none where nothing was chosen."""
        if label in self.tunings:
            return self.tunings[label].gradients
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
        """The loss on one domain, from the runs that did not fail; NaN, which nobody reaches, if all did.

        Args:
            fold: of that domain.
        """
        return fold.best(self.baseline, "mean_loss", None).loss_after(self.share)


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
        entrants[str(label)] = tuple(_candidate(folder, packed, c) for c in candidates)
    tasks = [[config_hash(o.config) for o in c.outcomes] for cs in entrants.values() for c in cs]
    longest = max(tasks, key=len, default=[])
    whole = all(any(len(c.outcomes) == len(longest) for c in cs) for cs in entrants.values())
    if not longest or not whole or any(not t or t != longest[: len(t)] for t in tasks):
        raise ValueError(f"every optimiser must have run all tasks of {found['group']!r}, in the same order.")
    if len({o.places for cs in entrants.values() for c in cs for o in c.outcomes}) > 1:
        raise ValueError(f"all runs of {found['group']!r} must have been watched at the same places.")
    seconds = {str(k): math.nan if v is None else _amount(v) for k, v in found["seconds"].items()}
    costs = {str(k): {str(n): _amount(x) for n, x in v.items()} for k, v in found["costs"].items()}
    tunings = {str(k): Tuning.from_json(v) for k, v in found.get("tunings", {}).items()}
    return Fold(str(found["group"]), entrants, seconds, costs, tuple(map(str, found.get("trained", ()))), tunings)


def _amount(value: Any) -> float:
    """Seconds, or a count of evaluations."""
    if not 0 <= float(value) < 2**53:
        raise ValueError(f"seconds and costs must be numbers from 0 to 2^53, got {value!r:.50}.")
    return float(value)


def _candidate(folder: Path, packed: Mapping[str, Result], found: Mapping[str, Any]) -> Candidate:
    contender = dict(found["contender"])
    return Candidate(contender, tuple(_outcome(folder, packed, contender, name) for name in found["runs"]))


def _outcome(folder: Path, packed: Mapping[str, Result], contender: Mapping[str, Any], name: Any) -> Outcome:
    if not isinstance(name, str) or not name or not set(name) <= _NAME:
        raise ValueError(f"the name of a record must consist of letters, digits and hyphens, got {name!r}.")
    try:
        outcome = Outcome.from_json(packed[name] if name in packed else read_cell(folder, name))
    except ValueError as error:
        raise ValueError(f"the record {name!r} in {str(folder)!r}: {error}") from None
    if outcome.contender != contender or cell_name(contender, outcome.config) != name:
        raise ValueError(f"the record {name!r} is of another training than its name says. Delete it, and it is made again.")
    return outcome


_NAME = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")

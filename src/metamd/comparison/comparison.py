"""What several optimisers did on the same tasks: choices, targets, differences and costs, all from the outcomes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from metamd.comparison.statistics import LEVEL, Estimate, Profile, bootstrap, profiles, signed_rank_tests, signed_ranks
from metamd.comparison.training import Outcome
from metamd.comparison.tuning import METRICS
from metamd.files.store import Records, Result, as_json, read_cells, read_json
from metamd.potentials.forms import Array
from metamd.rivals.base import Tuning, contender_key
from metamd.tasks.base import Config, config_hash

SHOWN = (
    "mean_loss",
    "final_loss",
    "steps_to_target",
    "seconds_to_target",
    "validation_loss",
    "test_loss",
    "test_error",
)
"""The columns of a table, as far as they were measured."""

ON_THE_WAY = ("tenth_loss", "half_loss")
"""What the protocol `once` shows beside the loss at the end."""

ON_TEST_DATA = {"test_loss": "test loss", "test_error": "test error"}
"""Measures on test data that a verdict on training losses is checked against, as far as they were measured."""

TO_TARGET = ("steps_to_target", "seconds_to_target")

LEAST = 1e-9
"""Smaller values count as this one in ratios: zero has no logarithm."""

HVP = 2.5
"""Gradient evaluations that a Hessian-vector product costs, measured on LeNet and the MLP."""


def evaluations(cost: Mapping[str, float]) -> float:
    """Gradient evaluations that learning took; a Hessian-vector product is `HVP`."""
    return cost.get("gradient_evaluations", 0) + HVP * cost.get("hessian_vector_products", 0)


# the outcomes of one domain


@dataclass(frozen=True)
class Candidate:
    """One setting of an optimiser on the tasks of a fold."""

    contender: Mapping[str, Any]  # what `Contender.describe` says
    outcomes: tuple[Outcome, ...]  # one per task; of the first tasks alone for a setting that was screened out

    def loss_after(self, share: float) -> float:
        """After a part of the run, on the mean of the runs that did not fail; NaN, which nobody reaches, if all did."""
        runs = [o for o in self.outcomes if not o.failed]
        return fmean(o.loss_after(share) for o in runs) if runs else math.nan


@dataclass(frozen=True)
class Fold:
    """The tasks of one held-out domain."""

    group: str  # the domain
    entrants: Mapping[str, tuple[Candidate, ...]]  # the candidates of each optimiser by label
    seconds: Mapping[str, float]  # of one step, by label
    # of learning it, by label: `gradient_evaluations`, `hessian_vector_products` and `seconds`
    costs: Mapping[str, Mapping[str, float]]
    trained: tuple[str, ...] = ()  # labels of optimisers that were learned on this domain, for which it is not held out
    # by label, how a setting was found that was not chosen among candidates here
    tunings: Mapping[str, Tuning] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The number of steps of every run."""
        return next(iter(self.entrants.values()))[0].outcomes[0].places[-1]

    def best(self, label: str, metric: str, target: float | None = None) -> Candidate:
        """The candidate with the smallest mean of a metric, a run that failed or never arrived counted as very large.

        For steps and seconds to a target it is the smallest median, as that is what tables show, and the mean decides among
        equals. Candidates that were screened out do not take part.
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
        """One number of one training; the target is the training loss to reach."""
        if metric in METRICS:
            return math.inf if outcome.failed and "loss" in metric else METRICS[metric](outcome)
        if metric not in TO_TARGET or target is None:
            raise ValueError(f"metric must be one of {', '.join([*METRICS, *TO_TARGET])}, got {metric!r}.")
        steps = outcome.steps_to(target)
        return steps if metric == "steps_to_target" or steps == math.inf else steps * self.seconds.get(label, math.nan)

    def learning_gradients(self, label: str) -> float:
        """Gradient evaluations of learning an optimiser; zero where no cost is known."""
        return evaluations(self.costs.get(label, {}))

    def tuning_gradients(self, label: str) -> int:
        """Gradient evaluations that the search for a setting takes on a task of this fold; none where nothing was chosen."""
        if label in self.tunings:
            return self.tunings[label].gradients
        found = self.entrants[label]
        return 0 if len(found) == 1 else round(sum(fmean(o.gradients for o in c.outcomes) for c in found))


@dataclass(frozen=True)
class Target:
    """The training loss to reach on a domain: what an optimiser has, on the mean over its seeds, after a part of the run."""

    baseline: str  # label of that optimiser, with the candidate that has the best mean loss there
    # of the steps. At 1 the baseline itself arrives in about half of its runs, for it must stay below the target
    share: float = 0.75


# the comparison


@dataclass(frozen=True)
class Difference:
    """The first optimiser of a comparison against another one, over pairs of runs of the same task."""

    label: str  # of the other one
    metric: str  # what is compared; less is better
    ratio: float  # geometric mean of ours / theirs over the pairs where both are finite; NaN without any
    low: float  # lower end of its 95 % interval
    high: float  # upper end
    wins: int  # pairs in which ours is smaller
    ties: int  # pairs in which they are equal
    losses: int  # pairs in which theirs is smaller
    p: float  # of the two-sided signed-rank test, corrected for the number of rivals
    # what that test is about; negative speaks for ours. Wins and losses, which have no size, may say otherwise
    rank_sum: float
    # of a training loss, or of steps and seconds to one: what is larger for ours on test data, by its geometric mean
    worse: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """`ahead`, `behind`, or `undecided` if p is above 0.05; who is ahead in training alone is said to be so."""
        if self.p > LEVEL:
            return "undecided"
        if self.rank_sum > 0:
            return "behind"
        return f"ahead, but {' and '.join(self.worse)} worse" if self.worse else "ahead"


@dataclass(frozen=True)
class Comparison:
    """The outcomes of all optimisers on the same tasks, by held-out domain.

    Its methods take the label of an optimiser, one of `labels`, and a metric, one of `metrics`.

    Args:
        folds: the domains.
        settings: what all runs have in common.
        aim: the target of steps- and seconds-to-target; if not given, that of the last label.
        protocol: by which rule settings were chosen, in a word.
    """

    folds: tuple[Fold, ...]
    settings: Mapping[str, Any]
    aim: Target | None = None
    protocol: str = ""

    @property
    def labels(self) -> list[str]:
        """The labels of the optimisers; the first is compared with the others."""
        return list(self.folds[0].entrants)

    @property
    def metrics(self) -> list[str]:
        """Those of `SHOWN` that were measured."""
        measured = {"test_error": True, "seconds_to_target": bool(self.folds[0].seconds)}
        measured |= {"validation_loss": True, "test_loss": True}
        for fold in self.folds:
            for label, candidates in fold.entrants.items():
                ended = [o for c in candidates for o in c.outcomes if not o.failed]
                for split in ("validation", "test"):
                    measured[f"{split}_loss"] &= all(split in o.ends for o in ended)
                measured["test_error"] &= all(o.ends.get("test", (0.0, None))[1] is not None for o in ended)
                measured["seconds_to_target"] &= not ended or math.isfinite(fold.seconds.get(label, math.nan))
        shown = [m for m in SHOWN if measured.get(m, True)]
        return [m for x in shown for m in ((*ON_THE_WAY, x) if self.protocol == "once" and x == "final_loss" else (x,))]

    @property
    def groups(self) -> list[int]:
        """The number of the domain of every task."""
        return [i for i, f in enumerate(self.folds) for _ in range(f.tasks(self.labels[0]))]

    @property
    def screening(self) -> str:
        """A sentence on settings that were not run on all tasks; empty if all were."""
        if all(len(f.finished(label)) == len(f.entrants[label]) for f in self.folds for label in self.labels):
            return ""
        return (
            "All settings were run on the first task of a domain; those that were among the best few there in mean loss, "
            "final loss or an error were run on the others."
        )

    def is_learned(self, label: str) -> bool:
        """Whether an optimiser is a learned file, and no rival."""
        return str(self.folds[0].entrants[label][0].contender["rival"]).startswith("metamd")

    def trained_on(self, label: str) -> list[str]:
        """The domains that an optimiser was learned on: for it they are not held out."""
        return [f.group for f in self.folds if label in f.trained]

    def aiming(self, baseline: str, share: float = 0.75) -> "Comparison":
        """The same with another target.

        Args:
            baseline: label of the optimiser that sets it, or the name of a rival, for the first label that it has.
            share: of the steps after which its loss is the target.
        """
        labels = [label for label in self.labels if label == baseline]
        labels += [label for label, found in self.folds[0].entrants.items() if found[0].contender.get("rival") == baseline]
        if not labels:
            raise ValueError(
                f"the baseline, which sets the target, must be one of {'; '.join(self.labels)}, or the name of a rival such "
                f"as adam; got {baseline!r}."
            )
        if not 0 < share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {share}.")
        return replace(self, aim=Target(labels[0], share))

    def target(self, fold: Fold) -> float:
        """The training loss to reach on one domain, of runs that did not fail; NaN, which nobody reaches, if all did."""
        aim = self.aim or Target(self.labels[-1])
        return fold.best(aim.baseline, "mean_loss").loss_after(aim.share)

    def chosen(self, label: str, metric: str) -> list[Candidate]:
        """The candidate of an optimiser that is shown for a metric, on each domain."""
        return [f.best(label, metric, self.target(f)) for f in self.folds]

    def values(self, label: str, metric: str) -> Array:
        """One number for every task: of all domains, one after another."""
        shown = zip(self.folds, map(self.target, self.folds), self.chosen(label, metric), strict=True)
        return np.array([f.value(o, label, metric, target) for f, target, c in shown for o in c.outcomes], dtype=np.float64)

    def estimate(self, label: str, metric: str) -> Estimate:
        """The mean of a metric over all tasks, or the median of steps and seconds to the target, with its interval."""
        return bootstrap(self.values(label, metric), self.groups, median=metric in TO_TARGET)

    def differences(self, metric: str) -> list[Difference]:
        """The first optimiser against each of the others."""
        ours, others = self.values(self.labels[0], metric), self.labels[1:]
        rows = [self.values(label, metric) for label in others]
        logs = [(np.log(np.maximum(ours, LEAST)), np.log(np.maximum(row, LEAST))) for row in rows]
        p_values = signed_rank_tests(logs)
        found = []
        for label, row, (a, b), p in zip(others, rows, logs, p_values, strict=True):
            both = np.isfinite(a) & np.isfinite(b)
            where = [g for g, ok in zip(self.groups, both, strict=True) if ok]
            log = bootstrap(a[both] - b[both], where) if both.any() else Estimate(math.nan, math.nan, math.nan)
            ratio, low, high = math.exp(log.value), math.exp(log.low), math.exp(log.high)
            wins, ties, losses = (int(x.sum()) for x in (ours < row, ours == row, ours > row))
            rank_sum, worse = float(signed_ranks(a, b).sum()), self._worse_on_test_data(metric, label)
            found.append(Difference(label, metric, ratio, low, high, wins, ties, losses, p, rank_sum, worse))
        return found

    def _worse_on_test_data(self, metric: str, label: str) -> tuple[str, ...]:
        """In what the first optimiser does worse than another one on test data; nothing for a metric of such data."""
        if metric.startswith(("test", "validation")):
            return ()

        def larger(other: str) -> bool:
            each = [np.log(np.maximum(self.values(x, other), LEAST)) for x in (self.labels[0], label)]
            both = np.isfinite(each[0]) & np.isfinite(each[1])
            return bool(both.any()) and float((each[0][both] - each[1][both]).mean()) > 0

        return tuple(said for other, said in ON_TEST_DATA.items() if other in self.metrics and larger(other))

    def profiles(self, metric: str = "steps_to_target") -> dict[str, Profile]:
        """The performance profile of each optimiser, for steps or seconds to the target."""
        return profiles({label: self.values(label, metric) for label in self.labels})

    def table(self, metric: str) -> list[dict[str, Any]]:
        """A row for each optimiser: the estimate, and how the first one stands against it."""
        differences = {d.label: d for d in self.differences(metric)}
        rows = []
        for label in self.labels:
            arrived = float(np.isfinite(self.values(label, metric)).mean())
            rows.append({"label": label, **asdict(self.estimate(label, metric)), "arrived": arrived})
            if d := differences.get(label):
                rows[-1] |= {k: getattr(d, k) for k in ("verdict", "ratio", "p", "wins", "losses")}
        return rows

    def curve(self, label: str) -> dict[str, tuple[tuple[int, ...], Array]]:
        """The training losses over the run by domain: where they were evaluated, and (tasks, places)."""
        runs = {f.group: c.outcomes for f, c in zip(self.folds, self.chosen(label, "mean_loss"), strict=True)}
        return {d: (each[0].places, np.array([o.losses for o in each], dtype=np.float64)) for d, each in runs.items()}

    def learning_gradients(self, label: str) -> float:
        """Gradient evaluations of learning an optimiser, on the mean over the domains."""
        return sum(f.learning_gradients(label) for f in self.folds) / len(self.folds)

    def tasks_to_pay(self, label: str, *, every_task: bool) -> float:
        """After how many tasks the first optimiser has paid for its learning, in gradient evaluations until the target.

        A run that never arrives counts as a whole run, which flatters it.

        Args:
            label: of the rival.
            every_task: whether the rival is tuned for every task anew, or once for all.
        """
        both = (self.labels[0], label)
        horizons = [float(self.folds[g].steps) for g in self.groups]
        steps = [float(np.minimum(self.values(x, "steps_to_target"), horizons).mean()) for x in both]
        tuning = [sum(f.tuning_gradients(x) for f in self.folds) / len(self.folds) for x in both]
        ahead, gain = self.learning_gradients(both[0]) - self.learning_gradients(label), steps[1] - steps[0]
        saved = tuning[1] - tuning[0]
        ahead, gain = (ahead, gain + saved) if every_task else (ahead - saved, gain)
        if ahead <= 0:
            return 0.0
        return math.ceil(ahead / gain) if gain > 0 else math.inf

    @classmethod
    def join(cls, parts: Iterable["Comparison"]) -> "Comparison":
        """Comparisons of the same optimisers on several domains as one.

        Args:
            parts: each with the same labels, and no domain twice.
        """
        found = list(parts)
        if not found:
            raise ValueError("there is nothing to join.")
        first = found[0]
        if another := next((c for c in found if c.labels != first.labels), None):
            apart = sorted({*first.labels} ^ {*another.labels})
            one, two = first.folds[0].group, another.folds[0].group
            raise ValueError(
                f"comparisons of the same optimisers are required, in one order, but those on {one!r} and {two!r} differ "
                f"in {', '.join(apart) or 'their order'}. Bring all domains to the same optimisers by the command that made "
                "them, or report on each folder by itself."
            )
        for said, name in (("protocol", "protocol"), ("target", "aim")):
            if any(getattr(c, name) != getattr(first, name) for c in found):
                raise ValueError(f"comparisons with one {said} are required, got several. Report on each folder by itself.")
        folds = tuple(f for c in found for f in c.folds)
        groups = [f.group for f in folds]
        if twice := [group for group in groups if groups.count(group) > 1]:
            raise ValueError(
                f"{twice[0]!r} is in two of these comparisons and would count as two domains. Report on each folder by "
                "itself, or compare with more seeds in one."
            )
        return replace(first, folds=folds)

    def index(self) -> Result:
        """All that `read` needs beside the records of the runs, in JSON's types."""

        def runs(c: Candidate) -> Result:
            return {"contender": c.contender, "runs": [cell_name(c.contender, o.config) for o in c.outcomes]}

        folds = []
        for fold in self.folds:
            entrants = {label: [runs(c) for c in found] for label, found in fold.entrants.items()}
            folds.append({**vars(fold), "entrants": entrants, "tunings": {n: asdict(t) for n, t in fold.tunings.items()}})
        return dict(as_json({"protocol": self.protocol, "aim": self.aim and asdict(self.aim), "folds": folds}))

    @classmethod
    def read(cls, folder: Path | str) -> "Comparison":
        """The comparison that `compare` left in a folder, from its records.

        Args:
            folder: with `comparison.json`, `run.json` and `cells`.
        """
        folder = Path(folder)
        index, cells = read_json(folder / "comparison.json"), read_cells(folder)
        where = repr(str(folder / "comparison.json"))
        try:
            folds = tuple(_read_fold(folder, cells, f) for f in index["folds"])
            if not folds or any(list(f.entrants) != list(folds[0].entrants) or not f.entrants for f in folds):
                raise ValueError(f"every domain of {where} must have the same optimisers, and there must be one.")
            found = cls(folds, Records.settings(folder), protocol=str(index.get("protocol", "")))
            aim = index.get("aim")
            return found if aim is None else found.aiming(aim["baseline"], float(aim["share"]))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{where} is not the index of a comparison: {error!r}.") from None


def cell_name(contender: Mapping[str, Any], config: Config) -> str:
    """The name of the record of one training, from the contender's description and the task's config."""
    return f"{contender_key(contender)}-{config_hash(config)[:16]}"


def _read_fold(folder: Path, cells: Mapping[str, Result], found: Mapping[str, Any]) -> Fold:
    """A fold from the records of its runs; nothing that the index says of it is trusted."""

    def outcome(contender: Mapping[str, Any], name: Any) -> Outcome:
        if name not in cells:
            raise FileNotFoundError(f"there is no record {name!r} in {str(folder)!r}. Compare again, and it is made.")
        try:
            outcome = Outcome.from_json(cells[name])
        except ValueError as error:
            raise ValueError(f"the record {name!r} in {str(folder)!r}: {error}") from None
        if outcome.contender != contender or cell_name(contender, outcome.config) != name:
            raise ValueError(
                f"the record {name!r} is of another training than its name says. Delete it, and it is made again."
            )
        return outcome

    def candidate(about: Mapping[str, Any]) -> Candidate:
        contender = dict(about["contender"])
        return Candidate(contender, tuple(outcome(contender, name) for name in about["runs"]))

    entrants = {str(label): tuple(map(candidate, each)) for label, each in found["entrants"].items()}
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

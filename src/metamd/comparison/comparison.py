"""What several optimisers did on the same tasks: choices, targets, differences and costs, all from the outcomes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from metamd.comparison.fold import TO_TARGET, Candidate, Fold, Target, cell_name, read_fold
from metamd.comparison.statistics import Array, Estimate, Profile, bootstrap, holm, profiles, rank_sum, signed_rank_test
from metamd.files.store import Records, read_json

SHOWN = ("mean_loss", "final_loss", "steps_to_target", "seconds_to_target", "test_error")
"""What a table has, as far as it was measured."""

LEAST = 1e-9
"""Smaller values count as this one in ratios: of zero there is none."""


@dataclass(frozen=True)
class Difference:
    """The first optimiser of a comparison against another one, over pairs of runs of the same task.

    Args:
        label: of the other one.
        metric: what is compared; less is better.
        ratio: geometric mean of ours / theirs over the pairs where both are finite; NaN without any.
        low: lower end of its 95 % interval.
        high: upper end.
        wins: pairs in which ours is smaller.
        ties: pairs in which they are equal.
        losses: pairs in which theirs is smaller.
        p: of the two-sided signed-rank test, corrected for the number of rivals.
        rank_sum: what that test is about; negative speaks for ours. Wins and losses, which have no size, may say otherwise.
    """

    label: str
    metric: str
    ratio: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int
    p: float
    rank_sum: float

    @property
    def verdict(self) -> str:
        """`ahead`, `behind`, or `undecided` if p is above 0.05."""
        if self.p > 0.05:
            return "undecided"
        return "ahead" if self.rank_sum < 0 else "behind"


@dataclass(frozen=True)
class Comparison:
    """The outcomes of all optimisers on the same tasks, by held-out domain.

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
        """Of the optimisers; the first is compared with the others."""
        return list(self.folds[0].entrants)

    @property
    def metrics(self) -> list[str]:
        """Those of `SHOWN` that were measured."""
        one = self.folds[0].entrants[self.labels[0]][0].outcomes[0]
        all_ends = [o.ends for f in self.folds for cs in f.entrants.values() for c in cs for o in c.outcomes if not o.failed]
        graded = all("test" in ends and ends["test"][1] is not None for ends in all_ends) and bool(one.places)
        timed = all(f.is_timed(label) for f in self.folds for label in self.labels) and bool(self.folds[0].seconds)
        left_out = ([] if graded else ["test_error"]) + ([] if timed else ["seconds_to_target"])
        return [m for m in SHOWN if m not in left_out]

    def trained_on(self, label: str) -> list[str]:
        """The domains that an optimiser was learned on: for it they are not held out.

        Args:
            label: of the optimiser.
        """
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
        """The training loss to reach on one domain.

        Args:
            fold: of that domain.
        """
        return (self.aim or Target(self.labels[-1])).of(fold)

    @property
    def screening(self) -> str:
        """A sentence on settings that were not run on all tasks; empty if all were."""
        if all(len(f.finished(label)) == len(f.entrants[label]) for f in self.folds for label in self.labels):
            return ""
        return (
            "All settings were run on the first task of a domain; those that were among the best few there in mean loss, "
            "final loss or an error were run on the others."
        )

    def chosen(self, label: str, metric: str) -> list[Candidate]:
        """The candidate of an optimiser that is shown for a metric, on each domain.

        Args:
            label: of the optimiser.
            metric: what is shown.
        """
        return [f.best(label, metric, self.target(f)) for f in self.folds]

    def values(self, label: str, metric: str) -> Array:
        """One number for every task: of all domains, one after another.

        Args:
            label: of the optimiser.
            metric: what is shown.
        """
        found = []
        for fold, candidate in zip(self.folds, self.chosen(label, metric), strict=True):
            found += [fold.value(o, label, metric, self.target(fold)) for o in candidate.outcomes]
        return np.array(found, dtype=np.float64)

    @property
    def groups(self) -> list[int]:
        """The number of the domain of every task."""
        return [i for i, f in enumerate(self.folds) for _ in range(f.tasks(self.labels[0]))]

    def estimate(self, label: str, metric: str) -> Estimate:
        """The mean of a metric over all tasks, or the median of steps and seconds to the target, with its interval.

        Args:
            label: of the optimiser.
            metric: what is shown.
        """
        return bootstrap(self.values(label, metric), self.groups, median=metric in TO_TARGET)

    def differences(self, metric: str) -> list[Difference]:
        """The first optimiser against each of the others.

        Args:
            metric: what is compared.
        """
        ours, others = self.values(self.labels[0], metric), self.labels[1:]
        rows = [self.values(label, metric) for label in others]
        logs = [(np.log(np.maximum(ours, LEAST)), np.log(np.maximum(row, LEAST))) for row in rows]
        p_values = holm([signed_rank_test(a, b) for a, b in logs])
        found = []
        for label, row, (a, b), p in zip(others, rows, logs, p_values, strict=True):
            both = np.isfinite(a) & np.isfinite(b)
            where = [g for g, ok in zip(self.groups, both, strict=True) if ok]
            log = bootstrap(a[both] - b[both], where) if both.any() else Estimate(math.nan, math.nan, math.nan)
            ratio, low, high = math.exp(log.value), math.exp(log.low), math.exp(log.high)
            wins, ties, losses = (int(x.sum()) for x in (ours < row, ours == row, ours > row))
            found.append(Difference(label, metric, ratio, low, high, wins, ties, losses, p, rank_sum(a, b)))
        return found

    def profiles(self, metric: str = "steps_to_target") -> dict[str, Profile]:
        """The performance profile of each optimiser.

        Args:
            metric: steps or seconds to the target.
        """
        return profiles({label: self.values(label, metric) for label in self.labels})

    def table(self, metric: str) -> list[dict[str, Any]]:
        """A row for each optimiser: the estimate, and how the first one stands against it.

        Args:
            metric: what is shown.
        """
        differences = {d.label: d for d in self.differences(metric)}
        rows = []
        for label in self.labels:
            row: dict[str, Any] = {"label": label, **asdict(self.estimate(label, metric))}
            row["arrived"] = float(np.isfinite(self.values(label, metric)).mean())
            if label in differences:
                d = differences[label]
                row |= {"verdict": d.verdict, "ratio": d.ratio, "p": d.p, "wins": d.wins, "losses": d.losses}
            rows.append(row)
        return rows

    def curve(self, label: str, metric: str = "mean_loss") -> dict[str, tuple[tuple[int, ...], Array]]:
        """The training losses over the run by domain: where they were evaluated, and (tasks, places).

        Args:
            label: of the optimiser.
            metric: for which its candidate was chosen.
        """
        found = {}
        for fold, candidate in zip(self.folds, self.chosen(label, metric), strict=True):
            losses = np.array([o.losses for o in candidate.outcomes], dtype=np.float64)
            found[fold.group] = candidate.outcomes[0].places, losses
        return found

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
        horizons = [float(self.folds[g].steps) for g in self.groups]
        steps = [float(np.minimum(self.values(x, "steps_to_target"), horizons).mean()) for x in (self.labels[0], label)]
        tuning = [sum(f.tuning_gradients(x) for f in self.folds) / len(self.folds) for x in (self.labels[0], label)]
        ahead = self.learning_gradients(self.labels[0]) - self.learning_gradients(label)
        gain = steps[1] - steps[0]
        if every_task:
            gain += tuning[1] - tuning[0]
        else:
            ahead -= tuning[1] - tuning[0]
        if ahead <= 0:
            return 0.0
        return math.ceil(ahead / gain) if gain > 0 else math.inf

    def with_seconds(self, seconds: Mapping[str, float]) -> "Comparison":
        """The same with the seconds of a step, by label.

        Args:
            seconds: as `metamd.training.step_seconds` gives them.
        """
        return replace(self, folds=tuple(replace(f, seconds=dict(seconds)) for f in self.folds))

    @classmethod
    def join(cls, parts: Iterable["Comparison"]) -> "Comparison":
        """Comparisons of the same optimisers on several domains as one.

        Args:
            parts: each with the same labels, and no domain twice.
        """
        found = list(parts)
        if not found:
            raise ValueError("there is nothing to join.")
        if another := next((c for c in found if c.labels != found[0].labels), None):
            apart = sorted({*found[0].labels} ^ {*another.labels})
            one, two = found[0].folds[0].group, another.folds[0].group
            raise ValueError(
                f"comparisons of the same optimisers are required, in one order, but those on {one!r} and {two!r} differ "
                f"in {', '.join(apart) or 'their order'}. Bring all domains to the same optimisers by the command that made "
                "them, or report on each folder by itself."
            )
        for said, facts in (("protocol", [c.protocol for c in found]), ("target", [c.aim for c in found])):
            if any(fact != facts[0] for fact in facts):
                raise ValueError(f"comparisons with one {said} are required, got several. Report on each folder by itself.")
        folds = [f for c in found for f in c.folds]
        groups = [f.group for f in folds]
        twice = next((group for group in groups if groups.count(group) > 1), None)
        if twice is not None:
            raise ValueError(
                f"{twice!r} is in two of these comparisons and would count as two domains. Report on each folder by itself, "
                "or compare with more seeds in one."
            )
        return cls(tuple(folds), found[0].settings, found[0].aim, found[0].protocol)

    def index(self) -> dict[str, Any]:
        """What is needed beside the records of the runs to have the comparison again, in JSON's types."""
        folds = []
        for fold in self.folds:
            entrants = {
                label: [
                    {"contender": c.contender, "runs": [cell_name(c.contender, o.config) for o in c.outcomes]} for c in found
                ]
                for label, found in fold.entrants.items()
            }
            seconds = {k: None if math.isnan(v) else v for k, v in fold.seconds.items()}
            about = {"group": fold.group, "trained": list(fold.trained)}
            tunings = {label: t.to_json() for label, t in fold.tunings.items()}
            costs = {"seconds": seconds, "costs": fold.costs} | ({"tunings": tunings} if tunings else {})
            folds.append({**about, "entrants": entrants, **costs})
        aim = None if self.aim is None else {"baseline": self.aim.baseline, "share": self.aim.share}
        return {"protocol": self.protocol, "aim": aim, "folds": folds}

    @classmethod
    def read(cls, folder: Path | str) -> "Comparison":
        """The comparison that `compare` left in a folder, from its records.

        Args:
            folder: with `comparison.json`, `run.json` and `cells`.
        """
        folder = Path(folder)
        index = read_json(folder / "comparison.json")
        where = repr(str(folder / "comparison.json"))
        try:
            folds = tuple(read_fold(folder, f) for f in index["folds"])
            if not folds or any(list(f.entrants) != list(folds[0].entrants) or not f.entrants for f in folds):
                raise ValueError(f"every domain of {where} must have the same optimisers, and there must be one.")
            found = cls(folds, Records.settings(folder), protocol=str(index.get("protocol", "")))
            aim = index.get("aim")
            return found if aim is None else found.aiming(aim["baseline"], float(aim["share"]))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{where} is not the index of a comparison: {error!r}.") from None

"""How much sooner than the best of several rivals: the comparison that a leave-one-out experiment is judged by."""

import math
from collections.abc import Mapping, Sequence

from metamd.comparison.comparison import Comparison
from metamd.comparison.fold import Candidate, Fold
from metamd.comparison.sections import Section
from metamd.files.store import Result


def pace(comparison: Comparison, rivals: Sequence[str], share: float = 1.0, ours: str | None = None) -> list[Result]:
    """One optimiser against the best of the rivals on every domain.

    Each quantity has its own best rival, with its own best setting on that very domain: the lowest mean loss, the lowest
    loss after a share of the steps, the highest test accuracy. The steps are those to the second of these losses, as a part
    of what that rival took by the same rule, with a whole run for each of its runs that was not there twice in a row. For
    ours such a run is never there, so that there is no ratio; `arrived` says in how many runs each of the two was. The
    seconds are those to the same loss, as a part of what the quickest rival takes by the clock, which may be another one,
    behind in steps: at any setting with which it is there in all runs. The learning is paid for after so many tasks on each
    of which the rival of the steps would be tuned with all its settings, and ours with its own where the protocol tunes it,
    in gradient evaluations, and in seconds, where a gradient evaluation of learning takes as long as a step of ours.

    Args:
        comparison: over all domains.
        rivals: labels.
        share: of the run.
        ours: its label; that of the first one if not given.
    """
    ours = ours or comparison.labels[0]
    found = []
    for fold in comparison.folds:
        mine = fold.best(ours, "mean_loss", None)
        losses = {label: _mean([o.mean_loss for o in fold.best(label, "mean_loss", None).outcomes]) for label in rivals}
        lowest = min(losses, key=lambda label: losses[label])
        reached = {label: min(fold.finished(label), key=lambda c: _standing(c, share)) for label in rivals}
        fastest = min(reached, key=lambda label: _standing(reached[label], share))
        target = reached[fastest].loss_after(share)
        each, theirs = ([o.steps_to(target) for o in c.outcomes] for c in (mine, reached[fastest]))
        steps, taken = _mean(each), _mean([min(s, fold.steps) for s in theirs])
        clocks = _clocks(fold, rivals, target)
        clocks[fastest] = min(clocks.get(fastest, math.inf), taken * fold.seconds.get(fastest, math.inf))
        quickest = min(clocks, key=lambda label: clocks[label])
        accuracies = {label: _accuracy(fold, label) for label in (ours, *rivals)}
        best = max(rivals, key=lambda label: accuracies[label])
        found.append(
            {
                "domain": fold.group,
                "mean_loss": _finite(_ratio(_mean([o.mean_loss for o in mine.outcomes]), losses[lowest])),
                "mean_loss_of": lowest,
                "steps": _finite(_ratio(steps, taken)),
                "seconds": _finite(_ratio(steps * fold.seconds.get(ours, math.nan), clocks[quickest])),
                "seconds_of": quickest,
                "steps_of": fastest,
                "arrived": {"ours": _arrived(each), "rival": _arrived(theirs), "runs": len(each)},
                "paid_after": _paid_after(fold, ours, fastest, steps, taken),
                "paid_by_the_clock": _paid_after(fold, ours, fastest, steps, taken, fold.seconds),
                "accuracy": 100 * accuracies[ours],
                "best_accuracy": 100 * accuracies[best],
                "accuracy_of": best,
            }
        )
    return found


def pace_section(title: str, rows: Sequence[Result], share: float) -> Section:
    """What `pace` found as a table, with the geometric means of the ratios.

    Args:
        title: who the rivals are.
        rows: as `pace` makes them.
        share: of the run.
    """
    where = "its final loss" if share == 1 else f"its loss at {share:.0%} of the run"
    columns = [f"against {title}", "mean loss", f"steps to {where}", "seconds", "test accuracy, %"]
    columns += ["paid for after, in gradients and in seconds"]
    found = []
    for row in rows:
        there = row["arrived"]
        missing = "" if there["ours"] else "never"
        loss = "diverged" if row["mean_loss"] is None else f"{row['mean_loss']:.2f} x"
        steps = f"{there['ours']} of {there['runs']} runs ({row['steps_of']}: {there['rival']})"
        if row["steps"] is not None:
            steps = f"{row['steps']:.2f} x ({row['steps_of']})"
        seconds = missing if row["seconds"] is None else f"{row['seconds']:.2f} x ({row['seconds_of']})"
        accuracy = f"{row['accuracy']:.2f} ({row['accuracy_of']}: {row['best_accuracy']:.2f})"
        paid = missing if row["paid_after"] is None else f"{row['paid_after']} tasks, {_tasks(row['paid_by_the_clock'])}"
        found.append([row["domain"], f"{loss} ({row['mean_loss_of']})", steps, seconds, accuracy, paid])
    means = [geometric_mean([row[k] for row in rows]) for k in ("mean_loss", "steps", "seconds")]
    accuracies = [_mean([row[k] for row in rows]) for k in ("accuracy", "best_accuracy")]
    ratios = ["" if m is None else f"{m:.2f} x" for m in means]
    found.append(["mean", *ratios, f"{accuracies[0]:.2f} ({accuracies[1]:.2f})", ""])
    return Section(columns=columns, rows=found)


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """None if any is missing, zero if any is.

    Args:
        values: none of them negative.
    """
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    return math.exp(_mean([math.log(v) for v in known])) if all(known) else 0.0


def _standing(candidate: Candidate, share: float) -> tuple[int, float]:
    """Fewer failed runs come first, then lower losses."""
    return sum(bool(o.failed) for o in candidate.outcomes), candidate.loss_after(share)


def _clocks(fold: Fold, rivals: Sequence[str], target: float) -> dict[str, float]:
    """The seconds in which each rival is at a loss, at the setting with which it takes fewest; infinite if at none."""
    return {
        label: min(_mean([o.steps_to(target) for o in c.outcomes]) for c in fold.finished(label)) * fold.seconds[label]
        for label in rivals
        if math.isfinite(fold.seconds.get(label, math.nan))
    }


def _paid_after(
    fold: Fold, ours: str, rival: str, steps: float, taken: float, prices: Mapping[str, float] | None = None
) -> int | None:
    """Tasks, by the price of a step if there is one; None where learning has no known cost, or nothing is ever gained."""
    here, there = (1.0 if prices is None else prices.get(label, math.nan) for label in (ours, rival))
    learning = fold.learning_gradients(ours) * here
    gain = (fold.tuning_gradients(rival) + taken) * there - (fold.tuning_gradients(ours) + steps) * here
    return math.ceil(learning / gain) if learning > 0 and gain > 0 else None


def _tasks(paid: int | None) -> str:
    return "never" if paid is None else f"{paid} tasks"


def _accuracy(fold: Fold, label: str) -> float:
    return _mean([o.accuracy("test") for o in fold.best(label, "test_error", None).outcomes])


def _arrived(steps: Sequence[float]) -> int:
    return sum(map(math.isfinite, steps))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _ratio(one: float, other: float) -> float:
    return one / other if 0 < other < math.inf else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""What experiments are judged by: how much sooner than the best rival, whether runs converged, and who stands where."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from metamd.comparison.comparison import Candidate, Comparison, Fold
from metamd.comparison.sections import Section, accuracy, interval
from metamd.files.store import Result


def pace(comparison: Comparison, rivals: Sequence[str], share: float = 1.0, ours: str | None = None) -> list[Result]:
    """One optimiser against the best rival on every domain.

    Each quantity has its own best rival, at its own best setting on that domain:

    - `mean_loss`: ours, divided by the lowest of a rival.
    - `steps`: the steps of ours to the lowest loss that a rival has after `share` of the run, divided by the steps of that
      rival. A run of that rival that does not stay there counts as a whole run. A run of ours that does not makes the ratio
      None; `arrived` counts the runs that do.
    - `seconds`: the seconds of ours to the same loss, divided by those of the quickest rival, at a setting with which all
      its runs arrive.
    - `accuracy`: ours and the highest of a rival, on test data.
    - `paid_after`: tasks after which learning is paid for in gradient evaluations. The rival of the steps is tuned with all
      its settings on each, and ours where the protocol tunes it.
    - `paid_by_the_clock`: the same in seconds. A gradient evaluation of learning counts as a step of ours.
    """
    ours = ours or comparison.labels[0]

    def standing(candidate: Candidate) -> tuple[int, float]:
        """Fewer failed runs come first, then lower losses."""
        return sum(bool(o.failed) for o in candidate.outcomes), candidate.loss_after(share)

    found = []
    for fold in comparison.folds:
        mine = fold.best(ours, "mean_loss")
        losses = {label: fmean([o.mean_loss for o in fold.best(label, "mean_loss").outcomes]) for label in (ours, *rivals)}
        lowest = min(rivals, key=losses.__getitem__)
        reached = {label: min(fold.finished(label), key=standing) for label in rivals}
        fastest = min(rivals, key=lambda label: standing(reached[label]))
        target = reached[fastest].loss_after(share)
        each, theirs = ([o.steps_to(target) for o in c.outcomes] for c in (mine, reached[fastest]))
        arrived = [sum(map(math.isfinite, counts)) for counts in (each, theirs)]
        steps, taken = fmean(each), fmean([min(s, fold.steps) for s in theirs])
        # at the setting with which a rival takes fewest steps; infinite if it arrives at none
        clocks = {
            label: min(fmean([o.steps_to(target) for o in c.outcomes]) for c in fold.finished(label)) * fold.seconds[label]
            for label in rivals
            if math.isfinite(fold.seconds.get(label, math.nan))
        }
        clocks[fastest] = min(clocks.get(fastest, math.inf), taken * fold.seconds.get(fastest, math.inf))
        quickest = min(clocks, key=clocks.__getitem__)
        chosen = {label: fold.best(label, "test_error") for label in (ours, *rivals)}
        accuracies = {label: fmean([o.accuracy("test") for o in c.outcomes]) for label, c in chosen.items()}
        best = max(rivals, key=accuracies.__getitem__)
        found.append(
            {
                "domain": fold.group,
                "mean_loss": _finite_ratio(losses[ours], losses[lowest]),
                "mean_loss_of": lowest,
                "steps": _finite_ratio(steps, taken),
                "seconds": _finite_ratio(steps * fold.seconds.get(ours, math.nan), clocks[quickest]),
                "seconds_of": quickest,
                "steps_of": fastest,
                "arrived": {"ours": arrived[0], "rival": arrived[1], "runs": len(each)},
                "paid_after": _paid_after(fold, ours, fastest, steps, taken),
                "paid_by_the_clock": _paid_after(fold, ours, fastest, steps, taken, fold.seconds),
                "accuracy": 100 * accuracies[ours],
                "best_accuracy": 100 * accuracies[best],
                "accuracy_of": best,
            }
        )
    return found


def pace_section(title: str, rows: Sequence[Result], share: float) -> Section:
    """What `pace` found against these rivals as a table, with the geometric means of the ratios."""
    where = "its final loss" if share == 1 else f"its loss at {share:.0%} of the run"
    columns = [f"against {title}", "mean loss", f"steps to {where}", "seconds", "test accuracy, %"]
    columns += ["paid for after, in gradients and in seconds"]
    found = []
    for row in rows:
        there = row["arrived"]
        missing = "" if there["ours"] else "never"
        loss = f"{_times(row['mean_loss'], 'diverged')} ({row['mean_loss_of']})"
        steps = f"{_times(row['steps'])} ({row['steps_of']})"
        if row["steps"] is None:
            steps = f"{there['ours']} of {there['runs']} runs ({row['steps_of']}: {there['rival']})"
        seconds = missing if row["seconds"] is None else f"{_times(row['seconds'])} ({row['seconds_of']})"
        right = f"{row['accuracy']:.2f} ({row['accuracy_of']}: {row['best_accuracy']:.2f})"
        clock = "never" if row["paid_by_the_clock"] is None else f"{row['paid_by_the_clock']} tasks"
        paid = missing if row["paid_after"] is None else f"{row['paid_after']} tasks, {clock}"
        found.append([row["domain"], loss, steps, seconds, right, paid])
    ratios = [_times(geometric_mean([row[k] for row in rows])) for k in ("mean_loss", "steps", "seconds")]
    mine, best = (fmean([row[k] for row in rows]) for k in ("accuracy", "best_accuracy"))
    return Section(columns=columns, rows=[*found, ["mean", *ratios, f"{mine:.2f} ({best:.2f})", ""]])


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """None if any is missing, zero if any is."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    return math.exp(fmean([math.log(v) for v in known])) if all(known) else 0.0


def _paid_after(
    fold: Fold, ours: str, rival: str, steps: float, taken: float, prices: Mapping[str, float] | None = None
) -> int | None:
    """Tasks, by the price of a step if there is one; None where learning has no known cost, or nothing is ever gained."""
    here, there = (1.0 if prices is None else prices.get(label, math.nan) for label in (ours, rival))
    learning = fold.learning_gradients(ours) * here
    gain = (fold.tuning_gradients(rival) + taken) * there - (fold.tuning_gradients(ours) + steps) * here
    return math.ceil(learning / gain) if learning > 0 and gain > 0 else None


def _times(ratio: float | None, missing: str = "") -> str:
    return missing if ratio is None else f"{ratio:.2f} x"


def _finite_ratio(one: float, other: float) -> float | None:
    """None where it is no finite number."""
    return one / other if 0 < other < math.inf and math.isfinite(one) else None


def last_tenth(losses: Sequence[float]) -> float | None:
    """The mean loss of the last tenth of a run over that of the tenth before; None where it is no number.

    A run has converged where it is at least 0.95: the loss falls by 5 % at most.
    """
    tenth = max(1, len(losses) // 10)
    last, before = (sum(part) / tenth for part in (losses[-tenth:], losses[-2 * tenth : -tenth]))
    return _finite_ratio(last, before)


def last_tenths(comparison: Comparison) -> dict[str, float | None]:
    """For each optimiser, with the setting that has the lowest final loss, of its mean curve over all domains."""
    found = {}
    for label in comparison.labels:
        runs = [o.losses for c in comparison.chosen(label, "final_loss") for o in c.outcomes]
        alike = len({len(run) for run in runs}) == 1
        found[label] = last_tenth([sum(x) / len(runs) for x in zip(*runs, strict=True)]) if alike else None
    return found


def standings(rows: Sequence[Result]) -> list[Section]:
    """One line per optimiser: means with their 95 % intervals; below, what could not be learned, with the reason."""
    found = []
    for row in rows:
        means = [row[m] for m in ("mean_loss", "final_loss")]
        losses = ["diverged" if m["value"] is None else interval(m, ".3g", "diverged") for m in means]
        cost = row["learning"]
        spent = [f"{cost['gradients']:,.0f}", f"{cost['seconds']:,.0f}"] if cost["gradients"] else ["", ""]
        found.append([row["label"], *losses, accuracy(row["test_error"]), *spent])
    columns = ["", "mean loss", "final loss", "test accuracy, %", "learning: gradients", "learning: s"]
    return [Section(columns=columns, rows=found), *unlearned_section(rows)]


def unlearned_section(rows: Sequence[Result]) -> list[Section]:
    """What could not be learned on some domain, and why."""
    failed = rows[0].get("failed", {}).items()
    said = "could not be learned everywhere, and its runs count as diverged there"
    return [Section(texts=[f"{label} {said}: {reason}." for label, reason in failed])] if failed else []

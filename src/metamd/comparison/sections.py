"""A comparison as a page: tables, curves, profiles and costs, from records alone."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from metamd.certification.statements import HEADINGS, HeldOutCertificate, readable
from metamd.comparison import figures
from metamd.comparison.comparison import LEAST, TO_TARGET, Comparison, Target
from metamd.comparison.entrants import PROTOCOLS, UNTUNED
from metamd.comparison.figures import best_schedules, loss_curves
from metamd.comparison.statistics import PAIRS_TO_DECIDE, pairs_to_find, smallest_p
from metamd.potentials.forms import Array


@dataclass(frozen=True)
class Section:
    """One part of a report: `metamd.comparison.page` writes a list of them as text, Markdown or HTML."""

    title: str = ""  # empty for a part that continues the one before
    texts: Sequence[str] = ()  # paragraphs, before the table
    columns: Sequence[str] = ()  # the heads of the table
    rows: Sequence[Sequence[str | float | None]] = ()  # a row whose first cell begins with MetaMD stands out
    figures: Sequence[tuple[Path, str]] = ()  # images, PNG, each with its caption
    headline: str = ""  # the sentence that a reader takes away; it stands above everything else
    folded: bool = False  # a page shows its title alone until it is opened, and a terminal leaves it out

    def cells(self) -> list[list[str]]:
        """The rows as text, numbers with four digits. A number that needs others is given as `formatted` writes it."""
        return [[cell if isinstance(cell, str) else formatted(cell) for cell in row] for row in self.rows]


def formatted(value: float | None, spec: str = ".4g", missing: str = "") -> str:
    """A number as a cell; `missing` stands for None and for what is not finite."""
    return format(value, spec) if value is not None and math.isfinite(value) else missing


def interval(found: Mapping[str, float | None], spec: str = ".4g", missing: str = "never") -> str:
    """An estimate with its interval, from `value`, `low` and `high`."""
    value, low, high = (formatted(found[k], spec, missing) for k in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def accuracy(error: Mapping[str, float]) -> str:
    """The accuracy in per cent with its interval, from those of the error."""
    value, high, low = (100 * (1 - error[k]) for k in ("value", "low", "high"))
    return interval({"value": value, "low": low, "high": high}, ".2f")


CONFIGURATION = "Configuration"
"""The title of what a terminal is spared."""

OPENING = "opening.png"
"""The figure that a page opens with; it is not kept beside it."""

CURVES = "curves.png"
"""The figure of a page that is not kept beside it: an experiment draws its own, of fewer optimisers."""

UNCERTIFIED = (
    "None lies beside these records. What held-out tasks guarantee about the next one is asked with metamd certify FILE "
    "FAMILY, and a comparison of that file then shows it here."
)

HEADS = {
    "mean_loss": "mean training loss",
    "tenth_loss": "loss after 1/10",
    "half_loss": "loss after 1/2",
    "final_loss": "loss at the end",
    "steps_to_target": "steps to target, median",
    "seconds_to_target": "seconds to target, median",
    "validation_loss": "validation loss",
    "test_loss": "test loss",
    "test_error": "test accuracy, %",
}

SHORT_HEADS = {metric: head.split(",")[0] for metric, head in HEADS.items()}


def sections(comparison: Comparison, folder: Path, *, versions: dict[str, Any] | None = None) -> list[Section]:
    """The parts of the page, with the versions of the libraries as the records have them; figures go into the folder.

    The first is to be read. The others are folded.
    """
    rest = [
        results(comparison),
        _verdicts(comparison),
        _curves(comparison, folder),
        _profiles(comparison, folder),
        _costs(comparison),
        *run_certificates(comparison, folder),
        _choices(comparison, folder),
        configuration(comparison.settings, versions or {}),
    ]
    return [opening(comparison, folder), *(replace(part, folded=True) for part in rest)]


def opening(c: Comparison, folder: Path) -> Section:
    """A sentence, the loss against steps and against seconds, and a line for each optimiser under its better schedule."""
    ours, shown = c.labels[0], _tuned(c)
    spared = {"tenth_loss", "half_loss", "validation_loss", *(() if c.protocol == "once" else ("final_loss",))}
    kept = [metric for metric in c.metrics if metric not in spared]
    listed = [label for label in c.labels if label == ours or label in shown or c.is_learned(label)]
    values = {label: {metric: c.estimate(label, metric).value for metric in kept} for label in listed}
    # a column in which nobody arrives is a sentence
    reached = any(math.isfinite(values[label][metric]) for label in listed for metric in TO_TARGET if metric in kept)
    kept = [metric for metric in kept if reached or metric not in TO_TARGET]
    lines = []
    for label in listed:
        cells = [values[label][metric] for metric in kept]
        numbers = [
            formatted(100 * (1 - x), ".2f") if metric == "test_error" else formatted(x, ".3g", "never")
            for metric, x in zip(kept, cells, strict=True)
        ]
        lines.append([_named(c, label), *numbers])
    return Section(
        texts=[*not_held_out(c), _asked(c, reached)],
        columns=["", *(HEADS[metric].removesuffix(", median") for metric in kept)],
        rows=lines,
        figures=_two_clocks(c, [ours, *shown], folder),
        headline=headline(c),
    )


def _tuned(c: Comparison) -> list[str]:
    """The tuned rivals, each under its better schedule."""
    return [label for label in best_schedules(c) if label != c.labels[0]]


def headline(c: Comparison) -> str:
    """What came out, in two or three sentences: over the run, whether it is chance, and on test data."""
    ours, shown = c.labels[0], _tuned(c)
    if not shown:
        return ""
    others = [label for label in shown if math.isfinite(float(c.values(label, "mean_loss").mean()))]
    if not others or not math.isfinite(float(c.values(ours, "mean_loss").mean())):
        failed = ours if others else "Every tuned rival"
        return f"{failed} failed in at least one run, so there is no mean loss to compare."
    best = min(others, key=lambda label: float(c.values(label, "mean_loss").mean()))
    found = next(d for d in c.differences("mean_loss") if d.label == best)
    sure = "This is more than chance."
    if found.verdict == "undecided":
        sure = f"{len(c.groups)} run{'s' * (len(c.groups) != 1)} each do not decide whether this is chance."
    if "test_loss" in c.metrics:
        on_test = next(d for d in c.differences("test_loss") if d.label == best)
        sure += "" if math.isnan(on_test.ratio) else f" Its test loss is {_times(on_test.ratio)} that of {best}."
    several = f"the best of {len(shown)} tuned rivals" if len(shown) > 1 else "the tuned rival"
    return f"{ours}'s mean training loss is {_times(found.ratio)} that of {best}, {several}. {sure}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times" if ratio >= 0.01 else "less than 0.01 times"


def _asked(c: Comparison, reached: bool) -> str:
    """What the numbers below are, in a line."""
    aim, runs = c.aim or Target(c.labels[-1]), len(c.groups)
    tuned = f"Protocol: {c.protocol}. {PROTOCOLS.get(c.protocol, '')} " if c.protocol else ""
    kind = "domain" if any(f.trained for f in c.folds) else "held-out domain"
    return (
        f"{runs} run{'s' * (runs != 1)} on {len(c.folds)} {kind}{'s' * (len(c.folds) != 1)}. {tuned}The target is the loss "
        f"of {aim.baseline} after {aim.share:.0%} of its steps. Each rival has its better "
        f"{'row' if c.protocol == 'once' else 'schedule'}. "
    ) + (
        "Steps and seconds to the target are medians, the rest are means."
        if reached
        else "Nobody reaches it in half of the runs. Numbers are means."
    )


def _two_clocks(c: Comparison, labels: Sequence[str], folder: Path) -> list[tuple[Path, str]]:
    panels = two_clocks(c, labels)
    if not panels.get("steps"):
        return []
    path = folder / OPENING
    figures.curves(panels, path, xlabel="", ylabel="training loss", narrow=True)
    caption = "Training loss against steps" + ", and against seconds of training" * ("seconds" in panels)
    return [(path, f"{caption}: the mean over all runs and its 95 % interval.")]


def two_clocks(c: Comparison, labels: Sequence[str]) -> dict[str, list[figures.Curve]]:
    """The mean loss of all runs against `steps`, and against `seconds` where steps were timed."""
    each = {label: list(c.curve(label).values()) for label in labels}
    if len({places for found in each.values() for places, _ in found}) > 1:
        return {}  # domains that were watched at other steps have no mean
    panels = {"steps": [x for label, found in each.items() for x in _mean_curve(label, found)]}
    seconds = {label: sum(f.seconds.get(label, math.nan) for f in c.folds) / len(c.folds) for label in labels}
    if all(map(math.isfinite, seconds.values())):
        panels["seconds"] = [replace(x, x=[seconds[x.label] * step for step in x.x]) for x in panels["steps"]]
    return panels


def _mean_curve(label: str, found: Sequence[tuple[Sequence[int], Array]]) -> list[figures.Curve]:
    runs = np.concatenate([losses for _, losses in found])
    return figures.banded(label, found[0][0], runs, [i for i, (_, losses) in enumerate(found) for _ in losses])


def results(c: Comparison) -> Section:
    """Every quantity of every optimiser with its interval, below the tasks, the protocol and the targets."""
    aim = c.aim or Target(c.labels[-1])
    domains = "Domains" if any(f.trained for f in c.folds) else "Held-out domains"
    drawn = (f"{f.group} (seeds: {f.tasks(c.labels[0])}, steps: {f.steps})" for f in c.folds)
    targets = (f"{formatted(c.target(f), missing='none, as all runs failed')} ({f.group})" for f in c.folds)
    texts = [
        *not_held_out(c),
        f"{domains}: {', '.join(drawn)}. Means over all runs; 95 % bootstrap intervals.",
        f"Protocol: {c.protocol or 'as given'}. {PROTOCOLS.get(c.protocol, '')} {c.screening}".strip(),
        f"The target on each domain is a training loss of {', '.join(targets)}, which {aim.baseline} has after "
        f"{aim.share:.0%} of the steps. A run that does not reach it counts as infinite.",
    ]
    rows = []
    for label in c.labels:
        row = [_named(c, label)]
        for metric in c.metrics:
            found = asdict(c.estimate(label, metric))
            shown = accuracy(found) if metric == "test_error" else interval(found)
            arrived = float(np.isfinite(c.values(label, metric)).mean())
            row.append(shown if metric == "test_error" or arrived == 1 else f"{shown}; {arrived:.0%} arrived")
        rows.append(row)
    return Section("Results", texts, ["", *(HEADS[m] for m in c.metrics)], rows)


def _named(c: Comparison, label: str) -> str:
    """A label, marked where some have seen what they are compared on and others have not."""
    seen = [bool(c.trained_on(each)) for each in c.labels if not each.endswith(UNTUNED)]
    return f"{label} (not held out)" if c.trained_on(label) and not all(seen) else label


def not_held_out(c: Comparison) -> list[str]:
    """What must be said of optimisers that were learned, or chosen, on what they are compared on."""
    each: dict[tuple[str, ...], list[str]] = {}
    for label in c.labels:
        if domains := tuple(c.trained_on(label)):
            each.setdefault(domains, []).append(label)
    found = []
    for domains, labels in each.items():
        which = "this domain" if len(domains) == 1 else "these domains"
        one = len(labels) == 1
        found.append(
            f"{'; '.join(labels)} {'was' if one else 'were'} trained on {which}: not held out ({', '.join(domains)}). "
            f"{'Its' if one else 'Their'} numbers there say nothing about a domain that {'it has' if one else 'they have'} "
            "not seen."
        )
    return found


def _verdicts(c: Comparison) -> Section:
    ours, pairs = c.labels[0], len(c.groups)
    rows = []
    for metric in c.metrics:
        for d in c.differences(metric):
            ratio = "" if math.isnan(d.ratio) else f"{d.ratio:.3g} ({d.low:.3g} to {d.high:.3g})"
            against = f"{SHORT_HEADS[metric]}: against {d.label}"
            rows.append([against, ratio, f"{d.wins} : {d.losses}", f"{d.p:.3f}", d.verdict])
    others = max(1, len(c.labels) - 1)
    texts = [
        f"{ours} against each of the others, on the same tasks, initialisations and batches. The ratio is the geometric "
        "mean of ours over theirs (of the error, for accuracy), where both are finite; below 1 is better. "
        f"In ratios and p, what is below {LEAST:g} counts as {LEAST:g}. p is of a "
        f"two-sided signed-rank test over these pairs, corrected for all rivals together [WestfallYoung1993]. With "
        f"{pairs} pair{'s' * (pairs != 1)} the smallest p that can come out is {min(1.0, smallest_p(pairs)):.2g}; p < 0.05 "
        f"takes {PAIRS_TO_DECIDE} at least, and {pairs_to_find(1.0, others)} where a difference is as large as its "
        "standard deviation over pairs. Who is ahead in training, but worse on test data by the geometric mean, is said to "
        "be so."
    ]
    return Section(f"{ours} against the rivals", texts, ["", "ratio", "wins : losses", "p", "verdict"], rows)


def _curves(c: Comparison, folder: Path) -> Section:
    path = folder / CURVES
    figures.curves(loss_curves(c, c.labels, intervals=True), path, xlabel="step", ylabel="training loss")
    caption = (
        "Training loss on fixed examples, the mean over the runs. The band is the 95 % bootstrap interval of the mean; over "
        "several domains, domains are drawn first. A curve ends where a run was given up."
    )
    return Section("Learning curves", figures=[(path, caption)])


def _profiles(c: Comparison, folder: Path) -> Section:
    found = {m: c.profiles(m) for m in TO_TARGET if m in c.metrics}
    panels = {
        SHORT_HEADS[m]: [
            figures.Curve(label, p.tau, p.share) for label, p in profiles.items() if not label.endswith(UNTUNED)
        ]
        for m, profiles in found.items()
    }
    path = folder / "profiles.png"
    figures.curves(panels, path, xlabel="tau", ylabel="share of tasks within tau times the best", logarithmic=False)
    rows = [[label, *(f"{profiles[label].area:.3f}" for profiles in found.values())] for label in c.labels]
    texts = [
        "The share of tasks on which an optimiser needs at most tau times as much as the best one, and the area under it."
    ]
    caption = "The share of tasks within tau times the best, without the optimisers that are not tuned."
    heads = ["area, tau from 1 to 4", *(SHORT_HEADS[m] for m in found)]
    return Section("Performance profiles", texts, heads, rows, [(path, caption)])


def _costs(c: Comparison) -> Section:
    ours = c.labels[0]

    def mean(values: Sequence[float], digits: int = 0) -> str:
        return formatted(sum(values) / len(values), f",.{digits}f")

    def tasks(count: float) -> str:
        return "never" if math.isinf(count) else f"{count:,.0f} task{'s' * (count != 1)}"

    rows = []
    for label in c.labels:
        tuning = [f.tuning_gradients(label) for f in c.folds]
        seconds = [f.seconds.get(label, math.nan) for f in c.folds]
        learned = [f.costs.get(label, {}).get("seconds", math.nan) for f in c.folds]
        clock = [n * s for n, s in zip(tuning, seconds, strict=True)]
        paid = ["", ""] if label == ours else [tasks(c.tasks_to_pay(label, every_task=x)) for x in (True, False)]
        spent = [mean([1000 * s for s in seconds], 2), mean(tuning), mean(clock)]
        rows.append([label, *spent, f"{c.learning_gradients(label):,.0f}", mean(learned), *paid])
    texts = [
        "What choosing settings and learning costs, in gradient evaluations and in seconds, on the mean over the domains. "
        f"The last columns say after how many tasks the learning of {ours} is paid for by reaching the target sooner, if "
        "the rival is tuned for every task and if it is tuned once. The milliseconds of a step are those of one process, "
        "taken in turns; the seconds of tuning are so many steps of it."
    ]
    heads = ["", "ms per step", "tuning, per task", "tuning, s", "learning", "learning, s"]
    return Section("Costs", texts, [*heads, "paid after, tuned each time", "tuned once"], rows)


def _choices(c: Comparison, folder: Path) -> Section:
    """What was chosen, and what a smaller budget would have found."""
    rows = []
    for label in c.labels:
        for fold, candidate in zip(c.folds, c.chosen(label, "mean_loss"), strict=True):
            several, about = fold.entrants[label], candidate.contender
            tried, ends = len(several), []
            if label in fold.tunings:
                how = fold.tunings[label]
                tried, ends = len(how.best_so_far), [*how.at_edge, *(f"{n} (range extended)" for n in how.extended)]
            elif tried > 1:
                ends = [
                    SHORT_HEADS[m] for m in c.metrics if fold.best(label, m, c.target(fold)) in (several[0], several[-1])
                ]
            found = about.get("setting")
            setting = ", ".join(f"{k} {_abridged(v)}" for k, v in found.items()) if isinstance(found, dict) else str(found)
            failed = sum(any(o.failed for o in x.outcomes) for x in several)
            rise = f", warm-up {about['warm_up']:.3g}" if isinstance(about.get("warm_up"), float) else ""
            counts = [f"{about.get('schedule', '')}{rise}", str(tried), str(failed)]
            rows.append([f"{label}, {fold.group}", setting, *counts, ", ".join(ends)])
    # the best score after each trial of a search, on the mean over the domains, as far as all of them went
    each = {label: [f.tunings[label].best_so_far for f in c.folds if label in f.tunings] for label in c.labels}
    means = {label: [sum(x) / len(x) for x in zip(*scores, strict=False)] for label, scores in each.items()}
    curves = [figures.Curve(label, range(1, len(best) + 1), best) for label, best in means.items() if len(best) > 1]
    shown = []
    if curves:
        path = folder / "budgets.png"
        figures.curves({"": curves}, path, xlabel="settings tried", ylabel="best score so far")
        shown = [(path, "The best score after so many trials of the search.")]
    heads = ["for the mean loss", "setting", "schedule", "tried", "failed", "at an end of the range"]
    texts = [
        "The candidate with the smallest mean training loss on each domain. The last column names the quantities, or the "
        "hyperparameters of a search, whose best setting lies at an end of its range: a better one may lie beyond."
    ]
    return Section("Settings", texts, heads, rows, shown)


def configuration(settings: Mapping[str, Any], versions: Mapping[str, Any]) -> Section:
    """What runs were made with, and the versions of the libraries, as the records have it."""
    values = {**settings, **{f"version of {k}": v for k, v in versions.items()}}
    return Section(CONFIGURATION, (), ["", "value"], [[str(k), _abridged(v)] for k, v in values.items()])


def training_costs(cells: Mapping[str, Mapping[str, Any]]) -> Section | None:
    """What the trainings of an experiment cost that compares in a way of its own; None if no record has a cost."""
    costs = {name: cell["cost"] for name, cell in cells.items() if isinstance(cell.get("cost"), dict)}
    heads = list(dict.fromkeys(head for cost in costs.values() for head in cost))
    if not heads:
        return None
    texts = ["What each training cost that the tables are made of, by its record. Rivals are tuned, not trained."]
    rows = [[name, *(_abridged(cost[head]) if head in cost else "" for head in heads)] for name, cost in costs.items()]
    return Section("Costs", texts, ["", *(head.replace("_", " ") for head in heads)], rows)


def _abridged(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 2000 else text[:2000] + " ..."


def certified_runs(c: Comparison) -> list[tuple[float, float, float]]:
    """Of runs of the first optimiser that have a certificate: the mean loss, the bound, and the lowest loss of a batch."""
    runs = [o for candidate in c.chosen(c.labels[0], "mean_loss") for o in candidate.outcomes]
    kept = [(o.batch_loss, o.certificate) for o in runs if {"bound", "lowest"} <= o.certificate.keys()]
    return [(loss, found["bound"], found["lowest"]) for loss, found in kept]


def uninformative(runs: Sequence[tuple[float, float, float]]) -> int:
    """How many certificates say nothing about their run: losses that are never negative obey the bound by themselves."""
    return sum(bound >= loss and lowest >= 0 for loss, bound, lowest in runs)


def run_certificates(c: Comparison, folder: Path) -> list[Section]:
    """What the gradients of the runs themselves say against other models; nothing for records without it."""
    runs = certified_runs(c)
    if not runs:
        return []
    loss, bound = (float(np.median([run[i] for run in runs])) for i in (0, 1))
    below = f"more than {formatted(bound)} below" if bound >= 0 else f"less than {formatted(-bound)} above"
    nothing = uninformative(runs)
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    text = (
        "If losses were convex, no model as near to the start as the end of a run would have had a mean loss, on the run's "
        f"own batches, {below} that of the run, which is {formatted(loss)} (medians of {count} of {c.labels[0]})."
    )
    text += f" For {nothing} of them that says nothing: the bound is not below the run's mean loss." if nothing else ""
    places = [(i + 1) / len(runs) for i in range(len(runs))]
    lines = [figures.Curve("mean loss", places, sorted(run[0] for run in runs))]
    lines.append(figures.Curve("bound of the certificate", places, sorted(run[1] for run in runs), dashed=True))
    path = folder / "certificate-runs.png"
    figures.curves({"": lines}, path, xlabel="share of the runs", ylabel="loss", logarithmic=bound > 0)
    return [
        Section("Certificate of the runs", [text], figures=[(path, "Mean losses of the runs, and bounds, each in order.")])
    ]


def certificate_sections(found: Any, folder: Path) -> list[Section]:
    """What the learned file says of held-out tasks, the `held_out` of its header: a sentence, a figure, every statement.

    Whatever is no certificate is shown as it is. None says that nothing lies beside the records.
    """
    if found is None:
        return [Section("Certificate", [UNCERTIFIED], folded=True)]
    known, rest = readable(found)
    parts = []
    for i, (name, certificate) in enumerate(known.items()):
        figure = score_figure(certificate, folder, f"certificate{i or ''}.png")
        parts.append(Section(f"Certificate of the file: {name}", [_in_short(certificate)], figures=figure, folded=True))
        parts.append(Section(f"Every statement of it, and what it rests on: {name}", certificate.paragraphs(), folded=True))
    texts = ["What else the learned file says about tasks that it was not learned on."]
    return [*parts, replace(configuration(rest, {}), title="Certificate", texts=texts, folded=True)] if rest else parts


def certified(found: HeldOutCertificate, folder: Path) -> list[Section]:
    """The page of one certificate: a sentence, the losses of the tasks, the bounds; what they rest on is folded."""
    said = [s for s in found.statements if s.bound is not None]
    rows = [[s.quantity, s.bound, HEADINGS[s.about], s.verdict] for s in said]
    texts = [f"{found.family}: {found.tasks} held-out tasks of {found.steps} steps, of which {found.diverged} diverged."]
    heads = ["", "at most", "about", "verdict"]
    opening = Section(texts=texts, columns=heads, rows=rows, figures=score_figure(found, folder), headline=_in_short(found))
    return [opening, Section("Every statement, and what it rests on", found.paragraphs(), folded=True)]


def _in_short(found: HeldOutCertificate) -> str:
    """A certificate as one sentence: its first statement about the next task."""
    percent = f"{100 * (1 - found.delta):g} %"
    first = next(
        (s for s in found.statements if s.about == "next task" and s.bound is not None and s.verdict == "holds"), None
    )
    if first is None:
        return f"{found.tasks} held-out tasks give no bound for the next task at {percent}."
    return f"For the next task, {first.quantity} is at most {formatted(first.bound)}, with probability {percent}."


def score_figure(certificate: HeldOutCertificate, folder: Path, name: str = "certificate.png") -> list[tuple[Path, str]]:
    """The losses of the held-out tasks in order, with the bound for the next one; nothing for files without them."""
    panels, bounds = {}, [s for s in certificate.statements if s.about == "next task" and s.bound is not None]
    for what, scores in certificate.scores.items():
        values = sorted(x for x in scores if math.isfinite(x))
        bound = next((s.bound for s in bounds if s.quantity.startswith(f"{what} ")), None)
        if what != "steps" and values and bound is not None:
            places = [(i + 1) / len(scores) for i in range(len(values))]
            line = figures.Curve("bound for the next task", [places[0], 1.0], [bound, bound], dashed=True)
            panels[what] = [figures.Curve("held-out tasks", places, values), line]
    if not panels:
        return []
    how = {"logarithmic": False, "narrow": True}
    figures.curves(panels, folder / name, xlabel="share of the tasks", ylabel="loss at the end", **how)
    caption = (
        f"{certificate.tasks} held-out tasks in order, and the bound for the next at {100 * (1 - certificate.delta):g} %."
    )
    return [(folder / name, caption)]

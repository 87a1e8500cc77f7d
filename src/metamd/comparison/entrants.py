"""By which rule the hyperparameters of everybody are chosen: every table names one of these protocols."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from metamd.comparison.compare import Entrants, draw, handicap
from metamd.comparison.parallel import Cell, fill
from metamd.comparison.search import Bayesian, Search
from metamd.comparison.tuning import tune
from metamd.files.store import Records, Result, read_cell
from metamd.files.usage import Schedule
from metamd.rivals.base import Contender, Rival, Tuning
from metamd.rivals.learned.learners import Learner
from metamd.tasks.base import Task, TaskFamily, config_hash, derive_seed

Protocol = Literal["handicap", "paper"]

PROTOCOLS: dict[str, str] = {
    "handicap": (
        "Rivals have the best of several learning rates, evenly spaced over a range fixed beforehand; the best is chosen on "
        "the very tasks, seeds and quantity that are shown. MetaMD has nothing tuned."
    ),
    "paper": (
        "Everybody, MetaMD included, is tuned in learning rate and weight decay for validation accuracy, with the same "
        "search, budget, split and seeds, on tasks with other seeds than those that are shown."
    ),
}
"""What each of them means, in a sentence for reports."""

ENDINGS: dict[Schedule, str] = {"constant": "", "linear": ", linear decay", "quadratic": ", quadratic decay"}
"""What the label of a tuned rival says of its schedule."""


UNTUNED = ", untuned"
"""What the label of a rival says that has its package's setting."""


def unscheduled(label: str) -> str:
    """The label of a tuned rival without its schedule: its title.

    Args:
        label: as `labels` makes it.

    Example:
        >>> unscheduled("Adam, linear decay")
        'Adam'
    """
    for ending in filter(None, ENDINGS.values()):
        label = label.removesuffix(ending)
    return label


def labels(ours: Iterable[str], rivals: Sequence[Rival | Learner], schedules: Sequence[Schedule]) -> list[str]:
    """Of everybody who enters a comparison, in the order of its tables: ours, the tuned rivals, the untuned ones.

    Args:
        ours: their labels.
        rivals: the others.
        schedules: of the rivals' learning rates, those that a rival may have; all that it has, if it has none of them.
    """
    tuned = [r.title + ENDINGS[s] for r in rivals for s in _allowed(r, schedules)]
    return [*ours, *tuned, *(r.title + UNTUNED for r in rivals)]


def _allowed(rival: Rival | Learner, schedules: Sequence[Schedule]) -> list[Schedule]:
    """Of these schedules those that a rival may have; what has its own instead, as Schedule-Free has, is left with that."""
    return [s for s in schedules if s in rival.schedules] or list(rival.schedules)


def entrants(
    protocol: Protocol,
    ours: Mapping[str, Contender],
    rivals: Sequence[Rival],
    family: TaskFamily,
    *,
    budget: int = 25,
    schedules: Sequence[Schedule] = ("constant", "linear"),
    steps: int | None = None,
    seed: int = 0,
    search: Search | None = None,
    records: Records | None = None,
    workers: int = 1,
    ray: str | None = None,
) -> Entrants:
    """Everybody who enters a comparison: ours first, then the rivals as the protocol tunes them, then the same untuned.

    Args:
        protocol: a name in `PROTOCOLS`.
        ours: by label; under `paper` each is tuned as the rivals are.
        rivals: the others.
        family: the held-out side, that `compare` will get.
        budget: settings per rival and schedule.
        schedules: of the rivals' learning rates, those that a rival may have.
        steps: T.
        seed: of the tasks to tune on and of the search.
        search: under `paper`; Bayesian if not given.
        records: where the trials of `paper` are kept.
        workers: processes for the searches of `paper`.
        ray: address of a Ray cluster for them instead, or "local".
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {protocol!r}.")
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}.")
    found: dict[str, Contender | Sequence[Contender]] = {}
    pairs = [(r, s) for r in rivals for s in _allowed(r, schedules)]
    if protocol == "handicap":
        found |= ours
        found |= {r.title + ENDINGS[s]: handicap(r, s, budget=budget) for r, s in pairs}
    else:
        learned = {label: c for label, c in ours.items() if not c.rival.unlearned}
        tuned = _tuned(
            [*((replace(c.rival, defaults=c.setting), c.schedule) for c in learned.values()), *pairs],
            [family.build(c) for configs in draw(family, 1, derive_seed(seed, "tuning")).values() for c in configs],
            {"search": search or Bayesian(), "budget": budget, "steps": steps, "seed": seed},
            records,
            workers,
            ray,
        )
        found |= ours
        for (label, contender), (best, how) in zip(learned.items(), tuned, strict=False):
            found[label] = replace(contender, setting={**contender.setting, **best}, tuning=how)
        for (r, s), (best, how) in zip(pairs, tuned[len(learned) :], strict=True):
            found[r.title + ENDINGS[s]] = replace(r.with_setting(s, **best), tuning=how)
    return found | {r.title + UNTUNED: r.untuned() for r in rivals}


def _tuned(
    pairs: Sequence[tuple[Rival, Schedule]],
    tasks: Sequence[Task],
    options: Mapping[str, Any],
    records: Records | None,
    workers: int,
    ray: str | None,
) -> list[tuple[dict[str, float], Tuning]]:
    """The best setting of each rival and schedule, in learning rate and weight decay; searches run side by side."""

    def name(rival: Rival, schedule: Schedule) -> str:
        """Of the search: what it depends on is in it."""
        where = (repr(rival.space), repr(rival.grid), *(config_hash(t.config) for t in tasks))
        return f"search-{rival.with_setting(schedule).key()}-{derive_seed(repr(options), *where):08x}"

    if records is None:
        results = {name(r, s): _search(r, s, tasks, options, None) for r, s in pairs}
    elif ray is None:
        cells = [Cell(name(r, s), partial(_search, r, s, tasks, options, records)) for r, s in pairs]
        results = fill(records, cells, title="tuning everybody", workers=workers)
    else:
        keep = partial(_bring, records)
        cells = [Cell(name(r, s), partial(_search_away, r, s, tasks, options), keep) for r, s in pairs]
        results = fill(records, cells, title="tuning everybody", workers=workers, ray=ray)
    return [(r["setting"], Tuning.from_json(r)) for r in (results[name(*pair)] for pair in pairs)]


def _search(
    rival: Rival, schedule: Schedule, tasks: Sequence[Task], options: Mapping[str, Any], records: Records | None
) -> Result:
    names = ("lr", "weight_decay")
    found = tune(rival, tasks, metric="validation_error", names=names, schedule=schedule, records=records, **options)
    how = Tuning(found.gradients // len(tasks), tuple(found.best_so_far), tuple(found.at_edge))
    return {"setting": {n: x for n, x in found.best.setting.items() if n in names}, **how.to_json()}


def _search_away(rival: Rival, schedule: Schedule, tasks: Sequence[Task], options: Mapping[str, Any]) -> Result:
    """On a machine that shares no folder with the records: the trials come with the result."""
    with TemporaryDirectory() as folder:
        records = Records(Path(folder), {})
        found = _search(rival, schedule, tasks, options, records)
        return {**found, "trials": {p.stem: read_cell(records.folder, p.stem) for p in (records.folder / "cells").iterdir()}}


def _bring(records: Records, found: Result) -> Result:
    """Keep the trials that came with a search, each as a record; the rest of it is its own."""
    for name, trial in found["trials"].items():
        records.cell(name, partial(dict, trial))
    return {k: v for k, v in found.items() if k != "trials"}

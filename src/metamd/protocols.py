"""By which rule the hyperparameters of everybody are chosen: every table names one of these protocols."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from metamd.cells import Cell, fill
from metamd.comparing import Entrants, draw, handicap
from metamd.records import Records, Result
from metamd.rivals.base import Contender, Rival
from metamd.search import Bayesian, Search
from metamd.tasks.base import Task, TaskFamily, derive_seed
from metamd.tuning import tune
from metamd.usage import Schedule

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

TITLES = {"constant": "{}", "linear": "{}, linear decay"}


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
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {protocol!r}.")
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}.")
    found: dict[str, Contender | Sequence[Contender]] = {}
    pairs = [(r, s) for r in rivals for s in schedules if s in r.schedules]
    if protocol == "handicap":
        found |= ours
        found |= {TITLES[s].format(r.title): handicap(r, s, budget=budget) for r, s in pairs}
    else:
        tuned = _tuned(
            [*((replace(c.rival, defaults=c.setting), c.schedule) for c in ours.values()), *pairs],
            [family.build(c) for configs in draw(family, 1, derive_seed(seed, "tuning")).values() for c in configs],
            {"search": search or Bayesian(), "budget": budget, "steps": steps, "seed": seed},
            records,
            workers,
        )
        for (label, contender), best in zip(ours.items(), tuned, strict=False):
            found[label] = Contender(contender.rival, {**contender.setting, **best}, contender.schedule)
        rest = tuned[len(ours) :]
        found |= {TITLES[s].format(r.title): r.with_setting(s, **b) for (r, s), b in zip(pairs, rest, strict=True)}
    return found | {f"{r.title}, untuned": r.untuned() for r in rivals}


def _tuned(
    pairs: Sequence[tuple[Rival, Schedule]],
    tasks: Sequence[Task],
    options: Mapping[str, Any],
    records: Records | None,
    workers: int,
) -> list[dict[str, float]]:
    """The best setting of each rival and schedule, in learning rate and weight decay; searches run side by side."""

    def search(rival: Rival, schedule: Schedule) -> Result:
        names = ("lr", "weight_decay")
        found = tune(rival, tasks, metric="validation_error", names=names, schedule=schedule, records=records, **options)
        return {"setting": {n: x for n, x in found.best.setting.items() if n in names}, "at_edge": found.at_edge}

    cells = [Cell(f"search-{r.with_setting(s).key()}", partial(search, r, s)) for r, s in pairs]
    if records is None:
        return [cell.compute()["setting"] for cell in cells]
    results = fill(records, cells, title="tuning everybody", workers=workers)
    return [results[cell.name]["setting"] for cell in cells]

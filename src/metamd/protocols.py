"""By which rule the hyperparameters of everybody are chosen: every table names one of these protocols."""

from collections.abc import Mapping, Sequence
from typing import Literal

from metamd.comparing import Entrants, draw, handicap
from metamd.records import Records
from metamd.rivals.base import Contender, Rival, Schedule
from metamd.search import Bayesian, Search
from metamd.tasks.base import TaskFamily, derive_seed
from metamd.tuning import tune

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
        tasks = [family.build(c) for configs in draw(family, 1, derive_seed(seed, "tuning")).values() for c in configs]

        def tuned(rival: Rival, schedule: Schedule) -> Contender:
            return tune(
                rival,
                tasks,
                search=search or Bayesian(),
                budget=budget,
                metric="validation_error",
                schedule=schedule,
                steps=steps,
                seed=seed,
                records=records,
            ).best

        for label, contender in ours.items():
            best = tuned(contender.rival, contender.schedule)
            found[label] = Contender(contender.rival, {**contender.setting, **best.setting}, contender.schedule)
        found |= {TITLES[s].format(r.title): tuned(r, s) for r, s in pairs}
    return found | {f"{r.title}, untuned": r.untuned() for r in rivals}

"""The rules of a comparison: which tasks, how runs are watched, and how everybody's hyperparameters are chosen."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

import torch

from metamd.comparison.comparison import Target, evaluations
from metamd.comparison.once import AGAIN, FOR_THE_END, Once, choose_once, price
from metamd.comparison.statistics import LEVEL, PAIRS_TO_DECIDE, pairs_to_find, smallest_p
from metamd.comparison.training import Measuring
from metamd.comparison.tuning import Bayesian, Search, tune
from metamd.files.store import Records, Result, as_json, read_cells
from metamd.files.usage import Schedule
from metamd.inner.executor import Cell, Executor, fill
from metamd.rivals.base import Contender, Rival, Tuning
from metamd.rivals.learned import Learner
from metamd.tasks.base import Config, Task, TaskFamily, config_hash, derive_seed, domain_of
from metamd.tasks.supervised import DatasetFamily
from metamd.tasks.wrapped import SharedStart

Entrants = Mapping[str, Contender | Sequence[Contender]]
"""By label: a contender, or several of which the best on the very tasks is shown."""

ProtocolName = Literal["once", "handicap", "paper"]

PROTOCOLS: dict[str, str] = {
    "once": (
        "Everybody has the training tasks and the same budget of gradient evaluations on them. MetaMD learns there; every "
        "rival chooses learning rate, schedule, warm-up, momentum and average there, by the score that MetaMD's usage was "
        "chosen by. A second row has what was chosen for the end of the run, where that differs. On the tasks that are "
        "shown nobody has anything tuned."
    ),
    "handicap": (
        "Rivals have the best of several learning rates, evenly spaced over a range fixed beforehand; the best is chosen on "
        "the very tasks, seeds and quantity that are shown. MetaMD has nothing tuned."
    ),
    "paper": (
        "Everybody, MetaMD included, is tuned in learning rate and weight decay for validation accuracy, with the same "
        "search, budget, split and seeds, on tasks with other seeds than those that are shown."
    ),
}
"""The rules by which settings are chosen, in sentences for reports. Every table names one of these."""


@dataclass(frozen=True)
class Protocol:
    """The rules of a comparison, the same for all optimisers and fixed before any result is seen.

    Args:
        name: by which rule settings are chosen: "once", "handicap", "paper", or a word of your own for settings you chose.
        seeds: tasks: initialisations and orders of the batches; for a family of several domains, of each. As many as are
            needed to decide, if not given: see `enough`.
        steps: T and the horizon of all schedules; the family's own if not given.
        seed: of the tasks that are drawn, and of the search.
        measuring: how the runs are watched.
        aim: the target of steps-to-target; that of the last optimiser if not given.
        screen: how many contenders of a label go on from the first task of a domain to the others: the best there in mean
            loss, in final loss and in each error. All of them if not given.
        budget: settings of each rival under each schedule.
        schedules: of the rivals' learning rates, those that a rival may have.
        search: by which settings are found under "paper".
        once: what there is to choose settings with under "once".

    Example:
        >>> Protocol("handicap", seeds=5).budget
        25
    """

    name: str = ""
    seeds: int | None = None
    steps: int | None = None
    seed: int = 0
    measuring: Measuring = field(default_factory=Measuring)
    aim: Target | None = None
    screen: int | None = None
    budget: int = 25
    schedules: Sequence[Schedule] = ("constant", "linear")
    search: Callable[..., Search] = Bayesian
    once: Once = field(default_factory=Once)

    def __post_init__(self) -> None:
        for name in ("seeds", "budget"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, got {given}.")
        if self.screen is not None and self.screen < 1:
            raise ValueError(f"screen must be at least 1, got {self.screen}. Leave it out to run all settings on all tasks.")


# the tasks


CLEAR = 1.5
"""How large a difference is for its standard deviation from task to task, that a comparison is to find by default."""


def domains_of(family: TaskFamily) -> Sequence[str]:
    """The domains of which each has its tasks; a family without any is one."""
    inner = family.family if isinstance(family, SharedStart) else family
    return inner.domains if isinstance(inner, DatasetFamily) else [inner.name]


def enough(family: TaskFamily, protocol: Protocol, others: int) -> Protocol:
    """The protocol with the seeds that a comparison with so many others needs, where it states none.

    p < 0.05 is possible with them. A difference of 1.5 times its standard deviation from task to task is found in four of
    five comparisons.
    """
    if protocol.seeds is not None:
        return protocol
    return replace(protocol, seeds=math.ceil(pairs_to_find(CLEAR, others) / len(domains_of(family))))


def said_beforehand(family: TaskFamily, protocol: Protocol, others: int) -> str:
    """What a comparison with so many others can decide, before anything is trained."""
    domains, seeds = len(domains_of(family)), enough(family, protocol, others).seeds or 1
    pairs = domains * seeds
    least = min(1.0, smallest_p(pairs))
    each = "task each" if seeds == 1 else "tasks each"
    many = f"{domains} domains with {seeds} {each}" if domains > 1 else f"{pairs} task{'s' * (pairs != 1)}"
    can = "which cannot decide anything" if least >= LEVEL else "so that 0.05 can be reached"
    found = ", ".join(f"{effect:g}: {pairs_to_find(effect, others)}" for effect in (CLEAR, 1.0, 0.5))
    return (
        f"The comparison has {many}. Against {others} other{'s' * (others != 1)} the smallest p is {least:.2g}, {can}: "
        f"{PAIRS_TO_DECIDE} tasks are needed. Tasks to find a difference in four of five comparisons, by its size in "
        f"standard deviations from task to task: {found}."
    )


FRUITLESS = 1000
"""Draws per domain after which a family has no other task."""


def draw_configs(family: TaskFamily, seeds: int, seed: int) -> dict[str, list[Config]]:
    """So many different tasks of each domain, by domain; of a family without domains, so many tasks."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "comparison"))
    domains = domains_of(family)
    found: dict[str, list[Config]] = {str(d): [] for d in domains}
    drawn, fruitless = set[str](), 0
    while any(len(configs) < seeds for configs in found.values()):
        config = family.sample(generator)
        group = found.get(domain_of(config), next(iter(found.values())))
        if len(group) < seeds and config_hash(config) not in drawn:
            group.append(config)
            drawn.add(config_hash(config))
            fruitless = 0
        elif (fruitless := fruitless + 1) > FRUITLESS * len(domains):
            fewest = min(map(len, found.values()))
            raise ValueError(
                f"{seeds} different tasks are required, and {FRUITLESS * len(domains)} draws in a row from {family.name!r} "
                f"brought no other than the {fewest} that are there. Ask for {max(fewest, 1)} (--seeds), or let it vary."
            )
    return found


# who enters


ENDINGS: dict[Schedule, str] = {"constant": "", "linear": ", linear decay", "quadratic": ", quadratic decay"}
"""The end of the label of a tuned rival, by its schedule."""

UNTUNED = ", untuned"
"""The end of the label of a rival with the setting of its package."""

PRINTED = ", grid as printed"
"""The end of the label of an optimiser with the best setting of the published grid, where the search went beyond it."""

R = TypeVar("R", bound=Rival | Learner)


def unscheduled(label: str) -> str:
    """The label of a tuned rival without its schedule, or what it was chosen for: its title."""
    return reduce(str.removesuffix, (FOR_THE_END, *ENDINGS.values()), label)


def labels(
    ours: Iterable[str], rivals: Sequence[Rival | Learner], schedules: Sequence[Schedule], protocol: str = "handicap"
) -> list[str]:
    """The labels of everybody who enters a comparison, in the order of its tables: ours, tuned rivals, untuned ones.

    Under "once" there may be second rows.
    """
    if protocol == "once":
        return [*ours, *(r.title for r in rivals), *(r.title + UNTUNED for r in rivals)]
    return [*ours, *_scheduled(rivals, schedules), *(r.title + UNTUNED for r in rivals)]


def _scheduled(rivals: Sequence[R], schedules: Sequence[Schedule]) -> dict[str, tuple[R, Schedule]]:
    """The rivals by label, under each of these schedules that they may have; Schedule-Free keeps its own."""
    allowed = [(r, [s for s in schedules if s in r.schedules] or r.schedules) for r in rivals]
    return {r.title + ENDINGS[s]: (r, s) for r, each in allowed for s in each}


def handicap(rival: Rival, schedule: Schedule = "constant", *, budget: int = 25) -> list[Contender]:
    """A rival with `budget` learning rates, evenly over its range: given to `compare`, it is shown with the best of them.

    The best is chosen on the tasks of the comparison, for the quantity that is shown, each quantity with its own best rate.
    No user of the rival has that advantage.

    Args:
        rival: the optimiser.
        schedule: of the learning rate.
        budget: how many rates.

    Example:
        >>> from metamd.rivals import rival
        >>> [c.setting["lr"] for c in handicap(rival("adam"), budget=3)]
        [0.0001, 0.01, 1.0]
    """
    return [rival.with_setting(schedule, lr=lr) for lr in rival.space["lr"].points(budget)]


def entrants(
    ours: Mapping[str, Contender],
    rivals: Sequence[Rival],
    family: TaskFamily,
    protocol: Protocol,
    *,
    training: TaskFamily | None = None,
    records: Records | None = None,
    workers: int | Executor = 1,
) -> Entrants:
    """Everybody who enters a comparison: ours first, then the rivals as the protocol tunes them, then the same untuned.

    Under "once" everybody chooses on tasks of the training side. Under "paper" ours are tuned as the rivals are, on the
    held-out side that `compare` will get. Where a search goes beyond a published grid, the setting of the grid as printed
    enters too.
    """
    if protocol.name not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {protocol.name!r}.")
    scheduled = _scheduled(rivals, protocol.schedules)
    untuned = {r.title + UNTUNED: r.untuned() for r in rivals}
    if protocol.name == "once":
        if training is None:
            raise ValueError("the protocol once needs the side of the family that is learned on: pass training=family.")
        return {**_chosen_once(ours, rivals, training, protocol, records, workers), **untuned}
    if protocol.name == "handicap":
        return {**ours, **{n: handicap(r, s, budget=protocol.budget) for n, (r, s) in scheduled.items()}, **untuned}
    given = {label: c for label, c in ours.items() if not c.rival.unlearned}
    given |= {label: r.with_setting(s) for label, (r, s) in scheduled.items()}
    drawn = draw_configs(family, 1, derive_seed(protocol.seed, "tuning"))
    tasks = [family.build(c) for configs in drawn.values() for c in configs]
    for task in tasks:
        if task.splits and "validation" not in task.splits:
            raise ValueError(
                f"the protocol paper tunes for validation accuracy, and {domain_of(task.config)!r} has only the splits "
                f'{", ".join(task.splits)}. Give it "validation" too, or compare by the protocol handicap.'
            )
    search, here = protocol.search(budget=protocol.budget, seed=protocol.seed), Executor.of(workers).ray is None
    hashes, cells = [config_hash(t.config) for t in tasks], {}
    for label, c in given.items():
        about = map(repr, (search, protocol.steps, c.rival.space, c.rival.grid, hashes))
        compute = partial(_search, c, tasks, search, protocol.steps, records if here else None)
        cells[label] = Cell(f"search-{c.key()}-{derive_seed(*about):08x}", compute, partial(_bring, records))
    results = fill(records, cells.values(), title="tuning everybody", workers=workers)  # searches run side by side
    tuned = {}
    for label, c in given.items():
        found = results[cells[label].name]
        tuned[label] = replace(c, setting={**c.setting, **found["setting"]}, tuning=Tuning.from_json(found))
        if "printed" in found:
            tuned[label + PRINTED] = replace(tuned[label], setting={**c.setting, **found["printed"]})
    return {**ours, **tuned, **untuned}


def _chosen_once(
    ours: Mapping[str, Contender],
    rivals: Sequence[Rival],
    training: TaskFamily,
    protocol: Protocol,
    records: Records | None,
    workers: int | Executor,
) -> dict[str, Contender]:
    """Ours as they learned, and the rivals as they chose; each again for the end of the run where that is another setting.

    Everybody has the gradient evaluations of our learning, or those that are stated; a learned rival has taken some before.
    """
    given = protocol.once.gradients or round(max((evaluations(c.rival.cost) for c in ours.values()), default=0.0)) or None
    least = 2 * price(training.steps if protocol.steps is None else protocol.steps)
    how = {"schedules": protocol.schedules, "steps": protocol.steps, "seed": protocol.seed}
    found: dict[str, Contender] = {}
    for label, c in {**ours, **{r.title: r.untuned() for r in rivals}}.items():
        found[label] = c
        spent = 0.0 if label in ours else evaluations(c.rival.cost)
        left = given if given is None else round(given / AGAIN if label in ours else given - spent)
        if c.rival.unlearned or (left is not None and left < least and (label in ours or spent)):
            continue
        once = replace(protocol.once, gradients=left)
        chosen = choose_once(c, training, once, **how, records=records, workers=workers)  # type: ignore[arg-type]
        if label not in ours:
            found[label] = chosen.contender
        if chosen.for_the_end.key() != found[label].key():
            found[label + FOR_THE_END] = chosen.for_the_end
    return found


def _search(contender: Contender, tasks: Sequence[Task], search: Search, steps: int | None, kept: Records | None) -> Result:
    """Without records, as on a machine that shares no folder with them, the trials come with the result."""
    rival = replace(contender.rival, defaults=contender.setting)
    with TemporaryDirectory() as folder:
        records, schedule = kept or Records(Path(folder), {}), contender.schedule
        found = tune(rival, tasks, search, metric="validation_error", schedule=schedule, steps=steps, records=records)
        trials = {} if kept else read_cells(Path(folder))
    how = Tuning(found.gradients // len(tasks), tuple(found.best_so_far), tuple(found.at_edge))
    chosen = {"setting": found.best} | ({} if found.as_printed is None else {"printed": found.as_printed})
    settings = {kind: {n: x for n, x in c.setting.items() if n in search.names} for kind, c in chosen.items()}
    return {**settings, "trials": trials, **as_json(asdict(how))}


def _bring(records: Records | None, found: Result) -> Result:
    """Keep the trials that came with a search, each as a record; the rest of it is its own."""
    for name, trial in found.pop("trials").items():
        if records is not None:
            records.write(name, trial)
    return found

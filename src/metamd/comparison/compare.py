"""Training the same tasks with several optimisers, and what can be said of the difference."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from metamd.comparison.comparison import Comparison
from metamd.comparison.fold import Candidate, Fold, Target, cell_name
from metamd.comparison.parallel import Cell, fill
from metamd.comparison.training import ROUNDS, WARM_UP, Measuring, Outcome, step_seconds, train
from metamd.comparison.tuning import METRICS
from metamd.files.progress import Progress
from metamd.files.store import Records, Result, write_json
from metamd.files.usage import Schedule
from metamd.files.versions import environment, versions
from metamd.rivals.base import Contender, Rival
from metamd.tasks.base import Config, Task, TaskFamily, config_hash, derive_seed, domain_of
from metamd.tasks.supervised import Supervised
from metamd.tasks.vision.families import ImageFamily
from metamd.tasks.wrapped import SharedStart

Entrants = Mapping[str, Contender | Sequence[Contender]]
"""By label: a contender, or several of which the best on the very tasks is shown."""


def handicap(rival: Rival, schedule: Schedule = "constant", *, budget: int = 25) -> list[Contender]:
    """A rival with `budget` learning rates, evenly over its range: given to `compare`, it is shown with the best of them.

    The best is chosen on the tasks of the comparison, for the quantity that is shown, each quantity with its own best rate.
    No user of the rival has that advantage.

    Args:
        rival: the optimiser.
        schedule: of the learning rate.
        budget: how many rates.
    """
    return [rival.with_setting(schedule, lr=lr) for lr in rival.space["lr"].points(budget)]


def compare(
    optimisers: Entrants,
    family: TaskFamily,
    *,
    seeds: int = 3,
    steps: int | None = None,
    seed: int = 0,
    measuring: Measuring | None = None,
    folder: Path | str | None = None,
    workers: int = 1,
    ray: str | None = None,
    protocol: str = "",
    aim: Target | None = None,
    screen: int | None = None,
) -> Comparison:
    """Train the same tasks, initialisations and batches with every optimiser.

    Args:
        optimisers: by label; the first is the one that the others are compared with. Several contenders under one label,
            as `handicap` makes them, are shown with the best of them.
        family: what to draw tasks from: the held-out side of a family, `family.held_out()`.
        seeds: tasks: initialisations and orders of the batches; for a family of several domains, of each.
        steps: T and the horizon of all schedules; the family's own if not given.
        seed: of the draw.
        measuring: how the runs are watched.
        folder: where every run is kept as a record, so that a comparison that was stopped continues and grows.
        workers: processes; several need a folder.
        ray: address of a Ray cluster to train on instead, with so many workers, or "local"; needs a folder.
        protocol: by which rule settings were chosen, in a word, for the report.
        aim: the target of steps-to-target; that of the last optimiser if not given.
        screen: run all contenders of a label on the first task of a domain, and on the others only those that are among so
            many best there in mean loss, final loss or an error; all if not given.

    Example:
        >>> from metamd import tasks
        >>> from metamd.rivals import rival
        >>> both = {"SGD": rival("sgd").with_setting(lr=0.1), "half": rival("sgd").with_setting(lr=0.05)}
        >>> found = compare(both, tasks.quadratic((1.0, 2.0)), seeds=4, steps=30, measuring=Measuring(splits=()))
        >>> [row["label"] for row in found.table("mean_loss")]
        ['SGD', 'half']
    """
    entrants = _checked(optimisers, seeds, screen)
    if folder is None and (ray is not None or workers > 1):
        where = "in several processes" if ray is None else "on a Ray cluster"
        raise ValueError(f"a comparison {where} needs a folder for its records. Pass folder=.")
    measuring, steps = measuring or Measuring(), family.steps if steps is None else steps
    groups = draw(family, seeds, seed)
    tasks = {config_hash(c): family.build(c) for configs in groups.values() for c in configs}
    settings = _settings(family, steps, measuring)
    records = None if folder is None else records_of(Path(folder), family, steps, measuring)

    def run(pairs: Iterable[tuple[Contender, str]], title: str) -> dict[tuple[str, str], Outcome]:
        cells = {(c.key(), name): _cell(tasks[name], c, steps, measuring) for c, name in pairs}
        if workers > 1 and records is not None and not all(records.has(cell.name) for cell in cells.values()):
            _load(family, groups, measuring)
        results = _fill(records, cells, title, workers, ray)
        return {key: Outcome.from_json(results[cell.name]) for key, cell in cells.items()}

    title, names = f"comparing on {family.name}", [[config_hash(c) for c in configs] for configs in groups.values()]
    if screen is None:
        outcomes = run(((c, n) for ns in names for n in ns for cs in entrants.values() for c in cs), title)
    else:
        outcomes = run(((c, ns[0]) for ns in names for cs in entrants.values() for c in cs), f"{title}, first tasks")
        kept = [(c, ns) for ns in names for cs in entrants.values() for c in _best_few(cs, ns[0], outcomes, screen)]
        outcomes |= run(((c, n) for c, ns in kept for n in ns[1:]), title)
    comparison = Comparison(_folds(groups, entrants, outcomes), settings, protocol=protocol)
    if aim is not None:
        comparison = comparison.aiming(aim.baseline, aim.share)
    return _timed(comparison, entrants, tasks, records)


def _checked(optimisers: Entrants, seeds: int, screen: int | None) -> dict[str, list[Contender]]:
    if not optimisers:
        raise ValueError("compare needs at least one optimiser, got none.")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}.")
    if screen is not None and screen < 1:
        raise ValueError(f"screen must be at least 1, got {screen}. Leave it out to run all settings on all tasks.")
    entrants = {label: [c] if isinstance(c, Contender) else list(c) for label, c in optimisers.items()}
    for label, contenders in entrants.items():
        if not contenders:
            raise ValueError(f"{label!r} has no contender. Give it one, or several.")
    return entrants


def _folds(
    groups: Mapping[str, Sequence[Config]],
    entrants: Mapping[str, Sequence[Contender]],
    outcomes: Mapping[tuple[str, str], Outcome],
) -> tuple[Fold, ...]:
    folds = []
    for group, configs in groups.items():
        members = {
            label: tuple(Candidate(c.describe(), _outcomes_of(c, configs, outcomes)) for c in found)
            for label, found in entrants.items()
        }
        costs = {label: dict(found[0].rival.cost) for label, found in entrants.items()}
        hashes = [config_hash(x) for x in configs]
        trained = tuple(label for label, found in entrants.items() if found[0].rival.was_learned_on(group, hashes))
        tunings = {label: found[0].tuning for label, found in entrants.items() if found[0].tuning is not None}
        folds.append(Fold(group, members, {}, costs, trained, tunings))
    return tuple(folds)


def _outcomes_of(
    contender: Contender, configs: Sequence[Config], outcomes: Mapping[tuple[str, str], Outcome]
) -> tuple[Outcome, ...]:
    keys = [(contender.key(), config_hash(x)) for x in configs]
    return tuple(outcomes[key] for key in keys if key in outcomes)


def _best_few(
    contenders: Sequence[Contender], task: str, outcomes: Mapping[tuple[str, str], Outcome], screen: int
) -> list[Contender]:
    """Those that are among so many best on one task, by any of the quantities that tables show."""
    found = [outcomes[c.key(), task] for c in contenders]
    errors = [f"{split}_error" for split, (_, accuracy) in found[0].ends.items() if accuracy is not None]
    kept: set[int] = set()
    for metric in ("mean_loss", "final_loss", *(error for error in errors if error in METRICS)):
        values = [math.inf if o.failed else METRICS[metric](o) for o in found]
        kept |= set(sorted(range(len(found)), key=values.__getitem__)[:screen])
    return [contenders[i] for i in sorted(kept)]


FRUITLESS = 1000
"""Draws per domain after which a family has no other task."""


def draw(family: TaskFamily, seeds: int, seed: int) -> dict[str, list[Config]]:
    """So many different tasks of each domain, by domain; of a family without domains, so many tasks.

    Args:
        family: what to draw from.
        seeds: tasks per domain.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "comparison"))
    domains = _domains(family)
    found: dict[str, list[Config]] = {str(d): [] for d in domains}
    drawn: set[str] = set()
    fruitless = 0
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


def _domains(family: TaskFamily) -> Sequence[str]:
    inner = family.family if isinstance(family, SharedStart) else family
    if isinstance(inner, ImageFamily):
        return inner.domains
    return list(inner.data) if isinstance(inner, Supervised) else [inner.name]


def _cell(task: Task, contender: Contender, steps: int, measuring: Measuring) -> Cell:
    return Cell(cell_name(contender.describe(), task.config), partial(_run, task, contender, steps, measuring))


def _run(task: Task, contender: Contender, steps: int, measuring: Measuring) -> Result:
    return train(task, contender, steps=steps, measuring=measuring).to_json()


def _load(family: TaskFamily, groups: Mapping[str, Sequence[Config]], measuring: Measuring) -> None:
    """Have every split of every domain prepared before the processes fork: they share it."""
    for configs in groups.values():
        task = family.build(configs[0])
        task.monitor(measuring.examples)
        for split in measuring.splits:
            task.evaluate(task.init(), split)


def _fill(
    records: Records | None, cells: Mapping[Any, Cell], title: str, workers: int, ray: str | None
) -> dict[str, Result]:
    if records is None:
        return {cell.name: cell.compute() for cell in cells.values()}
    return fill(records, cells.values(), title=title, workers=workers, ray=ray)


def records_of(folder: Path, family: TaskFamily, steps: int | None = None, measuring: Measuring | None = None) -> Records:
    """The records of a comparison; a folder that holds those of another is refused, so look before a long search.

    Args:
        folder: see `compare`, as for the others.
        family: see there.
        steps: see there.
        measuring: see there.
    """
    return Records(folder, _settings(family, family.steps if steps is None else steps, measuring or Measuring()))


def _settings(family: TaskFamily, steps: int, measuring: Measuring) -> dict[str, Any]:
    """All that an outcome depends on beside its task and its contender; other optimisers may join later."""
    watched = {"every": measuring.every, "examples": measuring.examples, "splits": list(measuring.splits)}
    return {"family": family.describe(), "steps": steps, "measuring": watched, "torch": versions()["torch"]}


def _timed(
    comparison: Comparison, entrants: Mapping[str, Sequence[Contender]], tasks: Mapping[str, Task], records: Records | None
) -> Comparison:
    """The same with the seconds of a step of each optimiser, taken in turns in this process.

    One rival under several schedules takes the same steps: it is timed once. Where some are known from records alone, those
    of the comparison that is there keep their seconds, and the others are counted in the same unit.
    """
    fold = comparison.folds[0]
    chosen = {}
    for label, found in entrants.items():
        best = fold.best(label, "mean_loss", None).contender
        chosen[label] = next(c for c in found if c.describe() == best)
    keys = json.dumps({label: c.key() for label, c in chosen.items()})
    name = f"seconds-{hashlib.blake2b(keys.encode(), digest_size=6).hexdigest()}"

    def compute() -> Result:
        kinds = {label: (c.rival.name, c.rival.identity) for label, c in chosen.items()}
        timed = {kind: label for label, kind in reversed(kinds.items())}
        gone = {label for label, c in chosen.items() if c.rival.recorded}
        lost = gone | {label for label, c in chosen.items() if c.rival.unlearned}
        once = {label: chosen[label] for label in chosen if label in timed.values() and label not in lost}
        found = _seconds(next(iter(tasks.values())), once, comparison.settings["steps"], shown=records is not None)
        each = {label: found.get(timed[kind], math.nan) for label, kind in kinds.items()}
        if gone and records is not None:
            each = in_unit_of(each, _seconds_before(records.folder, chosen))
        return {"seconds": {label: None if math.isnan(x) else x for label, x in each.items()}}

    taken = (compute() if records is None else records.cell(name, compute))["seconds"]
    timed = comparison.with_seconds({label: math.nan if x is None else x for label, x in taken.items()})
    if records is not None:
        write_json(records.folder / "comparison.json", timed.index() | {"versions": environment()})
    return timed


def _seconds(task: Task, contenders: Mapping[str, Contender], steps: int, *, shown: bool) -> dict[str, float]:
    """Those of a step of each; without a folder this is as silent as the trainings are."""
    with Progress("timing steps" if shown else "", (ROUNDS + WARM_UP) * len(contenders)) as progress:
        return step_seconds(task, contenders, steps=steps, advance=progress.advance)


def in_unit_of(seconds: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Seconds that were taken at two times, as taken at the first: the median of those in both says how much they differ.

    Args:
        seconds: taken now, by label; NaN for what could not be.
        before: taken then, in turns as well.
    """
    shared = [before[label] / x for label, x in seconds.items() if label in before and x > 0 and before[label] > 0]
    unit = median(shared) if shared else math.nan
    return {label: before.get(label, unit * x) for label, x in seconds.items()}


def _seconds_before(folder: Path, chosen: Mapping[str, Contender]) -> dict[str, float]:
    """Those of the comparison in the folder, of optimisers that are still the same, under another schedule too."""
    if not (folder / "comparison.json").exists():
        return {}
    fold = Comparison.read(folder).folds[0]
    known: dict[tuple[str, str], dict[str, float]] = {}
    for label, seconds in fold.seconds.items():
        contender = fold.entrants[label][0].contender
        if math.isfinite(seconds):
            known.setdefault((contender["rival"], contender.get("identity", "")), {})[label] = seconds
    found = {label: known.get((c.rival.name, c.rival.identity), {}) for label, c in chosen.items()}
    return {label: times.get(label, next(iter(times.values()))) for label, times in found.items() if times}

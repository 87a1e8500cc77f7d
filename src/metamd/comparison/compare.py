"""Training the same tasks with several optimisers; what came of it is a `Comparison`."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from metamd.comparison.comparison import Candidate, Comparison, Fold, cell_name
from metamd.comparison.entrants import Entrants, Protocol, draw_configs, enough
from metamd.comparison.training import Measuring, Outcome, step_seconds, train_contender
from metamd.comparison.tuning import METRICS
from metamd.files.progress import ends_with
from metamd.files.store import Records, Result, as_json, write_json
from metamd.files.versions import environment, versions
from metamd.inner.executor import Cell, Executor, fill
from metamd.rivals.base import Contender
from metamd.tasks.base import Config, Task, TaskFamily, config_hash, require_family

Outcomes = dict[tuple[str, str], Outcome]
"""By the contender's key and the hash of the task's config."""


@ends_with(
    lambda found: f'Compared {len(found.labels)} optimisers. found.table("mean_loss"); metamd report FOLDER makes a page.'
)
def compare(
    optimisers: Entrants,
    family: TaskFamily,
    protocol: Protocol | None = None,
    *,
    folder: Path | str | None = None,
    workers: int = 1,
    ray: str | None = None,
) -> Comparison:
    """Train the same tasks, initialisations and batches with every optimiser.

    Args:
        optimisers: by label; the first is the one that the others are compared with. Several contenders under one label,
            as `handicap` makes them, are shown with the best of them.
        family: what to draw tasks from: the held-out side of a family, `family.held_out()`.
        protocol: how many tasks and steps, and how runs are watched; as many tasks as can decide if it states none.
        folder: where every run is kept as a record, so that a comparison that was stopped continues and grows.
        workers: processes, of one thread each.
        ray: address of a Ray cluster to train on instead, with so many workers, or "local".

    Example:
        >>> from metamd import tasks
        >>> from metamd.rivals import rival
        >>> both = {"SGD": rival("sgd").with_setting(lr=0.1), "half": rival("sgd").with_setting(lr=0.05)}
        >>> protocol = Protocol(seeds=4, steps=30, measuring=Measuring(splits=()))
        >>> found = compare(both, tasks.quadratic((1.0, 2.0)), protocol)
        >>> [row["label"] for row in found.table("mean_loss")]
        ['SGD', 'half']
    """
    protocol = protocol or Protocol()
    require_family(family)
    if not isinstance(optimisers, Mapping):
        raise TypeError(
            f"optimisers must map labels to contenders, got {type(optimisers).__name__}. Pass "
            '{"SGD": metamd.rivals.rival("sgd").with_setting(lr=0.1)}, say.'
        )
    if not optimisers:
        raise ValueError("compare needs at least one optimiser, got none.")
    entrants = {label: [c] if isinstance(c, Contender) else list(c) for label, c in optimisers.items()}
    if empty := [label for label, contenders in entrants.items() if not contenders]:
        raise ValueError(f"{empty[0]!r} has no contender. Give it one, or several.")
    protocol, executor = measurable(family, enough(family, protocol, len(entrants) - 1)), Executor(workers, ray)
    measuring = protocol.measuring
    groups = draw_configs(family, protocol.seeds or 1, protocol.seed)
    tasks = {config_hash(c): family.build(c) for configs in groups.values() for c in configs}
    settings = comparison_settings(family, protocol)
    records = None if folder is None else Records(Path(folder), settings)

    def run(pairs: Iterable[tuple[Contender, str]], title: str) -> Outcomes:
        cells = {
            (c.key(), name): Cell(
                cell_name(c.describe(), tasks[name].config),
                partial(train_contender, tasks[name], c, steps=settings["steps"], measuring=measuring),
                Outcome.to_json,
            )
            for c, name in pairs
        }
        if workers > 1 and (records is None or not all(records.has(cell.name) for cell in cells.values())):
            _load(family, groups, measuring)
        results = fill(records, cells.values(), title=title, workers=executor)
        return {key: Outcome.from_json(results[cell.name]) for key, cell in cells.items()}

    title, names = f"comparing on {family.name}", [[config_hash(c) for c in configs] for configs in groups.values()]
    if protocol.screen is None:
        outcomes = run(((c, n) for ns in names for n in ns for cs in entrants.values() for c in cs), title)
    else:
        outcomes = run(((c, ns[0]) for ns in names for cs in entrants.values() for c in cs), f"{title}, first tasks")
        kept = [(c, ns) for ns in names for cs in entrants.values() for c in _best_few(cs, ns[0], outcomes, protocol.screen)]
        outcomes |= run(((c, n) for c, ns in kept for n in ns[1:]), title)
    folds = tuple(_fold(group, configs, entrants, outcomes) for group, configs in groups.items())
    comparison = Comparison(folds, settings, protocol=protocol.name)
    if protocol.aim is not None:
        comparison = comparison.aiming(protocol.aim.baseline, protocol.aim.share)
    return _timed(comparison, entrants, next(iter(tasks.values())), records)


def measurable(family: TaskFamily, protocol: Protocol) -> Protocol:
    """The same protocol without the splits that a dataset of the family does not have: their columns are left out."""
    drawn = [family.build(c).splits for configs in draw_configs(family, 1, protocol.seed).values() for c in configs]
    splits = tuple(s for s in protocol.measuring.splits if all(not there or s in there for there in drawn))
    return replace(protocol, measuring=replace(protocol.measuring, splits=splits))


def comparison_settings(family: TaskFamily, protocol: Protocol) -> Result:
    """All that an outcome depends on beside its task and its contender; other optimisers may join later."""
    watched = measurable(family, protocol).measuring.settings()
    steps = family.steps if protocol.steps is None else protocol.steps
    return {"family": family.describe(), "steps": steps, "measuring": watched, "torch": versions()["torch"]}


def _load(family: TaskFamily, groups: Mapping[str, Sequence[Config]], measuring: Measuring) -> None:
    """Have every split of every domain prepared before the processes fork: they share it."""
    for configs in groups.values():
        task = family.build(configs[0])
        task.monitor(measuring.examples)
        for split in measuring.splits:
            task.evaluate(task.init(), split)


def _best_few(contenders: Sequence[Contender], task: str, outcomes: Outcomes, screen: int) -> list[Contender]:
    """Those that are among so many best on one task, by any of the quantities that tables show."""
    found = [outcomes[c.key(), task] for c in contenders]
    errors = {f"{split}_error" for split, (_, accuracy) in found[0].ends.items() if accuracy is not None}
    kept: set[int] = set()
    for metric in {"mean_loss", "final_loss", *errors} & {*METRICS}:
        values = [math.inf if o.failed else METRICS[metric](o) for o in found]
        kept |= set(sorted(range(len(found)), key=values.__getitem__)[:screen])
    return [contenders[i] for i in sorted(kept)]


def _fold(group: str, configs: Sequence[Config], entrants: Mapping[str, Sequence[Contender]], outcomes: Outcomes) -> Fold:
    hashes, first = [config_hash(x) for x in configs], {label: found[0] for label, found in entrants.items()}

    def candidate(c: Contender) -> Candidate:
        return Candidate(c.describe(), tuple(outcomes[c.key(), x] for x in hashes if (c.key(), x) in outcomes))

    members = {label: tuple(map(candidate, found)) for label, found in entrants.items()}
    # for what was learned on this domain, or on one of these tasks, the domain is not held out
    trained = tuple(label for label, c in first.items() if group in c.rival.domains or {*c.rival.tasks} & {*hashes})
    tunings = {label: c.tuning for label, c in first.items() if c.tuning is not None}
    return Fold(group, members, {}, {label: dict(c.rival.cost) for label, c in first.items()}, trained, tunings)


def _timed(
    comparison: Comparison, entrants: Mapping[str, Sequence[Contender]], task: Task, records: Records | None
) -> Comparison:
    """The same with the seconds of a step of each optimiser, taken in turns in this process.

    One rival under several schedules takes the same steps: it is timed once.
    """
    best = {label: comparison.folds[0].best(label, "mean_loss").contender for label in entrants}
    chosen = {label: next(c for c in found if c.describe() == best[label]) for label, found in entrants.items()}
    keys = json.dumps({label: c.key() for label, c in chosen.items()})
    name = f"seconds-{hashlib.blake2b(keys.encode(), digest_size=6).hexdigest()}"

    def compute() -> Result:
        kinds = {label: (c.rival.name, c.rival.identity) for label, c in chosen.items()}
        timed = {kind: label for label, kind in reversed(kinds.items())}
        once = {label: c for label, c in chosen.items() if label in timed.values() and not c.rival.unlearned}
        found = step_seconds(task, once, steps=comparison.settings["steps"])
        return {"seconds": as_json({label: found.get(timed[kind]) for label, kind in kinds.items()})}

    taken = (compute() if records is None else records.cell(name, compute))["seconds"]
    seconds = {label: math.nan if x is None else x for label, x in taken.items()}
    comparison = replace(comparison, folds=tuple(replace(f, seconds=seconds) for f in comparison.folds))
    if records is not None:
        write_json(records.folder / "comparison.json", comparison.index() | {"versions": environment()})
    return comparison

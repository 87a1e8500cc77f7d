"""`metamd compare`: a learned optimiser against tuned rivals on held-out tasks; a stopped run continues."""

import sys
from typing import Any

from metamd.cli import one_line
from metamd.commands import Compare, Report
from metamd.commands import report as report_command
from metamd.commands.families import build_family, held_out_side
from metamd.comparing import compare
from metamd.folds import Target
from metamd.learned import LearnedOptimiser, load
from metamd.protocols import TITLES, entrants
from metamd.records import Records, write_json
from metamd.rivals import LEARNERS, Contender, Rival, learned_rival, rival
from metamd.search import SEARCHES
from metamd.tasks.base import TaskFamily


def run(options: Compare) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
    """
    if not options.rivals:
        raise ValueError("--rivals must name at least one, got none.")
    target = options.target or options.rivals[-1]
    if target not in options.rivals:
        raise ValueError(f"--target must be one of the rivals, got {options.target!r}.")
    for name in options.rivals:
        if name not in LEARNERS:
            rival(name)  # refuses an unknown one before anything is computed
    learned = load(options.file)
    known, family = sides(options, learned)
    rivals = [_rival(name, known, options) for name in options.rivals]
    baseline = rivals[options.rivals.index(target)]
    ours: dict[str, Contender] = {
        "MetaMD": _ours(learned, options),
    }
    trials = None
    if options.protocol == "paper":
        about = {"family": family.describe(), "seed": options.seed, "budget": options.budget}
        trials = Records(options.out / "tuning", about)
    try:
        everybody = entrants(
            options.protocol,
            ours,
            rivals,
            family,
            budget=options.budget,
            schedules=options.schedules,
            steps=options.steps,
            seed=options.seed,
            search=SEARCHES[options.search],
            records=trials,
            workers=options.workers,
        )
        compare(
            everybody,
            family,
            seeds=options.seeds,
            steps=options.steps,
            seed=options.seed,
            folder=options.out,
            workers=options.workers,
            ray=options.ray,
            protocol=options.protocol,
            aim=Target(_label(baseline.title, everybody)),
        )
    except KeyboardInterrupt:
        print(f"Stopped; the same command continues from {one_line(str(options.out))}.", file=sys.stderr)
        raise
    if learned.header.held_out:
        write_json(options.out / "certificate.json", learned.header.held_out)
    return report_command.run(Report(options.out, json=options.json))


def _ours(learned: LearnedOptimiser, options: Compare) -> Contender:
    """As the file says that it is best used, unless something else was asked."""
    made, usage = learned_rival(learned), learned.usage
    momentum = usage.momentum if options.momentum is None else options.momentum
    return made.with_setting(options.schedule or usage.schedule, momentum=momentum)


def _rival(name: str, family: TaskFamily, options: Compare) -> Rival:
    """A rival; one that is learned is learned on the training side, once, and kept beside the records."""
    if name not in LEARNERS:
        return rival(name)
    print(f"Learning {LEARNERS[name].title} on {family.name}.", file=sys.stderr)
    (options.out / "learned").mkdir(parents=True, exist_ok=True)
    return LEARNERS[name].rival(family, options.seed, options.out / "learned" / f"{name}.safetensors")


def sides(options: Compare, learned: LearnedOptimiser) -> tuple[TaskFamily, TaskFamily]:
    """The family to learn rivals on and the one to compare on: its held-out side, if something is held out.

    Args:
        options: what was asked.
        learned: the file, which says what it was not learned on.
    """
    known: dict[str, Any] = learned.header.family or {}
    family = build_family(options, known)
    inner = getattr(family, "family", family)
    held = getattr(inner, "hold_out", None)
    if held is not None and str(held) in [str(d) for d in known.get("domains") or []]:
        print(f"Note: the file was learned on {one_line(str(held))} too, so that nothing is held out.", file=sys.stderr)
    return family, held_out_side(family)


def _label(title: str, labels: Any) -> str:
    found = [TITLES[s].format(title) for s in ("constant", "linear") if TITLES[s].format(title) in labels]
    return found[0]

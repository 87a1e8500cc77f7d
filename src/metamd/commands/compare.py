"""`metamd compare`: a learned optimiser against tuned rivals on held-out tasks; a stopped run continues."""

import sys
from dataclasses import replace
from typing import Any

from metamd.cli import one_line
from metamd.commands import Compare, Report
from metamd.commands import report as report_command
from metamd.commands.train import family_of
from metamd.comparing import compare
from metamd.folds import Target
from metamd.learned import LearnedOptimiser, load
from metamd.protocols import TITLES, entrants
from metamd.records import Records
from metamd.rivals import Contender, learned_rival, rival
from metamd.search import SEARCHES
from metamd.tasks.base import TaskFamily


def run(options: Compare) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
    """
    rivals = [rival(name) for name in options.rivals]
    if not rivals:
        raise ValueError("--rivals must name at least one, got none.")
    baseline = rival(options.target) if options.target else rivals[-1]
    if baseline not in rivals:
        raise ValueError(f"--target must be one of the rivals, got {options.target!r}.")
    learned = load(options.file)
    family = side(options, learned)
    ours: dict[str, Contender] = {
        "MetaMD": learned_rival(learned).with_setting(options.schedule, momentum=options.momentum),
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
        )
        compare(
            everybody,
            family,
            seeds=options.seeds,
            steps=options.steps,
            seed=options.seed,
            folder=options.out,
            workers=options.workers,
            protocol=options.protocol,
            aim=Target(_label(baseline.title, everybody)),
        )
    except KeyboardInterrupt:
        print(f"Stopped; the same command continues from {one_line(str(options.out))}.", file=sys.stderr)
        raise
    return report_command.run(Report(options.out, json=options.json))


def side(options: Compare, learned: LearnedOptimiser) -> TaskFamily:
    """The family to compare on: its held-out side, if something is held out.

    Args:
        options: what was asked.
        learned: the file, which says what it was not learned on.
    """
    known: dict[str, Any] = learned.header.family or {}
    held = options.hold_out if options.hold_out is not None else known.get("hold_out")
    family = family_of(replace(options, hold_out=None if held is None else str(held)))
    seen = known.get("domains") or []
    if held is not None and str(held) in [str(d) for d in seen]:
        print(f"Note: the file was learned on {one_line(str(held))} too, so that nothing is held out.", file=sys.stderr)
    held_out = getattr(family, "held_out", None)
    if held is None or held_out is None:
        return family
    found: TaskFamily = held_out()
    return found


def _label(title: str, labels: Any) -> str:
    found = [TITLES[s].format(title) for s in ("constant", "linear") if TITLES[s].format(title) in labels]
    return found[0]

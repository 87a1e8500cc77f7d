"""`metamd train`: meta-training from the command line, with live progress and a run that Ctrl-C leaves resumable."""

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast, get_args

from metamd.cli.families import build_family, check_place
from metamd.cli.main import one_line
from metamd.cli.options import Train
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.progress import Progress
from metamd.files.store import Journal, Log
from metamd.inner.estimators import Forward, Reverse
from metamd.inner.estimators.base import Estimator
from metamd.inner.executor import Executor
from metamd.inner.objectives import End, Reference, Regret
from metamd.learning.meta import meta_train, paper, refinement, step_line
from metamd.learning.network import has_weights, learn_network
from metamd.learning.reference import learn_start
from metamd.learning.rounds.outer import Method, Refine, Stopping
from metamd.learning.usage import Choices, JudgedOn, learn_usage, rules_for_refresh
from metamd.potentials.diagonal import Kronecker, MaxDiagonal
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import starting_at

ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "forward": Forward,
    "reverse": Reverse,
}

MATTER = (
    *("family", "out", "steps", "model", "hold_out", "images", "width", "start", "learn_start", "tasks", "seed"),
    *("follow", "usage", "judged_on", "refresh", "tensorboard", "json", "every", "workers", "ray"),
)
"""Options that say what to learn for, and not how; or that the way for networks has anyway."""


def run(options: Train) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
    """
    _refuse_ignored(options)
    if not abs(options.seed) < 2**64:
        raise ValueError(f"--seed must lie between -2^64 and 2^64, got {options.seed}.")
    family = build_family(options)
    options = _resolved(options, family)
    _check_usage(options)
    check_place(options.out)
    folder = options.out.with_name(options.out.name + ".run")
    if options.out.exists() and not folder.exists():
        raise ValueError(
            f"{options.out} is there already, and {folder.name}, which tells that this command made it, is not. Choose "
            "another --out, or move the file away."
        )
    _method(options, family)  # refuses what does not go together, before anything is written
    notes: list[str] = []
    try:
        with Progress(f"metamd train {options.family}") as display:
            log = _log(display, notes, tensorboard(folder / "tensorboard") if options.tensorboard else None)
            learned = _learn(options, family, Journal(folder, every=options.every), log)
    except KeyboardInterrupt:
        print(f"Stopped; the same command continues from {one_line(str(folder))}.", file=sys.stderr)
        raise
    _save(learned, options.out)
    _report(options, learned.header.to_dict(), learned.fingerprint(), notes)
    return 0


def _save(learned: LearnedOptimiser, out: Path) -> None:
    """Write the file, unless the same one is there: it may have been certified since."""
    if not out.exists() or load(out).fingerprint() != learned.fingerprint():
        learned.save(out)


def _learn(options: Train, family: TaskFamily, journal: Journal, log: Log) -> LearnedOptimiser:
    start = None
    kept: dict[str, Any] = {"seed": options.seed, "journal": journal}
    kept["workers"] = Executor(options.workers, options.ray)
    if options.learn_start:
        start = learn_start(family, tasks=options.tasks, **kept)
        family = starting_at(family, start)
    method = _method(options, family)
    choices = Choices(judged_on=cast(JudgedOn, options.judged_on), rules=rules_for_refresh(options.refresh))
    if options.follow:
        objective = Regret(Reference(lr=options.reference) if options.reference else End(), prior=options.prior)
        chosen = choices if options.usage else None
        learned = learn_network(family, method["potential"], objective, tasks=options.tasks, choices=chosen, **kept)
    else:
        learned = meta_train(family, **method, max_norm=options.max_norm, tasks_per_step=options.tasks, log=log, **kept)
        if options.usage:
            learned = learn_usage(learned, family, choices, **kept)
    return learned if start is None else learned.with_start(start)


def tensorboard(folder: Path) -> Log:
    """A log that writes every number of a record as a scalar.

    Args:
        folder: of the event files.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs the tensorboard package: pip install metamd[tensorboard].") from None
    writer: Any = SummaryWriter(str(folder))

    def log(record: dict[str, Any], step: int) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                writer.add_scalar(f"{record['stage']}/{name}", value, step)
        writer.flush()

    return log


def _resolved(options: Train, family: TaskFamily) -> Train:
    """With a potential: where nothing is said of how to learn, that of `meta_train` with a family alone."""
    if options.potential is not None:
        return options
    usual, free = Train(options.family), {*MATTER, "potential"}
    plain = all(getattr(options, f.name) == getattr(usual, f.name) for f in fields(Train) if f.name not in free)
    if plain and has_weights(family):
        return replace(options, potential="kronecker", rank="auto", follow=True, usage=True)
    return replace(options, potential="diagonal")


def _check_usage(options: Train) -> None:
    if options.judged_on not in get_args(JudgedOn):
        raise ValueError(f"--judged-on must be {' or '.join(get_args(JudgedOn))}, got {options.judged_on!r}.")
    if options.refresh < 0:
        raise ValueError(f"--refresh must be a number of steps, got {options.refresh}. Leave it out for every step.")
    for name in ("judged_on", "refresh"):
        if getattr(options, name) != getattr(Train(options.family), name) and not options.usage:
            raise ValueError(f"--{name.replace('_', '-')} would change nothing without --usage. Leave it out, or add that.")


def _refuse_ignored(options: Train) -> None:
    """Options that would change nothing beside others are a mistake, not a wish."""
    usual = Train(options.family)
    rounds = ("refine", "estimator", "max_norm", "tolerance")
    shape = ("potential", "pieces", "tying", "rank", "reference", "prior", "follow")
    for why, names in {
        "with --follow": ("outer_steps", *rounds) if options.follow else (),
        "with --preset paper": (*shape, *rounds[:2], "tolerance") if options.preset == "paper" else (),
        "without --preset paper": ("k", "rho") if options.preset != "paper" else (),
        "without --refine": ("estimator",) if not options.refine and options.preset != "paper" else (),
    }.items():
        given = [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) != getattr(usual, n)]
        if given:
            advice = "Leave one of them out." if why.startswith("with ") else "Leave it out, or add that."
            raise ValueError(f"{', '.join(given)} would change nothing {why}. {advice}")


def _method(options: Train, family: TaskFamily) -> dict[str, Any]:
    if options.preset == "paper":
        preset = paper(options.k, rho=options.rho)
        return preset if options.outer_steps is None else preset | {"outer_steps": options.outer_steps}
    if options.preset != "default":
        raise ValueError(f'preset must be "default" or "paper", got {options.preset!r}.')
    if options.estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}; got {options.estimator!r}.")
    if options.refine is not None and options.refine < 0:
        raise ValueError(f"--refine must be a number of outer steps, got {options.refine}. Pass 0 for none.")
    refine = Refine(options.refine, ESTIMATORS[options.estimator]()) if options.refine else None
    if options.refine is None and options.potential == "diagonal":
        refine = refinement(family)
    lr = options.reference if options.reference is not None else 3e-3 * (options.potential == "kronecker")
    comparator = Reference(lr=lr) if lr else End()
    return {
        "potential": _potential(options),
        "objective": Regret(comparator, prior=options.prior),
        "method": Method(stopping=Stopping(options.tolerance)),
        "refine": refine,
        "outer_steps": 10 if options.outer_steps is None else options.outer_steps,
    }


def _potential(options: Train) -> MaxDiagonal:
    named: dict[str, Any] = {"tying": options.tying} if options.tying is not None else {}
    if options.potential == "kronecker":
        if not options.rank.isdecimal() and options.rank not in ("all", "auto"):
            raise ValueError(f"--rank must be a number of directions, auto or all; got {options.rank!r}.")
        rank: Any = {"all": None, "auto": "auto"}.get(options.rank) if not options.rank.isdecimal() else int(options.rank)
        return Kronecker(options.pieces, rank=rank, **named)
    if options.potential != "diagonal":
        raise ValueError(f"--potential must be diagonal or kronecker, got {options.potential!r}.")
    if options.rank != "all":
        raise ValueError("--rank is for --potential kronecker. Leave it out, or choose it.")
    return MaxDiagonal(options.pieces, **named)


def _log(display: Progress, notes: list[str], second: Log | None) -> Log:
    """Says every outer step, in lines where there is no bar that does; keeps the notes; and tells a second log."""

    def log(record: dict[str, Any], step: int) -> None:
        if not sys.stderr.isatty():
            display.say(step_line(record))
        for sentence in (*record["diverged"][:3], record["note"]):
            if sentence:
                display.say(f"  {one_line(sentence)}")
        if record["note"]:
            notes.append(record["note"])
        if second is not None:
            second(record, step)

    return log


def _report(options: Train, header: dict[str, Any], fingerprint: str, notes: list[str]) -> None:
    if options.json:
        print(json.dumps({"file": str(options.out), "fingerprint": fingerprint, "notes": notes, "header": header}))
        return
    cost = header["cost"]
    for note in (n for n in notes if n.startswith("kept one piece")):
        print(f"{note[0].upper()}{note[1:]}.")
    print(
        f"Learned {header['pieces']} piece{'s' * (header['pieces'] > 1)} from {len(header['task_hashes'])} tasks in "
        f"{cost['outer_steps']} outer steps, {cost['gradient_evaluations']:,} gradients, {cost['seconds']:.1f} s.\n"
        f"Written to {one_line(str(options.out))}: `metamd inspect` prints it, metamd.load reads it."
    )

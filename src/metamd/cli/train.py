"""`metamd train` learns a file from tasks of a family; `metamd update` learns a file anew with more recorded runs."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from metamd.cli.families import build_family, check_place, holds_out, show_plan, words
from metamd.cli.main import show
from metamd.cli.options import Train, Update
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.progress import Progress
from metamd.files.recorded_run import Run
from metamd.files.store import Journal, Log, locked
from metamd.files.text import install, one_line, shown
from metamd.inner.executor import Executor
from metamd.learning.meta import (
    has_weights,
    learn_network,
    meta_train,
    network_runs,
    paper,
    plan_of,
    plan_of_rounds,
    refinement,
)
from metamd.learning.outer import Method
from metamd.learning.recorded import update
from metamd.learning.reference import learn_start
from metamd.learning.rounds import step_line
from metamd.learning.score import JudgedOn
from metamd.learning.usage import Choices, Prefer, rules_for_refresh
from metamd.potentials.diagonal import Kronecker, MaxDiagonal
from metamd.tasks.base import TaskFamily
from metamd.tasks.supervised import Supervised
from metamd.tasks.wrapped import starting_at


def run(options: Train) -> None:
    """Carry out the command."""
    if not abs(options.seed) < 2**64:
        raise ValueError(f"--seed must lie between -2^64 and 2^64, got {options.seed}.")
    family = build_family(options)
    learn, told = _method(options, family)
    if options.dry_run:
        show_plan(family, _plan(options, family, learn, told), as_json=options.json)
        return
    check_place(options.out)
    folder = options.out.with_name(options.out.name + ".run")
    if options.out.exists() and not folder.exists():
        raise ValueError(
            f"{options.out} is there already, and {folder.name}, which tells that this command made it, is not. Choose "
            "another --out, or move the file away."
        )
    notes: list[str] = []
    try:
        with Progress(f"metamd train {options.family}") as display:
            second = tensorboard(folder / "tensorboard") if options.tensorboard else None
            told |= {"log": _log(display, notes, second) if learn is meta_train else second}
            workers = Executor(options.workers, options.ray)
            kept: dict[str, Any] = {"seed": options.seed, "journal": Journal(folder), "workers": workers}
            start = learn_start(family, tasks=options.tasks, **kept) if options.learn_start else None
            learned = learn(family if start is None else starting_at(family, start), **told, **kept)
            learned = learned if start is None else learned.with_start(start)
    except KeyboardInterrupt:
        print(f"Stopped; the same command continues from {one_line(str(folder))}.", file=sys.stderr)
        raise
    if not options.out.exists() or load(options.out).fingerprint() != learned.fingerprint():
        learned.save(options.out)  # the same file may have been certified since
    header, cost = learned.header.to_dict(), learned.header.cost
    rounds = f" in {cost['outer_steps']} outer steps" if cost["outer_steps"] else ""
    seen = " (all its datasets were learned from: see hold_out of metamd.tasks.supervised)"
    seen = seen if isinstance(family, Supervised) and not holds_out(family) else ""
    text = (
        f"Learned from {len(header['task_hashes'])} tasks{rounds}, with {cost['gradient_evaluations']:,} gradients in "
        f"{cost['seconds']:.1f} s.\n"
        f"Written to {one_line(str(options.out))}. What it says of itself: metamd inspect {words(options.out)}\n"
        f"Use it: opt = metamd.MetaMD(model.named_parameters(), {str(options.out)!r}, steps={family.steps})\n"
        f"Is it better than tuned rivals: metamd compare {words(options.out, options.family)}{seen}\n"
        f"What held-out tasks guarantee: metamd certify {words(options.out, options.family)}"
    )
    record = {"file": str(options.out), "fingerprint": learned.fingerprint(), "notes": notes, "header": header}
    show(record, text, as_json=options.json)


def _plan(options: Train, family: TaskFamily, learn: Callable[..., LearnedOptimiser], told: Mapping[str, Any]) -> str:
    """What a dry run says of the runs."""
    workers = Executor(options.workers, options.ray)
    if learn is learn_network:
        return plan_of(family, told["potential"], network_runs(options.tasks, told["choices"]), workers)
    names = {f.name for f in fields(Method)}
    method = replace(told.get("method", Method()), **{k: v for k, v in told.items() if k in names})
    alone = "potential" not in told
    method = replace(method, refine=refinement(family)) if alone and method.closed else method
    return plan_of_rounds(family, method, options.tasks, alone, workers)


def _method(options: Train, family: TaskFamily) -> tuple[Callable[..., LearnedOptimiser], dict[str, Any]]:
    """What learns, and what it is told; options that are unknown or would change nothing beside others are refused."""
    if options.preset not in ("default", "paper", "paper-plain"):
        raise ValueError(f"--preset must be default, paper or paper-plain, got {options.preset!r}.")
    published = options.preset != "default"
    from_adam = has_weights(family) and not published and options.outer_steps is None  # the default for networks
    for why, names in {
        "with --preset paper": ("potential", "tying", "rank") * published,
        "without --preset paper": ("k",) * (not published),
        "where no usage is chosen": ("judged_on", "refresh", "prefer") * (not from_adam),
    }.items():
        given = [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) != getattr(Train, n)]
        if given:
            raise ValueError(f"{', '.join(given)} would change nothing {why}. Leave it out.")
    if from_adam:
        rules = rules_for_refresh(options.refresh) if options.refresh else None
        chosen = {"judged_on": cast(JudgedOn, options.judged_on), "prefer": cast(Prefer, options.prefer)}
        choices = Choices(rules=rules, **chosen)  # type: ignore[arg-type]
        return learn_network, {"potential": _potential(options, from_adam), "tasks": options.tasks, "choices": choices}
    told: dict[str, Any] = paper(options.k, stable=options.preset == "paper") if published else {}
    if not published and (
        has_weights(family) or (options.potential, options.tying, options.rank) != (None, None, Train.rank)
    ):
        told = {"potential": _potential(options, from_adam), "refine": refinement(family)}
    rounds = {} if options.outer_steps is None else {"outer_steps": options.outer_steps}
    return meta_train, told | rounds | {"tasks_per_step": options.tasks}


def _potential(options: Train, from_adam: bool) -> MaxDiagonal:
    """What is learned: coordinates for networks, unless a diagonal was asked for."""
    named: dict[str, Any] = {"tying": options.tying} if options.tying is not None else {}
    chosen = options.potential or ("kronecker" if from_adam else "diagonal")
    if chosen not in ("diagonal", "kronecker"):
        raise ValueError(f"--potential must be diagonal or kronecker, got {options.potential!r}.")
    if chosen == "diagonal":
        if options.rank != Train.rank:
            raise ValueError("--rank is for --potential kronecker. Leave it out, or choose it.")
        return MaxDiagonal(1, **named)
    if not from_adam:
        raise ValueError("--potential kronecker is for networks, and not for --outer-steps. Leave one of them out.")
    if not options.rank.isdecimal() and options.rank not in ("all", "auto"):
        raise ValueError(f"--rank must be a number of directions, auto or all; got {options.rank!r}.")
    rank: Any = int(options.rank) if options.rank.isdecimal() else {"all": None, "auto": "auto"}[options.rank]
    return Kronecker(1, rank=rank, **named)


def tensorboard(folder: Path) -> Log:
    """A log that writes every number of a record as a scalar of event files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            f"--tensorboard needs the tensorboard package, which is not installed. {install('tensorboard')}"
        ) from None
    writer: Any = SummaryWriter(str(folder))

    def log(record: dict[str, Any], step: int) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                writer.add_scalar(f"{record['stage']}/{name}", value, step)
        writer.flush()

    return log


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


# metamd update


def run_update(options: Update) -> None:
    """Carry out the command."""
    if not options.runs:
        raise ValueError("there must be at least one RUN to add. Write: metamd update FILE RUN [RUN ...].")
    if not options.file.exists():
        raise FileNotFoundError(f"there is no file {shown(str(options.file))}. Make one with metamd.learn(runs).save(path).")
    out = options.out or options.file
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {shown(str(out.parent))} to save into. Create it first.")
    loaded = [(path.name, Run.load(path)) for path in options.runs]
    runs = [replace(run, name=run.name or file) for file, run in loaded]
    # Two nights that end at once must not both read the old file.
    with locked(out.with_name(f".{out.name}.lock")):
        before = load(options.file)
        after = update(before, runs, weights=[options.weight] * len(runs), decay=options.decay)
        after.save(out)
    earlier, rows = ((x.header.learned_from or {"runs": []})["runs"] for x in (before, after))
    old, new = ({k: v.detach().double() for k, v in x.potential.log_d.items()} for x in (before, after))
    # directions that are kept by themselves may be more or fewer than before: then their mean tells
    moved = torch.cat(
        [(new[k] - old[k] if new[k].shape == old[k].shape else new[k].mean() - old[k].mean()).abs().flatten() for k in old]
    )
    change = {"median": float(moved.median().exp()), "largest": float(moved.max().exp())} if len(moved) else None
    record = {
        "file": str(out),
        "runs": len(rows),
        "added": len(rows) - len(earlier),
        "weight": sum(row["weight"] for row in rows),
        "horizon": after.header.horizon,
        "fingerprint": after.fingerprint(),
        "step_size_change": change,
        "factor": after.usage.factor if after.header.usage is not None else None,
    }
    text = (
        f"{one_line(str(out))}: {record['added']} added, {record['runs']} runs in all (total weight "
        f"{record['weight']:.4g}, horizon {record['horizon']})."
    )
    if change:
        text += f"\nStep sizes changed by a factor of {change['median']:.3g} (median) and {change['largest']:.3g} (largest)."
    if record["factor"] is not None:
        text += (
            f"\nThe next run takes the factor {record['factor']:.3g}, where this file had {before.usage.factor:.3g}: "
            f"metamd.MetaMD(model.named_parameters(), {str(out)!r}, steps={record['horizon']}). Record it, and end with "
            "recorder.finish(score=its mean loss)."
        )
    show(record, text, as_json=options.json)

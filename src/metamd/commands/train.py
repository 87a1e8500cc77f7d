"""`metamd train`: meta-training from the command line, with live progress and a run that Ctrl-C leaves resumable."""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from metamd.cli import one_line
from metamd.commands import Compare, Train
from metamd.hypergrad import Forward, ForwardDiagonal, ForwardRandom, Reverse
from metamd.hypergrad.base import Estimator
from metamd.journal import Journal, Log
from metamd.meta import Method, meta_train, paper
from metamd.objectives import Regret
from metamd.outer_steps import Refine, Stopping
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import TaskFamily
from metamd.tasks.catalogue import FAMILIES
from metamd.tasks.shared_start import starting_at

ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "forward": Forward,
    "forward-diagonal": ForwardDiagonal,
    "forward-random": ForwardRandom,
    "reverse": Reverse,
}


def run(options: Train) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
    """
    family = family_of(options)
    _check_place(options.out)
    folder = options.out.with_name(options.out.name + ".run")
    with _processes() as rank:
        display = _Display(options, rank)
        log = _also(display.show, tensorboard(folder / "tensorboard") if options.tensorboard and rank == 0 else None)
        try:
            with display:
                learned = meta_train(
                    family,
                    **_method(options),
                    outer_steps=options.outer_steps,
                    tasks_per_step=options.tasks,
                    seed=options.seed,
                    journal=Journal(folder, every=options.every),
                    log=log,
                )
        except KeyboardInterrupt:
            if rank == 0:
                print(f"Stopped; the same command continues from {one_line(str(folder))}.", file=sys.stderr)
            raise
        if rank == 0:
            learned.save(options.out)
            _report(options, learned.header.to_dict(), learned.fingerprint(), display.notes)
    return 0


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


def family_of(options: Compare | Train) -> TaskFamily:
    """The family that the options name, with what they say of it.

    Args:
        options: what was asked.
    """
    if options.family not in FAMILIES:
        raise ValueError(f"there is no family {options.family!r}. There are {', '.join(sorted(FAMILIES))}.")
    build = FAMILIES[options.family]
    asked = {name: getattr(options, name) for name in ("steps", "model", "hold_out", "images", "width")}
    given = {name: value for name, value in asked.items() if value is not None}
    for name in given:
        if name not in inspect.signature(build).parameters:
            raise ValueError(f"the family {options.family!r} has no option --{name.replace('_', '-')}. Leave it out.")
    if options.family in ("rotated-mnist", "adapt-rotated-mnist") and options.hold_out is not None:
        try:
            given["hold_out"] = float(options.hold_out)
        except ValueError:
            raise ValueError(f"--hold-out must be an angle such as 30, got {options.hold_out!r}.") from None
    family = build(**given)
    return family if options.start is None else starting_at(family, options.start)


def _method(options: Train) -> dict[str, Any]:
    if options.preset == "paper":
        return paper(options.k, rho=options.rho)
    if options.preset != "default":
        raise ValueError(f'preset must be "default" or "paper", got {options.preset!r}.')
    if options.estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}; got {options.estimator!r}.")
    refine = Refine(options.refine, ESTIMATORS[options.estimator]()) if options.refine else None
    return {
        "potential": MaxDiagonal(options.pieces, tying=options.tying),  # type: ignore[arg-type]
        "objective": Regret(prior=options.prior),
        "method": Method(stopping=Stopping(options.tolerance)),
        "refine": refine,
    }


def _check_place(out: Path) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a directory. Name a file inside it, such as {out / 'learned.safetensors'}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK) or (out.exists() and not os.access(out, os.W_OK)):
        raise PermissionError(f"{out} cannot be written. Choose another place with --out.")


@contextmanager
def _processes() -> Iterator[int]:
    """Join the other processes that torchrun started, if it did; the rank of this one."""
    started = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not started or dist.is_initialized():
        yield dist.get_rank() if started else 0
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _also(first: Log, second: Log | None) -> Log:
    def log(record: dict[str, Any], step: int) -> None:
        first(record, step)
        if second is not None:
            second(record, step)

    return log


class _Display:
    """Outer step, tasks done, objective, bound and time left, on standard error."""

    def __init__(self, options: Train, rank: int) -> None:
        self.notes: list[str] = []
        self.done, self.began = 0, time.monotonic()
        console = Console(stderr=True, markup=False, highlight=False)
        self.quiet = rank > 0
        self.live = console.is_terminal and not self.quiet
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self.live,
        )
        self.bar = self.progress.add_task("meta-training", total=options.outer_steps + options.refine + 1)

    def __enter__(self) -> "_Display":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, record: dict[str, Any], step: int) -> None:
        """One more outer step."""
        self.done += record["tasks"]
        parts = [f"{record['stage']} {step}", f"{self.done} tasks"]
        parts += [f"{n} {record[n]:.4g}" for n in ("objective", "bound", "loss") if record[n] is not None]
        if record["diverged"]:
            parts.append(f"{len(record['diverged'])} diverged")
        line = "  ".join(parts)
        self.progress.update(self.bar, completed=step, description=line)
        if record["note"]:
            self.notes.append(record["note"])
        if self.quiet:
            return
        out = self.progress.console
        if not self.live:
            out.print(line, soft_wrap=True)
        for sentence in (*record["diverged"][:3], record["note"]):
            if sentence:
                out.print(f"  {one_line(sentence)}", soft_wrap=True)


def _report(options: Train, header: dict[str, Any], fingerprint: str, notes: list[str]) -> None:
    if options.json:
        print(json.dumps({"file": str(options.out), "fingerprint": fingerprint, "notes": notes, "header": header}))
        return
    cost = header["cost"]
    print(
        f"Learned {header['pieces']} piece{'s' * (header['pieces'] > 1)} from {len(header['task_hashes'])} tasks in "
        f"{cost['outer_steps']} outer steps, {cost['gradient_evaluations']:,} gradients, {cost['seconds']:.1f} s.\n"
        f"Written to {one_line(str(options.out))}: `metamd inspect` prints it, metamd.load reads it."
    )

"""`metamd certify`: what held-out tasks guarantee about the next ones, printed and written into the file."""

import shlex
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from metamd.certification.certification import LONGER, SCALED, certify, recommended
from metamd.certification.statements import HeldOutCertificate, Stated, certificates
from metamd.cli.families import build_family, check_place, duration, held_out_side, show_plan
from metamd.cli.main import show
from metamd.cli.options import Certify
from metamd.comparison.page import write_page
from metamd.comparison.sections import certified
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.shipped import FOLDER, locate
from metamd.files.store import locked
from metamd.files.text import one_line, shown
from metamd.inner.executor import Executor
from metamd.inner.objectives import Reference
from metamd.learning.meta import seconds_beside_adam
from metamd.tasks.base import SolvedTask, TaskFamily


def run(options: Certify) -> None:
    """Carry out the command."""
    torch.set_num_threads(1)  # tasks are small; sums in one order give the same numbers everywhere
    learned = load(options.file)
    family = held_out_side(build_family(options, learned.header.family))
    if options.dry_run:
        show_plan(family, _plan(options, family, learned), as_json=options.json)
        return
    out = _out_path(options)
    reference = None if options.reference_lr is None else Reference(lr=options.reference_lr)
    found = certify(
        learned,
        family,
        held_out_tasks=options.held_out_tasks,
        delta=options.delta,
        seed=options.seed,
        stated=Stated(options.target, options.regret_cap, options.radius, options.reach, options.theory),
        comparator=reference,
        executor=Executor(options.workers, options.ray),
    )
    others = _write_certificate(options.file, out, learned, found)
    if options.report is not None:
        with TemporaryDirectory() as folder:
            title, parts = f"Held-out certificate of {out.name}", certified(found, Path(folder))
            write_page(options.report, title, parts, command=command_line(options))
    beside = f", beside what it says of {one_line('; '.join(others))}" if others else ""
    written = f"Written into the header of {one_line(str(out))} for {one_line(found.place)}{beside}."
    following = f"A run prints its own certificate with certify=True. On a page: --report {out.stem}.html"
    lines = [*(one_line(line) for line in str(found).splitlines()), written, *[following] * (options.report is None)]
    show({"file": str(out), "certificate": found.to_dict()}, "\n".join(lines), as_json=options.json)


def _plan(options: Certify, family: TaskFamily, learned: LearnedOptimiser) -> str:
    """What a dry run says of the runs."""
    task = family.build(family.sample(torch.Generator().manual_seed(0)))
    seconds = seconds_beside_adam(task, {"MetaMD": partial(recommended, task, learned, task.steps)})["MetaMD"]
    followed = 0 if isinstance(task, SolvedTask) else LONGER
    length = (options.held_out_tasks * (1 + followed) + SCALED * followed) * task.steps
    about = duration(length * seconds / options.workers)
    return (
        f"{options.held_out_tasks} held-out tasks as the file recommends, {'and' if followed else 'without'} runs to find "
        f"their solutions: {length:,} steps of {1e3 * seconds:.2g} ms here, about {about}."
    )


def command_line(options: Certify) -> str:
    """The command that makes the same certificate again, with all options that are not as by default."""
    words = ["metamd", "certify", options.file, options.family]
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name not in ("file", "family", "json", "report", "dry_run") and value != each.default:
            flag = f"--{each.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join([*words, "--report", str(options.report)])


def _out_path(options: Certify) -> Path:
    """Where the result goes; a file of the package is not changed in place."""
    source = locate(options.file)
    path = source if options.out is None else options.out
    if options.report is not None:
        check_place(options.report)
        if options.report.resolve() in (source.resolve(), path.resolve()):
            raise ValueError(f"--report must be another file than the learned one, got {options.report} for both.")
    if options.out is None and path.parent == FOLDER:
        raise ValueError(f"{shown(options.file)} is shipped with the package and stays as it is. Pass --out FILE.")
    check_place(path)
    return path


def _write_certificate(file: str, out: Path, learned: LearnedOptimiser, found: HeldOutCertificate) -> list[str]:
    """Put the certificate beside those of other families and domains, which are given back, in place of an earlier one."""
    with locked(out.with_name(f".{out.name}.lock")):
        now = load(file)
        if now.fingerprint() != learned.fingerprint():
            raise ValueError(f"{shown(file)} was changed while its tasks ran. Run the command again.")
        found.into(now).save(out)
    return [place for place in certificates(now.header.held_out) if place != found.place]

"""`metamd update`: add the runs of a night to a learned-optimiser file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metamd.cli.main import one_line
from metamd.cli.options import Update
from metamd.files.container import shown
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.recorded_run import Run
from metamd.files.store import locked
from metamd.learning.recorded import update


def run(options: Update) -> int:
    """Carry out the command."""
    if not options.runs:
        raise ValueError("there must be at least one RUN to add. Write: metamd update FILE RUN [RUN ...].")
    if not options.file.is_file():
        raise FileNotFoundError(f"there is no file {shown(str(options.file))}. Make one with metamd.learn(runs).save(path).")
    out = options.out or options.file
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {shown(str(out.parent))} to save into. Create it first.")
    runs = [_named(path) for path in options.runs]
    # Two nights that end at once must not both read the old file.
    with locked(out.with_name(f".{out.name}.lock")):
        before = load(options.file)
        after = update(before, runs, weights=[options.weight] * len(runs), decay=options.decay)
        after.save(out)
    _report(summary(before, after, out), as_json=options.json)
    return 0


def _named(path: Path) -> Run:
    """A run, called after its file if it has no name of its own."""
    found = Run.load(path)
    return found if found.name else replace(found, name=path.name)


def summary(before: LearnedOptimiser, after: LearnedOptimiser, out: Path) -> dict[str, Any]:
    """What an update did, in plain types."""
    rows = (after.header.learned_from or {"runs": []})["runs"]
    added = len(rows) - len((before.header.learned_from or {"runs": []})["runs"])
    old, new = before.potential.log_d, after.potential.log_d
    moved = torch.cat([(new[k] - old[k]).detach().double().abs().flatten() for k in old])
    change = {"median": float(moved.median().exp()), "largest": float(moved.max().exp())} if len(moved) else None
    return {
        "file": str(out),
        "runs": len(rows),
        "added": added,
        "weight": sum(row["weight"] for row in rows),
        "horizon": after.header.horizon,
        "fingerprint": after.fingerprint(),
        "step_size_change": change,
    }


def _report(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    change = result["step_size_change"]
    print(
        f"{one_line(result['file'])}: {result['added']} added, {result['runs']} runs in all (total weight "
        f"{result['weight']:.4g}, horizon {result['horizon']})."
    )
    if change is not None:
        print(f"Step sizes changed by a factor of {change['median']:.3g} (median) and {change['largest']:.3g} (largest).")

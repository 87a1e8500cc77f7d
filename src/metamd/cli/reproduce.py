"""`metamd reproduce`: the experiments, from records that an interrupted run continues."""

import json
import sys
from pathlib import Path
from typing import Any

from metamd.cli.options import Reproduce
from metamd.cli.report import tables, write_report, write_tables
from metamd.comparison.page import as_markdown
from metamd.experiments import every, find, folder_name
from metamd.experiments.experiment import screened
from metamd.experiments.race import Synthetic
from metamd.files.store import ARCHIVE, Result, archive, unarchive, write_json


def run(options: Reproduce) -> int:
    """Carry out the command."""
    folder = options.out or Path("runs") / f"{folder_name(options.name, options.variant)}-{options.scale}"
    if options.name == "all":
        found = _all(options, folder)
        print(json.dumps(found) if options.json else "\n".join(f"## {n}\n\n{_tables(r)}" for n, r in found.items()))
    else:
        result = reproduce(find(options.name, options.variant), options, folder)
        print(json.dumps(result) if options.json else _tables(result))
    print(f"Records, tables and figures are in {folder}.", file=sys.stderr)
    return 0


def reproduce(experiment: Any, options: Reproduce, folder: Path) -> Result:
    """Run one experiment and write its tables, figures and page; then its records become an archive."""
    if options.scale not in experiment.scales:
        raise ValueError(f"{experiment.name} has the scales {', '.join(experiment.scales)}, got {options.scale!r}.")
    only: dict[str, Any] = {"only": options.only} if options.only else {}
    if only and isinstance(experiment, Synthetic):
        raise ValueError(f"{experiment.name} holds out no domains. Leave out --only.")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / ARCHIVE).is_file():
        unarchive(folder)
    result: Result = experiment.run(options.scale, folder, options.seed, options.workers, options.ray, **only)
    write_json(folder / "summary.json", result)
    (folder / "tables.md").write_text(_tables(result))
    if any(folder.glob("*/comparison.json")):
        write_report(folder, folder, places=experiment.places(options.scale, folder, options.only) if only else None)
    else:
        write_tables(folder, folder)
    archive(folder, screened)
    return result


def _all(options: Reproduce, folder: Path) -> dict[str, Result]:
    """Every experiment and variant that has the scale, one after another, each in a folder of its own."""
    found = {}
    for number, (name, variant) in enumerate(every(), start=1):
        title, experiment = folder_name(name, variant), find(name, variant)
        place = f"{number} of {len(every())}: {title}"
        if options.scale not in experiment.scales:
            print(f"{place} has no scale {options.scale}, and is left out.", file=sys.stderr)
            continue
        print(f"{place}, in {folder / title}", file=sys.stderr)
        found[title] = reproduce(experiment, options, folder / title)
    return found


def _tables(result: Result) -> str:
    return as_markdown(tables(result))

"""`metamd reproduce`: the experiments, from records that an interrupted run continues."""

import json
import sys
from pathlib import Path
from typing import Any

from metamd.cli.options import Reproduce
from metamd.cli.report import module_of, names, tables, write_report, write_tables
from metamd.comparison.page import as_markdown
from metamd.files.store import Records, Result, write_json


def run(options: Reproduce) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
    """
    folder = options.out or Path("runs") / f"{options.name}-{options.scale}"
    if options.name == "all":
        found = dict(_all(options, folder))
        print(json.dumps(found) if options.json else "\n".join(f"## {n}\n\n{_tables(r)}" for n, r in found.items()))
    else:
        result = reproduce(options.name, options, folder)
        print(json.dumps(result) if options.json else _tables(result))
    print(f"Records, tables and figures are in {folder}.", file=sys.stderr)
    return 0


def reproduce(name: str, options: Reproduce, folder: Path) -> Result:
    """Run one experiment and write its tables, figures and page.

    Args:
        name: of the experiment.
        options: what was asked.
        folder: where everything is kept.
    """
    experiment = module_of(name)
    if options.scale not in experiment.SCALES:
        raise ValueError(f"{name} has the scales {', '.join(experiment.SCALES)}, got {options.scale!r}.")
    runner = getattr(experiment, "EXPERIMENT", experiment)  # what needs nothing more is declared, the others written out
    only: dict[str, Any] = {"only": options.only} if options.only else {}
    if only and runner is experiment:
        raise ValueError(f"{name} holds out no domains. Leave out --only.")
    folder.mkdir(parents=True, exist_ok=True)
    result: Result = runner.run(options.scale, folder, options.seed, options.workers, options.ray, **only)
    write_json(folder / "summary.json", result)
    (folder / "tables.md").write_text(_tables(result))
    if any(folder.glob("*/comparison.json")):
        write_report(folder, folder, places=runner.places(options.scale, folder, options.only) if only else None)
    else:
        write_tables(folder, folder)
    for settings in folder.rglob("run.json") if options.pack else ():
        if folder / "learned" not in settings.parents:  # the parts of a lesson are no records
            Records(settings.parent, Records.settings(settings.parent)).pack()
    return result


def _all(options: Reproduce, folder: Path) -> list[tuple[str, Result]]:
    """Every experiment that has the scale, one after another; what the folder has already is not computed again."""
    found = []
    for number, name in enumerate(names(), start=1):
        place = f"{number} of {len(names())}: {name}"
        if options.scale not in module_of(name).SCALES:
            print(f"{place} has no scale {options.scale}, and is left out.", file=sys.stderr)
            continue
        print(f"{place}, in {folder / name}", file=sys.stderr)
        found.append((name, reproduce(name, options, folder / name)))
    return found


def _tables(result: Result) -> str:
    return as_markdown(tables(result))

"""`metamd reproduce`: the experiments, from records that an interrupted run continues."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from metamd.cli.options import Reproduce
from metamd.cli.report import write_report, write_tables
from metamd.comparison.entrants import PROTOCOLS
from metamd.files.store import Records, Result, write_json


def run(options: Reproduce) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
    """
    folder = options.out or Path("runs") / f"{options.name}-{options.scale}"
    if options.name == "all":
        found = dict(_all(options, folder))
        print(json.dumps(found) if options.json else "\n".join(f"## {n}\n\n{_tables(n, r)}" for n, r in found.items()))
    else:
        result = reproduce(options.name, options, folder)
        print(json.dumps(result) if options.json else _tables(options.name, result))
    print(f"Records, tables and figures are in {folder}.", file=sys.stderr)
    return 0


def reproduce(name: str, options: Reproduce, folder: Path) -> Result:
    """Run one experiment and write its tables, figures and page.

    Args:
        name: of the experiment.
        options: what was asked.
        folder: where everything is kept.
    """
    experiment = _module(name)
    if options.scale not in experiment.SCALES:
        raise ValueError(f"{name} has the scales {', '.join(experiment.SCALES)}, got {options.scale!r}.")
    runner = getattr(experiment, "EXPERIMENT", experiment)  # what needs nothing more is declared, the others written out
    only: dict[str, Any] = {"only": options.only} if options.only else {}
    if only and runner is experiment:
        raise ValueError(f"{name} holds out no domains. Leave out --only.")
    folder.mkdir(parents=True, exist_ok=True)
    result: Result = runner.run(options.scale, folder, options.seed, options.workers, options.ray, **only)
    write_json(folder / "summary.json", result)
    (folder / "tables.md").write_text(_tables(name, result))
    if any(folder.glob("*/comparison.json")):
        write_report(folder, folder, places=runner.places(options.scale, folder, options.only) if only else None)
    else:
        write_tables(folder, folder)
    for settings in folder.rglob("run.json") if options.pack else ():
        if folder / "learned" not in settings.parents:  # the parts of a lesson are no records
            Records(settings.parent, Records.settings(settings.parent)).pack()
    return result


def names() -> tuple[str, ...]:
    """Of all experiments, in the order in which `all` runs them."""
    positional = get_type_hints(Reproduce)["name"]
    return tuple(name for name in get_args(positional) if name != "all")


def _all(options: Reproduce, folder: Path) -> list[tuple[str, Result]]:
    """Every experiment that has the scale, one after another; what the folder has already is not computed again."""
    found = []
    for number, name in enumerate(names(), start=1):
        place = f"{number} of {len(names())}: {name}"
        if options.scale not in _module(name).SCALES:
            print(f"{place} has no scale {options.scale}, and is left out.", file=sys.stderr)
            continue
        print(f"{place}, in {folder / name}", file=sys.stderr)
        found.append((name, reproduce(name, options, folder / name)))
    return found


def _module(name: str) -> Any:
    return import_module(f"metamd.experiments.{name.replace('-', '_')}")


def _tables(name: str, result: Result) -> str:
    text: str = _module(name).markdown(result["rows"])
    protocol = result.get("protocol")
    if protocol not in PROTOCOLS:
        return text
    rule = f"Protocol: {protocol}. {PROTOCOLS[protocol]} {result.get('screening', '')}".rstrip()
    return f"{rule}\n\n{text}"

"""`metamd reproduce`: one of the paper's experiments, from records that an interrupted run continues."""

import json
import sys
from importlib import import_module
from pathlib import Path

from metamd.commands import Reproduce
from metamd.commands.report import write_report
from metamd.records import write_json


def run(options: Reproduce) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
    """
    experiment = import_module(f"metamd.experiments.{options.name.replace('-', '_')}")
    if options.scale not in experiment.SCALES:
        raise ValueError(f"{options.name} has the scales {', '.join(experiment.SCALES)}, got {options.scale!r}.")
    folder = options.out or Path("runs") / f"{options.name}-{options.scale}"
    folder.mkdir(parents=True, exist_ok=True)
    runner = getattr(experiment, "EXPERIMENT", experiment)  # leave-one-out experiments are declared, the others written out
    result = runner.run(options.scale, folder, options.seed, options.workers, options.ray)
    text = experiment.markdown(result["rows"])
    write_json(folder / "summary.json", result)
    if any(folder.glob("*/comparison.json")):
        write_report(folder, folder)
    (folder / "tables.md").write_text(text)
    print(json.dumps(result) if options.json else text)
    print(f"Records, tables and figures are in {folder}.", file=sys.stderr)
    return 0

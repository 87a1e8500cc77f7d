"""`metamd reproduce`: one of the paper's experiments, from records that an interrupted run continues."""

import json
import sys
from importlib import import_module
from pathlib import Path

from metamd.commands import Reproduce
from metamd.records import write_json


def run(options: Reproduce) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
    """
    experiment = import_module(f"metamd.experiments.{options.name}")
    folder = options.out or Path("runs") / f"{options.name}-{options.scale}"
    folder.mkdir(parents=True, exist_ok=True)
    result = experiment.run(options.scale, folder, options.seed)
    text = experiment.markdown(result["rows"])
    write_json(folder / "summary.json", result)
    (folder / "tables.md").write_text(text)
    print(json.dumps(result) if options.json else text)
    print(f"Records, tables and figures are in {folder}.", file=sys.stderr)
    return 0

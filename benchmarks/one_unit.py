"""Count the times of a step of some domains in the unit of another one, where they were taken on different machines.

    python benchmarks/one_unit.py FOLDER DOMAIN LIKE

A step of a rival takes as long on one domain as on another, and how much longer than one of Adam is up to the processor:
torch's Muon, which computes in bfloat16, takes 60 times as long as Adam where there are no units for that. The rivals of
the domain get the seconds that they have on the domain LIKE, and those of MetaMD are multiplied by the median of how much
the rivals' have changed. `metamd reproduce` with the same folder then makes the tables again.
"""

import json
import sys
from pathlib import Path

from metamd.comparison.compare import in_unit_of
from metamd.files.store import read_json, write_json


def main() -> None:
    folder, domain, like = Path(sys.argv[1]), *sys.argv[2:]
    index, other = (read_json(folder / f"domain-{name}" / "comparison.json") for name in (domain, like))
    (fold,), (reference,) = index["folds"], other["folds"]
    before = {label: x for label, x in reference["seconds"].items() if not label.startswith("MetaMD")}
    fold["seconds"] = in_unit_of(fold["seconds"], before)
    write_json(folder / f"domain-{domain}" / "comparison.json", index)
    print(json.dumps(fold["seconds"]))


if __name__ == "__main__":
    main()

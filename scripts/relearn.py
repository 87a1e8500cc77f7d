"""Copy the record of an experiment without what MetaMD learned and ran, so that `metamd reproduce` makes that anew.

    python scripts/relearn.py results/rotated-mnist-mlp runs/rotated-mnist-mlp
    metamd reproduce rotated-mnist-mlp --scale cpu --out runs/rotated-mnist-mlp

The runs of rivals are kept: a new version of MetaMD does not change them. The steps of all optimisers are timed again, in
turns. Where tasks begin at a model that was trained before, as in `adaptation`, another processor makes another start in the
last digits, and `metamd reproduce` refuses to mix: such a record is made from nothing.
"""

import argparse
import shutil
from pathlib import Path

from metamd.files.store import ARCHIVE, unarchive

STALE = ("cells/learn-*", "*/cells/metamd-*", "*/cells/seconds-*", "*/comparison.json")
"""Learned files, runs with them, times of steps, and tables of comparisons."""


def relearn(record: Path, folder: Path) -> int:
    """Unpack a record into a new folder without what is stale; how many results are kept."""
    folder.mkdir(parents=True)
    shutil.copy(record / ARCHIVE, folder)
    unarchive(folder)
    (folder / ARCHIVE).unlink()
    for pattern in STALE:
        for path in folder.glob(pattern):
            path.unlink()
    return len(list(folder.glob("*/cells/*.json")))


def main() -> None:
    """Carry out the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="a folder of results/")
    parser.add_argument("folder", type=Path, help="a new one")
    options = parser.parse_args()
    kept = relearn(options.record, options.folder)
    print(f"{kept:,} results of rivals are kept in {options.folder}.")


if __name__ == "__main__":
    main()

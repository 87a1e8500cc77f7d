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

from metamd.files.store import ARCHIVE, UNPACKED, read_json, unarchive, write_json

STALE = ("learn-", "metamd-", "seconds-")
"""How the names of cells begin that hold learned files, runs with them, and times of steps."""


def relearn(record: Path, folder: Path) -> int:
    """Unpack a record into a new folder without what is stale; how many results are kept."""
    folder.mkdir(parents=True)
    shutil.copy(record / ARCHIVE, folder)
    unarchive(folder)
    (folder / ARCHIVE).unlink()
    for path in folder.glob("*/comparison.json"):
        path.unlink()
    kept = 0
    for path in folder.rglob(UNPACKED):
        cells = {name: cell for name, cell in read_json(path).items() if not name.startswith(STALE)}
        write_json(path, cells)
        kept += len(cells) if path.parent != folder else 0
    return kept


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

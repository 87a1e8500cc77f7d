"""Results on disk: one small JSON file per cell of a table, written whole, so that an interrupted run continues.

A run that is done may be packed: then all cells are lines of one file, `cells.jsonl`, and more may still be added beside it.
"""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from metamd.files.container import strict_json, write_atomically

FORMAT = 1
PACKED = "cells.jsonl"
TOP = ("", "settings")

Result = dict[str, Any]
"""What a cell holds, in JSON's own types; the count of a run that never arrived, say, is None."""


class Records:
    """The cells of one run in a folder, together with the settings that they were made with.

    Args:
        folder: made if it is not there.
        settings: all that the results depend on, in JSON's types. A folder with other settings is refused.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = Records(Path(folder), {"seed": 0}).cell("a", lambda: {"iterations": 3})
        ...     second = Records(Path(folder), {"seed": 0}).cell("a", lambda: {"iterations": 4})
        >>> second
        {'iterations': 3}
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "settings": _plain(settings)}
        path = folder / "run.json"
        if not path.exists() and ((folder / PACKED).exists() or any((folder / "cells").iterdir())):
            raise ValueError(
                f"{str(folder)!r} holds results, but not run.json, which says by which settings they were made. Put it "
                "back, or choose another folder (--out)."
            )
        if not path.exists():
            write_json(path, about)
        elif (found := read_json(path, "Put it back, or choose another folder (--out).")) != about:
            lines = _differences(found, about)
            differing = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
            raise ValueError(
                f"{str(folder)!r} holds a run with other settings: {differing}. Choose another folder (--out) or delete it."
            )

    @staticmethod
    def settings(folder: Path) -> dict[str, Any]:
        """What the run in a folder was made with.

        Args:
            folder: of the run.
        """
        found = read_json(folder / "run.json").get("settings")
        if not isinstance(found, dict):
            raise ValueError(f"{str(folder / 'run.json')!r} must have the settings of the run, by name.")
        return found

    def cell(self, name: str, compute: Callable[[], Result]) -> Result:
        """The result of that name: read if it is there, else computed and written.

        Args:
            name: a file name without its ending.
            compute: makes the result.
        """
        if not self.has(name):
            self.write(name, compute())
        return self.read(name)

    def write(self, name: str, result: Result) -> None:
        """Keep a result."""
        write_json(self.path(name), _plain(result))

    def read(self, name: str) -> Result:
        """A result that is there."""
        return self.packed[name] if name in self.packed else read_cell(self.folder, name)

    def has(self, name: str) -> bool:
        """Whether the cell is there."""
        return name in self.packed or self.path(name).exists()

    @cached_property
    def packed(self) -> dict[str, Result]:
        """The cells of the packed file, by name."""
        return read_packed(self.folder)

    def forget(self, name: str) -> None:
        """Have a cell computed again.

        Args:
            name: of the cell.
        """
        self.path(name).unlink(missing_ok=True)
        if self.packed.pop(name, None) is not None:
            self._write_packed()

    def pack(self) -> None:
        """Move all cells into the packed file."""
        loose = read_loose(self.folder)
        self.packed.update(loose)
        self._write_packed()
        for name in loose:
            self.path(name).unlink()

    def _write_packed(self) -> None:
        if not self.packed:
            (self.folder / PACKED).unlink(missing_ok=True)
            return
        lines = [json.dumps({"cell": name, **self.packed[name]}, allow_nan=False) for name in sorted(self.packed)]
        write_atomically(self.folder / PACKED, ("\n".join(lines) + "\n").encode())

    def path(self, name: str) -> Path:
        """Where the cell is kept."""
        return self.folder / "cells" / f"{name}.json"


def read_cell(folder: Path, name: str) -> Result:
    """One cell of a run that is not packed.

    Args:
        folder: of the run.
        name: of the cell.
    """
    path = folder / "cells" / f"{name}.json"
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object. Delete it, and it is computed again.")
    return found


def read_loose(folder: Path) -> dict[str, Result]:
    """The cells of a run that are not packed, by name.

    Args:
        folder: of the run.
    """
    return {path.stem: read_cell(folder, path.stem) for path in sorted((folder / "cells").glob("*.json"))}


def read_packed(folder: Path) -> dict[str, Result]:
    """The packed cells of a run, by name; none if it is not packed.

    Args:
        folder: of the run.
    """
    path = folder / PACKED
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        value = strict_json(line, f"line {number} of {str(path)!r}")
        if not isinstance(value, dict) or not isinstance(value.get("cell"), str):
            raise ValueError(f"line {number} of {str(path)!r} must hold a JSON object with the name of its cell.")
        found[value.pop("cell")] = value
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, whole or not at all, one line for each of its keys.

    Args:
        path: the file; its folder exists.
        value: in JSON's types, without NaN and infinity.
    """
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in value.items())
    write_atomically(path, f"{{\n{lines}\n}}\n".encode())


def read_json(path: Path, advice: str = "Delete the file, and it is computed again.") -> Any:
    """The value of a JSON file, or a sentence that names the file.

    Args:
        path: the file.
        advice: what to do where it is damaged.
    """
    try:
        return strict_json(path.read_bytes(), repr(str(path)))
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. {advice}") from None


def _differences(found: Any, now: Any, path: str = "") -> list[str]:
    """Where two values of JSON differ, such as "steps is 30 there, not 20"."""
    if isinstance(found, dict) and isinstance(now, dict):
        names = [k for k in {**found, **now} if found.get(k) != now.get(k)]
        return [line for k in names for line in _differences(found.get(k), now.get(k), k if path in TOP else f"{path}.{k}")]
    was, is_now = ("not there" if x is None else json.dumps(x) for x in (found, now))
    return [f"{path} is {was}, and would be {is_now}"]


def _plain(value: Any) -> Any:
    """As it will be read back: tuples become lists."""
    return json.loads(json.dumps(value, allow_nan=False))

"""One store: a folder with the settings of a run, its finished results and tensors, and a lock that keeps a second run out.

Everything is written whole or not at all, so that the same call continues a run that was stopped at any moment. The records
of a finished experiment become an archive: one compressed file with a line for each result.
"""

import json
import lzma
import math
import shutil
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from metamd.files.container import Kind, Tensors, strict_json, write_atomically
from metamd.files.limits import ARCHIVE_LIMIT, JSON_LIMIT, LOG_LIMIT, read_regular
from metamd.files.text import brief, shown

FORMAT = 1
ARCHIVE = "records.jsonl.xz"
UNPACKED = "cells.json"
"""The cells that came out of an archive: one file, since thousands of small ones take minutes to write and to read."""

CHECKPOINT, CHECKPOINT_VERSION = Kind("checkpoint", "metamd.checkpoint", described=False), 3

Result = dict[str, Any]
"""What a cell holds, in JSON's own types; None stands for what is infinite or unknown."""

Log = Callable[[dict[str, Any], int], None]
"""Called with the record of an outer step and its number."""


class Records:
    """The cells of one run in a folder, a small JSON file each; a folder that was made with other settings is refused.

    Cells that came out of an archive lie in one file together; a file of its own goes before them.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._unpacked = _unpacked(folder)
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "settings": _as_read_back(settings)}
        path = folder / "run.json"
        if not path.exists() and (self._unpacked or any((folder / "cells").iterdir())):
            raise ValueError(
                f"{str(folder)!r} holds results, but not run.json, which says by which settings they were made. Put it "
                "back, or choose another folder (--out)."
            )
        if not path.exists():
            write_json(path, about)
        _check_settings(read_json(path, "Put it back, or choose another folder (--out)."), about, folder)

    @staticmethod
    def settings(folder: Path) -> dict[str, Any]:
        """What the run in a folder was made with."""
        found = read_json(folder / "run.json").get("settings")
        if not isinstance(found, dict):
            raise ValueError(f"{str(folder / 'run.json')!r} must have the settings of the run, by name.")
        return found

    def cell(self, name: str, compute: Callable[[], Result]) -> Result:
        """The result of that name, a file name without its ending: read if it is there, else computed and written."""
        if not self.has(name):
            self.write(name, compute())
        return self.read(name)

    def write(self, name: str, result: Result) -> None:
        """Keep a result."""
        write_json(self.path(name), _as_read_back(result))

    def read(self, name: str) -> Result:
        """A result that is there."""
        return read_json(self.path(name)) if self.path(name).exists() else self._unpacked[name]

    def has(self, name: str) -> bool:
        """Whether the cell is there."""
        return name in self._unpacked or self.path(name).exists()

    def forget(self, name: str) -> None:
        """Remove a result, if it is there."""
        if self._unpacked.pop(name, None) is not None:
            write_json(self.folder / UNPACKED, self._unpacked)
        self.path(name).unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        """Where the cell is kept."""
        return self.folder / "cells" / f"{name}.json"


@dataclass(frozen=True)
class Journal:
    """Where a meta-training keeps its checkpoint and its log, so that the same call continues one that was stopped.

    A recipe keeps its finished parts in the same folder, see `learning.parts`.

    Tensors and JSON only, written whole or not at all: a kill at any moment loses at most the outer steps since the last
    checkpoint, and a full disk leaves the old one.

    Args:
        folder: made if it is not there; one run at a time.
        every: outer steps between checkpoints.

    Example:
        >>> Journal("runs/quadratic", every=5)
        Journal(folder='runs/quadratic', every=5)
    """

    folder: str | Path
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}. It is the number of outer steps per checkpoint.")

    @property
    def checkpoint(self) -> Path:
        """The file of the last checkpoint."""
        return Path(self.folder) / "checkpoint.safetensors"

    @property
    def log(self) -> Path:
        """One JSON object per outer step."""
        return Path(self.folder) / "log.jsonl"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder; a second run is refused with a sentence, and so is a folder that cannot be written."""
        folder = Path(self.folder)
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder / "lock", wait=False))
            except BlockingIOError:
                raise BlockingIOError(
                    f"another run is writing to {shown(str(folder))}. Wait for it, stop it, or write elsewhere."
                ) from None
            except OSError as error:
                raise type(error)(
                    f"{shown(str(folder))} cannot be written ({error.strerror or error}). Choose another place."
                ) from None
            for left in folder.glob(".*.tmp"):  # of a process that was killed while it wrote
                with suppress(OSError):
                    left.unlink()
            yield

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Write a checkpoint: the tensors and the facts of a state, and the configuration that it belongs to."""
        facts = {"version": CHECKPOINT_VERSION, "identity": dict(identity), "state": dict(state)}
        CHECKPOINT.write(self.checkpoint, json.dumps(facts, allow_nan=False), dict(tensors))

    def resume(self, identity: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]] | None:
        """The tensors and facts of the last checkpoint, if there is one of the same configuration; the log is cut to it."""
        found = None
        if self.checkpoint.exists():
            try:
                tensors, state, there = CHECKPOINT.read(self.checkpoint, _checkpoint)
            except ValueError as error:
                raise ValueError(f"{brief(str(error), 900)} Delete the checkpoint to begin again.") from None
            _check_settings(there, identity, Path(self.folder))
            found = tensors, state
        if self.log.exists():
            kept = []
            try:
                lines = read_regular(self.log, LOG_LIMIT).decode("utf-8", "replace").splitlines()
            except ValueError as error:
                raise ValueError(f"{str(self.log)!r} cannot be read: {error} Delete the log to go on without.") from None
            for line in lines:
                with suppress(ValueError, KeyError, TypeError, RecursionError):  # the last record may be cut in the middle
                    if found is not None and json.loads(line)["step"] <= found[1]["step"]:
                        kept.append(f"{line}\n")
            write_atomically(self.log, "".join(kept).encode())
        return found

    def note(self, record: dict[str, Any], step: int) -> None:
        """Append one record to the log."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | record) + "\n")


def _checkpoint(text: str, tensors: Tensors) -> tuple[Tensors, dict[str, Any], dict[str, Any]]:
    facts = strict_json(text, "its record")
    try:
        if facts["version"] != CHECKPOINT_VERSION:
            raise ValueError(f"it has the version {facts['version']}, and this metamd reads {CHECKPOINT_VERSION}.")
        return tensors, {"step": int(facts["state"]["step"]), **facts["state"]}, dict(facts["identity"])
    except (KeyError, TypeError):
        raise ValueError("its record must have a version, an identity and a state with its step.") from None


def read_cells(folder: Path) -> dict[str, Result]:
    """All cells of a run, by name."""
    return _unpacked(folder) | {path.stem: read_json(path) for path in sorted((folder / "cells").glob("*.json"))}


def _unpacked(folder: Path) -> dict[str, Result]:
    path = folder / UNPACKED
    found = read_json(path, limit=ARCHIVE_LIMIT) if path.exists() else {}
    if not all(isinstance(cell, dict) for cell in found.values()):
        raise ValueError(f"every value in {str(path)!r} must be a JSON object. Delete the file, and it is made again.")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON without NaN and infinity, whole or not at all, one line for each of its keys."""
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in value.items())
    write_atomically(path, f"{{\n{lines}\n}}\n".encode())


def read_json(
    path: Path, advice: str = "Delete the file, and it is computed again.", limit: int = JSON_LIMIT
) -> dict[str, Any]:
    """The object in a JSON file, or a sentence that names the file and says what to do."""
    try:
        found = strict_json(_content(path, limit), repr(str(path)))
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. {advice}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object. {advice}")
    return found


def _content(path: Path, limit: int = JSON_LIMIT) -> bytes:
    try:
        return read_regular(path, limit)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from None


FEWER = 3
"""Digits of the losses of runs that no figure shows, in an archive: trials, and settings that were screened out."""


def archive(folder: Path, screened: Callable[[Path], Container[str]] = lambda place: ()) -> None:
    """Move all records of a folder and those in it into one file; trials and `screened` cells keep `FEWER` digits."""
    places = sorted(p.parent for p in folder.rglob("run.json") if folder / "learned" not in p.parents)
    lines: list[Result] = []
    for place in places:
        here = {"folder": place.relative_to(folder).as_posix()}
        lines.append(here | {"run": read_json(place / "run.json")})
        others = sorted(place.glob("*.json")) if place != folder else []
        others = [p for p in others if p.name not in ("run.json", UNPACKED)]
        lines += [here | {"file": p.name, "content": read_json(p)} for p in others]
        few = screened(place)
        for name, cell in sorted(read_cells(place).items()):
            seldom = name in few or "runs" in cell
            lines.append(here | {"cell": name, "result": _with_short_losses(cell, FEWER) if seldom else cell})
    text = "\n".join(json.dumps(line, allow_nan=False, separators=(",", ":")) for line in lines) + "\n"
    write_atomically(folder / ARCHIVE, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    for place in sorted(places, reverse=True):  # folders inside others first
        shutil.rmtree(place / "cells", ignore_errors=True)
        (place / UNPACKED).unlink(missing_ok=True)
        if place != folder:
            for path in place.glob("*.json"):
                path.unlink()
            if not any(place.iterdir()):
                place.rmdir()


def _with_short_losses(cell: Result, digits: int) -> Result:
    """The record of a run, or of a trial, which has several."""
    found = dict(cell)
    if isinstance(losses := cell.get("losses"), list):
        found["losses"] = shortened(losses, digits)
    if isinstance(runs := cell.get("runs"), list):
        found["runs"] = [_with_short_losses(run, digits) if isinstance(run, dict) else run for run in runs]
    return found


def unarchive(folder: Path, into: Path | None = None) -> None:
    """Write the records of an archive into its folder or another one; cells that are there are kept."""
    where, into = repr(str(folder / ARCHIVE)), into or folder
    try:
        unpack = lzma.LZMADecompressor(memlimit=2**30)
        text = unpack.decompress(_content(folder / ARCHIVE, ARCHIVE_LIMIT), ARCHIVE_LIMIT)
        if not unpack.eof:
            raise ValueError(f"it is cut short, or unpacks to more than {ARCHIVE_LIMIT:,} bytes")
        settings: dict[Path, Any] = {}
        cells: dict[Path, dict[str, Result]] = {}
        files = {}
        for line in text.splitlines():
            said = strict_json(line, f"a line of {where}")
            place = into / said["folder"]
            if not place.resolve().is_relative_to(into.resolve()) or not ("run" in said or place in settings):
                raise ValueError("it names a folder that lies elsewhere, or that has no settings")
            if "run" in said:
                settings[place] = said["run"]["settings"]
            elif "cell" in said:
                cells.setdefault(place, {})[Path(said["cell"]).name] = dict(said["result"])
            else:
                files[place / Path(said["file"]).name] = said["content"]
    except (lzma.LZMAError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{where} is not the archive of an experiment: {brief(str(error), 600)}. Put it back, or delete it."
        ) from None
    for place, about in settings.items():
        Records(place, about)
    for place, found in cells.items():
        write_json(place / UNPACKED, found)
    for path, content in files.items():
        if not path.exists():
            write_json(path, content)


@contextmanager
def records_in(folder: Path) -> Iterator[Path]:
    """Where the records of a folder are to be read: there, or in a copy of its archive that is removed again."""
    if not (folder / ARCHIVE).is_file() or (folder / "cells").exists():
        yield folder
        return
    with TemporaryDirectory() as copy:
        unarchive(folder, Path(copy))
        yield Path(copy)


def as_json(value: Any) -> Any:
    """The same in JSON's types: None for what is infinite or unknown, lists for tuples."""
    return _mapped(value, lambda x: x if math.isfinite(x) else None)


SETTING_DIGITS = 6
"""Digits of hyperparameters that are searched, so that records are readable and exact."""


def shortened(value: Any, digits: int) -> Any:
    """Plain values with so many digits of every float."""
    return _mapped(value, lambda x: float(f"{x:.{digits}g}"))


def _mapped(value: Any, change: Callable[[float], float | None]) -> Any:
    if isinstance(value, float):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _mapped(v, change) for k, v in value.items()}
    return [_mapped(v, change) for v in value] if isinstance(value, list | tuple) else value


def _check_settings(found: Any, now: Mapping[str, Any], folder: Path) -> None:
    """Refuse a folder whose results were made with other settings."""
    lines = _differences(found, _as_read_back(now))
    if lines:
        differing = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
        raise ValueError(
            f"{str(folder)!r} holds a run with other settings: {differing}. Choose another folder (--out) or delete it."
        )


def _differences(found: Any, now: Any, path: str = "") -> list[str]:
    """Where two values of JSON differ, such as "steps is 30, and would be 20"."""
    if found == now:
        return []
    if isinstance(found, dict) and isinstance(now, dict):
        below = {k: k if path in ("", "settings") else f"{path}.{k}" for k in {**found, **now}}
        return [line for k, name in below.items() for line in _differences(found.get(k), now.get(k), name)]
    was, is_now = ("not there" if x is None else brief(json.dumps(x), 80) for x in (found, now))
    return [f"{brief(path, 80)} is {was}, and would be {is_now}"]


def _as_read_back(value: Any) -> Any:
    """As it will be read back: tuples become lists."""
    return json.loads(json.dumps(value, allow_nan=False))


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path`, which the system releases when its holder dies; without `wait` it may be refused.

    The file stays behind: removing it would let two processes hold two files of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _acquire(file.fileno(), wait)
        try:
            yield
        finally:
            _release(file.fileno())


if sys.platform == "win32":
    import msvcrt

    def _acquire(descriptor: int, wait: bool) -> None:
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if not wait:
                    raise BlockingIOError(*error.args) from None
                time.sleep(0.1)

    def _release(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _acquire(descriptor: int, wait: bool) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _release(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)

"""The folder of a meta-training: its checkpoint, its log, and the lock that keeps a second run out."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from metamd.files.container import pack, read, shown, strict_json, write_atomically
from metamd.files.locks import locked

CHECKPOINT_VERSION = 2
FACTS_KEY, CHECKSUM_KEY = "metamd.checkpoint", "metamd.checksum"

Log = Callable[[dict[str, Any], int], None]
"""Called with the record of an outer step and its number."""


@dataclass(frozen=True)
class Journal:
    """Where a meta-training keeps its checkpoint and its log, so that the same call continues one that was stopped.

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
        text, tensors = json.dumps(facts, allow_nan=False), dict(tensors)
        write_atomically(self.checkpoint, pack(tensors, {FACTS_KEY: text, CHECKSUM_KEY: _checksum(text, tensors)}))

    def resume(self, identity: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and facts of the last checkpoint, if there is one; the log is cut to it.

        Args:
            identity: the present configuration; a checkpoint of another one is refused.
        """
        found = self._read(identity) if self.checkpoint.exists() else None
        if self.log.exists():
            kept = [line for line in _lines(self.log) if found is not None and line["step"] <= found[1]["step"]]
            write_atomically(self.log, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return found

    def note(self, record: dict[str, Any], step: int) -> None:
        """Append one record to the log."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | record) + "\n")

    def _read(self, identity: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        where = shown(str(self.checkpoint))
        try:
            container = read(self.checkpoint)
            text = container.metadata.get(FACTS_KEY, "")
            if container.metadata.get(CHECKSUM_KEY) != _checksum(text, container.tensors):
                raise ValueError("its content does not match its checksum.")
            facts = strict_json(text, "its record")
            if facts["version"] != CHECKPOINT_VERSION:
                raise ValueError(f"it has the version {facts['version']}, and this metamd reads {CHECKPOINT_VERSION}.")
            found = container.tensors, {"step": int(facts["state"]["step"]), **facts["state"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the checkpoint {where} cannot be used: {error} Delete it to begin again.") from None
        _same(facts["identity"], identity, where)
        return found


def _same(there: Mapping[str, Any], here: Mapping[str, Any], where: str) -> None:
    plain = json.loads(json.dumps(dict(here)))
    for name in sorted(set(there) | set(plain)):
        if there.get(name) != plain.get(name):
            raise ValueError(
                f"the checkpoint {where} is of another configuration: {name} is {shown(there.get(name))} there and "
                f"{shown(plain.get(name))} here. Continue with the same options, or write elsewhere."
            )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log; the last one may be cut in the middle."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0")
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()

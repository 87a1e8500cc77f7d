"""The one container: tensors, a JSON text and a checksum in a safetensors file, which may be damaged or hostile when read.

Every file that MetaMD writes with tensors is a `Kind` of it. A crash while writing leaves the old file.
"""

import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from metamd.files.limits import DATA_LIMIT, HEADER_LIMIT, KEYS_LIMIT, TENSORS_LIMIT, open_regular
from metamd.files.text import brief, shown
from metamd.potentials.tying import Shape

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
"""The types that may be stored, in the words of safetensors. F16 is not one: exp(12) overflows there."""

AGAIN = "The file is damaged or was not written by MetaMD: copy it again or make a new one."


T = TypeVar("T")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name in sentences, and the keys in its metadata of the JSON text and of the checksum."""

    name: str
    key: str
    seal: str = "metamd.checksum"
    described: bool = True  # whether types and shapes enter the checksum; those of starts and checkpoints never did

    def write(self, path: Path, text: str, tensors: Tensors, digest: str | None = None) -> None:
        """Write a file whole or not at all; its checksum is of the text and the tensors if no other is given."""
        digest = checksum(text, tensors, described=self.described) if digest is None else digest
        write_atomically(path, pack(tensors, {self.key: text, self.seal: digest}))

    def read(self, path: Path, assemble: Callable[[str, Tensors], T], digest: Callable[[T, str], str] | None = None) -> T:
        """What `assemble` makes of the text and the tensors; whatever is wrong is a sentence that begins with the path.

        `digest` gives the checksum that the file should have, if it is not of the text and the tensors alone.
        """
        try:
            metadata, tensors = read(path, self._check_metadata)
            text = metadata[self.key]
            found = assemble(text, tensors)
            right = checksum(text, tensors, described=self.described) if digest is None else digest(found, text)
            if metadata[self.seal] != right:
                raise ValueError(f"its content does not match its checksum. {AGAIN}")
            return found
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {str(path)!r}. Check the path.") from None
        except OSError as error:
            raise type(error)(f"{str(path)!r} cannot be read: {error.strerror or error}".rstrip(".") + ".") from None
        except ValueError as error:
            raise ValueError(brief(f"{str(path)!r} cannot be loaded: {error}")) from None

    def _check_metadata(self, metadata: Mapping[str, str]) -> None:
        if set(metadata) != {self.key, self.seal}:
            raise ValueError(
                f"its metadata must have the entries {self.key!r} and {self.seal!r}, got {shown(sorted(metadata))}: it "
                f"is a safetensors file, but no {self.name}."
            )


def checksum(text: str, tensors: Mapping[str, Tensor], *, described: bool = True) -> str:
    """The digest of a text and of tensors on the CPU: names, types, shapes and bytes, in the order of the names."""
    digest = blake2b(text.encode(), digest_size=16)
    for name, value in sorted(tensors.items()):
        about = (
            json.dumps([name, DTYPES.get(value.dtype, str(value.dtype)), list(value.shape)]) if described else f"{name}\0"
        )
        digest.update(about.encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """The shape of every tensor, by name."""
    return {name: tuple(x.shape) for name, x in tensors.items()}


def strict_json(text: bytes | str, what: str) -> Any:
    """Parse JSON and refuse what parsers disagree on: repeated keys, NaN, half surrogates, very deep nesting."""

    refused: list[str] = []
    seen = 0

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal seen
        seen += len(pairs)
        if seen > KEYS_LIMIT:
            raise ValueError(f"more than {KEYS_LIMIT:,} keys")
        found = dict(pairs)
        if len(found) < len(pairs) and not refused:
            (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            refused.append(f"{what} repeats the key {shown(key)}; every key may appear once.")
        return found

    def constant(name: str) -> None:
        refused.append(f"{what} contains {name}, which is no JSON number. Store null instead.")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
        json.dumps(value, ensure_ascii=False).encode()  # half surrogates fail here
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply to be read. {AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{what} must be JSON in UTF-8, but it does not parse ({shown(str(error))}). {AGAIN}") from None
    if refused:
        raise ValueError(refused[0])
    return value


def read(path: Path, accept: Callable[[Mapping[str, str]], None] = lambda metadata: None) -> tuple[dict[str, str], Tensors]:
    """The metadata and the tensors of a file: the length of its header is judged first, then the header, then the rest.

    `accept` refuses metadata of something else, before the tensors are read.
    """
    if path.is_dir():
        raise IsADirectoryError("it is a directory. Name the .safetensors file inside it.")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"a safetensors file has at least 8 bytes and this one has {len(prefix)}. {AGAIN}")
        length = int.from_bytes(prefix, "little")
        if length > HEADER_LIMIT and (prefix[:4] == b"PK\x03\x04" or prefix[:1] == b"\x80"):
            raise ValueError(
                "it must be a safetensors file, but it starts like one of torch.save or pickle, which MetaMD never opens "
                "because they can run code. Save with learned.save(path)."
            )
        if length > HEADER_LIMIT:
            raise ValueError(
                f"its header would have {length:,} bytes where at most {HEADER_LIMIT:,} are read, so it is no file of "
                f"MetaMD, or not a safetensors file at all. {AGAIN}"
            )
        if 8 + length > size:
            raise ValueError(f"the file is truncated: its header needs {8 + length:,} bytes, and it has {size:,}. {AGAIN}")
        header = file.read(length)
        if len(header) < length:
            raise ValueError(f"the file was cut while it was read. {AGAIN}")
        shapes, metadata = _parse_header(header)
        accept(metadata)
        if size - 8 - length > DATA_LIMIT:
            raise ValueError(f"its tensors have {size - 8 - length:,} bytes, where at most {DATA_LIMIT:,} are read. {AGAIN}")
        # One read of one open file: what is decoded is what was checked, whatever happens to the path meanwhile.
        data = file.read(size - 8 - length)
    try:  # safetensors refuses sizes and offsets that do not fill the data exactly
        tensors = decode(b"".join((prefix, header, data)))
    except (SafetensorError, OverflowError, RuntimeError) as error:
        raise ValueError(f"safetensors refuses the file ({shown(str(error))}). {AGAIN}") from None
    if {n: list(t.shape) for n, t in tensors.items()} != shapes:
        raise ValueError(f"its header reads differently in different parsers. {AGAIN}")
    return metadata, tensors


def _parse_header(header: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The shapes of the tensors as the header states them, and the metadata."""
    table = strict_json(header, "the safetensors header")
    if not isinstance(table, dict):
        raise ValueError(f"the safetensors header must be a JSON object, got {shown(table)}. {AGAIN}")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"__metadata__ must map texts to texts, got {shown(metadata)}. {AGAIN}")
    types = list(DTYPES.values())
    if len(table) > TENSORS_LIMIT:
        raise ValueError(f"it has {len(table):,} tensors, where at most {TENSORS_LIMIT:,} are read. {AGAIN}")
    for name, entry in table.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"the tensor {shown(name)} must be described by dtype, shape and data_offsets. {AGAIN}")
        if entry["dtype"] not in types:
            raise ValueError(f"the tensor {shown(name)} must be stored as {', '.join(types)}, got {shown(entry['dtype'])}.")
    return {name: entry["shape"] for name, entry in table.items()}, metadata


def pack(tensors: Tensors, metadata: dict[str, str]) -> bytes:
    """The bytes of a safetensors file; equal content gives equal bytes, since safetensors itself shuffles metadata."""
    data = encode(tensors)
    length = int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": metadata, **json.loads(data[8 : 8 + length])}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # keeps the tensors aligned
    if len(header) > HEADER_LIMIT:
        raise ValueError(
            f"the header must fit in {HEADER_LIMIT:,} bytes, and has {len(header):,}. Keep long records beside the file, "
            "not in family= or held_out=."
        )
    return b"".join((len(header).to_bytes(8, "little"), header, memoryview(data)[8 + length :]))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at every moment the path holds the old content or the new one, whole. A link stays a link."""
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a directory. Name a file inside it, such as learned.safetensors.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {str(path.parent)!r} to save into. Create it first.")
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None  # a file that is replaced keeps its mode
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o666 if mode is None else mode)) as file:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), mode)  # what the umask took away
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None:  # it names the temporary file, or none
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise
    if hasattr(os, "O_DIRECTORY"):  # so that the rename survives a power cut; only some systems can open a directory
        handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

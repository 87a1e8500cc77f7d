"""Reading a safetensors file that may be damaged or hostile, and writing one so that a crash leaves the old file."""

import json
import math
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

HEADER_LIMIT = 8 * 2**20
"""The largest safetensors header that is read, in bytes; metadata and our own header are inside it."""

WIDTHS = {"F64": 8, "F32": 4, "BF16": 2}
"""Bytes per number of the types that may be stored. F16 is not one: exp(12) overflows there."""

AGAIN = "The file is damaged or was not written by MetaMD: copy it again or make a new one."


@dataclass(frozen=True)
class Entry:
    """One tensor in the file.

    Args:
        dtype: its type in the words of safetensors.
        shape: its shape.
        begin: where its bytes begin, counted from the end of the header.
        end: where they end.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Container:
    """What a safetensors file holds.

    Args:
        metadata: its free entries, text to text.
        tensors: its tensors by name.
    """

    metadata: dict[str, str]
    tensors: dict[str, Tensor]


def shown(value: object) -> str:
    """An untrusted value for a sentence: its repr, which escapes control characters, cut to a readable length."""
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def strict_json(text: bytes | str, what: str) -> Any:
    """Parse JSON and refuse what parsers disagree on: repeated keys, NaN, half surrogates, very deep nesting.

    Args:
        text: the JSON text.
        what: what the text is, for the sentences.

    Example:
        >>> strict_json('{"a": 1, "a": 2}', "the header")
        Traceback (most recent call last):
        ValueError: the header repeats the key 'a'; every key may appear once.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [k for k, _ in pairs]
            twice = next(k for i, k in enumerate(names) if k in names[:i])
            raise _RefusedError(f"{what} repeats the key {shown(twice)}; every key may appear once.")
        return found

    def constant(name: str) -> Any:
        raise _RefusedError(f"{what} contains {name}, which is no JSON number. Store null instead.")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
        json.dumps(value, ensure_ascii=False).encode()  # half surrogates fail here
    except _RefusedError as refused:
        raise ValueError(str(refused)) from None
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply to be read. {AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{what} must be JSON in UTF-8, but it does not parse ({shown(str(error))}). {AGAIN}") from None
    return value


class _RefusedError(ValueError):
    """A sentence raised inside the JSON parser, told apart from the parser's own errors."""


def read(path: Path) -> Container:
    """Read a file whose every size is checked before it is believed.

    The length of the header is judged first, from the first eight bytes; then the header is parsed, then its offsets
    are held against the size of the file. Only then are the tensors decoded. What fails is a `ValueError`.

    Args:
        path: a regular file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = _header_length(prefix, size)
        header = file.read(length)
        if len(header) < length:
            raise ValueError(f"the file was cut while it was read. {AGAIN}")
        entries, metadata = parse_header(header, size - 8 - length)
        # One read of one open file: what is decoded is what was checked, whatever happens to the path meanwhile.
        data = file.read(size - 8 - length)
    try:
        tensors = decode(b"".join((prefix, header, data)))
    except SafetensorError as error:
        raise ValueError(f"safetensors refuses the file ({shown(str(error))}). {AGAIN}") from None
    if {n: tuple(t.shape) for n, t in tensors.items()} != {n: e.shape for n, e in entries.items()}:
        raise ValueError(f"its header reads differently in different parsers. {AGAIN}")
    return Container(metadata, tensors)


def _header_length(prefix: bytes, size: int) -> int:
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
            f"its header would have {length:,} bytes where at most {HEADER_LIMIT:,} are read, so it is no learned "
            f"optimiser, or not a safetensors file at all. {AGAIN}"
        )
    if 8 + length > size:
        raise ValueError(f"the file is truncated: its header needs {8 + length:,} bytes, and it has {size:,}. {AGAIN}")
    return length


def parse_header(header: bytes, available: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries and the metadata of a safetensors header, held against the bytes that follow it.

    Args:
        header: the JSON text.
        available: how many bytes of data the file has.
    """
    table = strict_json(header, "the safetensors header")
    if not isinstance(table, dict):
        raise ValueError(f"the safetensors header must be a JSON object, got {shown(table)}. {AGAIN}")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"__metadata__ must map texts to texts, got {shown(metadata)}. {AGAIN}")
    entries = {name: _entry(name, value) for name, value in table.items()}
    _check_coverage(entries, available)
    return entries, metadata


def _entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the tensor {shown(name)} must be described by dtype, shape and data_offsets. {AGAIN}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise ValueError(f"the tensor {shown(name)} must be stored as {', '.join(WIDTHS)}, got {shown(dtype)}.")
    if not naturals(shape):
        raise ValueError(f"the shape of {shown(name)} must be a list of numbers >= 0, got {shown(shape)}. {AGAIN}")
    if not naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets of {shown(name)} must be [begin, end], got {shown(offsets)}. {AGAIN}")
    needed = math.prod(shape) * WIDTHS[dtype]  # of Python integers: it cannot overflow
    if needed != offsets[1] - offsets[0]:
        raise ValueError(
            f"the tensor {shown(name)} of shape {shown(shape)} needs {shown(needed)} bytes, but its offsets leave it "
            f"{shown(offsets[1] - offsets[0])}. {AGAIN}"
        )
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def naturals(value: object) -> bool:
    """Whether a parsed value is a short list of integers >= 0 that fit in 63 bits. (True is no integer here.)"""
    return isinstance(value, list) and len(value) <= 64 and all(type(i) is int and 0 <= i < 2**63 for i in value)


def _check_coverage(entries: dict[str, Entry], available: int) -> None:
    """The tensors must lie one after another and fill the data exactly: nothing shared, nothing hidden between."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            kind = "overlaps the one before it" if entry.begin < position else "leaves a gap before it"
            raise ValueError(f"the tensor {shown(name)} {kind}: tensors must lie one after another. {AGAIN}")
        position = entry.end
    if position > available:
        raise ValueError(f"the file is truncated: its tensors need {position:,} bytes, and {available:,} are there. {AGAIN}")
    if position < available:
        raise ValueError(f"{available - position:,} bytes follow the last tensor and belong to none. {AGAIN}")


def read_checked(path: Path) -> Container:
    """Read a file that a user named; whatever is wrong with it is a sentence that begins with its path.

    Args:
        path: what the user named.
    """
    try:
        check_regular(path)
        return read(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(path)!r}. Check the path.") from None
    except OSError as error:
        raise type(error)(f"{str(path)!r} cannot be read: {error.strerror or error}".rstrip(".") + ".") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be loaded: {error}") from None


def check_regular(path: Path) -> None:
    """Refuse what is no file, before it is opened: a pipe would wait for ever.

    Args:
        path: what the user named.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError("it is a directory. Name the .safetensors file inside it.")
    if not stat.S_ISREG(mode):
        raise ValueError("it must be a regular file, and it is a pipe or a device. Copy it to a file first.")


def pack(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The bytes of a safetensors file; equal content gives equal bytes, since safetensors itself shuffles metadata.

    Args:
        tensors: by name.
        metadata: text to text.
    """
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
    """Write a file so that at every moment the path holds the old content or the new one, whole.

    Args:
        path: where to write; a symbolic link keeps pointing where it does.
        data: the content.
    """
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a directory. Name a file inside it, such as learned.safetensors.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {str(path.parent)!r} to save into. Create it first.")
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut; only some systems can open a directory."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

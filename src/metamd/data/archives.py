"""Open compressed files without trusting them: every read has a limit, every member was asked for by name.

Nothing is ever extracted to disk, so that a member's path decides nothing. A path that leaves its folder is refused all
the same, because an official archive has none.
"""

from __future__ import annotations

import bz2
import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path, PurePosixPath

from metamd.data.registry import DataError

MEMBERS = 1000
"""More members than any archive read here holds."""


def decompress(path: Path, limit: int) -> bytes:
    """The bytes inside a `.gz` or `.bz2` file, refused when there are more than `limit`."""
    try:
        with _open(path) as stream:
            content = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete {path.suffix} file ({error}). Delete it and fetch it again.") from error
    if len(content) > limit:
        raise DataError(f"{path} holds more than the {limit} bytes expected of it, so it was not read. Delete it.")
    return content


def _open(path: Path) -> gzip.GzipFile | bz2.BZ2File | BufferedReader:
    if path.suffix == ".gz":
        return gzip.open(path)
    return bz2.open(path) if path.suffix == ".bz2" else path.open("rb")


def tar_members(path: Path, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Named members of a `.tar.gz` file, each of which must have exactly the given size."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for position, member in enumerate(archive):
                _refuse_path(path, member.name)
                if position >= MEMBERS:
                    raise DataError(f"{path} has more than {MEMBERS} members, so it was not read. Delete it.")
                if member.name in sizes:
                    found[member.name] = _tar_member(path, archive, member, sizes[member.name])
                if len(found) == len(sizes):
                    break
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete .tar.gz file ({error}). Delete it and fetch it again.") from error
    _refuse_missing(path, sizes, found)
    return found


def _tar_member(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, size: int) -> bytes:
    stream = archive.extractfile(member) if member.isreg() else None
    if stream is None:
        raise DataError(f"{member.name} in {path} is not an ordinary file, so it was not read. Delete the archive.")
    if member.size != size:
        raise DataError(
            f"{member.name} in {path} must have {size} bytes, got {member.size}. Delete the archive and fetch it again."
        )
    return stream.read(size)


def zip_members(path: Path, limits: Mapping[str, int]) -> dict[str, bytes]:
    """Named members of a zip file, each refused when it holds more bytes than its limit."""
    found: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                _refuse_path(path, name)
            for name in sorted(limits.keys() & set(archive.namelist())):
                # The directory's size can lie, so the read has the limit and not only the declared size.
                with archive.open(name) as stream:
                    found[name] = stream.read(limits[name] + 1)
                if len(found[name]) > limits[name]:
                    raise DataError(f"{name} in {path} holds more than {limits[name]} bytes, so it was not read.")
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, zlib.error) as error:
        raise DataError(f"{path} is not a complete zip file ({error}). Delete it and make it again.") from error
    _refuse_missing(path, limits, found)
    return found


def _refuse_path(path: Path, member: str) -> None:
    if member.startswith(("/", "\\")) or ".." in PurePosixPath(member.replace("\\", "/")).parts or ":" in member:
        raise DataError(f"{path} has a member that leaves its folder, {member!r}, so it was not read. Delete it.")


def _refuse_missing(path: Path, wanted: Mapping[str, int], found: Mapping[str, bytes]) -> None:
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise DataError(f"{path} must hold {', '.join(missing)} and does not. Delete it and make or fetch it again.")

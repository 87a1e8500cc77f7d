"""`metamd data list | fetch | verify | path`: each prints its result, as one JSON object if that was asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from metamd.cli.main import show
from metamd.cli.options import Data, DataFetch, DataList, DataPath, DataVerify
from metamd.data import loading, registry
from metamd.data.raw_files import fetch_files, find_file
from metamd.data.registry import DataError, Dataset, FileSet

SplitRow = dict[str, Any]


def run(options: Data) -> None:
    """Carry out one of the four actions; wrong data end in a sentence and exit code 2."""
    actions: dict[type, Callable[[Any], None]] = {
        DataList: _list_datasets,
        DataFetch: _fetch,
        DataVerify: _verify,
        DataPath: _path,
    }
    actions[type(options.action)](options.action)


def _list_datasets(options: DataList) -> None:
    """Say of every split where it is, how much of it, and whether it is official, partial or rebuilt.

    Counts come from file headers, so this is quick; `verify` reads the bytes.
    """
    rows = [_listed(record, split) for record in registry.datasets().values() for split in record.splits]
    lines = [f"{'dataset':<13}{'split':<6}{'images':>15}  {'form':<9}{'where':<12} {'status':<10}  note"]
    for row in rows:
        shape = "x".join(str(side) for side in row["shape"])
        images = f"{row['count']} of {row['official_count']}"
        place = f"{row['where']:<12} {row['status']:<10}"
        lines.append(f"{row['name']:<13}{row['split']:<6}{images:>15}  {shape:<9}{place}  {row['note']}".rstrip())
    sets = [_listed_set(record) for record in registry.file_sets().values()]
    lines += ["", f"{'files':<13}{'number':>6}{'MB':>7}  {'here':>6}  title"]
    lines += [f"{x['name']:<13}{x['files']:>6}{x['bytes'] / 1e6:>7.1f}  {x['here']:>6}  {x['title']}" for x in sets]
    licences = {row["title"]: row["licence"] for row in [*rows, *sets]}
    lines += ["", "licences:", *(f"  {title}: {licence}" for title, licence in licences.items())]
    show({"datasets": rows, "files": sets}, "\n".join(lines), as_json=options.json)


def _fetch(options: DataFetch) -> None:
    """Download, check, decode and cache a dataset, with a bar on standard error."""
    if options.name in registry.file_sets():
        rows = [_file_row(options.name, path) for path in fetch_files(options.name, force=options.force)]
        show({"fetched": rows}, _lines(rows), as_json=options.json)
        return
    wanted = [options.split] if options.split else list(registry.dataset(options.name).splits)
    paths = loading.fetch(options.name, wanted, force=options.force)
    rows = [_checked(options.name, split, path) for split, path in zip(wanted, paths, strict=True)]
    show({"fetched": rows}, _lines(rows), as_json=options.json)


def _verify(options: DataVerify) -> None:
    """Read every split at hand and compare it with its recorded checksums; raise when one is wrong."""
    names = [options.name] if options.name else [*registry.datasets(), *registry.file_sets()]
    sets = [name for name in names if name in registry.file_sets()]
    names = [name for name in names if name not in sets]
    places = [(name, split, loading.find_split(name, split)) for name in names for split in registry.dataset(name).splits]
    rows = [_checked(name, split, path) for name, split, path in places if path is not None]
    held = [(name, find_file(name, file.name)) for name in sets for file in registry.file_set(name).files]
    rows += [_file_row(name, path) for name, path in held if path is not None]
    show({"verified": rows}, _lines(rows), as_json=options.json)
    if bad := [row for row in rows if not row["ok"]]:
        raise DataError(f"{len(bad)} of {len(rows)} splits are wrong; the first: {bad[0]['note']}")
    if not rows:
        raise DataError(f"There is nothing to verify: nothing of {', '.join([*names, *sets])} is at hand. Fetch one first.")


def _path(options: DataPath) -> None:
    """Print the file of a split that is at hand, or without a name the cache folder."""
    name, split = options.name, options.split
    if name is not None and name in registry.file_sets():
        first, split = find_file(name, registry.file_set(name).files[0].name), "as a set of files"
        found = first.parent if first is not None else None
    else:
        if name is not None:
            registry.split_of(name, split)
        found = loading.cache_folder() if name is None else loading.find_split(name, split)
    if found is None:
        raise DataError(f"{name} {split} is not at hand. Run `metamd data fetch {name}` first.")
    show({"path": str(found)}, str(found), as_json=options.json)


def _listed(record: Dataset, split: str) -> SplitRow:
    known = record.splits[split]
    found = loading.find_split(record.name, split)
    row: SplitRow = {
        "name": record.name,
        "title": record.title,
        "split": split,
        "where": "absent",
        "count": 0,
        "official_count": known.count,
        "status": "absent",
        "note": record.note,
        "shape": list(record.shape),
        "licence": record.licence,
        "download_bytes": record.download_size,
    }
    if found is None:
        return row
    row["where"] = "cache" if found.parent == loading.cache_folder() else "METAMD_DATA"
    try:
        count = len(loading.stored(found, "labels")[0])
    except DataError as error:
        return row | {"status": "wrong", "note": str(error)}
    forms = {form.count: (form.status, form.note) for form in reversed(known.forms)}
    status, note = forms.get(count, ("unrecorded", loading.UNRECORDED))
    if row["where"] == "cache" and count == known.count:
        status, note = "official", ""
    return row | {"count": count, "status": status, "note": note}


def _checked(name: str, split: str, path: Path) -> SplitRow:
    row: SplitRow = {"name": name, "split": split, "path": str(path), "ok": True}
    try:
        _, came = loading.read_split(path, name, split)
    except DataError as error:
        return row | {"ok": False, "count": 0, "status": "wrong", "note": str(error)}
    return row | {"count": came.count, "status": came.status, "note": came.note}


def _listed_set(record: FileSet) -> SplitRow:
    here = sum(find_file(record.name, file.name) is not None for file in record.files)
    about = {key: getattr(record, key) for key in ("name", "title", "licence", "note")}
    return {**about, "files": len(record.files), "bytes": record.size, "here": here}


def _file_row(name: str, path: Path) -> SplitRow:
    from metamd.data.download import mismatch  # imports torch, which listing does without

    why = mismatch(next(file for file in registry.file_set(name).files if file.name == path.name), path)
    row: SplitRow = {"name": name, "split": "", "path": str(path), "ok": why is None, "count": 1}
    return row | {"status": "wrong" if why else "official", "note": why or ""}


def _lines(rows: list[SplitRow]) -> str:
    notes = [f"  ({row['note']})" if row["note"] else "" for row in rows]
    starts = [f"{row['name']:<13}{row['split']:<6}{row['count']:>6}  {row['status']:<10}  {row['path']}" for row in rows]
    return "\n".join(start + note for start, note in zip(starts, notes, strict=True))

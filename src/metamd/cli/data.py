"""`metamd data list | fetch | verify | path`: each prints its result, as one JSON object if that was asked."""

from pathlib import Path
from typing import Any

from metamd.cli.main import show
from metamd.cli.options import Data, DataFetch, DataList, DataVerify
from metamd.data import loading, registry
from metamd.data.registry import DataError, Dataset

Row = dict[str, Any]


def run(options: Data) -> None:
    """Carry out one of the four actions; wrong data end in a sentence and exit code 2."""
    action = options.action
    if isinstance(action, DataList):
        list_datasets(json=action.json)
    elif isinstance(action, DataFetch):
        fetch(action.name, split=action.split, force=action.force, json=action.json)
    elif isinstance(action, DataVerify):
        verify(action.name, json=action.json)
    else:
        path(action.name, split=action.split, json=action.json)


def list_datasets(*, json: bool = False) -> list[Row]:
    """Say of every split where it is, how much of it, and whether it is official, partial or rebuilt.

    Counts come from file headers, so this is quick; `verify` reads the bytes.
    """
    rows = [_listed(record, split) for record in registry.datasets().values() for split in record.splits]
    show({"datasets": rows}, "\n".join(_list_text(rows)), as_json=json)
    return rows


def fetch(name: str, *, split: str | None = None, force: bool = False, json: bool = False) -> list[Row]:
    """Download, check, decode and cache a dataset, with a bar on standard error."""
    wanted = [split] if split else list(registry.dataset(name).splits)
    paths = loading.fetch(name, wanted, force=force)
    rows = [_checked(name, key, path) for key, path in zip(wanted, paths, strict=True)]
    show({"fetched": rows}, "\n".join(map(_line, rows)), as_json=json)
    return rows


def verify(name: str | None = None, *, json: bool = False) -> list[Row]:
    """Read every split at hand and compare it with its recorded checksums; raise when one is wrong."""
    names = [name] if name else list(registry.datasets())
    rows = []
    for key in names:
        for split in registry.dataset(key).splits:
            path = loading.find(key, split)
            if path is not None:
                rows.append(_checked(key, split, path))
    bad = [row for row in rows if not row["ok"]]
    show({"verified": rows}, "\n".join(map(_line, rows)), as_json=json)
    if bad:
        raise DataError(f"{len(bad)} of {len(rows)} splits are wrong; the first: {bad[0]['note']}")
    if not rows:
        raise DataError(f"There is nothing to verify: no split of {', '.join(names)} is at hand. Fetch one first.")
    return rows


def path(name: str | None = None, *, split: str = "train", json: bool = False) -> str:
    """Print the file of a split that is at hand, or without a name the cache folder."""
    if name is None:
        found = loading.cache_folder()
    else:
        registry.split_of(name, split)
        at_hand = loading.find(name, split)
        if at_hand is None:
            raise DataError(f"{name} {split} is not at hand. Run `metamd data fetch {name}` first.")
        found = at_hand
    show({"path": str(found)}, str(found), as_json=json)
    return str(found)


def _listed(record: Dataset, split: str) -> Row:
    known = record.splits[split]
    found = loading.find(record.name, split)
    row: Row = {
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
    forms = [form for form in known.forms if form.count == count]
    row["count"] = count
    if row["where"] == "cache" and count == known.count:
        row |= {"status": "official", "note": ""}
    elif forms:
        row |= {"status": forms[0].status, "note": forms[0].note}
    else:
        row |= {"status": "unrecorded", "note": loading.UNRECORDED}
    return row


def _checked(name: str, split: str, path: Path) -> Row:
    row: Row = {"name": name, "split": split, "path": str(path), "ok": True}
    try:
        _, came = loading.read(path, name, split)
    except DataError as error:
        return row | {"ok": False, "count": 0, "status": "wrong", "note": str(error)}
    return row | {"count": came.count, "status": came.status, "note": came.note}


def _line(row: Row) -> str:
    note = f"  ({row['note']})" if row["note"] else ""
    return f"{row['name']:<13}{row['split']:<6}{row['count']:>6}  {row['status']:<10}  {row['path']}{note}"


def _list_text(rows: list[Row]) -> list[str]:
    lines = [f"{'dataset':<13}{'split':<6}{'images':>15}  {'form':<9}{'where':<12} {'status':<10}  note"]
    for row in rows:
        shape = "x".join(str(side) for side in row["shape"])
        images = f"{row['count']} of {row['official_count']}"
        place = f"{row['where']:<12} {row['status']:<10}"
        lines.append(f"{row['name']:<13}{row['split']:<6}{images:>15}  {shape:<9}{place}  {row['note']}".rstrip())
    licences = {row["title"]: row["licence"] for row in rows}
    return [*lines, "", "licences:", *(f"  {title}: {licence}" for title, licence in licences.items())]

"""`metamd report`: the page of a comparison from its records; nothing is trained."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metamd.cli.options import Report
from metamd.comparison.comparison import Comparison, Target
from metamd.comparison.entrants import PROTOCOLS
from metamd.comparison.page import as_markdown, as_text, write_page
from metamd.comparison.sections import (
    CONFIGURATION,
    Section,
    certificate_sections,
    configuration,
    kept_figures,
    not_held_out,
    sections,
    training_costs,
)
from metamd.experiments import find
from metamd.files.container import write_atomically
from metamd.files.store import Records, Result, read_cells, read_json, records_in
from metamd.files.versions import joined


def run(options: Report) -> int:
    """Carry out the command."""
    out = options.out or options.folder
    if _has_tables_alone(options.folder):
        if options.target is not None or options.share is not None:
            raise ValueError(f"{options.folder} compares in a way of its own. Leave out --target and --share.")
        parts = write_tables(options.folder, out)
        print(json.dumps({"page": str(out / "report.html")}) if options.json else _shown(parts))
        return 0
    comparison, parts = write_report(options.folder, out, options.target, options.share)
    if options.json:
        print(json.dumps(summary(comparison) | {"page": str(out / "report.html")}))
    else:
        print(_shown(parts))
        print(f"\nThe report is in {out / 'report.html'}.")
    return 0


def _shown(parts: Sequence[Section]) -> str:
    return as_text([p for p in parts if p.title != CONFIGURATION])


def write_report(
    folder: Path,
    out: Path,
    target: str | None = None,
    share: float | None = None,
    places: Sequence[Path] | None = None,
) -> tuple[Comparison, list[Section]]:
    """Write `report.html`, `report.md` and the figures that are kept beside them; what they show is given back."""
    comparison, versions = read(folder, places)
    if target is not None or share is not None:
        aim = comparison.aim or Target(comparison.labels[-1])
        comparison = comparison.aiming(target or aim.baseline, aim.share if share is None else share)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as figures:
        parts = sections(comparison, Path(figures), versions=versions)
        kept = folder / "certificate.json"
        parts += certificate_sections(read_json(kept) if kept.is_file() else None)
        _write(out, _title(comparison), parts, folder)
        for name in kept_figures(comparison):
            write_atomically(out / name, (Path(figures) / name).read_bytes())
    return comparison, parts


def write_tables(folder: Path, out: Path) -> list[Section]:
    """The same pages of an experiment that compares in a way of its own: its tables, figures, costs and configuration."""
    parts = tables(read_json(folder / "summary.json"))
    figures = [(path, path.stem.replace("-", " ").capitalize()) for path in sorted(folder.glob("*.png"))]
    parts += [Section("Figures", figures=figures)] if figures else []
    with records_in(folder) as records:
        costs = training_costs(read_cells(records))
    parts += [] if costs is None else [costs]
    parts += [configuration(Records.settings(folder), {})] if (folder / "run.json").is_file() else []
    out.mkdir(parents=True, exist_ok=True)
    _write(out, folder.resolve().name.capitalize(), parts, folder)
    return parts


def _write(out: Path, title: str, parts: list[Section], folder: Path) -> None:
    command = f"metamd report {folder}"
    write_page(out / "report.html", title, parts, command=command)
    write_atomically(out / "report.md", as_markdown(parts, title=title, command=command).encode())


def _has_tables_alone(folder: Path) -> bool:
    with records_in(folder) as records:
        alone = not any((*records.glob("comparison.json"), *records.glob("*/comparison.json")))
    return alone and (folder / "summary.json").is_file()


def tables(result: Result) -> list[Section]:
    """The tables of an experiment from its summary, below the protocol by which settings were chosen."""
    name, protocol = str(result.get("experiment")), result.get("protocol")
    try:
        experiment = find(name, str(result.get("variant", "")))
    except ValueError as error:
        raise ValueError(f"the summary does not say whose it is: {error} Run the experiment again.") from None
    try:
        parts: list[Section] = experiment.sections(result["rows"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the summary does not hold the rows of {name}: {error!r}. Run the experiment again.") from None
    if protocol not in PROTOCOLS:
        return parts
    rule = f"Protocol: {protocol}. {PROTOCOLS[protocol]} {result.get('screening', '')}".rstrip()
    return [Section(texts=[rule]), *parts]


def read(folder: Path, places: Sequence[Path] | None = None) -> tuple[Comparison, dict[str, Any]]:
    """The comparison in a folder, or those in its folders as one, and all versions that they were made with."""
    with records_in(folder) as records:
        if places is None:
            inside = sorted(p.parent for p in records.glob("*/comparison.json"))
            places = [records] if (records / "comparison.json").is_file() else inside
        if not places:
            raise FileNotFoundError(
                f"{folder} holds no comparison. Make one with `metamd compare FILE FAMILY --out {folder}`."
            )
        comparison = Comparison.join(Comparison.read(p) for p in places)
        found = {p.name: read_json(p / "comparison.json").get("versions") for p in places}
    return comparison, joined({name: v if isinstance(v, dict) else {} for name, v in found.items()})


def summary(comparison: Comparison) -> dict[str, Any]:
    """The tables as one JSON object, None for what is infinite or unknown."""
    tables = {
        metric: [{k: _finite(v) for k, v in row.items()} for row in comparison.table(metric)]
        for metric in comparison.metrics
    }
    areas = {label: profile.area for label, profile in comparison.profiles().items()}
    targets = {f.group: _finite(comparison.target(f)) for f in comparison.folds}
    pays = {
        label: {
            "tuned each time": _finite(comparison.tasks_to_pay(label, every_task=True)),
            "tuned once": _finite(comparison.tasks_to_pay(label, every_task=False)),
        }
        for label in comparison.labels[1:]
    }
    trained = {label: comparison.trained_on(label) for label in comparison.labels if comparison.trained_on(label)}
    return {
        "protocol": comparison.protocol,
        "held_out": {f.group: not f.trained for f in comparison.folds},
        "trained_on": trained,
        "notes": [not_held_out(comparison, label) for label in trained],
        "targets": targets,
        "tables": tables,
        "areas": areas,
        "tasks_to_pay": pays,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _title(comparison: Comparison) -> str:
    family = comparison.settings.get("family", {})
    name = family.get("family", "") if isinstance(family, dict) else ""
    return f"{comparison.labels[0]} against {len(comparison.labels) - 1} rivals" + (f" on {name}" if name else "")

"""`metamd report`, the page of a comparison from its records, and `metamd reproduce`, which computes the records before."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metamd.cli.main import show
from metamd.cli.options import Report, Reproduce
from metamd.comparison.comparison import Comparison, Target
from metamd.comparison.entrants import PROTOCOLS
from metamd.comparison.page import as_markdown, as_text, write_page
from metamd.comparison.sections import (
    CURVES,
    OPENING,
    Section,
    certificate_sections,
    configuration,
    not_held_out,
    sections,
    training_costs,
)
from metamd.experiments import EXPERIMENTS, find, folder_name
from metamd.experiments.experiment import Experiment, screened
from metamd.experiments.synthetic import Synthetic
from metamd.files.container import write_atomically
from metamd.files.store import (
    ARCHIVE,
    Records,
    Result,
    archive,
    as_json,
    read_cells,
    read_json,
    records_in,
    unarchive,
    write_json,
)
from metamd.files.versions import joined
from metamd.inner.executor import Executor


def run(options: Report) -> None:
    """Carry out the command."""
    out = options.out or options.folder
    with records_in(options.folder) as records:
        compared = any(records.glob("comparison.json")) or any(records.glob("*/comparison.json"))
    if compared or not (options.folder / "summary.json").is_file():
        comparison, parts = write_report(options.folder, out, options.target, options.share)
        found = summary(comparison)
    elif options.target is not None or options.share is not None:
        raise ValueError(f"{options.folder} compares in a way of its own. Leave out --target and --share.")
    else:
        found, parts = {}, write_tables(options.folder, out)
    page = str(out / "report.html")
    more = "; ".join(dict.fromkeys(part.title for part in parts if part.folded))
    text = f"{as_text(parts)}\n\nThe report is in {page}." + (f" It also has: {more}." if more else "")
    show(found | {"page": page}, text, as_json=options.json)


def run_reproduce(options: Reproduce) -> None:
    """Carry out the command."""
    protocol = f"-{options.protocol}" if options.protocol else ""
    folder = options.out or Path("runs") / f"{folder_name(options.name, options.variant)}-{options.scale}{protocol}"
    if options.name == "all":
        found = _all(options, folder)
        text = "\n".join(f"## {name}\n\n{as_markdown(tables(result))}" for name, result in found.items())
    else:
        found = reproduce(find(options.name, options.variant), options, folder)
        text = as_markdown(tables(found))
    show(found, text, as_json=options.json)
    print(f"Records, tables and figures are in {folder}.", file=sys.stderr)


def reproduce(experiment: Experiment | Synthetic, options: Reproduce, folder: Path) -> Result:
    """Run one experiment and write its tables, figures and page; then its records become an archive."""
    if options.scale not in experiment.scales:
        raise ValueError(f"{experiment.name} has the scales {', '.join(experiment.scales)}, got {options.scale!r}.")
    if options.only and isinstance(experiment, Synthetic):
        raise ValueError(f"{experiment.name} holds out no domains. Leave out --only.")
    if options.protocol and isinstance(experiment, Synthetic):
        raise ValueError(f"{experiment.name} has a protocol of its own. Leave out --protocol.")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / ARCHIVE).is_file():
        unarchive(folder)
    executor = Executor(options.workers, options.ray)
    if options.protocol and isinstance(experiment, Experiment):
        scales = {name: replace(size, protocol=options.protocol) for name, size in experiment.scales.items()}
        experiment = replace(experiment, scales=scales)
    result = experiment.run(options.scale, folder, options.seed, executor, options.only)
    write_json(folder / "summary.json", result)
    (folder / "tables.md").write_text(as_markdown(tables(result)))
    if isinstance(experiment, Experiment):
        asked = experiment.places(experiment.scales[options.scale], folder, options.only)
        write_report(folder, folder, places=asked or None)
    else:
        write_tables(folder, folder)
    archive(folder, screened)
    return result


def _all(options: Reproduce, folder: Path) -> dict[str, Result]:
    """Every experiment and variant that has the scale, one after another, each in a folder of its own."""
    found = {}
    for number, (pair, experiment) in enumerate(EXPERIMENTS.items(), start=1):
        title = folder_name(*pair)
        place = f"{number} of {len(EXPERIMENTS)}: {title}"
        if options.scale not in experiment.scales:
            print(f"{place} has no scale {options.scale}, and is left out.", file=sys.stderr)
            continue
        print(f"{place}, in {folder / title}", file=sys.stderr)
        found[title] = reproduce(experiment, options, folder / title)
    return found


def write_report(
    folder: Path, out: Path, target: str | None = None, share: float | None = None, places: Sequence[Path] | None = None
) -> tuple[Comparison, list[Section]]:
    """Write `report.html`, `report.md` and the figures that are kept beside them; what they show is given back."""
    comparison, versions = read_comparison(folder, places)
    if target is not None or share is not None:
        aim = comparison.aim or Target(comparison.labels[-1])
        comparison = comparison.aiming(target or aim.baseline, aim.share if share is None else share)
    with TemporaryDirectory() as figures:
        parts = sections(comparison, Path(figures), versions=versions)
        kept = folder / "certificate.json"
        parts += certificate_sections(read_json(kept) if kept.is_file() else None, Path(figures))
        family = comparison.settings.get("family", {})
        name = family.get("family", "") if isinstance(family, dict) else ""
        title = f"{comparison.labels[0]} against {len(comparison.labels) - 1} rivals" + (f" on {name}" if name else "")
        _write_report(out, title, parts, folder)
        for path in (path for part in parts for path, _ in part.figures if path.name not in (OPENING, CURVES)):
            write_atomically(out / path.name, path.read_bytes())
    return comparison, parts


def write_tables(folder: Path, out: Path) -> list[Section]:
    """The same pages of an experiment that compares in a way of its own: a figure and its first table are not folded."""
    found = tables(read_json(folder / "summary.json"))
    first = next((i for i, part in enumerate(found) if part.rows), 0) + 1
    figures = [(path, path.stem.replace("-", " ").capitalize()) for path in sorted(folder.glob("*.png"))]
    parts = [Section(figures=figures[:1])] if figures else []
    parts += [*found[:first], *(replace(part, folded=True, title=part.title or "More") for part in found[first:])]
    parts += [Section("Figures", figures=figures[1:], folded=True)] if figures[1:] else []
    with records_in(folder) as records:
        costs = training_costs(read_cells(records))
    parts += [] if costs is None else [replace(costs, folded=True)]
    run = [configuration(Records.settings(folder), {})] if (folder / "run.json").is_file() else []
    parts += [replace(part, folded=True) for part in run]
    _write_report(out, folder.resolve().name.capitalize(), parts, folder)
    return parts


def _write_report(out: Path, title: str, parts: list[Section], folder: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    command = f"metamd report {folder}"
    write_page(out / "report.html", title, parts, command=command)
    write_atomically(out / "report.md", as_markdown(parts, title=title, command=command).encode())


def tables(result: Result) -> list[Section]:
    """The tables of an experiment from its summary, below the protocol by which settings were chosen."""
    name, protocol = str(result.get("experiment")), result.get("protocol")
    try:
        experiment = find(name, str(result.get("variant", "")))
    except ValueError as error:
        raise ValueError(f"the summary does not say whose it is: {error} Run the experiment again.") from None
    try:
        parts = experiment.sections(result["rows"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the summary does not hold the rows of {name}: {error!r}. Run the experiment again.") from None
    if protocol not in PROTOCOLS:
        return parts
    rule = f"Protocol: {protocol}. {PROTOCOLS[protocol]} {result.get('screening', '')}".rstrip()
    return [Section(texts=[rule]), *parts]


def read_comparison(folder: Path, places: Sequence[Path] | None = None) -> tuple[Comparison, dict[str, Any]]:
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
    ways = {"tuned each time": True, "tuned once": False}
    pays = {
        label: {way: comparison.tasks_to_pay(label, every_task=each) for way, each in ways.items()}
        for label in comparison.labels[1:]
    }
    trained = {label: comparison.trained_on(label) for label in comparison.labels if comparison.trained_on(label)}
    found = {
        "protocol": comparison.protocol,
        "held_out": {f.group: not f.trained for f in comparison.folds},
        "trained_on": trained,
        "notes": not_held_out(comparison),
        "targets": {f.group: comparison.target(f) for f in comparison.folds},
        "tables": {metric: comparison.table(metric) for metric in comparison.metrics},
        "areas": {label: profile.area for label, profile in comparison.profiles().items()},
        "tasks_to_pay": pays,
    }
    return dict(as_json(found))

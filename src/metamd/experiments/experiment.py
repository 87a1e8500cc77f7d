"""Learn on all domains of a family but one, compare on that one, each in turn: what the image experiments share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from metamd.comparison.compare import compare
from metamd.comparison.comparison import Comparison, Target
from metamd.comparison.entrants import Protocol, entrants, labels, unscheduled
from metamd.comparison.figures import learning_curves
from metamd.comparison.pace import last_tenths, pace, pace_section, unlearned_section
from metamd.comparison.parallel import Cell, fill
from metamd.comparison.sections import Section, formatted
from metamd.comparison.tuning import SEARCHES
from metamd.experiments.declare import (
    Entry,
    Family,
    Geometry,
    Scale,
    alone,
    bring,
    kept_start,
    learn,
    learn_away,
    learned_file,
    settings_of,
)
from metamd.experiments.recorded import failures, recorded, standing, unlearned
from metamd.files.learned import LearnedStart, load
from metamd.files.store import Records, Result
from metamd.optimiser.optimiser import takes_polar_steps
from metamd.rivals import Contender, Learner, Rival, known_rival, learned_rival
from metamd.tasks.base import TaskFamily, derive_seed
from metamd.tasks.vision.families import ImageFamily
from metamd.tasks.wrapped import SharedStart

__all__ = ["MODERN", "Entry", "Experiment", "Geometry", "Scale", "sections"]

PAPERS = ("sgd", "sgdm", "nesterov", "rmsprop", "adam", "adamw")
"""Rivals that the paper has, and their nearest relatives."""

MODERN = ("sgdm", "rmsprop", "adam", "adamw", "muon", "soap", "schedule-free", "prodigy")
"""Some of them, and what has come since."""

Sides = Mapping[str, TaskFamily]


@dataclass(frozen=True)
class Experiment:
    """A leave-one-out experiment, or another in which geometries are learned and then compared on held-out tasks.

    Args:
        name: of the experiment.
        family: with a domain held out, at a scale.
        geometries: what is learned, by name; the first entry of the first one is what everything is compared with.
        scales: by name.
        published: the paper's test accuracies in per cent, by optimiser and domain.
        target: label of the rival that sets the target.
        share: of the run, after which the loss of the best rival is what ours is to reach sooner.
        sides: what is compared on, by name, if it is not the held-out side of the family alone.
        own_tasks: whether every side draws tasks of its own, as repetitions on one domain must; else the draw is the same.
        start: finds where the tasks of a family with a shared start begin instead; kept beside what is learned.
        draw: the figure, from the comparison and the labels of ours to show, into a folder.
    """

    name: str
    family: Callable[[Scale, str], Family]
    geometries: Mapping[str, Geometry]
    scales: Mapping[str, Scale]
    published: Mapping[str, Mapping[str, float]]
    target: str = "Adam, linear decay"
    share: float = 1.0
    sides: Callable[[Scale, str, Family], Sides] | None = None
    own_tasks: bool = False
    start: Callable[[Scale, Family], LearnedStart] | None = None
    draw: Callable[[Comparison, Sequence[str], Path], None] = learning_curves

    def run(
        self, scale: str, folder: Path, seed: int, workers: int = 1, ray: str | None = None, only: Sequence[str] = ()
    ) -> Result:
        """Learn, compare, tabulate and draw; what is in the folder already is kept.

        Args:
            scale: a name in `scales`.
            folder: for records, learned files and the learning curves.
            seed: of everything random.
            workers: processes.
            ray: address of a Ray cluster to learn and to train on.
            only: domains of the scale to hold out now; all if not given.
        """
        found, failed = self.compared(scale, folder, seed, workers, ray, only)
        joined = Comparison.join(found)
        self.draw(joined, [next(iter(g.entries)) for g in self.geometries.values()], folder)
        size, rows = self.scales[scale], self.rows(joined)
        rows[0]["pace"] = self._paces(joined, _opponents(joined, size))
        rows[0] |= {"share": self.share} | ({"failed": failed} if failed else {})
        about: Result = {"experiment": self.name, "scale": scale, "seed": seed, "protocol": size.protocol}
        about |= {"screening": joined.screening} if joined.screening else {}
        return about | {"last_tenth": last_tenths(joined), "rows": rows}

    def compared(
        self, scale: str, folder: Path, seed: int, workers: int = 1, ray: str | None = None, only: Sequence[str] = ()
    ) -> tuple[list[Comparison], dict[str, str]]:
        """Learn and compare: a comparison for every side, and what could not be learned on some domain, and why.

        A domain whose comparison is there in full is read: what was learned for it need not be. What could not be learned
        has runs that count as failed.

        Args:
            scale: a name in `scales`.
            folder: for records and learned files.
            seed: of everything random.
            workers: processes.
            ray: address of a Ray cluster to learn and to train on.
            only: domains of the scale to hold out now; all if not given.
        """
        size = self.scales[scale]
        settings = {"experiment": self.name, "scale": scale, "seed": seed, **settings_of(size)}
        if foreign := [d for d in only if d not in size.domains]:
            raise ValueError(f"{self.name} holds out {', '.join(size.domains)} at scale {scale}, but not {foreign[0]!r}.")
        size = replace(size, domains=tuple(d for d in size.domains if d in only)) if only else size
        records = Records(folder, settings)
        known = {cell: records.cell(cell, dict) for cell in self._cells(size) if records.has(cell)}
        kept = {d: read for d in size.domains if (read := self._read(size, d, folder, known))}
        families = {domain: self._begun(size, domain, folder) for domain in size.domains if domain not in kept}
        before = {domain: self._before(size, domain, folder) for domain in families}
        stands = {domain: self._standing(size, domain, known, found) for domain, found in before.items()}
        self._forget(records, stands, folder)
        lessons = self._lessons(size, families, folder, seed, stands, away=ray is not None)
        title = f"{self.name}: learning"
        taught = known | (fill(records, lessons, title=title, workers=workers, ray=ray) if families else {})
        found = []
        for domain in size.domains:
            if domain in kept:
                found += kept[domain]
                continue
            for name, side in self.held_out_sides(size, domain, families[domain]).items():
                here = _place(folder, name)
                protocol = Protocol(
                    size.protocol,
                    seeds=size.seeds,
                    steps=side.steps,
                    seed=seed,
                    measuring=size.measuring,
                    aim=Target(self.target),
                    screen=size.screen,
                    budget=size.budget,
                    schedules=size.schedules,
                    search=SEARCHES[size.search],
                )
                ours = self._ours(folder, domain, side, taught, dict.fromkeys(stands[domain], before[domain].get(name)))
                rivals = list(self._rivals(size, families[domain], domain, folder, seed))
                trials = Records(here / "tuning", settings) if size.protocol == "paper" else None
                everybody = entrants(dict(ours), rivals, side, protocol, records=trials, workers=workers, ray=ray)
                drawn = derive_seed(seed, name) if self.own_tasks else seed
                found.append(compare(everybody, side, replace(protocol, seed=drawn), folder=here, workers=workers, ray=ray))
        return found, failures(self.geometries, taught, size.domains)

    def places(self, scale: str, folder: Path, only: Sequence[str]) -> list[Path]:
        """Where the comparisons of some domains are kept.

        Args:
            scale: a name in `scales`.
            folder: of the experiment.
            only: the domains.
        """
        return [place for domain in only for place in self._places(self.scales[scale], domain, folder).values()]

    def _places(self, size: Scale, domain: str, folder: Path) -> dict[str, Path]:
        names = [domain] if self.sides is None else list(self.sides(size, domain, self.family(size, domain)))
        return {name: _place(folder, name) for name in names}

    def held_out_sides(self, size: Scale, domain: str, family: Family) -> Sides:
        """What is compared on after learning with a domain held out, by name.

        Args:
            size: the scale.
            domain: that was held out.
            family: its training side.
        """
        if self.sides is not None:
            return self.sides(size, domain, family)
        if size.test_steps is not None and isinstance(family, ImageFamily):
            return {domain: family.held_out(steps=size.test_steps)}
        return {domain: family.held_out()}

    def _paces(self, joined: Comparison, opponents: Mapping[str, list[str]]) -> dict[str, list[Result]]:
        """Of the first of ours, then of those that find directions less often, which seconds are for."""
        found = {title: pace(joined, who, self.share) for title, who in opponents.items()}
        entries = [pair for g in self.geometries.values() for pair in g.entries.items()]
        for label in (label for label, entry in entries if entry.refresh is not None):
            found |= {f"{title}, by {label}": pace(joined, who, self.share, label) for title, who in opponents.items()}
        return found

    def _cells(self, size: Scale) -> list[str]:
        return [f"learn-{domain}-{name}" for domain in size.domains for name in self.geometries]

    def _read(self, size: Scale, domain: str, folder: Path, known: Mapping[str, Result]) -> list[Comparison]:
        """The comparisons of a domain, if everybody whom the scale asks for is in them with all settings and seeds."""
        places = self._places(size, domain, folder).values()
        taught = all(f"learn-{domain}-{name}" in known for name in self.geometries)
        if not (taught and all((place / "comparison.json").exists() for place in places)):
            return []
        ours = [label for g in self.geometries.values() for label in g.entries]
        wanted = labels(ours, [known_rival(r) for r in size.rivals], size.schedules)
        tuned = wanted[len(ours) : -len(size.rivals)]
        budget = 1 if size.protocol == "paper" else size.budget
        found = [Comparison.read(place) for place in places]
        for c in found:
            if c.labels != wanted or any(f.tasks(ours[0]) != size.seeds for f in c.folds):
                return []
            if any(len(f.entrants[label]) != budget for f in c.folds for label in tuned):
                return []
        return found

    def _rivals(self, size: Scale, family: Family, domain: str, folder: Path, seed: int) -> Iterator[Rival]:
        """Those of the scale; some are learned first, on the training side, and kept beside what ours learned."""
        for name in size.rivals:
            known = known_rival(name)
            if isinstance(known, Learner):
                yield known.rival(family, derive_seed(seed, "learning", domain), learned_file(folder, domain, name))
            else:
                yield known

    def _begun(self, size: Scale, domain: str, folder: Path) -> Family:
        """The family with a domain held out, from the learned start if there is to be one."""
        family = self.family(size, domain)
        if self.start is None:
            return family
        found = kept_start(learned_file(folder, domain, "start"), partial(self.start, size, family))
        return SharedStart(family.family if isinstance(family, SharedStart) else family, found)

    def _before(self, size: Scale, domain: str, folder: Path) -> dict[str, Comparison]:
        """The comparisons of a domain that are there, by side, of whom others may have been asked for since."""
        places = self._places(size, domain, folder)
        there = size.protocol == "handicap" and all((place / "comparison.json").exists() for place in places.values())
        return {name: Comparison.read(place) for name, place in places.items()} if there else {}

    def _standing(self, size: Scale, domain: str, known: Mapping[str, Result], before: Mapping[str, Comparison]) -> set[str]:
        """Geometries that need not be learned again for a domain: all their runs are there."""
        taught = {name: known[cell] for name in self.geometries if (cell := f"learn-{domain}-{name}") in known}
        return standing(self.geometries, taught, before.values(), size.seeds)

    def _lessons(
        self,
        size: Scale,
        families: Mapping[str, Family],
        folder: Path,
        seed: int,
        stands: Mapping[str, set[str]],
        away: bool = False,
    ) -> Iterator[Cell]:
        """What is to be learned; away, on a cluster that shares no folder, a lesson that is lost begins again."""
        (folder / "learned").mkdir(exist_ok=True)
        for domain, family in families.items():
            for name, geometry in self.geometries.items():
                if name in stands[domain]:
                    continue
                path = learned_file(folder, domain, name)
                drawn = domain if geometry.same_tasks else path.stem
                cell = f"learn-{domain}-{name}"
                if away:
                    yield Cell(cell, partial(learn_away, size, family, geometry, seed, drawn), partial(bring, path))
                else:
                    yield Cell(cell, partial(learn, size, family, geometry, path, seed, drawn))

    def _forget(self, records: Records, stands: Mapping[str, set[str]], folder: Path) -> None:
        """What was learned into a file that is gone is learned again, unless it stands; what could not be learned is not."""
        for domain, stand in stands.items():
            for name in self.geometries.keys() - stand:
                cell = f"learn-{domain}-{name}"
                gone = not learned_file(folder, domain, name).exists()
                if gone and records.has(cell) and "failed" not in records.cell(cell, dict):
                    records.forget(cell)

    def _ours(
        self,
        folder: Path,
        domain: str,
        side: TaskFamily,
        taught: Mapping[str, Result],
        before: Mapping[str, Comparison | None],
    ) -> Iterator[tuple[str, Contender]]:
        shapes = {n: tuple(x.shape) for n, x in side.example().items()}
        for name, geometry in self.geometries.items():
            for label, entry in geometry.entries.items():
                if (there := before.get(name)) is not None:
                    yield label, recorded(there, label)
                    continue
                if reason := taught[f"learn-{domain}-{name}"].get("failed"):
                    yield label, unlearned(label, f"metamd-{name}", reason)
                    continue
                learned, used = load(learned_file(folder, domain, name)), name
                if entry.instead is not None and learned.header.model != shapes:
                    learned, used = load(learned_file(folder, domain, entry.instead)), entry.instead
                if entry.piece is not None:
                    learned = alone(learned, entry.piece)
                entered = learned_rival(
                    learned,
                    name=f"metamd-{used}",
                    title=label,
                    usage=entry.usage,
                    exact=entry.exact,
                    averaging=entry.averaging,
                    refresh=entry.refresh if takes_polar_steps(learned) else None,
                )
                yield label, entered.untuned()

    def rows(self, comparison: Comparison) -> list[Result]:
        """One row for each optimiser: its test accuracy on every domain and overall, the paper's beside it, and its speed.

        Args:
            comparison: over all domains.
        """
        rows = []
        per_metric = {m: {r["label"]: r for r in comparison.table(m)} for m in comparison.metrics}
        areas = {label: p.area for label, p in comparison.profiles().items()}
        for label in comparison.labels:
            accuracies = {}
            for fold, candidate in zip(comparison.folds, comparison.chosen(label, "test_error"), strict=True):
                values = [100 * o.accuracy("test") for o in candidate.outcomes]
                accuracies[fold.group] = sum(values) / len(values)
            bare = unscheduled(label)
            published = self.published.get(label if bare in comparison.labels else bare, {})
            row: Result = {"label": label, "accuracy": accuracies, "published": dict(published)}
            row["learning"] = {"gradients": comparison.learning_gradients(label), "seconds": _seconds(comparison, label)}
            for metric, table in per_metric.items():
                kept = {k: v for k, v in table[label].items() if k != "label"}
                row[metric] = {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in kept.items()}
            rows.append(row | {"area": areas[label]})
        return rows


def sections(rows: list[Result]) -> list[Section]:
    """The tables of the results page."""
    domains = list(rows[0]["accuracy"])
    accuracies, standing = [], []
    for row in rows:
        values = [row["accuracy"][d] for d in domains]
        accuracies.append([row["label"], *(f"{x:.2f}" for x in (*values, sum(values) / len(values)))])
        if row["published"]:
            paper = [row["published"].get(d) for d in domains]
            mean = None if None in paper else sum(x for x in paper if x is not None) / len(paper)
            accuracies.append([f"{row['label']}, in the paper", *(formatted(x, ".2f") for x in (*paper, mean))])
        steps = row["steps_to_target"]
        ratio = steps.get("ratio")
        losses = [formatted(row[m]["value"], missing="diverged") for m in ("mean_loss", "final_loss")]
        fields = [row["label"], *losses, formatted(steps["value"], missing="never"), f"{steps['arrived']:.0%}"]
        against = "" if ratio is None else f"ours takes {ratio:.2f} x, {steps['verdict']}"
        standing.append([*fields, against, f"{row['area']:.3f}"])
    columns = ["", "mean loss", "final loss", "steps to target", "arrived", "of ours", "area"]
    return [
        Section(columns=["test accuracy, %", *domains, "mean"], rows=accuracies),
        Section(columns=columns, rows=standing),
        *(pace_section(title, found, rows[0]["share"]) for title, found in rows[0].get("pace", {}).items()),
        *unlearned_section(rows),
    ]


def _opponents(comparison: Comparison, size: Scale) -> dict[str, list[str]]:
    """The labels of tuned rivals: those that the paper compares with, and all where there are others."""
    titles = {name: known_rival(name).title for name in size.rivals}
    tuned = {name: [label for label in comparison.labels if unscheduled(label) == title] for name, title in titles.items()}
    everybody = [label for members in tuned.values() for label in members]
    papers = [label for name in PAPERS if name in tuned for label in tuned[name]]
    groups = {"the best of the paper's rivals": papers} if papers else {}
    return groups | ({"the best of all": everybody} if set(everybody) != set(papers) else {})


def _place(folder: Path, side: str) -> Path:
    return folder / f"domain-{side.replace(' ', '-')}"


def _seconds(comparison: Comparison, label: str) -> float:
    each = [float(f.costs.get(label, {}).get("seconds", 0.0)) for f in comparison.folds]
    return sum(each) / len(each)

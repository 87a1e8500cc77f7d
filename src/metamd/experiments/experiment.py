"""Learn on all domains of a family but one, compare on that one, each in turn: what the experiments with networks share."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from metamd.comparison.compare import compare
from metamd.comparison.comparison import Comparison, Target
from metamd.comparison.entrants import entrants, labels, unscheduled
from metamd.comparison.figures import learning_curves
from metamd.comparison.pace import geometric_mean, last_tenths, pace, pace_section, unlearned_section
from metamd.comparison.sections import Section, certified_runs, formatted, uninformative
from metamd.comparison.training import one_thread
from metamd.experiments.declare import (
    Family,
    Geometry,
    Scale,
    alone,
    bring,
    held_out,
    learn_away,
    learn_geometry,
    learned_file,
    learning_settings,
)
from metamd.files.learned import LearnedStart, load
from metamd.files.store import Records, Result, as_json, read_json
from metamd.inner.executor import Cell, Executor, fill
from metamd.optimiser.guard import OffFamilyWarning
from metamd.rivals import Contender, Learner, Rival, known_rival, learned_rival
from metamd.rivals.base import NamedParameters, Setting
from metamd.tasks.base import TaskFamily, derive_seed
from metamd.tasks.vision import ImageFamily
from metamd.tasks.wrapped import SharedStart

PAPER_AND_RELATIVES = ("sgd", "sgdm", "nesterov", "rmsprop", "adam", "adamw")
"""Rivals that the paper has, and their nearest relatives."""

Sides = Mapping[str, TaskFamily]


def by_domain(rows: Sequence[Result]) -> list[Section]:
    """Test accuracies by domain with the paper's beside them, losses and steps to the target, and the pace of ours."""
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
        losses = [formatted(row[m]["value"], missing="diverged") for m in ("mean_loss", "final_loss")]
        against = "" if steps.get("ratio") is None else f"ours takes {steps['ratio']:.2f} x, {steps['verdict']}"
        there = [formatted(steps["value"], missing="never"), f"{steps['arrived']:.0%}", against]
        standing.append([row["label"], *losses, *there, f"{row['area']:.3f}"])
    columns = ["", "mean loss", "final loss", "steps to target", "arrived", "of ours", "area"]
    return [
        Section(columns=["test accuracy, %", *domains, "mean"], rows=accuracies),
        Section(columns=columns, rows=standing),
        *(pace_section(title, found, rows[0]["share"]) for title, found in rows[0].get("pace", {}).items()),
        *unlearned_section(rows),
    ]


def accuracy_and_losses(rows: Sequence[Result]) -> list[Section]:
    """One line for everybody: losses, steps to the target, and test accuracy on the mean of the domains."""
    found = []
    for row in rows:
        losses = [formatted(row[m]["value"], ".3g", "diverged") for m in ("mean_loss", "final_loss")]
        accuracy = sum(row["accuracy"].values()) / len(row["accuracy"])
        steps = formatted(row["steps_to_target"]["value"], missing="never")
        found.append([row["label"], *losses, steps, f"{accuracy:.2f}"])
    return [Section(columns=["", "mean loss", "final loss", "steps to target", "test accuracy, %"], rows=found)]


def by_the_clock(rows: Sequence[Result]) -> list[Section]:
    """One line for every way to use a file: ratios to the best rival of each domain, geometric means, and accuracy."""
    found = []
    for title, each in rows[0]["pace"].items():
        label = title.partition(", by ")[2] or rows[0]["label"]
        ratios = [geometric_mean([row[k] for row in each]) for k in ("mean_loss", "steps", "seconds")]
        ours, theirs = (sum(row[k] for row in each) / len(each) for k in ("accuracy", "best_accuracy"))
        ways = ["not in all runs" if x is None else f"{x:.2f} x" for x in ratios]
        found.append([label, *ways, f"{ours:.2f} (best rival {theirs:.2f})"])
    columns = ["", "mean loss", "steps to the final loss of the best rival", "seconds", "test accuracy, %"]
    return [Section(columns=columns, rows=found)]


@dataclass(frozen=True)
class Experiment:
    """A leave-one-out experiment, or another in which geometries are learned and then compared on held-out tasks."""

    name: str  # of the experiment
    family: Callable[[Scale, str], Family]  # with a domain held out, at a scale
    # what is learned, by name; the first entry of the first one is what everything is compared with
    geometries: Mapping[str, Geometry]
    scales: Mapping[str, Scale]  # by name
    # the paper's test accuracies in per cent, by optimiser and domain
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    variant: str = ""  # what distinguishes it from the experiment of that name; empty for that one
    target: str = "Adam, linear decay"  # label of the rival that sets the target
    share: float = 1.0  # of the run, after which the loss of the best rival is what ours is to reach sooner
    # what is compared on, by name, if it is not the held-out side of the family alone
    sides: Callable[[Scale, str, Family], Sides] | None = None
    # whether every side draws tasks of its own, as repetitions on one domain must; else the draw is the same
    own_tasks: bool = False
    # whether tasks are meant to differ from those that were learned on, so that nobody is warned of it
    off_family: bool = False
    # finds where the tasks of a family with a shared start begin instead; kept beside what is learned
    start: Callable[[Scale, Family], LearnedStart] | None = None
    # the figure, from the comparison and the labels of ours to show, into a folder
    draw: Callable[[Comparison, Sequence[str], Path], None] = learning_curves
    # makes the rows from the comparisons and draws, in place of `rows` and `draw`
    summarise: Callable[[list[Comparison], Path], list[Result]] | None = None
    # further rows, from the scale, the folder, the seed and the number of processes
    more: Callable[[Scale, Path, int, int], list[Result]] | None = None
    sections: Callable[[Sequence[Result]], list[Section]] = by_domain  # the tables, from the rows

    def run(self, scale: str, folder: Path, seed: int, workers: int | Executor = 1, only: Sequence[str] = ()) -> Result:
        """Learn, compare, tabulate and draw; what is in the folder already is kept."""
        self = self.at(scale)
        with warnings.catch_warnings():
            if self.off_family:
                warnings.simplefilter("ignore", OffFamilyWarning)
            found, failed = self.compared(scale, folder, seed, workers, only)
        size = self.scales[scale]
        about = self._named(scale, seed) | {"protocol": size.protocol}
        if self.summarise is not None:
            return about | {"rows": self.summarise(found, folder)}
        joined = Comparison.join(found)
        self.draw(joined, [next(iter(g.entries)) for g in self.geometries.values()], folder)
        rows = self.rows(joined)
        rows[0] |= {"pace": self._paces(joined, _opponents(joined, size)), "share": self.share}
        rows[0] |= {"failed": failed} if failed else {}
        if runs := certified_runs(joined):
            rows[0] |= {"certificates": {"runs": len(runs), "says_nothing": uninformative(runs)}}
        about |= {"screening": joined.screening} if joined.screening else {}
        rows += [] if self.more is None else self.more(size, folder, seed, Executor.of(workers).workers)
        return about | {"last_tenth": last_tenths(joined), "rows": rows}

    def at(self, scale: str) -> "Experiment":
        """The experiment with the geometries that enter at a scale."""
        kept = self.scales[scale].geometries
        return self if kept is None else replace(self, geometries={name: self.geometries[name] for name in kept})

    def _named(self, scale: str, seed: int) -> Result:
        variant = {"variant": self.variant} if self.variant else {}
        return {"experiment": self.name, **variant, "scale": scale, "seed": seed}

    def compared(
        self, scale: str, folder: Path, seed: int, workers: int | Executor = 1, only: Sequence[str] = ()
    ) -> tuple[list[Comparison], dict[str, str]]:
        """Learn and compare: a comparison for every side, and what could not be learned on some domain, and why.

        A domain whose comparison is complete is read; its learned files need not be there. Where a geometry could not be
        learned, its runs count as failed.
        """
        self, size, executor = self.at(scale), self.scales[scale], Executor.of(workers)
        settings = self._named(scale, seed) | learning_settings(size)
        if foreign := [d for d in only if d not in size.domains]:
            raise ValueError(f"{self.name} holds out {', '.join(size.domains)} at scale {scale}, but not {foreign[0]!r}.")
        size = replace(size, domains=tuple(d for d in size.domains if d in only)) if only else size
        records = Records(folder, settings)
        cells = [_cell(domain, name) for domain in size.domains for name in self.geometries]
        known = {cell: records.read(cell) for cell in cells if records.has(cell)}
        kept = {d: read for d in size.domains if (read := self._read(size, d, folder, known))}
        families = {domain: self._begun(size, domain, folder) for domain in size.domains if domain not in kept}
        if families:
            lacking = self._to_learn(records, size, families, seed, away=executor.ray is not None)
            known |= fill(records, lacking, title=f"{self.name}: learning", workers=executor)
        found = []
        for domain in size.domains:
            if domain in kept:
                found += kept[domain]
                continue
            for name, side in self.held_out_sides(size, domain, families[domain]).items():
                here = _domain_folder(folder, name)
                target = unscheduled(self.target) if size.protocol == "once" else self.target
                aim = Target(target, 1.0) if size.protocol == "once" else Target(target)
                protocol = size.rules(steps=side.steps, seed=seed, aim=aim)
                ours = self._ours(folder, domain, side, known)
                # some rivals are learned first, on the training side, and kept beside what ours learned
                rivals = [
                    r.rival(families[domain], derive_seed(seed, "learning", domain), learned_file(folder, domain, n))
                    if isinstance(r, Learner)
                    else r
                    for n, r in ((n, known_rival(n)) for n in size.rivals)
                ]
                # under once everybody chooses on the training side, the same for all sides
                where_tuned = _domain_folder(folder, domain) if size.protocol == "once" else here
                trials = Records(where_tuned / "tuning", settings) if size.protocol != "handicap" else None
                where: dict[str, Any] = {"training": families[domain], "records": trials, "workers": executor}
                everybody = entrants(dict(ours), rivals, side, protocol, **where)
                drawn = derive_seed(seed, name) if self.own_tasks else seed
                found.append(compare(everybody, side, replace(protocol, seed=drawn), folder=here, **vars(executor)))
        return found, failures(self.geometries, known, size.domains)

    def held_out_sides(self, size: Scale, domain: str, family: Family) -> Sides:
        """The families to compare on after learning with a domain held out, by name."""
        if self.sides is not None:
            return self.sides(size, domain, family)
        if size.test_steps is not None and isinstance(family, ImageFamily):
            return {domain: family.held_out(steps=size.test_steps)}
        return {domain: held_out(family)}

    def rows(self, comparison: Comparison) -> list[Result]:
        """One row for each optimiser: test accuracy on every domain and overall, the paper's beside it, and speed."""
        tables = {m: {r.pop("label"): as_json(r) for r in comparison.table(m)} for m in comparison.metrics}
        profiles, rows = comparison.profiles(), []
        for label in comparison.labels:
            shown = zip(comparison.folds, comparison.chosen(label, "test_error"), strict=True)
            right = {f.group: [100 * o.accuracy("test") for o in c.outcomes] for f, c in shown}
            seconds = [float(f.costs.get(label, {}).get("seconds", 0.0)) for f in comparison.folds]
            bare = unscheduled(label)
            row = {
                "label": label,
                "accuracy": {domain: sum(values) / len(values) for domain, values in right.items()},
                "published": dict(self.published.get(label if bare in comparison.labels else bare, {})),
                "learning": {"gradients": comparison.learning_gradients(label), "seconds": sum(seconds) / len(seconds)},
            }
            rows.append(row | {metric: table[label] for metric, table in tables.items()} | {"area": profiles[label].area})
        return rows

    def _paces(self, joined: Comparison, opponents: Mapping[str, list[str]]) -> dict[str, list[Result]]:
        """The pace of our first entry, then of the others that are paced."""
        entries = [pair for g in self.geometries.values() for pair in g.entries.items()]
        others = {f", by {label}": label for label, entry in entries if entry.paced}
        return {
            title + ending: pace(joined, who, self.share, label)
            for ending, label in ({"": None} | others).items()
            for title, who in opponents.items()
        }

    def places(self, size: Scale, folder: Path, domains: Sequence[str]) -> list[Path]:
        """Where the comparisons of some domains are kept."""
        if self.sides is None:
            return [_domain_folder(folder, domain) for domain in domains]
        return [
            _domain_folder(folder, name)
            for domain in domains
            for name in self.sides(size, domain, self.family(size, domain))
        ]

    def _read(self, size: Scale, domain: str, folder: Path, known: Mapping[str, Result]) -> list[Comparison]:
        """The comparisons of a domain, if everybody whom the scale asks for is in them with all settings and seeds.

        Others may be in them too: what is no longer tried, such as a potential that was cut, stays in the tables.
        """
        places = self.places(size, folder, [domain])
        taught = all(_cell(domain, name) in known for name in self.geometries)
        if not (taught and all((place / "comparison.json").exists() for place in places)):
            return []
        ours = [label for g in self.geometries.values() for label in g.entries]
        wanted = labels(ours, [known_rival(r) for r in size.rivals], size.schedules, size.protocol)
        tuned = wanted[len(ours) : -len(size.rivals)]
        budget = size.budget if size.protocol == "handicap" else 1
        found = [Comparison.read(place) for place in places]
        whole = all(
            {*wanted} <= {*c.labels}
            and all(f.tasks(ours[0]) == size.seeds for f in c.folds)
            and all(len(f.entrants[label]) == budget for f in c.folds for label in tuned)
            for c in found
        )
        return found if whole else []

    def _begun(self, size: Scale, domain: str, folder: Path) -> Family:
        """The family with a domain held out, from the learned start if there is to be one, which a file keeps."""
        family, path = self.family(size, domain), learned_file(folder, domain, "start")
        if self.start is None:
            return family
        if not path.exists():
            with one_thread():
                found = self.start(size, family)
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
        return SharedStart(family, LearnedStart.load(path))

    def _to_learn(
        self, records: Records, size: Scale, families: Mapping[str, Family], seed: int, away: bool = False
    ) -> Iterator[Cell]:
        """What is to be learned; away, on a cluster that shares no folder, learning that is lost begins again."""
        (records.folder / "learned").mkdir(exist_ok=True)
        for domain, family in families.items():
            for name, geometry in self.geometries.items():
                path, cell = learned_file(records.folder, domain, name), _cell(domain, name)
                # what was learned into a file that is gone is learned again; what could not be learned is not
                if not path.exists() and records.has(cell) and "failed" not in records.read(cell):
                    records.forget(cell)
                drawn = domain if geometry.same_tasks else path.stem
                if away:
                    yield Cell(cell, partial(learn_away, size, family, geometry, seed, drawn), partial(bring, path))
                else:
                    yield Cell(cell, partial(learn_geometry, size, family, geometry, path, seed, drawn))

    def _ours(
        self, folder: Path, domain: str, side: TaskFamily, taught: Mapping[str, Result]
    ) -> Iterator[tuple[str, Contender]]:
        shapes = {n: tuple(x.shape) for n, x in side.example().items()}
        for name, geometry in self.geometries.items():
            for label, entry in geometry.entries.items():
                if reason := taught[_cell(domain, name)].get("failed"):
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
                )
                if entry.searched_as is not None:
                    like = known_rival(entry.searched_as)
                    assert isinstance(like, Rival)
                    entered = replace(entered, space=like.space, grid=like.grid)
                yield label, entered.untuned()


def unlearned(label: str, name: str, reason: str) -> Contender:
    """An optimiser whose training failed: nobody can run it, so all its runs count as failed."""
    return Rival(name, label, _cannot_run, {}, {}, identity="unlearned", unlearned=reason).untuned()


def _cannot_run(named: NamedParameters, setting: Setting) -> NoReturn:
    raise ValueError("this optimiser could not be learned: nothing can be trained with it. Its runs count as failed.")


def screened(place: Path) -> set[str]:
    """The runs in a folder that no table shows: those of settings that were not run on all tasks."""
    folds = read_json(place / "comparison.json")["folds"] if (place / "comparison.json").exists() else ()
    each = [[c["runs"] for c in candidates] for fold in folds for candidates in fold["entrants"].values()]
    return {run for settings in each for runs in settings if len(runs) < max(map(len, settings)) for run in runs}


def failures(geometries: Mapping[str, Geometry], taught: Mapping[str, Result], domains: Sequence[str]) -> dict[str, str]:
    """By label what could not be learned on some domain, with the reason."""
    failed = {n: [r for d in domains if (r := taught.get(_cell(d, n), {}).get("failed"))] for n in geometries}
    return {
        label: f"{reasons[0].rstrip('.')} ({len(reasons)} of {len(domains)} trainings)"
        for name, reasons in failed.items()
        if reasons
        for label in geometries[name].entries
    }


def _opponents(comparison: Comparison, size: Scale) -> dict[str, list[str]]:
    """The labels of tuned rivals: those that the paper compares with, and all where there are others."""
    tuned = {n: [x for x in comparison.labels if unscheduled(x) == known_rival(n).title] for n in size.rivals}
    everybody = [label for members in tuned.values() for label in members]
    papers = [label for name in PAPER_AND_RELATIVES for label in tuned.get(name, ())]
    groups = {"the best of the paper's rivals": papers} if papers else {}
    return groups | ({"the best of all": everybody} if set(everybody) != set(papers) else {})


def _cell(domain: str, geometry: str) -> str:
    return f"learn-{domain}-{geometry}"


def _domain_folder(folder: Path, side: str) -> Path:
    return folder / f"domain-{side.replace(' ', '-')}"

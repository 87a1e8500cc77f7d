"""Learn on all domains of a family but one, compare on that one, each in turn: what the image experiments share."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from metamd.cells import Cell, fill
from metamd.choosing import learn_usage, tuned_reference
from metamd.comparing import compare
from metamd.comparison import Comparison
from metamd.experiments.pace import lines as pace_lines
from metamd.experiments.pace import pace
from metamd.folds import Target
from metamd.following import learn_from_reference
from metamd.hypergrad import ClosedForm
from metamd.journal import Journal
from metamd.learned import load
from metamd.meta import meta_train
from metamd.objectives import Objective, Reference, Regret
from metamd.potentials import MaxDiagonal
from metamd.protocols import Protocol, entrants
from metamd.records import Records, Result
from metamd.rivals import Contender, Schedule, learned_rival, rival
from metamd.tasks.base import derive_seed
from metamd.tasks.counted import Counted
from metamd.tasks.held_out import ImageFamily
from metamd.tasks.shared_start import SharedStart
from metamd.training import Measuring
from metamd.usage import Usage

PAPERS = ("sgd", "sgdm", "nesterov", "rmsprop", "adam", "adamw")
"""Rivals that the paper has, and their nearest relatives."""


@dataclass(frozen=True)
class Entry:
    """One way in which a learned geometry enters the comparison.

    Args:
        usage: metric, momentum, schedule and factor; None for what was chosen on the training tasks, or plainly.
    """

    usage: Usage | None = None


@dataclass(frozen=True)
class Geometry:
    """What is learned for each held-out domain.

    Args:
        potential: a new one at every call.
        entries: how it enters, by label.
        objective: what is minimised.
        choose_usage: whether metric, momentum, schedule and factor are chosen on training tasks, at a scale that does so.
        follow: learn from runs of a reference optimiser, whose rate is chosen on training tasks, instead of in rounds: runs
            so many times longer than those of the comparison, at a rate as many times lower; as many of them as a round has
            tasks, twice. 0 for rounds.
    """

    potential: Callable[[], MaxDiagonal]
    entries: Mapping[str, Entry]
    objective: Objective = field(default_factory=lambda: Regret(comparator=Reference(lr=1e-3, factor=1.0)))
    choose_usage: bool = False
    follow: float = 0


@dataclass(frozen=True)
class Scale:
    """How much is computed.

    Args:
        domains: held out in turn.
        images: training images per domain; None for all.
        steps: T.
        outer_steps: of the meta-training, at most.
        tasks_per_step: of the meta-training.
        seeds: runs per domain.
        budget: settings per rival and schedule.
        rivals: names in `metamd.rivals.RIVALS`.
        schedules: of the rivals.
        protocol: by which rivals are tuned.
        usage_tasks: training tasks to choose a usage on; 0 for none.
        screen: settings that go on from the first seed to the others, by each quantity; None for all.
    """

    domains: tuple[str, ...]
    images: int | None
    steps: int = 500
    outer_steps: int = 6
    tasks_per_step: int = 5
    seeds: int = 3
    budget: int = 25
    rivals: tuple[str, ...] = ("sgd", "sgdm", "rmsprop", "adam")
    schedules: tuple[Schedule, ...] = ("constant", "linear")
    protocol: Protocol = "handicap"
    usage_tasks: int = 2
    screen: int | None = None


@dataclass(frozen=True)
class Experiment:
    """A leave-one-out experiment.

    Args:
        name: of the experiment.
        family: with a domain held out, at a scale.
        geometries: what is learned, by name; the first entry of the first one is what everything is compared with.
        scales: by name.
        published: the paper's test accuracies in per cent, by optimiser and domain.
        target: label of the rival that sets the target.
        share: of the run, after which the loss of the best rival is what ours is to reach sooner.
    """

    name: str
    family: Callable[[Scale, str], ImageFamily | SharedStart]
    geometries: Mapping[str, Geometry]
    scales: Mapping[str, Scale]
    published: Mapping[str, Mapping[str, float]]
    target: str = "Adam, linear decay"
    share: float = 1.0

    def run(self, scale: str, folder: Path, seed: int, workers: int = 1, ray: str | None = None) -> Result:
        """Learn, compare and tabulate; what is in the folder already is kept.

        Args:
            scale: a name in `scales`.
            folder: for records and learned files.
            seed: of everything random.
            workers: processes.
            ray: address of a Ray cluster to train on; learning is done here.
        """
        size = self.scales[scale]
        settings = {"experiment": self.name, "scale": scale, "seed": seed, **_learning(size)}
        records = Records(folder, settings)
        families = {domain: self.family(size, domain) for domain in size.domains}
        for name, path in self._files(size, folder):
            if not path.exists():
                records.forget(name)
        fill(records, self._lessons(size, families, folder, seed), title=f"{self.name}: learning", workers=workers)
        found = []
        for domain, family in families.items():
            ours = dict(self._ours(folder, domain))
            side = family.held_out()
            here = folder / f"domain-{domain}"
            everybody = entrants(
                size.protocol,
                ours,
                [rival(name) for name in size.rivals],
                side,
                budget=size.budget,
                schedules=size.schedules,
                steps=size.steps,
                seed=seed,
                records=Records(here / "tuning", settings) if size.protocol == "paper" else None,
                workers=workers,
            )
            found.append(
                compare(
                    everybody,
                    side,
                    seeds=size.seeds,
                    steps=size.steps,
                    seed=seed,
                    measuring=Measuring(),
                    folder=here,
                    workers=workers,
                    ray=ray,
                    protocol=size.protocol,
                    aim=Target(self.target),
                    screen=size.screen,
                )
            )
        joined = Comparison.join(found)
        rows = self.rows(joined)
        rows[0]["pace"] = {title: pace(joined, labels, self.share) for title, labels in _opponents(joined, size).items()}
        rows[0]["share"] = self.share
        return {"experiment": self.name, "scale": scale, "seed": seed, "protocol": size.protocol, "rows": rows}

    def _lessons(
        self, size: Scale, families: Mapping[str, ImageFamily | SharedStart], folder: Path, seed: int
    ) -> Iterator[Cell]:
        (folder / "learned").mkdir(exist_ok=True)
        tasks = [(family, geometry) for family in families.values() for geometry in self.geometries.values()]
        for (name, path), (family, geometry) in zip(self._files(size, folder), tasks, strict=True):
            yield Cell(name, partial(_learn, size, family, geometry, path, seed))

    def _files(self, size: Scale, folder: Path) -> list[tuple[str, Path]]:
        """The cells of what is learned, and the files, which are learned again if they are gone."""
        names = [f"{domain}-{name}" for domain in size.domains for name in self.geometries]
        return [(f"learn-{name}", folder / "learned" / f"{name}.safetensors") for name in names]

    def _ours(self, folder: Path, domain: str) -> Iterator[tuple[str, Contender]]:
        for name, geometry in self.geometries.items():
            learned = load(folder / "learned" / f"{domain}-{name}.safetensors")
            for label, entry in geometry.entries.items():
                yield label, learned_rival(learned, name=f"metamd-{name}", title=label, usage=entry.usage).untuned()

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
            row: Result = {"label": label, "accuracy": accuracies, "published": dict(self.published.get(label, {}))}
            for metric, table in per_metric.items():
                kept = {k: v for k, v in table[label].items() if k != "label"}
                row[metric] = {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in kept.items()}
            rows.append(row | {"area": areas[label]})
        return rows


def markdown(rows: list[Result]) -> str:
    """The tables of the results page.

    Args:
        rows: as `Experiment.rows` makes them.
    """
    domains = list(rows[0]["accuracy"])
    lines = ["| test accuracy, % | " + " | ".join(domains) + " | mean |", "|---" * (len(domains) + 2) + "|"]
    for row in rows:
        values = [row["accuracy"][d] for d in domains]
        lines.append(_line(row["label"], [*values, sum(values) / len(values)]))
        if row["published"]:
            paper = [row["published"].get(d) for d in domains]
            mean = None if None in paper else sum(x for x in paper if x is not None) / len(paper)
            lines.append(_line(f"{row['label']}, in the paper", [*paper, mean]))
    lines += ["", "| | mean loss | final loss | steps to target | arrived | of ours | area |", "|---" * 7 + "|"]
    for row in rows:
        steps = row["steps_to_target"]
        shown = ["never" if steps["value"] is None else f"{steps['value']:.4g}", f"{steps['arrived']:.0%}"]
        ratio = steps.get("ratio")
        shown += ["" if ratio is None else f"ours takes {ratio:.2f} x, {steps['verdict']}", f"{row['area']:.3f}"]
        losses = ["diverged" if row[m]["value"] is None else f"{row[m]['value']:.4g}" for m in ("mean_loss", "final_loss")]
        lines.append("| " + " | ".join([row["label"], *losses, *shown]) + " |")
    for title, found in rows[0].get("pace", {}).items():
        lines += ["", *pace_lines(title, found, rows[0]["share"])]
    return "\n".join(lines) + "\n"


def _opponents(comparison: Comparison, size: Scale) -> dict[str, list[str]]:
    """The labels of tuned rivals: those that the paper compares with, and all."""
    titles = {name: rival(name).title for name in size.rivals}
    tuned = {
        name: [x for x in comparison.labels if x in (title, f"{title}, linear decay")] for name, title in titles.items()
    }
    everybody = [label for labels in tuned.values() for label in labels]
    papers = [label for name in PAPERS if name in tuned for label in tuned[name]]
    return {"the best of the paper's rivals": papers, "the best of all": everybody} if papers else {"the best": everybody}


def _line(label: str, values: list[float | None]) -> str:
    return "| " + " | ".join([label, *("" if v is None else f"{v:.2f}" for v in values)]) + " |"


def _learning(size: Scale) -> dict[str, Any]:
    """What learned files depend on: rivals and seeds may be added to a folder later."""
    kept = ("domains", "images", "steps", "outer_steps", "tasks_per_step", "protocol", "usage_tasks")
    return {k: v for k, v in asdict(size).items() if k in kept}


def _learn(size: Scale, family: ImageFamily | SharedStart, geometry: Geometry, path: Path, seed: int) -> Result:
    began, counted = time.perf_counter(), Counted(family)
    reference = tuned_reference(counted, seed=seed) if geometry.follow or geometry.choose_usage else None
    searched = {"gradient_evaluations": float(counted.batches), "seconds": time.perf_counter() - began}
    drawn = derive_seed(seed, "learning", path.stem)
    if geometry.follow and reference is not None:
        tasks = 2 * size.tasks_per_step
        longer = replace(reference, lr=reference.lr / geometry.follow, factor=geometry.follow)
        learned = learn_from_reference(family, geometry.potential(), reference=longer, tasks=tasks, seed=drawn)
    else:
        learned = meta_train(
            family,
            geometry.potential(),
            objective=geometry.objective,
            estimator=ClosedForm(),
            outer_steps=size.outer_steps,
            tasks_per_step=size.tasks_per_step,
            seed=drawn,
            journal=Journal(path.with_suffix(".run")),
        )
    if geometry.choose_usage and size.usage_tasks:
        chosen = derive_seed(seed, "usage", path.stem)
        learned = learn_usage(learned, family, reference=reference, tasks=size.usage_tasks, seed=chosen)
    cost = {k: v + searched.get(k, 0.0) for k, v in learned.header.cost.items()}
    learned = replace(learned, header=replace(learned.header, cost=cost))
    learned.save(path)
    return {"file": path.name, "fingerprint": learned.fingerprint(), "cost": cost}

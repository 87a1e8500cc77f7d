"""Families that people have: a network per picture, adapters per speaker, a transformer per text, a network per equation.

The protocol is `once`: everybody chooses on the training side, and nobody touches anything on held-out tasks. Tasks are the
unit of intervals, not seeds. Every optimiser is shown by what the field states on test data, after parts of the run and at
its end. MetaMD is held against each of the others: in mean loss, in loss at the end, and in the steps and seconds that it
takes to the loss which the other has at its end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metamd import tasks
from metamd.comparison import figures
from metamd.comparison.comparison import Comparison
from metamd.comparison.entrants import UNTUNED
from metamd.comparison.once import FOR_THE_END
from metamd.comparison.sections import Section, formatted, interval, two_clocks
from metamd.comparison.statistics import bootstrap
from metamd.comparison.training import Measuring, begun, one_thread
from metamd.experiments.declare import Entrant, Family, Scale, coordinates, learned_file
from metamd.experiments.experiment import Experiment
from metamd.files.learned import LearnedOptimiser, LearnedStart, load, total_cost
from metamd.files.store import Result, as_json
from metamd.inner.objectives import Reference
from metamd.inner.run import train
from metamd.learning.reference import draw_tasks, learn_start, tuned_reference
from metamd.potentials.forms import Array
from metamd.rivals import RIVALS, Contender, learned_rival
from metamd.rivals.table import averaged
from metamd.tasks.base import Config, TaskFamily
from metamd.tasks.pictures import PictureFamily, PictureTask
from metamd.tasks.wrapped import NearestStart, SharedStart, Solved, starting_at

HELD_OUT = "held-out"
"""The name of what is held out, where it is one fixed side of the family."""

GEOMETRY = {"kronecker": coordinates({"MetaMD": Entrant()})}
SMOKE = Scale((HELD_OUT,), None, steps=8, tasks_per_step=1, seeds=1, protocol="once", rivals=("adam",), usage_tasks=1)
CPU = Scale((HELD_OUT,), None, tasks_per_step=2, seeds=1, protocol="once", usage_tasks=2)
PAPER = Scale((HELD_OUT,), None, tasks_per_step=8, seeds=3, protocol="once", usage_tasks=6)

JUDGED_BY = ("mean_loss", "final_loss", "test_loss")
"""The measures for which a table has MetaMD's ratios to the others."""

# the rows, from the comparisons


def summarised(found: Sequence[Comparison], folder: Path, levels: Mapping[str, float] | None = None) -> list[Result]:
    """A row for every optimiser on each side, and `curves.png` of the first side; `levels` are training losses, by title."""
    rows = [row for c in found for row in _rows(c, levels or {})]
    first = found[0]
    shown = [label for label in first.labels if not label.endswith((UNTUNED, FOR_THE_END))]
    panels = two_clocks(first, shown)
    figures.curves(panels, folder / "curves.png", xlabel="", ylabel="training loss")
    return rows


def _rows(c: Comparison, levels: Mapping[str, float]) -> list[Result]:
    ours = c.labels[0]
    differences = {
        m: {d.label: d for d in c.differences(m)} for m in ("mean_loss", "final_loss", "test_loss") if m in c.metrics
    }
    rows = []
    for label in c.labels:
        seconds = [f.seconds.get(label, math.nan) for f in c.folds]
        row: Result = {"side": side_of(c), "label": label, "tasks": len(c.groups), "ms": 1e3 * sum(seconds) / len(seconds)}
        row["looks"] = {place: {n: asdict(x) for n, x in look.items()} for place, look in _looks(c, label).items()}
        row["levels"] = {title: _reached(c, label, loss) for title, loss in levels.items()}
        if label != ours:
            row["against"] = {m: {**asdict(d[label]), "verdict": d[label].verdict} for m, d in differences.items()}
            row["against"] |= {k: asdict(x) for k, x in to_the_end_of(c, label).items()}
        rows.append(as_json(row))
    return rows


def side_of(c: Comparison) -> str:
    """The tasks of a comparison in a word: the family, or its held-out part."""
    family = c.settings["family"]
    return str(family.get("hold_out") or family["family"])


def _looks(c: Comparison, label: str) -> dict[str, dict[str, Any]]:
    """What the field states on test data by the number of steps: means over tasks with their intervals."""
    runs = [o for candidate in c.chosen(label, "mean_loss") for o in candidate.outcomes]
    found: dict[str, dict[str, Any]] = {}
    for place in runs[0].looks:
        for name in runs[0].looks[place]:
            values = np.array([o.looks.get(place, {}).get(name, math.inf) for o in runs], dtype=np.float64)
            if name != "loss":
                found.setdefault(place, {})[name] = bootstrap(values, c.groups)
    return found


def _reached(c: Comparison, label: str, loss: float) -> Result:
    """The median steps and seconds to a training loss, and the part of the runs that arrive."""
    steps = _each(c, label, lambda outcome, _: outcome.steps_to(loss))
    seconds = c.folds[0].seconds.get(label, math.nan)
    middle = float(np.median(steps))
    return {"steps": middle, "seconds": middle * seconds, "arrived": float(np.isfinite(steps).mean())}


def _each(c: Comparison, label: str, value: Any) -> Array:
    """A number for every task, from the outcome and its place among all."""
    outcomes = [o for candidate in c.chosen(label, "mean_loss") for o in candidate.outcomes]
    return np.array([value(o, i) for i, o in enumerate(outcomes)], dtype=np.float64)


def to_the_end_of(c: Comparison, label: str) -> dict[str, Any]:
    """Steps and seconds of ours to the final loss of another optimiser on the same task, divided by what that one took.

    Medians over tasks with their intervals; infinite where ours does not arrive, and 0 where the other's run failed.
    """
    ours = c.labels[0]
    mine = [o for candidate in c.chosen(ours, "mean_loss") for o in candidate.outcomes]

    def share(theirs: Any, i: int) -> float:
        if theirs.failed:
            return 0.0
        steps = mine[i].steps_to(theirs.final_loss)
        # at the last evaluation there is no later one to confirm it
        last = mine[i].places[-1] if mine[i].final_loss <= theirs.final_loss else math.inf
        return float(min(steps, last) / mine[i].places[-1])

    steps = _each(c, label, share)
    dearer = c.folds[0].seconds.get(ours, math.nan) / c.folds[0].seconds.get(label, math.nan)
    return {"steps": bootstrap(steps, c.groups, median=True), "seconds": bootstrap(steps * dearer, c.groups, median=True)}


def per_side(rows: Sequence[Result]) -> list[Section]:
    """Two tables for each side: what everybody reaches, and ours against each of the others."""
    found = []
    for side in dict.fromkeys(row["side"] for row in rows if "side" in row):
        here = [row for row in rows if row.get("side") == side]
        places = list(here[0]["looks"])
        name = next(iter(here[0]["looks"][places[-1]])) if places else ""
        levels = list(here[0]["levels"])
        heads = [f"{side}, {here[0]['tasks']} tasks", *(f"{name} after {place}" for place in places)]
        heads += [f"seconds to {title}" for title in levels] + ["ms per step"]
        lines = []
        for row in here:
            looks = [row["looks"].get(place, {}).get(name) for place in places]
            said = ["diverged" if x is None else formatted(x["value"], ".4g", "diverged") for x in looks[:-1]]
            said += ["diverged" if x is None else interval(x, ".4g", "diverged") for x in looks[-1:]]
            said += [formatted(row["levels"][title]["seconds"], ".2f", "never") for title in levels]
            lines.append([row["label"], *said, formatted(row["ms"], ".1f")])
        found.append(Section(columns=heads, rows=lines))
        # an untuned rival may be the best one, since nobody is tuned on these tasks
        ratios = [[f"against {row['label']}", *_against(row["against"])] for row in here if "against" in row]
        kept = [i for i in range(len(AGAINST)) if any(line[i] for line in ratios)]
        found.append(Section(columns=[AGAINST[i] for i in kept], rows=[[line[i] for i in kept] for line in ratios]))
    return found


AGAINST = ("MetaMD", "mean loss", "loss at the end", "test loss", "steps to its last loss", "seconds to it")


def _against(found: Mapping[str, Any]) -> list[str]:
    said = []
    for metric in JUDGED_BY:
        d = found.get(metric)
        ratio = "" if d is None else formatted(d["ratio"], ".2f", "diverged")
        said.append("" if d is None else f"{ratio} x ({d['low']:.2f} to {d['high']:.2f}), {d['verdict']}")
    return [*said, *(interval(found[k], ".2f") for k in ("steps", "seconds"))]


# a network per picture


def _pictures(scale: Scale, hold_out: str) -> PictureFamily:
    return tasks.pictures(steps=scale.steps, **scale.sizes)  # type: ignore[arg-type]


def _from_one_model(scale: Scale, hold_out: str) -> SharedStart:
    family = _pictures(scale, hold_out)
    return starting_at(family, family.example())


def reptile(scale: Scale, family: Family) -> LearnedStart:
    """A start moved, round by round, to the mean of the solutions that short runs find from it [Nichol2018]."""
    assert isinstance(family, SharedStart)
    start, costs, seen = LearnedStart(dict(family.start)), [], dict[str, None]()
    finder = tuned_reference(family)
    for number in range(scale.outer_steps):
        here = SharedStart(family, start)
        found = learn_start(here, reference=finder, tasks=scale.tasks_per_step, seed=number)
        seen |= dict.fromkeys((*start.tasks, *found.tasks))
        costs.append(found.cost)
        start = found
    return LearnedStart(dict(start), seen, total_cost(*costs))


DECIBELS = {f"{level} dB": 4 * 10 ** (-level / 10) for level in (25, 28, 30)}
"""Levels of the PSNR as losses of colours from -1 to 1."""


def _pictures_summarised(found: list[Comparison], folder: Path) -> list[Result]:
    rows = summarised(found, folder, DECIBELS)
    path, said = learned_file(folder, HELD_OUT, "kronecker"), found[0].settings["family"]
    if path.exists():  # else the figure is there already
        options = {key: said[key] for key in ("model", "width", "side", "steps")}
        family = _started(tasks.pictures(**options).held_out(), said, path)
        draw_side_by_side(found[0], family, load(path), folder / "pictures.png")
    return rows


def contender_of(description: Mapping[str, Any], learned: LearnedOptimiser) -> Contender:
    """Who a record describes: a rival with its setting, or what was learned."""
    name = str(description["rival"])
    if name.startswith("metamd"):
        return learned_rival(learned).untuned()
    bare = name.removesuffix("-averaged")
    rival = averaged(RIVALS[bare]) if bare != name else RIVALS[name]
    return Contender(rival, description["setting"], description["schedule"], warm_up=description.get("warm_up", 0.0))


def draw_side_by_side(
    c: Comparison,
    family: TaskFamily,
    learned: LearnedOptimiser,
    path: Path,
    parts: Sequence[int] = (10, 4, 1),
    *,
    narrow: bool = False,
) -> None:
    """The first held-out picture as every optimiser has it after as many seconds as MetaMD takes for parts of its run.

    A run that is over by then is shown as it ends. With `narrow`, a second figure is drawn, see `figures.NARROW`.
    """
    fold = c.folds[0]
    labels = [label for label in c.labels if not label.endswith((UNTUNED, FOR_THE_END))]
    task, steps = family.build(fold.best(labels[0], "mean_loss").outcomes[0].config), fold.steps
    assert isinstance(task, PictureTask)
    places, colours = (part[torch.arange(len(part))] for part in task.splits["train"])
    looks = [max(1, steps // n) for n in parts]
    shown = [[(colours, f"{fold.group}\nat {look * fold.seconds[labels[0]]:.2f} s") for look in looks]]
    with one_thread():
        for label in labels:
            rule = begun(task, contender_of(fold.best(label, "mean_loss").contender, learned), steps)
            shown.append([])
            for look in looks:
                until = min(steps, round(look * fold.seconds[labels[0]] / fold.seconds[label]))
                train(task, rule, range(rule.taken, until))
                with torch.no_grad():
                    pixels = torch.func.functional_call(task.model, rule.model(), (places,))
                psnr = task.evaluate(rule.model(), "train").measures["PSNR, dB"]
                shown[-1].append((pixels, f"{label.split(',')[0]}\n{until} steps, {psnr:.1f} dB"))
    _draw_pictures(list(zip(*shown, strict=True)), path, dpi=110)
    if narrow:
        _draw_pictures(shown, path.with_stem(path.stem + figures.NARROW), dpi=180)


def _draw_pictures(grid: Sequence[Sequence[tuple[torch.Tensor, str]]], path: Path, dpi: int) -> None:
    """Rows of square pictures, colours from -1 to 1, with a title above each."""
    rows, columns = len(grid), len(grid[0])
    with figures.drawing(path, (1.35 * columns, 1.6 * rows), rows, columns, dpi=dpi, colours=256) as (_, axes):
        for ax, (pixels, title) in zip(axes.flatten(), (cell for row in grid for cell in row), strict=True):
            side = math.isqrt(len(pixels))
            ax.imshow(((pixels + 1) / 2).clamp(0, 1).reshape(side, side, 3).numpy(), interpolation="nearest")
            ax.set_title(title, fontsize=7)
            ax.set_axis_off()


def _started(family: TaskFamily, said: Mapping[str, Any], learned: Path) -> TaskFamily:
    """The family from the learned start, where the comparison had one."""
    if "start_hash" not in said:
        return family
    return SharedStart(family, LearnedStart.load(learned_file(learned.parents[1], HELD_OUT, "start")))


PICTURE_RIVALS = ("adam", "soap", "muon", "lbfgs")
PICTURES = Experiment(
    "images",
    _pictures,
    GEOMETRY,
    {
        "smoke": replace(SMOKE, sizes={"side": 4, "width": 4}, measuring=Measuring(every=4, looks=(4, 8)), outer_steps=1),
        "cpu": replace(CPU, steps=200, rivals=PICTURE_RIVALS, measuring=Measuring(looks=(10, 50, 200)), outer_steps=4),
        "paper": replace(PAPER, steps=200, rivals=PICTURE_RIVALS, measuring=Measuring(looks=(10, 50, 200)), outer_steps=20),
    },
    target="Adam",
    summarise=_pictures_summarised,
    sections=per_side,
)
FROM_LEARNED_START = replace(PICTURES, family=_from_one_model, variant="learned-start", start=reptile)

# adapters per speaker


def _speakers(scale: Scale, hold_out: str) -> Family:
    return tasks.speakers(steps=scale.steps, **scale.sizes)  # type: ignore[arg-type]


def _presidents(scale: Scale, domain: str, family: Family) -> Mapping[str, TaskFamily]:
    family = tasks.speakers(hold_out="presidents", steps=scale.steps, **scale.sizes)
    return {HELD_OUT: family.held_out()}


ADAPTERS = ("adamw", "lora-plus", "muon", "soap", "prodigy", "schedule-free")
SPEAKERS = Experiment(
    "speakers",
    _speakers,
    GEOMETRY,
    {
        "smoke": replace(
            SMOKE,
            rivals=("adamw",),
            sizes={"rank": 1, "context": 6, "batch_size": 2},
            measuring=Measuring(every=4, looks=(4, 8), examples=20),
        ),
        "cpu": replace(
            CPU,
            steps=50,
            rivals=ADAPTERS[:4],
            sizes={"context": 32, "batch_size": 4},
            measuring=Measuring(looks=(10, 25, 50), examples=1000),
        ),
        "paper": replace(PAPER, steps=100, rivals=ADAPTERS, measuring=Measuring(looks=(10, 50, 100))),
    },
    target="AdamW",
    summarise=summarised,
    sections=per_side,
)
TO_PRESIDENTS = replace(SPEAKERS, variant="presidents", sides=_presidents)

# a transformer per text


def _texts(scale: Scale, hold_out: str) -> Family:
    return tasks.texts(steps=scale.steps, **scale.sizes)  # type: ignore[arg-type]


TEXT_RIVALS = ("adamw", "muon", "soap")
TEXTS = Experiment(
    "texts",
    _texts,
    GEOMETRY,
    {
        "smoke": replace(
            SMOKE,
            rivals=("adamw",),
            sizes={"width": 16, "layers": 1, "context": 6, "batch_size": 2},
            measuring=Measuring(every=4, looks=(4, 8), examples=20),
        ),
        "cpu": replace(
            CPU,
            steps=200,
            seeds=3,
            rivals=TEXT_RIVALS,
            sizes={"batch_size": 8},
            measuring=Measuring(looks=(20, 100, 200), examples=500),
        ),
        "paper": replace(PAPER, steps=300, rivals=TEXT_RIVALS, measuring=Measuring(looks=(30, 150, 300))),
    },
    target="AdamW",
    summarise=summarised,
    sections=per_side,
)

# a network per equation


def _burgers(scale: Scale, hold_out: str) -> Family:
    return tasks.burgers(steps=scale.steps, **scale.sizes)


def _equations(scale: Scale, domain: str, family: Family) -> Mapping[str, TaskFamily]:
    """Other draws of the equation that is learned on, and another equation."""
    return {"burgers": family, "advection": tasks.advection(steps=scale.steps, **scale.sizes)}


EQUATION_RIVALS = ("adam", "adam-lbfgs", "soap")
BURGERS = Experiment(
    "burgers",
    _burgers,
    GEOMETRY,
    {
        "smoke": replace(
            SMOKE, sizes={"width": 4, "depth": 2, "places": 8, "edges": 4}, measuring=Measuring(every=4, looks=(4, 8))
        ),
        "cpu": replace(
            CPU,
            steps=500,
            seeds=8,
            rivals=EQUATION_RIVALS,
            sizes={"places": 500},
            measuring=Measuring(every=20, looks=(50, 200, 500)),
        ),
        "paper": replace(
            PAPER, steps=1000, seeds=20, rivals=EQUATION_RIVALS, measuring=Measuring(every=20, looks=(100, 500, 1000))
        ),
    },
    target="Adam",
    summarise=summarised,
    sections=per_side,
    sides=_equations,
    off_family=True,
)

KNOWN = 8
"""The number of equations that are solved first, for runs that begin at the solution with the nearest viscosity."""

SOLVER = Reference(torch.optim.Adam, 4e-3, 2.0)
"""The solver of these equations: Adam, over twice the steps of a run."""


def _from_the_nearest(scale: Scale, hold_out: str) -> NearestStart:
    family = _burgers(scale, hold_out)
    return NearestStart(family, partial(_solutions, family), _between_viscosities)


def _solutions(family: TaskFamily) -> Solved:
    tasks = draw_tasks(family, 0, "solved before", KNOWN)
    return [(task.config, SOLVER.run(task, task.init(), task.steps)[0]) for task in tasks]


def _between_viscosities(one: Config, other: Config) -> float:
    return abs(math.log(one["viscosity"] / other["viscosity"]))


WARM = replace(
    BURGERS, family=_from_the_nearest, variant="warm-start", sides=lambda scale, domain, family: {"burgers": family}
)

EXPERIMENTS = (PICTURES, FROM_LEARNED_START, SPEAKERS, TO_PRESIDENTS, TEXTS, BURGERS, WARM)

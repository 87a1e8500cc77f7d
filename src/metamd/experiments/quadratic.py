"""`metamd reproduce quadratic`: iterations on random 2-D quadratics, the paper's first figure [GaoMetaMD2022].

Every rival is tuned on the test problems themselves, on a grid fixed beforehand; MetaMD is learned on other problems of the
family and has nothing tuned. The best diagonal, found by brute force on the test problems, is what one metric can reach.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from metamd import tasks
from metamd.comparison import figures
from metamd.comparison.sections import Section
from metamd.comparison.statistics import spread
from metamd.experiments import synthetic
from metamd.experiments.synthetic import Attempt, BatchedRival, Problems, Synthetic
from metamd.files.learned import LearnedOptimiser
from metamd.files.store import Records, Result, shortened
from metamd.inner.estimators import Reverse
from metamd.inner.executor import Cell
from metamd.learning.meta import paper
from metamd.learning.outer import Adam, Method
from metamd.potentials import Diagonal
from metamd.rivals.base import Setting
from metamd.tasks.base import Task, TaskFamily, derive_seed

ROWS = {"published": (0.3, 14.0), "ill": (0.01, 14.0)}
"""The means of Q's diagonal. Those of the paper's second row are not published; (0.01, 14) is ours."""

PAPER_LABELS = {"paper-published": "MetaMD, paper", "paper-adam": "MetaMD, paper (Adam on log D)"}
"""Algorithm 1 as published, trained from near the origin; and its objective with another outer rule."""

STARTS = {"far": 3.0, "near": 0.1}
TOLERANCES = {"tight": 1e-6, "loose": 1e-2}
PUBLISHED = {
    "published": {"MetaMD, paper": 23, "SGD": 928, "SGD-M": 104, "Adam": 45},
    "ill": {"MetaMD, paper": 280, "SGD": 27_328, "SGD-M": 1_838, "Adam": 324},
}
"""The paper's iterations. Its threshold, its starting point and the second row's means are not given there."""

PAPER_PLACES = {
    ("published", "far"): ("published", "adam"),
    ("published", "near"): ("published", "adam"),
    ("ill", "far"): ("adam",),
    ("ill", "near"): (),
}
"""Where the paper's objective is tried: it needs second derivatives, and the ill row thousands of steps to converge."""

OURS = {"default": "MetaMD", "closed": "MetaMD, closed form alone"}
"""`meta_train` with the family alone, which refines by digits, and with a potential, which does not."""

RATES = {"low": -5, "high": 2, "per_decade": 8}


Numbers = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Scale:
    """How much is computed."""

    rows: tuple[str, ...] = ("published", "ill")  # names in `ROWS`
    starts: tuple[str, ...] = ("far", "near")  # names in `STARTS`
    problems: int = 50  # test problems
    limit: int = 50_000  # the most iterations of a rival
    learned_limit: int = 2_000  # the most iterations of a learned geometry
    trainings: int = 3  # meta-trainings of our default, with different seeds
    outer_steps: int = 20  # at most, of our default
    tasks_per_step: int = 16  # of our default
    # k, outer_steps, tasks_per_step and T of the preset `paper`, which is plain gradient descent on M
    published: Numbers = (("k", 7), ("outer_steps", 300), ("tasks_per_step", 4), ("T", 200))
    # the same for the paper's objective followed by Adam on log D, with its lr
    adam: Numbers = (("k", 10), ("lr", 0.1), ("outer_steps", 150), ("tasks_per_step", 4), ("T", 200))
    grid: int = 25  # points per coordinate of the brute force
    everything: bool = True  # whether rivals are also tuned in more than the rate


SHORT_TRAINING: Numbers = (("outer_steps", 1), ("tasks_per_step", 1), ("T", 100))
SMOKE_SCALE = Scale(
    ("published",),
    ("far",),
    problems=5,
    limit=2_000,
    learned_limit=500,
    trainings=1,
    outer_steps=2,
    tasks_per_step=2,
    published=(("k", 7), *SHORT_TRAINING),
    adam=(("k", 10), ("lr", 0.1), *SHORT_TRAINING),
    grid=7,
    everything=False,
)
SCALES = {"smoke": SMOKE_SCALE, "cpu": Scale(), "paper": Scale()}
"""The paper publishes no more of its protocol than `cpu` has."""


def family(row: str, start: str, steps: int = 200) -> TaskFamily:
    """The quadratics of one row and start."""
    return tasks.quadratic(ROWS[row], start=STARTS[start], steps=steps)


@lru_cache
def _problems(row: str, start: str, count: int, seed: int) -> Problems:
    return Problems.draw(family(row, start), count, derive_seed(seed, "test problems"))


def cells(scale: Scale, seed: int) -> Iterator[Cell]:
    """What there is to compute, the quick ones first."""
    places = list(product(scale.rows, scale.starts))
    for row, start in places:
        for name, tolerance in TOLERANCES.items():
            tuned, brute = (partial(f, scale, seed, row, start, tolerance) for f in (_tuned, _brute))
            yield from synthetic.tuned_cells(f"{row}-{start}-{name}", tuned, brute, RATES, everything=scale.everything)
    for row, start in places:
        for number in range(scale.trainings):
            for key in OURS:
                yield Cell(
                    f"{row}-{start}-{key}-{number}", partial(_learn_and_measure, scale, seed, row, start, number, key)
                )
        for name in PAPER_PLACES[row, start]:
            yield Cell(f"{row}-{start}-paper-{name}", partial(_preset, scale, seed, row, start, name))


def _tuned(
    scale: Scale, seed: int, row: str, start: str, tolerance: float, rival: BatchedRival, settings: Sequence[Setting]
) -> Result:
    """The setting with the smallest mean number of iterations on the test problems, which is generous to the rival."""
    problems = _problems(row, start, scale.problems, seed)
    found = synthetic.iterations(problems, rival, settings, tolerance, scale.limit)
    best = int(synthetic.means(found, scale.limit).argmin())
    counts = [None if c == synthetic.NEVER else c for c in found[best].tolist()]
    points = synthetic.path(problems, rival, settings[best], scale.limit if counts[0] is None else counts[0])
    return {"setting": settings[best], "iterations": counts, "path": shortened(points, synthetic.PATH_DIGITS)}


def _brute(scale: Scale, seed: int, row: str, start: str, tolerance: float) -> Result:
    """The best single diagonal metric, searched around the mean Hessian's diagonal, a factor e^3 to either side."""
    problems = _problems(row, start, scale.problems, seed)
    centre = (2 * problems.batch["Q"]).mean(0).diagonal().clamp_min(1e-12).log10().tolist()

    def score(rival: BatchedRival, settings: Sequence[Setting]) -> torch.Tensor:
        return synthetic.means(synthetic.iterations(problems, rival, settings, tolerance, scale.limit), scale.limit)

    best = synthetic.best_diagonal(score, centre, 3 / math.log(10), points=scale.grid, rounds=4, shrink=0.25)
    return _tuned(scale, seed, row, start, tolerance, synthetic.ONE_DIAGONAL, [best])


def _learn_and_measure(scale: Scale, seed: int, row: str, start: str, number: int, key: str) -> Result:
    potential, steps = (None, 100) if key == "default" else (Diagonal(), 200)
    options = {"potential": potential, "outer_steps": scale.outer_steps, "tasks_per_step": scale.tasks_per_step}
    training = synthetic.try_meta_train(family(row, start, steps), options, derive_seed(seed, "training", number))
    return measured_iterations(_problems(row, start, scale.problems, seed), training, scale.learned_limit)


def measured_iterations(problems: Problems, training: Attempt, limit: int, *, exact: bool = True) -> Result:
    """The iterations of what was learned, to every tolerance, and its path on the first problem."""

    def result(learned: LearnedOptimiser) -> Result:
        tightest = min(TOLERANCES.values())
        runs = [synthetic.run_learned(task, learned, limit, exact=exact, tolerance=tightest) for task in problems.tasks]
        counts = {
            name: [next((t for t, norm in enumerate(norms) if norm < tolerance), None) for _, norms in runs]
            for name, tolerance in TOLERANCES.items()
        }
        points = runs[0][0]
        shown = [points[t] for t in synthetic.thinned(len(points) - 1)]
        return {"iterations": counts, "path": shortened(shown, synthetic.PATH_DIGITS)}

    return synthetic.measured(training, result)


def _preset(scale: Scale, seed: int, row: str, start: str, name: str) -> Result:
    """The paper's algorithm from near the origin, with Adam from where it is tested; then these test problems."""
    training, given = _train_published(scale, seed, row, start if name == "adam" else "near", name)
    problems = _problems(row, start, scale.problems, seed)
    return measured_iterations(problems, training, scale.learned_limit, exact=False) | {"setting": given}


@lru_cache
def _train_published(scale: Scale, seed: int, row: str, start: str, name: str) -> tuple[Attempt, Result]:
    given: Result = dict(scale.adam if name == "adam" else scale.published)
    # Reverse gives Forward's gradient to rounding, in less time where there are few steps
    estimator = Reverse() if name == "adam" else Reverse(1)
    options = paper(given["k"], estimator=estimator, outer_steps=int(given["outer_steps"]), stable=False)
    if name == "adam":
        options["method"] = Method(Adam(given["lr"]), exact=False, keep="last")
    options["tasks_per_step"] = int(given["tasks_per_step"])
    return synthetic.try_meta_train(family(row, start, int(given["T"])), options, derive_seed(seed, "training", 0)), given


# the table


def table(results: Mapping[str, Result]) -> list[Result]:
    """One row for every optimiser, family, start and tolerance: the spread of its iterations."""
    return [
        {"row": row, "start": start, "tolerance": TOLERANCES[name], "optimiser": label} | spread(counts) | extra
        for row, start, name in product(ROWS, STARTS, TOLERANCES)
        for label, counts, extra in _labelled_counts(results, row, start, name)
    ]


def _labelled_counts(
    results: Mapping[str, Result], row: str, start: str, name: str
) -> Iterator[tuple[str, list[Any], Result]]:
    for key, label in OURS.items():
        trainings = [r for k, r in results.items() if k.startswith(f"{row}-{start}-{key}-") and "failed" not in r]
        if trainings:
            each = [{"metrics": r["metrics"], "mean": spread(r["iterations"][name])["mean"], **r["cost"]} for r in trainings]
            yield label, [c for r in trainings for c in r["iterations"][name]], {"trainings": each}
    for key, label in PAPER_LABELS.items():
        preset = results.get(f"{row}-{start}-{key}", {"failed": ""})
        if "failed" not in preset:
            yield label, preset["iterations"][name], {"metrics": preset["metrics"], "setting": preset["setting"]}
    for key, label in synthetic.LABELS.items():
        if found := results.get(f"{row}-{start}-{name}-{key}"):
            yield label, found["iterations"], {"setting": found["setting"]}


def sections(rows: Sequence[Result]) -> list[Section]:
    """The tables of the results page."""
    parts: list[Section] = []
    for (row, means), (start, place) in product(ROWS.items(), STARTS.items()):
        if here := [r for r in rows if (r["row"], r["start"]) == (row, start)]:
            title = f"Means {means[0]:g} and {means[1]:g}, start ({place:g}, {place:g})"
            parts += _start_tables(title, here, PUBLISHED[row] if start == "far" else {})
    return [replace(part, headline="" if i else _headline(part)) for i, part in enumerate(parts)]


def _headline(part: Section) -> str:
    """The medians of the first table, of ours and of the best rival whose rate alone is tuned."""
    medians = {str(row[0]): str(row[1]).split(" (")[0] for row in part.rows}
    rivals = {
        k.removesuffix(" (rate)"): float(v.replace(",", ""))
        for k, v in medians.items()
        if k.endswith(" (rate)") and v != "never"
    }
    if "MetaMD" not in medians or not rivals:
        return ""
    best = min(rivals, key=rivals.__getitem__)
    return (
        f"MetaMD needs {medians['MetaMD']} iterations in the median, with nothing tuned. {best}, the best rival with a "
        f"tuned rate, needs {rivals[best]:g}."
    )


def _start_tables(title: str, rows: list[Result], published: Mapping[str, int]) -> Iterator[Section]:
    tight, loose = ({r["optimiser"]: r for r in rows if r["tolerance"] == t} for t in TOLERANCES.values())
    columns = ["optimiser", "1e-6: median (quartiles)", "95 % interval", "mean", "arrived", "MetaMD is faster by"]
    lines, left = [], dict(published)
    for label, found in tight.items():
        number = left.pop(label.removesuffix(" (rate)"), None)
        interval = f"{_formatted_count(found['low'])} to {_formatted_count(found['high'])}"
        arrived = f"{found['arrived']}/{found['count']}"
        here = [_middle(found), interval, _formatted_count(found["mean"], 1), arrived, _speedup(found, tight)]
        there = [_middle(loose[label]), _speedup(loose[label], loose)]
        lines.append([label, *here, *there, "" if number is None else f"{number:,}"])
    # of what was not run, or could not be learned, the paper's number alone
    lines += [[label, "no result here", *[""] * 6, f"{number:,}"] for label, number in left.items()]
    yield Section(title, columns=[*columns, "1e-2: median (quartiles)", "by", "paper"], rows=lines)
    best = tight["best diagonal"]["mean"]
    means = {label: [t["mean"] for t in tight.get(label, {}).get("trainings", [])] for label in OURS.values() if best}
    ratios = {n: ["not all arrived" if m is None else f"{m / best:.2f}" for m in each] for n, each in means.items() if each}
    if ratios:
        said = "Mean iterations of each meta-training over those of the best diagonal, at 1e-6."
        yield Section(texts=[f"{said} {'; '.join(f'{n}: ' + ', '.join(each) for n, each in ratios.items())}."])


def _middle(found: Result) -> str:
    return f"{_formatted_count(found['median'])} ({_formatted_count(found['lower'])} to {_formatted_count(found['upper'])})"


def _formatted_count(value: float | None, digits: int = 0) -> str:
    if value is None:
        return "never"
    return f"{value:,.{digits}f}" if digits else f"{value:,.1f}".removesuffix(".0")


def _speedup(found: Result, members: Mapping[str, Result]) -> str:
    """By how many times the median of ours is smaller."""
    ours = members.get("MetaMD", {}).get("median")
    return "" if not ours or found["optimiser"] == "MetaMD" or found["median"] is None else f"{found['median'] / ours:.1f} x"


# the figures


def draw(results: Mapping[str, Result], folder: Path) -> None:
    """The trajectories on the first test problem, and all iterations."""
    settings = Records.settings(folder)
    rows, groups = {}, {}
    for row in settings["rows"]:
        title = f"means {ROWS[row][0]:g}, {ROWS[row][1]:g}"
        task = _problems(row, "far", settings["problems"], settings["seed"]).tasks[0]
        rows[title] = list(_panels(results, row, task))
        for start in settings["starts"]:
            groups[f"{title}; start {STARTS[start]:g}"] = [
                figures.Strip(label, counts, not label.endswith("(all)"))
                for label, counts, _ in _labelled_counts(results, row, start, "tight")
            ]
    figures.trajectories(rows, folder / "trajectories.png")
    figures.strips(groups, folder / "iterations.png", xlabel="iterations until the gradient is below 1e-6")


def _panels(results: Mapping[str, Result], row: str, task: Task) -> Iterator[figures.Panel]:
    shown = {label: f"{key}-0" for key, label in OURS.items()} | {label: key for key, label in PAPER_LABELS.items()}
    shown |= {rival.name: f"tight-{key}-rate" for key, rival in synthetic.BATCHED_RIVALS.items()}
    for label, key in shown.items():
        found = results.get(f"{row}-far-{key}", {"failed": ""})
        if "failed" not in found:
            counts = found["iterations"]
            count = (counts["tight"] if isinstance(counts, dict) else counts)[0]
            arrived = "did not arrive" if count is None else f"{count:,} iterations"
            yield synthetic.panel(f"{label}\n{arrived}", task, found["path"])


EXPERIMENTS = (Synthetic("quadratic", SCALES, cells, table, sections, draw),)

"""How much hangs on what the paper does not publish of its outer loop: rho, outer steps, tasks in each, and the first M.

    python benchmarks/sensitivity.py

The preset `paper` and our closed form on the quadratics of the first figure, from (0.1, 0.1), where the preset can learn.
One number is changed at a time; the median of iterations to a gradient of 1e-6 on 50 test problems, over three trainings of
the closed form and one of the preset, which takes minutes. What was computed is kept in benchmarks/results, and the table of
docs/reproduction.md is printed.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from metamd.comparison.statistics import spread
from metamd.experiments.quadratic import family, measured_iterations
from metamd.experiments.synthetic import Problems, try_meta_train
from metamd.files.store import ARCHIVE, Records, Result, archive, read_cells, records_in, unarchive
from metamd.inner.estimators import Reverse
from metamd.inner.executor import Cell, fill
from metamd.learning.meta import Method, paper
from metamd.learning.outer import GradientDescent
from metamd.potentials import Diagonal, MaxDiagonal
from metamd.tasks.base import derive_seed

FOLDER = Path(__file__).parent / "results" / "sensitivity"
PLACE = ("published", "near")
PROBLEMS, LIMIT = 50, 2000
TRAININGS = {"preset": 1, "closed": 3}
CURVATURE = 28.0
"""The larger one, of the mean quadratic."""

USUAL: dict[str, dict[str, float]] = {
    "preset": {"pace": 0.05, "outer_steps": 300, "tasks": 4, "first": 1.0},
    "closed": {"outer_steps": 20, "tasks": 16, "first": 1 / CURVATURE},
}
VARIED: dict[str, dict[str, tuple[float, ...]]] = {
    "preset": {"pace": (0.01, 0.25), "outer_steps": (30, 100), "tasks": (1, 8), "first": (0.4, 0.7, 4.0)},
    "closed": {"outer_steps": (1, 3, 10), "tasks": (1, 4, 64), "first": (0.001, 1.0, 100.0)},
}
SAID = {
    "pace": "rho, as a share of M^2 / E",
    "outer_steps": "outer steps",
    "tasks": "tasks per step n",
    "first": "first D = M^2, over the largest curvature",
}
NAMES = {"preset": "preset `paper-plain`", "closed": "closed form"}


def learned_from(who: str, setting: dict[str, float], number: int) -> Result:
    """Train with a setting, and count iterations on the test problems."""
    if who == "preset":
        options = paper(estimator=Reverse(1), stable=False, outer_steps=int(setting["outer_steps"]))
        options["method"] = replace(options["method"], outer=GradientDescent(pace=setting["pace"]))
    else:
        options = {"potential": Diagonal(), "outer_steps": int(setting["outer_steps"]), "method": Method()}
    if setting["first"] != USUAL[who]["first"]:
        options["potential"] = begun(options["potential"], setting["first"], options["method"].spread)
    options["tasks_per_step"] = int(setting["tasks"])
    problems = Problems.draw(family(*PLACE), PROBLEMS, derive_seed(0, "test problems"))
    training = try_meta_train(family(*PLACE), options, derive_seed(0, "training", number))
    found = measured_iterations(problems, training, LIMIT, exact=who == "closed")
    return {k: v for k, v in found.items() if k != "path"}


def begun(potential: MaxDiagonal, first: float, spread: float) -> MaxDiagonal:
    """With metrics that begin at so many times the largest curvature; pieces differ as fresh ones do."""
    noise = torch.randn(potential.pieces, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    apart = spread if potential.pieces > 1 else 0.0
    logs = torch.full_like(noise, first * CURVATURE).log() + 2 * apart * noise
    return potential.with_metrics({"theta": logs})


def settings() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Who, what is changed, and the setting: first the usual one of everybody."""
    for who, usual in USUAL.items():
        yield who, "", dict(usual)
        for name, values in VARIED[who].items():
            for value in values:
                yield who, name, {**usual, name: value}


def cell(who: str, setting: dict[str, float], number: int) -> str:
    return "-".join([who, *(f"{x:.3g}" for x in setting.values()), str(number)])


def table(results: dict[str, Result]) -> str:
    """In Markdown: a line for each number that is varied, and a column for who is trained with it."""
    shown: dict[str, dict[str, dict[float, str]]] = {name: {who: {} for who in USUAL} for name in SAID}
    for who, name, setting in settings():
        found = [results[cell(who, setting, number)] for number in range(TRAININGS[who])]
        for changed in [name] if name else [n for n in SAID if n in setting]:
            shown[changed][who][setting[changed]] = _median(found, usual=not name)
    lines = ["| | " + " | ".join(NAMES.values()) + " |", "|---" * (1 + len(NAMES)) + "|"]
    for name, columns in shown.items():
        each = [", ".join(f"{value:.3g}: {c[value]}" for value in sorted(c)) for c in columns.values()]
        lines.append(f"| {SAID[name]} | " + " | ".join(each) + " |")
    return "\n".join(lines)


def _median(found: list[Result], *, usual: bool) -> str:
    """Of all iterations, "never" where most runs do not arrive; the usual setting in bold."""
    if failed := [f for f in found if "failed" in f]:
        return f"cannot learn ({len(failed)} of {len(found)})"
    counts: list[Any] = [count for f in found for count in f["iterations"]["tight"]]
    median = spread(counts)["median"]
    text = "never" if median is None else f"{median:g}"
    return f"**{text}**" if usual else text


def read() -> dict[str, Result]:
    """All that was computed."""
    with records_in(FOLDER) as records:
        return read_cells(records)


def about() -> dict[str, Any]:
    return {"experiment": "sensitivity", "place": PLACE, "problems": PROBLEMS, "limit": LIMIT, "usual": USUAL}


if __name__ == "__main__":
    if (FOLDER / ARCHIVE).is_file():
        unarchive(FOLDER)
    wanted = [
        Cell(cell(who, setting, number), partial(learned_from, who, setting, number))
        for who, _, setting in settings()
        for number in range(TRAININGS[who])
    ]
    filled = fill(Records(FOLDER, about()), wanted, title="sensitivity", workers=1)
    archive(FOLDER)
    print(table(filled))

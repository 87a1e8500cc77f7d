"""`metamd reproduce pieces`: mixtures of 1 to 5 diagonal metrics, and which of them is active when [GaoMetaMD2022].

Rotated MNIST with a 3-layer MLP, 45 degrees held out. The closed form learns one metric. The mixtures here are made
from it: it is spread at random into N pieces, which follow the gradient of the regret bound. The paper shows how often each
of three pieces is active during training, and, in a table that it left out, the accuracy with each piece alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metamd.comparison import figures
from metamd.comparison.entrants import draw_configs
from metamd.comparison.pace import standings
from metamd.comparison.sections import Section
from metamd.experiments.declare import PAPERS_STEP, PLAIN, Entrant, Geometry, Scale, learned_file, learning_settings
from metamd.experiments.experiment import Experiment
from metamd.experiments.paper_tables import HELD_OUT, ONE_ANGLE, rotated
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.store import Records, Result, shortened
from metamd.files.usage import Usage
from metamd.inner.estimators import Direct
from metamd.inner.executor import Cell, fill
from metamd.inner.run import run_inner
from metamd.learning.outer import Adam, Method
from metamd.potentials import Diagonal, MaxDiagonal
from metamd.potentials.base import Centre
from metamd.tasks.base import TaskFamily

PIECES = (2, 3, 4, 5)
"""How many pieces a mixture has."""
WINDOWS = 10
"""Windows of a run over which the activity of a piece is averaged."""

SCALES = {
    "smoke": replace(ONE_ANGLE, images=100, steps=6, budget=1, usage_tasks=6, batch_size=50),
    "cpu": Scale(
        (HELD_OUT,), 1000, steps=200, outer_steps=4, tasks_per_step=4, usage_tasks=2, budget=9, rivals=("sgdm", "adam")
    ),
    "paper": Scale((HELD_OUT,), 1000, outer_steps=20, seeds=10, protocol="paper", search="grid"),
}


def _perturbed(pieces: int, centre: Centre, learned: LearnedOptimiser) -> Mapping[str, Any]:
    """N pieces that differ at random from the one that was learned, which then follow the bound's own gradient."""
    log_d = {k: v.detach().expand(pieces, *v.shape[1:]).clone() for k, v in learned.potential.log_d.items()}
    return {
        "potential": MaxDiagonal(pieces, centre=centre).with_metrics(log_d),
        "estimator": Direct(),
        "method": Method(Adam(lr=0.05), keep="last", spread=0.25),
    }


def _mixture(pieces: int, entries: Mapping[str, Entrant], centre: Centre = "start") -> Geometry:
    return Geometry(Diagonal(), entries, then=partial(_perturbed, pieces, centre), same_tasks=True)


MORE_OF_THREE = {
    "3 pieces, the paper's step": PAPERS_STEP,
    **{f"3 pieces, piece {j + 1} alone": Entrant(Usage(), piece=j) for j in range(3)},
}
GEOMETRIES = {
    "1-piece": Geometry(Diagonal(), {"1 piece": PLAIN}, same_tasks=True),
    **{f"{n}-pieces": _mixture(n, {f"{n} pieces": PLAIN} | (MORE_OF_THREE if n == 3 else {})) for n in PIECES},
    "3-pieces-origin": _mixture(
        3, {"3 pieces about the origin": PLAIN, "3 pieces about the origin, the paper's step": PAPERS_STEP}, centre="origin"
    ),
}

WATCHED = {
    **{f"{n} pieces": (f"{n}-pieces", True) for n in PIECES},
    "3 pieces, the paper's step": ("3-pieces", False),
    "3 pieces about the origin": ("3-pieces-origin", True),
    "3 pieces about the origin, the paper's step": ("3-pieces-origin", False),
}
"""Mixtures whose pieces are followed: the geometry, and whether steps are exact."""


def _activity(size: Scale, folder: Path, seed: int, workers: int) -> list[Result]:
    """Follow the pieces through held-out runs, draw their weights, and summarise them."""
    scale = next(name for name, known in SCALES.items() if known == size)
    about = {"experiment": "pieces, activity", "scale": scale, "seed": seed, **learning_settings(size)}
    side = rotated(size, HELD_OUT).held_out()
    cells = [
        Cell(f"{name}-{i}", partial(piece_weights, side, config, learned_file(folder, HELD_OUT, geometry), exact=exact))
        for name, (geometry, exact) in WATCHED.items()
        for i, config in enumerate(draw_configs(side, size.seeds, seed)[HELD_OUT])
    ]
    found = fill(Records(folder / "activity", about), cells, title="pieces: activity", workers=workers)
    activity = {name: [found[f"{name}-{i}"] for i in range(size.seeds)] for name in WATCHED}
    draw_weights(activity, folder / "activity.png")
    return [
        {
            "followed": name,
            "shares": np.mean([np.mean(r["weights"], axis=0) for r in runs], axis=0).tolist(),
            "at the end": np.mean([r["weights"][-1] for r in runs], axis=0).tolist(),
            "several": float(np.mean([r["several"] for r in runs])),
            "switches": float(np.mean([r["switches"] for r in runs])),
        }
        for name, runs in activity.items()
    ]


def piece_weights(side: TaskFamily, config: Mapping[str, Any], path: Path, *, exact: bool) -> Result:
    """The weights of the pieces over one run, averaged over windows of steps, and how often several were active.

    The run has the constant rate that the file recommends.
    """
    torch.set_num_threads(1)
    task, learned = side.build(config), load(path)
    run_ = run_inner(task, learned.potential.bind(task.init()), lr=learned.usage.factor, exact=exact)
    windows = np.array_split(run_.weights, min(WINDOWS, len(run_.weights)))
    return {
        "steps": [int(x) for x in np.cumsum([len(w) for w in windows])],
        "weights": shortened([w.mean(0).tolist() for w in windows], 7),
        "several": float((run_.weights.max(1) < 1).mean()),
        "switches": run_.switches,
        "diverged": run_.diverged,
    }


def draw_weights(activity: Mapping[str, list[Result]], path: Path) -> None:
    """The share of every piece over the run: mean over the seeds, the band from the smallest to the largest."""
    panels = {}
    for name, runs in activity.items():
        fewest = min(len(r["steps"]) for r in runs)
        x, weights = runs[0]["steps"][:fewest], np.array([r["weights"][:fewest] for r in runs])
        panels[name] = [
            figures.Curve(f"piece {j + 1}", x, w.mean(0).tolist(), w.min(0).tolist(), w.max(0).tolist())
            for j, w in enumerate(np.moveaxis(weights, 2, 0))
        ]
    figures.curves(panels, path, xlabel="step", ylabel="weight of the piece", logarithmic=False)


def _weight_tables(rows: Sequence[Result]) -> list[Section]:
    found = []
    for r in (r for r in rows if "followed" in r):
        weights = [" / ".join(f"{x:.2f}" for x in r[k]) for k in ("shares", "at the end")]
        found.append([r["followed"], *weights, f"{r['several']:.0%}", f"{r['switches']:.1f}"])
    columns = ["weight of the pieces", "over the run", "in the last steps", "steps on several pieces", "switches"]
    return [*standings([r for r in rows if "followed" not in r]), Section(columns=columns, rows=found)]


EXPERIMENTS = (Experiment("pieces", rotated, GEOMETRIES, SCALES, more=_activity, sections=_weight_tables),)

"""`metamd demo`: two runs of AdamW are recorded and learned from; others are trained with the file, beside tuned rivals.

A network is fitted to a piece of a photograph. The photographs come with scikit-learn: nothing is downloaded. A rival has
the best of several rates for the held-out tasks, and MetaMD has nothing tuned. A second part uses a file that comes with the
package.
"""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from metamd import tasks
from metamd.cli.main import show
from metamd.cli.options import Demo
from metamd.cli.report import summary
from metamd.comparison.compare import compare
from metamd.comparison.comparison import Comparison, Target
from metamd.comparison.entrants import Protocol, entrants
from metamd.comparison.page import as_text, write_page
from metamd.comparison.sections import Section, sections
from metamd.comparison.training import Measuring, one_thread
from metamd.experiments.per_instance import draw_side_by_side
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.progress import Progress
from metamd.files.recorded_run import Run
from metamd.files.store import Result, write_json
from metamd.files.text import install
from metamd.inner.run import OptimiserSteps, train
from metamd.learning.recorded import learn
from metamd.learning.recorder import Recorder
from metamd.rivals import learned_rival, rival
from metamd.tasks.base import TaskFamily
from metamd.tasks.pictures import PictureFamily, Pixels, Suite

DEMO_RIVALS = ("sgdm", "adamw", "muon", "soap")


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does."""

    side: int = 40  # pixels of a piece, by as many
    width: int = 64  # units of the hidden layers
    steps: int = 100  # of a fit
    pieces: int = 3  # test tasks
    budget: int = 5  # learning rates per rival
    quadratic: int = 200  # steps on a quadratic


DEMO_PARTS = {
    "photographs": (
        "Photographs: learned here, from two recorded runs",
        "A network gives the colour of a place, and is fitted to a piece of a photograph. AdamW at its default rate did so "
        "twice, for pieces of one photograph. From these two records the file was learned, without any further training. "
        "New networks are fitted with it to pieces of another photograph.",
    ),
    "quadratics": (
        "Quadratics: a file that comes with the package",
        "New, badly scaled quadratics in two dimensions. The file was learned on others.",
    ),
}
"""The title of each part of the page, and what its tasks are."""

PICTURES = "pictures.png"
"""The figure that the page opens with."""


def run(options: Demo, size: DemoSize | None = None) -> None:
    """Carry out the command; everything at its full size if none is given."""
    size, began = size or DemoSize(), time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    parts, rest, found = list[Section](), list[Section](), dict[str, Result]()
    # Problems this small lose on a second thread, and sums in one order give the same numbers on every machine.
    with one_thread(), Progress("metamd demo") as display:
        family = photographs(size)
        learned = learn_from_two(family, options.seed, display)
        learned.save(options.out / "photographs.safetensors")
        quadratics = tasks.quadratic(steps=size.quadratic)
        pairs = {"photographs": (learned, family.held_out()), "quadratics": (load("quadratic"), quadratics)}
        for name, (file, held_out) in pairs.items():
            (title, about), folder = DEMO_PARTS[name], options.out / name
            folder.mkdir(exist_ok=True)
            display.say(f"{title.split(':')[0]}: MetaMD and {len(DEMO_RIVALS)} rivals, {size.budget} rates each.")
            comparison = _compared(file, held_out, size, options.seed)
            shown, *more = sections(comparison, folder)
            drawn = _at_equal_seconds(comparison, held_out, file, folder) if name == "photographs" else []
            texts = [about, *shown.texts, f"What the file recommends: {file.usage}."]
            parts.append(replace(shown, title=title, texts=texts, figures=[*drawn, *shown.figures]))
            rest += [replace(part, title=f"{title.split(':')[0]}: {part.title}") for part in more]
            found[name] = summary(comparison)
    write_json(options.out / "demo.json", found)
    page = options.out / "report.html"
    write_page(page, "MetaMD: what a learned optimiser does", [*parts, *rest], command=f"metamd demo --seed {options.seed}")
    where = f"Open {page}. `metamd inspect {options.out / 'photographs.safetensors'}` prints what was learned."
    next_step = 'Your own: record two runs with metamd.Recorder, as in README.md under "Learn your own".'
    show(
        {"seed": options.seed, **found, "page": str(page)}, f"{as_text(parts)}\n\n{where}\n{next_step}", as_json=options.json
    )
    print(f"Took {time.perf_counter() - began:.0f} s.", file=sys.stderr)


def _at_equal_seconds(c: Comparison, family: TaskFamily, learned: LearnedOptimiser, folder: Path) -> list[tuple[Path, str]]:
    draw_side_by_side(c, family, learned, folder / PICTURES, parts=(10, 4), narrow=True)
    caption = (
        "The same piece, fitted by every optimiser for the same time: until MetaMD has taken a tenth of its steps, and a "
        "quarter of them. Above each: the steps until then, and the signal-to-noise ratio, where more decibels are better."
    )
    return [(folder / PICTURES, caption)]


def learn_from_two(known: TaskFamily, seed: int, display: Progress | None = None) -> LearnedOptimiser:
    """Train two tasks by AdamW at its default rate, record the runs, and learn from them."""
    runs, generator = list[Run](), torch.Generator().manual_seed(seed)
    for config in (known.sample(generator) for _ in range(100)):
        if len(runs) == 2 or any(run.name == config["domain"] for run in runs):
            continue
        task, began = known.build(config), time.perf_counter()
        params = {name: nn.Parameter(x) for name, x in task.init().items()}
        optimiser = torch.optim.AdamW(list(params.items()))
        recorder = Recorder(optimiser, name=str(config["domain"]), batch_size=len(task.batch(0)["inputs"]))
        train(task, OptimiserSteps(params, optimiser), task.steps)
        runs.append(recorder.finish())
        if display is not None:
            seconds = time.perf_counter() - began
            display.say(f"Recorded AdamW on {config['domain']}: {task.steps} steps in {seconds:.1f} s.")
    began, learned = time.perf_counter(), learn(runs)
    if display is not None:
        display.say(f"Learned from both in {time.perf_counter() - began:.2f} s, without any training.")
    return learned


def _compared(file: LearnedOptimiser, family: TaskFamily, size: DemoSize, seed: int) -> Comparison:
    """The file as it recommends against tuned rivals."""
    several = len(family.drawn().domains)
    protocol = Protocol(
        "handicap",
        1 if several else size.pieces,
        family.steps,
        seed,
        Measuring(every=max(1, family.steps // 20), splits=()),  # neither family has a test split
        Target("AdamW, linear decay"),
        screen=2,
        budget=size.budget,
        schedules=("linear",),
    )
    ours = {"MetaMD": learned_rival(file).untuned()}
    everybody = entrants(ours, [rival(name) for name in DEMO_RIVALS], family, protocol)
    return compare(everybody, family, protocol)


BUNDLED = ("china.jpg", "flower.jpg")
"""Photographs of scikit-learn: pieces of the first are learned from."""

ACROSS, DOWN = 3, 2
"""Pieces of a photograph."""

TESTED = (2, 5, 1)
"""The numbers of the pieces of the second one that are fitted, the first of which is shown: the middle of the flower."""


def photographs(size: DemoSize) -> PictureFamily:
    """Pieces of one photograph to learn from, and of another one to test on."""
    sides = [f"china {i + 1}" for i in range(ACROSS * DOWN)], [f"flower {i}" for i in TESTED[: size.pieces]]
    suite = Suite("scikit-learn", sides, squares, "six squares, means of the pixels")
    return PictureFamily(suite, "siren", size.width, size.side, size.steps)


def squares(side: int) -> dict[str, Pixels]:
    """Six pieces of each photograph, by name."""
    try:
        from sklearn.datasets import load_sample_image
    except ModuleNotFoundError:
        raise ValueError(f"the photographs come with scikit-learn, which is not installed. {install('demo')}") from None
    found = {}
    for name in BUNDLED:
        whole = torch.from_numpy(load_sample_image(name)[80:336, 128:512].copy()).float()
        small = F.interpolate(whole.permute(2, 0, 1)[None], (DOWN * side, ACROSS * side), mode="area")[0]
        corners = ((row, column) for row in range(0, DOWN * side, side) for column in range(0, ACROSS * side, side))
        for i, (row, column) in enumerate(corners):
            piece = small[:, row : row + side, column : column + side].flatten(1).T
            found[f"{name.split('.')[0]} {i + 1}"] = piece.round().to(torch.uint8).numpy()
    return found

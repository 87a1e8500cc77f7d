"""`metamd demo`: two runs of AdamW are recorded and learned from; a third is trained with the file, beside tuned rivals.

The digits come with scikit-learn: nothing is downloaded. A rival has the best of several rates for the held-out tasks, and
MetaMD has nothing tuned. A second part uses a file that comes with the package.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from metamd import tasks
from metamd.cli.main import show
from metamd.cli.options import Demo
from metamd.cli.report import summary
from metamd.comparison.compare import compare
from metamd.comparison.comparison import Comparison, Target
from metamd.comparison.entrants import Protocol, entrants
from metamd.comparison.page import as_text, write_page
from metamd.comparison.sections import Section, opening, sections
from metamd.comparison.training import Measuring, one_thread
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.progress import Progress
from metamd.files.recorded_run import Run
from metamd.files.store import Result, write_json
from metamd.files.text import install
from metamd.learning.recorded import Recorder, learn
from metamd.rivals import learned_rival, rival
from metamd.tasks.base import TaskFamily
from metamd.tasks.vision import turned

DEMO_RIVALS = ("sgdm", "adamw", "muon", "soap")


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does."""

    angles: tuple[int, ...] = (0, 60)  # rotations of the recorded runs, in degrees
    held_out: int = 30  # the rotation to test on
    steps: int = 200  # T
    hidden: int = 64  # units of the hidden layer
    seeds: int = 3  # test tasks
    budget: int = 5  # learning rates per rival


DEMO_PARTS = {
    "digits": (
        "Rotated digits: learned here, from two recorded runs",
        "A small network on 8x8 digits. AdamW at its default rate trained it twice, on digits turned by {angles} degrees. "
        "From these two records the file was learned, without any further training. New networks are trained with it on "
        "digits turned by {held_out} degrees.",
    ),
    "quadratics": (
        "Quadratics: a file that comes with the package",
        "New, badly scaled quadratics in two dimensions. The file was learned on others.",
    ),
}
"""The title of each part of the page, and what its tasks are."""


def run(options: Demo, size: DemoSize | None = None) -> None:
    """Carry out the command; everything at its full size if none is given."""
    size, began = size or DemoSize(), time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    print("Recording two runs of AdamW, learning from them, and comparing with tuned rivals.", file=sys.stderr, flush=True)
    parts, rest, found = list[Section](), list[Section](), dict[str, Result]()
    # Problems this small lose on a second thread, and sums in one order give the same numbers on every machine.
    with one_thread(), Progress("metamd demo"):
        known, unseen = rotated_digits(size)
        learned = learn_from_two(known, options.seed)
        learned.save(options.out / "digits.safetensors")
        quadratics = tasks.quadratic(steps=size.steps)
        for name, file, family in (("digits", learned, unseen), ("quadratics", load("quadratic"), quadratics)):
            comparison = _compared(file, family, size, options.seed)
            (options.out / name).mkdir(exist_ok=True)
            shown, (title, about) = opening(comparison, options.out / name), DEMO_PARTS[name]
            texts = [about.format(angles=" and ".join(map(str, size.angles)), held_out=size.held_out), *shown.texts]
            parts.append(replace(shown, title=title, texts=[*texts, f"What the file recommends: {file.usage}."]))
            more = sections(comparison, options.out / name)[1:]
            rest += [replace(part, title=f"{title.split(':')[0]}: {part.title}") for part in more]
            found[name] = summary(comparison)
    write_json(options.out / "demo.json", found)
    page = options.out / "report.html"
    write_page(page, "MetaMD: what a learned optimiser does", [*parts, *rest], command=f"metamd demo --seed {options.seed}")
    where = f"The report is in {page}. `metamd inspect {options.out / 'digits.safetensors'}` prints what was learned."
    show({"seed": options.seed, **found, "page": str(page)}, f"{as_text(parts)}\n\n{where}", as_json=options.json)
    print(f"Took {time.perf_counter() - began:.0f} s.", file=sys.stderr)


def learn_from_two(known: TaskFamily, seed: int) -> LearnedOptimiser:
    """Train one task of each domain by AdamW at its default rate, record the runs, and learn from them."""
    runs, generator = list[Run](), torch.Generator().manual_seed(seed)
    for config in (known.sample(generator) for _ in range(100)):
        if len(runs) == 2 or any(run.name == config["dataset"] for run in runs):
            continue
        task = known.build(config)
        params = {name: nn.Parameter(x) for name, x in task.init().items()}
        optimiser = torch.optim.AdamW(list(params.items()))
        recorder = Recorder(optimiser, name=str(config["dataset"]), batch_size=50)
        for step in range(task.steps):
            optimiser.zero_grad()
            torch.autograd.backward(task.loss(params, task.batch(step)))
            optimiser.step()
        runs.append(recorder.finish())
    return learn(runs)


def _compared(file: LearnedOptimiser, family: TaskFamily, size: DemoSize, seed: int) -> Comparison:
    """The file as it recommends against tuned rivals."""
    usage = file.usage
    ours = {"MetaMD": learned_rival(file).with_setting(usage.schedule, momentum=usage.momentum)}
    graded = len(family.drawn().domains) > 0  # quadratics have neither a test split nor classes
    measuring = Measuring(every=max(1, size.steps // 20), splits=("test",) if graded else ())
    protocol = Protocol(
        "handicap",
        size.seeds,
        size.steps,
        seed,
        measuring,
        Target("AdamW, linear decay"),
        screen=2,
        budget=size.budget,
        schedules=("linear",),
    )
    everybody = entrants(ours, [rival(name) for name in DEMO_RIVALS], family, protocol)
    return compare(everybody, family, protocol)


def rotated_digits(size: DemoSize) -> tuple[TaskFamily, TaskFamily]:
    """Rotated digits to learn from and to test on."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ValueError(f"the digits come with scikit-learn, which is not installed. {install('demo')}") from None
    found = load_digits()
    pictures, labels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)

    def family(angles: Sequence[int]) -> TaskFamily:
        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(64, size.hidden), nn.ReLU(), nn.Linear(size.hidden, 10))

        data = {f"{a} degrees": (turned(pictures, a).flatten(1), labels) for a in angles}
        return tasks.supervised(make, data, batch_size=50, steps=size.steps, name="rotated digits")

    return family(size.angles), family([size.held_out])

"""`metamd demo`: the main job end to end: learn on a family, use it on new tasks beside tuned rivals, report.

The digits come with scikit-learn: nothing is downloaded. A rival has the best of several rates for the held-out tasks;
MetaMD is used as it was learned. A learned diagonal, the paper's potential, stands beside it: it has the certificate.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Adam

from metamd import tasks
from metamd.cli.main import show
from metamd.cli.options import Demo
from metamd.cli.report import summary
from metamd.comparison.compare import compare
from metamd.comparison.comparison import Comparison, Target
from metamd.comparison.entrants import Protocol, entrants
from metamd.comparison.figures import learning_curves
from metamd.comparison.page import as_text, write_page
from metamd.comparison.sections import Section, results
from metamd.comparison.training import Measuring, one_thread
from metamd.files.learned import LearnedOptimiser
from metamd.files.progress import Progress
from metamd.files.store import Result, write_json
from metamd.files.text import install
from metamd.files.usage import Usage
from metamd.inner.objectives import Reference, Regret
from metamd.inner.run import run_inner
from metamd.learning.meta import meta_train
from metamd.potentials import Diagonal
from metamd.rivals import learned_rival, rival
from metamd.tasks.base import Task, TaskFamily, derive_seed
from metamd.tasks.vision import turned

DEMO_RIVALS = ("sgd", "sgdm", "adam")


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does."""

    angles: tuple[int, ...] = (0, 15, 60, 75, 90)  # rotations to learn from, in degrees
    held_out: int = 30  # the rotation to test on
    start_angle: int = 45  # rotation of the network at which tasks begin, where they share a start
    steps: int = 200  # T
    hidden: int = 64  # units of the hidden layer
    outer_steps: int = 5  # of a diagonal, and of what is learned for quadratics
    tasks_per_step: int = 4  # of learning
    seeds: int = 5  # test tasks
    budget: int = 7  # learning rates per rival and schedule


DEMO_PARTS = {
    "quadratics": ("Quadratics", "Badly scaled quadratics in two dimensions that were not seen while learning."),
    "digits": (
        "Rotated digits, every task from a new network",
        "A small network on 8x8 digits, rotated by an angle that was not learned from.",
    ),
    "digits-adapted": (
        "Rotated digits, every task from the same network",
        "The same network, trained at one rotation, is adapted to an angle that was not learned from.",
    ),
}
"""The title of each part of the page, and what its tasks are."""


def run(options: Demo, size: DemoSize | None = None) -> None:
    """Carry out the command; everything at its full size if none is given."""
    size, began = size or DemoSize(), time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    parts, found = list[Section](), dict[str, Result]()
    # Problems this small lose on a second thread, and sums in one order give the same numbers on every machine.
    with one_thread(), Progress("metamd demo"):
        fresh, shared = rotated_digits(size), rotated_digits(size, options.seed)
        sides = {"quadratics": (tasks.quadratic(steps=size.steps),) * 2, "digits": fresh, "digits-adapted": shared}
        for name, (known, unseen) in sides.items():
            comparison, files = _compared(known, unseen, size, options.seed)
            for ending, learned in files.items():
                learned.save(options.out / f"{name}{ending}.safetensors")
            task = unseen.build(unseen.sample(torch.Generator().manual_seed(derive_seed(options.seed, "certificate"))))
            certified = certificate(task, files["-diagonal"])
            (options.out / name).mkdir(exist_ok=True)
            learning_curves(comparison, list(comparison.labels)[:2], options.out / name)
            figure = [(options.out / name / "curves.png", "Training loss on the tasks that were held out.")]
            table, (title, about) = results(comparison), DEMO_PARTS[name]
            best = min(comparison.labels, key=lambda label: float(comparison.values(label, "mean_loss").mean()))
            verdict = f"Smallest mean loss over the run: {best}." + " Here learning does not pay." * (best != "MetaMD")
            usage = f"What was chosen for MetaMD while learning: {files[''].usage}."
            texts = [about, *table.texts, usage, verdict, _certificate_line(certified)]
            parts.append(replace(table, title=title, texts=texts, figures=figure))
            found[name] = summary(comparison) | {"certificate": certified}
    write_json(options.out / "demo.json", found)
    page = options.out / "report.html"
    write_page(page, "MetaMD: what a learned optimiser does", parts, command=f"metamd demo --seed {options.seed}")
    where = f"The report is in {page}, and the learned optimisers beside it: `metamd inspect` prints one."
    show({"seed": options.seed, **found, "page": str(page)}, f"{as_text(parts)}\n\n{where}", as_json=options.json)
    print(f"Took {time.perf_counter() - began:.0f} s.", file=sys.stderr)


def _compared(
    known: TaskFamily, unseen: TaskFamily, size: DemoSize, seed: int
) -> tuple[Comparison, dict[str, LearnedOptimiser]]:
    """Learn on one side, the default and a diagonal, and compare on the other with tuned rivals."""
    learned = meta_train(known, tasks_per_step=size.tasks_per_step, seed=seed)
    plain = meta_train(known, Diagonal(), outer_steps=size.outer_steps, tasks_per_step=size.tasks_per_step, seed=seed)
    ours = {
        "MetaMD": learned_rival(learned).untuned(),
        "MetaMD, diagonal": learned_rival(plain, name="diagonal", title="MetaMD, diagonal", usage=Usage()).untuned(),
    }
    graded = unseen is not known  # quadratics have neither a test split nor classes
    measuring = Measuring(every=max(1, size.steps // 20), splits=("test",) if graded else ())
    aim = Target("Adam, linear decay")
    protocol = Protocol("handicap", size.seeds, size.steps, seed, measuring, aim, budget=size.budget)
    everybody = entrants(ours, [rival(name) for name in DEMO_RIVALS], unseen, protocol)
    return compare(everybody, unseen, protocol), {"": learned, "-diagonal": plain}


# rotated digits


def rotated_digits(size: DemoSize, seed: int | None = None) -> tuple[TaskFamily, TaskFamily]:
    """Rotated digits to learn from and to test on; with a seed, all begin at one network trained at another rotation."""
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

    known, unseen = family(size.angles), family([size.held_out])
    if seed is None:
        return known, unseen
    first = family([size.start_angle])
    task = first.build(first.sample(torch.Generator().manual_seed(derive_seed(seed, "start"))))
    start, _ = Reference(Adam, lr=3e-3, factor=2.0).run(task, task.init(), size.steps)
    return tasks.starting_at(known, start), tasks.starting_at(unseen, start)


# the certificate


def certificate(task: Task, learned: LearnedOptimiser) -> Result:
    """The regret bound of one run against a longer run of Adam, and what was realised, per step.

    sum_t <g_t, theta_t - u> <= B(u||theta_1) + 1/2 sum_t g_t' D^-1 g_t for any losses; where they are convex the left side
    is at least the regret.
    """
    objective = Regret(comparator=Reference(Adam, lr=1e-2, factor=2.0))
    run = run_inner(task, learned.potential, reference=objective.reference, certify=True)
    if run.diverged or run.reference is None:
        return {"diverged": run.diverged}
    bound = float(objective.value(run, learned.bind(list(run.start.items())).potential).detach())
    return {"bound": bound / run.steps, "realised": run.regret(run.reference) / run.steps, "steps": run.steps}


def _certificate_line(found: Result) -> str:
    if "bound" not in found:
        return f"Certificate of the diagonal: none, the run was given up. {found['diverged']}"
    return (
        f"Certificate of the diagonal: over {found['steps']} steps the linearised regret against a longer run of Adam is at "
        f"most {found['bound']:.3f} per step; realised: {found['realised']:.3f}."
    )

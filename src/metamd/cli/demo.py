"""`metamd demo`: the main job end to end: learn on a family, use it on new tasks beside tuned rivals, report."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from metamd.cli.options import Demo
from metamd.comparison import figures
from metamd.comparison.page import as_text, write_page
from metamd.comparison.sections import Section
from metamd.comparison.statistics import Spread
from metamd.experiments import digits, race
from metamd.experiments.race import RIVALS
from metamd.files.progress import Progress
from metamd.files.store import Result, write_json
from metamd.learning.meta import meta_train
from metamd.potentials import Diagonal
from metamd.tasks import quadratic
from metamd.tasks.base import derive_seed

TOLERANCE = 1e-6
RATES = {"low": -4, "high": 1, "per_decade": 8}


@dataclass(frozen=True)
class Size:
    """How much the demo does.

    Args:
        problems: test quadratics.
        limit: the most iterations on one.
        outer_steps: of the meta-training on quadratics.
        tasks_per_step: of the same.
        plans: the settings of the digits by title.
    """

    problems: int = 20
    limit: int = 5_000
    outer_steps: int = 8
    tasks_per_step: int = 16
    plans: Mapping[str, digits.Plan] = field(
        default_factory=lambda: {
            "every task starts from the same network": digits.Plan(),
            "every task starts from a new network": digits.Plan(start_angle=None, angles=(0, 15, 45, 60, 75)),
        }
    )


def run(options: Demo, size: Size | None = None) -> int:
    """Carry out the command.

    Args:
        options: what was asked.
        size: how much; all of it if not given.
    """
    size, began = size or Size(), time.perf_counter()
    # Problems this small lose on a second thread, and sums in one order give the same numbers on every machine.
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    with Progress("metamd demo") as progress:

        def say(what: str) -> None:
            progress.advance(what)

        quadratics = _quadratics(size, options, say)
        trained = {}
        for number, (title, plan) in enumerate(size.plans.items()):
            found, learned = digits.compare(plan, options.seed, lambda what, title=title: say(f"digits, {title}: {what}"))  # type: ignore[misc]
            learned.save(options.out / f"digits-{number + 1}.safetensors")
            trained[title] = found | {"plan": asdict(plan)}
        say("drawing")
        _draw(quadratics, trained, options.out)
    result = {"seed": options.seed, "quadratics": quadratics, "digits": trained}
    write_json(options.out / "demo.json", result)
    sections = _sections(quadratics, trained, size, options.out)
    page = options.out / "report.html"
    write_page(page, "MetaMD: what a learned geometry does", sections, command=f"metamd demo --seed {options.seed}")
    if options.json:
        print(json.dumps(result | {"page": str(page)}))
    else:
        print(as_text(sections))
        print(f"\nThe report is in {page}, and the learned geometries beside it: `metamd inspect` prints one.")
    print(f"Took {time.perf_counter() - began:.0f} s.", file=sys.stderr)
    return 0


def _quadratics(size: Size, options: Demo, say: digits.Say) -> Result:
    """Iterations on quadratics that were not seen in training."""
    say("quadratics: learning")
    family = quadratic()
    learned = meta_train(
        family, Diagonal(), outer_steps=size.outer_steps, tasks_per_step=size.tasks_per_step, seed=options.seed
    )
    learned.save(options.out / "quadratics.safetensors")
    problems = race.Problems.draw(family, size.problems, derive_seed(options.seed, "test problems"))
    say("quadratics: rivals")
    entries = {"MetaMD": race.learned(problems, learned, [TOLERANCE], size.limit)[0]}
    for rival in RIVALS.values():
        entries[rival.name] = race.tuned(problems, rival, rival.grid(RATES, everything=False), TOLERANCE, size.limit)
    entries["best diagonal"] = race.best_diagonal(problems, TOLERANCE, size.limit, points=15)
    q, b = (problems.batch[k][0] for k in ("Q", "b"))
    members = {n: {"iterations": e.counts, "setting": e.setting, "path": e.path} for n, e in entries.items()}
    return {"members": members, "Q": q.tolist(), "b": b.tolist(), "optimum": torch.linalg.solve(2 * q, b).tolist()}


def _draw(quadratics: Result, trained: Mapping[str, Result], out: Path) -> None:
    (a, c), (_, d) = quadratics["Q"]
    b = quadratics["b"]

    def surface(x: Any, y: Any) -> Any:
        return a * x**2 + 2 * c * x * y + d * y**2 - b[0] * x - b[1] * y

    panels = []
    for name, found in quadratics["members"].items():
        count = found["iterations"][0]
        title = f"{name}\n{'did not arrive' if count is None else f'{count} iterations'}"
        panels.append(figures.Panel(title, surface, found["path"], quadratics["optimum"]))
    figures.trajectories({"one of the problems": panels}, out / "quadratics.png")
    lines = {
        title: [
            figures.Curve(name, list(range(1, len(m["curve"]) + 1)), _smooth(m["curve"]))
            for name, m in found["members"].items()
            if m["mean_loss"] < float("inf")
        ]
        for title, found in trained.items()
    }
    figures.curves(lines, out / "digits.png", xlabel="step", ylabel="training loss, mean over tasks and 10 steps")


def _smooth(values: list[float], window: int = 10) -> list[float]:
    kept = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [sum(k) / len(k) for k in kept]


def _sections(quadratics: Result, trained: Mapping[str, Result], size: Size, out: Path) -> list[Section]:
    parts = [_quadratic_section(quadratics, size, out)]
    for number, (title, found) in enumerate(trained.items()):
        shown = [(out / "digits.png", "Training loss on the held-out rotation.")] if number + 1 == len(trained) else []
        parts.append(_digit_section(title, found, shown))
    return parts


def _quadratic_section(found: Result, size: Size, out: Path) -> Section:
    spreads = {name: Spread.of(m["iterations"]) for name, m in found["members"].items()}
    ours = spreads["MetaMD"].median
    rows = [
        [name, f"{s.median:g}", f"{s.lower:g} to {s.upper:g}", f"{s.median / ours:.1f} x", f"{s.arrived}/{s.count}"]
        for name, s in spreads.items()
    ]
    return Section(
        "Quadratics",
        [
            f"Iterations until the gradient is below {TOLERANCE:g}, on {size.problems} badly scaled quadratics that were "
            "not seen in meta-training. MetaMD has nothing tuned; the rivals have their best learning rate, chosen on these "
            "very problems. So has the best diagonal: it is what one diagonal metric can reach at most."
        ],
        ["", "median", "quartiles", "of MetaMD's", "arrived"],
        rows,
        [(out / "quadratics.png", "From the green dot to the star, on the first of the problems.")],
    )


def _digit_section(title: str, found: Result, shown: list[tuple[Path, str]]) -> Section:
    plan, members = found["plan"], found["members"]
    best = min(members, key=lambda n: members[n]["mean_loss"])
    rows = [
        [
            name if "rate" not in m else f"{name}, rate {m['rate']:g}",
            f"{m['mean_loss']:.3f} +- {m['deviation']:.3f}",
            f"{m['train_loss']:.3f}",
            f"{100 * m['accuracy']:.1f} %",
            str(m.get("tried", 1)),
        ]
        for name, m in members.items()
    ]
    verdict = f"Smallest mean loss over the run: {best}."
    if best != "MetaMD":
        verdict += " Here the learned geometry does not pay."
    angles = ", ".join(map(str, plan["angles"]))
    return Section(
        f"Rotated digits: {title}",
        [
            f"Learned on rotations by {angles} degrees, tested on {plan['held_out']} degrees: {plan['steps']} steps, "
            f"{plan['seeds']} seeds (mean and standard deviation), a network with {plan['hidden']} hidden units. The rivals "
            f"have the best of {len(plan['rates'])} learning rates, chosen on the held-out task. MetaMD has nothing tuned "
            f"there; what was chosen for it on the other rotations: {found['usage']}.",
            verdict,
            _certificate(found["certificate"]),
        ],
        ["", "mean loss over the run", "loss at the end", "test accuracy", "runs per seed"],
        rows,
        shown,
    )


def _certificate(found: Result) -> str:
    if "bound" not in found:
        return f"Certificate of the diagonal: none, the run was given up. {found['diverged']}"
    return (
        f"Certificate of the diagonal: over {found['steps']} steps the linearised regret against a longer run of Adam is at "
        f"most {found['bound']:.3f} per step; realised: {found['realised']:.3f}."
    )

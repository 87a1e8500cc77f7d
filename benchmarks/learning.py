"""What `meta_train(family)` gives beside the networks of the results, and how much of it two workers share.

    python benchmarks/learning.py                   # all parts
    python benchmarks/learning.py logistic pictures # some

- quadratics: coupled ones of dimension 8. Iterations to a gradient of 1e-6 on new problems, against torch's Adam at the rate
  of 25 over four decades that is best on other problems of the family.
- logistic: the gap to the smallest loss at the end, in the geometric mean over new regressions, against Adam at the best of
  the same rates, constant and with linear decay.
- pictures: coordinate networks of `tasks.pictures`, 16x16 pixels, width 32, 200 steps, on four held-out pictures. Against
  SOAP and Adam at the best of seven rates, constant and with linear decay, for the end of the runs on three other pictures.
- workers: how much sooner two workers are done with learning than one, in processor time: the time of every piece of work is
  taken, and each goes to the worker that is free first. A fork and the way back of the result count as often as they happen.
  It holds for a machine with two free cores, and does not need one.

What was measured is kept in benchmarks/results/learning.json, part by part, and the tables are printed.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from machine import machine
from metamd import MetaMD, meta_train, tasks
from metamd.comparison.training import Measuring, train_contender
from metamd.experiments.synthetic import BATCHED_RIVALS, NEVER, Problems, iterations, means
from metamd.files.learned import LearnedOptimiser
from metamd.files.progress import showing
from metamd.files.usage import Schedule
from metamd.inner.executor import Executor, T
from metamd.inner.run import OptimiserSteps, train
from metamd.inner.together import Stacked
from metamd.rivals import Contender, learned_rival, rival
from metamd.tasks.base import SolvedTask, Task, TaskFamily
from metamd.tasks.pictures import psnr

RESULTS = Path(__file__).parent / "results" / "learning.json"
RATES = {"low": -3, "high": 1, "per_decade": 6}
"""Of Adam on quadratics, ends and density of a grid in log10: 25 rates."""

SMALL = 1e-6
"""The gradient that counts as the optimum."""

LIMIT = 3000
"""Iterations after which a run is given up."""

FROM_FLAT_TO_STEEP = tuple(0.3 * (14 / 0.3) ** (i / 7) for i in range(8))
"""Curvatures in equal ratios, from one mean of the paper's quadratics to the other."""


# vectors


def quadratics(curvatures: Sequence[float], coupling: float) -> list[dict[str, Any]]:
    """One row: iterations on new problems."""
    family = tasks.quadratic(curvatures, coupling=coupling, steps=200)
    learned = meta_train(family)
    adam, known, new = BATCHED_RIVALS["adam"], Problems.draw(family, 20, 1), Problems.draw(family, 50, 2)
    grid = adam.grid(RATES, everything=False)
    best = grid[int(means(iterations(known, adam, grid, SMALL, LIMIT), LIMIT).argmin())]
    theirs = [LIMIT if n == NEVER else n for n in iterations(new, adam, [best], SMALL, LIMIT)[0].tolist()]
    ours = [arrival(task, learned) for task in new.tasks]
    pairs = list(zip(ours, theirs, strict=True))
    return [
        {
            "family": f"curvatures {min(curvatures):g} to {max(curvatures):g}, coupling {coupling:g}",
            "usage": str(learned.usage),
            "ours": median(ours),
            "adam": median(theirs),
            "ratio": median(a / b for a, b in pairs),
            "behind": sum(a > b for a, b in pairs),
            "problems": len(pairs),
            "rate": best["lr"],
        }
    ]


def arrival(task: Task, learned: LearnedOptimiser) -> int:
    """After how many steps as the file recommends the gradient is small."""
    params = {n: nn.Parameter(x.clone()) for n, x in task.init().items()}

    def until(t: int, losses: Sequence[float], grads: Mapping[str, Tensor]) -> str:
        return "it has arrived" if math.sqrt(sum(float(g.square().sum()) for g in grads.values())) < SMALL else ""

    rule = OptimiserSteps(params, MetaMD(params.items(), learned, steps=LIMIT, check_finite=False))
    return len(train(task, rule, LIMIT, until=until).losses)


def logistic() -> list[dict[str, Any]]:
    """One row: the gaps at the end."""
    family = tasks.logistic()
    learned, new, known = meta_train(family), drawn(family, 20, 2), drawn(family, 10, 1)
    offered = [(10 ** (-3 + i / 6), linear) for i in range(19) for linear in (False, True)]
    rate, linear = min(offered, key=lambda setting: gap(known, adam_together(known, *setting)))
    return [
        {
            "usage": str(learned.usage),
            "ours": gap(new, [recommended(task, learned) for task in new]),
            "adam": gap(new, adam_together(new, rate, linear)),
            "setting": f"{rate:.3g}, {'linear' if linear else 'constant'}",
        }
    ]


def recommended(task: Task, learned: LearnedOptimiser) -> dict[str, Tensor]:
    """The end of a run as the file recommends."""
    params = {n: nn.Parameter(x.clone()) for n, x in task.init().items()}
    train(task, OptimiserSteps(params, MetaMD(params.items(), learned, steps=task.steps, check_finite=False)), task.steps)
    return {n: x.detach() for n, x in params.items()}


def adam_together(problems: Sequence[Task], rate: float, linear: bool) -> list[dict[str, Tensor]]:
    """The ends of torch's Adam on several tasks: as it takes each number alone, they are run side by side."""
    stacked, steps = Stacked(problems), problems[0].steps
    params = {n: nn.Parameter(x) for n, x in stacked.init().items()}
    factor = (lambda t: 1 - t / steps) if linear else None
    train(stacked, OptimiserSteps(params, torch.optim.Adam(params.values(), lr=rate), factor), steps, until=None)
    return [{n: x[i].detach() for n, x in params.items()} for i in range(len(problems))]


def gap(problems: Sequence[Task], ends: Sequence[Mapping[str, Tensor]]) -> float:
    """The geometric mean of loss minus the smallest loss, on all examples of training."""
    logs = []
    for task, end in zip(problems, ends, strict=True):
        assert isinstance(task, SolvedTask)
        logs.append(math.log(max(task.evaluate(end, "train").loss - task.minimum(), 1e-16)))
    return math.exp(fmean(logs))


def drawn(family: TaskFamily, count: int, seed: int) -> list[Task]:
    generator = torch.Generator().manual_seed(seed)
    return [family.build(family.sample(generator)) for _ in range(count)]


def best_contender(
    name: str, rates: Sequence[float], schedules: Sequence[Schedule], score: Callable[[Contender], float]
) -> Contender:
    """The rate and schedule with the smallest score."""
    offered = [rival(name).with_setting(schedule, lr=rate) for schedule in schedules for rate in rates]
    return min(offered, key=score)


# coordinate networks


def pictures(steps: int = 200) -> TaskFamily:
    return tasks.pictures(width=32, side=16, steps=steps)


def coordinate_networks() -> list[dict[str, Any]]:
    """A row for each optimiser: PSNR at the end and mean loss over the run, in the mean over the held-out pictures."""
    family = pictures()
    learned = meta_train(family, tasks_per_step=3)
    known, new = drawn(family, 3, 1), drawn(family.held_out(), 4, 2)
    places = [1e-4 * 10 ** (i / 2) for i in range(7)]
    found = [fitted(new, learned_rival(learned).untuned(), "MetaMD", str(learned.usage))]
    for name in ("soap", "adam"):
        best = best_contender(name, places, ("constant", "linear"), partial(log_end, known))
        found.append(fitted(new, best, rival(name).title, f"{best.setting['lr']:.3g}, {best.schedule}"))
    return found


def log_end(problems: Sequence[Task], contender: Contender) -> float:
    return fmean(math.log(max(ended(task, contender)[1], 1e-16)) for task in problems)


def ended(task: Task, contender: Contender) -> tuple[float, float]:
    """The mean loss over a run, and that at its end."""
    outcome = train_contender(task, contender, measuring=Measuring(every=5, splits=()))
    return outcome.mean_loss, outcome.final_loss


def fitted(problems: Sequence[Task], contender: Contender, label: str, setting: str) -> dict[str, Any]:
    runs = [ended(task, contender) for task in problems]
    psnrs = [psnr(end) for _, end in runs]
    return {"label": label, "setting": setting, "psnr": psnrs, "mean loss": fmean(mean for mean, _ in runs)}


# workers


@dataclass(frozen=True)
class Shared(Executor):
    """Computes in this process, and notes what so many workers would have shared of it, in seconds of the processor."""

    taken: list[float] = field(default_factory=list)  # by all pieces, batch by batch
    spans: list[float] = field(default_factory=list)  # until the last worker would have been done

    def results(
        self, pieces: Mapping[str, Callable[[], T]], label: str = "", *, done: int = 0
    ) -> Generator[tuple[str, T], None, None]:
        """As one worker."""
        ends, total = [0.0] * self.workers, 0.0
        for name, compute in pieces.items():
            began = time.process_time()
            found = compute()
            seconds = time.process_time() - began
            total += seconds
            place = ends.index(min(ends))
            ends[place] += seconds + (forking() if len(pieces) > 1 else 0.0)
            yield name, found
        self.taken.append(total)
        self.spans.append(max(ends) if len(pieces) > 1 else total)


@cache
def forking() -> float:
    """The seconds of a fork, an empty piece and the way back of its result; the least of several."""

    def once() -> float:
        began = time.perf_counter()
        Executor(2).all({"a": partial(bytes, 200_000), "b": partial(bytes, 200_000)})
        return time.perf_counter() - began

    return min(once() for _ in range(20))


def workers(name: str, make: Callable[[], TaskFamily]) -> list[dict[str, Any]]:
    """One row: processor time of learning with one worker and with two."""
    executor, family = Shared(2), make()
    began = time.process_time()
    meta_train(family, tasks_per_step=3, workers=executor)
    alone = time.process_time() - began
    together = alone - sum(executor.taken) + sum(executor.spans)
    return [{"family": name, "one": alone, "two": together, "ratio": alone / together}]


# tables


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "quadratics-0.1": partial(quadratics, FROM_FLAT_TO_STEEP, 0.1),
    "quadratics-0.3": partial(quadratics, FROM_FLAT_TO_STEEP, 0.3),
    "quadratics-round": partial(quadratics, (1.0,) * 8, 0.3),
    "logistic": logistic,
    "pictures": coordinate_networks,
    "workers-tabular": partial(workers, "tabular, 161 parameters, 50 steps", partial(tasks.tabular, steps=50)),
    "workers-pictures": partial(workers, "pictures, 2,307 parameters, 100 steps", partial(pictures, 100)),
    "workers-longer": partial(workers, "pictures, 2,307 parameters, 400 steps", partial(pictures, 400)),
}


def table(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of a part in Markdown."""
    if part.startswith("quadratics"):
        heads = ["quadratics of dimension 8", "MetaMD", "tuned Adam", "ratio", "MetaMD is behind", "usage"]
        lines = [
            [
                r["family"],
                f"{r['ours']:g}",
                f"{r['adam']:g}",
                f"{r['ratio']:.2f}",
                f"{r['behind']} of {r['problems']}",
                r["usage"],
            ]
            for r in rows
        ]
    elif part == "logistic":
        heads = ["logistic regressions", "gap at the end", "setting"]
        (row,) = rows
        lines = [["MetaMD", f"{row['ours']:.2g}", row["usage"]], ["tuned Adam", f"{row['adam']:.2g}", row["setting"]]]
    elif part == "pictures":
        heads = ["coordinate networks", "PSNR at the end", "on each picture", "mean loss", "setting"]
        lines = [
            [
                r["label"],
                f"{fmean(r['psnr']):.1f}",
                ", ".join(f"{x:.0f}" for x in r["psnr"]),
                f"{r['mean loss']:.3g}",
                r["setting"],
            ]
            for r in rows
        ]
    else:
        heads = ["learning", "one worker, s", "two workers, s", "times as fast"]
        lines = [[r["family"], f"{r['one']:.0f}", f"{r['two']:.0f}", f"{r['ratio']:.2f}"] for r in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all of them if none is given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 1)
    for part in options.parts or PARTS:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept[part] = {"rows": PARTS[part](), "machine": machine(load)}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        print(table(part, kept[part]["rows"]), end="\n\n", flush=True)


if __name__ == "__main__":
    with showing("never"):
        main()

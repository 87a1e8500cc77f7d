"""What meta-training costs, as ratios within one run: `python benchmarks/meta.py [--out FILE]`.

Every pair is timed alternately; the median of the ratios is reported. The unrolled rival is plain autograd over functional
SGD steps, what libraries for unrolled optimisation build underneath; TorchOpt and higher themselves are not dependencies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from metamd import Diagonal, tasks
from metamd.experiments.race import Problems
from metamd.hypergrad import ClosedForm, Forward, Reverse
from metamd.inner import run_inner
from metamd.objectives import Regret, TrainingLoss

STEPS, LR = 100, 0.05


def family(hidden: int = 64):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 64, generator=generator)
    targets = torch.randint(10, (1000,), generator=generator)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))

    return tasks.supervised(make, {"noise": (inputs, targets)}, batch_size=100, steps=STEPS)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def ratio(run: Callable[[], object], rival: Callable[[], object], rounds: int) -> dict[str, float]:
    run(), rival()  # the first call of everything is slow
    pairs = [(seconds(run), seconds(rival)) for _ in range(rounds)]
    return {
        "seconds": statistics.median(a for a, _ in pairs),
        "rival_seconds": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def plain(task) -> None:
    """An ordinary training loop with torch's SGD on the same batches."""
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    optimiser = torch.optim.SGD(list(params.values()), lr=LR)
    for t in range(STEPS):
        optimiser.zero_grad()
        task.loss(params, task.batch(t)).backward()
        optimiser.step()


def unrolled(task) -> None:
    """The gradient of the mean loss by learned log rates, through a tape of the whole run."""
    params = {n: x.requires_grad_() for n, x in task.init().items()}
    rates = {n: torch.full_like(x, LR).log().requires_grad_() for n, x in params.items()}
    total = torch.zeros(())
    for t in range(STEPS):
        loss = task.loss(params, task.batch(t))
        total = total + loss / STEPS
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {n: x - rates[n].exp() * g for (n, x), g in zip(params.items(), grads, strict=True)}
    torch.autograd.grad(total, list(rates.values()))


def batched_quadratics(count: int = 1000, steps: int = 1000) -> float:
    problems = Problems.draw(tasks.quadratic(), count, 0)
    metric = torch.tensor([0.9, 30.0], dtype=torch.float64)

    def run() -> None:
        theta = problems.start
        for _ in range(steps):
            theta = theta - problems.gradient(theta, problems.batch) / metric

    return seconds(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/meta.json"))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = family()
    task = made.build(made.sample(torch.Generator().manual_seed(0)))
    phi, regret, loss = Diagonal().bind(task.init()), Regret(), TrainingLoss()
    tied = Diagonal(tying="tensor").bind(task.init())

    def closed() -> None:
        ClosedForm().minimise([run_inner(task, phi, lr=LR)], phi, regret)

    result = {
        "closed form / plain training": ratio(closed, lambda: plain(task), options.rounds),
        "Reverse, full tape / unrolled by autograd": ratio(
            lambda: Reverse(1)(task, phi, loss, lr=LR), lambda: unrolled(task), options.rounds
        ),
        "Reverse, sqrt(T) checkpoints / unrolled by autograd": ratio(
            lambda: Reverse()(task, phi, loss, lr=LR), lambda: unrolled(task), options.rounds
        ),
        "Forward per tensor, together / one tangent at a time": ratio(
            lambda: Forward()(task, tied, regret, lr=LR), lambda: Forward(tangents=1)(task, tied, regret, lr=LR), 3
        ),
        "1,000 quadratics x 1,000 steps": {"seconds": batched_quadratics()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

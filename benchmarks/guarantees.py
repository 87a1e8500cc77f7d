"""For which families the certificate of a run says something: its bound on the mean against the run's own mean loss.

The ball just holds the end of a run as recommended, twice as long: the smallest radius that has a solution in it. A radius
that held-out tasks give is larger.

python benchmarks/guarantees.py        # writes benchmarks/results/guarantees.json
python benchmarks/results_page.py      # puts it into docs/guarantees.md and docs/results/index.md
"""

import argparse
import json
from pathlib import Path

import torch

import metamd
from metamd.certification.certification import distances
from metamd.cli.families import held_out_side
from metamd.learning.first_look import draw_task

FAMILIES = {
    "quadratics": lambda: ("quadratic", metamd.tasks.quadratic()),
    "logistic regression": lambda: learned(metamd.tasks.logistic(10, steps=200)),
    "linear model on rotated digits": lambda: learned(metamd.tasks.rotated_mnist(model="linear", hold_out=0.0, steps=100)),
    "small network on tables": lambda: learned(metamd.tasks.tabular(steps=200)),
    "MLP on rotated digits": lambda: ("mlp-by-role", metamd.tasks.rotated_mnist(model="mlp", hold_out=0.0, steps=100)),
    "MLP that adapts to an angle": lambda: learned(metamd.tasks.adapt_rotated_mnist(hold_out=0.0), few=True),
    "LeNet on digits": lambda: ("lenet-digits", metamd.tasks.diverse_digits(hold_out="kmnist", steps=100)),
    "forecaster of a cash machine": lambda: learned(metamd.tasks.cash_machines(), few=True),
    "network of a photograph": lambda: learned(metamd.tasks.pictures(steps=100), few=True),
    "network of an equation": lambda: learned(metamd.tasks.advection(steps=100), few=True),
}


def learned(family, few=False):
    """A file that was learned in seconds or minutes, and its family."""
    return metamd.meta_train(family, metamd.Diagonal(), outer_steps=2 if few else 4, tasks_per_step=2 if few else 8), family


def row(file, family):
    """The certificate of one held-out run as the file recommends."""
    file, family = metamd.load(file) if isinstance(file, str) else file, held_out_side(family)
    task = draw_task(family, 0, "certify", 0)
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    opt = metamd.MetaMD(list(params.items()), file, steps=task.steps, certify=True)
    total, lowest = 0.0, 0.0
    for step in range(task.steps):
        opt.zero_grad()
        loss = task.loss(params, task.batch(step))
        loss.backward()
        total, lowest = total + loss.item(), min(lowest, loss.item())
        opt.step()
    found = opt.certificate(radius=distances(task, file, None), mean_loss=total / task.steps)
    # Losses that fall below zero have no zero to be compared with.
    said = {"mean_loss": found.mean_loss, "bound": found.mean, "says_nothing": found.says_nothing if lowest >= 0 else None}
    return {"steps": task.steps, "usage": str(file.usage), **said}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "guarantees.json")
    parser.add_argument("--only", nargs="*", default=list(FAMILIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.only:
        rows[name] = row(*FAMILIES[name]())
        print(f"{name:30s} {rows[name]}", flush=True)
        kept = {name: rows[name] for name in FAMILIES if name in rows}
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()

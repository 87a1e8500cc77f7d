"""For which families the certificate of a run says something: its bound on the mean against the run's own mean loss.

The ball just holds the end of a run as recommended, twice as long: the smallest radius that has a solution in it. A radius
that held-out tasks give is larger.

python benchmarks/guarantees.py        # writes benchmarks/results/guarantees.json
"""

import argparse
import json
from pathlib import Path

import torch

import metamd
from metamd.certification.certification import distances
from metamd.cli.families import held_out_side
from metamd.learning.rounds import draw_task

FAMILIES = {
    "quadratics": lambda: ("quadratic", metamd.tasks.quadratic()),
    "logistic regression": lambda: learned(metamd.tasks.logistic(10, steps=200), metamd.Diagonal()),
    "small network on tables": lambda: learned(metamd.tasks.tabular(steps=200), metamd.Diagonal()),
    "MLP on rotated digits": lambda: (
        "mlp-by-role",
        held_out_side(metamd.tasks.rotated_mnist(model="mlp", hold_out=0.0, steps=100)),
    ),
    "LeNet on digits": lambda: ("lenet-digits", held_out_side(metamd.tasks.diverse_digits(hold_out="kmnist", steps=100))),
}


def learned(family, potential):
    """A file that was learned in a few seconds, and its family."""
    return metamd.meta_train(family, potential, outer_steps=4, tasks_per_step=8), family


def row(file, family):
    """The certificate of one held-out run as the file recommends."""
    file = metamd.load(file) if isinstance(file, str) else file
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
    rows = {}
    for name in arguments.only:
        rows[name] = row(*FAMILIES[name]())
        print(f"{name:26s} {rows[name]}", flush=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

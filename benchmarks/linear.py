"""Test accuracy of the linear model on rotated MNIST, 1,000 images per domain and all: `python benchmarks/linear.py`.

The paper reports about 87 % after 1,000 iterations. Here: Adam at rate 0.01, batches of 100, three seeds, angle 0. It needs
METAMD_DATA.
"""

import json
import statistics
from pathlib import Path

import torch

from metamd import tasks

OUT = Path(__file__).parent / "results" / "linear.json"
STEPS, RATE, SEEDS = 1000, 0.01, 3


def accuracy(images, seed):
    family = tasks.rotated_mnist(hold_out=0, model="linear", images=images, steps=STEPS).held_out()
    task = family.build(family.sample(torch.Generator().manual_seed(seed)))
    params = {n: x.requires_grad_() for n, x in task.init().items()}
    adam = torch.optim.Adam(params.values(), lr=RATE)
    for step in range(STEPS):
        adam.zero_grad()
        task.loss(params, task.batch(step)).backward()
        adam.step()
    return task.evaluate({n: x.detach() for n, x in params.items()}, "test").accuracy


def main():
    record = {}
    for label, images in (("1,000 images", 1000), ("all images", None)):
        found = [accuracy(images, seed) for seed in range(SEEDS)]
        record[label] = {"accuracy": found, "mean": statistics.mean(found)}
        print(f"{label:14s} {100 * statistics.mean(found):.2f} %  ({', '.join(f'{100 * a:.2f}' for a in found)})")
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

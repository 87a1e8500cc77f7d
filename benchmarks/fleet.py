"""The time of 111 small models: side by side, one after another, and by fused Adam: `python benchmarks/fleet.py`.

An MLP 28-32-1 for each of 111 made-up series, 50 steps of batches of 32, one thread. The file recommends what the default
recipe does for networks: polar steps in learned coordinates, whitened in part, with a tail average. Seconds are those of the
processor, so that others on the machine change little; of runs one after another 8 series stand for all.
"""

import json
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import metamd
from machine import machine
from metamd.files.usage import Usage
from metamd.inner.fleet import fleet_task
from metamd.potentials.online import Online
from metamd.tasks.supervised import Recipe

OUT = Path(__file__).parent / "results" / "fleet.json"
SERIES, ALONE, STEPS, BATCH, ROUNDS = 111, 8, 50, 32, 3


def make():
    return nn.Sequential(nn.Linear(28, 32), nn.ReLU(), nn.Linear(32, 1))


def made_up():
    generator = torch.Generator().manual_seed(0)
    found = {}
    for i in range(SERIES):
        inputs = torch.randn(600, 28, generator=generator)
        found[f"series {i}"] = inputs, inputs[:, :1].sin() + 0.1 * torch.randn(600, 1, generator=generator)
    return found


def learned_on(series):
    family = metamd.tasks.supervised(make, dict(list(series.items())[:2]), F.mse_loss, batch_size=BATCH, steps=STEPS)
    learned = metamd.learning.learn_from_reference(family, metamd.Kronecker(rank="auto"), tasks=2)
    online = Online("polar", beta=0.9, signal=0.95, whiten=4, scale=dict.fromkeys(learned.potential.log_d, 30.0))
    usage = Usage("online", averaging="tail", schedule="linear")
    return replace(learned, header=replace(learned.header, usage=usage.to_dict(), online=online.to_dict()))


def side_by_side(series, how):
    found = list(metamd.fleet(make, series, how, steps=STEPS, batch_size=BATCH, loss_fn=F.mse_loss))
    assert not any(fit.failed for fit in found)
    return {fit.name: fit.params for fit in found}


def one_after_another(series, begin):
    """The first few series in an ordinary loop."""
    found = {}
    for name, (inputs, targets) in list(series.items())[:ALONE]:
        recipe = Recipe(make, F.mse_loss, BATCH, STEPS)
        task = fleet_task(recipe, name, {"train": (inputs, targets)}, steps=STEPS, seed=0)
        model = recipe.make(task.config["init_seed"])
        optimiser = begin(model)
        for t in range(STEPS):
            rows = task.shuffle.indices(t)
            optimiser.zero_grad()
            F.mse_loss(model(inputs[rows]), targets[rows]).backward()
            optimiser.step()
        found[name] = {n: p.detach() for n, p in model.named_parameters()}
    return found


def main():
    torch.set_num_threads(1)
    load, series = round(os.getloadavg()[0], 1), made_up()
    learned = learned_on(series)
    ways = {
        "MetaMD, fleet": lambda: side_by_side(series, learned),
        "Adam, fleet": lambda: side_by_side(series, partial(torch.optim.Adam, lr=0.01)),
        "MetaMD, one after another": lambda: one_after_another(
            series, lambda model: metamd.MetaMD(model.named_parameters(), learned, steps=STEPS)
        ),
        "Adam(fused=True), one after another": lambda: one_after_another(
            series, lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        ),
    }
    taken = {label: [] for label in ways}
    for turn in range(ROUNDS + 1):  # the first round warms up
        for label, run in ways.items():
            began = time.process_time()
            run()
            seconds = (time.process_time() - began) * (SERIES / ALONE if "another" in label else 1)
            if turn:
                taken[label].append(seconds)
    medians = {label: statistics.median(times) for label, times in taken.items()}
    ours = medians["MetaMD, fleet"]
    record = {"seconds": medians, "as many times as MetaMD's fleet": {k: v / ours for k, v in medians.items()}}
    for label, seconds in medians.items():
        print(f"{label:36s} {seconds:7.2f} s  {seconds / ours:5.1f} x")
    OUT.write_text(json.dumps(record | {"machine": machine(load)}, indent=1) + "\n")


if __name__ == "__main__":
    main()

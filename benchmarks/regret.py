"""Draw bound against realised regret over a run, on convex tasks and on a network.

python benchmarks/regret.py        # writes docs/figures/regret-convex.png and docs/figures/regret-network.png
"""

import argparse
import math
from pathlib import Path

import torch

import metamd
from metamd.comparison.figures import Curve, curves

LINES = {
    "Theorem 1": lambda c: math.nan if c.mirror is None else c.mirror.published,
    "local norms": lambda c: math.nan if c.mirror is None else c.mirror.bound,
    "ball": lambda c: c.bound,
    "realised": lambda c: c.realised,
}


def held_out(family):
    """A task that the geometry was not learned on."""
    return family.build(family.sample(torch.Generator().manual_seed(12345)))


def follow(task, geometry, reference, **options):
    """The certificate after every step, and the regret of the losses themselves."""
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    optimiser = metamd.MetaMD(list(params.items()), geometry, certify=True, **options)
    found, losses, regret, start = [], [], 0.0, task.init()
    radius = optimiser.potential.norm({n: reference[n] - x for n, x in start.items()})
    for step in range(task.steps):
        batch = task.batch(step)
        loss = task.loss(params, batch)
        optimiser.zero_grad()
        loss.backward()
        with torch.no_grad():
            regret += float(loss.detach() - task.loss(reference, batch))
        optimiser.step()
        found.append(optimiser.certificate(reference, radius=radius))
        losses.append(regret)
    return found, losses


def panel(task, geometry, reference, **options):
    found, losses = follow(task, geometry, reference, **options)
    steps = list(range(1, len(found) + 1))
    assert all(c.guaranteed and c.realised <= c.bound for c in found)
    print(
        f"  T = {found[-1].steps}: losses {losses[-1]:.4g}, {', '.join(f'{n} {f(found[-1]):.4g}' for n, f in LINES.items())}"
    )
    lines = {n: f for n, f in LINES.items() if not math.isnan(f(found[-1]))}
    drawn = [Curve(name, steps[::5], [value(c) for c in found[::5]]) for name, value in lines.items()]
    return [*drawn, Curve("losses", steps[::5], losses[::5], dashed=True)]


def convex(path):
    family = metamd.tasks.logistic(20, steps=200, batch_size=20)
    task = held_out(family)
    reference = task.optimum()
    panels = {}
    for title, potential in {
        "logistic regression, one learned metric": metamd.Diagonal(),
        "three learned pieces": metamd.MaxDiagonal(3),
    }.items():
        estimator = {} if potential.pieces == 1 else {"estimator": metamd.Direct()}
        learned = metamd.meta_train(family, potential, outer_steps=8, tasks_per_step=8, seed=0, **estimator)
        panels[title] = panel(task, learned, reference)
    curves(panels, path, xlabel="step", ylabel="regret up to this step")


def network(path):
    family = metamd.tasks.tabular(steps=200)
    task = held_out(family)
    learned = metamd.meta_train(family, metamd.Diagonal(), outer_steps=8, tasks_per_step=8, seed=0)
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    adam = torch.optim.Adam(params.values(), lr=0.01)
    for step in range(5000):
        adam.zero_grad()
        task.loss(params, task.batch(step)).backward()
        adam.step()
    reference = {n: p.detach() for n, p in params.items()}
    panels = {
        "network with 16 hidden units, learned metric": panel(task, learned, reference),
        "momentum 0.9": panel(task, learned, reference, momentum=0.9),
    }
    curves(panels, path, xlabel="step", ylabel="regret up to this step")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    convex(arguments.out / "regret-convex.png")
    network(arguments.out / "regret-network.png")


if __name__ == "__main__":
    main()

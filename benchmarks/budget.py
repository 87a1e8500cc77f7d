"""What an experiment costs at the scale `cpu`, before it is run: `python benchmarks/budget.py [NAME ...]`.

Processor seconds of one process, so that other work on the machine counts little. A training is Adam's, on every side that
is compared on, from two short ones of different length. A lesson is one of a single task and outer step, times their number,
which is a little too much; learning a usage is counted for one task, times their number. Pages and figures are not counted.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from metamd.cli.reproduce import names
from metamd.comparison.training import train
from metamd.experiments.declare import learn
from metamd.rivals import rival

OUT = Path(__file__).parent / "results" / "budget.json"
WITHOUT = ("quadratic", "rosenbrock")


def spent(work):
    began = time.process_time()
    work()
    return time.process_time() - began


def training(side, measuring):
    """Seconds of one training on a side."""
    task = side.build(side.sample(torch.Generator().manual_seed(0)))
    adam, short = rival("adam").untuned(), max(measuring.every, side.steps // 20)
    train(task, adam, steps=1, measuring=measuring)
    one, two = (spent(lambda n=n: train(task, adam, steps=n, measuring=measuring)) for n in (short, 3 * short))
    slope = max(two - one, 0.0) / (2 * short)
    return one + slope * (side.steps - short)


def entrants(experiment, size):
    """How many trainings a side gets; of screened settings about twice as many go on as each quantity chooses."""
    ours = {label for g in experiment.geometries.values() for label in g.entries}
    searches = sum(s in rival(r).schedules for r in size.rivals for s in size.schedules)
    later = size.budget if size.screen is None else min(size.budget, 2 * size.screen)
    return size.seeds * (len(ours) + len(size.rivals)) + searches * (size.budget + (size.seeds - 1) * later)


def lesson(family, geometry, size):
    """Seconds of learning a geometry."""
    small = replace(size, outer_steps=1, tasks_per_step=1, usage_tasks=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "learned.safetensors"
        one = spent(lambda: learn(small, family, geometry, path, 0, "budget"))
        total = one * size.tasks_per_step * (1 if geometry.follow else size.outer_steps)
        if geometry.choose_usage and size.usage_tasks:
            more = replace(small, usage_tasks=1)
            path = Path(folder) / "used.safetensors"
            total += max(spent(lambda: learn(more, family, geometry, path, 0, "budget")) - one, 0) * size.usage_tasks
    return total


def budget(name):
    module = import_module(f"metamd.experiments.{name.replace('-', '_')}")
    experiment = getattr(module, "EXPERIMENT", None) or module.COMPARISON
    size = experiment.scales["cpu"]
    domain = size.domains[0]
    family = experiment.family(size, domain)
    sides = experiment.held_out_sides(size, domain, family)
    each = [training(side, size.measuring) for side in sides.values()]
    trainings = len(size.domains) * len(sides) * entrants(experiment, size)
    lessons = [lesson(family, g, size) for g in experiment.geometries.values()]
    found = {
        "trainings": trainings,
        "seconds per training": sum(each) / len(each),
        "lessons": len(size.domains) * len(lessons),
        "seconds per lesson": sum(lessons) / len(lessons),
    }
    total = trainings * found["seconds per training"] + found["lessons"] * found["seconds per lesson"]
    return found | {"minutes on one core": total / 60}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[n for n in names() if n not in WITHOUT])
    torch.set_num_threads(1)
    for name in parser.parse_args().names:
        numbers = {k: round(v, 3) for k, v in budget(name).items()}
        found = json.loads(OUT.read_text()) if OUT.exists() else {}
        OUT.write_text(json.dumps(found | {name: numbers}, indent=1) + "\n")
        print(f"| {name} | {' | '.join(f'{v:,.4g}' for v in numbers.values())} |", flush=True)


if __name__ == "__main__":
    main()

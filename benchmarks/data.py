"""Measure which share of a training step is spent on data: `task.batch` against gradient and update, interleaved.

python benchmarks/data.py benchmarks/results/data.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from metamd.tasks import TaskFamily, diverse_digits, images, rotated_mnist

# A little more than an epoch of 54,000 images for the first two, so that the shuffle of an epoch is counted.
CASES: dict[str, tuple[Callable[[], TaskFamily], int]] = {
    "diverse-digits, lenet": (lambda: diverse_digits(hold_out=None), 560),
    "rotated-mnist with all images, mlp": (lambda: rotated_mnist(images=None), 560),
    "rotated-mnist with 1000 images, mlp": (rotated_mnist, 560),
    "images, resnet18 of width 16": (lambda: images(width=16), 12),
}


def measure(family: TaskFamily, steps: int) -> dict[str, float]:
    """Seconds per step for the batch, and for gradient and update, in one run of SGD."""
    task = family.build(family.sample(torch.Generator().manual_seed(0)))
    params = task.init()
    data, training = [], []
    for step in range(-3, steps):
        start = time.perf_counter()
        batch = task.batch(max(step, 0))
        between = time.perf_counter()
        grads = torch.func.grad(task.loss)(params, batch)
        params = {name: (p - 0.01 * grads[name]).detach() for name, p in params.items()}
        if step >= 0:  # the first ones prepare the images and warm up
            data.append(between - start)
            training.append(time.perf_counter() - between)
    share = sum(data) / (sum(data) + sum(training))
    return {
        "batch_ms": 1e3 * statistics.mean(data),
        "batch_median_ms": 1e3 * statistics.median(data),
        "step_ms": 1e3 * statistics.mean(training),
        "share": share,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    results = {}
    for name, (make, steps) in CASES.items():
        results[name] = measure(make(), steps)
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(), "threads": 1}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**machine, "batch_size": 100, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What certify=True costs: a LeNet training step with and without it, interleaved, and the optimiser's step alone.

python benchmarks/certificate.py        # writes benchmarks/results/certificate.json
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from metamd import Diagonal, MaxDiagonal, MetaMD
from metamd.tasks.models import LeNet

CASES = {
    "as lenet-digits recommends": {"file": "lenet-digits"},
    "the same, tail average": {"file": "lenet-digits", "averaging": "tail"},
    "one piece": {"pieces": 1},
    "one piece, momentum": {"pieces": 1, "momentum": 0.9},
    "one piece, weight decay": {"pieces": 1, "weight_decay": 0.01},
    "three pieces": {"pieces": 3},
    "three pieces, fused": {"pieces": 3, "fused": True},
}


def prepare(certify, pieces=1, file=None, **options):
    """LeNet and an optimiser: by a shipped file, or with metrics that differ by some ten per cent, around one."""
    model = LeNet(generator=torch.Generator().manual_seed(0))
    if file is not None:
        return model, MetaMD(model.named_parameters(), file, steps=10_000, certify=certify, **options)
    fresh = (Diagonal() if pieces == 1 else MaxDiagonal(pieces)).bind(list(model.named_parameters()))
    g = torch.Generator().manual_seed(1)
    geometry = fresh.with_metrics({k: 0.1 * torch.randn(v.shape, generator=g) for k, v in fresh.log_d.items()})
    return model, MetaMD(model.named_parameters(), geometry, lr=0.01, certify=certify, **options)


def timed(model, optimiser, images, labels):
    """Seconds of a training step, and of the optimiser's part of it."""
    began = time.perf_counter()
    optimiser.zero_grad()
    cross_entropy(model(images), labels).backward()
    middle = time.perf_counter()
    optimiser.step()
    end = time.perf_counter()
    return end - began, end - middle


def measure(options, rounds, warm_up=5):
    """Medians of ratios within a round, so that a busy machine slows both sides alike."""
    g = torch.Generator().manual_seed(2)
    images, labels = torch.rand(100, 1, 28, 28, generator=g), torch.randint(10, (100,), generator=g)
    made = {certify: prepare(certify, **options) for certify in (False, True)}
    found = []
    for r in range(rounds + warm_up):
        order = (False, True) if r % 2 else (True, False)
        times = {certify: timed(*made[certify], images, labels) for certify in order}
        if r >= warm_up:
            found.append((times[False], times[True]))
    step = statistics.median(plain[1] for plain, _ in found)
    added = statistics.median(certified[1] - plain[1] for plain, certified in found)
    whole = statistics.median(plain[0] for plain, _ in found)
    return {
        "training_step_ms": 1e3 * whole,
        "optimiser_step_ms": 1e3 * step,
        "added_ms": 1e3 * added,
        "share_of_training_step": added / whole,
        "ratio_of_training_steps": statistics.median(b[0] / a[0] for a, b in found),
        "ratio_of_optimiser_steps": statistics.median(b[1] / a[1] for a, b in found),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "certificate.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: measure(options, arguments.rounds) for name, options in CASES.items()}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    record = {"model": "LeNet", "batch": 100, "threads": 1, "rounds": arguments.rounds, "versions": versions, "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    for name, row in rows.items():
        share, ratio = row["share_of_training_step"], row["ratio_of_optimiser_steps"]
        print(f"{name:26s} {100 * share:+6.2f} % of a training step, {ratio:.2f} of the optimiser's")


if __name__ == "__main__":
    main()

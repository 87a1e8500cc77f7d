"""What recording costs: training steps with and without a Recorder, taken in turn, in one process on one thread.

    python benchmarks/recorder.py [--rounds 300]

Every round takes one step of each variant, in an order that rotates, so that a busy machine slows all of them alike. The
overhead is the median over rounds of (step with recording) / (step without), minus one; the same between two plain
variants (A/A) says how much of it is noise. The time inside the hooks, measured in the same rounds, is far less noisy.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from metamd import Recorder
from metamd.tasks.models import MLP, LeNet

VARIANTS = {
    "plain": None,
    "plain again": None,
    "coordinates": {},
    "parameter": {"tying": "parameter"},
    "tensor": {"tying": "tensor"},
}
OPTIMISERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


class Transformer(nn.Module):
    """Two layers of width 64 on the rows of an image: 28 symbols of 28 numbers each."""

    def __init__(self, width=64, generator=None):
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Linear(28, width)
        layer = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **layer) for _ in range(2))
        self.output = nn.Linear(width, 10)

    def forward(self, images):
        x = self.read(images.squeeze(1))
        for block in self.blocks:
            x = block(x)
        return self.output(x.mean(1))


def variant(model_class, optimiser_class, options):
    model = model_class(generator=torch.Generator().manual_seed(0))
    optimiser = optimiser_class(model.named_parameters(), lr=1e-3)
    recorder = None if options is None else TimedRecorder(optimiser, **options)
    return model, optimiser, recorder


class Stopwatch:
    """Adds up the time that a recorder's hooks take."""

    def __init__(self, recorder):
        self.seconds = 0.0
        for name in ("_before", "_after"):
            setattr(recorder, name, self.timed(getattr(recorder, name)))

    def timed(self, hook):
        def call(*args):
            began = time.perf_counter()
            result = hook(*args)
            self.seconds += time.perf_counter() - began
            return result

        return call


class TimedRecorder(Recorder):
    """A recorder whose hooks are timed; they are replaced before they are registered."""

    def _scan(self):
        if not hasattr(self, "watch"):
            self.watch = Stopwatch(self)
        super()._scan()


def seconds_of_a_step(model, optimiser, images, labels):
    began = time.perf_counter()
    optimiser.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimiser.step()
    return time.perf_counter() - began


def measure(model_class, optimiser_class, rounds, warm_up=10):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(100, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (100,), generator=generator)
    made = {name: variant(model_class, optimiser_class, options) for name, options in VARIANTS.items()}
    names = list(made)
    times = {name: [] for name in names}
    for r in range(rounds + warm_up):
        k = r % len(names)
        for name in names[k:] + names[:k]:
            taken = seconds_of_a_step(*made[name][:2], images, labels)
            if r >= warm_up:
                times[name].append(taken)
            elif made[name][2] is not None:
                made[name][2].watch.seconds = 0.0
    plain = times["plain"]
    hooks = {n: m[2].watch.seconds / sum(times[n]) for n, m in made.items() if m[2] is not None}
    return {
        "step_ms": 1e3 * statistics.median(plain),
        "overhead": {n: statistics.median(a / b for a, b in zip(times[n], plain, strict=True)) - 1 for n in names[1:]},
        "hooks": {n: share / (1 - share) for n, share in hooks.items()},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recorder.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {
        f"{model.__name__}, {name}": measure(model, optimiser, arguments.rounds)
        for model in (LeNet, MLP, Transformer)
        for name, optimiser in OPTIMISERS.items()
    }
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    record = {"batch": 100, "threads": 1, "rounds": arguments.rounds, "versions": versions, "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    for label, row in rows.items():
        print(f"{label}: {row['step_ms']:.2f} ms a step")
        for name, share in row["overhead"].items():
            inside = f"   hooks {100 * row['hooks'][name]:5.2f} %" if name in row["hooks"] else ""
            print(f"    {name:26s} {100 * share:+6.2f} %{inside}")


if __name__ == "__main__":
    main()

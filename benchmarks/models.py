"""Which memory layout and which compiler the paper's models gain from: `python benchmarks/models.py [--rounds N]`.

ResNet18 puts its images into channels-last memory by itself; "plain" is without that. Time of loss and
gradient at batch 100 on one thread, over the plain model's, medians of interleaved rounds. The first call of a compiled
model is not counted; its seconds are in the record.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from metamd.tasks import models
from metamd.tasks.models import MLP, LeNet, ResNet18, channels_last

OUT = Path(__file__).parent / "results" / "models.json"
MODELS = {
    "MLP": (MLP, (784,)),
    "LeNet": (LeNet, (1, 28, 28)),
    "ResNet18, width 16, batch norm": (lambda: ResNet18(width=16), (3, 32, 32)),
}


def variants(build, shape):
    torch.manual_seed(0)
    x, y = torch.randn(100, *shape), torch.randint(10, (100,))
    found = {"plain": build(), "compiled": torch.compile(build())}
    if len(shape) == 3:
        found |= {"channels last": build(), "channels last, parameters too": build().to(memory_format=torch.channels_last)}
    return {kind: (kind, model, x) for kind, model in found.items()}, y


def seconds(kind, model, x, y):
    model.zero_grad()
    layout = channels_last if kind.startswith("channels last") else (lambda images: images)
    with mock.patch.object(models, "channels_last", layout):
        began = time.perf_counter()
        nn.functional.cross_entropy(model(x), y).backward()
        return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    record = {}
    for name, (build, shape) in MODELS.items():
        built, y = variants(build, shape)
        first = {kind: seconds(*pair, y) for kind, pair in built.items()}
        times = [{kind: seconds(*pair, y) for kind, pair in built.items()} for _ in range(rounds)]
        record[name] = {
            kind: {
                "ratio": round(statistics.median(t[kind] / t["plain"] for t in times), 3),
                "milliseconds": round(1e3 * statistics.median(t[kind] for t in times), 2),
                "first_call_seconds": round(first[kind], 2),
            }
            for kind in built
        }
        for kind, row in record[name].items():
            print(f"{name:32s} {kind:14s} {row['ratio']:6.2f} x   first call {row['first_call_seconds']:6.1f} s")
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

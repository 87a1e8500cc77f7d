"""What meta-training costs: the closed form, hypergradients by reverse and forward mode, and many small runs at once.

    python benchmarks/meta.py [--rounds ROUNDS]

Four questions, each answered by ratios within one round, where the contenders take turns in an order that rotates; medians
over rounds, on one thread. Times are processor times of this process: what else the machine is busy with counts less. The
data are noise around ten means. At the end stands the table of docs/results/costs.md.

- closed form: training tasks with `run_inner` and minimising, against a bare loop of `torch.optim.SGD` on the same batches.
- reverse mode: d(mean loss)/d(rates) through T = 100 steps of a network 784-128-10 with batches of 100, against loops
  unrolled with TorchOpt, with higher, and with torch alone. All differentiate by a rate for every tensor, or for every
  parameter. That their gradients agree is checked first. Peak memory, the bytes in live tensors, is measured in a process
  of its own for each.
- forward mode: all tangents of a step in one vmapped product, against two Python loops over them: `torch.func.jvp` of the
  gradient for each, as it is mostly written, and the leanest, double backwards that share the gradient and its graph. And
  what a step of it is made of, which bounds what can be gained.
- quadratics: 1,000 tasks of two dimensions, 1,000 steps each.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import metamd
from machine import machine
from meta_contenders import (
    FORWARD,
    REVERSE,
    closed_form,
    deep,
    installed,
    parts_of_a_step,
    plain_training,
    small,
    tasks_of,
    two_layers,
    with_torch,
)
from meta_report import Row, markdown, show, targets
from metamd import Diagonal
from metamd.inner.run import Trajectory, run_inner
from metamd.inner.together import run_many
from metamd.tasks.models import MLP, LeNet

RESULTS = Path(__file__).parent / "results"
STEPS = 100
TYINGS = ("tensor", "parameter")
MEGA = 2**20


# measuring


def measure(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Processor seconds of every contender in every round, after one round that does not count."""
    names = list(contenders)
    times = {name: np.zeros(rounds) for name in names}
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.process_time()
            contenders[name]()
            if number >= 0:
                times[name][number] = time.process_time() - began
    return times


def rows_of(question: str, setting: str, times: dict[str, np.ndarray], reference: str) -> list[Row]:
    rows = []
    for name, seconds in times.items():
        low, middle, high = (round(float(q), 3) for q in np.quantile(seconds / times[reference], (0.25, 0.5, 0.75)))
        rows.append(Row(question, setting, name, round(1e3 * float(np.median(seconds)), 2), middle, (low, high)))
    return rows


class LiveMemory(TorchDispatchMode):
    """The largest number of bytes in storages that operations returned and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def freed(_: Any) -> None:
            self.live -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def report_memory(name: str, tying: str) -> None:
    """What a process of its own prints: megabytes in live tensors."""
    [task] = tasks_of(two_layers, STEPS, 1)
    with LiveMemory() as memory:
        REVERSE[name](task, tying, STEPS)
    print(memory.peak / MEGA)


def memory_of(name: str, tying: str) -> float:
    command = [sys.executable, __file__, "--memory", name, tying]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return round(float(output.splitlines()[-1]), 1)


# the questions


def closed_form_rows(rounds: int) -> list[Row]:
    rows = []
    for name, make, steps in (("MLP", MLP, 100), ("LeNet", LeNet, 25)):
        tasks = tasks_of(make, steps, 2)
        contenders: dict[str, Callable[[], object]] = {"plain training": partial(plain_training, tasks)}
        contenders |= {f"closed form per {tying}": partial(closed_form, tasks, tying) for tying in TYINGS}
        rows += rows_of("closed form", name, measure(contenders, rounds), "plain training")
    return rows


def reverse_rows(rounds: int) -> list[Row]:
    rows = []
    [task] = tasks_of(two_layers, STEPS, 1)
    for tying in TYINGS:
        here = [name for name in REVERSE if installed(name)]
        expected = with_torch(task, tying, STEPS)
        for name in here:
            check(REVERSE[name](task, tying, STEPS), expected, name)
        times = measure({name: partial(REVERSE[name], task, tying, STEPS) for name in here}, rounds)
        for row in rows_of("reverse mode", f"per {tying}", times, "torch loop"):
            rows.append(replace(row, live_mb=memory_of(row.contender, tying)))
        rows += [
            Row("reverse mode", f"per {tying}", name, None, None, None, note="not installed")
            for name in REVERSE
            if name not in here
        ]
    return rows


def check(found: list[Tensor], expected: list[Tensor], name: str) -> None:
    """Contenders that compute something else are not compared.

    Steps chain rounding up: after a hundred of them two digits are sure in float32.
    """
    error = torch.cat([(f - e).flatten() for f, e in zip(found, expected, strict=True)]).norm()
    size = torch.cat([e.flatten() for e in expected]).norm()
    assert error <= 2e-2 * size, f"{name}: relative error {float(error / size):.2g}"


def forward_rows(rounds: int) -> list[Row]:
    rows = []
    for name, make, steps in (
        ("784-16-10", small, 50),
        ("784-128-10", two_layers, 50),
        ("LeNet", LeNet, 2),
        ("784-16x5-10", deep(16, 5), 20),
    ):
        [task] = tasks_of(make, steps, 1)
        expected, *others = (f(task, "tensor", steps) for f in FORWARD.values())
        for found in others:
            check(found, expected, name)
        times = measure({c: partial(f, task, "tensor", steps) for c, f in FORWARD.items()}, rounds)
        rows += rows_of("forward mode", f"{name}, {len(task.init())} tangents", times, "loop of double backwards")
    return rows


def part_rows(rounds: int) -> list[Row]:
    rows = []
    for name, make in (("784-16-10", small), ("784-128-10", two_layers)):
        [task] = tasks_of(make, 1, 1)
        times = measure({c: partial(repeat, f, 20) for c, f in parts_of_a_step(task).items()}, rounds)
        rows += rows_of("parts", f"{name}, {len(task.init())} tangents", times, "and one product")
    return [replace(r, median_ms=None if r.median_ms is None else round(r.median_ms / 20, 3)) for r in rows]


def repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def quadratic_rows() -> list[Row]:
    number, steps, one = 1000, 1000, 3
    where, g = metamd.tasks.quadratic(steps=steps), torch.Generator().manual_seed(0)
    tasks = [where.build(where.sample(g)) for _ in range(number)]
    phi = Diagonal()
    together = partial(run_many, tasks, phi, lr=0.01)

    def apart() -> list[Trajectory]:
        return [run_inner(task, phi, lr=0.01) for task in tasks[:one]]

    seconds = {}
    for name, run, of in (("all at once", together, number), ("one by one", apart, one)):
        began = time.perf_counter()
        assert not any(r.diverged for r in run())
        seconds[name] = np.array([(time.perf_counter() - began) * number / of])
    rows = rows_of("quadratics", f"{number:,} tasks x {steps:,} steps", seconds, "one by one")
    return [rows[0], replace(rows[1], note=f"from {one} tasks")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where meta.json goes")
    parser.add_argument("--memory", nargs=2, metavar=("CONTENDER", "TYING"), help="measure one peak in this process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        report_memory(*args.memory)
        return
    before = round(os.getloadavg()[0], 1)
    rows = closed_form_rows(args.rounds) + reverse_rows(args.rounds) + forward_rows(args.rounds)
    rows += part_rows(args.rounds) + quadratic_rows()
    goals = targets(rows)
    show(rows, goals)
    print("\n" + markdown(goals))
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine(before),
        "rounds": args.rounds,
        "steps_of_reverse_mode": STEPS,
        "targets": goals,
        "rows": [asdict(r) for r in rows],
    }
    (args.out / "meta.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

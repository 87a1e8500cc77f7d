"""What meta-training costs: the closed form, hypergradients by reverse and forward mode, and many small runs at once.

    python benchmarks/meta.py [--rounds ROUNDS]

Four questions, each answered by ratios within one round, where the contenders take turns in an order that rotates; medians
over rounds, on one thread. The data are noise around ten means.

- closed form: training tasks with `run_inner` and minimising, against a bare loop of `torch.optim.SGD` on the same batches.
- reverse mode: d(mean loss)/d(rates) through T = 100 steps of a network 784-128-10 with batches of 100, against loops
  unrolled with TorchOpt, with higher, and with torch alone. All differentiate by a rate for every tensor, or for every
  parameter. That their gradients agree is checked first. Peak memory, the bytes in live tensors, is measured in a process
  of its own for each.
- forward mode: all tangents of a step in one vmapped product, against two Python loops over them: `torch.func.jvp` of the
  gradient for each, as it is mostly written, and the leanest, double backwards that share the gradient and its graph.
- quadratics: 1,000 tasks of two dimensions, 1,000 steps each.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import metamd
from metamd import ClosedForm, Diagonal, Forward, MaxDiagonal, Regret, Reverse, TrainingLoss
from metamd.hypergrad.base import Estimator
from metamd.inner import run_inner
from metamd.lockstep import run_many
from metamd.models import MLP, LeNet
from metamd.tasks.supervised import SupervisedTask

RESULTS = Path(__file__).parent / "results"
STEPS = 100
RATE = 0.05
TYINGS = ("tensor", "parameter")
MEGA = 2**20


@dataclass(frozen=True)
class Row:
    """One contender; ratios are to the reference of its question, and `target` says what they should be."""

    question: str
    setting: str
    contender: str
    median_ms: float | None
    ratio: float | None
    ratio_quartiles: tuple[float, float] | None
    live_mb: float | None = None  # the peak, in tensors
    note: str = ""


# problems


def family(make_model: Callable[[], nn.Module], steps: int) -> metamd.tasks.TaskFamily:
    """A model on images of noise around one mean per class."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(5000) % 10
    images = torch.randn(5000, 1, 28, 28, generator=g) + torch.randn(10, 1, 28, 28, generator=g)[labels]
    return metamd.tasks.supervised(make_model, {"noise": {"train": (images, labels)}}, batch_size=100, steps=steps)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def tasks_of(make_model: Callable[[], nn.Module], steps: int, number: int) -> list[SupervisedTask]:
    where, g = family(make_model, steps), torch.Generator().manual_seed(1)
    found = [where.build(where.sample(g)) for _ in range(number)]
    assert all(isinstance(t, SupervisedTask) for t in found)
    return found  # type: ignore[return-value]


def potential(task: SupervisedTask, tying: str) -> MaxDiagonal:
    """One metric, 1 / RATE everywhere."""
    phi = Diagonal(tying=tying).bind(task.init())  # type: ignore[arg-type]
    with torch.no_grad():
        for leaf in phi.log_d.values():
            leaf.fill_(-float(np.log(RATE)))
    return phi


# closed form


def plain_training(tasks: list[SupervisedTask]) -> None:
    """What anybody would write."""
    for task in tasks:
        model = task.recipe.make(task.config["init_seed"])
        optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
        for t in range(task.steps):
            batch = task.batch(t)
            optimiser.zero_grad()
            F.cross_entropy(model(batch["inputs"]), batch["targets"]).backward()
            optimiser.step()


def closed_form(tasks: list[SupervisedTask], tying: str) -> None:
    phi = potential(tasks[0], tying)
    ClosedForm().minimise([run_inner(t, phi) for t in tasks], phi, Regret())


# reverse mode: every contender returns the gradient by log D = -log rate, in one list over the tensors

Hypergradient = Callable[[SupervisedTask, str, int], list[Tensor]]


def rates_for(task: SupervisedTask, tying: str) -> list[Tensor]:
    shapes = [x.shape if tying == "parameter" else () for x in task.init().values()]
    return [torch.full(s, RATE, requires_grad=True) for s in shapes]


def by_log(losses: list[Tensor], rates: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(torch.stack(losses).sum() / len(losses), rates)
    return [-r.detach() * f for r, f in zip(rates, found, strict=True)]


def with_torch(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """The shortest loop that can be differentiated."""
    rates, losses = rates_for(task, tying), []
    names, params = zip(*((n, x.requires_grad_()) for n, x in task.init().items()), strict=True)
    for t in range(steps):
        batch = task.batch(t)
        outputs = functional_call(task.model, dict(zip(names, params, strict=True)), (batch["inputs"],))
        losses.append(F.cross_entropy(outputs, batch["targets"]))
        grads = torch.autograd.grad(losses[-1], params, create_graph=True)
        params = tuple(p - r * g for p, r, g in zip(params, rates, grads, strict=True))
    return by_log(losses, rates)


def with_torchopt(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """Its functional optimiser; torchopt.sgd takes one rate for all, so the rates are a transformation of their own."""
    import torchopt

    rates, losses = rates_for(task, tying), []

    def update(updates: Any, state: Any, *, params: Any = None, inplace: bool = True) -> Any:
        return tuple(-r * u for r, u in zip(rates, updates, strict=True)), state

    rule = torchopt.base.GradientTransformation(lambda params: torchopt.base.EmptyState(), update)
    optimiser = torchopt.FuncOptimizer(rule)
    names, params = zip(*((n, x.requires_grad_()) for n, x in task.init().items()), strict=True)
    for t in range(steps):
        batch = task.batch(t)
        outputs = functional_call(task.model, dict(zip(names, params, strict=True)), (batch["inputs"],))
        losses.append(F.cross_entropy(outputs, batch["targets"]))
        params = optimiser.step(losses[-1], params)
    return by_log(losses, rates)


def with_higher(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """Its inner loop, with a parameter group for every tensor so that each has its rate."""
    import higher

    rates, losses = rates_for(task, tying), []
    groups = [{"params": [p]} for p in task.model.parameters()]
    optimiser = torch.optim.SGD(groups, lr=RATE)
    with higher.innerloop_ctx(task.model, optimiser, override={"lr": rates}) as (model, inner):
        for t in range(steps):
            batch = task.batch(t)
            losses.append(F.cross_entropy(model(batch["inputs"]), batch["targets"]))
            inner.step(losses[-1])
        return by_log(losses, rates)


def with_metamd(estimator: Estimator, task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    found = estimator(task, potential(task, tying), TrainingLoss(), steps=steps)
    return [g[0] for g in found.grads.values()]


REVERSE: dict[str, Hypergradient] = {
    "torch loop": with_torch,
    "TorchOpt": with_torchopt,
    "higher": with_higher,
    "MetaMD, full tape": partial(with_metamd, Reverse(1)),
    "MetaMD, checkpoints": partial(with_metamd, Reverse()),
}


def installed(name: str) -> bool:
    needs = {"TorchOpt": "torchopt", "higher": "higher"}.get(name)
    return needs is None or importlib.util.find_spec(needs) is not None


# forward mode


def loop_over_tangents(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """z_{t+1} = z_t - rate (H z_t - g 1_k), one tangent after the other; the gradient and its graph are shared."""
    names, params = zip(*task.init().items(), strict=True)
    z = [[torch.zeros_like(x) for x in params] for _ in params]
    along = [torch.zeros(()) for _ in params]
    for t in range(steps):
        leaves = [x.detach().requires_grad_() for x in params]
        loss = task.loss(dict(zip(names, leaves, strict=True)), task.batch(t))
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        fixed = [g.detach() for g in grads]
        for k, row in enumerate(z):
            along[k] += sum(torch.dot(a.flatten(), g.flatten()) for a, g in zip(row, fixed, strict=True)) / steps
            hz = torch.autograd.grad(grads, leaves, row, retain_graph=k + 1 < len(z))
            z[k] = [a - RATE * (h - g if i == k else h) for i, (a, h, g) in enumerate(zip(row, hz, fixed, strict=True))]
        params = tuple(x.detach() - RATE * g for x, g in zip(params, fixed, strict=True))
    return along


def loop_of_jvps(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """The same with torch.func.jvp of the gradient for every tangent, as it is mostly written."""
    params = task.init()
    z = [{n: torch.zeros_like(x) for n, x in params.items()} for _ in params]
    along = [torch.zeros(()) for _ in params]
    for t in range(steps):
        gradient = torch.func.grad(partial(task.loss, batch=task.batch(t)))
        for k, (moved, row) in enumerate(zip(params, z, strict=True)):
            fixed, hz = torch.func.jvp(gradient, (params,), (row,))
            along[k] += sum(torch.dot(row[n].flatten(), fixed[n].flatten()) for n in params) / steps
            z[k] = {n: a - RATE * (hz[n] - fixed[n] if n == moved else hz[n]) for n, a in row.items()}
        params = {n: x - RATE * fixed[n] for n, x in params.items()}
    return along


FORWARD: dict[str, Hypergradient] = {
    "loop of double backwards": loop_over_tangents,
    "loop of jvps": loop_of_jvps,
    "MetaMD, all at once": partial(with_metamd, Forward()),
}


# measuring


def measure(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every contender in every round, after one round that does not count."""
    names = list(contenders)
    times = {name: np.zeros(rounds) for name in names}
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            contenders[name]()
            if number >= 0:
                times[name][number] = time.perf_counter() - began
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
    """Contenders that compute something else are not compared. Steps chain rounding up: three digits remain in float32."""
    error = torch.cat([(f - e).flatten() for f, e in zip(found, expected, strict=True)]).norm()
    size = torch.cat([e.flatten() for e in expected]).norm()
    assert error <= 2e-2 * size, f"{name}: relative error {float(error / size):.2g}"


def forward_rows(rounds: int) -> list[Row]:
    rows = []
    for name, make, steps in (("784-16-10", small, 50), ("784-128-10", two_layers, 50), ("LeNet", LeNet, 2)):
        [task] = tasks_of(make, steps, 1)
        expected, *others = (f(task, "tensor", steps) for f in FORWARD.values())
        for found in others:
            check(found, expected, name)
        times = measure({c: partial(f, task, "tensor", steps) for c, f in FORWARD.items()}, rounds)
        rows += rows_of("forward mode", f"{name}, {len(task.init())} tangents", times, "loop of double backwards")
    return rows


def quadratic_rows() -> list[Row]:
    number, steps, one = 1000, 1000, 3
    where, g = metamd.tasks.quadratic(steps=steps), torch.Generator().manual_seed(0)
    tasks = [where.build(where.sample(g)) for _ in range(number)]
    phi = Diagonal()
    together = partial(run_many, tasks, phi, together=where.shared_loss, lr=0.01)
    apart = partial(run_many, tasks[:one], phi, lr=0.01)
    seconds = {}
    for name, run, of in (("all at once", together, number), ("one by one", apart, one)):
        began = time.perf_counter()
        assert not any(r.diverged for r in run())
        seconds[name] = np.array([(time.perf_counter() - began) * number / of])
    rows = rows_of("quadratics", f"{number:,} tasks x {steps:,} steps", seconds, "one by one")
    return [rows[0], replace(rows[1], note=f"from {one} tasks")]


# the results


def targets(rows: list[Row]) -> list[dict[str, Any]]:
    """What was asked for and what was found."""
    found = []

    def add(question: str, what: str, value: float | None, bound: float, at_least: bool = False) -> None:
        met = None if value is None else bool(value >= bound if at_least else value <= bound)
        shown = None if value is None else round(value, 3)
        found.append({"question": question, "what": what, "found": shown, "target": bound, "at_least": at_least, "met": met})

    at = {(r.question, r.setting, r.contender): r for r in rows}
    for (question, setting, name), r in at.items():
        if question == "closed form" and name != "plain training":
            add(question, f"{setting}, {name.removeprefix('closed form ')}: time / plain training", r.ratio, 1.25)
        if question == "forward mode" and name.startswith("MetaMD"):
            for loop in FORWARD:
                if loop != name:
                    add(question, f"{setting}: {loop} / MetaMD", at[question, setting, loop].ratio / r.ratio, 1.5, True)
        if question == "quadratics" and name == "all at once":
            assert r.median_ms is not None
            add(question, f"{setting}: seconds", r.median_ms / 1e3, 10.0)
        if question == "reverse mode" and name in ("TorchOpt", "higher"):
            tape, some = (at[question, setting, f"MetaMD, {kind}"] for kind in ("full tape", "checkpoints"))
            there = r.ratio is not None
            add(question, f"{setting}: full tape / {name}, time", tape.ratio / r.ratio if there else None, 1.0)
            add(question, f"{setting}: checkpoints / {name}, time", some.ratio / r.ratio if there else None, 1.5)
            add(question, f"{setting}: checkpoints / {name}, memory", some.live_mb / r.live_mb if there else None, 0.25)
    return found


def show(rows: list[Row], goals: list[dict[str, Any]]) -> None:
    print(f"{'':44}{'ms':>10}  ratio  (quartiles)      MB live")
    for r in rows:
        name = f"{r.question:13} {r.setting:28} {r.contender}"
        if r.ratio is None or r.ratio_quartiles is None:
            print(f"{name:66}  {r.note}")
            continue
        low, high = r.ratio_quartiles
        memory = "" if r.live_mb is None else f"{r.live_mb:9.1f}"
        print(f"{name:66} {r.median_ms:9.1f} {r.ratio:7.3f}  ({low:.3f}-{high:.3f}) {memory} {r.note}")
    print()
    for goal in goals:
        mark = {True: "met", False: "MISSED", None: "not installed"}[goal["met"]]
        sign = ">=" if goal["at_least"] else "<="
        print(f"{goal['question']:13} {goal['what']:52} {goal['found']!s:>8} {sign} {goal['target']:<5} {mark}")


def draw(rows: list[Row], goals: list[dict[str, Any]], path: Path) -> None:
    """A panel per question: ratios with their quartiles; beside reverse mode its memory."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 8.5), layout="constrained")
    panels = (
        ("closed form", "time / plain training", 1.25),
        ("forward mode", "time / a loop of double backwards", 1 / 1.5),
        ("reverse mode", "time / unrolled torch loop", None),
    )
    for axis, (question, label, goal) in zip(axes.flat, panels, strict=False):
        shown = [r for r in rows if r.question == question and r.ratio is not None][::-1]
        middle = np.array([r.ratio for r in shown])
        spread = np.abs(np.array([r.ratio_quartiles for r in shown]).T - middle)
        bars(axis, shown, middle, label, spread)
        if goal is not None:
            axis.axvline(goal, color="#2a6f4e", lw=1.2, ls="--")
        axis.set_title(question if goal is None else f"{question} (dashed: target {goal:.3g})", fontsize=11)
    shown = [r for r in rows if r.live_mb is not None][::-1]
    bars(axes[1, 1], shown, np.array([r.live_mb for r in shown]), "peak megabytes in live tensors", None)
    axes[1, 1].set_title("reverse mode, memory", fontsize=11)
    quadratics = next(g for g in goals if g["question"] == "quadratics")
    figure.suptitle(f"What meta-training costs (quadratics, {quadratics['what']}: {quadratics['found']:g})", fontsize=12)
    figure.savefig(path, dpi=130)


def bars(axis: Any, rows: list[Row], values: np.ndarray, label: str, spread: np.ndarray | None) -> None:
    names = [f"{r.setting}: {r.contender}" for r in rows]
    ours = [r.contender.startswith(("MetaMD", "closed form")) for r in rows]
    error = {} if spread is None else {"xerr": spread, "error_kw": {"lw": 0.8, "ecolor": "#333"}}
    axis.barh(names, values, color=["#c2571a" if o else "#8a8f98" for o in ours], **error)
    ends = values if spread is None else values + spread[1]
    for at, (value, end) in enumerate(zip(values, ends, strict=True)):
        axis.text(
            end + 0.015 * values.max(), at, f"{value:.2f}" if spread is not None else f"{value:.0f}", va="center", fontsize=8
        )
    axis.set_xlim(right=1.15 * float(ends.max()))
    axis.set_xlabel(label)
    axis.tick_params(axis="y", labelsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where meta.json and meta.png go")
    parser.add_argument("--memory", nargs=2, metavar=("CONTENDER", "TYING"), help="measure one peak in this process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        report_memory(*args.memory)
        return
    before = round(os.getloadavg()[0], 1)
    rows = closed_form_rows(args.rounds) + reverse_rows(args.rounds) + forward_rows(args.rounds) + quadratic_rows()
    goals = targets(rows)
    show(rows, goals)
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "load_before_and_after": [before, round(os.getloadavg()[0], 1)],
        },
        "rounds": args.rounds,
        "steps_of_reverse_mode": STEPS,
        "targets": goals,
        "rows": [asdict(r) for r in rows],
    }
    (args.out / "meta.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(rows, goals, args.out / "meta.png")


if __name__ == "__main__":
    main()

"""What a step costs: MetaMD against torch's Adam and SGD, interleaved in one run.

    python benchmarks/step.py [PARAMETERS] [--rounds ROUNDS]

Every rival has parameters of its own and steps once a round, so that whatever else the machine does meets all alike. Ratios
are to `Adam(fused=True)` of the same round; medians over rounds. The metrics are random: log-normal, with a standard
deviation of one in the natural logarithm, around the size of the gradients. In the "dominant" geometry the pieces differ
by factors e^3 on average, so that one of them stays active and its steps can be lazy; in the "contested" one they have the
same average, and the run slides along kinks, where every step has to find new weights: the worst case. Rivals with pieces
are timed in the middle of a run, hundreds of steps from its start, where all pieces are tied.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metamd
from machine import machine
from metamd.tasks.models import LeNet, ResNet18

RESULTS = Path(__file__).parent / "results"
MEANS = {"dominant": (-6.0, -3.0, 0.0), "contested": (0.0, 0.0, 0.0)}
PROBLEMS = ("matrix", "lenet", "resnet18")
STEP = 1e-4  # the size of a step where a metric is at its average
DRAWS = 4  # gradients of as many batches take turns
SELDOM = 10  # rivals that take longer than ten steps of the first one step in one of as many rounds
AWAY = 300  # steps between the start of a run and where it is timed


@dataclass(frozen=True)
class Problem:
    """Parameters and the gradients that take turns on them."""

    name: str
    params: dict[str, Tensor]
    grads: list[dict[str, Tensor]]
    repeats: int  # steps in a row, where one is too short to time

    @property
    def size(self) -> int:
        return sum(x.numel() for x in self.params.values())


@dataclass(frozen=True)
class Rival:
    """An optimiser over its own copy of the parameters; `check_finite` of None leaves it alone."""

    name: str
    params: dict[str, nn.Parameter]
    optimiser: torch.optim.Optimizer
    check_finite: bool | None = None

    def step(self, problem: Problem, number: int) -> float:
        for name, p in self.params.items():
            p.grad = problem.grads[number % DRAWS][name]
        if isinstance(self.optimiser, metamd.MetaMD) and self.check_finite is not None:
            self.optimiser.check_finite = self.check_finite
        begin = time.perf_counter()
        for _ in range(problem.repeats):
            self.optimiser.step()
        return (time.perf_counter() - begin) / problem.repeats


@dataclass(frozen=True)
class Row:
    """What was measured of one rival on one problem."""

    problem: str
    parameters: int
    rival: str
    median_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    ratio_undisturbed: float  # of the fastest tenth of both: where other work shares the machine, the median has it in it
    state_bytes: float
    metric_bytes: float
    lazy_share: float | None


# problems


def flat(size: int, generator: torch.Generator) -> Problem:
    """One matrix; gradients of a common mean and noise three times as large."""
    shape = (max(1, size // 1000), 1000)
    mean = torch.randn(shape, generator=generator)
    grads = [{"weight": mean + 3 * torch.randn(shape, generator=generator)} for _ in range(DRAWS)]
    return Problem(f"one matrix of {size:,}", {"weight": 0.05 * torch.randn(shape, generator=generator)}, grads, 1)


def model(name: str, net: nn.Module, images: tuple[int, ...], repeats: int, generator: torch.Generator) -> Problem:
    """A network, with its gradients at the start on batches of noise."""
    grads = []
    for _ in range(DRAWS):
        labels = torch.randint(10, images[:1], generator=generator)
        loss = F.cross_entropy(net(torch.randn(images, generator=generator)), labels)
        found = torch.autograd.grad(loss, list(net.parameters()))
        grads.append({n: g.contiguous() for (n, _), g in zip(net.named_parameters(), found, strict=True)})
    return Problem(name, {n: p.detach() for n, p in net.named_parameters()}, grads, repeats)


def geometry(problem: Problem, tying: str, means: Iterable[float], generator: torch.Generator) -> metamd.MaxDiagonal:
    """Random metrics around the size of the gradients: a coordinate with an average metric moves by about STEP."""
    means = torch.tensor(list(means))
    bare = metamd.MaxDiagonal(len(means), tying=tying)  # type: ignore[arg-type]
    logs = {}
    for key, blank in bare.bind(problem.params).log_d.items():
        size = problem.grads[0][key].square().mean().sqrt().clamp_min(1e-8)
        spread = torch.randn(blank.shape, generator=generator)
        logs[key] = torch.log(size / STEP) + means.reshape(-1, *[1] * (blank.ndim - 1)) + spread
    return bare.with_metrics(logs)


# rivals


def rivals(problem: Problem, generator: torch.Generator) -> list[Rival]:
    """Everything that is timed; the first one is what the others are compared with."""

    def copies() -> dict[str, nn.Parameter]:
        return {n: nn.Parameter(x.clone()) for n, x in problem.params.items()}

    def rival(name: str, build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]) -> Rival:
        params = copies()
        return Rival(name, params, build(params))

    def ours(name: str, phi: metamd.MaxDiagonal, *, checks: tuple[bool, ...] = (False,), **options: bool) -> list[Rival]:
        params = copies()
        optimiser = metamd.MetaMD(params.items(), phi, **options)
        marks = {False: name, True: f"{name}, check_finite"}
        return [Rival(marks[c], params, optimiser, c) for c in checks]

    adam, sgd = torch.optim.Adam, torch.optim.SGD
    found = [
        rival("Adam, fused", lambda p: adam(p.values(), lr=STEP, fused=True)),
        rival("SGD momentum, fused", lambda p: sgd(p.values(), lr=STEP, momentum=0.9, fused=True)),
        rival("Adam", lambda p: adam(p.values(), lr=STEP)),
        rival("SGD momentum", lambda p: sgd(p.values(), lr=STEP, momentum=0.9)),
        *ours("one diagonal", geometry(problem, "parameter", (0.0,), generator), checks=(False, True)),
    ]
    for tying in ("parameter", "channel"):
        for kind, means in MEANS.items():
            phi = geometry(problem, tying, means, generator)
            name = f"three per {tying}, {kind}"
            both = (False, True) if kind == "dominant" else (False,)
            found += ours(name, phi)
            found += ours(f"{name}, fused", phi, checks=both, fused=True)
            if kind == "contested" and tying == "parameter":
                found += ours(f"{name}, fused, exact=False", phi, fused=True, exact=False)
    return found


def go_ahead(rival: Rival, problem: Problem, optimiser: metamd.MetaMD) -> None:
    """Put the parameters where AWAY steps of the mean gradient would lead with the largest metric of each coordinate."""
    phi = optimiser.potential
    assert isinstance(phi, metamd.MaxDiagonal)
    with torch.no_grad():
        for name, p in rival.params.items():
            mean = torch.stack([g[name] for g in problem.grads]).mean(0)
            p.sub_(mean / phi.metric(name).amax(0), alpha=AWAY)


def memory(rival: Rival, size: int) -> tuple[float, float]:
    """Bytes per parameter: state of the run, and metrics as the optimiser keeps them."""
    state = sum(v.nbytes for s in rival.optimiser.state.values() for v in s.values() if isinstance(v, Tensor))
    if not isinstance(rival.optimiser, metamd.MetaMD):
        return state / size, 0.0
    phi = rival.optimiser.potential
    return state / size, sum(phi.metric(n).nbytes for n in rival.params) / size


def lazy_share(rival: Rival) -> float | None:
    """The share of steps that the bounds decided, over the whole run."""
    fused = getattr(getattr(rival.optimiser, "potential", None), "_fused", None)
    return None if fused is None else fused.lazy_steps / max(1, fused.lazy_steps + fused.full_steps)


# the run


def measure(problem: Problem, rounds: int, warmup: int, generator: torch.Generator) -> list[Row]:
    """Interleave all rivals, after some steps of each that are not timed."""
    field = rivals(problem, generator)
    times = {r.name: np.full(rounds, np.nan) for r in field}
    first = np.inf
    for optimiser, r in {r.optimiser: r for r in field}.items():
        r.step(problem, 0)
        if isinstance(optimiser, metamd.MetaMD):
            go_ahead(r, problem, optimiser)
    slow: set[str] = set()
    for number in range(-warmup, rounds):
        for r in field:
            if r.name in slow and number % SELDOM:
                continue
            elapsed = r.step(problem, number)
            first = elapsed if r is field[0] else first
            if number >= 0:
                times[r.name][number] = elapsed
            elif elapsed > 10 * first:
                slow.add(r.name)
    reference = times[field[0].name]
    rows = []
    for r in field:
        ratios = times[r.name] / reference
        low, middle, high = (round(float(q), 3) for q in np.nanquantile(ratios, (0.25, 0.5, 0.75)))
        state, metrics = memory(r, problem.size)
        share = lazy_share(r)
        rows.append(
            Row(
                problem=problem.name,
                parameters=problem.size,
                rival=r.name,
                median_ms=round(1e3 * float(np.nanmedian(times[r.name])), 4),
                ratio=middle,
                ratio_quartiles=(low, high),
                ratio_undisturbed=round(float(np.nanquantile(times[r.name], 0.1) / np.quantile(reference, 0.1)), 3),
                state_bytes=round(state, 2),
                metric_bytes=round(metrics, 2),
                lazy_share=None if share is None else round(share, 3),
            )
        )
    return rows


def show(rows: list[Row]) -> None:
    for name in dict.fromkeys(r.problem for r in rows):
        print(f"\n{name}\n{'':52}     ms   / fused Adam  (quartiles)  undisturbed   bytes: state  metrics   lazy")
        for r in (r for r in rows if r.problem == name):
            low, high = r.ratio_quartiles
            lazy = "" if r.lazy_share is None else f"{r.lazy_share:6.0%}"
            print(
                f"{r.rival:52}{r.median_ms:9.3f}  {r.ratio:8.2f}     ({low:6.2f}-{high:6.2f})  {r.ratio_undisturbed:8.2f} "
                f"{r.state_bytes:10.1f}  {r.metric_bytes:7.1f}  {lazy}"
            )


def draw(rows: list[Row], path: Path) -> None:
    """A panel per problem: ratios to fused Adam, with their quartiles."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    problems = list(dict.fromkeys(r.problem for r in rows))
    figure, axes = plt.subplots(1, len(problems), figsize=(4 + 3.2 * len(problems), 6), sharey=True, layout="constrained")
    for axis, name in zip(np.atleast_1d(axes), problems, strict=True):
        shown = [r for r in rows if r.problem == name][::-1]
        middle = np.array([r.ratio for r in shown])
        spread = np.abs(np.array([r.ratio_quartiles for r in shown]).T - middle)
        colours = [
            "#8a8f98" if r.rival[:4] in ("Adam", "SGD ") else "#c2571a" if "fused" in r.rival else "#e8b48f" for r in shown
        ]
        axis.barh([r.rival for r in shown], middle, xerr=spread, color=colours, error_kw={"lw": 0.8, "ecolor": "#333"})
        axis.axvline(1, color="#333", lw=0.8, ls=":")
        axis.set_xscale("log")
        ticks = [4.0**i for i in range(-2, 6) if middle.min() / 4 < 4.0**i < middle.max() * 4]
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("time of a step / fused Adam")
        for at, r in enumerate(shown):
            axis.text(r.ratio_quartiles[1] * 1.06, at, f"{r.ratio:.2f}", va="center", fontsize=7)
        axis.set_xlim(right=axis.get_xlim()[1] * 1.6)
    kinds = {"torch.optim": "#8a8f98", "MetaMD, plain": "#e8b48f", "MetaMD, fused": "#c2571a"}
    patches = [plt.Rectangle((0, 0), 1, 1, color=c) for c in kinds.values()]
    figure.legend(patches, list(kinds), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parameters", type=int, nargs="?", default=10_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--problems", nargs="+", default=PROBLEMS, choices=PROBLEMS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where step.json and step.png go")
    args = parser.parse_args()
    g = torch.Generator().manual_seed(0)
    before = round(os.getloadavg()[0], 1)
    makers: dict[str, Callable[[], Problem]] = {
        "matrix": lambda: flat(args.parameters, g),
        "lenet": lambda: model("LeNet", LeNet(generator=g), (32, 1, 28, 28), 10, g),
        "resnet18": lambda: model("ResNet18", ResNet18(generator=g), (4, 3, 32, 32), 1, g),
    }
    rows = [row for name in args.problems for row in measure(makers[name](), args.rounds, args.warmup, g)]
    show(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine(before),
        "rounds": args.rounds,
        "warmup": args.warmup,
        "metrics": {
            "log_means": MEANS,
            "log_deviation": 1.0,
            "unit": f"root mean square gradient of the tensor / {STEP}",
            "gradients": f"{DRAWS} draws in turn; matrix: a mean N(0,1) and noise N(0,9); networks: batches of noise",
            "place": f"{AWAY} steps of the mean gradient from the start",
        },
        "rows": [asdict(r) for r in rows],
    }
    (args.out / "step.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(rows, args.out / "step.png")


if __name__ == "__main__":
    main()

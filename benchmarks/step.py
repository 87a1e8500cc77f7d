"""What a step costs: MetaMD against torch's Adam and Muon and against SOAP, in turns, in one process, on one thread.

    python benchmarks/step.py [--rounds ROUNDS] [--only MLP LeNet transformer siren weight passes compiled]

Parts that are not asked for stay as they were measured last. The first four are a whole training step of a small model:
loss, gradient and step. A turn is ten steps, so that what SOAP does every ten is in it. Rows of `products alone` call the
matrix products of that polar step again, as they were, in place of the step: whoever writes it, none of as many iterations
on as many rows is quicker.
`weight`: the step alone of one weight of 2048 x 2048, beside torch's Muon in bfloat16 and its five iterations in float32.
`passes`: the step alone of 10 million parameters under one diagonal metric and under mixtures of three, over fused Adam's.
Their metrics are random: log-normal, with a standard deviation of one in the natural logarithm, around the size of the
gradients. In the "dominant" mixture the pieces differ by factors e^3 on average, so that one stays active and its steps can
be lazy. In the "random" one they have the same average, and the run slides along kinks: with one gradient throughout the
weights of the pieces stay, with gradients that vary every step has to find new ones. Mixtures are timed a hundred steps
from the start of a run, where all pieces are tied. `stream` reads the six arrays of a mixture's pass and writes one, and
computes next to nothing: no pass in float32 is quicker. `arrays` are those that a step reads or writes at least, each
as long as the parameters. Where the weights of pieces change, they follow from a sum over all parameters, so that none is
known before a second pass: 13 arrays against Adam's 7. At Adam's bytes per second that is 1.86 of its time.
`compiled`: the step alone of the MLP, under `torch.compile(fullgraph=True)` and written out. Written out it is the averages
and the products and nothing else: no share of signal, no look at the size of gradients, no groups, no state to save.
"""

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import metamd
from machine import machine
from metamd.potentials.whitening import POLYNOMIALS
from metamd.tasks.models import MLP, LeNet
from timing import ABOUT, POLAR, RANK, RESULTS, Named, markdown, optimisers, polar, rows, take_turns, write

MODELS = {"MLP": "MLP", "LeNet": "LeNet", "transformer": "transformer", "siren": "coordinate network"}
PARTS = (*MODELS, "weight", "passes", "compiled")
MEANS = {"dominant": (-6.0, -3.0, 0.0), "random": (0.0, 0.0, 0.0)}
STEP = 1e-4  # the size of a step where a metric is at its average
RECORD = RESULTS / "step.json"
AWAY = 100  # steps between the start of a run and where it is timed
DRAWS = 4  # gradients take turns
FLOORS = ("MetaMD, whiten 3, block 64", "MetaMD, whiten 3, block 32")  # whose products are timed alone
ARRAYS = {
    "Adam, fused": 7,  # reads x, g and two averages; writes all but g
    "SGD with momentum, fused": 5,
    "one diagonal": 4,  # x, g, D; x
    "one diagonal, check_finite": 4,  # a loop of our own would look at g where it reads it
    "three, dominant, fused": 4,  # as one diagonal, while one piece stays active
    "three, dominant, fused, check_finite": 4,
    "three, random, one gradient, fused": 7,  # x, g, the centre, D_1 D_2 D_3; x
    "three, random, gradients vary, fused": 13,  # the same, and all but x once more
    "stream: six arrays read, one written": 7,
}

STREAM = """void stream(float *x, const float *g, const float *c, const float *d, long n) {
    for (long i = 0; i < n; i++) x[i] = x[i] - g[i] * (d[i] + d[n + i] + d[2 * n + i]) - c[i];
}"""


# the whole of a training step


class Transformer(nn.Module):
    """Two layers of causal attention over 64 tokens, width 64, four heads."""

    def __init__(self, vocabulary: int = 64, width: int = 64, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
        self.layers, self.output = nn.ModuleList(layers), nn.Linear(width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.output(x)


class Siren(nn.Module):
    """An image as a function of the coordinates: three hidden layers of 128 sines."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n, width) for n in (2, width, width)])
        self.output = nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        for layer in self.layers:
            points = torch.sin(30 * layer(points))
        return self.output(points)


def models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]]:
    """Each with its loss on a fixed batch."""
    images, labels = torch.randn(100, 1, 28, 28), torch.randint(10, (100,))
    text, points = torch.randint(64, (32, 65)), 2 * torch.rand(1024, 2) - 1
    values = torch.sin(9 * points[:, :1]) * torch.cos(7 * points[:, 1:])
    return {
        "MLP": (MLP, lambda m: F.cross_entropy(m(images), labels)),
        "LeNet": (LeNet, lambda m: F.cross_entropy(m(images), labels)),
        "transformer": (Transformer, lambda m: F.cross_entropy(m(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())),
        "coordinate network": (Siren, lambda m: F.mse_loss(m(points), values)),
    }


def training(rounds: int, wanted: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Loss, gradient and step."""

    def stepper(build: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], make: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        model = build()
        optimiser = make(list(model.named_parameters()))

        def step() -> None:
            model.zero_grad()
            loss(model).backward()
            optimiser.step()

        return step

    found = {}
    for name, (build, loss) in ((name, made) for name, made in models().items() if name in wanted):
        steps = {who: stepper(build, loss, make) for who, make in optimisers().items()}
        steps |= {f"{who}, products alone": stepper(build, loss, partial(Products, **POLAR[who])) for who in FLOORS}
        found[name] = rows(take_turns(steps, rounds=rounds, repeats=10))
    return found


class Products(TorchDispatchMode):
    """The matrix products of a polar step, which a first step shows; they are called again without anything in between."""

    CALLS = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_")

    def __init__(self, named: Named, **whitening: int) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self.optimiser, self.named = polar(named, check_finite=False, **whitening), named

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call.overloadpacket.__name__ in self.CALLS:
            kept = [a.clone() if isinstance(a, Tensor) else a for a in args]  # later calls write into them
            self.calls.append(partial(call, *kept, **(kwargs or {})))
        return call(*args, **(kwargs or {}))

    @torch.no_grad()
    def step(self) -> None:
        """The first step is MetaMD's."""
        if not self.calls:
            with self:
                self.optimiser.step()
        for call in self.calls:
            call()


# one weight


def five_iterations(g: Tensor) -> Tensor:
    """torch's Newton-Schulz iteration, whose coefficients these are, in the type of the gradient."""
    x = g / g.norm()
    for _ in range(5):
        a = x @ x.mT
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, b, x, beta=3.4445)
    return x


def weight(rounds: int, size: int = 2048) -> list[dict[str, Any]]:
    """The step alone."""
    grad, steps = torch.randn(size, size), {}

    def parameter() -> nn.Parameter:
        p = nn.Parameter(torch.zeros(size, size))
        p.grad = grad.clone()
        return p

    steps["torch.optim.Muon, bfloat16"] = torch.optim.Muon([parameter()], lr=1e-3).step
    p, average = parameter(), torch.zeros(size, size)

    def in_float32() -> None:
        average.lerp_(grad, 0.05)
        p.data.sub_(five_iterations(grad.lerp(average, 0.95)), alpha=1e-3)

    steps["the same five iterations, float32"] = in_float32
    steps |= {name: polar([("weight", parameter())], **whitening).step for name, whitening in POLAR.items()}
    return rows(take_turns(steps, rounds=max(2, rounds // 5)))


# passes over memory


def random_metrics(grad: Tensor, means: tuple[float, ...], generator: torch.Generator) -> metamd.MaxDiagonal:
    """Metrics around the size of the gradients: a coordinate with an average metric moves by about STEP."""
    logs = torch.log(grad.square().mean().sqrt() / STEP) + torch.tensor(means).reshape(-1, 1, 1)
    return metamd.MaxDiagonal(len(means)).with_metrics(
        {"x": logs + torch.randn(len(means), *grad.shape, generator=generator)}
    )


def passes(rounds: int, size: int) -> list[dict[str, Any]]:
    """The step alone, over that of fused Adam."""
    generator, shape = torch.Generator().manual_seed(0), (max(1, size // 1000), 1000)
    mean = torch.randn(shape, generator=generator)
    grads = [mean + 3 * torch.randn(shape, generator=generator) for _ in range(DRAWS)]

    def stepper(make: Callable[[nn.Parameter], torch.optim.Optimizer], *, vary: bool = False) -> Callable[[], None]:
        p, count = nn.Parameter(torch.zeros(shape)), 0
        optimiser = make(p)

        def step() -> None:
            nonlocal count
            p.grad, count = grads[count % DRAWS if vary else 0], count + 1
            optimiser.step()

        if isinstance(optimiser, metamd.MetaMD) and optimiser.fused:
            for _ in range(AWAY):
                step()
        return step

    def ours(phi: metamd.MaxDiagonal, **options: bool) -> Callable[[nn.Parameter], torch.optim.Optimizer]:
        return lambda p: metamd.MetaMD([("x", p)], phi, **options)

    one = random_metrics(mean, (0.0,), generator)
    mixtures = {name: random_metrics(mean, means, generator) for name, means in MEANS.items()}
    quick = {"fused": True, "check_finite": False}
    steps = {
        "Adam, fused": stepper(lambda p: torch.optim.Adam([p], lr=STEP, fused=True)),
        "SGD with momentum, fused": stepper(lambda p: torch.optim.SGD([p], lr=STEP, momentum=0.9, fused=True)),
        "one diagonal": stepper(ours(one, check_finite=False), vary=True),
        "one diagonal, check_finite": stepper(ours(one), vary=True),
        "three, dominant, fused": stepper(ours(mixtures["dominant"], **quick), vary=True),
        "three, dominant, fused, check_finite": stepper(ours(mixtures["dominant"], fused=True), vary=True),
        "three, random, one gradient, fused": stepper(ours(mixtures["random"], **quick)),
        "three, random, gradients vary, fused": stepper(ours(mixtures["random"], **quick), vary=True),
        "stream: six arrays read, one written": stream(torch.zeros(shape), grads[0], mixtures["random"]),
    }
    found = rows(take_turns(steps, rounds=rounds, warmup=4))
    return [{**row, "arrays": ARRAYS[row["optimiser"]]} for row in found]


def stream(x: Tensor, grad: Tensor, phi: metamd.MaxDiagonal) -> Callable[[], None]:
    """A pass that does nothing but read what a mixture reads, and write the parameters."""
    metrics, centre = phi.log_d["x"].detach().exp() * 1e-9, torch.zeros_like(x)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "stream.c", Path(folder) / "stream.so"
        source.write_text(STREAM)
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-fPIC", "-shared", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(target))
    places = [ctypes.c_void_p(t.data_ptr()) for t in (x, grad, centre, metrics)]
    kept = x, grad, centre, metrics  # alive as long as the function is
    return lambda: library.stream(*places, ctypes.c_long(len(kept[0].flatten())))


# compiled


def compiled(rounds: int) -> list[dict[str, Any]]:
    """The step alone of the MLP, over that of Adam, compiled or not."""
    name, steps = "MetaMD, whiten 3, block 64", {}
    for how in ("", ", compiled"):
        for who in ("Adam, foreach", name):
            named = with_gradients()
            optimiser = polar(named, check_finite=False, **POLAR[name]) if who == name else optimisers()[who](named)
            steps[who + how] = torch.compile(optimiser.step, fullgraph=who == name) if how else optimiser.step
    steps["its averages and products, written out"] = written_out(with_gradients())
    return rows(take_turns(steps, rounds=rounds, repeats=10, warmup=2))


def with_gradients() -> list[tuple[str, nn.Parameter]]:
    """The parameters of the MLP."""
    torch.manual_seed(0)
    build, loss = models()["MLP"]
    model = build()
    loss(model).backward()
    return list(model.named_parameters())


def written_out(named: list[tuple[str, nn.Parameter]]) -> Callable[[], None]:
    """A polar step of the MLP, with three iterations and blocks of 64, by as few calls as there are."""
    weights, vectors = ([p for _, p in named if (p.ndim > 1) is matrix] for matrix in (True, False))
    given, along = [p.grad for p in weights], [p.grad for p in vectors]
    means, moving, squares = ([torch.zeros_like(p) for p in ps] for ps in (weights, vectors, vectors))
    columns = [torch.linalg.qr(torch.randn(p.shape[1], RANK))[0] for p in weights]
    rest, sizes, iterations = [0.5 * u.mT.contiguous() for u in columns], (64, 64, 10), POLYNOMIALS[3]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_lerp_(means, given, 0.3)
        ahead = torch._foreach_lerp(given, means, 0.7)
        right = [
            torch.addmm(a, a @ u, k).view(-1, n, len(u)) for a, u, k, n in zip(ahead, columns, rest, sizes, strict=True)
        ]
        first, second, third = (torch.bmm(r, a.view(r.shape).mT) for r, a in zip(right, ahead, strict=True))
        found = torch.cat([first, second, F.pad(third, (0, 54, 0, 54))])
        bound = torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True)
        r = z = found / bound
        for i, (a, b, c) in enumerate(iterations):
            p = torch.baddbmm(r, r, r, beta=b, alpha=c)
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            z = torch.bmm(p, z) if i else p
            r = torch.bmm(torch.bmm(p, r), p) if i < 2 else r
        z.mul_(bound.rsqrt_())
        for x, m, root in zip(weights, right, (z[:2], z[2:4], z[4:, :10, :10]), strict=True):
            x.view(m.shape).baddbmm_(root, m, alpha=-1e-6)
        torch._foreach_lerp_(moving, along, 0.3)
        torch._foreach_mul_(squares, 0.99)
        torch._foreach_addcmul_(squares, along, along, 0.01)
        metrics = torch._foreach_sqrt(squares)
        torch._foreach_add_(metrics, 1e-8)
        torch._foreach_addcdiv_(vectors, moving, metrics, -1e-6)

    return step


# the page


def table(found: list[dict[str, Any]], heading: str) -> str:
    lines: list[tuple[Any, ...]] = [
        (r["optimiser"], r["ms"], f"{r['ratio']:.2f}", "{:.2f}-{:.2f}".format(*r["quartiles"]), f"{r['undisturbed']:.2f}")
        for r in found
    ]
    heads: tuple[str, ...] = (heading, "ms", "ratio", "quartiles", "of the fastest tenths")
    if "arrays" in found[0]:
        first = found[0]["arrays"]
        heads += ("arrays", "at the first one's bytes per second")
        lines = [(*line, r["arrays"], f"{r['arrays'] / first:.2f}") for line, r in zip(lines, found, strict=True)]
    return markdown(heads, lines)


def page(record: dict[str, Any]) -> str:
    parts = [
        "# What a step costs\n",
        f"`python benchmarks/step.py`, one thread of {record['machine']['processor']}. Medians over rounds; in brackets the "
        "ratio of the fastest tenths, which other work on the machine disturbs least. " + ABOUT + "\n",
    ]
    if record.get("training"):
        found = {name: {r["optimiser"]: r for r in timed} for name, timed in record["training"].items()}
        lines = [
            (
                who,
                *(
                    "{ratio:.2f} ({undisturbed:.2f})".format(**model[who]) if who in model else ""
                    for model in found.values()
                ),
            )
            for who in dict.fromkeys(who for model in found.values() for who in model)
        ]
        base = ("Adam, foreach: ms", *(f"{model['Adam, foreach']['ms']:.1f}" for model in found.values()))
        parts += ["## A training step, over that with `Adam(foreach=True)`\n", markdown(("", *found), [*lines, base]) + "\n"]
    if "weight" in record:
        parts += ["## One weight of 2048 x 2048, the step alone\n", table(record["weight"], "") + "\n"]
    if "passes" in record:
        parts += [f"## {record['parameters']:,} parameters, the step alone\n", table(record["passes"], "") + "\n"]
    if "compiled" in record:
        parts += [
            "## The step of the MLP alone, compiled and written out\n",
            table(record["compiled"], "`check_finite=False`") + "\n",
        ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parameters", type=int, default=10_000_000, help="of `passes`")
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = round(os.getloadavg()[0], 1)
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record |= {"rounds": args.rounds, "parameters": args.parameters}
    found = training(args.rounds, [MODELS[part] for part in args.only if part in MODELS])
    every = {**record.get("training", {}), **found}
    record["training"] = {name: every[name] for name in MODELS.values() if name in every}
    if "weight" in args.only:
        record["weight"] = weight(args.rounds)
    if "passes" in args.only:
        record["passes"] = passes(2 * args.rounds, args.parameters)
    if "compiled" in args.only:
        record["compiled"] = compiled(2 * args.rounds)
    record |= {"machine": machine(before), "about": ABOUT}
    write("step", record, page(record))


if __name__ == "__main__":
    main()

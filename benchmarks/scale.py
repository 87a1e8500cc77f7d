"""Time and memory of a step where models are large: one weight of 256 to 4096, and a model of the shape of GPT-2 small.

    python benchmarks/scale.py [--sizes 256 512 ...] [--without gpt2]

The step alone, with random gradients, on one thread. Every measurement has a process of its own. Memory is the state between
steps, and for large weights how far the process grows in a step, both in copies of the parameters. A step of SOAP is nine
ordinary ones and one that renews the eigenbases, over ten. On GPT-2 the embeddings are given to AdamW, except where said,
and SOAP is measured on one of the twelve blocks, and multiplied.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from machine import machine
from timing import ABOUT, POLAR, markdown, optimisers, polar, write

SIZES = (256, 512, 1024, 2048, 4096)
ONE = ("Adam, foreach", "Adam, fused", "Muon + AdamW", "SOAP", *POLAR)
WIDTH, BLOCKS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024
BUDGET = 20.0  # seconds, after which no further step is timed
NODES, LINK = (1, 8, 64), 25e9  # of the calculation: processes that share the model, and bytes a second into each of them

Params = dict[str, nn.Parameter]


def block(at: int) -> dict[str, tuple[int, ...]]:
    """The shapes of one block of GPT-2, as torch's linear layers have them."""
    weights = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.out": (WIDTH, WIDTH)}
    weights |= {"mlp.up": (4 * WIDTH, WIDTH), "mlp.down": (WIDTH, 4 * WIDTH)}
    found: dict[str, tuple[int, ...]] = {f"blocks.{at}.{n}.weight": s for n, s in weights.items()}
    found |= {f"blocks.{at}.{n}.bias": s[:1] for n, s in weights.items()}
    return found | {f"blocks.{at}.{n}": (WIDTH,) for n in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")}


def gpt2() -> dict[str, tuple[int, ...]]:
    """All of it; the output layer is the embedding of the tokens."""
    found: dict[str, tuple[int, ...]] = {"tokens": (VOCABULARY, WIDTH), "positions": (CONTEXT, WIDTH)}
    for at in range(BLOCKS):
        found |= block(at)
    return found | {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,)}


class Both:
    """Optimisers of two sets of parameters, as one."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()


def gpt2_optimisers() -> dict[str, Callable[[Params], Any]]:
    """For the whole model."""

    def split(params: Params, *, vectors: bool) -> tuple[Params, list[nn.Parameter]]:
        """Those of the blocks, with or without vectors, and the rest."""
        inner = {n: p for n, p in params.items() if n.startswith("blocks") and (vectors or p.ndim > 1)}
        return inner, [p for n, p in params.items() if n not in inner]

    def muon(params: Params) -> Any:
        inner, rest = split(params, vectors=False)
        return Both(torch.optim.Muon(inner.values(), lr=1e-3), torch.optim.AdamW(rest, fused=True))

    def ours(params: Params, **whitening: int) -> Any:
        inner, rest = split(params, vectors=True)
        return Both(polar(list(inner.items()), **whitening), torch.optim.AdamW(rest, fused=True))

    return {
        "Adam, foreach": lambda params: torch.optim.Adam(params.values(), foreach=True),
        "Adam, fused": lambda params: torch.optim.Adam(params.values(), fused=True),
        "Muon + AdamW": muon,
        **{name: lambda params, w=whitening: ours(params, **w) for name, whitening in POLAR.items()},
        "MetaMD, whiten 3, embeddings too": lambda params: polar(list(params.items()), whiten=3),
    }


# one measurement, in a process of its own


def measured(shapes: dict[str, tuple[int, ...]], make: Callable[[Params], Any]) -> dict[str, Any]:
    """Seconds of a step, and memory in copies of the parameters."""
    torch.set_num_threads(1)
    params = {n: nn.Parameter(0.02 * torch.randn(s)) for n, s in shapes.items()}
    for p in params.values():
        p.grad = torch.randn_like(p)
    size = sum(p.nbytes for p in params.values())
    optimiser = make(params)
    optimiser.step()
    state = kept(optimiser)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what is there now
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < 2 or (len(seconds) < 10 and time.perf_counter() - begin < BUDGET):
        seconds.append(timed(optimiser))
    usual, groups = statistics.median(seconds), [g for g in optimiser.param_groups if "precondition_frequency" in g]
    for group in groups:
        group["precondition_frequency"] = 1
    step = (9 * usual + timed(optimiser)) / 10 if groups else usual
    found = {"seconds": step, "steps": len(seconds), "parameters": size // 4, "state": state / size}
    # The C library keeps what is freed below 32 MB, so that the process grows for larger blocks only.
    return found | ({"peak": (resident("VmHWM") - before) / size} if min(p.nbytes for p in params.values()) > 2**25 else {})


def timed(optimiser: Any) -> float:
    begin = time.perf_counter()
    optimiser.step()
    return time.perf_counter() - begin


def resident(what: str) -> int:
    """Bytes of memory that this process has, or has had at most: Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))


def kept(optimiser: Any) -> int:
    """Bytes of the tensors in the state of an optimiser, and of MetaMD's metrics and coordinates."""

    def size(found: object) -> int:
        if isinstance(found, Tensor):
            return found.nbytes
        if isinstance(found, dict | list | tuple):
            return sum(map(size, found.values() if isinstance(found, dict) else found))
        return 0

    parts = getattr(optimiser, "parts", None)
    if parts:
        return sum(map(kept, parts))
    total = sum(size(state) for state in optimiser.state.values())
    basis = getattr(getattr(optimiser, "potential", None), "basis", None)
    return total + (0 if basis is None else size(basis.factors))


def one(what: str, name: str) -> dict[str, Any]:
    """A measurement by its name."""
    if what == "gpt2":
        return measured(gpt2(), gpt2_optimisers()[name])
    shapes = block(0) if what == "block" else {"weight": (int(what), int(what))}
    make = optimisers()[name]
    if what != "block" and name == "Muon + AdamW":  # its last layer would be AdamW's: of a single weight, all there is
        return measured(shapes, lambda params: torch.optim.Muon(params.values(), lr=1e-3))
    return measured(shapes, lambda params: make(list(params.items())))


def apart(what: str, name: str) -> dict[str, Any]:
    """The same, in another process."""
    command = [sys.executable, __file__, "--one", what, name]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = {k: round(v, 6) if isinstance(v, float) else v for k, v in json.loads(done.stdout).items()}
    print(what, name, found, file=sys.stderr, flush=True)
    return found


# the page


def on_nodes(seconds: float, nodes: int) -> tuple[str, ...]:
    """GPT-2 under FSDP2, by calculation, from the seconds of a step of one process.

    Every process receives what it has not of each weight's averaged gradient, in float32, and whitens all weights.
    """
    hidden = BLOCKS * sum(math.prod(shape) for shape in block(0).values() if len(shape) > 1)
    everything = sum(math.prod(shape) for shape in gpt2().values())
    received = 4 * hidden * (nodes - 1) / nodes
    built, shared = seconds + received / LINK, seconds / nodes + 2 * received / LINK
    state = 4 * (2 * everything - hidden) / nodes  # one average of a weight; of all else two numbers
    return str(nodes), f"{state / 1e6:,.0f}", f"{received / 1e6:,.0f}", f"{built:.2f}", f"{shared:.2f}"


def page(record: dict[str, Any]) -> str:
    """Tables of one weight, and of GPT-2."""
    sizes, names = list(record["weights"]), list(next(iter(record["weights"].values())))
    parts = ["# Steps of large weights\n", "`python benchmarks/scale.py`, one thread, the step alone. " + ABOUT + "\n"]

    lines = [(n, *(f"{1e3 * record['weights'][s][n]['seconds']:.1f}" for s in sizes)) for n in names]
    parts += ["## One weight: milliseconds of a step\n", markdown(("", *(f"{s} x {s}" for s in sizes)), lines) + "\n"]
    largest = record["weights"][sizes[-1]]
    lines = [(n, f"{r['state']:.2f}", f"{r['peak']:.0f}" if "peak" in r else "") for n, r in largest.items()]
    parts += [f"## One weight of {sizes[-1]} x {sizes[-1]}: memory, in copies of the weight\n"]
    parts += [markdown(("", "state", "for the step itself"), lines) + "\n"]
    if "gpt2" in record:
        found = record["gpt2"]
        lines = [(n, f"{r['seconds']:.2f}", f"{r['state']:.2f}") for n, r in found.items()]
        count = next(iter(found.values()))["parameters"]
        parts += [f"## The shape of GPT-2 small, {count:,} parameters\n"]
        parts += [markdown(("", "seconds of a step", "state"), lines) + "\n"]
        name = "MetaMD, whiten 3, block 64"
        heading = ("processes", "state of each, MB", "each receives, MB", "seconds, as built", "if each whitened its share")
        parts += [f"## The same over several processes, by calculation from the {found[name]['seconds']:.2f} s of {name}\n"]
        parts += [f"Links of {LINK / 1e9:.0f} GB/s into each process. Forward and backward are not in it.\n"]
        parts += [markdown(heading, [on_nodes(found[name]["seconds"], n) for n in NODES]) + "\n"]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--without", nargs="*", default=(), choices=("gpt2",))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    before = round(os.getloadavg()[0], 1)
    record: dict[str, Any] = {"weights": {str(s): {n: apart(str(s), n) for n in ONE} for s in args.sizes}}
    if "gpt2" not in args.without:
        record["gpt2"] = {n: apart("gpt2", n) for n in gpt2_optimisers()}
        soap, adam = apart("block", "SOAP"), record["gpt2"]["Adam, fused"]
        share = BLOCKS * soap["parameters"] / adam["parameters"]
        record["gpt2"]["SOAP, twelve times one block, embeddings to AdamW"] = {
            "seconds": BLOCKS * soap["seconds"] + (1 - share) * adam["seconds"],
            "state": share * soap["state"] + (1 - share) * adam["state"],
        }
    write("scale", {"machine": machine(before), "about": ABOUT, **record}, page(record))


if __name__ == "__main__":
    main()

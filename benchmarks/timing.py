"""What the timing benchmarks share: optimisers by name, turns that all of them take, and tables."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import metamd
from metamd.rivals import rival

RESULTS = Path(__file__).parent / "results"
RANK = 32  # directions of a learned basis, as in the shipped file for LeNet
POLAR: Mapping[str, Mapping[str, int]] = {
    "MetaMD, exact": {},
    "MetaMD, whiten 5": {"whiten": 5},
    "MetaMD, whiten 3": {"whiten": 3},
    "MetaMD, whiten 3, block 64": {"whiten": 3, "block": 64},
    "MetaMD, whiten 3, block 32": {"whiten": 3, "block": 32},
}
ABOUT = (
    "Muon is torch.optim.Muon with AdamW for vectors and the last layer; its five iterations run in bfloat16. SOAP is that "
    "of pytorch_optimizer, with new eigenbases every 10 steps. MetaMD takes polar steps as the shipped files recommend them "
    f"(beta 0.7, signal 0.95), in float32 and in random coordinates of rank {RANK}. Exact steps find eigenvalues; `whiten` "
    "and `block` are those of `metamd.Online`."
)

Named = Sequence[tuple[str, torch.nn.Parameter]]


def learned_coordinates(named: Iterable[tuple[str, Tensor]]) -> metamd.MaxDiagonal:
    """Coordinates and a metric of the shape that a learned file has, with random numbers."""
    params, generator = {n: p.detach() for n, p in named}, torch.Generator().manual_seed(0)
    basis, factors = metamd.Kronecker(rank=RANK).bind(params).basis, {}
    for name in basis.learnable():
        size = basis.places[name].sizes["right"]
        columns = torch.randn(size, min(RANK, size), generator=generator)
        factors[f"right/{basis.places[name].key}"] = torch.linalg.qr(columns)[0]
    blank = metamd.MaxDiagonal(1, tying="tensor", basis=basis.with_factors(factors)).bind(params)
    return blank.with_metrics({k: 0.5 * torch.randn(d.shape, generator=generator) for k, d in blank.log_d.items()})


def polar(named: Named, *, check_finite: bool = True, **whitening: int) -> metamd.MetaMD:
    """MetaMD with polar steps, at a scale that nothing was trained for."""
    scale = dict.fromkeys((n for n, _ in named), 1e3)
    online = metamd.Online("polar", beta=0.7, signal=0.95, scale=scale, **whitening)
    return metamd.MetaMD(named, learned_coordinates(named), metric=online, check_finite=check_finite)


def optimisers() -> dict[str, Callable[[Named], Any]]:
    """What is timed, by name; the first one is what the others are compared with."""
    adam = torch.optim.Adam
    found: dict[str, Callable[[Named], Any]] = {
        "Adam, foreach": lambda named: adam([p for _, p in named], lr=1e-4, foreach=True),
        "Adam, as constructed": lambda named: adam([p for _, p in named], lr=1e-4),
        "Adam, fused": lambda named: adam([p for _, p in named], lr=1e-4, fused=True),
        "Muon + AdamW": lambda named: rival("muon").untuned().start(list(named)),
        "SOAP": lambda named: rival("soap").untuned().start(list(named)),
    }
    return found | {name: partial(polar, **whitening) for name, whitening in POLAR.items()}


def take_turns(
    steps: Mapping[str, Callable[[], object]], *, rounds: int, repeats: int = 1, warmup: int = 1
) -> dict[str, NDArray[np.float64]]:
    """Seconds of a step, by name and round: in every round each makes so many steps in a row."""
    found = {name: np.empty(rounds) for name in steps}
    for number in range(-warmup, rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                step()
            if number >= 0:
                found[name][number] = (time.perf_counter() - begin) / repeats
    return found


def rows(times: Mapping[str, NDArray[np.float64]]) -> list[dict[str, Any]]:
    """Medians over rounds: milliseconds, and ratios to the first name in the same round, with their quartiles.

    Where other work shares the machine, the medians have it in them; `undisturbed` is the ratio of the fastest tenths.
    """
    reference = next(iter(times.values()))
    found = []
    for name, seconds in times.items():
        low, middle, high = (round(float(q), 3) for q in np.quantile(seconds / reference, (0.25, 0.5, 0.75)))
        ms = round(1e3 * float(np.median(seconds)), 3)
        least = round(float(np.quantile(seconds, 0.1) / np.quantile(reference, 0.1)), 3)
        found.append({"optimiser": name, "ms": ms, "ratio": middle, "quartiles": [low, high], "undisturbed": least})
    return found


def markdown(heading: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table."""
    shown = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(heading) + " |", "|---" * len(heading) + "|", *shown])


def write(name: str, record: Mapping[str, Any], page: str) -> None:
    """The record and the page of a benchmark, beside those of the others."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(page)
    print(page)

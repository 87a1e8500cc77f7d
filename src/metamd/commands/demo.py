"""`metamd demo`: mirror descent in a mixture of metrics, on problems small enough to look at."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metamd.commands import Demo
from metamd.learned import LearnedOptimiser
from metamd.optimiser import MetaMD
from metamd.potentials import Euclidean, MaxDiagonal, Potential

CURVATURE = torch.tensor([[0.6, 0.0], [0.0, 28.0]], dtype=torch.float64)
TOLERANCE = 1e-6
LIMIT = 5000


def run(options: Demo) -> int:
    """Compare optimisers on badly scaled quadratics, write a geometry to a file, read it back and use it."""
    options.out.mkdir(parents=True, exist_ok=True)
    problems = list(_problems(options.seed))
    geometry = LearnedOptimiser.from_potential(_hand_made(), family={"name": "2-D quadratics"}, horizon=LIMIT)
    path = options.out / "quadratics.safetensors"
    geometry.save(path)
    rows = {
        "SGD, best rate": [_iterations(p, Euclidean(), 2 / (p[0][0, 0] + p[0][1, 1])) for p in problems],
        "mixture, the paper's step": [_iterations(p, geometry.potential, 1.0, exact=False) for p in problems],
        "mixture, exact step": [_iterations(p, geometry.potential, 1.0) for p in problems],
    }
    result = {"iterations": rows, "tolerance": TOLERANCE, "problems": len(problems), "file": str(path)}
    _report(result, options)
    return 0


def _problems(seed: int, count: int = 20) -> Iterator[tuple[Tensor, Tensor]]:
    """Quadratics 1/2 x'Ax - b'x whose curvatures vary by 20 % around 0.6 and 28."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        scale = 1 + 0.1 * torch.randn(2, generator=generator, dtype=torch.float64)
        yield CURVATURE * scale.diag() ** 2, 1 + torch.randn(2, generator=generator, dtype=torch.float64)


def _hand_made() -> MaxDiagonal:
    """Two metrics written by hand: the mean curvature, and twice it further from the start. Nothing is learned here."""
    pieces = torch.stack([CURVATURE.diag(), 2 * CURVATURE.diag()]).log()
    offsets = torch.tensor([20.0, 0.0], dtype=torch.float64)
    return MaxDiagonal(2).with_metrics({"x": pieces}, offsets)


def _iterations(problem: tuple[Tensor, Tensor], potential: Potential, lr: Tensor | float, exact: bool = True) -> int | None:
    a, b = problem
    x = torch.nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64))
    optimiser = MetaMD([("x", x)], potential, lr=float(lr), exact=exact)
    for t in range(LIMIT):
        optimiser.zero_grad()
        torch.autograd.backward(0.5 * x @ a @ x - b @ x)
        if x.grad is not None and float(x.grad.norm()) < TOLERANCE:
            return t
        optimiser.step()
    return None


def _report(result: dict[str, Any], options: Demo) -> None:
    Path(options.out / "demo.json").write_text(json.dumps(result, indent=1))
    if options.json:
        print(json.dumps(result))
        return
    print(f"Iterations until the gradient is below {TOLERANCE:g}, {result['problems']} badly scaled quadratics:\n")
    for name, counts in result["iterations"].items():
        finite = sorted(c if c is not None else LIMIT for c in counts)
        print(f"  {name:28s} median {finite[len(finite) // 2]:5d}   worst {finite[-1]:5d}")
    print(
        "\nThe metrics were written by hand: learning them comes with `metamd train`. They are in a file now, which\n"
        f"`metamd inspect {result['file']}` prints and `metamd.load` reads."
    )
    print(f"Written to {options.out}.", file=sys.stderr)

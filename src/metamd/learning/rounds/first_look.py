"""A look at the tasks before any long work: what would fail later is a sentence now, and how large a basis may be."""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from metamd.inner.closed_form import LARGEST
from metamd.inner.derivatives import hessian_products
from metamd.inner.run import Cost, scalar_loss
from metamd.learning.rounds.round import draw
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.tying import Slot, some
from metamd.tasks.base import Task, TaskFamily, derive_seed

POWERS = 20
"""Products with the Hessian that the power method takes."""

AFFORDED = 0.25
"""The share of the operations of a gradient that products with learned factors may take."""


@dataclass(frozen=True)
class Findings:
    """What the first gradients of a family's tasks say."""

    bound: MaxDiagonal  # the potential, bound to the first task
    shapes: dict[str, tuple[int, ...]]  # of the first task's tensors
    scale: dict[str, float]  # root mean square of the first gradient, by key of the metric
    curvature: float | None  # the largest of the tasks' Hessians at the start, if it was asked for
    cost: Cost  # of looking


def first_look(family: TaskFamily, potential: MaxDiagonal, seed: int, count: int, *, curvature: bool = False) -> Findings:
    """Look at the start of the tasks of the first outer step, of which there are `count`."""
    if not isinstance(family, TaskFamily):
        raise TypeError(f"family must be a TaskFamily, got {type(family).__name__}. See metamd.tasks for some.")
    if isinstance(family, Sized) and not len(family):
        raise ValueError(f"the family {family.name!r} is empty. Give it at least one task to sample.")
    try:
        first = draw(family, seed, "train", 1, 0)
    except (LookupError, StopIteration, RuntimeError) as error:
        raise ValueError(f"the family {family.name!r} has no task to sample ({error!r}). Give it at least one.") from error
    start = first.init()
    if not start:
        raise ValueError(f"the tasks of {family.name!r} have no parameters. task.init() must return at least one tensor.")
    bound = affording(potential.bind(start), first)
    shapes = {n: tuple(x.shape) for n, x in start.items()}
    found: list[dict[str, Any]] = []
    for i in range(count):
        try:
            task = draw(family, seed, "train", 1, i)
            found.append(look(task, bound, shapes) | ({"curvature": largest_curvature(task, seed)} if curvature else {}))
        except ValueError as error:
            raise ValueError(f"task {i + 1} of the first {count}: {error}") from error
    finite = [row for row in found if all(map(math.isfinite, (row["loss"], *(s for s, _ in row["squares"].values()))))]
    if not finite:
        raise ValueError(
            f"the loss or its gradient is not finite (loss {found[0]['loss']}) at the start of all {count} tasks that were "
            "tried, before any step was taken. Check the data and the initialisation."
        )
    scale = gradient_scale([row["squares"] for row in finite])
    bends = [row["curvature"] for row in finite if math.isfinite(row.get("curvature", math.nan))]
    cost = Cost(gradients=count * (1 + curvature), hvps=POWERS * count * curvature)
    return Findings(bound, shapes, scale, max(bends, default=None), cost)


def squares_by_key(grads: Params, slots: Mapping[str, Slot]) -> dict[str, list[float]]:
    """The sum and the number of the squares of a gradient, by key of the metric."""
    squares: dict[str, list[float]] = {}
    for n, g in grads.items():
        pair = squares.setdefault(slots[n].key, [0.0, 0.0])
        pair[0] += float(g.square().sum(dtype=torch.float64))
        pair[1] += g.numel()
    return squares


def gradient_scale(rows: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The root mean square of the first gradients, by key of the metric: rows hold sums of squares and their numbers."""
    keys = dict.fromkeys(k for row in rows for k in row)
    totals = {k: [sum(row[k][j] for row in rows if k in row) for j in (0, 1)] for k in keys}
    return {k: math.sqrt(s / n) for k, (s, n) in totals.items() if n}


def largest_curvature(task: Task, seed: int) -> float:
    """|lambda|, the largest eigenvalue of the Hessian at the start, by the power method."""
    start = task.init()
    generator = torch.Generator().manual_seed(derive_seed(seed, "curvature"))
    tangents = {n: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for n, x in start.items()}
    found = 0.0
    for _ in range(POWERS):
        length = math.sqrt(sum(float(v.square().sum(dtype=torch.float64)) for v in tangents.values()))
        if not 0 < length < math.inf:
            break
        units = {n: (v / length).unsqueeze(0) for n, v in tangents.items()}
        _, _, products = hessian_products(task, start, task.batch(0), units)
        tangents = {n: h[0] for n, h in products.items()}
        found = math.sqrt(sum(float(h.square().sum(dtype=torch.float64)) for h in tangents.values()))
    return found


def look(task: Task, bound: MaxDiagonal, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The loss at the start, and by key the sum and the number of the squares of the first gradient."""
    start = {n: x.detach().requires_grad_() for n, x in task.init().items()}
    here = {n: tuple(x.shape) for n, x in start.items()}
    for n in sorted(set(here) | set(shapes)) if bound.tying == "parameter" else ():
        if here.get(n) != shapes.get(n):
            raise ValueError(
                f"its tensor {n!r} has the shape {here.get(n)} where the first task's has {shapes.get(n)}, and the tying "
                '"parameter" learns one metric for each entry. Use tying="role" or "tensor" for tasks of different shapes.'
            )
    slots = bound.bind(start).slots
    loss = scalar_loss(task, start, task.batch(0))
    grads = torch.autograd.grad(loss, list(start.values()), allow_unused=True)
    ignored = {n: None for n, g in zip(start, grads, strict=True) if g is None}
    if ignored:
        raise ValueError(
            f"the loss ignores {some(ignored)}, so that nothing can be learned about it. Leave such parameters out of "
            "task.init()."
        )
    squares = squares_by_key(dict(zip(start, grads, strict=True)), slots)
    return {"loss": float(loss.detach()), "squares": squares}


def affording(potential: MaxDiagonal, task: Task) -> MaxDiagonal:
    """The same potential; under `rank="auto"` its basis keeps all directions of the sides that can be afforded.

    With `LARGEST` directions a side costs two thin products, with all n of them one product of 2n operations for each number
    of the tensor. The cheapest sides come first, until a quarter of the operations of a gradient is spent. Convolutions,
    whose kernels are used at many places, leave room for more than matrices do. The potential, bound to the task's
    parameters, gets a new basis in place.
    """
    basis = potential.basis
    if basis.rank != "auto":
        return potential
    thin: dict[str, int] = {}
    whole: dict[str, int] = {}
    for place in map(basis.places.__getitem__, basis.learnable()):
        numbers, factor, n = math.prod(place.shape), f"right/{place.key}", place.sizes["right"]
        thin[factor] = thin.get(factor, 0) + 4 * numbers * min(LARGEST, n)
        whole[factor] = whole.get(factor, 0) + 2 * numbers * n
    left = AFFORDED * gradient_operations(task) - sum(thin.values())
    kept = []
    for factor in sorted(whole, key=lambda f: whole[f] - thin[f]):
        extra = whole[factor] - thin[factor]
        if extra <= max(left, 0):
            kept.append(factor)
            left -= extra
    potential.basis = basis.with_factors(basis.factors, kept)
    return potential


def gradient_operations(task: Task) -> int:
    """Multiplications and additions of loss and gradient of one batch, counted: three times those of the loss."""
    with FlopCounterMode(display=False) as counter:
        task.loss(task.init(), task.batch(0))
    return 3 * int(counter.get_total_flops())

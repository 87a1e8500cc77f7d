"""A first look at the tasks of a family before any long work: what would fail later is refused now."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from metamd.inner.closed_form import LARGEST_RANK
from metamd.inner.derivatives import hessian_products
from metamd.inner.run import Cost, scalar_loss
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.tying import Slot, some
from metamd.tasks.base import Config, Task, TaskFamily, derive_seed, require_family

POWERS = 20
"""Products with the Hessian that the power method takes."""

AFFORDED = 0.25
"""The share of the operations of a gradient that products with learned factors may take."""


def draw_config(family: TaskFamily, *purpose: int | str) -> Config:
    """A config that depends on the family and on these words alone: a seed, what the task is for, and its number."""
    return family.sample(torch.Generator().manual_seed(derive_seed(*purpose)))


def draw_task(family: TaskFamily, *purpose: int | str) -> Task:
    """The task of that config."""
    return family.build(draw_config(family, *purpose))


@dataclass(frozen=True)
class Findings:
    """What the first gradients of a family's tasks say."""

    bound: MaxDiagonal  # the potential, bound to the first task
    shapes: dict[str, tuple[int, ...]]  # of the first task's tensors
    scale: dict[str, float]  # root mean square of the first gradient, by key of the metric
    curvature: float | None  # the largest of the tasks' Hessians at the start, if it was asked for
    cost: Cost  # of looking


def first_look(family: TaskFamily, potential: MaxDiagonal, seed: int, count: int, *, curvature: bool = False) -> Findings:
    """Look at the start of the `count` tasks of the first outer step."""
    require_family(family)
    if isinstance(family, Sized) and not len(family):
        raise ValueError(f"the family {family.name!r} is empty. Give it at least one task to sample.")
    try:
        first = draw_task(family, seed, "train", 1, 0)
    except (LookupError, StopIteration, RuntimeError) as error:
        raise ValueError(f"the family {family.name!r} has no task to sample ({error!r}). Give it at least one.") from error
    start = first.init()
    if not start:
        raise ValueError(f"the tasks of {family.name!r} have no parameters. task.init() must return at least one tensor.")
    bound = affording(potential.bind(start), first)
    shapes = {n: tuple(x.shape) for n, x in start.items()}
    found = []
    for i in range(count):
        try:
            task = draw_task(family, seed, "train", 1, i)
            found.append((*look(task, bound, shapes), largest_curvature(task, seed) if curvature else math.nan))
        except ValueError as error:
            raise ValueError(f"task {i + 1} of the first {count}: {error}") from error
    finite = [row for row in found if all(map(math.isfinite, (row[0], *(s for s, _ in row[1].values()))))]
    if not finite:
        raise ValueError(
            f"the loss or its gradient is not finite (loss {found[0][0]}) at the start of all {count} tasks that were "
            "tried, before any step was taken. Check the data and the initialisation."
        )
    bends = [bend for _, _, bend in finite if math.isfinite(bend)]
    cost = Cost(gradients=count * (1 + curvature), hvps=POWERS * count * curvature)
    return Findings(bound, shapes, gradient_scale(squares for _, squares, _ in finite), max(bends, default=None), cost)


Squares = dict[str, tuple[float, float]]
"""By key of the metric, a sum of squares and their number."""


def total_squares(rows: Iterable[tuple[str, float, float]]) -> Squares:
    """The sums over all rows of the same key."""
    found: Squares = {}
    for key, square, number in rows:
        total, count = found.get(key, (0.0, 0))
        found[key] = total + square, count + number
    return found


def squares_by_key(grads: Params, slots: Mapping[str, Slot]) -> Squares:
    """The squares of a gradient."""
    return total_squares((slots[n].key, float(g.square().sum(dtype=torch.float64)), g.numel()) for n, g in grads.items())


def gradient_scale(found: Iterable[Squares]) -> dict[str, float]:
    """The root mean square of the first gradients, by key of the metric, where it is finite."""
    total = total_squares((k, *pair) for squares in found for k, pair in squares.items())
    return {k: math.sqrt(s / n) for k, (s, n) in total.items() if n and math.isfinite(s / n)}


def largest_curvature(task: Task, seed: int) -> float:
    """|lambda|, the largest eigenvalue of the Hessian at the start, by the power method."""
    start = task.init()
    generator = torch.Generator().manual_seed(derive_seed(seed, "curvature"))
    tangents = {n: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for n, x in start.items()}
    length = norm_of_all(tangents)
    for _ in range(POWERS):
        if not 0 < length < math.inf:
            break
        units = {n: (v / length).unsqueeze(0) for n, v in tangents.items()}
        tangents = {n: h[0] for n, h in hessian_products(task, start, task.batch(0), units)[2].items()}
        length = norm_of_all(tangents)
    return length


def norm_of_all(tensors: Params) -> float:
    """The 2-norm over all tensors."""
    return math.sqrt(sum(float(x.square().sum(dtype=torch.float64)) for x in tensors.values()))


def look(task: Task, bound: MaxDiagonal, shapes: dict[str, tuple[int, ...]]) -> tuple[float, Squares]:
    """The loss at the start, and the squares of the first gradient."""
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
    return float(loss.detach()), squares_by_key(dict(zip(start, grads, strict=True)), slots)


def affording(potential: MaxDiagonal, task: Task) -> MaxDiagonal:
    """The same potential; under `rank="auto"` its basis is changed in place, to keep all directions where that costs little.

    The cheapest sides come first, until a quarter of the operations of a gradient is spent.
    """
    basis = potential.basis
    if basis.rank != "auto":
        return potential
    left, extra, kept = AFFORDED * gradient_operations(task), Counter[str](), []
    for place in map(basis.places.__getitem__, basis.learnable()):
        # two thin products with `LARGEST_RANK` directions, one product with all of them
        numbers, n = math.prod(place.shape), place.sizes["right"]
        left -= 4 * numbers * min(LARGEST_RANK, n)
        extra[f"right/{place.key}"] += 2 * numbers * n - 4 * numbers * min(LARGEST_RANK, n)
    for factor in sorted(extra, key=extra.__getitem__):
        if extra[factor] <= max(left, 0):
            kept.append(factor)
            left -= extra[factor]
    potential.basis = basis.with_factors(basis.factors, kept)
    return potential


def gradient_operations(task: Task) -> int:
    """Multiplications and additions of loss and gradient of one batch, counted: three times those of the loss."""
    with FlopCounterMode(display=False) as counter:
        task.loss(task.init(), task.batch(0))
    return 3 * int(counter.get_total_flops())

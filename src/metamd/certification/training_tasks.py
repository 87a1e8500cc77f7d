"""The training tasks of a learned optimiser, drawn again, and how far their solutions lie from their starts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metamd.certification.generalisation import Displacements, Size
from metamd.files.header import Header
from metamd.files.learned import LearnedOptimiser
from metamd.learning.rounds.outer import metric_norms
from metamd.learning.rounds.round import draw_config
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import grouped_squares
from metamd.tasks.base import Task, TaskFamily, config_hash

PURPOSES = ("train", "judge", "pieces", "scale")
"""What `meta_train` draws tasks for."""


@dataclass(frozen=True)
class TrainingTasks:
    """The tasks that a file was learned on.

    Args:
        tasks: n of them.
        share: of delta that their number leaves: how many outer steps there were was decided by looking at the tasks, so
            that step s may only use 1/(s(s + 1)).
    """

    tasks: list[Task]
    share: float


def training_tasks(header: Header, family: TaskFamily) -> TrainingTasks:
    """Draw the training tasks again from the seed in the header, each checked against its hash.

    Args:
        header: of the learned optimiser.
        family: what it was learned on.

    Raises:
        ValueError: if these are not the tasks, with the reason.
    """
    known, steps = set(header.task_hashes), int(header.cost.get("outer_steps", 0))
    if known and not steps:
        raise ValueError("the file was learned from reference runs, not in outer steps whose tasks can be drawn again.")
    if not known or len(header.seeds) != 1:
        raise ValueError("the file does not say which tasks it was learned on.")
    if len(known) % steps:
        raise ValueError("its training tasks were not all different, so that they are not a sample of independent tasks.")
    found: list[Task] = []
    for step in range(1, steps + 1):
        for purpose in PURPOSES:
            configs = [draw_config(family, header.seeds[0], purpose, step, i) for i in range(len(known) // steps)]
            found += [family.build(config) for config in configs if config_hash(config) in known]
    if len(found) != len(known):
        raise ValueError(
            "the training tasks were not drawn from this family as it is here, and a bound from them says nothing about it."
        )
    return TrainingTasks(found, 1 / (steps * (steps + 1)))


@dataclass(frozen=True)
class Displacement:
    """How far a solution lies from its start.

    Args:
        divergence: B(theta_*||theta_1).
        length: ||theta_* - theta_1||_2.
        reach: the largest root mean square over coordinates that share a metric; the length, in a learned basis.
    """

    divergence: float
    length: float
    reach: float

    @property
    def distance(self) -> float:
        """sqrt(2 B), which is ||theta_* - theta_1||_D for one piece."""
        return math.sqrt(2 * max(self.divergence, 0.0)) if self.divergence < math.inf else math.inf


@torch.no_grad()
def measure(potential: MaxDiagonal, start: Params, solution: Params) -> Displacement:
    """The displacement of one task; all infinite if the solution is not finite.

    Args:
        potential: bound to the task's tensors and centred at its start.
        start: theta_1.
        solution: theta_*.
    """
    if not all(bool(x.isfinite().all()) for x in solution.values()):
        return Displacement(math.inf, math.inf, math.inf)
    moved = {n: (solution[n] - start[n]).double() for n in start}
    length = math.sqrt(sum(float(x.square().sum()) for x in moved.values()))
    reach = length if potential.basis.factors() else math.sqrt(_largest_mean_square(potential, moved))
    return Displacement(float(potential.divergence(solution, start)), length, reach)


def _largest_mean_square(potential: MaxDiagonal, moved: Params) -> float:
    """Over groups of coordinates that share a metric."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, float] = {}
    for n, slot in potential.slots.items():
        squares = slot.gather(grouped_squares(potential.basis.into(n, moved[n]), slot.shape))
        sums[slot.key] = sums.get(slot.key, 0) + squares
        counts[slot.key] = counts.get(slot.key, 0) + moved[n].numel() / max(squares.numel(), 1)
    return max(float(s.max()) / counts[k] for k, s in sums.items() if s.numel())


def displacements(
    learned: LearnedOptimiser, tasks: Sequence[Task], solve: Callable[[Task], Params | None]
) -> tuple[Displacements, Size]:
    """Those of all tasks, and the size of the potential.

    Args:
        learned: the geometry.
        tasks: the training tasks.
        solve: finds theta_* without looking at the geometry, or nothing.

    Raises:
        ValueError: if some theta_* is not known or not finite, with the reason.
    """
    rows = []
    for task in tasks:
        solution, start = solve(task), task.init()
        if solution is None:
            raise ValueError(
                "theta_* must not depend on the potential, and the end of a run does. Pass comparator=Reference(...), a "
                "longer run of another optimiser."
            )
        bound = learned.potential.bind(start)
        rows.append(measure(bound, start, solution))
    if not all(math.isfinite(row.divergence) for row in rows):
        raise ValueError("theta_* of some training task is not finite. Give the comparator a lower lr.")
    columns = [np.array([getattr(row, name) for row in rows]) for name in ("divergence", "length", "reach")]
    models = [{n: tuple(x.shape) for n, x in task.init().items()} for task in tasks]
    if any(shapes != models[0] for shapes in models):
        raise ValueError("the training tasks have models of different shapes, so that there is no one norm ||m||.")
    return Displacements(*columns), size_of(learned.potential.bind(tasks[0].init()), models[0])


def size_of(potential: MaxDiagonal, shapes: dict[str, tuple[int, ...]]) -> Size:
    """What the bounds need to know of a potential.

    Args:
        potential: bound to a model.
        shapes: of the model's tensors.
    """
    metrics = [d for n in potential.slots if (d := potential.metric(n).detach()).numel()]
    b = potential.offsets.detach()
    return Size(
        pieces=potential.pieces,
        numbers=sum(v[0].numel() for v in potential.log_d.values()),
        norm=float(metric_norms(potential, shapes).max()),
        largest=max(float(d.max()) for d in metrics),
        smallest=min(float(d.min()) for d in metrics),
        centred=potential.pieces == 1 or potential.centre == "start",
        offsets=bool((b != b[0]).any()),
        turned=bool(potential.basis.factors()),
    )

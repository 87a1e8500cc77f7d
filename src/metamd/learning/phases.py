"""Several pieces out of one: what the early, middle and late parts of the runs say about the size of steps.

With the pieces active one after another and the offsets b chosen so that the forms meet where a phase ends, the bound is

    B(u||theta_1) + 1/2 sum_t g'D^-1 g = 1/2 sum_j [ D_j (R_j - R_{j-1}) + Y_j / D_j ],

R_j the squared displacement at the end of phase j and Y_j the squared gradients in it: every phase has a closed form of its
own. The curvature that is active can only grow with the distance, so that phases whose steps would grow are joined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metamd.inner.closed_form import Iterate
from metamd.inner.objectives import Regret
from metamd.inner.run import Array, Cost, MirrorDescent, Trajectory, gradient
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import grouped_squares
from metamd.tasks.base import Task


@dataclass(frozen=True)
class PhaseSums:
    """What the phases of a run add up to.

    Args:
        sums: by key, (phases,) each: "y/key" the local norms g'D^-1 g of every phase and "r/key" the squared displacement
            at its end in the norm of D; the last is that of the comparator.
        diverged: as in `Trajectory`.
        cost: of the run.
    """

    sums: dict[str, Tensor]
    diverged: str
    cost: Cost


def run_phases(task: Task, potential: MaxDiagonal, objective: Regret, phases: int, exact: bool) -> PhaseSums:
    """Run a task with one piece and add up its phases.

    Args:
        task: the problem.
        potential: phi, bound, with one piece.
        objective: whose comparator counts.
        phases: how many.
        exact: as for `run_inner`.
    """
    walk = MirrorDescent(task, potential, exact=exact, phases=phases)
    points: list[Params] = []
    while walk.going:
        walk.step(*gradient(task, walk.params, task.batch(walk.taken)))
        if not walk.diverged and walk.taken * phases // walk.steps > len(points):
            points += [walk.params] * (walk.taken * phases // walk.steps - len(points))
    run = walk.finish(objective.reference)
    return PhaseSums({} if run.diverged else _add_up(run, potential, objective, points), run.diverged, run.cost)


def _add_up(run: Trajectory, potential: MaxDiagonal, objective: Regret, points: Sequence[Params]) -> dict[str, Tensor]:
    ends = [*points[:-1], objective.comparator.of(run)]
    sums: dict[str, Tensor] = {}
    for n, slot in potential.slots.items():
        d = potential.metric(n)[0].detach().double()
        moved = [potential.basis.into(n, (end[n] - run.start[n]).double()) for end in ends]
        held = torch.stack([(d * grouped_squares(x, slot.shape)).sum() for x in moved])
        spent = (run.squares[n].double() / d).reshape(len(ends), -1).sum(1)
        for name, value in ((f"r/{slot.key}", held), (f"y/{slot.key}", spent)):
            sums[name] = sums[name] + value if name in sums else value
    return sums


def blank(iterate: Iterate, phases: int) -> dict[str, Tensor]:
    """The sums of no run."""
    return {f"{s}/{k}": torch.zeros(phases, dtype=torch.float64) for k in iterate.log_d for s in ("r", "y")}


def build_pieces(one: Iterate, sums: Mapping[str, Tensor], tasks: float, strength: float = 1.0) -> Iterate:
    """Pieces that are the one metric times a factor for each phase and tensor, and the offsets that hand over between them.

    Args:
        one: the metrics of one piece.
        sums: over the runs.
        tasks: how many runs.
        strength: the power to which the factors are raised; 0 gives copies of the one piece.
    """
    phases = len(next(iter(sums.values())))
    log_d: dict[str, Tensor] = {}
    offsets = np.zeros(phases)
    for key, log in one.log_d.items():
        held, spent = ((sums[f"{s}/{key}"] / tasks).numpy() for s in ("r", "y"))
        factors = rising(spent, np.diff(held, prepend=0.0)) ** strength
        terms = one.basis.terms(key)
        log_d[key] = torch.stack([log[0] + float(np.log(f)) / terms for f in factors]).to(log.dtype)
        # b_{j+1} = b_j - 1/2 (D_{j+1} - D_j) R_j: the forms meet at the end of phase j
        offsets[1:] -= 0.5 * np.cumsum(np.diff(factors) * held[:-1])
    return one.moved(log_d, torch.from_numpy(offsets))


def rising(above: Array, below: Array) -> Array:
    """sqrt(above / below) by phase, neighbours joined until every ratio is positive and none falls.

    Example:
        >>> rising(np.array([1.0, 4.0, 1.0]), np.array([1.0, 1.0, 1.0]))
        array([1.        , 1.58113883, 1.58113883])
    """
    groups: list[tuple[float, float, int]] = []
    for a, b in zip(above, below, strict=True):
        groups.append((float(a), float(b), 1))
        while len(groups) > 1 and (_ratio(groups[-2]) >= _ratio(groups[-1]) or min(groups[-1][1], groups[-2][1]) <= 0):
            (a1, b1, n1), (a2, b2, n2) = groups[-2:]
            groups[-2:] = [(a1 + a2, b1 + b2, n1 + n2)]
    return np.concatenate([np.full(n, np.sqrt(_ratio((a, b, n)))) for a, b, n in groups])


def _ratio(group: tuple[float, float, int]) -> float:
    a, b, _ = group
    return a / b if a > 0 and b > 0 else 1.0

"""A geometry from reference runs alone: what an ordinary optimiser's runs on training tasks say, in closed form, at once.

Rounds of mirror descent learn from runs of their own; where a first metric leads nowhere, as on the plateau on which LeNet
starts, the runs of another optimiser say more. Start, end and gradients are all that the closed form needs.
"""

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metamd.files.learned import LearnedOptimiser, Moments, fingerprint, load, total_cost
from metamd.files.store import Journal
from metamd.files.usage import Usage
from metamd.inner.closed_form import Iterate, learn_factors
from metamd.inner.comparators import Reference
from metamd.inner.objectives import Regret
from metamd.inner.run import Trajectory
from metamd.inner.sums import GradientSums, minimiser, moments_of
from metamd.learning.parts import parts_of
from metamd.learning.rounds.first_look import affording, gradient_scale, look, squares_by_key
from metamd.learning.rounds.round import ends_of, within_reach
from metamd.learning.trial import train
from metamd.learning.usage import draw_tasks, said_reference, tuned_reference
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task, TaskFamily
from metamd.tasks.wrapped import Counted

CHECKED = 3
"""Tasks that are trained with what was learned, to see that it does not diverge."""

MARGIN = 1.4
"""How much longer steps are in these runs: other tasks may be steeper."""

DOUBLINGS = 10

NOTHING_YET = {"gradient_evaluations": 0, "hessian_vector_products": 0, "outer_steps": 0}


def learn_from_reference(
    family: TaskFamily,
    potential: MaxDiagonal,
    *,
    reference: Reference | None = None,
    tasks: int = 8,
    prior: float = 0.0,
    seed: int = 0,
    journal: Journal | None = None,
) -> LearnedOptimiser:
    """The metrics that minimise the regret bound of reference runs on training tasks, against their own ends.

    Three of the tasks are then trained with them, by steps that are longer by 1.4; if one diverges, all metrics are doubled
    until none does.

    Args:
        family: its training side.
        potential: of one piece: `Kronecker()` or `Diagonal()`.
        reference: the optimiser whose runs are learned from; its gradients up to step T count. `tuned_reference` if not
            given.
        tasks: how many runs.
        prior: as for `Regret`.
        seed: draws the tasks.
        journal: where to keep the result, and the reference's rate before it, so that the same call does not compute them
            again.

    Example:
        >>> from metamd import Diagonal, tasks
        >>> learn_from_reference(tasks.tabular(steps=20), Diagonal(), reference=Reference(lr=0.01), tasks=2)
        LearnedOptimiser(max-diagonal, 1 piece, tying='parameter', centre='start', 4 tensors, 161 numbers, horizon=20)
    """
    if not isinstance(potential, MaxDiagonal):
        raise TypeError(
            f"only metrics are learned from reference runs: potential must be Diagonal() or Kronecker(), got "
            f"{type(potential).__name__}."
        )
    if potential.pieces != 1:
        raise ValueError(f"a reference run says nothing about {potential.pieces} pieces, but about one. Pass pieces=1.")
    began, counted = time.perf_counter(), Counted(family)
    reference = reference or tuned_reference(counted, seed=seed, journal=journal)
    built = draw_tasks(counted, seed, "follow", tasks)
    phi = potential.bind(built[0].init()).requires_grad_(False)
    objective = Regret(prior=prior)

    def followed() -> LearnedOptimiser:
        look(built[0], phi, {n: tuple(x.shape) for n, x in built[0].init().items()})
        found, provenance = _metrics(built, affording(phi, built[0]), reference, objective)
        return LearnedOptimiser.from_potential(
            found.requires_grad_(True),
            **provenance,
            **_about(counted),
            seeds=(seed,),
            cost=total_cost(NOTHING_YET, counted.cost(began)),
            task_hashes=tuple(dict.fromkeys([*reference.chosen_on, *counted.tasks])),
        )

    settings = {
        "potential": [repr(potential), repr(phi.basis), fingerprint(phi)],
        "reference": said_reference(reference),
        **{"tasks": tasks, "prior": prior, "seed": seed},
    }
    with parts_of(journal, "follow", counted, settings) as parts:
        return parts.file("learned", followed, load)


def _metrics(
    tasks: Sequence[Task], phi: MaxDiagonal, reference: Reference, objective: Regret
) -> tuple[MaxDiagonal, dict[str, Any]]:
    """What the reference runs of the tasks say, and what a header says of them."""
    first: list[dict[str, list[float]]] = []
    runs = [_follow(task, phi, reference, first) for task in tasks]
    used = [run for run in runs if not run.diverged]
    if not used:
        raise ValueError(f"all {len(tasks)} reference runs diverged. Give a reference with a lower lr than {reference.lr}.")
    moments = Moments.total([moments_of(run, phi, objective) for run in used], [1.0] * len(used))
    turned = learn_factors(Iterate.of(phi), moments, math.inf)
    log_d = minimiser(moments, {k: v for k, v in phi.log_d.items() if k not in turned.log_d})
    ordered = {k: turned.log_d[k] if k in turned.log_d else log_d[k] for k in phi.log_d}
    finished = [task for task, run in zip(tasks, runs, strict=True) if not run.diverged]
    found = _steady(Iterate.of(phi).moved(ordered, basis=turned.basis).apply(phi), finished[:CHECKED])
    finite = [row for row in first if all(math.isfinite(s) for s, _ in row.values())]
    return found, {
        "model": {n: tuple(x.shape) for n, x in tasks[0].init().items()},
        "gradient_scale": gradient_scale(finite, phi),
        "objective": repr(objective),
        "estimator": f"ClosedForm() of runs of {reference!r}",
        "target_loss": within_reach([ends_of(run) for run in used]),
    }


def _about(family: TaskFamily) -> dict[str, Any]:
    described = family.describe()
    size = described.get("batch_size")
    return {
        "family": {"name": family.name, **described},
        "horizon": family.steps,
        "batch_size": size if isinstance(size, int) and size > 0 else None,
    }


def _steady(potential: MaxDiagonal, tasks: Sequence[Task]) -> MaxDiagonal:
    """The metrics, doubled until plain runs with them finish: that another optimiser's runs did does not say so."""
    for _ in range(DOUBLINGS):
        bound = potential.bind(tasks[0].init())
        if all(math.isfinite(train(task, bound, Usage(factor=MARGIN)).loss) for task in tasks):
            break
        twice = {k: v.detach() + math.log(2) for k, v in potential.log_d.items()}
        potential = Iterate.of(potential).moved(twice).apply(potential)
    else:
        warnings.warn(
            f"plain runs with the metrics of the reference runs diverge although they were doubled {DOUBLINGS} times. Look "
            "at the tasks, or choose a usage with metamd.learn_usage, which leaves out what diverges.",
            RuntimeWarning,
            stacklevel=2,
        )
    return potential


def _follow(task: Task, potential: MaxDiagonal, reference: Reference, first: list[dict[str, list[float]]]) -> Trajectory:
    """The record of a reference run, as if mirror descent had made it; the squares of its first gradient are added."""
    start = {n: x.detach() for n, x in task.init().items()}
    sums = GradientSums(potential, products=True)
    losses: list[float] = []

    def watch(step: int, loss: Tensor, grads: Params) -> None:
        if not step:
            first.append(squares_by_key(grads, potential.slots))
        if step < task.steps:
            losses.append(float(loss))
            sums.add(grads)

    end, cost = reference.run(task, start, task.steps, watch=watch)
    finite = all(bool(x.isfinite().all()) for x in end.values()) and all(map(math.isfinite, losses))
    return Trajectory(
        losses=torch.tensor(losses, dtype=torch.float64),
        start=start,
        end=end,
        squares=sums.squares(),
        lr=1.0,
        steps=task.steps,
        diverged="" if finite else "The reference run diverged.",
        cost=cost,
        reference=end,
        products=sums.products(),
    )

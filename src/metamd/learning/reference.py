"""What an ordinary optimiser's runs on training tasks say: its best rate, a geometry in closed form, and a start.

Rounds of mirror descent learn from runs of their own; where a first metric leads nowhere, as on the plateau on which LeNet
starts, the runs of another optimiser say more. Start, end and gradients are all that the closed form needs.
"""

import math
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from metamd.files.learned import LearnedOptimiser, LearnedStart, Moments, fingerprint, load
from metamd.files.progress import ends_with
from metamd.files.store import Journal, Result
from metamd.inner.closed_form import Iterate, best_iterate, moments_of
from metamd.inner.executor import Executor
from metamd.inner.objectives import PRIOR, Reference, Regret
from metamd.inner.run import GradientSums, Trajectory, all_finite, run_inner
from metamd.learning.first_look import Squares, affording, draw_config, gradient_scale, look, squares_by_key
from metamd.learning.parts import Parts, described, parts_of, stage
from metamd.learning.rounds import ends_of, within_reach
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.tasks.base import Task, TaskFamily, config_hash, domain_of, require_family
from metamd.tasks.wrapped import Counted, SharedStart, uncounted

REFERENCE_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""Adam's rates that a reference run may have."""

DRAWN_PER_TASK = 4
"""Tasks that are drawn for each that is kept, so that no domain is left out by chance."""

CHECKED = 3
"""Tasks that are trained with what was learned, to see that it does not diverge."""

MARGIN = 1.4
"""How much longer steps are in these runs: other tasks may be steeper."""

DOUBLINGS = 10  # a thousand times shorter steps; what still diverges has another reason


def draw_tasks(family: TaskFamily, seed: int, purpose: str, count: int) -> list[Task]:
    """Tasks that depend on the family and these words alone, spread evenly over the domains that their configs name."""
    if count < 1:
        raise ValueError(f"tasks must be at least 1, got {count}.")
    offered = [draw_config(family, seed, "usage", purpose, i) for i in range(DRAWN_PER_TASK * count)]
    domains = [domain_of(config) for config in offered]
    turns = [domains[:i].count(domain) for i, domain in enumerate(domains)]
    chosen = sorted(range(len(offered)), key=turns.__getitem__)[:count]
    return [family.build(offered[i]) for i in chosen]


def reference_identity(reference: Reference | None) -> list[object]:
    """What tells a reference run from others, in JSON's types."""
    return [] if reference is None else [repr(reference), reference.lr, reference.factor]


def solved(tasks: Sequence[Task], reference: Reference, parts: Parts) -> list[tuple[Task, dict[str, Tensor]]]:
    """Tasks, each with the end of a reference run."""
    return list(zip(tasks, parts.runs(partial(_end, reference), tasks), strict=True))


def _end(reference: Reference, task: Task) -> dict[str, Tensor]:
    return reference.run(task, task.init(), task.steps)[0]


def following_losses(task: Task, params: Params, batches: int = 10) -> list[float]:
    """The losses of batches that follow the run."""
    with torch.no_grad():
        return [float(task.loss(params, task.batch(task.steps + i))) for i in range(batches)]


def tuned_reference(
    family: TaskFamily,
    *,
    rates: Sequence[float] = REFERENCE_RATES,
    factor: float = 1.0,
    tasks: int = 2,
    seed: int = 0,
    journal: Journal | None = None,
    workers: int | Executor = 1,
) -> Reference:
    """An Adam run whose rate is the best of a few on training tasks, to compare runs with.

    Args:
        family: its training side.
        rates: to choose from; the one whose run has the lowest training loss at its end, averaged over the tasks.
        factor: how many times longer than a run it is.
        tasks: how many.
        seed: draws them.
        journal: where to keep the loss of every rate, so that the same call continues one that was stopped.
        workers: processes that share the rates, or an `Executor`.
    """
    family = family if isinstance(family, Counted) else Counted(family)
    built = draw_tasks(family, seed, "reference", tasks)

    def tried(rate: float) -> Result:
        ends = [_end(Reference(torch.optim.Adam, rate, factor), task) for task in built]
        loss = sum(fmean(following_losses(task, end)) for task, end in zip(built, ends, strict=True))
        return {"rate": rate, "loss": loss if math.isfinite(loss) else None}

    settings = {"factor": factor, "tasks": tasks, "seed": seed}
    runs = len(rates) * tasks
    with (
        stage(family, "Adam's rate", runs * factor * family.steps) as forecast,
        parts_of(journal, "reference", family, settings, workers) as parts,
    ):
        found = parts.all({f"rate-{rate!r}": partial(tried, rate) for rate in rates})
        for rate in rates:
            loss = found[f"rate-{rate!r}"]["loss"]
            forecast.tell(math.inf if loss is None else loss / tasks, note=f"Adam with rate {rate:g}")
    finite = {rate: loss for rate in rates if (loss := found[f"rate-{rate!r}"]["loss"]) is not None}
    if not finite:
        for task in built:
            first = following_losses(task, task.init(), 1)[0]
            if not math.isfinite(first):
                raise ValueError(
                    f"the loss is {first} at the start of a task of {family.name!r} ({domain_of(task.config)}), before any "
                    "step was taken. Check its data and its initialisation, or leave it out of the family."
                )
        raise ValueError(
            f"Adam diverged on {family.name!r} at all of the rates {', '.join(map(str, rates))}. Give lower ones."
        )
    best = min(finite, key=lambda rate: finite[rate])
    return Reference(torch.optim.Adam, best, factor, chosen_on=tuple(config_hash(task.config) for task in built))


@ends_with(lambda start: f"Learned a start of {len(start)} tensors. Keep it: start.save(path); learned.with_start(start).")
def learn_start(
    family: TaskFamily,
    *,
    reference: Reference | None = None,
    tasks: int = 8,
    seed: int = 0,
    journal: Journal | None = None,
    workers: int | Executor = 1,
) -> LearnedStart:
    """The start that minimises the bound over training tasks: the mean of their solutions.

    For every convex potential with a fixed centre E B(u||v) = E phi(u) - phi(mean u) + B(mean u||v), which v = mean u
    minimises [Khodak2019]. The tasks must begin at one model already: means over unrelated initialisations say nothing.

    Args:
        family: of tasks with a shared start; its training side.
        reference: what finds the solutions; `tuned_reference` if not given.
        tasks: how many.
        seed: draws them.
        journal: where to keep it, so that the same call does not compute it again.
        workers: processes that share the runs, or an `Executor`.

    Example:
        >>> from metamd.tasks import quadratic, starting_at
        >>> family = starting_at(quadratic(steps=20), {"theta": torch.ones(2, dtype=torch.float64)})
        >>> start = learn_start(family, reference=Reference(lr=0.05), tasks=2)
        >>> list(start), len(start.tasks), start.cost["gradient_evaluations"]
        (['theta'], 2, 80)
    """
    require_family(family)
    if not isinstance(uncounted(family), SharedStart):
        raise ValueError(
            f"a learned start needs tasks that begin at one model, but those of {family.name!r} have initialisations of "
            "their own. Give them one with metamd.tasks.starting_at(family, parameters)."
        )
    began, counted = time.perf_counter(), Counted(family)
    # in a folder of its own, since what follows from the learned start has a reference of its own too
    inside = None if journal is None else Journal(Path(journal.folder) / "start")
    finder = reference or tuned_reference(counted, seed=seed, journal=inside, workers=workers)
    built = draw_tasks(counted, seed, "start", tasks)
    settings = {"reference": reference_identity(finder), "tasks": tasks, "seed": seed}
    with (
        stage(counted, "solutions", tasks * finder.factor * family.steps),
        parts_of(journal, "start", counted, settings, workers) as parts,
    ):

        def found() -> LearnedStart:
            ends = [end for _, end in solved(built, finder, parts) if all_finite(end)]
            if not ends:
                raise ValueError(f"all {tasks} reference runs diverged. Give a reference with a lower lr.")
            used = (*finder.chosen_on, *(config_hash(task.config) for task in built))
            mean = {n: torch.stack([end[n] for end in ends]).mean(0) for n in ends[0]}
            return LearnedStart(mean, dict.fromkeys(used), counted.cost(began))

        return parts.file("start", found, LearnedStart.load)


@ends_with(LearnedOptimiser.summary)
def learn_from_reference(
    family: TaskFamily,
    potential: MaxDiagonal,
    *,
    reference: Reference | None = None,
    tasks: int = 8,
    prior: float = PRIOR,
    seed: int = 0,
    journal: Journal | None = None,
    workers: int | Executor = 1,
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
        workers: processes that share the runs, or an `Executor`; the result does not depend on them.

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
    reference = reference or tuned_reference(counted, seed=seed, journal=journal, workers=workers)
    built = draw_tasks(counted, seed, "follow", tasks)
    phi = potential.bind(built[0].init()).requires_grad_(False)
    settings = {
        "potential": [repr(potential), repr(phi.basis), fingerprint(phi)],
        "reference": reference_identity(reference),
        **{"tasks": tasks, "prior": prior, "seed": seed},
    }
    with (
        stage(counted, "runs to learn from", (tasks * reference.factor + CHECKED) * family.steps) as forecast,
        parts_of(journal, "follow", counted, settings, workers) as parts,
    ):

        def followed() -> LearnedOptimiser:
            shapes, objective = {n: tuple(x.shape) for n, x in built[0].init().items()}, Regret(prior=prior)
            look(built[0], phi, shapes)
            now = Iterate.of(affording(phi, built[0]))
            runs = parts.runs(partial(_record_reference, phi, reference, objective), built)
            used = [(task, *said) for task, (_, said) in zip(built, runs, strict=True) if said is not None]
            if not used:
                raise ValueError(
                    f"all {tasks} reference runs diverged. Give a reference with a lower lr than {reference.lr}."
                )
            moments = Moments.total([said for _, _, said in used], [1.0] * len(used))
            found = best_iterate(now, moments).apply(phi)
            finite = [first for first, _ in runs if all(math.isfinite(s) for s, _ in first.values())]
            return LearnedOptimiser.from_potential(
                _steady(found, [task for task, _, _ in used[:CHECKED]], parts).requires_grad_(True),
                model=shapes,
                gradient_scale=gradient_scale(finite),
                objective=repr(objective),
                estimator=f"ClosedForm() of runs of {reference!r}",
                target_loss=within_reach([ends for _, ends, _ in used]),
                **described(counted),
                seeds=(seed,),
                cost={"gradient_evaluations": 0, "hessian_vector_products": 0, "outer_steps": 0, **counted.cost(began)},
                task_hashes=tuple(dict.fromkeys([*reference.chosen_on, *counted.tasks])),
            )

        learned = parts.file("learned", followed, load)
        forecast.tell(math.nan, note=f"metrics from {tasks} runs of {reference!r}")
        return learned


def _steady(potential: MaxDiagonal, tasks: Sequence[Task], parts: Parts) -> MaxDiagonal:
    """The metrics, doubled until plain runs with them finish: that another optimiser's runs did does not say so."""
    for _ in range(DOUBLINGS):
        plain = partial(run_inner, potential=potential.bind(tasks[0].init()), lr=MARGIN)
        if not any(run.diverged for run in parts.runs(plain, tasks)):
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


def _record_reference(
    potential: MaxDiagonal, reference: Reference, objective: Regret, task: Task
) -> tuple[Squares, tuple[tuple[float, float], Moments] | None]:
    """What a reference run says: the squares of its first gradient; if it finished, first and last loss, and moments."""
    start = {n: x.detach() for n, x in task.init().items()}
    sums = GradientSums(potential, products=True)
    losses: list[float] = []
    first: Squares = {}

    def watch(step: int, loss: Tensor, grads: Params) -> None:
        if not step:
            first.update(squares_by_key(grads, potential.slots))
        if step < task.steps:
            losses.append(float(loss))
            sums.add(grads)

    end, _ = reference.run(task, start, task.steps, watch=watch)
    if not all_finite(end) or not all(map(math.isfinite, losses)):
        return first, None
    # recorded as if mirror descent had made it
    said = torch.tensor(losses, dtype=torch.float64)
    run = Trajectory(said, start, end, sums.squares(), lr=1.0, steps=task.steps, products=sums.products)
    return first, (ends_of(run), moments_of(run, potential, objective))

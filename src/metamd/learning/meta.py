"""`meta_train`: learn the geometry of a family of tasks, by the recipe for networks, for vectors, or of the paper."""

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from metamd.files.learned import LearnedOptimiser, total_cost
from metamd.files.progress import ends_with
from metamd.files.store import Journal, Log
from metamd.files.usage import Usage
from metamd.inner.estimators import Estimator, Forward, Reverse
from metamd.inner.executor import Executor
from metamd.inner.objectives import FromLipschitz, LogGap, PaperBound, Reference
from metamd.inner.run import OptimiserSteps, StepRule, seconds_per_step
from metamd.learning.first_look import first_look
from metamd.learning.outer import Adam, GradientDescent, Method, Normalised, Refine, Unpublished
from metamd.learning.paper import learn_published
from metamd.learning.parts import Forecast
from metamd.learning.reference import CHECKED, REFERENCE_RATES, learn_from_reference, tuned_reference
from metamd.learning.rounds import Plan
from metamd.learning.usage import Choices, Prefer, learn_usage, runs_to_choose, runs_to_scale, steps_of
from metamd.optimiser.guard import OffFamilyWarning
from metamd.potentials.base import Potential
from metamd.potentials.diagonal import Diagonal, Kronecker, MaxDiagonal
from metamd.potentials.online import Online
from metamd.tasks.base import Task, TaskFamily, require_family
from metamd.tasks.wrapped import Counted, uncounted

VECTORS = Choices(
    metrics=("learned",),
    momenta=(0.0, 0.5, 0.7, 0.8, 0.9, 0.95),
    schedules=("constant", "linear", "quadratic"),
    averages=("constant", "tail"),
)
"""The choices for a usage of vectors. Their runs go side by side, so that many momenta cost little time."""

SMOOTH = 0.1
"""s of the smooth minimum that stands for the paper's lambda. Over a million entries it is at most four times the
smallest."""

FEW = 16
"""Metrics up to which forward mode is taken, which has a tangent for each."""


@ends_with(LearnedOptimiser.summary)
def meta_train(
    family: TaskFamily,
    potential: Potential | None = None,
    *,
    method: Method = Method(),  # noqa: B008
    tasks_per_step: int = 8,
    seed: int = 0,
    journal: Journal | None = None,
    log: Log | None = None,
    workers: int | Executor = 1,
    prefer: Prefer = "steps",
    **changes: Any,
) -> LearnedOptimiser:
    """Learn metrics with which the tasks of a family are trained in fewer steps.

    With `ClosedForm`, train the tasks and set D_i = sqrt(E sum_t g_ti^2 / E delta_i^2), in turn, within a trust region in
    log D. With any other estimator, follow the gradient. No validation data is used.

    Args:
        family: the tasks; every outer step samples new ones, initialisations included.
        potential: `Diagonal()`, `MaxDiagonal(pieces)` or `Kronecker()`; the search starts at the metrics that it has. If not
            given, networks are learned by `learn_network` from runs of a tuned Adam, twice as many as `tasks_per_step`,
            which takes no `method`. Tasks of vectors alone get a `Diagonal()`, refined by `LogGap` where digits count, as
            for quadratics. For both, `learn_usage` follows.
        method: objective, estimator and rule of the outer steps, how many, and what is kept.
        tasks_per_step: n.
        seed: of everything random.
        journal: where to keep checkpoints and a log, or the finished parts where the potential is not given and networks
            are learned, so that the same call continues a run that was stopped.
        log: called with the record of every outer step and its number; for networks without a potential, with the result of
            every rate of Adam and of every usage tried.
        workers: processes that share the runs, or an `Executor`; the result does not depend on them. Small tasks that share
            one loss run side by side in this process.
        prefer: "steps" or "seconds", for which a usage is chosen where the potential is not given, see `Choices`.
        changes: fields of `Method` by name, such as `objective=`, `estimator=`, `outer_steps=`, `refine=`, `max_norm=`.

    Example:
        >>> from metamd import Diagonal, tasks
        >>> meta_train(tasks.quadratic(steps=50), Diagonal(), outer_steps=3, tasks_per_step=4)
        LearnedOptimiser(max-diagonal, 1 piece, tying='parameter', centre='start', 1 tensor, 2 numbers, horizon=50)
    """
    require_family(family)
    if potential is None and has_weights(family):
        foreign = [n for n, given in {"method": method != Method(), **changes}.items() if given]
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)} can be given together with a potential, such as Kronecker() or Diagonal(). Without "
                "one, networks are learned from runs of Adam, which has no such option."
            )
        options: dict[str, Any] = {"seed": seed, "journal": journal, "workers": workers, "log": log}
        return learn_network(family, tasks=tasks_per_step, choices=Choices(prefer=prefer), **options)
    if prefer != "steps" and potential is not None:
        raise ValueError(
            f"prefer={prefer!r} would change nothing with a potential, of which no usage is chosen. Leave it out."
        )
    method = replace(method, **changes)
    alone = potential is None
    if potential is None:
        potential = Diagonal()
        method = replace(method, refine=refinement(family)) if method.refine is None and method.closed else method
    if not isinstance(potential, MaxDiagonal):
        raise ValueError(
            f"meta_train needs a potential with metrics to learn, got {type(potential).__name__}. "
            "Pass Diagonal() or MaxDiagonal(pieces=3)."
        )
    method.check()
    if tasks_per_step < 1:
        raise ValueError(
            f"tasks_per_step must be at least 1, got {tasks_per_step}. Every outer step trains that many tasks."
        )
    if method.closed and potential.pieces > 1 and method.refine is None:
        raise ValueError(
            f"ClosedForm learns one piece, got {potential.pieces}. Pass Diagonal(), or learn the pieces along a gradient: "
            "by refine=Refine() afterwards, or by estimator=Reverse()."
        )
    if method.unpublished is not None:
        options = {"seed": seed, "journal": journal, "workers": workers, "log": log}
        return learn_published(family, potential, method, tasks=tasks_per_step, **options)
    with nullcontext() if journal is None else journal.opened():
        found = first_look(family, potential, seed, tasks_per_step, curvature=method.start == "curvature")
        plan = Plan(family, method, potential.pieces, tasks_per_step, seed, found, Executor.of(workers))
        learned = plan.train(journal, log)
    if not alone:
        return learned
    # where digits count, nobody knows beforehand how many steps a run will have: no schedule that needs to
    steady: dict[str, Any] = {"schedules": ("constant",), "averages": ("constant",)} if family.counts_digits else {}
    offered = replace(VECTORS, prefer=prefer, **steady)
    return learn_usage(learned, family, offered, seed=seed, journal=journal, workers=workers)


def has_weights(family: TaskFamily) -> bool:
    """Whether its tasks train matrices, such as the weights of a network, and not vectors alone."""
    return any(x.ndim > 1 for x in family.example().values())


@ends_with(LearnedOptimiser.summary)
def learn_network(
    family: TaskFamily,
    potential: MaxDiagonal | None = None,
    *,
    reference: Reference | None = None,
    tasks: int = 8,
    choices: Choices | None = Choices(),  # noqa: B008
    seed: int = 0,
    journal: Journal | None = None,
    workers: int | Executor = 1,
    log: Log | None = None,
) -> LearnedOptimiser:
    """Learned coordinates from runs of a tuned Adam, and the best usage of them, on training tasks alone.

    Args:
        family: of networks.
        potential: what is learned; `Kronecker(rank="auto")` if not given.
        reference: the optimiser whose runs are learned from; `tuned_reference` if not given.
        tasks: half as many runs as are learned from.
        choices: what a usage is chosen from; None chooses none.
        seed: of everything random.
        journal: where finished parts are kept, so that the same call continues one that was stopped, to the same result:
            each rate of the reference, the geometry, the online scales, and each run of a usage.
        workers: processes that share the runs, or an `Executor`; the result does not depend on them.
        log: called with what came out of every rate of Adam and of every usage tried, and its number.
    """
    began, counted = time.perf_counter(), Counted(family)
    kept: dict[str, Any] = {"seed": seed, "journal": journal, "workers": workers}
    shape = Kronecker(rank="auto") if potential is None else potential
    runs = network_runs(tasks, choices, reference)
    forecast = Forecast(f"learning {family.name}", {name: count * family.steps for name, count in runs.items()}, log)
    with forecast.of(counted):
        if forecast.shown:  # else nobody waits for its times
            forecast.say(plan_of(family, shape, runs, Executor.of(workers)))
        reference = reference or tuned_reference(counted, **kept)
        tuning = counted.cost(began)
        learned = learn_from_reference(counted, shape, reference=reference, tasks=2 * tasks, **kept)
        learned = replace(learned, header=replace(learned.header, cost=total_cost(learned.header.cost, tuning)))
        return learned if choices is None else learn_usage(learned, counted, choices, reference=reference, **kept)


def network_runs(tasks: int, choices: Choices | None, reference: Reference | None = None) -> dict[str, float]:
    """How many runs each stage of `learn_network` takes, about, in the length of a task's own."""
    finder = reference or Reference(torch.optim.Adam, REFERENCE_RATES[0])
    runs = {
        "Adam's rate": 0.0 if reference else 2.0 * len(REFERENCE_RATES),
        "runs to learn from": 2 * tasks * finder.factor + CHECKED,
    }
    if choices is not None:
        runs |= {"online scales": runs_to_scale(choices, finder), "usages": runs_to_choose(choices)}
    return runs


def plan_of(family: TaskFamily, potential: MaxDiagonal, runs: Mapping[str, float], executor: Executor) -> str:
    """What `learn_network` is going to do, and about how long it takes: runs x steps x the measured time of a step."""
    task = uncounted(family).build(family.sample(torch.Generator().manual_seed(0)))
    phi, online = potential.bind(task.init()), Online("polar", beta=0.9)
    polar = replace(online, scale={slot.key: 1e9 for slot in phi.slots.values()})  # steps so short that nothing changes
    seconds = seconds_beside_adam(task, {"polar": partial(steps_of, task, phi, Usage("online"), polar)})
    tried = runs.get("online scales", 0.0) + runs.get("usages", 0.0)
    followed = sum(runs.values()) - tried
    whole = task.steps * (followed * seconds["Adam"] + tried * seconds["polar"]) / executor.workers
    return (
        f"{family.name}: {followed:.0f} runs of Adam and about {tried:.0f} to choose a usage, of {task.steps} steps each, "
        f"which take {1e3 * seconds['Adam']:.2g} and up to {1e3 * seconds['polar']:.2g} ms here: about "
        f"{timedelta(seconds=round(whole))} with {executor.workers} worker{'s' * (executor.workers > 1)}."
    )


def plan_of_rounds(family: TaskFamily, method: Method, tasks: int, usages: bool, executor: Executor) -> str:
    """What `meta_train` is going to do in rounds, and about how long it takes at most."""
    task = uncounted(family).build(family.sample(torch.Generator().manual_seed(0)))
    seconds = seconds_beside_adam(task, {})["Adam"]
    outer = sum(steps for _, steps in method.stages)
    chosen = runs_to_choose(VECTORS) if usages else 0.0
    runs = outer * tasks + chosen
    and_then = f", then about {chosen:.0f} to choose a usage" * usages
    whole = timedelta(seconds=round(runs * task.steps * seconds / executor.workers))
    return (
        f"{family.name}: at most {outer} outer steps of {tasks} runs{and_then}, of {task.steps} steps each, which take "
        f"{1e3 * seconds:.2g} ms here: about {whole} with "
        f"{executor.workers} worker{'s' * (executor.workers > 1)}, and less where tasks run side by side."
    )


def seconds_beside_adam(task: Task, others: Mapping[str, Callable[[], StepRule]]) -> dict[str, float]:
    """The seconds of a training step by Adam, and by these, for what is going to be done."""

    def by_adam() -> OptimiserSteps:
        return OptimiserSteps.beginning(task.init(), lambda named: torch.optim.Adam(named, lr=1e-9))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffFamilyWarning)  # nothing is trained
        return seconds_per_step(task, {"Adam": by_adam, **others}, task.steps, rounds=3, block=3, warm_up=1)


def refinement(family: TaskFamily) -> Refine | None:
    """How a diagonal learned for vectors is refined, if at all: by digits where those count, as the regret counts losses."""
    if not family.counts_digits:
        return None
    few = sum(x.numel() for x in family.example().values()) <= FEW
    return Refine(12, Forward() if few else Reverse(), Adam(0.05), LogGap(1e-12))


def paper(
    k: float | FromLipschitz | None = None,
    *,
    rho: float | None = None,
    pieces: int = 3,
    estimator: Estimator | None = None,
    outer_steps: int | None = None,
    stable: bool = True,
) -> dict[str, Any]:
    """The options that make `meta_train` Algorithm 1 of the paper [GaoMetaMD2022].

    N = 3 diagonals centred at the origin, the paper's inner step, E = B(theta_{T+1}||theta_1) + k/lambda with its direct and
    indirect gradient. The paper does not publish eta, k, rho, the number of outer steps, or where M begins.

    By default these are chosen on training tasks, by the rule of `metamd.learning.paper`. The outer steps are
    `Normalised` and leave the geometric mean of each piece at 1, and lambda is a smooth minimum. With `stable=False` it is
    the plain rule, M <- M - rho/n sum_i dE_i/dM, from the square root of the largest curvature, with forward-mode gradients;
    the last M is kept. That explodes on networks.

    Args:
        k: of `PaperBound`; None chooses it. The plain rule then takes 7, which comes near the published number of iterations
            on the paper's quadratics, see docs/results/quadratic.md.
        rho: the outer learning rate: the pace of `Normalised`, or that of `GradientDescent`; None chooses it.
        pieces: N.
        estimator: of the gradient, if not `Reverse()`, or `Forward()` for the plain rule: both are exact.
        outer_steps: at most; 150 if not given, 300 for the plain rule.
        stable: whether the outer steps are normalised.

    Example:
        >>> sorted(paper())
        ['estimator', 'method', 'objective', 'outer_steps', 'potential']
    """
    if stable:
        if isinstance(k, FromLipschitz):
            raise ValueError("k of the theory differs from task to task. Pass stable=False with it, or a number.")
        chosen = Unpublished() if k is None else Unpublished(k=k)
        chosen = chosen if rho is None else replace(chosen, paces=(rho,))
        method = Method(Normalised(common=False), exact=False, keep="last", spread=0.02, unpublished=chosen)
    else:
        method = Method(GradientDescent(rho), exact=False, keep="last", start="curvature")
    return {
        "potential": MaxDiagonal(pieces, centre="origin"),
        "objective": PaperBound(7.0 if k is None else k, smooth=SMOOTH if stable else 0.0),
        "estimator": estimator or (Reverse() if stable else Forward()),
        "method": method,
        "outer_steps": outer_steps or (150 if stable else 300),
    }

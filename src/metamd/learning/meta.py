"""meta_train: learn the geometry of a family of tasks; with the recipes for networks and vectors, and that of the paper."""

import math
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from metamd.files.learned import LearnedOptimiser, fingerprint, total_cost
from metamd.files.progress import Progress
from metamd.files.store import Journal, Log
from metamd.inner.closed_form import Iterate
from metamd.inner.estimators import Estimator, Forward, Reverse
from metamd.inner.executor import Executor
from metamd.inner.objectives import FromLipschitz, LogGap, PaperBound, Reference
from metamd.learning.parts import identity_of
from metamd.learning.reference import described, learn_from_reference, tuned_reference
from metamd.learning.rounds.outer import Adam, GradientDescent, Method, OuterStep, Refine
from metamd.learning.rounds.round import Learner, first_look
from metamd.learning.rounds.stages import Plan, State
from metamd.learning.usage import Choices, learn_usage
from metamd.potentials.base import Potential
from metamd.potentials.diagonal import Diagonal, Kronecker, MaxDiagonal
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Counted

FEW = 16
"""Metrics up to which forward mode is taken, which has a tangent for each."""

SETTLED = 1e-2
"""A run has converged, for `PaperBound`, when its gradient has fallen to this share of the first."""


class NotConvergedWarning(UserWarning):
    """Runs end before they have converged, where the objective takes their ends for solutions."""


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
    **changes: Any,
) -> LearnedOptimiser:
    """Learn metrics with which the tasks of a family are trained in fewer steps.

    With `ClosedForm`, train the tasks and set D_i = sqrt(E sum_t g_ti^2 / E delta_i^2), in turn, within a trust region in
    log D. With any other estimator, follow the gradient. No validation data is used.

    Args:
        family: the tasks; every outer step samples new ones, initialisations included.
        potential: `Diagonal()`, `MaxDiagonal(pieces)` or `Kronecker()`; learned metrics that it has are where the search
            starts. If not given: what docs/results.md speaks for, `Diagonal()` for tasks of vectors alone, refined by
            `LogGap` where digits count as for quadratics, and for networks `learn_network`: `Kronecker()` from runs of a
            tuned Adam, twice as many as `tasks_per_step`, with `learn_usage` after it. That way has no method and no log.
        method: objective, estimator and rule of the outer steps, how many, and what is kept.
        tasks_per_step: n.
        seed: of everything random.
        journal: where to keep checkpoints and a log, or the finished parts where the potential is not given and networks
            are learned, so that the same call continues a run that was stopped.
        log: called with the record of every outer step and its number.
        workers: processes that share the runs, or an `Executor`; the result does not depend on them. Small tasks that share
            one loss run side by side in this process.
        changes: fields of `Method` by name, such as `objective=`, `estimator=`, `outer_steps=`, `refine=`, `max_norm=`.

    Example:
        >>> from metamd import Diagonal, tasks
        >>> meta_train(tasks.quadratic(steps=50), Diagonal(), outer_steps=3, tasks_per_step=4)
        LearnedOptimiser(max-diagonal, 1 piece, tying='parameter', centre='start', 1 tensor, 2 numbers, horizon=50)
    """
    if potential is None and has_weights(family):
        foreign = [n for n, given in {"method": method != Method(), **changes, "log": log is not None}.items() if given]
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)} can be given together with a potential, such as Kronecker() or Diagonal(). Without "
                "one, networks are learned from runs of Adam, which has no such option."
            )
        return learn_network(family, tasks=tasks_per_step, seed=seed, journal=journal, workers=workers)
    method = replace(method, **changes)
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
    with nullcontext() if journal is None else journal.opened():
        found = first_look(family, potential, seed, tasks_per_step, curvature=method.start == "curvature")
        how = (method.objective, method.estimator, method.exact, method.max_norm, found.shapes, family.shared_loss)
        learner = Learner(found.bound, *how, executor=Executor.of(workers))
        plan = Plan(family, learner, method, potential.pieces, tasks_per_step, seed, found)
        return _result(plan, _train(plan, _begin(plan), journal, log))


def has_weights(family: TaskFamily) -> bool:
    """Whether its tasks train matrices, such as the weights of a network, and not vectors alone."""
    return any(x.ndim > 1 for x in family.example().values())


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
    """
    began, counted = time.perf_counter(), Counted(family)
    kept: dict[str, Any] = {"seed": seed, "journal": journal, "workers": workers}
    reference = reference or tuned_reference(counted, **kept)
    tuning = counted.cost(began)
    shape = Kronecker(rank="auto") if potential is None else potential
    learned = learn_from_reference(family, shape, reference=reference, tasks=2 * tasks, **kept)
    learned = replace(learned, header=replace(learned.header, cost=total_cost(learned.header.cost, tuning)))
    return learned if choices is None else learn_usage(learned, family, choices, reference=reference, **kept)


def refinement(family: TaskFamily) -> Refine | None:
    """How a diagonal learned for vectors is refined, if at all: by digits where those count, as the regret counts losses."""
    if not family.counts_digits:
        return None
    few = sum(x.numel() for x in family.example().values()) <= FEW
    return Refine(12, Forward() if few else Reverse(), Adam(0.05), LogGap(1e-12))


def step_line(record: Mapping[str, Any]) -> str:
    """One outer step in a line."""
    numbers = [f"{n} {record[n]:.4g}" for n in ("objective", "bound", "loss") if record[n] is not None]
    lost = [f"{len(record['diverged'])} diverged"] if record["diverged"] else []
    return "  ".join([f"{record['stage']} {record['step']}", *numbers, *lost])


def paper(
    k: float | FromLipschitz = 7.0,
    *,
    rho: float | None = None,
    pieces: int = 3,
    estimator: Estimator | None = None,
    outer_steps: int = 300,
) -> dict[str, Any]:
    """The options that make `meta_train` Algorithm 1 of the paper [GaoMetaMD2022].

    M <- M - rho/n sum_i dE_i/dM with E = B(theta_{T+1}||theta_1) + k/lambda, N = 3 diagonals centred at the origin, the
    paper's inner step, forward-mode gradients; the last M is kept. What the paper leaves open is chosen from the data: M
    starts at the square root of the largest curvature, and rho is a share of M^2 / E. It needs runs that converge, and
    that start near the origin: see docs/limits.md.

    Args:
        k: of `PaperBound`; the paper leaves it open. On its quadratics, D = (k / E delta^2)^(2/3) is where the flat
            coordinate comes to rest: 7 comes near the published number of iterations, see docs/results.md.
        rho: the outer learning rate; None scales it, see `GradientDescent`.
        pieces: N.
        estimator: of the gradient, if not `Forward()`.
        outer_steps: plain gradient descent needs hundreds.

    Example:
        >>> sorted(paper())
        ['estimator', 'method', 'objective', 'outer_steps', 'potential']
    """
    return {
        "potential": MaxDiagonal(pieces, centre="origin"),
        "objective": PaperBound(k),
        "estimator": estimator or Forward(),
        "method": Method(GradientDescent(rho), exact=False, keep="last", start="curvature"),
        "outer_steps": outer_steps,
    }


def _begin(plan: Plan) -> State:
    """The first state: one piece for the closed form, pieces that differ a little for gradients."""
    found, now = plan.found, Iterate.of(plan.found.bound)
    if found.curvature and not any(bool(v.any()) for v in now.log_d.values()):
        now = now.shifted(math.log(found.curvature))
    if plan.method.closed:
        # of several metrics, the geometric mean
        now = now.moved({k: v.mean(0, keepdim=True) for k, v in now.log_d.items()}, torch.zeros(1, dtype=torch.float64))
    elif plan.pieces > 1 and all(bool((v == v[:1]).all()) for v in now.log_d.values()):
        now = plan.spread_out(now)
    return State(plan.learner.inside(now), cost=found.cost)


def _train(plan: Plan, state: State, journal: Journal | None, log: Log | None) -> State:
    """All outer steps that are left, with a checkpoint after every few and when something interrupts."""
    identity = {} if journal is None else _identity(plan, state)
    kept = None if journal is None else journal.resume(identity)
    state = state if kept is None else State.restore(*kept, state.now.basis)
    saved = state.step
    try:
        with Progress("outer steps", state.step + plan.left(state), done=state.step) as progress:
            while not plan.finished(state):
                state, record = plan.advance(state)
                _warn(plan, record)
                progress.update(state.step, step_line(record.to_dict()), state.step + plan.left(state))
                if journal is not None:
                    journal.note(record.to_dict(), record.step)
                    if record.step - saved >= journal.every or plan.finished(state):
                        journal.save(state.tensors(), state.facts(), identity)
                        saved = state.step
                if log is not None:
                    log(record.to_dict(), record.step)
    except BaseException:
        if journal is not None and state.step > saved:
            with suppress(OSError):  # a full disk may be why we are here
                journal.save(state.tensors(), state.facts(), identity)
        raise
    return state


def _identity(plan: Plan, state: State) -> dict[str, Any]:
    """What two runs must have in common for one to continue the other."""
    learner, method = plan.learner, plan.method
    return {
        **({} if learner.potential.basis.kind == "identity" else {"basis": repr(learner.potential.basis)}),
        "family": identity_of(plan.family),
        "potential": fingerprint(learner.potential),
        "start": fingerprint(state.now.apply(learner.potential)),
        **{n: repr(getattr(method, n)) for n in ("objective", "estimator", "stopping", "refine")},
        "outer": repr(method.rule),
        "exact": method.exact,
        "stages": [list(s) for s in method.stages],
        "tasks_per_step": plan.tasks_per_step,
        "seed": plan.seed,
        **({} if method.max_norm is None else {"max_norm": method.max_norm}),
    }


def _warn(plan: Plan, record: OuterStep) -> None:
    if isinstance(plan.learner.objective, PaperBound) and record.unsettled > SETTLED:
        warnings.warn(
            f"under PaperBound the end of a run stands for the solution, but in outer step {record.step} the gradients at "
            f"the ends are still {record.unsettled:.2g} times the first ones: the objective then rewards not moving at "
            "all. Give the tasks more steps, or use objective=Regret().",
            NotConvergedWarning,
            stacklevel=4,
        )


def _result(plan: Plan, state: State) -> LearnedOptimiser:
    cost = {"gradient_evaluations": state.cost.gradients, "hessian_vector_products": state.cost.hvps}
    potential, refine = state.now.apply(plan.learner.potential), plan.method.refine
    said = repr(plan.method.estimator) + (f", then {refine!r}" if refine else "")
    if potential.pieces != plan.pieces:
        said = f"{said}; kept one piece, of {plan.pieces} that were tried"
    return LearnedOptimiser.from_potential(
        potential.requires_grad_(True),
        model=plan.found.shapes,
        **described(plan.family),
        gradient_scale={k: v for k, v in plan.found.scale.items() if math.isfinite(v)},
        objective=repr(plan.method.objective),
        estimator=said,
        seeds=(plan.seed,),
        cost={**cost, "outer_steps": state.step, "seconds": state.cost.seconds},
        task_hashes=state.tasks,
        max_norm=plan.method.max_norm,
        target_loss=state.target,
    )

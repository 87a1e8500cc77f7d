"""meta_train: learn the geometry of a family of tasks."""

import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from metamd.files.learned import LearnedOptimiser, fingerprint
from metamd.files.progress import Progress
from metamd.files.store import Journal, Log
from metamd.inner.closed_form import Iterate
from metamd.inner.estimators import ClosedForm, Estimator, Forward, Reverse
from metamd.inner.objectives import PRIOR, FromLipschitz, LogGap, Objective, PaperBound, Regret
from metamd.learning.network import has_weights, learn_network
from metamd.learning.parts import identity_of
from metamd.learning.rounds.first_look import Findings, first_look
from metamd.learning.rounds.outer import Adam, Ball, GradientDescent, Outer, OuterStep, Refine, Stopping, TrustRegion
from metamd.learning.rounds.round import Learner
from metamd.learning.rounds.stages import Plan, StageName
from metamd.learning.rounds.state import State
from metamd.potentials.base import Potential
from metamd.potentials.diagonal import Diagonal, MaxDiagonal
from metamd.tasks.base import TaskFamily

FEW = 16
"""Metrics up to which forward mode is taken, which has a tangent for each."""

SETTLED = 1e-2
"""A run has converged, for `PaperBound`, when its gradient has fallen to this share of the first."""


class NotConvergedWarning(UserWarning):
    """Runs end before they have converged, where the objective takes their ends for solutions."""


@dataclass(frozen=True)
class Method:
    """How the outer steps are made.

    Args:
        outer: the rule: `TrustRegion` for the closed form and `Adam` for gradients, if not given.
        exact: False takes the paper's inner step.
        keep: "best" judges the last metrics and the best of those before on fresh tasks; "last" does not.
        stopping: when it has converged.
        start: fresh metrics begin at "one", or at the largest "curvature" of the first tasks where they start, D =
            lambda_max, with which no first step is too long in any direction.
        spread: of the logarithms of M_j at the start, so that several pieces are not all the same.
    """

    outer: Outer | None = None
    exact: bool = True
    keep: Literal["best", "last"] = "best"
    stopping: Stopping = field(default_factory=Stopping)
    start: Literal["one", "curvature"] = "one"
    spread: float = 0.1


def meta_train(
    family: TaskFamily,
    potential: Potential | None = None,
    *,
    objective: Objective = Regret(prior=PRIOR),  # noqa: B008
    estimator: Estimator = ClosedForm(),  # noqa: B008
    outer_steps: int = 10,
    tasks_per_step: int = 8,
    seed: int = 0,
    method: Method = Method(),  # noqa: B008
    refine: Refine | None = None,
    max_norm: float | None = None,
    journal: Journal | None = None,
    log: Log | None = None,
) -> LearnedOptimiser:
    """Learn metrics with which the tasks of a family are trained in fewer steps.

    With `ClosedForm`, train the tasks and set D_i = sqrt(E sum_t g_ti^2 / E delta_i^2), in turn, within a trust region in
    log D. With any other estimator, follow the gradient. No validation data is used.

    Args:
        family: the tasks; every outer step samples new ones, initialisations included.
        potential: `Diagonal()`, `MaxDiagonal(pieces)` or `Kronecker()`; learned metrics that it has are where the search
            starts. If not given: what docs/results.md speaks for, `Diagonal()` for tasks of vectors alone, refined by
            `LogGap` where digits count as for quadratics, and for networks `Kronecker()` from runs of a tuned Adam, twice
            as many as `tasks_per_step`, with `learn_usage` after it. That way has no other options than these, the seed and
            the journal.
        objective: what is minimised.
        estimator: how its gradient is had; `ClosedForm` goes to the minimum itself.
        outer_steps: how many at most.
        tasks_per_step: n.
        seed: of everything random.
        method: the rule of the outer step, and what is kept.
        refine: outer steps along the hypergradient, afterwards. Several pieces need it, or an estimator of gradients.
        max_norm: C: metrics are kept at ||m_j||_2 = sqrt(sum_i D_ji) <= C by projection, for a bound on new tasks that has
            its C from the start (docs/concepts/held-out.md). Too small a C makes steps too long.
        journal: where to keep checkpoints and a log, or the finished parts where the potential is not given and networks
            are learned, so that the same call continues a run that was stopped.
        log: called with the record of every outer step and its number.

    Example:
        >>> from metamd import Diagonal, tasks
        >>> meta_train(tasks.quadratic(steps=50), Diagonal(), outer_steps=3, tasks_per_step=4)
        LearnedOptimiser(max-diagonal, 1 piece, tying='parameter', centre='start', 1 tensor, 2 numbers, horizon=50)
    """
    if potential is None and has_weights(family):
        _refuse_options(locals())
        return learn_network(family, tasks=tasks_per_step, seed=seed, journal=journal)
    if potential is None:
        potential = Diagonal()
        refine = refinement(family) if refine is None and isinstance(estimator, ClosedForm) else refine
    learnable = _check(potential, objective, estimator, method, outer_steps, tasks_per_step, refine)
    with nullcontext() if journal is None else journal.opened():
        found = first_look(family, learnable, seed, tasks_per_step, curvature=method.start == "curvature")
        closed = isinstance(estimator, ClosedForm)
        plan = Plan(
            family,
            Learner(found.bound, objective, estimator, method.exact, family.shared_loss),
            outer=method.outer or (TrustRegion() if closed else Adam()),
            stages=_stages(outer_steps, method, refine),
            pieces=learnable.pieces,
            tasks_per_step=tasks_per_step,
            seed=seed,
            stopping=method.stopping,
            refine=refine,
            spread=method.spread,
            ball=Ball(max_norm, found.bound, found.shapes),
        )
        return _result(plan, _train(plan, _begin(found, plan), journal, log))


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


def _refuse_options(given: Mapping[str, Any]) -> None:
    """Say which options the way for networks does not have."""
    usual = dict(meta_train.__kwdefaults__ or {})
    foreign = [n for n in usual if n not in ("tasks_per_step", "seed", "journal") and given[n] is not usual[n]]
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)} can be given together with a potential, such as Kronecker() or Diagonal(). Without one, "
            "networks are learned from runs of Adam, which has no such option."
        )


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


def _check(
    potential: Potential,
    objective: Objective,
    estimator: Estimator,
    method: Method,
    outer_steps: int,
    tasks: int,
    refine: Refine | None,
) -> MaxDiagonal:
    if not isinstance(potential, MaxDiagonal):
        raise ValueError(
            f"meta_train needs a potential with metrics to learn, got {type(potential).__name__}. "
            "Pass Diagonal() or MaxDiagonal(pieces=3)."
        )
    if outer_steps < 1:
        raise ValueError(f"outer_steps must be at least 1, got {outer_steps}. Nothing is learned without one.")
    if tasks < 1:
        raise ValueError(f"tasks_per_step must be at least 1, got {tasks}. Every outer step trains that many tasks.")
    closed = isinstance(estimator, ClosedForm)
    if closed and potential.pieces > 1 and refine is None:
        raise ValueError(
            f"ClosedForm learns one piece, got {potential.pieces}. Pass Diagonal(), or learn the pieces along a gradient: "
            "by refine=Refine() afterwards, or by estimator=Reverse()."
        )
    if closed and not isinstance(objective, Regret):
        name = type(objective).__name__
        raise ValueError(f"ClosedForm minimises Regret, got {name}. Use estimator=Forward() or Reverse() for it.")
    if method.outer is not None and isinstance(method.outer, TrustRegion) != closed:
        raise ValueError(
            f"{type(estimator).__name__} does not go with the outer rule {type(method.outer).__name__}. "
            "TrustRegion is for ClosedForm, Adam and GradientDescent are for gradients."
        )
    return potential


def _stages(steps: int, method: Method, refine: Refine | None) -> tuple[tuple[StageName, int], ...]:
    judge: list[tuple[StageName, int]] = [("judge", 1)] if method.keep == "best" else []
    stages: list[tuple[StageName, int]] = [("learn", steps), *judge]
    return tuple(stages if refine is None else [*stages, ("refine", refine.steps), *judge])


def _begin(found: Findings, plan: Plan) -> State:
    """The first state: one piece for the closed form, pieces that differ a little for gradients."""
    now = Iterate.of(found.bound)
    if found.curvature and not any(bool(v.any()) for v in now.log_d.values()):
        now = now.shifted(math.log(found.curvature))
    if isinstance(plan.learner.estimator, ClosedForm):
        # of several metrics, the geometric mean
        now = now.moved({k: v.mean(0, keepdim=True) for k, v in now.log_d.items()}, torch.zeros(1, dtype=torch.float64))
    elif plan.pieces > 1 and all(bool((v == v[:1]).all()) for v in now.log_d.values()):
        now = plan.spread_out(now)
    return State(plan.ball.project(now), cost=found.cost, scale=found.scale, shapes=found.shapes)


def _train(plan: Plan, state: State, journal: Journal | None, log: Log | None) -> State:
    """All outer steps that are left, with a checkpoint after every few and when something interrupts."""
    identity = {} if journal is None else _identity(plan, state)
    kept = None if journal is None else journal.resume(identity)
    state = state if kept is None else State.restore(*kept, state.now.basis)
    saved = state.step
    total = sum(steps for _, steps in plan.stages)
    try:
        with Progress("outer steps", total, done=state.step) as progress:
            while not plan.finished(state):
                state, record = plan.advance(state)
                _warn(plan, record)
                progress.advance(step_line(record.to_dict()))
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
    basis = plan.learner.potential.basis
    return {
        **({} if basis.kind == "identity" else {"basis": repr(basis)}),
        "family": identity_of(plan.family),
        "potential": fingerprint(plan.learner.potential),
        "start": fingerprint(state.now.apply(plan.learner.potential)),
        "objective": repr(plan.learner.objective),
        "estimator": repr(plan.learner.estimator),
        "outer": repr(plan.outer),
        "exact": plan.learner.exact,
        "stages": [list(s) for s in plan.stages],
        "tasks_per_step": plan.tasks_per_step,
        "seed": plan.seed,
        "stopping": repr(plan.stopping),
        "refine": repr(plan.refine),
        **({} if plan.ball.radius is None else {"max_norm": plan.ball.radius}),
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
    described = plan.family.describe()
    size = described.get("batch_size")
    cost: dict[str, float] = {
        "gradient_evaluations": state.cost.gradients,
        "hessian_vector_products": state.cost.hvps,
        "outer_steps": state.step,
        "seconds": state.cost.seconds,
    }
    potential = state.now.apply(plan.learner.potential)
    return LearnedOptimiser.from_potential(
        potential.requires_grad_(True),
        model=dict(state.shapes),
        family={"name": plan.family.name, **described},
        horizon=plan.family.steps,
        batch_size=size if isinstance(size, int) and size > 0 else None,
        gradient_scale={k: v for k, v in state.scale.items() if math.isfinite(v)},
        objective=repr(plan.learner.objective),
        estimator=_said(plan, potential.pieces),
        seeds=(plan.seed,),
        cost=cost,
        task_hashes=state.tasks,
        max_norm=plan.ball.radius,
        target_loss=state.target,
    )


def _said(plan: Plan, pieces: int) -> str:
    """How it was learned, in words where the result has fewer pieces than were asked for."""
    said = repr(plan.learner.estimator) + (f", then {plan.refine!r}" if plan.refine else "")
    return said if pieces == plan.pieces else f"{said}; kept one piece, of {plan.pieces} that were tried"

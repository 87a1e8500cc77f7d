"""Learning from ordinary runs: recorded runs in, a learned optimiser out; and later runs added to it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from metamd.files.container import shown
from metamd.files.learned import LearnedOptimiser, Moments, total_cost
from metamd.files.recorded_run import Run
from metamd.files.versions import versions as library_versions
from metamd.inner.closed_form import minimiser, moments_of
from metamd.inner.objectives import Regret
from metamd.inner.run import Cost, Trajectory
from metamd.learning.rounds.round import gradient_scale
from metamd.potentials.diagonal import Diagonal, MaxDiagonal
from metamd.potentials.tying import Shape, TyingName

RECORDED_PRIOR = 0.1
"""The default strength s of the prior: a coordinate that stands still has a step size of at least sqrt(s/2 / (1 + s)), here
0.21, of its tensor's and of the model's; without a prior, zero."""


def learn(
    runs: Sequence[Run],
    *,
    weights: Sequence[float] | None = None,
    tying: TyingName | None = None,
    prior: float = RECORDED_PRIOR,
) -> LearnedOptimiser:
    """Learn a geometry from recorded runs, the closed form D_i = sqrt(E sum_t g_ti^2 / E delta_i^2) [Khodak2019].

    It has one piece: a mixture has to be run to be judged, and `meta_train` learns those.
    The comparator is the end of each run. A coordinate that hardly moved would be given a step size near zero, move less in
    the next run, and so on; the prior prevents it: squared step sizes are averaged with their tensor's, see `Regret`.

    Args:
        runs: of models with the same tensors; by role, of any widths and depths.
        weights: one for each run; equal if not given.
        tying: which coordinates share a metric; as recorded if not given.
        prior: its strength; 0 for none.

    Example:
        >>> start, end = {"x": torch.tensor([0.0])}, {"x": torch.tensor([2.0])}
        >>> run = Run(start, end, {"x": torch.tensor([[16.0]])}, {"x": 4.0}, steps=1)
        >>> learn([run]).potential.log_d["x"].exp()
        tensor([[2.]], grad_fn=<ExpBackward0>)
    """
    shares = _weights(runs := list(runs), weights)
    recorded = sorted({run.tying for run in runs})
    if tying is None and len(recorded) > 1:
        raise ValueError(
            f'the runs were recorded with the tyings {", ".join(map(repr, recorded))}. Pass one, such as tying="tensor".'
        )
    tying = tying or recorded[0]
    _check_runs(runs, tying)
    return _solve(runs, shares, tying, prior)


def update(
    learned: LearnedOptimiser, runs: Sequence[Run], *, weights: Sequence[float] | None = None, decay: float = 1.0
) -> LearnedOptimiser:
    """Add runs to those that a geometry was learned from; with decay 1 the result is that of `learn` on all of them.

    Args:
        learned: what `learn` or `update` gave, or its file.
        runs: the new ones.
        weights: one for each new run; 1 if not given.
        decay: the factor on the weights of the earlier runs, at most 1.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be above 0 and at most 1, got {decay}. Pass 1 to keep all runs alike.")
    header, earlier = learned.header, learned.header.learned_from
    if earlier is None or learned.moments is None:
        raise ValueError(
            "this learned optimiser does not hold the sums of the runs it was learned from, so that nothing can be added to "
            "them. Learn one from recorded runs with metamd.learn(runs), and keep its moments."
        )
    shares = _weights(runs := list(runs), weights)
    _check_runs(runs, header.tying, header.model, {row["fingerprint"] for row in earlier["runs"]})
    found = _solve(runs, shares, header.tying, earlier["prior"], learned, decay)
    return replace(found, header=replace(found.header, family=header.family, seeds=header.seeds))


def as_trajectory(run: Run, tying: TyingName) -> Trajectory:
    """A recorded run as meta-learning sees one, at eta = 1. Losses, pieces and weights were not recorded."""
    return Trajectory(
        losses=torch.zeros(0, dtype=torch.float64),
        start=run.start,
        end=run.end,
        squares={n: s.double().sum(0) for n, s in run.tied_squares(tying).items()},
        lr=1.0,
        steps=run.steps,
        diverged=run.diverged,
        cost=Cost(gradients=run.steps),
    )


def _solve(
    runs: Sequence[Run],
    shares: Sequence[float],
    tying: TyingName,
    prior: float,
    earlier: LearnedOptimiser | None = None,
    decay: float = 1.0,
) -> LearnedOptimiser:
    """The closed form for these runs, and for those of an earlier file; the header says where it comes from."""
    bound = [Diagonal(tying=tying).bind(run.start) for run in runs]
    weights, regret, model = list(shares), Regret(prior=prior), runs[0].model
    moments = [moments_of(as_trajectory(run, tying), phi, regret) for run, phi in zip(runs, bound, strict=True)]
    scales = [_weighted(w, _mean_squares(run, phi)) for w, run, phi in zip(shares, runs, bound, strict=True)]
    fields = ("name", "fingerprint", "steps", "batch_size", "weight")
    marks = [(run.name, run.fingerprint(), run.steps, run.batch_size, w) for run, w in zip(runs, shares, strict=True)]
    rows: list[dict[str, Any]] = [dict(zip(fields, mark, strict=True)) for mark in marks]
    cost: Mapping[str, float] = {"runs": len(runs), "gradient_evaluations": sum(run.steps for run in runs)}
    if earlier is not None and earlier.moments is not None and earlier.header.learned_from is not None:
        header, model = earlier.header, earlier.header.model
        before = [{**row, "weight": row["weight"] * decay} for row in earlier.header.learned_from["runs"]]
        kept = Moments(*({k: v.double() for k, v in part.items()} for part in (earlier.moments.x, earlier.moments.y)))
        moments, weights, bound = [kept, *moments], [decay, *weights], [earlier.potential, *bound]
        squares = {k: v**2 for k, v in header.gradient_scale.items()}
        scales = [_weighted(sum(row["weight"] for row in before), squares), *scales]
        rows, cost = before + rows, total_cost(header.cost, cost)
    total = Moments.total(moments, weights)
    present: dict[str, Tensor] = {}
    for phi in bound:  # metrics to keep where the runs say nothing, and their types
        present = {**{k: v.detach() for k, v in phi.log_d.items()}, **present}
    potential = Diagonal(tying=tying).with_metrics(minimiser(total, present))
    sizes = {row["batch_size"] for row in rows}
    about = LearnedOptimiser.from_potential(
        potential,
        model=dict(model) if all(run.model == model for run in runs) else {},
        horizon=max(1, round(sum(row["weight"] * row["steps"] for row in rows) / sum(row["weight"] for row in rows))),
        batch_size=sizes.pop() if len(sizes) == 1 else None,
        gradient_scale={k: s for k, s in gradient_scale(scales).items() if math.isfinite(s)},
        objective=repr(regret),
        estimator="ClosedForm()",
        versions=library_versions(),
        cost=dict(cost),
        learned_from={"prior": prior, "runs": rows},
    ).header
    # in the type of the metrics: what a file gives back is what was saved
    x, y = ({k: v.to(present[k].dtype) for k, v in part.items()} for part in (total.x, total.y))
    return LearnedOptimiser(about, potential, Moments(x, y))


def _mean_squares(run: Run, bound: MaxDiagonal) -> dict[str, float]:
    """The mean square of the first gradients by key."""
    pairs: dict[str, tuple[float, int]] = {}
    for n, slot in bound.slots.items():
        count, (total, counted) = run.start[n].numel(), pairs.get(slot.key, (0.0, 0))
        pairs[slot.key] = total + count * run.gradient_rms[n] ** 2, counted + count
    return {k: total / max(count, 1) for k, (total, count) in pairs.items()}


def _weighted(weight: float, squares: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {k: (weight * square, weight) for k, square in squares.items()}


# the door


def _weights(runs: Sequence[Run], weights: Sequence[float] | None) -> list[float]:
    if not runs:
        raise ValueError(
            "there must be at least one run to learn from, got none. Record one with metamd.Recorder(optimiser)."
        )
    if weights is None:
        return [1.0] * len(runs)
    if len(weights) != len(runs):
        raise ValueError(f"there must be one weight for every run, got {len(weights)} for {len(runs)} runs.")
    if not all(0 < w < math.inf for w in weights):
        raise ValueError(
            f"weights must be positive and finite, got {shown(list(weights))}. Leave out a run that shall not count."
        )
    return [float(w) for w in weights]


def _check_runs(
    runs: Sequence[Run], tying: TyingName, model: Mapping[str, Shape] | None = None, seen: set[str] | None = None
) -> None:
    """Refuse runs that diverged, that are there already, or that are of another model."""
    model, seen = model or runs[0].model, set(seen or ())
    for i, run in enumerate(runs):
        called = f"{run.label} ({i + 1} of {len(runs)})"
        if run.diverged:
            raise ValueError(f"{called} diverged: {run.diverged} Leave it out, and lower the learning rate of the next.")
        mark = run.fingerprint()
        if mark in seen:
            raise ValueError(f"{called} is there already: the same record counts once. Give it a larger weight instead.")
        seen.add(mark)
        other = [n for n in (*model, *run.model) if run.model.get(n) != model.get(n)] if tying != "role" else []
        for n in other[:1]:
            has, needs = (f"{n!r} of shape {m[n]}" if n in m else f"no {n!r}" for m in (run.model, model))
            raise ValueError(
                f"{called} is of another model: it has {has}, where the others have {needs}. Runs of different models can "
                'be combined by role: tying="role".'
            )
        run.tied_squares(tying)  # says whether its sums can be tied so

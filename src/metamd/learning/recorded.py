"""Learning from recorded runs: `learn` computes a file from them, and `update` adds runs to such a file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from metamd.files.learned import LearnedOptimiser, Moments, total_cost
from metamd.files.recorded_run import COLUMNS, Run
from metamd.files.text import shown
from metamd.files.usage import Schedule, Usage
from metamd.files.versions import versions as library_versions
from metamd.inner.closed_form import Iterate, best_iterate, minimiser, moments_of
from metamd.inner.objectives import Regret
from metamd.inner.run import Trajectory
from metamd.learning.first_look import gradient_scale, total_squares
from metamd.potentials.diagonal import Diagonal, Kronecker, MaxDiagonal
from metamd.potentials.online import Online
from metamd.potentials.tying import Shape, TyingName

RECORDED_PRIOR = 0.1
"""The default strength s of the prior: a coordinate that stands still has a step size of at least sqrt(s/2 / (1 + s)), here
0.21, of its tensor's and of the model's; without a prior, zero."""


POLAR = Online("polar", beta=0.9, signal=0.95, whiten=4)
"""The rule of the steps that are recommended; its scale is learned."""

SHRINKAGE = (1.0, 1.0)
"""What is added to the diagonals of X and Y, as shares of the mean: much, since few runs are known. With two runs of an MLP
and of LeNet the mean loss on a third task was between 5 % lower and 3 % higher than with the (0.1, 0.001) of many runs, and
the test loss lower in three of four trials."""

TRAVEL = 38.0
"""How long polar steps are at factor 1, see `_scales`. Steps do not all point in one direction, and AdamW at its default
rate comes a fraction of the way."""

SCHEDULE: Schedule = "quadratic"
"""Steps are longer at first than with linear decay and TRAVEL = 32, and shorter at the end. On tasks that no table shows,
mean losses of an MLP, of LeNet and of a transformer on text were 8 % lower to 1 % higher. Test losses of the first two were
10 to 16 % lower, that on text 3 % higher."""


def learn(
    runs: Sequence[Run],
    *,
    weights: Sequence[float] | None = None,
    tying: TyingName | None = None,
    prior: float = RECORDED_PRIOR,
) -> LearnedOptimiser:
    """Learn a geometry from recorded runs; nothing is trained.

    For weights, the closed form X^-1 # Y gives the coordinates and their metric, X = E delta' delta and Y = E sum_t G_t'
    G_t. The file recommends polar steps in these coordinates, with quadratic decay and a tail average. How long they are
    follows from the way that the recorded runs travelled. The factor on them is safe at first, and `update` moves it.

    With a `tying`, or from runs that were recorded with one, D_i = sqrt(E sum_t g_ti^2 / E delta_i^2) [Khodak2019] is the
    metric of the parameters themselves, and nothing more is recommended.

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
    shares = _weights(runs := _listed(runs), weights)
    whole = tying is None and all(run.products for run in runs)
    recorded = sorted({run.tying for run in runs})
    if tying is None and len(recorded) > 1:
        raise ValueError(
            f'the runs were recorded with the tyings {", ".join(map(repr, recorded))}. Pass one, such as tying="tensor".'
        )
    tying = tying or recorded[0]
    _check_runs(runs, tying, runs[0].model, set())
    return _solve(runs, shares, None if whole else tying, prior)


def update(
    learned: LearnedOptimiser, runs: Sequence[Run], *, weights: Sequence[float] | None = None, decay: float = 1.0
) -> LearnedOptimiser:
    """Add runs to those that a geometry was learned from; with decay 1 the result is that of `learn` on all of them.

    Runs that were made with a file of polar steps and have a score also move the factor, by `next_factor`. One of them that
    diverged moves the factor down, and adds nothing else.

    Args:
        learned: what `learn` or `update` gave, or its file.
        runs: the new ones.
        weights: one for each new run; 1 if not given.
        decay: the factor on the weights of the earlier runs, at most 1.
    """
    if not isinstance(learned, LearnedOptimiser):
        raise TypeError(f"learned must be a LearnedOptimiser, got {type(learned).__name__}. Pass metamd.load(path).")
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be above 0 and at most 1, got {decay}. Pass 1 to keep all runs alike.")
    header, earlier = learned.header, learned.header.learned_from
    if earlier is None or learned.moments is None:
        raise ValueError(
            "this learned optimiser does not hold the sums of the runs it was learned from, so that nothing can be added to "
            "them. Learn one from recorded runs with metamd.learn(runs), and keep its moments."
        )
    shares = _weights(runs := _listed(runs), weights)
    whole = header.basis != "identity"
    if whole and (without := [run for run in runs if not run.products]):
        raise ValueError(
            f"{without[0].label} was recorded with a tying, and this file has learned coordinates. Record it with "
            "Recorder(optimiser), without tying."
        )
    failed = [run for run in runs if whole and run.diverged and run.factor is not None]
    kept = [(run, share) for run, share in zip(runs, shares, strict=True) if run not in failed]
    _check_runs(
        [run for run, _ in kept],
        header.tying,
        header.model or runs[0].model,
        {row["fingerprint"] for row in earlier["runs"]},
    )
    trials = [{"factor": run.factor, "score": None} for run in failed]
    tying = None if whole else header.tying
    found = _solve([r for r, _ in kept], [w for _, w in kept], tying, earlier["prior"], learned, decay, trials)
    return replace(found, header=replace(found.header, family=header.family, seeds=header.seeds))


def next_factor(trials: Sequence[Mapping[str, float | None]]) -> float:
    """The factor to train the next run with, from the factors and scores of the runs before; None is a run that diverged.

    The score of a factor is the mean over its runs. The factor doubles as long as that is better, else it halves. Then the
    neighbours of the best one are tried, the root of 2 away. When neither is better, the best one stays.

    Example:
        >>> next_factor([])
        1.0
        >>> next_factor([{"factor": 1.0, "score": 0.5}, {"factor": 2.0, "score": 0.7}])
        0.5
    """
    found: dict[int, list[float]] = {}
    for trial in trials:
        score = trial["score"]
        found.setdefault(round(2 * math.log2(trial["factor"] or 1.0)), []).append(math.inf if score is None else score)
    if not found:
        return 1.0
    means = {place: fmean(scores) for place, scores in found.items()}
    best = min(means, key=lambda place: (means[place], abs(place)))
    if math.isinf(means[best]):  # all of them diverged
        place = min(means) - 2
    elif best == max(means):
        place = best + 2
    elif best == min(means):
        place = best - 2
    else:
        place = next((near for near in (best + 1, best - 1) if near not in means), best)
    return float(2.0 ** (place / 2))


_HEAVIEST = 1e30
"""Times squared gradients this is still far from the largest number, 1.8e308."""


def _solve(
    runs: Sequence[Run],
    shares: Sequence[float],
    tying: TyingName | None,
    prior: float,
    earlier: LearnedOptimiser | None = None,
    decay: float = 1.0,
    failed: Sequence[Mapping[str, Any]] = (),
) -> LearnedOptimiser:
    """The closed form for these runs together with the runs of an earlier file; the header names all of them.

    Without a tying, weights are taken as matrices.
    """
    shape = Kronecker(rank="auto", shrinkage=SHRINKAGE, limit=COLUMNS) if tying is None else Diagonal(tying=tying)
    bound = [shape.bind(run.start) for run in runs]
    weights, regret = list(shares), Regret(prior=prior)
    moments, scales = [], []
    rows: list[dict[str, Any]] = []
    known: dict[str, Any] = {}  # what the earlier file was learned from
    for run, phi, share in zip(runs, bound, shares, strict=True):
        moments.append(moments_of(_as_trajectory(run, tying), phi, regret))
        numbers = {n: run.start[n].numel() for n in phi.slots}
        first = total_squares((phi.slots[n].key, count * run.gradient_rms[n] ** 2, count) for n, count in numbers.items())
        scales.append({k: (share * (total / max(count, 1)), share) for k, (total, count) in first.items()})
        mark = {"name": run.name, "fingerprint": run.fingerprint(), "steps": run.steps, "batch_size": run.batch_size}
        rows.append({**mark, "weight": share})
    cost: Mapping[str, float] = {"runs": len(runs), "gradient_evaluations": sum(run.steps for run in runs)}
    trials: list[Mapping[str, Any]] = []
    trials += [
        {"factor": run.factor, "score": run.score} for run in runs if run.factor is not None and run.score is not None
    ]
    trials += failed
    models = [run.model for run in runs]
    if earlier is not None and earlier.moments is not None and earlier.header.learned_from is not None:
        header, known = earlier.header, earlier.header.learned_from
        models.insert(0, header.model)
        before = [{**row, "weight": row["weight"] * decay} for row in known["runs"]]
        kept = Moments(*({k: v.double() for k, v in part.items()} for part in (earlier.moments.x, earlier.moments.y)))
        moments, weights, bound = [kept, *moments], [decay, *weights], [earlier.potential, *bound]
        share = sum(row["weight"] for row in before)
        scales = [{k: (share * v**2, share) for k, v in header.gradient_scale.items()}, *scales]
        rows, cost = before + rows, total_cost(header.cost, cost)
        trials = [*known.get("trials", ()), *trials]
    if not max(row["weight"] * row["steps"] for row in rows) < _HEAVIEST:
        raise ValueError(
            f"weights must be below {_HEAVIEST:g} over the steps of a run, got {max(row['weight'] for row in rows):g}: the "
            "sums over all runs would overflow. Weights count relative to each other; 1 is the usual one."
        )
    total, whole = Moments.total(moments, weights), sum(row["weight"] for row in rows)
    model = models[0] if all(m == models[0] for m in models) else {}
    horizon = max(1, round(sum(row["weight"] * row["steps"] for row in rows) / whole))
    # metrics to keep where the runs say nothing, and their types: those of the first that has them
    present = {k: v.detach() for phi in reversed(bound) for k, v in phi.log_d.items()}
    about: dict[str, Any] = {}
    from_runs: dict[str, Any] = {"prior": prior, "runs": rows} | ({"trials": trials} if trials else {})
    if tying is not None:
        potential = Diagonal(tying=tying).with_metrics(minimiser(total, present))
    else:
        empty = {n: torch.empty(s, dtype=present[n].dtype) for n, s in model.items()}
        blank = shape.bind(empty)
        potential = best_iterate(Iterate.of(blank), total).apply(blank)
        reach = _reach(runs, shares, known.get("reach"), decay)
        online = replace(POLAR, scale=_scales(potential.bind(empty), reach, horizon))
        usage = Usage("online", schedule=SCHEDULE, factor=next_factor(trials), averaging="tail")
        about = {"usage": usage.to_dict(), "online": online.to_dict()}
        from_runs |= {"reach": reach}
    sizes = {row["batch_size"] for row in rows}
    header = LearnedOptimiser.from_potential(
        potential,
        model=dict(model),
        horizon=horizon,
        batch_size=sizes.pop() if len(sizes) == 1 else None,
        gradient_scale=gradient_scale(scales),
        objective=repr(regret),
        estimator="ClosedForm()",
        versions=library_versions(),
        cost=dict(cost),
        learned_from=from_runs,
        **about,
    ).header
    # in the type of the metrics: what a file gives back is what was saved
    x, y = ({k: v.to(present[k.removeprefix("right/")].dtype) for k, v in part.items()} for part in (total.x, total.y))
    return LearnedOptimiser(header, potential, Moments(x, y))


def _as_trajectory(run: Run, tying: TyingName | None) -> Trajectory:
    """What a record says, as if mirror descent had made the run."""
    squares = {n: s.double().sum(0) for n, s in run.tied_squares(tying or "tensor").items()}
    products = {}
    if tying is None:
        squares |= {n: (x.diagonal() if x.ndim > 1 else x).double()[None] for n, x in run.products.items()}
        products = {f"right/{n}": x for n, x in run.products.items() if x.ndim > 1}
    none = torch.zeros(0)
    return Trajectory(none, run.start, run.end, squares, lr=1.0, steps=run.steps, products=products)


def _reach(runs: Sequence[Run], shares: Sequence[float], earlier: Mapping[str, Any] | None, decay: float) -> dict[str, Any]:
    """How far runs went: the squared largest singular value of a weight's displacement; for a vector the mean square.

    Runs with a file of polar steps went as far as the file said, so that they count only where there are no others.
    """
    counted = [(run, share) for run, share in zip(runs, shares, strict=True) if run.factor is None]
    counted = counted or ([] if earlier else list(zip(runs, shares, strict=True)))
    squares: dict[str, float] = {k: decay * v for k, v in earlier["squares"].items()} if earlier else {}
    for run, share in counted:
        for n, start in run.start.items():
            delta = (run.end[n] - start).double()
            if delta.ndim > 1 and delta.numel():
                square = float(torch.linalg.matrix_norm(delta.reshape(len(delta), -1), 2)) ** 2
            else:
                square = float(delta.square().sum()) / max(delta.numel(), 1)
            squares[n] = squares.get(n, 0.0) + share * square
    weight = sum(share for _, share in counted) + (decay * earlier["weight"] if earlier else 0.0)
    return {"weight": weight, "squares": squares}


def _scales(potential: MaxDiagonal, reach: Mapping[str, Any], steps: int) -> dict[str, float]:
    """s by tensor, so that T polar steps take a weight TRAVEL/3 times as far as the recorded runs went.

    Their rate falls quadratically, and each has the spectral norm 1/s E[1/d]^1/2 in the mean of the metric. The numbers of a
    vector move by 1/s.
    """
    found = {}
    for key, square in reach["squares"].items():
        d, away = potential.metric(key)[0].detach().double(), math.sqrt(square / reach["weight"])
        size = float((1 / d).mean()) ** 0.5 if d.numel() > 1 else 1.0
        found[key] = steps * size / (TRAVEL * away) if away > 0 else math.nan
    # a tensor that stood still moves as little as the one that moved least
    most = max((s for s in found.values() if math.isfinite(s)), default=1.0)
    return {k: s if math.isfinite(s) else most for k, s in found.items()}


# checks of what users pass


def _listed(runs: Any) -> list[Run]:
    """The runs as a list; what is none is refused."""
    found = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str | bytes) else [runs]
    if wrong := [run for run in found if not isinstance(run, Run)]:
        raise TypeError(
            f"runs must be a list of recorded runs, got {shown(wrong[0])} in it. Pass what Recorder.finish() gives, or "
            "metamd.Run.load(path)."
        )
    return found


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


def _check_runs(runs: Sequence[Run], tying: TyingName, model: Mapping[str, Shape], seen: set[str]) -> None:
    """Refuse runs that diverged, that are there already (their fingerprints are `seen`), or that are of another model."""
    for i, run in enumerate(runs):
        called = f"{run.label} ({i + 1} of {len(runs)})"
        if run.diverged:
            raise ValueError(f"{called} diverged: {run.diverged} Leave it out, and lower the learning rate of the next.")
        if all(torch.equal(run.start[n], run.end[n]) for n in run.model):
            raise ValueError(
                f"{called} never moved: it ends where it started, so that it says nothing of step sizes. Record a run that "
                "trains; its learning rate may be zero, or its parameters frozen."
            )
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

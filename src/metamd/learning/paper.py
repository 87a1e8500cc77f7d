"""The paper's own method as a recipe: a stable Algorithm 1, with all that is unpublished chosen on training tasks.

[GaoMetaMD2022] does not publish the inner rate eta, k, the outer rate rho, the number of outer steps, or where M begins. The
rule here, for all families the same:

1. eta is the rate with which M = 1, that is SGD, has the lowest mean training loss on a few training tasks.
2. M begins at 1, with a small seeded spread between the pieces; k is a share of the mean divergence of those SGD runs.
3. Every pair of k and pace is followed for a first number of outer steps and judged by the mean training loss of the same
   tasks, at its own best rate. The best goes on for as many steps at a time, while that lowers its loss.
4. What is best is brought to geometric mean 1, so that rates of SGD suit it, and the file recommends the rate found.

No outer step sees the tasks that judge, and nobody sees a held-out task. The header has all that was tried (`choice`).
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from metamd.files.learned import LearnedOptimiser, total_cost
from metamd.files.store import SETTING_DIGITS, Journal, Log, Result, shortened
from metamd.files.usage import Usage
from metamd.inner.closed_form import Iterate
from metamd.inner.executor import Executor
from metamd.inner.objectives import PaperBound
from metamd.inner.run import run_inner
from metamd.learning.first_look import first_look
from metamd.learning.outer import Method, Normalised, Stopping, Unpublished
from metamd.learning.parts import Parts, parts_of
from metamd.learning.reference import draw_tasks
from metamd.learning.rounds import Plan
from metamd.potentials.base import Params
from metamd.potentials.diagonal import Diagonal, MaxDiagonal
from metamd.tasks.base import Task, TaskFamily, derive_seed
from metamd.tasks.wrapped import Counted

FIRST_RATE, RATIOS, FURTHEST = 0.1, (4.0, 2.0**0.5), 20
"""A climb to the best rate begins here, by these ratios in turn, and ends after so many steps of each."""

SCORE = "mean training loss at the best rate"


def learn_published(
    family: TaskFamily,
    potential: MaxDiagonal,
    method: Method,
    *,
    tasks: int,
    seed: int = 0,
    journal: Journal | None = None,
    workers: int | Executor = 1,
    log: Log | None = None,
) -> LearnedOptimiser:
    """The paper's method by the rule of this module.

    Args:
        family: its training side.
        potential: N diagonals, centred at the origin.
        method: with `unpublished`, and `outer_steps` the largest number of outer steps.
        tasks: per outer step.
        seed: of everything random.
        journal: where every stage keeps its checkpoint, and the trials their results.
        workers: processes that share the runs.
        log: called with the record of every outer step, numbered through.
    """
    offered, began, counted = method.unpublished or Unpublished(), time.perf_counter(), Counted(family)
    built = draw_tasks(counted, seed, "published", offered.tasks)
    settings = {"potential": repr(potential), "method": repr(method), "tasks": tasks, "seed": seed}
    with parts_of(journal, "trials", counted, settings, workers) as parts:
        judge = Judge(built, parts, exact=method.exact)
        stages = _Stages(family, tasks, seed, journal, parts.executor, log)
        sgd = judge.rate("sgd", Diagonal(centre=potential.centre), FIRST_RATE, RATIOS)
        if not math.isfinite(sgd["loss"]):
            raise ValueError(f"SGD diverged on {family.name!r} at every rate that was tried. Check the data and the tasks.")
        eta, unit = sgd["rate"], judge.divergence(sgd["rate"])
        ready = replace(method, unpublished=None, lr=eta, keep="last", stopping=Stopping(0.0))
        tried: list[Result] = [{"k": 0.0, "pace": 0.0, "outer_steps": 0, **sgd}]

        def follow(last: LearnedOptimiser | None, before: Result, steps: int) -> tuple[LearnedOptimiser, Result]:
            k, pace, done = before["k"], before["pace"], before["outer_steps"]
            assert isinstance(ready.objective, PaperBound)
            assert isinstance(ready.outer, Normalised)
            how = replace(ready, objective=replace(ready.objective, k=k), outer=replace(ready.outer, pace=pace))
            name = f"k-{k:.6g}-pace-{pace:.6g}-from-{done}"
            start = potential if last is None else last.potential
            found = stages.follow(name, start, replace(how, outer_steps=steps), done)
            row: Result = {"k": k, "pace": pace, "outer_steps": done + steps, "rate": eta, "loss": math.inf}
            if found is not None:
                found = centred(found)
                row |= judge.rate(name, found.potential, eta, RATIOS[1:])
            tried.append(row)
            return found or last, row  # type: ignore[return-value]

        first = min(offered.first or math.ceil(method.outer_steps / 3), method.outer_steps)
        ks = [float(f"{share * unit:.6g}") for share in offered.shares] if offered.k is None else [offered.k]
        fresh: list[Result] = [{"k": k, "pace": pace, "outer_steps": 0} for k in ks for pace in offered.paces]
        best, row = min((follow(None, before, first) for before in fresh), key=lambda pair: pair[1]["loss"])
        if not math.isfinite(row["loss"]):
            raise ValueError(
                f"the paper's method diverged on {family.name!r} with every k and pace that was tried, so that nothing was "
                f"learned. {stages.reason}"
            )
        while (left := method.outer_steps - row["outer_steps"]) > 0:
            further, after = follow(best, row, min(first, left))
            if not after["loss"] < row["loss"]:
                break
            best, row = further, after
        return _finished(best, row, tried, stages, counted, began)


def _finished(
    best: LearnedOptimiser, row: Result, tried: Sequence[Result], stages: "_Stages", counted: Counted, began: float
) -> LearnedOptimiser:
    """The file: at geometric mean 1, with the rate that goes with it and the table of what was tried."""
    rows = [{n: None if x == math.inf else x for n, x in one.items()} for one in tried]
    sgd = "tuned SGD, M = 1, is the row with k = 0"
    header = replace(
        best.header,
        usage=Usage(factor=row["rate"]).to_dict(),
        choice={
            "score": SCORE,
            "judged_on": "training",
            "tried": rows,
            "rule": f"lowest loss; {sgd}. M was brought to geometric mean 1 and the rate to it.",
        },
        cost=total_cost(*stages.costs, {**counted.cost(began), "seconds": 0.0})
        | {"outer_steps": row["outer_steps"], "seconds": time.perf_counter() - began + counted.seconds},
        task_hashes=tuple(dict.fromkeys([*stages.hashes, *counted.tasks])),
    )
    return replace(best, header=header)


def centred(learned: LearnedOptimiser) -> LearnedOptimiser:
    """The same metrics times a number, so that their geometric mean over all pieces and coordinates is 1."""
    now = Iterate.of(learned.potential)
    return replace(learned, potential=now.shifted(-mean_log(now.log_d)).apply(learned.potential).requires_grad_(True))


def mean_log(log_d: Params) -> float:
    """The mean of log D over all that is stored."""
    total = sum(float(v.double().sum()) for v in log_d.values())
    return total / max(sum(v.numel() for v in log_d.values()), 1)


def metric_spread(potential: MaxDiagonal) -> dict[str, float]:
    """Standard deviations of log M: between coordinates, between the means of tensors, and between pieces.

    The first two are of the piece where they are largest. The last is the root mean square over coordinates of how pieces
    differ, beside a common factor of each.
    """
    logs = [v.detach().double().reshape(potential.pieces, -1) / 2 for v in potential.log_d.values()]
    flat, means = torch.cat(logs, 1), torch.stack([v.mean(1) for v in logs], 1)
    shape = flat - flat.mean(1, keepdim=True)
    return {
        "coordinates": float(flat.std(1, correction=0).max()),
        "tensors": float(means.std(1, correction=0).max()),
        "pieces": float(shape.var(0, correction=0).mean().sqrt()),
    }


class Judge:
    """Mean training losses of a few tasks under metrics and a rate; every run is a part that is kept."""

    def __init__(self, tasks: Sequence[Task], parts: Parts, *, exact: bool) -> None:
        self.tasks, self.parts, self.exact = tasks, parts, exact

    def rate(self, name: str, potential: MaxDiagonal, first: float, ratios: Sequence[float]) -> Result:
        """The best rate: from the first one, by each ratio in turn, to where neither neighbour is better."""
        phi, best = potential.bind(self.tasks[0].init()).requires_grad_(False), first
        for ratio in ratios:
            best = climb(lambda rate: self.loss(name, phi, rate), best, ratio)
        return {"rate": best, "loss": self.loss(name, phi, best)}

    def loss(self, name: str, phi: MaxDiagonal, rate: float) -> float:
        """The mean over the tasks and all steps; infinite if a task diverges."""
        found = self.parts.all({f"{name}-rate-{rate:.6g}": partial(_mean_losses, self.tasks, phi, rate, exact=self.exact)})
        values = found[f"{name}-rate-{rate:.6g}"]["losses"]
        return math.inf if None in values else statistics.fmean(values)

    def divergence(self, rate: float) -> float:
        """The mean of 1/2 |theta_{T+1} - theta_1|^2 over SGD's runs: B where M = 1."""
        found = self.parts.all({f"divergence-{rate:.6g}": partial(_divergences, self.tasks, rate)})
        return statistics.fmean(found[f"divergence-{rate:.6g}"]["divergences"])


def _mean_losses(tasks: Sequence[Task], phi: MaxDiagonal, rate: float, *, exact: bool) -> Result:
    runs = [run_inner(task, phi, lr=rate, exact=exact) for task in tasks]
    return {"losses": [None if run.diverged else float(run.losses.mean()) for run in runs]}


def _divergences(tasks: Sequence[Task], rate: float) -> Result:
    runs = [run_inner(task, Diagonal(), lr=rate) for task in tasks]
    return {"divergences": [sum(0.5 * float((r.end[n] - r.start[n]).square().sum()) for n in r.start) for r in runs]}


def climb(loss: Callable[[float], float], first: float, ratio: float) -> float:
    """The rate first x ratio^i from which neither neighbour has a lower loss; where all diverge, lower ones.

    Example:
        >>> climb(lambda rate: abs(rate - 0.4), 0.1, 2.0)
        0.4
    """
    known: dict[int, float] = {}

    def rate(place: int) -> float:
        return float(shortened(first * ratio**place, SETTING_DIGITS))

    def at(place: int) -> float:
        if place not in known:
            known[place] = loss(rate(place))
        return known[place]

    place = 0
    for _ in range(FURTHEST):
        better = min((place, place - 1, place + 1), key=at)
        if better == place and math.isfinite(at(place)):
            break
        place = better if better != place else place - 1
    return rate(place)


class _Stages:
    """The stages of outer steps, one after another: what they cost, which tasks they saw, and their records in one count."""

    def __init__(
        self, family: TaskFamily, tasks: int, seed: int, journal: Journal | None, executor: Executor, log: Log | None
    ) -> None:
        self.family, self.tasks, self.seed, self.journal, self.executor = family, tasks, seed, journal, executor
        self.log, self.steps, self.reason = log, 0, ""
        self.costs: list[Mapping[str, float]] = []
        self.hashes: dict[str, None] = {}

    def follow(self, name: str, start: MaxDiagonal, method: Method, done: int) -> LearnedOptimiser | None:
        """So many outer steps from these metrics; nothing if all tasks of one diverge. All that begin see the same tasks."""
        drawn = self.seed if not done else derive_seed(self.seed, "continued", done)
        inside = None if self.journal is None else Journal(Path(self.journal.folder) / name, self.journal.every)
        plan = Plan(
            self.family,
            method,
            start.pieces,
            self.tasks,
            drawn,
            first_look(self.family, start, drawn, self.tasks),
            self.executor,
        )
        try:
            if inside is None:
                found = plan.train(None, self._told)
            else:
                with inside.opened():
                    found = plan.train(inside, self._told)
        except ValueError as error:
            if "diverged" not in str(error):
                raise
            self.reason = str(error)
            return None
        self.costs.append(found.header.cost)
        self.hashes |= dict.fromkeys(found.header.task_hashes)
        return found

    def _told(self, record: dict[str, Any], step: int) -> None:
        self.steps += 1
        if self.log is not None:
            self.log({**record, "step": self.steps}, self.steps)

"""The score by which settings are chosen: usages of a file, and settings of rivals under the protocol `once`.

It is the mean of three logarithms: of the mean loss over the run, of the losses on the way, and of the loss at the end.
`learn_usage` has the formula.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from metamd.files.store import Result
from metamd.inner.run import StepRule, train
from metamd.learning.parts import Parts
from metamd.learning.reference import following_losses
from metamd.potentials.base import Params
from metamd.potentials.forms import Array
from metamd.tasks.base import SolvedTask, Task

JudgedOn = Literal["auto", "train", "validation"]

SCORE = "area under the logarithm of the loss"
"""The name of the score in headers."""

UNKNOWN = 1e-2
"""A share of the first loss. Where losses fall below zero and their minimum is not known, a loss that is nearer to the
lowest seen than that counts as equal to it."""

LOOKS = 20
"""About how often the loss of a run is looked at: twice in each of the `PHASES`, for every optimiser. A look at an average
costs a gradient; a hundred of them would double the cost of short runs."""

PHASES = 10
"""Equal parts of a run: their mean losses make a score, and a learned schedule has a number at each of their ends."""


def can_be_judged(judged_on: JudgedOn, task: Task) -> JudgedOn:
    """The data that the end of a run is judged on; "auto" depends on the task."""
    # where the smallest training loss is known, it is what is sought
    lacking = "validation" not in task.splits or isinstance(task, SolvedTask)
    return "train" if judged_on == "auto" and lacking else judged_on


def judged_run(
    task: Task, rule: StepRule, steps: int, model: Callable[[], Params] | None = None
) -> tuple[float, tuple[float, ...]]:
    """Train a task, and judge its losses: their mean and that of every part; infinite if the run diverged.

    Only some steps are looked at. They are the same for every run of a task, so that no choice of batches favours one.

    Args:
        task: the task.
        rule: what moves its parameters.
        steps: T.
        model: the parameters that are judged in place of those where gradients are taken, such as an average.
    """
    seen: list[float] = []

    @torch.no_grad()
    def look(t: int, loss: Tensor, grads: Params) -> None:
        if looked_at(t, steps):
            seen.append(float(loss if model is None else task.loss(model(), task.batch(t))))

    return (math.inf, ()) if train(task, rule, steps, watch=look).diverged else mean_and_parts(np.array(seen))


def looked_at(step: int, steps: int) -> bool:
    """Whether the loss of this step of a run counts."""
    apart = max(1, steps // LOOKS)
    return step % apart == apart // 2


def mean_and_parts(losses: Array) -> tuple[float, tuple[float, ...]]:
    """The mean loss of a run and those of its parts, of the steps that were looked at."""
    return float(losses.mean()), tuple(float(part.mean()) for part in np.array_split(losses, min(PHASES, len(losses))))


def run_record(task: Task, mean: float, way: Sequence[float], end: Params, judged_on: JudgedOn) -> Result:
    """The mean losses of the parts of a run, and that at its end; None if it diverged.

    Judged on the validation split there is nothing but the end, for it is not looked at in between.
    """
    last = _end(task, end, judged_on) if math.isfinite(mean) else math.inf
    if not math.isfinite(last):
        return {"way": [], "end": None}
    return {"way": [] if judged_on == "validation" else list(way), "end": last}


def _end(task: Task, params: Params, judged_on: JudgedOn) -> float:
    if judged_on != "train":
        return task.evaluate(params, "validation").loss
    if isinstance(task, SolvedTask):
        return task.evaluate(params, "train").loss  # without the noise of batches
    return fmean(following_losses(task, params))


class RunScores:
    """The scores of settings on some tasks, from the records of their runs; `starts` says what each task begins with.

    Losses are counted from the smallest possible one where the task knows it, else from the lowest seen if that is below
    zero: `see` notes the losses of a run.
    """

    def __init__(self, starts: Sequence[Result]) -> None:
        self._starts, self._lowest = starts, [0.0] * len(starts)

    @classmethod
    def on(cls, tasks: Sequence[Task], parts: Parts, start: Callable[[Task], Result]) -> "RunScores":
        """Those on some tasks; what their starts are like is kept as parts."""
        return cls(list(parts.all({f"start-{i}": partial(start, task) for i, task in enumerate(tasks)}).values()))

    def see(self, number: int, run: Result) -> None:
        """A run of a task."""
        if run["end"] is not None:
            self._lowest[number] = min(self._lowest[number], run["end"], *run["way"])

    def score(self, runs: Sequence[Result]) -> float:
        """The geometric mean of losses over the first tasks, a run of each, and over the run; infinite if any diverged."""
        return self._mean(runs, self._logarithm)

    def end(self, runs: Sequence[Result]) -> float:
        """The same of the losses at the end alone."""
        return self._mean(runs, lambda number, run: math.log(self._above_zero(number, run)[-1]))

    def _mean(self, runs: Sequence[Result], logarithm: Callable[[int, Result], float]) -> float:
        logs = [math.inf if run["end"] is None else logarithm(i, run) for i, run in enumerate(runs)]
        return math.exp(sum(logs) / len(logs))

    def _logarithm(self, number: int, run: Result) -> float:
        """That of the mean loss over a run, the mean over the run of the logarithms, and that at the end."""
        *way, end = self._above_zero(number, run)
        return fmean([math.log(fmean(way)), fmean(map(math.log, way)), math.log(end)]) if way else math.log(end)

    def _above_zero(self, number: int, run: Result) -> list[float]:
        start, lowest = self._starts[number], self._lowest[number]
        zero = lowest if start["minimum"] is None else start["minimum"]
        unknown = start["minimum"] is None and lowest < 0
        floor = start["noise"] + (UNKNOWN if unknown else start["precision"]) * (start["loss"] - zero)
        return [max(x - zero, 0.0) + max(floor, sys.float_info.min) for x in (*run["way"], run["end"])]


def start_of(task: Task) -> Result:
    """The loss at the start of a task, what it leaves to chance and to rounding, and its smallest value if it is known.

    The standard error of the losses of a few batches is what tells no two settings apart. It is taken at the start, so
    that it is the same for all of them; where every batch is the whole function it is nothing.
    """
    losses = following_losses(task, task.init())
    known = task.minimum() if isinstance(task, SolvedTask) else None
    precision = max(torch.finfo(x.dtype).eps for x in task.init().values())
    noise = stdev(losses) / math.sqrt(len(losses))
    return {"loss": fmean(losses), "noise": noise, "precision": precision, "minimum": known}

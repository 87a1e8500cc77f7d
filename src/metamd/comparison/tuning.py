"""The same search, budget and search space for everybody, fixed beforehand; every trial is a record, failed ones too."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from metamd.comparison.search import History, QuasiRandom, Search
from metamd.comparison.training import Measuring, Outcome, train
from metamd.files.store import Records, Result
from metamd.files.usage import Schedule
from metamd.rivals.base import Contender, Rival, searched
from metamd.tasks.base import Task, config_hash, derive_seed

Metric = Callable[[Outcome], float]

METRICS: dict[str, Metric] = {
    "mean_loss": lambda o: o.mean_loss,
    "final_loss": lambda o: o.final_loss,
    "batch_loss": lambda o: o.batch_loss,
    "validation_error": lambda o: 1 - o.accuracy("validation"),
    "test_error": lambda o: 1 - o.accuracy("test"),
}
"""What a training can be judged by; of all of them less is better."""


@dataclass(frozen=True)
class Trial:
    """One setting on all tasks.

    Args:
        contender: the rival with the setting.
        outcomes: one per task.
        score: the mean of the metric over the tasks; infinite if one of them failed.
    """

    contender: Contender
    outcomes: tuple[Outcome, ...]
    score: float


@dataclass(frozen=True)
class Tuned:
    """What a search found, with all its trials.

    Args:
        rival: what was tuned.
        metric: what for, a name in `METRICS`.
        search: by which search.
        trials: in the order in which they were made.
    """

    rival: Rival
    metric: str
    search: str
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Contender:
        """The setting with the best score; the first of them if all failed."""
        return min(self.trials, key=lambda t: t.score).contender

    @property
    def score(self) -> float:
        """The best score."""
        return min(t.score for t in self.trials)

    @property
    def best_so_far(self) -> list[float]:
        """The best score after each trial: what a smaller budget would have found."""
        return [min(t.score for t in self.trials[: i + 1]) for i in range(len(self.trials))]

    @property
    def gradients(self) -> int:
        """Gradient evaluations of all trials."""
        return sum(o.gradients for t in self.trials for o in t.outcomes)

    @property
    def at_edge(self) -> list[str]:
        """The hyperparameters whose best value lies at an end of the search space, or grid: a better one may lie beyond."""
        tried = {n: [t.contender.setting[n] for t in self.trials if n in t.contender.setting] for n in self.rival.space}
        varied = {n: values for n, values in tried.items() if len(set(values)) > 1}
        if self.search == "grid":
            return [n for n, values in varied.items() if self.best.setting[n] in (min(values), max(values))]
        return [n for n in varied if self.rival.space[n].at_edge(self.best.setting[n])]


def tune(
    rival: Rival,
    tasks: Task | Iterable[Task],
    *,
    search: Search | None = None,
    budget: int = 25,
    metric: str = "mean_loss",
    names: Sequence[str] = ("lr", "weight_decay"),
    schedule: Schedule = "constant",
    steps: int | None = None,
    measuring: Measuring | None = None,
    seed: int = 0,
    records: Records | None = None,
) -> Tuned:
    """Look for the best hyperparameters of a rival: at most `budget` settings, each trained on all tasks.

    Args:
        rival: what is tuned.
        tasks: what it is tuned on.
        search: `Grid()`, `QuasiRandom()` or `Bayesian()`; quasi-random if not given.
        budget: of settings. One that diverges counts.
        metric: what is minimised, a name in `metamd.tuning.METRICS`.
        names: of the hyperparameters that vary, those among them that the rival has.
        schedule: of the learning rate.
        steps: T; the tasks' own if not given.
        measuring: how the runs are watched.
        seed: of the search.
        records: where the trials are kept, so that a search that was stopped continues.

    Example:
        >>> import torch
        >>> from metamd import tasks
        >>> from metamd.rivals import rival
        >>> family = tasks.quadratic((1.0, 2.0))
        >>> task = family.build(family.sample(torch.Generator().manual_seed(0)))
        >>> found = tune(rival("sgd"), task, budget=8, steps=20, names=["lr"], measuring=Measuring(splits=()))
        >>> 0.05 < found.best.setting["lr"] < 0.6
        True
    """
    search, measuring = search or QuasiRandom(), measuring or Measuring()
    chosen = [tasks] if isinstance(tasks, Task) else list(tasks)
    _check(chosen, budget, metric)
    names = searched(rival, names)
    about = [rival.name, rival.identity, sorted(rival.defaults.items()), search.name, repr(search), budget, metric, names]
    about += [repr(rival.space), repr(rival.grid), schedule, steps, repr(measuring), seed]
    about += [config_hash(t.config) for t in chosen]
    place = f"trial-{rival.name}-{schedule}-{derive_seed(*map(str, about)):08x}"
    trials: list[Trial] = []
    for number in range(budget):
        history = [(t.contender.setting, t.score) for t in trials]

        def compute(history: History = history) -> Result:
            setting = search.propose(rival, names, history, budget=budget, seed=seed)
            if setting is None:
                return {"setting": None}
            contender = rival.with_setting(schedule, **setting)
            runs = [train(t, contender, steps=steps, measuring=measuring) for t in chosen]
            return {"setting": setting, "runs": [o.to_json() for o in runs]}

        found = compute() if records is None else records.cell(f"{place}-{number:03d}", compute)
        if found["setting"] is None:  # a grid with fewer points than the budget
            break
        outcomes = tuple(Outcome.from_json(r) for r in found["runs"])
        trials.append(Trial(rival.with_setting(schedule, **found["setting"]), outcomes, score(outcomes, METRICS[metric])))
    return Tuned(rival, metric, search.name, tuple(trials))


def score(outcomes: Sequence[Outcome], metric: Metric) -> float:
    """The mean of a metric; infinite if a run failed.

    Args:
        outcomes: of one setting.
        metric: what is judged.
    """
    values = [math.inf if o.failed else metric(o) for o in outcomes]
    return math.inf if math.inf in values else math.fsum(values) / len(values)


def _check(tasks: Sequence[Task], budget: int, metric: str) -> None:
    if not tasks:
        raise ValueError("tune needs at least one task, got none.")
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}. It is the number of settings that are tried.")
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}.")

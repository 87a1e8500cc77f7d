"""The same search, budget and search space for everybody, fixed beforehand; every trial is a record, failed ones too."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from metamd.comparison.training import Measuring, Outcome, one_thread, train_contender
from metamd.files.progress import Progress
from metamd.files.store import SETTING_DIGITS, Records, Result, shortened
from metamd.files.text import install
from metamd.files.usage import Schedule
from metamd.rivals.base import Contender, Rival, Setting, searched
from metamd.tasks.base import Task, TaskFamily, config_hash, derive_seed, seeded

if TYPE_CHECKING:
    from metamd.comparison.once import Chosen, Once

Measure = Callable[[Outcome], float]

METRICS: dict[str, Measure] = {
    "mean_loss": lambda o: o.mean_loss,
    "final_loss": lambda o: o.final_loss,
    "tenth_loss": lambda o: o.loss_after(0.1),
    "half_loss": lambda o: o.loss_after(0.5),
    "batch_loss": lambda o: o.batch_loss,
    "validation_loss": lambda o: o.loss_on("validation"),
    "test_loss": lambda o: o.loss_on("test"),
    "validation_error": lambda o: 1 - o.accuracy("validation"),
    "test_error": lambda o: 1 - o.accuracy("test"),
}
"""What a training can be judged by; less is better for all of them."""

History = Sequence[tuple[Setting, float]]
"""What was tried, and its score: lower is better, infinite for a trial that failed."""


# which setting to try next


@dataclass(frozen=True)
class Search(ABC):
    """Proposes settings one after another, each a function of what was tried before."""

    budget: int = 25  # settings that are tried, at most; one that diverges counts
    names: Sequence[str] = ("lr", "weight_decay")  # the hyperparameters that vary, those among them that the rival has
    seed: int = 0  # of what is random in it

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1, got {self.budget}. It is the number of settings that are tried.")

    @abstractmethod
    def propose(self, rival: Rival, history: History) -> dict[str, float] | None:
        """The next setting of a rival; None when there is nothing left to try."""


@dataclass(frozen=True)
class Grid(Search):
    """The published grid where a rival has one that fits the budget, else an even division of its search space.

    Args:
        budget: settings that are tried, at most.
        names: the hyperparameters that vary.
        seed: changes nothing.

    Example:
        >>> from metamd.rivals import rival
        >>> Grid(budget=3, names=["lr"]).propose(rival("soap"), [])
        {'lr': 0.0001}
    """

    def propose(self, rival: Rival, history: History) -> dict[str, float] | None:
        """The next point of the grid."""
        settings = rival.settings(self.names, self.budget)
        return settings[len(history)] if len(history) < len(settings) else None


@dataclass(frozen=True)
class ExtendedGrid(Grid):
    """The published grid, whole, and then beyond its ends until the best value of every hyperparameter is inside.

    A value beyond an end is as far from it, by its logarithm, as the value before; the others stay at their best. What the
    grid as printed would have chosen is kept beside it, see `printed`.

    Args:
        budget: settings that are tried, at most.
        names: the hyperparameters that vary.
        seed: changes nothing.
    """

    def propose(self, rival: Rival, history: History) -> dict[str, float] | None:
        """The next point of the grid, or one beyond the best."""
        names, printed = searched(rival, self.names), self.printed(rival)
        if len(history) < printed:
            return super().propose(rival, history)
        best = min(history, key=lambda trial: trial[1])[0]
        for name in names:
            values = sorted({s[name] for s, _ in history})
            if len(values) < 2 or best[name] not in (values[0], values[-1]):
                continue
            inner = values[1] if best[name] == values[0] else values[-2]
            further = float(shortened(best[name] ** 2 / inner, SETTING_DIGITS))
            return {n: float(best[n]) for n in names} | {name: further}
        return None

    def printed(self, rival: Rival) -> int:
        """How many of the first trials are the grid as printed."""
        return len(rival.settings(self.names, self.budget))


@dataclass(frozen=True)
class QuasiRandom(Search):
    """Scrambled Sobol points of the search space, which cover it more evenly than random ones.

    Args:
        budget: settings that are tried, at most.
        names: the hyperparameters that vary.
        seed: of the scrambling.
    """

    def propose(self, rival: Rival, history: History) -> dict[str, float] | None:
        """The next Sobol point."""
        names = searched(rival, self.names)
        return _setting(rival, names, sobol(len(names), len(history) + 1, self.seed)[-1])


@dataclass(frozen=True)
class Bayesian(QuasiRandom):
    """The paper's search: a Gaussian process with an RBF kernel on the logarithms, and its upper confidence bound.

    The next setting maximises mu + sqrt(beta) sigma of the negative score [GaoMetaMD2022], appendix. The first points and
    beta are not published; these are ours. A failed trial counts as the worst score that was seen.

    Args:
        budget: settings that are tried, at most.
        names: the hyperparameters that vary.
        seed: of the first points and of the proposals.
        initial: Sobol points before the process is fitted.
        beta: weight of the uncertainty.
    """

    initial: int = 5
    beta: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial < 1 or not 0 <= self.beta < math.inf:
            raise ValueError(f"Bayesian needs initial >= 1 and beta >= 0, got {self.initial} and {self.beta}.")

    def propose(self, rival: Rival, history: History) -> dict[str, float] | None:
        """A Sobol point first, then the best of the upper confidence bound."""
        finite = [score for _, score in history if math.isfinite(score)]
        if len(history) < self.initial or not finite:
            return super().propose(rival, history)
        names = searched(rival, self.names)
        places = torch.tensor([[rival.space[n].place(s[n]) for n in names] for s, _ in history], dtype=torch.float64)
        scores = torch.tensor([s if math.isfinite(s) else max(finite) for _, s in history], dtype=torch.float64)
        with seeded(derive_seed(self.seed, "proposal", len(history))):
            return _setting(rival, names, _most_promising(places, -scores, self.beta))


SEARCHES: dict[str, type[Search]] = {"grid": Grid, "extended": ExtendedGrid, "random": QuasiRandom, "bayes": Bayesian}
"""By the names of the command line."""


def sobol(dimension: int, count: int, seed: int) -> Tensor:
    """The first points of a scrambled Sobol sequence in the unit cube, (count, dimension)."""
    engine: Any = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=derive_seed(seed, "sobol"))  # type: ignore[no-untyped-call]
    found: Tensor = engine.draw(count, dtype=torch.float64)
    return found


def _setting(rival: Rival, names: Sequence[str], place: Tensor) -> dict[str, float]:
    return {n: rival.space[n].at(float(u)) for n, u in zip(names, place, strict=True)}


def _most_promising(places: Tensor, values: Tensor, beta: float) -> Tensor:
    """The point of the unit cube with the largest upper confidence bound."""
    try:
        from botorch import settings
        from botorch.acquisition.analytic import UpperConfidenceBound
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.models.transforms import Standardize
        from botorch.optim.optimize import optimize_acqf
        from gpytorch.kernels import RBFKernel, ScaleKernel
        from gpytorch.mlls import ExactMarginalLogLikelihood
        from gpytorch.priors import GammaPrior
    except ModuleNotFoundError:
        raise ValueError(f"Bayesian search needs botorch, which is not installed. {install('tuning')}") from None
    dimension = places.shape[1]
    kernel: Any = ScaleKernel(
        RBFKernel(ard_num_dims=dimension, lengthscale_prior=GammaPrior(3.0, 6.0)), outputscale_prior=GammaPrior(2.0, 0.15)
    )
    # one thread is ten times faster here than two busy ones
    with one_thread(), settings.validate_input_scaling(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a line search that fails is tried again from other points, with a warning
        process: Any = SingleTaskGP(places, values[:, None], covar_module=kernel, outcome_transform=Standardize(m=1))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(process.likelihood, process))
        bounds = torch.tensor([[0.0] * dimension, [1.0] * dimension], dtype=torch.float64)
        found, _ = optimize_acqf(UpperConfidenceBound(process, beta=beta), bounds, q=1, num_restarts=5, raw_samples=128)
    return found[0].detach().clamp(0, 1)


# the search itself


@dataclass(frozen=True)
class Trial:
    """One setting on all tasks."""

    contender: Contender  # the rival with the setting
    outcomes: tuple[Outcome, ...]  # one per task
    score: float  # the mean of the metric over the tasks; infinite if one of them failed


@dataclass(frozen=True)
class Tuned:
    """What a search found, with all its trials."""

    rival: Rival  # what was tuned
    search: Search  # by which search
    trials: tuple[Trial, ...]  # in the order in which they were made

    @property
    def best(self) -> Contender:
        """The setting with the best score; the first of them if all failed."""
        return min(self.trials, key=lambda t: t.score).contender

    @property
    def as_printed(self) -> Contender | None:
        """What the grid as printed would have chosen, if the search went beyond it."""
        if not isinstance(self.search, ExtendedGrid):
            return None
        return min(self.trials[: self.search.printed(self.rival)], key=lambda t: t.score).contender

    @property
    def best_so_far(self) -> list[float]:
        """The best score after each trial: what a smaller budget would have found."""
        return list(accumulate((t.score for t in self.trials), min))

    @property
    def gradients(self) -> int:
        """Gradient evaluations of all trials."""
        return sum(o.gradients for t in self.trials for o in t.outcomes)

    @property
    def at_edge(self) -> list[str]:
        """The hyperparameters whose best value lies at an end of the search space, or grid: a better one may lie beyond."""
        tried = {n: [t.contender.setting[n] for t in self.trials if n in t.contender.setting] for n in self.rival.space}
        varied = {n: values for n, values in tried.items() if len(set(values)) > 1}
        if isinstance(self.search, Grid):
            return [n for n, values in varied.items() if self.best.setting[n] in (min(values), max(values))]
        return [n for n in varied if self.rival.space[n].at_edge(self.best.setting[n])]


@overload
def tune(
    rival: Rival,
    tasks: Task | Iterable[Task],
    search: Search | None = None,
    *,
    metric: str = "mean_loss",
    schedule: Schedule = "constant",
    steps: int | None = None,
    measuring: Measuring | None = None,
    records: Records | None = None,
) -> Tuned: ...


@overload
def tune(
    rival: Rival,
    tasks: TaskFamily,
    search: "Once | None" = None,
    *,
    steps: int | None = None,
    records: Records | None = None,
) -> "Chosen": ...


def tune(
    rival: Rival,
    tasks: Task | Iterable[Task] | TaskFamily,
    search: "Search | Once | None" = None,
    *,
    metric: str = "mean_loss",
    schedule: Schedule = "constant",
    steps: int | None = None,
    measuring: Measuring | None = None,
    records: Records | None = None,
) -> "Tuned | Chosen":
    """Look for the best hyperparameters of a rival: each setting that the search proposes is trained on all tasks.

    Given a family, a rival chooses its settings once, on training tasks, by the protocol `once`.

    Args:
        rival: what is tuned.
        tasks: what it is tuned on: a task, several, or the family whose training side it chooses on once.
        search: `Grid()`, `QuasiRandom()` or `Bayesian()`, with a budget; 25 quasi-random settings if not given. For a family
            `Once()`, with its budget.
        metric: what is minimised, a name in `metamd.comparison.tuning.METRICS`. For a family it is the score of a usage.
        schedule: of the learning rate; a family tries several.
        steps: T; the tasks' own if not given.
        measuring: how the runs are watched; not for a family.
        records: where the trials are kept, so that a search that was stopped continues.

    Example:
        >>> from metamd import tasks
        >>> from metamd.rivals import rival
        >>> family = tasks.quadratic((1.0, 2.0))
        >>> task = family.build(family.sample(torch.Generator().manual_seed(0)))
        >>> search = QuasiRandom(budget=8, names=["lr"])
        >>> found = tune(rival("sgd"), task, search, steps=20, measuring=Measuring(splits=()))
        >>> 0.05 < found.best.setting["lr"] < 0.6
        True
    """
    from metamd.comparison.once import Once, choose_once  # which needs this module

    if isinstance(tasks, TaskFamily) or isinstance(search, Once):
        if not isinstance(tasks, TaskFamily) or isinstance(search, Search):
            raise TypeError(
                f"Once() goes with a family, and other searches with tasks; got {type(search).__name__} for "
                f"{type(tasks).__name__}. Pass the family alone, or tasks that were built."
            )
        if metric != "mean_loss" or schedule != "constant" or measuring is not None:
            raise ValueError(
                "metric, schedule and measuring are for tasks that were built: on a family a score decides, and "
                "several schedules are tried. Leave them out."
            )
        return choose_once(rival.untuned(), tasks, search or Once(), steps=steps, records=records)
    search, measuring = search or QuasiRandom(), measuring or Measuring()
    chosen = [tasks] if isinstance(tasks, Task) else list(tasks)
    if not chosen:
        raise ValueError("tune needs at least one task, got none.")
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}.")
    about = [rival.name, rival.identity, sorted(rival.defaults.items()), search, searched(rival, search.names), metric]
    about += [rival.space, rival.grid, schedule, steps, measuring, [config_hash(t.config) for t in chosen]]
    place = f"trial-{rival.name}-{schedule}-{derive_seed(*map(repr, about)):08x}"
    trials: list[Trial] = []

    def compute() -> Result:
        setting = search.propose(rival, [(t.contender.setting, t.score) for t in trials])
        if setting is None:
            return {"setting": None}
        contender = rival.with_setting(schedule, **setting)
        runs = [train_contender(t, contender, steps=steps, measuring=measuring) for t in chosen]
        return {"setting": setting, "runs": [o.to_json() for o in runs]}

    with Progress(f"tuning {rival.title}", search.budget) as progress:
        for number in range(search.budget):
            found = compute() if records is None else records.cell(f"{place}-{number:03d}", compute)
            if found["setting"] is None:  # a grid with fewer points than the budget
                break
            outcomes = tuple(Outcome.from_json(r) for r in found["runs"])
            values = [math.inf if o.failed else METRICS[metric](o) for o in outcomes]
            trials.append(Trial(rival.with_setting(schedule, **found["setting"]), outcomes, fmean(values)))
            progress.advance()
    return Tuned(rival, search, tuple(trials))

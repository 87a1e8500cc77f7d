"""Which settings to try next: on a grid, quasi-random, or where a Gaussian process expects the most."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metamd.rivals.base import Rival, Setting, searched
from metamd.tasks.base import derive_seed, seeded

History = Sequence[tuple[Setting, float]]
"""What was tried, and its score: lower is better, infinite for a trial that failed."""


class Search(ABC):
    """Proposes settings one after another, a pure function of what was tried, the budget and the seed."""

    name: str

    @abstractmethod
    def propose(
        self, rival: Rival, names: Sequence[str], history: History, *, budget: int, seed: int
    ) -> dict[str, float] | None:
        """The next setting; None when there is nothing left to try.

        Args:
            rival: what is tuned.
            names: of the hyperparameters that vary.
            history: the trials so far.
            budget: of trials.
            seed: of what is random in it.
        """


@dataclass(frozen=True)
class Grid(Search):
    """The published grid where a rival has one that fits the budget, else an even division of its search space."""

    name = "grid"

    def propose(
        self, rival: Rival, names: Sequence[str], history: History, *, budget: int, seed: int
    ) -> dict[str, float] | None:
        """The next point of the grid."""
        settings = rival.settings(names, budget)
        return settings[len(history)] if len(history) < min(budget, len(settings)) else None


@dataclass(frozen=True)
class QuasiRandom(Search):
    """Scrambled Sobol points of the search space, which cover it more evenly than random ones."""

    name = "quasi-random"

    def propose(
        self, rival: Rival, names: Sequence[str], history: History, *, budget: int, seed: int
    ) -> dict[str, float] | None:
        """The next Sobol point."""
        names = searched(rival, names)
        return None if len(history) >= budget else _setting(rival, names, sobol(len(names), len(history) + 1, seed)[-1])


@dataclass(frozen=True)
class Bayesian(Search):
    """The paper's search: a Gaussian process with an RBF kernel on the logarithms, and its upper confidence bound.

    The next setting maximises mu + sqrt(beta) sigma of the negative score [GaoMetaMD2022], appendix. The first points and
    beta are not published; these are ours. A failed trial counts as the worst score that was seen.

    Args:
        initial: Sobol points before the process is fitted.
        beta: weight of the uncertainty.
    """

    initial: int = 5
    beta: float = 4.0
    name = "bayesian"

    def __post_init__(self) -> None:
        if self.initial < 1 or not 0 <= self.beta < math.inf:
            raise ValueError(f"Bayesian needs initial >= 1 and beta >= 0, got {self.initial} and {self.beta}.")

    def propose(
        self, rival: Rival, names: Sequence[str], history: History, *, budget: int, seed: int
    ) -> dict[str, float] | None:
        """A Sobol point first, then the best of the upper confidence bound."""
        names = searched(rival, names)
        if len(history) >= budget:
            return None
        finite = [score for _, score in history if math.isfinite(score)]
        if len(history) < self.initial or not finite:
            return _setting(rival, names, sobol(len(names), len(history) + 1, seed)[-1])
        places = torch.tensor([[_place(rival, n, s[n]) for n in names] for s, _ in history], dtype=torch.float64)
        scores = torch.tensor([s if math.isfinite(s) else max(finite) for _, s in history], dtype=torch.float64)
        with seeded(derive_seed(seed, "proposal", len(history))):
            return _setting(rival, names, _most_promising(places, -scores, self.beta))


SEARCHES: dict[str, Search] = {"grid": Grid(), "random": QuasiRandom(), "bayes": Bayesian()}
"""By the names of the command line."""


def sobol(dimension: int, count: int, seed: int) -> Tensor:
    """The first points of a scrambled Sobol sequence in the unit cube, (count, dimension).

    Args:
        dimension: of the cube.
        count: how many.
        seed: of the scrambling.
    """
    engine: Any = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=derive_seed(seed, "sobol"))  # type: ignore[no-untyped-call]
    found: Tensor = engine.draw(count, dtype=torch.float64)
    return found


def _setting(rival: Rival, names: Sequence[str], place: Tensor) -> dict[str, float]:
    return {n: rival.space[n].at(float(u)) for n, u in zip(names, place, strict=True)}


def _place(rival: Rival, name: str, value: float) -> float:
    space = rival.space[name]
    return math.log(value / space.low) / math.log(space.high / space.low)


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
        raise ValueError(
            "Bayesian search needs botorch, which is not installed. Run: pip install 'metamd[tuning]'"
        ) from None
    dimension = places.shape[1]
    kernel: Any = ScaleKernel(
        RBFKernel(ard_num_dims=dimension, lengthscale_prior=GammaPrior(3.0, 6.0)), outputscale_prior=GammaPrior(2.0, 0.15)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ten times faster than two busy threads
    try:
        with settings.validate_input_scaling(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a line search that fails is tried again from other points, with a warning
            process: Any = SingleTaskGP(places, values[:, None], covar_module=kernel, outcome_transform=Standardize(m=1))
            fit_gpytorch_mll(ExactMarginalLogLikelihood(process.likelihood, process))
            bounds = torch.tensor([[0.0] * dimension, [1.0] * dimension], dtype=torch.float64)
            rule = UpperConfidenceBound(process, beta=beta)
            found, _ = optimize_acqf(rule, bounds, q=1, num_restarts=5, raw_samples=128)
    finally:
        torch.set_num_threads(threads)
    return found[0].detach().clamp(0, 1)

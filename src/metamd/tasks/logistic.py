"""Logistic regression on Gaussian data: convex, noisy, with a known optimum."""

from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from metamd.tasks.base import Config, Drawn, Evaluation, SolvedTask, Split, TaskFamily, check_config, draw_seed
from metamd.tasks.batches import Shuffle


def logistic(
    dimension: int = 10,
    *,
    examples: int = 1000,
    batch_size: int | None = 100,
    decades: float = 1.0,
    l2: float = 1e-3,
    tolerance: float = 1e-6,
    steps: int = 200,
) -> TaskFamily:
    """Logistic regressions, each with its own truth and data.

    l(w, b) = mean_i log(1 + exp(-y_i (w'x_i + b))) + l2/2 (|w|^2 + b^2), y_i = +-1, x_i ~ N(0, diag(s^2)), s from 1 down to
    10^-decades in equal ratios; the labels follow a logistic model with w'x of unit variance. The bias is penalised too,
    so that the loss is strongly convex whatever is drawn.

    Args:
        dimension: features.
        examples: for training; as many again for validation and for test.
        batch_size: examples per step; None takes all of them.
        decades: how far the scales of the features are apart; the condition number is about its power of 100.
        l2: strength of the penalty. With 0 the optimum need not exist.
        tolerance: a run has arrived when the norm of its gradient is below this.
        steps: T.
    """
    return Logistic(dimension, examples, batch_size, {"decades": decades, "l2": l2, "tolerance": tolerance}, steps)


class Logistic(TaskFamily):
    """See `logistic`."""

    def __init__(
        self, dimension: int, examples: int, batch_size: int | None, numbers: Mapping[str, float], steps: int
    ) -> None:
        super().__init__("logistic", steps, shared_loss=True)
        if dimension < 1 or examples < 1:
            raise ValueError(f"dimension and examples must be at least 1, got {dimension} and {examples}.")
        batch_size = examples if batch_size is None else batch_size
        if not 1 <= batch_size <= examples:
            raise ValueError(
                f"batch_size must lie between 1 and the {examples} examples, got {batch_size}. Pass None for all."
            )
        if numbers["l2"] < 0 or not numbers["tolerance"] > 0:
            raise ValueError(f"l2 must not be negative and tolerance must be positive, got {dict(numbers)}.")
        self.dimension, self.examples, self.batch_size, self.numbers = dimension, examples, batch_size, numbers

    def sample(self, generator: torch.Generator) -> Config:
        """Seeds of the data and of the batches."""
        return {"family": self.name, "data_seed": draw_seed(generator), "batch_seed": draw_seed(generator)}

    def build(self, config: Config) -> "LogisticTask":
        """The regression of a config."""
        check_config(config, self.name, "data_seed", "batch_seed")
        return LogisticTask(config, self)

    def describe(self) -> dict[str, Any]:
        """The settings."""
        sizes = {"dimension": self.dimension, "examples": self.examples, "batch_size": self.batch_size}
        return {"family": self.name, **sizes, **self.numbers, "steps": self.steps}

    def drawn(self) -> Drawn:
        """A new truth with new data."""
        return Drawn("a regression with its own truth", "drawn anew", "zero in all tasks", "drawn anew")


class LogisticTask(SolvedTask):
    """One regression; parameters `weight` and `bias` start at zero."""

    def __init__(self, config: Config, family: Logistic) -> None:
        super().__init__(config, family.steps, family.numbers["tolerance"])
        self.l2, self.dimension = family.numbers["l2"], family.dimension
        self.shuffle = Shuffle(family.examples, family.batch_size, config["batch_seed"])
        generator = torch.Generator().manual_seed(config["data_seed"])
        scales = torch.logspace(0, -family.numbers["decades"], family.dimension, dtype=torch.float64)
        truth = torch.randn(family.dimension, generator=generator, dtype=torch.float64)
        self.splits = {split: _draw(truth / truth.norm(), scales, family.examples, generator) for split in get_args(Split)}

    def init(self) -> dict[str, Tensor]:
        """Zero."""
        return {"weight": torch.zeros(self.dimension, dtype=torch.float64), "bias": torch.zeros((), dtype=torch.float64)}

    def batch(self, step: int) -> dict[str, Tensor]:
        """Some of the training examples."""
        rows = self.shuffle.indices(step)
        return {k: v[rows] for k, v in self.splits["train"].items()}

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """The mean over the batch, and the penalty."""
        weight, bias = params["weight"], params["bias"]
        margins = batch["signs"] * (batch["inputs"] @ weight + bias)
        return F.softplus(-margins).mean() + self.l2 / 2 * (weight @ weight + bias**2)

    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """Loss with the penalty, and share of right signs."""
        data = self.splits[split]
        right = data["signs"] * (data["inputs"] @ params["weight"] + params["bias"]) > 0
        return Evaluation(float(self.loss(params, data).detach()), float(right.double().mean()))

    def optimum(self) -> dict[str, Tensor]:
        """By Newton's method on all training examples, each step halved until the loss falls."""
        data = self.splits["train"]
        x = torch.cat([data["inputs"], torch.ones_like(data["signs"])[:, None]], 1)
        u = torch.zeros(self.dimension + 1, dtype=torch.float64)

        def loss(u: Tensor) -> Tensor:
            return self.loss({"weight": u[:-1], "bias": u[-1]}, data)

        for _ in range(100):
            p = torch.sigmoid(-data["signs"] * (x @ u))
            grad = -(x * (p * data["signs"])[:, None]).mean(0) + self.l2 * u
            if grad.norm() < 1e-13:
                break
            hessian = x.T @ (x * (p * (1 - p))[:, None]) / len(x) + self.l2 * torch.eye(len(u), dtype=u.dtype)
            move = torch.linalg.solve(hessian, grad)
            # Close to the optimum the loss no longer resolves the step: there Newton's own one is taken.
            size = next((s for s in (1.0, 0.5, 0.25, 0.1, 0.01) if loss(u - s * move) < loss(u)), 1.0)
            u = u - size * move
        separated = self.l2 == 0 and bool((data["signs"] * (x @ u) > 0).all())
        if separated or not grad.norm() < 1e-9:
            raise RuntimeError("This regression has no finite optimum: its classes are separable. Pass l2=1e-3.")
        return {"weight": u[:-1], "bias": u[-1]}


def _draw(truth: Tensor, scales: Tensor, examples: int, generator: torch.Generator) -> dict[str, Tensor]:
    white = torch.randn(examples, len(truth), generator=generator, dtype=torch.float64)
    chance = torch.rand(examples, generator=generator, dtype=torch.float64)
    signs = torch.where(chance < torch.sigmoid(white @ truth), 1.0, -1.0).double()
    return {"inputs": white * scales, "signs": signs}

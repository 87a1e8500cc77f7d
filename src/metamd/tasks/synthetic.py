"""Functions with a known optimum: random quadratics and the Rosenbrock valley, in double precision."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metamd.tasks.base import Config, Drawn, Evaluation, SolvedTask, Split, TaskFamily, check_config, draw_seed

_STORED = 8
"""Up to this dimension a quadratic's config holds its numbers; above, the seed they come from."""


def quadratic(
    means: Sequence[float] = (0.3, 14.0),
    *,
    start: float | Sequence[float] = 3.0,
    spread: float = 0.1,
    coupling: float = 0.3,
    tolerance: float = 1e-6,
    steps: int = 200,
) -> TaskFamily:
    """Random quadratics theta'Q theta - b'theta, with Hessian 2Q; the paper's first experiment.

    Q = C C', C lower triangular, C_ii = sqrt(mean_i) (1 + spread N(0, 1)), C_ij = coupling N(0, 1) below the diagonal,
    b ~ N(1, I). The optimum is Q^-1 b / 2. The paper leaves open how C is drawn: spread and coupling are our reading.

    Args:
        means: roughly the diagonal of Q, one number per dimension.
        start: theta_1, or one number for all its coordinates.
        spread: how much the diagonal of C varies.
        coupling: how large the rest of C is. The condition of Q grows exponentially with coupling and dimension: at the
            default and equal means about 20 in dimension 10 and a million in dimension 100; coupling / sqrt(dimension)
            keeps it below ten.
        tolerance: a run has arrived when the norm of its gradient is below this.
        steps: T.

    Example:
        >>> family = quadratic()
        >>> task = family.build(family.sample(torch.Generator().manual_seed(0)))
        >>> bool(task.loss(task.init(), task.batch(0)) > task.minimum())
        True
    """
    return Quadratic(tuple(means), start, (spread, coupling), tolerance, steps)


def rosenbrock(
    dimension: int = 2,
    *,
    start: float | Sequence[float] = (-1.2, 1.0),
    shift: float = 0.0,
    scale: float = 0.0,
    tolerance: float = 1e-6,
    steps: int = 500,
) -> TaskFamily:
    """The Rosenbrock function, or a family of shifted and scaled ones.

    f(theta) = sum_i 100 (x_{i+1} - x_i^2)^2 + (1 - x_i)^2, x = s * (theta - c), c ~ shift N(0, I), log s ~ scale N(0, I).
    As in the paper all tasks are the same function unless shift or scale is given. The optimum is c + 1/s.

    Args:
        dimension: at least 2.
        start: theta_1; a shorter sequence is repeated. The paper's is not published; (-1.2, 1) is the customary one.
        shift: how far the valleys lie apart.
        scale: how much the logarithms of the coordinates' scales vary.
        tolerance: a run has arrived when the norm of its gradient is below this.
        steps: T.
    """
    return Rosenbrock(dimension, start, (shift, scale), tolerance, steps)


class Quadratic(TaskFamily):
    """See `quadratic`."""

    counts_digits = True

    def __init__(
        self,
        means: tuple[float, ...],
        start: float | Sequence[float],
        spreads: tuple[float, float],
        tolerance: float,
        steps: int,
    ) -> None:
        super().__init__("quadratic", steps, shared_loss=True)
        if not means:
            raise ValueError("means must have one number per dimension, got none. Pass means=(0.3, 14.0) for the paper's.")
        if min(means) <= 0:
            raise ValueError(f"means must be positive, got {means}. They are the curvatures of a convex function.")
        self.means, self.spreads, self.tolerance = means, spreads, _positive(tolerance, "tolerance")
        self.start = _start(start, len(means))

    def sample(self, generator: torch.Generator) -> Config:
        """Q and b, or from dimension 9 the seed they come from."""
        seed = draw_seed(generator)
        if len(self.means) > _STORED:
            return {"family": self.name, "seed": seed}
        q, b = self._draw(seed)
        return {"family": self.name, "Q": q.tolist(), "b": b.tolist()}

    def build(self, config: Config) -> "QuadraticTask":
        """The quadratic of a config."""
        check_config(config, self.name, *(("seed",) if "seed" in config else ("Q", "b")))
        if "seed" in config:
            q, b = self._draw(config["seed"])
        else:
            q, b = (torch.tensor(config[k], dtype=torch.float64) for k in ("Q", "b"))
        n = len(self.means)
        if q.shape != (n, n) or b.shape != (n,):
            raise ValueError(
                f"Q and b must have dimension {n}, got {tuple(q.shape)} and {tuple(b.shape)}. Pass as many means."
            )
        return QuadraticTask(config, self, q, b)

    def describe(self) -> dict[str, Any]:
        """The settings."""
        spread, coupling = self.spreads
        settings = {"means": list(self.means), "start": self.start.tolist(), "spread": spread, "coupling": coupling}
        return {"family": self.name, **settings, "tolerance": self.tolerance, "steps": self.steps}

    def drawn(self) -> Drawn:
        """A new function; everything else is shared."""
        return Drawn("a quadratic with Q and b drawn anew", "none", "the same for all tasks", "none: every step sees it all")

    def _draw(self, seed: int) -> tuple[Tensor, Tensor]:
        generator, n = torch.Generator().manual_seed(seed), len(self.means)
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        diagonal = torch.tensor(self.means, dtype=torch.float64).sqrt() * (1 + self.spreads[0] * noise.diagonal())
        c = torch.diag(diagonal) + self.spreads[1] * noise.tril(-1)
        return c @ c.T, 1 + torch.randn(n, generator=generator, dtype=torch.float64)


class QuadraticTask(SolvedTask):
    """One quadratic; its batch is {Q, b}, the same at every step."""

    def __init__(self, config: Config, family: Quadratic, q: Tensor, b: Tensor) -> None:
        super().__init__(config, family.steps, family.tolerance)
        self.start, self.q, self.b = family.start, q, b

    def init(self) -> dict[str, Tensor]:
        """The family's start."""
        return {"theta": self.start.clone()}

    def batch(self, step: int) -> dict[str, Tensor]:
        """The whole problem."""
        return {"Q": self.q, "b": self.b}

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """theta'Q theta - b'theta."""
        theta = params["theta"]
        return theta @ (batch["Q"] @ theta) - batch["b"] @ theta

    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """The loss: every split is the function itself."""
        return Evaluation(float(self.loss(params, self.batch(0)).detach()))

    def optimum(self) -> dict[str, Tensor]:
        """Q^-1 b / 2."""
        return {"theta": torch.linalg.solve(2 * self.q, self.b)}


class Rosenbrock(TaskFamily):
    """See `rosenbrock`."""

    def __init__(
        self,
        dimension: int,
        start: float | Sequence[float],
        spreads: tuple[float, float],
        tolerance: float,
        steps: int,
    ) -> None:
        super().__init__("rosenbrock", steps, shared_loss=True)
        if dimension < 2:
            raise ValueError(f"dimension must be at least 2, got {dimension}. The function couples neighbours.")
        if min(spreads) < 0:
            raise ValueError(f"shift and scale must not be negative, got {spreads}. Leave them out for the plain function.")
        self.spreads, self.tolerance = spreads, _positive(tolerance, "tolerance")
        self.start = _start(start, dimension)

    def sample(self, generator: torch.Generator) -> Config:
        """The shift c and the scale s; no shift is 0, never -0, which would be another config."""
        c, log_s = torch.randn(2, len(self.start), generator=generator, dtype=torch.float64)
        shift, scale = self.spreads
        return {"family": self.name, "shift": (shift * c + 0.0).tolist(), "scale": (scale * log_s).exp().tolist()}

    def build(self, config: Config) -> "RosenbrockTask":
        """The function of a config."""
        check_config(config, self.name, "shift", "scale")
        c, s = (torch.tensor(config[k], dtype=torch.float64) for k in ("shift", "scale"))
        if not c.shape == s.shape == self.start.shape:
            raise ValueError(f"shift and scale must have {len(self.start)} numbers, got {c.numel()} and {s.numel()}.")
        return RosenbrockTask(config, self, c, s)

    def describe(self) -> dict[str, Any]:
        """The settings."""
        shift, scale = self.spreads
        settings = {"start": self.start.tolist(), "shift": shift, "scale": scale, "tolerance": self.tolerance}
        return {"family": self.name, **settings, "steps": self.steps}

    def drawn(self) -> Drawn:
        """A new valley, if they differ at all."""
        drawn = (
            "a valley with its shift and scale drawn anew" if any(self.spreads) else "the one function: all tasks are equal"
        )
        return Drawn(drawn, "none", "the same for all tasks", "none: every step sees it all")


class RosenbrockTask(SolvedTask):
    """One valley; its batch is {shift, scale}, the same at every step."""

    def __init__(self, config: Config, family: Rosenbrock, c: Tensor, s: Tensor) -> None:
        super().__init__(config, family.steps, family.tolerance)
        self.start, self.c, self.s = family.start, c, s

    def init(self) -> dict[str, Tensor]:
        """The family's start."""
        return {"theta": self.start.clone()}

    def batch(self, step: int) -> dict[str, Tensor]:
        """The whole problem."""
        return {"shift": self.c, "scale": self.s}

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """The sum over neighbours."""
        x = batch["scale"] * (params["theta"] - batch["shift"])
        here, there = x[:-1], x[1:]
        return (100 * (there - here**2) ** 2 + (1 - here) ** 2).sum()

    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """The loss: every split is the function itself."""
        return Evaluation(float(self.loss(params, self.batch(0)).detach()))

    def optimum(self) -> dict[str, Tensor]:
        """Where x is all ones."""
        return {"theta": self.c + 1 / self.s}


def _start(start: float | Sequence[float], dimension: int) -> Tensor:
    numbers = [start] if isinstance(start, int | float) else list(start)
    if not numbers or dimension % len(numbers):
        raise ValueError(
            f"start must be one number or one for each of {dimension} dimensions, got {len(numbers)}. Pass start=3.0, say."
        )
    return torch.tensor(numbers, dtype=torch.float64).repeat(dimension // len(numbers))


def _positive(value: float, what: str) -> float:
    if not value > 0:
        raise ValueError(f"{what} must be positive, got {value}. Pass {what}=1e-6, say.")
    return value

"""Families made of random numbers: quadratics, Rosenbrock valleys, logistic regressions and regressions on tables."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metamd.tasks.base import (
    Config,
    Drawn,
    Evaluation,
    Shuffle,
    SolvedTask,
    Split,
    Task,
    TaskFamily,
    check_config,
    draw_seed,
)
from metamd.tasks.sources import Arrays
from metamd.tasks.supervised import Recipe, SupervisedTask

_WHOLE = ("none", "the same for all tasks", "none: every step sees it all")
"""Data, initialisation and batches of a function of one vector."""

_STORED = 8
"""Up to this dimension a quadratic's config holds its numbers; above, the seed they come from."""


def quadratic(
    means: Sequence[float] = (0.3, 14.0),
    *,
    start: float | Sequence[float] = 3.0,
    spread: float = 0.1,
    coupling: float = 0.3,
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
        steps: T.

    Example:
        >>> family = quadratic()
        >>> task = family.build(family.sample(torch.Generator().manual_seed(0)))
        >>> bool(task.loss(task.init(), task.batch(0)) > task.minimum())
        True
    """
    if not means:
        raise ValueError("means must have one number per dimension, got none. Pass means=(0.3, 14.0) for the paper's.")
    if min(means) <= 0:
        raise ValueError(f"means must be positive, got {tuple(means)}. They are the curvatures of a convex function.")
    settings = {"means": list(means), "start": _start_vector(start, len(means)), "spread": spread, "coupling": coupling}
    return _Quadratic("quadratic", settings, steps, Drawn("a quadratic with Q and b drawn anew", *_WHOLE), _QuadraticTask)


def rosenbrock(
    dimension: int = 2,
    *,
    start: float | Sequence[float] = (-1.2, 1.0),
    shift: float = 0.0,
    scale: float = 0.0,
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
        steps: T.
    """
    if dimension < 2:
        raise ValueError(f"dimension must be at least 2, got {dimension}. The function couples neighbours.")
    if min(shift, scale) < 0:
        raise ValueError(
            f"shift and scale must not be negative, got {(shift, scale)}. Leave them out for the plain function."
        )
    varied = "a valley with its shift and scale drawn anew"
    drawn = Drawn(varied if shift or scale else "the one function: all tasks are equal", *_WHOLE)
    settings = {"start": _start_vector(start, dimension), "shift": shift, "scale": scale}
    return _Rosenbrock("rosenbrock", settings, steps, drawn, _RosenbrockTask, ("shift", "scale"))


def logistic(
    dimension: int = 10,
    *,
    examples: int = 1000,
    batch_size: int | None = 100,
    decades: float = 1.0,
    l2: float = 1e-3,
    steps: int = 200,
) -> TaskFamily:
    """Logistic regressions, each with its own truth and data.

    l(w, b) = mean_i log(1 + exp(-y_i (w'x_i + b))) + l2/2 (|w|^2 + b^2), y_i = +-1, x_i ~ N(0, diag(s^2)), s from 1 down to
    10^-decades in equal ratios. The labels follow a logistic model with w'x of unit variance. The bias is penalised too,
    so that the loss is strongly convex whatever is drawn.

    Args:
        dimension: features.
        examples: for training; as many again for validation and for test.
        batch_size: examples per step; None takes all of them.
        decades: how far the scales of the features are apart; the condition number is about its power of 100.
        l2: strength of the penalty. With 0 the optimum need not exist.
        steps: T.
    """
    batch_size = examples if batch_size is None else batch_size
    if dimension < 1 or examples < 1:
        raise ValueError(f"dimension and examples must be at least 1, got {dimension} and {examples}.")
    if not 1 <= batch_size <= examples:
        raise ValueError(f"batch_size must lie between 1 and the {examples} examples, got {batch_size}. Pass None for all.")
    if l2 < 0:
        raise ValueError(f"l2 must not be negative, got {l2}. Pass l2=1e-3, say.")
    settings = {"dimension": dimension, "examples": examples, "batch_size": batch_size, "decades": decades, "l2": l2}
    drawn = Drawn("a regression with its own truth", "drawn anew", "zero in all tasks", "drawn anew")
    return _Synthetic("logistic", settings, steps, drawn, _LogisticTask, ("data_seed", "batch_seed"))


def tabular(
    features: int = 8,
    *,
    width: int = 16,
    examples: int = 500,
    noise: float = 0.1,
    batch_size: int = 50,
    steps: int = 200,
) -> TaskFamily:
    """Small networks that learn what other random networks answer about rows of a table.

    y = v'tanh(W x) + noise N(0, 1), with W and v random per task; students have the same form and biases. The columns keep
    their units from task to task, from 1/3 to 3 in equal ratios. These units are what can be learned about the family.

    Args:
        features: columns.
        width: hidden units of teacher and student.
        examples: rows for training; as many again for validation and for test.
        noise: standard deviation beside an answer of about unit variance.
        batch_size: rows per step.
        steps: T.
    """
    sizes = {"features": features, "width": width, "examples": examples, "batch_size": batch_size}
    if min(sizes.values()) < 1 or batch_size > examples:
        raise ValueError(f"features, width, examples and batch_size must be positive, batch_size <= examples; got {sizes}.")
    drawn = Drawn("a teacher network drawn anew", "rows drawn anew", "drawn anew", "drawn anew")
    seeds = ("data_seed", "init_seed", "batch_seed")
    return _Synthetic("tabular", {**sizes, "noise": noise}, steps, drawn, _tabular_task, seeds)


class _Synthetic(TaskFamily):
    """A family whose tasks are a function of its settings and of the `keys` of their configs, which are seeds mostly."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        steps: int,
        drawn: Drawn,
        task: "Callable[[Config, _Synthetic], Task]",
        keys: Sequence[str] = (),
    ) -> None:
        super().__init__(name, steps, shared_loss=True)
        self.settings, self._drawn, self._task, self._keys = settings, drawn, task, keys

    def drawn(self) -> Drawn:
        return self._drawn

    def sample(self, generator: torch.Generator) -> Config:
        return {"family": self.name, **{key: draw_seed(generator) for key in self._keys}}

    def build(self, config: Config) -> Task:
        check_config(config, self.name, *self._keys)
        return self._task(config, self)

    def describe(self) -> dict[str, Any]:
        return {"family": self.name, **self.settings, "steps": self.steps}


class _Function(SolvedTask):
    """A function of one vector theta; the batch of every step is the whole function."""

    def __init__(self, config: Config, family: _Synthetic, whole: Mapping[str, Any]) -> None:
        super().__init__(config, family.steps)
        self.start = torch.tensor(family.settings["start"], dtype=torch.float64)
        self.whole = {key: torch.as_tensor(x, dtype=torch.float64) for key, x in whole.items()}

    def init(self) -> dict[str, Tensor]:
        return {"theta": self.start.clone()}

    def batch(self, step: int) -> dict[str, Tensor]:
        return dict(self.whole)

    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        return Evaluation(float(self.loss(params, self.whole).detach()))


class _Quadratic(_Synthetic):
    counts_digits = True

    def sample(self, generator: torch.Generator) -> Config:
        seed = draw_seed(generator)
        if len(self.settings["means"]) > _STORED:
            return {"family": self.name, "seed": seed}
        return {"family": self.name, **{key: x.tolist() for key, x in _quadratic_numbers(self.settings, seed).items()}}


def _quadratic_numbers(settings: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    means = torch.tensor(settings["means"], dtype=torch.float64)
    generator, n = torch.Generator().manual_seed(seed), len(means)
    noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
    diagonal = means.sqrt() * (1 + settings["spread"] * noise.diagonal())
    c = torch.diag(diagonal) + settings["coupling"] * noise.tril(-1)
    return {"Q": c @ c.T, "b": 1 + torch.randn(n, generator=generator, dtype=torch.float64)}


class _QuadraticTask(_Function):
    def __init__(self, config: Config, family: _Synthetic) -> None:
        if "seed" in config:
            whole: Mapping[str, Any] = _quadratic_numbers(family.settings, config["seed"])
        else:
            check_config(config, family.name, "Q", "b")
            whole = {"Q": config["Q"], "b": config["b"]}
        super().__init__(config, family, whole)
        n, q, b = len(self.start), tuple(self.whole["Q"].shape), tuple(self.whole["b"].shape)
        if (q, b) != ((n, n), (n,)):
            raise ValueError(f"Q and b must have dimension {n}, got {q} and {b}. Pass as many means.")

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        theta = params["theta"]
        return theta @ (batch["Q"] @ theta) - batch["b"] @ theta

    def optimum(self) -> dict[str, Tensor]:
        return {"theta": torch.linalg.solve(2 * self.whole["Q"], self.whole["b"])}


class _Rosenbrock(_Synthetic):
    def sample(self, generator: torch.Generator) -> Config:
        c, log_s = torch.randn(2, len(self.settings["start"]), generator=generator, dtype=torch.float64)
        shift, scale = self.settings["shift"], self.settings["scale"]
        # No shift is 0, never -0, which would be another config.
        return {"family": self.name, "shift": (shift * c + 0.0).tolist(), "scale": (scale * log_s).exp().tolist()}


class _RosenbrockTask(_Function):
    def __init__(self, config: Config, family: _Synthetic) -> None:
        n, shift, scale = len(family.settings["start"]), config["shift"], config["scale"]
        if [len(shift), len(scale)] != [n, n]:
            raise ValueError(f"shift and scale must have {n} numbers, got {len(shift)} and {len(scale)}.")
        super().__init__(config, family, {"shift": shift, "scale": scale})

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["scale"] * (params["theta"] - batch["shift"])
        here, there = x[:-1], x[1:]
        return (100 * (there - here**2) ** 2 + (1 - here) ** 2).sum()

    def optimum(self) -> dict[str, Tensor]:
        return {"theta": self.whole["shift"] + 1 / self.whole["scale"]}


def _start_vector(start: float | Sequence[float], dimension: int) -> list[float]:
    numbers = [start] if isinstance(start, int | float) else list(start)
    if not numbers or dimension % len(numbers):
        raise ValueError(
            f"start must be one number or one for each of {dimension} dimensions, got {len(numbers)}. Pass start=3.0, say."
        )
    return [float(x) for x in numbers] * (dimension // len(numbers))


class _LogisticTask(SolvedTask):
    """One regression; parameters `weight` and `bias` start at zero."""

    def __init__(self, config: Config, family: _Synthetic) -> None:
        settings = family.settings
        super().__init__(config, family.steps)
        self.l2, self.dimension, examples = settings["l2"], settings["dimension"], settings["examples"]
        self.shuffle = Shuffle(examples, settings["batch_size"], config["batch_seed"])
        generator = torch.Generator().manual_seed(config["data_seed"])
        scales = torch.logspace(0, -settings["decades"], self.dimension, dtype=torch.float64)
        truth = torch.randn(self.dimension, generator=generator, dtype=torch.float64)
        self.splits: dict[Split, dict[str, Tensor]] = {}
        for split in get_args(Split):
            white = torch.randn(examples, self.dimension, generator=generator, dtype=torch.float64)
            chance = torch.rand(examples, generator=generator, dtype=torch.float64)
            signs = torch.where(chance < torch.sigmoid(white @ (truth / truth.norm())), 1.0, -1.0).double()
            self.splits[split] = {"inputs": white * scales, "signs": signs}

    def init(self) -> dict[str, Tensor]:
        return {"weight": torch.zeros(self.dimension, dtype=torch.float64), "bias": torch.zeros((), dtype=torch.float64)}

    def batch(self, step: int) -> dict[str, Tensor]:
        rows = self.shuffle.indices(step)
        return {k: v[rows] for k, v in self.splits["train"].items()}

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        weight, bias = params["weight"], params["bias"]
        margins = batch["signs"] * (batch["inputs"] @ weight + bias)
        return F.softplus(-margins).mean() + self.l2 / 2 * (weight @ weight + bias**2)

    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        data = self.splits[split]
        right = data["signs"] * (data["inputs"] @ params["weight"] + params["bias"]) > 0
        return Evaluation(float(self.loss(params, data).detach()), float(right.double().mean()))

    def optimum(self) -> dict[str, Tensor]:
        # By Newton's method on all training examples, each step halved until the loss falls.
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


def _tabular_task(config: Config, family: _Synthetic) -> SupervisedTask:
    generator = torch.Generator().manual_seed(config["data_seed"])
    features, width, noise = (family.settings[key] for key in ("features", "width", "noise"))
    w = torch.randn(width, features, generator=generator) * (2 / features**0.5)
    v = torch.randn(width, generator=generator) / width**0.5
    splits: dict[Split, Arrays] = {}
    for split in get_args(Split):
        rows = torch.randn(family.settings["examples"], features, generator=generator)
        errors = noise * torch.randn(len(rows), generator=generator)
        splits[split] = rows * torch.logspace(0.5, -0.5, features), torch.tanh(rows @ w.T) @ v + errors
    recipe = Recipe(partial(_student, features, width), F.mse_loss, family.settings["batch_size"], family.steps)
    return SupervisedTask(config, recipe, splits)


def _student(features: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 1), nn.Flatten(0))

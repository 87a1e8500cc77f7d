"""Catalogues that laws run over, slow obvious references, and deliberately broken doubles that laws must reject."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from metamd.files.learned import Moments
from metamd.inner.closed_form import minimiser, moments_of
from metamd.inner.objectives import Regret
from metamd.inner.run import Trajectory
from metamd.potentials import Diagonal, Euclidean, MaxDiagonal, NegativeEntropy, PNorm, Potential
from metamd.potentials.base import Params
from metamd.potentials.basis import Basis
from metamd.potentials.forms import Array
from metamd.tasks import (
    Config,
    Evaluation,
    SolvedTask,
    Task,
    TaskFamily,
    logistic,
    quadratic,
    rosenbrock,
    starting_at,
    supervised,
    tabular,
)
from metamd.tasks.base import draw_seed


def closed_form(runs: Sequence[Trajectory], potential: MaxDiagonal, objective: Regret, weights: Any = None) -> Params:
    """The logarithms of the best metrics for these runs, by key."""
    moments = [moments_of(run, potential, objective) for run in runs]
    return minimiser(Moments.total(moments, weights or [1.0] * len(runs)), potential.log_d)


def draws(full: int) -> int:
    """How many random cases a law draws: all of them under `pytest -m slow`, a tenth otherwise."""
    return full if os.environ.get("METAMD_LAWS") == "full" else max(1, full // 10)


SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4), "scale": ()}


def normal_point(
    seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g, dtype=dtype) for n, s in shapes.items()}


def positive_point(seed: int) -> dict[str, Tensor]:
    return {n: x.abs() + 0.1 for n, x in normal_point(seed).items()}


def simplex_point(seed: int) -> dict[str, Tensor]:
    return {n: x.softmax(-1) for n, x in normal_point(seed, {"p": (5,), "rows": (3, 4)}).items()}


def randomised(potential: MaxDiagonal, seed: int, spread: float = 1.0, offsets: float = 0.0) -> MaxDiagonal:
    """The potential with random metrics, spread in the natural logarithm, and random offsets."""
    g = torch.Generator().manual_seed(seed)
    logs = {k: spread * torch.randn(v.shape, generator=g, dtype=v.dtype) for k, v in potential.log_d.items()}
    b = offsets * torch.randn(potential.pieces, generator=g, dtype=torch.float64)
    return potential.with_metrics(logs, b)


def diagonals(pieces: int, *, tying: str = "parameter", centre: str = "origin", offsets: float = 0.0) -> MaxDiagonal:
    params = normal_point(99)
    fresh = MaxDiagonal(pieces, tying=tying, centre=centre).bind(params)  # type: ignore[arg-type]
    return randomised(fresh, 7, offsets=offsets).bind(params)


class ValueOnly(Potential):
    """A user's own potential: nothing but a value, coupled across tensors."""

    def value(self, params: Params) -> Tensor:
        square = sum((x * x).sum() for x in params.values())
        return torch.cosh(0.1 * square) + 0.5 * square + sum((x**4).sum() for x in params.values())


POTENTIALS: dict[str, tuple[Potential, Callable[[int], dict[str, Tensor]]]] = {
    "euclidean": (Euclidean(), normal_point),
    "entropy-simplex": (NegativeEntropy(), simplex_point),
    "entropy-orthant": (NegativeEntropy("orthant"), positive_point),
    "p-norm-1.2": (PNorm(1.2), normal_point),
    "p-norm-2": (PNorm(2), normal_point),
    "diagonal": (diagonals(1), normal_point),
    "diagonal-channel": (diagonals(1, tying="channel"), normal_point),
    "max-3": (diagonals(3), normal_point),
    "max-3-offsets": (diagonals(3, offsets=3.0), normal_point),
    "max-3-start": (diagonals(3, centre="start"), normal_point),
    "max-5-role": (diagonals(5, tying="role"), normal_point),
    "max-2-column": (diagonals(2, tying="column", offsets=1.0), normal_point),
    "value-only": (ValueOnly(), normal_point),
}


class WrongMirror(Euclidean):
    """Misses the factor 1/2 between value and mirror."""

    def mirror(self, params: Params) -> dict[str, Tensor]:
        return {n: 2 * x for n, x in params.items()}


class NotConvex(Potential):
    """Its divergence is negative."""

    def value(self, params: Params) -> Tensor:
        return -sum((x * x).sum() for x in params.values())  # type: ignore[return-value]


class MaxOfDivergences(MaxDiagonal):
    """The paper's appendix: the divergence of a max taken for the max of divergences."""

    def divergence(self, u: Params, v: Params) -> Tensor:
        squares = torch.stack([(self.metric(n) * (u[n] - v[n]) ** 2).reshape(3, -1).sum(1) for n in u])
        return 0.5 * squares.sum(0).max()


def broken_max(kind: type[MaxDiagonal]) -> MaxDiagonal:
    good = diagonals(3)
    broken = kind(3, centre="origin")
    broken.table, broken.slots = good.table, good.slots
    return broken


def brute_force_weights(d: Array, y: Array, b: Array, rounds: int = 5000) -> tuple[Array, Array, float]:
    """The simplex problem by moving mass between two pieces at a time, bisecting in extended precision.

    Returns the weights, the point D(w)^-1 y, and by how much the optimality conditions are missed, relative to the forms.
    """
    real = np.longdouble
    d, y, b = d.astype(real), y.astype(real), b.astype(real)
    w = np.full(len(d), real(1) / len(d))

    def forms(weights):
        x = y / (weights @ d)
        return (d * x * x).sum(1) / 2 + b

    for _ in range(rounds):
        f = forms(w)
        up, down = int(np.argmax(f)), int(np.argmin(np.where(w > 0, f, np.inf)))
        if up == down or f[up] - f[down] <= 1e-17 * np.abs(f).max():
            break
        low, high = real(0), w[down]

        def excess(moved, w=w, up=up, down=down):
            v = w.copy()
            v[up], v[down] = w[up] + moved, w[down] - moved
            g = forms(v)
            return g[up] - g[down]

        if excess(high) >= 0:
            low = high
        for _ in range(130):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        w[up], w[down] = w[up] + low, w[down] - low if low < w[down] else real(0)
    f = forms(w)
    missed = (f.max() - f[w > 0].min()) / max(np.abs(f).max(), real(1e-300))
    return w, y / (w @ d), float(missed)


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def random_geometry(model: nn.Module, pieces: int = 3, seed: int = 3, **options: object) -> MaxDiagonal:
    """A mixture with random metrics for this model, with its names, as a learned file would carry."""
    fresh = (Diagonal(**options) if pieces == 1 else MaxDiagonal(pieces, **options)).bind(list(model.named_parameters()))  # type: ignore[arg-type]
    return randomised(fresh, seed)


def random_basis(
    start: Params,
    *,
    sides: Literal["right", "both"] = "right",
    rank: int | None = None,
    pieces: int = 1,
    seed: int = 0,
    centre: Literal["start", "origin"] = "start",
    scale: float = 0.5,
) -> MaxDiagonal:
    """A potential in a random basis with random metrics, bound."""
    generator = torch.Generator().manual_seed(seed)
    blank = MaxDiagonal(pieces, tying="tensor", centre=centre, basis=Basis(sides)).bind(start)
    factors = {}
    for place in blank.basis.places.values():
        for side in ("left", "right") if sides == "both" else ("right",):
            n = place.sizes[side]
            q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
            factors[f"{side}/{place.key}"] = q[:, : rank or n]
    basis = blank.basis.with_factors(factors)
    bound = MaxDiagonal(pieces, tying="tensor", centre=centre, basis=basis).bind(start)
    logs = {k: scale * torch.randn(v.shape, generator=generator, dtype=torch.float64) for k, v in bound.log_d.items()}
    offsets = 0.3 * torch.randn(pieces, generator=generator, dtype=torch.float64) if pieces > 1 else None
    return bound.with_metrics(logs, offsets).bind(start)


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int, seed: int = 0, first: int = 0) -> list[float]:
    """Fit a fixed random target; the batch of a step depends on its number alone."""
    dtype = next(model.parameters()).dtype
    losses = []
    for t in range(first, first + steps):
        g = torch.Generator().manual_seed(1000 * seed + t)
        x = torch.randn(16, 5, generator=g).to(dtype)
        target = torch.stack([x[:, 0] + x[:, 1], x[:, 2] * x[:, 3], x[:, 4].sin()], 1)
        optimiser.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def judged_run(task: Task, params: dict[str, Tensor], optimiser: Any, steps: int, schedule: Any = None) -> list[float]:
    """Train a task in an ordinary loop; the losses of the batches before each step, in eval mode, where it is left."""
    losses = []
    for t in range(steps):
        optimiser.eval()
        losses.append(float(task.loss(params, task.batch(t)).detach()))
        optimiser.train()
        optimiser.zero_grad()
        task.loss(params, task.batch(t)).backward()
        optimiser.step()
        if schedule is not None:
            schedule.step()
    optimiser.eval()
    return losses


def equal_parameters(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def labelled(examples: int, seed: int = 0, shape: tuple[int, ...] = (1, 6, 6), classes: int = 3) -> tuple[Tensor, Tensor]:
    """Images whose class shifts their mean, so that there is something to learn."""
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (examples,), generator=g)
    centres = torch.randn(classes, *shape, generator=g)
    return centres[targets] + torch.randn(examples, *shape, generator=g), targets


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))


def norm_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def dropout_model() -> nn.Module:
    head = (nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout2d(0.3), *head)


def images(make_model: Callable[[], nn.Module], **options: Any) -> TaskFamily:
    data = {"a": labelled(50, 1), "b": labelled(60, 2)}
    return supervised(make_model, data, **{"batch_size": 8, "steps": 20, **options})


FAMILIES: dict[str, Callable[[], TaskFamily]] = {
    "quadratic": quadratic,
    "quadratic-12": lambda: quadratic([1.0] * 12),
    "rosenbrock": lambda: rosenbrock(shift=0.5, scale=0.3),
    "rosenbrock-4": lambda: rosenbrock(4, start=0.5, shift=0.1),
    "logistic": lambda: logistic(4, examples=40, batch_size=10),
    "tabular": lambda: tabular(4, width=5, examples=40, batch_size=10),
    "supervised": lambda: images(plain_model),
    "supervised-start": lambda: starting_at(images(plain_model), dict(plain_model().named_parameters())),
    "supervised-norm": lambda: images(norm_model),
    "supervised-dropout": lambda: images(dropout_model),
}


class Toy(TaskFamily):
    """Noisy parabolas, as a user would write them; right, or with one named fault."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("toy", 10, shared_loss=True)
        self.fault = fault

    def sample(self, generator: torch.Generator) -> Config:
        centre: Any = float(torch.randn((), generator=None if self.fault == "global generator" else generator))
        if self.fault == "config with a tensor":
            centre = torch.tensor(centre)
        return {"centre": centre, "seed": draw_seed(generator)}

    def build(self, config: Config) -> "ToyTask":
        if self.fault == "random build":
            config = {**config, "centre": config["centre"] + float(torch.randn(()))}
        return ToyTask(config, self.fault)

    def describe(self) -> dict[str, Any]:
        return {"family": self.name, "steps": self.steps}


class ToyTask(SolvedTask):
    def __init__(self, config: Config, fault: str) -> None:
        super().__init__(config, 10)
        self.fault, self.calls, self.x = fault, 0, torch.zeros(2, dtype=torch.float64)

    def init(self) -> dict[str, Tensor]:
        if self.fault == "drifting start":
            self.x = self.x + 1
        return {"x": self.x if self.fault == "aliased start" else self.x.clone()}

    def batch(self, step: int) -> dict[str, Tensor]:
        self.calls += 1
        g = torch.Generator().manual_seed(self.config["seed"] + (self.calls if self.fault == "call order" else step))
        return {"centre": self.config["centre"] + torch.randn(2, generator=g, dtype=torch.float64)}

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        square = ((params["x"] - batch["centre"]) ** 2).sum()
        if self.fault == "detached loss":
            return square.detach() + 0 * params["x"].sum()
        if self.fault == "private loss":
            return square * self.config["centre"]
        return square + (self.calls if self.fault == "loss with memory" else 0)

    def evaluate(self, params: Mapping[str, Tensor], split: str = "test") -> Evaluation:
        return Evaluation(float(((params["x"] - self.config["centre"]) ** 2).sum()))

    def optimum(self) -> dict[str, Tensor]:
        off = 1 if self.fault == "wrong optimum" else 0
        return {"x": torch.full((2,), self.config["centre"] + off, dtype=torch.float64)}


def losses_of(task, params, optimiser, schedule, steps):
    """Train parameters on a task in an ordinary loop; the loss of every batch."""
    losses = []
    for t in range(steps):
        optimiser.zero_grad()
        loss = task.loss(params, task.batch(t))
        loss.backward()
        losses.append(float(loss.detach()))
        optimiser.step()
        schedule.step()
    return losses


NASTY = "<script>alert(1)</script> | [x](javascript:1) `$\\frac{` \x1b[31m\n# head"
"""A text from a record that tries to be markup, mathematics, a colour and a heading."""

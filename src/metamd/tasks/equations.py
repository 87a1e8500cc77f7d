"""A network per equation (physics-informed): Burgers' equation, and advection with diffusion as another one.

u(x, t) for x in [-1, 1] and t in [0, 1]. The loss is the mean squared residual of the equation at drawn places, plus those
of the initial and of the boundary values [Raissi2019].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from metamd.tasks.base import (
    Config,
    Drawn,
    Evaluation,
    Split,
    Task,
    TaskFamily,
    check_config,
    derive_seed,
    draw_seed,
    seeded,
)

Field = NDArray[np.float64]

GRID = (128, 51)
"""Places and times at which a solution is compared with the exact one, evenly spaced and with both ends."""

NODES = np.linspace(-14, 14, 561)
"""Nodes of the trapezoidal rule for integrals of exp(-s^2) f(s), f analytic. Twice as many give the same solutions."""


class SolutionNetwork(nn.Module):
    """u(x, t) by layers of tanh.

    Args:
        width: of the hidden layers.
        depth: how many of them.
    """

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(n, width) for n in (2, *[width] * (depth - 1)))
        self.output = nn.Linear(width, 1)
        for layer in (*self.hidden, self.output):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)


def solution(params: Mapping[str, Tensor], places: Tensor) -> Tensor:
    """u at places (number, 2) of x and t."""
    h = places
    for i in range(_depth(params)):
        h = torch.tanh(h @ params[f"hidden.{i}.weight"].T + params[f"hidden.{i}.bias"])
    return (h @ params["output.weight"].T + params["output.bias"])[:, 0]


def derivatives(params: Mapping[str, Tensor], places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, u_x, u_t and u_xx at places (number, 2), carried forward from layer to layer.

    With z' = W h' for every derivative of the inputs h of a layer, a = tanh z has a_x = (1 - a^2) z_x and
    a_xx = (1 - a^2) (z_xx - 2 a z_x^2). Three nested calls of autograd give the same and take several times as long.
    """
    x, t = (places.new_tensor(unit).expand_as(places) for unit in ((1.0, 0.0), (0.0, 1.0)))
    h, xx, count = places, torch.zeros_like(places), len(places)
    for i in range(_depth(params)):
        # One product for all four.
        z = torch.cat([h, x, t, xx]) @ params[f"hidden.{i}.weight"].T
        h, x, t, xx = torch.split(z, count)
        h = torch.tanh(h + params[f"hidden.{i}.bias"])
        slope = 1 - h * h
        xx = slope * (xx - 2 * h * x * x)
        x, t = slope * x, slope * t
    u, x, t, xx = torch.split((torch.cat([h, x, t, xx]) @ params["output.weight"].T)[:, 0], count)
    return u + params["output.bias"], x, t, xx


def _depth(params: Mapping[str, Tensor]) -> int:
    return len(params) // 2 - 1  # a weight and a bias for each layer, and for the output


# equations as tasks


class EquationTask(Task):
    """One equation with its initial and boundary values; every step sees all places."""

    splits = ("train", "test")

    def __init__(self, config: Config, family: "EquationFamily") -> None:
        super().__init__(config, family.steps)
        self.family = family
        generator = torch.Generator().manual_seed(derive_seed(config["data_seed"], "places"))
        inside = torch.rand(family.places, 2, generator=generator) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
        line = torch.linspace(0, 1, family.edges)
        start = torch.stack([2 * line - 1, torch.zeros_like(line)], 1)
        sides = [torch.stack([torch.full_like(line, side), line], 1) for side in (-1.0, 1.0)]
        edge = torch.cat([start, *sides])
        numbers = {key: torch.tensor(float(config[key])) for key in family.equation.keys}
        self.whole = {"inside": inside, "edge": edge, "known": self.exact(edge).float(), **numbers}

    def exact(self, places: Tensor) -> Tensor:
        """The solution at places (number, 2), in double precision."""
        x, t = places.double().numpy().T
        return torch.from_numpy(self.family.equation.exact(x, t, self.config))

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor]:
        """The grid, and the exact solution there."""
        grid = torch.cartesian_prod(torch.linspace(-1, 1, GRID[0]), torch.linspace(0, 1, GRID[1]))
        return grid, self.exact(grid)

    def init(self) -> dict[str, Tensor]:
        """Xavier's initialisation, drawn from the config's seed."""
        with seeded(self.config["init_seed"]):
            model = SolutionNetwork(self.family.width, self.family.depth)
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    def batch(self, step: int) -> dict[str, Tensor]:
        """All places, and the numbers of the equation."""
        return dict(self.whole)

    def loss(self, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Mean squared residual inside, plus mean squared error at the edges."""
        inside = self.family.equation.residual(derivatives(params, batch["inside"]), batch)
        error = solution(params, batch["edge"]) - batch["known"]
        return inside.square().mean() + error.square().mean()

    @torch.no_grad()
    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """The training loss; on other splits the error |u - exact| / |exact|, in the 2-norm on a grid, in its place."""
        if split == "train":
            return Evaluation(float(self.loss(params, self.whole)))
        grid, wanted = self.reference
        error = float((solution(params, grid).double() - wanted).norm() / wanted.norm())
        return Evaluation(error, None, {"relative L2 error": error})


class EquationFamily(TaskFamily):
    """Networks that solve one equation each; `sample` draws its numbers."""

    def __init__(self, name: str, equation: "Equation", sizes: Mapping[str, int], steps: int) -> None:
        if wrong := [f"{key}={value}" for key, value in sizes.items() if value < 2]:
            raise ValueError(f"width, depth, places and edges must be at least 2, got {', '.join(wrong)}.")
        super().__init__(name, steps, shared_loss=True)
        self.equation, self.sizes = equation, dict(sizes)
        self.width, self.depth, self.places, self.edges = (sizes[key] for key in ("width", "depth", "places", "edges"))

    def sample(self, generator: torch.Generator) -> Config:
        """The numbers of an equation, and seeds of the places and of the initialisation."""
        seeds = {"data_seed": draw_seed(generator), "init_seed": draw_seed(generator)}
        shares = torch.rand(len(self.equation.ranges), generator=generator, dtype=torch.float64).tolist()
        drawn = {}
        for (key, (low, high)), share in zip(self.equation.ranges.items(), shares, strict=True):
            # A viscosity matters by its order of magnitude.
            geometric = key == "viscosity"
            drawn[key] = low * (high / low) ** share if geometric else low + (high - low) * share
        return {"family": self.name, **drawn, **seeds}

    def build(self, config: Config) -> EquationTask:
        """The task of a config."""
        check_config(config, self.name, *self.equation.keys, "data_seed", "init_seed")
        return EquationTask(config, self)

    def drawn(self) -> Drawn:
        """An equation."""
        varied = " and ".join([", ".join(self.equation.keys[:-1]), self.equation.keys[-1]])
        domain = f"{self.equation.title} with {varied} drawn anew"
        return Drawn(domain, "places drawn anew", "drawn anew", "none: every step sees all places")

    def describe(self) -> dict[str, Any]:
        """The settings, and the ranges of the numbers."""
        ranges = {key: list(range_) for key, range_ in self.equation.ranges.items()}
        return {"family": self.name, **self.sizes, "steps": self.steps, "ranges": ranges}


@dataclass(frozen=True)
class Equation:
    """An equation: what its residual is from u, u_x, u_t, u_xx and its numbers, its solution, and where numbers lie."""

    title: str
    residual: Callable[[tuple[Tensor, Tensor, Tensor, Tensor], Mapping[str, Tensor]], Tensor]
    exact: Callable[[Field, Field, Mapping[str, Any]], Field]
    ranges: Mapping[str, tuple[float, float]]

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the numbers."""
        return tuple(self.ranges)


def burgers(*, width: int = 32, depth: int = 3, places: int = 1000, edges: int = 100, steps: int = 1000) -> EquationFamily:
    """Solve Burgers' equation u_t + u u_x = nu u_xx by a network, from initial values that form a shock.

    u(x, 0) = -a sin(pi x) + b sin(2 pi x) and u(-1, t) = u(1, t) = 0, for x from -1 to 1 and t from 0 to 1. A task draws the
    viscosity nu between 0.01 / pi and 0.1 / pi, evenly in its logarithm, a between 0.8 and 1.2 and b between -0.3 and 0.3,
    and its places. On validation and test the loss is the relative error in the 2-norm against the solution of Cole and
    Hopf.

    Args:
        width: of the hidden layers.
        depth: how many of them.
        places: at which the residual is taken, the same ones at every step.
        edges: places at the start, and at each of both ends.
        steps: T.
    """
    sizes = {"width": width, "depth": depth, "places": places, "edges": edges}
    ranges = {"viscosity": (0.01 / math.pi, 0.1 / math.pi), "first": (0.8, 1.2), "second": (-0.3, 0.3)}
    return EquationFamily("burgers", Equation("Burgers' equation", _burgers, cole_hopf, ranges), sizes, steps)


def advection(*, width: int = 32, depth: int = 3, places: int = 1000, edges: int = 100, steps: int = 1000) -> EquationFamily:
    """Solve advection with diffusion, u_t + c u_x = nu u_xx, by the network of `burgers`.

    u(x, 0) = a sin(pi x) + b sin(2 pi x), and both ends have the values of the exact solution: the same waves, moved by
    c t and damped. A task draws c between 0.5 and 1.5, nu between 0.01 and 0.1 evenly in its logarithm, a and b as
    `burgers`.

    Args:
        width: of the hidden layers.
        depth: how many of them.
        places: at which the residual is taken, the same ones at every step.
        edges: places at the start, and at each of both ends.
        steps: T.
    """
    sizes = {"width": width, "depth": depth, "places": places, "edges": edges}
    ranges = {"viscosity": (0.01, 0.1), "speed": (0.5, 1.5), "first": (0.8, 1.2), "second": (-0.3, 0.3)}
    return EquationFamily("advection", Equation("advection with diffusion", _advection, travelling, ranges), sizes, steps)


def _burgers(parts: tuple[Tensor, Tensor, Tensor, Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    u, u_x, u_t, u_xx = parts
    return u_t + u * u_x - numbers["viscosity"] * u_xx


def _advection(parts: tuple[Tensor, Tensor, Tensor, Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    _, u_x, u_t, u_xx = parts
    return u_t + numbers["speed"] * u_x - numbers["viscosity"] * u_xx


# exact solutions


def cole_hopf(x: Field, t: Field, numbers: Mapping[str, Any]) -> Field:
    """The solution of Burgers' equation from u_0(x) = -a sin(pi x) + b sin(2 pi x).

    By the transformation of Cole and Hopf, with F(y) = exp(-int_0^y u_0 / (2 nu)) and y = x - sqrt(4 nu t) s,
    u(x, t) = int u_0(y) F(y) exp(-s^2) ds / int F(y) exp(-s^2) ds [Basdevant1986].
    """
    nu, a, b = (float(numbers[key]) for key in ("viscosity", "first", "second"))
    y = x[:, None] - np.sqrt(4 * nu * t)[:, None] * NODES
    start = -a * np.sin(np.pi * y) + b * np.sin(2 * np.pi * y)
    integral = a * (np.cos(np.pi * y) - 1) / np.pi + b * (1 - np.cos(2 * np.pi * y)) / (2 * np.pi)
    logs = -integral / (2 * nu) - NODES**2
    weights = np.exp(logs - logs.max(1, keepdims=True))  # F alone overflows
    return (start * weights).sum(1) / weights.sum(1)


def travelling(x: Field, t: Field, numbers: Mapping[str, Any]) -> Field:
    """Both waves of `advection`, moved and damped."""
    nu, c, a, b = (float(numbers[key]) for key in ("viscosity", "speed", "first", "second"))
    waves = [size * np.exp(-nu * (k * np.pi) ** 2 * t) * np.sin(k * np.pi * (x - c * t)) for k, size in ((1, a), (2, b))]
    return waves[0] + waves[1]

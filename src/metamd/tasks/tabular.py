"""Regressions on tables, made by random teacher networks."""

from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metamd.tasks.base import Config, Drawn, Split, TaskFamily, check_config, draw_seed
from metamd.tasks.recipe import Recipe
from metamd.tasks.sources import Arrays
from metamd.tasks.supervised import SupervisedTask


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
    their units from task to task, from 1/3 to 3 in equal ratios: that is what there is to learn about the family.

    Args:
        features: columns.
        width: hidden units of teacher and student.
        examples: rows for training; as many again for validation and for test.
        noise: standard deviation beside an answer of about unit variance.
        batch_size: rows per step.
        steps: T.
    """
    sizes = {"features": features, "width": width, "examples": examples, "batch_size": batch_size}
    wrong = {k: v for k, v in sizes.items() if v < 1}
    if wrong or batch_size > examples:
        raise ValueError(f"features, width, examples and batch_size must be positive, batch_size <= examples; got {sizes}.")
    return Tabular(sizes, noise, steps)


class Tabular(TaskFamily):
    """See `tabular`."""

    def __init__(self, sizes: Mapping[str, int], noise: float, steps: int) -> None:
        super().__init__("tabular", steps, shared_loss=True)
        self.sizes, self.noise = sizes, noise
        features, width = sizes["features"], sizes["width"]

        def make_model() -> nn.Module:
            return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 1), nn.Flatten(0))

        self.recipe = Recipe(make_model, F.mse_loss, sizes["batch_size"], steps)

    def sample(self, generator: torch.Generator) -> Config:
        """Seeds of teacher and rows, of the student's initialisation, and of the batches."""
        return {"family": self.name, **{k: draw_seed(generator) for k in ("data_seed", "init_seed", "batch_seed")}}

    def build(self, config: Config) -> SupervisedTask:
        """The regression of a config."""
        check_config(config, self.name, "data_seed", "init_seed", "batch_seed")
        generator = torch.Generator().manual_seed(config["data_seed"])
        features, width = self.sizes["features"], self.sizes["width"]
        w = torch.randn(width, features, generator=generator) * (2 / features**0.5)
        v = torch.randn(width, generator=generator) / width**0.5
        splits: dict[Split, Arrays] = {split: self._draw(w, v, generator) for split in get_args(Split)}
        return SupervisedTask(config, self.recipe, splits)

    def describe(self) -> dict[str, Any]:
        """The settings."""
        return {"family": self.name, **self.sizes, "noise": self.noise, "steps": self.steps}

    def drawn(self) -> Drawn:
        """A new teacher with new rows."""
        return Drawn("a teacher network drawn anew", "rows drawn anew", "drawn anew", "drawn anew")

    def _draw(self, w: Tensor, v: Tensor, generator: torch.Generator) -> Arrays:
        rows = torch.randn(self.sizes["examples"], self.sizes["features"], generator=generator)
        noise = self.noise * torch.randn(len(rows), generator=generator)
        units = torch.logspace(0.5, -0.5, self.sizes["features"])
        return rows * units, torch.tanh(rows @ w.T) @ v + noise

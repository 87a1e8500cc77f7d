"""What a training problem is, and a family of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Config = Mapping[str, Any]
"""All that defines a task, in JSON's own types, so that it can be stored, hashed and built again."""

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Evaluation:
    """The quality of parameters on a whole split.

    Args:
        loss: mean loss.
        accuracy: share of right answers; None where there is no such thing.
    """

    loss: float
    accuracy: float | None = None


class Task(ABC):
    """One training problem: where it starts, its batches, and its loss.

    Everything is a pure function of the config: step t's batch can be had again at any time, which Hessian-vector
    products, recomputation, antithetic pairs and bit-exact resumption need.

    Args:
        config: what the task was built from.
        steps: T, the number of steps a run takes.
    """

    def __init__(self, config: Config, steps: int) -> None:
        self.config, self.steps = config, steps

    @abstractmethod
    def init(self) -> dict[str, Tensor]:
        """theta_1: fresh tensors by name, the same at every call."""

    @abstractmethod
    def batch(self, step: int) -> Any:
        """The batch of step t, counted from 0: any nest of tensors."""

    @abstractmethod
    def loss(self, params: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The loss on a batch, a scalar; a pure function, so that torch.func can differentiate it."""

    @abstractmethod
    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """Loss and accuracy on a whole split. Meta-training never asks for validation or test."""


class TaskFamily(ABC):
    """A distribution over tasks whose parameters have the same names.

    Args:
        name: for tables and headers.
        steps: T.
    """

    def __init__(self, name: str, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}. It is the number of training steps of one run.")
        self.name, self.steps = name, steps

    @abstractmethod
    def sample(self, generator: torch.Generator) -> Config:
        """Draw a task: random in the generator alone. Seeds of its initialisation and batches are in the config."""

    @abstractmethod
    def build(self, config: Config) -> Task:
        """The task of a config: deterministic."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The family's own settings in JSON's types, for the header of what is learned on it."""


def draw_seed(generator: torch.Generator) -> int:
    """A fresh seed for a part of a config."""
    return int(torch.randint(2**31 - 1, (1,), generator=generator))

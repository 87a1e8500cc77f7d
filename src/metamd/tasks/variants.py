"""A held-out side under a name of its own, and with initialisations of another size."""

from typing import Any

import torch

from metamd.tasks.base import Config, Drawn, Task, TaskFamily


class Variant(TaskFamily):
    """The tasks of a family, as a domain with a name of its own; they may begin further from the origin, or nearer.

    Args:
        family: what the tasks are.
        name: under which a comparison shows them.
        gain: the factor on the initial parameters.
    """

    def __init__(self, family: TaskFamily, name: str, gain: float = 1.0) -> None:
        if not gain > 0:
            raise ValueError(f"gain must be positive, got {gain}. Pass 1.0 to leave initialisations as they are.")
        super().__init__(name, family.steps, shared_loss=family.shared_loss)
        self.family, self.gain = family, gain

    def sample(self, generator: torch.Generator) -> Config:
        """As the family does."""
        return self.family.sample(generator)

    def build(self, config: Config) -> Task:
        """The family's task, with its initialisation scaled."""
        task = self.family.build(config)
        if self.gain != 1:
            init = task.init
            scaled = lambda: {n: self.gain * x for n, x in init().items()}  # noqa: E731
            setattr(task, "init", scaled)  # noqa: B010 - an attribute of this task alone
        return task

    def drawn(self) -> Drawn:
        """As the family does."""
        return self.family.drawn()

    def describe(self) -> dict[str, Any]:
        """The family's settings, and the gain."""
        return {**self.family.describe(), "variant": self.name, "gain": self.gain}

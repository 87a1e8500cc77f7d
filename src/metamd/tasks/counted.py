"""A family that knows what was done with it."""

import time
from typing import Any

import torch

from metamd.tasks.base import Config, Drawn, Task, TaskFamily, config_hash


def uncounted(family: TaskFamily) -> TaskFamily:
    """The family itself, to look at a task without counting it."""
    while isinstance(family, Counted):
        family = family.family
    return family


class Counted(TaskFamily):
    """A family that counts the batches asked of its tasks, one for each gradient evaluation, and remembers the tasks.

    Args:
        family: any.
    """

    def __init__(self, family: TaskFamily) -> None:
        super().__init__(family.name, family.steps, shared_loss=family.shared_loss)
        self.counts_digits = family.counts_digits
        self.family, self.batches, self.tasks = family, 0, dict[str, None]()
        self.seconds = 0.0

    def sample(self, generator: torch.Generator) -> Config:
        """As the family does."""
        return self.family.sample(generator)

    def build(self, config: Config) -> Task:
        """The family's task, whose batches are counted."""
        task = self.family.build(config)
        self.tasks[config_hash(config)] = None
        batch = task.batch

        def counted(step: int) -> Any:
            self.batches += 1
            return batch(step)

        setattr(task, "batch", counted)  # noqa: B010 - an attribute of this task alone
        return task

    def spent(self, batches: int, seconds: float) -> None:
        """Count work that was done before and is not done again.

        Args:
            batches: that were asked for.
            seconds: that it took.
        """
        self.batches += batches
        self.seconds += seconds
        if isinstance(self.family, Counted):
            self.family.spent(batches, seconds)

    def cost(self, began: float) -> dict[str, float]:
        """What was done with it, as a header says it.

        Args:
            began: `time.perf_counter()` at the beginning.
        """
        return {"gradient_evaluations": self.batches, "seconds": time.perf_counter() - began + self.seconds}

    def drawn(self) -> Drawn:
        """As the family does."""
        return self.family.drawn()

    def describe(self) -> dict[str, Any]:
        """As the family does."""
        return self.family.describe()

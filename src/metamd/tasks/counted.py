"""A family that knows what was done with it."""

from typing import Any

import torch

from metamd.tasks.base import Config, Task, TaskFamily, config_hash


class Counted(TaskFamily):
    """A family that counts the batches asked of its tasks, one for each gradient evaluation, and remembers the tasks.

    Args:
        family: any.
    """

    def __init__(self, family: TaskFamily) -> None:
        super().__init__(family.name, family.steps, shared_loss=family.shared_loss)
        self.family, self.batches, self.tasks = family, 0, dict[str, None]()

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

    def describe(self) -> dict[str, Any]:
        """As the family does."""
        return self.family.describe()

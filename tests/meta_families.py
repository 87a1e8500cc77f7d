"""Families for the tests of meta-training: tiny, poisoned, jealous of their validation data, of mixed shapes."""

import torch

from metamd.tasks import Config, Evaluation, Task, TaskFamily, quadratic
from metamd.tasks.base import draw_seed
from tests.small_tasks import NoisyCoordinate


class Wrapped(TaskFamily):
    """A family whose tasks are those of another, changed by a function of (task, config)."""

    def __init__(self, inner, change, name="wrapped"):
        super().__init__(name, inner.steps)
        self.inner, self.change = inner, change

    def sample(self, generator: torch.Generator) -> Config:
        return {"inner": dict(self.inner.sample(generator)), "mark": draw_seed(generator) % 1000}

    def build(self, config: Config) -> Task:
        task = self.inner.build(config["inner"])
        task.config = config
        self.change(task, config)
        return task

    def describe(self):
        return {"wrapped": self.inner.describe()}


def poisoned(inner, share=200):
    """Tasks with a mark below `share` (in thousandths) give NaN from step 5 on, whatever the metrics."""

    def change(task, config):
        batch = task.batch
        if config["mark"] < share:
            task.batch = lambda step: {k: v * (float("nan") if step >= 5 else 1.0) for k, v in batch(step).items()}

    return Wrapped(inner, change)


def jealous(inner):
    """Whoever asks for anything but training data gets an error."""

    def change(task, config):
        def refuse(params, split="test") -> Evaluation:
            raise AssertionError(f"meta-training asked for the {split} split")

        task.evaluate = refuse

    return Wrapped(inner, change)


class Mixed(TaskFamily):
    """Parabolas whose dimension is drawn too; options make the loss ignore a tensor or be NaN."""

    def __init__(self, dimensions=(2, 3), ignores=False, bad=False, steps=10):
        super().__init__("mixed", steps)
        self.dimensions, self.ignores, self.bad = dimensions, ignores, bad

    def sample(self, generator):
        index = int(torch.randint(len(self.dimensions), (1,), generator=generator))
        return {"dimension": self.dimensions[index], "seed": draw_seed(generator)}

    def build(self, config):
        return MixedTask(config, self)

    def describe(self):
        return {"dimensions": list(self.dimensions)}


class MixedTask(Task):
    def __init__(self, config, family):
        super().__init__(config, family.steps)
        self.family = family

    def init(self):
        g = torch.Generator().manual_seed(self.config["seed"])
        theta = 1 + torch.rand(self.config["dimension"], generator=g, dtype=torch.float64)
        return {"theta": theta} | ({"unused": torch.ones(2, dtype=torch.float64)} if self.family.ignores else {})

    def batch(self, step):
        return None

    def loss(self, params, batch):
        value = 5.0 * (params["theta"] ** 2).sum()
        return value * float("nan") if self.family.bad else value

    def evaluate(self, params, split="test"):
        raise AssertionError


def small(steps=60):
    return quadratic(steps=steps)


class Noisy(TaskFamily):
    """Tasks with a tensor of pure noise, which starves under the comparator at the end of the run."""

    def __init__(self, steps=50):
        super().__init__("noisy", steps)

    def sample(self, generator: torch.Generator) -> Config:
        return {"family": self.name, "seed": draw_seed(generator) % 10_000}

    def build(self, config: Config) -> Task:
        task = NoisyCoordinate(config["seed"], self.steps)
        task.config = config
        return task

    def describe(self):
        return {"steps": self.steps}

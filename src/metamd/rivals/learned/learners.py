"""Rivals that are learned on the family themselves: what a learner is, and the step with one rate for each coordinate."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from metamd.files.container import write_atomically
from metamd.files.usage import SCHEDULES, Schedule
from metamd.inner.run import Cost
from metamd.learning.parts import identity_of
from metamd.rivals.base import Named, Range, Rival, Setting, Stepper
from metamd.tasks.base import Task, TaskFamily, config_hash, derive_seed

Lesson = Callable[[TaskFamily, int], tuple[dict[str, Tensor], Cost]]
"""Learns tensors on a family under a seed, at a cost."""

FACTOR = Range(0.1, 10)
"""Of the factor on what was learned."""


@dataclass(frozen=True)
class Learner:
    """How a learned rival is learned, and how it steps.

    Args:
        name: on the command line and in records.
        title: in tables.
        learn: the tensors that were learned, from the family's training side.
        make: the optimiser from named parameters, tensors and setting.
        schedules: that it may be combined with.
    """

    name: str
    title: str
    learn: Lesson
    make: Callable[[Named, Mapping[str, Tensor], Setting], Stepper]
    schedules: tuple[Schedule, ...] = tuple(SCHEDULES)

    def rival(self, family: TaskFamily, seed: int = 0, path: Path | None = None) -> Rival:
        """Learn on a family, or read what was learned before.

        Args:
            family: its training side.
            seed: of everything random.
            path: a safetensors file to keep what was learned in; one that was learned on another family is refused.
        """
        learned_on = "" if path is None else lesson_code(family, seed)
        if path is not None and path.exists():
            tensors, cost = _read(path, learned_on)
        else:
            tensors, spent = self.learn(family, seed)
            # a Hessian-vector product is counted apart, as for our own learning
            cost = {
                "gradient_evaluations": float(spent.gradients),
                "hessian_vector_products": float(spent.hvps),
                "seconds": spent.seconds,
            }
            if path is not None:
                write_atomically(path, save(tensors, {"cost": json.dumps(cost), "learned_on": learned_on}))
        digest = hashlib.blake2b(digest_size=16)
        for n, x in sorted(tensors.items()):
            digest.update(n.encode() + x.contiguous().double().numpy().tobytes())

        def make(named: Named, setting: Setting) -> Stepper:
            return self.make(named, tensors, setting)

        space, defaults = {"lr": FACTOR}, {"lr": 1.0}
        return Rival(
            self.name,
            self.title,
            make,
            space,
            defaults,
            schedules=self.schedules,
            identity=digest.hexdigest(),
            cost=cost,
            domains=family.drawn().domains,
        )


def lesson_code(family: TaskFamily, seed: int) -> str:
    """A name for what a rival is learned from: the family, what is held out of it, and the seed.

    Args:
        family: its training side.
        seed: of the learning.
    """
    return config_hash({"family": identity_of(family), "seed": seed})[:16]


def _read(path: Path, learned_on: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}. Delete it to learn it anew.") from None
    if about.get("learned_on") != learned_on or "cost" not in about:
        raise ValueError(f"{str(path)!r} was learned on another family or with another seed. Delete it to learn it anew.")
    return tensors, json.loads(about["cost"])


class PerCoordinate:
    """theta <- theta - lr rate g, a rate for each coordinate.

    Args:
        named: the parameters.
        rates: by name.
        setting: `lr`, a factor.
    """

    def __init__(self, named: Named, rates: Mapping[str, Tensor], setting: Setting) -> None:
        misfits = [n for n, p in named if n not in rates or rates[n].shape != p.shape]
        if misfits:
            raise ValueError(f"the learned rates do not fit the parameter {misfits[0]!r}. Learn them on this model.")
        self.pairs = [(p, rates[n].to(p)) for n, p in named]
        self.param_groups: list[dict[str, Any]] = [{"lr": setting["lr"], "params": [p for _, p in named]}]

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for p, rate in self.pairs:
            assert p.grad is not None
            p.addcmul_(rate, p.grad, value=-self.param_groups[0]["lr"])


def sampled(family: TaskFamily, count: int, seed: int, purpose: str) -> Iterator[Task]:
    """Tasks to learn from, one after another.

    Args:
        family: its training side.
        count: how many.
        seed: of the draw.
        purpose: what for, so that every learner has its own.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, purpose))
    for _ in range(count):
        yield family.build(family.sample(generator))

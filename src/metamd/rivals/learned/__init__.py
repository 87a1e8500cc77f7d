"""Rivals that are learned on the family themselves: what a learner is, and the step with one rate for each coordinate."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metamd.files.container import Kind, strict_json
from metamd.files.progress import Progress
from metamd.files.usage import SCHEDULES, Schedule
from metamd.inner.run import Cost, Stepper
from metamd.learning.parts import identity_of
from metamd.rivals.base import NamedParameters, Range, Rival, Setting
from metamd.tasks.base import Task, TaskFamily, config_hash, derive_seed

FILE = Kind("learned rival", "metamd.rival")


@dataclass(frozen=True)
class Learner:
    """How a learned rival is learned, and how it steps.

    Args:
        name: on the command line and in records.
        title: in tables.
        learn: what it learns on the training side of a family under a seed, as tensors, and the gradients that took.
        make: the optimiser from named parameters, tensors and setting; its `lr` is a factor on what was learned.
        schedules: that it may be combined with.
    """

    name: str
    title: str
    learn: Callable[[TaskFamily, int], tuple[dict[str, Tensor], Cost]]
    make: Callable[[NamedParameters, Mapping[str, Tensor], Setting], Stepper]
    schedules: tuple[Schedule, ...] = tuple(SCHEDULES)

    def rival(self, family: TaskFamily, seed: int = 0, path: Path | None = None) -> Rival:
        """Learn on a family, or read what was learned before.

        Args:
            family: its training side.
            seed: of everything random.
            path: a file to keep what was learned in; one that was learned on another family is refused.
        """
        if path is not None and path.exists():
            tensors, cost = _read_rival(path, source(family, seed))
        else:
            began = time.perf_counter()
            tensors, spent = self.learn(family, seed)
            # a Hessian-vector product is counted apart, as for our own learning
            cost = {"gradient_evaluations": float(spent.gradients), "hessian_vector_products": float(spent.hvps)}
            cost["seconds"] = time.perf_counter() - began
            if path is not None:
                text = json.dumps({"cost": cost, "learned_on": source(family, seed)})
                FILE.write(path, text, tensors)
        digest = hashlib.blake2b(digest_size=16)
        for n, x in sorted(tensors.items()):
            digest.update(n.encode() + x.contiguous().double().numpy().tobytes())
        return Rival(
            self.name,
            self.title,
            lambda named, setting: self.make(named, tensors, setting),
            {"lr": Range(0.1, 10)},
            {"lr": 1.0},
            schedules=self.schedules,
            identity=digest.hexdigest(),
            cost=cost,
            domains=family.drawn().domains,
        )


def source(family: TaskFamily, seed: int) -> str:
    """A name for what a rival is learned from: the family, what is held out of it, and the seed."""
    return config_hash({"family": identity_of(family), "seed": seed})[:16]


def _read_rival(path: Path, learned_on: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    try:
        about, tensors = FILE.read(path, lambda text, tensors: (strict_json(text, "its text"), tensors))
        if about["learned_on"] != learned_on:
            raise ValueError(f"{str(path)!r} was learned on another family or with another seed.")
        return tensors, {k: float(about["cost"][k]) for k in about["cost"]}
    except ValueError as error:
        raise ValueError(f"{error} Delete it to learn it anew.") from None


class PerCoordinate:
    """theta <- theta - lr rate g, a rate for each coordinate."""

    def __init__(self, named: NamedParameters, rates: Mapping[str, Tensor], setting: Setting) -> None:
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
    """Tasks to learn from, one after another, with progress; every learner has its own, by its purpose."""
    generator = torch.Generator().manual_seed(derive_seed(seed, purpose))
    with Progress(f"learning {purpose} on {family.name}", count) as progress:
        for _ in range(count):
            yield family.build(family.sample(generator))
            progress.advance()

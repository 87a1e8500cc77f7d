"""What a training problem is, and a family of them."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

STEPS_LIMIT = 10**9
"""The most steps of one run: a forged file may ask for more."""

Config = Mapping[str, Any]
"""All that tells a task from the others of its family, in JSON's own types: it can be stored, hashed and built again."""

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Evaluation:
    """The quality of parameters on a whole split.

    Args:
        loss: mean loss.
        accuracy: share of right answers; None where there is no such thing.
        measures: what the field states beside or instead of a loss, by name and unit: `{"PSNR, dB": 31.2}`.
    """

    loss: float
    accuracy: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)


class Task(ABC):
    """One training problem: where it starts, its batches, and its loss.

    Everything is a pure function of the config, so that the batch of a step can be had again at any time. Hessian-vector
    products, recomputation, antithetic pairs and bit-exact resumption need that.

    Args:
        config: what the task was built from.
        steps: T, the number of steps a run takes.
    """

    splits: Collection[Split] = ()
    """The splits that `evaluate` has data for; none if it is the same for all of them."""

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
        """Loss and accuracy on a whole split.

        Meta-training evaluates no split. A usage of networks is judged on validation data too (`judged_on`), never on test
        data.
        """

    def monitor(self, examples: int = 2000) -> Callable[[Mapping[str, Tensor]], float]:
        """A function of the parameters: the loss on a fixed part of the training split, cheap enough to watch a run by.

        The loss of a batch would not do: the first of many noisy losses below a target comes too early. A task without
        examples to choose from takes the whole training split.

        Args:
            examples: how many, at most; the same ones for all tasks on the same data.
        """
        return lambda params: self.evaluate(params, "train").loss


class SolvedTask(Task):
    """A task whose best parameters are known."""

    @abstractmethod
    def optimum(self) -> dict[str, Tensor]:
        """theta_*, the minimiser of the training loss."""

    def minimum(self) -> float:
        """The training loss at the optimum."""
        return self.evaluate(self.optimum(), "train").loss

    def monitor(self, examples: int = 2000) -> Callable[[Mapping[str, Tensor]], float]:
        """How far the loss on the training split lies above its minimum; rounding may not take it below zero."""
        minimum = self.minimum()
        return lambda params: max(self.evaluate(params, "train").loss - minimum, 0.0)


@dataclass(frozen=True)
class Drawn:
    """What makes one task of a family differ from the next, in words: a statement about "the next task" is about such draws.

    Args:
        domain: which problem it is.
        data: which examples it has.
        initialisation: where it starts.
        batches: in which order it sees its data.
        domains: the names of the domains that tasks come from, where these are a fixed few.
    """

    domain: str = "not said by the family"
    data: str = "not said by the family"
    initialisation: str = "not said by the family"
    batches: str = "not said by the family"
    domains: tuple[str, ...] = ()


def require_family(family: object) -> None:
    """Refuse what is no family: the name of one, say."""
    if not isinstance(family, TaskFamily):
        raise TypeError(f"family must be a TaskFamily, got {type(family).__name__}. See metamd.tasks for some.")


class TaskFamily(ABC):
    """A distribution over tasks whose parameters have the same names.

    Args:
        name: for tables and headers, and in every config.
        steps: T.
        shared_loss: whether the loss of any task serves all of them, because what tells tasks apart is in the batch;
            tasks can then run together, `torch.func.vmap(task.loss)` over their stacked parameters and batches.
    """

    counts_digits: bool = False
    """Whether losses are convex and the same at every step, so that what counts is how many of their digits are right."""

    def __init__(self, name: str, steps: int, *, shared_loss: bool = False) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}. It is the number of training steps of one run.")
        if steps > STEPS_LIMIT:
            raise ValueError(f"steps must be at most {STEPS_LIMIT:,}, got {steps:.3g}. Pass fewer (--steps).")
        self.name, self.steps, self.shared_loss = name, steps, shared_loss

    @abstractmethod
    def sample(self, generator: torch.Generator) -> Config:
        """Draw a task: random in the generator alone. Seeds of its initialisation and batches are in the config."""

    @abstractmethod
    def build(self, config: Config) -> Task:
        """The task of a config: deterministic."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The family's own settings in JSON's types, for the header of what is learned on it."""

    def drawn(self) -> Drawn:
        """What `sample` draws anew for each task, and what all tasks share."""
        return Drawn()

    def example(self) -> dict[str, Tensor]:
        """Parameters as a task of this family has them, to bind a potential or to compare shapes; nothing is trained."""
        return self.build(self.sample(torch.Generator().manual_seed(0))).init()


def draw_seed(generator: torch.Generator) -> int:
    """A fresh seed for a part of a config."""
    return int(torch.randint(2**31 - 1, (1,), generator=generator))


def derive_seed(*parts: int | str) -> int:
    """A seed for one purpose out of a config's seed and the purpose's name: same parts, same seed, on every machine."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block torch's global generators start from a seed; after it they go on as if nothing had happened."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def config_hash(config: Config) -> str:
    """A name for a config that does not depend on the order of its keys: blake2b over its canonical JSON.

    Example:
        >>> config_hash({"a": 1, "b": [2.0]}) == config_hash({"b": [2.0], "a": 1})
        True
    """
    try:
        text = json.dumps(dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise ValueError(f"A config must be made of JSON's types and finite numbers: {e}. Store lists, not tensors.") from e
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def domain_of(config: Config) -> str:
    """The domain, dataset or series that a config names; without one, its family."""
    return str(next((config[key] for key in ("domain", "dataset", "series", "family") if key in config), ""))


def check_config(config: Config, family: str, *keys: str) -> None:
    """Refuse the config of another family, or one with parts missing."""
    if config.get("family") != family:
        raise ValueError(
            f"The config of a task of {family!r} is required, got one of {config.get('family')!r}. "
            f"Build a config with the family that sampled it."
        )
    if missing := [k for k in keys if k not in config]:
        raise ValueError(
            f"A config of {family!r} needs {', '.join(keys)}; {', '.join(missing)} is missing. Sample a new one."
        )


class Shuffle:
    """Batches without replacement, a pure function of (seed, step): a new permutation per epoch, its ragged end left out."""

    def __init__(self, examples: int, batch_size: int, seed: int) -> None:
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self._last: tuple[int, Tensor] | None = None

    def indices(self, step: int) -> Tensor:
        """The examples of a step, counted from 0."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}. The first batch is that of step 0.")
        epoch, place = divmod(step, self.examples // self.batch_size)
        # Steps mostly come in order, so the last permutation is kept: it saves time and changes nothing.
        if self._last is None or self._last[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            self._last = epoch, torch.randperm(self.examples, generator=generator)
        return self._last[1][place * self.batch_size : (place + 1) * self.batch_size]

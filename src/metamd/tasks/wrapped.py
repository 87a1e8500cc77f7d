"""Families made from others: with one start for all tasks, with a name of their own, with their batches counted."""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

from metamd.files.limits import open_regular
from metamd.files.text import brief
from metamd.potentials.tying import clean_names
from metamd.tasks.base import Config, Drawn, Task, TaskFamily, config_hash


def starting_at(family: TaskFamily, start: Mapping[str, Tensor] | str | Path) -> "SharedStart":
    """The same family with every task beginning at these parameters instead of an initialisation of its own.

    Args:
        family: any; tasks keep their data, their batches and their configs.
        start: the parameters by name, or the path of a checkpoint that holds them: safetensors, or what `torch.save` made
            of a state_dict. Names may have the prefixes of DDP and torch.compile; what the tasks do not train is ignored.

    Example:
        >>> from metamd.tasks import quadratic
        >>> family = starting_at(quadratic(), {"theta": torch.tensor([1.0, -1.0], dtype=torch.float64)})
        >>> family.example()["theta"]
        tensor([ 1., -1.], dtype=torch.float64)
    """
    named = read_parameters(Path(start)) if isinstance(start, str | Path) else start
    given = clean_names(list(named.items()), None)
    wanted = family.example()
    for name, x in wanted.items():
        shape = tuple(given[name].shape) if name in given else "missing"
        if shape != tuple(x.shape):
            raise ValueError(
                f"start must have every trained parameter of the model in its shape; {name!r} should be {tuple(x.shape)} "
                f"and is {shape}. Pass dict(model.named_parameters())."
            )
        if not bool(torch.isfinite(given[name]).all()):
            raise ValueError(f"start must be finite, and {name!r} is not. Take an earlier checkpoint.")
    return SharedStart(family, {n: given[n].detach().to(x).clone() for n, x in wanted.items()})


class Wrapped(TaskFamily):
    """A family whose tasks differ in one respect from those of another, and which may have another name."""

    def __init__(self, family: TaskFamily, name: str | None = None) -> None:
        super().__init__(name or family.name, family.steps, shared_loss=family.shared_loss)
        self.family, self.counts_digits = family, family.counts_digits

    def sample(self, generator: torch.Generator) -> Config:
        """A task as the family draws it."""
        return self.family.sample(generator)

    def build(self, config: Config) -> Task:
        """The family's task, changed."""
        task = self.family.build(config)
        vars(task).update(self.changed(task))
        return task

    @abstractmethod
    def changed(self, task: Task) -> dict[str, Callable[..., Any]]:
        """The methods of this task that replace those of its class."""

    def drawn(self) -> Drawn:
        """What the family draws."""
        return self.family.drawn()

    def describe(self) -> dict[str, Any]:
        """The family's settings."""
        return self.family.describe()


class SharedStart(Wrapped):
    """See `starting_at`. A start may be a function, called when first needed; a start that the family had is dropped."""

    def __init__(self, family: TaskFamily, start: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(family.family if isinstance(family, SharedStart) else family)
        self._start = start

    @cached_property
    def start(self) -> Mapping[str, Tensor]:
        """theta_1."""
        return self._start() if callable(self._start) else self._start

    def of(self, family: TaskFamily) -> "SharedStart":
        """Another family from the same start, which is found once for both."""
        return SharedStart(family, partial(getattr, self, "start"))  # a partial can be pickled

    def held_out(self) -> "SharedStart":
        """The held-out side, from the same start."""
        side = getattr(self.family, "held_out", None)
        if side is None:
            raise ValueError(f"{self.name} has no held-out side. Sample tasks that training did not use instead.")
        return self.of(side())

    def changed(self, task: Task) -> dict[str, Callable[..., Any]]:
        """The task begins at a copy of the start."""
        return {"init": partial(_copies, self.start)}

    def drawn(self) -> Drawn:
        """What the family draws, except the initialisation."""
        return replace(self.family.drawn(), initialisation="the same model for all tasks")

    def describe(self) -> dict[str, Any]:
        """The family's settings and a hash of the start."""
        content = b"".join(name.encode() + x.double().cpu().numpy().tobytes() for name, x in sorted(self.start.items()))
        digest = blake2b(content, digest_size=8).hexdigest()
        return {**self.family.describe(), "start": "shared", "start_hash": digest}


Solved = Sequence[tuple[Config, Mapping[str, Tensor]]]
"""Tasks by their configs, each with its solution."""


class NearestStart(Wrapped):
    """Every task begins at the solution of the nearest task among those that were solved before; its own does not count.

    Args:
        family: whose tasks begin elsewhere.
        solved: finds the solutions when a task is first built.
        distance: between the configs of two tasks.
    """

    def __init__(
        self, family: TaskFamily, solved: Callable[[], Solved], distance: Callable[[Config, Config], float]
    ) -> None:
        super().__init__(family)
        self._solved, self.distance = solved, distance

    @cached_property
    def solved(self) -> Solved:
        """The solutions, found once."""
        return self._solved()

    def changed(self, task: Task) -> dict[str, Callable[..., Any]]:
        """The task begins at a copy of the nearest solution."""
        others = [(config, start) for config, start in self.solved if config_hash(config) != config_hash(task.config)]
        if not others:
            raise ValueError(f"{self.name} has no solved task to begin a run from but the task itself. Solve two at least.")
        _, start = min(others, key=lambda pair: self.distance(pair[0], task.config))
        return {"init": partial(_copies, start)}

    def drawn(self) -> Drawn:
        """What the family draws, except the initialisation."""
        return replace(self.family.drawn(), initialisation="the solution of the nearest solved task")

    def describe(self) -> dict[str, Any]:
        """The family's settings, and where tasks begin."""
        return {**self.family.describe(), "start": "nearest solution"}


class Variant(Wrapped):
    """The tasks of a family as a domain with a name of its own, their initial parameters multiplied by `gain`."""

    def __init__(self, family: TaskFamily, name: str, gain: float = 1.0) -> None:
        if not gain > 0:
            raise ValueError(f"gain must be positive, got {gain}. Pass 1.0 to leave initialisations as they are.")
        super().__init__(family, name)
        self.gain = gain

    def changed(self, task: Task) -> dict[str, Callable[..., Any]]:
        """The initialisation is scaled."""
        init = task.init
        return {} if self.gain == 1 else {"init": lambda: {n: self.gain * x for n, x in init().items()}}

    def describe(self) -> dict[str, Any]:
        """The family's settings, and the gain."""
        return {**self.family.describe(), "variant": self.name, "gain": self.gain}


class Watcher(Protocol):
    """What is told of the batches that a `Counted` family counts."""

    def count(self, batches: int, seconds: float) -> None:
        """Batches, and seconds spent before."""


class Counted(Wrapped):
    """A family that counts the batches asked of its tasks, one for each gradient evaluation, and remembers the tasks."""

    def __init__(self, family: TaskFamily) -> None:
        super().__init__(family)
        self.batches, self.seconds, self.tasks = 0, 0.0, dict[str, None]()
        self.watcher: Watcher | None = None

    def changed(self, task: Task) -> dict[str, Callable[..., Any]]:
        """The task's batches are counted."""
        self.tasks[config_hash(task.config)] = None
        batch = task.batch

        def counted(step: int) -> Any:
            self._count(1, 0.0)
            return batch(step)

        return {"batch": counted}

    def spent(self, batches: int, seconds: float) -> None:
        """Count work that was done before, which took some seconds, or in another process."""
        self._count(batches, seconds)
        if isinstance(self.family, Counted):
            self.family.spent(batches, seconds)

    def _count(self, batches: int, seconds: float) -> None:
        self.batches += batches
        self.seconds += seconds
        if self.watcher is not None:
            self.watcher.count(batches, seconds)

    def cost(self, began: float) -> dict[str, float]:
        """The work since `time.perf_counter()` was `began`, as headers state it."""
        return {"gradient_evaluations": self.batches, "seconds": time.perf_counter() - began + self.seconds}


def uncounted(family: TaskFamily) -> TaskFamily:
    """The family itself, to look at a task without counting it."""
    while isinstance(family, Counted):
        family = family.family
    return family


def read_parameters(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint (safetensors, or a state_dict by `torch.save`), without executing anything in it."""
    try:
        open_regular(path).close()  # a pipe would wait for ever
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {path}. Name a file with the parameters to start from.") from None
    except Exception as e:
        raise ValueError(
            f"{path} could not be read as a checkpoint of tensors alone: {brief((str(e).splitlines() or [''])[0], 400)} "
            "Save model.state_dict() with torch.save or safetensors."
        ) from e
    for key in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ValueError(f"{path} must hold parameters by name. Save model.state_dict() with torch.save or safetensors.")
    return found


def _copies(start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.clone() for n, x in start.items()}

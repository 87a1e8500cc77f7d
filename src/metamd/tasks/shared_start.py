"""Families whose tasks all begin at one given model: nightly retrains, one model per customer, fine-tuning."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from metamd.files.start import LearnedStart
from metamd.potentials.tying import clean_names
from metamd.tasks.base import Config, Drawn, Task, TaskFamily


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
    inner = family.family if isinstance(family, SharedStart) else family
    return SharedStart(inner, {n: given[n].detach().to(x).clone() for n, x in wanted.items()})


class Late:
    """A start that is found when it is first asked for, and then kept.

    Args:
        find: finds it.
    """

    def __init__(self, find: Callable[[], Mapping[str, Tensor]]) -> None:
        self.find = find

    @cached_property
    def value(self) -> Mapping[str, Tensor]:
        """The start."""
        return self.find()


class SharedStart(TaskFamily):
    """See `starting_at`.

    Args:
        family: what the tasks are.
        start: theta_1 of all of them, or what finds it once it is needed.
    """

    def __init__(self, family: TaskFamily, start: "Mapping[str, Tensor] | Late") -> None:
        super().__init__(family.name, family.steps, shared_loss=family.shared_loss)
        self.counts_digits = family.counts_digits
        self.family = family
        self._start = start if isinstance(start, Late | LearnedStart) else dict(start)

    @property
    def start(self) -> Mapping[str, Tensor]:
        """theta_1."""
        return self._start.value if isinstance(self._start, Late) else self._start

    def held_out(self) -> "SharedStart":
        """The held-out side, from the same start."""
        side = getattr(self.family, "held_out", None)
        if side is None:
            raise ValueError(f"{self.name} has no held-out side. Sample tasks that training did not use instead.")
        return SharedStart(side(), self._start)

    def sample(self, generator: torch.Generator) -> Config:
        """As the family does."""
        return self.family.sample(generator)

    def build(self, config: Config) -> Task:
        """The family's task, with this start."""
        task = self.family.build(config)
        setattr(task, "init", partial(_copies, self.start))  # noqa: B010 - an attribute of this task alone
        return task

    def drawn(self) -> Drawn:
        """As the family, from the shared start."""
        return replace(self.family.drawn(), initialisation="the same model for all tasks")

    def describe(self) -> dict[str, Any]:
        """The family's settings and a hash of the start."""
        digest = blake2b(digest_size=8)
        for name, x in sorted(self.start.items()):
            digest.update(name.encode() + x.double().cpu().numpy().tobytes())
        return {**self.family.describe(), "start": "shared", "start_hash": digest.hexdigest()}


def read_parameters(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, without executing anything in it.

    Args:
        path: a safetensors file, or one that `torch.save` wrote of a state_dict, bare or under "model" or "state_dict".
    """
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {path}. Name a file with the parameters to start from.") from None
    except Exception as e:
        raise ValueError(
            f"{path} could not be read as a checkpoint of tensors alone: {str(e).splitlines()[0]} "
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

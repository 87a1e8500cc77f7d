"""A start that was learned: the parameters, the tasks that they are from, and what finding them has cost."""

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metamd.files.container import AGAIN, pack, read_checked, strict_json, write_atomically

FACTS_KEY, CHECKSUM_KEY = "metamd.start", "metamd.checksum"


class LearnedStart(dict[str, Tensor]):
    """Parameters by name, as `metamd.learn_start` finds them; `LearnedOptimiser.with_start` takes the rest from it too.

    Args:
        params: by name.
        tasks: hashes of the tasks that they were learned on.
        cost: of learning them, as headers have it.
    """

    def __init__(
        self, params: Mapping[str, Tensor], tasks: Iterable[str] = (), cost: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(params)
        self.tasks, self.cost = tuple(tasks), dict(cost or {})

    def save(self, path: str | Path) -> None:
        """Write it whole or not at all.

        Args:
            path: where; conventionally `*.safetensors`.
        """
        # safetensors has an order of its own
        text = json.dumps({"names": list(self), "tasks": list(self.tasks), "cost": self.cost}, allow_nan=False)
        tensors = {n: x.detach().cpu().contiguous() for n, x in self.items()}
        write_atomically(Path(path), pack(tensors, {FACTS_KEY: text, CHECKSUM_KEY: _checksum(text, tensors)}))

    @classmethod
    def load(cls, path: str | Path) -> "LearnedStart":
        """Read what `save` wrote; nothing in it is executed.

        Args:
            path: of the file.
        """
        container = read_checked(Path(path))
        text = container.metadata.get(FACTS_KEY, "")
        if container.metadata.get(CHECKSUM_KEY) != _checksum(text, container.tensors):
            raise ValueError(f"{str(path)!r} cannot be loaded: its content does not match its checksum. {AGAIN}")
        facts: dict[str, Any] = strict_json(text, f"the record of {str(path)!r}")
        return cls({name: container.tensors[name] for name in facts["names"]}, facts["tasks"], facts["cost"])


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0")
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""The processes that share the tasks of an outer step; alone, there is one and nothing is sent."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Workers:
    """The processes of `torch.distributed`, as one of them sees them.

    Every process holds the same state and makes the same decisions from the same sums, so that nothing else has to be sent.

    Args:
        rank: which one this is.
        size: how many there are.

    Example:
        >>> Workers(rank=1, size=3).mine(5)
        range(1, 5, 3)
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def present(cls) -> "Workers":
        """Those of the process group, if one was set up."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def mine(self, count: int) -> range:
        """Which of so many tasks this process runs; the last processes may have one less than the first."""
        return range(self.rank, count, self.size)

    def total(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all processes, in float64.

        Args:
            sums: of this process, with the same names and shapes on all of them.
        """
        wide = {n: x.double() for n, x in sums.items()}
        if self.size == 1 or not wide:
            return wide
        names = sorted(wide)
        flat = torch.cat([wide[n].reshape(-1) for n in names])
        dist.all_reduce(flat)
        parts = torch.split(flat, [wide[n].numel() for n in names])
        return {n: p.reshape(wide[n].shape) for n, p in zip(names, parts, strict=True)}

    def gather(self, mine: Mapping[int, Any], count: int) -> list[Any]:
        """What every task had to say, in the order of the tasks.

        Args:
            mine: by task, from this process.
            count: of all tasks.
        """
        found = dict(mine)
        if self.size > 1:
            parts: list[Any] = [None] * self.size
            dist.all_gather_object(parts, found)
            found = {i: value for part in parts for i, value in part.items()}
        return [found[i] for i in range(count)]

    def share(self, value: Any) -> Any:
        """What the first process has, on all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def join(backend: str) -> None:
    """Join the other processes that torchrun started.

    Processes that come back after a kill must not find the addresses of those that died, which torchrun's store still has:
    every restart has a part of the store to itself.

    Args:
        backend: "gloo" or "nccl".
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"metamd/{attempt}", server)  # type: ignore[attr-defined]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)

"""Cells on a Ray cluster: actors hold the cells and compute one after another; this process writes the records."""

import ipaddress
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from metamd.comparison.parallel import ATTEMPTS, Cell
from metamd.files.store import Records, Result

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Read when ray is imported: "0" has it listen on loopback alone. Told an address of loopback, it takes the machine's."""

PATIENCE = 5.0
"""Seconds until somebody has to answer."""


def fill_with_ray(
    records: Records, cells: Sequence[Cell], *, address: str, workers: int, advance: Callable[[str], None]
) -> None:
    """Compute cells on a cluster; one whose actor dies is begun again on another.

    What cells compute with is sent to every actor once. Records are written here, and so are files that come with a result,
    so that no folder is shared.

    Args:
        records: where results are kept.
        cells: those that are missing.
        address: of the cluster's head, or "local" to start one on this machine, on loopback and without its dashboard.
        workers: actors, of one CPU each.
        advance: called with the name of every cell that is there.
    """
    if address == "local":
        os.environ.setdefault(LOOPBACK, "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("--ray needs the ray package, which is not installed. Run: pip install 'metamd[ray]'") from None
    with _cluster(ray, address, workers):
        # an actor is restarted with the same cells, and its call is made again, so often
        kind = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=ATTEMPTS - 1)(Computer)
        shared = ray.put([cell.compute for cell in cells])
        actors = [kind.remote(shared) for _ in range(min(workers, len(cells)))]
        waiting, running = deque(range(len(cells))), {}

        def give(actor: Any) -> None:
            if waiting:
                index = waiting.popleft()
                running[actor.compute.remote(index)] = (actor, index)

        for actor in actors:
            give(actor)
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            actor, index = running.pop(done)
            name = cells[index].name
            try:
                trouble, result = ray.get(done)
            except ray.exceptions.RayError as error:
                raise ChildProcessError(f"the actor of {name!r} was lost {ATTEMPTS} times: {error}") from None
            if trouble is not None:
                raise ValueError(trouble[1]) if trouble[0] else RuntimeError(f"{name}: {trouble[1]}")
            records.cell(name, partial(cells[index].kept, result))
            advance(name)
            give(actor)


class Computer:
    """What runs on the cluster.

    Args:
        makers: of all cells that there are to compute.
    """

    def __init__(self, makers: Sequence[Callable[[], Result]]) -> None:
        import torch

        torch.set_num_threads(1)
        self.makers = makers

    def compute(self, index: int) -> tuple[tuple[bool, str] | None, Result]:
        """One of the cells, or what went wrong and whether it is the caller's fault.

        Args:
            index: of the cell.
        """
        try:
            return None, self.makers[index]()
        except (ValueError, OSError) as error:
            return (True, str(error)), {}
        except Exception as error:
            return (False, repr(error)), {}


def _knock(address: str) -> None:
    """Refuse an address at which nobody answers: Ray itself would ask for many minutes.

    Args:
        address: of the cluster's head; "auto" and those with a scheme are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in address:
        return
    try:
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"there is no Ray cluster at {address!r}: {error}. Start one with `ray start --head`.") from None


@contextmanager
def _cluster(ray: Any, address: str, workers: int) -> Iterator[None]:
    ours = not ray.is_initialized()
    if ours:
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        if address == "local":
            options |= {"num_cpus": workers, "_node_ip_address": "127.0.0.1"}
        else:
            options = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
            _knock(address)
        try:
            begun = ray.init(**options)
        except ConnectionError as error:
            raise ValueError(f"there is no Ray cluster at {address!r}: {error}") from None
    try:
        if ours and address == "local" and not ipaddress.ip_address(begun.address_info["node_ip_address"]).is_loopback:
            raise ValueError(
                "a local Ray cluster must be out of reach of other machines, and ray was imported before that could be "
                f"said. Set {LOOPBACK}=0 in the environment, or pass the address of a cluster of your own."
            )
        yield
    finally:
        if ours:
            ray.shutdown()

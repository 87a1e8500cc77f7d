"""Independent pieces of work, computed in this process, in several processes, or on a Ray cluster.

The results do not depend on where they were computed. The caller keeps each result as it arrives, so that a run which is
stopped, by Ctrl-C for example, continues with the pieces that are missing.
"""

import ipaddress
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from metamd.files.progress import Progress, showing

ATTEMPTS = 3
"""How often a piece is begun whose process is killed. After that the piece is at fault, not the machine."""

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Read when ray is imported: "0" makes it listen on loopback alone. An address of loopback alone does not."""

PATIENCE = 5.0
"""Seconds until the head of a cluster has to answer."""

T = TypeVar("T")
Answer = tuple[str, Any]
"""("result", it), ("refused", a sentence) or ("failed", an exception in words)."""


@dataclass(frozen=True)
class Executor:
    """Where independent pieces of work are computed.

    Args:
        workers: processes, of one thread each; their results are those of one process with one thread. One worker computes
            in the calling process. So does every executor where processes cannot be forked: on Windows, after CUDA was
            used, and inside a worker.
        ray: the address of a Ray cluster to compute on instead, with so many workers; "local" starts one on this machine,
            on loopback and without its dashboard.

    Example:
        >>> Executor().all({"a": lambda: 1, "b": lambda: 2})
        {'a': 1, 'b': 2}
    """

    workers: int = 1
    ray: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}.")

    @classmethod
    def of(cls, workers: "int | Executor") -> "Executor":
        """An executor with so many workers, or the one that is given."""
        return workers if isinstance(workers, Executor) else cls(workers)

    def all(self, pieces: Mapping[str, Callable[[], T]], label: str = "") -> dict[str, T]:
        """All results, in the order of the pieces."""
        found = dict(self.results(pieces, label))
        return {name: found[name] for name in pieces}

    def results(
        self, pieces: Mapping[str, Callable[[], T]], label: str = "", *, done: int = 0
    ) -> Generator[tuple[str, T], None, None]:
        """Every piece's name and result, as they are finished.

        Processes share memory at the fork, so pieces may be closures; only results are pickled. On a cluster both are. A
        piece whose process dies is begun again. A `ValueError` or `OSError` in a piece arrives as a `ValueError` with the
        same sentence, any other exception as a `RuntimeError` that names the piece.

        Args:
            pieces: by name.
            label: of the progress that is shown; none is shown without it.
            done: pieces that were finished before, for the progress.
        """
        forks = "fork" in multiprocessing.get_all_start_methods()
        forks &= not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        inside = multiprocessing.current_process().daemon  # a worker, which may have no processes of its own
        if self.ray is not None and pieces:
            found: Generator[tuple[str, T], None, None] = _on_ray(pieces, self.ray, self.workers)
        elif self.workers == 1 or len(pieces) < 2 or inside or not forks:
            found = ((name, compute()) for name, compute in pieces.items())
        else:
            found = _Pool(pieces, self.workers).run()
        with Progress(label, len(pieces) + done, done=done) as progress, closing(found):
            for name, result in found:
                yield name, result
                progress.advance(name)


def _answer(compute: Callable[[], Any]) -> Answer:
    try:
        with showing("never"):
            return "result", compute()
    except (ValueError, OSError) as error:
        return "refused", str(error)
    except BaseException as error:
        return "failed", repr(error)


def _opened(name: str, answer: Answer) -> Any:
    kind, value = answer
    if kind == "result":
        return value
    raise ValueError(value) if kind == "refused" else RuntimeError(f"{name}: {value}")


class _Pool:
    """Processes that take one piece after another; one that dies is replaced, and its piece begun again."""

    def __init__(self, pieces: Mapping[str, Callable[[], Any]], workers: int) -> None:
        self.names, self.pieces, self.workers = list(pieces), list(pieces.values()), workers
        self.waiting = deque(range(len(pieces)))
        self.begun: Counter[int] = Counter()
        self.free: list[_Worker] = []
        self.busy: dict[_Worker, int] = {}

    def run(self) -> Generator[tuple[str, Any], None, None]:
        try:
            while self.waiting or self.busy:
                while self.waiting and len(self.busy) < self.workers:
                    self._give(self.free.pop() if self.free else _Worker(self.pieces))
                ready = set(wait([w.pipe for w in self.busy]))
                for worker in [w for w in self.busy if w.pipe in ready]:
                    yield from self._take(worker)
        finally:
            for worker in [*self.free, *self.busy]:
                worker.end()

    def _give(self, worker: "_Worker") -> None:
        piece = self.waiting.popleft()
        self.begun[piece] += 1
        self.busy[worker] = piece
        with suppress(OSError):  # it has died since; that shows when its answer is taken
            worker.pipe.send(piece)

    def _take(self, worker: "_Worker") -> Generator[tuple[str, Any], None, None]:
        piece = self.busy.pop(worker)
        name = self.names[piece]
        try:
            answer: Answer = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):  # killed
            worker.end()
            if self.begun[piece] == ATTEMPTS:
                raise ChildProcessError(
                    f"the process of {name!r} was killed {ATTEMPTS} times (code {worker.process.exitcode}). Is there memory "
                    "enough? Fewer workers need less."
                ) from None
            self.waiting.appendleft(piece)
            return
        self.free.append(worker)
        yield name, _opened(name, answer)


class _Worker:
    """One process and the pipe to it. Its memory is the parent's at the time of the fork, the pieces among it."""

    def __init__(self, pieces: Sequence[Callable[[], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(pieces, theirs, self.pipe), daemon=True)
        sys.stdout.flush()
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Kill it; what it has not answered yet is computed again."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pieces: Sequence[Callable[[], Any]], pipe: Connection, parents: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    torch.set_num_threads(1)
    parents.close()  # so that the parent's death shows as the end of the pipe
    while True:
        try:
            piece = pieces[pipe.recv()]
        except (EOFError, OSError):
            os._exit(0)  # nothing of the parent's may be flushed or closed twice
        try:
            # torch's own pickler for pipes would pass tensors through shared memory that dies with this process
            data = pickle.dumps(_answer(piece))
        except Exception as error:
            data = pickle.dumps(("failed", f"its result cannot be sent to another process: {error!r}"))
        with suppress(OSError):
            pipe.send_bytes(data)


def _on_ray(pieces: Mapping[str, Callable[[], Any]], address: str, workers: int) -> Generator[tuple[str, Any], None, None]:
    """Actors hold the pieces and compute one after another; a piece whose actor dies is begun again on another."""
    if address == "local":
        os.environ.setdefault(LOOPBACK, "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("--ray needs the ray package, which is not installed. Run: pip install 'metamd[ray]'") from None
    names = list(pieces)
    with _cluster(ray, address, workers):
        # an actor is restarted with the same pieces, and its call is made again, so often
        kind = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=ATTEMPTS - 1)(_Actor)
        shared = ray.put(list(pieces.values()))
        waiting, running = deque(range(len(pieces))), {}

        def give(actor: Any) -> None:
            if waiting:
                index = waiting.popleft()
                running[actor.compute.remote(index)] = (actor, index)

        for _ in range(min(workers, len(pieces))):
            give(kind.remote(shared))
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            actor, index = running.pop(done)
            try:
                answer = ray.get(done)
            except ray.exceptions.RayError as error:
                raise ChildProcessError(f"the actor of {names[index]!r} was lost {ATTEMPTS} times: {error}") from None
            give(actor)
            yield names[index], _opened(names[index], answer)


class _Actor:
    """What runs on the cluster."""

    def __init__(self, pieces: Sequence[Callable[[], Any]]) -> None:
        torch.set_num_threads(1)
        self.pieces = pieces

    def compute(self, index: int) -> Answer:
        return _answer(self.pieces[index])


def _knock(address: str) -> None:
    """Refuse an address at which nobody answers: Ray itself would ask for many minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in address:  # "auto", or with a scheme: left to Ray
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

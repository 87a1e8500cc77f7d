"""Independent pieces of work, computed in this process, in several processes, or on a Ray cluster.

The results do not depend on where they were computed. Each is kept as it arrives, by the caller or by `fill`, so that a run
which is stopped, by Ctrl-C for example, continues with the pieces that are missing.
"""

import ipaddress
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from metamd.files.progress import Progress, showing
from metamd.files.store import Records, Result
from metamd.files.text import install

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
            found = _in_processes(pieces, self.workers)
        with Progress(label, len(pieces) + done, done=done) as progress, closing(found):
            for name, result in found:
                yield name, result
                progress.advance(name)


# results that are kept


@dataclass(frozen=True)
class Cell:
    """One result of an experiment."""

    name: str  # of its record
    compute: Callable[[], Any]  # makes it, on another machine perhaps
    # puts files that came with it into their places, where the records are, and returns what the record is to hold
    keep: Callable[[Any], Result] = lambda made: made


def fill(records: Records | None, cells: Iterable[Cell], *, title: str, workers: int | Executor = 1) -> dict[str, Result]:
    """All results by name, in the order of the cells; each is written as soon as it is there, unless records is None."""
    todo = {cell.name: cell for cell in cells}
    found = {} if records is None else {name: records.read(name) for name in todo if records.has(name)}
    missing = {name: cell.compute for name, cell in todo.items() if name not in found}
    for name, made in Executor.of(workers).results(missing, title, done=len(found)):
        found[name] = todo[name].keep(made)
        if records is not None:
            records.write(name, found[name])
            found[name] = records.read(name)
    return {name: found[name] for name in todo}


# how pieces are computed


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


def _in_processes(pieces: Mapping[str, Callable[[], Any]], workers: int) -> Generator[tuple[str, Any], None, None]:
    """A process for every piece, so many at a time; a piece whose process is killed is begun again.

    The memory of a process is the parent's at the time of the fork, the pieces among it.
    """
    context, waiting, begun = multiprocessing.get_context("fork"), deque(pieces), Counter[str]()
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.popleft()
                begun[name] += 1
                pipe, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_work, args=(pieces[name], theirs, pipe), daemon=True)
                sys.stdout.flush()
                process.start()
                theirs.close()  # so that the process's death shows as the end of the pipe
                running[pipe] = name, process
            ready = wait(list(running))
            for pipe in [p for p in running if p in ready]:
                name, process = running[pipe]
                try:
                    answer: Answer | None = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # killed
                    answer = None
                process.join()
                del running[pipe]
                pipe.close()
                if answer is not None:
                    yield name, _opened(name, answer)
                elif begun[name] < ATTEMPTS:
                    waiting.appendleft(name)
                else:
                    raise ChildProcessError(
                        f"the process of {name!r} was killed {ATTEMPTS} times (code {process.exitcode}). Is there memory "
                        "enough? Fewer workers need less."
                    )
    finally:
        for pipe, (_, process) in running.items():
            process.kill()
            process.join()
            pipe.close()


def _work(compute: Callable[[], Any], pipe: Connection, parents: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    torch.set_num_threads(1)
    parents.close()  # so that the parent's death shows when the answer is sent
    try:
        # torch's own pickler for pipes would pass tensors through shared memory that dies with this process
        data = pickle.dumps(_answer(compute))
    except Exception as error:
        data = pickle.dumps(("failed", f"its result cannot be sent to another process: {error!r}"))
    with suppress(OSError):
        pipe.send_bytes(data)
    os._exit(0)  # nothing of the parent's may be flushed or closed twice


def _on_ray(pieces: Mapping[str, Callable[[], Any]], address: str, workers: int) -> Generator[tuple[str, Any], None, None]:
    """Remote calls, so many at a time."""
    if address == "local":
        os.environ.setdefault(LOOPBACK, "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError(f"--ray needs the ray package, which is not installed. {install('ray')}") from None
    with _cluster(ray, address, workers):
        # Ray begins a call whose process dies again, so often
        compute = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_alone)
        waiting, running = deque(pieces), dict[Any, str]()
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.popleft()
                running[compute.remote(pieces[name])] = name
            (done,), _ = ray.wait(list(running), num_returns=1)
            name = running.pop(done)
            try:
                answer = ray.get(done)
            except ray.exceptions.RayError as error:
                raise ChildProcessError(f"the process of {name!r} was lost {ATTEMPTS} times: {error}") from None
            yield name, _opened(name, answer)


def _alone(compute: Callable[[], Any]) -> Answer:
    torch.set_num_threads(1)
    return _answer(compute)


def _check_reachable(address: str) -> None:
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
        where: dict[str, Any] = {"include_dashboard": False, "num_cpus": workers, "_node_ip_address": "127.0.0.1"}
        if address != "local":
            where = {"address": address}
            _check_reachable(address)
        try:
            begun = ray.init(**where, log_to_driver=False, logging_level="ERROR")
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

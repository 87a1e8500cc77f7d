"""The steps of N diagonal metrics in single passes over memory, with a largest form that is found lazily but exactly.

A step with piece j reads theta, g and D_j. Whether j still has the largest form depends on the centre and on all other
metrics, most of the memory there is. Instead, the norms |x|_k of x = theta - c are bounded: a move d shortens |x|_j by |d|_j
at most and lengthens |x|_k by |d|_k at most, and over a chunk of coordinates

    |d|_k^2 = sum D_k d^2 <= min(max(D_k/D_j) sum e, |D_k/D_j|_2 |e|_2),    e = D_j d^2,

where what depends on metrics alone is computed once. The forms are computed only where these bounds cannot tell.

The passes over memory are in C (fused.c), compiled at first use and called with addresses.
"""

import ctypes
import functools
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metamd.potentials.base import Moves, Params
from metamd.potentials.forms import Array, Solution, solve_weights

AHEAD = 1.25  # how much longer than the last move the next one is expected to be at most
MARGINS = {torch.float32: 1e-5, torch.float64: 1e-12}  # what rounding of the forms can hide, relative to their size

CHUNK, GROUP, MOST = 1024, 8, 8  # as in fused.c
DTYPES = (torch.float32, torch.float64)

# No -ffast-math: the step rounds as torch's own does, and NaN and infinity stay what they are.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-fPIC", "-shared")
EXTRAS = (("-march=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())
INSTEAD = "Leave fused=False; on CUDA, wrap opt.step in torch.compile."

ROW = np.dtype(
    [(n, np.uintp) for n in ("theta", "grad", "centre", "metric")]
    + [(n, np.int64) for n in ("stride", "period", "cols", "wide", "skip")]
    + [(n, np.float64) for n in ("keep", "lr")]
)


def drift(forms: Array, offsets: Array, piece: int, lengths: Array) -> Array:
    """Bounds of the forms after a move of lengths |d|_k: below for piece j, above for all others.

    F_j' >= 1/2 max(0, |x|_j - |d|_j)^2 + b_j and F_k' <= 1/2 (|x|_k + |d|_k)^2 + b_k, with |x|_k = sqrt(2 (F_k - b_k)).
    """
    after = np.empty_like(forms)
    for k, (form, b, length) in enumerate(zip(forms.tolist(), offsets.tolist(), lengths.tolist(), strict=True)):
        norm = math.sqrt(2 * max(form - b, 0.0))
        norm = max(norm - length, 0.0) if k == piece else norm + length
        after[k] = norm * norm / 2 + b
    return after


def decided(forms: Array, piece: int, margin: float) -> bool:
    """Whether the lower bound of one form exceeds the upper bounds of all others by more than rounding."""
    bounds = forms.tolist()
    least = margin * max(map(abs, bounds))
    return all(bounds[piece] - bound > least for k, bound in enumerate(bounds) if k != piece)  # NaN decides nothing


class Job(ctypes.Structure):
    """What a pass needs; the same struct is in fused.c."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        *((n, ctypes.c_void_p) for n in ("tensors", "chunks")),
        *((n, ctypes.c_int64) for n in ("count", "pieces", "threads")),
        *((n, ctypes.c_void_p) for n in ("before", "after")),
        ("piece", ctypes.c_int64),
        *((n, ctypes.c_void_p) for n in ("kappa", "rho")),
        ("width", ctypes.c_int64),
    )


_FORBIDDEN = "failed to map segment"  # what the loader says of a file system that is mounted noexec


@functools.cache
def build() -> ctypes.CDLL:
    """Compile fused.c for this machine in a private directory, and load it."""
    command = shlex.split(os.environ.get("CC", ""))
    found = [command[0]] if command else ["cc", "gcc", "clang"]
    compiler = next((path for name in found if (path := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError(
            f"fused=True needs a C compiler, and there is no {' or '.join(found)} to call. Install one, point the "
            f"environment variable CC to it, or leave fused=False."
        )
    said = ""
    with (
        tempfile.TemporaryDirectory(prefix="metamd-") as folder,
        resources.as_file(resources.files("metamd.optimiser")) as package,
    ):
        for number, extra in enumerate(EXTRAS):
            target = Path(folder) / f"fused{number}.so"
            line = [compiler, *command[1:], *FLAGS, *extra, str(package / "fused.c"), "-o", str(target), "-lm"]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                try:
                    return ctypes.CDLL(str(target))
                except OSError as error:  # an OpenMP library that is there to link, but not to load
                    said = str(error)
                    if _FORBIDDEN in said:
                        break
            else:
                said = done.stderr
    if _FORBIDDEN in said:
        raise RuntimeError(
            f"fused=True compiles a kernel in {tempfile.gettempdir()!r}, but files there may not run code (noexec). Point "
            "the environment variable TMPDIR to another folder, or leave fused=False."
        )
    raise RuntimeError(
        f"fused=True needs a C compiler, and {found[0] if command else Path(compiler).name} could not compile fused.c: "
        f"{said.strip()[-500:]}. Point the environment variable CC to another compiler, or leave fused=False."
    )


def check(what: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
    """Refuse a tensor that a pass cannot read."""
    if x.device.type != "cpu":
        raise ValueError(f"fused=True needs tensors on the CPU, but {what} is on {x.device}. {INSTEAD}")
    if x.dtype not in DTYPES:
        raise ValueError(f"fused=True needs float32 or float64, but {what} has {x.dtype}. {INSTEAD}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(
            f"fused=True needs metrics in the dtype of their tensor, {dtype}, but {what} has {x.dtype}. {INSTEAD}"
        )
    if x.layout != torch.strided or not x.is_contiguous():
        raise ValueError(
            f"fused=True needs contiguous tensors, but {what} of shape {tuple(x.shape)} is not. Leave fused=False, or make "
            "it contiguous before the optimiser is built."
        )


@dataclass(frozen=True)
class Layout:
    """How the elements of a contiguous tensor find their metrics."""

    shape: torch.Size
    metric: Tensor  # (N, stored numbers), contiguous
    period: int  # element i has the metric of element i mod period
    cols: int  # so many consecutive elements share a metric

    def chunks(self, index: int) -> list[tuple[int, int, int]]:
        """(tensor, first element, length) of parts of at most CHUNK elements, of whole rows and periods where they fit."""
        size = self.shape.numel()
        block = max(1, self.cols if self.cols > 1 else self.period)
        run = block if block > CHUNK else CHUNK // block * block
        even = math.ceil(run / math.ceil(run / CHUNK))
        length = min(run, math.ceil(even / 16) * 16)  # whole cache lines
        return [
            (index, at, min(length, start + run - at, size - at))
            for start in range(0, size, run)
            for at in range(start, min(start + run, size), length)
        ]


def layout(shape: torch.Size, d: Tensor) -> Layout:
    """The layout for a metric of shape (N, ...) that broadcasts against a tensor of the given shape."""
    tied = (1,) * (len(shape) + 1 - d.ndim) + tuple(d.shape[1:])
    size, flat = shape.numel(), d.reshape(len(d), -1)
    if size == 0:
        return Layout(shape, flat, 1, 1)
    leading = next(i for i in range(len(shape), -1, -1) if tied[:i] == shape[:i])
    if math.prod(tied[leading:]) == 1:
        return Layout(shape, flat, size, math.prod(shape[leading:]))
    trailing = next(i for i in range(len(shape) + 1) if tied[i:] == shape[i:])
    if math.prod(tied[:trailing]) == 1:
        period = math.prod(shape[trailing:])
        times = min(math.ceil(CHUNK / period), size // period)  # short columns side by side
        return Layout(shape, flat.repeat(1, times), period * times, 1)
    return Layout(shape, d.expand(len(d), *shape).reshape(len(d), -1), size, 1)  # neither rows nor columns


class FusedDiagonals:
    """The `FusedPass` of given diagonal metrics, for float32 and float64 on the CPU.

    It needs a C compiler, which it calls once per process. Metrics, centre and offsets are taken as they are now: make a
    new one after a change to them.
    """

    def __init__(self, metrics: Params, start: Params, offsets: Array) -> None:
        self.pieces = len(offsets)
        if self.pieces > MOST:
            raise ValueError(f"fused=True serves up to {MOST} pieces, got {self.pieces}. Leave fused=False.")
        for name, d in metrics.items():
            check(f"the metric of {name!r}", d)
        for name, c in start.items():
            check(f"the centre of {name!r}", c, metrics[name].dtype)
        self.metrics, self.start = dict(metrics), dict(start)
        self._offsets = np.array(offsets, dtype=np.float64)
        self._margin = max((MARGINS[d.dtype] for d in metrics.values()), default=0.0)
        self._lengths = np.full(self.pieces, np.inf)  # |d|_k of the last move, to guess whether laziness will do
        self.lazy_steps = self.full_steps = 0  # how often the bounds sufficed, and how often forms were computed
        self._trial: tuple[Array, Array] | None = None  # forms and Hessian after a trial step, where both were added up
        self._library = build()
        self._layouts: dict[str, Layout] = {}
        self._rows = np.zeros(0, dtype=ROW)
        self._chunks = np.zeros((0, 3), dtype=np.int64)
        self._ratios: dict[int, Array] = {}

    # the step

    def advance(self, params: Params, moves: Moves, weights: Array, forms: Array) -> Array:
        """Write the trial step into the parameters that have a move; return the forms after it, or bounds that decide."""
        n, b, piece = self.pieces, self._offsets, int(np.argmax(weights)) if weights.max() == 1 else -1
        self._trial = None
        if piece >= 0 and decided(drift(forms, b, piece, AHEAD * self._lengths), piece, self._margin):
            self._lengths = np.sqrt(self.follow(params, moves, piece))
            bounds = drift(forms, b, piece, self._lengths)
            if decided(bounds, piece, self._margin):
                self.lazy_steps += 1
                return bounds
            self.full_steps += 1
            return self.forms(params, params)
        self.full_steps += 1
        # sum D_k x^2 and sum D_k D_l x^2 / D(w) after the step; at a vertex, what `follow` returns instead of the latter
        sums = self._pass("advance", 2 * n + n * n, params, params, weights, weights, moves, piece)
        found = sums[:n] / 2 + b
        if piece < 0:
            self._trial = found, sums[n : n + n * n].reshape(n, n)
        self._lengths = np.sqrt(sums[n + n * n :]) if piece >= 0 else np.full(n, np.inf)
        return found

    def follow(self, params: Params, moves: Moves, piece: int) -> Array:
        """theta <- (1 - decay) theta - lr g / D_j, in place; upper bounds of sum D_k d^2 for the move d, by piece."""
        vertex = np.eye(self.pieces)[piece]
        return self._pass("follow", self.pieces, params, moves, vertex, vertex, moves, piece)

    def forms(self, params: Params, names: Collection[str]) -> Array:
        """1/2 sum D_k (theta - c)^2 + b_k over the named tensors, computed exactly."""
        vertex = np.eye(self.pieces)[0]
        return self._pass("forms", self.pieces, params, names, vertex, vertex) / 2 + self._offsets

    def settle(self, params: Params, moving: Collection[str], weights: Array, *, tolerance: float) -> Solution:
        """Take the trial step that the given weights led to on to the weights that are right, in place.

        The first point that the solver looks at is written at once: it is the right one almost always, and then no other
        pass is needed.
        """
        held = [n for n in params if n not in moving]
        offsets = self.forms(params, held) if held else self._offsets  # with the forms of what does not move
        trial, here = self._trial, weights

        def evaluate(w: Array) -> tuple[Array, Array]:
            nonlocal here
            if (w == weights).all():
                return self.rescale(params, moving, w, w, write=False) if trial is None else (trial[0] - offsets, trial[1])
            first, before = here is weights, here
            here = w if first else here
            return self.rescale(params, moving, before, w, write=first)

        found = solve_weights(evaluate, weights, offsets, tolerance=tolerance)
        if (here != found.weights).any():
            self.rescale(params, moving, here, found.weights)
        return found

    def rescale(
        self, params: Params, names: Collection[str], before: Array, after: Array, *, write: bool = True
    ) -> tuple[Array, Array]:
        """theta <- D(before)/D(after) (theta - c) + c for the named tensors, in place; what `solve` needs to know there."""
        n = self.pieces
        # sum D_k x^2 and sum D_k D_l x^2 / D(after)
        sums = self._pass("rescale" if write else "evaluate", n + n * n, params, names, before, after)
        if write:
            torch.autograd.graph.increment_version([params[name] for name in names])
        return sums[:n] / 2, sums[n:].reshape(n, n)

    # passes over memory

    def _pass(
        self,
        name: str,
        width: int,
        params: Params,
        names: Collection[str],
        before: Array,
        after: Array,
        moves: Moves | None = None,
        piece: int = -1,
    ) -> Array:
        """Call a pass of fused.c over the named tensors; the sums that it accumulates."""
        self._lay_out(params)
        if piece >= 0 and piece not in self._ratios:
            # max D_k/D_j and |D_k/D_j|_2 of every chunk whose elements have metrics of their own: (2, chunks, N)
            self._ratios[piece] = np.zeros((2, len(self._chunks), self.pieces))
            self._point_to(params, params, {})
            self._call("ratios", 0, before, after, piece)
        alive = self._point_to(params, names, moves or {})
        sums = self._call(name, width, before, after, piece)
        del alive
        if moves:
            torch.autograd.graph.increment_version([params[n] for n in moves])
        return sums

    def _lay_out(self, params: Params) -> None:
        """Divide the tensors into chunks, unless that was done and they have not changed in kind."""
        if self._layouts.keys() == params.keys() and all(
            x.shape == a.shape and x.dtype == a.metric.dtype and x.is_cpu and x.is_contiguous()
            for x, a in zip(params.values(), map(self._layouts.__getitem__, params), strict=True)
        ):
            return
        for name, x in params.items():
            check(f"the tensor {name!r}", x, self.metrics[name].dtype)
            if self.start and self.start[name].shape != x.shape:
                raise ValueError(
                    f"the centre of {name!r} must have the shape of its tensor, {tuple(x.shape)}, got "
                    f"{tuple(self.start[name].shape)}. Build the optimiser anew after a change of shape."
                )
        self._layouts = {n: layout(x.shape, self.metrics[n]) for n, x in params.items()}
        layouts, self._ratios = list(self._layouts.values()), {}
        self._chunks = np.array([c for i, a in enumerate(layouts) for c in a.chunks(i)], dtype=np.int64).reshape(-1, 3)
        self._rows = rows = np.zeros(len(params), dtype=ROW)
        rows["centre"] = [self.start[n].data_ptr() if self.start else 0 for n in params]
        rows["metric"] = [a.metric.data_ptr() for a in layouts]
        rows["stride"] = [a.metric.shape[1] for a in layouts]
        rows["period"] = [a.period for a in layouts]
        rows["cols"] = [a.cols for a in layouts]
        rows["wide"] = [a.metric.dtype == torch.float64 for a in layouts]

    def _point_to(self, params: Params, names: Collection[str], moves: Moves) -> list[Tensor]:
        """Note where the tensors of a pass are. The gradients returned must live until it is over."""
        rows, grads = self._rows, {n: _readable(n, m.grad, params[n]) for n, m in moves.items()}
        rows["theta"] = [params[n].data_ptr() for n in self._layouts]
        rows["grad"] = [grads[n].data_ptr() if n in grads else 0 for n in self._layouts]
        rows["skip"] = [n not in names for n in self._layouts]
        rows["keep"] = [float(1 - moves[n].decay) if n in moves else 1.0 for n in self._layouts]
        rows["lr"] = [float(moves[n].lr) if n in moves else 0.0 for n in self._layouts]
        return list(grads.values())

    def _call(self, name: str, width: int, before: Array, after: Array, piece: int) -> Array:
        kappa, rho = map(_address, self._ratios[piece]) if piece >= 0 else (None, None)
        count, threads = len(self._chunks), torch.get_num_threads()
        places = _address(self._rows), _address(self._chunks)
        job = Job(*places, count, self.pieces, threads, _address(before), _address(after), piece, kappa, rho, width)
        partial, out = np.empty((count // GROUP + 1) * width), np.empty(width)
        getattr(self._library, name)(ctypes.byref(job), ctypes.c_void_p(_address(partial)), ctypes.c_void_p(_address(out)))
        return out


def _readable(name: str, grad: Tensor, x: Tensor) -> Tensor:
    if grad.shape != x.shape or grad.layout != torch.strided or not grad.is_cpu:
        raise ValueError(
            f"the gradient of {name!r} must be a dense tensor of shape {tuple(x.shape)} on the CPU, got "
            f"{tuple(grad.shape)}, {grad.layout}, on {grad.device}. {INSTEAD}"
        )
    return grad if grad.dtype == x.dtype and grad.is_contiguous() else grad.to(x.dtype).contiguous()


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])  # .ctypes.data takes four times as long

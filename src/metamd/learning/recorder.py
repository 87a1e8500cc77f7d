"""`Recorder`: hooks on any torch optimiser that record one training run."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from metamd.files.container import shapes
from metamd.files.recorded_run import COLUMNS, Run, products_shapes
from metamd.optimiser.binding import Options
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials.forms import grouped_squares, widen
from metamd.potentials.sharding import is_sharded
from metamd.potentials.tying import TyingName, clean_names, some, stored_shape, tied_shape

STATE_VERSION = 3

SPACING = 16
"""The products of a weight with n columns are taken every n/16 steps. With b examples a product has 2n/(6b) of the
operations of a gradient, so that they add 16/(3b), which is 5 % at b = 100."""

LENGTHS_EVERY, LENGTHS_KEPT = 10, 64
"""Steps between two measured lengths of the optimiser's steps, and how many are kept: then every second one is left out, and
the distance doubles."""


class Recorder:
    """Watches an optimiser through its public hooks and records one training run.

    It keeps theta_1 and, of the gradients that the optimiser saw (clipped, unscaled, averaged over processes), what the
    closed form needs: for weights sum_t G_t'G_t, from some of the steps, and for vectors sum_t g_t^2. Steps that a
    GradScaler skips or that raise are not counted. Training is not changed.

    Args:
        optimiser: any torch optimiser whose parameters have names.
        tying: record sum_t g_t^2 instead, over coordinates that will share a metric; `learn` then makes a metric of the
            parameters themselves, of this tying or a coarser one. If not given, "parameter" for a model without weights.
        named: `model.named_parameters()`, for an optimiser that was built without names.
        batch_size: examples per gradient, for the record.
        name: what sentences and files call the run.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(model.named_parameters(), lr=0.1)
        >>> recorder = Recorder(adam, name="monday")
        >>> for _ in range(5):
        ...     adam.zero_grad()
        ...     model(torch.ones(4, 2)).square().mean().backward()
        ...     adam.step()
        >>> recorder.finish()
        Run('monday', Adam, 5 steps, 2 tensors, 3 numbers)
    """

    def __init__(
        self,
        optimiser: Optimizer,
        *,
        tying: TyingName | None = None,
        named: Iterable[tuple[str, Tensor]] | None = None,
        batch_size: int | None = None,
        name: str = "",
    ) -> None:
        if not isinstance(optimiser, Optimizer):
            raise TypeError(f"Recorder needs a torch optimiser, got {type(optimiser).__name__}. Pass the one that trains.")
        if tying is not None and tying not in get_args(TyingName):
            raise ValueError(f"tying must be one of {', '.join(get_args(TyingName))}; got {tying!r}.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}. Leave it out if it is not known.")
        self.optimiser, self.batch_size, self.name = optimiser, batch_size, name
        self._given = None if named is None else {id(p): n for n, p in named}
        self._params: dict[str, Tensor] = {}
        self._start: dict[str, Tensor] = {}
        self._rms: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._products: dict[str, Tensor] = {}  # sum_t G_t'G_t of some of the steps
        self._lengths: list[list[float]] = []
        self._every = LENGTHS_EVERY
        self.steps = 0  # how many were recorded so far
        self._pending: dict[str, Tensor] | None = None
        self._staged: dict[str, Tensor] = {}  # products of this step
        self._before_step: list[Tensor] = []  # the parameters, where the length of the step is measured
        self._finished = False
        self._scan()
        weights = any(p.ndim > 1 and p.numel() for p in self._params.values())
        self.coordinates = tying is None and weights
        self.tying: TyingName = tying or ("tensor" if weights else "parameter")
        self._hooks = optimiser.register_step_pre_hook(self._before), optimiser.register_step_post_hook(self._after)

    def detach(self) -> None:
        """Stop recording and leave the optimiser as it was."""
        for hook in self._hooks:
            hook.remove()

    def finish(self, score: float | None = None) -> Run:
        """Stop recording and return the record, once; the end of the run is where the parameters are now.

        Args:
            score: how good the run was, the lower the better, such as its mean loss: always the same quantity. From the
                scores of runs with a file `update` finds the factor on its steps.
        """
        if score is not None and not (isinstance(score, int | float) and math.isfinite(score)):
            raise ValueError(
                f"score must be a finite number, lower for a better run, got {score!r}. Pass its mean loss, and none for "
                "a run that diverged."
            )
        if self._finished:
            raise ValueError("this recording was finished already. Make a new Recorder for what comes after.")
        self.detach()
        if not self.steps:
            raise ValueError(
                "nothing was recorded: no step with gradients was taken. Make the Recorder before training, with the "
                "optimiser that trains."
            )
        self._finished = True
        none = {n: torch.zeros(stored_shape(self.tying, tuple(x.shape))) for n, x in self._start.items()}
        products = {}
        for n, shape in products_shapes(shapes(self._start)).items() if self.coordinates else ():
            found, total = self._products.get(n, torch.zeros(shape)), float(self._sums.get(n, none[n]))
            trace = float(found.diagonal().sum() if found.ndim > 1 else found.sum())
            # scaled to all steps by the squares, which every step adds
            products[n] = (found * (total / trace if trace > 0 else 0.0)).cpu()
        count = len(self._start)
        return Run(
            start={n: x.cpu() for n, x in self._start.items()},
            end={n: self._params[n].detach().clone().cpu() for n in self._start},
            squares={n: self._sums.get(n, none[n]).cpu()[None] for n in self._start},
            gradient_rms={n: self._rms.get(n, 0.0) for n in self._start},
            steps=self.steps,
            tying=self.tying,
            batch_size=self.batch_size,
            name=self.name,
            optimiser=type(self.optimiser).__name__,
            products=products,
            lengths=torch.tensor([row + [0.0] * (count - len(row)) for row in self._lengths]) if self._lengths else None,
            factor=self._factor(),
            score=None if score is None else float(score),
        )

    def _factor(self) -> float | None:
        """The factor on the learned steps, of a run with a file of polar steps as it recommends."""
        used = getattr(self.optimiser, "_used", None)
        return used.factor if isinstance(self.optimiser, MetaMD) and isinstance(used, Options) else None

    # the hooks

    @torch.no_grad()
    def _before(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._pending = None
        if {id(p) for p in self._params.values()} != {id(p) for group in optimiser.param_groups for p in group["params"]}:
            self._scan()
        for n, p in self._params.items():
            if n not in self._start:
                self._start[n] = p.detach().clone(memory_format=torch.contiguous_format)
        measured = self.coordinates and self.steps % self._every == 0
        self._before_step = [p.detach().clone() for p in self._params.values()] if measured else []
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._stage()
            return None

        def evaluate() -> Any:
            loss = closure()
            if self._pending is None:  # the first evaluation: its gradients are those at theta_t
                self._stage()
            return loss

        return (args[0], *args[2:]), {**kwargs, "closure": evaluate}

    @torch.no_grad()
    def _stage(self) -> None:
        """The squares of this step's gradients. They count only once the step has been taken."""
        found_inf = getattr(self.optimiser, "found_inf", None)
        if found_inf is not None and bool(found_inf > 0):  # a fused optimiser is called by GradScaler, and skips by itself
            return
        names = [n for n, p in self._params.items() if p.grad is not None]
        grads = [_dense(n, self._params[n].grad) for n in names]
        self._staged = {}
        if self.coordinates:
            squares: Iterable[Tensor] = [x.square() for x in torch._foreach_norm(grads)] if grads else ()
            self._staged = {n: found for n, g in zip(names, grads, strict=True) if (found := self._product(g)) is not None}
        elif self.tying == "parameter":
            squares = torch._foreach_mul(grads, grads) if grads else ()
        else:
            shapes = [(tied_shape(self.tying, s), stored_shape(self.tying, s)) for s in (tuple(g.shape) for g in grads)]
            squares = [grouped_squares(g, tied).reshape(to) for g, (tied, to) in zip(grads, shapes, strict=True)]
        scale = getattr(self.optimiser, "grad_scale", None)
        if scale is not None:  # and unscales by itself
            squares = [s / scale.to(s.device, s.dtype).square() for s in squares]
            self._staged = {n: s / scale.to(s.device, s.dtype).square() for n, s in self._staged.items()}
        self._pending = dict(zip(names, squares, strict=True))

    def _product(self, grad: Tensor) -> Tensor | None:
        """G'G of a weight, or its diagonal where that is too large; None where this step is left out."""
        if grad.ndim < 2 or not grad.numel():
            return None
        g = grad.reshape(len(grad), -1)
        columns = g.shape[1]
        if columns > COLUMNS:
            return g.square().sum(0) if self.steps % SPACING == 0 else None
        return g.mT @ g if self.steps % max(1, columns // SPACING) == 0 else None

    @torch.no_grad()
    def _after(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        staged, self._pending = self._pending, None
        if not staged:
            return
        for n in staged:
            if n not in self._rms:
                self._rms[n] = float(staged[n].sum(dtype=torch.float64) / max(self._params[n].numel(), 1)) ** 0.5
                self._sums[n] = torch.zeros_like(staged[n])
        torch._foreach_add_([self._sums[n] for n in staged], list(staged.values()))
        for n, product in self._staged.items():
            self._products[n] = self._products[n] + product if n in self._products else product
        if self._before_step:
            moved = torch._foreach_sub([p.detach() for p in self._params.values()], self._before_step)
            roots = [max(p.numel(), 1) ** 0.5 for p in self._params.values()]
            self._lengths.append([float(x) / r for x, r in zip(torch._foreach_norm(moved), roots, strict=True)])
            if len(self._lengths) > LENGTHS_KEPT:
                self._lengths, self._every = self._lengths[::2], 2 * self._every
        self._before_step, self._staged = [], {}
        self.steps += 1

    def _scan(self) -> None:
        """Find the names of all parameters; those that are added during a run start where they are then."""
        pairs: list[tuple[str, Tensor]] = []
        for group in self.optimiser.param_groups:
            names = group.get("param_names")
            if self._given is not None:
                names = [self._given.get(id(p)) for p in group["params"]]
            if names is None or None in names:
                raise ValueError(
                    f"runs are combined by the names of the parameters, but not all of these have one. Build the optimiser "
                    f"with {type(self.optimiser).__name__}(model.named_parameters(), ...), or call "
                    "Recorder(optimiser, named=model.named_parameters())."
                )
            pairs += zip(names, group["params"], strict=True)
        if self._given is not None:  # the model's order of layers, by which roles are told
            place = {n: i for i, n in enumerate(self._given.values())}
            pairs.sort(key=lambda pair: place[pair[0]])
        self._params = clean_names(pairs)
        for n, p in self._params.items():
            if is_sharded(p) or p.is_complex():
                raise ValueError(
                    f"Recorder needs whole real tensors, but {n!r} is {'complex' if p.is_complex() else 'sharded'}. "
                    "Record a run without sharding, such as one with DistributedDataParallel."
                )

    # saving

    def state_dict(self) -> dict[str, Any]:
        """The record so far, in tensors and plain types: save it in the checkpoint, beside the optimiser's."""
        return {
            "version": STATE_VERSION,
            "tying": None if self.coordinates else self.tying,
            "start": {n: x.clone() for n, x in self._start.items()},
            "gradient_rms": dict(self._rms),
            "steps": self.steps,
            "sums": {n: x.clone() for n, x in self._sums.items()},
            "products": {n: x.clone() for n, x in self._products.items()},
            "lengths": [list(row) for row in self._lengths],
            "every": self._every,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a record.

        Args:
            state: what `state_dict` gave, of a recorder with the same options on an optimiser of the same parameters.
        """
        if state.get("version") not in (1, 2, STATE_VERSION):
            raise ValueError(f"a record must have a version from 1 to {STATE_VERSION}, got {state.get('version')!r}.")
        ours = None if self.coordinates else self.tying
        if state.get("tying") != ours:
            raise ValueError(
                f"this record was made with tying = {state.get('tying')!r}, but this Recorder has {ours!r}. "
                "Make the Recorder with the options of the run that is continued."
            )
        for n, x in state["start"].items():
            if n not in self._params or x.shape != self._params[n].shape:
                raise ValueError(
                    f"this record is of a model with {n!r} of shape {tuple(x.shape)}, but this optimiser has "
                    f"{some(self._params)}. Load it where the same model is trained."
                )
        devices = {n: p.device for n, p in self._params.items()}
        self._start = {n: x.to(devices[n], copy=True) for n, x in state["start"].items()}
        self._rms = dict(state["gradient_rms"])
        sums = state["sums"] if state["version"] > 1 else {n: x.sum(0) for n, x in state["sums"].items()}  # 1 had parts
        self._sums, self.steps = {n: x.to(devices[n], copy=True) for n, x in sums.items()}, state["steps"]
        self._products = {n: x.to(devices[n], copy=True) for n, x in state.get("products", {}).items()}
        self._lengths, self._every = [list(row) for row in state.get("lengths", [])], state.get("every", LENGTHS_EVERY)


def _dense(name: str, grad: Tensor | None) -> Tensor:
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"Recorder needs dense gradients, but that of {name!r} is sparse. Build the layer without sparse=True, or leave "
            "its parameters to an optimiser of their own."
        )
    return widen(grad)

"""`MetaMD`, mirror descent in a learned geometry as a `torch.optim.Optimizer`."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.hooks import RemovableHandle

from metamd.files.header import Header
from metamd.files.learned import LearnedOptimiser, fingerprint
from metamd.files.usage import Average, Metric
from metamd.optimiser import averaging as average
from metamd.optimiser import binding
from metamd.optimiser.certificate import (
    AVERAGED,
    Ball,
    Certified,
    MirrorSums,
    RunSums,
    Seen,
    euclidean_metric,
    forget_stores,
    is_idle,
)
from metamd.optimiser.checkpoint import (
    EDITED,
    SEEN,
    Kind,
    PieceRecord,
    Saved,
    differs,
    digests,
    mend_state,
    metric_code,
    read_state,
)
from metamd.optimiser.guard import FamilyWatch, Safeguard, energy
from metamd.potentials.base import Active, Move, Params, Potential, Step
from metamd.potentials.classical import Euclidean
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.online import Online, Point, ordinary
from metamd.potentials.sharding import is_sharded, local, version


@dataclass(slots=True)
class Entry:
    """One parameter in one step."""

    name: str  # cleaned, by which its metric is found
    param: Tensor  # as the user holds it
    x: Tensor  # its part on this process, where the gradient was taken
    grad: Tensor | None  # the part of the gradient on this process; None for a parameter that rests
    group: dict[str, Any]
    state: dict[str, Any]

    @property
    def z(self) -> Tensor:
        """The iterate of mirror descent, which moves: x itself, unless x is an average of the iterates."""
        return local(self.state["z"]) if "z" in self.state else self.x


class MetaMD(Certified, Optimizer):
    """Mirror descent in a learned geometry, as an ordinary torch optimiser.

    theta+ = argmin <g, theta> + B(theta||theta_t)/lr. A learned geometry has its step sizes inside: lr = 1 uses them as
    they are. The choice of the active piece is one for the whole model, over all groups.

    With `steps` a learned file is used as it recommends: its metric, momentum or tail average, factor and schedule. Options
    that are given win over recommended ones. Without `steps` every option is what its default says, as in any torch
    optimiser. A file that recommends more then gets a warning, unless `metric` is given.

    Args:
        params: as for any torch optimiser; `model.named_parameters()` for a learned geometry. Parameters without names are
            matched with the model that a file was learned on, by order and shape.
        geometry: a `LearnedOptimiser`, the path of one, the name of a shipped one, or a potential.
        lr: for a learned file, a factor on its step sizes (default: use them unchanged, which is 1 - momentum). For any
            other potential, the learning rate. The lr of a group scales the gradient of that group.
        steps: the number of steps of the run, for which the file's recommended usage is set up. The schedule is inside:
            every step multiplies lr by its share, and the last share is kept after the end. A torch scheduler on top
            multiplies once more, and gets a warning.
        momentum: gradients are taken at an average of the iterates, which keeps this share of itself in every step; for
            `Euclidean()` that is SGD with momentum, and lr means the same. 0 if neither given nor recommended.
        weight_decay: decoupled, towards zero.
        maximize: ascend instead.
        exact: False takes the paper's step.
        fused: one pass over memory by a compiled kernel (CPU).
        certify: add up what `certificate` needs: a float64 sum of the gradients, and the start where it is not kept anyway.
            A tail average then leaves out the newest iterate, where no gradient was taken yet. No step changes.
        check_finite: refuse a step with NaN or infinite gradients before anything is written.
        safeguard: halve the step while the run blows up.
        averaging: "constant", the average of the momentum, if neither given nor recommended; or "tail", an average beside
            the run. The model is used inside `with opt.averaged():`, or between `opt.eval()` and `opt.train()`.
        metric: "learned" if neither given nor recommended; "online": the diagonal follows the run in the learned
            coordinates, at the scale that the file has for it; an `Online` for a rule and scales of your own.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> opt = MetaMD([x], MaxDiagonal(pieces=2), lr=0.1)
        >>> (x**2).sum().backward()
        >>> opt.step()
        >>> x
        Parameter containing:
        tensor([ 0.8000, -0.8000], requires_grad=True)
    """

    _header: Header | None = None  # of the file, if the geometry is from one
    _loading: tuple[Saved, RunSums | None] | None = None  # while a state_dict is loaded
    _looking: RemovableHandle | None = None  # from the last step until the tail average is used, or its absence noticed

    def __init__(
        self,
        params: Iterable[Any],
        geometry: LearnedOptimiser | Potential | str | PathLike[str],
        lr: float | Tensor | None = None,
        *,
        steps: int | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        exact: bool = True,
        fused: bool = False,
        certify: bool = False,
        check_finite: bool = True,
        safeguard: bool = False,
        averaging: Average | None = None,
        metric: Metric | Online | None = None,
    ) -> None:
        given = {"lr": lr, "momentum": momentum, "averaging": averaging, "metric": metric}
        self._potential, learned = binding.opened(geometry)
        self._header = None if learned is None else learned.header
        if not isinstance(params, Tensor | Iterable):
            raise TypeError(f"params must be an iterable of parameters, got {params!r}. Pass model.named_parameters().")
        params = binding.with_names(params if isinstance(params, Tensor) else list(params), self._potential, learned)
        used = binding.choose(learned, steps, params, {k: v for k, v in given.items() if v is not None})
        self.exact, self.fused, self.check_finite, self.averaging = exact, fused, check_finite, used.averaging
        self._used, self._said = used, set[str]()
        self._watch = None if learned is None else FamilyWatch(learned.header.horizon, learned.header.gradient_scale)
        self._online = binding.online_metric(used.metric, self._potential, learned)
        # the names of the tensors in the order of the layers, which roles are read off; empty if nobody knows it
        self._order = tuple(getattr(self._potential, "slots", ())) or tuple(() if learned is None else learned.header.model)
        self._safeguard = Safeguard() if safeguard else None
        self._bound: Potential | None = None
        self._sums = None
        if certify:
            plain = self._online is None and isinstance(self._potential, MaxDiagonal | Euclidean)
            self._sums = RunSums(mirror=MirrorSums() if plain else None, header=self._header)
        self._hash: str | None = None
        # By id, which the parameter itself keeps from being given to another; a weak reference would forbid swap_tensors.
        self._places: dict[int, tuple[str, Tensor, torch.device]] = {}
        self._active: Active | None = None
        self._versions: dict[str, int] = {}  # of every parameter after the last step; none where nothing is known
        self._awaited: dict[str, int] = {}  # after loading, the digests of the parameters that belong to the state
        self._count, self._training = {"steps": 0}, True  # a dict, which torch.compile keeps track of
        self._record = PieceRecord()
        rates = {"lr": used.rate_of(used.momentum), "momentum": used.momentum}
        super().__init__(params, {**rates, "weight_decay": weight_decay, "maximize": maximize})
        self._bind()

    @property
    def _steps(self) -> int:
        """How many steps were taken."""
        return self._count["steps"]

    # names and geometry

    @property
    def potential(self) -> Potential:
        """The potential, bound to the parameters."""
        return self._bound or self._potential

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; those added during a run start where they are then."""
        own_rate = "lr" in param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            average.check_averaging(self.averaging, group["momentum"])
            if not own_rate:
                group["lr"] = self._used.rate_of(group["momentum"])
            binding.check_group(group)
            if self._bound is not None:
                self._bind()
        except (TypeError, ValueError):
            self.param_groups.pop()  # refused: the optimiser is as it was
            raise

    def _bind(self) -> None:
        named = binding.named_parameters(self.param_groups, self._potential)
        named = binding.without_unknown_frozen(named, self._potential)
        starts = {n: local(self.state[p]["start"]) for n, p in named.items() if "start" in self.state.get(p, {})}
        bound = binding.fit(self._potential, named, starts, self._online, fused=self.fused, order=self._order)
        binding.check_scales(self._online, bound, [n for n, p in named.items() if p.requires_grad])
        self._bound, self._places = bound, {id(p): (n, p, p.device) for n, p in named.items()}
        self._sharded = any(is_sharded(p) for p in named.values())

    # the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; a closure evaluates the model again and returns the loss."""
        rule = None if self._online is None else self._online.rule
        if torch.compiler.is_dynamo_compiling() and (rule in (None, "eigen") or self.check_finite):
            # The choice of pieces is data dependent, and bases turn in some steps alone: one graph break here, instead of a
            # graph for every outcome.
            return torch.compiler.disable(self._step)(closure)  # type: ignore[no-untyped-call]
        return self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None) -> float | None:
        """One step, from top to bottom: look at the gradients, move the iterates z, then the averages x."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._training:
            raise RuntimeError("this optimiser is in eval mode: its parameters are averages now. Call opt.train() first.")
        entries = self._entries()
        moving = [e for e in entries if e.grad is not None]
        if not moving:
            return loss
        grads = {e.name: e.grad for e in moving if e.grad is not None}
        lengths = self._check(entries, grads)
        self._notice_edits(entries)
        share = self._used.share(self._steps)
        tail = [e for e in entries if e.grad is not None or "mean" in e.state] if self.averaging == "tail" else []
        if self._sums is not None:
            # A state of a run without a certificate has this point in its average already, and no sum for it.
            late = [(e.param, e.state) for e in tail if "mean" not in e.state or AVERAGED in e.state]
            average.follow(late, self._steps, ahead=True)
        seen = [] if self._sums is None else self._seen(entries)
        self._count["steps"] += 1
        self._open(moving, grads, loss)

        if self._sums is not None:
            self._sums.add(seen, loss=loss, idle=is_idle(e.group for e in moving))

        # z_{t+1} = argmin <g(x_t), z> + B(z||z_t)/eta
        moves, bound = {}, self.potential
        for e in moving:
            lr = e.group["lr"]  # of a tensor, Python would have to read the number
            eta = (lr if self._online is not None else float(lr)) * share
            eta = eta / (1 - e.group["momentum"]) if self.averaging == "constant" else eta
            eta = eta if self._safeguard is None else eta * self._safeguard.damping
            moves[e.name] = Move(grads[e.name], -eta if e.group["maximize"] else eta, eta * e.group["weight_decay"])
        # a tensor that rests at the centre adds nothing to the forms
        starts = bound.start if isinstance(bound, MaxDiagonal) and bound.keeps_start else None
        points = {e.name: e.z for e in entries if e.grad is not None or starts is None or e.name in starts}
        if self._online is not None and isinstance(bound, MaxDiagonal):
            step = Step(points)
            self._online.advance(
                bound, [Point(e.name, e.z, moves[e.name], e.state, e.param) for e in moving], lengths=lengths
            )
            for e in moving if self._sharded else ():
                binding.share_state(e.state, e.param)
        else:
            active = None
            if isinstance(bound, MaxDiagonal) and bound.pieces > 1:
                if not self._versions.keys() >= points.keys():  # somebody else has changed a parameter
                    self._active = bound.activate(points, self._active)
                active = self._active
            plain = None if self._sums is None else self._sums.mirror
            if self._sums is not None and plain is not None:
                plain.before(self._ball_metric(), active, moves, seen, self._sums.square)
            step = bound.step(points, moves, active=active, exact=self.exact, into=points)
            if plain is not None:
                plain.after(step.active, exact=self.exact)

        # x_{t+1} = m x_t + (1 - m) z_{t+1}
        for e in moving:
            if "z" in e.state:
                e.x.lerp_(e.z, 1 - e.group["momentum"])
        if self._sums is None:
            average.follow([(e.param, e.state) for e in tail], self._steps)
        if step.active is not None:
            self._active = step.active
            self._record.append(step.active.piece)
        self._versions = {e.name: version(e.param) for e in entries}
        if self.averaging == "tail" and self._steps == self._used.steps and not torch.compiler.is_dynamo_compiling():
            self._look_out()
        return loss

    def _entries(self) -> list[Entry]:
        """All parameters, in the order of the groups."""
        found = []
        for group in self.param_groups:
            for p in group["params"]:
                name, _, device = self._places.get(id(p), ("", p, None))
                if device is None and not p.requires_grad:
                    continue  # frozen, and nothing was learned for it
                if device != p.device:
                    # Moved to another device, or replaced by its shards, since this was bound: Accelerate does both.
                    self._versions = {}
                    self._bind()
                    return self._entries()
                if p.grad is None:  # without a gradient a parameter gets no state
                    found.append(Entry(name, p, local(p), None, group, self.state.get(p, {})))
                else:
                    if p.grad.is_sparse or p.grad.is_complex():
                        kind = "sparse" if p.grad.is_sparse else "complex"
                        raise RuntimeError(
                            f"MetaMD needs dense real gradients, but that of {name!r} is {kind}. "
                            "Build the layer without sparse=True, or give this parameter to torch.optim.SparseAdam."
                        )
                    found.append(Entry(name, p, local(p), local(p.grad), group, self.state[p]))
        return found

    def _check(self, entries: list[Entry], grads: Params) -> list[Tensor] | None:
        """Refuse a step that cannot be taken, before anything is written; lengths of the gradients, if they are known."""
        for group in self.param_groups:
            # to look at a rate that is a tensor, Python has to read it
            if (self.check_finite or not isinstance(group["lr"], Tensor)) and not math.isfinite(group["lr"]):
                raise ValueError(f"lr must be finite, got {group['lr']}: a scheduler or an edit of param_groups set it.")
            if self.averaging == "constant":  # a tail average does not use its momentum
                average.check_averaging(self.averaging, group["momentum"])
            self._notice_scheduler(group)
        binding.check_scales(self._online, self.potential, grads)
        # the share of signal needs the lengths anyway, and they say whether all numbers are finite
        found = list(grads.values())
        lengths = None if self._online is None else self._online.lengths(found, narrow=self.check_finite)
        if self.check_finite:
            known = binding.are_finite(grads) if lengths is None else ordinary(lengths)
            if self._sharded or not known:
                binding.refuse_nonfinite({e.name: e.param for e in entries}, grads, known=known)
            if lengths is not None and not known and self._online is not None:
                lengths = self._online.lengths(found)
        if self._steps == 0 or self._versions:
            self.potential.check({e.name: e.x for e in entries if e.name not in self._versions})
        return lengths

    def _notice_edits(self, entries: list[Entry]) -> None:
        """After somebody else changed or added a parameter, pieces begin again at the new point, and its averages."""
        edited = self._edited({e.name: e.param for e in entries})
        self._awaited = {}
        changed = [e for e in entries if e.name in edited]
        for e in changed:
            self._versions = {}
            e.state.pop("z", None)
            e.state.pop("mean", None)
        if changed and self._sums is not None:
            self._sums.forget("a parameter was changed or added from outside")

    def _edited(self, named: Params) -> set[str]:
        """Which parameters somebody else has changed or added since the last step, change of mode, load or copy."""
        if self._awaited:
            now = digests({n: p for n, p in named.items() if n in self._awaited})
            return {n for n, digest in now.items() if differs(self._awaited[n], digest)}
        return {n for n, p in named.items() if self._versions and version(p) != self._versions.get(n)}

    def _see(self, named: Params, edited: Iterable[str]) -> None:
        """Take the parameters as they are now, except those whose edit the next step is to notice."""
        if self._awaited:
            self._awaited = digests({n: named[n] for n in self._awaited}) | dict.fromkeys(edited, EDITED)
        elif self._versions:
            self._versions = {n: version(p) for n, p in named.items()} | dict.fromkeys(edited, -1)

    def _open(self, moving: list[Entry], grads: Params, loss: float | None) -> None:
        """What a step needs before it is taken: iterates, starts, the watch over the family, damping."""
        bound = self.potential
        for e in moving:
            if self.averaging == "constant" and e.group["momentum"] > 0:
                kept = e.state.get("z")
                e.state["z"] = e.param.detach().clone() if kept is None else kept.to(e.param.device)
        if isinstance(bound, MaxDiagonal):
            if bound.keeps_start and any("start" not in e.state for e in moving):
                for e in moving:
                    e.state.setdefault("start", e.param.detach().clone())
                self._bind()
            if self._watch is not None:
                self._watch.observe(self._steps, grads, bound.slots, online=self._online is not None)
        if self._safeguard is not None:
            self._safeguard.update(energy(bound, self._active, grads), None if loss is None else float(loss))

    def _notice_scheduler(self, group: dict[str, Any]) -> None:
        """Say once that a torch scheduler multiplies what the schedule inside multiplies already."""
        lr, first = group["lr"], group.get("initial_lr")  # every torch scheduler notes where lr began
        if first is None or isinstance(lr, Tensor) or lr == first or not self._used.recommended:
            return  # a rate that is a tensor is not read
        self._say_once(
            "scheduler",
            f"a scheduler has changed lr from {first:g} to {lr:g}, on top of what this optimiser does by itself: "
            f"{self._used.usage}. Leave the scheduler out, or take one that keeps lr constant.",
            stacklevel=9,  # from here to the user's loop: the step, and what torch and the scheduler wrap it with
        )

    def _look_out(self) -> None:
        """After the last step, say once that the model is evaluated without its tail average."""
        me = weakref.ref(self, lambda _: handle.remove())

        # An optimiser does not know the model: for a while it looks at all that are called, at the first parameter of each.
        def look(module: nn.Module, args: Any) -> None:
            optimiser, first = me(), next(module.parameters(), None)
            if optimiser is None or (module.training and torch.is_grad_enabled()) or id(first) not in optimiser._places:
                return  # somebody else's, or training that goes on
            handle.remove()
            optimiser._say_once("average", optimiser._unused("this model is evaluated at"), stacklevel=6)

        self._looking = handle = register_module_forward_pre_hook(look)

    def _unused(self, where: str) -> str:
        return (
            f"the {self._used.steps} steps of this run are done, and its tail average was never used: {where} the last "
            "iterate. Evaluate and save the model inside `with opt.averaged():`, or after opt.eval()."
        )

    def _say_once(self, about: str, sentence: str, stacklevel: int = 3) -> None:
        if about not in self._said:
            self._said.add(about)
            warnings.warn(sentence, stacklevel=stacklevel)

    # the modes of a tail average, which is not in the parameters during training

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A block in which the parameters are the tail average, to evaluate or save the model; without one it does nothing.

        Example:
            >>> x = torch.nn.Parameter(torch.ones(2))
            >>> opt = MetaMD([x], MaxDiagonal(pieces=2), lr=0.1, averaging="tail")
            >>> with opt.averaged():
            ...     saved = x.detach().clone()
        """
        training = self._training
        self.eval()
        try:
            yield
        finally:
            if training:
                self.train()

    def eval(self) -> None:
        """Put the tail average into the parameters, to evaluate or save the model."""
        self._switch(training=False)

    def train(self) -> None:
        """Put the iterates back into the parameters, to go on."""
        self._switch(training=True)

    @torch.no_grad()
    def _switch(self, *, training: bool) -> None:
        if self.averaging != "tail" or self._training == training:
            return
        self._said.add("average")  # who uses the average needs no word about it
        if self._looking is not None:
            self._looking.remove()
        named = {n: p for n, p, _ in self._places.values()}
        edited = self._edited(named)
        for p, store in self.state.items():
            if "mean" in store:
                (average.to_iterate if training else average.to_average)(p, store)
        self._training = training
        # an edit is noticed by the next step, unless going back to the iterate has dealt with it
        self._see(named, [n for n in edited if not training or "mean" not in self.state[named[n]]])

    # what can be read off it

    def __repr__(self) -> str:
        return f"{super().__repr__()}{self._used.about}"

    @property
    def active_piece(self) -> int | None:
        """The piece with the largest weight after the last step; None before the first, or without pieces."""
        return None if self._active is None else self._active.piece

    @property
    def active_pieces(self) -> Tensor:
        """The active piece after every step so far."""
        return self._record.expand()

    def _ball(self) -> Ball:
        if self._sums is None:
            raise ValueError("this run has no certificate. Build MetaMD with certify=True before training.")
        named = binding.named_parameters(self.param_groups, self._potential)
        return Ball(self._sums, self.potential, named, {n: self.state.get(p, {}) for n, p in named.items()})

    def _seen(self, entries: list[Entry]) -> list[Seen]:
        """The gradients of a step as the certificate counts them, before the step."""
        tail = self.averaging == "tail"
        return [
            Seen(
                *(e.name, e.param, e.grad, e.state, bool(e.group["maximize"])),
                average.last_share(e.state, self._steps) if tail and "mean" in e.state else None,
            )
            for e in entries
        ]

    def _ball_metric(self) -> MaxDiagonal:
        bound = self.potential
        return bound if isinstance(bound, MaxDiagonal) else euclidean_metric({n: p for n, p, _ in self._places.values()})

    # saving and copying

    def state_dict(self) -> dict[str, Any]:
        """As for any torch optimiser. It holds the state of the run, not the geometry: keep the learned file beside it."""
        used, kind, guard = self._used, self._kind(), self._safeguard or Safeguard()
        if self._training and self.averaging == "tail" and used.steps is not None and self._steps >= used.steps:
            self._say_once("average", self._unused("the parameters are"))
        weights = np.zeros(kind.pieces) if self._active is None else self._active.weights
        shared = {
            "step": torch.tensor(self._steps),
            "weights": torch.as_tensor(weights, dtype=torch.float64).clone(),
            "safeguard": torch.tensor([guard.damping, guard.log_reference], dtype=torch.float64),
            "pieces": self._record.encode(),
            **{k: v for k, v in vars(kind).items() if k != "pieces" and v is not None},
            "training": self._training,
            **({} if self._sums is None else {"certificate": self._sums.encode()}),
        }
        for group in self.param_groups:
            group.update(shared)
        # Where something is kept that an edit makes wrong, the state says what the parameter was.
        named = {
            n: p
            for n, p, _ in self._places.values()
            if self._sums is not None or self.state.get(p, {}).keys() & {"z", "mean"}
        }
        edited = self._edited(named)
        for n, digest in digests(named).items():
            self.state[named[n]][SEEN] = torch.tensor(EDITED if n in edited else digest)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state_dict was taken, in the same geometry.

        Parameters keep their names. A state_dict that cannot be continued is refused, and nothing is changed.
        """
        # A load hook may return another state_dict: a hook behind all others sees the one that is loaded.
        last = self.register_load_state_dict_pre_hook(lambda _, loaded: self._accept(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            loaded, self._loading = self._loading, None
        for sentence in () if loaded is None else loaded[0].other:
            warnings.warn(sentence, stacklevel=2)

    def _accept(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Refuse a state_dict that cannot be continued, before anything is changed."""
        saved = read_state(state_dict, self._kind(), self.param_groups)
        certificate = saved.state_dict["param_groups"][0].get("certificate")
        self._loading = saved, None if self._sums is None else self._sums.resumed(certificate, saved.steps)
        return saved.state_dict

    def _resume(self, saved: Saved, sums: RunSums | None) -> None:
        """Take over what torch does not: it has put groups and state in their places, and rounded the state."""
        mend_state(saved.state_dict, self._kind(), self.param_groups, self.state)
        for group in self.param_groups:
            group.pop("certificate", None)  # or a run that goes on without would save it again
        self._sums = sums
        if sums is not None and not sums.steps:
            forget_stores(self.state.values())
        self._count, self._training, self._record = {"steps": saved.steps}, saved.training, saved.record
        # The forms are found again at the next step: the versions say that nothing is known of the parameters.
        self._active = Active(saved.weights, np.zeros_like(saved.weights)) if saved.weights.any() else None
        self._versions = {}
        if self._safeguard is not None:
            self._safeguard = Safeguard(*saved.safeguard)
        self._bind()
        # The parameters may be loaded before or after this: the next step compares them with what they were.
        stores = {n: self.state.get(p, {}) for n, p, _ in self._places.values()}
        self._awaited = {n: int(store[SEEN]) for n, store in stores.items() if SEEN in store}

    def __getstate__(self) -> dict[str, Any]:
        edited = self._edited({n: p for n, p, _ in self._places.values()}) if self._versions else None
        return {**super().__getstate__(), **{k: v for k, v in self.__dict__.items() if k in _COPIED}, "edited": edited}

    def __setstate__(self, state: dict[str, Any]) -> None:
        edited = state.get("edited")
        super().__setstate__({k: v for k, v in state.items() if k != "edited"})
        for group in self.param_groups:
            for option, without in _FIRST.items():
                group.setdefault(option, without)
        if "_potential" in state:
            self._versions = {}
            self._bound = None
            self._bind()
            if edited is not None:  # a copy of parameters has versions of its own
                named = {n: p for n, p, _ in self._places.values()}
                self._versions = {n: -1 if n in edited else version(p) for n, p in named.items()}
        elif self._loading is not None:
            self._resume(*self._loading)

    def _kind(self) -> Kind:
        phi = self._potential
        if self._hash is None:
            self._hash = fingerprint(phi) if isinstance(phi, MaxDiagonal) else repr(phi)  # reads all metrics: once
        pieces = phi.pieces if isinstance(phi, MaxDiagonal) else 0
        return Kind(pieces, self._hash, metric_code(self._online), self.averaging, self._used.steps)


_FIRST = {"weight_decay": 0.0, "maximize": False, "momentum": 0.0}
"""What the options of a group mean where they are missing: the state was taken before there were any."""

# what pickle and deepcopy keep; the rest is bound anew
_COPIED = (
    *(
        "_active",
        "_awaited",
        "_hash",
        "_header",
        "_potential",
        "_record",
        "_safeguard",
        "_count",
        "_sums",
        "_training",
        "_watch",
    ),
    *("_online", "_order", "_said", "_used", "averaging", "check_finite", "exact", "fused"),
)


def takes_polar_steps(learned: LearnedOptimiser) -> bool:
    """Whether polar steps are what the file recommends."""
    return learned.usage.metric == "online" and learned.online is not None and learned.online.rule == "polar"


def refreshed(learned: LearnedOptimiser, refresh: int) -> LearnedOptimiser:
    """The same learned optimiser, whose polar steps find their directions every so many steps."""
    online = learned.online
    if online is None or not takes_polar_steps(learned):
        raise ValueError(
            f"refresh says how often the directions of polar steps are found, but this file recommends the {learned.usage}. "
            "Leave refresh out."
        )
    if type(refresh) is not int or refresh < 1:
        raise ValueError(f"refresh must be a number of steps, 1 or more; got {refresh!r}. Pass refresh=4, say.")
    return replace(learned, header=replace(learned.header, online=replace(online, refresh=refresh).to_dict()))


def prepare(
    params: Iterable[Any],
    learned: LearnedOptimiser | str | PathLike[str],
    *,
    steps: int,
    refresh: int | None = None,
    **options: Any,
) -> tuple[MetaMD, LambdaLR]:
    """The pair (optimiser, scheduler) that takes the steps of `MetaMD(params, learned, steps=steps)`.

    The schedule is outside: call `scheduler.step()` after every `optimiser.step()`.

    Where the file recommends a tail average, call `optimiser.eval()` before the model is used and `optimiser.train()` before
    going on: the parameters are the average in between. Nothing is lost where that is forgotten but the average.

    Args:
        params: `model.named_parameters()`, as for `MetaMD`.
        learned: what `load` gives, or what it takes: a path, or the name of a shipped one. One without a `usage` is used
            plainly.
        steps: how many times `schedule.step()` will be called: the length of the run.
        refresh: how often a file that recommends polar steps finds their directions: 4 makes a step of a small network half
            as long, and takes a few more of them. What the file says if not given, which is every step.
        options: of `MetaMD`; they win over recommended ones.

    Example:
        >>> import metamd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> learned = metamd.LearnedOptimiser.from_potential(metamd.Diagonal().bind(dict(model.named_parameters())))
        >>> opt, schedule = prepare(model.named_parameters(), learned, steps=100)
    """
    found = binding.opened_file(learned)
    optimiser = MetaMD(params, found if refresh is None else refreshed(found, refresh), steps=steps, **options)
    share, optimiser._used = optimiser._used.share, replace(optimiser._used, steps=None)
    return optimiser, LambdaLR(optimiser, share)

"""`MetaMD`, mirror descent in a learned geometry as a `torch.optim.Optimizer`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from metamd.files.learned import LearnedOptimiser
from metamd.files.usage import Metric
from metamd.optimiser import averaging as average
from metamd.optimiser import binding
from metamd.optimiser.averaging import WITH_MODES, AveragingName
from metamd.optimiser.certificate.bounds import CertifiedRun
from metamd.optimiser.certificate.record import Certificate, Reference
from metamd.optimiser.certificate.sums import Sums
from metamd.optimiser.checkpoint import Kind, forget_metric, keep_wide, metric_code, refuse_foreign
from metamd.optimiser.guard import Safeguard, energy
from metamd.optimiser.pieces import PieceRecord
from metamd.potentials.base import Active, Move, Params, Potential, Step
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.online import Online
from metamd.potentials.sharding import local


class MetaMD(Optimizer):
    """Mirror descent in a learned geometry, as an ordinary torch optimiser.

    theta+ = argmin <g, theta> + B(theta||theta_t)/lr. A learned geometry has its step sizes inside: lr = 1 uses them as
    they are. The choice of the active piece is one for the whole model, over all groups.

    The metric, momentum and schedule that a file recommends are set up by `metamd.prepare`. Here every option is what its
    default says, as in any torch optimiser; `print(opt)` has a line about the difference.

    Args:
        params: as for any torch optimiser; `model.named_parameters()` for a learned geometry.
        geometry: a `LearnedOptimiser`, or a potential.
        lr: a factor on the learned step sizes; the learning rate for a potential that was not learned. Of a group, it
            scales that group's gradient. Its default takes the learned step sizes as they are: 1 - momentum, of a group
            its own.
        momentum: gradients are taken at an average of the iterates, which keeps this share of itself in every step; for
            `Euclidean()` that is SGD with momentum, and lr means the same.
        weight_decay: decoupled, towards zero.
        maximize: ascend instead.
        exact: False takes the paper's step.
        fused: one pass over memory by a compiled kernel (CPU).
        certify: add up what `certificate` needs, at the cost of one copy of the parameters.
        check_finite: refuse a step with NaN or infinite gradients before anything is written.
        safeguard: halve the step while the run blows up.
        averaging: the weights of the average: "constant" ones (momentum), "anytime" (1/t), "schedule-free", or "tail", an
            average beside the run; these two need `opt.eval()` before the model is used and `opt.train()` after.
        metric: "learned", or "online": the diagonal follows the run in the learned coordinates, at the scale that the file
            has for it; an `Online` for a rule and scales of your own.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> opt = MetaMD([x], MaxDiagonal(pieces=2), lr=0.1)
        >>> (x**2).sum().backward()
        >>> opt.step()
        >>> x
        Parameter containing:
        tensor([ 0.8000, -0.8000], requires_grad=True)
    """

    def __init__(
        self,
        params: Iterable[Any],
        geometry: LearnedOptimiser | Potential,
        lr: float | Tensor | None = None,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        exact: bool = True,
        fused: bool = False,
        certify: bool = False,
        check_finite: bool = True,
        safeguard: bool = False,
        averaging: AveragingName = "constant",
        metric: Metric | Online = "learned",
    ) -> None:
        self.exact, self.fused, self.check_finite, self.averaging = exact, fused, check_finite, averaging
        self._safeguard = Safeguard() if safeguard else None
        self._potential, self._watch = binding.unwrap(geometry)
        self._online = binding.online_metric(metric, geometry)
        self._recommended, self._order = binding.recommended(geometry), binding.layer_order(geometry)
        self._bound: Potential | None = None
        if certify and self._online is not None:
            raise ValueError(
                "certify=True covers the learned metric, with plain mirror descent or constant-weight averages, got an "
                'online metric. Pass metric="learned", or leave certify=False.'
            )
        self._sums = Sums(paper=not exact) if certify else None
        self._hash: str | None = None
        # By id, which the parameter itself keeps from being given to another; a weak reference would forbid swap_tensors.
        self._places: dict[int, tuple[str, Tensor, torch.device]] = {}
        self._active: Active | None = None
        self._versions: dict[str, int] = {}
        self._steps, self._restart, self._training = 0, 0, True
        self._record = PieceRecord()
        self._learned_steps = lr is None
        lr = 1.0 if lr is None else lr
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize})
        self._bind()

    # names and geometry

    @property
    def potential(self) -> Potential:
        """The potential, bound to the parameters."""
        return self._bound or self._potential

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; those added during a run start where they are then."""
        learned_steps = self._learned_steps and "lr" not in param_group
        super().add_param_group(param_group)
        try:
            binding.settle_group(self.param_groups[-1], self.averaging, learned_steps=learned_steps)
            if self._bound is not None:
                self._bind()
        except ValueError:
            self.param_groups.pop()  # refused: the optimiser is as it was
            raise

    def _bind(self) -> None:
        named = binding.named_parameters(self.param_groups, self._potential)
        starts = {n: local(self.state[p]["start"]) for n, p in named.items() if "start" in self.state.get(p, {})}
        binding.check_whole(self._online, named)
        bound = binding.fit(self._potential, named, starts, fused=self.fused, order=self._order)
        binding.check_scales(self._online, bound, [n for n, p in named.items() if p.requires_grad])
        self._bound, self._places = bound, {id(p): (n, p, p.device) for n, p in named.items()}
        if self._sums is not None:
            self._sums.bind(self._bound, named)

    # the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        if torch.compiler.is_dynamo_compiling():
            # The choice of pieces is data dependent: one graph break here, instead of a graph for every outcome.
            return torch.compiler.disable(self._step)(closure)  # type: ignore[no-untyped-call]
        return self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._training:
            raise RuntimeError("this optimiser is in eval mode: its parameters are averages now. Call opt.train() first.")
        named, grads, groups = self._gather()
        if not grads:
            return loss
        average.check_groups(self.param_groups, self.averaging)
        binding.check_scales(self._online, self.potential, grads)
        if self.check_finite:
            binding.refuse_nonfinite(named, grads)
        self._check_domain(named)
        self._notice_edits(named)
        self._begin(named, grads, loss)
        params = {n: local(p) for n, p in named.items() if n in grads or self._stands_off_centre(n)}
        points = {n: local(self.state.get(named[n], {}).get("z", x)) for n, x in params.items()}
        moves = {n: self._move(grads[n], groups[n]) for n in grads}
        averaged = {n: groups[n]["momentum"] for n in grads if points[n] is not params[n]}
        counts = {n: self._steps - self.state[named[n]].get("since", self._restart) for n in averaged}
        active = None if self._online is not None else self._current(points)
        if self._sums is not None:
            stores = {n: self.state[p] if n in moves else self.state.get(p, {}) for n, p in named.items()}
            self._sums.before(active, moves, named, stores)
        if self.averaging == "schedule-free":
            for n, momentum in averaged.items():
                average.lift(params[n], points[n], counts[n], momentum, self.state[named[n]])
        step = self._advance(named, points, moves, active)
        if self._sums is not None:
            self._sums.after(step.active)
        for n, momentum in averaged.items():
            average.blend(params[n], points[n], counts[n], momentum, self.averaging)
        for n, p in named.items() if self.averaging == "tail" else ():
            if n in grads or "mean" in self.state.get(p, {}):
                average.follow(p, self.state[p], self._steps)
        self._finish(step, named)
        return loss

    def _advance(self, named: Params, points: dict[str, Tensor], moves: Mapping[str, Move], active: Active | None) -> Step:
        """Move the iterates, in place."""
        bound = self.potential
        if self._online is None or not isinstance(bound, MaxDiagonal):
            return bound.step(points, moves, active=active, exact=self.exact, into=points)
        for n, move in moves.items():
            state = self.state[named[n]]
            self._online.advance(bound, n, points[n], move, state)
            binding.share_state(state, named[n])
        return Step(points)

    def _gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Any]]]:
        named, grads, groups = {}, {}, {}
        for group in self.param_groups:
            for p in group["params"]:
                name, _, device = self._places.get(id(p), ("", p, None))
                if device != p.device:
                    # Moved to another device, or replaced by its shards, since this was bound: Accelerate does both.
                    self._versions = {}
                    self._bind()
                    return self._gather()
                named[name] = p
                if p.grad is None:
                    continue
                binding.refuse_unusual(name, p.grad)
                grads[name], groups[name] = local(p.grad), group
        return named, grads, groups

    def _notice_edits(self, named: Params) -> None:
        """After somebody else changed or added a parameter, pieces begin again at the new point, and averages of those."""
        changed = self._edited(named)
        if changed:
            average.begin_again([self.state[named[n]] for n in changed], self.state.values(), self._restart)
            self._versions, self._restart = {}, self._steps
        if changed and self._sums is not None:
            self._sums.restart("a parameter was changed or added from outside")

    def _edited(self, named: Params) -> list[str]:
        """What somebody else has changed or added since the last step or change of mode."""
        return [n for n, p in named.items() if self._versions and local(p)._version != self._versions.get(n)]

    def _check_domain(self, named: Params) -> None:
        """Refuse parameters outside of the domain before their first step."""
        if self._steps == 0 or self._versions:
            self.potential.check({n: local(p) for n, p in named.items() if n not in self._versions})

    def _begin(self, named: Params, grads: Params, loss: float | None) -> None:
        """What a step needs before it is taken: domain, start, the watch over the family, damping."""
        self._steps += 1
        bound = self.potential
        average.open_iterates(self.param_groups, self.state, self.averaging, self._steps - 1)
        if isinstance(bound, MaxDiagonal):
            if bound.keeps_start and any("start" not in self.state[named[n]] for n in grads):
                for n in grads:
                    self.state[named[n]].setdefault("start", named[n].detach().clone())
                self._bind()
            if self._watch is not None:
                keys = {n: s.key for n, s in bound.slots.items()}
                self._watch.observe(self._steps, grads, keys, online=self._online is not None)
        if self._safeguard is not None:
            self._safeguard.update(energy(bound, self._active, grads), None if loss is None else float(loss))

    def _stands_off_centre(self, name: str) -> bool:
        """Whether a tensor that does not move contributes to the forms."""
        bound = self.potential
        return not (isinstance(bound, MaxDiagonal) and bound.keeps_start) or name in bound.start

    def _move(self, grad: Tensor, group: Mapping[str, Any]) -> Move:
        lr = self._rate(group)
        return Move(grad, -lr if group["maximize"] else lr, lr * group["weight_decay"])

    def _rate(self, group: Mapping[str, Any]) -> float:
        lr = average.rate_of_iterate(float(group["lr"]), group["momentum"], self.averaging)
        return lr * (self._safeguard.damping if self._safeguard is not None else 1.0)

    def _current(self, params: Params) -> Active | None:
        """The active pieces at the present point; recomputed if somebody else changed a parameter since the last step."""
        bound = self.potential
        if not isinstance(bound, MaxDiagonal) or bound.pieces == 1:
            return None
        if not self._versions.keys() >= params.keys():
            self._active = bound.activate(params, self._active)
        return self._active

    def _finish(self, step: Step, named: Params) -> None:
        if step.active is not None:
            self._active = step.active
            self._record.append(step.active.piece)
        self._versions = {n: local(p)._version for n, p in named.items()}

    # the modes of averages that are not in the parameters

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters, to evaluate or save the model; "schedule-free" and "tail" need it."""
        self._switch(training=False)

    @torch.no_grad()
    def train(self) -> None:
        """Put the point where gradients are taken into the parameters, to go on."""
        self._switch(training=True)

    def _switch(self, *, training: bool) -> None:
        if self.averaging not in WITH_MODES or self._training == training:
            return
        named = {n: p for n, p, _ in self._places.values()}
        edited = self._edited(named) if self.averaging == "tail" else []
        (average.to_gradient_points if training else average.to_averages)(self.param_groups, self.state, self.averaging)
        self._training = training
        if self._versions:
            noticed = (n for n in edited if not training or "mean" not in self.state[named[n]])  # for the next step
            self._versions = {n: local(p)._version for n, p in named.items()} | dict.fromkeys(noticed, -1)

    # what can be read off it

    def __repr__(self) -> str:
        return f"{super().__repr__()}{self._recommended}"

    @property
    def active_piece(self) -> int | None:
        """The piece with the largest weight after the last step; None before the first, or without pieces."""
        return None if self._active is None else self._active.piece

    @property
    def active_pieces(self) -> Tensor:
        """The active piece after every step so far."""
        return self._record.expand()

    def certificate(self, reference: Reference | None = None, *, radius: float | None = None) -> Certificate:
        """What is guaranteed for the run so far; needs `certify=True`.

        Args:
            reference: the comparator u: a state_dict, a module, or tensors in the order of the parameters.
            radius: instead of it, rho: every u with B(u || start) <= rho^2/2 is a comparator.
        """
        if self._sums is None:
            raise ValueError("this run has no certificate. Build MetaMD with certify=True before training.")
        named = binding.named_parameters(self.param_groups, self._potential)
        stores = {n: self.state.get(p, {}) for n, p in named.items()}
        binding.refuse_edited(named, self._versions, stores)
        return CertifiedRun(self._sums, named, stores, self._active, self.averaging).certificate(reference, radius)

    # saving and copying

    def state_dict(self) -> dict[str, Any]:
        """As for any torch optimiser. It holds the state of the run, not the geometry: keep the learned file beside it."""
        weights = np.zeros(binding.piece_count(self._potential)) if self._active is None else self._active.weights
        guard = self._safeguard or Safeguard()
        shared = {
            "step": torch.tensor(self._steps),
            "weights": torch.as_tensor(weights, dtype=torch.float64).clone(),
            "safeguard": torch.tensor([guard.damping, guard.log_reference], dtype=torch.float64),
            "pieces": self._record.encode(),
            **self._kind().shared(),
            "restart": torch.tensor(self._restart),
            "training": self._training,
            **({} if self._sums is None else {"certificate": self._sums.encode()}),
        }
        for group in self.param_groups:
            group.update(shared)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state_dict was taken, in the same geometry."""
        refuse_foreign(state_dict, self._kind())
        saved = state_dict["param_groups"][0]
        sums = None if self._sums is None else self._sums.resumed(saved.get("certificate"), int(saved["step"]))
        super().load_state_dict(state_dict)
        keep_wide(state_dict, self.param_groups, self.state)
        forget_metric(state_dict, self._kind(), self.state)
        group = self.param_groups[0]
        self._sums = sums
        for each in self.param_groups:
            each.pop("certificate", None)  # or a run that goes on without would save it again
        self._steps, self._restart = int(group["step"]), int(group.get("restart", 0))
        self._training = bool(group.get("training", True))
        self._record = PieceRecord.decode(group["pieces"])
        weights = group["weights"].cpu().double().numpy()
        # The forms are found again at the next step: the versions say that nothing is known of the parameters.
        self._active = Active(weights, np.zeros_like(weights)) if weights.any() else None
        self._versions = {}
        if self._safeguard is not None:
            self._safeguard = Safeguard(*group["safeguard"].tolist())
        self._bind()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{k: v for k, v in self.__dict__.items() if k in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("momentum", 0.0)  # taken before there was any
        if "_potential" in state:
            self._versions = {}
            self._bound = None
            self._bind()

    def _kind(self) -> Kind:
        if self._hash is None:
            self._hash = binding.geometry_code(self._potential)  # reads all metrics: once
        return Kind(binding.piece_count(self._potential), self._hash, metric_code(self._online), self.averaging)


# what pickle and deepcopy keep; the rest is bound anew
_COPIED = (
    *("_active", "_hash", "_potential", "_record", "_restart", "_safeguard", "_steps", "_sums", "_training", "_watch"),
    *("_learned_steps", "_online", "_order", "_recommended", "averaging", "check_finite", "exact", "fused"),
)

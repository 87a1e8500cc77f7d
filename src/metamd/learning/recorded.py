"""Learning from ordinary runs: hooks on any torch optimiser record them, and a geometry is learned from the records."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from metamd.files.learned import LearnedOptimiser, Moments, total_cost
from metamd.files.recorded_run import Run
from metamd.files.text import shown
from metamd.files.versions import versions as library_versions
from metamd.inner.closed_form import minimiser, moments_of
from metamd.inner.objectives import Regret
from metamd.inner.run import Trajectory
from metamd.learning.rounds import gradient_scale, total_squares
from metamd.potentials.diagonal import Diagonal
from metamd.potentials.forms import grouped_squares, widen
from metamd.potentials.sharding import is_sharded
from metamd.potentials.tying import Shape, TyingName, clean_names, some, stored_shape, tied_shape

STATE_VERSION = 2


class Recorder:
    """Watches an optimiser through its public hooks and records one training run.

    It keeps theta_1 and sum_t g_t^2, the gradients being those that the optimiser saw: clipped, unscaled, averaged over
    processes. Steps that a GradScaler skips or that raise are not counted. Training is not changed.

    Args:
        optimiser: any torch optimiser whose parameters have names.
        tying: which coordinates will share a metric; coarser ones can still be chosen by `learn`.
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
        tying: TyingName = "parameter",
        named: Iterable[tuple[str, Tensor]] | None = None,
        batch_size: int | None = None,
        name: str = "",
    ) -> None:
        if not isinstance(optimiser, Optimizer):
            raise TypeError(f"Recorder needs a torch optimiser, got {type(optimiser).__name__}. Pass the one that trains.")
        if tying not in get_args(TyingName):
            raise ValueError(f"tying must be one of {', '.join(get_args(TyingName))}; got {tying!r}.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}. Leave it out if it is not known.")
        self.optimiser, self.tying, self.batch_size, self.name = optimiser, tying, batch_size, name
        self._given = None if named is None else {id(p): n for n, p in named}
        self._params: dict[str, Tensor] = {}
        self._start: dict[str, Tensor] = {}
        self._rms: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self.steps = 0  # how many were recorded so far
        self._pending: dict[str, Tensor] | None = None
        self._finished = False
        self._scan()
        self._hooks = optimiser.register_step_pre_hook(self._before), optimiser.register_step_post_hook(self._after)

    def detach(self) -> None:
        """Stop recording and leave the optimiser as it was."""
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> Run:
        """Stop recording and return the record, once; the end of the run is where the parameters are now."""
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
        )

    # the hooks

    @torch.no_grad()
    def _before(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._pending = None
        if {id(p) for p in self._params.values()} != {id(p) for group in optimiser.param_groups for p in group["params"]}:
            self._scan()
        for n, p in self._params.items():
            if n not in self._start:
                self._start[n] = p.detach().clone(memory_format=torch.contiguous_format)
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
        if self.tying == "parameter":
            squares: Iterable[Tensor] = torch._foreach_mul(grads, grads) if grads else ()
        else:
            shapes = [(tied_shape(self.tying, s), stored_shape(self.tying, s)) for s in (tuple(g.shape) for g in grads)]
            squares = [grouped_squares(g, tied).reshape(to) for g, (tied, to) in zip(grads, shapes, strict=True)]
        scale = getattr(self.optimiser, "grad_scale", None)
        if scale is not None:  # and unscales by itself
            squares = [s / scale.to(s.device, s.dtype).square() for s in squares]
        self._pending = dict(zip(names, squares, strict=True))

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
            "tying": self.tying,
            "start": {n: x.clone() for n, x in self._start.items()},
            "gradient_rms": dict(self._rms),
            "steps": self.steps,
            "sums": {n: x.clone() for n, x in self._sums.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a record.

        Args:
            state: what `state_dict` gave, of a recorder with the same options on an optimiser of the same parameters.
        """
        if state.get("version") not in (1, STATE_VERSION):
            raise ValueError(f"a record must have the version 1 or {STATE_VERSION}, got {state.get('version')!r}.")
        if state.get("tying") != self.tying:
            raise ValueError(
                f"this record was made with tying = {state.get('tying')!r}, but this Recorder has {self.tying!r}. "
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


def _dense(name: str, grad: Tensor | None) -> Tensor:
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"Recorder needs dense gradients, but that of {name!r} is sparse. Build the layer without sparse=True, or leave "
            "its parameters to an optimiser of their own."
        )
    return widen(grad)


# learning from records


RECORDED_PRIOR = 0.1
"""The default strength s of the prior: a coordinate that stands still has a step size of at least sqrt(s/2 / (1 + s)), here
0.21, of its tensor's and of the model's; without a prior, zero."""


def learn(
    runs: Sequence[Run],
    *,
    weights: Sequence[float] | None = None,
    tying: TyingName | None = None,
    prior: float = RECORDED_PRIOR,
) -> LearnedOptimiser:
    """Learn a geometry from recorded runs, the closed form D_i = sqrt(E sum_t g_ti^2 / E delta_i^2) [Khodak2019].

    It has one piece: a mixture has to be run to be judged, and `meta_train` learns those.
    The comparator is the end of each run. A coordinate that hardly moved would be given a step size near zero, move less in
    the next run, and so on; the prior prevents it: squared step sizes are averaged with their tensor's, see `Regret`.

    Args:
        runs: of models with the same tensors; by role, of any widths and depths.
        weights: one for each run; equal if not given.
        tying: which coordinates share a metric; as recorded if not given.
        prior: its strength; 0 for none.

    Example:
        >>> start, end = {"x": torch.tensor([0.0])}, {"x": torch.tensor([2.0])}
        >>> run = Run(start, end, {"x": torch.tensor([[16.0]])}, {"x": 4.0}, steps=1)
        >>> learn([run]).potential.log_d["x"].exp()
        tensor([[2.]], grad_fn=<ExpBackward0>)
    """
    shares = _weights(runs := _listed(runs), weights)
    recorded = sorted({run.tying for run in runs})
    if tying is None and len(recorded) > 1:
        raise ValueError(
            f'the runs were recorded with the tyings {", ".join(map(repr, recorded))}. Pass one, such as tying="tensor".'
        )
    tying = tying or recorded[0]
    _check_runs(runs, tying, runs[0].model, set())
    return _solve(runs, shares, tying, prior)


def update(
    learned: LearnedOptimiser, runs: Sequence[Run], *, weights: Sequence[float] | None = None, decay: float = 1.0
) -> LearnedOptimiser:
    """Add runs to those that a geometry was learned from; with decay 1 the result is that of `learn` on all of them.

    Args:
        learned: what `learn` or `update` gave, or its file.
        runs: the new ones.
        weights: one for each new run; 1 if not given.
        decay: the factor on the weights of the earlier runs, at most 1.
    """
    if not isinstance(learned, LearnedOptimiser):
        raise TypeError(f"learned must be a LearnedOptimiser, got {type(learned).__name__}. Pass metamd.load(path).")
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be above 0 and at most 1, got {decay}. Pass 1 to keep all runs alike.")
    header, earlier = learned.header, learned.header.learned_from
    if earlier is None or learned.moments is None:
        raise ValueError(
            "this learned optimiser does not hold the sums of the runs it was learned from, so that nothing can be added to "
            "them. Learn one from recorded runs with metamd.learn(runs), and keep its moments."
        )
    shares = _weights(runs := _listed(runs), weights)
    _check_runs(runs, header.tying, header.model or runs[0].model, {row["fingerprint"] for row in earlier["runs"]})
    found = _solve(runs, shares, header.tying, earlier["prior"], learned, decay)
    return replace(found, header=replace(found.header, family=header.family, seeds=header.seeds))


_HEAVIEST = 1e30
"""Times squared gradients this is still far from the largest number, 1.8e308."""


def _solve(
    runs: Sequence[Run],
    shares: Sequence[float],
    tying: TyingName,
    prior: float,
    earlier: LearnedOptimiser | None = None,
    decay: float = 1.0,
) -> LearnedOptimiser:
    """The closed form for these runs, and for those of an earlier file; the header says where it comes from."""
    bound = [Diagonal(tying=tying).bind(run.start) for run in runs]
    weights, regret, model, none = list(shares), Regret(prior=prior), runs[0].model, torch.zeros(0)
    moments, scales = [], []
    rows: list[dict[str, Any]] = []
    for run, phi, weight in zip(runs, bound, shares, strict=True):
        squares = {n: s.double().sum(0) for n, s in run.tied_squares(tying).items()}
        moments.append(moments_of(Trajectory(none, run.start, run.end, squares, lr=1.0, steps=run.steps), phi, regret))
        numbers = {n: run.start[n].numel() for n in phi.slots}
        first = total_squares((phi.slots[n].key, count * run.gradient_rms[n] ** 2, count) for n, count in numbers.items())
        scales.append({k: (weight * (total / max(count, 1)), weight) for k, (total, count) in first.items()})
        mark = {"name": run.name, "fingerprint": run.fingerprint(), "steps": run.steps, "batch_size": run.batch_size}
        rows.append({**mark, "weight": weight})
    cost: Mapping[str, float] = {"runs": len(runs), "gradient_evaluations": sum(run.steps for run in runs)}
    if earlier is not None and earlier.moments is not None and earlier.header.learned_from is not None:
        header, model = earlier.header, earlier.header.model
        before = [{**row, "weight": row["weight"] * decay} for row in earlier.header.learned_from["runs"]]
        kept = Moments(*({k: v.double() for k, v in part.items()} for part in (earlier.moments.x, earlier.moments.y)))
        moments, weights, bound = [kept, *moments], [decay, *weights], [earlier.potential, *bound]
        share = sum(row["weight"] for row in before)
        scales = [{k: (share * v**2, share) for k, v in header.gradient_scale.items()}, *scales]
        rows, cost = before + rows, total_cost(header.cost, cost)
    if not max(row["weight"] * row["steps"] for row in rows) < _HEAVIEST:
        raise ValueError(
            f"weights must be below {_HEAVIEST:g} over the steps of a run, got {max(row['weight'] for row in rows):g}: the "
            "sums over all runs would overflow. Weights count relative to each other; 1 is the usual one."
        )
    total = Moments.total(moments, weights)
    # metrics to keep where the runs say nothing, and their types: those of the first that has them
    present = {k: v.detach() for phi in reversed(bound) for k, v in phi.log_d.items()}
    potential = Diagonal(tying=tying).with_metrics(minimiser(total, present))
    sizes = {row["batch_size"] for row in rows}
    about = LearnedOptimiser.from_potential(
        potential,
        model=dict(model) if all(run.model == model for run in runs) else {},
        horizon=max(1, round(sum(row["weight"] * row["steps"] for row in rows) / sum(row["weight"] for row in rows))),
        batch_size=sizes.pop() if len(sizes) == 1 else None,
        gradient_scale=gradient_scale(scales),
        objective=repr(regret),
        estimator="ClosedForm()",
        versions=library_versions(),
        cost=dict(cost),
        learned_from={"prior": prior, "runs": rows},
    ).header
    # in the type of the metrics: what a file gives back is what was saved
    x, y = ({k: v.to(present[k].dtype) for k, v in part.items()} for part in (total.x, total.y))
    return LearnedOptimiser(about, potential, Moments(x, y))


# the door


def _listed(runs: Any) -> list[Run]:
    """The runs as a list; what is none is refused."""
    found = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str | bytes) else [runs]
    if wrong := [run for run in found if not isinstance(run, Run)]:
        raise TypeError(
            f"runs must be a list of recorded runs, got {shown(wrong[0])} in it. Pass what Recorder.finish() gives, or "
            "metamd.Run.load(path)."
        )
    return found


def _weights(runs: Sequence[Run], weights: Sequence[float] | None) -> list[float]:
    if not runs:
        raise ValueError(
            "there must be at least one run to learn from, got none. Record one with metamd.Recorder(optimiser)."
        )
    if weights is None:
        return [1.0] * len(runs)
    if len(weights) != len(runs):
        raise ValueError(f"there must be one weight for every run, got {len(weights)} for {len(runs)} runs.")
    if not all(0 < w < math.inf for w in weights):
        raise ValueError(
            f"weights must be positive and finite, got {shown(list(weights))}. Leave out a run that shall not count."
        )
    return [float(w) for w in weights]


def _check_runs(runs: Sequence[Run], tying: TyingName, model: Mapping[str, Shape], seen: set[str]) -> None:
    """Refuse runs that diverged, that are there already (their fingerprints are `seen`), or that are of another model."""
    for i, run in enumerate(runs):
        called = f"{run.label} ({i + 1} of {len(runs)})"
        if run.diverged:
            raise ValueError(f"{called} diverged: {run.diverged} Leave it out, and lower the learning rate of the next.")
        if all(torch.equal(run.start[n], run.end[n]) for n in run.model):
            raise ValueError(
                f"{called} never moved: it ends where it started, so that it says nothing of step sizes. Record a run that "
                "trains; its learning rate may be zero, or its parameters frozen."
            )
        mark = run.fingerprint()
        if mark in seen:
            raise ValueError(f"{called} is there already: the same record counts once. Give it a larger weight instead.")
        seen.add(mark)
        other = [n for n in (*model, *run.model) if run.model.get(n) != model.get(n)] if tying != "role" else []
        for n in other[:1]:
            has, needs = (f"{n!r} of shape {m[n]}" if n in m else f"no {n!r}" for m in (run.model, model))
            raise ValueError(
                f"{called} is of another model: it has {has}, where the others have {needs}. Runs of different models can "
                'be combined by role: tying="role".'
            )
        run.tied_squares(tying)  # says whether its sums can be tied so

"""Learning from ordinary runs: hooks on any torch optimiser record them, and a geometry is learned from the records."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from metamd.files.container import shapes
from metamd.files.learned import LearnedOptimiser, Moments, total_cost
from metamd.files.recorded_run import COLUMNS, Run, products_shapes
from metamd.files.text import shown
from metamd.files.usage import Schedule, Usage
from metamd.files.versions import versions as library_versions
from metamd.inner.closed_form import Iterate, learn_factors, minimiser, moments_of
from metamd.inner.objectives import Regret
from metamd.inner.run import Trajectory
from metamd.learning.rounds import gradient_scale, total_squares
from metamd.optimiser.binding import Options
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials.diagonal import Diagonal, Kronecker, MaxDiagonal
from metamd.potentials.forms import grouped_squares, widen
from metamd.potentials.online import Online
from metamd.potentials.sharding import is_sharded
from metamd.potentials.tying import Shape, TyingName, clean_names, some, stored_shape, tied_shape

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
    closed form needs: of weights sum_t G_t'G_t, from some of the steps, and of vectors sum_t g_t^2. Steps that a GradScaler
    skips or that raise are not counted. Training is not changed.

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
            # of all steps, by their squares, which are known of every one
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


# learning from records


RECORDED_PRIOR = 0.1
"""The default strength s of the prior: a coordinate that stands still has a step size of at least sqrt(s/2 / (1 + s)), here
0.21, of its tensor's and of the model's; without a prior, zero."""


POLAR = Online("polar", beta=0.9, signal=0.95, whiten=4)
"""The rule of the steps that are recommended; its scale is learned."""

SHRINKAGE = (1.0, 1.0)
"""What is added to the diagonals of X and Y, as shares of the mean: much, since few runs are known. With two runs of an MLP
and of LeNet the mean loss on a third task was between 5 % lower and 3 % higher than with the (0.1, 0.001) of many runs, and
the test loss lower in three of four trials."""

TRAVEL = 38.0
"""How long polar steps are at factor 1, see `_scales`. Steps do not all point in one direction, and AdamW at its default
rate comes a fraction of the way."""

SCHEDULE: Schedule = "quadratic"
"""Steps are longer at first than with linear decay and TRAVEL = 32, and shorter at the end. On tasks that no table shows,
mean losses of an MLP, of LeNet and of a transformer on text were 8 % lower to 1 % higher. Test losses of the first two were
10 to 16 % lower, that on text 3 % higher."""


def learn(
    runs: Sequence[Run],
    *,
    weights: Sequence[float] | None = None,
    tying: TyingName | None = None,
    prior: float = RECORDED_PRIOR,
) -> LearnedOptimiser:
    """Learn a geometry from recorded runs; nothing is trained.

    Of weights the closed form X^-1 # Y gives the coordinates and their metric, X = E delta' delta and Y = E sum_t G_t' G_t.
    The file recommends polar steps in these coordinates, with quadratic decay and a tail average. How long they are follows
    from the way that the recorded runs travelled. The factor on them is safe at first, and `update` moves it.

    With a `tying`, or from runs that were recorded with one, D_i = sqrt(E sum_t g_ti^2 / E delta_i^2) [Khodak2019] is the
    metric of the parameters themselves, and nothing more is recommended.

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
    whole = tying is None and all(run.products for run in runs)
    recorded = sorted({run.tying for run in runs})
    if tying is None and len(recorded) > 1:
        raise ValueError(
            f'the runs were recorded with the tyings {", ".join(map(repr, recorded))}. Pass one, such as tying="tensor".'
        )
    tying = tying or recorded[0]
    _check_runs(runs, tying, runs[0].model, set())
    return _solve(runs, shares, None if whole else tying, prior)


def update(
    learned: LearnedOptimiser, runs: Sequence[Run], *, weights: Sequence[float] | None = None, decay: float = 1.0
) -> LearnedOptimiser:
    """Add runs to those that a geometry was learned from; with decay 1 the result is that of `learn` on all of them.

    Runs that were made with a file of polar steps and have a score also move the factor, by `next_factor`. One of them that
    diverged moves the factor down, and adds nothing else.

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
    whole = header.basis != "identity"
    if whole and (without := [run for run in runs if not run.products]):
        raise ValueError(
            f"{without[0].label} was recorded with a tying, and this file has learned coordinates. Record it with "
            "Recorder(optimiser), without tying."
        )
    failed = [run for run in runs if whole and run.diverged and run.factor is not None]
    kept = [(run, share) for run, share in zip(runs, shares, strict=True) if run not in failed]
    _check_runs(
        [run for run, _ in kept],
        header.tying,
        header.model or runs[0].model,
        {row["fingerprint"] for row in earlier["runs"]},
    )
    trials = [{"factor": run.factor, "score": None} for run in failed]
    tying = None if whole else header.tying
    found = _solve([r for r, _ in kept], [w for _, w in kept], tying, earlier["prior"], learned, decay, trials)
    return replace(found, header=replace(found.header, family=header.family, seeds=header.seeds))


def next_factor(trials: Sequence[Mapping[str, float | None]]) -> float:
    """The factor to train the next run with, from the factors and scores of the runs before; None is a run that diverged.

    The score of a factor is the mean over its runs. The factor doubles as long as that is better, else it halves. Then the
    neighbours of the best one are tried, the root of 2 away. When neither is better, the best one stays.

    Example:
        >>> next_factor([])
        1.0
        >>> next_factor([{"factor": 1.0, "score": 0.5}, {"factor": 2.0, "score": 0.7}])
        0.5
    """
    found: dict[int, list[float]] = {}
    for trial in trials:
        score = trial["score"]
        found.setdefault(round(2 * math.log2(trial["factor"] or 1.0)), []).append(math.inf if score is None else score)
    if not found:
        return 1.0
    means = {place: fmean(scores) for place, scores in found.items()}
    best = min(means, key=lambda place: (means[place], abs(place)))
    if math.isinf(means[best]):  # all of them diverged
        place = min(means) - 2
    elif best == max(means):
        place = best + 2
    elif best == min(means):
        place = best - 2
    else:
        place = next((near for near in (best + 1, best - 1) if near not in means), best)
    return float(2.0 ** (place / 2))


_HEAVIEST = 1e30
"""Times squared gradients this is still far from the largest number, 1.8e308."""


def _solve(
    runs: Sequence[Run],
    shares: Sequence[float],
    tying: TyingName | None,
    prior: float,
    earlier: LearnedOptimiser | None = None,
    decay: float = 1.0,
    failed: Sequence[Mapping[str, Any]] = (),
) -> LearnedOptimiser:
    """The closed form for these runs, and for those of an earlier file; the header says where it comes from.

    Without a tying it is that of weights as matrices.
    """
    shape = Kronecker(rank="auto", shrinkage=SHRINKAGE, limit=COLUMNS) if tying is None else Diagonal(tying=tying)
    bound = [shape.bind(run.start) for run in runs]
    weights, regret = list(shares), Regret(prior=prior)
    moments, scales = [], []
    rows: list[dict[str, Any]] = []
    known: dict[str, Any] = {}  # what the earlier file was learned from
    for run, phi, share in zip(runs, bound, shares, strict=True):
        moments.append(moments_of(_as_trajectory(run, tying), phi, regret))
        numbers = {n: run.start[n].numel() for n in phi.slots}
        first = total_squares((phi.slots[n].key, count * run.gradient_rms[n] ** 2, count) for n, count in numbers.items())
        scales.append({k: (share * (total / max(count, 1)), share) for k, (total, count) in first.items()})
        mark = {"name": run.name, "fingerprint": run.fingerprint(), "steps": run.steps, "batch_size": run.batch_size}
        rows.append({**mark, "weight": share})
    cost: Mapping[str, float] = {"runs": len(runs), "gradient_evaluations": sum(run.steps for run in runs)}
    trials: list[Mapping[str, Any]] = []
    trials += [
        {"factor": run.factor, "score": run.score} for run in runs if run.factor is not None and run.score is not None
    ]
    trials += failed
    models = [run.model for run in runs]
    if earlier is not None and earlier.moments is not None and earlier.header.learned_from is not None:
        header, known = earlier.header, earlier.header.learned_from
        models.insert(0, header.model)
        before = [{**row, "weight": row["weight"] * decay} for row in known["runs"]]
        kept = Moments(*({k: v.double() for k, v in part.items()} for part in (earlier.moments.x, earlier.moments.y)))
        moments, weights, bound = [kept, *moments], [decay, *weights], [earlier.potential, *bound]
        share = sum(row["weight"] for row in before)
        scales = [{k: (share * v**2, share) for k, v in header.gradient_scale.items()}, *scales]
        rows, cost = before + rows, total_cost(header.cost, cost)
        trials = [*known.get("trials", ()), *trials]
    if not max(row["weight"] * row["steps"] for row in rows) < _HEAVIEST:
        raise ValueError(
            f"weights must be below {_HEAVIEST:g} over the steps of a run, got {max(row['weight'] for row in rows):g}: the "
            "sums over all runs would overflow. Weights count relative to each other; 1 is the usual one."
        )
    total, whole = Moments.total(moments, weights), sum(row["weight"] for row in rows)
    model = models[0] if all(m == models[0] for m in models) else {}
    horizon = max(1, round(sum(row["weight"] * row["steps"] for row in rows) / whole))
    # metrics to keep where the runs say nothing, and their types: those of the first that has them
    present = {k: v.detach() for phi in reversed(bound) for k, v in phi.log_d.items()}
    about: dict[str, Any] = {}
    from_runs: dict[str, Any] = {"prior": prior, "runs": rows} | ({"trials": trials} if trials else {})
    if tying is not None:
        potential = Diagonal(tying=tying).with_metrics(minimiser(total, present))
    else:
        empty = {n: torch.empty(s, dtype=present[n].dtype) for n, s in model.items()}
        blank = shape.bind(empty)
        now = Iterate.of(blank)
        turned = learn_factors(now, total, math.inf)
        log_d = minimiser(total, {k: v for k, v in now.log_d.items() if k not in turned.log_d}) | turned.log_d
        potential = now.moved(log_d, basis=turned.basis).apply(blank)
        reach = _reach(runs, shares, known.get("reach"), decay)
        online = replace(POLAR, scale=_scales(potential.bind(empty), reach, horizon))
        usage = Usage("online", schedule=SCHEDULE, factor=next_factor(trials), averaging="tail")
        about = {"usage": usage.to_dict(), "online": online.to_dict()}
        from_runs |= {"reach": reach}
    sizes = {row["batch_size"] for row in rows}
    header = LearnedOptimiser.from_potential(
        potential,
        model=dict(model),
        horizon=horizon,
        batch_size=sizes.pop() if len(sizes) == 1 else None,
        gradient_scale=gradient_scale(scales),
        objective=repr(regret),
        estimator="ClosedForm()",
        versions=library_versions(),
        cost=dict(cost),
        learned_from=from_runs,
        **about,
    ).header
    # in the type of the metrics: what a file gives back is what was saved
    x, y = ({k: v.to(present[k.removeprefix("right/")].dtype) for k, v in part.items()} for part in (total.x, total.y))
    return LearnedOptimiser(header, potential, Moments(x, y))


def _as_trajectory(run: Run, tying: TyingName | None) -> Trajectory:
    """What a record says, as if mirror descent had made the run."""
    squares = {n: s.double().sum(0) for n, s in run.tied_squares(tying or "tensor").items()}
    products = {}
    if tying is None:
        squares |= {n: (x.diagonal() if x.ndim > 1 else x).double()[None] for n, x in run.products.items()}
        products = {f"right/{n}": x for n, x in run.products.items() if x.ndim > 1}
    none = torch.zeros(0)
    return Trajectory(none, run.start, run.end, squares, lr=1.0, steps=run.steps, products=products)


def _reach(runs: Sequence[Run], shares: Sequence[float], earlier: Mapping[str, Any] | None, decay: float) -> dict[str, Any]:
    """How far runs went, by tensor: the squared largest singular value of the displacement; of vectors its mean square.

    Runs with a file of polar steps went as far as the file said, so that they count only where there are no others.
    """
    counted = [(run, share) for run, share in zip(runs, shares, strict=True) if run.factor is None]
    counted = counted or ([] if earlier else list(zip(runs, shares, strict=True)))
    squares: dict[str, float] = {k: decay * v for k, v in earlier["squares"].items()} if earlier else {}
    for run, share in counted:
        for n, start in run.start.items():
            delta = (run.end[n] - start).double()
            if delta.ndim > 1 and delta.numel():
                square = float(torch.linalg.matrix_norm(delta.reshape(len(delta), -1), 2)) ** 2
            else:
                square = float(delta.square().sum()) / max(delta.numel(), 1)
            squares[n] = squares.get(n, 0.0) + share * square
    weight = sum(share for _, share in counted) + (decay * earlier["weight"] if earlier else 0.0)
    return {"weight": weight, "squares": squares}


def _scales(potential: MaxDiagonal, reach: Mapping[str, Any], steps: int) -> dict[str, float]:
    """s by tensor: in T steps whose rate falls quadratically, each of spectral norm 1/s E[1/d]^1/2, as the metric has it in
    the mean, a weight gets TRAVEL/3 times as far as the recorded runs did. The numbers of a vector move by 1/s.
    """
    found = {}
    for key, square in reach["squares"].items():
        d, away = potential.metric(key)[0].detach().double(), math.sqrt(square / reach["weight"])
        size = float((1 / d).mean()) ** 0.5 if d.numel() > 1 else 1.0
        found[key] = steps * size / (TRAVEL * away) if away > 0 else math.nan
    # a tensor that stood still moves as little as the one that moved least
    most = max((s for s in found.values() if math.isfinite(s)), default=1.0)
    return {k: s if math.isfinite(s) else most for k, s in found.items()}


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

"""Random convex runs of all optimisers for the laws of certificates, and their regret from the losses, slow and obvious."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metamd import Certificate, Diagonal, Euclidean, LearnedOptimiser, MaxDiagonal, MetaMD
from metamd.files.usage import Usage
from metamd.optimiser.certificate import RunSums, certify_run
from metamd.potentials.online import Online


class Loss:
    """A convex function of one vector: a quadratic, absolute deviations, or a logistic loss, each step with noise."""

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self.kind = rng.integers(3)
        self.centre = rng.normal(size=size)
        self.scale = np.exp(rng.normal(size=size))
        self.noise = rng.normal() * rng.integers(2)

    def rate(self, rng: np.random.Generator, logs: np.ndarray) -> float:
        """A rate around the largest at which a quadratic does not blow up."""
        return float(2 * rng.random() / (self.scale**2 / np.exp(logs)).max())

    def value(self, x: np.ndarray, shift: np.ndarray) -> float:
        r = self.scale * (x - self.centre - self.noise * shift)
        return float([0.5 * r @ r, np.abs(r).sum(), np.logaddexp(0, r).sum()][self.kind])

    def grad(self, x: np.ndarray, shift: np.ndarray) -> np.ndarray:
        r = self.scale * (x - self.centre - self.noise * shift)
        return self.scale * [r, np.sign(r), 0.5 * (1 + np.tanh(r / 2))][self.kind]


class Linear(Loss):
    """<shift, x>: against it the bound is attained by the worst model of the ball."""

    def value(self, x: np.ndarray, shift: np.ndarray) -> float:
        return float(shift @ x)

    def grad(self, x: np.ndarray, shift: np.ndarray) -> np.ndarray:
        return shift


Named = list[tuple[str, Tensor]]
SIZES = {"a": 2, "b": 3}
T = torch.optim
TORCH: dict[str, Callable[[Named, float], T.Optimizer]] = {
    "SGD": lambda p, lr: T.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1),
    "Nesterov": lambda p, lr: T.SGD(p, lr=lr, momentum=0.5, nesterov=True),
    "Adam": lambda p, lr: T.Adam(p, lr=lr),
    "AMSGrad": lambda p, lr: T.Adam(p, lr=lr, amsgrad=True),
    "AdamW": lambda p, lr: T.AdamW(p, lr=lr),
    "NAdam": lambda p, lr: T.NAdam(p, lr=lr),
    "RAdam": lambda p, lr: T.RAdam(p, lr=lr),
    "Adamax": lambda p, lr: T.Adamax(p, lr=lr),
    "Adagrad": lambda p, lr: T.Adagrad(p, lr=lr),
    "Adadelta": lambda p, lr: T.Adadelta(p, lr=lr),
    "Adafactor": lambda p, lr: T.Adafactor(p, lr=lr),
    "RMSprop": lambda p, lr: T.RMSprop(p, lr=lr, momentum=0.5),
    "Rprop": lambda p, lr: T.Rprop(p, lr=lr),
    "ASGD": lambda p, lr: T.ASGD(p, lr=lr),
    "LBFGS": lambda p, lr: T.LBFGS([x for _, x in p], lr=lr, max_iter=3),
    "LBFGS, Wolfe": lambda p, lr: T.LBFGS([x for _, x in p], lr=lr, max_iter=3, line_search_fn="strong_wolfe"),
}
"""All dense optimisers of torch.optim for vectors; Muon takes matrices, and SparseAdam sparse gradients."""

POLAR = Online("polar", scale=dict.fromkeys(SIZES, 30.0))
AVERAGE = Online("average", scale=dict.fromkeys(SIZES, 30.0))
SUM = Online("sum", scale=dict.fromkeys(SIZES, 30.0))
EIGEN = Online("eigen", scale=dict.fromkeys(SIZES, 30.0))
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.8},
    "decay": {"weight_decay": 0.1},
    "tail": {"averaging": "tail"},
    "the paper's step": {"exact": False},
    "polar": {"metric": POLAR, "averaging": "tail"},
    "average": {"metric": AVERAGE, "momentum": 0.5},
    "sum": {"metric": SUM},
    "eigen": {"metric": EIGEN, "averaging": "tail"},
    "safeguard": {"safeguard": True},
    "groups": {"groups": True},
    "as recommended": {"usage": Usage(schedule="quadratic", averaging="tail")},
    "as recommended, momentum": {"usage": Usage(momentum=0.6, schedule="linear")},
}


@dataclass
class RandomRun:
    """A run on two vectors, and every gradient of it: where it was taken, its loss and the factor of that."""

    about: str
    certificate: Callable[..., Certificate]
    phi: MaxDiagonal | None  # None for the Euclidean norm
    points: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]]  # x, g, shift, factor
    loss: Loss
    plain: bool  # whether it is plain mirror descent

    @property
    def start(self) -> np.ndarray:
        return self.points[0][0]

    def metrics(self) -> np.ndarray:
        """D_1 .. D_N over both vectors, (N, 5)."""
        if self.phi is None:
            return np.ones((1, 5))
        return np.concatenate([self.phi.metric(n).detach().numpy() for n in SIZES], 1)

    def norm(self, delta: np.ndarray) -> float:
        return float(np.sqrt((self.metrics() @ delta**2).max()))

    def regret(self, u: np.ndarray) -> float:
        """sum_t s_t (f_t(x_t) - f_t(u)), from the losses alone."""
        return sum(s * (self.loss.value(x, shift) - self.loss.value(u, shift)) for x, _, shift, s in self.points)

    def size(self) -> float:
        return sum(s * (abs(self.loss.value(x, shift)) + np.abs(g) @ (np.abs(x) + 1)) for x, g, shift, s in self.points) + 1


def random_run(seed: int, *, sums: type[RunSums] = RunSums, linear: bool = False) -> RandomRun:
    """A run of one to six steps, the optimiser, its options, the schedule, clipping and accumulation all drawn."""
    rng = np.random.default_rng(seed)
    values = {n: rng.normal(size=size) for n, size in SIZES.items()}
    params = {n: nn.Parameter(torch.from_numpy(x.copy())) for n, x in values.items()}
    loss, rate = (Linear if linear else Loss)(rng, 5), float(np.exp(rng.normal() - 3))
    pieces = int(rng.integers(1, 4))
    fresh = MaxDiagonal(pieces, centre=("start", "origin")[rng.integers(2)])
    logs = {n: torch.from_numpy(rng.normal(size=(pieces, size))) for n, size in SIZES.items()}
    geometry = fresh.with_metrics(logs, torch.from_numpy(rng.normal(size=pieces) * rng.integers(2)))
    clip = float(np.exp(rng.normal())) if rng.integers(3) == 0 else None
    parts = int(rng.integers(1, 3))  # gradients of a step are accumulated over so many
    factor, steps = [1.0], int(rng.integers(1, 7))
    scale = (lambda: factor[0]) if clip is not None else None
    phi: MaxDiagonal | None = geometry.bind(params)
    plain = False
    if rng.integers(2):
        name = sorted(OURS)[rng.integers(len(OURS))]
        options = OURS[name]
        if "metric" in options:
            geometry = Diagonal().with_metrics({n: x[:1] for n, x in logs.items()})
        phi = geometry.bind(params)
        plain = name == "plain" and clip is None
        given: Any = list(params.items())
        if "groups" in options:  # with rates and momenta of their own
            given, options = [{"params": given[:1], "lr": 2 * rate}, {"params": given[1:], "momentum": 0.5}], {}
        learned: Any = geometry
        if "usage" in options:  # the rate is the file's
            learned = LearnedOptimiser.from_potential(phi)
            usage = replace(options["usage"], factor=rate).to_dict()
            learned, options = replace(learned, header=replace(learned.header, usage=usage)), {"steps": steps}
        lr = None if "steps" in options else rate
        optimiser: Any = MetaMD(given, learned, lr, certify=scale is None, check_finite=False, **options)
    else:
        name = sorted(TORCH)[rng.integers(len(TORCH))]
        optimiser = TORCH[name](list(params.items()), rate)
        named = "param_names" in optimiser.param_groups[0] and rng.integers(2)
        geometry, phi = (geometry, phi) if named else (Euclidean(), None)
    if isinstance(optimiser, MetaMD) and scale is None:
        old = optimiser._sums
        optimiser._sums = sums(mirror=old.mirror)
        certificate = optimiser.certificate
    else:
        run = certify_run(optimiser, geometry, scale=scale)
        run._sums = sums()
        certificate = run.certificate
    found = []
    schedule = np.ones(steps) if plain or rng.integers(2) else np.linspace(1, 0.1, steps)
    first = [group["lr"] for group in optimiser.param_groups]
    for t in range(steps):
        shifts = rng.normal(size=(parts, 5))

        def closure(shifts: np.ndarray = shifts) -> float:
            x = np.concatenate([p.detach().numpy().copy() for p in params.values()])
            g = sum((loss.grad(x, s) for s in shifts), np.zeros(5))
            factor[0] = 1.0 if clip is None else min(1.0, clip / max(float(np.linalg.norm(g)), 1e-300))
            for p, part in zip(params.values(), np.split(g * factor[0], [2]), strict=True):
                p.grad = torch.from_numpy(part.copy())
            found.extend((x, loss.grad(x, s), s, factor[0]) for s in shifts)
            return sum(loss.value(x, s) for s in shifts)

        for group, lr in zip(optimiser.param_groups, first, strict=True):
            group["lr"] = lr * float(schedule[t])
        if "LBFGS" in name or rng.integers(4) == 0:
            optimiser.step(closure)
        else:
            closure()
            optimiser.step()
        if rng.integers(12) == 0:  # an edit from outside does no harm
            with torch.no_grad():
                params["a"].mul_(0.5)
            plain = False
    return RandomRun(f"{name}, seed {seed}", certificate, phi, found, loss, plain)


def random_tail_run(seed: int, *, certify: bool = True, linear: bool = False) -> tuple[RandomRun, np.ndarray]:
    """A run with a tail average and the same loss in every step, and the model that `opt.eval()` gives."""
    rng = np.random.default_rng(seed)
    params = {n: nn.Parameter(torch.from_numpy(rng.normal(size=size))) for n, size in SIZES.items()}
    loss, rate, shift = (Linear if linear else Loss)(rng, 5), float(np.exp(rng.normal() - 2)), rng.normal(size=5)
    polar, pieces = rng.integers(3) == 0, int(rng.integers(1, 4))
    logs = {n: torch.from_numpy(rng.normal(size=(1 if polar else pieces, size))) for n, size in SIZES.items()}
    geometry = (Diagonal() if polar else MaxDiagonal(pieces)).with_metrics(logs)
    options: dict[str, Any] = {"metric": POLAR} if polar else {}
    optimiser = MetaMD(list(params.items()), geometry, rate, averaging="tail", certify=certify, **options)
    points = []
    for _ in range(int(rng.integers(1, 12))):
        x = np.concatenate([p.detach().numpy().copy() for p in params.values()])
        g = loss.grad(x, shift)
        points.append((x, g, shift, 1.0))
        for p, part in zip(params.values(), np.split(g, [2]), strict=True):
            p.grad = torch.from_numpy(part.copy())
        optimiser.step()
    optimiser.eval()
    model = np.concatenate([p.detach().numpy().copy() for p in params.values()])
    found = RandomRun(f"tail, seed {seed}", optimiser.certificate, geometry.bind(params), points, loss, plain=False)
    return found, model

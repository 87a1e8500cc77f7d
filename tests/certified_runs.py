"""Random convex runs for the laws of certificates, and the same numbers from the definitions, slow and obvious."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metamd import Certificate, MaxDiagonal, MetaMD
from metamd.optimiser.certificate import Sums

AVERAGES: list[dict[str, Any]] = [{}, {}, {"momentum": 0.5}, {"momentum": 0.9}]


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


@dataclass
class Definition:
    """A certificate's numbers from the definitions, term by term.

    Args:
        realised: sum <v_t, x_t - u>.
        bound: B(u || start) + 1/2 sum |v_t|^2_(t,*), less the lag of the averages.
        losses: the weighted regret of the losses, if nothing but losses was minimised.
        size: of the terms whose sums these are, which rounding is relative to.
    """

    realised: float
    bound: float
    losses: float | None
    size: float


@dataclass
class RandomRun:
    """One run of MetaMD on one vector, and all that happened in it."""

    optimiser: MetaMD
    metrics: np.ndarray
    offsets: np.ndarray
    centred: bool
    steps: list[dict[str, Any]]
    loss: Loss
    decay: float
    end: np.ndarray

    def comparator(self, rng: np.random.Generator) -> np.ndarray:
        """The minimiser of the loss, the end of the run, or any point."""
        anywhere = self.loss.centre + rng.normal(size=len(self.end)) * np.exp(2 * rng.normal())
        return [self.loss.centre, self.end, anywhere][rng.integers(3)]

    def certificate(self, u: np.ndarray) -> Certificate:
        return self.optimiser.certificate([torch.from_numpy(u)])

    def definition(self, u: np.ndarray) -> Definition:
        start, w1 = self.steps[0]["z"], self.steps[0]["w"]
        c = start if self.centred else np.zeros_like(start)

        def phi(x: np.ndarray) -> float:
            return float((0.5 * self.metrics @ (x - c) ** 2 + self.offsets).max())

        divergence = phi(u) - phi(start) - (w1 @ self.metrics * (start - c)) @ (u - start)
        rate = np.mean([s["lr"] for s in self.steps])
        realised = bound = losses = 0.0
        size = abs(phi(u)) + abs(phi(start)) + np.abs(self.offsets).max()
        for s in self.steps:
            d = s["w"] @ self.metrics
            pull = self.decay * d * s["z"]
            v = s["lr"] * (s["g"] + pull)
            realised += s["lr"] * (s["g"] @ (s["x"] - u) + pull @ (s["z"] - u))
            bound += 0.5 * (v * v / d).sum() - s["lr"] * s["g"] @ (s["z"] - s["x"])
            size += s["lr"] * np.abs(s["g"] + pull) @ (np.abs(s["x"]) + np.abs(s["z"]) + np.abs(u))
            losses += s["lr"] * (self.loss.value(s["x"], s["shift"]) - self.loss.value(u, s["shift"]))
        scaled = [float(q / rate) for q in (realised, divergence + bound, losses)]
        return Definition(scaled[0], scaled[1], None if self.decay else scaled[2], float(size / rate))


def random_run(seed: int, *, sums: type[Sums] | None = None, **options: Any) -> RandomRun:
    """A run of one to four steps with random dimension, pieces, metrics, offsets, centre, schedule, decay and average."""
    rng = np.random.default_rng(seed)
    size, n = int(rng.integers(1, 201)), int(rng.integers(2, 6))
    centred = bool(rng.integers(2))
    logs = 2 * rng.random() * rng.normal(size=(n, size))
    offsets = rng.normal(size=n) * rng.integers(2)
    geometry = MaxDiagonal(n, centre="start" if centred else "origin")
    phi = geometry.with_metrics({"x": torch.from_numpy(logs)}, torch.from_numpy(offsets))
    x = torch.nn.Parameter(torch.from_numpy(rng.normal(size=size)))
    decay = float(rng.integers(2) * rng.random())
    average = AVERAGES[rng.integers(len(AVERAGES))]
    loss = Loss(rng, size)
    rates = loss.rate(rng, logs) * (np.ones(4) if rng.integers(2) else 1 / np.arange(1, 5))
    optimiser = MetaMD([("x", x)], phi, weight_decay=decay, certify=True, check_finite=False, **{**average, **options})
    if sums is not None:
        optimiser._sums = sums(potential=optimiser._sums.potential)
    steps, w = [], None
    for lr in rates[: rng.integers(1, 5)]:
        shift = rng.normal(size=size)
        at = x.detach().numpy().copy()
        z = optimiser.state[x]["z"].numpy().copy() if "z" in optimiser.state[x] else at
        if w is None:
            first = offsets if centred else 0.5 * np.exp(logs) @ at**2 + offsets
            w = np.eye(n)[int(np.argmax(first))]
        g = loss.grad(at, shift)
        x.grad = torch.from_numpy(g)
        optimiser.param_groups[0]["lr"] = float(lr)
        optimiser.step()
        scale = 1 - average.get("momentum", 0.0)
        steps.append({"x": at, "z": z, "w": w, "g": g, "lr": lr / scale, "shift": shift})
        if n > 1:
            w = optimiser._active.weights
    end = (optimiser.state[x]["z"] if "z" in optimiser.state[x] else x.detach()).numpy()
    return RandomRun(optimiser, np.exp(logs), offsets, centred, steps, loss, decay, end.copy())


@dataclass
class Bundle:
    """Many runs of one piece in one optimiser: each vector has its own loss, rate and decay, and is a run of its own."""

    optimiser: MetaMD
    runs: dict[str, RandomRun]


def random_bundle(seed: int, *, runs: int) -> Bundle:
    rng = np.random.default_rng(seed)
    names = [f"run{i}" for i in range(runs)]
    starts = {n: rng.normal(size=int(rng.integers(1, 201))) for n in names}
    logs = {n: 2 * rng.random() * rng.normal(size=(1, len(x))) for n, x in starts.items()}
    average, steps = AVERAGES[rng.integers(len(AVERAGES))], int(rng.integers(1, 8))
    schedule = np.ones(steps) if rng.integers(2) else np.linspace(1, 0.1, steps)
    params = {n: torch.nn.Parameter(torch.from_numpy(x.copy())) for n, x in starts.items()}
    losses = {n: Loss(rng, len(x)) for n, x in starts.items()}
    rates = {n: loss.rate(rng, logs[n]) for n, loss in losses.items()}
    decays = {n: float(rng.integers(2) * rng.random()) for n in names}
    phi = MaxDiagonal(1, centre=["start", "origin"][rng.integers(2)]).with_metrics(
        {n: torch.from_numpy(x) for n, x in logs.items()}
    )
    groups = [{"params": [(n, p)], "weight_decay": decays[n]} for n, p in params.items()]
    optimiser = MetaMD(groups, phi, certify=True, check_finite=False, **average)
    found: dict[str, list[dict[str, Any]]] = {n: [] for n in names}
    scale = 1 - average.get("momentum", 0.0)
    for factor in schedule:
        for group, (n, p) in zip(optimiser.param_groups, params.items(), strict=True):
            at, shift = p.detach().numpy().copy(), rng.normal(size=p.numel())
            z = optimiser.state[p]["z"].numpy().copy() if "z" in optimiser.state[p] else at
            g = losses[n].grad(at, shift)
            p.grad, group["lr"] = torch.from_numpy(g), float(rates[n] * factor)
            step = {"x": at, "z": z, "w": np.ones(1), "g": g, "lr": group["lr"] / scale, "shift": shift}
            found[n].append(step)
        optimiser.step()
    ends = {n: (optimiser.state[p]["z"] if "z" in optimiser.state[p] else p.detach()).numpy() for n, p in params.items()}
    parts = {
        n: RandomRun(optimiser, np.exp(logs[n]), np.zeros(1), False, found[n], losses[n], decays[n], ends[n].copy())
        for n in names
    }
    return Bundle(optimiser, parts)

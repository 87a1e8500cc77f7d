"""ARUBA and ARUBA++: rates from the distances and the squared gradients of earlier tasks [Khodak2019].

    rate_i = sqrt(b_i / G_i),  b_i = sum_s (eps^2/s + 1/2 delta_si^2),  G_i = sum_s (zeta^2/s + sum_t g_sti^2)

over tasks s, each trained with the rates so far. ARUBA++ adds the squared gradients of the present run to G. The scales eps
and zeta are not published for runs of this length: zeta^2 is the mean of the first task's sums, and eps the zeta times the
first rate, so that it starts as SGD with that rate.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metamd.inner.run import Cost, all_finite, not_finite, train
from metamd.rivals.base import NamedParameters, Setting
from metamd.rivals.learned import Learner, PerCoordinate, sampled
from metamd.tasks.base import TaskFamily

TASKS, FIRST_RATE = 10, 0.05  # ours: the rate is divided by 4 whenever a run diverges


def learn_aruba(family: TaskFamily, seed: int) -> tuple[dict[str, Tensor], Cost]:
    """b and G, as `b/<name>` and `G/<name>`."""
    spent, counted = Cost(), 0
    b: dict[str, Tensor] = {}
    g: dict[str, Tensor] = {}
    rate, zeta = FIRST_RATE, 0.0
    for task in sampled(family, TASKS, seed, "aruba"):
        start = task.init()
        rule = FixedRates(start, {n: (b[n] / g[n]).sqrt() if b else torch.full_like(x, rate) for n, x in start.items()})
        done = train(task, rule, task.steps, until=not_finite)
        spent += done.cost
        if done.diverged or not all_finite(rule.params):
            rate /= 4  # a run that diverged says nothing but this
            b = {n: x / 16 for n, x in b.items()}
            continue
        counted += 1
        if not b:
            numbers = sum(x.numel() for x in rule.squares.values())
            zeta = float(sum(x.sum() for x in rule.squares.values())) / numbers
            b, g = ({n: torch.zeros_like(x) for n, x in start.items()} for _ in range(2))
        for n in b:
            b[n] += rate**2 * zeta / counted + 0.5 * (rule.params[n] - start[n]).square()
            g[n] += zeta / counted + rule.squares[n]
    if not b:
        raise ValueError(f"ARUBA diverged on all {TASKS} tasks, with rates down to {rate:g}.")
    return {f"b/{n}": x for n, x in b.items()} | {f"G/{n}": x for n, x in g.items()}, spent


class FixedRates:
    """Gradient descent with a rate for every coordinate, which adds up the squared gradients."""

    def __init__(self, start: Mapping[str, Tensor], rates: Mapping[str, Tensor]) -> None:
        self.params, self.rates = dict(start), rates
        self.squares = {n: torch.zeros_like(x) for n, x in start.items()}

    def step(self, loss: Tensor, grads: Mapping[str, Tensor]) -> str:
        """One step."""
        self.params = {n: x - self.rates[n] * grads[n] for n, x in self.params.items()}
        for n, s in self.squares.items():
            s.addcmul_(grads[n], grads[n])
        return ""


def _fixed(named: NamedParameters, tensors: Mapping[str, Tensor], setting: Setting) -> PerCoordinate:
    rates = {n: (tensors[f"b/{n}"] / tensors[f"G/{n}"]).sqrt() for n, _ in named if f"b/{n}" in tensors}
    return PerCoordinate(named, rates, setting)


class RunningRates:
    """ARUBA++: rate_i = sqrt(b_i / (G_i + squared gradients of this run))."""

    def __init__(self, named: NamedParameters, tensors: Mapping[str, Tensor], setting: Setting) -> None:
        _fixed(named, tensors, setting)  # refuses what does not fit
        self.parts = [(p, tensors[f"b/{n}"].to(p).sqrt(), tensors[f"G/{n}"].to(p).clone()) for n, p in named]
        self.param_groups: list[dict[str, Any]] = [{"lr": setting["lr"], "params": [p for _, p in named]}]

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for p, root, squares in self.parts:
            assert p.grad is not None
            squares.addcmul_(p.grad, p.grad)
            p.addcdiv_(root * p.grad, squares.sqrt(), value=-self.param_groups[0]["lr"])


ARUBA = Learner("aruba", "ARUBA", learn_aruba, _fixed)
ARUBA_PLUS = Learner("aruba-plus", "ARUBA++", learn_aruba, RunningRates)

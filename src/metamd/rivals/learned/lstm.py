"""A small LSTM as optimiser, the same for every coordinate, trained through its own steps [Andrychowicz2016].

The gradient is given as its logarithm and sign, the LSTM's output is the step. One layer of 8 units, where the paper has
two of 20, and windows of 10 steps, where it has 20: on a CPU.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metamd.inner.run import Cost, gradient
from metamd.rivals.base import NamedParameters, Setting
from metamd.rivals.learned import Learner, sampled
from metamd.tasks.base import TaskFamily, derive_seed, seeded

UNITS, WINDOW, WINDOWS, TASKS = 8, 10, 10, 15  # ours, smaller than the paper's: see above
OUTER_RATE, OUTPUT = 3e-3, 0.1  # ours; steps are small before anything is learned
SHARPNESS = 10.0  # p of the paper's appendix A

Memory = tuple[Tensor, Tensor]


class LSTMRule(nn.Module):
    """From gradients to steps, one row for each coordinate."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, UNITS)
        self.output = nn.Linear(UNITS, 1)

    def forward(self, grads: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The steps, (coordinates,), and the new memory."""
        hidden, state = self.cell(prepared(grads), memory)
        return OUTPUT * self.output(hidden)[:, 0], (hidden, state)


def prepared(grads: Tensor) -> Tensor:
    """(log|g| / p, sign g) where |g| >= exp(-p), else (-1, exp(p) g), with p = 10."""
    size = grads.abs()
    large = size >= math.exp(-SHARPNESS)
    logs = torch.where(large, size.clamp_min(math.exp(-SHARPNESS)).log() / SHARPNESS, -1.0)
    return torch.stack([logs, torch.where(large, grads.sign(), math.exp(SHARPNESS) * grads)], 1)


def learn_lstm(family: TaskFamily, seed: int) -> tuple[dict[str, Tensor], Cost]:
    """The weights of the rule."""
    taken = 0
    with seeded(derive_seed(seed, "lstm")):
        rule = LSTMRule()
    nn.init.zeros_(rule.output.bias)
    with torch.no_grad():
        rule.output.weight.mul_(0.1)
    outer = torch.optim.Adam(rule.parameters(), lr=OUTER_RATE)
    for task in sampled(family, TASKS, seed, "lstm"):
        params: dict[str, Tensor] = task.init()
        memory = blank(sum(x.numel() for x in params.values()))
        for window in range(min(WINDOWS, max(1, task.steps // WINDOW))):
            losses = []
            # Not `inner.run.train`: the window keeps the graph of its own steps, which the rule is trained through.
            for t in range(window * WINDOW, (window + 1) * WINDOW):
                # gradients as inputs are not differentiated, as in the paper
                _, grads = gradient(task, {n: x.detach() for n, x in params.items()}, task.batch(t))
                steps, memory = rule(flat(grads).float(), memory)
                params = moved(params, steps)
                losses.append(task.loss(params, task.batch(t + 1)))
                taken += 2
            loss = torch.stack(losses).mean()
            if not bool(loss.isfinite()):
                break
            outer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(rule.parameters(), 1.0)
            outer.step()
            params = {n: x.detach() for n, x in params.items()}
            memory = (memory[0].detach(), memory[1].detach())
    return {n: p.detach().clone() for n, p in rule.named_parameters()}, Cost(gradients=taken)


def blank(coordinates: int) -> Memory:
    """The memory before the first step."""
    return torch.zeros(coordinates, UNITS), torch.zeros(coordinates, UNITS)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All coordinates in a row."""
    return torch.cat([x.reshape(-1) for x in tensors.values()])


def moved(params: Mapping[str, Tensor], steps: Tensor) -> dict[str, Tensor]:
    """The parameters after a step, whose coordinates are in their order."""
    parts = torch.split(steps, [x.numel() for x in params.values()])
    return {n: x + d.view_as(x).to(x.dtype) for (n, x), d in zip(params.items(), parts, strict=True)}


class LearnedRule:
    """The trained LSTM as an optimiser."""

    def __init__(self, named: NamedParameters, tensors: Mapping[str, Tensor], setting: Setting) -> None:
        self.named = dict(named)
        self.param_groups: list[dict[str, Any]] = [{"lr": setting["lr"], "params": [p for _, p in named]}]
        with seeded(0):
            self.rule = LSTMRule()
        self.rule.load_state_dict(dict(tensors))
        self.memory = blank(sum(p.numel() for _, p in named))

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        grads = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        steps, self.memory = self.rule(flat(grads).float(), self.memory)
        for n, x in moved(self.named, self.param_groups[0]["lr"] * steps).items():
            self.named[n].copy_(x)


LSTM = Learner("lstm", "LSTM optimiser", learn_lstm, LearnedRule)

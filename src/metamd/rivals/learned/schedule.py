"""A learned schedule: one rate for each tenth of the run, by forward-mode differentiation [Micaelli2021].

SGD with momentum 0.9. A tangent for each rate is pushed through the whole run, so that memory does not grow with the number
of steps, and the loss at the end is differentiated exactly. The paper's method learns on the very task and repeats it for
each; here the schedule is learned on the family, as everybody else, and used on new tasks. Outer steps are signs, whose size
is halved when the sign turns, as there. The loss at the end is of batches that follow the run, and not of validation data.
The rates with the smallest loss are kept, and a run that ends higher than the best so far by half goes back to them.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from metamd.inner.run import Cost
from metamd.rivals.base import NamedParameters, Setting
from metamd.rivals.learned import Learner, sampled
from metamd.tasks.base import Task, TaskFamily

WINDOWS, MOMENTUM = 10, 0.9
# Ours. A step of 0.7 doubles or halves a rate: eight of them can reach any between 0.01 / 256 and 0.01 * 256.
OUTER_STEPS, FIRST_RATE, FIRST_SIZE, JUDGES = 8, 0.01, 0.7, 4


def learn_schedule(family: TaskFamily, seed: int) -> tuple[dict[str, Tensor], Cost]:
    """The rates, as `rates`, and the horizon."""
    spent = Cost()
    logs = torch.full((WINDOWS,), FIRST_RATE, dtype=torch.float64).log()
    size, before = torch.full_like(logs, FIRST_SIZE), torch.zeros_like(logs)
    best, best_logs, best_sign = math.inf, logs, torch.ones_like(logs)
    for task in sampled(family, OUTER_STEPS, seed, "schedule"):
        loss, slope, cost = loss_and_slopes(task, logs)
        spent += cost
        if float(loss) < best and bool(slope.isfinite().all()):
            best, best_logs, best_sign = float(loss), logs, slope.sign()
        elif not float(loss) <= 1.5 * best or not bool(slope.isfinite().all()):
            size = size / 2
            logs = best_logs - size * best_sign
            continue
        sign = slope.sign()
        size = torch.where(sign * before < 0, size / 2, size)
        logs, before = logs - size * sign, sign
    return {"rates": best_logs.exp(), "steps": torch.tensor(float(family.steps))}, spent


def loss_and_slopes(task: Task, logs: Tensor) -> tuple[Tensor, Tensor, Cost]:
    """The loss after a run with these rates, and its gradient with respect to their logarithms.

    v <- m v + g, theta <- theta - r v; with a tangent of both for each rate that was used so far,
    dv <- m dv + H dtheta, dtheta <- dtheta - r dv - [this rate] r v.
    """
    theta = {n: x.detach() for n, x in task.init().items()}
    velocity = {n: torch.zeros_like(x) for n, x in theta.items()}
    count, slope = len(logs), grad(task.loss)
    d_theta, d_velocity = ({n: x.new_zeros(count, *x.shape) for n, x in theta.items()} for _ in range(2))
    hvps = 0
    # Not `inner.run.train`: a tangent for each rate is carried along with every step.
    for t in range(task.steps):
        window = t * count // task.steps
        rate, used, batch = float(logs[window].exp()), window + 1, task.batch(t)
        found = slope(theta, batch)
        # H d for each tangent d, forward over reverse
        bent = vmap(lambda d, b=batch: jvp(lambda p: slope(p, b), (theta,), (d,))[1])(
            {n: x[:used] for n, x in d_theta.items()}
        )
        hvps += used
        for n, x in theta.items():
            velocity[n] = MOMENTUM * velocity[n] + found[n]
            d_velocity[n][:used] = MOMENTUM * d_velocity[n][:used] + bent[n]
            d_theta[n][:used] -= rate * d_velocity[n][:used]
            d_theta[n][window] -= rate * velocity[n]
            theta[n] = x - rate * velocity[n]
    judges = range(task.steps, task.steps + JUDGES)
    loss = torch.stack([task.loss(theta, task.batch(t)) for t in judges]).mean()
    ends = [slope(theta, task.batch(t)) for t in judges]
    slopes = torch.stack(
        [sum((g[n] * d_theta[n][k]).sum().double() for g in ends for n in theta) / JUDGES for k in range(count)]
    )
    return loss.detach(), slopes, Cost(gradients=task.steps + JUDGES, hvps=hvps)


class Scheduled:
    """SGD with momentum and the learned rates; after the horizon the last one stays."""

    def __init__(self, named: NamedParameters, tensors: Mapping[str, Tensor], setting: Setting) -> None:
        self.params = [p for _, p in named]
        self.rates, self.horizon = tensors["rates"].tolist(), float(tensors["steps"])
        self.param_groups: list[dict[str, Any]] = [{"lr": setting["lr"], "params": self.params}]
        self.velocity = [torch.zeros_like(p) for p in self.params]
        self.taken = 0

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        window = min(int(self.taken * len(self.rates) / self.horizon), len(self.rates) - 1)
        rate = self.rates[window] * self.param_groups[0]["lr"]
        for p, v in zip(self.params, self.velocity, strict=True):
            assert p.grad is not None
            v.mul_(MOMENTUM).add_(p.grad)
            p.sub_(v, alpha=rate)
        self.taken += 1


SCHEDULE = Learner("learned-schedule", "Learned schedule", learn_schedule, Scheduled, schedules=("constant",))

"""Meta-SGD: a rate for each coordinate, by the gradient of the loss after a few steps [Li2017].

For runs of hundreds of steps the unrolled part is a window of a few steps that moves along the run; the loss that follows
it, on the next batch, is differentiated with respect to the logarithms of the rates. The start is not learned: it is given.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from metamd.inner.run import Cost, gradient
from metamd.rivals.learned import Learner, PerCoordinate, sampled
from metamd.tasks.base import Task, TaskFamily

TASKS, WINDOW, WINDOWS = 12, 5, 20  # ours: the paper's runs have a few steps in all
FIRST_RATE, OUTER_RATE = 0.05, 0.03  # ours; the outer rate is Adam's, on the logarithms


def learn_meta_sgd(family: TaskFamily, seed: int) -> tuple[dict[str, Tensor], Cost]:
    """The rates by name."""
    inner = 0
    logs = {n: torch.full_like(x, FIRST_RATE).log_().requires_grad_() for n, x in family.example().items()}
    outer = torch.optim.Adam(logs.values(), lr=OUTER_RATE)
    for task in sampled(family, TASKS, seed, "meta-sgd"):
        params: dict[str, Tensor] = task.init()
        for window in range(min(WINDOWS, max(1, task.steps // WINDOW))):
            end, loss = unrolled(task, params, logs, window * WINDOW, WINDOW)
            inner += WINDOW + 1
            if not bool(loss.isfinite()):
                with torch.no_grad():
                    for x in logs.values():
                        x -= 0.5
                break
            grads = torch.autograd.grad(loss, list(logs.values()))
            for x, g in zip(logs.values(), grads, strict=True):
                x.grad = torch.nan_to_num(g)
            outer.step()
            params = {n: x.detach() for n, x in end.items()}
    return {n: x.detach().exp() for n, x in logs.items()}, Cost(gradients=inner, hvps=inner)


def unrolled(
    task: Task, params: Mapping[str, Tensor], logs: Mapping[str, Tensor], first: int, steps: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The end of a few steps and the loss on the batch that follows, as functions of the logarithms of the rates."""
    here = {n: x.detach().requires_grad_() for n, x in params.items()}
    # Not `inner.run.train`: these steps keep their graph, because the rates are differentiated through them.
    for t in range(first, first + steps):
        _, grads = gradient(task, here, task.batch(t), graph=True)
        here = {n: x - logs[n].exp() * grads[n] for n, x in here.items()}
    return here, task.loss(here, task.batch(first + steps))


META_SGD = Learner("meta-sgd", "Meta-SGD", learn_meta_sgd, PerCoordinate)

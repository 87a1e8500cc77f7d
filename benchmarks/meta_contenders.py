"""The contenders of `benchmarks/meta.py`: the same derivatives by MetaMD, TorchOpt, higher and plain torch."""

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import metamd
from metamd import Diagonal, Forward, MaxDiagonal, Regret, Reverse, TrainingLoss
from metamd.files.learned import Moments
from metamd.inner.closed_form import minimiser, moments_of
from metamd.inner.derivatives import hessian_products
from metamd.inner.estimators import Estimator
from metamd.inner.run import gradient, run_inner
from metamd.tasks.supervised import SupervisedTask

RATE = 0.05


# problems


def family(make_model: Callable[[], nn.Module], steps: int) -> metamd.tasks.TaskFamily:
    """A model on images of noise around one mean per class."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(5000) % 10
    images = torch.randn(5000, 1, 28, 28, generator=g) + torch.randn(10, 1, 28, 28, generator=g)[labels]
    return metamd.tasks.supervised(make_model, {"noise": {"train": (images, labels)}}, batch_size=100, steps=steps)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def deep(width: int, layers: int) -> Callable[[], nn.Module]:
    """A perceptron with so many hidden layers of a width: two tangents for each."""

    def make() -> nn.Module:
        sizes = [784, *[width] * layers]
        hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))

    return make


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def tasks_of(make_model: Callable[[], nn.Module], steps: int, number: int) -> list[SupervisedTask]:
    where, g = family(make_model, steps), torch.Generator().manual_seed(1)
    found = [where.build(where.sample(g)) for _ in range(number)]
    assert all(isinstance(t, SupervisedTask) for t in found)
    return found  # type: ignore[return-value]


@cache
def potential(task: SupervisedTask, tying: str) -> MaxDiagonal:
    """One metric, 1 / RATE everywhere."""
    phi = Diagonal(tying=tying).bind(task.init())  # type: ignore[arg-type]
    with torch.no_grad():
        for leaf in phi.log_d.values():
            leaf.fill_(-float(np.log(RATE)))
    return phi


# closed form


def plain_training(tasks: list[SupervisedTask]) -> None:
    """What anybody would write."""
    for task in tasks:
        model = task.recipe.make(task.config["init_seed"])
        optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
        for t in range(task.steps):
            batch = task.batch(t)
            optimiser.zero_grad()
            F.cross_entropy(model(batch["inputs"]), batch["targets"]).backward()
            optimiser.step()


def closed_form(tasks: list[SupervisedTask], tying: str) -> None:
    phi = potential(tasks[0], tying)
    moments = [moments_of(run_inner(t, phi), phi, Regret()) for t in tasks]
    minimiser(Moments.total(moments, [1.0] * len(tasks)), phi.log_d)


# reverse mode: every contender returns the gradient by log D = -log rate, in one list over the tensors

Hypergradient = Callable[[SupervisedTask, str, int], list[Tensor]]


def rates_for(task: SupervisedTask, tying: str) -> list[Tensor]:
    shapes = [x.shape if tying == "parameter" else () for x in task.init().values()]
    return [torch.full(s, RATE, requires_grad=True) for s in shapes]


def by_log(losses: list[Tensor], rates: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(torch.stack(losses).sum() / len(losses), rates)
    return [-r.detach() * f for r, f in zip(rates, found, strict=True)]


def with_torch(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """The shortest loop that can be differentiated."""
    rates, losses = rates_for(task, tying), []
    names, params = zip(*((n, x.requires_grad_()) for n, x in task.init().items()), strict=True)
    for t in range(steps):
        batch = task.batch(t)
        outputs = functional_call(task.model, dict(zip(names, params, strict=True)), (batch["inputs"],))
        losses.append(F.cross_entropy(outputs, batch["targets"]))
        grads = torch.autograd.grad(losses[-1], params, create_graph=True)
        params = tuple(p - r * g for p, r, g in zip(params, rates, grads, strict=True))
    return by_log(losses, rates)


def with_torchopt(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """Its functional optimiser; torchopt.sgd takes one rate for all, so the rates are a transformation of their own."""
    import torchopt

    rates, losses = rates_for(task, tying), []

    def update(updates: Any, state: Any, *, params: Any = None, inplace: bool = True) -> Any:
        return tuple(-r * u for r, u in zip(rates, updates, strict=True)), state

    rule = torchopt.base.GradientTransformation(lambda params: torchopt.base.EmptyState(), update)
    optimiser = torchopt.FuncOptimizer(rule)
    names, params = zip(*((n, x.requires_grad_()) for n, x in task.init().items()), strict=True)
    for t in range(steps):
        batch = task.batch(t)
        outputs = functional_call(task.model, dict(zip(names, params, strict=True)), (batch["inputs"],))
        losses.append(F.cross_entropy(outputs, batch["targets"]))
        params = optimiser.step(losses[-1], params)
    return by_log(losses, rates)


def with_higher(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """Its inner loop, with a parameter group for every tensor so that each has its rate."""
    import higher

    rates, losses = rates_for(task, tying), []
    groups = [{"params": [p]} for p in task.model.parameters()]
    optimiser = torch.optim.SGD(groups, lr=RATE)
    with higher.innerloop_ctx(task.model, optimiser, override={"lr": rates}) as (model, inner):
        for t in range(steps):
            batch = task.batch(t)
            losses.append(F.cross_entropy(model(batch["inputs"]), batch["targets"]))
            inner.step(losses[-1])
        return by_log(losses, rates)


def with_metamd(estimator: Estimator, task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    found = estimator(task, potential(task, tying), TrainingLoss(), steps=steps)
    return [g[0] for g in found.grads.values()]


REVERSE: dict[str, Hypergradient] = {
    "torch loop": with_torch,
    "TorchOpt": with_torchopt,
    "higher": with_higher,
    "MetaMD, full tape": partial(with_metamd, Reverse(1)),
    "MetaMD, checkpoints": partial(with_metamd, Reverse()),
}


def installed(name: str) -> bool:
    needs = {"TorchOpt": "torchopt", "higher": "higher"}.get(name)
    return needs is None or importlib.util.find_spec(needs) is not None


# forward mode


def loop_over_tangents(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """z_{t+1} = z_t - rate (H z_t - g 1_k), one tangent after the other; the gradient and its graph are shared."""
    names, params = zip(*task.init().items(), strict=True)
    z = [[torch.zeros_like(x) for x in params] for _ in params]
    along = [torch.zeros(()) for _ in params]
    for t in range(steps):
        leaves = [x.detach().requires_grad_() for x in params]
        loss = task.loss(dict(zip(names, leaves, strict=True)), task.batch(t))
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        fixed = [g.detach() for g in grads]
        for k, row in enumerate(z):
            along[k] += sum(torch.dot(a.flatten(), g.flatten()) for a, g in zip(row, fixed, strict=True)) / steps
            hz = torch.autograd.grad(grads, leaves, row, retain_graph=k + 1 < len(z))
            z[k] = [a - RATE * (h - g if i == k else h) for i, (a, h, g) in enumerate(zip(row, hz, fixed, strict=True))]
        params = tuple(x.detach() - RATE * g for x, g in zip(params, fixed, strict=True))
    return along


def loop_of_jvps(task: SupervisedTask, tying: str, steps: int) -> list[Tensor]:
    """The same with torch.func.jvp of the gradient for every tangent, as it is mostly written."""
    params = task.init()
    z = [{n: torch.zeros_like(x) for n, x in params.items()} for _ in params]
    along = [torch.zeros(()) for _ in params]
    for t in range(steps):
        gradient = torch.func.grad(partial(task.loss, batch=task.batch(t)))
        for k, (moved, row) in enumerate(zip(params, z, strict=True)):
            fixed, hz = torch.func.jvp(gradient, (params,), (row,))
            along[k] += sum(torch.dot(row[n].flatten(), fixed[n].flatten()) for n in params) / steps
            z[k] = {n: a - RATE * (hz[n] - fixed[n] if n == moved else hz[n]) for n, a in row.items()}
        params = {n: x - RATE * fixed[n] for n, x in params.items()}
    return along


FORWARD: dict[str, Hypergradient] = {
    "loop of double backwards": loop_over_tangents,
    "loop of jvps": loop_of_jvps,
    "MetaMD, all at once": partial(with_metamd, Forward()),
}


def parts_of_a_step(task: SupervisedTask) -> dict[str, Callable[[], object]]:
    """What a step of forward mode with a tangent per tensor is made of, for perceptrons.

    The multiplications alone are those by the 784 columns of the inputs, two for the gradient and two for every tangent:
    whoever wants all Hessian-vector products has to do them.
    """
    params, batch, g = task.init(), task.batch(0), torch.Generator().manual_seed(0)
    z = {n: 1e-2 * torch.randn(len(params), *x.shape, generator=g) for n, x in params.items()}
    leaves = {n: x.detach().requires_grad_() for n, x in params.items()}
    inputs, weight = batch["inputs"].flatten(1), next(iter(params.values()))
    back = torch.randn(len(inputs), len(weight), generator=g)

    def multiply() -> None:
        for _ in range(1 + len(params)):
            inputs @ weight.t()
            back.t() @ inputs

    return {
        "gradient with its graph": lambda: gradient(task, leaves, batch, graph=True),
        "and one product": lambda: hessian_products(task, params, batch, {n: v[:1] for n, v in z.items()}),
        "and all products": lambda: hessian_products(task, params, batch, z),
        "multiplications alone": multiply,
    }

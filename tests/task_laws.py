"""The laws of families of tasks: each is a function that says whether a family keeps it."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils._pytree import tree_flatten, tree_map

from metamd.tasks import Task, TaskFamily, config_hash


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(family: TaskFamily, seed: int = 0) -> Any:
    return family.build(family.sample(generator(seed)))


def same(one: Any, two: Any) -> bool:
    (a, form_a), (b, form_b) = tree_flatten(one), tree_flatten(two)
    return form_a == form_b and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def stack(nests: list[Any]) -> Any:
    return tree_map(lambda *leaves: torch.stack(leaves), *nests)


def direction(params: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    g = generator(seed)
    return {n: torch.randn(x.shape, generator=g, dtype=x.dtype) for n, x in params.items()}


def same_task(one: Task, two: Task) -> bool:
    start = same(one.init(), two.init())
    batches = all(same(one.batch(t), two.batch(t)) for t in (0, 3, 11))
    loss = torch.equal(one.loss(one.init(), one.batch(2)), two.loss(two.init(), two.batch(2)))
    return start and batches and loss


def sample_uses_the_generator_alone(family: TaskFamily) -> bool:
    before = torch.get_rng_state()
    first = family.sample(generator())
    untouched = torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    return untouched and first == family.sample(generator())


def build_is_deterministic_and_leaves_the_generator_alone(family: TaskFamily) -> bool:
    config, before = family.sample(generator()), torch.get_rng_state()
    one = family.build(config)
    untouched = torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    return untouched and same_task(one, family.build(config))


def config_survives_json(family: TaskFamily) -> bool:
    config = family.sample(generator())
    try:
        again = json.loads(json.dumps(config))
    except TypeError:
        return False
    return config_hash(again) == config_hash(config) and same_task(family.build(config), family.build(again))


def batches_do_not_depend_on_the_order_of_calls(family: TaskFamily) -> bool:
    forwards, backwards = draw(family), draw(family)
    one = {t: forwards.batch(t) for t in range(12)}
    two = {t: backwards.batch(t) for t in reversed(range(12))}
    return all(same(one[t], two[t]) and same(one[t], forwards.batch(t)) for t in one)


def start_is_fresh_and_the_same_at_every_call(family: TaskFamily) -> bool:
    task = draw(family)
    first = task.init()
    kept = {n: x.clone() for n, x in first.items()}
    for x in first.values():
        x.add_(1)  # what an optimiser does
    second = task.init()
    return same(kept, second) and not any(x.requires_grad for x in second.values())


def loss_is_pure(family: TaskFamily) -> bool:
    task = draw(family)
    params, batch = task.init(), task.batch(1)
    kept, before = tree_map(torch.clone, (params, batch)), torch.get_rng_state()
    first = task.loss(params, batch)
    task.loss(direction(params, 1), task.batch(5))
    unchanged = same(kept, (params, batch)) and torch.equal(before, torch.get_rng_state())
    return first.dim() == 0 and unchanged and torch.equal(first, task.loss(params, batch))


def loss_can_be_differentiated_by_torch_func(family: TaskFamily) -> bool:
    task = draw(family)
    params, batch = task.init(), task.batch(1)
    leaves = {n: x.clone().requires_grad_() for n, x in params.items()}
    plain = torch.autograd.grad(task.loss(leaves, batch), list(leaves.values()), materialize_grads=True)
    pure = grad(task.loss)(params, batch)
    agree = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(plain, pure.values(), strict=True))
    moving = any(bool(x.abs().sum() > 0) for x in plain)
    v = direction(params, 2)
    _, slope = jvp(lambda p: task.loss(p, batch), (params,), (v,))
    forward = torch.allclose(slope, sum((pure[n] * v[n]).sum() for n in v), rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    return agree and moving and forward


def hessian_products_run_over_many_tangents_at_once(family: TaskFamily) -> bool:
    task = draw(family)
    params, batch = task.init(), task.batch(1)

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        return jvp(lambda p: grad(task.loss)(p, batch), (params,), (v,))[1]

    tangents = [direction(params, s) for s in range(3)]
    together, apart = vmap(product)(stack(tangents)), stack([product(v) for v in tangents])
    return all(torch.allclose(together[n], apart[n], rtol=1e-4, atol=1e-5) for n in params)


def tasks_with_a_shared_loss_run_together(family: TaskFamily) -> bool:
    tasks = [draw(family, s) for s in range(3)]
    params, batches = ([f(t) for t in tasks] for f in (lambda t: t.init(), lambda t: t.batch(4)))
    together = vmap(tasks[0].loss)(stack(params), stack(batches))
    apart = torch.stack([t.loss(p, b) for t, p, b in zip(tasks, params, batches, strict=True)])
    return family.shared_loss and torch.allclose(together, apart, rtol=1e-5, atol=1e-6)


def parameters_have_the_shapes_of_the_example(family: TaskFamily) -> bool:
    shapes = {n: x.shape for n, x in family.example().items()}
    return all(shapes == {n: x.shape for n, x in draw(family, s).init().items()} for s in range(3))


def settings_survive_json(family: TaskFamily) -> bool:
    return json.loads(json.dumps(family.describe())) == family.describe()


Law = Callable[[TaskFamily], bool]
LAWS: list[Law] = [
    sample_uses_the_generator_alone,
    build_is_deterministic_and_leaves_the_generator_alone,
    config_survives_json,
    batches_do_not_depend_on_the_order_of_calls,
    start_is_fresh_and_the_same_at_every_call,
    loss_is_pure,
    loss_can_be_differentiated_by_torch_func,
    hessian_products_run_over_many_tangents_at_once,
    tasks_with_a_shared_loss_run_together,
    parameters_have_the_shapes_of_the_example,
    settings_survive_json,
]

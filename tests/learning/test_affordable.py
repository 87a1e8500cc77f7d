"""How many directions `rank="auto"` keeps: operations counted by hand, and what a quarter of a gradient pays for."""

import pytest
import torch
from torch import nn

from metamd import Kronecker, learn_from_reference, meta_train, tasks
from metamd.inner.closed_form import LARGEST
from metamd.inner.objectives import Reference
from metamd.learning.rounds.first_look import AFFORDED, affording, gradient_operations
from metamd.tasks.models import LeNet

SIZES = (100, 60, 4)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.Tanh(), nn.Linear(SIZES[1], SIZES[2]))


def family(batch_size, model=network, shape=(SIZES[0],), classes=SIZES[2]):
    generator = torch.Generator().manual_seed(0)
    data = {n: (torch.randn(300, *shape, generator=generator), torch.arange(300) % classes) for n in "ab"}
    return tasks.supervised(model, data, batch_size=batch_size, steps=10)


def first(found):
    return found.build(found.sample(torch.Generator().manual_seed(0)))


def kept(batch_size, **options):
    task = first(family(batch_size))
    potential = Kronecker(rank="auto", **options).bind(task.init())
    return affording(potential, task).basis.whole


def test_operations_are_those_of_the_products():
    numbers = SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2]
    assert gradient_operations(first(family(7))) == 3 * 2 * 7 * numbers
    # a kernel is used at every place of its output: 28 x 28 and 10 x 10
    images = first(family(5, LeNet, (1, 28, 28), 10))
    shapes = {n: x.shape for n, x in images.init().items() if x.ndim > 1}
    places = dict.fromkeys(shapes, 1) | {"first.weight": 28 * 28, "second.weight": 10 * 10}
    assert gradient_operations(images) == 3 * 2 * 5 * sum(shapes[n].numel() * places[n] for n in shapes)


@pytest.mark.parametrize("batch_size", [1, 10, 66, 67, 100, 150, 200])
def test_all_directions_are_kept_where_a_quarter_of_a_gradient_pays(batch_size):
    costs = {}
    for place, (columns, rows) in {"0": SIZES[:2], "2": SIZES[1:]}.items():
        numbers = rows * columns
        costs[f"right/{place}.weight"] = (4 * numbers * min(columns, LARGEST), 2 * numbers * columns)
    budget = AFFORDED * 3 * 2 * batch_size * (SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2])
    whole = kept(batch_size)
    spent = sum(costs[f][f in whole] for f in costs)
    assert spent <= budget or not whole
    for factor in set(costs) - whole:
        assert spent - costs[factor][0] + costs[factor][1] > budget, "one more could have been afforded"


def test_larger_batches_pay_for_more():
    assert not kept(1)
    assert kept(100) == {"right/2.weight"}
    assert kept(200) == {"right/0.weight", "right/2.weight"}
    assert not affording(Kronecker(rank=3).bind(first(family(200)).init()), first(family(200))).basis.whole


@pytest.mark.parametrize("learn", ["reference", "rounds"])
def test_what_is_learned_has_these_directions(learn):
    for batch_size, columns in ((100, LARGEST), (200, SIZES[0])):
        if learn == "reference":
            found = learn_from_reference(family(batch_size), Kronecker(rank="auto"), reference=Reference(lr=1e-2), tasks=2)
        else:
            found = meta_train(family(batch_size), Kronecker(rank="auto"), outer_steps=2, tasks_per_step=2)
        factors = found.potential.basis.factors()
        assert factors["right/2.weight"].shape == (SIZES[1], SIZES[1])
        assert factors["right/0.weight"].shape[1] <= columns
        assert (factors["right/0.weight"].shape[1] == SIZES[0]) == (batch_size == 200)

"""Laws of families over the catalogue, each shown to reject a family with one fault; then the families' own numbers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad

import metamd
from metamd.tasks import SolvedTask, config_hash, logistic, quadratic, rosenbrock, tabular
from tests import task_laws as laws
from tests.helpers import FAMILIES, Toy
from tests.task_laws import LAWS, Law, direction, draw, generator


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", [*FAMILIES, "a user's own"])
def test_families_keep_the_laws(name: str, law: Law) -> None:
    assert law(FAMILIES[name]() if name in FAMILIES else Toy())


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        (laws.sample_uses_the_generator_alone, "global generator"),
        (laws.build_is_deterministic_and_leaves_the_generator_alone, "random build"),
        (laws.config_survives_json, "config with a tensor"),
        (laws.batches_do_not_depend_on_the_order_of_calls, "call order"),
        (laws.start_is_fresh_and_the_same_at_every_call, "aliased start"),
        (laws.start_is_fresh_and_the_same_at_every_call, "drifting start"),
        (laws.loss_is_pure, "loss with memory"),
        (laws.loss_can_be_differentiated_by_torch_func, "detached loss"),
        (laws.tasks_with_a_shared_loss_run_together, "private loss"),
    ],
)
def test_laws_reject_a_family_with_one_fault(law: Law, fault: str) -> None:
    assert not law(Toy(fault))


SOLVED = ["quadratic", "quadratic-12", "rosenbrock", "rosenbrock-4", "logistic"]


def optimum_is_optimal(task: SolvedTask, whole: Any) -> bool:
    best = task.optimum()
    flat = all(bool(g.abs().max() < 1e-9) for g in grad(task.loss)(best, whole).values())
    near = [{n: x + 0.01 * direction(best, s)[n] for n, x in best.items()} for s in range(5)]
    lowest = all(task.evaluate(p, "train").loss > task.minimum() for p in near)
    return flat and lowest and task.minimum() == pytest.approx(float(task.loss(best, whole)))


@pytest.mark.parametrize("name", SOLVED)
def test_the_known_optimum_is_one(name: str) -> None:
    for seed in range(5):
        task = draw(FAMILIES[name](), seed)
        assert optimum_is_optimal(task, task.splits["train"] if name == "logistic" else task.batch(0))


def test_a_wrong_optimum_is_noticed() -> None:
    good, bad = draw(Toy()), draw(Toy("wrong optimum"))
    whole = {"centre": torch.full((2,), good.config["centre"], dtype=torch.float64)}
    assert optimum_is_optimal(good, whole)
    assert not optimum_is_optimal(bad, whole)


def test_quadratics_are_drawn_as_described() -> None:
    family = quadratic()
    factors, b = [], []
    for seed in range(2000):
        config = family.sample(generator(seed))
        factors.append(torch.linalg.cholesky(torch.tensor(config["Q"], dtype=torch.float64)))
        b.append(torch.tensor(config["b"]))
    c, b_all = torch.stack(factors), torch.stack(b)
    # 2,000 draws from fixed seeds: four standard errors of a mean are 0.09 deviations, of a deviation 0.064 of it.
    for i, mean in enumerate((0.3, 14.0)):
        assert c[:, i, i].mean() == pytest.approx(math.sqrt(mean), rel=0.009)
        assert c[:, i, i].std() == pytest.approx(0.1 * math.sqrt(mean), rel=0.064)
        assert b_all[:, i].mean() == pytest.approx(1, abs=0.09)
        assert b_all[:, i].std() == pytest.approx(1, rel=0.064)
    assert c[:, 1, 0].mean() == pytest.approx(0, abs=0.027)
    assert c[:, 1, 0].std() == pytest.approx(0.3, rel=0.064)


def test_a_quadratic_by_hand() -> None:
    family = quadratic((1.0, 1.0), start=(1.0, 2.0))
    task = family.build({"family": "quadratic", "Q": [[2.0, 0.0], [0.0, 4.0]], "b": [4.0, 8.0]})
    assert float(task.loss(task.init(), task.batch(0))) == 2 + 16 - 4 - 16
    assert isinstance(task, SolvedTask)
    assert task.optimum()["theta"].tolist() == [1.0, 1.0]
    assert task.minimum() == -6


def test_large_quadratics_store_a_seed_and_small_ones_their_numbers() -> None:
    assert set(quadratic([1.0] * 8).sample(generator())) == {"family", "Q", "b"}
    assert set(quadratic([1.0] * 9).sample(generator())) == {"family", "seed"}
    assert draw(quadratic([1.0] * 500, coupling=0.3 / math.sqrt(500))).init()["theta"].shape == (500,)


def test_the_plain_rosenbrock_is_one_function_and_the_family_is_many() -> None:
    one, many = rosenbrock(), rosenbrock(shift=1.0, scale=0.5)
    assert one.sample(generator(0)) == one.sample(generator(1))
    assert many.sample(generator(0)) != many.sample(generator(1))
    task = draw(one)
    assert float(task.loss(task.init(), task.batch(0))) == pytest.approx(24.2)  # the textbook value at (-1.2, 1)
    assert task.optimum()["theta"].tolist() == [1.0, 1.0]
    assert task.minimum() == 0


def test_logistic_batches_cover_the_training_split_once_per_epoch() -> None:
    task = draw(logistic(3, examples=40, batch_size=10))
    epoch = torch.cat([task.batch(t)["inputs"] for t in range(4)])
    assert torch.equal(epoch.sort(0).values, task.splits["train"]["inputs"].sort(0).values)
    assert not torch.equal(epoch, torch.cat([task.batch(t)["inputs"] for t in range(4, 8)]))


def test_logistic_optimum_predicts_and_a_separable_one_without_penalty_is_refused() -> None:
    task = draw(logistic(3, examples=2000))
    best = task.evaluate(task.optimum())
    assert best.accuracy > 0.62
    assert best.loss < task.evaluate(task.init()).loss
    with pytest.raises(RuntimeError, match="no finite optimum"):
        draw(logistic(5, examples=5, batch_size=5, l2=0.0)).optimum()


def test_a_table_can_be_learned() -> None:
    task = draw(tabular())
    params = task.init()
    for t in range(200):
        slope = grad(task.loss)(params, task.batch(t))
        params = {n: x - 0.05 * slope[n] for n, x in params.items()}
    before, after = task.evaluate(task.init()), task.evaluate(params)
    assert after.loss < 0.3 * before.loss
    assert after.accuracy is None


def test_hashes_tell_configs_apart_and_ignore_the_order_of_keys() -> None:
    family = quadratic()
    hashes = {config_hash(family.sample(generator(s))) for s in range(50)}
    assert len(hashes) == 50
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="JSON's types"):
        config_hash({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="finite"):
        config_hash({"a": math.nan})


def test_tasks_are_reached_through_the_package() -> None:
    assert metamd.tasks.quadratic is quadratic
    assert "tasks" in dir(metamd)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: quadratic(()), "one number per dimension, got none"),
        (lambda: quadratic((1.0, -1.0)), "means must be positive"),
        (lambda: quadratic((1.0, 2.0, 3.0), start=(1.0, 2.0)), "start must be one number or one for each of 3"),
        (lambda: quadratic(steps=0), "steps must be at least 1"),
        (lambda: rosenbrock(1), "dimension must be at least 2"),
        (lambda: rosenbrock(shift=-1.0), "must not be negative"),
        (lambda: rosenbrock(steps=0), "steps must be at least 1"),
        (lambda: logistic(batch_size=2000), "between 1 and the 1000 examples, got 2000"),
        (lambda: logistic(0), "at least 1"),
        (lambda: logistic(l2=-1.0), "l2 must not be negative"),
        (lambda: tabular(batch_size=501), "batch_size <= examples"),
        (lambda: quadratic().build({"family": "logistic"}), "of 'quadratic' is required, got one of 'logistic'"),
        (lambda: quadratic().build({"family": "quadratic", "Q": [[1.0]]}), "b is missing"),
        (lambda: quadratic().build({"family": "quadratic", "Q": [[1.0]], "b": [1.0]}), "must have dimension 2"),
        (lambda: rosenbrock().build({"family": "rosenbrock", "shift": [0], "scale": [1]}), "must have 2 numbers"),
        (lambda: draw(logistic()).batch(-1), "step must not be negative"),
    ],
)
def test_bad_input_is_a_sentence(wrong: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        wrong()

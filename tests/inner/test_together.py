"""Runs side by side are the runs one by one."""

import pytest
import torch

import metamd
from metamd import Diagonal, MaxDiagonal
from metamd.inner import together
from metamd.inner.objectives import Reference
from metamd.inner.run import run_inner
from metamd.inner.together import run_many
from tests.small_tasks import Separable, TanhNet, potential_for


class SharedSeparable(Separable):
    """What tells the tasks apart is in the batch; `poison` makes one of them go wrong."""

    def __init__(self, seed=0, steps=10, poison=None) -> None:
        super().__init__(seed, steps)
        self.poison = poison

    def batch(self, step):
        bad = torch.tensor(float("nan") if step == self.poison else 0.0, dtype=torch.float64)
        return {"c": self.c, "bad": bad}

    def loss(self, params, batch):
        return 0.5 * (self.a * (params["x"] - batch["c"]) ** 2).sum() + batch["bad"]


def families():
    quadratic = metamd.tasks.quadratic(steps=20)
    g = torch.Generator().manual_seed(0)
    return {
        "quadratics": [quadratic.build(quadratic.sample(g)) for _ in range(5)],
        "networks": [TanhNet(seed, 9) for seed in range(4)],
        "different starts": [SharedSeparable(seed) for seed in range(4)],
    }


def side_by_side_is_one_by_one(tasks, potential):
    many = run_many(tasks, potential, lr=0.5)
    for run, task in zip(many, tasks, strict=True):
        alone = run_inner(task, potential, lr=0.5)
        same = torch.allclose(run.losses, alone.losses, rtol=1e-9)
        same &= all(torch.allclose(run.end[n], x, rtol=1e-9) for n, x in alone.end.items())
        same &= all(torch.allclose(run.squares[n], x, rtol=1e-9) for n, x in alone.squares.items())
        same &= abs(run.largest_gradient - alone.largest_gradient) <= 1e-9 * alone.largest_gradient
        same &= run.weights.shape == alone.weights.shape and run.diverged == alone.diverged
        if not same:
            return False
    return True


@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize("tying", ["parameter", "channel", "column", "tensor", "role"])
def test_side_by_side_is_one_by_one(name, tying):
    tasks = families()[name]
    potential = potential_for(tasks[0], log=3.5, tying=tying)
    assert side_by_side_is_one_by_one(tasks, potential)


def test_a_loss_that_is_not_shared_is_rejected():
    tasks = [Separable(seed) for seed in range(3)]
    assert not side_by_side_is_one_by_one(tasks, potential_for(tasks[0], log=3.5))


def test_one_run_that_goes_wrong_does_not_touch_the_others():
    tasks = [SharedSeparable(seed, poison=4 if seed == 1 else None) for seed in range(3)]
    potential = potential_for(tasks[0], log=3.5)
    runs = run_many(tasks, potential)
    assert [bool(r.diverged) for r in runs] == [False, True, False]
    assert "nan at step 4" in runs[1].diverged
    assert len(runs[1].losses) == 4
    alone = run_inner(tasks[1], potential)
    assert torch.allclose(runs[1].end["x"], alone.end["x"])
    assert torch.allclose(runs[1].squares["x"], alone.squares["x"])
    assert side_by_side_is_one_by_one(tasks, potential)


def test_all_may_explode():
    runs = run_many([SharedSeparable(seed, 300) for seed in range(3)], Diagonal())
    assert all("rose from" in r.diverged for r in runs)


def test_several_pieces_and_large_models_run_one_by_one(monkeypatch):
    class Refuses:
        def __init__(self, *arguments) -> None:
            raise AssertionError("side by side")

    monkeypatch.setattr(together, "_SideBySide", Refuses)
    tasks = [SharedSeparable(seed) for seed in range(3)]
    assert len(run_many(tasks, MaxDiagonal(3), lr=0.01)) == 3
    with pytest.raises(AssertionError, match="side by side"):
        run_many(tasks, Diagonal())
    monkeypatch.setattr(together, "SMALL", 2)
    assert len(run_many(tasks, Diagonal(), lr=0.01)) == 3


def test_references_are_found_for_each():
    tasks = [SharedSeparable(seed) for seed in range(2)]
    runs = run_many(tasks, Diagonal(), lr=0.01, reference=Reference(lr=0.1))
    assert not torch.equal(runs[0].reference["x"], runs[1].reference["x"])
    assert runs[0].cost.gradients == 10 + 20


def test_no_tasks_are_refused():
    with pytest.raises(ValueError, match="at least one task"):
        run_many([], Diagonal())

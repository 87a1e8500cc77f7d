"""The learned start: the mean of where reference runs end, its tasks, its cost and its file."""

import math

import pytest
import torch

import metamd
from metamd import (
    Diagonal,
    LearnedOptimiser,
    MaxDiagonal,
    meta_train,
)
from metamd.files.learned import LearnedStart
from metamd.inner.objectives import Reference
from metamd.learning.reference import learn_start
from metamd.tasks import quadratic, starting_at, tabular


def test_the_mean_of_the_solutions_minimises_the_expected_divergence():
    g = torch.Generator().manual_seed(0)
    solutions = [{"x": torch.randn(4, generator=g, dtype=torch.float64)} for _ in range(5)]
    mean = {"x": torch.stack([u["x"] for u in solutions]).mean(0)}
    fresh = MaxDiagonal(3, centre="origin").bind(mean)
    phi = fresh.with_metrics({"x": torch.randn(3, 4, generator=g, dtype=torch.float64)}).bind(mean)

    def expected(v):
        return sum(float(phi.divergence(u, v).detach()) for u in solutions) / 5

    others = [{"x": mean["x"] + 0.3 * torch.randn(4, generator=g, dtype=torch.float64)} for _ in range(50)]
    assert all(expected(mean) <= expected(v) + 1e-12 for v in others)
    median = {"x": torch.stack([u["x"] for u in solutions]).median(0).values}
    assert expected(median) > expected(mean)


def test_a_learned_start_is_the_mean_of_reference_ends_and_travels_with_the_file(tmp_path):
    family = starting_at(quadratic(steps=20), {"theta": torch.tensor([1.0, 1.0], dtype=torch.float64)})
    reference = Reference(lr=0.05, factor=2)
    start = learn_start(family, reference=reference, tasks=3, seed=1)
    seeds = [metamd.tasks.base.derive_seed(1, "usage", "start", i) for i in range(3)]
    drawn = [family.build(family.sample(torch.Generator().manual_seed(s))) for s in seeds]
    ends = [reference.run(t, t.init(), 20)[0]["theta"] for t in drawn]
    torch.testing.assert_close(start["theta"], torch.stack(ends).mean(0))
    learned = meta_train(starting_at(family, start), Diagonal(), outer_steps=1, tasks_per_step=2).with_start(start)
    learned.save(tmp_path / "started.safetensors")
    again = metamd.load(tmp_path / "started.safetensors")
    assert torch.equal(again.start["theta"], start["theta"])
    assert again.header.start == {"theta": (2,)}
    damaged = (tmp_path / "started.safetensors").read_bytes()
    at = damaged.rindex(start["theta"].numpy().tobytes())
    (tmp_path / "damaged.safetensors").write_bytes(damaged[:at] + b"\x01" + damaged[at + 1 :])
    with pytest.raises(ValueError, match="does not match its checksum"):
        metamd.load(tmp_path / "damaged.safetensors")


def test_a_learned_start_knows_its_tasks_and_its_cost(tmp_path):
    family = starting_at(quadratic(steps=10), {"theta": torch.tensor([1.0, 1.0], dtype=torch.float64)})
    used, batches, build = set(), [], family.build

    def spied(config):
        task = build(config)
        used.add(metamd.tasks.config_hash(config))
        batch = task.batch
        task.batch = lambda step: (batches.append(step), batch(step))[1]
        return task

    family.build = spied
    start = learn_start(family, tasks=4)
    assert set(start.tasks) == used
    assert start.cost["gradient_evaluations"] == len(batches)
    learned = meta_train(starting_at(family, start), Diagonal(), outer_steps=1, tasks_per_step=2)
    with_it, plain = learned.with_start(start), learned.with_start(LearnedStart(start, tasks=["a" * 32]))
    assert set(with_it.header.task_hashes) == {*learned.header.task_hashes, *start.tasks}
    both = learned.header.cost["gradient_evaluations"] + len(batches)
    assert with_it.header.cost["gradient_evaluations"] == both
    assert with_it.header.cost["outer_steps"] == learned.header.cost["outer_steps"]
    assert plain.header.cost == learned.header.cost
    assert "a" * 32 in plain.header.task_hashes
    start.save(tmp_path / "start.safetensors")
    again = LearnedStart.load(tmp_path / "start.safetensors")
    assert (again.tasks, again.cost, list(again)) == (start.tasks, start.cost, list(start))
    data = bytearray((tmp_path / "start.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "start.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="does not match its checksum"):
        LearnedStart.load(tmp_path / "start.safetensors")


def test_a_learned_start_needs_tasks_that_share_one():
    with pytest.raises(ValueError, match="needs tasks that begin at one model"):
        learn_start(tabular(steps=5))
    learned = meta_train(quadratic(), Diagonal(), outer_steps=1, tasks_per_step=1)
    with pytest.raises(ValueError, match="the header must announce the learned start"):
        LearnedOptimiser(learned.header, learned.potential, start={"theta": torch.zeros(2)})
    with pytest.raises(ValueError, match="must be finite"):
        learned.with_start({"theta": torch.tensor([math.nan, 0.0])}).save("never.safetensors")

"""What a family alone gives: learned coordinates and a usage for networks, a diagonal for vectors."""

from dataclasses import replace

import pytest
import torch

from metamd import Diagonal, Forward, Reverse, load, meta_train, prepare, tasks
from metamd.cli import main as cli
from metamd.cli.options import Train
from metamd.cli.train import _resolved
from metamd.learning.meta import refinement
from metamd.learning.network import has_weights, learn_network
from tests.helpers import losses_of


def test_a_network_gets_learned_coordinates_and_a_usage():
    family = tasks.tabular(steps=20)
    assert has_weights(family)
    learned = meta_train(family, tasks_per_step=1, seed=3)
    assert any(name.startswith("right/") for name in learned.potential.basis.factors())
    assert learned.header.usage is not None
    assert learned.fingerprint() == learn_network(family, tasks=1, seed=3).fingerprint()
    task = family.build(family.sample(torch.Generator().manual_seed(9)))
    params = {n: torch.nn.Parameter(x.clone()) for n, x in task.init().items()}
    optimiser, schedule = prepare(params.items(), learned, steps=20)
    losses = losses_of(task, params, optimiser, schedule, 20)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("family", [tasks.quadratic(steps=20), tasks.rosenbrock(steps=20)])
def test_vectors_get_a_diagonal_that_is_refined_where_digits_count(family):
    assert not has_weights(family)
    few = {"outer_steps": 2, "tasks_per_step": 2}
    found, refine = meta_train(family, **few), refinement(family)
    assert found.fingerprint() == meta_train(family, Diagonal(), refine=refine, **few).fingerprint()
    assert (refine is None) == (family.name != "quadratic")
    assert ("LogGap" in found.header.estimator) == (refine is not None)


def test_many_metrics_are_refined_by_reverse_mode():
    assert isinstance(refinement(tasks.quadratic([1.0] * 17)).estimator, Reverse)
    assert isinstance(refinement(tasks.quadratic()).estimator, Forward)


def test_options_that_the_default_for_networks_does_not_have_are_refused():
    with pytest.raises(ValueError, match="outer_steps, max_norm can be given together with a potential"):
        meta_train(tasks.tabular(steps=5), outer_steps=3, max_norm=2.0)


def test_the_command_line_has_the_same_default(tmp_path):
    network, vectors = tasks.tabular(steps=5), tasks.quadratic(steps=5)
    plain = Train("tabular", steps=5, seed=1)
    assert _resolved(plain, network) == replace(plain, potential="kronecker", rank="auto", follow=True, usage=True)
    assert _resolved(Train("quadratic"), vectors).potential == "diagonal"
    for said in ({"pieces": 3}, {"tying": "column"}, {"outer_steps": 2}, {"preset": "paper"}, {"refine": 1}):
        assert _resolved(replace(plain, **said), network).potential == "diagonal", said
    assert _resolved(replace(plain, potential="diagonal"), network).follow is False
    out = tmp_path / "tabular.safetensors"
    assert cli.run(["train", "tabular", "--steps", "10", "--tasks", "1", "--out", str(out)]) == 0
    learned = load(out)
    assert learned.header.usage is not None
    assert learned.potential.basis.kind == "right"

"""Two real processes: data parallel, fully sharded, and distributed checkpoints."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from metamd import MetaMD, certify_run
from tests.distributed_worker import (
    ONLINE,
    STEPS,
    batch,
    fit,
    fit_image,
    geometry_and_model,
    image_model,
    kept,
    online_geometry,
)
from tests.helpers import small_model
from tests.processes import PATIENCE

MODES = {
    "ddp": ("ddp", "ddp_kronecker", "ddp_nonfinite", "certified_ddp", "certified_closure"),
    "fsdp": (
        "fsdp",
        "fsdp_channel",
        "fsdp_column",
        "fsdp_kronecker",
        "fsdp_after",
        "fsdp_momentum",
        "fsdp_tail",
        "fsdp_nonfinite",
        "fsdp_refused",
        "checkpoint",
        "checkpoint_online",
        "checkpoint_edited",
        "certified",
        "certified_pieces",
        "certified_adam",
    ),
}
"""The cases that one launch of two processes runs, one after another."""


def launch(mode, folder, world=2):
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed_worker", str(rank), str(world), str(folder), *MODES[mode]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(world)
    ]
    outputs = [run.communicate(timeout=PATIENCE)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * world, "\n".join(outputs)[-3000:]


@pytest.fixture
def ranks(once):
    """`ranks(case)`: what each process of a case found; every mode is launched once."""

    def found(case):
        (mode,) = (m for m, cases in MODES.items() if case in cases)
        folder = once(f"distributed-{mode}", partial(launch, mode))
        return [torch.load(folder / case / f"{rank}.pt", weights_only=True) for rank in range(2)]

    return found


def single(momentum=0.0, averaging="constant", **options):
    geometry, model = geometry_and_model(**options)
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.1, momentum=momentum, averaging=averaging)
    fit(model, optimiser, 0, 1)
    optimiser.eval()
    return model.state_dict(), optimiser


def equal(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def close(a, b):
    return all(torch.allclose(a[n], b[n], rtol=1e-9, atol=1e-11) for n in a)


@pytest.mark.parametrize(("case", "options"), [("ddp", {}), ("ddp_kronecker", {"sides": "both"})])
def test_data_parallel_ranks_agree_with_each_other_and_with_one_process(ranks, case, options):
    first, second = ranks(case)
    assert equal(first["params"], second["params"])
    assert first["weights"] == second["weights"]
    assert torch.equal(first["pieces"], second["pieces"])
    params, optimiser = single(**options)
    assert close(first["params"], params)
    assert (optimiser._active.weights > 0).sum() > 1, "no kink was met: the agreement of weights says little"


def test_data_parallel_refuses_a_nonfinite_gradient_on_all_ranks(ranks):
    first, second = ranks("ddp_nonfinite")
    assert "not finite" in first["error"]
    assert "not finite" in second["error"]
    assert equal(first["params"], geometry_and_model()[1].state_dict())


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("fsdp", {}),
        ("fsdp_channel", {"tying": "channel", "centre": "origin"}),
        ("fsdp_column", {"tying": "column"}),
        ("fsdp_kronecker", {"sides": "right"}),
        ("fsdp_after", {}),
        ("fsdp_momentum", {"momentum": 0.8}),
        ("fsdp_tail", {"averaging": "tail"}),
    ],
)
def test_fully_sharded_gives_the_unsharded_result(ranks, case, options):
    first, second = ranks(case)
    params, optimiser = single(**options)
    assert equal(first["params"], second["params"])
    assert close(first["params"], params)
    assert torch.equal(first["pieces"], optimiser.active_pieces)
    assert first["weights"] == second["weights"]


def test_fully_sharded_comparison_rejects_forms_of_one_shard():
    """The comparison above can fail: weights from half of the coordinates lead elsewhere."""
    params, _ = single()
    geometry, model = geometry_and_model()
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.1)
    potential = optimiser.potential
    potential.add_up = lambda parts, add=potential.add_up: add({n: p for n, p in parts.items() if n.startswith("0.")})
    bind = optimiser._bind
    optimiser._bind = lambda: (bind(), setattr(optimiser.potential, "add_up", potential.add_up))
    fit(model, optimiser, 0, 1)
    assert not close(model.state_dict(), params)


def test_fully_sharded_refuses_a_nonfinite_gradient_on_all_ranks(ranks):
    first, second = ranks("fsdp_nonfinite")
    assert "elsewhere is not finite" in first["error"]
    assert "'0.weight'" in second["error"]
    assert equal(first["params"], geometry_and_model()[1].state_dict())


def test_distributed_checkpoint_resumes_bit_exactly(ranks):
    first, second = ranks("checkpoint")
    for result in (first, second):
        assert result["weights"] == result["loaded"]
        assert equal(result["params"], result["resumed"])
        assert torch.equal(*result["pieces"])
        assert len(result["pieces"][0]) == STEPS


@pytest.mark.parametrize("rule", ONLINE)
def test_sharded_online_metrics_take_the_steps_of_one_process_and_resume_bit_for_bit(ranks, rule):
    found = ranks("checkpoint_online")
    model = image_model()
    geometry, online = online_geometry(rule, model)
    optimiser = MetaMD(model.named_parameters(), geometry, metric=online, momentum=0.8)
    fit_image(model, optimiser, 0, 1, range(10))
    for result in (one[rule] for one in found):
        assert equal(result["params"], result["resumed"])
        assert close(result["params"], model.state_dict())
        for own, resumed, state in zip(*result["kept"], kept(optimiser), strict=True):
            assert own.keys() == resumed.keys() == state.keys()
            assert equal(own, resumed)
            assert close(own, state)


def test_sharded_polar_steps_are_not_those_of_the_shards(ranks):
    """The comparison above can fail: the rows of one process whitened alone lead elsewhere."""
    model = image_model()
    geometry, online = online_geometry("polar", model)
    optimiser = MetaMD(model.named_parameters(), geometry, metric=dataclasses.replace(online, block=2), momentum=0.8)
    fit_image(model, optimiser, 0, 1, range(10))
    assert not close(ranks("checkpoint_online")[0]["polar"]["params"], model.state_dict())


@pytest.mark.parametrize(
    ("case", "options"),
    [("certified", {}), ("certified_pieces", {"averaging": "tail"}), ("certified_ddp", {})],
)
def test_certificates_of_shards_and_of_resumed_runs_are_those_of_one_process(ranks, case, options):
    first, second = ranks(case)
    assert first == second
    assert first["one"] == first["resumed"]
    geometry, model = geometry_and_model(**({} if case == "certified" else {"pieces": 1}))
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.1, certify=True, **options)
    fit(model, optimiser, 0, 1)
    single = optimiser.certificate(small_model(seed=1, dtype=torch.float64), radius=1.0)
    for field in ("bound", "realised", *(["average"] if options else [])):
        assert first["one"][field] == pytest.approx(getattr(single, field), rel=1e-8), field
    assert first["one"]["mirror"] == pytest.approx(dataclasses.asdict(single.mirror), rel=1e-8)
    assert first["one"]["guaranteed"]
    assert first["one"]["steps"] == STEPS


def test_certificates_of_shards_that_adam_moves_are_those_of_one_process(ranks):
    first, second = ranks("certified_adam")
    assert first == second
    assert first["one"] == first["resumed"]
    geometry, model = geometry_and_model(pieces=1)
    run = certify_run(adam := torch.optim.Adam(model.named_parameters(), lr=0.01), geometry)
    fit(model, adam, 0, 1)
    single = run.certificate(small_model(seed=1, dtype=torch.float64), radius=1.0)
    for field in ("bound", "realised"):
        assert first["one"][field] == pytest.approx(getattr(single, field), rel=1e-8), field
    assert (first["one"]["steps"], first["one"]["guaranteed"]) == (STEPS, True)


def test_the_loss_of_one_processs_part_of_the_batch_is_not_taken_for_that_of_the_run(ranks):
    first, second = ranks("certified_closure")
    assert first["own"] != second["own"]
    assert first["known"] == second["known"] == [None, None]
    assert first["given"] == 2.0


def test_the_two_ranks_see_different_data():
    assert not torch.equal(batch(0, 0, 2), batch(0, 1, 2))


def test_a_basis_that_shards_would_cut_is_refused(ranks):
    for found in ranks("fsdp_refused"):
        assert "needs whole tensors on one process, but its dimensions [0] are sharded" in found["error"]


def test_an_edit_after_a_distributed_checkpoint_is_noticed(ranks):
    for found in ranks("checkpoint_edited"):
        for edited in (False, True):
            assert equal(found[f"edited={edited} resumed=False"], found[f"edited={edited} resumed=True"])
        assert not equal(found["edited=False resumed=False"], found["edited=True resumed=False"])
        shards, wholes = found["digests"]
        assert shards == wholes

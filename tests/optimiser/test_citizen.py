"""MetaMD among torch's own machinery: schedulers, mixed precision, compile, and torch's tables for its own optimisers."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

from metamd import Euclidean, MetaMD
from tests.helpers import equal_parameters, random_geometry, small_model, train
from tests.processes import PATIENCE

ROOT = Path(__file__).parents[2]
SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda t: 0.9**t},
    "MultiplicativeLR": {"lr_lambda": lambda t: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10, "cycle_momentum": False},
    "ReduceLROnPlateau": {"patience": 0},
    "SequentialLR": None,
    "ChainedScheduler": None,
}


def scheduler(name, optimiser):
    if name == "SequentialLR":
        return lr_scheduler.SequentialLR(
            optimiser, [lr_scheduler.ConstantLR(optimiser), lr_scheduler.ExponentialLR(optimiser, 0.5)], [3]
        )
    if name == "ChainedScheduler":
        return lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimiser), lr_scheduler.ExponentialLR(optimiser, 0.5)]
        )
    return getattr(lr_scheduler, name)(optimiser, **SCHEDULERS[name])


def test_every_scheduler_of_torch_is_in_the_table():
    kinds = {
        n
        for n, c in vars(lr_scheduler).items()
        if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler) and not n.startswith("_") and n != "LRScheduler"
    }
    assert kinds == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_drives_it(name):
    """The learning rates are those that SGD gets, and the parameters move by them."""
    ours, theirs = small_model(), small_model()
    a = MetaMD(ours.named_parameters(), Euclidean(), lr=0.1)
    b = torch.optim.SGD(theirs.parameters(), lr=0.1)
    drive = {a: scheduler(name, a), b: scheduler(name, b)}
    for t in range(6):
        for model, optimiser in ((ours, a), (theirs, b)):
            loss = train(model, optimiser, 1, first=t)[0]
            drive[optimiser].step(*([loss] if name == "ReduceLROnPlateau" else []))
        assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_swa_and_clipping_and_ema():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.02)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    swa = torch.optim.swa_utils.SWALR(optimiser, swa_lr=0.01)
    for t in range(5):
        train(model, optimiser, 1, first=t)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        averaged.update_parameters(model)
        swa.step()
    assert optimiser.param_groups[0]["lr"] < 0.02


def test_grad_scaler_skips_a_bad_step_and_takes_the_next():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=10**6)
    before = [p.detach().clone() for p in model.parameters()]
    taken = []
    for _ in range(90):
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 5)).square().sum() * 1e12
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scale = scaler.get_scale()
        scaler.update()
        taken.append(scaler.get_scale() == scale)
        if not taken[-1]:
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        else:
            break
    assert not taken[0]
    assert taken[-1]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert len(optimiser.active_pieces) == 1


COMPILE = """
import torch, metamd
from torch._dynamo.utils import counters
from tests.helpers import small_model, random_geometry, train
model, twin = small_model(), small_model()
geometry = random_geometry(model)
opt = metamd.MetaMD(model.named_parameters(), geometry, lr=torch.tensor(0.2))
plain = metamd.MetaMD(twin.named_parameters(), geometry, lr=torch.tensor(0.2))
compiled = torch.compile(opt.step)
class Compiled:
    zero_grad = opt.zero_grad
    step = staticmethod(compiled)
for t in range(12):
    if t == 2:
        torch._dynamo.config.error_on_recompile = True
        frames = counters["frames"]["ok"]
    train(model, Compiled, 1, first=t)
    train(twin, plain, 1, first=t)
    for o in (opt, plain):
        o.param_groups[0]["lr"] *= 0.95
assert counters["frames"]["ok"] == frames, counters
assert frames > 0
assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
assert len(set(opt.active_pieces.tolist())) >= 1
print("frames", frames)
"""


def test_compiled_step_does_not_recompile():
    """Twelve steps with a changing learning rate and changing pieces: nothing is compiled after the second."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("frames")


def test_compiled_and_wrapped_models_find_their_metrics():
    model = small_model()
    geometry = random_geometry(model)
    compiled = torch.compile(model, backend="eager")
    assert all(n.startswith("_orig_mod.") for n, _ in compiled.named_parameters())
    optimiser = MetaMD(compiled.named_parameters(), geometry)
    assert set(optimiser.potential.slots) == {n for n, _ in model.named_parameters()}


def test_parameters_replaced_behind_its_back_are_bound_again():
    """Accelerate puts shards in the place of parameters; names go by place, and the run is that of the new ones."""
    model, other = small_model(seed=1), small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.3)
    optimiser.param_groups[0]["params"] = list(other.parameters())
    train(other, optimiser, 10)
    expected = small_model()
    train(expected, MetaMD(expected.named_parameters(), random_geometry(model), lr=0.3), 10)
    assert equal_parameters(other, expected)
    assert equal_parameters(model, small_model(seed=1))


def test_metrics_follow_parameters_to_another_device(monkeypatch):
    """As after `model.to(device)`, which keeps the parameter objects. No device can be had everywhere but "meta"."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = small_model()
    first = model[0].weight
    optimiser = MetaMD(model.named_parameters(), random_geometry(model))
    model.to("meta")
    assert model[0].weight is first
    optimiser.step()  # without gradients nothing is computed, but the parameters are looked at
    assert {optimiser.potential.metric(n).device.type for n, _ in model.named_parameters()} == {"meta"}

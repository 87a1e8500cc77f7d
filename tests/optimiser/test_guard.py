"""Off the family: one warning that says so, and smaller steps where a run blows up."""

import math
import warnings

import pytest
import torch
from torch import nn

from metamd import Diagonal, LearnedOptimiser, MetaMD, OffFamilyWarning
from metamd.optimiser.guard import FamilyWatch, Safeguard
from metamd.potentials.tying import Slot

CURVATURE = torch.tensor([1.0, 10.0, 100.0])


def learned(horizon=50, scale=None):
    """A geometry learned on quadratics with these curvatures: Newton's metric, and the gradients seen there."""
    potential = Diagonal().with_metrics({"x": CURVATURE.log().reshape(1, 3)})
    return LearnedOptimiser.from_potential(potential, horizon=horizon, gradient_scale={"x": scale or 58.0})


def run(factor=1.0, steps=20, noise=0.0, curvature=CURVATURE, **options):
    x = nn.Parameter(torch.ones(3))
    optimiser = MetaMD([("x", x)], options.pop("geometry", learned()), **options)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = factor * 0.5 * (curvature * x**2).sum()
        loss.backward()
        x.grad += noise * curvature.sqrt() * torch.randn(3, generator=generator)
        if not torch.isfinite(x.grad).all():
            return [*losses, math.inf], optimiser
        optimiser.step()
        losses.append(loss.item() / factor)
    return losses, optimiser


def test_a_run_of_the_family_gets_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, _ = run(noise=0.01)
    assert losses[-1] < 1e-2


def test_a_ten_times_scaled_loss_is_noticed_once():
    with pytest.warns(OffFamilyWarning, match="times those of the family") as caught:
        run(factor=10.0, steps=12)
    assert len(caught) == 1
    assert "summed instead of averaged" in str(caught[0].message)


def test_what_to_do_about_the_scale_depends_on_the_metric():
    """An online metric has steps of the same length whatever the scale: a lower lr would ruin the run."""
    watch = {"horizon": None, "gradient_scale": {"w": 1.0}}
    grads, slots = {"w": torch.full((4,), 60.0)}, {"w": Slot("w", (), ())}
    with pytest.warns(OffFamilyWarning, match=r"multiply lr by 0\.017") as learned_metric:
        FamilyWatch(**watch).observe(1, grads, slots)
    with pytest.warns(OffFamilyWarning, match="merely scaled needs nothing") as online_metric:
        FamilyWatch(**watch).observe(1, grads, slots, online=True)
    assert "another geometry" not in str(learned_metric[0].message)
    assert "lr" not in str(online_metric[0].message)


def test_another_family_is_noticed():
    with pytest.warns(OffFamilyWarning, match="of another kind"):
        run(curvature=torch.tensor([1e-3, 1e-3, 1e-3]), steps=6)


def test_far_beyond_the_horizon_is_noticed_once():
    with pytest.warns(OffFamilyWarning, match="learned for runs of 5 steps") as caught:
        run(geometry=learned(horizon=5), steps=30)
    assert len(caught) == 1


def test_a_little_beyond_the_horizon_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, _ = run(geometry=learned(horizon=15), steps=25)
    assert len(losses) == 25


@pytest.mark.filterwarnings("ignore::metamd.OffFamilyWarning")
def test_safeguard_tames_a_ten_times_scaled_loss():
    unguarded, _ = run(factor=10.0, steps=60)
    guarded, optimiser = run(factor=10.0, steps=60, safeguard=True)
    assert unguarded[-1] > 1e6
    assert guarded[-1] < 1e-3
    assert optimiser._safeguard.damping < 0.3


def test_safeguard_leaves_a_noisy_run_of_the_family_alone():
    _, guarded = run(noise=0.3, steps=200, safeguard=True, geometry=learned(horizon=1000))
    assert guarded._safeguard.damping == 1.0


def test_safeguard_reacts_to_a_loss_that_is_not_finite():
    guard = Safeguard()
    guard.update(1.0, 1.0)
    assert guard.update(1.0, math.inf) == 0.5
    assert guard.update(math.inf, None) == 0.25
    assert guard.update(1.0, 1.0) > 0.25


def test_watch_ignores_keys_it_does_not_know():
    watch = FamilyWatch(None, {"x": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(1, 7):
            watch.observe(t, {"y": torch.full((2,), 1e6)}, {"y": Slot("y", (), ())})
    with pytest.warns(OffFamilyWarning):
        watch.observe(1, {"x": torch.full((2,), 1e6)}, {"x": Slot("x", (), ())})

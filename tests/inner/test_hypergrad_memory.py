"""Peak memory in live tensors: flat in the number of steps going forwards, its square root going back."""

import gc

import pytest
import torch

from metamd import Direct, Forward, Regret, Reverse
from tests.live_memory import LiveMemory, peak_of
from tests.small_tasks import Separable, potential_for


def peak(estimator, steps, size=2):
    """Bytes beyond the record of the losses, 8 for every step."""
    task = Separable(0, steps, curvatures=(1.0, 2.0) * (size // 2))
    phi = potential_for(task, log=3.0, spread=0.1)
    return peak_of(lambda: estimator(task, phi, Regret(), generator=torch.Generator())) - 8 * steps


def is_flat(estimator, lengths):
    peaks = [peak(estimator, steps) for steps in lengths]
    return max(peaks) <= 1.02 * min(peaks)


def test_live_memory_counts_what_is_alive():
    def compute():
        first = [torch.ones(1000) for _ in range(10)]
        del first
        return [torch.ones(1000) for _ in range(5)]

    assert peak_of(compute) == 40_000


def test_direct_is_flat_in_the_number_of_steps():
    assert is_flat(Direct(), (50, 500))


def test_forward_is_flat_over_thousands_of_steps():
    assert is_flat(Forward(), (50, 500, 5000))


def test_a_tape_is_not_flat():
    assert not is_flat(Reverse(checkpoints=1), (50, 100))


def growth(estimator):
    """How the peak grows with the number of steps: 2 if like its root, 4 if in proportion."""
    first, second, third = (peak(estimator, steps, size=64) for steps in (64, 256, 1024))
    return (third - second) / (second - first)


def test_reverse_grows_like_the_square_root():
    assert growth(Reverse()) == pytest.approx(2.0, rel=0.1)
    assert growth(Reverse(checkpoints=1)) == pytest.approx(4.0, rel=0.1)


def left_alive(estimator, lr):
    """Bytes that are still alive after a run, without help of the garbage collector."""
    task = Separable(0, 60, curvatures=(1.0, 2.0) * 500)
    phi = potential_for(task, log=3.0, spread=0.1)
    gc.collect()
    gc.disable()
    try:
        with LiveMemory() as memory:
            found = estimator(task, phi, Regret(), lr=lr)
            diverged = bool(found.diverged)
            del found
        return memory.live, diverged
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpoints", [1, 5])
@pytest.mark.parametrize("lr", [1.0, 100.0], ids=["finished", "diverged"])
def test_no_tape_outlives_its_run(checkpoints, lr):
    live, diverged = left_alive(Reverse(checkpoints), lr)
    assert diverged == (lr > 1)
    assert live < 20 * 8000, "a thousand numbers a step, for sixty steps"

"""Learn an optimiser from 10 series, then train a forecaster for each of 100 others, all side by side.

python examples/forecasters.py
"""

import sys
import time
from functools import partial

import torch
from torch import nn

import metamd

# Weeks that repeat, with a strength, a trend and a noise of their own; four weeks of days go in, the next day comes out.
STEPS = int(next(filter(str.isdigit, sys.argv[1:]), "200"))
LAGS, SERIES = 28, 100 if STEPS > 50 else 4


def new_model() -> nn.Module:
    """A small network for each series."""
    return nn.Sequential(nn.Linear(LAGS, 32), nn.ReLU(), nn.Linear(32, 1))


def windows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All windows of two years of a series, and the days that follow them."""
    generator = torch.Generator().manual_seed(seed)
    strength, trend, noise = torch.rand(3, generator=generator)
    days = torch.arange(730.0)
    week = torch.randn(7, generator=generator).repeat(105)[:730]
    series = strength * week + trend * days / 730 + 0.3 * noise * torch.randn(730, generator=generator)
    rows = series.unfold(0, LAGS + 1, 1)
    return rows[:, :LAGS].contiguous(), rows[:, LAGS:].contiguous()


# Learn from ten series.
known = {f"series {i}": {"train": windows(i)} for i in range(10)}
family = metamd.tasks.supervised(new_model, known, nn.functional.mse_loss, batch_size=32, steps=STEPS)
learned = metamd.meta_train(family, tasks_per_step=4)

# Train on all but the last hundred windows of the others, and forecast these.
others = {f"series {i}": windows(i) for i in range(100, 100 + SERIES)}
data = {name: {"train": (x[:-100], y[:-100])} for name, (x, y) in others.items()}
hows = {f"Adam {lr}": partial(torch.optim.Adam, lr=lr) for lr in (0.001, 0.003, 0.01, 0.03)}
for title, how in {"MetaMD": learned, **hows}.items():
    began, errors = time.perf_counter(), []
    for fit in metamd.fleet(new_model, data, how, steps=STEPS, batch_size=32, loss_fn=nn.functional.mse_loss):
        model = new_model()
        model.load_state_dict(dict(fit.params))
        x, y = (part[-100:] for part in others[fit.name])
        errors.append(float((model(x) - y).square().mean()))
    print(f"{title}: mean squared error {sum(errors) / SERIES:.3f}, {SERIES} models in {time.perf_counter() - began:.1f} s")

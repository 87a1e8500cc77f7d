"""A model per customer: learn from a few customers, with the start that suits all, and train the next ones in fewer steps.

python examples/customers.py
"""

import sys

import torch
from torch import nn

import metamd
from metamd.tasks import starting_at, supervised

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60


def new_model() -> nn.Module:
    """One small model for each customer."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def customer(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one customer: what they have in common, and a part of their own."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 6, generator=g)
    return x, (x @ (torch.ones(6, 1) + 0.3 * torch.randn(6, 1, generator=g))).tanh()


def fit(model: nn.Module, opt: torch.optim.Optimizer, seed: int) -> float:
    """Train on the first 150 rows, and give the loss of the last 50."""
    x, y = customer(seed)
    g = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows = torch.randint(150, (20,), generator=g)
        opt.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        opt.step()
    return float((model(x[150:]) - y[150:]).square().mean().detach())


if __name__ == "__main__":
    torch.manual_seed(0)
    known = {f"customer {i}": customer(i) for i in range(6)}
    fresh = supervised(new_model, known, nn.functional.mse_loss, batch_size=20, steps=STEPS)
    family = starting_at(fresh, new_model().state_dict())
    start = metamd.learn_start(family, tasks=4)
    learned = metamd.meta_train(starting_at(family, start), metamd.Diagonal(), outer_steps=2, tasks_per_step=4)
    for seed in range(100, 103):
        losses = {}
        for name in ("MetaMD", "Adam"):
            model = new_model()
            model.load_state_dict(start)
            params = model.named_parameters()
            opt = metamd.MetaMD(params, learned, steps=STEPS) if name == "MetaMD" else torch.optim.Adam(params, lr=3e-3)
            losses[name] = fit(model, opt, seed)
        print(f"customer {seed}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))

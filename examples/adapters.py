"""LoRA adapters: record two of them, learn, and train the next adapter of the same network without a rate to tune.

python examples/adapters.py
"""

import copy
import sys

import peft
import torch
from sklearn.datasets import load_digits
from torch import nn

import metamd
from metamd.tasks.vision import turned

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
DIGITS = load_digits()
IMAGES, LABELS = torch.tensor(DIGITS.images, dtype=torch.float32)[:, None] / 16, torch.tensor(DIGITS.target)
CONFIG = peft.LoraConfig(r=4, target_modules=["0", "2", "4"])


def train(model: nn.Module, opt: torch.optim.Optimizer, angle: float, steps: int) -> float:
    """Your loop, on 1,500 digits turned by an angle; the mean loss on the way."""
    inputs, total, g = turned(IMAGES, angle).flatten(1), 0.0, torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(1500, (50,), generator=g)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[rows]), LABELS[rows])
        loss.backward()
        opt.step()
        total += float(loss.detach()) / steps
    return total


if __name__ == "__main__":
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    train(base, torch.optim.Adam(base.parameters()), 0, 5 * STEPS)

    runs = []
    for angle in (30, -45):
        model = peft.get_peft_model(copy.deepcopy(base), CONFIG)
        opt = torch.optim.AdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=1e-3)
        recorder = metamd.Recorder(opt, name=f"{angle} degrees", batch_size=50)
        train(model, opt, angle, STEPS)
        runs.append(recorder.finish())
    learned = metamd.learn(runs)

    for rate in (None, 1e-3, 3e-3, 1e-2, 3e-2):
        model = peft.get_peft_model(copy.deepcopy(base), CONFIG)
        params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        opt = metamd.MetaMD(params, learned, steps=STEPS) if rate is None else torch.optim.AdamW(params, lr=rate)
        name = "MetaMD, nothing tuned" if rate is None else f"AdamW at {rate:g}"
        print(f"{name}: mean loss {train(model, opt, 60, STEPS):.3f}")

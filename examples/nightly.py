"""Nightly retraining: record every run, learn from two, and let each further night improve the file.

python examples/nightly.py
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import metamd

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200


def new_model() -> nn.Module:
    """The same model every night."""
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def train(model: nn.Module, opt: torch.optim.Optimizer, night: int) -> float:
    """Your loop; the data of a night differ a little from those of the night before. It gives the mean loss back."""
    g = torch.Generator().manual_seed(night)
    target, total = torch.ones(8, 1) + 0.5 * torch.randn(8, 1, generator=g), 0.0
    for _ in range(STEPS):
        x = torch.randn(32, 8, generator=g)
        opt.zero_grad()
        loss = (model(x) - (x @ target).sin()).square().mean()
        loss.backward()
        opt.step()
        total += float(loss.detach()) / STEPS
    return total


def night(number: int, file: Path, folder: Path) -> float:
    """Train, record, and keep the file up to date."""
    model = new_model()
    if file.exists():
        opt: torch.optim.Optimizer = metamd.MetaMD(model.named_parameters(), file, steps=STEPS)
    else:
        opt = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    recorder = metamd.Recorder(opt, name=f"night {number}", batch_size=32)
    loss = train(model, opt, number)
    recorder.finish(score=loss).save(folder / f"{number}.run.safetensors")
    if number == 1:
        metamd.learn([metamd.Run.load(folder / f"{i}.run.safetensors") for i in range(2)]).save(file)
    elif number > 1:
        metamd.update(metamd.load(file), [metamd.Run.load(folder / f"{number}.run.safetensors")], decay=0.9).save(file)
    return loss


if __name__ == "__main__":
    torch.manual_seed(0)
    with TemporaryDirectory() as place:
        for i in range(5):
            print(f"night {i}: mean loss {night(i, Path(place) / 'nightly.safetensors', Path(place)):.3f}")

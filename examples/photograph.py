"""Learn an optimiser from pieces of one photograph, then fit a network to a piece of another one.

python examples/photograph.py
"""

import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from torch import nn

import metamd

# Photographs that come with scikit-learn, cut into squares; a network gives the colour of a place.
STEPS = int(next(filter(str.isdigit, sys.argv[1:]), "200"))
SIDE = 64 if STEPS > 50 else 8
CENTRES = (2 * torch.arange(SIDE) + 1) / SIDE - 1
WAVES = torch.cartesian_prod(CENTRES, CENTRES) @ torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 15
PLACES = torch.cat([WAVES.sin(), WAVES.cos()], 1)


def new_model() -> nn.Module:
    """128 waves of a place in, its colour out."""
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def pieces(name: str) -> list[torch.Tensor]:
    """Six squares of a photograph, with colours from -1 to 1."""
    whole = torch.from_numpy(load_sample_image(name)[80:336, 128:512].copy()) / 127.5 - 1
    small = nn.functional.interpolate(whole.permute(2, 0, 1)[None], (2 * SIDE, 3 * SIDE), mode="area")[0]
    return [small[:, r : r + SIDE, c : c + SIDE].flatten(1).T for r in (0, SIDE) for c in (0, SIDE, 2 * SIDE)]


# Learn from pieces of the first photograph.
data = {f"piece {i}": {"train": (PLACES, piece)} for i, piece in enumerate(pieces("china.jpg"))}
family = metamd.tasks.supervised(new_model, data, nn.functional.mse_loss, batch_size=SIDE**2, steps=STEPS)
learned = metamd.meta_train(family, tasks_per_step=4)

# Fit a piece of the second one, from the same initial weights by everybody.
target, figure = pieces("flower.jpg")[0], plt.figure(figsize=(12, 3))
for number, name in enumerate(("MetaMD", "Adam 0.001", "Adam 0.003", "Adam 0.01", "Adam 0.03")):
    torch.manual_seed(0)
    model = new_model()
    params = model.named_parameters()
    ours = name == "MetaMD"
    opt = metamd.MetaMD(params, learned, steps=STEPS) if ours else torch.optim.Adam(params, lr=float(name.split()[1]))
    for _ in range(STEPS):
        opt.zero_grad()
        nn.functional.mse_loss(model(PLACES), target).backward()
        opt.step()
    if ours:
        opt.eval()  # a tail average, where the file recommends one
    found = model(PLACES).detach()
    print(f"{name}: {10 * torch.log10(4 / nn.functional.mse_loss(found, target)):.3f} dB")
    axis = figure.add_subplot(1, 5, number + 1, title=name, xticks=[], yticks=[])
    axis.imshow((found.reshape(SIDE, SIDE, 3).clamp(-1, 1) + 1) / 2)
figure.savefig("photograph.png")

"""A family of two small image datasets and a network for them, for tests of rivals and of trainings."""

import torch
from torch import nn

from metamd import tasks


def small_network():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )


def images(seed, count=120):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    means = torch.randn(4, 1, 6, 6, generator=generator)
    return means[labels] + 0.5 * torch.randn(count, 1, 6, 6, generator=generator), labels


FAMILY = tasks.supervised(small_network, {"a": images(0), "b": images(1)}, batch_size=20, steps=20)


def task_of(family=FAMILY, seed=0):
    return family.build(family.sample(torch.Generator().manual_seed(seed)))

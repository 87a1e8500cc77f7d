"""The models of the paper's experiments, each a plain `nn.Module`: linear, MLP, LeNet and ResNet18.

A model takes float images (number, channels, height, width) and gives one logit per class. Its initial
weights come from the `generator` passed in, drawn as torch's layers draw theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "group"]


class Linear(nn.Module):
    """Multinomial logistic regression on the flattened image; 7,850 parameters by default.

    Args:
        inputs: pixels times channels.
        classes: how many logits.
        generator: draws the initial weights.
    """

    def __init__(self, inputs: int = 784, classes: int = 10, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.output = nn.Linear(_check_positive(inputs, "inputs"), _check_positive(classes, "classes"))
        initialise(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """One logit per class."""
        return self.output(images.flatten(1))


class MLP(nn.Module):
    """Three layers, 784-128-128-10 by default, with ReLU between them; 118,282 parameters by default.

    Args:
        inputs: pixels times channels.
        classes: how many logits.
        width: units in each hidden layer.
        generator: draws the initial weights.
    """

    def __init__(
        self, inputs: int = 784, classes: int = 10, *, width: int = 128, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        _check_positive(width, "width")
        self.first = nn.Linear(_check_positive(inputs, "inputs"), width)
        self.second = nn.Linear(width, width)
        self.output = nn.Linear(width, _check_positive(classes, "classes"))
        initialise(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """One logit per class."""
        return self.output(F.relu(self.second(F.relu(self.first(images.flatten(1))))))


class LeNet(nn.Module):
    """LeNet-5 for 28x28 images: 6 and 16 maps of 5x5, the first padded, then 120-84-10; 61,706 parameters.

    ReLU and max-pooling stand where the original of 1998 has scaled tanh and trainable averages. Every map of the
    second layer sees every map of the first, as is usual today.

    Args:
        channels: 1 for grey, 3 for colour.
        classes: how many logits.
        generator: draws the initial weights.
    """

    def __init__(self, channels: int = 1, classes: int = 10, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(_check_positive(channels, "channels"), 6, 5, padding=2)
        self.second = nn.Conv2d(6, 16, 5)
        self.third = nn.Linear(400, 120)
        self.fourth = nn.Linear(120, 84)
        self.output = nn.Linear(84, _check_positive(classes, "classes"))
        initialise(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """One logit per class."""
        maps = F.relu(_pooled(self.first(channels_last(images))))
        maps = F.relu(_pooled(self.second(maps)))
        return self.output(F.relu(self.fourth(F.relu(self.third(maps.flatten(1))))))


class ResNet18(nn.Module):
    """ResNet18 for 32x32 images: a 3x3 stem without pooling; 11,173,962 parameters at width 64.

    Args:
        channels: 3 for colour, 1 for grey.
        classes: how many logits.
        width: channels of the first stage; 16 has 701,466 parameters and suits a machine without accelerator.
        norm: `"batch"` as published, or `"group"`, whose output depends on the example alone: with it the
            loss is a pure function of the parameters and the batch, without running statistics. Batch norm runs
            in channels-last memory on a CPU.
        generator: draws the initial weights.
    """

    def __init__(
        self,
        channels: int = 3,
        classes: int = 10,
        *,
        width: int = 64,
        norm: Norm = "batch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check_positive(width, "width")
        self.stem = nn.Conv2d(_check_positive(channels, "channels"), width, 3, padding=1, bias=False)
        self.norm = _norm(norm, width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(before, after, stride, norm), Block(after, after, 1, norm))
                for before, after, stride in zip(widths, widths[1:], (1, 2, 2, 2), strict=False)
            )
        )
        self.output = nn.Linear(widths[-1], _check_positive(classes, "classes"))
        initialise(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """One logit per class."""
        images = channels_last(images) if isinstance(self.norm, nn.BatchNorm2d) else images
        return self.output(self.stages(F.relu(self.norm(self.stem(images)))).mean((2, 3)))


class Block(nn.Module):
    """A residual block of two 3x3 convolutions; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = _norm(norm, after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = _norm(norm, after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), _norm(norm, after))

    def forward(self, maps: Tensor) -> Tensor:
        """The block's maps."""
        inner = F.relu(self.first_norm(self.first(maps)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(maps))


MODELS: dict[str, Callable[..., nn.Module]] = {"linear": Linear, "mlp": MLP, "lenet": LeNet, "resnet18": ResNet18}


def channels_last(images: Tensor) -> Tensor:
    """The images in the layout in which a CPU convolves fastest; `benchmarks/models.py` measures by how much."""
    # The parameters keep the ordinary layout, so that optimisers see nothing of it. The vmap of torch.func knows no other.
    if images.device.type != "cpu" or torch._C._functorch.is_functorch_wrapped_tensor(images):
        return images
    return images.to(memory_format=torch.channels_last)  # contiguous() would leave a single channel as it is


def initialise(model: nn.Module, generator: torch.Generator | None) -> None:
    """Draw weights and biases as torch draws them, uniform on +-1/sqrt(n) for n inputs; without a generator, keep them."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer in layers if generator is not None else ():
        bound = 1 / math.sqrt(layer.weight[0].numel())
        for tensor in layer.parameters():
            nn.init.uniform_(tensor, -bound, bound, generator=generator)


def _pooled(maps: Tensor) -> Tensor:
    """The largest of every two by two, of maps with an even number of rows and columns."""
    if torch.is_grad_enabled():
        return F.max_pool2d(maps, 2)
    # The same values; evaluations of LeNet take half as long on a CPU.
    rows = torch.maximum(maps[..., ::2, :], maps[..., 1::2, :])
    return torch.maximum(rows[..., ::2], rows[..., 1::2])


def _norm(norm: Norm, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        # At most 32 groups, as published, and a divisor of the channels at every width.
        return nn.GroupNorm(math.gcd(channels, 32), channels)
    raise ValueError(f"norm must be 'batch' or 'group', got {norm!r}. Pass norm='group' for a pure loss.")


def _check_positive(value: int, what: str) -> int:
    if value < 1:
        raise ValueError(f"{what} must be a positive whole number, got {value}. Pass {what}=10, say.")
    return value

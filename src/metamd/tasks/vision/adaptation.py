"""A model trained at one angle is adapted to others: rotated MNIST with a shared start."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from metamd.tasks.base import derive_seed
from metamd.tasks.batches import Shuffle
from metamd.tasks.recipe import trained
from metamd.tasks.shared_start import Late, SharedStart
from metamd.tasks.vision.domains import Domain, choose
from metamd.tasks.vision.families import rotated_mnist
from metamd.tasks.vision.family import ImageFamily
from metamd.tasks.vision.pixels import rotate

ADAPTED = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90)


def adapt_rotated_mnist(
    *,
    pretrained_at: float = 45.0,
    angles: Sequence[float] = ADAPTED,
    hold_out: float | None = None,
    model: str = "mlp",
    images: int | None = 5000,
    batch_size: int = 100,
    steps: int = 100,
    pretraining_steps: int = 500,
) -> SharedStart:
    """Rotated MNIST whose tasks all begin at one model, which was trained at another angle on images that no task has.

    The model is trained when the first task is built (Adam, rate 0.001 falling linearly to zero), in a second or two.

    Args:
        pretrained_at: the angle that the model was trained at, in degrees.
        angles: what it is adapted to; every one is a domain.
        hold_out: the angle that training never sees, for `held_out()`; None holds out none.
        model: `"linear"`, `"mlp"`, `"lenet"` or `"resnet18"`.
        images: training images per domain, at most 40,000, so that some are left for the model.
        batch_size: images per step.
        steps: T.
        pretraining_steps: of the model.
    """
    if images is None or not 1 <= images <= 40_000:
        raise ValueError(f"images must lie between 1 and 40,000, so that some are left to pretrain on; got {images}.")
    if pretraining_steps < 1:
        raise ValueError(f"pretraining_steps must be at least 1, got {pretraining_steps}.")
    family = rotated_mnist(angles=angles, hold_out=hold_out, model=model, images=images, batch_size=batch_size, steps=steps)
    family.name = "adapt-rotated-mnist"
    family.how = {
        **family.how,
        "pretrained_at": pretrained_at,
        "pretraining_steps": pretraining_steps,
        "pretraining": "Adam, rate 0.001 falling linearly to zero, on images that no task has",
    }
    return SharedStart(family, Late(partial(pretrain, family, pretrained_at, pretraining_steps)))


def pretrain(family: ImageFamily, angle: float, steps: int) -> dict[str, Tensor]:
    """The parameters of a model trained at an angle, on the training images that the family's tasks leave.

    Args:
        family: of rotations of MNIST.
        angle: in degrees.
        steps: of Adam.
    """
    source, recipe = family.collection.source("mnist"), family.recipe
    train, validation = choose(source.labels["train"], family.collection.images, family.collection.seed)
    taken = torch.zeros(len(source.labels["train"]), dtype=torch.bool)
    taken[torch.cat([train, validation])] = True
    domain = Domain(source, {"train": (~taken).nonzero()[:, 0]}, partial(rotate, angle=angle), family.collection.shape[0])
    images, labels = domain["train"]
    model = recipe.make(derive_seed("pretrained"))
    params = trained(model)
    optimiser = torch.optim.Adam(params.values(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    order = Shuffle(len(labels), recipe.batch_size, derive_seed("pretraining"))
    for t in range(steps):
        rows = order.indices(t)
        optimiser.zero_grad()
        F.cross_entropy(functional_call(model, params, (images[rows],)), labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return {n: p.detach().clone() for n, p in params.items()}

"""Which examples make the batch of a step, and which belong to which split."""

import torch
from torch import Tensor

from metamd.tasks.base import Split, derive_seed


class Shuffle:
    """Batches without replacement: a new permutation per epoch, the ragged end left out.

    A pure function of (seed, step): steps can be asked for in any order, and again.

    Args:
        examples: how many there are.
        batch_size: how many of them in a batch.
        seed: of the permutations.
    """

    def __init__(self, examples: int, batch_size: int, seed: int) -> None:
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self._last: tuple[int, Tensor] | None = None

    def indices(self, step: int) -> Tensor:
        """The examples of a step, counted from 0."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}. The first batch is that of step 0.")
        epoch, place = divmod(step, self.examples // self.batch_size)
        # Steps mostly come in order, so the last permutation is kept: it saves time and changes nothing.
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, torch.randperm(self.examples, generator=_generator(self.seed, "epoch", epoch))
        return self._last[1][place * self.batch_size : (place + 1) * self.batch_size]


def divide(examples: int, shares: tuple[float, float, float], seed: int) -> dict[Split, Tensor]:
    """Disjoint sets of examples for training, validation and test, in shares that sum to 1.

    Example:
        >>> {split: len(rows) for split, rows in divide(50, (0.8, 0.1, 0.1), seed=0).items()}
        {'train': 40, 'validation': 5, 'test': 5}
    """
    order = torch.randperm(examples, generator=_generator(seed, "splits", examples))
    validation, test = round(shares[1] * examples), round(shares[2] * examples)
    train = examples - validation - test
    return {"train": order[:train], "validation": order[train : train + validation], "test": order[train + validation :]}


def chunks(examples: int, size: int) -> tuple[Tensor, ...]:
    """All examples in order, in parts of nearly equal length: a last part of one would have no variance."""
    return torch.arange(examples).tensor_split(-(-examples // size))


def _generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*parts))

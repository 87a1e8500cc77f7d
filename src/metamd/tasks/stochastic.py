"""What is random or remembers something inside a model: initial weights, dropout, batch-norm statistics."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's global generators start from a seed inside, and go on outside as if nothing had happened."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


class HashedDropout(TorchFunctionMode):
    """Inside, dropout masks are a hash of (seed, which dropout of the forward pass, position).

    No generator is involved, so the mask of a step is the same whenever and on whatever device it is asked for, and
    `torch.func` sees ordinary arithmetic, even under vmap over seeds.

    Args:
        seed: of the step, an integer tensor without dimensions.
    """

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed, self.calls = seed.to(torch.int32), 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dropout by hash; everything else as it is."""
        kwargs = kwargs or {}
        if func not in _SPATIAL:
            return func(*args, **kwargs)
        return self._dropout(_SPATIAL[func], *args, **kwargs)

    def _dropout(self, spatial: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        self.calls += 1
        if p == 1:
            return torch.zeros_like(input)
        kept = input.dim() - spatial
        shape = tuple(input.shape[:kept]) + (1,) * spatial  # whole channels are dropped together
        mask = hashed_uniform(self.seed + (self.calls * _GOLDEN) % 2**31, shape, input.device) >= p
        return input * mask.to(input.dtype) / (1 - p)


def hashed_uniform(seed: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers in [0, 1), a pure function of the seed (int32) and the position: murmur3's finaliser, twice."""
    position = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=device)
    bits = _mix(_mix(position ^ _mix(seed)) + seed)
    return ((bits & 0xFFFFFF).to(torch.float32) / 2**24).reshape(shape)


def use_batch_statistics(model: nn.Module) -> nn.Module:
    """Take running statistics away from the norms that train: they would make the loss depend on past calls."""
    for norm in tracking_norms(model):
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return model


def calibrate(model: nn.Module, batches: Callable[[], Iterable[Tensor]]) -> None:
    """Switch a model to evaluation, its batch norms with the statistics of these batches under its present weights."""
    norms = [norm for norm in tracking_norms(model) if isinstance(norm, _BatchNorm)]
    for norm in tracking_norms(model):
        if not isinstance(norm, _BatchNorm):  # an instance norm has the instance's own statistics at any time
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    model.eval()
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over all batches
        norm.train()
    for inputs in batches():
        model(inputs)
    model.eval()


def tracking_norms(model: nn.Module) -> list[_NormBase]:
    """The norms that would update running statistics in a forward pass; those put into eval mode are left alone."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]


def _mix(h: Tensor) -> Tensor:
    # The masks undo the sign that an arithmetic shift drags in.
    h = (h ^ ((h >> 16) & 0xFFFF)) * -0x7A143595
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return h ^ ((h >> 16) & 0xFFFF)


_GOLDEN = 0x9E3779B9
_SPATIAL: dict[Callable[..., Any], int] = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}

"""In which order numbers lie in memory: that of a gradient has to be that of its parameter."""

import torch
from torch import Tensor


def laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides of its parameter, which `backward` sees to and `torch.autograd.grad` does not.

    Where images are in channels-last memory, so are the gradients of the kernels that are convolved with them. Torch's fused
    optimisers go through the memory of both as it comes, and would take each number for that of another entry.

    Args:
        parameter: the parameter.
        gradient: its gradient, of the same shape.

    Example:
        >>> kernel = torch.zeros(2, 3, 5, 5)
        >>> laid_out_like(kernel, torch.ones(2, 3, 5, 5).to(memory_format=torch.channels_last)).is_contiguous()
        True
    """
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)

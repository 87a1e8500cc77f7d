"""MetaMD: learn an optimiser for a family of training problems and use it as a `torch.optim.Optimizer`."""

from metamd._version import __version__

__all__ = ["__version__"]

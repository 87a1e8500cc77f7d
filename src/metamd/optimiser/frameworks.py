"""A learned file as an optimiser class, for frameworks that build their optimiser themselves."""

import copyreg
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from metamd.files.learned import LearnedOptimiser
from metamd.optimiser import binding
from metamd.optimiser.optimiser import MetaMD


class _FromFile(type):
    """The type of the classes that are made here. pickle makes such a class again, from its file."""

    made_from: tuple[Any, int, dict[str, Any]]


def as_optimizer_class(file: LearnedOptimiser | str | PathLike[str], *, steps: int, **options: Any) -> type[MetaMD]:
    """A subclass of `MetaMD` that uses a learned file as it recommends, for frameworks that ask for an optimiser class.

    Such frameworks build the optimiser as `cls(model.parameters(), lr=...)`. Three things differ from `MetaMD`:

    - A passed lr, or that of a group, is ignored, since the file has its step sizes inside. A warning says so once.
    - After the last of the steps the parameters are the tail average, where the file recommends one. No `eval()` is needed.
    - The file is given here, and `steps` with it.

    As for `MetaMD`, parameters without names are matched by order and shape with the model that the file was learned on.

    Args:
        file: a path, the name of a shipped file, or what `load` gives.
        steps: the number of optimiser steps of the run, over which the recommended schedule extends.
        options: of `MetaMD`; they win over recommended ones, as do options that the framework passes, other than lr.

    Example:
        >>> import metamd
        >>> model = metamd.models.LeNet(generator=torch.Generator().manual_seed(0))
        >>> cls = as_optimizer_class("lenet-digits", steps=100)
        >>> opt = cls(model.parameters())
    """
    return _make(file, steps, options)


def _make(file: LearnedOptimiser | str | PathLike[str], steps: int, options: dict[str, Any]) -> type[MetaMD]:
    """The class; a name of the module, so that pickle finds it."""
    learned = binding.opened_file(file)

    class RecommendedMetaMD(MetaMD, metaclass=_FromFile):
        """`MetaMD` as a learned file recommends; see `as_optimizer_class`."""

        made_from = (file, steps, options)

        def __init__(self, params: Iterable[Any], lr: Any = None, **given: Any) -> None:
            super().__init__(params, learned, steps=steps, **{**options, **given})
            if lr is not None:
                self._ignore(lr)

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            """Add parameters; an lr of the group is ignored."""
            super().add_param_group({k: v for k, v in param_group.items() if k != "lr"})
            if "lr" in param_group:
                self._ignore(param_group["lr"])

        def _ignore(self, lr: Any) -> None:
            self._say_once(
                "lr",
                f"lr={lr} is ignored: a learned file has its step sizes inside. To scale them, pass a factor as lr to "
                "metamd.as_optimizer_class.",
                stacklevel=4,
            )

        def _step(self, closure: Callable[[], float] | None) -> float | None:
            if self._steps >= steps:  # the framework goes on after the end
                self.train()
            loss = super()._step(closure)
            if self._steps >= steps:
                self.eval()
            return loss

    copyreg.pickle(_FromFile, lambda cls: (_make, cls.made_from))  # type: ignore[return-value, arg-type]
    return RecommendedMetaMD

"""The options of each `metamd` command, free of torch; the module named beside each computes when it is called."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Demo:
    """Learn an optimiser on a small family, use it on a new task and compare it with its rivals.

    Args:
        out: directory for what it writes.
        seed: of everything random.
        json: print one JSON object on standard output instead of text.
    """

    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/demo")
    seed: int = 0
    json: bool = False


@dataclass(frozen=True)
class Inspect:
    """Print what a learned-optimiser file says about itself and the distribution of its step sizes.

    Args:
        file: a path, or the name of a learned optimiser shipped with the package.
        json: print one JSON object on standard output instead of text.
        figure: draw the distributions into this image, such as steps.png.
    """

    file: Annotated[Positional[str], arg(metavar="FILE")]
    json: bool = False
    figure: Annotated[Path | None, arg(metavar="PNG")] = None


Options = Demo | Inspect

HOMES: dict[type, str] = {Demo: "metamd.commands.demo", Inspect: "metamd.commands.inspect"}
"""Where each command is carried out: a module with `run(options) -> int`, imported when the command is called."""

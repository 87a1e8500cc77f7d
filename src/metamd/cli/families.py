"""What commands that train tasks have in common: the family that was asked for, and a place to write to."""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from metamd.cli.options import Certify, Compare, Train
from metamd.files.text import shown
from metamd.tasks import FAMILIES
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import starting_at


def build_family(options: Certify | Compare | Train, recorded: Mapping[str, Any] | None = None) -> TaskFamily:
    """The family by its name, with the options that were given."""
    if options.family not in FAMILIES:
        raise ValueError(f"there is no family {options.family!r}. There are {', '.join(sorted(FAMILIES))}.")
    build = FAMILIES[options.family]
    known = inspect.signature(build).parameters
    asked = {name: getattr(options, name) for name in ("steps", "model", "hold_out", "images", "width")}
    given = {name: value for name, value in asked.items() if value is not None}
    if strange := [name.replace("_", "-") for name in given if name not in known]:
        raise ValueError(f"the family {options.family!r} has no option --{strange[0]}. Leave it out.")
    again = recorded if recorded is not None and recorded.get("name") == options.family else {}
    shared = ("start", "shared")  # a model, which the header has the hash of alone
    reused = {n: value for n, value in again.items() if n in known and value is not None and (n, value) != shared}
    settings = reused | given
    if options.family == "quadratic" and isinstance(options, Train) and options.preset == "paper":
        settings["start"] = 0.1  # from far off the paper's objective has no minimum where steps are stable: docs/results.md
    if options.family in ("rotated-mnist", "adapt-rotated-mnist") and isinstance(settings.get("hold_out"), str):
        try:
            settings["hold_out"] = float(settings["hold_out"])
        except ValueError:
            raise ValueError(f"--hold-out must be an angle such as 30, got {settings['hold_out']!r}.") from None
    if wrong := [n for n in reused if n not in given and not _fits(reused[n], known[n].default)]:
        raise ValueError(
            f"the settings of the family that the file records do not fit it: {wrong[0]} is {shown(reused[wrong[0]])}. "
            + (f"Pass --{wrong[0].replace('_', '-')}." if wrong[0] in asked else "Learn the file again.")
        )
    try:
        family = build(**settings)
        if again:
            family.build(family.sample(torch.Generator().manual_seed(0)))  # numbers that fit may still not fit together
        return family if options.start is None else starting_at(family, options.start)
    except (TypeError, ArithmeticError, LookupError, RuntimeError) as error:  # a header can hold anything
        if again:
            raise ValueError(f"the settings of the family that the file records do not fit it ({error}).") from None
        raise


def _fits(value: Any, default: Any) -> bool:
    """Whether a recorded setting is of the type that its default has: a header can hold anything."""
    if isinstance(default, bool | str):
        return type(value) is type(default)
    if isinstance(default, int):
        return type(value) is int
    if isinstance(default, float):
        return type(value) in (int, float) or (isinstance(value, list) and all(type(x) in (int, float) for x in value))
    if isinstance(default, list | tuple) and default:
        return isinstance(value, list) and all(_fits(x, default[0]) for x in value)
    return True


def held_out_side(family: TaskFamily) -> TaskFamily:
    """The side of a family that learning never sees; the family itself, if it has none or was made without."""
    inner = getattr(family, "family", family)
    has_side = hasattr(inner, "held_out") and getattr(inner, "hold_out", "a half") is not None
    return family.held_out() if has_side else family  # type: ignore[attr-defined]


def check_place(out: Path) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a directory. Name a file inside it, such as {out / 'learned.safetensors'}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK) or (out.exists() and not os.access(out, os.W_OK)):
        raise PermissionError(f"{out} cannot be written. Choose another place with --out.")

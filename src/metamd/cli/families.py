"""What commands that train tasks have in common: the family that was asked for, what a dry run says, a place to write to."""

import importlib.util
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from metamd.cli.main import show
from metamd.cli.options import Certify, Compare, Train
from metamd.files.text import one_line, shown
from metamd.tasks import FAMILIES
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import starting_at


def build_family(options: Certify | Compare | Train, recorded: Mapping[str, Any] | None = None) -> TaskFamily:
    """The family by its name or from a file of the user's, with the options that were given."""
    asked = {name: getattr(options, name) for name in ("steps", "model", "hold_out", "images", "width")}
    given = {name: value for name, value in asked.items() if value is not None}
    if options.family.endswith(".py") or ".py:" in options.family:
        family = own_family(options.family, given, ray=options.ray is not None)
        return family if options.start is None else starting_at(family, options.start)
    if options.family not in FAMILIES:
        raise ValueError(
            f"there is no family {options.family!r}. There are {', '.join(sorted(FAMILIES))}; my.py:family takes one from a "
            "file of yours."
        )
    build = FAMILIES[options.family]
    known = inspect.signature(build).parameters
    if strange := [name.replace("_", "-") for name in given if name not in known]:
        raise ValueError(f"the family {options.family!r} has no option --{strange[0]}. Leave it out.")
    again = recorded if recorded is not None and recorded.get("name") == options.family else {}
    shared = ("start", "shared")  # a model, which the header has the hash of alone
    reused = {n: value for n, value in again.items() if n in known and value is not None and (n, value) != shared}
    settings = reused | given
    if options.family == "quadratic" and isinstance(options, Train) and options.preset != "default":
        settings["start"] = (
            0.1  # from far off the paper's objective has no minimum where steps are stable: docs/results/quadratic.md
        )
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


def own_family(place: str, given: Mapping[str, Any], *, ray: bool = False) -> TaskFamily:
    """The family of a place such as "my.py:family": a TaskFamily, or a function that makes one from the options given.

    The file is executed with the rights of who runs the command, as `python my.py` would be.
    """
    path, _, name = place.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(
            f"{shown(place)} names no family in the file. Write my.py:family, the name of a family or function."
        )
    module = _executed(Path(path), ray=ray)
    if not hasattr(module, name):
        made = [n for n, x in vars(module).items() if isinstance(x, TaskFamily) or _is_own(x, module)]
        raise ValueError(f"{path} has nothing called {shown(name)}. It has: {', '.join(made) or 'no family or function'}.")
    found = getattr(module, name)
    if callable(found) and not isinstance(found, TaskFamily):
        known = inspect.signature(found).parameters
        taken = any(p.kind is p.VAR_KEYWORD for p in known.values())
        strange = [] if taken else [n for n in given if n not in known]
        needed = [
            n
            for n, p in known.items()
            if p.default is p.empty and n not in given and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if needed:
            raise ValueError(f"{name} in {path} needs the argument {needed[0]!r}. Give it a default.")
    else:
        strange = list(given)
    if strange:
        flag = f"--{strange[0].replace('_', '-')}"
        raise ValueError(f"{name} in {path} takes no {flag}. Make it a function with that argument, or leave it out.")
    if callable(found) and not isinstance(found, TaskFamily):
        found = _explained(lambda: found(**given), Path(path))
    if not isinstance(found, TaskFamily):
        raise ValueError(
            f"{name} in {path} must be a TaskFamily, or a function that makes one, got {type(found).__name__}. "
            "metamd.tasks.supervised(make_model, datasets, loss_fn) makes one."
        )
    return found


def _executed(path: Path, *, ray: bool) -> ModuleType:
    """A file of the user's as a module; what lies beside it can be imported in it, as in a script."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {shown(str(path))}. Check the path.")
    name = f"metamd_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be read as a Python file. Check its name and its rights.")
    folder, module = str(path.resolve().parent), importlib.util.module_from_spec(spec)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    load = spec.loader.exec_module
    _explained(lambda: load(module), path)
    if ray:  # other machines do not have the file
        importlib.import_module("ray.cloudpickle").register_pickle_by_value(module)
    return module


def _explained(act: Any, path: Path) -> Any:
    """Do what runs the user's own lines; what they raise is a sentence that names the line."""
    try:
        return act()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        here = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        if isinstance(error, SyntaxError) and error.lineno is not None:
            here = [error.lineno]
        where = f"{path}, line {here[-1]}" if here else str(path)
        raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error


def _is_own(x: Any, module: ModuleType) -> bool:
    return inspect.isfunction(x) and x.__module__ == module.__name__


MOST_TENSORS = 12
"""Tensors of a model that a dry run names."""


def show_plan(family: TaskFamily, plan: str, *, as_json: bool) -> None:
    """What a dry run prints: the tasks, the model, and what would be run."""
    shapes = {n: list(x.shape) for n, x in family.example().items()}
    drawn = family.drawn()
    numbers = sum(x.numel() for x in family.example().values())
    named = [f"{n} {tuple(s)}" for n, s in list(shapes.items())[:MOST_TENSORS]]
    more = len(shapes) - len(named)
    lines = [
        f"tasks   {family.name}: {drawn.domain}; {family.steps} steps each",
        f"        data {drawn.data}; initialisation {drawn.initialisation}; batches {drawn.batches}",
        f"model   {numbers:,} numbers in {len(shapes)} tensors: {', '.join(named)}{f' and {more} more' if more > 0 else ''}",
        f"runs    {plan}",
        "This was a dry run: nothing was trained, and nothing was written.",
    ]
    record = {"family": family.name, "drawn": vars(drawn) | {"domains": list(drawn.domains)}, "steps": family.steps}
    show(record | {"shapes": shapes, "plan": plan}, "\n".join(map(one_line, lines)), as_json=as_json)


def words(*parts: object) -> str:
    """Words of a command line, as they are to be typed."""
    return shlex.join(map(str, parts))


def duration(seconds: float) -> str:
    """A time in hours, minutes and seconds.

    Example:
        >>> duration(75.2)
        '0:01:15'
    """
    return str(timedelta(seconds=round(seconds)))


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
    return family.held_out() if holds_out(family) else family  # type: ignore[attr-defined]


def holds_out(family: TaskFamily) -> bool:
    """Whether a family has a side that learning never sees."""
    inner = getattr(family, "family", family)
    return hasattr(inner, "held_out") and getattr(inner, "hold_out", "a half") is not None


def check_place(out: Path) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a directory. Name a file inside it, such as {out / 'learned.safetensors'}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK) or (out.exists() and not os.access(out, os.W_OK)):
        raise PermissionError(f"{out} cannot be written. Choose another place with --out.")

"""The versions of libraries that a file was learned with or a comparison computed with."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import safetensors
import torch

from metamd._version import __version__

PACKAGES = ("pytorch_optimizer", "schedulefree", "prodigyopt", "botorch", "gpytorch")
"""Where rivals and the search of the protocol `paper` come from. A learned file does not depend on them."""


def versions() -> dict[str, str]:
    """The versions of the libraries that decide what a run computes."""
    return {
        "metamd": __version__,
        "torch": str(torch.__version__),
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def environment() -> dict[str, str]:
    """The versions that a learned file has, and those of the packages of rivals and tuning that are installed."""
    found = versions()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def joined(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The versions of several comparisons as one: what is the same in all as it is, else every value with where it is from.

    Example:
        >>> joined({"a": {"torch": "2.6", "python": "3.11"}, "b": {"torch": "2.7", "python": "3.11"}, "c": {"torch": "2.6"}})
        {'torch': '2.6 (a, c); 2.7 (b)', 'python': '3.11 (a, b); not recorded (c)'}
    """
    names = dict.fromkeys(name for each in found.values() for name in each)
    return {name: _said({place: each.get(name) for place, each in found.items()}) for name in names}


def _said(values: Mapping[str, Any]) -> Any:
    places: dict[str, list[str]] = {}
    for place, value in values.items():
        text = "not recorded" if value is None else value if isinstance(value, str) else json.dumps(value)
        places.setdefault(text, []).append(place)
    if len(places) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{text} ({', '.join(where)})" for text, where in places.items())

"""The versions of libraries that a file was learned with or a comparison computed with."""

import platform
from collections.abc import Mapping
from contextlib import suppress
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
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def joined(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The versions of several comparisons as one: what is the same in all as it is, else every value with where it is from.

    Example:
        >>> joined({"a": {"torch": "2.6", "python": "3.11"}, "b": {"torch": "2.7", "python": "3.11"}, "c": {"torch": "2.6"}})
        {'torch': '2.6 (a, c); 2.7 (b)', 'python': '3.11 (a, b); not recorded (c)'}
    """
    said = {}
    for name in dict.fromkeys(name for each in found.values() for name in each):
        places: dict[str, list[str]] = {}
        for place, each in found.items():
            places.setdefault(str(each.get(name, "not recorded")), []).append(place)
        said[name] = "; ".join(text if len(places) == 1 else f"{text} ({', '.join(at)})" for text, at in places.items())
    return said

"""Write docs/api.md, the public names with their signatures, from the package itself.

python scripts/api.py
"""

import inspect
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import metamd
from metamd.tasks import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
PARTS = {
    "Learn": ("meta_train", "paper", "Recorder", "Run", "learn", "update", "learn_usage", "learn_start"),
    "File": ("load", "LearnedOptimiser"),
    "Use": ("MetaMD", "prepare", "as_optimizer_class", "fleet", "OffFamilyWarning"),
    "Guarantee": ("certify_run", "Certificate", "certify", "HeldOutCertificate"),
    "Compare": ("compare", "Comparison", "tune"),
}
"""The names of `metamd` in the order of use; what is not here yet comes last, so that no public name is missing."""

POTENTIALS = (
    *("Potential", "Euclidean", "NegativeEntropy", "PNorm", "Diagonal", "MaxDiagonal", "Kronecker"),
    *("bregman", "mirror_step"),
)
"""These have a page that explains them, and stand here with their arguments alone."""

RETURNED = {"Run", "LearnedOptimiser", "Certificate", "HeldOutCertificate", "Comparison"}
"""Classes that a function returns: what can be asked of them matters, not how they are made."""

METHODS = {
    "MetaMD": ("averaged", "eval", "train"),
    "Recorder": ("finish",),
    "Run": ("load", "save"),
    "LearnedOptimiser": ("bind", "from_pretrained", "push_to_hub", "save", "with_start"),
    "HeldOutCertificate": ("into", "of"),
    "Comparison": ("aiming", "differences", "table", "trained_on"),
}
"""What users call of a class; `MetaMD` has the rest of what torch's optimisers have."""

OPTIONS = {
    "To learn": ("Journal", "Executor", "showing"),
    "In a file": ("Usage", "Online"),
    "To certify": ("Stated",),
    "To compare": ("Protocol", "Measuring", "Rival", "Contender", "handicap", "learned_rival"),
    "To tune": ("Grid", "QuasiRandom", "Bayesian"),
}
"""Names that are arguments of those above; what is not here yet comes last."""

RESEARCH = {"estimators", "objectives", "learning"}
"""Modules whose names stand there and not among the options: only who meta-trains in rounds needs them."""

OPENING = """# API reference

What you call first comes first, with its arguments. `help(metamd.NAME)` explains them, with an example.
"""


def signature(thing: Any) -> str:
    """The arguments without their types; nothing for what cannot be called or has none of its own."""
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, Warning | Exception)):
        return ""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=inspect.Parameter.empty, default=_short(p.default)) for p in found.parameters.values()]
    text = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty)).replace("(*args, **kwargs)", "")
    text = re.sub(r"<(?:class|function) '?(?:[\w.]+\.)?(\w+)'?(?: at 0x\w+)?>", r"\1", text)
    return re.sub(r"\b(?:metamd|torch|math)\.(?:\w+\.)*(\w+)", r"\1", text)


class _Long:
    """Stands for a default that is an object, or long."""

    def __repr__(self) -> str:
        return "..."


def _short(default: Any) -> Any:
    if default is inspect.Parameter.empty or inspect.isroutine(default):
        return default
    return default if len(repr(default)) < 40 and "<" not in repr(default) else _Long()


def clause(thing: Any) -> str:
    """The first sentence of its docstring up to a colon or the like, code and equations whole; nothing for data."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return ""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    text = re.split(r"; |: (?=[a-z])|\. |, (?=which|whose|so that|as a|nothing|the same|else|without|in METAMD)", text)[0]
    return re.sub(r"(`[^`]*`)|<", lambda m: m[1] or "&lt;", text.rstrip("."))  # which a browser would take for a tag


def entry(name: str) -> str:
    """A line for a name that users begin with: its arguments, and the first clause of what it says."""
    thing = getattr(metamd, name)
    head = name if name in RETURNED else name + signature(thing)
    more = ", ".join(f"`{n}`" for n in METHODS.get(name, ()) if hasattr(thing, n))
    return f"- **`{head}`**: {clause(thing)}." + (f" It has {more}." if more else "")


def codes(names: Iterable[str], home: Any = None, top: Iterable[str] = ()) -> str:
    """Names in a row, with their arguments if their home is given; those of `metamd` itself in bold."""
    found = {name: f"`{name}{signature(getattr(home, name)) if home else ''}`" for name in names}
    return ", ".join(f"**{text}**" if name in top else text for name, text in found.items())


def names_of(short: str) -> list[str]:
    """The public names of a module of `metamd`."""
    path = metamd._SUBMODULES[short]
    module = import_module(path)
    return getattr(module, "__all__", None) or sorted(
        n for n, x in vars(module).items() if inspect.isclass(x) and x.__module__ == path and not n.startswith("_")
    )


def module_entry(short: str, listed: list[str]) -> str:
    """A line for a module: its functions with their arguments, then classes and tables, then families."""
    module = import_module(metamd._SUBMODULES[short])
    here = [name for name in names_of(short) if name not in listed]
    families = [name for name in here if short == "tasks" and name.replace("_", "-") in FAMILIES]
    functions = [name for name in here if inspect.isroutine(getattr(module, name)) and name not in families]
    plain = [name for name in here if name not in {*families, *functions}]
    top = metamd._HOME if short in RESEARCH else ()
    found = [codes(functions, module, top), codes(plain, top=top), families and f"[families](data.md) {codes(families)}"]
    return f"- **`{short}`**: " + "; ".join(text for text in found if text)


def page() -> str:
    """The page."""
    listed = [*POTENTIALS, *(name for names in PARTS.values() for name in names)]
    listed += [name for short in RESEARCH for name in names_of(short)]
    rest = [n for n in (*metamd.__all__, *metamd._HOME) if n not in listed and n not in metamd._SUBMODULES]
    rest = list(dict.fromkeys(rest))
    blocks = [OPENING]
    for title, names in PARTS.items():
        blocks += [f"## {title}\n", "\n".join(entry(name) for name in names) + "\n"]
    blocks.append(f"## Mathematics\n\n[Potentials](potentials.md): {codes(POTENTIALS, metamd)}.\n")
    known = [name for names in OPTIONS.values() for name in names]
    rows = {**OPTIONS, "Others": tuple(name for name in rest if name not in known)}
    blocks += ["## Options\n", "\n".join(f"- {use}: {codes(names)}" for use, names in rows.items() if names) + "\n"]
    blocks.append("## Modules of `metamd`\n\nNames in bold are at `metamd.NAME` too.\n")
    blocks.append("\n".join(module_entry(short, rest) for short in sorted(metamd._SUBMODULES)) + "\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    PAGE.write_text(page())

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

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
PARTS = {
    "Learn": ("meta_train", "paper", "Recorder", "Run", "learn", "update", "learn_usage", "learn_start"),
    "File": ("load", "LearnedOptimiser"),
    "Use": ("MetaMD", "prepare", "as_optimizer_class", "fleet", "OffFamilyWarning"),
    "Guarantee": ("certify_run", "Certificate", "certify", "HeldOutCertificate"),
    "Compare": ("compare", "Comparison", "tune"),
    "Mathematics": (
        *("Potential", "Euclidean", "NegativeEntropy", "PNorm", "Diagonal", "MaxDiagonal", "Kronecker"),
        *("bregman", "mirror_step"),
    ),
}
"""The names of `metamd` in the order of use; what is not here yet comes last, so that no public name is missing."""

OPENING = """# API reference

`python scripts/api.py` writes this page from the package. `help(metamd.NAME)` has the full text and an example. Importing
`metamd` is cheap: a name is fetched, and torch with it, when it is first used.
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
    text = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
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


def sentence(thing: Any) -> str:
    """The first sentence of its docstring; nothing for data."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return ""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def methods(thing: Any) -> list[str]:
    """The public methods of a class that it defines itself."""
    own = vars(thing) if inspect.isclass(thing) else {}
    found = [n for n, f in own.items() if not n.startswith("_") and (inspect.isroutine(f) or isinstance(f, property))]
    return sorted(n for n in found if inspect.getdoc(own[n]))


def entries(names: Iterable[str], module: Any) -> list[str]:
    """A paragraph for each name."""
    lines = []
    for name in names:
        thing = getattr(module, name)
        text = f"**`{name}{signature(thing)}`**  \n{sentence(thing)}".rstrip()
        more = ", ".join(f"`{n}`" for n in methods(thing))
        lines.append(text + (f"  \nWith {more}." if more else ""))
    return lines


def page() -> str:
    """The page."""
    listed = [name for names in PARTS.values() for name in names]
    rest = [n for n in (*metamd.__all__, *metamd._HOME) if n not in listed and n not in metamd._SUBMODULES]
    blocks = [OPENING]
    for title, names in {**PARTS, "Records and options that these take": tuple(dict.fromkeys(rest))}.items():
        blocks += [f"## {title}\n", *(f"{entry}\n" for entry in entries(names, metamd))]
    for short, path in sorted(metamd._SUBMODULES.items()):
        module = import_module(path)
        names = getattr(module, "__all__", None) or sorted(
            n for n, x in vars(module).items() if inspect.isclass(x) and x.__module__ == path and not n.startswith("_")
        )
        here = [name for name in names if name not in rest]
        blocks += [f"## `{short}`, a module of `metamd`\n", *(f"{entry}\n" for entry in entries(here, module))]
        if others := [f"`{name}`" for name in names if name in rest]:
            blocks.append(f"Also {', '.join(others)}, above.\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    PAGE.write_text(page())

"""The learned optimisers inside the package: where they lie, and the card of each, which says how it was made and judged."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from metamd.files.store import read_json

FOLDER = Path(str(files("metamd.files"))) / "pretrained"
NAME = re.compile("[a-z0-9-]+")


@dataclass(frozen=True)
class Card:
    """What is said of a shipped file beside what its header says: what it is for, and the command that made it.

    Each comparison has the `command` that made it, `family`, `where`, `protocol`, `seeds`, `steps`, the label that set the
    `target`, and `rows`: a `label` with its `mean_loss`, `final_loss`, `steps_to_target` and `test_accuracy`.
    """

    name: str
    about: str
    command: str
    sha256: str
    comparisons: tuple[Mapping[str, Any], ...]


def names() -> list[str]:
    """The names that `metamd.load` takes."""
    return sorted(p.stem for p in FOLDER.glob("*.safetensors"))


def card(name: str) -> Card:
    """The card of a shipped file."""
    found = read_json(FOLDER / f"{name}.json")
    return Card(**{**found, "comparisons": tuple(found["comparisons"])})


def outcome_lines(comparison: Mapping[str, Any]) -> list[str]:
    """A comparison of a card in words: where it was made, then a line for each optimiser.

    Example:
        >>> row = {"label": "Adam", "mean_loss": 0.25, "final_loss": 0.125, "steps_to_target": None, "test_accuracy": 0.9}
        >>> about = {"where": "held-out domain 30", "family": "rotated-mnist", "protocol": "paper", "seeds": 3, "steps": 100}
        >>> print(*outcome_lines({**about, "target": "Adam", "rows": [row]}), sep="\\n")
        rotated-mnist, held-out domain 30: 3 seeds, 100 steps, protocol paper, target of Adam
          Adam: mean loss 0.25, final 0.125, never at the target, test 90.00 %
    """
    how = "{family}, {where}: {seeds} seeds, {steps} steps, protocol {protocol}, target of {target}"
    lines = [how.format(**comparison)]
    for row in comparison["rows"]:
        mean, final, steps, test = (row[k] for k in ("mean_loss", "final_loss", "steps_to_target", "test_accuracy"))
        mean, final = ("infinite" if loss is None else f"{loss:.4g}" for loss in (mean, final))
        target = "never at the target" if steps is None else f"{steps:g} steps to the target"
        accuracy = "" if test is None else f", test {100 * test:.2f} %"
        lines.append(f"  {row['label']}: mean loss {mean}, final {final}, {target}{accuracy}")
    return lines


def locate(path_or_name: str | PathLike[str]) -> Path:
    """The path of a file, or of one shipped with the package: a text of lower-case letters, digits and hyphens is a name."""
    if not isinstance(path_or_name, str | PathLike):
        raise TypeError(f"a path or the name of a shipped file is required, got {path_or_name!r}.")
    if not isinstance(path_or_name, str) or not NAME.fullmatch(path_or_name):
        return Path(path_or_name)
    path = FOLDER / f"{path_or_name}.safetensors"
    if path.is_file():
        return path
    shipped = ", ".join(names()) or "none so far"
    here = [n for n in (path_or_name, f"{path_or_name}.safetensors") if Path(n).exists()]
    hint = (
        f'To read the file in this directory, write "./{here[0]}".' if here else 'To read a file, write its path: "./name".'
    )
    raise FileNotFoundError(f"no learned optimiser {path_or_name!r} is shipped with metamd (shipped: {shipped}). {hint}")

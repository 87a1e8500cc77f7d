"""Make the learned optimisers inside the package, their cards and the page about them, all from the settings below.

    python benchmarks/ship.py                 # all of them, or `make shipped`
    python benchmarks/ship.py lenet-digits    # one

Each is made by `metamd train` and judged by `metamd compare` on what it was not trained on. The same settings on the same
machine and versions give the same bytes: seconds, which differ from run to run, are left out of the files. The records of
the comparisons stay in runs/shipped, so that a command that was stopped continues, and rivals are not trained again for
another file of the same family. The images are found as everywhere, see docs/data.md.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from metamd import Comparison, load
from metamd.cli import main as cli
from metamd.files import shipped

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "runs" / "shipped"
PAGE = ROOT / "docs" / "shipped.md"
BEGIN, END = "<!-- written by benchmarks/ship.py: begin -->", "<!-- written by benchmarks/ship.py: end -->"

RIVALS = "--protocol handicap --rivals sgdm adam muon --seeds 3"
"""Whom every file is compared with."""


@dataclass(frozen=True)
class Recipe:
    """How a shipped file is made and judged.

    Args:
        about: what it is for, in a sentence.
        train: the words after `metamd train`, without --out.
        compare: the words after `metamd compare NAME`, without --out, for each comparison.
    """

    about: str
    train: str
    compare: tuple[str, ...]


RECIPES = {
    "quadratic": Recipe(
        "Quadratics in two variables with curvatures around 0.6 and 28 (tasks.quadratic): a first look, in a second.",
        "quadratic --seed 0",
        (f"quadratic {RIVALS} --budget 25",),
    ),
    "lenet-digits": Recipe(
        "LeNet on ten classes of 28x28 grey images, such as digits: learned coordinates. KMNIST was held out.",
        "diverse-digits --model lenet --hold-out kmnist --images 1000 --steps 100 --rank 32 --tasks 3 --seed 0",
        (f"diverse-digits {RIVALS} --budget 7",),
    ),
    "mlp-by-role": Recipe(
        "MLPs of any width and depth on 28x28 grey images: a step size for each role of a tensor. 30 degrees were held out.",
        "rotated-mnist --model mlp --hold-out 30 --images 1000 --steps 100 "
        "--potential diagonal --tying role --tasks 4 --seed 0",
        tuple(f"rotated-mnist{width} {RIVALS} --budget 9" for width in ("", " --width 32", " --width 512")),
    ),
}
"""All settings."""


def make(name: str, recipe: Recipe, records: Path = RECORDS, workers: int = 1) -> shipped.Card:
    """Train, judge, and put file and card into the package."""
    torch.set_num_threads(1)  # sums in one order give the same numbers everywhere
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.safetensors"
        run("train", *recipe.train.split(), "--out", str(path))
        learned = load(path)
        cost = {k: v for k, v in learned.header.cost.items() if k != "seconds"}
        choice = learned.header.choice and {k: v for k, v in learned.header.choice.items() if k != "seconds_per_step"}
        replace(learned, header=replace(learned.header, cost=cost, choice=choice)).save(path)
        found = []
        for number, words in enumerate(recipe.compare, start=1):
            place = records / f"{name}-{number}"
            run("compare", str(path), *words.split(), "--out", str(place), "--workers", str(workers))
            found.append({"command": f"metamd compare {name} {words}", **judged(Comparison.read(place))})
        content = path.read_bytes()
    (shipped.FOLDER / path.name).write_bytes(content)
    digest = sha256(content).hexdigest()
    card = {"name": name, "about": recipe.about, "command": f"metamd train {recipe.train}", "sha256": digest}
    text = json.dumps({**card, "comparisons": found}, indent=1)
    (shipped.FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return shipped.card(name)


def run(*words: str) -> None:
    """A command of metamd; whoever reads the card can give it too."""
    print(f"metamd {' '.join(words)}", file=sys.stderr)
    code = cli.run(list(words))
    if code:
        raise SystemExit(code)


def judged(comparison: Comparison) -> dict[str, Any]:
    """What a card says of a comparison."""
    assert comparison.aim is not None
    outcomes = comparison.folds[0].entrants[comparison.labels[0]][0].outcomes
    rows = {label: {"label": label} for label in comparison.labels}
    for metric in ("mean_loss", "final_loss", "steps_to_target", "test_error"):
        key = "test_accuracy" if metric == "test_error" else metric
        table = comparison.table(metric) if metric in comparison.metrics else []
        for row in rows.values():
            row[key] = None
        for entry in table:
            value = 1 - entry["value"] if metric == "test_error" else entry["value"]
            rows[entry["label"]][key] = None if value == float("inf") else float(f"{value:.6g}")
    return {
        "family": comparison.settings["family"]["family"],
        "where": where(comparison),
        "protocol": comparison.protocol,
        "seeds": len(outcomes),
        "steps": outcomes[0].places[-1],
        "target": comparison.aim.baseline,
        "rows": list(rows.values()),
    }


def where(comparison: Comparison) -> str:
    """On what it was judged, in words; something that it was trained on is not accepted."""
    if comparison.trained_on(comparison.labels[0]):
        raise SystemExit(f"it was trained on {comparison.trained_on(comparison.labels[0])}: hold out what it is judged on.")
    family = comparison.settings["family"]
    width = f", width {family['width']}" if family.get("width") else ""
    groups = [f.group for f in comparison.folds]
    domains = f"held-out domain {', '.join(groups)}" if family.get("hold_out") else "new tasks"
    return f"{domains}{width}"


def page(cards: list[shipped.Card]) -> str:
    """The part of the page that the cards decide: of the rivals in each comparison, the one with the lowest mean loss."""
    lines = []
    for card in cards:
        lines += [f"## {card.name}", "", card.about, ""]
        lines += ["| on | optimiser | mean loss | final loss | steps to target | test accuracy, % |", f"|{6 * '---|'}"]
        for c in card.comparisons:
            ours, *rivals = c["rows"]
            arrived = [row for row in rivals if row["mean_loss"] is not None]
            for row in (ours, min(arrived, key=lambda r: r["mean_loss"])):
                accuracy = "" if row["test_accuracy"] is None else f"{100 * row['test_accuracy']:.2f}"
                values = [number(row[key]) for key in ("mean_loss", "final_loss", "steps_to_target")]
                lines.append(f"| {' | '.join([c['where'], row['label'], *values, accuracy])} |")
        lines.append("")
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"


def write_page(path: Path) -> None:
    """Put what the cards say between the two marks of the page."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    cards = [shipped.card(name) for name in RECIPES if name in shipped.names()]
    path.write_text(f"{before}{BEGIN}\n\n{page(cards)}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)}; all of them if none is given")
    parser.add_argument("--workers", type=int, default=1, help="processes of the comparisons")
    options = parser.parse_args()
    names = options.names or list(RECIPES)
    unknown = [n for n in names if n not in RECIPES]
    if unknown:
        parser.error(f"there is no recipe {unknown[0]!r}. There are {', '.join(RECIPES)}.")
    for name in names:
        make(name, RECIPES[name], workers=options.workers)
    write_page(PAGE)


if __name__ == "__main__":
    main()

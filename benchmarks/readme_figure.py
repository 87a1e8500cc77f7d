"""Draw the figure of README.md: loss against steps and against seconds on three families, from the records in results/.

python benchmarks/readme_figure.py
"""

from dataclasses import replace
from pathlib import Path

from metamd.cli.report import read_comparison
from metamd.comparison.entrants import unscheduled
from metamd.comparison.figures import Curve, best_schedules, curves
from metamd.comparison.sections import two_clocks

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures" / "families.png"
FAMILIES = {
    "adaptation": "MLP adapted to a new angle",
    "rotated-mnist-mlp": "MLP from scratch, new angle",
    "diverse-digits-lenet": "LeNet, new dataset",
}
RIVALS = ("SGD-M", "Adam", "Muon + AdamW", "SOAP", "Schedule-Free AdamW")


def panels() -> dict[str, list[Curve]]:
    """Three panels against steps, then three against seconds."""
    found: dict[str, list[Curve]] = {}
    for name, title in FAMILIES.items():
        comparison, _ = read_comparison(ROOT / "results" / name)
        rivals = [label for label in best_schedules(comparison) if unscheduled(label) in RIVALS]
        found |= {f"{title}: {clock}": x for clock, x in two_clocks(comparison, [comparison.labels[0], *rivals]).items()}
    # without bands: over the datasets of LeNet they hide the lines, and the pages of results have the intervals
    bare = {title: [replace(curve, low=None, high=None) for curve in each] for title, each in found.items()}
    return {title: bare[title] for clock in ("steps", "seconds") for title in bare if title.endswith(clock)}


if __name__ == "__main__":
    curves(panels(), OUT, xlabel="", ylabel="training loss")

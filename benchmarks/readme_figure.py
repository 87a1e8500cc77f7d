"""Draw the figure of README.md: loss against steps and against seconds on three families, by the protocol `once`.

    python benchmarks/readme_figure.py

Every rival is shown with the settings that it chose on training tasks, as MetaMD is. The records are in results/.
"""

from dataclasses import replace
from pathlib import Path

from metamd.cli.report import read_comparison
from metamd.comparison.entrants import UNTUNED
from metamd.comparison.figures import Curve, curves
from metamd.comparison.once import FOR_THE_END
from metamd.comparison.sections import two_clocks

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures" / "families.png"
FAMILIES = {
    "images": "a network per picture",
    "texts": "a transformer per text",
    "speakers": "an adapter per speaker",
}
RIVALS = ("Adam", "AdamW", "Muon + AdamW", "SOAP")


def panels() -> dict[str, list[Curve]]:
    """Three panels against steps, then three against seconds."""
    found: dict[str, list[Curve]] = {}
    for name, title in FAMILIES.items():
        comparison, _ = read_comparison(ROOT / "results" / name)
        chosen = [label for label in comparison.labels[1:] if not label.endswith((UNTUNED, FOR_THE_END))]
        labels = [comparison.labels[0], *(label for label in chosen if label in RIVALS)]
        found |= {f"{title}: {clock}": x for clock, x in two_clocks(comparison, labels).items()}
    # without bands, which hide lines that lie near each other; the pages of results have the intervals
    bare = {title: [replace(curve, low=None, high=None) for curve in each] for title, each in found.items()}
    return {title: bare[title] for clock in ("steps", "seconds") for title in bare if title.endswith(clock)}


if __name__ == "__main__":
    curves(panels(), OUT, xlabel="", ylabel="training loss", share_y=False)

"""What a learned start gains: mean losses of adaptation from the given model and from the learned start, from the records.

    python benchmarks/starts.py

Reads results/adapt-rotated-mnist and results/adapt-rotated-mnist-learned, whose rivals had the best rate for each, and
prints the table of docs/results.md.
"""

from pathlib import Path

import numpy as np

from metamd.comparison.comparison import Comparison, Fold

RESULTS = Path(__file__).resolve().parents[1] / "results"
GIVEN, LEARNED = "adapt-rotated-mnist", "adapt-rotated-mnist-learned"


def mean_losses(fold: Fold) -> tuple[float, str, float]:
    """MetaMD's, and the best rival with its own."""
    losses = {label: fold.best(label, "mean_loss", None).outcomes for label in fold.entrants}
    means = {label: float(np.mean([o.mean_loss for o in runs])) for label, runs in losses.items()}
    rival = min((label for label in means if not label.startswith("MetaMD")), key=lambda label: means[label])
    return means["MetaMD"], rival, means[rival]


def table() -> str:
    """In Markdown, with geometric means."""
    lines = [
        "| mean loss | MetaMD, given start | MetaMD, learned start | best rival, given start | best rival, learned start "
        "| learned against given | learned against learned |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios = []
    for folder in sorted((RESULTS / LEARNED).glob("domain-*")):
        pairs = [Comparison.read(RESULTS / name / folder.name).folds[0] for name in (GIVEN, LEARNED)]
        (given, there, theirs), (learned, here, after) = (mean_losses(fold) for fold in pairs)
        ratios.append((learned / theirs, learned / after))
        lines.append(
            f"| {folder.name.removeprefix('domain-')} | {given:.3f} | {learned:.3f} | {theirs:.3f} ({there}) "
            f"| {after:.3f} ({here}) | {ratios[-1][0]:.2f} x | {ratios[-1][1]:.2f} x |"
        )
    first, second = np.exp(np.log(ratios).mean(0))
    lines.append(f"| mean | | | | | {first:.2f} x | {second:.2f} x |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

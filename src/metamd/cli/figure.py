"""The figure of `metamd inspect`: one row per layer, one outline per piece, over a common logarithmic axis."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metamd.cli.main import one_line

if TYPE_CHECKING:
    from metamd.cli.inspect import Distribution

MOST_LAYERS = 40
FEW = 12
"""So few step sizes are drawn as ticks: a histogram of them would say nothing."""


def draw(rows: "Sequence[Distribution]", pieces: int, path: Path) -> None:
    """Draw the distributions of step sizes.

    Args:
        rows: layer by layer, piece by piece.
        pieces: N.
        path: the image to write; its ending chooses the format.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("--figure needs matplotlib, which is not installed. Run: pip install 'metamd[plot]'") from None
    if not path.parent.is_dir():
        raise ValueError(f"there is no directory {str(path.parent)!r} for the figure. Create it first.")
    shown = rows[: MOST_LAYERS * pieces]
    keys = list(dict.fromkeys(row.key for row in shown))
    figure = Figure(figsize=(8, 1.4 + 0.45 * len(keys)), layout="constrained")
    axes = figure.add_subplot()
    _draw_rows(axes, shown, keys)
    axes.set_xscale("log")
    axes.set_xlabel("learned step size 1/D")
    # A name is not a formula: parse_math would read "$" in a hostile one.
    axes.set_yticks(range(len(keys)), [_short(k) for k in keys], parse_math=False)
    axes.set_ylim(len(keys) - 0.4, -1.0)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if len(rows) > len(shown):
        axes.set_title(f"the first {MOST_LAYERS} of {len(rows) // pieces} layers", fontsize="medium")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=min(pieces, 6), frameon=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the font lacks
        figure.savefig(path, dpi=150)


def _draw_rows(axes: Any, rows: "Sequence[Distribution]", keys: list[str]) -> None:
    from metamd.cli.inspect import span

    low, high = np.clip(span(rows), -100, 100)  # tick locators overflow near the ends of float64
    edges = np.linspace(low, high, 81)
    places = {key: i for i, key in enumerate(keys)}
    for row in rows:
        place, colour, steps = places[row.key], f"C{(row.piece - 1) % 10}", np.clip(row.log_steps, low, high)
        label = f"piece {row.piece}" if place == 0 else None
        if steps.size <= FEW:
            axes.vlines(10**steps, place - 0.5, place, color=colour, alpha=0.8, linewidth=2, label=label)
            continue
        counts = np.histogram(steps, edges)[0]
        heights = place - 0.8 * counts / counts.max()
        axes.stairs(heights, 10**edges, baseline=place, fill=True, alpha=0.35, color=colour, label=label)
        axes.stairs(heights, 10**edges, baseline=None, color=colour, linewidth=0.8)
    axes.hlines(range(len(keys)), 10**low, 10**high, color="0.7", linewidth=0.6)


def _short(key: str) -> str:
    name = one_line(key)
    return name if len(name) <= 40 else f"{name[:18]}...{name[-18:]}"

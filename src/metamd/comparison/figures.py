"""Figures from records: nothing is computed here. matplotlib is imported when a figure is drawn."""

import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from metamd.comparison.comparison import Comparison
from metamd.comparison.entrants import ENDINGS, UNTUNED, unscheduled
from metamd.comparison.statistics import bootstrap
from metamd.files.container import write_atomically
from metamd.files.store import as_json
from metamd.files.text import install
from metamd.potentials.forms import Array

COLOURS = {
    "MetaMD": "#c1272d",
    "MetaMD, paper": "#e08214",
    "MetaMD, diagonal": "#f4a582",
    "MetaMD, judged on validation data": "#e08214",
    "MetaMD, for few seconds": "#e08214",
    "SGD": "#555555",
    "SGD-M": "#1b7837",
    "Adam": "#2166ac",
    "RMSprop": "#7b3294",
    "AdamW": "#7f7f7f",
    "Muon + AdamW": "#17a2b8",
    "SOAP": "#8c510a",
    "Schedule-Free AdamW": "#ff7f00",
    "Prodigy": "#e7298a",
    "best diagonal": "#000000",
    "Adam, untuned": "#92c5de",
    "MetaMD, paper (Adam on log D)": "#fdb863",
}
"""One colour per optimiser in all figures."""

PALETTE = ("#1f78b4", "#b15928", "#33a02c", "#6a3d9a", "#ff7f00", "#e7298a", "#17becf", "#8c6d31", "#7f7f7f", "#bcbd22")
"""For optimisers that have no colour of their own, by their name."""

LEGEND_LINE, LEGEND_KEY, LETTER = 0.2, 0.55, 0.062
"""Inches in a legend below the panels: the height of a line, the width of a key, and of a letter behind it."""

PANELS = {1: (4.4, 3.2), 2: (3.9, 3.2), 3: (3.1, 2.5)}
"""Inches of a panel by how many stand in a row: text keeps its size on a page as wide as the figure."""

NARROW = "-narrow"
"""What the name of a figure ends in whose panels stand below each other, for a telephone."""


def _colour(label: str) -> str:
    # endings that leave an optimiser its colour
    bare = reduce(str.removesuffix, (*ENDINGS.values(), UNTUNED, " (all)", " (rate)"), label)
    known = COLOURS.get(label) or COLOURS.get(bare) or COLOURS.get(bare.split(" (")[0])
    return known or (COLOURS["MetaMD"] if bare.startswith("MetaMD") else PALETTE[sum(bare.encode()) % len(PALETTE)])


def _style(label: str, dashed: bool) -> str:
    if label.endswith(UNTUNED):
        return ":"
    if dashed or label.endswith(ENDINGS["linear"]):
        return "--"
    # other ways to use what was learned have the colour of the first
    return "-." if label.endswith(ENDINGS["quadratic"]) or label.startswith("MetaMD,") else "-"


def literal(text: str) -> str:
    """A text from a record as matplotlib shows it: no mathematics is read into it, and it is not too long."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:60])
    return shown.replace("\\", "/").replace("$", "\\$")


@contextmanager
def drawing(
    path: Path,
    size: tuple[float, float],
    rows: int,
    columns: int,
    *,
    share_y: bool = False,
    dpi: int = 110,
    colours: int = 64,  # of a PNG; lines need no more, and photographs do
) -> Iterator[Any]:
    """A figure that needs no display, and its panels, (rows, columns); it is written at the end."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError(f"figures need matplotlib, which is not installed. {install('plot')}") from None
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    yield figure, grid
    # no creation date and no version, so that the same records give the same bytes
    png, drawn = path.suffix == ".png", io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format=path.suffix[1:] or "png", metadata={"Software": None} if png else None)
    if png:  # with 64 colours: a quarter of the size, and no line looks different
        from PIL import Image

        with Image.open(drawn) as full:
            drawn = io.BytesIO()
            full.convert("RGB").quantize(colours, Image.Quantize.FASTOCTREE).save(drawn, "png", optimize=True)
    write_atomically(path, drawn.getvalue())


def _frame(axes: Any, title: str, xlabel: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class Panel:
    """A run in the plane."""

    title: str  # above it; its first line is the optimiser's name
    surface: Callable[[Array, Array], Array]  # the function of (x, y), on arrays
    path: Sequence[Sequence[float]]  # the points of the run, (points, 2)
    optimum: Sequence[float]  # where it should end


def trajectories(rows: Mapping[str, Sequence[Panel]], path: Path) -> None:
    """Runs over the contours of what they minimise, a column per optimiser; all panels of a row show the same region."""
    columns = max(len(panels) for panels in rows.values())
    with drawing(path, (2.15 * columns + 0.3, 2.35 * len(rows) + 0.2), len(rows), columns) as (_, grid):
        for axes_row, (label, panels) in zip(grid, rows.items(), strict=True):
            box = _box(panels)
            for axes in axes_row[len(panels) :]:
                axes.set_axis_off()
            for axes, panel in zip(axes_row, panels, strict=False):
                _contours(axes, panel, box)
                points, colour = np.asarray(panel.path, dtype=np.float64), _colour(panel.title.split("\n")[0])
                axes.plot(*points.T, ".-", color=colour, linewidth=1.1, markersize=2.6)
                axes.plot(*points[0], "o", color="#2ca02c", markersize=6, markeredgecolor="white")
                axes.plot(*panel.optimum, "*", color="#ff9900", markersize=11, markeredgecolor="black", markeredgewidth=0.5)
                axes.set(xlim=box[:2], ylim=box[2:])
                axes.set_title(panel.title, fontsize=8)
                axes.tick_params(labelsize=6)
            axes_row[0].set_ylabel(label, fontsize=8)


def _box(panels: Sequence[Panel]) -> tuple[float, float, float, float]:
    """Around start, optimum and the runs; one that shoots out of the picture does not decide its size."""
    ends = np.array([p for panel in panels for p in (panel.path[0], panel.optimum)], dtype=np.float64)
    low, high = ends.min(0), ends.max(0)
    size, longest = high - low, float((high - low).max())
    size = np.where(size > 0.02 * longest, size, max(0.5, 0.5 * longest))  # start and optimum at one height say nothing
    points = np.concatenate([np.asarray(panel.path, dtype=np.float64) for panel in panels])
    low = np.maximum(points.min(0), low - size)
    high = np.minimum(points.max(0), high + 0.6 * size)
    margin = 0.08 * np.maximum(high - low, 0.5)
    (x0, y0), (x1, y1) = low - margin, high + margin
    return float(x0), float(x1), float(y0), float(y1)


def _contours(axes: Any, panel: Panel, box: tuple[float, float, float, float]) -> None:
    x, y = np.meshgrid(np.linspace(box[0], box[1], 160), np.linspace(box[2], box[3], 160))
    bottom = panel.surface(*(np.array([v], dtype=np.float64) for v in panel.optimum))[0]
    height = np.log10(np.maximum(panel.surface(x, y) - bottom, 1e-6))  # a linear scale shows nothing of a flat valley
    levels = np.linspace(np.quantile(height, 0.02), height.max(), 12)
    axes.contourf(x, y, height, levels=levels, cmap="Blues_r", alpha=0.45, extend="min")
    axes.contour(x, y, height, levels=levels, colors="0.6", linewidths=0.4)


@dataclass(frozen=True)
class Strip:
    """The counts of one optimiser."""

    label: str  # on the axis
    counts: Sequence[float | None]  # one per problem, None for a run that never arrived
    filled: bool = True  # whether the dots are full


def strips(groups: Mapping[str, Sequence[Strip]], path: Path, *, xlabel: str, missed: str = "never") -> None:
    """One row of dots per optimiser on a logarithmic axis, a bar at the median; one panel per group."""
    tallest = max(len(s) for s in groups.values())
    with drawing(path, (4.2 * len(groups) + 0.6, 0.27 * tallest + 1.1), 1, len(groups)) as (_, grid):
        for axes, (title, members) in zip(grid[0], groups.items(), strict=True):
            labels = []
            least = min([0.8, *(c for s in members for c in s.counts if c)])  # a logarithmic axis has no zero
            for place, strip in enumerate(members):
                values = np.array([np.nan if c is None else max(c, least) for c in strip.counts], dtype=np.float64)
                offsets, colour = place + 0.28 * (np.arange(len(values)) % 7 - 3) / 3, _colour(strip.label)
                face = colour if strip.filled else "none"
                axes.scatter(values, offsets, s=9, facecolors=face, edgecolors=colour, linewidths=0.6, alpha=0.7)
                missing = int(np.isnan(values).sum())
                if missing < len(values) / 2:
                    middle = float(np.median(np.where(np.isnan(values), np.inf, values)))
                    axes.vlines(middle, place - 0.42, place + 0.42, color="black", linewidth=1.6)
                labels.append(strip.label + (f", {missing} {missed}" if missing else ""))
            axes.set_yticks(range(len(labels)), labels, fontsize=8)
            axes.set_ylim(len(labels) - 0.4, -0.6)
            axes.set_xscale("log")
            axes.tick_params(axis="x", which="both", labelsize=7)
            _frame(axes, title, xlabel)
            axes.grid(axis="x", color="0.9")
            axes.set_axisbelow(True)


@dataclass(frozen=True)
class Curve:
    """A quantity over the steps."""

    label: str  # in the legend; the colour goes by what stands before " ("
    x: Sequence[float]  # the steps
    y: Sequence[float]  # the values
    low: Sequence[float] | None = None  # lower edge of a band, if there is one
    high: Sequence[float] | None = None  # its upper edge
    dashed: bool = False  # how the line is drawn


def banded(
    label: str, x: Sequence[float], runs: Array, groups: Sequence[int] | None = None, *, dashed: bool = False
) -> list[Curve]:
    """The mean of several runs with a band: from the smallest to the largest, or the 95 % interval of the mean over groups.

    It ends where one of the runs has no finite value; a curve of which fewer than two points are left is none.
    """
    kept = np.isfinite(runs).all(0)
    if kept.sum() < 2:
        return []
    y = runs[:, kept]
    if groups is None:
        low, high = y.min(0), y.max(0)
    else:
        low, high = np.transpose([(e.low, e.high) for e in (bootstrap(column, groups) for column in y.T)])
    return [Curve(label, np.array(x)[kept].tolist(), y.mean(0).tolist(), low.tolist(), high.tolist(), dashed)]


def curves(
    panels: Mapping[str, Sequence[Curve]],
    path: Path,
    *,
    xlabel: str,
    ylabel: str,
    logarithmic: bool = True,
    narrow: bool = False,
    share_y: bool = True,
) -> None:
    """Lines with bands, one panel per group; with `narrow` also a second figure, see `NARROW`.

    Panels whose values are not compared with each other do not `share_y`.
    """
    _curves(panels, path, xlabel, ylabel, logarithmic, share_y, min(3, len(panels)), dpi=110)
    if narrow:  # a telephone has several dots to a pixel of the page
        _curves(panels, path.with_stem(path.stem + NARROW), xlabel, ylabel, logarithmic, share_y, columns=1, dpi=180)


def _curves(
    panels: Mapping[str, Sequence[Curve]],
    path: Path,
    xlabel: str,
    ylabel: str,
    logarithmic: bool,
    share_y: bool,
    columns: int,
    dpi: int,
) -> None:
    labels = list(dict.fromkeys(literal(curve.label) for members in panels.values() for curve in members))
    rows, (each, height) = -(-len(panels) // columns), PANELS[columns]
    wide = each * columns
    across = max(1, min(len(labels), int(wide / (LEGEND_KEY + LETTER * max(map(len, labels), default=0)))))
    size = wide, height * rows + LEGEND_LINE * -(-len(labels) // across)
    with drawing(path, size, rows, columns, share_y=share_y, dpi=dpi) as (figure, grid):
        for axes, (title, members) in zip(grid.flatten(), panels.items(), strict=False):
            for curve in members:
                colour, style = _colour(curve.label), _style(curve.label, curve.dashed)
                width = 1.9 if curve.label.startswith("MetaMD") else 1.3
                axes.plot(curve.x, curve.y, style, color=colour, linewidth=width, label=literal(curve.label))
                if curve.low is not None and curve.high is not None:
                    axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
            if logarithmic and any(0 < y < np.inf for curve in members for y in curve.y):
                axes.set_yscale("log")
            axes.tick_params(which="both", labelsize=7)  # a short axis has minor labels alone
            _frame(axes, literal(title), xlabel)
            axes.grid(color="0.92")
        for axes in grid.flatten()[: len(panels)]:  # when all panels have shared their limits
            _plain_numbers(axes)
        for axes in grid.flatten()[len(panels) :]:
            axes.set_axis_off()
        grid[0, 0].set_ylabel(ylabel, fontsize=8)
        legends = [axes.get_legend_handles_labels() for axes in grid.flatten()]
        lines = {label: line for found in legends for line, label in zip(*found, strict=True)}
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=across, fontsize=8, frameon=False)


def _plain_numbers(axes: Any) -> None:
    """Numbers such as 0.3 in place of powers of ten, on a logarithmic axis that has one of these at most."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log" and math.floor(math.log10(high)) <= math.ceil(math.log10(low)):
        digits = "1235" if high / low > 4 else "123456789"  # on a longer axis only some have room
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in digits else "")


ALL = "all domains"


def loss_curves(
    comparison: Comparison, labels: Sequence[str], *, dashed: Collection[str] = (), intervals: bool = False
) -> dict[str, list[Curve]]:
    """The curves of each panel by its title, as `curves` draws them.

    The first panel is of all domains, if there are several that were watched at the same steps; its bands are 95 % bootstrap
    intervals. With `intervals` the bands of each domain are too; otherwise they reach from the smallest loss to the largest.
    """
    each = {label: comparison.curve(label) for label in labels}
    panels = {f.group: ([f.group], [0] * f.tasks(labels[0]) if intervals else None) for f in comparison.folds}
    if len(panels) > 1 and len({places for places, _ in each[labels[0]].values()}) == 1:
        panels = {ALL: ([*panels], comparison.groups), **panels}
    found: dict[str, list[Curve]] = {title: [] for title in panels}
    for title, (domains, groups) in panels.items():
        for label, curve in each.items():
            losses = np.concatenate([curve[domain][1] for domain in domains])
            found[title] += banded(label, curve[domains[0]][0], losses, groups, dashed=label in dashed)
    return found


def learning_curves(comparison: Comparison, ours: Sequence[str], folder: Path) -> None:
    """Draw `curves.png`: the training loss of ours and of tuned rivals with the better of their schedules."""
    found = loss_curves(comparison, [*ours, *best_schedules(comparison)], dashed=ours[1:])
    curves(found, folder / "curves.png", xlabel="step", ylabel="training loss")


def mean_losses(comparison: Comparison, ours: Sequence[str], folder: Path) -> None:
    """Draw `losses.png`: the mean training loss of every run, for many optimisers whose curves would hide each other."""
    losses = {label: comparison.values(label, "mean_loss").tolist() for label in [*ours, *best_schedules(comparison)]}
    rows = [Strip(label, as_json(values), label in ours) for label, values in losses.items()]
    strips({"a dot per run": rows}, folder / "losses.png", xlabel="mean training loss", missed="diverged")


def best_schedules(comparison: Comparison) -> list[str]:
    """The label of every tuned rival, under the schedule with which its mean loss is smaller."""
    means: dict[str, dict[str, float]] = {}
    for label in comparison.labels:
        if not comparison.is_learned(label) and not label.endswith(UNTUNED):
            means.setdefault(unscheduled(label), {})[label] = float(comparison.values(label, "mean_loss").mean())
    return [min(each, key=each.__getitem__) for each in means.values()]

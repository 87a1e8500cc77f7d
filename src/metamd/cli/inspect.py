"""`metamd inspect`: what a learned-optimiser file says about itself, and the distribution of its step sizes 1/D."""

import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metamd.certification.statements import readable
from metamd.cli.main import show
from metamd.cli.options import Inspect
from metamd.comparison.figures import drawing, literal
from metamd.files.header import Header
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.shipped import Card, card, locate, names, outcome_lines
from metamd.files.text import one_line
from metamd.potentials.tying import some

BARS = " ▁▂▃▄▅▆▇█"
BINS = 16
MOST_LAYERS = 40  # in the figure
MOST_ROWS, MOST_LETTERS = 40, 2_000  # in the tables
MOST_TICKS = 12
"""So few step sizes are drawn as ticks: a histogram of them would say nothing."""


@dataclass(frozen=True)
class Distribution:
    """The step sizes 1/D of one layer under one piece."""

    key: str  # the name of the metric
    piece: int  # j, from 1
    log_steps: NDArray[np.float64]  # their logarithms to base 10, sorted

    def summary(self) -> dict[str, Any]:
        """The distribution in numbers, which are None where a layer has no parameters."""
        logs, known = self.log_steps, {"min": 0.0, "median": 0.5, "max": 1.0}
        found = {name: float(10 ** np.quantile(logs, q)) if logs.size else None for name, q in known.items()}
        return {"key": self.key, "piece": self.piece, "count": logs.size, **found}


def run(options: Inspect) -> None:
    """Carry out the command."""
    if options.file is None:
        _list_shipped(options)
        return
    learned = load(options.file)
    rows = distributions(learned)
    found = card(options.file) if options.file in names() else None
    if options.figure is not None:
        draw_distributions(rows, learned.header.pieces, options.figure)
        print(f"wrote {one_line(str(options.figure))}", file=sys.stderr)
    if options.json:
        record = {"file": options.file, "fingerprint": learned.fingerprint(), "header": learned.header.to_dict()}
        record |= {} if found is None else {"card": asdict(found)}
        print(json.dumps({**record, "step_sizes": [row.summary() for row in rows]}))
        return
    width = max(80, get_terminal_size((120, 24)).columns)  # narrower, rich would drop the names of the layers
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    console.print(_card_table(options.file, learned, found))
    console.print(_step_table(rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        console.print(f"and {len(rows) - MOST_ROWS:,} rows more, which --json has")
    console.print("The whole header: --json. The step sizes as a figure: --figure steps.png.")


def _list_shipped(options: Inspect) -> None:
    """The learned optimisers that come with the package."""
    if options.figure is not None:
        raise ValueError("--figure draws the step sizes of one file. Name it: metamd inspect FILE --figure PNG.")
    cards = [card(name) for name in names()]
    lines = [f"{c.name}  ({locate(c.name).stat().st_size / 1000:,.0f} kB)\n  {c.about}" for c in cards]
    lines.append('metamd.load("NAME") reads one, and `metamd inspect NAME` prints its header and where it was judged.')
    show({"shipped": [asdict(c) for c in cards]}, "\n".join(lines), as_json=options.json)


def distributions(learned: LearnedOptimiser) -> list[Distribution]:
    """The step sizes of every layer under every piece, in the order of the file."""
    found = []
    for key, value in learned.potential.log_d.items():
        logs_d, sides = value.detach().double(), [learned.header.factors.get(f"{side}/{key}") for side in ("left", "right")]
        numbers = [None if shape is None else min(shape[1] + 1, shape[0]) for shape in sides]
        if learned.header.basis == "both" and numbers != [None, None]:  # log D is a sum over rows and columns
            rows = numbers[0] if numbers[0] is not None else logs_d.shape[1] - (numbers[1] or 0)
            logs_d = logs_d[:, :rows, None] + logs_d[:, None, rows:]
        logs = [-row.flatten().numpy() / np.log(10) for row in logs_d]
        found += [Distribution(key, j + 1, np.sort(row)) for j, row in enumerate(logs)]
    return found


def histogram(values: NDArray[np.float64], low: float, high: float, bins: int = BINS) -> str:
    """Counts as a row of Unicode bars between two ends; the fullest bin is a full bar and no occupied bin is empty.

    Example:
        >>> histogram(np.array([0.0, 0.1, 0.9]), 0, 1, bins=4)
        '█  ▄'
    """
    if not values.size:
        return " " * bins
    width = max(high - low, 1e-9)
    counts = np.bincount(np.clip((values - low) / width * bins, 0, bins - 1).astype(int), minlength=bins)
    heights = np.ceil(counts / counts.max() * (len(BARS) - 1)).astype(int)
    return "".join(BARS[h] for h in heights)


def span(rows: Sequence[Distribution]) -> tuple[float, float]:
    """The ends of an axis, in powers of ten, on which all rows can be compared: whole decades around all step sizes."""
    filled = [row.log_steps for row in rows if row.log_steps.size]
    if not filled:
        return -1.0, 1.0
    low, high = min(v[0] for v in filled), max(v[-1] for v in filled)
    ends = float(np.floor(low + 1e-6)), float(np.ceil(high - 1e-6))
    return ends if ends[0] < ends[1] else (ends[0] - 1, ends[1] + 1)


def _card_table(file: str, learned: LearnedOptimiser, found: Card | None) -> Table:
    """What a reader wants to know first: what it is, how it is used, where it is from, what is known of it."""
    header = learned.header
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    said: dict[str, str | None] = {"file": file}
    if found is not None:
        said |= {"shipped": found.about, "made by": found.command}
    steps = header.horizon or "T"
    said["use"] = f"opt = metamd.MetaMD(model.named_parameters(), {file!r}, steps={steps})"
    online = f" ({learned.online})" if learned.usage.metric == "online" and learned.online is not None else ""
    said["recommends"] = "nothing but plain use" if header.usage is None else f"{learned.usage}{online}"
    if (choice := header.choice) is not None:
        judged = choice["judged_on"].replace("auto", "validation data at the end and training")
        took = f"; a step took {1e3 * choice['seconds_per_step']:.3g} ms" if "seconds_per_step" in choice else ""
        said["chosen for"] = f"few {choice.get('prefer', 'steps')}, judged on {judged} data, by the {choice['score']}{took}"
        if "tried" in choice:
            said["chosen for"] = f"the {choice['score']}, judged on {choice['judged_on']} data: {choice.get('rule', '')}"
            said["tried"] = "\n".join(map(_tried_line, choice["tried"]))
    numbers = sum(math.prod(shape) for shape in header.model.values())
    if header.model:
        said["fits"] = f"a model of {len(header.model)} tensors, {numbers:,} numbers: {some(header.model)}"
    elif header.tying == "role":
        said["fits"] = "models of any width and depth, by the roles of their layers"
    pieces = f"{header.pieces} piece{'s' * (header.pieces > 1)}"
    basis = {
        "identity": "in the parameters",
        "right": "in learned coordinates",
        "both": "in learned coordinates of both sides",
    }
    said["geometry"] = (
        f"{header.potential} of {pieces} {basis[header.basis]}, tying {header.tying!r}, centre {header.centre!r}"
    )
    said["coordinates"] = ", ".join(f"{k} {n} x {r}" for k, (n, r) in header.factors.items())
    said["learned on"] = _learned_on(header)
    said["learned by"] = (
        " ".join(x for x in (header.objective, header.estimator and f"with {header.estimator}") if x) or None
    )
    said["horizon"] = None if header.horizon is None else f"{header.horizon} steps"
    said["batch size"] = None if header.batch_size is None else str(header.batch_size)
    said["cost"] = ", ".join(f"{n.replace('_', ' ')} {x:,.5g}" for n, x in header.cost.items() if x) or None
    said["start"] = "a learned start is in the file" if header.start else None
    said["target"] = (
        None if header.target_loss is None else f"a loss of {header.target_loss:.4g}, which training tasks reached"
    )
    if (radius := header.radius) is not None:
        said["radius"] = f"{radius.quantile:.4g} times the scale of each tensor: {radius.source}"
    said["guaranteed"] = _held_out(header.held_out) or f"nothing yet; metamd certify {one_line(file)} FAMILY finds it out"
    said["judged"] = None if found is None else "\n".join(line for c in found.comparisons for line in outcome_lines(c))
    said["made with"] = ", ".join(f"{n} {v}" for n, v in header.versions.items()) or None
    said["fingerprint"] = learned.fingerprint()
    for name, value in said.items():
        if value:
            folded = name in ("guaranteed", "judged", "tried")  # their lines were made safe one by one
            table.add_row(Text(name), Text(_cut(value if folded else one_line(value))))
    if missing := [name for name, value in said.items() if not value and name not in _OPTIONAL]:
        table.add_row(Text("not recorded"), Text(", ".join(missing)))
    return table


_OPTIONAL = ("start", "judged", "radius", "target", "shipped", "made by", "coordinates")
"""Lines of a card that most files do not need."""


def _learned_on(header: Header) -> str | None:
    """The tasks or runs that a file is from, in words."""
    if header.learned_from is not None:
        rows = header.learned_from["runs"]
        names = ", ".join(repr(row["name"]) for row in rows[:4] if row["name"])
        return f"{len(rows)} recorded run{'s' * (len(rows) > 1)}{f': {names}' if names else ''}{', ...' * (len(rows) > 4)}"
    if header.family is None:
        return None
    about = header.family
    listed = about.get("domains") or about.get("datasets")
    domains = f": {', '.join(map(str, listed))}" if isinstance(listed, list | dict) and listed else ""
    held = about.get("hold_out")
    kept = f"; held out: {', '.join(map(str, held)) if isinstance(held, list) else held}" if held else ""
    tasks = len(header.task_hashes)
    count = f"; {tasks} task{'s' * (tasks != 1)} used in learning (--json lists them)" if tasks else ""
    return f"{about.get('name', about.get('family', json.dumps(about, ensure_ascii=False)))}{domains}{kept}{count}"


def _tried_line(row: Mapping[str, Any]) -> str:
    """One k and pace of the paper's method, after some outer steps."""
    loss = "diverged" if row["loss"] is None else f"loss {row['loss']:.4g} at rate {row['rate']:.3g}"
    return f"k {row['k']:.4g}, pace {row['pace']:.3g}, {row['outer_steps']} outer steps: {loss}"


def _held_out(found: Mapping[str, Any]) -> str | None:
    """The statements of certificates that say something, a line each; anything else as JSON."""
    known, rest = readable(found)
    lines = []
    for place, certificate in known.items():
        lines.append(f"certificate from {certificate.tasks} tasks of {place} (--json has it whole)")
        holding = [s for s in certificate.statements if s.verdict == "holds" and s.bound is not None]
        lines += [f"{s.about}: {s.quantity} <= {s.bound:.5g}" for s in holding]
    lines += [json.dumps(rest, ensure_ascii=False)] if rest else []
    return "\n".join(map(one_line, lines)) or None


def _cut(text: str) -> str:
    """A long value, cut: nobody reads it here, and folding millions of characters would take minutes."""
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ... ({len(text):,} characters; --json has all)"


def _step_table(rows: Sequence[Distribution]) -> Table:
    low, high = span(rows)
    table = Table(title="\nlearned step sizes 1/D", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("layer", overflow="fold")
    for column in ("piece", "count", "min", "median", "max"):
        table.add_column(column, justify="right", no_wrap=True, min_width=5 if column == "piece" else 8)
    left, right = f"1e{low:+.0f}", f"1e{high:+.0f}"
    table.add_column(left + right.rjust(BINS - len(left)), no_wrap=True, min_width=BINS)
    for row in rows:
        key, piece, count, *numbers = row.summary().values()
        ends = ["-" if x is None else f"{x:.3g}" for x in numbers]
        cells = (
            _cut(one_line(key)) if piece == 1 else "",
            str(piece),
            f"{count:,}",
            *ends,
            histogram(row.log_steps, low, high),
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def draw_distributions(rows: Sequence[Distribution], pieces: int, path: Path) -> None:
    """Draw the distributions of step sizes, layer by layer; the ending of the path chooses the format."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no directory {str(path.parent)!r} for the figure. Create it first.")
    shown = rows[: MOST_LAYERS * pieces]
    places = {key: place for place, key in enumerate(dict.fromkeys(row.key for row in shown))}
    low, high = np.clip(span(shown), -100, 100)  # tick locators overflow near the ends of float64
    edges = np.linspace(low, high, 81)
    with warnings.catch_warnings(), drawing(path, (8, 1.4 + 0.45 * len(places)), 1, 1) as (figure, grid):
        warnings.simplefilter("ignore")  # a glyph that the font lacks
        axes = grid[0, 0]
        for row in shown:
            place, colour, steps = places[row.key], f"C{(row.piece - 1) % 10}", np.clip(row.log_steps, low, high)
            label = f"piece {row.piece}" if place == 0 else None
            if steps.size <= MOST_TICKS:
                axes.vlines(10**steps, place - 0.5, place, color=colour, alpha=0.8, linewidth=2, label=label)
                continue
            counts = np.histogram(steps, edges)[0]
            heights = place - 0.8 * counts / counts.max()
            axes.stairs(heights, 10**edges, baseline=place, fill=True, alpha=0.35, color=colour, label=label)
            axes.stairs(heights, 10**edges, baseline=None, color=colour, linewidth=0.8)
        axes.hlines(range(len(places)), 10**low, 10**high, color="0.7", linewidth=0.6)
        axes.set_xscale("log")
        axes.set_xlabel("learned step size 1/D")
        axes.set_yticks(range(len(places)), map(literal, places))
        axes.set_ylim(len(places) - 0.4, -1.0)
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        if len(rows) > len(shown):
            axes.set_title(f"the first {MOST_LAYERS} of {len(rows) // pieces} layers", fontsize="medium")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=min(pieces, 6), frameon=False)

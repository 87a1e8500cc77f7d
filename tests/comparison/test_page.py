"""What a page says and draws, from outcomes that are invented, damaged or hostile."""

import json
import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from metamd import Comparison, compare, tasks
from metamd.cli.report import read_comparison, summary, write_report
from metamd.comparison import figures
from metamd.comparison.comparison import Candidate, Fold, cell_name
from metamd.comparison.figures import loss_curves
from metamd.comparison.page import WIDTH, as_markdown, as_text
from metamd.comparison.sections import Section, accuracy, formatted, interval, sections
from metamd.comparison.statistics import bootstrap
from metamd.comparison.training import Outcome
from metamd.rivals import rival
from tests.helpers import NASTY
from tests.small_comparisons import bare

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

QUADRATIC = tasks.quadratic((0.5, 4.0), steps=30)


@pytest.fixture
def undrawn(monkeypatch):
    """Sections without their figures, for tests of what is said."""
    monkeypatch.setattr(figures, "curves", lambda panels, path, **options: None)


def test_seeds_are_counted_by_domain_where_they_differ(tmp_path, undrawn):
    one, two = (compare({"a": rival("sgd").untuned()}, QUADRATIC, bare(seeds=n)) for n in (1, 3))
    both = [replace(c, folds=(replace(c.folds[0], group=g),)) for g, c in (("x", one), ("y", two))]
    text = as_markdown(sections(Comparison.join(both), tmp_path)[1:2])
    assert "x (seeds: 1, steps: 30), y (seeds: 3, steps: 30)" in " ".join(text.split())


def joined(*seeds):
    """The same rivals on as many domains, with so many seeds in each."""
    both = {"a": rival("sgd").untuned(), "b": rival("adam").with_setting(lr=0.1)}
    parts = [compare(both, QUADRATIC, bare(seeds=n, seed=i)) for i, n in enumerate(seeds)]
    return Comparison.join([replace(c, folds=(replace(c.folds[0], group=f"d{i}"),)) for i, c in enumerate(parts)])


def test_bands_of_learning_curves_are_bootstrap_intervals(tmp_path, monkeypatch):
    """Each held against the interval that tables have, at one step; ranges would be wider."""
    drawn = {}
    monkeypatch.setattr(figures, "curves", lambda panels, path, **options: drawn.setdefault(path.name, panels))
    found = joined(3, 3)
    sections(found, tmp_path)
    shown = drawn["curves.png"]
    assert list(shown) == ["all domains", "d0", "d1"]
    each = [losses[:, 2] for _, losses in found.curve("b").values()]
    wanted = {"all domains": bootstrap(np.concatenate(each), [0, 0, 0, 1, 1, 1]), "d1": bootstrap(each[1], [0, 0, 0])}
    for title, estimate in wanted.items():
        curve = next(c for c in shown[title] if c.label == "b")
        assert (curve.y[2], curve.low[2], curve.high[2]) == (estimate.value, estimate.low, estimate.high)
    ranges = loss_curves(found, ["b"])["d1"][0]
    assert (ranges.low[2], ranges.high[2]) == (each[1].min(), each[1].max())


def test_short_logarithmic_axes_have_plain_numbers_and_long_ones_powers_of_ten(tmp_path, monkeypatch):
    drawn, drawing = [], figures.drawing

    @contextmanager
    def watched(*args, **options):
        with drawing(*args, **options) as (figure, grid):
            yield figure, grid
            figure.draw_without_rendering()
            texts = [axes.get_ymajorticklabels() + axes.get_yminorticklabels() for axes in grid.flatten()]
            drawn.extend({text.get_text() for text in each} for each in texts)

    monkeypatch.setattr(figures, "drawing", watched)
    panels = {title: [figures.Curve("MetaMD", [0, 1], [low, 5.0])] for title, low in {"short": 1.9, "long": 1e-3}.items()}
    figures.curves(panels, tmp_path / "x.png", xlabel="", ylabel="loss", share_y=False)
    short, long = drawn
    assert {"2", "3", "4", "5"} <= short
    assert not any("^" in text for text in short)
    assert {r"$\mathdefault{10^{-2}}$", r"$\mathdefault{10^{0}}$"} <= long


def test_settings_at_an_end_of_the_range_are_named_for_each_quantity(tmp_path, undrawn):
    rates = [rival("sgd").with_setting(lr=x) for x in (1e-4, 1e-2, 1e-1)]
    early, late = [2.0] + [0.5] * 10, [2.0] * 9 + [0.1] * 2
    curves = {0: [2.0] * 11, 1: early, 2: late}
    found = {"a": tuple(_invented(c, curves[i]) for i, c in enumerate(rates)), "b": (_invented(rates[1], early),)}
    comparison = Comparison((Fold("d", found, {"a": 1.0, "b": 1.0}, {}),), {"steps": 100}).aiming("b")
    (part,) = (p for p in sections(comparison, tmp_path) if p.title == "Settings")
    rows = {row[0]: row[-1] for row in part.rows}
    assert rows["a, d"] == "loss at the end", "the mean loss is best at the rate in the middle"
    assert rows["b, d"] == "", "where nothing was chosen there is no end"


@pytest.mark.parametrize("last", [1, 2])
def test_columns_in_which_nobody_arrives_are_a_sentence(last, tmp_path, undrawn):
    """A run arrives where it is at the target twice in a row."""
    one, two = (rival(name).untuned() for name in ("sgd", "adam"))
    runs = {"a": (_invented(one, [2.0] * 11),), "b": (_invented(two, [2.0] * (11 - last) + [0.1] * last),)}
    found = Comparison((Fold("d", runs, {"a": 1.0, "b": 1.0}, {}),), {"steps": 100}).aiming("b", 1.0)
    opening = sections(found, tmp_path)[0]
    assert ("steps to target" in opening.columns, "seconds to target" in opening.columns) == (last == 2,) * 2
    assert ("Nobody reaches it in half of the runs" in opening.texts[-1]) == (last == 1)
    assert {len(row) for row in opening.rows} == {len(opening.columns)}


def _invented(contender, losses):
    places, plain = tuple(range(0, 101, 10)), contender.describe()
    return Candidate(plain, (Outcome({"seed": 0}, plain, places, tuple(losses), losses[-1], {}, 100),))


def test_hostile_records_are_shown_as_text(tmp_path):
    """Labels, domains, settings and versions that try to be markup, mathematics or escapes."""
    both = {NASTY: rival("sgd").untuned(), "b": [rival("adam").with_setting(lr=x) for x in (0.1, 0.2)]}
    compare(both, QUADRATIC, bare(NASTY, seeds=2), folder=tmp_path)
    path = tmp_path / "comparison.json"
    index = json.loads(path.read_text())
    index["folds"][0]["group"] = NASTY
    index["versions"] = {NASTY: NASTY}
    for candidate in index["folds"][0]["entrants"]["b"][:1]:  # a record that fits its name, as a forger would have it
        candidate["contender"]["setting"] = {NASTY: NASTY}
        for i, name in enumerate(candidate["runs"]):
            found = json.loads((tmp_path / "cells" / f"{name}.json").read_text()) | {"contender": candidate["contender"]}
            candidate["runs"][i] = cell_name(found["contender"], found["config"])
            (tmp_path / "cells" / f"{candidate['runs'][i]}.json").write_text(json.dumps(found))
    path.write_text(json.dumps(index))
    run = json.loads((tmp_path / "run.json").read_text())
    run["settings"]["family"]["family"] = NASTY
    (tmp_path / "run.json").write_text(json.dumps(run))
    _, parts = write_report(tmp_path, tmp_path)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for shown in (page, text):
        assert "<script" not in shown
        assert "\x1b" not in shown.replace("&#27;", "")
    assert "\n# head" not in text
    assert "[x](javascript" not in text
    assert "\x1b" not in as_text(parts)


def test_numbers_are_cells():
    assert Section(rows=[["Adam", 0.25], ["SGD", None]]).cells() == [["Adam", "0.25"], ["SGD", ""]]
    assert (formatted(0.25, ".2f"), formatted(None, missing="diverged")) == ("0.25", "diverged")
    assert interval({"value": 0.5, "low": 0.4, "high": None}, missing="diverged") == "0.5 (0.4 to diverged)"
    assert accuracy({"value": 0.1, "low": 0.09, "high": 0.12}) == "90.00 (88.00 to 91.00)"


def test_text_and_markdown_escape_what_they_show():
    hostile = [Section("a|b", ["*x* <i>"], ["h"], [["r\nr"]])]
    text = as_markdown(hostile, title="# t", command="c")
    assert "a\\|b" in text
    assert "\\*x\\* &lt;i&gt;" in text
    assert "| r r |" in text
    assert "r\\nr" in as_text(hostile)


def places_in(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places_in(inner, (*path, key))


def test_records_changed_anywhere_give_tables_or_a_sentence(tmp_path):
    """Values of other types, sizes and signs in place of any other, or nothing."""
    both = {"a": rival("sgd").untuned(), "b": [rival("adam").with_setting(lr=x) for x in (0.1, 0.2)]}
    compare(both, QUADRATIC, bare(seeds=2), folder=tmp_path)
    values = [None, 0, -1, 1e308, "x", [], {}, True, {"a": 1}, 10**400, "1e999"]
    draw, refused = random.Random(0), 0
    for path in (tmp_path / "comparison.json", tmp_path / "run.json", next((tmp_path / "cells").glob("sgd*"))):
        text = path.read_text()
        for _ in range(100):
            changed = json.loads(text)
            *way, last = draw.choice([p for p in places_in(changed) if p])
            inner = changed
            for key in way:
                inner = inner[key]
            if draw.random() < 0.2:
                del inner[last]
            else:
                inner[last] = draw.choice(values)
            path.write_text(json.dumps(changed).replace('"1e999"', "1e999"))
            try:
                summary(read_comparison(tmp_path)[0])
            except (ValueError, OSError):
                refused += 1
        path.write_text(text)
    assert 20 < refused < 280


def test_a_table_wider_than_a_terminal_continues_below():
    heads = ["", *(f"column {i}" for i in range(5))]
    rows = [[f"row {i}", *(f"{i}{j}".rjust(40, ".") for j in range(5))] for i in range(2)]
    lines = as_text([Section("Wide", columns=heads, rows=rows)]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert [line[:5] for line in lines if line.startswith("row")] == ["row 0", "row 1"] * 3
    for cell in (cell for row in rows for cell in row[1:]):
        assert sum(cell in line for line in lines) == 1

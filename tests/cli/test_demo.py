"""`metamd demo` at its smallest, and the page it writes."""

import json
import re
from importlib import import_module
from types import SimpleNamespace

import pytest

from metamd.cli import main as cli
from metamd.cli.demo import DemoSize, learn_from_two, photographs, run, squares
from metamd.cli.options import Demo
from metamd.comparison.page import write_page
from metamd.comparison.sections import Section

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("pytorch_optimizer")

SMALL = DemoSize(side=6, width=4, steps=20, pieces=2, budget=2, quadratic=8)


def test_the_demo_opens_with_pictures_at_equal_seconds_and_the_seed_decides(tmp_path, capsys):
    run(Demo(tmp_path, 0), SMALL)
    said = capsys.readouterr()
    for text in ("Quadratics", "Photographs: learned here", "MetaMD's mean training loss is", "seconds to target"):
        assert text in said.out
    for label in ("MetaMD", "AdamW, linear decay", "Muon + AdamW, linear decay", "SOAP, linear decay"):
        assert said.out.count(label) >= 2
    assert f"Open {tmp_path / 'report.html'}" in said.out
    page = (tmp_path / "report.html").read_text()
    opening = page.split("<details>")[0]
    captions = re.findall(r"<figcaption>(The same piece|Training loss)", opening)
    assert captions == ["The same piece", "Training loss", "Training loss"]
    wide, narrow = (re.findall(rf'{kind}="data:image/png;base64,', opening) for kind in ("src", "srcset"))
    assert len(wide) == len(narrow) == 3
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing beside it
    results = [json.loads((tmp_path / "demo.json").read_text())]
    run(Demo(tmp_path, 1, json=True), SMALL)
    results.append({k: v for k, v in json.loads(capsys.readouterr().out).items() if k not in ("seed", "page")})
    losses = [[row["value"] for row in found["photographs"]["tables"]["mean_loss"]] for found in results]
    assert losses[0] != losses[1]


def test_something_is_said_before_torch_is_imported_and_after_every_recorded_run(tmp_path, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(cli, "import_module", lambda name: said.append(capsys.readouterr().err) or import_module(name))
    monkeypatch.setattr(run, "__defaults__", (SMALL,))
    assert cli.run(["demo", "--out", str(tmp_path)]) == 0
    assert said == [f"{Demo.opening}\n"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[0] for line in lines[:3]] == ["Recorded", "Recorded", "Learned"]
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(run=lambda options: None))
    assert cli.run(["demo", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_the_file_is_learned_from_one_run_of_two_pieces():
    known = photographs(SMALL)
    assert set(known.held_out().domains).isdisjoint(known.domains)
    assert known.held_out().domains == ("flower 2", "flower 5")
    one, two = (learn_from_two(known, seed) for seed in (0, 1))
    rows = [row["name"] for row in one.header.learned_from["runs"]]
    assert len(set(rows)) == 2
    assert set(rows) < {f"china {i}" for i in range(1, 7)}
    assert one.fingerprint() == learn_from_two(known, 0).fingerprint() != two.fingerprint()


def test_pieces_are_squares_of_the_photographs():
    from sklearn.datasets import load_sample_image

    whole, found = load_sample_image("flower.jpg")[80:336, 128:512], squares(64)
    assert len(found) == 12
    corner = whole[:2, 128:130].reshape(4, 3).mean(0)  # the second piece of the upper row; its pixels are means of 2 x 2
    assert found["flower 2"].shape == (64 * 64, 3)
    assert abs(found["flower 2"][0] - corner).max() <= 0.5


def test_a_page_escapes_what_it_is_given(tmp_path):
    bad = "<script>alert(1)</script>"
    write_page(tmp_path / "p.html", bad, [Section(bad, [bad], [bad], [[bad]])], command=bad)
    assert "<script>" not in (tmp_path / "p.html").read_text()

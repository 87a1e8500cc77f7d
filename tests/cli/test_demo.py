"""`metamd demo` at its smallest, and the page it writes."""

import json
import re

import pytest

from metamd.cli.demo import DemoSize, learn_from_two, rotated_digits, run
from metamd.cli.options import Demo
from metamd.comparison.page import write_page
from metamd.comparison.sections import Section

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("pytorch_optimizer")

SMALL = DemoSize(angles=(15, 60), steps=8, hidden=4, seeds=2, budget=2)


def test_the_demo_opens_with_what_came_out_and_the_seed_decides(tmp_path, capsys):
    run(Demo(tmp_path, 0), SMALL)
    said = capsys.readouterr()
    for text in ("Quadratics", "Rotated digits: learned here", "MetaMD's mean training loss is"):
        assert text in said.out
    for label in ("MetaMD", "AdamW, linear decay", "Muon + AdamW, linear decay", "SOAP, linear decay"):
        assert said.out.count(label) >= 2
    assert said.err.startswith("Recording two runs"), "something is said before anything is trained"
    assert str(tmp_path / "report.html") in said.out
    page = (tmp_path / "report.html").read_text()
    opening = page.split("<details>")[0]
    assert len(re.findall(r'src="data:image/png;base64,', opening)) == 2
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing beside it
    results = [json.loads((tmp_path / "demo.json").read_text())]
    run(Demo(tmp_path, 1, json=True), SMALL)
    results.append({k: v for k, v in json.loads(capsys.readouterr().out).items() if k not in ("seed", "page")})
    losses = [[row["value"] for row in found["digits"]["tables"]["mean_loss"]] for found in results]
    assert losses[0] != losses[1]


def test_the_file_is_learned_from_one_run_of_each_angle():
    known, _ = rotated_digits(SMALL)
    assert set(known.describe()["datasets"]) == {"15 degrees", "60 degrees"}
    one, two = (learn_from_two(known, seed) for seed in (0, 1))
    assert {row["name"] for row in one.header.learned_from["runs"]} == {"15 degrees", "60 degrees"}
    assert one.fingerprint() == learn_from_two(known, 0).fingerprint() != two.fingerprint()


def test_a_page_escapes_what_it_is_given(tmp_path):
    bad = "<script>alert(1)</script>"
    write_page(tmp_path / "p.html", bad, [Section(bad, [bad], [bad], [[bad]])], command=bad)
    assert "<script>" not in (tmp_path / "p.html").read_text()

"""`metamd demo` at its smallest, and the page it writes."""

import json
import re

import pytest
import torch

from metamd import Diagonal, LearnedOptimiser
from metamd.cli.demo import DemoSize, certificate, rotated_digits, run
from metamd.cli.options import Demo
from metamd.comparison.page import write_page
from metamd.comparison.sections import Section

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

SMALL = DemoSize(angles=(15, 60), steps=8, hidden=4, outer_steps=1, tasks_per_step=1, seeds=2, budget=2)


def test_the_demo_prints_tables_and_writes_a_page_and_the_seed_decides(tmp_path, capsys):
    run(Demo(tmp_path, 0), SMALL)
    out = capsys.readouterr().out
    for said in ("Quadratics", "Rotated digits, every task from the same network", "Certificate of the diagonal:"):
        assert said in out
    for label in ("MetaMD, diagonal", "Adam, linear decay", "SGD-M, untuned"):
        assert out.count(label) >= 3
    assert str(tmp_path / "report.html") in out
    page = (tmp_path / "report.html").read_text()
    assert len(re.findall(r'src="data:image/png;base64,', page)) == 3
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing beside it
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {
        f"{name}{ending}.safetensors" for name in ("quadratics", "digits", "digits-adapted") for ending in ("", "-diagonal")
    }
    results = [json.loads((tmp_path / "demo.json").read_text())]
    for seed in (0, 1):
        run(Demo(tmp_path, seed, json=True), SMALL)
        results.append({k: v for k, v in json.loads(capsys.readouterr().out).items() if k not in ("seed", "page")})
    for found in results:
        for comparison in found.values():
            del comparison["tables"]["seconds_to_target"]
    assert results[0] == results[1] != results[2]


def test_the_certificate_holds():
    known, unseen = rotated_digits(SMALL)
    assert set(known.describe()["datasets"]) == {"15 degrees", "60 degrees"}
    task = unseen.build(unseen.sample(torch.Generator().manual_seed(0)))
    metrics = {n: torch.full((1, *x.shape), 2.0) for n, x in task.init().items()}
    found = certificate(task, LearnedOptimiser.from_potential(Diagonal().with_metrics(metrics)))
    assert found["realised"] <= found["bound"]


def test_a_page_escapes_what_it_is_given(tmp_path):
    bad = "<script>alert(1)</script>"
    write_page(tmp_path / "p.html", bad, [Section(bad, [bad], [bad], [[bad]])], command=bad)
    assert "<script>" not in (tmp_path / "p.html").read_text()

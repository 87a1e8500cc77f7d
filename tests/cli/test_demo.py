"""`metamd demo` at its smallest, and the page it writes."""

import json
import math
import re

import pytest
import torch

from metamd import Diagonal, LearnedOptimiser, MetaMD
from metamd.cli.demo import Size, run
from metamd.cli.options import Demo
from metamd.comparison.page import write_page
from metamd.comparison.sections import Section
from metamd.experiments import digits

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

TINY = digits.Plan(
    angles=(15, 30), start_angle=None, steps=8, hidden=4, outer_steps=1, tasks_per_step=1, seeds=2, rates=(0.01, 0.1)
)
SMALL = Size(problems=2, limit=200, outer_steps=1, tasks_per_step=1, plans={"a new <network>": TINY})


def test_the_demo_prints_a_table_and_writes_a_page(tmp_path, capsys):
    assert run(Demo(tmp_path, 0, False), SMALL) == 0
    out = capsys.readouterr().out
    assert "Quadratics" in out
    assert "Certificate of the diagonal:" in out
    assert "MetaMD, diagonal" in out
    assert "Adam, linear decay" in out
    assert str(tmp_path / "report.html") in out
    page = (tmp_path / "report.html").read_text()
    assert "a new &lt;network&gt;" in page
    assert len(re.findall(r'src="data:image/png;base64,', page)) == 2
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing beside it
    assert (tmp_path / "quadratics.safetensors").exists()


def test_the_demo_as_json_is_one_object_and_the_seed_decides(tmp_path, capsys):
    results = []
    for seed in (0, 0, 1):
        assert run(Demo(tmp_path, seed, True), SMALL) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1] != results[2]


def test_rotations():
    pictures = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(digits.rotated(pictures, 0), pictures.flatten(1), atol=1e-6)
    quarter = digits.rotated(pictures, 90).view(3, 8, 8)
    turned = torch.rot90(pictures[:, 0], 1, (1, 2))
    assert torch.allclose(quarter, turned, atol=1e-5)


def test_the_certificate_holds():
    known, unseen = digits.families(TINY, 0)
    assert set(known.describe()["datasets"]) == {"15 degrees", "30 degrees"}
    task = unseen.build(unseen.sample(torch.Generator().manual_seed(0)))
    metrics = {n: torch.full((1, *x.shape), 2.0) for n, x in task.init().items()}
    found = digits.certificate(task, LearnedOptimiser.from_potential(Diagonal().with_metrics(metrics)))
    assert found["realised"] <= found["bound"]


def test_a_run_is_judged_by_the_average_that_its_optimiser_keeps():
    _, unseen = digits.families(TINY, 0)
    task = unseen.build(unseen.sample(torch.Generator().manual_seed(0)))
    metrics = {n: torch.full((1, *x.shape), 2.0) for n, x in task.init().items()}
    learned = LearnedOptimiser.from_potential(Diagonal().with_metrics(metrics))

    def losses(averaging):
        return digits.train(task, lambda named: (MetaMD(named, learned, averaging=averaging), None))

    iterate, average = ({n: x.clone() for n, x in task.init().items()} for _ in range(2))
    by_hand = []
    for t in range(task.steps):
        by_hand.append(float(task.loss(average, task.batch(t))))
        leaves = {n: x.requires_grad_() for n, x in iterate.items()}
        grads = torch.autograd.grad(task.loss(leaves, task.batch(t)), list(leaves.values()))
        iterate = {n: x.detach() - g / math.exp(2) for (n, x), g in zip(leaves.items(), grads, strict=True)}
        average = {n: x.lerp(iterate[n], 10 / (t + 10)) for n, x in average.items()}
    found = losses("tail")
    assert found["losses"] == pytest.approx(by_hand, rel=1e-5)
    assert found["losses"][2:] != pytest.approx(losses("constant")["losses"][2:], rel=1e-3)
    assert found["train_loss"] == pytest.approx(task.evaluate(average, "train").loss, rel=1e-5)


def test_a_page_escapes_what_it_is_given(tmp_path):
    bad = "<script>alert(1)</script>"
    write_page(tmp_path / "p.html", bad, [Section(bad, [bad], [bad], [[bad]])], command=bad)
    assert "<script>" not in (tmp_path / "p.html").read_text()

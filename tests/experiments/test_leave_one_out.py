"""Experiments that hold out one domain after another, from learning to the page."""

import json
import shutil
from dataclasses import replace

import pytest

from metamd import rivals, tasks
from metamd.cli import main as cli
from metamd.comparison.entrants import ENDINGS, PROTOCOLS
from metamd.comparison.page import as_markdown
from metamd.experiments import EXPERIMENTS, find, paper_tables
from metamd.experiments.declare import Entrant, Geometry, Scale
from metamd.experiments.experiment import Experiment, by_domain
from metamd.files.store import unarchive
from metamd.files.usage import Usage
from metamd.potentials import Diagonal
from metamd.tasks.wrapped import Variant
from tests.tiny_datasets import place, tiny_data

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


__all__ = ["place", "tiny_data"]


TINY = Scale(("0", "45"), 60, steps=6, outer_steps=1, tasks_per_step=1, seeds=1, budget=2, rivals=("adam",), usage_tasks=1)


def test_leave_one_out_from_learning_to_the_page(tiny_data, tmp_path, monkeypatch):
    def small(scale, hold_out):
        return tasks.rotated_mnist(
            angles=[0, 45, 60],
            hold_out=float(hold_out),
            model="linear",
            images=scale.images,
            batch_size=20,
            steps=scale.steps,
        )

    diagonal = {
        "diagonal": Geometry(
            Diagonal(), choices={}, entries={"MetaMD": Entrant(), "MetaMD, linear decay": Entrant(Usage(schedule="linear"))}
        )
    }
    tiny = replace(paper_tables.ROTATED_MLP, family=small, geometries=diagonal, scales={"smoke": TINY})
    monkeypatch.setitem(EXPERIMENTS, ("rotated-mnist-mlp", ""), tiny)
    out = tmp_path / "out"
    assert cli.run(["reproduce", "rotated-mnist-mlp", "--scale", "smoke", "--out", str(out)]) == 0
    assert "MetaMD, in the paper | 95.22 | 95.34" in (out / "tables.md").read_text()
    assert "Certificate of the runs" in (out / "report.html").read_text()
    assert json.loads((out / "summary.json").read_text())["rows"][0]["certificates"]["runs"] == 2 * TINY.seeds
    assert {p.name for p in out.glob("learned/*.safetensors")} == {"0-diagonal.safetensors", "45-diagonal.safetensors"}
    unarchive(out)

    before = {p: p.stat().st_mtime_ns for p in out.rglob("cells/*.json")}
    again = tiny.run("smoke", out, 0)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("cells/*.json")} == before, "something was run twice"
    assert again == json.loads((out / "summary.json").read_text())
    assert [r["label"] for r in again["rows"]][:3] == ["MetaMD", "MetaMD, linear decay", "Adam"]
    assert (
        out / "tables.md"
    ).read_text() == f"Protocol: handicap. {PROTOCOLS['handicap']}\n\n{as_markdown(by_domain(again['rows']))}"
    for row in again["rows"]:
        assert set(row["accuracy"]) == {"0", "45"}
    # some domains alone, and everything in one file
    some = ["reproduce", "rotated-mnist-mlp", "--scale", "smoke", "--out", str(out), "--only", "45"]
    assert cli.run(some) == 0
    assert set(json.loads((out / "summary.json").read_text())["rows"][0]["accuracy"]) == {"45"}
    assert (out / "records.jsonl.xz").is_file()
    assert not [*out.glob("domain-*"), *out.glob("cells*")]
    unarchive(out)
    # what is compared in full needs no learned file; with another seed of the comparison it does
    shutil.rmtree(out / "learned")
    assert tiny.run("smoke", out, 0) == again
    assert not (out / "learned").exists()
    more = replace(tiny, scales={"smoke": replace(TINY, seeds=2)}).run("smoke", out, 0)
    assert (out / "learned" / "0-diagonal.safetensors").exists()
    assert more["rows"][0]["mean_loss"] != again["rows"][0]["mean_loss"]
    assert cli.run([*some[:-1], "17"]) == 2
    assert cli.run(["reproduce", "quadratic", "--scale", "smoke", "--out", str(tmp_path / "q"), "--only", "17"]) == 2
    assert not (tmp_path / "q").exists()


def test_repetitions_on_one_domain_have_tasks_of_their_own(tiny_data, tmp_path):
    """Else three trainings that are compared on the same three runs would count as nine."""

    def sides(scale, training, family):
        return {training: Variant(family.held_out(), training)}

    def small(scale, training):
        return tasks.rotated_mnist(
            angles=[0, 45], hold_out=45.0, model="linear", images=60, batch_size=20, steps=scale.steps
        )

    geometries = {"diagonal": Geometry(Diagonal(), {"MetaMD": Entrant(Usage())})}
    scales = {"smoke": replace(TINY, domains=("one", "two"), schedules=("linear",))}
    drawn = {}
    for own in (True, False):
        experiment = Experiment("x", small, geometries, scales, {}, sides=sides, own_tasks=own)
        found, _ = experiment.compared("smoke", tmp_path / str(own), 0)
        drawn[own] = [c.folds[0].entrants["MetaMD"][0].outcomes[0].config for c in found]
    assert drawn[True][0] != drawn[True][1]
    assert drawn[False][0] == drawn[False][1]
    assert find("ablation").own_tasks


@pytest.mark.parametrize("experiment", [paper_tables.ROTATED_MLP, paper_tables.DIVERSE_DIGITS], ids=lambda e: e.name)
def test_declarations_fit_their_families(experiment, tiny_data):
    assert set(experiment.scales) == {"smoke", "cpu", "paper"}
    for scale in experiment.scales.values():
        labels = {rivals.rival(name).title + ENDINGS[s] for name in scale.rivals for s in scale.schedules}
        assert experiment.target in labels
        for published in experiment.published.values():
            assert set(scale.domains) <= set(published)
    family = experiment.family(experiment.scales["smoke"], experiment.scales["smoke"].domains[0])
    assert family.held_out().domains == experiment.scales["smoke"].domains[:1]
    labels = [label for g in experiment.geometries.values() for label in g.entries]
    assert len(labels) == len(set(labels))
    assert labels[0] == "MetaMD"

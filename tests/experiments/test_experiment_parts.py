"""The parts that experiments share: pieces alone, variants of a family, what is carried over, curves and tables."""

import json
import lzma
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from metamd import Diagonal, LearnedOptimiser, MaxDiagonal, MetaMD, compare, learn_start, tasks
from metamd.cli.report import read_comparison, write_report
from metamd.cli.report import tables as tables_of
from metamd.comparison.comparison import Comparison
from metamd.comparison.entrants import Protocol, entrants, handicap
from metamd.comparison.figures import best_schedules, learning_curves
from metamd.comparison.pace import last_tenth, last_tenths, standings
from metamd.comparison.page import as_markdown
from metamd.comparison.training import Measuring
from metamd.comparison.tuning import SEARCHES
from metamd.experiments import EXPERIMENTS, find, folder_name, out_of_distribution, pieces
from metamd.experiments import experiment as leave_one_out
from metamd.experiments.declare import Entrant, Geometry, Scale, alone, learn_geometry, learned_file, learning_settings
from metamd.experiments.experiment import Experiment, failures, screened, unlearned
from metamd.files.learned import load
from metamd.files.store import Records, archive, read_cells, read_json, records_in, unarchive
from metamd.inner.objectives import PaperBound, Reference
from metamd.rivals import learned_rival, rival
from metamd.tasks.base import derive_seed
from metamd.tasks.wrapped import SharedStart, Variant, starting_at
from tests.tiny_datasets import place, tiny_data

__all__ = ["place", "tiny_data"]

ROOT = Path(__file__).parents[2]
WATCH = Measuring(every=5, splits=())
FLAT, STEEP = tasks.quadratic((0.5, 1.0), steps=30), tasks.quadratic((8.0, 10.0), steps=30)


def mixture():
    logs = torch.tensor([[3.0, 4.0], [4.0, 3.0]], dtype=torch.float64)
    return LearnedOptimiser.from_potential(MaxDiagonal(2).with_metrics({"theta": logs}), horizon=30)


def drawn(family, seed=0):
    return family.build(family.sample(torch.Generator().manual_seed(seed)))


# pieces


@pytest.mark.parametrize("piece", [0, 1])
def test_a_piece_alone_takes_the_steps_of_its_diagonal(piece):
    single = alone(mixture(), piece)
    wanted = LearnedOptimiser.from_potential(
        Diagonal().with_metrics({"theta": mixture().potential.log_d["theta"][piece : piece + 1]})
    )
    assert single.fingerprint() == wanted.fingerprint() != alone(mixture(), 1 - piece).fingerprint()
    task = drawn(FLAT)
    theta = torch.nn.Parameter(task.init()["theta"])
    optimiser = MetaMD([("theta", theta)], single)
    before = theta.detach().clone()
    (theta.grad,) = torch.autograd.grad(task.loss({"theta": theta}, task.batch(0)), theta)
    optimiser.step()
    diagonal = mixture().potential.log_d["theta"][piece].exp()
    torch.testing.assert_close(theta.detach(), before - theta.grad / diagonal)


@pytest.mark.parametrize("exact", [True, False])
def test_the_pieces_that_are_followed_are_those_of_the_optimiser(tmp_path, exact, monkeypatch):
    """Window by window of one step, against the record that MetaMD keeps after every step."""
    monkeypatch.setattr(pieces, "WINDOWS", 30)
    mixture().save(tmp_path / "two.safetensors")
    config = FLAT.sample(torch.Generator().manual_seed(3))
    found = pieces.piece_weights(FLAT, config, tmp_path / "two.safetensors", exact=exact)
    task = FLAT.build(config)
    theta = torch.nn.Parameter(task.init()["theta"])
    optimiser = MetaMD([("theta", theta)], mixture(), exact=exact)
    for t in range(30):
        (theta.grad,) = torch.autograd.grad(task.loss({"theta": theta}, task.batch(t)), theta)
        optimiser.step()
    weights = torch.tensor(found["weights"])
    assert torch.allclose(weights.sum(1), torch.ones(30))
    assert found["steps"] == list(range(1, 31))
    assert torch.equal(weights[1:].argmax(1), optimiser.active_pieces[:-1])
    if not exact:
        assert found["several"] == 0
        assert set(weights.flatten().tolist()) <= {0.0, 1.0}


# variants


def test_a_variant_scales_the_start_and_nothing_else():
    far = Variant(FLAT, "far", 3.0)
    config = far.sample(torch.Generator().manual_seed(0))
    task, wanted = far.build(config), FLAT.build(config)
    torch.testing.assert_close(task.init()["theta"], 3 * wanted.init()["theta"])
    assert float(task.loss(wanted.init(), task.batch(0))) == float(wanted.loss(wanted.init(), wanted.batch(0)))
    torch.testing.assert_close(Variant(FLAT, "same").build(config).init(), wanted.init())
    assert (far.describe()["variant"], far.describe()["gain"], far.name) == ("far", 3.0, "far")
    found = compare({"SGD": rival("sgd").with_setting(lr=0.01)}, far, Protocol(seeds=2, measuring=WATCH))
    assert [f.group for f in found.folds] == ["far"]
    with pytest.raises(ValueError, match=r"gain must be positive, got 0\.0"):
        Variant(FLAT, "none", 0.0)


def compared(family):
    entrants = {
        "MetaMD": learned_rival(mixture()).untuned(),
        "SGD": handicap(rival("sgd"), budget=5),
        "SGD, linear decay": handicap(rival("sgd"), "linear", budget=5),
        "SGD, untuned": rival("sgd").untuned(),
    }
    return compare(entrants, family, Protocol(seeds=2, steps=30, measuring=WATCH))


def test_a_rival_is_carried_over_with_the_rate_that_was_best_where_ours_was_learned():
    usual, other = compared(FLAT), compared(STEEP)
    shown = out_of_distribution._shown_candidates(other, usual)
    assert list(shown) == ["MetaMD", "SGD (tuned here)", "SGD (carried over)", "SGD (untuned)"]
    (label,) = best_schedules(usual)
    best = usual.folds[0].best(label, "mean_loss")
    carried, here = shown["SGD (carried over)"], shown["SGD (tuned here)"]
    assert carried.contender == best.contender != here.contender
    mean = [sum(o.mean_loss for o in c.outcomes) for c in (here, carried)]
    assert mean[0] < mean[1]
    assert out_of_distribution._shown_candidates(usual, usual)["SGD (tuned here)"] == best


def test_the_better_schedule_is_shown_and_drawn(tmp_path):
    found = compared(FLAT)
    means = {label: found.values(label, "mean_loss").mean() for label in ("SGD", "SGD, linear decay")}
    assert best_schedules(found) == [min(means, key=means.get)]
    learning_curves(found, ["MetaMD"], tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 5_000


# learning


def small(scale, hold_out):
    raise AssertionError("not asked for")


SIZE = Scale(("a",), None, steps=30, outer_steps=2, tasks_per_step=2)


def test_geometries_with_the_mark_learn_from_the_same_tasks(tmp_path):
    found = {}
    for name, same in {"one": True, "two": True, "three": False}.items():
        geometry = Geometry(Diagonal(), {}, same_tasks=same)
        (cell,) = Experiment("x", small, {name: geometry}, {}, {})._to_learn(Records(tmp_path, {}), SIZE, {"a": FLAT}, 0)
        cell.compute()
        found[name] = load(tmp_path / "learned" / f"a-{name}.safetensors")
    assert found["one"].fingerprint() == found["two"].fingerprint() != found["three"].fingerprint()
    assert found["one"].header.seeds == (derive_seed(0, "learning", "a"),)


def test_learning_that_was_stopped_continues_to_the_same_result(tmp_path):
    def learned(folder, limit=math.inf):
        """Learn, with so many batches before Ctrl-C; the result, and the batches that were drawn."""
        known, drawn = tasks.tabular(steps=4), 0
        build = known.build

        def built(config):
            task = build(config)
            batch = task.batch

            def counted(step):
                nonlocal drawn
                drawn += 1
                if drawn > limit:
                    raise KeyboardInterrupt
                return batch(step)

            task.batch = counted
            return task

        known.build = built
        choices = {"factors": (0.5, 1.0), "metrics": ("learned",), "schedules": ("linear",)}
        size = Scale(("a",), None, tasks_per_step=1, usage_tasks=2)
        geometry = Geometry(Diagonal(), {}, choices)
        folder.mkdir(exist_ok=True)
        try:
            found = learn_geometry(size, known, geometry, folder / "a.safetensors", 0, "x")
        except KeyboardInterrupt:
            return None, drawn
        return {**found, "cost": found["cost"]["gradient_evaluations"]}, drawn

    whole, drawn = learned(tmp_path / "whole")
    for share in (0.2, 0.3, 0.3):
        assert learned(tmp_path / "stopped", share * drawn)[0] is None
    again, rest = learned(tmp_path / "stopped")
    assert again == whole
    assert rest < 0.7 * drawn, "what was finished is not learned again"


def test_a_second_training_goes_on_from_the_first_and_both_are_paid_for(tmp_path):
    seen = []

    def then(learned):
        seen.append(learned)
        return {"potential": Diagonal().with_metrics(dict(learned.potential.log_d)), "outer_steps": 1}

    once = learn_geometry(SIZE, FLAT, Geometry(Diagonal(), {}), tmp_path / "once.safetensors", 0, "x")
    twice = learn_geometry(SIZE, FLAT, Geometry(Diagonal(), {}, then=then), tmp_path / "twice.safetensors", 0, "x")
    assert seen[0].fingerprint() == once["fingerprint"]
    assert twice["cost"]["gradient_evaluations"] > once["cost"]["gradient_evaluations"]


def test_a_learned_start_is_kept_and_paid_for(tmp_path):
    threads = []

    def start(size, family):
        threads.append(torch.get_num_threads())
        return learn_start(family, reference=Reference(lr=0.05), tasks=2)

    def shared(size, domain):
        return starting_at(FLAT, {"theta": torch.ones(2, dtype=torch.float64)})

    experiment = Experiment("x", shared, {}, {}, {}, start=start)
    family, again = (experiment._begun(SIZE, "a", tmp_path) for _ in range(2))
    assert threads == [1], "the second time it is read"
    assert (tmp_path / "learned" / "a-start.safetensors").exists()
    assert family.describe() == again.describe() != shared(SIZE, "a").describe()
    plain = SharedStart(family.family, dict(family.start))
    paid, free = (
        learn_geometry(SIZE, f, Geometry(Diagonal(), {}), tmp_path / f"{n}.safetensors", 0, "x")
        for n, f in {"paid": family, "free": plain}.items()
    )
    assert paid["fingerprint"] == free["fingerprint"]
    more = paid["cost"]["gradient_evaluations"] - free["cost"]["gradient_evaluations"]
    assert more == family.start.cost["gradient_evaluations"] == 2 * 2 * FLAT.steps
    learned = load(tmp_path / "paid.safetensors")
    assert learned.header.cost["gradient_evaluations"] == paid["cost"]["gradient_evaluations"]
    assert set(family.start.tasks) <= set(learned.header.task_hashes)


BAD = Geometry(Diagonal(), {"bad": Entrant()}, options={"objective": PaperBound()})
"""The closed form refuses it."""


def test_what_cannot_be_learned_is_said(tmp_path):
    result = learn_geometry(SIZE, FLAT, BAD, tmp_path / "bad.safetensors", 0, "x")
    assert "ClosedForm minimises Regret" in result["failed"]
    taught = {"learn-a-good": {}, "learn-a-bad": result, "learn-b-good": {}, "learn-b-bad": {}}
    geometries = {"good": Geometry(Diagonal(), {"good": Entrant()}), "bad": BAD}
    assert failures(geometries, taught, ["a", "b"]) == {"bad": f"{result['failed'].rstrip('.')} (1 of 2 trainings)"}


def test_runs_of_what_cannot_be_learned_count_as_failed(tmp_path, monkeypatch):
    """On the domain where it could not, and its runs elsewhere are kept."""
    made = []

    def learned(size, family, geometry, path, seed, name):
        made.append(path.name)
        return learn_geometry(size, family, geometry if path.name != "b-sometimes.safetensors" else BAD, path, seed, name)

    monkeypatch.setattr(leave_one_out, "learn_geometry", learned)
    some = Geometry(Diagonal(), {"sometimes": Entrant()}, same_tasks=True)
    experiment = with_rivals("sgd", geometries={**DIAGONAL, "sometimes": some, "bad": BAD}, domains=("a", "b"))
    (first, second), failed = experiment.compared("tiny", tmp_path, 0)
    assert failed.keys() == {"bad", "sometimes"}
    assert failed["sometimes"].endswith("(1 of 2 trainings)")
    assert failed["bad"].endswith("(2 of 2 trainings)")
    lost = [*first.folds[0].entrants["bad"], *second.folds[0].entrants["bad"], *second.folds[0].entrants["sometimes"]]
    for candidate in lost:
        assert [o.failed for o in candidate.outcomes] == [failed["bad"].rpartition(" (")[0] + "."] * 2
        assert all(math.isinf(o.mean_loss) and o.gradients == 0 for o in candidate.outcomes)
    assert all(math.isfinite(x) for x in first.values("sometimes", "mean_loss"))
    assert all(math.isfinite(x) for x in first.values("MetaMD", "mean_loss"))
    assert math.isnan(first.folds[0].seconds["bad"])
    assert first.folds[0].seconds["MetaMD"] > 0
    again, _ = experiment.compared("tiny", tmp_path, 0)
    assert len(made) == 6, "nothing is learned again"
    assert again[1].labels == second.labels
    nobody = {"bad": unlearned("bad", "metamd-bad", "it diverged.")}
    assert entrants(nobody, [], FLAT, Protocol("paper", budget=2)) == nobody, "there is nothing to tune"


def test_a_geometry_that_does_not_fit_is_replaced(tmp_path):
    (tmp_path / "learned").mkdir()
    mixture().save(learned_file(tmp_path, "a", "narrow"))
    other = LearnedOptimiser.from_potential(Diagonal(tying="role").bind({"theta": torch.zeros(2)}))
    other.save(learned_file(tmp_path, "a", "role"))
    geometries = {
        "narrow": Geometry(Diagonal(), {"MetaMD": Entrant(instead="role")}),
        "role": Geometry(Diagonal(), {"role": Entrant()}),
    }
    experiment = Experiment("x", small, geometries, {}, {})
    taught = {"learn-a-narrow": {}, "learn-a-role": {}}
    ours = dict(experiment._ours(tmp_path, "a", SimpleNamespace(example=lambda: {"theta": torch.zeros(3)}), taught))
    assert ours["MetaMD"].key() == ours["role"].key()
    assert "metamd-role" in ours["MetaMD"].key()
    taught["learn-a-narrow"] = {"failed": "it diverged."}
    assert dict(experiment._ours(tmp_path, "a", FLAT, taught))["MetaMD"].rival.unlearned == "it diverged."


def test_settings_name_a_batch_size_and_a_width_only_where_they_are_unusual():
    assert "batch_size" not in learning_settings(SIZE)
    assert learning_settings(Scale(("a",), None, batch_size=25, width=16))["width"] == 16


def test_the_search_of_a_scale_is_the_papers_and_committed_folders_do_not_have_it():
    assert "search" not in learning_settings(SIZE)
    papers = {name: find(name).scales["paper"] for name, variant in EXPERIMENTS if not variant}
    grids = {n for n, s in papers.items() if getattr(s, "search", "") == "grid"}
    assert grids == {"rotated-mnist-linear", "rotated-mnist-mlp", "pieces", "ablation"}
    assert learning_settings(papers["rotated-mnist-mlp"])["search"] == "grid"
    assert {papers[n].search for n in ("diverse-digits-lenet", "resnet18-cifar10")} == {"bayes"}
    for title in ("sgd", "sgdm", "rmsprop", "adam"):
        grid = rival(title).settings(("lr", "weight_decay"), papers["rotated-mnist-mlp"].budget)
        assert len(grid) == 15, "the published grid, whole"


def test_the_search_of_a_scale_is_used(monkeypatch, tmp_path):
    class StopError(Exception):
        pass

    def entered(ours, rivals, family, protocol, **options):
        assert protocol.search is SEARCHES["grid"]
        raise StopError

    monkeypatch.setattr(leave_one_out, "entrants", entered)
    side = SimpleNamespace(held_out=lambda: FLAT)
    size = replace(SIZE, domains=("a",), protocol="paper", search="grid")
    experiment = Experiment("x", lambda size, domain: side, {"none": Geometry(Diagonal(), {})}, {"tiny": size}, {})
    monkeypatch.setattr(leave_one_out, "learn_geometry", lambda *args: {})
    with pytest.raises(StopError):
        experiment.compared("tiny", tmp_path, 0)


def test_runs_of_a_comparison_may_be_longer_than_those_that_were_learned_on(tiny_data):
    family = tasks.rotated_mnist(angles=[0, 45], hold_out=45.0, model="linear", images=60, batch_size=20, steps=6)
    experiment = Experiment("x", lambda size, domain: family, {}, {}, {})
    for size, steps in ((SIZE, 6), (replace(SIZE, test_steps=9), 9)):
        side = experiment.held_out_sides(size, "45", family)["45"]
        assert side.steps == drawn(side).steps == side.describe()["steps"] == steps
        assert side.domains == ("45",)
    assert family.steps == 6
    for name in ("diverse-digits-lenet", "resnet18-cifar10"):
        paper = find(name).scales["paper"]
        assert (paper.steps, paper.test_steps) == (500, 20_000), "T = 500 is published, and convergence"


# adding to a comparison that is there

DIAGONAL = {"diagonal": Geometry(Diagonal(), {"MetaMD": Entrant()})}


def halves(size, domain):
    family = tasks.quadratic((0.5, 1.0), steps=30)
    family.held_out = lambda: FLAT
    return family


def with_rivals(*rivals, geometries=DIAGONAL, **options):
    size = replace(SIZE, seeds=2, budget=3, measuring=WATCH, schedules=("constant",), rivals=rivals, **options)
    return Experiment("x", halves, geometries, {"tiny": size}, {}, target="SGD")


def test_an_archive_gives_the_same_comparison_and_more_may_be_added(tmp_path):
    experiment = with_rivals("sgd", screen=1)
    (before,), _ = experiment.compared("tiny", tmp_path, 0)
    few = screened(tmp_path / "domain-a")
    assert few
    archive(tmp_path, screened)
    assert not [*tmp_path.rglob("cells*"), *tmp_path.rglob("domain-*")]
    with records_in(tmp_path) as records:
        assert records != tmp_path
        found = Comparison.read(records / "domain-a")
    for label in before.labels:
        assert found.chosen(label, "mean_loss") == before.chosen(label, "mean_loss")
    assert [len(found.folds[0].entrants[x]) for x in before.labels] == [
        len(before.folds[0].entrants[x]) for x in before.labels
    ]
    assert not list(tmp_path.rglob("domain-*"))
    unarchive(tmp_path)
    (again,), _ = experiment.compared("tiny", tmp_path, 0)
    assert again.table("mean_loss") == before.table("mean_loss")
    (more,), _ = with_rivals("sgd", "adam", screen=1).compared("tiny", tmp_path, 0)
    archive(tmp_path, screened)
    unarchive(tmp_path, tmp_path / "copy")
    assert Comparison.read(tmp_path / "copy" / "domain-a").labels == more.labels


def test_unpacked_cells_are_read_replaced_and_forgotten(tmp_path):
    records = Records(tmp_path / "a", {})
    for name in "xyz":
        records.write(name, {"value": name})
    archive(tmp_path)
    unarchive(tmp_path)
    records = Records(tmp_path / "a", {})
    assert records.cell("x", lambda: {"value": 1}) == {"value": "x"}
    records.write("y", {"value": 2})
    records.forget("z")
    assert records.read("y") == {"value": 2}
    assert not records.has("z")
    assert read_cells(tmp_path / "a") == {"x": {"value": "x"}, "y": {"value": 2}}
    (tmp_path / "a" / "run.json").unlink()
    with pytest.raises(ValueError, match=r"holds results, but not run\.json"):
        Records(tmp_path / "a", {})


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "records.jsonl.xz").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"records\.jsonl\.xz' is not the archive of an experiment.*Put it back"):
        unarchive(tmp_path)
    for line in ({"folder": "../elsewhere", "run": {"settings": {}}}, {"folder": "here", "cell": "one", "result": {}}):
        (tmp_path / "records.jsonl.xz").write_bytes(lzma.compress(json.dumps(line).encode()))
        with pytest.raises(ValueError, match="a folder that lies elsewhere, or that has no settings"):
            unarchive(tmp_path)


def test_an_archive_writes_only_into_its_folder(tmp_path):
    lines = [{"folder": "a", "run": {"settings": {}}}, {"folder": "a", "cell": "../../../out", "result": {}}]
    text = "\n".join(json.dumps(line) for line in [*lines, {"folder": "a", "file": "../../out.json", "content": {}}])
    (tmp_path / "records.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    unarchive(tmp_path, tmp_path / "inside")
    assert not list(tmp_path.glob("*.json")) + list(tmp_path.parent.glob("out.json"))
    assert [p.relative_to(tmp_path / "inside").as_posix() for p in tmp_path.rglob("out.json")] == ["a/out.json"]
    assert read_cells(tmp_path / "inside" / "a") == {"out": {}}


@pytest.fixture
def gone(tmp_path):
    """A comparison with SGD, whose learned files were deleted, and its folder."""
    (before,), _ = with_rivals("sgd").compared("tiny", tmp_path, 0)
    shutil.rmtree(tmp_path / "learned")
    return before, tmp_path


def nothing_is_learned(monkeypatch):
    monkeypatch.setattr(leave_one_out, "learn_geometry", lambda *args: pytest.fail("it would be learned again"))


def test_a_rival_joins_and_nothing_else_is_trained(gone, monkeypatch):
    """Ours is learned again, to the same file, and its runs are those that are there."""
    before, folder = gone
    (after,), failed = with_rivals("sgd", "adam").compared("tiny", folder, 0)
    assert after.labels == ["MetaMD", "SGD", "Adam", "SGD, untuned", "Adam, untuned"]
    assert not failed
    (then,), (now,) = before.folds, after.folds
    assert now.entrants["MetaMD"] == then.entrants["MetaMD"]
    assert len(now.entrants["Adam"]) == 3
    cells = [p.name for p in (folder / "domain-a" / "cells").glob("adam-*.json")]
    assert len(cells) == 4 * 2, "three rates and the default on two tasks"
    nothing_is_learned(monkeypatch)
    again, _ = with_rivals("sgd", "adam").compared("tiny", folder, 0)
    assert again[0].folds[0].seconds == now.seconds


def test_a_rival_that_joins_on_some_domains_is_reported_on_these(tmp_path):
    before, after = (
        replace(with_rivals(*rivals, domains=("a", "b")), sides=lambda size, domain, family: {domain: Variant(FLAT, domain)})
        for rivals in (["sgd"], ["sgd", "adam"])
    )
    before.compared("tiny", tmp_path, 0)
    write_report(tmp_path, tmp_path)
    after.compared("tiny", tmp_path, 0, only=("b",))
    with pytest.raises(ValueError, match="differ in Adam"):
        write_report(tmp_path, tmp_path)
    shown, _ = write_report(tmp_path, tmp_path, places=after.places(after.scales["tiny"], tmp_path, ("b",)))
    assert [f.group for f in shown.folds] == ["b"]
    assert "Adam" in (tmp_path / "report.md").read_text()


NOT_RUN = {
    "diverse-digits-lenet-published",
    "resnet18-cifar10-published",
    "images-learned-start",
    "burgers-warm-start",
    "speakers-presidents",
}
"""Experiments without a record yet: docs/paper.md and docs/results/index.md say so, and which command runs them."""

BEGUN = {"rotated-mnist-mlp-published", "rotated-mnist-mlp-seconds"}
"""Records of some domains: `reproduce` trains the others."""

OF_REPORTS = ("report.html", "report.md", "profiles.png", "budgets.png", "certificate-runs.png")
"""What `metamd report` writes beside a record, and is not kept."""

COMMITTED = sorted(path.parent for path in (ROOT / "results").glob("*/records.jsonl.xz"))


def experiment_of(folder):
    about = Records.settings(folder)
    return find(about["experiment"], about.get("variant", "")), about


def test_committed_folders_are_small_and_named_as_their_experiments():
    files = [p for p in (ROOT / "results").rglob("*") if p.is_file() and p.name not in OF_REPORTS]
    assert {p.parent.parent for p in files} == {ROOT / "results"}, "no raw cells"
    assert sum(p.stat().st_size for p in files) < 6e6
    declared = {folder_name(*pair) for pair in EXPERIMENTS} | {"rotated-mnist-linear-paper"}
    assert {p.name for p in COMMITTED} == declared - NOT_RUN
    for folder in COMMITTED:
        experiment, about = experiment_of(folder)
        ending = "" if about["scale"] == "cpu" else f"-{about['scale']}"
        assert folder.name == folder_name(experiment.name, experiment.variant) + ending
        summary = read_json(folder / "summary.json")
        assert (folder / "tables.md").read_text() == as_markdown(tables_of(summary))


@pytest.mark.parametrize(
    "committed", [p for p in COMMITTED if isinstance(experiment_of(p)[0], Experiment)], ids=lambda folder: folder.name
)
def test_committed_records_are_all_that_their_scale_asks_for(committed, tmp_path, monkeypatch):
    """`reproduce` in such a folder computes nothing: every optimiser, setting and seed of the present scale is there."""

    def refused(*args, **options):
        pytest.fail("something would be computed again")

    for computing in ("one_thread", "fill", "compare"):
        monkeypatch.setattr(leave_one_out, computing, refused)
    folder, (experiment, about) = tmp_path / committed.name, experiment_of(committed)
    unarchive(committed, folder)
    whole = about["scale"] == "cpu" and committed.name not in BEGUN
    only = () if whole else [p.name.removeprefix("domain-") for p in folder.glob("domain-*")]
    found, _ = experiment.compared(about["scale"], folder, about["seed"], only=only)
    assert len(found) == len(list(folder.glob("domain-*/comparison.json")))
    assert all(comparison.protocol == about["protocol"] for comparison in found)
    more = {about["scale"]: replace(experiment.scales[about["scale"]], seeds=99)}
    with pytest.raises(pytest.fail.Exception):
        replace(experiment, scales=more).compared(about["scale"], folder, about["seed"], only=only)


def test_the_mlp_of_the_scale_cpu_has_not_converged_and_the_papers_scale_is_longer():
    """The claim of the experiment's docstring, from its committed records."""
    shares = last_tenths(read_comparison(ROOT / "results" / "rotated-mnist-mlp")[0])
    tuned = {label: share for label, share in shares.items() if label.endswith(", linear decay") and "MetaMD" not in label}
    assert {"Adam, linear decay", "SGD-M, linear decay"} <= set(tuned)
    assert max(tuned.values()) < 0.94, "a run that has converged falls by 5 % at most in its last tenth"
    assert max(tuned["Adam, linear decay"], tuned["SGD-M, linear decay"]) < 0.9
    cpu, papers = (find("rotated-mnist-mlp").scales[scale] for scale in ("cpu", "paper"))
    assert (cpu.steps, papers.steps) == (500, 5000)
    assert cpu.images == papers.images == 10_000


@pytest.mark.parametrize(
    ("losses", "share"),
    [([2.0] + [1.0] * 20, 1.0), ([1.0] * 18 + [0.8, 0.8], 0.8), ([math.inf] * 20, None), ([1.0] * 10 + [0.0] * 10, None)],
)
def test_the_last_tenth_of_a_run_over_the_one_before(losses, share):
    assert last_tenth(losses) == share


def test_the_table_says_what_diverged_and_what_learning_cost():
    number = {"value": 0.5, "low": 0.25, "high": 0.75}
    row = {"label": "one", "mean_loss": number, "final_loss": dict.fromkeys(number), "test_error": number}
    text = as_markdown(standings([row | {"learning": {"gradients": 1234.0, "seconds": 2.0}, "failed": {"two": "it broke"}}]))
    assert "| one | 0.5 (0.25 to 0.75) | diverged | 50.00 (25.00 to 75.00) | 1,234 | 2 |" in text
    assert "two could not be learned everywhere, and its runs count as diverged there: it broke." in text

"""The paper's own method by the paper's protocol: grids as printed and beyond, who is tuned how, spreads and shares."""

from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from metamd import Diagonal, MaxDiagonal, load, tasks
from metamd.comparison.compare import compare
from metamd.comparison.comparison import Target
from metamd.comparison.entrants import PRINTED, Protocol, entrants
from metamd.comparison.tuning import SEARCHES, ExtendedGrid, Grid
from metamd.experiments import find
from metamd.experiments.declare import Entrant, Geometry, learned_file
from metamd.experiments.experiment import Experiment
from metamd.experiments.published import ALONE, AS_PUBLISHED, about_file, against_sgd, geometries, sections
from metamd.files.learned import LearnedOptimiser
from metamd.files.store import Records, read_cells
from metamd.files.usage import Usage
from metamd.learning.paper import metric_spread
from metamd.rivals import rival

NAMES = ("lr", "weight_decay")


def test_the_grids_are_those_printed():
    decays = (0.001, 0.0001, 0.0005)
    for name in ("sgd", "sgdm", "rmsprop"):
        assert rival(name).grid == {"lr": (0.1, 0.05, 0.01, 0.005, 0.001), "weight_decay": decays}
    assert rival("adam").grid == {"lr": (0.3, 0.2, 0.1, 0.01, 0.001), "weight_decay": decays}
    for name in ("rotated-mnist-linear", "rotated-mnist-mlp"):
        for scale in ("cpu", "paper"):
            size = find(name, "published").scales[scale]
            assert (size.protocol, size.search) == ("paper", "extended")
            search = SEARCHES[size.search](budget=size.budget)
            assert {n: search.printed(rival(n)) for n in size.rivals} == dict.fromkeys(size.rivals, 15)
    for name in ("diverse-digits-lenet", "resnet18-cifar10"):
        size = find(name, "published").scales["paper"]
        assert (size.protocol, size.search, size.budget) == ("paper", "bayes", 25)


def search_by(score, budget=40, name="sgd"):
    """All trials of an extended grid where a function of (rate, decay) is the score."""
    search, history = ExtendedGrid(budget=budget), []
    while len(history) < budget and (setting := search.propose(rival(name), history)) is not None:
        history.append((setting, score(setting["lr"], setting["weight_decay"])))
    return search, history


def test_an_extended_grid_is_the_printed_one_first_and_ends_where_the_best_is_inside():
    search, history = search_by(lambda lr, decay: abs(lr - 0.7) + abs(decay - 5e-4))
    assert [s for s, _ in history[:15]] == rival("sgd").settings(NAMES, 15)
    beyond = [s["lr"] for s, _ in history[15:]]
    assert beyond == [0.2, 0.4, 0.8, 1.6], "by the ratio of the last two rates, to one beyond the best"
    best = min(history, key=lambda t: t[1])[0]
    assert (best["lr"], best["weight_decay"]) == (0.8, 5e-4)
    assert search.propose(rival("sgd"), history) is None
    assert Grid(budget=40).propose(rival("sgd"), history) is None


def test_an_extended_grid_goes_beyond_both_ends_of_both_and_no_further_than_its_budget():
    _, history = search_by(lambda lr, decay: lr + decay, budget=22)
    assert len(history) == 22
    assert min(s["lr"] for s, _ in history) < 1e-3
    _, inside = search_by(lambda lr, decay: abs(lr - 0.01) + abs(decay - 5e-4))
    assert len(inside) == 15, "nothing more where the best of the printed grid is inside"
    _, flat = search_by(lambda lr, decay: 1.0)
    assert len(flat) <= 17, "a tie beyond an end ends it"


def test_the_setting_of_the_printed_grid_enters_beside_the_extended_one():
    family = tasks.logistic(steps=4)
    protocol = Protocol("paper", seeds=1, budget=17, schedules=("constant",), search=ExtendedGrid)
    found = entrants({}, [rival("sgd")], family, protocol)
    assert list(found) == ["SGD", "SGD" + PRINTED, "SGD, untuned"]
    assert found["SGD" + PRINTED].setting["lr"] in rival("sgd").grid["lr"]
    assert found["SGD"].setting["lr"] >= found["SGD" + PRINTED].setting["lr"]
    plain = entrants({}, [rival("sgd")], family, replace(protocol, search=Grid, budget=15))
    assert list(plain) == ["SGD", "SGD, untuned"]
    assert plain["SGD"].setting == found["SGD" + PRINTED].setting


def saved(path, log_d, **about):
    potential = MaxDiagonal(len(log_d), centre="origin").with_metrics({"theta": torch.tensor(log_d)})
    potential = potential.bind({"theta": torch.zeros(len(log_d[0]))})
    path.parent.mkdir(exist_ok=True)
    LearnedOptimiser.from_potential(potential, usage=Usage(factor=0.2).to_dict(), **about).save(path)
    return load(path)


def test_published_files_are_tuned_as_sgd_is_and_take_the_papers_step(tmp_path):
    saved(learned_file(tmp_path, "a", "published-3"), [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    experiment = Experiment("x", lambda size, domain: None, {"published-3": geometries()["published-3"]}, {}, {})
    side = SimpleNamespace(example=lambda: {"theta": torch.zeros(2)})
    ours = dict(experiment._ours(tmp_path, "a", side, {"learn-a-published-3": {}}))
    assert list(ours) == [AS_PUBLISHED, *ALONE]
    for contender in ours.values():
        assert contender.rival.grid == rival("sgd").grid
        assert contender.rival.space == rival("sgd").space
        assert contender.setting["lr"] == 0.2, "untuned: the rate that the file recommends"
        assert '"exact": false' in contender.rival.identity
    assert len({c.rival.identity for c in ours.values()}) == 4
    other = replace(experiment, geometries={"published-3": Geometry(Diagonal(), {"MetaMD": Entrant()})})
    assert dict(other._ours(tmp_path, "a", side, {"learn-a-published-3": {}}))["MetaMD"].rival.grid != rival("sgd").grid


def test_spreads_by_hand():
    x = {"a": torch.tensor([[0.0, 2.0], [2.0, 4.0]]), "b": torch.tensor([[1.0, 1.0], [3.0, 3.0]])}
    found = metric_spread(MaxDiagonal(2).with_metrics(x))  # log M: (0, 1), (.5, .5); the second piece is the first times e
    assert found["coordinates"] == pytest.approx((0.125) ** 0.5)
    assert found["tensors"] == pytest.approx(0.0)
    assert found["pieces"] == pytest.approx(0.0), "a common factor is no spread"
    y = {"a": torch.tensor([[0.0, 2.0], [2.0, 0.0]]), "b": torch.tensor([[1.0, 1.0], [4.0, 4.0]])}
    assert metric_spread(MaxDiagonal(2).with_metrics(y))["pieces"] > 0.1
    assert metric_spread(MaxDiagonal(2).with_metrics(y))["tensors"] == pytest.approx(0.75)


def test_a_file_without_a_spread_counts_as_sgd(tmp_path):
    tried = [{"k": 0.0, "loss": 0.5}, {"k": 1.0, "loss": None}, {"k": 2.0, "loss": 0.4}, {"k": 3.0, "loss": 0.45}]
    rows = [{"pace": 0.0, "outer_steps": 0, "rate": 0.1, **row} for row in tried]
    choice = {"score": "x", "judged_on": "training", "rule": "y", "tried": rows}
    saved(tmp_path / "f" / "flat.safetensors", [[0.0, 0.1]], choice=choice)
    saved(tmp_path / "f" / "own.safetensors", [[0.0, 1.0]])
    flat, own = (about_file(tmp_path / "f" / f"{n}.safetensors") for n in ("flat", "own"))
    assert (flat["counts as"], own["counts as"]) == ("SGD", "its own")
    assert (flat["SGD"]["loss"], flat["chosen"]["k"], len(flat["tried"])) == (0.5, 2.0, 3)
    assert own["chosen"] == {}


def test_everybody_is_divided_by_tuned_sgd(tmp_path):
    family = tasks.logistic(steps=12)
    protocol = Protocol("paper", seeds=2, budget=16, schedules=("constant",), search=ExtendedGrid, aim=Target("SGD"))
    records = Records(tmp_path / "tuning", {})
    everybody = entrants({}, [rival("sgd"), rival("sgdm")], family, protocol, records=records)
    found = compare(everybody, family, protocol, folder=tmp_path)
    rows = {row["against SGD"]: row for row in against_sgd([tmp_path])}
    assert list(rows) == ["SGD-M"], "no rows for what is untuned or of the grid as printed"
    losses = {label: found.estimate(label, "mean_loss").value for label in ("SGD", "SGD-M")}
    assert rows["SGD-M"]["mean_loss"] == [pytest.approx(losses["SGD-M"] / losses["SGD"])]
    trials = [c for n, c in read_cells(tmp_path / "tuning").items() if n.startswith("trial-") and "runs" in c]
    lowest = {
        name: min(fmean(t["runs"][0]["losses"][1:]) for t in trials if t["runs"][0]["contender"]["rival"] == name)
        for name in ("sgd", "sgdm")
    }
    assert rows["SGD-M"]["quickest"] == [pytest.approx(lowest["sgdm"] / lowest["sgd"])]
    assert lowest["sgdm"] != lowest["sgd"]
    assert rows["SGD-M"]["lr"] == [everybody["SGD-M"].setting["lr"]]
    assert against_sgd([]) == []


def test_the_tables_have_spreads_and_shares():
    row = {"label": "SGD", "accuracy": {"a": 90.0}, "published": {}, "area": 1.0}
    row |= {m: {"value": 1.0} for m in ("mean_loss", "final_loss")} | {"steps_to_target": {"value": 3, "arrived": 1.0}}
    learned = {"learned": "a, N = 3", "coordinates": 0.3, "tensors": 0.2, "pieces": 0.1, "counts as": "its own"}
    learned |= {"SGD": {"loss": 0.5}, "chosen": {"loss": 0.4}, "windows": [[0.5, 0.5, 0.0], [0.1, 0.9, 0.0]]}
    quick = {"against SGD": "x", "mean_loss": [0.5, 2.0], "steps": [0.9, None], "arrived": [5, 6], "quickest": [0.81, 1.0]}
    *_, against, files = sections([row, quick, quick | {"steps": [0.9, 0.4]}, learned])
    assert against.rows == [["x", "1.00", "5 of 6 runs arrive", "0.90"], ["x", "1.00", "0.60 x", "0.90"]]
    shares = ["0.50 / 0.50 / 0.00", "0.30 / 0.70 / 0.00", "0.10 / 0.90 / 0.00"]
    assert files.rows == [["a, N = 3", "0.30", "0.20", "0.10", "its own", *shares, "0.500", "0.400"]]


def test_a_scale_may_leave_geometries_out():
    experiment = find("rotated-mnist-linear", "published")
    assert list(experiment.at("cpu").geometries) == [f"published-{n}" for n in (3, 1, 2)]
    assert experiment.at("paper") is experiment
    assert "kronecker" in experiment.geometries
    assert experiment.published[AS_PUBLISHED]["45"] == 87.54

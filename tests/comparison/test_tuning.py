"""A search spends its budget, comes near what is known to be best, and continues after a stop."""

import math
from dataclasses import replace

import pytest
import torch

from metamd import (
    Bayesian,
    Grid,
    Measuring,
    QuasiRandom,
    tasks,
    tune,
)
from metamd.comparison.training import train_contender
from metamd.comparison.tuning import sobol
from metamd.files.store import Records
from metamd.rivals import RIVALS, Range, Rival, rival
from tests.small_comparisons import BARE
from tests.small_images import task_of


def test_the_first_points_of_bayesian_search_are_five_of_sobols():
    pytest.importorskip("botorch")
    rival, history = RIVALS["adam"], []
    for count in range(7):
        proposed, sobols = (s.propose(rival, history) for s in (Bayesian(seed=3), QuasiRandom(seed=3)))
        assert (proposed == sobols) is (count < 5)
        history.append((proposed, abs(math.log(proposed["lr"] / 0.01))))
    assert (Bayesian().initial, Bayesian().beta) == (5, 4.0)


def valley(optimum):
    """A rival on which only lr and weight_decay matter, and their best values are known."""

    class Step:
        def __init__(self, named, setting):
            self.params, self.setting = [p for _, p in named], setting
            self.param_groups = [{"lr": setting["lr"]}]

        def step(self):
            distance = sum(math.log10(self.setting[n] / v) ** 2 for n, v in optimum.items())
            with torch.no_grad():
                for p in self.params:
                    p.fill_(math.sqrt(distance))

    space = {"lr": Range(1e-5, 0.1), "weight_decay": Range(1e-6, 1e-2)}
    return Rival("valley", "Valley", Step, space, {"lr": 1e-3, "weight_decay": 1e-4})


class Height(tasks.Task):
    """The loss is the square of the parameter."""

    def init(self):
        return {"x": torch.ones(1)}

    def batch(self, step):
        return None

    def loss(self, params, batch):
        return (params["x"] ** 2).sum()

    def evaluate(self, params, split="test"):
        return tasks.Evaluation(float(params["x"] ** 2))


OPTIMUM = {"lr": 3e-3, "weight_decay": 2e-5}


HEIGHT = Height({"family": "height"}, 2)


@pytest.mark.parametrize("search", [Grid(25), QuasiRandom(25), Bayesian(15)], ids=["grid", "quasi-random", "bayesian"])
def test_a_search_comes_near_a_known_optimum_within_its_budget(search):
    found = tune(valley(OPTIMUM), HEIGHT, search, metric="final_loss", measuring=BARE)
    assert len(found.trials) == search.budget
    assert found.gradients == 2 * search.budget
    # the space is 4 x 4 decades: a grid of 5 x 5 comes within half a decade in each coordinate
    assert found.best_so_far[-1] < (0.06 if isinstance(search, Bayesian) else 0.6)
    assert found.best_so_far == sorted(found.best_so_far, reverse=True)
    assert not found.at_edge


def test_bayesian_search_beats_the_points_it_starts_from_in_most_places():
    """The same number of quasi-random points, in three valleys."""
    better = 0
    for i in range(3):
        there = {"lr": 10 ** (-4.5 + i), "weight_decay": 10 ** (-2.5 - i)}
        both = (Bayesian(13), QuasiRandom(13))
        bayes, sobols = (tune(valley(there), HEIGHT, s, metric="final_loss", measuring=BARE).best_so_far for s in both)
        better += bayes[-1] < sobols[-1]
    assert better == 3


def test_grids_are_the_papers_where_they_fit_and_even_elsewhere():
    adam = rival("adam")
    assert len(adam.settings(["lr", "weight_decay"], 25)) == 15
    assert {s["lr"] for s in adam.settings(["lr", "weight_decay"], 25)} == {0.3, 0.2, 0.1, 0.01, 0.001}
    assert {s["lr"] for s in rival("sgd").settings(["lr", "weight_decay"], 25)} == {0.1, 0.05, 0.01, 0.005, 0.001}
    assert len(adam.settings(["lr", "weight_decay"], 10)) == 9  # 3 x 3
    assert len(rival("soap").settings(["lr"], 25)) == 25
    assert len(tune(valley(OPTIMUM), HEIGHT, Grid(budget=3, names=["lr"]), measuring=BARE).trials) == 3


def test_sobol_points_cover_better_than_chance():
    points = sobol(2, 32, 0)
    assert torch.equal(points[:5], sobol(2, 5, 0))
    assert not torch.equal(points, sobol(2, 32, 1))
    for axis in points.T:
        assert set((axis * 16).long().tolist()) == set(range(16))  # one in every sixteenth, which random points never have


def test_failed_trials_count_and_lose():
    family = tasks.quadratic((1.0, 2.0), steps=100)
    sgd = Rival("sgd", "SGD", RIVALS["sgd"].make, {"lr": Range(0.01, 100)}, {"lr": 0.01})
    for search in (Grid(8, ["lr"]), QuasiRandom(8, ["lr"]), Bayesian(8, ["lr"], initial=3)):
        found = tune(sgd, task_of(family), search, measuring=BARE)
        failed = [t for t in found.trials if t.score == math.inf]
        assert len(found.trials) == 8
        assert failed, "the range reaches far into divergence"
        assert found.best.setting["lr"] < 1


def test_a_best_value_at_the_edge_is_said():
    found = tune(valley({"lr": 1.0}), HEIGHT, Grid(budget=9, names=["lr"]), metric="final_loss", measuring=BARE)
    assert found.best.setting["lr"] == 0.1
    assert found.at_edge == ["lr"]
    published = replace(valley({"lr": 1e-3}), grid={"lr": (0.01, 0.02, 0.03)})
    found = tune(published, HEIGHT, Grid(budget=9, names=["lr"]), metric="final_loss", measuring=BARE)
    assert found.best.setting["lr"] == 0.01
    assert found.at_edge == ["lr"], "the end of the grid, in the middle of the space"


def test_trials_are_records_and_a_search_continues(tmp_path):
    def search(budget, folder):
        records = Records(tmp_path / folder, {"what": "search"})
        return tune(valley(OPTIMUM), HEIGHT, Bayesian(budget=8), measuring=BARE, records=records)

    whole = search(8, "a")
    files = sorted((tmp_path / "a" / "cells").iterdir())
    assert len(files) == 8
    for name in [f.name for f in files][5:]:
        (tmp_path / "a" / "cells" / name).unlink()
    kept = files[0].stat().st_mtime_ns
    again = search(8, "a")
    assert [t.contender.setting for t in again.trials] == [t.contender.setting for t in whole.trials]
    assert files[0].stat().st_mtime_ns == kept


def test_bad_searches_are_sentences():
    with pytest.raises(ValueError, match="at least one task"):
        tune(rival("adam"), [])
    with pytest.raises(ValueError, match="budget must be at least 1"):
        tune(rival("adam"), task_of(), QuasiRandom(budget=0))
    with pytest.raises(ValueError, match="metric must be one of mean_loss"):
        tune(rival("adam"), task_of(), metric="accuracy")
    with pytest.raises(ValueError, match="initial >= 1"):
        Bayesian(initial=0)
    with pytest.raises(ValueError, match="every, examples and looks"):
        Measuring(every=0)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        train_contender(task_of(), rival("adam").untuned(), steps=0)

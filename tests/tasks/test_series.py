"""A forecaster per cash machine: missing days, splits, the sMAPE, and the laws of families."""

import numpy as np
import pytest
import torch

from metamd.comparison.entrants import draw_configs
from metamd.experiments import forecasters
from metamd.tasks import cash_machines
from metamd.tasks.series import Forecaster, smape, windows
from tests.loopback import needs_files
from tests.task_laws import LAWS, draw
from tests.tiny_datasets import publish_files, series


@pytest.fixture
def machines(tmp_path, monkeypatch):
    publish_files(tmp_path, monkeypatch, nn5={"nn5.npz": series()})


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_family_keeps_the_laws(law):
    assert law(cash_machines(lags=14, width=3, batch_size=4, steps=5))


@pytest.mark.usefixtures("machines")
def test_sides_are_disjoint_and_tasks_are_judged_by_the_smape():
    family = cash_machines(lags=14, width=3, batch_size=4)
    learned, held = set(family.domains), set(family.held_out().domains)
    assert (len(learned), len(held), len(learned & held)) == (55, 56, 0)
    task = draw(family.held_out())
    assert task.config["series"] in held
    # What a task begins at is the mean of each weekday.
    days, wanted = task.splits["test"]
    begun = smape(days[0].view(2, 7).mean(0).repeat(8), wanted[0])
    assert task.evaluate(task.init()).loss == pytest.approx(begun, rel=1e-6)
    assert task.evaluate(task.init()).measures == {"sMAPE, %": task.evaluate(task.init()).loss}
    assert task.evaluate(task.init(), "train").loss < 0.2


def test_missing_days_are_filled_for_training_and_left_out_of_errors():
    days = np.tile(np.arange(1.0, 8), 40)[:280]
    days[3], days[-5] = np.nan, np.nan
    found = windows(days, 14)
    mean = np.nanmean(days[:168])
    inputs, targets = found["train"]
    assert inputs.shape == (168 - 14 - 56 + 1, 14)
    assert inputs[0, 3] * mean == pytest.approx(4)  # the median of its weekday
    assert torch.equal(targets[0, :14], inputs[14])
    assert found["validation"][1].isnan().sum() == 0
    assert found["test"][1].isnan().nonzero().tolist() == [[0, 51]]
    days_in, wanted = found["test"]
    assert (days_in.shape, wanted.shape) == ((1, 14), (1, 56))
    assert days_in[0, 0] * mean == pytest.approx(1)  # day 210 begins a week
    forecast = wanted[0].nan_to_num(1e6)
    assert smape(forecast, wanted[0]) == 0  # whatever is said of the missing day
    # The test days say nothing to training.
    changed = days.copy()
    changed[-56:] = 100.0
    assert all(torch.equal(a, b) for a, b in zip(windows(changed, 14)["train"], found["train"], strict=True))


def test_the_smape_by_hand():
    wanted = torch.tensor([1.0, 2.0, 0.0, torch.nan])
    # |1 - 3| / 2 = 1, 0, 0 and nothing
    assert smape(torch.tensor([3.0, 2.0, 0.0, 5.0]), wanted) == pytest.approx(100 / 3)
    assert smape(torch.tensor([-1.0, 2.0, 1.0, 5.0]), wanted) == pytest.approx(400 / 3)


def test_a_forecaster_begins_at_the_mean_of_the_weekday():
    week = torch.arange(7.0)
    forecast = Forecaster(14, 3)(torch.cat([week, week + 2])[None])
    assert torch.equal(forecast, (week + 1).repeat(8)[None])


@pytest.mark.usefixtures("machines")
def test_a_comparison_draws_a_task_of_every_series():
    held = cash_machines(lags=14, width=3, batch_size=4, steps=5).held_out()
    found = draw_configs(held, 1, seed=0)
    assert {name: [c["series"] for c in configs] for name, configs in found.items()} == {n: [n] for n in held.domains}


@pytest.mark.parametrize(
    ("wrong", "sentence"), [({"lags": 10}, "whole weeks, from 7 to 364 days, got 10"), ({"width": 0}, "at least 1")]
)
def test_bad_input_is_a_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        cash_machines(**wrong)


@pytest.mark.real_data
def test_the_series_are_those_of_the_competition():
    needs_files("nn5")
    series = cash_machines().series
    assert {days.shape for days in series.values()} == {(791,)}
    assert (len(series), sum(int(np.isnan(days).sum()) for days in series.values())) == (111, 1677)
    # The mean of the weekday over ten weeks: what a task begins at.
    family = cash_machines()
    begun = [family.build({"family": "cash-machines", "series": n, "init_seed": 0, "batch_seed": 0}) for n in family.domains]
    assert np.mean([t.evaluate(t.init(), "validation").loss for t in begun]) == pytest.approx(22.505, abs=0.01)


@pytest.mark.usefixtures("machines")
def test_auto_ets_forecasts_weeks_that_repeat():
    pytest.importorskip("statsforecast", reason="statsforecast is not installed: pip install statsforecast")
    family = cash_machines(lags=14, width=3, batch_size=4)
    found = forecasters.auto_ets(family)["sMAPE"]["AutoETS"]
    naive = [forecasters.naive(forecasters.task_of(family.held_out(), name)) for name in family.held_out().domains]
    # the noise of a day has a standard deviation of 1 beside 20 to 38: a forecast of the mean is off by 3 % of it
    assert 1 < np.mean(found) < 4
    assert np.mean(found) < 0.85 * np.mean(naive), "repeating a week repeats its noise"

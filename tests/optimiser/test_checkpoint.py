"""State of another kind of run: refused where it would be wrong, warned of where it is another run."""

import copy

import pytest
import torch

from metamd import Kronecker, MetaMD, Online
from metamd.potentials.online import KEPT
from tests.helpers import equal_parameters, small_model, train

AVERAGES = [{}, {"momentum": 0.8}, {"averaging": "tail"}]


def online(model, rule="average", rate=0.01, **options):
    return Online(rule, scale={n: 1 / rate for n, _ in model.named_parameters()}, **options)


def run(model, steps=3, **options):
    optimiser = MetaMD(model.named_parameters(), Kronecker(), **options)
    train(model, optimiser, steps)
    return optimiser


@pytest.mark.parametrize("kept", AVERAGES, ids=str)
@pytest.mark.parametrize("other", AVERAGES, ids=str)
def test_averages_of_another_kind_are_refused(kept, other):
    model = small_model()
    optimiser = run(model, **kept, lr=0.05)
    optimiser.eval()
    state = copy.deepcopy(optimiser.state_dict())
    fresh = MetaMD(model.named_parameters(), Kronecker(), **other, lr=0.05)
    if kept.get("averaging") == other.get("averaging"):
        fresh.load_state_dict(state)
        return
    with pytest.raises(ValueError, match=r"is of a run with averaging='.*', but this optimiser has '"):
        fresh.load_state_dict(state)
    train(model, fresh, 1)


def test_averages_that_are_no_longer_there_are_refused():
    model = small_model()
    state = run(model, lr=0.05).state_dict()
    state["param_groups"][0]["averaging"] = "schedule-free"
    with pytest.raises(ValueError, match=r"averaging='schedule-free', which this version no longer has.*Start a new run"):
        MetaMD(model.named_parameters(), Kronecker(), lr=0.05).load_state_dict(state)


def test_another_metric_warns_and_another_rule_begins_anew():
    model = small_model()
    state = run(model, metric=online(model)).state_dict()
    run(model, metric=online(model)).load_state_dict(copy.deepcopy(state))
    cases = [
        ("learned", True),
        (online(model, "sum"), True),
        (online(model, "polar"), True),
        (online(model, "polar", signal=0.99), True),
        (online(model, rate=0.02), False),
    ]
    for metric, anew in cases:
        other = copy.deepcopy(model)
        resumed = MetaMD(other.named_parameters(), Kronecker(), metric=metric)
        with pytest.warns(UserWarning, match="of a run in another metric"):
            resumed.load_state_dict(copy.deepcopy(state))
        assert anew == all(key not in store for store in resumed.state.values() for key in (*KEPT, "counted"))
        train(other, resumed, 1, first=3)
        if anew:
            twin = copy.deepcopy(model)
            train(twin, MetaMD(twin.named_parameters(), Kronecker(), metric=metric), 1, first=3)
            assert equal_parameters(other, twin)


def test_polar_steps_that_have_not_followed_the_signal_begin_anew():
    model = small_model()
    state = run(model, metric=online(model, "polar")).state_dict()
    resumed = MetaMD(model.named_parameters(), Kronecker(), metric=online(model, "polar", signal=0.99))
    with pytest.warns(UserWarning, match="of a run in another metric"):
        resumed.load_state_dict(state)
    assert not any(key in store for store in resumed.state.values() for key in (*KEPT, "counted"))


def test_a_learned_metric_warns_of_an_online_run_and_the_other_way_round():
    model = small_model()
    state = run(model).state_dict()
    with pytest.warns(UserWarning, match="of a run in another metric"):
        run(model, metric=online(model)).load_state_dict(state)


@pytest.mark.parametrize("options", [*AVERAGES, {"metric": "online"}], ids=str)
def test_a_state_from_before_kinds_were_noted_still_loads(options):
    model = small_model(dtype=torch.float64)
    options = {**options, "lr": 0.05} | ({"metric": online(model)} if "metric" in options else {})
    optimiser = run(model, **options)
    old = copy.deepcopy(optimiser.state_dict())
    for group in old["param_groups"]:
        for key in ("metric", "averaging"):
            del group[key]
    for store in old["state"].values():
        store.pop("momentum", None)
    other = copy.deepcopy(model)
    resumed = MetaMD(other.named_parameters(), Kronecker(), **options)
    resumed.load_state_dict(old)
    train(model, optimiser, 3, first=3)
    train(other, resumed, 3, first=3)
    assert equal_parameters(model, other)

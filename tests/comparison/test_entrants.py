"""Who enters a comparison: the protocols tune everybody as they say."""

import json
from dataclasses import replace

import pytest
import torch

from metamd import Comparison, Protocol, compare, tasks
from metamd.cli.report import write_report
from metamd.comparison.entrants import PROTOCOLS, entrants, labels, unscheduled
from metamd.comparison.sections import sections
from metamd.comparison.tuning import Grid, QuasiRandom
from metamd.files.store import Records
from metamd.rivals import Range, rival

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

QUADRATIC = tasks.quadratic((0.5, 4.0), steps=30)


def test_the_papers_protocol_tunes_everybody_alike(tmp_path):
    data = {n: tasks_data(i) for i, n in enumerate("ab")}
    family = tasks.supervised(small_network, data, batch_size=10, steps=10)
    ours = {"ours": rival("sgdm").with_setting("linear", momentum=0.5)}
    records = Records(tmp_path, {})
    rules, options = (
        Protocol("paper", budget=4, schedules=["constant"], search=QuasiRandom),
        {"records": records, "workers": 2},
    )
    found = entrants(ours, [rival("adam"), rival("schedule-free")], family, rules, **options)
    assert list(found) == ["ours", "Adam", "Schedule-Free AdamW", "Adam, untuned", "Schedule-Free AdamW, untuned"]
    trials = sorted(p.stem for p in tmp_path.glob("cells/trial-*.json"))
    assert len(trials) == 3 * 4  # the same budget for all three
    wider = replace(rival("adam"), space={**rival("adam").space, "lr": Range(1e-6, 1.0)})
    entrants({}, [wider], family, rules, **options)
    assert len(list(tmp_path.glob("cells/search-adam-*.json"))) == 2, "another search space is another search"
    assert len(list(tmp_path.glob("cells/trial-adam-*.json"))) == 2 * 4
    assert found["ours"].schedule == "linear"
    assert found["ours"].setting["momentum"] == 0.5  # tuning leaves it as it entered
    searched = [json.loads(p.read_text()) for p in tmp_path.glob("cells/trial-sgdm-*.json")]
    assert {run["contender"]["setting"]["momentum"] for trial in searched for run in trial["runs"]} == {0.5}
    for label in ("ours", "Adam"):
        assert found[label].setting["weight_decay"] > 0
    # what the search cost and how it went is shown, and read again
    compared = compare(found, family, Protocol("paper", seeds=1), folder=tmp_path / "c")
    for comparison in (compared, Comparison.read(tmp_path / "c")):
        assert comparison.folds == compared.folds
        for fold in comparison.folds:
            assert fold.tuning_gradients("Adam") == 4 * 10, "four trials of ten steps on a task"
            assert fold.tuning_gradients("Adam, untuned") == 0
            best = fold.tunings["Adam"].best_so_far
            assert len(best) == 4
            assert list(best) == sorted(best, reverse=True)
    (tmp_path / "page").mkdir()
    by_title = {part.title: part for part in sections(compared, tmp_path / "page")}
    costs = {row[0]: row for row in by_title["Costs"].rows}
    assert costs["Adam"][2] == "40"
    assert float(costs["Adam"][3].replace(",", "")) >= 0
    settings = {row[0]: row for row in by_title["Settings"].rows}
    assert settings["Adam, a"][3] == "4"
    assert (tmp_path / "page" / "budgets.png").exists()
    write_report(tmp_path / "c", tmp_path / "shown")
    assert {p.name for p in (tmp_path / "shown").glob("*.png")} == {"profiles.png", "budgets.png"}


def test_another_search_or_another_momentum_is_another_search(tmp_path):
    """In the same folder; the old one's answer would be a wrong one."""
    family = tasks.supervised(small_network, {"a": tasks_data(0)}, batch_size=10, steps=10)
    records, settings = Records(tmp_path, {}), []
    for search in (QuasiRandom, Grid, QuasiRandom):
        rules = Protocol("paper", budget=4, schedules=["constant"], search=search)
        for momentum in (0.0, 0.9):
            ours = {"ours": rival("sgdm").with_setting(momentum=momentum)}
            found = entrants(ours, [], family, rules, records=records)["ours"]
            fresh = entrants(ours, [], family, rules)["ours"]
            assert found.setting == fresh.setting
            assert found.tuning == fresh.tuning
            settings.append(found.setting["lr"])
    assert settings[:2] == settings[4:]
    assert len(list(tmp_path.glob("cells/search-*.json"))) == 4
    assert len(list(tmp_path.glob("cells/trial-*.json"))) == 4 * 4


def test_the_handicap_tunes_rivals_alone():
    ours, both = {"ours": rival("sgd").untuned()}, [rival("adam"), rival("schedule-free")]
    decayed = entrants(ours, both, QUADRATIC, Protocol("handicap", budget=5, schedules=["linear"]))
    assert list(decayed)[1:3] == ["Adam, linear decay", "Schedule-Free AdamW"], "what has no schedule is tuned all the same"
    assert list(decayed) == labels(ours, both, ["linear"])
    found = entrants(ours, both, QUADRATIC, Protocol("handicap", budget=5))
    assert list(found) == [
        "ours",
        "Adam",
        "Adam, linear decay",
        "Schedule-Free AdamW",
        "Adam, untuned",
        "Schedule-Free AdamW, untuned",
    ]
    assert [len(c) for c in found.values() if isinstance(c, list)] == [5, 5, 5]
    steeper = entrants(ours, both, QUADRATIC, Protocol("handicap", budget=5, schedules=["quadratic"]))
    assert list(steeper)[1:3] == ["Adam, quadratic decay", "Schedule-Free AdamW"]
    assert [c.share(0.5) for c in steeper["Adam, quadratic decay"]] == [0.25] * 5
    assert [unscheduled(label) for label in found][1:4] == ["Adam", "Adam", "Schedule-Free AdamW"]
    with pytest.raises(ValueError, match="protocol must be one of once, handicap, paper"):
        entrants(ours, [], QUADRATIC, Protocol("fair"))
    assert set(PROTOCOLS) == {"once", "handicap", "paper"}
    assert Grid() != QuasiRandom()


def small_network():
    from torch import nn

    return nn.Linear(4, 3)


def tasks_data(seed):

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(60, 4, generator=generator), torch.arange(60) % 3

"""A family from a file of the user's, and dry runs: what is run, refused, said, and left alone."""

import json
import re
from pathlib import Path

import pytest

from metamd import Protocol, compare, load, tasks
from metamd.cli import main as cli
from metamd.cli import report
from metamd.cli.families import own_family
from metamd.comparison.compare import measurable
from metamd.comparison.entrants import entrants
from metamd.rivals import rival

MINE = """
from dataclasses import dataclass

import torch
from beside import CURVATURES
from metamd import tasks


@dataclass
class Sizes:
    steps: int = 30


fixed = tasks.quadratic(CURVATURES, steps=20)


def family(steps=Sizes().steps):
    return tasks.quadratic(CURVATURES, steps=steps)


def needy(path):
    return fixed


def broken():
    return 1 / 0


def number():
    return 3


def regression():
    x = torch.arange(40.0).reshape(20, 2)
    return tasks.supervised(lambda: torch.nn.Linear(2, 1), {"mine": (x, x[:, :1])}, batch_size=5, steps=4)


def two_splits():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    data = {"train": (x, x[:, :1]), "test": (x, x[:, :1])}
    return tasks.supervised(lambda: torch.nn.Linear(2, 1), {"mine": data}, torch.nn.MSELoss(), batch_size=5, steps=4)


def sensors(hold_out="west"):
    x = torch.randn(3, 100, 2, generator=torch.Generator().manual_seed(0))
    data = {name: (rows, (rows[:, 0] > 0).long()) for name, rows in zip(("north", "south", "west"), x, strict=True)}
    net = lambda: torch.nn.Sequential(torch.nn.Linear(2, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    return tasks.supervised(net, data, batch_size=20, steps=4, hold_out=hold_out)


def all_sensors():
    return sensors(())
"""
SHORT = ["--outer-steps", "2", "--tasks", "2"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text("CURVATURES = (0.5, 4.0)\n")
    (tmp_path / "code" / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))  # taken away again afterwards
    return str(tmp_path / "code" / "mine.py")


def test_a_family_of_ones_own_is_learned_certified_and_compared(mine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "run", lambda options: None)  # the page is tested elsewhere
    out = str(tmp_path / "x.safetensors")
    assert cli.run(["train", f"{mine}:family", "--steps", "10", "--out", out, *SHORT]) == 0
    said = capsys.readouterr().out
    assert load(out).header.horizon == 10
    assert f"MetaMD(model.named_parameters(), {out!r}, steps=10)" in said
    place = tmp_path / "c"
    certified = ["certify", out, f"{mine}:family", "--held-out-tasks", "5", "--delta", "0.2"]
    size = ["--protocol", "handicap", "--rivals", "adam", "--budget", "2", "--seeds", "2"]
    compared = ["compare", out, f"{mine}:fixed", *size, "--out", str(place)]
    for command in (certified, compared):
        assert " ".join(command[:2]) in said, "the next commands are named"
    assert cli.run([*compared, "--dry-run"]) == 0
    assert "2 runs of MetaMD and 10 of rivals" in capsys.readouterr().out
    assert not place.exists()
    assert cli.run(certified) == 0
    assert cli.run(compared) == 0
    cells = [p.name.partition("-")[0] for p in (place / "cells").glob("*.json")]
    assert (cells.count("metamd"), cells.count("adam")) == (2, 10), "as many as the dry run said"


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("", [], "names no family in the file. Write my.py:family"),
        (":other", [], "has nothing called 'other'. It has: fixed, family"),
        (":needy", [], "needs the argument 'path'. Give it a default"),
        (":broken", [], "line 26 raised ZeroDivisionError: division by zero"),
        (":number", [], "must be a TaskFamily, or a function that makes one, got int"),
        (":fixed", ["--steps", "5"], "fixed in {mine} takes no --steps. Make it a function"),
        (":family", ["--images", "5"], "family in {mine} takes no --images. Make it a function"),
        (":regression", [], "The loss is cross entropy, whose targets are classes"),
    ],
)
def test_what_is_no_family_is_a_sentence(name, more, message, mine, tmp_path, capsys):
    assert cli.run(["train", mine + name, "--out", str(tmp_path / "x"), *more]) == 2
    said = capsys.readouterr().err
    assert message.format(mine=mine) in said
    assert said.count("\n") == 1


def test_a_line_is_named_by_a_relative_path_too(mine, monkeypatch, capsys):
    monkeypatch.chdir(Path(mine).parent)
    assert cli.run(["train", "mine.py:broken"]) == 2
    assert "mine.py, line 26 raised ZeroDivisionError" in capsys.readouterr().err


def test_datasets_that_a_family_of_ones_own_holds_out_are_compared_and_certified_on(mine, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = str(tmp_path / "x.safetensors")
    assert cli.run(["train", f"{mine}:sensors", "--out", file, "--outer-steps", "2", "--tasks", "2"]) == 0
    assert capsys.readouterr().out.count("hold_out") == 0
    assert load(file).domains == ("north", "south")
    asked = ["--rivals", "sgd", "--gradients", "400", "--seeds", "2", "--out", str(tmp_path / "compared")]
    assert cli.run(["compare", file, f"{mine}:sensors", *asked]) == 0
    said = capsys.readouterr()
    assert "on 1 held-out domain" in said.out
    assert "not held out" not in said.out + said.err
    assert cli.run(["certify", file, f"{mine}:sensors", "--held-out-tasks", "20"]) == 0
    assert "domain: the dataset west" in capsys.readouterr().out
    assert cli.run(["inspect", file]) == 0
    assert "held out: west" in capsys.readouterr().out

    assert cli.run(["train", f"{mine}:all_sensors", "--out", f"{file}2", "--outer-steps", "2", "--tasks", "2"]) == 0
    assert "all its datasets were learned from: see hold_out" in capsys.readouterr().out
    asked = ["--rivals", "sgd", "adam", "--gradients", "400", "--seeds", "1", "--out", str(tmp_path / "seen")]
    assert cli.run(["compare", f"{file}2", f"{mine}:all_sensors", *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("not held out (north, south, west)") == 1, "one sentence for all"
    assert re.search(r"MetaMD; (.+; )?SGD; (.+; )?Adam(; .+)? were trained on these domains: not held out", said)
    assert "(not held out)" not in said, "what is true of every row is in no row"


def test_files_that_are_not_there_or_do_not_parse_are_sentences(tmp_path, capsys):
    assert cli.run(["train", f"{tmp_path / 'none.py'}:family"]) == 2
    assert "there is no file" in capsys.readouterr().err
    (tmp_path / "bad.py").write_text("x = 1\nx = = 2\n")
    assert cli.run(["train", f"{tmp_path / 'bad.py'}:family"]) == 2
    assert "bad.py, line 2 raised SyntaxError" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["fixed", "two_splits"])
def test_a_dry_run_says_what_would_be_done_and_does_nothing(family, mine, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    new, place = tmp_path / "new" / "y.safetensors", f"{mine}:{family}"
    assert cli.run(["train", place, "--dry-run", "--out", str(new)]) == 0
    said = capsys.readouterr().out
    shape = "2 numbers in 1 tensors: theta (2,)" if family == "fixed" else "weight (1, 2), bias (1,)"
    for text in (shape, "steps each", " ms here: about 0:0", "nothing was trained"):
        assert text in said, text
    if family == "fixed":  # the shipped file is of such a model
        file = "quadratic"
        assert cli.run(["certify", file, place, "--dry-run", "--json", "--held-out-tasks", "7"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["shapes"] == {"theta": [2]}
        assert record["plan"].startswith("7 held-out tasks")
        words = ["--rivals", "sgd", "adam", "--seeds", "2", "--budget", "3", "--out", str(tmp_path / "compared")]
        assert cli.run(["compare", file, place, "--protocol", "handicap", "--dry-run", *words]) == 0
        assert "2 runs of MetaMD and 28 of rivals, of 20 steps each" in capsys.readouterr().out  # 2 (2 x 2 x 3 + 2)
    assert [p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(p)] == before


def test_a_split_that_is_missing_is_left_out_of_a_comparison(mine):
    family, sgd = own_family(f"{mine}:two_splits", {}), rival("sgd")
    found = compare({"SGD": sgd.untuned()}, family, Protocol("handicap", seeds=1))
    assert found.settings["measuring"]["splits"] == ["test"]
    assert found.folds[0].entrants["SGD"][0].outcomes[0].ends.keys() == {"test"}
    assert measurable(tasks.tabular(steps=4), Protocol()) == Protocol(), "nothing is left out where all are there"
    with pytest.raises(ValueError, match="tunes for validation accuracy, and 'mine' has only the splits train, test"):
        entrants({}, [sgd], family, Protocol("paper", budget=1))

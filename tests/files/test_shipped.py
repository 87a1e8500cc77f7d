"""The learned optimisers inside the package: intact, small, offline, judged on what was held out, and made to the byte."""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import metamd
from metamd import Comparison, load
from metamd.cli import main as cli
from metamd.files import shipped
from metamd.files.shipped import card, names
from metamd.tasks import models, rotated_mnist
from tests.processes import PATIENCE

ROOT = Path(__file__).parents[2]
NAMES = ("lenet-digits", "mlp-by-role", "quadratic")


def script():
    """benchmarks/ship.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("ship", ROOT / "benchmarks" / "ship.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ship"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def is_intact(found):
    """Whether the file is the one that the card was written for."""
    return sha256((shipped.FOLDER / f"{found.name}.safetensors").read_bytes()).hexdigest() == found.sha256


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, no data, and an empty folder."""

    def refuse(*args, **options):
        raise AssertionError("something asked for the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setenv("METAMD_DATA", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_file_is_small_and_the_one_its_card_is_of(name, offline):
    assert name in names()
    found, learned = card(name), load(name)
    assert found.name == name
    assert (shipped.FOLDER / f"{name}.safetensors").stat().st_size < 1_000_000
    assert is_intact(found)
    assert learned.header.target_loss is not None
    assert all(v.dtype == torch.float32 for k, v in learned.potential.log_d.items()) or name == "quadratic"


def test_the_hash_rejects_a_changed_file(monkeypatch, tmp_path):
    for path in shipped.FOLDER.glob("quadratic.*"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert is_intact(card("quadratic"))
    changed = load("quadratic")
    replace(changed, header=replace(changed.header, seeds=(7,))).save(tmp_path / "quadratic.safetensors")
    assert not is_intact(card("quadratic"))


@pytest.mark.parametrize("name", NAMES)
def test_what_it_was_judged_on_was_held_out(name):
    """The header names the domains it was learned on; the card's are others, and rivals stand beside it."""
    learned = load(name)
    for comparison in card(name).comparisons:
        labels = [row["label"] for row in comparison["rows"]]
        assert labels[0] == "MetaMD"
        assert {"SGD-M", "Adam", "Muon + AdamW"} <= set(labels)
        held = (learned.header.family or {}).get("hold_out")
        assert held not in learned.domains
        assert comparison["where"].startswith(f"held-out domain {held}" if held else "new tasks")


def test_cards_and_page_are_those_of_the_recipes():
    ship = script()
    assert set(ship.RECIPES) == set(NAMES) <= set(names())
    for name, recipe in ship.RECIPES.items():
        found = card(name)
        assert (found.about, found.command) == (recipe.about, f"metamd train {recipe.train}")
        assert [c["command"] for c in found.comparisons] == [f"metamd compare {name} {words}" for words in recipe.compare]
        for command in (found.command, *(c["command"] for c in found.comparisons)):
            cli.parse(command.split()[1:])  # whoever reads it can give it
    page = (ROOT / "docs" / "shipped.md").read_text()
    assert ship.page([card(name) for name in ship.RECIPES]) in page


def test_the_same_settings_give_the_same_bytes(monkeypatch, tmp_path):
    ship = script()
    few = "--rivals sgd --budget 2 --seeds 2"
    recipe = ship.Recipe("Small.", "quadratic --steps 20 --outer-steps 1 --tasks 2", (f"quadratic {few}",))
    made = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        monkeypatch.setattr(shipped, "FOLDER", tmp_path / place)
        found = ship.make("small", recipe, tmp_path / "records" / place)
        made.append(((tmp_path / place / "small.safetensors").read_bytes(), found))
        assert is_intact(found)
        record = Comparison.read(tmp_path / "records" / place / "small-1")
        shown = {row["label"]: row["mean_loss"] for row in found.comparisons[0]["rows"]}
        assert shown == {row["label"]: pytest.approx(row["value"], rel=1e-5) for row in record.table("mean_loss")}
    assert made[0] == made[1]


def test_a_card_of_what_was_trained_on_is_refused(monkeypatch, tmp_path):
    ship = script()
    one = metamd.rivals.rival("sgd")
    seen = {"MetaMD": replace(one, domains=("quadratic",)).untuned(), "SGD": one.untuned()}
    protocol = metamd.Protocol(seeds=1, steps=5, measuring=metamd.Measuring(splits=()))
    with pytest.raises(SystemExit, match="it was trained on"):
        ship.judged(metamd.compare(seen, metamd.tasks.quadratic(), protocol).aiming("SGD"))


# use


def fall(model, name, inputs, steps=30):
    """The loss of a model before and after a few steps with a shipped file, on strokes: ten patterns and noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = (torch.rand(10, 1, 7, 7, generator=generator) < 0.2).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = torch.randint(10, (100,), generator=generator)
    images = (patterns[labels] * torch.rand(100, 1, 28, 28, generator=generator)).reshape(100, *inputs)
    opt, schedule = metamd.prepare(model.named_parameters(), name, steps=steps)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        losses.append(float(loss.detach()))
        loss.backward()
        opt.step()
        schedule.step()
    return losses[0], losses[-1]


def test_lenet_is_trained_by_name(offline):
    first, last = fall(models.LeNet(generator=torch.Generator().manual_seed(0)), "lenet-digits", (1, 28, 28))
    assert last < 0.8 * first


@pytest.mark.parametrize("width", [16, 300])
def test_by_role_another_width_is_trained(width, offline):
    first, last = fall(models.MLP(width=width, generator=torch.Generator().manual_seed(0)), "mlp-by-role", (784,))
    assert last < 0.8 * first
    by_name = metamd.Diagonal().bind(models.MLP(width=20).named_parameters())
    with pytest.raises(ValueError, match="needs a metric of shape"):  # what a geometry that is not learned by role says
        by_name.bind(models.MLP(width=width).named_parameters())


def test_an_unknown_name_is_answered_with_those_there_are(capsys):
    for args in (["inspect", "lenet"], ["compare", "lenet", "quadratic"], ["certify", "lenet", "quadratic"]):
        assert cli.run(args) == 2
        said = capsys.readouterr().err
        assert "no learned optimiser 'lenet' is shipped with metamd" in said
        assert all(name in said for name in NAMES)


def test_inspect_without_a_file_lists_them(capsys, offline):
    assert cli.run(["inspect"]) == 0
    said = capsys.readouterr().out
    assert all(name in said and card(name).about in said for name in NAMES)
    assert cli.run(["inspect", "--json"]) == 0
    assert [c["name"] for c in json.loads(capsys.readouterr().out)["shipped"]] == names()
    assert cli.run(["inspect", "--figure", "x.png"]) == 2
    assert "Name it: metamd inspect FILE --figure PNG." in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_inspect_prints_the_card(name, capsys, offline):
    assert cli.run(["inspect", name]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert card(name).about in said
    assert card(name).command in said
    assert " MetaMD: mean loss" in said
    assert cli.run(["inspect", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["card"]["sha256"] == card(name).sha256


def test_commands_take_the_names(tmp_path, capsys):
    out = tmp_path / "c.safetensors"
    assert cli.run(["certify", "quadratic", "quadratic", "--held-out-tasks", "2"]) == 2
    assert "stays as it is. Pass --out FILE." in capsys.readouterr().err
    assert cli.run(["certify", "quadratic", "quadratic", "--held-out-tasks", "2", "--out", str(out)]) == 0
    assert load(out).header.held_out["certificates"]["quadratic"]["tasks"] == 2
    assert is_intact(card("quadratic"))
    few = ["--protocol", "handicap", "--rivals", "sgd", "--budget", "1", "--seeds", "1", "--steps", "20", "--json"]
    capsys.readouterr()
    assert cli.run(["compare", "quadratic", "quadratic", "--out", str(tmp_path / "o"), *few]) == 0
    assert json.loads(capsys.readouterr().out)["held_out"] == {"quadratic": True}


def test_the_wheel_has_them(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    inside = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    for name in NAMES:
        assert {f"metamd/files/pretrained/{name}.safetensors", f"metamd/files/pretrained/{name}.json"} <= set(inside)


def test_the_width_of_an_mlp_is_an_option_of_its_family():
    family = rotated_mnist(width=32)
    assert family.training.describe()["width"] == 32
    assert family.recipe.make(0).second.weight.shape == (32, 32)
    assert "width" not in rotated_mnist().training.describe()  # records made before stay valid
    with pytest.raises(ValueError, match="'lenet' has none"):
        rotated_mnist(model="lenet", width=3)

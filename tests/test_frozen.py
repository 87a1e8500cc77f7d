"""What an earlier version wrote and did, held against this one: files, runs, states, names, and the default recipe.

The artefacts are in `frozen/`, with the script that wrote them. Only the public API is used here.
"""

import json
import math
import shutil
from dataclasses import astuple

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import metamd
from tests.frozen import problems
from tests.frozen.problems import (
    CASES,
    EVALUATED,
    FILES,
    HERE,
    MIDDLE,
    ONLY_LOADS,
    POLAR,
    RECIPES,
    RUNS,
    SHIPPED,
    SINGLE,
    TOLERANCES,
)

CUT = {"ForwardDiagonal", "ForwardRandom"}
"""Public names that were taken away on purpose."""

EXPECTED = torch.load(HERE / "expected.pt", weights_only=True)
SAID = json.loads((HERE / "expected.json").read_text())
ABOUT = SAID["about"]
NAMES = json.loads((HERE / "surface.json").read_text())["names"]
IN_SINGLE = {"version-1", "version-2", "version-3"}
FILES_AND_USES = [(name, use) for name in FILES for use in ("plain", "recommended")]


def assert_same(found, expected, dtype=torch.float64, case=""):
    """Equal in every tensor, but for rounding."""
    rtol, atol = (POLAR if "polar" in case or case == "network-default" else TOLERANCES)[dtype]
    if case in IN_SINGLE:
        rtol, atol = SINGLE
    assert list(found) == list(expected)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def assert_alike(found, expected, rel=1e-6):
    """Equal in JSON's types, but for rounding."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert sorted(found) == sorted(expected)
        for key in expected:
            assert_alike(found[key], expected[key], rel)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_alike(a, b, rel)
    elif isinstance(expected, float) and math.isfinite(expected):
        assert found == pytest.approx(expected, rel=rel, abs=1e-9)
    else:
        assert found == expected


# names


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_there(module):
    home = metamd
    for part in module.split(".")[1:]:
        home = getattr(home, part)
    gone = [name for name in NAMES[module] if not hasattr(home, name)]
    assert set(gone) <= (CUT if module == "metamd" else set())


# learned files


def run_of(learned, name, use):
    return (problems.plain_end if use == "plain" else problems.recommended_end)(learned, FILES[name])


@pytest.mark.parametrize(("name", "use"), FILES_AND_USES)
def test_a_learned_file_takes_the_same_steps(name, use):
    found = run_of(metamd.load(problems.path_of(name)), name, use)
    assert all(bool(x.isfinite().all()) for x in found.values())
    if use == "plain" or name not in ONLY_LOADS:
        assert_same(found, EXPECTED[use][name], case=name)


@pytest.mark.parametrize("name", FILES)
def test_a_learned_file_says_the_same(name):
    learned = metamd.load(problems.path_of(name))
    assert learned.fingerprint() == ABOUT[name]["fingerprint"]
    assert repr(learned) == ABOUT[name]["repr"]
    assert learned.usage.to_dict() == ABOUT[name]["usage"]
    assert name in ONLY_LOADS or (learned.online and learned.online.to_dict()) == ABOUT[name]["online"]


def taken_apart(path):
    """The tensors of a file and its header, read without metamd."""
    with safe_open(path, "pt") as file:
        return safetensors.torch.load_file(path), json.loads(file.metadata()["metamd"])


@pytest.mark.parametrize("name", FILES)
def test_a_learned_file_is_saved_as_it_was(name, tmp_path):
    path = problems.path_of(name)
    metamd.load(path).save(tmp_path / "again.safetensors")
    (old, header), (new, again) = taken_apart(path), taken_apart(tmp_path / "again.safetensors")
    assert again == header or name in ONLY_LOADS
    assert sorted(new) == sorted(old)
    assert all(new[n].dtype == x.dtype and torch.equal(new[n], x) for n, x in old.items())
    assert_same(run_of(metamd.load(tmp_path / "again.safetensors"), name, "plain"), EXPECTED["plain"][name], case=name)


def test_a_learned_start_is_that_of_the_file():
    path = problems.path_of("quadratic-start")
    learned = metamd.load(path)
    assert torch.equal(learned.start["theta"], taken_apart(path)[0]["start/theta"])


def test_moments_stay_with_what_was_learned_from_runs():
    assert metamd.load(problems.path_of("recorded")).moments is not None
    assert metamd.load(problems.path_of("quadratic-diagonal")).moments is None


@pytest.mark.parametrize("name", SHIPPED)
def test_a_file_that_was_shipped_takes_the_same_steps(name):
    learned = metamd.load(problems.path_of(f"shipped-{name}"))  # those of the package are learned again now and then
    assert learned.fingerprint() == ABOUT[f"shipped {name}"]["fingerprint"]
    assert_same(problems.plain_end(learned, SHIPPED[name]), EXPECTED["shipped"][name])
    assert_same(problems.recommended_end(learned, SHIPPED[name]), EXPECTED["shipped-recommended"][name])


# certificates


def statements(certificate):
    return [[s[k] for k in ("about", "quantity", "bound", "verdict", "confidence")] for s in certificate["statements"]]


def test_held_out_tasks_certify_the_same():
    (written,) = taken_apart(problems.path_of("quadratic-certified"))[1]["held_out"]["certificates"].values()
    learned = metamd.load(problems.path_of("quadratic-certified"))
    stated = metamd.Stated(theory=True, regret_cap=500.0)
    found = metamd.certify(learned, problems.quadratic_family(), held_out_tasks=20, stated=stated).to_dict()
    # Losses have the name of their split since, regrets that of their run, and there are more statements.
    names = {"steps to a loss": "steps to a training loss", "loss after": "training loss after"}
    names |= {"min(regret,": "min(regret of plain mirror descent,", "regret above": "regret of plain mirror descent above"}
    known = {(row[0], row[1]): row for row in statements(found)}
    for about, quantity, *rest in statements(written):
        for old, new in names.items():
            quantity = quantity.replace(old, new)
        assert_alike(known[about, quantity], [about, quantity, *rest])
    assert str(metamd.HeldOutCertificate.from_dict(written))


# recorded runs


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_loads_and_is_saved_as_it_was(name, tmp_path):
    run = metamd.Run.load(problems.path_of(name))
    assert {k: getattr(run, k) for k in ("steps", "tying")} == {k: ABOUT[name][k] for k in ("steps", "tying")}
    assert repr(run) == ABOUT[name]["repr"]
    assert run.fingerprint() == ABOUT[name]["fingerprint"]
    run.save(tmp_path / "again.safetensors")
    assert metamd.Run.load(tmp_path / "again.safetensors").fingerprint() == ABOUT[name]["fingerprint"]


def test_runs_teach_the_same():
    found = problems.learned_from_runs()
    assert set(found) == set(EXPECTED["runs"])
    for name, learned in found.items():
        assert_same({k: v.detach() for k, v in learned.potential.log_d.items()}, EXPECTED["runs"][name])
        about = {"horizon": learned.header.horizon, "gradient_scale": dict(learned.header.gradient_scale)}
        assert_alike(about, ABOUT[f"learn {name}"])


def test_the_command_adds_a_run_to_a_file(tmp_path, capsys):
    file = tmp_path / "file.safetensors"
    shutil.copy(problems.path_of("recorded-column"), file)
    assert problems.command("update", file, problems.path_of("run-parameter"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 2
    learned = metamd.load(file)
    assert_same({k: v.detach() for k, v in learned.potential.log_d.items()}, EXPECTED["runs"]["both"])


# states


def saved(name):
    return torch.load(HERE / f"state-{name}.pt", weights_only=True)


def assert_ended(name, optimiser, params, *, whole=False):
    expected, dtype = saved(name)["end"], CASES[name][1]
    found = problems.ended(name, optimiser, params)
    assert set(found) == set(expected)
    assert torch.equal(found["pieces"], expected["pieces"])
    assert_same(found["params"], expected["params"], dtype, name)
    assert_same(found["evaluated"], expected["evaluated"], dtype, name)
    if "certificate" in expected and whole and name not in problems.EDITED:
        # The earlier certificate was that of mirror descent alone, and began again after a load or an edit.
        bound, realised, _, published, lipschitz, *_ = expected["certificate"].tolist()
        certificate = found["certificate"]
        assert certificate.realised == pytest.approx(realised, rel=1e-6 if "kronecker" in name else 1e-8)
        if certificate.mirror is not None:
            assert astuple(certificate.mirror) == pytest.approx((bound, published, lipschitz), rel=1e-6)
        assert (certificate.mirror is not None) == (name in ("certify", "certify-mixture", "certify-kronecker"))


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_a_saved_state(name):
    where, dtype, build = CASES[name]
    state, (_, grads) = saved(name), problems.problem(where, dtype)
    params = problems.parameters(state["middle"])
    optimiser, schedule = build(params)
    optimiser.load_state_dict(state["optimiser"])
    if schedule is not None:
        schedule.load_state_dict(state["schedule"])
    if name in EVALUATED:
        optimiser.train()
    problems.walk(optimiser, schedule, params, grads, MIDDLE)
    assert_ended(name, optimiser, params)


@pytest.mark.parametrize("name", CASES)
def test_a_whole_run_is_the_same(name):
    where, dtype, build = CASES[name]
    start, grads = problems.problem(where, dtype)
    params = problems.parameters(start)
    optimiser, schedule = build(params)
    problems.walk(optimiser, schedule, params, grads, 0, MIDDLE, edited=name in problems.EDITED)
    if name not in EVALUATED:
        assert_same(problems.values(params), saved(name)["middle"], dtype, name)
    problems.walk(optimiser, schedule, params, grads, MIDDLE)
    assert_ended(name, optimiser, params, whole=True)


# the default recipe


@pytest.mark.parametrize("name", RECIPES)
def test_the_default_recipe_learns_the_same(name):
    learned, losses = problems.recipe(name)
    expected = SAID["recipes"][name]
    assert_alike(learned.usage.to_dict(), expected["usage"])
    assert_alike(learned.online and learned.online.to_dict(), expected["online"])
    assert_alike(losses, expected["losses"])

"""Going on from a state_dict or a copy: hooks, names, versions, and parameters that were changed in between."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from metamd import Kronecker, MetaMD, Online
from metamd.optimiser.checkpoint import EDITED, differs, digests
from tests.helpers import equal_parameters, random_geometry, small_model, train

KINDS = {
    "momentum": {"momentum": 0.8, "lr": 0.05},
    "tail": {"averaging": "tail", "lr": 0.05},
    "online": {"metric": "average", "momentum": 0.5},
    "polar": {"metric": "polar", "averaging": "tail"},
}


def optimiser_of(model, kind, *, backwards=False, geometry=None):
    """An optimiser of a model, its parameters listed from the first or from the last."""
    options = dict(KINDS[kind])
    if "metric" in options:
        options["metric"] = Online(options["metric"], scale={n: 100.0 for n, _ in model.named_parameters()})
    named = list(model.named_parameters())
    return MetaMD(reversed(named) if backwards else named, geometry or Kronecker(), **options)


def by_name(optimiser, state_dict):
    """A load hook that gives every parameter the state of its name, as torch's documentation tells users to write."""
    adapted = copy.deepcopy(optimiser.state_dict())
    theirs, ours = state_dict["param_groups"][0], adapted["param_groups"][0]
    ours.update({k: v for k, v in theirs.items() if k not in ("params", "param_names")})
    place = dict(zip(theirs["param_names"], theirs["params"], strict=True))
    adapted["state"] = {
        i: state_dict["state"][place[name]] for i, name in zip(ours["params"], ours["param_names"], strict=True)
    }
    return adapted


def square_model(seed=0):
    """Layers of one shape, so that a state that goes astray fits."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


def switched_off(optimiser):
    """The state of a run as a checkpoint holds it."""
    kept = io.BytesIO()
    torch.save(optimiser.state_dict(), kept)
    kept.seek(0)
    return torch.load(kept, weights_only=True)


# hooks


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_loads_by_name_finds_every_state(kind):
    """With parameters in another order, and layers of one shape: squares, averages and means follow their names."""
    model = square_model()
    optimiser = optimiser_of(model, kind)
    train(model, optimiser, 5)
    state, other = switched_off(optimiser), copy.deepcopy(model)
    resumed = optimiser_of(other, kind, backwards=True)
    resumed.register_load_state_dict_pre_hook(by_name)
    resumed.load_state_dict(state)
    for name, p in model.named_parameters():
        mine, theirs = resumed.state[other.get_parameter(name)], optimiser.state[p]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine), name
    for m, o in ((model, optimiser), (other, resumed)):
        train(m, o, 5, first=5)
        o.eval()
    for name, p in model.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), p)


def test_a_hook_that_converts_a_foreign_state_is_reached():
    model = small_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, adam, 3)
    optimiser = optimiser_of(model, "momentum")

    def convert(mine, state_dict):
        assert "betas" in state_dict["param_groups"][0]
        converted = mine.state_dict()
        for group in converted["param_groups"]:
            group["lr"] = state_dict["param_groups"][0]["lr"]
        return converted

    optimiser.register_load_state_dict_pre_hook(convert)
    optimiser.load_state_dict(adam.state_dict())
    assert optimiser.param_groups[0]["lr"] == 0.1
    train(model, optimiser, 2)


def test_a_hook_that_changes_the_state_in_place_is_reached():
    model = small_model()
    optimiser = optimiser_of(model, "tail")
    train(model, optimiser, 3)

    def forget(_, state_dict):
        state_dict["state"] = {}

    resumed = optimiser_of(model, "tail")
    resumed.register_load_state_dict_pre_hook(forget)
    resumed.load_state_dict(optimiser.state_dict())
    assert not any(resumed.state.values())


def test_hooks_after_loading_see_all_of_what_was_loaded():
    model = small_model(dtype=torch.bfloat16)
    optimiser = optimiser_of(model, "tail")
    train(model, optimiser, 3)
    seen = []

    def look(mine):
        seen.append((mine._steps, {s["mean"].dtype for s in mine.state.values()}))

    resumed = optimiser_of(model, "tail")
    resumed.register_load_state_dict_post_hook(look)
    resumed.load_state_dict(switched_off(optimiser))
    assert seen == [(3, {torch.float32})]


def test_hooks_are_left_as_they_were():
    model = small_model()
    optimiser = optimiser_of(model, "momentum")
    train(model, optimiser, 1)
    state = optimiser.state_dict()
    before = list(optimiser._optimizer_load_state_dict_pre_hooks)
    optimiser.load_state_dict(state)
    with pytest.raises(ValueError, match="not a state_dict of MetaMD"):
        optimiser.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    assert list(optimiser._optimizer_load_state_dict_pre_hooks) == before


# what is refused, before anything is changed


def broken(state, how):
    """A state_dict that cannot be continued."""
    group = state["param_groups"][0]
    if how == "pieces":
        group["pieces"] = "0xtwo"
    elif how == "step":
        group["step"] = "many"
    elif how == "safeguard":
        group["safeguard"] = torch.zeros(5)
    elif how == "weights":
        group["weights"] = 3
    elif how == "groups":
        state["param_groups"] = "none"
    elif how == "no state":
        del state["state"]
    elif how == "shape":
        state["state"][0]["mean"] = torch.zeros(2)
    elif how == "kind of state":
        state["state"][0]["mean"] = "a text"
    elif how == "order":
        group["param_names"] = group["param_names"][::-1]
    return state


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("pieces", "must be as `state_dict` wrote it"),
        ("step", "must be as `state_dict` wrote it"),
        ("safeguard", "must be as `state_dict` wrote it"),
        ("weights", "must be as `state_dict` wrote it"),
        ("groups", "not a state_dict"),
        ("no state", "not a state_dict"),
        ("shape", r"'0\.weight' has the shape \(8, 5\).*\(2,\)"),
        ("kind of state", "must be a tensor"),
        ("order", "another order.*register_load_state_dict_pre_hook"),
    ],
)
def test_a_broken_state_is_refused_whole(how, sentence):
    model = small_model()
    optimiser = optimiser_of(model, "tail")
    train(model, optimiser, 3)
    twin, mirror = copy.deepcopy((model, optimiser))
    with pytest.raises(ValueError, match=sentence):
        optimiser.load_state_dict(broken(switched_off(optimiser), how))
    train(model, optimiser, 2, first=3)
    train(twin, mirror, 2, first=3)
    for o in (optimiser, mirror):
        o.eval()
    assert equal_parameters(model, twin)


# other versions and names


@pytest.mark.parametrize("missing", ["maximize", "weight_decay", "momentum"])
def test_a_state_of_a_version_without_an_option_loads(missing):
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), Kronecker(), lr=0.05)
    train(model, optimiser, 2)
    state = switched_off(optimiser)
    for group in state["param_groups"]:
        del group[missing]
    other = copy.deepcopy(model)
    resumed = MetaMD(other.named_parameters(), Kronecker(), lr=0.05)
    resumed.load_state_dict(state)
    train(model, optimiser, 2, first=2)
    train(other, resumed, 2, first=2)
    assert equal_parameters(model, other)


def test_the_names_by_which_metrics_are_found_stay():
    """torch lets loaded names replace one's own; metrics are found by them, and the parameters here have these names."""
    model = small_model()
    geometry = random_geometry(model)
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.05)
    train(model, optimiser, 2)
    state = switched_off(optimiser)
    state["param_groups"][0]["param_names"] = ["a", "b", "c", "d"]
    other = copy.deepcopy(model)
    resumed = MetaMD(other.named_parameters(), geometry, lr=0.05)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
    train(model, optimiser, 2, first=2)
    train(other, resumed, 2, first=2)
    assert equal_parameters(model, other)


def test_unnamed_parameters_take_the_names_of_the_state():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), Kronecker(), lr=0.05)
    resumed = MetaMD(model.parameters(), Kronecker(), lr=0.05)
    resumed.load_state_dict(switched_off(optimiser))
    assert resumed.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]


# parameters that somebody changes between loading or copying and the next step


def loaded(model, kind, state):
    other = copy.deepcopy(model)
    optimiser = optimiser_of(other, kind)
    optimiser.load_state_dict(state)
    return other, optimiser


def model_after(model, kind, state):
    """The parameters are loaded after the optimiser, as many training scripts do."""
    other = square_model(seed=5)
    optimiser = optimiser_of(other, kind)
    optimiser.load_state_dict(state)
    other.load_state_dict(model.state_dict())
    return other, optimiser


WAYS = {
    "running": lambda model, optimiser, kind: (model, optimiser),
    "loaded": lambda model, optimiser, kind: loaded(model, kind, switched_off(optimiser)),
    "model loaded last": lambda model, optimiser, kind: model_after(model, kind, switched_off(optimiser)),
    "loaded twice": lambda model, optimiser, kind: loaded(
        model, kind, switched_off(loaded(model, kind, switched_off(optimiser))[1])
    ),
    "copied": lambda model, optimiser, kind: copy.deepcopy((model, optimiser)),
    "pickled": lambda model, optimiser, kind: pickle.loads(pickle.dumps((model, optimiser))),
    "copied after loading": lambda model, optimiser, kind: copy.deepcopy(loaded(model, kind, switched_off(optimiser))),
}
EDITS = {
    "reset": lambda p: p.fill_(100.0),
    "one number": lambda p: p.view(-1)[:1].add_(1.0),
    "turned over": lambda p: p.copy_(p.flip(0)),
}


def run_by(way, kind, edit=None, *, evaluated=False):
    """Five steps, then the run goes on in some way, is edited there, and takes five more."""
    model = square_model()
    optimiser = optimiser_of(model, kind)
    train(model, optimiser, 5)
    model, optimiser = WAYS[way](model, optimiser, kind)
    with torch.no_grad():
        if edit is not None:
            EDITS[edit](model[2].weight)
    if evaluated:
        optimiser.eval()
        optimiser.train()
    train(model, optimiser, 5, first=5)
    optimiser.eval()
    return model


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_an_edit_is_noticed_as_in_an_ordinary_run(way, kind, edit):
    assert equal_parameters(run_by(way, kind, edit), run_by("running", kind, edit))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_without_an_edit_the_run_goes_on(way, kind):
    assert equal_parameters(run_by(way, kind), run_by("running", kind))
    assert not equal_parameters(run_by(way, kind), run_by("running", kind, "reset"))


@pytest.mark.parametrize("edit", [None, "reset"])
@pytest.mark.parametrize("way", WAYS)
def test_an_edit_before_a_change_of_mode_is_noticed(way, edit):
    assert equal_parameters(run_by(way, "tail", edit, evaluated=True), run_by("running", "tail", edit, evaluated=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_was_reset_stays_where_it_was_put(way):
    model = square_model()
    optimiser = optimiser_of(model, "momentum")
    train(model, optimiser, 5)
    model, optimiser = WAYS[way](model, optimiser, "momentum")
    with torch.no_grad():
        model[2].weight.fill_(100.0)
    for _ in range(20):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimiser.step()
    assert (model[2].weight == 100.0).all()


def test_an_edit_before_a_copy_is_noticed_by_the_copy():
    ends = []
    for copied in (False, True):
        model = square_model()
        optimiser = optimiser_of(model, "momentum")
        train(model, optimiser, 5)
        with torch.no_grad():
            model[2].weight.fill_(100.0)
        model, optimiser = copy.deepcopy((model, optimiser)) if copied else (model, optimiser)
        train(model, optimiser, 5, first=5)
        ends.append(model)
    assert equal_parameters(*ends)


def test_an_edit_before_a_state_was_taken_is_noticed_when_it_is_loaded():
    ends = []
    for saved in (False, True):
        model = square_model()
        optimiser = optimiser_of(model, "momentum")
        train(model, optimiser, 5)
        with torch.no_grad():
            model[2].weight.fill_(100.0)
        if saved:
            model, optimiser = loaded(model, "momentum", switched_off(optimiser))
        train(model, optimiser, 5, first=5)
        ends.append(model)
    assert equal_parameters(*ends)


def test_parameters_of_another_precision_are_no_edit():
    """A run that goes on in bfloat16 keeps its average: rounding is not somebody's change."""
    model = square_model()
    optimiser = optimiser_of(model, "momentum")
    train(model, optimiser, 5)
    state, other = switched_off(optimiser), copy.deepcopy(model).bfloat16()
    resumed = optimiser_of(other, "momentum")
    resumed.load_state_dict(state)
    kept = [s["z"].clone() for s in resumed.state.values()]
    for p in other.parameters():
        p.grad = torch.zeros_like(p)
    resumed.step()
    assert all(torch.equal(s["z"], z) for s, z in zip(resumed.state.values(), kept, strict=True))


def test_a_digest_is_of_the_bits_their_places_and_their_type():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    others = {
        "one bit": x.view(torch.int32)
        .bitwise_xor(torch.tensor([[0, 0, 0], [0, 1, 0]], dtype=torch.int32))
        .view(torch.float32),
        "rows": x.flip(0),
        "columns": x.flip(1),
        "turned": x.flip(0).flip(1),
        "the sign of nothing": torch.where(x == 1, -0.0, x),
        "double": x.double(),
    }
    found = digests({"x": x, "same": x.t().contiguous().t(), **others})
    assert found.pop("same") == found["x"]
    assert len(set(found.values())) == len(found)
    assert all(0 <= d < 2**63 for d in found.values())
    assert differs(EDITED, found["x"])
    assert not differs(found["double"], found["x"])
    assert digests({"scalar": torch.tensor(1.0)}) != digests({"scalar": torch.tensor(2.0)})
    assert len(digests({"empty": torch.zeros(0, 3)})) == 1


def test_a_digest_is_the_same_in_chunks(monkeypatch):
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    one = digests({"x": x})
    monkeypatch.setattr("metamd.optimiser.checkpoint._CHUNK", 30)
    assert digests({"x": x}) == one

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metamd
from metamd import LearnedOptimiser, MaxDiagonal
from metamd.files import shipped
from metamd.files.learned import fingerprint
from tests.learned_files import TYINGS, learned, model, same

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("tying", TYINGS)
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_file_gives_back_what_was_saved(tying, pieces, dtype, tmp_path):
    made = learned(pieces, tying, dtype, horizon=7)
    made.save(tmp_path / "x.safetensors")
    found = metamd.load(tmp_path / "x.safetensors")
    assert same(found, made)
    assert not same(found, learned(pieces, tying, dtype, horizon=7, seed=1)), "the comparison must be able to fail"
    assert found.fingerprint() == made.fingerprint()
    assert same(found.bind(model()), found)


KEYS = st.text(min_size=1, max_size=6).map(lambda s: f"layer {s}")
ROWS = st.integers(1, 4).flatmap(
    lambda n: st.dictionaries(KEYS, st.lists(st.integers(0, 3), max_size=3).map(lambda s: (n, *s)), min_size=1, max_size=4)
)


@settings(max_examples=100)
@given(shapes=ROWS, dtype=st.sampled_from(DTYPES), scale=st.floats(-40, 40), family=st.dictionaries(st.text(), st.text()))
def test_any_shapes_and_names_round_trip(tmp_path_factory, shapes, dtype, scale, family):
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    log_d = {
        k: torch.linspace(-1, 1, max(torch.Size(s).numel(), 1))[: torch.Size(s).numel()].reshape(s)
        for k, s in shapes.items()
    }
    pieces = next(iter(shapes.values()))[0]
    potential = MaxDiagonal(pieces, centre="origin").with_metrics({k: (scale * v).to(dtype) for k, v in log_d.items()})
    made = LearnedOptimiser.from_potential(potential, family=family)
    made.save(path)
    assert same(metamd.load(path), made)


def test_saving_twice_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        learned(horizon=7).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_loaded_metrics_can_be_trained_and_leave_the_file_alone(tmp_path):
    learned().save(tmp_path / "x.st")
    before = (tmp_path / "x.st").read_bytes()
    found = metamd.load(tmp_path / "x.st").bind(model())
    found.potential.value({k: v + 1 for k, v in model().items()}).backward()
    with torch.no_grad():
        for value in found.potential.parameters():
            value -= 0.1 * value.grad
    assert (tmp_path / "x.st").read_bytes() == before
    assert found.fingerprint() != metamd.load(tmp_path / "x.st").fingerprint()


def test_a_transposed_or_repeated_metric_is_saved_by_value(tmp_path):
    shared = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).T
    made = LearnedOptimiser.from_potential(MaxDiagonal(2).with_metrics({"a": shared, "b": shared}))
    made.save(tmp_path / "x.st")
    assert same(metamd.load(tmp_path / "x.st"), made)


def test_bind_keeps_the_original_and_follows_tying():
    made = learned(tying="channel", horizon=9)
    bound = made.bind({f"module.{n}": x for n, x in model().items()})
    assert bound.potential.slots
    assert not made.potential.slots
    assert bound.header == made.header
    with pytest.raises(ValueError, match="'other' of shape"):
        made.bind({**model(), "other": torch.zeros(3)})
    lenient = made.bind({**model(), "other": torch.zeros(3)}, missing="euclidean")
    assert lenient.header.tensors["other"] == (2, 3)
    assert lenient.header.horizon == 9


def test_header_and_potential_must_agree():
    made = learned()
    with pytest.raises(ValueError, match="the header says centre = 'origin', but the potential has 'start'"):
        LearnedOptimiser(replace(made.header, centre="origin"), made.potential)
    with pytest.raises(ValueError, match="the header says tensors = "):
        LearnedOptimiser(made.header, made.potential.with_metrics({"other": torch.zeros(2)}))


def test_a_potential_without_metrics_is_refused():
    with pytest.raises(ValueError, match="Bind the potential to a model first"):
        LearnedOptimiser.from_potential(MaxDiagonal(2))


def test_repr_tells_what_matters():
    assert repr(learned(1, "tensor", horizon=5)) == (
        "LearnedOptimiser(max-diagonal, 1 piece, tying='tensor', centre='start', 4 tensors, 4 numbers, horizon=5)"
    )


# what save refuses


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.tensor([[0.0], [float("nan")]]), "must be finite"),
        (torch.tensor([[0.0], [1e3]]), "holds log D = 1000"),
        (torch.zeros(2, 1, dtype=torch.float16), "must be float64, float32 or bfloat16, got torch.float16"),
    ],
)
def test_metrics_that_load_would_refuse_are_not_saved(value, sentence, tmp_path):
    made = LearnedOptimiser.from_potential(MaxDiagonal(2).with_metrics({"x": value}))
    with pytest.raises(ValueError, match=sentence):
        made.save(tmp_path / "x.st")
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_load_would_refuse_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="the header must fit in 8,388,608 bytes"):
        learned(family={"log": "x" * 2**23}).save(tmp_path / "x.st")
    with pytest.raises(ValueError, match="must be JSON in UTF-8"):
        learned(objective="\ud800").save(tmp_path / "x.st")
    assert list(tmp_path.iterdir()) == []


# fingerprint


def test_the_fingerprint_is_of_the_geometry_alone():
    made = learned()
    assert made.fingerprint() == learned(horizon=3, family={"name": "other"}).fingerprint()
    assert made.fingerprint() == fingerprint(made.bind(model()).potential)


def test_the_fingerprint_changes_with_any_part_of_the_geometry():
    made = learned().potential
    others = [
        made.with_metrics(
            {k: torch.nextafter(v, v + 1) if k == "fc2.bias" else v for k, v in made.log_d.items()}, made.offsets
        ),
        made.with_metrics({k: v.double() for k, v in made.log_d.items()}, made.offsets),
        made.with_metrics({f"{k}_": v for k, v in made.log_d.items()}, made.offsets),
        made.with_metrics({k: v[..., None] for k, v in made.log_d.items()}, made.offsets),
        made.with_metrics(made.log_d, made.offsets + 1),
        MaxDiagonal(2, centre="origin").with_metrics(made.log_d, made.offsets),
        MaxDiagonal(2, tying="column").with_metrics(made.log_d, made.offsets),
    ]
    assert len({fingerprint(p) for p in (made, *others)}) == 1 + len(others)


# names and paths


def test_names_are_shipped_files_and_the_rest_is_a_path(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shipped").mkdir()
    learned(horizon=1).save("shipped/digits-1.safetensors")
    learned(horizon=2).save("digits-1")
    assert metamd.load("digits-1").header.horizon == 1
    assert metamd.load("./digits-1").header.horizon == 2
    assert metamd.load(Path("digits-1")).header.horizon == 2
    learned().save("mine.safetensors")
    with pytest.raises(FileNotFoundError, match=r'\(shipped: digits-1\)\. .* write "./mine.safetensors"'):
        metamd.load("mine")


def test_nothing_outside_the_package_answers_to_a_name():
    with pytest.raises(FileNotFoundError, match="no learned optimiser 'no-such' is shipped"):
        metamd.load("no-such")
    with pytest.raises(FileNotFoundError, match=r"there is no file '\.\./no-such'"):
        metamd.load("../no-such")


def test_a_directory_gets_a_sentence(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"it is a directory\. Name the \.safetensors file"):
        metamd.load(tmp_path)
    with pytest.raises(IsADirectoryError, match="Name a file inside it"):
        learned().save(tmp_path)
    with pytest.raises(FileNotFoundError, match="Create it first"):
        learned().save(tmp_path / "no" / "x.st")

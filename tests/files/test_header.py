import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamd import LearnedOptimiser, MaxDiagonal
from metamd.files.header import CHECKS, Header
from tests.learned_files import SHAPES, full_header, learned, model

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_every_field_survives_the_round_trip():
    header = full_header()
    assert all(getattr(header, f.name) not in (None, (), {}) for f in fields(Header)), "the example must fill every field"
    assert Header.from_json(header.to_json()) == header


def test_every_field_has_a_check():
    assert set(CHECKS) == {f.name for f in fields(Header)}


@given(family=st.dictionaries(st.text(max_size=5), JSON), text=st.text(max_size=10), seeds=st.lists(st.integers(-1, 9)))
def test_free_content_survives_the_round_trip(family, text, seeds):
    header = replace(full_header(), family=family, objective=text, seeds=tuple(seeds), held_out=family)
    assert Header.from_json(header.to_json()) == header


@given(name=st.sampled_from([f.name for f in fields(Header)]), value=JSON)
@settings(max_examples=300)
def test_any_value_of_any_field_is_read_or_refused_with_a_sentence(name, value):
    text = json.dumps({**full_header().to_dict(), name: value})
    try:
        header = Header.from_json(text)
    except ValueError as error:
        sentence = str(error)
    else:
        sentence = "It was read."
        assert Header.from_json(header.to_json()) == header
    assert sentence.endswith((".", ".)")), sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schema_version": 7}, r"schema_version must be 1, 2, 3, 4, 5 or 6, .* got 7\. A newer metamd"),
        ({"schema_version": True}, "schema_version must be 1"),
        ({"pieces": 0}, "pieces must be an integer of at least 1, got 0"),
        ({"pieces": True}, "pieces must be an integer"),
        ({"tying": "diagonal"}, "tying must be 'parameter' or .* got 'diagonal'"),
        ({"centre": ["start"]}, "centre must be 'start' or 'origin'"),
        ({"basis": "kronecker"}, "basis must be 'identity' or 'right' or 'both', got 'kronecker'"),
        ({"potential": "entropy"}, "potential must be 'max-diagonal'"),
        ({"tensors": {}}, "tensors must name at least one metric"),
        ({"tensors": {"x": (3, 4)}}, "one row for each of the 2 pieces"),
        ({"tensors": {"x": ()}}, "one row for each of the 2 pieces"),
        ({"tensors": {"x": (2, -1)}}, "shapes of integers >= 0"),
        ({"model": {"fc1.weight": (9, 9)}}, "'fc1.weight' of shape"),
        ({"horizon": 0}, "horizon must be an integer of at least 1"),
        ({"gradient_scale": {"nobody": 1.0}}, "gradient_scale has 'nobody'"),
        ({"gradient_scale": {"fc1.weight": -1.0}}, "gradient_scale must map names to numbers >= 0"),
        ({"cost": {"seconds": "long"}}, "cost must map names to numbers"),
        ({"cost": {"seconds": 10**400}}, "cost must map names to numbers"),
        ({"held_out": {"loss": float("nan")}}, "held_out must hold only texts, finite numbers"),
        ({"family": {"object": object()}}, "family must hold only texts"),
        ({"versions": {"torch": 2}}, "versions must map names to texts"),
        ({"seeds": (1.5,)}, "seeds must be a list of integers"),
        ({"max_norm": 0.0}, "max_norm must be a positive number, got 0.0"),
        ({"target_loss": float("nan")}, "target_loss must be a finite number, got nan"),
        ({"task_hashes": ("0",)}, "task_hashes must be a list of hashes"),
        ({"objective": 3}, r"objective must be a text, got 3\. Pass repr"),
    ],
)
def test_a_wrong_field_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(full_header(), **{"model": {}, "gradient_scale": {}, **changes})


def test_a_header_does_not_change_with_what_it_was_made_of():
    family = {"name": "quadratic", "sizes": [1]}
    header = replace(full_header(), family=family)
    family["sizes"].append(2)
    assert header.family == {"name": "quadratic", "sizes": [1]}


@pytest.mark.parametrize("tying", ["parameter", "channel"])
def test_the_model_is_recorded_where_the_potential_knows_it(tying):
    bound = MaxDiagonal(2, tying=tying).bind(model())
    assert LearnedOptimiser.from_potential(bound).header.model == SHAPES
    assert learned().header.model == {}


CHOICE = {"score": "area under the logarithm of the loss", "judged_on": "train"}


@pytest.mark.parametrize(
    ("name", "value", "version"), [("max_norm", 2.0, 3), ("target_loss", 0.0, 3), ("choice", CHOICE, 4)]
)
def test_a_header_with_fields_of_a_later_version_has_it(name, value, version):
    least = {"pieces": 1, "tying": "parameter", "centre": "start", "tensors": {"x": (1, 2)}}
    old = Header(**least, schema_version=2)
    assert old.schema_version == 2
    assert name not in old.to_dict()
    newer = replace(old, **{name: value})
    assert newer.schema_version == version
    assert newer.to_dict()[name] == value

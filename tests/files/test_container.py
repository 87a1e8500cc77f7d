import json
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as encode

import metamd
from metamd.files import container
from metamd.files import learned as module
from tests.learned_files import Parts, file_bytes, learned, same


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("files") / "learned.safetensors"


@pytest.fixture(scope="module")
def whole(place):
    return file_bytes(place, learned(horizon=100, family={"name": "quadratic"}))


def entry(name, **changes):
    return lambda p: p.table[name].update(changes)


def header(**changes):
    return lambda p: p.header(**changes)


def shift(p):
    """Move the second tensor into the first."""
    _, *rest = sorted((n for n in p.table if n != "__metadata__"), key=lambda n: p.table[n]["data_offsets"])
    width = p.table[rest[0]]["data_offsets"][1] - p.table[rest[0]]["data_offsets"][0]
    p.table[rest[0]]["data_offsets"] = [8, 8 + width]


def no_entry(p):
    del p.table["log_d/fc1.bias"]


def extra(p):
    p.table["log_d/extra"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(p.data), len(p.data) + 4]}
    p.data += bytes(4)


def hide(p):
    p.data += b"hidden"


def nested(p):
    p.table["__metadata__"]["metamd"] = "[" * 100_000


def twice(p):
    text = p.table["__metadata__"]["metamd"]
    p.table["__metadata__"]["metamd"] = '{"horizon": 5, ' + text[1:]


def rename_offsets(p):
    p.table["log_d/offsets"] = p.table.pop("offsets")


def grow_together(p):
    """The last tensor, with sizes that agree with each other and not with the file."""
    name = max((n for n in p.table if n != "__metadata__"), key=lambda n: p.table[n]["data_offsets"])
    begin = p.table[name]["data_offsets"][0]
    p.table[name].update(shape=[2, 2**40], data_offsets=[begin, begin + 2**43])


def reshape(p):
    rows = json.loads(p.table["__metadata__"]["metamd"])["tensors"]
    p.header(tensors=[{**row, "shape": [2, 12]} if row["key"] == "fc1.weight" else row for row in rows])


REFUSED = "safetensors refuses the file"

DAMAGE = {
    "dtype": (entry("offsets", dtype="I64"), "must be stored as F64, F32, BF16, got 'I64'"),
    "half": (entry("log_d/fc1.bias", dtype="F16"), "must be stored as F64, F32, BF16, got 'F16'"),
    "negative shape": (entry("log_d/fc1.bias", shape=[-2, -4]), REFUSED),
    "true as a number": (entry("log_d/fc1.bias", shape=[True, 8]), REFUSED),
    "fraction": (entry("log_d/fc1.bias", shape=[2.0, 4]), REFUSED),
    "overflow": (entry("log_d/fc1.bias", shape=[2**62, 2**62]), REFUSED),
    "wrapping to the right size": (entry("log_d/fc1.bias", shape=[2**62 + 8, 4]), REFUSED),
    "larger than the file": (grow_together, REFUSED),
    "backwards": (entry("log_d/fc1.bias", data_offsets=[32, 0]), REFUSED),
    "overlap": (shift, REFUSED),
    "odd entry": (entry("offsets", note=1), "described by dtype, shape and data_offsets"),
    "hidden bytes": (hide, REFUSED),
    "gap": (no_entry, REFUSED),
    "unannounced tensor": (extra, "holds a tensor 'log_d/extra' that its header does not announce"),
    "renamed tensor": (rename_offsets, "the tensor 'offsets', which its header announces, is missing"),
    "metadata no text": (lambda p: p.table.update(__metadata__={"metamd": 1}), "must map texts to texts"),
    "no header": (lambda p: p.table.update(__metadata__={}), "but no learned optimiser"),
    "other metadata": (lambda p: p.table["__metadata__"].update(format="pt"), "must have the entries 'metamd'"),
    "header no JSON": (lambda p: p.table["__metadata__"].update(metamd="{"), "the header must be JSON"),
    "header no object": (lambda p: p.table["__metadata__"].update(metamd="[]"), "the header must be a JSON object"),
    "deep header": (nested, "the header is nested too deeply"),
    "repeated field": (twice, "the header repeats the key 'horizon'"),
    "NaN in the header": (lambda p: p.table["__metadata__"].update(metamd='{"a": NaN}'), "contains NaN"),
    "schema version": (header(schema_version=99), "schema_version must be 1, 2, 3, 4, 5 or 6, .* got 99"),
    "no version": (header(schema_version=...), "schema_version must be 1, 2, 3, 4, 5 or 6, .* got None"),
    "unknown field": (header(colour="red"), "a field 'colour' that no schema version knows"),
    "missing field": (header(tying=...), "lacks the field 'tying'"),
    "potential": (header(potential="pickle"), "potential must be 'max-diagonal', got 'pickle'"),
    "basis": (header(basis="hadamard"), "basis must be 'identity'"),
    "tying": (header(tying="channel"), "does not match its checksum"),
    "unknown tying": (header(tying="nobody"), "tying must be"),
    "centre": (header(centre="origin"), "does not match its checksum"),
    "pieces": (header(pieces=3), "one row for each of the 3 pieces"),
    "huge pieces": (header(pieces=10**15), "one row for each of the 1000000000000000 pieces"),
    "huge and agreed": (header(pieces=10**15, tensors=[{"key": "x", "shape": [10**15]}]), "'log_d/x', which its header"),
    "tensor twice": (header(tensors=[{"key": "x", "shape": [2]}] * 2), "lists 'x' twice"),
    "other shape": (reshape, r"'log_d/fc1.weight' must have the shape \(2, 12\) its header announces, got \(2, 4, 3\)"),
    "NaN metric": (lambda p: p.numbers("log_d/fc1.bias", [float("nan")]), "'log_d/fc1.bias' must be finite"),
    "infinite metric": (lambda p: p.numbers("log_d/fc1.bias", [float("-inf")]), "must be finite"),
    "overflowing metric": (lambda p: p.numbers("log_d/fc1.bias", [89.0]), "holds log D = 89, .* zero or infinite in F32"),
    "vanishing metric": (lambda p: p.numbers("log_d/fc1.bias", [-200.0]), "holds log D = -200"),
    "infinite step": (lambda p: p.numbers("log_d/fc1.bias", [-90.0]), "holds log D = -90"),
    "NaN offset": (lambda p: p.numbers("offsets", [float("nan")]), "'offsets' must be finite"),
    "other metric": (lambda p: p.numbers("log_d/fc1.bias", [0.125]), "does not match its checksum"),
    "other horizon": (header(horizon=101), "does not match its checksum"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_with_its_sentence(name, place, whole):
    damage, sentence = DAMAGE[name]
    parts = Parts(whole)
    place.write_bytes(parts.join())
    metamd.load(place)  # taking a file apart and joining it changes nothing: what fails below fails for the damage
    damage(parts)
    place.write_bytes(parts.join())
    with pytest.raises(ValueError, match=sentence) as caught:
        metamd.load(place)
    assert str(caught.value).startswith(repr(str(place))[:70])


RAW = {
    "empty": (lambda w: b"", "has 0"),
    "short": (lambda w: w[:7], "has 7"),
    "cut in the header": (lambda w: w[:100], "the file is truncated: its header needs"),
    "cut in the data": (lambda w: w[:-1], REFUSED),
    "huge header": (lambda w: (2**63).to_bytes(8, "little") + w[8:], "would have 9,223,372,036,854,775,808 bytes"),
    "header over the limit": (lambda w: (8 * 2**20 + 1).to_bytes(8, "little") + w[8:], "8,388,609 bytes where at most"),
    "pickle": (lambda w: pickle.dumps({"a": 1}), "starts like one of torch.save or pickle"),
    "no JSON": (lambda w: Parts(w).join("{" + "x" * 50), "the safetensors header must be JSON"),
    "no UTF-8": (lambda w: w[:9] + b"\xff" + w[10:], "the safetensors header must be JSON"),
    "half surrogate": (lambda w: Parts(w).join('{"\\ud800": 1}'), "the safetensors header must be JSON"),
    "no object": (lambda w: Parts(w).join("[1, 2]"), "must be a JSON object"),
    "deep": (lambda w: Parts(w).join('{"a":' * 100_000), "is nested too deeply"),
    "repeated tensor": (lambda w: Parts(w).join('{"a": 1, "a": 2}'), "repeats the key 'a'"),
    "long integer": (lambda w: Parts(w).join('{"a": ' + "9" * 5000 + "}"), "must be JSON"),
    "other safetensors": (lambda w: encode({"weight": torch.zeros(2)}), "but no learned optimiser"),
}


@pytest.mark.parametrize("name", RAW)
def test_other_bytes_are_refused_with_their_sentence(name, place, whole):
    change, sentence = RAW[name]
    place.write_bytes(change(whole))
    with pytest.raises(ValueError, match=sentence):
        metamd.load(place)


def test_a_torch_save_file_is_not_opened(place):
    torch.save({"a": torch.zeros(2)}, place)
    with pytest.raises(ValueError, match=r"starts like one of torch\.save or pickle"):
        metamd.load(place)


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe or a device"):
        metamd.load(tmp_path / "pipe")


def test_a_parser_that_disagrees_is_noticed(place, whole, monkeypatch):
    place.write_bytes(whole)
    monkeypatch.setattr(container, "decode", lambda data: {})
    with pytest.raises(ValueError, match="reads differently in different parsers"):
        metamd.load(place)


def unharmed(place, data, original):
    """The law: a changed file is refused with a ValueError, or it loads to the very same content."""
    place.write_bytes(data)
    try:
        found = metamd.load(place)
    except ValueError:
        return True
    return same(found, original)


def flipped(data, position, bit):
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


def test_a_flip_of_any_byte_is_refused_or_harmless(place, whole):
    place.write_bytes(whole)
    original = metamd.load(place)
    harmed = [i for i in range(len(whole)) if not unharmed(place, flipped(whole, i, i % 8), original)]
    assert harmed == []


@settings(max_examples=300)
@given(data=st.data())
def test_any_edit_is_refused_or_harmless(place, whole, data):
    place.write_bytes(whole)
    original = metamd.load(place)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, min(len(whole), begin + 40)))
    assert unharmed(place, whole[:begin] + data.draw(st.binary(max_size=40)) + whole[end:], original)


@settings(max_examples=200)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused(place, content):
    place.write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ValueError):
        metamd.load(place)


def test_the_law_of_flips_rejects_a_loader_without_a_checksum(place, whole, monkeypatch):
    place.write_bytes(whole)
    original = metamd.load(place)
    stored = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]["metamd.checksum"]
    monkeypatch.setattr(module, "checksum", lambda text, tensors: stored)
    assert unharmed(place, whole, original)
    assert not unharmed(place, flipped(whole, len(whole) - 2, 0), original)


def test_offsets_in_another_type_are_refused(place):
    made = learned()
    tensors = {f"log_d/{k}": v.detach() for k, v in made.potential.log_d.items()}
    metadata = {"metamd": made.header.to_json(), "metamd.checksum": ""}
    place.write_bytes(container.pack({**tensors, "offsets": torch.zeros(2)}, metadata))
    with pytest.raises(ValueError, match=r"'offsets' must be float64, got torch\.float32"):
        metamd.load(place)

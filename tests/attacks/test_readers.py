"""Every reader of files, offered what was tried on them: a refusal is a sentence of at most a thousand characters.

A broken reader would hang, run out of memory or raise something else. `resource` holds the memory, a signal the time: both
are far above what a refusal takes, so that no test measures anything.
"""

import json
import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import metamd
from metamd.cli.main import run
from metamd.data.folders import image_folder
from metamd.data.loading import check_sum, stored
from metamd.files import limits
from metamd.files.learned import LearnedStart
from metamd.files.limits import KEYS_LIMIT, SENTENCE_LIMIT
from metamd.files.store import ARCHIVE, UNPACKED, Journal, Records, read_cells, read_json, unarchive
from metamd.tasks import quadratic, starting_at, supervised
from tests.attacks import writers
from tests.helpers import draws
from tests.processes import PATIENCE

CONTAINERS = {
    "learned": metamd.load,
    "run": metamd.Run.load,
    "start": LearnedStart.load,
    "shared start": lambda path: starting_at(quadratic(), path),
    "checkpoint": lambda path: checkpoint(path),
}


def checkpoint(path):
    """The file as the checkpoint of a meta-training that is to go on."""
    path.rename(path.with_name("checkpoint.safetensors"))
    Journal(path.parent).resume({})


@contextmanager
def bounded(memory=16 * 2**30):
    """Stops a reader that hangs, and one that takes what the file claims."""

    def late(*_):
        raise AssertionError("the reader hangs")

    before, old = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    signal.alarm(int(PATIENCE))
    resource.setrlimit(resource.RLIMIT_AS, (memory, before[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(read, *given):
    """What a reader says when it refuses."""
    with bounded(), pytest.raises((ValueError, OSError)) as caught:
        read(*given)
    said = str(caught.value)
    assert not isinstance(caught.value, UnicodeError | json.JSONDecodeError)
    assert len(said) <= SENTENCE_LIMIT
    assert said.rstrip().endswith((".", "..."))
    return said


@pytest.mark.parametrize("attack", writers.LEARNED)
@pytest.mark.parametrize("reader", CONTAINERS)
def test_a_hostile_container_is_refused(reader, attack, tmp_path):
    path = tmp_path / "file.safetensors"
    writers.LEARNED[attack](path)
    said = refusal(CONTAINERS[reader], path)
    assert str(path.parent) in said or "start must have every trained parameter" in said


@pytest.mark.parametrize("attack", writers.NO_FILES)
@pytest.mark.parametrize("reader", [reader for reader in CONTAINERS if reader != "checkpoint"])
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_what_is_no_file_is_refused_before_it_is_opened(reader, attack, ending, tmp_path):
    path = tmp_path / f"file.{ending}"
    writers.NO_FILES[attack](path)
    refusal(CONTAINERS[reader], path)


def test_a_file_of_100_tensors_is_still_read(tmp_path):
    """The limits are far above what is used: the law rejects a reader that refuses all."""
    params = {f"t{i}": torch.zeros(3) for i in range(100)}
    learned = metamd.LearnedOptimiser.from_potential(metamd.Diagonal().bind(params), family={str(i): i for i in range(1000)})
    learned.save(tmp_path / "f.safetensors")
    assert metamd.load(tmp_path / "f.safetensors").fingerprint() == learned.fingerprint()
    assert KEYS_LIMIT > 100 * 12


def test_the_page_has_every_limit():
    page = (Path(__file__).parents[2] / "docs" / "promises.md").read_text()
    for name, value in vars(limits).items():
        if name.endswith("_LIMIT"):
            for size, unit in ((2**30, " GiB"), (2**20, " MiB"), (1, "")):
                if value % size == 0 and value >= size:
                    assert f"| `{name}` | {value // size:,}{unit}" in page
                    break


# records, journals, archives


@pytest.mark.parametrize("name", [name for name in writers.JSON if name != "a long text"])
def test_a_hostile_record_is_refused(name, tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(writers.JSON[name])
    assert str(path) in refusal(read_json, path)
    (tmp_path / "cells").mkdir()
    path.rename(tmp_path / "cells" / "a.json")
    refusal(read_cells, tmp_path)
    (tmp_path / "cells" / "a.json").rename(tmp_path / UNPACKED)
    assert UNPACKED in refusal(read_cells, tmp_path)


def test_other_settings_are_named_in_few_words(tmp_path):
    (tmp_path / "run.json").write_bytes(writers.JSON["a long text"])
    (tmp_path / "cells").mkdir()
    assert "other settings" in refusal(Records, tmp_path, {"a": 1})


def test_a_record_larger_than_the_limit_is_refused_unread(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(b"{")
    os.truncate(path, 2**37)
    assert "bytes, where at most" in refusal(read_json, path)


@pytest.mark.parametrize("attack", ["a pipe", "a device", "a folder"])
def test_a_store_of_pipes_and_devices_is_refused(attack, tmp_path):
    for name, read in {
        "run.json": lambda: Records(tmp_path, {}),
        "checkpoint.safetensors": lambda: Journal(tmp_path).resume({}),
        "log.jsonl": lambda: Journal(tmp_path).resume({}),
        ARCHIVE: lambda: unarchive(tmp_path),
    }.items():
        path = tmp_path / name
        writers.NO_FILES[attack](path)
        refusal(read)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize("name", writers.JSON)
def test_a_hostile_log_is_cut_to_what_can_be_read(name, tmp_path):
    (tmp_path / "log.jsonl").write_bytes(writers.JSON[name] + b"\n")
    with bounded():
        assert Journal(tmp_path).resume({}) is None
    assert (tmp_path / "log.jsonl").read_bytes() == b""


@pytest.mark.parametrize("attack", writers.ARCHIVES)
def test_a_hostile_archive_is_refused_and_writes_nothing(attack, tmp_path):
    (folder := tmp_path / "in" / "side").mkdir(parents=True)
    writers.ARCHIVES[attack](folder / ARCHIVE)
    before = sorted(tmp_path.rglob("*"))
    assert ARCHIVE in refusal(unarchive, folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("metamd.files.store.ARCHIVE_LIMIT", 2**20)
    writers.archive(tmp_path / ARCHIVE, writers.RUN, {"folder": ".", "cell": "a", "result": {"x": " " * 2**21}})
    assert "unpacks to more than" in refusal(unarchive, tmp_path)


# datasets


@pytest.mark.parametrize("attack", writers.NPZ)
def test_a_broken_npz_file_is_named(attack, tmp_path):
    path = tmp_path / "data.npz"
    writers.NPZ[attack](path)
    with bounded():
        assert str(path) in refusal(supervised, lambda: torch.nn.Linear(2, 1), {"mine": str(path)})
        assert str(path) in refusal(stored, path, "inputs", "targets")


@pytest.mark.parametrize("attack", ["a pipe", "a device", "a folder"])
def test_a_dataset_that_is_no_file_is_refused(attack, tmp_path):
    path = tmp_path / "data.npz"
    writers.NO_FILES[attack](path)
    refusal(supervised, lambda: torch.nn.Linear(2, 1), {"mine": str(path)})
    refusal(stored, path, "inputs", "targets")
    np.savez(tmp_path / "real.npz", images=np.zeros(3))
    writers.NO_FILES[attack](tmp_path / "real.npz.sha256")
    refusal(check_sum, tmp_path / "real.npz")


@pytest.mark.parametrize("attack", ["a pipe", "a device", "a folder"])
def test_an_image_that_is_no_file_is_refused(attack, tmp_path):
    (tmp_path / "cats").mkdir()
    writers.NO_FILES[attack](tmp_path / "cats" / "one.png")
    assert "one.png" in refusal(image_folder, tmp_path)


# the command line


def said(argv, capsys):
    """The code and the one line of a command that refuses."""
    with bounded():
        code = run([str(word) for word in argv])
    err = capsys.readouterr().err
    assert len(err) <= SENTENCE_LIMIT + 20
    assert "Traceback" not in err
    return code, err


FORGED = [
    {"spread": "x"},
    {"spread": [1]},
    {"steps": 1.5},
    {"steps": "x"},
    {"steps": True},
    {"steps": 10**30},
    {"start": "x"},
    {"means": ["a", "b"]},
    {"means": {}},
]


@pytest.mark.parametrize("entry", FORGED, ids=str)
def test_forged_settings_of_a_family_are_refused(entry, tmp_path, capsys):
    path = tmp_path / "file.safetensors"
    writers.forged(path, family={"name": "quadratic", "spread": 0.1, "steps": 5} | entry)
    code, err = said(["certify", path, "quadratic", "--held-out-tasks", 2], capsys)
    assert code == 2
    assert "settings of the family that the file records do not fit it" in err or "steps must be at most" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--held-out-tasks", "1000000000000"], "held_out_tasks must be at most 1,000,000"),
        (["--radius", "1e308"], "radius must be at most 1e100"),
        (["--reach", "1e308"], "reach must be at most 1e100"),
        (["--delta", "nan"], "delta must lie between 0 and 1"),
        (["--seed", "0", "--steps", "2000000000"], "steps must be at most 1,000,000,000"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_numbers_that_overflow_or_never_end_are_refused(words, sentence, tmp_path, capsys):
    code, err = said(["certify", "quadratic", "quadratic", "--out", tmp_path / "out.safetensors", *words], capsys)
    assert code == 2
    assert sentence in err


def test_update_says_what_a_pipe_is(tmp_path, capsys):
    os.mkfifo(tmp_path / "file")
    assert "it is a pipe or a device" in said(["update", tmp_path / "file", tmp_path / "file"], capsys)[1]


@pytest.mark.parametrize("weight", ["1e308", "1e300", "inf", "nan", "0", "-1"])
def test_a_weight_that_overflows_is_refused(weight, tmp_path, capsys):
    path = tmp_path / "file.safetensors"
    path.write_bytes(Path(writers.path_of("recorded-column")).read_bytes())
    code, err = said(["update", path, writers.path_of("run-parameter"), "--weight", weight], capsys)
    assert code == 2
    assert "weights must be" in err


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "FILE"),
        ("update", "FILE", "FILE"),
        ("update", str(writers.path_of("recorded-column")), "FILE", "--out", "OUT"),
        ("certify", "FILE", "quadratic"),
        ("train", "quadratic", "--start", "FILE", "--out", "OUT"),
    ],
    ids=lambda words: " ".join(words[:1]),
)
@pytest.mark.parametrize("attack", ["a pipe", "a device", "a folder"])
def test_commands_do_not_wait_for_what_is_no_file(command, attack, tmp_path, capsys):
    writers.NO_FILES[attack](tmp_path / "file")
    words = [str(tmp_path / {"FILE": "file", "OUT": "out.safetensors"}[w]) if w in ("FILE", "OUT") else w for w in command]
    assert said(words, capsys)[0] == 2


def test_inspect_prints_long_values_and_many_layers_in_short(tmp_path, capsys):
    """Folding all of it took minutes."""
    params = {f"t{i}": torch.zeros(1) for i in range(1500)}
    learned = metamd.LearnedOptimiser.from_potential(
        metamd.Diagonal(centre="origin").bind(params), model={}, family={f"k{i}": i for i in range(50_000)}
    )
    learned.save(tmp_path / "f.safetensors")
    with bounded():
        assert run(["inspect", str(tmp_path / "f.safetensors")]) == 0
    out = capsys.readouterr().out
    assert len(out) < 400_000
    out = " ".join(out.split())
    assert "1,460 rows more" in out
    assert "--json has all" in out


# a fuzz over all readers


def mutations(content: bytes, count: int):
    """The same bytes with a few flipped, cut, doubled or replaced."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        data = bytearray(content)
        kind = generator.integers(5)
        at = int(generator.integers(len(data)))
        if kind == 0:
            data[at] ^= 1 << int(generator.integers(8))
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = data[at : at + 40]
        elif kind == 3:
            data[at : at + 8] = generator.bytes(8)
        else:
            data[at : at + 1] = b'"'
        yield bytes(data)


@pytest.mark.law
@pytest.mark.parametrize("kind", ["learned", "run", "record", "archive", "npz"])
def test_damage_is_a_sentence_or_harmless(kind, tmp_path):
    """Any damage is refused in a sentence, or what is read is what was there: a learned file has a checksum."""
    path = tmp_path / {"record": "run.json", "archive": ARCHIVE, "npz": "data.npz"}.get(kind, "file.safetensors")
    if kind == "archive":
        writers.archive(path, writers.RUN, {"folder": ".", "cell": "a", "result": {"x": 1}})
    elif kind == "npz":
        np.savez(path, inputs=np.ones((30, 2), np.float32), targets=np.arange(30) % 2)
    elif kind == "record":
        path.write_text(json.dumps({"format": 1, "settings": {"a": 1}}))
    else:
        path.write_bytes(Path(writers.path_of("quadratic-diagonal" if kind == "learned" else "run-column")).read_bytes())
    readers = {
        "learned": lambda: metamd.load(path).fingerprint(),
        "run": lambda: metamd.Run.load(path).fingerprint(),
        "record": lambda: read_json(path),
        "archive": lambda: unarchive(tmp_path, tmp_path / "out"),
        "npz": lambda: stored(path, "inputs", "targets"),
    }
    content, right, refused = path.read_bytes(), readers[kind](), 0
    for data in mutations(content, draws(1000)):
        path.write_bytes(data)
        error = None
        try:
            with bounded():
                found = readers[kind]()
        except (ValueError, OSError) as raised:
            error, found, refused = raised, right, refused + 1
        assert kind not in ("learned", "run") or found == right
        assert error is None or len(str(error)) <= SENTENCE_LIMIT
    assert refused > draws(1000) // 4

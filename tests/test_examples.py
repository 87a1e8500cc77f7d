"""The programs of examples/, each in a tiny form."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.data_builders import publish_files
from tests.tasks.test_language import sources
from tests.tasks.test_pictures import photograph
from tests.test_example_loops import NAMES

EXAMPLES = Path(__file__).parents[1] / "examples"
KODAK = {"kodak": {f"kodim{n:02d}.png": photograph(n) for n in range(1, 25)}}
TINY = {
    "adapters.py": (lambda: sources(4, layers=1), ["--steps", "2", "--tasks", "2"], "bits per character"),
    "photograph.py": (lambda: KODAK, ["--steps", "3", "--tasks", "2", "--side", "4"], "PSNR in dB after 3 steps"),
}


@pytest.mark.parametrize("name", TINY)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    make, options, said = TINY[name]
    publish_files(tmp_path, monkeypatch, **make())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    assert said in out
    assert out.count("\n") == 5
    assert list(tmp_path.glob("*.safetensors"))


def test_examples_are_short_and_all_are_run():
    found = {path.name: path.read_text().count("\n") for path in EXAMPLES.glob("*.py")}
    assert {*TINY, *(f"{name}.py" for name in NAMES)} == set(found), "each is run here or by tests/test_example_loops.py"
    assert max(found.values()) < 60

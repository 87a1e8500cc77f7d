"""The programs of examples/, each in tiny form and in an empty folder, without the data mirror; and the notebook."""

import importlib.util
import json
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "photograph.ipynb"
NEEDS = {
    "adapters": ("peft", "sklearn"),
    "lightning_module": ("lightning",),
    "photograph": ("matplotlib", "sklearn"),
    "trainer": ("accelerate", "transformers"),
}


def run_example(path, folder):
    """Run a file as a script, with one small number as its argument."""
    os.environ["HF_HUB_OFFLINE"], os.environ["MPLBACKEND"] = "1", "agg"
    for mirror in ("METAMD_DATA", "METAMD_OFFICIAL"):
        os.environ.pop(mirror, None)
    os.chdir(folder)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # lightning's use of torch
    sys.argv = [str(path), "5"]
    if path.suffix == ".py":
        runpy.run_path(str(path), run_name="__main__")
        return
    names = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)


def check(path, folder):
    missing = [name for name in NEEDS.get(path.stem, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: pip install '.[clients,demo]'")
    ended = processes.run(run_example, path, folder)
    assert ended.code == 0, ended.err
    assert re.search(r"\d\.\d{3}", ended.out), "numbers are printed"


FRAMEWORKS = pytest.mark.slow  # importing one takes seconds


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=[FRAMEWORKS] * (p.stem in NEEDS)) for p in EXAMPLES])
def test_examples_run(path, tmp_path):
    check(path, tmp_path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_short_and_say_how_to_run_them(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert f"python examples/{path.name}" in text


def test_the_notebook_is_the_example():
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    cells = runpy.run_path(str(ROOT / "scripts" / "notebook.py"))["cells"]
    assert found == cells(NOTEBOOK.with_suffix(".py").read_text()), "run scripts/notebook.py"
    assert cells(NOTEBOOK.with_suffix(".py").read_text() + "\nprint()\n") != found


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    check(NOTEBOOK, tmp_path)

"""Programs of examples/ that show a loop, each in tiny form and in an empty folder, without the data mirror."""

import importlib.util
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from tests import processes

NAMES = ("nightly", "customers", "lightning_module", "trainer")
EXAMPLES = [Path(__file__).parents[1] / "examples" / f"{name}.py" for name in NAMES]
NEEDS = {"lightning_module": "lightning", "trainer": "transformers"}


def run_example(path, folder):
    """Run a file as a script, with one small number as its argument."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("METAMD_DATA", None)
    os.chdir(folder)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # lightning's use of torch
    sys.argv = [str(path), "5"]
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_run(path, tmp_path):
    needed = NEEDS.get(path.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install '.[clients]'")
    ended = processes.run(run_example, path, tmp_path)
    assert ended.code == 0, ended.err
    assert re.search(r"\d\.\d{3}", ended.out)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_short_and_say_how_to_run_them(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert f"python examples/{path.name}" in text

"""The gate counts the tests on real data, and fails when it should have had some and none ran."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITE = """
import pytest

@pytest.mark.real_data
@pytest.mark.skipif({skipped}, reason="no data here")
@pytest.mark.parametrize("i", [1, 2, 3])
def test_real(i):
    assert i

def test_other():
    pass
"""


def run(folder: Path, skipped: bool, **environment: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = real_data: yes\n")
    (folder / "test_it.py").write_text(SUITE.format(skipped=skipped))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("METAMD_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, env={**clean, **environment}, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("skipped", "environment", "code", "said"),
    [
        (False, {"METAMD_REAL_DATA": "required"}, 0, "real-data tests: 3 ran"),
        (True, {}, 0, "real-data tests: 0 ran"),
        (True, {"METAMD_REAL_DATA": "required"}, 1, "none ran: set METAMD_DATA"),
    ],
)
def test_real_data_tests_are_counted_and_can_be_required(tmp_path, skipped, environment, code, said):
    result = run(tmp_path, skipped, **environment)
    assert result.returncode == code, result.stdout + result.stderr
    assert said in result.stdout


# the extras

EXTRAS = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]

BARE = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None
import metamd
for name in metamd.__all__:
    getattr(metamd, name)
learned = metamd.meta_train(metamd.tasks.quadratic(steps=5), metamd.Diagonal(), outer_steps=1, tasks_per_step=1)
learned.save_pretrained("folder")
assert metamd.LearnedOptimiser.from_pretrained("folder").fingerprint() == learned.fingerprint()
from metamd.cli.main import run
assert run(["inspect", "quadratic"]) == 0
"""
OPTIONAL = (
    *("matplotlib", "sklearn", "jinja2", "requests", "urllib3", "scipy", "PIL", "pytorch_optimizer", "schedulefree"),
    *("prodigyopt", "botorch", "gpytorch", "ray", "lightning", "accelerate", "transformers", "tensorboard"),
    "huggingface_hub",
)


def test_the_package_works_without_extras(tmp_path):
    command = [sys.executable, "-c", BARE, *OPTIONAL]
    source = str(HERE.parent / "src")
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": source}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_extra_that_a_sentence_names_is_one():
    sources = "".join(p.read_text() for p in (HERE.parent / "src").rglob("*.py"))
    named = set(re.findall(r"""install\(["'](\w+)["']\)""", sources))
    assert {"plot", "data", "hub"} <= named
    assert named <= set(EXTRAS)
    assert not re.search(r"pip install '?metamd", sources), "there is no release to install"

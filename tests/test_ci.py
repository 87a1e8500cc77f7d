"""The gate counts the tests on real data, and fails when it should have had some and none ran."""

import os
import shutil
import subprocess
import sys
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

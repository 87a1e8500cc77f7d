"""One thread per test worker, laws at a tenth or in full, and a count of the tests that ran on real data."""

import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# Set before torch is imported: two test workers with two threads each would fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs behind it deaf to Ctrl-C, and children inherit that: those that tests interrupt must hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples every time, and no deadline: a run that fails, fails again, also on a quiet machine.
hypothesis.settings.register_profile("tests", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "slow":
        os.environ["METAMD_LAWS"] = "full"  # read by tests.helpers.draws


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Laws take part in both runs: in a tenth of their draws by default, in all of them under `-m slow`."""
    for item in items:
        if os.environ.get("METAMD_LAWS") == "full" and item.get_closest_marker("law"):
            item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def hardly_timed() -> None:
    """Comparisons time the steps of every optimiser; no test depends on how exactly."""
    from metamd.comparison.training import step_seconds

    step_seconds.__kwdefaults__.update({"rounds": 2, "warm_up": 1})


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws from torch's own generator does not depend on the tests that ran before it in the same worker."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)`: a folder that `make` fills in the first test worker that asks; the others wait and share it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder = base / "once" / name
        folder.parent.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.with_suffix(".made").exists():
                shutil.rmtree(folder, ignore_errors=True)  # a worker that failed left it
                folder.mkdir()
                make(folder)
                folder.with_suffix(".made").touch()
        return folder

    return folder_of


RAN: list[str] = []
"""Tests marked `real_data` that ran to an end; under xdist, filled in the controlling process alone."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.outcome != "skipped" and "real_data" in report.keywords:
        RAN.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    in_worker = hasattr(session.config, "workerinput")
    if os.environ.get("METAMD_REAL_DATA") == "required" and not RAN and not in_worker:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"real-data tests: {len(RAN)} ran")
    if os.environ.get("METAMD_REAL_DATA") == "required" and not RAN:
        terminalreporter.write_line("METAMD_REAL_DATA=required, and none ran: set METAMD_DATA to the datasets.", red=True)

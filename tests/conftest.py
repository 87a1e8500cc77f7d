"""One thread per test worker, and a count of the tests that ran on real data."""

import os
import signal

import pytest

# Set before torch is imported: two test workers with two threads each would fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs behind it deaf to Ctrl-C, and children inherit that: those that tests interrupt must hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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

"""The one display: lines in a file, a bar on a terminal, nothing when asked, and no thread."""

import io
import sys
import threading

import pytest

from metamd.cli import main as cli
from metamd.files import progress as module
from metamd.files.progress import Progress, ends_with, showing


class Terminal(io.StringIO):
    def isatty(self):
        return True


def count(total, **options):
    with Progress("tasks", total, **options) as progress:
        for i in range(25):
            progress.advance(f"task {i}")
        progress.say("one diverged")


def test_in_a_file_a_few_lines_with_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr(module.time, "monotonic", lambda: 7.0)
    with showing("always"):
        count(25)
    assert capsys.readouterr().err == "one diverged\ntasks: 25 of 25 in 0:00:00\n", "work of a moment has one line"
    monkeypatch.setattr(module, "PAUSE", 0.0)
    with showing("always"):
        count(25)
        count(None)
    known, unknown, _ = capsys.readouterr().err.split("one diverged\n")
    lines = known.splitlines()
    assert len(lines) <= 10
    assert lines[0] == "tasks: 3 of 25, 0:00:00 left"
    assert unknown.splitlines()[:4] == ["tasks: 25 of 25 in 0:00:00", "tasks: 1", "tasks: 2", "tasks: 4"]


@pytest.mark.parametrize("shown", ["terminal", "never"])
def test_a_program_whose_errors_go_to_a_file_is_left_alone(shown, capsys):
    with showing(shown):
        count(25)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal_takes_no_thread_and_nests(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "100")
    before = set(threading.enumerate())
    with Progress("outer", 2) as outer:
        count(25, done=5)
        outer.advance("first")
        assert not set(threading.enumerate()) - before
    assert "one diverged" in screen.getvalue()
    assert "outer" in screen.getvalue()
    assert "1 of 2" in screen.getvalue()
    assert module._screen is None


def test_silence_and_a_total_that_becomes_known(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with showing("never"):
        count(25)
    with Progress("", 3) as unnamed:
        unnamed.advance()
    assert screen.getvalue() == ""
    monkeypatch.undo()
    with showing("always"), Progress("file, MB") as progress:
        progress.update(2.5, total=5)
    assert "file, MB: 2.5 of 5" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--quiet",)])
def test_a_command_shows_progress_unless_it_is_told_not_to(words, tmp_path, capsys):
    command = ["certify", "quadratic", "quadratic", "--held-out-tasks", "2", "--out", str(tmp_path / "x.safetensors")]
    assert cli.run([*command, "--workers", "2", *words]) == 0
    assert capsys.readouterr().err.partition(" in ")[0] == ("" if words else "held-out tasks: 2 of 2")


def test_a_long_verb_ends_with_a_sentence_on_a_terminal_alone(monkeypatch, capsys):
    @ends_with(lambda found: f"inner {found}")
    def inner():
        return 1

    @ends_with(lambda found: f"made {found}; use it")
    def outer():
        return inner() + 1

    assert outer() == 2
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert (outer(), inner()) == (2, 1)
    said = "made 2; use it\ninner 1\n"
    assert terminal.getvalue() == said, "a verb inside another one is silent"
    with showing("always"):  # a command says it itself
        outer()
    with pytest.raises(ZeroDivisionError):
        ends_with(str)(lambda: 1 / 0)()
    assert terminal.getvalue() == said
    assert inner.__name__ == "inner"

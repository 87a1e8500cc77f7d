import json
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from metamd import LearnedOptimiser, MaxDiagonal, __version__
from metamd.cli import main as cli
from metamd.cli.inspect import distributions, histogram, span
from metamd.cli.options import Demo, Options
from tests.learned_files import SHAPES, learned
from tests.processes import PATIENCE, environment

HOSTILE = "\x1b[31m[bold red]\u202e\x07$\\frac$"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.safetensors"
    learned(3, horizon=100, family={"name": HOSTILE}, objective="[link=evil]Regret()").save(path)
    return str(path)


def demo(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "metamd.cli.demo", SimpleNamespace(run=run))


def process(*args, code=None, **options):
    command = [sys.executable, *(["-c", code] if code else ["-m", "metamd"]), *args]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


LIGHT = """
import sys
from metamd.cli.main import run
try:
    run(sys.argv[1:])
except SystemExit as exit:
    assert exit.code == 0, exit.code
print(sorted({"torch", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("inspect", "--help"), ("demo", "--help")], ids=" ".join)
def test_help_and_version_answer_without_torch(args):
    out, err = process(*args, code=LIGHT).communicate(timeout=PATIENCE)
    assert err == "[]\n"
    assert ("usage: metamd" in out) != (out == f"metamd {__version__}\n")


def test_the_law_of_light_commands_rejects_one_that_loads_torch(file):
    assert "torch" in process("inspect", file, code=LIGHT).communicate(timeout=PATIENCE)[1]


def test_every_command_has_a_home_and_help_names_it(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.run(["--help"])
    shown = capsys.readouterr().out
    assert all(command.__name__.lower() in shown for command in get_args(Options))


@pytest.mark.parametrize("args", [["inspct", "x"], ["inspect", "x", "--jsn"], ["certify"], [], ["demo", "--seed", "one"]])
def test_a_typo_is_answered_with_code_2(args, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.run(args)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


def test_options_reach_the_command(monkeypatch, tmp_path):
    seen = []
    demo(monkeypatch, seen.append)
    assert cli.run(["demo", "--out", str(tmp_path), "--seed", "3", "--json"]) == 0
    assert seen == [Demo(tmp_path, 3, json=True)]


@pytest.mark.parametrize("error", [ValueError("lr must be positive."), OSError("there is no such file.")])
def test_bad_input_is_one_sentence_and_code_2(error, monkeypatch, capsys):
    def fail(options):
        raise error

    demo(monkeypatch, fail)
    assert cli.run(["demo", "--quiet"]) == 2
    assert capsys.readouterr() == ("", f"metamd: {error}\n")


@pytest.mark.parametrize("number", cli.ADVICE)
def test_an_error_of_the_system_is_a_sentence_with_its_path(number, monkeypatch, capsys):
    def fail(options):
        raise OSError(number, "raw text", "some/where")

    demo(monkeypatch, fail)
    assert cli.run(["demo", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "'some/where'" in said
    assert "raw text" not in said
    assert "Errno" not in said
    assert cli.sentence(OSError(number, "raw text")) == f"[Errno {number}] raw text"


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    demo(monkeypatch, lambda options: {}["missing"])
    with pytest.raises(KeyError):
        cli.run(["demo", "--quiet"])


STUB = """
import sys, time, types
def run(options):
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
sys.modules["metamd.cli.demo"] = types.SimpleNamespace(run=run)
from metamd.cli.main import main
main(["demo", "--quiet"])
"""


def test_ctrl_c_exits_with_130():
    child = process(code=STUB)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=PATIENCE) == ("", "metamd: interrupted\n")
    assert child.returncode == 130


def test_a_reader_that_stops_gets_no_traceback(file):
    child = process("inspect", file)
    child.stdout.close()
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait(timeout=PATIENCE) == 1


def test_inspect_prints_header_and_steps(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.run(["inspect", file]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in (
        "max-diagonal",
        "horizon       100 steps",
        "fc1.weight",
        "median",
        "█",
        "not recorded",
        "[link=evil]Regret()",
    ):
        assert text in out, text
    assert out.splitlines()[1].split(maxsplit=1)[0] == "use", "how it is used comes first"
    assert "MetaMD(model.named_parameters()" in out
    assert len(out.splitlines()) < 40, "a card, not a dump of the header"


def unsafe(text):
    """The law: nothing that steers a terminal."""
    return [c for c in text if c != "\n" and not c.isprintable()]


def test_inspect_prints_nothing_that_steers_the_terminal(file, capsys, tmp_path):
    path = tmp_path / "evil.safetensors"
    made = MaxDiagonal(1).with_metrics({f"layer{HOSTILE}": torch.zeros(1, 2)})
    fields = {"family": {HOSTILE: HOSTILE}, "objective": HOSTILE, "versions": {"torch": HOSTILE}, "model": {HOSTILE: (2,)}}
    LearnedOptimiser.from_potential(made, **fields).save(path)
    assert cli.run(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert unsafe(HOSTILE) == ["\x1b", "\u202e", "\x07"]
    assert unsafe(out) == []
    assert "[bold red]" in out
    assert cli.run(["inspect", str(tmp_path / HOSTILE.replace("/", ""))]) == 2
    assert unsafe(capsys.readouterr().err) == []


def test_inspect_json_is_one_object_with_the_true_step_sizes(tmp_path, capsys):
    path = tmp_path / "x.st"
    log_d = -torch.log(torch.tensor([[1.0, 2.0, 8.0], [0.5, 0.5, 0.5]], dtype=torch.float64))
    LearnedOptimiser.from_potential(MaxDiagonal(2).with_metrics({"x": log_d, "none": log_d[:, :0]}), horizon=4).save(path)
    assert cli.run(["inspect", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["header"]["horizon"] == 4
    assert len(record["fingerprint"]) == 32
    first, second, empty, _ = record["step_sizes"]
    assert [first[k] for k in ("key", "piece", "count")] == ["x", 1, 3]
    assert [first[k] for k in ("min", "median", "max")] == pytest.approx([1, 2, 8])
    assert [second[k] for k in ("piece", "min", "max")] == [2, pytest.approx(0.5), pytest.approx(0.5)]
    assert [empty[k] for k in ("key", "count", "min", "max")] == ["none", 0, None, None]


@pytest.mark.parametrize(
    "log_d",
    [torch.zeros(2, 0), torch.zeros(2), torch.zeros(2, 50), torch.linspace(-708, 708, 100, dtype=torch.float64).view(2, 50)],
    ids=["no parameters", "one number", "all equal", "every size a float64 can hold"],
)
def test_inspect_survives_unusual_metrics(log_d, tmp_path, capsys):
    LearnedOptimiser.from_potential(MaxDiagonal(2).with_metrics({"x": log_d})).save(tmp_path / "x.st")
    assert cli.run(["inspect", str(tmp_path / "x.st"), "--figure", str(tmp_path / "x.png")]) == 0
    assert f" {log_d[0].numel()} " in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_inspect_names_every_layer_in_any_terminal(columns, file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.run(["inspect", file]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SHAPES)
    assert "…" not in out


@pytest.mark.parametrize("tying", ["parameter", "tensor"])
def test_inspect_draws_a_figure(tying, tmp_path, capsys):
    learned(12, tying).save(tmp_path / "x.st")
    assert cli.run(["inspect", str(tmp_path / "x.st"), "--json", "--figure", str(tmp_path / "x.png")]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err.startswith("wrote ")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_says_what_is_missing(file, tmp_path, capsys, monkeypatch):
    assert cli.run(["inspect", str(tmp_path / "no.st")]) == 2
    assert cli.run(["inspect", file, "--figure", str(tmp_path / "no" / "x.png")]) == 2
    assert cli.run(["inspect", file, "--figure", str(tmp_path / "x.doc")]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.run(["inspect", file, "--figure", str(tmp_path / "x.png")]) == 2
    lines = capsys.readouterr().err.splitlines()
    wanted = ["there is no file", "there is no directory", "Format 'doc' is not supported", "pip install '.[plot]'"]
    assert all(w in line for w, line in zip(wanted, lines, strict=True))


def test_bars_count_what_they_show():
    assert histogram(np.array([]), 0, 1, bins=3) == "   "
    assert histogram(np.array([0.0, 1.0]), 0, 1, bins=3) == "█ █"
    assert histogram(np.array([5.0]), 5, 5, bins=3) == "█  "
    assert histogram(np.r_[np.zeros(100), 1.0], 0, 1, bins=2) == "█▁", "a single value must stay visible"


def test_the_axis_holds_all_step_sizes():
    rows = distributions(learned(3))
    low, high = span(rows)
    assert all(low <= row.log_steps[0] <= row.log_steps[-1] <= high for row in rows)
    ones = LearnedOptimiser.from_potential(MaxDiagonal(1).with_metrics({"x": torch.zeros(1, 2)}))
    assert span(distributions(ones)) == (-1.0, 1.0)


def test_data_commands_answer_and_refuse(tmp_path, monkeypatch):
    monkeypatch.setenv("METAMD_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listed = json.loads(process("data", "list", "--json").communicate(timeout=PATIENCE)[0])
    assert {row["name"] for row in listed["datasets"]} >= {"mnist", "cifar10"}
    for words in (("data", "path", "mnist"), ("data", "fetch", "no-such-set"), ("data", "verify", "no-such-set")):
        refused = process(*words)
        _, err = refused.communicate(timeout=PATIENCE)
        assert refused.returncode == 2
        assert err.startswith("metamd: ")
        assert err.count("\n") == 1

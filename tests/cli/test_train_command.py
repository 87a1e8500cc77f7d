import json
import re
import signal
import sys
from types import SimpleNamespace

import pytest

from metamd import load
from metamd.cli import main as cli
from metamd.cli.train import tensorboard
from metamd.tasks.synthetic import _QuadraticTask
from tests import processes

SHORT = ["--steps", "20", "--outer-steps", "2", "--tasks", "2"]


@pytest.mark.parametrize("family", ["quadratic", "rosenbrock", "logistic", "tabular"])
def test_every_family_trains_to_a_file_that_loads(family, tmp_path, capsys):
    out = tmp_path / "new" / "learned.safetensors"
    assert cli.run(["train", family, "--out", str(out), *SHORT]) == 0
    said = capsys.readouterr()
    assert re.search(r"^Learned from \d+ tasks in \d+ outer steps, with [\d,]+ gradients in ", said.out, re.M)
    assert "objective" in said.err
    learned = load(out)
    assert learned.header.family["name"] == family
    assert learned.header.horizon == 20
    log = (tmp_path / "new" / "learned.safetensors.run" / "log.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in log.splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 12 if family == "quadratic" else len(steps) == 3, "quadratics are refined"


def test_json_is_one_object_and_progress_goes_to_standard_error(tmp_path, capsys):
    out = tmp_path / "x.safetensors"
    assert cli.run(["train", "quadratic", "--out", str(out), "--json", *SHORT]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert record["fingerprint"] == load(out).fingerprint()
    assert record["header"]["family"]["name"] == "quadratic"
    assert "learn 1" in said.err


def test_the_shape_of_what_is_learned_from_the_command_line(tmp_path):
    coordinates, role = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    few = ["--steps", "4", "--tasks", "1"]
    assert cli.run(["train", "tabular", "--out", str(coordinates), "--rank", "2", *few]) == 0
    header = load(coordinates).header
    assert header.basis == "right"
    assert max(rank for _, rank in header.factors.values()) <= 2
    assert cli.run(["train", "tabular", "--out", str(role), "--potential", "diagonal", "--tying", "role", *few]) == 0
    assert load(role).header.tying == "role"
    assert load(role).header.usage is not None


@pytest.mark.filterwarnings("ignore::metamd.NotConvergedWarning")
@pytest.mark.parametrize("preset", ["paper", "paper-plain"])
def test_the_paper_presets_from_the_command_line(preset, tmp_path, capsys):
    out = tmp_path / "x.safetensors"
    assert cli.run(["train", "quadratic", "--out", str(out), "--preset", preset, *SHORT]) == 0
    assert (load(out).header.choice is None) == (preset == "paper-plain")
    assert cli.run(["inspect", str(out)]) == 0
    assert ("2 outer steps: loss" in capsys.readouterr().out) == (preset == "paper"), "the table of what was tried"
    assert load(out).header.pieces == 3
    assert load(out).header.family["start"] == [0.1, 0.1], "from (3, 3) the paper's objective has no minimum to go to"


def test_quadratics_are_refined_by_their_digits(tmp_path):
    assert cli.run(["train", "quadratic", "--out", str(tmp_path / "q.safetensors"), *SHORT]) == 0
    header = load(tmp_path / "q.safetensors").header
    assert "LogGap" in header.estimator
    assert header.cost["hessian_vector_products"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "there is no family 'nothing'. There are"),
        (["quadratic", "--outer-steps", "0"], "outer_steps must be at least 1"),
        (["quadratic", "--steps", "0"], "steps must be at least 1"),
        (["quadratic", "--preset", "mine"], "--preset must be default, paper or paper-plain, got 'mine'"),
        (["quadratic", "--k", "99"], "--k would change nothing without --preset paper. Leave it out."),
        (["quadratic", "--judged-on", "validation"], "--judged-on would change nothing where no usage is chosen. Leave it"),
        (["tabular", "--judged-on", "test"], 'judged_on must be "auto", "train" or "validation", got \'test\''),
        (["tabular", "--outer-steps", "2", "--refresh", "4"], "--refresh would change nothing where no usage is chosen."),
        (["tabular", "--refresh", "-1"], "refresh must be a number of steps, or 0 for every one; got -1"),
        (["quadratic", "--tying", "mine"], "tying must be one of"),
        (["quadratic", "--potential", "mine"], "--potential must be diagonal or kronecker"),
        (["quadratic", "--potential", "kronecker"], "--potential kronecker is for networks, and not for --outer-steps"),
        (["quadratic", "--rank", "3"], "--rank is for --potential kronecker"),
        (["quadratic", "--preset", "paper", "--tying", "role"], "--tying would change nothing with --preset paper"),
        (["tabular", "--rank", "some"], "--rank must be a number of directions, auto or all"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(args, message, tmp_path, capsys):
    out = tmp_path / "x.safetensors"
    assert cli.run(["train", *args, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_places_that_cannot_be_written_are_refused(tmp_path, capsys):
    assert cli.run(["train", "quadratic", "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.run(["train", "quadratic", "--out", str(tmp_path / "file" / "x")]) == 2
    assert f"a folder is required where {str(tmp_path / 'file')!r} is or lies under a file" in capsys.readouterr().err


def test_another_configuration_on_the_same_file_is_refused(tmp_path, capsys):
    out = str(tmp_path / "x.safetensors")
    assert cli.run(["train", "quadratic", "--out", out, *SHORT]) == 0
    assert cli.run(["train", "quadratic", "--out", out, *SHORT, "--seed", "7"]) == 2
    assert "other settings: seed is 0, and would be 7" in capsys.readouterr().err


def train_until_interrupted(*words):
    """The command, with a Ctrl-C at its 120th loss: in the second outer step, each having four tasks of 20 steps."""
    loss, strike = _QuadraticTask.loss, processes.Countdown(120, signal.SIGINT)
    _QuadraticTask.loss = lambda *args: (strike(), loss(*args))[1]
    processes.command("", "train", *words)


def test_ctrl_c_leaves_a_run_that_the_same_command_continues(tmp_path):
    options = ["--steps", "20", "--outer-steps", "4", "--tasks", "4"]
    out, whole = tmp_path / "x.safetensors", tmp_path / "whole.safetensors"
    first = processes.run(train_until_interrupted, "quadratic", "--out", out, *options)
    assert first.code == 130, first.err
    assert "the same command continues" in first.err
    assert not out.exists()
    assert (tmp_path / "x.safetensors.run" / "checkpoint.safetensors").exists()
    for where in (out, whole):
        assert cli.run(["train", "quadratic", "--out", str(where), *options]) == 0
    assert load(out).fingerprint() == load(whole).fingerprint()


def test_tensorboard_gets_the_numbers(monkeypatch, tmp_path):
    calls = []
    writer = SimpleNamespace(add_scalar=lambda *a: calls.append(a), flush=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder: writer))
    tensorboard(tmp_path)({"stage": "learn", "step": 1, "objective": 2.5, "bound": None, "note": "x"}, 1)
    assert calls == [("learn/objective", 2.5, 1)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install"):
        tensorboard(tmp_path)


def test_tensorboard_itself_reads_what_was_written(tmp_path, capsys):
    reason = "tensorboard is not installed"
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    out = tmp_path / "x.safetensors"
    assert cli.run(["train", "quadratic", "--out", str(out), "--tensorboard", *SHORT]) == 0
    found = events.EventAccumulator(str(tmp_path / "x.safetensors.run" / "tensorboard"))
    found.Reload()
    assert [e.step for e in found.Scalars("learn/objective")] == [1, 2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("quadratic", "--model", "mlp"), "has no option --model"),
        (("rotated-mnist", "--hold-out", "left"), "must be an angle such as 30, got 'left'"),
        (("no-such-family",), "There are adapt-rotated-mnist, "),
    ],
)
def test_options_of_families_are_checked_before_anything_else(words, sentence, capsys, tmp_path):
    assert cli.run(["train", *words, "--out", str(tmp_path / "x.safetensors")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_usage_is_chosen_for_directions_that_are_found_every_so_many_steps(tmp_path):
    out = tmp_path / "t.safetensors"
    assert cli.run(["train", "tabular", "--steps", "4", "--tasks", "1", "--refresh", "3", "--out", str(out)]) == 0
    runs = [json.loads(path.read_text()) for path in (tmp_path / "t.safetensors.run" / "usage" / "cells").glob("run-*.json")]
    tried = {(run["online"]["rule"], run["online"]["refresh"]) for run in runs if run["online"]}
    assert tried == {("average", 0), ("polar", 3), ("eigen", 2)}


SMALLEST = ["quadratic", "--steps", "5", "--outer-steps", "1", "--tasks", "2"]


def test_a_file_that_the_command_did_not_make_is_left_alone(tmp_path, capsys):
    out = tmp_path / "mine.safetensors"
    out.write_bytes(b"a checkpoint of mine")
    assert cli.run(["train", *SMALLEST, "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert out.read_bytes() == b"a checkpoint of mine"


def test_the_same_command_again_keeps_the_certificates_of_its_file(tmp_path, capsys):
    out = tmp_path / "q.safetensors"
    assert cli.run(["train", *SMALLEST, "--out", str(out)]) == 0
    assert cli.run(["certify", str(out), "quadratic", "--held-out-tasks", "2", "--steps", "5"]) == 0
    assert load(out).header.held_out
    before = out.read_bytes()
    for path in (out, tmp_path / "." / out.name):
        assert cli.run(["certify", str(out), "quadratic", "--held-out-tasks", "2", "--report", str(path)]) == 2
    assert "--report must be another file than the learned one" in capsys.readouterr().err
    assert cli.run(["train", *SMALLEST, "--out", str(out)]) == 0
    assert out.read_bytes() == before


def test_a_seed_that_no_file_could_hold_is_refused_at_once(tmp_path, capsys):
    assert cli.run(["train", *SMALLEST, "--seed", str(2**64), "--out", str(tmp_path / "q.safetensors")]) == 2
    assert "--seed must lie between" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

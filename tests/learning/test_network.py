"""The default recipe: what a family alone gives; stopped and continued, in one process or in several."""

import itertools
import json
import math
import re
import signal

import pytest
import torch
from torch import nn

import metamd
from metamd import (
    Diagonal,
    Evolution,
    Forward,
    Journal,
    Kronecker,
    MaxDiagonal,
    Reverse,
    learn_start,
    learn_usage,
    load,
    meta_train,
    prepare,
    tasks,
)
from metamd.cli import main as cli
from metamd.files.progress import Progress, showing
from metamd.inner.objectives import Reference
from metamd.learning.meta import has_weights, learn_network, refinement
from metamd.learning.parts import Parts, parts_of
from metamd.learning.reference import REFERENCE_RATES, learn_from_reference
from metamd.tasks import quadratic, starting_at, supervised, tabular
from metamd.tasks.wrapped import Counted
from tests import processes
from tests.helpers import losses_of
from tests.network_worker import family, train, work


def test_a_network_gets_learned_coordinates_and_a_usage():
    family = tasks.tabular(steps=20)
    assert has_weights(family)
    learned = meta_train(family, tasks_per_step=1, seed=3)
    assert any(name.startswith("right/") for name in learned.potential.basis.factors)
    assert learned.header.usage is not None
    assert learned.fingerprint() == learn_network(family, tasks=1, seed=3).fingerprint()
    task = family.build(family.sample(torch.Generator().manual_seed(9)))
    params = {n: torch.nn.Parameter(x.clone()) for n, x in task.init().items()}
    optimiser, schedule = prepare(params.items(), learned, steps=20)
    losses = losses_of(task, params, optimiser, schedule, 20)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("family", [tasks.quadratic(steps=20), tasks.rosenbrock(steps=20)])
def test_vectors_get_a_diagonal_that_is_refined_where_digits_count(family):
    assert not has_weights(family)
    few = {"outer_steps": 2, "tasks_per_step": 2}
    found, refine = meta_train(family, **few), refinement(family)
    assert found.fingerprint() == meta_train(family, Diagonal(), refine=refine, **few).fingerprint()
    assert (refine is None) == (family.name != "quadratic")
    assert ("LogGap" in found.header.estimator) == (refine is not None)


def test_many_metrics_are_refined_by_reverse_mode():
    assert isinstance(refinement(tasks.quadratic([1.0] * 17)).estimator, Reverse)
    assert isinstance(refinement(tasks.quadratic()).estimator, Forward)


def test_options_that_the_default_for_networks_does_not_have_are_refused():
    with pytest.raises(ValueError, match="outer_steps, max_norm can be given together with a potential"):
        meta_train(tasks.tabular(steps=5), outer_steps=3, max_norm=2.0)


def test_vectors_get_a_usage_with_momentum_where_it_is_better():
    """Ill-conditioned by couplings that no diagonal sees: the one call ends lower than plain steps."""
    family = tasks.quadratic([1.0] * 4, coupling=0.5, steps=60)
    learned = meta_train(family, outer_steps=3, tasks_per_step=4)
    assert learned.usage.momentum > 0
    gaps = {"plain": 0.0, "recommended": 0.0}
    for i in range(4):
        task = family.build(family.sample(torch.Generator().manual_seed(50 + i)))
        for name, options in (("plain", {"metric": "learned"}), ("recommended", {"steps": 60})):
            params = {n: torch.nn.Parameter(x.clone()) for n, x in task.init().items()}
            optimiser = metamd.MetaMD(params.items(), learned, **options)
            for _ in range(60):
                optimiser.zero_grad()
                task.loss(params, task.batch(0)).backward()
                optimiser.step()
            gaps[name] += math.log(task.monitor()({n: p.detach() for n, p in params.items()}) + 1e-15) / 4
    assert gaps["recommended"] < gaps["plain"] - 1


def test_seconds_are_a_preference_where_a_usage_is_chosen():
    learned = meta_train(tasks.tabular(steps=6), tasks_per_step=1, prefer="seconds")
    assert learned.header.choice["prefer"] == "seconds"
    assert learned.header.choice["seconds_per_step"] > 0
    with pytest.raises(ValueError, match="prefer='seconds' would change nothing with a potential"):
        meta_train(tasks.quadratic(steps=5), Diagonal(), prefer="seconds")
    with pytest.raises(ValueError, match=r'prefer must be "steps" or "seconds", got \'minutes\''):
        meta_train(tasks.tabular(steps=5), prefer="minutes")


def test_the_command_line_has_the_same_default_and_says_what_was_preferred(tmp_path, capsys):
    out = tmp_path / "tabular.safetensors"
    assert cli.run(["train", "tabular", "--steps", "10", "--tasks", "1", "--out", str(out)]) == 0
    learned = load(out)
    assert learned.header.usage is not None
    assert learned.potential.basis.kind == "right"
    capsys.readouterr()
    assert cli.run(["inspect", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "few steps, judged on" in said
    assert "a step took" in said


# stopped and continued


LOOKS = 3
"""Batches by which a family is known again, one for each stage that has a journal."""


def said(learned):
    """All that a file says, but how long it took."""
    header = learned.header.to_dict()
    timeless = {
        name: {k: v for k, v in header[name].items() if "seconds" not in k}
        for name in ("cost", "choice")
        if header.get(name)
    }
    return header | timeless, learned.fingerprint()


class Spied:
    """The worker's family, and how many batches were drawn."""

    def __init__(self):
        self.family, self.drawn = family(), 0
        build = self.family.build

        def built(config):
            task = build(config)
            batch = task.batch
            task.batch = lambda step: (setattr(self, "drawn", self.drawn + 1), batch(step))[1]
            return task

        self.family.build = built


@pytest.fixture(scope="module")
def whole():
    spied = Spied()
    learned = train(of=spied.family)
    return learned, spied.drawn


def test_the_cost_is_all_that_was_drawn(whole):
    learned, drawn = whole
    assert learned.header.cost["gradient_evaluations"] == drawn, "choosing the reference's rate is a part of it"


def test_killed_in_every_stage_it_continues_to_the_same_result(tmp_path, whole):
    """The points are places in the uninterrupted run: a process that began again each time would never come past them."""
    learned, drawn = whole
    for point in ("batch:60", "renamed:4", "batch:150", f"batch:{drawn // 2}", "renamed:5"):
        killed = processes.run(work, tmp_path, point)
        assert killed.code == -signal.SIGKILL, killed.err
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"reference", "follow", "usage"}
    last = processes.run(work, tmp_path)
    assert last.code == 0, last.err
    assert said(load(tmp_path / "0.safetensors")) == said(learned)
    spied = Spied()
    assert said(train(Journal(tmp_path / "run"), of=spied.family)) == said(learned)
    assert spied.drawn == LOOKS, "everything was there"
    suffixes = {p.suffix for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "lock"}
    assert suffixes == {".json", ".safetensors"}, "nothing that could be executed, and nothing half written"


def test_a_part_that_is_gone_is_computed_again_and_no_other(tmp_path, whole):
    learned, drawn = whole
    journal = Journal(tmp_path)
    assert said(train(journal)) == said(learned)
    (tmp_path / "follow" / "learned.safetensors").unlink()
    cell = next((tmp_path / "usage" / "cells").glob("run-*.json"))
    cost = json.loads(cell.read_text())["gradients"]
    cell.unlink()
    spied = Spied()
    assert said(train(journal, of=spied.family)) == said(learned)
    follow = json.loads((tmp_path / "follow" / "cells" / "learned.json").read_text())["gradients"]
    assert spied.drawn == LOOKS + cost + follow < drawn


def test_another_model_or_loss_of_the_same_shapes_is_refused(tmp_path):
    data = {"a": (torch.randn(40, 4), torch.randn(40, 1))}

    def learned(activation, loss, folder):
        make = lambda: nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 1))  # noqa: E731
        family = supervised(make, data, loss, batch_size=20, steps=5)
        return learn_from_reference(family, Diagonal(), reference=Reference(lr=0.01), tasks=1, journal=Journal(folder))

    mse, l1 = nn.functional.mse_loss, nn.functional.l1_loss
    once, again = (learned(nn.Tanh, mse, tmp_path) for _ in range(2))
    assert once.fingerprint() == again.fingerprint()
    for other in ((nn.ReLU, mse), (nn.Tanh, l1)):
        with pytest.raises(ValueError, match=r"other settings: family\.first"):
            learned(*other, tmp_path)


def test_other_settings_and_damaged_parts_are_refused(tmp_path):
    train(Journal(tmp_path))
    with pytest.raises(ValueError, match="holds a run with other settings: seed is 0, and would be 1"):
        train(Journal(tmp_path), seed=1)
    with pytest.raises(ValueError, match=r"other settings: family\.steps is 4, and would be 5"):
        train(Journal(tmp_path), of=tabular(steps=5))
    rate = next((tmp_path / "reference" / "cells").glob("*.json"))
    rate.write_text('{"loss": 1.0}')
    with pytest.raises(ValueError, match="must say what it has cost"):
        train(Journal(tmp_path))
    rate.write_text("{")
    with pytest.raises(ValueError, match="Delete the file, and it is computed again"):
        train(Journal(tmp_path))


def test_a_second_run_is_refused_while_the_first_lives(tmp_path):
    counted = Counted(family())
    with (
        parts_of(Journal(tmp_path), "usage", counted, {}),
        pytest.raises(BlockingIOError, match="another run is writing to"),
        parts_of(Journal(tmp_path), "usage", counted, {}),
    ):
        pass


def test_what_was_done_before_counts_for_all_who_count():
    outer = Counted(family())
    Parts(Counted(outer)).family.spent(7, 1.5)
    assert (outer.batches, outer.seconds) == (7, 1.5)


def test_ctrl_c_leaves_a_run_that_the_same_command_continues(tmp_path):
    torch.save(family().example(), tmp_path / "start.pt")
    options = ["tabular", "--steps", "4", "--tasks", "1", "--start", tmp_path / "start.pt", "--learn-start"]
    out, whole = tmp_path / "x.safetensors", tmp_path / "whole.safetensors"
    cells = tmp_path / "x.safetensors.run" / "usage" / "cells"
    first = processes.run(processes.command, "cell:20:SIGINT", "train", *options, "--out", out)
    assert first.code == 130, first.err
    assert "the same command continues" in first.err
    assert not out.exists()
    made = {p: p.stat().st_mtime_ns for p in cells.glob("run-*.json")}
    assert cli.run(["train", *map(str, options), "--seed", "7", "--out", str(out)]) == 2
    for where in (out, whole):
        assert cli.run(["train", *map(str, options), "--out", str(where)]) == 0
    assert said(load(out)) == said(load(whole))
    assert all(torch.equal(x, load(whole).start[n]) for n, x in load(out).start.items())
    assert all(p.stat().st_mtime_ns == when for p, when in made.items()), "runs that were there are read"


def test_a_usage_after_rounds_continues_too(tmp_path):
    learned = meta_train(tabular(steps=20), Diagonal(), outer_steps=1, tasks_per_step=1)
    options = {"tasks": 1, "factors": (1.0,), "journal": Journal(tmp_path)}
    once, again = (learn_usage(learned, tabular(steps=20), **options) for _ in range(2))
    assert said(once) == said(again)
    start = starting_at(quadratic(steps=10), {"theta": torch.ones(2, dtype=torch.float64)})
    first, second = (learn_start(start, tasks=2, journal=Journal(tmp_path / "start")) for _ in range(2))
    assert torch.equal(first["theta"], second["theta"])
    assert (first.tasks, first.cost) == (second.tasks, second.cost)


@pytest.mark.parametrize("kept", [False, True])
def test_several_workers_learn_the_same_bits_at_the_same_cost(whole, kept, tmp_path):
    learned, _ = whole
    journal = Journal(tmp_path) if kept else None
    assert said(meta_train(family(), tasks_per_step=1, journal=journal, workers=2)) == said(learned)


@pytest.mark.parametrize(
    ("potential", "options"),
    [(Kronecker(), {}), (MaxDiagonal(2), {"estimator": Evolution()}), (Diagonal(), {"estimator": Reverse()})],
    ids=["closed form", "random", "reverse"],
)
def test_several_workers_make_the_same_outer_steps(potential, options):
    options |= {"outer_steps": 2, "tasks_per_step": 3}
    one, two = (meta_train(tabular(steps=4), potential, workers=n, **options) for n in (1, 2))
    assert said(one) == said(two)


def test_a_learning_says_how_far_it_is(capsys):
    with showing("always"):
        train()
    lines = capsys.readouterr().err
    cost = train().header.cost["gradient_evaluations"]
    assert re.match(
        r"tabular: 15 runs of Adam and about \d+ to choose a usage, of 4 steps each, which take .* ms here", lines
    )
    assert re.search(r"^online metric, tail average, .*: score ", lines, re.MULTILINE)
    assert f"learning tabular: {cost:g} of {cost:g} in " in lines, "the bar counts gradients, all of them"


def test_a_bar_moves_within_its_stages_and_never_past_its_end():
    """Of every batch the forecast is told, so that no stage stands still."""
    seen = []

    class Seen(Progress):
        def update(self, done, note="", total=None):
            super().update(done, note, total)
            seen.append((self.done, self.total, note))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("metamd.learning.parts.Progress", Seen)
        learned = train()
    counts = [done for done, _, _ in seen]
    assert counts[-1] == learned.header.cost["gradient_evaluations"]
    assert max(b - a for a, b in itertools.pairwise(counts)) == 1
    assert all(done <= total for done, total, _ in seen)
    assert list(dict.fromkeys(note for _, _, note in seen if note)) == [
        "Adam's rate",
        "runs to learn from",
        "online scales",
        "usages",
    ]


def test_kept_parts_are_no_measure_of_the_time_that_is_left(tmp_path, capsys):
    train(Journal(tmp_path))
    skipped = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Progress, "skip", lambda progress, count: skipped.append(count))
        learned = train(Journal(tmp_path))
    assert sum(skipped) == learned.header.cost["gradient_evaluations"]


def test_a_network_has_a_log_too(tmp_path):
    """The same records whether parts were kept or not, each with its number."""
    logs = [[], []]
    for seen in logs:
        meta_train(family(), tasks_per_step=1, journal=Journal(tmp_path), log=lambda *told, seen=seen: seen.append(told))
    assert logs[0] == logs[1]
    records = [record for record, _ in logs[0]]
    assert [record["step"] for record in records] == [number for _, number in logs[0]] == list(range(1, len(records) + 1))
    assert [r["note"] for r in records[:4]] == [f"Adam with rate {rate:g}" for rate in REFERENCE_RATES]
    assert records[-1]["note"].startswith("chosen: ")
    assert records[-1]["objective"] == min(r["objective"] for r in records if r["note"].startswith(records[-1]["note"][8:]))

"""Comparisons as they are made: paired, kept as records, screened, timed, in processes and on a cluster."""

import json
import math
import os
import signal
import socket
from dataclasses import replace

import pytest
import torch

from metamd import Comparison, Diagonal, Measuring, Protocol, compare, handicap, learned_rival, load, meta_train, tasks
from metamd.cli import main as cli
from metamd.comparison.entrants import draw_configs
from metamd.comparison.entrants import entrants as entered
from metamd.comparison.tuning import QuasiRandom
from metamd.experiments.declare import Entrant, Geometry, Scale
from metamd.experiments.experiment import Experiment
from metamd.files.store import Records
from metamd.inner.executor import Cell, Executor, fill
from metamd.rivals import rival
from tests import processes
from tests.small_comparisons import bare

"""Comparisons: A/A finds no winner, a planted one is found; statistics against scipy; cells that survive what kills them."""


QUADRATIC = tasks.quadratic((0.5, 4.0), steps=40)


def entrants():
    learned = meta_train(QUADRATIC, Diagonal(), outer_steps=3, tasks_per_step=4)
    return {
        "MetaMD": learned_rival(learned).untuned(),
        "SGD": handicap(rival("sgd"), budget=7),
        "Adam": handicap(rival("adam"), "linear", budget=7),
        "Adam, untuned": rival("adam").untuned(),
    }


def test_a_comparison_is_its_records(tmp_path):
    who = entrants()
    found = compare(who, QUADRATIC, bare(seeds=5), folder=tmp_path).aiming("SGD")
    assert len(list((tmp_path / "cells").iterdir())) == 5 * (1 + 7 + 7 + 1) + 1  # and the seconds
    verdicts = {d.label: d.wins for d in found.differences("mean_loss")}
    assert verdicts == {"SGD": 5, "Adam": 5, "Adam, untuned": 5}
    assert found.metrics == ["mean_loss", "final_loss", "steps_to_target", "seconds_to_target"]
    again = Comparison.read(tmp_path).aiming("SGD")
    for label in found.labels:
        for metric in found.metrics:
            assert again.values(label, metric).tolist() == found.values(label, metric).tolist()
    assert again.learning_gradients("MetaMD") == found.learning_gradients("MetaMD") > 0
    # nothing is computed twice, and another rival may join
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}
    more = compare({**who, "RMSprop": rival("rmsprop").untuned()}, QUADRATIC, bare(seeds=5), folder=tmp_path)
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}
    assert {n: after[n] for n in before} == before
    assert len(after) == len(before) + 5 + 1
    assert more.values("SGD", "mean_loss").tolist() == found.values("SGD", "mean_loss").tolist()
    with pytest.raises(ValueError, match="other settings"):
        compare(who, QUADRATIC, bare(seeds=5, steps=7), folder=tmp_path)


def test_screening_runs_the_best_few_of_the_first_task_and_keeps_what_it_dropped(tmp_path):
    who = entrants()
    whole = compare(who, QUADRATIC, bare(seeds=4))
    found = compare(who, QUADRATIC, bare(seeds=4, screen=2), folder=tmp_path)
    firsts = [c.outcomes[0] for c in whole.folds[0].entrants["SGD"]]
    kept = set()
    for value in (lambda o: o.mean_loss, lambda o: o.final_loss):
        kept |= {id(o) for o in sorted(firsts, key=value)[:2]}
    sizes = [len(c.outcomes) for c in found.folds[0].entrants["SGD"]]
    assert sizes == [4 if id(o) in kept else 1 for o in firsts]
    assert found.chosen("SGD", "mean_loss")[0].contender == whole.chosen("SGD", "mean_loss")[0].contender
    spent = [sum(o.gradients for c in x.folds[0].entrants["SGD"] for o in c.outcomes) for x in (found, whole)]
    assert spent[0] < spent[1]
    assert found.folds[0].tuning_gradients("SGD") > 0.9 * whole.folds[0].tuning_gradients("SGD") > 0.9 * spent[1] / 4 - 1
    assert "first task" in found.screening
    assert not whole.screening
    again = Comparison.read(tmp_path)
    assert [len(c.outcomes) for c in again.folds[0].entrants["SGD"]] == sizes
    assert again.values("Adam", "mean_loss").tolist() == found.values("Adam", "mean_loss").tolist()
    with pytest.raises(ValueError, match="screen must be at least 1, got 0"):
        compare(who, QUADRATIC, Protocol(screen=0))
    both = {label: who[label] for label in ("SGD", "Adam")}
    first = compare(both, QUADRATIC, bare(seeds=4, screen=1))
    assert first.groups == [0] * 4, "the first label may have been screened too"
    assert first.differences("mean_loss")[0].label == "Adam"


def test_several_processes_give_what_one_gives(tmp_path):
    who = entrants()
    one = compare(who, QUADRATIC, bare(seeds=3))
    two = compare(who, QUADRATIC, bare(seeds=3), folder=tmp_path, workers=2)
    for label in one.labels:
        assert one.values(label, "mean_loss").tolist() == two.values(label, "mean_loss").tolist()


def test_runs_are_paired():
    found = compare({"a": rival("sgd").with_setting(lr=0.01), "b": rival("adam").untuned()}, QUADRATIC, bare(seeds=3))
    for one, two in zip(found.chosen("a", "mean_loss")[0].outcomes, found.chosen("b", "mean_loss")[0].outcomes, strict=True):
        assert one.config == two.config
        assert one.losses[0] == two.losses[0]


def test_a_rival_under_two_schedules_is_timed_once():
    who = {
        "a": rival("sgd").with_setting(lr=0.01),
        "b": rival("sgd").with_setting("linear", lr=0.02),
        "c": rival("adam").untuned(),
    }
    seconds = compare(who, QUADRATIC, bare(seeds=1)).folds[0].seconds
    assert seconds["a"] == seconds["b"] != seconds["c"]


def test_every_domain_has_its_seeds():
    data = {n: (torch.randn(30, 4), torch.arange(30) % 3) for n in "xyz"}
    family = tasks.supervised(lambda: torch.nn.Linear(4, 3), data, batch_size=5, steps=10)
    groups = draw_configs(family, 2, 0)
    assert {g: len(configs) for g, configs in groups.items()} == {"x": 2, "y": 2, "z": 2}
    assert all(c["dataset"] == g for g, configs in groups.items() for c in configs)
    found = compare({"a": rival("sgd").untuned()}, family, Protocol(seeds=2))
    assert [f.group for f in found.folds] == ["x", "y", "z"]
    assert found.groups == [0, 0, 1, 1, 2, 2]
    assert "test_error" in found.metrics


def test_tasks_that_are_drawn_are_different_ones():
    """One problem that counts twelve times would be a verdict of twelve pairs."""
    configs = draw_configs(tasks.rosenbrock(shift=0.1), 12, 0)["rosenbrock"]
    assert len({json.dumps(c) for c in configs}) == 12
    plain = tasks.rosenbrock()
    assert len(draw_configs(plain, 1, 0)["rosenbrock"]) == 1
    generator = torch.Generator().manual_seed(0)
    assert len({json.dumps(plain.sample(generator)) for _ in range(20)}) == 1, "no -0 beside 0"
    with pytest.raises(ValueError, match=r"2 different tasks are required.* no other than the 1 that are there. Ask for 1"):
        draw_configs(plain, 2, 0)


def test_an_optimiser_that_diverges_at_once_is_timed_and_hides_nobodys_seconds():
    wild = {"SGD": rival("sgd").with_setting(lr=0.01), "wild": rival("sgd").with_setting(lr=1e12)}
    found = compare(wild, QUADRATIC, bare(seeds=2))
    assert "seconds_to_target" in found.metrics
    assert found.folds[0].seconds["wild"] > 0
    assert set(found.values("wild", "seconds_to_target")) == {math.inf}

    def timed(seconds):
        return replace(found, folds=tuple(replace(f, seconds=seconds) for f in found.folds))

    unknown = timed({"SGD": 1.0, "wild": math.nan})
    assert "seconds_to_target" in unknown.metrics, "of runs that all failed no seconds are needed"
    assert set(unknown.values("wild", "seconds_to_target")) == {math.inf}
    assert "seconds_to_target" not in timed({"SGD": math.nan, "wild": 1.0}).metrics


def test_settings_are_screened_where_a_split_has_no_error_to_show():
    family = tasks.tabular(steps=5)
    both = [rival("sgd").with_setting(lr=x) for x in (0.1, 0.2, 0.4)]
    found = compare({"a": both}, family, Protocol(seeds=2, screen=1, measuring=Measuring(splits=("train", "test"))))
    assert found.screening


def test_workers_compare_without_a_folder():
    both = {"a": rival("sgd").untuned(), "b": rival("adam").untuned()}
    here, there = (compare(both, QUADRATIC, Protocol(seeds=2, steps=8), workers=n) for n in (1, 2))
    assert all(here.values(n, "mean_loss").tolist() == there.values(n, "mean_loss").tolist() for n in both)


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as silent:  # a port that is taken, and where nobody listens
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"there is no Ray cluster at '{address}'.*ray start --head"):
            fill(Records(tmp_path, {}), [Cell("a", dict)], title="t", workers=Executor(ray=address))


def test_bad_comparisons_are_sentences():
    with pytest.raises(ValueError, match="at least one optimiser"):
        compare({}, QUADRATIC)
    with pytest.raises(ValueError, match="'x' has no contender"):
        compare({"x": []}, QUADRATIC)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        compare({"x": rival("sgd").untuned()}, QUADRATIC, workers=0)
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        compare({"x": rival("sgd").untuned()}, QUADRATIC, Protocol(seeds=0))


def test_a_killed_worker_is_replaced_and_its_cell_run_again(tmp_path):
    """The first attempt at one cell kills its own process, as the kernel does when memory is short."""

    def compute(i):
        mark = tmp_path / f"tried-{i}"
        first = not mark.exists()
        mark.touch()
        if i == 2 and first:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"i": i, "process": os.getpid()}

    cells = [Cell(f"c{i}", lambda i=i: compute(i)) for i in range(6)]
    found = fill(Records(tmp_path / "r", {}), cells, title="t", workers=2)
    assert [r["i"] for r in found.values()] == list(range(6))
    assert all(r["process"] != os.getpid() for r in found.values())


def fill_on_ray(folder):
    """A killed actor's cell is run again; the records are written here, whatever process computed them."""

    def compute(i):
        mark = folder / f"tried-{i}"
        first = not mark.exists()
        mark.touch()
        if i == 2 and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if i == 9:
            raise ValueError("nine is too many.")
        return {"i": i, "process": os.getpid()}

    cells = [Cell(f"c{i}", lambda i=i: compute(i)) for i in range(5)]
    found = fill(Records(folder / "r", {}), cells, title="t", workers=Executor(2, "local"))
    assert [r["i"] for r in found.values()] == list(range(5))
    assert os.getpid() not in {r["process"] for r in found.values()}
    assert fill(Records(folder / "r", {}), cells, title="t", workers=Executor(2, "local")) == found
    with pytest.raises(ValueError, match=r"^nine is too many\.$"):
        fill(Records(folder / "r", {}), [Cell("c9", lambda: compute(9))], title="t", workers=Executor(ray="local"))


def compare_on_ray(folder):
    both = {"a": rival("sgd").untuned(), "b": rival("muon").untuned()}
    rules = bare(seeds=2, steps=12)
    there = compare(both, tasks.quadratic(), rules, folder=folder, workers=2, ray="local")
    here = compare(both, tasks.quadratic(), rules)
    assert there.values("b", "mean_loss").tolist() == here.values("b", "mean_loss").tolist()


def experiment_on_ray(folder):
    """What is learned there comes here as a file."""
    family = tasks.quadratic((0.5, 1.0), steps=20)
    family.held_out = lambda: tasks.quadratic((0.5, 1.0), steps=20)
    size = Scale(("a",), None, 20, 1, 2, 1, 2, ("sgd",), ("constant",), usage_tasks=0, measuring=Measuring(splits=()))
    experiment = Experiment(
        "x", lambda size, domain: family, {"d": Geometry(Diagonal(), {"MetaMD": Entrant()})}, {"t": size}, {}
    )
    experiment = replace(experiment, target="SGD")
    found = {ray: experiment.compared("t", folder / str(ray), 0, Executor(2, ray))[0][0] for ray in (None, "local")}
    files = [load(folder / where / "learned" / "a-d.safetensors").fingerprint() for where in ("None", "local")]
    assert files[0] == files[1]
    assert [p.name for p in (folder / "local" / "learned").iterdir()] == ["a-d.safetensors"], "nothing else is left here"
    assert found["local"].values("MetaMD", "mean_loss").tolist() == found[None].values("MetaMD", "mean_loss").tolist()


def tune_on_ray(folder):
    inputs, tuned = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), {}
    points = {"a": (inputs, (inputs.sum(1) > 0).long())}
    sorting = tasks.supervised(lambda: torch.nn.Linear(4, 2), points, batch_size=10, steps=5)
    for where in (None, "local"):
        records = Records(folder / f"tuning-{where}", {})
        rules = Protocol("paper", budget=3, schedules=["constant"], search=QuasiRandom)
        everybody = entered({}, [rival("sgd"), rival("adam")], sorting, rules, records=records, workers=Executor(ray=where))
        tuned[where] = everybody["Adam"].setting
    names = [sorted(p.name for p in (folder / f"tuning-{where}" / "cells").iterdir()) for where in (None, "local")]
    assert names[0] == names[1]
    assert len(names[0]) == 2 * 3 + 2
    assert tuned["local"] == tuned[None]


def all_on_ray(folder):
    # others are being tested beside it: workers are as urgent as they are, and a slow start is no error
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "600"}
    small = [
        "--protocol",
        "handicap",
        "--rivals",
        "sgd",
        "--schedules",
        "constant",
        "--budget",
        "2",
        "--seeds",
        "1",
        "--steps",
        "10",
    ]
    assert cli.run(["compare", "quadratic", "quadratic", "--out", str(folder / "c"), *small, "--ray", "local"]) == 0
    assert (folder / "c" / "report.html").exists()

    import ray

    assert not ray.is_initialized(), "the cluster of the command is gone"
    begun = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)  # one for all that follows
    assert begun.address_info["node_ip_address"] == "127.0.0.1", "as the command's was, in this process"
    for work in (fill_on_ray, compare_on_ray, experiment_on_ray, tune_on_ray):
        (folder / work.__name__).mkdir()
        work(folder / work.__name__)
    ray.shutdown()
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = True  # as if it had been imported before
    with pytest.raises(ValueError, match="must be out of reach of other machines"):
        fill(Records(folder / "open", {}), [Cell("a", dict)], title="t", workers=Executor(ray="local"))


def test_a_local_ray_cluster(tmp_path):
    """In a process of its own, which leaves no cluster behind, and with one cluster for nearly all: each takes seconds."""
    pytest.importorskip("ray")
    ended = processes.run(all_on_ray, tmp_path)
    assert ended.code == 0, ended.err


def test_a_cell_that_always_kills_its_process_is_given_up(tmp_path):
    cells = [Cell("good", lambda: {}), Cell("bad", lambda: os.kill(os.getpid(), signal.SIGKILL))]
    with pytest.raises(ChildProcessError, match=r"'bad' was killed 3 times \(code -9\)"):
        fill(Records(tmp_path, {}), cells, title="t", workers=2)


def test_the_sentence_of_a_cell_arrives(tmp_path):
    def bad():
        raise ValueError("lr must be positive.")

    def bug():
        raise KeyError("x")

    def full():
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="No space left on device"):
        fill(Records(tmp_path / "c", {}), [Cell("a", full), Cell("b", dict)], title="t", workers=2)
    with pytest.raises(ValueError, match=r"^lr must be positive\.$"):
        fill(Records(tmp_path / "a", {}), [Cell("a", bad), Cell("b", dict)], title="t", workers=2)
    with pytest.raises(RuntimeError, match="a: KeyError"):
        fill(Records(tmp_path / "b", {}), [Cell("a", bug), Cell("b", dict)], title="t", workers=2)
    with pytest.raises(ValueError, match="workers must be at least 1"):
        fill(Records(tmp_path / "c", {}), [], title="t", workers=0)


def fill_twelve(point, folder, workers):
    def compute(i):
        with (folder / "log").open("a") as log:
            log.write(f"{i}\n")
        return {"i": i}

    processes.arm(point)
    cells = [Cell(f"c{i}", lambda i=i: compute(i)) for i in range(12)]
    fill(Records(folder / "r", {}), cells, title="t", workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_filling_survives_ctrl_c_and_kill(tmp_path, how, workers):
    assert processes.run(fill_twelve, f"cell:3:{how}", tmp_path, workers).code != 0
    done = {p.stem for p in tmp_path.glob("r/cells/*.json")}
    assert len(done) == 3
    before = (tmp_path / "log").read_text().split()
    fill_twelve("", tmp_path, workers)
    log = (tmp_path / "log").read_text().split()
    assert {p.stem for p in tmp_path.glob("r/cells/*.json")} == {f"c{i}" for i in range(12)}
    assert not {f"c{i}" for i in log[len(before) :]} & done, "a finished cell was run twice"

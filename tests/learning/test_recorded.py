"""Runs as files, `learn`, `update` and `metamd update`."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import metamd
from metamd import Diagonal, LearnedOptimiser, MetaMD, Recorder, Regret, Run, learn
from metamd.cli import main as cli
from metamd.files import learned as learned_module
from metamd.files.learned import Moments
from metamd.inner.run import run_inner
from metamd.learning.recorded import RECORDED_PRIOR, update
from metamd.tasks.base import Task
from tests import processes
from tests.helpers import closed_form, small_model, train
from tests.learned_files import Parts, learned, same

VERSION_1 = Path(__file__).parents[1] / "frozen" / "version-1.safetensors"
TYINGS = ("parameter", "channel", "column", "tensor", "role")


def recorded(seed=0, steps=12, model=None, dtype=torch.float32, **options):
    model = small_model(seed, dtype) if model is None else model
    optimiser = torch.optim.Adam(model.named_parameters(), lr=0.01)
    recorder = Recorder(optimiser, name=f"night-{seed}", batch_size=16, **{"tying": "parameter"} | options)
    train(model, optimiser, steps, seed)
    return recorder.finish()


def logs(found):
    return {k: v.detach() for k, v in found.potential.log_d.items()}


def agree(one, two, tolerance):
    a, b = logs(one), logs(two)
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0, atol=tolerance) for k in a)


# the closed form


class Regression(Task):
    """A small network on random data; the batch depends on the step alone."""

    def __init__(self, seed):
        super().__init__({"seed": seed}, steps=15)
        self.model = small_model(seed, torch.float64)

    def init(self):
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def batch(self, step):
        g = torch.Generator().manual_seed(100 * self.config["seed"] + step)
        x = torch.randn(16, 5, generator=g, dtype=torch.float64)
        return x, x[:, :3].sin()

    def loss(self, params, batch):
        return (torch.func.functional_call(self.model, dict(params), (batch[0],)) - batch[1]).square().mean()

    def evaluate(self, params, split="test"):
        raise AssertionError("nothing is evaluated while learning")


def record_as_run_inner(task, lr):
    """The same run as `run_inner`'s, by the optimiser and an ordinary loop."""
    named = {n: nn.Parameter(x) for n, x in task.init().items()}
    optimiser = MetaMD(list(named.items()), Diagonal(), lr=lr)
    recorder = Recorder(optimiser, name=f"task {task.config['seed']}", tying="parameter")
    for t in range(task.steps):
        optimiser.zero_grad()
        task.loss(named, task.batch(t)).backward()
        optimiser.step()
    return recorder.finish()


@pytest.mark.parametrize("prior", [0.0, RECORDED_PRIOR, 2.0])
@pytest.mark.parametrize("weights", [None, [1.0, 0.25, 4.0]])
@pytest.mark.parametrize("tying", TYINGS)
def test_learn_equals_the_closed_form_on_the_same_trajectories(tying, weights, prior):
    tasks = [Regression(seed) for seed in range(3)]
    potential = Diagonal(tying=tying).bind(tasks[0].init())
    trajectories = [run_inner(task, potential, lr=0.1) for task in tasks]
    # lr enters the closed form as a factor: learned files fix eta = 1
    wanted = closed_form([replace(t, lr=1.0) for t in trajectories], potential, Regret(prior=prior), weights=weights)
    runs = [record_as_run_inner(task, 0.1) for task in tasks]
    found = logs(learn(runs, tying=tying, weights=weights, prior=prior))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=0, atol=1e-10)
    for run, trajectory in zip(runs, trajectories, strict=True):
        tied = run.tied_squares(tying)
        assert all(torch.allclose(tied[n].sum(0), s, rtol=1e-10, atol=0) for n, s in trajectory.squares.items())


def test_learn_by_hand():
    """Of each run x_i + s q y_i and (1 + s) y_i, q = sum x / sum y; D_i^2 is the ratio of their weighted sums."""
    x1, y1, x2, y2 = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 4], [2.0, 8], [0.0, 9], [6.0, 1]))
    zero = {"x": torch.zeros(2, dtype=torch.float64)}
    runs = [Run(zero, {"x": x.sqrt()}, {"x": y[None]}, {"x": 1.0}, steps=5) for x, y in ((x1, y1), (x2, y2))]
    for prior in (0.0, 0.3):
        x = sum(w * (x + prior * x.sum() / y.sum() * y) for w, x, y in ((1, x1, y1), (3, x2, y2)))
        y = (1 + prior) * (y1 + 3 * y2)
        found = logs(learn(runs, weights=[1, 3], prior=prior))["x"][0]
        assert torch.allclose(found.exp(), (y / x).sqrt(), rtol=1e-12)


def test_header_says_where_it_comes_from():
    runs = [recorded(seed, steps) for seed, steps in ((0, 10), (1, 20))]
    header = learn(runs, weights=[1, 3]).header
    assert header.horizon == 18  # (10 + 3 * 20) / 4, rounded
    assert (header.batch_size, header.tying, header.pieces) == (16, "parameter", 1)
    assert header.model == runs[0].model
    assert [row["weight"] for row in header.learned_from["runs"]] == [1, 3]
    assert [row["name"] for row in header.learned_from["runs"]] == ["night-0", "night-1"]
    assert header.learned_from["prior"] == RECORDED_PRIOR
    assert header.cost == {"runs": 2, "gradient_evaluations": 30}
    assert header.versions["torch"] == torch.__version__
    rms = [run.gradient_rms["0.weight"] ** 2 for run in runs]
    assert header.gradient_scale["0.weight"] == pytest.approx(math.sqrt((rms[0] + 3 * rms[1]) / 4))
    assert header.objective == "Regret(comparator=End(), prior=0.1)"


def test_a_learned_geometry_trains_without_a_warning():
    found = learn([recorded(seed) for seed in range(3)])
    model = small_model(7)
    losses = train(model, MetaMD(model.named_parameters(), found), 12, seed=7)
    assert losses[-1] < losses[0]


def test_by_role_runs_of_different_widths_and_depths_are_combined():
    torch.manual_seed(0)

    def network(*widths):
        pairs = zip((5, *widths), (*widths, 3), strict=True)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairs))

    runs = [recorded(i, model=network(*widths)) for i, widths in enumerate([(8,), (6, 7), (4,)])]
    found = learn(runs, tying="role")
    assert found.header.model == {}
    assert set(logs(found)) == {"first.weight", "first.bias", "hidden.weight", "hidden.bias", "last.weight", "last.bias"}
    wide = network(32, 16, 9)
    train(wide, MetaMD(wide.named_parameters(), found, lr=0.1), 3)
    assert agree(update(learn(runs[:2], tying="role"), runs[2:]), found, 1e-6)
    with pytest.raises(ValueError, match="is of another model"):
        learn(runs)


# what is refused


def test_runs_of_another_model_are_refused():
    run = recorded(0)
    other = recorded(1, model=nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)))
    sentence = (
        r"the run 'night-1' \(2 of 2\) is of another model: it has '0.weight' of shape \(9, 5\), where the others have"
    )
    with pytest.raises(ValueError, match=sentence):
        learn([run, other])
    renamed = replace(run, **{p: {f"net.{n}": x for n, x in getattr(run, p).items()} for p in ("start", "end", "squares")})
    with pytest.raises(ValueError, match=r"it has no '0.weight', where the others have '0.weight' of shape"):
        learn([run, replace(renamed, gradient_rms={f"net.{n}": v for n, v in run.gradient_rms.items()})])


def poisoned(run, part, value=math.nan):
    tensors = {n: x.clone() for n, x in getattr(run, part).items()}
    tensors["2.bias"].view(-1)[0] = value
    return replace(run, **{part: tensors})


@pytest.mark.parametrize("part", ["end", "squares"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_run_is_refused_by_name(part, value):
    runs = [recorded(0), poisoned(recorded(1), part, value)]
    with pytest.raises(ValueError, match=r"the run 'night-1' \(2 of 2\) diverged: The .* of '2.bias' is not finite"):
        learn(runs)
    with pytest.raises(ValueError, match=r"the run 'night-1' .* diverged"):
        update(learn(runs[:1]), runs[1:])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weights": [1.0]}, "one weight for every run, got 1 for 2 runs"),
        ({"weights": [1.0, 0.0]}, "weights must be positive and finite"),
        ({"weights": [1.0, math.nan]}, "weights must be positive and finite"),
        ({"prior": -1.0}, "prior must be finite and not negative"),
    ],
)
def test_wrong_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        learn([recorded(0), recorded(1)], **options)


def test_no_run_the_same_run_or_two_tyings_are_refused():
    with pytest.raises(ValueError, match="at least one run to learn from, got none"):
        learn([])
    with pytest.raises(ValueError, match=r"'again' \(2 of 2\) is there already"):
        learn([recorded(0), replace(recorded(0), name="again")])
    with pytest.raises(ValueError, match="recorded with the tyings 'channel', 'parameter'"):
        learn([recorded(0), recorded(1, tying="channel")])
    assert learn([recorded(0), recorded(1, tying="channel")], tying="tensor").header.tying == "tensor"


# updates


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_updates_give_what_learning_from_all_runs_at_once_gives(dtype, tmp_path):
    runs = [recorded(seed, 10 + seed, dtype=dtype) for seed in range(4)]
    found = learn(runs[:1], weights=[2.0])
    for i, run in enumerate(runs[1:]):
        found.save(tmp_path / f"{i}.safetensors")  # through files, as nights do
        found = update(metamd.load(tmp_path / f"{i}.safetensors"), [run])
    at_once = learn(runs, weights=[2.0, 1, 1, 1])
    assert agree(found, at_once, 1e-12 if dtype == torch.float64 else 1e-5)
    assert found.header.gradient_scale == pytest.approx(at_once.header.gradient_scale, rel=1e-5)
    alike = {f: getattr(at_once.header, f) for f in ("horizon", "batch_size", "cost", "learned_from", "model")}
    assert alike == {f: getattr(found.header, f) for f in alike}


def test_decay_forgets():
    old, new = [recorded(s, dtype=torch.float64) for s in (0, 1)], recorded(2, dtype=torch.float64)
    found = update(learn(old), [new], decay=0.25)
    assert agree(found, learn([*old, new], weights=[0.25, 0.25, 1]), 1e-12)
    assert not agree(found, learn([*old, new]), 1e-3)
    assert [row["weight"] for row in found.header.learned_from["runs"]] == [0.25, 0.25, 1]
    for wrong in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="decay must be above 0 and at most 1"):
            update(learn(old), [new], decay=wrong)


def test_an_update_keeps_what_it_was_given_and_refuses_what_it_has():
    first = learn([recorded(0)])
    described = replace(first, header=replace(first.header, family={"name": "nights"}))
    assert update(described, [recorded(1)]).header.family == {"name": "nights"}
    with pytest.raises(ValueError, match=r"'night-0' .* is there already"):
        update(first, [recorded(0)])
    with pytest.raises(ValueError, match="does not hold the sums of the runs"):
        update(replace(first, moments=None), [recorded(1)])
    with pytest.raises(ValueError, match="does not hold the sums of the runs"):
        update(learned(), [recorded(1)])
    bound = first.bind(small_model().named_parameters())
    assert agree(update(bound, [recorded(1)]), update(first, [recorded(1)]), 0)


# starving: with the end of the run as comparator, what moves little is given smaller and smaller steps


def night(geometry, seed, steps=200):
    """Linear regression with noise; the bias starts where it belongs, so that it has nothing to do."""
    g = torch.Generator().manual_seed(seed)
    model = nn.Linear(10, 1).double()
    target = torch.randn(1, 10, generator=g, dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    named = model.named_parameters()
    optimiser = torch.optim.SGD(named, lr=0.05) if geometry is None else MetaMD(named, geometry)
    recorder = Recorder(optimiser, name=str(seed), tying="parameter")
    for _ in range(steps):
        x, noise = (torch.randn(16, k, generator=g, dtype=torch.float64) for k in (10, 1))
        optimiser.zero_grad()
        (model(x) - x @ target.T - noise).square().mean().backward()
        optimiser.step()
    return recorder.finish()


def bias_rates(prior, nightly, rounds=6):
    """The learned step size of the bias after each round, in units of the rate that the first nights used."""
    rates, geometry = [], None
    for r in range(rounds):
        if geometry is not None and nightly:
            geometry = update(geometry, [night(geometry, 100 * r)], decay=0.5)
        else:
            geometry = learn([night(geometry, 100 * r + i) for i in range(3)], prior=prior)
        rates.append(float(logs(geometry)["bias"].neg().exp()) / 0.05)
    return rates


@pytest.mark.filterwarnings(
    "ignore::metamd.OffFamilyWarning"
)  # of two tensors, one starts at its optimum: its scale is noise
@pytest.mark.parametrize("nightly", [False, True])
def test_the_prior_keeps_what_moves_little_from_starving(nightly):
    starved, kept = bias_rates(0.0, nightly), bias_rates(RECORDED_PRIOR, nightly)
    assert starved[-1] < 0.05
    assert starved[-1] < starved[0] / 2, "and it goes on falling"
    assert min(kept) > 0.15
    assert min(kept) > kept[0] / 2


# the file of a run


def test_a_run_file_gives_back_what_was_recorded(tmp_path):
    for i, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
        run = recorded(i, dtype=dtype, tying=TYINGS[i])
        run.save(tmp_path / "x.st")
        found = Run.load(tmp_path / "x.st")
        assert found.fingerprint() == run.fingerprint()
        fields = ("steps", "tying", "batch_size", "name", "optimiser", "versions", "model", "phases", "gradient_rms")
        assert all(getattr(found, f) == getattr(run, f) for f in fields)
        assert same(learn([found]), learn([run]))
        assert repr(found) == repr(run)


def test_half_precision_and_divergence_can_be_saved(tmp_path):
    run = recorded(0)
    half = replace(run, start={n: x.half() for n, x in run.start.items()}, end={n: x.half() for n, x in run.end.items()})
    for made in (half, poisoned(run, "squares")):
        made.save(tmp_path / "x.st")
        found = Run.load(tmp_path / "x.st")
        assert found.fingerprint() == made.fingerprint()
        assert found.diverged == made.diverged


def fields_of(parts, **changes):
    metadata = parts.table["__metadata__"]
    plain = {**json.loads(metadata["metamd.run"]), **changes}
    metadata["metamd.run"] = json.dumps({k: v for k, v in plain.items() if v is not ...})


DAMAGE = {
    "field": (lambda p: fields_of(p, owner="me"), "its header must have name, tying"),
    "no field": (lambda p: fields_of(p, steps=...), "its header must have name, tying"),
    "version": (lambda p: fields_of(p, schema_version=3), "the schema_version of its header must be 1 or 2, got 3"),
    "steps": (lambda p: fields_of(p, steps=0), "the steps of its header must be an integer of at least 1"),
    "phases": (lambda p: fields_of(p, phases=2), "must have the shape"),
    "tying": (lambda p: fields_of(p, tying="tensor"), "must have the shape"),
    "model": (lambda p: fields_of(p, model=[]), "model must name one tensor"),
    "rows": (lambda p: fields_of(p, model=[{"name": 1, "shape": []}]), "model must be a list"),
    "shape": (lambda p: fields_of(p, model=[{"name": "a", "shape": [-1]}]), "shapes of integers"),
    "name": (lambda p: fields_of(p, name="other"), "does not match its checksum"),
    "kind": (lambda p: p.table["__metadata__"].update({"metamd": "{}"}), "but no recorded run"),
    "tensor": (lambda p: p.table.update({"start/1": p.table.pop("start/0.weight")}), "is missing"),
    "bytes": (lambda p: p.data.__setitem__(-1, p.data[-1] ^ 1), "checksum|negative"),
    "cut": (lambda p: p.data.pop(), "safetensors refuses the file"),
}


@pytest.mark.parametrize(("change", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_run_file_is_refused(change, sentence, tmp_path):
    recorded(0).save(tmp_path / "x.st")
    parts = Parts((tmp_path / "x.st").read_bytes())
    change(parts)
    (tmp_path / "y.st").write_bytes(parts.join())
    with pytest.raises(ValueError, match=f"y.st' cannot be loaded: .*({sentence})"):
        Run.load(tmp_path / "y.st")


def test_negative_sums_and_other_files_are_refused(tmp_path):
    poisoned(recorded(0), "squares", -1.0).save(tmp_path / "x.st")
    with pytest.raises(ValueError, match="must not be negative"):
        Run.load(tmp_path / "x.st")
    learn([recorded(0)]).save(tmp_path / "l.st")
    with pytest.raises(ValueError, match="but no recorded run"):
        Run.load(tmp_path / "l.st")
    with pytest.raises(ValueError, match="but no learned optimiser"):
        metamd.load(tmp_path / "x.st")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Run.load(tmp_path / "none.st")


# the learned file: version 2 carries moments, version 1 is still read


def test_a_file_of_version_1_loads_and_is_written_back_as_it_was(tmp_path):
    found = metamd.load(VERSION_1)
    assert found.header.schema_version == 1
    assert found.header.learned_from is None
    assert found.moments is None
    assert same(found, replace(learned(), header=found.header))
    found.save(tmp_path / "x.st")
    assert (tmp_path / "x.st").read_bytes() == VERSION_1.read_bytes()
    header = replace(found.header, learned_from=learn([recorded(0)]).header.learned_from)
    assert header.schema_version == 2


def test_moments_survive_the_file_and_may_be_left_out(tmp_path):
    made = learn([recorded(0), recorded(1)])
    made.save(tmp_path / "x.st")
    found = metamd.load(tmp_path / "x.st")
    for ours, theirs in ((made.moments.x, found.moments.x), (made.moments.y, found.moments.y)):
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    small = replace(found, moments=None)
    small.save(tmp_path / "small.st")
    assert metamd.load(tmp_path / "small.st").moments is None
    assert metamd.load(tmp_path / "small.st").fingerprint() == made.fingerprint()
    more = torch.nn.Sequential(*small_model(), torch.nn.Linear(2, 2))
    assert len(list(more.parameters())) > len(made.header.tensors)
    other = made.bind(more.named_parameters(), missing="euclidean")
    other.save(tmp_path / "other.st")
    assert metamd.load(tmp_path / "other.st").moments is None
    assert made.bind(small_model().named_parameters(), missing="euclidean").moments is not None
    with pytest.raises(ValueError, match="moments need a header that says which runs"):
        LearnedOptimiser(replace(made.header, learned_from=None), made.potential, made.moments)


def broken_moments(made, kind):
    x = {k: v.clone() for k, v in made.moments.x.items()}
    if kind == "negative":
        x["0.bias"][0] = -1
    elif kind == "nan":
        x["0.bias"][0] = math.nan
    elif kind == "shape":
        x["0.bias"] = x["0.bias"][:3]
    else:
        del x["0.bias"]
    return replace(made, moments=Moments(x, made.moments.y))


@pytest.mark.parametrize("kind", ["negative", "nan", "shape", "missing"])
def test_wrong_moments_are_neither_saved_nor_loaded(kind, tmp_path, monkeypatch):
    made = broken_moments(learn([recorded(0)]), kind)
    with pytest.raises(ValueError, match="moments"):
        made.save(tmp_path / "x.st")
    with monkeypatch.context() as patched:
        patched.setattr(learned_module, "_check", lambda header, tensors: None)
        made.save(tmp_path / "x.st")
    with pytest.raises(ValueError, match="moments"):
        metamd.load(tmp_path / "x.st")


def test_a_changed_moment_does_not_match_the_checksum(tmp_path):
    learn([recorded(0)]).save(tmp_path / "x.st")
    parts = Parts((tmp_path / "x.st").read_bytes())
    parts.data[parts.table["moments/y/0.bias"]["data_offsets"][0]] ^= 1
    (tmp_path / "x.st").write_bytes(parts.join())
    with pytest.raises(ValueError, match="does not match its checksum"):
        metamd.load(tmp_path / "x.st")


# the command


@pytest.fixture
def nights(tmp_path):
    for i in range(3):
        recorded(i).save(tmp_path / f"{i}.run.safetensors")
    learn([recorded(10)]).save(tmp_path / "l.safetensors")
    return tmp_path


def test_update_writes_what_the_function_gives(nights, capsys):
    before = metamd.load(nights / "l.safetensors")
    files = [str(nights / f"{i}.run.safetensors") for i in range(2)]
    assert cli.run(["update", str(nights / "l.safetensors"), *files, "--decay", "0.5", "--weight", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = metamd.load(nights / "l.safetensors")
    assert same(found, update(before, [recorded(0), recorded(1)], weights=[2, 2], decay=0.5))
    assert (said["added"], said["runs"], said["weight"]) == (2, 3, 4.5)
    assert said["fingerprint"] == found.fingerprint()
    assert said["step_size_change"]["largest"] >= said["step_size_change"]["median"] >= 1


def test_out_leaves_the_file_alone_and_text_is_readable(nights, capsys):
    before = (nights / "l.safetensors").read_bytes()
    out = nights / "new.safetensors"
    assert cli.run(["update", str(nights / "l.safetensors"), str(nights / "0.run.safetensors"), "--out", str(out)]) == 0
    assert (nights / "l.safetensors").read_bytes() == before
    assert len(metamd.load(out).header.learned_from["runs"]) == 2
    text = capsys.readouterr().out
    assert "1 added, 2 runs in all" in text
    assert "Step sizes changed by a factor of" in text


def test_bad_input_is_a_sentence_with_code_2_and_leaves_the_file_alone(nights, capsys):
    file = nights / "l.safetensors"
    before = file.read_bytes()
    poisoned(replace(recorded(5), name=""), "end").save(nights / "bad.run.safetensors")
    old = nights / "old.safetensors"
    old.write_bytes(VERSION_1.read_bytes())
    good, bad = str(nights / "0.run.safetensors"), str(nights / "bad.run.safetensors")
    for words, sentence in (
        ([str(file)], "at least one RUN"),
        ([str(file), bad], "'bad.run.safetensors' (1 of 1) diverged"),
        ([str(file), good, str(file)], "but no recorded run"),
        ([str(file), str(nights / "none")], "there is no file"),
        ([str(nights / "none"), good], "there is no file"),
        ([str(old), good], "does not hold the sums"),
        ([str(file), good, "--decay", "2"], "decay must be"),
        ([str(file), good, "--weight", "0"], "weights must be positive"),
        ([str(file), good, "--out", str(nights / "no" / "where.st")], "no directory"),
    ):
        assert cli.run(["update", *words]) == 2, words
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("metamd: ")
        assert err.count("\n") == 1
        assert sentence in err
    assert file.read_bytes() == before


def test_two_updates_at_once_both_count(nights):
    file = nights / "l.safetensors"
    children = [processes.begin(processes.command, "", "update", file, nights / f"{i}.run.safetensors") for i in range(2)]
    assert [child.finish().code for child in children] == [0, 0]
    assert len(metamd.load(file).header.learned_from["runs"]) == 3

"""Learned coordinates and polar steps from recorded runs: what is recorded, learned, moved by nights, and refused."""

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import metamd
from metamd import MetaMD, Recorder, Run, learn, update
from metamd.cli import main as cli
from metamd.files import recorded_run
from metamd.inner.closed_form import TOLERATED, best_metric
from metamd.learning import recorded as learning
from metamd.learning import recorder as recording
from metamd.learning.recorded import SHRINKAGE, TRAVEL, next_factor
from tests.helpers import equal_parameters, small_model, train
from tests.learned_files import Parts
from tests.learning.test_recorder import gradients

WEIGHTS = ("0.weight", "2.weight")


def recorded(seed=0, steps=12, model=None, file=None, score=None, dtype=torch.float32, **options):
    model = small_model(seed, dtype) if model is None else model
    if file is None:
        optimiser = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    else:
        optimiser = MetaMD(model.named_parameters(), file, steps=steps)
    recorder = Recorder(optimiser, name=f"night-{seed}", batch_size=16, **options)
    train(model, optimiser, steps, seed)
    return recorder.finish(score)


def metric(learned, name):
    """D of a weight, as a matrix, by what it does to gradients."""
    phi = learned.potential.bind({n: torch.zeros(s) for n, s in learned.header.model.items()})
    rows, columns = learned.header.model[name]
    eye = torch.eye(columns).repeat(1 + rows // columns, 1)
    zeros = {n: torch.zeros(s) for n, s in learned.header.model.items()}
    found = [phi.mirror(zeros | {name: row.expand(rows, -1).clone()})[name][0] for row in eye[:columns]]
    return torch.stack(found).double().detach()


# what is recorded


def test_products_lengths_and_squares_are_those_of_a_plain_loop():
    model = small_model(dtype=torch.float64)
    optimiser = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    recorder = Recorder(optimiser)
    products, squares, lengths = dict.fromkeys(WEIGHTS, 0.0), {}, []
    for t in range(25):
        gradients(model, t)
        for n, p in model.named_parameters():
            squares[n] = squares.get(n, 0.0) + float((p.grad**2).sum())
            if n in products:
                products[n] = products[n] + p.grad.T @ p.grad
        before = copy.deepcopy(list(model.parameters()))
        optimiser.step()
        if t % 10 == 0:
            moved = zip(model.parameters(), before, strict=True)
            lengths.append([float((p - q).detach().square().mean().sqrt()) for p, q in moved])
    run = recorder.finish()
    assert (run.tying, set(run.products)) == ("tensor", set(WEIGHTS))
    for n in WEIGHTS:
        assert torch.allclose(run.products[n], products[n], rtol=1e-10)
        assert not torch.allclose(run.products[n], 1.01 * products[n], rtol=1e-10), "the comparison must be able to fail"
    assert {n: float(s) for n, s in run.squares.items()} == pytest.approx(squares)
    assert torch.allclose(run.lengths, torch.tensor(lengths), rtol=1e-5)


def test_of_wide_weights_few_steps_are_taken_and_count_for_all():
    model = nn.Linear(64, 2).double()
    optimiser = torch.optim.SGD(model.named_parameters(), lr=0.0)
    recorder, seen, total = Recorder(optimiser), 0.0, 0.0
    for t in range(10):
        model.weight.grad = torch.randn(2, 64, dtype=torch.float64)
        model.bias.grad = torch.zeros(2, dtype=torch.float64)
        total += float(model.weight.grad.square().sum())
        if t % 4 == 0:  # 64 columns over 16
            seen = seen + model.weight.grad.T @ model.weight.grad
        optimiser.step()
    product = recorder.finish().products["weight"]
    assert torch.allclose(product, seen * (total / seen.trace()), rtol=1e-10)


def test_lengths_are_thinned_in_long_runs(monkeypatch):
    monkeypatch.setattr(recording, "LENGTHS_EVERY", 1)
    monkeypatch.setattr(recording, "LENGTHS_KEPT", 8)
    every, run = [], recorded(steps=40)
    model = small_model(0)
    optimiser = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    recorder = Recorder(optimiser)
    recorder._every = 1
    monkeypatch.setattr(recording, "LENGTHS_KEPT", 100)
    train(model, optimiser, 40, 0)
    every = recorder.finish().lengths
    assert torch.equal(run.lengths, every[:: 40 // len(run.lengths)][: len(run.lengths)])
    assert len(run.lengths) <= 8


def test_training_is_not_changed_and_a_record_is_continued():
    plain, watched, stopped = small_model(), small_model(), small_model()
    optimisers = [torch.optim.AdamW(m.named_parameters(), lr=0.01) for m in (plain, watched, stopped)]
    whole, first = Recorder(optimisers[1]), Recorder(optimisers[2])
    losses = [train(m, o, 12) for m, o in zip((plain, watched), optimisers, strict=False)]
    assert losses[0] == losses[1]
    assert equal_parameters(plain, watched)
    train(stopped, optimisers[2], 12)
    again = Recorder(optimisers[2])
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    first.detach()
    assert again.finish().fingerprint() == whole.finish().fingerprint()
    with pytest.raises(ValueError, match="made with tying = None, but this Recorder has 'parameter'"):
        Recorder(optimisers[2], tying="parameter").load_state_dict(first.state_dict())


def test_a_model_of_vectors_is_recorded_by_parameter():
    x = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([("x", x)], lr=0.1)
    recorder = Recorder(sgd)
    (x**2).sum().backward()
    sgd.step()
    run = recorder.finish()
    assert (run.tying, run.products, run.squares["x"].shape) == ("parameter", {}, (1, 3))
    assert learn([run]).header.usage is None


def test_a_run_and_its_file_are_the_same(tmp_path):
    run = recorded(3, score=0.25)
    run.save(tmp_path / "x.st")
    found = Run.load(tmp_path / "x.st")
    assert found.fingerprint() == run.fingerprint()
    assert (found.score, found.factor) == (0.25, None)
    assert all(torch.equal(found.products[n], run.products[n]) for n in WEIGHTS)
    assert torch.equal(found.lengths, run.lengths)
    for broken, sentence in (
        ({n: -x for n, x in run.products.items()}, "must not be negative"),
        ({"0.weight": run.products["0.weight"]}, "products of some weights, and of others none"),
        ({n: x[:2] for n, x in run.products.items()}, "must have the shape"),
    ):
        replace(run, products=broken).save(tmp_path / "broken.st")
        with pytest.raises(ValueError, match=sentence):
            Run.load(tmp_path / "broken.st")


def test_scores_are_finite_numbers():
    with pytest.raises(ValueError, match="score must be a finite number, lower for a better run, got nan"):
        recorded(score=math.nan)


# what is learned


def test_the_metric_is_the_closed_form_and_the_scale_the_way_travelled():
    runs = [recorded(seed, dtype=torch.float64) for seed in range(2)]
    learned = learn(runs, prior=0.0)
    assert (learned.header.basis, learned.header.tying, learned.header.schema_version) == ("right", "tensor", 5)
    for n in WEIGHTS:
        deltas = [(run.end[n] - run.start[n]).double() for run in runs]
        x, y = sum(d.T @ d for d in deltas), sum(run.products[n] for run in runs)
        x, y = (m + share * m.diagonal().mean() * torch.eye(len(m)) for m, share in zip((x, y), SHRINKAGE, strict=True))

        def bound(d, x=x, y=y):
            return float((d @ x).trace() + torch.linalg.solve(d, y).trace())

        d, best = metric(learned, n), best_metric(x, y)
        assert bound(best) * (1 - 1e-9) <= bound(d) <= bound(best) * (1 + TOLERATED)
        assert bound(2 * best) > bound(best) * (1 + TOLERATED), "another metric is told from it"
        away = sum(float(torch.linalg.matrix_norm(delta, 2)) ** 2 for delta in deltas) / 2
        size = float(torch.linalg.inv(d).diagonal().mean()) ** 0.5
        assert learned.online.scale[n] == pytest.approx(12 * size / (TRAVEL * away**0.5), rel=1e-4)
    vector = sum(float((run.end["0.bias"] - run.start["0.bias"]).square().mean()) for run in runs) / 2
    assert learned.online.scale["0.bias"] == pytest.approx(12 / (TRAVEL * vector**0.5), rel=1e-6)


def test_a_file_of_two_runs_trains_a_third_task_in_fewer_steps_than_adamw(tmp_path):
    learn([recorded(seed, steps=60) for seed in range(2)]).save(tmp_path / "x.safetensors")
    losses = {}
    for rate in (None, 3e-3, 1e-2, 3e-2):
        model = small_model(7)
        named = model.named_parameters()
        file = str(tmp_path / "x.safetensors")
        opt = MetaMD(named, file, steps=60) if rate is None else torch.optim.AdamW(named, lr=rate)
        losses[rate] = sum(train(model, opt, 60, seed=7)) / 60
    assert losses.pop(None) < 0.95 * min(losses.values()), losses


def test_a_tying_gives_the_plain_metric_and_old_records_nothing_else():
    runs = [recorded(seed) for seed in range(2)]
    plain = learn(runs, tying="tensor")
    assert (plain.header.basis, plain.header.usage, plain.header.online) == ("identity", None, None)
    with pytest.raises(ValueError, match="from which 'parameter' cannot be computed"):
        learn(runs, tying="parameter")
    tied = [recorded(seed, tying="parameter") for seed in range(2)]
    assert learn(tied).header.usage is None
    assert learn([runs[0], replace(tied[1], tying="tensor", squares=runs[1].squares)]).header.usage is None


def test_weights_with_too_many_columns_have_one_number_for_each(monkeypatch, tmp_path):
    for place in (learning, recording, recorded_run):
        monkeypatch.setattr(place, "COLUMNS", 6)  # the second weight has 8
    runs = [recorded(seed) for seed in range(3)]
    assert runs[0].products["2.weight"].shape == (8,)
    runs[0].save(tmp_path / "run.st")
    found = learn([Run.load(tmp_path / "run.st"), runs[1]])
    assert list(found.header.factors) == ["right/0.weight"]
    assert found.header.tensors["2.weight"] == (1, 8)
    found.save(tmp_path / "x.st")
    again = update(metamd.load(tmp_path / "x.st"), runs[2:])
    assert again.online.scale == pytest.approx(learn(runs).online.scale, rel=1e-4)


# from night to night


def test_updates_give_what_learning_from_all_runs_at_once_gives(tmp_path):
    runs = [recorded(seed, 10 + seed) for seed in range(4)]
    found = learn(runs[:1], weights=[2.0])
    for i, run in enumerate(runs[1:]):
        found.save(tmp_path / f"{i}.safetensors")  # through files, as nights do
        found = update(metamd.load(tmp_path / f"{i}.safetensors"), [run])
    at_once = learn(runs, weights=[2.0, 1, 1, 1])
    assert found.online.scale == pytest.approx(at_once.online.scale, rel=1e-3)
    for n in WEIGHTS:
        assert torch.allclose(metric(found, n), metric(at_once, n), rtol=1e-4)
        assert not torch.allclose(metric(found, n), metric(learn(runs[:1]), n), rtol=1e-4)
    assert found.header.learned_from["runs"] == at_once.header.learned_from["runs"]
    reach, whole = (x.header.learned_from["reach"] for x in (found, at_once))
    assert (reach["weight"], reach["squares"]) == (whole["weight"], pytest.approx(whole["squares"]))
    forgot = update(learn(runs[:2]), runs[2:3], decay=0.25)
    assert forgot.online.scale == pytest.approx(learn(runs[:3], weights=[0.25, 0.25, 1]).online.scale, rel=1e-3)


def walk(best, nights):
    """Factors of nights whose score is least at the factor `best`, and whose runs diverge far above it."""
    trials, factors = [], []
    for _ in range(nights):
        factors.append(next_factor(trials))
        score = None if factors[-1] > 5 * best else abs(math.log(factors[-1] / best))
        trials.append({"factor": factors[-1], "score": score})
    return factors


@pytest.mark.parametrize("best", [0.06, 0.5, 0.8, 1.0, 1.3, 2.0, 6.0, 30.0])
def test_the_factor_comes_to_the_best_one_and_stays(best):
    factors = walk(best, 20)
    assert abs(math.log2(factors[-1] / best)) <= 0.25 + 1e-9
    assert len(set(factors[-3:])) == 1
    assert max(b / a for a, b in pairwise(factors)) <= 4 + 1e-9
    assert max(factors) <= max(4 * best, 1.0), "no night goes further than twice beyond what was found worse"


def test_scored_runs_with_the_file_move_the_factor_and_nothing_longer_than_that(tmp_path):
    learned = learn([recorded(seed) for seed in range(2)])
    assert learned.usage.factor == 1.0
    learned.save(tmp_path / "x.st")
    run = recorded(5, file=str(tmp_path / "x.st"), score=0.5)
    assert (run.factor, run.score) == (1.0, 0.5)
    found = update(metamd.load(tmp_path / "x.st"), [run])
    assert found.usage.factor == 2.0
    assert found.header.learned_from["trials"] == [{"factor": 1.0, "score": 0.5}]
    # a run with the file went as far as the file said: learning lengths from it would make them longer every night
    assert found.header.learned_from["reach"] == learned.header.learned_from["reach"]
    found.save(tmp_path / "y.st")
    worse = recorded(6, file=str(tmp_path / "y.st"), score=0.75)
    assert worse.factor == 2.0
    assert update(metamd.load(tmp_path / "y.st"), [worse]).usage.factor == 0.5
    unscored = replace(worse, score=None)
    assert update(found, [unscored]).usage.factor == 2.0
    assert len(update(found, [unscored]).header.learned_from["runs"]) == 4


def test_a_diverged_run_with_the_file_moves_the_factor_down_and_adds_nothing():
    learned = learn([recorded(seed) for seed in range(2)])
    run = recorded(5, file=learned, score=0.5)
    nan = replace(run, end={n: torch.full_like(x, math.nan) for n, x in run.end.items()}, factor=2.0, score=None)
    found = update(update(learned, [run]), [nan])
    assert found.usage.factor == 0.5
    assert len(found.header.learned_from["runs"]) == 3
    with pytest.raises(ValueError, match="diverged"):
        update(learned, [replace(nan, factor=None)])


def test_a_run_with_a_tying_is_refused_where_coordinates_were_learned():
    with pytest.raises(ValueError, match="recorded with a tying, and this file has learned coordinates"):
        update(learn([recorded(0)]), [recorded(1, tying="parameter")])


def test_moments_that_are_not_those_of_matrices_are_refused(tmp_path):
    learn([recorded(0)]).save(tmp_path / "x.st")
    parts = Parts((tmp_path / "x.st").read_bytes())
    parts.table["moments/x/right/0.bias"] = parts.table.pop("moments/x/0.bias")
    (tmp_path / "x.st").write_bytes(parts.join())
    with pytest.raises(ValueError, match=r"the tensor 'moments/x/0.bias', which its header announces, is missing"):
        metamd.load(tmp_path / "x.st")


def test_the_command_says_the_factor_of_the_next_run(tmp_path, capsys):
    file, night = tmp_path / "x.safetensors", tmp_path / "night.run.safetensors"
    learn([recorded(seed) for seed in range(2)]).save(file)
    recorded(5, file=str(file), score=0.5).save(night)
    assert cli.run(["update", str(file), str(night)]) == 0
    said = capsys.readouterr().out
    assert "The next run takes the factor 2, where this file had 1" in said
    assert metamd.load(file).usage.factor == 2.0

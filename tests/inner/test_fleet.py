"""A fleet trains each model as it would train alone; what goes wrong is set aside, and the others do not notice."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metamd
from metamd import Diagonal, Kronecker, LearnedOptimiser, MaxDiagonal, MetaMD, fleet
from metamd.files.progress import showing
from metamd.files.usage import Usage
from metamd.inner import fleet as module
from metamd.inner.fleet import fleet_task
from metamd.potentials.online import Online
from metamd.tasks.supervised import Recipe
from tests.helpers import random_basis, randomised

STEPS, BATCH = 12, 8
POLAR = Online("polar", beta=0.9, signal=0.95, whiten=4)
ADAM = partial(torch.optim.Adam, lr=0.02)


def make():
    """More columns than rows in the first weight, more rows than columns in the second."""
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def data(*names, examples=40):
    def one(seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(examples, 6, generator=generator, dtype=torch.float64)
        return inputs, inputs[:, :1].sin() + seed / 10

    return {name: one(i) for i, name in enumerate(names)}


def learned(potential, usage, online=None):
    """A file of some geometry, with what it recommends."""
    made = LearnedOptimiser.from_potential(potential)
    header = replace(made.header, usage=usage.to_dict())
    if online is not None:
        header = replace(header, online=replace(online, scale=dict.fromkeys(potential.log_d, 15.0)).to_dict())
    return replace(made, header=header)


def start():
    return dict(make().named_parameters())


BASIS = random_basis({n: x.detach() for n, x in start().items()}, rank=2)


def raised(potential):
    """The same with metrics e^3 times as large: steps that are short enough."""
    return potential.with_metrics({k: v + 3 for k, v in potential.log_d.items()}).bind(start())


PLAIN = raised(randomised(Diagonal().bind(start()), 1, spread=0.3))
TAIL = Usage("online", averaging="tail", schedule="linear", factor=0.7)
HOWS = {
    "polar, whitened in part": learned(BASIS, TAIL, POLAR),
    "polar, by eigenvalues": learned(BASIS, TAIL, replace(POLAR, whiten=0, signal=0.0)),
    "polar, by blocks": learned(BASIS, TAIL, replace(POLAR, block=2)),
    "polar, directions taken again": learned(BASIS, replace(TAIL, averaging="constant"), replace(POLAR, refresh=3)),
    "eigen rule": learned(BASIS, TAIL, Online("eigen", beta=0.9)),
    "eigen rule, bases every third step": learned(BASIS, TAIL, Online("eigen", beta=0.9, refresh=3)),
    "average rule": learned(BASIS, Usage("online", momentum=0.8, schedule="quadratic"), Online("average")),
    "sum rule": learned(BASIS, Usage("online"), Online("sum")),
    "learned metric in a basis": learned(raised(BASIS), Usage(momentum=0.9, schedule="linear")),
    "diagonal": learned(PLAIN, Usage(averaging="tail")),
    "one number each": learned(raised(randomised(Diagonal(tying="tensor").bind(start()), 2)), Usage()),
    "Adam": ADAM,
}


def alone(name, splits, how):
    """The same model in an ordinary loop with the ordinary class."""
    task = fleet_task(Recipe(make, F.mse_loss, BATCH, STEPS), name, {"train": splits}, steps=STEPS, seed=3)
    model = task.recipe.make(task.config["init_seed"])
    if isinstance(how, LearnedOptimiser):
        optimiser = MetaMD(model.named_parameters(), how, steps=STEPS)
    else:
        optimiser = how(model.parameters())
    losses = []
    for t in range(STEPS):
        rows = task.shuffle.indices(t)
        optimiser.zero_grad()
        loss = F.mse_loss(model(splits[0][rows]), splits[1][rows])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    if hasattr(optimiser, "eval"):
        optimiser.eval()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, losses


def fits(series, how, **options):
    return {fit.name: fit for fit in fleet(make, series, how, steps=STEPS, batch_size=BATCH, loss_fn=F.mse_loss, **options)}


@pytest.mark.parametrize("name", HOWS)
def test_each_model_trains_as_it_would_alone(name):
    series = data("a", "b", "c")
    found = fits(series, HOWS[name], seed=3)
    assert list(found) == list(series)
    for key, splits in series.items():
        params, losses = alone(key, splits, HOWS[name])
        assert found[key].losses == pytest.approx(losses, rel=1e-8)
        for n, x in params.items():
            torch.testing.assert_close(found[key].params[n], x, rtol=1e-7, atol=1e-9)
    make().load_state_dict(found["a"].params)


def test_the_comparison_rejects_other_steps():
    """A broken double: the same file without its tail average trains otherwise."""
    series, how = data("a"), HOWS["polar, whitened in part"]
    other = replace(how, header=replace(how.header, usage=replace(TAIL, averaging="constant").to_dict()))
    params, _ = alone("a", series["a"], other)
    found = fits(series, how, seed=3)["a"].params
    assert any(not torch.allclose(found[n], x, rtol=1e-3) for n, x in params.items())


def test_batches_of_series_of_different_lengths_are_those_of_each_alone():
    series = data("a", "b") | {"short": tuple(x[:10] for x in data("short")["short"])}
    found = fits(series, ADAM, seed=3)
    for key, splits in series.items():
        assert found[key].losses == pytest.approx(alone(key, splits, ADAM)[1], rel=1e-8)


SGD = partial(torch.optim.SGD, lr=0.05)


@pytest.mark.parametrize("how", [SGD, learned(PLAIN, Usage(averaging="tail"))], ids=["SGD", "file"])
def test_a_bad_series_is_set_aside_and_named(how):
    series = data("a", "b", "c")
    bad = dict(series)
    bad["missing"] = (torch.full((40, 6), torch.nan, dtype=torch.float64), series["a"][1])
    bad["narrow"] = (series["a"][0][:, :5], series["a"][1])
    bad["short"] = tuple(x[:5] for x in series["a"])
    bad["steep"] = (series["a"][0], series["a"][1] + 1e200)
    bad["lengths"] = (series["a"][0], series["a"][1][:7])
    found = fits(bad, how)
    said = {name: fit.failed for name, fit in found.items() if fit.failed}
    assert set(said) == set(bad) - set(series)
    assert "must be finite" in said["missing"]
    assert "(5,)" in said["narrow"]
    assert "fewer than a batch of 8" in said["short"]
    assert "one target per input" in said["lengths"]
    assert "The loss became inf" in said["steep"]
    assert all(not found[name].params for name in said)
    assert len(found["steep"].losses) < STEPS
    for name, fit in fits(series, how).items():
        assert found[name].losses == pytest.approx(fit.losses, rel=1e-12)


def test_results_come_as_they_are_finished(monkeypatch, capsys):
    monkeypatch.setattr(module, "SIDE_BY_SIDE", 2)
    trained = []
    train = module.train

    def noted(task, *rest, **options):
        trained.append(len(task.tasks))
        return train(task, *rest, **options)

    monkeypatch.setattr(module, "train", noted)
    series = data(*"abcde")
    with showing("always"):
        some = fleet(make, series, ADAM, steps=STEPS, batch_size=BATCH, loss_fn=F.mse_loss)
        assert trained == []
        assert next(some).name == "a"
        assert trained == [2]
        assert [fit.name for fit in some] == ["b", "c", "d", "e"]
    assert trained == [2, 2, 1]
    assert "training 5 models" in capsys.readouterr().err
    apart = {name: fits({name: one}, ADAM)[name].losses for name, one in series.items()}
    together = {name: fit.losses for name, fit in fits(series, ADAM).items()}
    assert all(together[n] == pytest.approx(apart[n], rel=1e-9) for n in series), "whoever is beside it"


def test_a_start_in_the_file_is_where_models_begin():
    how, series, model = learned(PLAIN, Usage()), data("a", "b"), make()
    begun = {n: x.detach().clone() for n, x in model.named_parameters()}
    for name, fit in fits(series, how.with_start(begun)).items():
        splits = {"train": series[name]}
        task = fleet_task(Recipe(make, F.mse_loss, BATCH, STEPS), name, splits, steps=STEPS, seed=0)
        rows = task.shuffle.indices(0)
        first = F.mse_loss(model(series[name][0][rows]), series[name][1][rows]).item()
        assert fit.losses[0] == pytest.approx(first, rel=1e-12)


def test_a_file_is_named_and_wrong_calls_are_sentences(tmp_path):
    how = learned(PLAIN, Usage())
    how.save(tmp_path / "file.safetensors")
    assert fits(data("a"), tmp_path / "file.safetensors")["a"].losses == fits(data("a"), how)["a"].losses
    series = data("a")
    with pytest.raises(TypeError, match=r"one of torch's Adam, AdamW, SGD.*got 'LBFGS'"):
        fits(series, partial(torch.optim.LBFGS, lr=1.0))
    with pytest.raises(ValueError, match="a geometry of one piece, got one of 2"):
        fits(series, LearnedOptimiser.from_potential(MaxDiagonal(2).bind(start())))
    with pytest.raises(ValueError, match="steps and batch_size must be whole numbers"):
        fleet(make, series, ADAM, steps=0)
    with pytest.raises(ValueError, match="at least one"):
        fleet(make, {}, ADAM, steps=1)
    with pytest.raises(ValueError, match="draws frozen parameters or buffers"):
        fleet(Frozen, series, ADAM, steps=1, batch_size=BATCH, loss_fn=F.mse_loss)
    assert metamd.fleet is fleet
    assert isinstance(Kronecker(), MaxDiagonal)


class Frozen(nn.Module):
    """A model with a fixed random part."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(6, 4).double().requires_grad_(False)
        self.out = nn.Linear(4, 1).double()

    def forward(self, x):
        return self.out(self.fixed(x).tanh())

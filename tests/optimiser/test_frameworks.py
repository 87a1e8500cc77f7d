"""Parameters without names, and `as_optimizer_class` inside frameworks that build the optimiser themselves."""

import copy
import inspect
import itertools
import pickle
import random
import warnings

import pytest
import torch
from torch import nn

import metamd
from metamd import LearnedOptimiser, MetaMD, Usage, as_optimizer_class
from metamd.optimiser.binding import assignments
from tests.helpers import draws, equal_parameters, random_geometry, small_model, train
from tests.optimiser.test_one_call import STEPS, USAGES, file_of


@pytest.fixture(params=USAGES.values(), ids=USAGES)
def learned(request):
    return file_of(*request.param)


def named_run(learned, steps=STEPS):
    """The run that every framework stands for: one call, one loop, the average at the end."""
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), learned, steps=STEPS)
    train(model, optimiser, steps)
    optimiser.eval()
    return model


# parameters without names


def by_brute_force(model, groups):
    """Every way to deal the tensors out, of which those are kept that give every group its list."""
    ways = [list(way) for way in itertools.product(range(len(groups)), repeat=len(model))]
    lists = [[[s for s, j in zip(model, way, strict=True) if j == i] for i in range(len(groups))] for way in ways]
    return [way for way, dealt in zip(ways, lists, strict=True) if dealt == groups]


def greedy(model, groups):
    """Broken: the first group that fits takes the tensor."""
    left, way = [list(g) for g in groups], []
    for shape in model:
        fits = [i for i, g in enumerate(left) if g[:1] == [shape]]
        if not fits:
            return []
        way.append(fits[0])
        left[fits[0]].pop(0)
    return [way]


def dealt_out(seed):
    g = random.Random(seed)
    model = [g.choice([(2, 3), (3,), (2,)]) for _ in range(g.randint(1, 6))]
    count = g.randint(1, 3)
    groups = [[] for _ in range(count)]
    for shape in model:
        groups[g.randrange(count)].append(shape)
    if g.random() < 0.2:
        g.shuffle(groups[0])
    return model, groups


def agrees(found, ways):
    return len(found) == min(len(ways), 2) and all(way in ways for way in found) and (len(found) < 2 or found[0] != found[1])


@pytest.mark.law
def test_tensors_are_dealt_out_in_the_only_way_there_is():
    cases = [dealt_out(seed) for seed in range(draws(2000))]
    ways = [by_brute_force(*case) for case in cases]
    assert {min(len(w), 2) for w in ways} == {0, 1, 2}
    assert all(agrees(assignments(*case), w) for case, w in zip(cases, ways, strict=True))
    assert not all(agrees(greedy(*case), w) for case, w in zip(cases, ways, strict=True))


def test_many_equal_layers_in_groups_of_their_own_are_ambiguous_at_once():
    layer = [(8, 8), (8,)]
    assert len(assignments(layer * 40, [layer] * 40)) == 2
    assert len(assignments(layer * 40, [layer] * 39 + [layer[::-1]])) != 1  # gives up instead of trying 2^39 ways
    assert assignments(layer * 400, [[(8, 8)] * 400, [(8,)] * 400]) == [[0, 1] * 400]


def test_parameters_without_names_are_those_of_the_recorded_model(learned):
    whole = small_model()
    train(whole, MetaMD(whole.named_parameters(), learned, steps=STEPS), STEPS)
    for split in (lambda ps: ps, lambda ps: [{"params": ps[::2]}, {"params": iter(ps[1::2])}, {"params": []}]):
        model = small_model()
        optimiser = MetaMD(split(list(model.parameters())), learned, steps=STEPS)
        train(model, optimiser, STEPS)
        assert equal_parameters(model, whole)
        names = [n for group in optimiser.param_groups for n in group["param_names"]]
        assert sorted(names) == sorted(learned.header.model)


def test_names_that_are_given_are_kept():
    learned = file_of(Usage())
    named = dict(small_model().named_parameters())
    turned = [(n, named[n]) for n in reversed(named)]
    assert MetaMD(turned, learned).param_groups[0]["param_names"] == list(reversed(named))


def test_parameters_that_could_be_others_are_refused():
    learned = file_of(Usage())
    p = list(small_model().parameters())
    with pytest.raises(ValueError, match=r"where it has '0.weight' of shape \(8, 5\), there is a tensor of shape \(8,\)"):
        MetaMD([p[1], p[0], *p[2:]], learned)
    with pytest.raises(ValueError, match=r"which has 4 tensors, '0.weight', .*, but 3 came. Pass all .* frozen ones too"):
        MetaMD(p[:3], learned)
    with pytest.raises(ValueError, match="the groups do not fit: each must keep the order of the model"):
        MetaMD([{"params": [p[2], p[0]]}, {"params": [p[1], p[3]]}], learned)
    bare = random_geometry(small_model())
    with pytest.raises(ValueError, match=r"these have none, and no model is recorded .* Pass model.named_parameters\(\)"):
        MetaMD(p, bare)
    with pytest.raises(ValueError, match="no model is recorded"):
        MetaMD(p, LearnedOptimiser.from_potential(bare, model={}))
    square = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    twice = LearnedOptimiser.from_potential(random_geometry(square, pieces=1).bind(list(square.named_parameters())))
    layers = [{"params": layer.parameters()} for layer in square]
    with pytest.raises(ValueError, match=r"more than one way: '0.weight' of shape \(3, 3\) may be in group 0 or in group 1"):
        MetaMD(layers, twice)
    assert MetaMD(square.parameters(), twice).param_groups[0]["param_names"] == list(twice.header.model)


def test_the_error_about_names_says_which_rename_to_pass():
    model, learned = nn.ModuleDict({"net": small_model()}), file_of(*USAGES["polar, tail"])
    with pytest.raises(
        ValueError, match=r"bind\(params, rename=lambda name: name.removeprefix\('net.'\)\), \.\.\.\)"
    ) as error:
        MetaMD(model.named_parameters(), learned, steps=STEPS)
    rename = eval(str(error.value).split("rename=")[1].split("), ...")[0])
    bound = learned.bind(model.named_parameters(), rename=rename)
    optimiser = MetaMD(model.named_parameters(), bound, steps=STEPS)
    train(model["net"], optimiser, STEPS)
    optimiser.eval()
    assert equal_parameters(model["net"], named_run(learned))
    long = LearnedOptimiser.from_potential(random_geometry(model, pieces=1))
    with pytest.raises(ValueError, match=r"rename=lambda name: 'net.' \+ name\)"):
        MetaMD(model["net"].named_parameters(), long)


# a class for frameworks


def test_the_class_is_the_one_call_without_lr_and_ends_at_the_average(learned):
    model = small_model()
    cls = as_optimizer_class(learned, steps=STEPS)
    assert issubclass(cls, torch.optim.Optimizer)
    assert "lr" in inspect.signature(cls).parameters  # by which frameworks find out that they may pass one
    decayed, others = list(model.parameters())[::2], list(model.parameters())[1::2]
    groups = [{"params": decayed, "weight_decay": 0.0, "lr": 3e-5}, {"params": others, "weight_decay": 0.0}]
    with pytest.warns(UserWarning, match="lr=3e-05 is ignored: a learned file has its step sizes inside") as said:
        optimiser = cls(groups, lr=5e-5)
    assert len(said) == 1
    train(model, optimiser, STEPS)
    assert equal_parameters(model, named_run(learned))
    optimiser.state_dict()
    train(model, optimiser, 2, first=STEPS)  # a framework may go on
    assert bool(torch.isfinite(model[0].weight).all())


def test_options_of_the_class_and_of_the_call_win(tmp_path):
    learned = file_of(*USAGES["momentum"])
    learned.save(tmp_path / "x.safetensors")
    cls = as_optimizer_class(tmp_path / "x.safetensors", steps=STEPS, lr=0.25, weight_decay=0.1)
    group = cls(small_model().parameters(), weight_decay=0.2).param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.25, 0.9, 0.2)
    with pytest.raises(TypeError, match="learned must be a LearnedOptimiser or a path, got Euclidean"):
        as_optimizer_class(metamd.Euclidean(), steps=STEPS)


def test_a_run_of_the_class_is_saved_copied_and_pickled(learned):
    cls = as_optimizer_class(learned, steps=STEPS)
    model = small_model()
    optimiser = cls(model.parameters())
    train(model, optimiser, 5)
    other = small_model(seed=9)
    resumed = pickle.loads(pickle.dumps(cls))(other.parameters())
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimiser.state_dict())
    twins = [(other, resumed), copy.deepcopy((model, optimiser)), pickle.loads(pickle.dumps((model, optimiser)))]
    for m, o in twins:
        train(m, o, STEPS - 5, first=5)
        assert equal_parameters(m, named_run(learned))


# the frameworks themselves

X = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
Y = torch.stack([X[:, 0] + X[:, 1], X[:, 2] * X[:, 3], X[:, 4].sin()], 1)
BATCH = 16


def plain_loop(learned, model, epochs):
    optimiser = MetaMD(model.named_parameters(), learned, steps=epochs * len(X) // BATCH)
    for _ in range(epochs):
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            optimiser.zero_grad()
            (model(x) - y).square().mean().backward()
            optimiser.step()
    optimiser.eval()
    return model


class Regression(nn.Module):
    """What the Trainer asks of a model: keyword arguments in, a mapping with the loss out."""

    def __init__(self):
        super().__init__()
        self.net = small_model()

    def forward(self, x, labels):
        return {"loss": (self.net(x) - labels).square().mean()}


@pytest.mark.parametrize("scheduler", ["constant", "linear"])
def test_the_trainer_of_hugging_face(tmp_path, monkeypatch, scheduler):
    """Its groups without names, with and without weight decay, its lr and its scheduler."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    learned = file_of(*USAGES["polar, tail"])
    model, data = Regression(), [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    parts = {
        "args": transformers.TrainingArguments(
            str(tmp_path),
            num_train_epochs=4,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential",
            max_grad_norm=0,
            lr_scheduler_type=scheduler,
            save_strategy="epoch",
            eval_strategy="epoch",  # for which the Trainer calls eval() and train() of the optimiser
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        "train_dataset": data,
        "eval_dataset": data,
        "optimizer_cls_and_kwargs": (as_optimizer_class(learned, steps=12), {"lr": 5e-5}),
    }
    trainer = transformers.Trainer(model, **parts)
    sentences = ["lr=5e-05 is ignored"] + ["a scheduler has changed lr from 0.7 to"] * (scheduler == "linear")
    with pytest.warns(UserWarning, match="is ignored|a scheduler has changed lr") as said:
        trainer.train()
    assert [str(w.message).startswith(s) for w, s in zip(said, sentences, strict=True)] == [True] * len(sentences)
    assert len(trainer.optimizer.param_groups) == 2
    same = equal_parameters(model.net, plain_loop(learned, small_model(), 4))
    assert same == (scheduler == "constant")
    last = torch.nn.Module.state_dict(model)
    kept = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
    from safetensors.torch import load_file

    saved = load_file(f"{kept}/model.safetensors")
    assert all(torch.equal(saved[n], x) for n, x in last.items()), "what is saved at the end is the average"

    resumed = Regression()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.Trainer(resumed, **parts).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-6")
    assert equal_parameters(resumed.net, model.net), "a run that its own checkpoint interrupted goes on as if nothing was"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_skorch(tmp_path):
    skorch = pytest.importorskip("skorch", reason="skorch is not installed")
    learned = file_of(*USAGES["polar, tail"])
    net = skorch.NeuralNetRegressor(
        small_model(),
        optimizer=as_optimizer_class(learned, steps=12),
        max_epochs=4,
        batch_size=BATCH,
        train_split=None,
        verbose=0,
    )
    with pytest.warns(UserWarning, match="lr=0.01 is ignored"):
        net.fit(X, Y)
    assert equal_parameters(net.module_, plain_loop(learned, small_model(), 4))
    again = pickle.loads(pickle.dumps(net))
    assert equal_parameters(again.module_, net.module_)


@pytest.mark.filterwarnings("ignore")
def test_neuralforecast(tmp_path, monkeypatch):
    """A model of its own: the file is made for it, and used through `optimizer=`."""
    pytest.importorskip("neuralforecast", reason="neuralforecast is not installed")
    import numpy as np
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import MLP

    monkeypatch.chdir(tmp_path)
    options = {"h": 2, "input_size": 4, "num_layers": 2, "hidden_size": 8, "max_steps": 6, "batch_size": 4}
    options |= {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    example = MLP(**options)
    potential = random_geometry(example, pieces=1).bind(list(example.named_parameters()))
    said = {"usage": Usage("learned", 0.0, "linear", averaging="tail").to_dict()}
    learned = LearnedOptimiser.from_potential(potential, **said)
    days = pd.date_range("2020-01-01", periods=40)
    table = pd.DataFrame({"unique_id": "a", "ds": days, "y": np.sin(np.arange(40.0))})
    made = []

    class Named(MetaMD):
        """The same with names that are given."""

        def __init__(self, params):
            super().__init__(zip(learned.header.model, params, strict=True), learned, steps=6)
            made.append(self)

    forecasts = [
        NeuralForecast([MLP(**options, optimizer=o)], freq="D") for o in (Named, as_optimizer_class(learned, steps=6))
    ]
    forecasts[0].fit(table)
    made[0].eval()
    with pytest.warns(UserWarning, match="lr=0.001 is ignored"):
        forecasts[1].fit(table)
    assert equal_parameters(*(f.models[0] for f in forecasts))
    assert not equal_parameters(forecasts[1].models[0], example)
    assert bool(np.isfinite(forecasts[1].predict()["MLP"]).all())

"""Wrong calls: each gets a sentence that says what was required and what came, not an error from inside."""

import numpy as np
import pytest
import torch
from torch import nn

import metamd
from metamd import Diagonal, Euclidean, MaxDiagonal, MetaMD, PNorm, Recorder
from metamd.tasks import quadratic, supervised
from tests.frozen.problems import path_of
from tests.helpers import small_model, train

X = torch.linspace(-1, 1, 80).reshape(40, 2)
Y = torch.arange(40) % 2


def model():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


def optimiser(geometry=None, **options):
    return MetaMD(model().named_parameters(), geometry or Euclidean(), **{"lr": 0.1, **options})


def family(inputs=X, targets=Y, **options):
    return supervised(model, {"mine": (inputs, targets)}, batch_size=8, **options)


def missing(like, row=3):
    found = like.clone()
    found[row] = torch.nan
    return found


def unmoved():
    net = model()
    sgd = torch.optim.SGD(net.named_parameters(), lr=0.0)
    recorder = Recorder(sgd)
    for _ in range(3):
        sgd.zero_grad()
        nn.functional.cross_entropy(net(X), Y).backward()
        sgd.step()
    return recorder.finish()


def certificate(factor):
    net = small_model()
    own = MetaMD(net.named_parameters(), Diagonal(), lr=0.1, certify=True)
    train(net, own, 3)
    return own.certificate({n: factor * p.detach() for n, p in net.named_parameters()})


WRONG = {
    "learn a text": (lambda: metamd.learn(["x"]), TypeError, "runs must be a list of recorded runs, got 'x'"),
    "learn a path": (lambda: metamd.learn("runs/a"), TypeError, "runs must be a list of recorded runs, got 'runs/a'"),
    "learn a number": (lambda: metamd.learn(5), TypeError, "runs must be a list of recorded runs, got 5"),
    "update a path": (lambda: metamd.update("file", []), TypeError, "learned must be a LearnedOptimiser, got str"),
    "update with a path": (
        lambda: metamd.update(metamd.load(path_of("recorded")), ["x"]),
        TypeError,
        "runs must be a list of recorded runs",
    ),
    "a run that never moved": (lambda: metamd.learn([unmoved()]), ValueError, "never moved: it ends where it started"),
    "meta_train a name": (lambda: metamd.meta_train("quadratic"), TypeError, "family must be a TaskFamily, got str"),
    "meta_train a name with a potential": (
        lambda: metamd.meta_train("quadratic", Diagonal()),
        TypeError,
        "family must be a TaskFamily, got str",
    ),
    "learn_start of a name": (lambda: metamd.learn_start("quadratic"), TypeError, "family must be a TaskFamily, got str"),
    "certify a name": (
        lambda: metamd.certify(metamd.load("quadratic"), "quadratic"),
        TypeError,
        "family must be a TaskFamily, got str",
    ),
    "compare a name": (lambda: metamd.compare({"a": None}, "quadratic"), TypeError, "family must be a TaskFamily, got str"),
    "compare a text": (lambda: metamd.compare("adam", quadratic()), TypeError, "optimisers must map labels to contenders"),
    "lr a text": (lambda: optimiser(lr="1"), TypeError, "lr must be a number"),
    "lr a list": (lambda: optimiser(lr=[1]), TypeError, "lr must be a number"),
    "momentum a text": (lambda: optimiser(momentum="x"), TypeError, "momentum must be a number, got 'x'"),
    "momentum a text, lr by default": (lambda: optimiser(momentum="x", lr=None), TypeError, "momentum must be a number"),
    "momentum of a group a text": (
        lambda: MetaMD([{"params": [nn.Parameter(X)], "momentum": "x"}], Euclidean(), lr=1.0),
        TypeError,
        "momentum must be a number, got 'x'",
    ),
    "decay a text": (lambda: optimiser(weight_decay="x"), TypeError, "weight_decay must be a number, got 'x'"),
    "2.5 pieces": (lambda: MaxDiagonal(2.5), TypeError, r"pieces must be a whole number of metrics, got 2\.5"),
    "pieces a text": (lambda: MaxDiagonal("2"), TypeError, "pieces must be a whole number of metrics, got '2'"),
    "pieces True": (lambda: MaxDiagonal(True), TypeError, "pieces must be a whole number of metrics, got True"),
    "p a text": (lambda: PNorm("x"), TypeError, "p must be a number"),
    "names that are numbers": (
        lambda: MetaMD([(1, nn.Parameter(X))], MaxDiagonal(2), lr=1.0),
        TypeError,
        "names of parameters must be texts, got 1",
    ),
    "names that are None": (
        lambda: MetaMD([(None, nn.Parameter(X))], MaxDiagonal(2), lr=1.0),
        TypeError,
        "names of parameters must be texts, got None",
    ),
    "bound names that are numbers": (lambda: Diagonal().bind({1: X}), TypeError, "names of parameters must be texts, got 1"),
    "no parameters": (lambda: MetaMD(None, Euclidean(), lr=1.0), TypeError, "params must be an iterable"),
    "a number of parameters": (lambda: MetaMD(5, Euclidean(), lr=1.0), TypeError, "params must be an iterable"),
    "load nothing": (lambda: metamd.load(None), TypeError, "a path or the name of a shipped file is required, got None"),
    "load a number": (lambda: metamd.load(5), TypeError, "a path or the name of a shipped file is required, got 5"),
    "two shares": (lambda: family(shares=(0.5, 0.5)), ValueError, "shares must be three fractions that sum to 1"),
    "shares a text": (lambda: family(shares="abc"), ValueError, "shares must be three fractions that sum to 1"),
    "text labels": (
        lambda: family(targets=np.array(["cat", "dog"] * 20)),
        TypeError,
        "must hold numbers, got an array of <U3. Number the classes",
    ),
    "text labels as objects": (
        lambda: family(targets=np.array(["cat", "dog"] * 20, dtype=object)),
        TypeError,
        "must hold numbers, got an array of object",
    ),
    "text labels in a list": (lambda: family(targets=["cat"] * 40), TypeError, "must hold tensors, got list"),
    "missing inputs": (
        lambda: family(missing(X)),
        ValueError,
        "inputs of dataset 'mine' must be finite, but 1 of 40 examples have missing or infinite values, the first at row 3",
    ),
    "missing targets": (
        lambda: family(targets=missing(X, 7)),
        ValueError,
        "targets of dataset 'mine' must be finite, .* the first at row 7",
    ),
    "a reference that is not finite": (lambda: certificate(float("nan")), ValueError, "reference.* must be finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_gets_a_sentence(name):
    call, kind, sentence = WRONG[name]
    with pytest.raises(kind, match=sentence) as caught:
        call()
    assert str(caught.value).rstrip().endswith(".")
    assert type(caught.value) is kind


def test_right_calls_are_taken():
    """The law rejects checks that refuse all."""
    assert optimiser(momentum=0.5, weight_decay=0.1).param_groups[0]["momentum"] == 0.5
    assert family(shares=[0.8, 0.1, 0.1]).steps > 0
    assert certificate(1.0).steps == 3

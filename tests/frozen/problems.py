"""The small problems of the frozen artefacts, and how each is run: shared by what writes them and what tests them.

Nothing here but the public API of metamd, so that every version can be held against the same artefacts.
"""

import runpy
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import metamd
from metamd import MetaMD, Online, tasks

HERE = Path(__file__).parent
F64 = torch.float64
STEPS, MIDDLE, EDIT = 24, 10, 6
"""How many gradients a problem has, after how many a state_dict is taken, and a parameter is changed from outside."""


# families


def make_network(dtype=F64):
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def table(seed, examples=90):
    """Rows with units of their own, in three classes, with some labels wrong."""
    g = torch.Generator().manual_seed(seed)
    units = torch.tensor([3.0, 1.0, 0.3, 1.0, 2.0], dtype=F64)
    rows = torch.randn(examples, 5, generator=g, dtype=F64)
    answers = torch.tanh(rows @ torch.randn(5, 4, generator=g, dtype=F64)) @ torch.randn(4, 3, generator=g, dtype=F64)
    return rows * units, (answers + 0.5 * torch.randn(examples, 3, generator=g, dtype=F64)).argmax(1)


def network_family(steps=60):
    datasets = {"one": table(1), "two": table(2)}
    return tasks.supervised(make_network, datasets, batch_size=12, steps=steps, name="frozen")


def quadratic_family(steps=50):
    return tasks.quadratic(steps=steps)


def held_out_task(family, seed=1234):
    """A task that learning has not drawn."""
    return family.build(family.sample(torch.Generator().manual_seed(seed)))


# what the default recipe gives

RECIPES = {
    "quadratic": (quadratic_family, {"outer_steps": 3, "tasks_per_step": 3, "seed": 5}),
    "network": (network_family, {"tasks_per_step": 2, "seed": 5}),
}


def recipe(name):
    """Learn by the default recipe, train a held-out task as recommended: the learned optimiser and 30 losses."""
    make, options = RECIPES[name]
    family = make()
    learned = metamd.meta_train(family, **options)
    task = held_out_task(family)
    params = parameters(task.init())
    optimiser, schedule = metamd.prepare(params.items(), learned, steps=30)
    losses = []
    for t in range(30):
        optimiser.zero_grad()
        loss = task.loss(params, task.batch(t))
        loss.backward()
        losses.append(float(loss.detach()))
        optimiser.step()
        schedule.step()
    return learned, losses


# runs on saved gradients

_PROBLEMS = {}


def problem(name, dtype=F64):
    """Where a problem starts, and its gradients, (STEPS, ...) by name."""
    if not _PROBLEMS:
        _PROBLEMS.update(torch.load(HERE / "problems.pt", weights_only=True))
    found = _PROBLEMS[name]
    return tuple({n: x.to(dtype) for n, x in found[part].items()} for part in ("start", "grads"))


def parameters(values):
    return {n: nn.Parameter(x.detach().clone()) for n, x in values.items()}


def values(params):
    return {n: p.detach().clone() for n, p in params.items()}


def walk(optimiser, schedule, params, grads, first=0, last=STEPS, *, edited=False):
    """Take the steps from `first` to `last` with saved gradients; `edited` changes a parameter from outside before one."""
    for t in range(first, last):
        if edited and t == EDIT:
            with torch.no_grad():
                next(iter(params.values())).mul_(0.9)
        for n, p in params.items():
            p.grad = grads[n][t].clone()
        optimiser.step()
        if schedule is not None:
            schedule.step()


# learned files: the problem that each is run on

FILES = {
    "quadratic-diagonal": "quadratic",
    "quadratic-default": "quadratic",
    "quadratic-certified": "quadratic",
    "quadratic-start": "quadratic",
    "mixture-paper": "quadratic",
    "mixture-gradient": "quadratic",
    "mixture-phases": "network",
    "mixture-offsets": "network",
    "network-default": "network",
    "network-schedule": "network",
    "network-average": "network",
    "network-sum": "network",
    "network-diagonal-usage": "network",
    "network-both": "network",
    "network-refresh": "network",
    "column": "network",
    "channel": "network",
    "role": "network",
    "recorded": "network",
    "recorded-column": "network",
    "version-1": "layers",
    "version-2": "layers",
    "version-3": "layers",
    "version-3-usage": "layers",
}
SHIPPED = {"quadratic": "quadratic", "mlp-by-role": "roles"}

ONLY_LOADS = {"network-refresh"}
"""Files whose recommended use is no longer promised to be the same: they load, and take finite steps."""


def path_of(name):
    return HERE / f"{name}.safetensors"


def plain_end(learned, name):
    """The parameters after the steps of a problem, in plain use."""
    start, grads = problem(name)
    params = parameters(start)
    walk(MetaMD(params.items(), learned, metric="learned"), None, params, grads)
    return values(params)


def recommended_end(learned, name):
    """The parameters after the steps of a problem, used as recommended; the average if there is one."""
    start, grads = problem(name)
    params = parameters(start)
    optimiser, schedule = metamd.prepare(params.items(), learned, steps=STEPS)
    walk(optimiser, schedule, params, grads)
    optimiser.eval()
    return values(params)


# states of the optimiser in the middle of a run


def _plain(file, **options):
    def build(params):
        return MetaMD(params.items(), metamd.load(path_of(file)), **{"metric": "learned", **options}), None

    return build


def _prepared(file, **options):
    def build(params):
        return metamd.prepare(params.items(), metamd.load(path_of(file)), steps=STEPS, **options)

    return build


def _potential(make, **options):
    def build(params):
        return MetaMD(params.items(), make(), **options), None

    return build


def _groups(params):
    """Two groups with options of their own."""
    named = list(params.items())
    groups = [{"params": named[:2], "momentum": 0.5}, {"params": named[2:], "lr": 0.3, "weight_decay": 0.1}]
    return MetaMD(groups, metamd.load(path_of("mixture-offsets"))), None


def _scales(**scale):
    return {n: scale.get(n.split(".")[1], 40.0) for n in ("0.weight", "0.bias", "2.weight", "2.bias")}


AVERAGE = Online("average", beta=0.95, scale=_scales(weight=60.0))
SUM = Online("sum", scale=_scales(weight=20.0))
POLAR = Online("polar", beta=0.8, scale=_scales(weight=3.0))

CASES = {
    "diagonal": ("network", F64, _plain("recorded")),
    "diagonal-momentum": ("network", F64, _plain("recorded", momentum=0.9, weight_decay=0.02)),
    "diagonal-maximize": ("network", F64, _plain("recorded", lr=0.1, maximize=True)),
    "diagonal-tail": ("network", F64, _plain("recorded", averaging="tail")),
    "quadratic": ("quadratic", F64, _plain("quadratic-diagonal")),
    "mixture": ("network", F64, _plain("mixture-offsets")),
    "mixture-momentum": ("network", F64, _plain("mixture-offsets", momentum=0.8)),
    "mixture-paper": ("quadratic", F64, _plain("mixture-paper", exact=False)),
    "mixture-paper-step": ("network", F64, _plain("mixture-offsets", exact=False)),
    "groups": ("network", F64, _groups),
    "kronecker": ("network", F64, _plain("network-default")),
    "average": ("network", F64, _plain("network-default", metric=AVERAGE)),
    "average-momentum": ("network", F64, _plain("recorded", metric=AVERAGE, momentum=0.9)),
    "average-file": ("network", F64, _prepared("network-average")),
    "sum": ("network", F64, _plain("network-default", metric=SUM)),
    "sum-momentum": ("network", F64, _plain("recorded", metric=SUM, momentum=0.8)),
    "sum-file": ("network", F64, _prepared("network-sum")),
    "polar": ("network", F64, _plain("network-default", metric=POLAR)),
    "polar-file": ("network", F64, _prepared("network-default")),
    "polar-file-evaluated": ("network", F64, _prepared("network-default")),
    "polar-file-momentum": ("network", F64, _prepared("network-default", momentum=0.9)),
    "polar-file-refresh": ("network", F64, _prepared("network-default", refresh=4)),
    "polar-version-3": ("layers", F64, _prepared("version-3-usage")),
    "learned-schedule": ("network", F64, _prepared("network-schedule")),
    "certify": ("network", F64, _plain("recorded", certify=True)),
    "certify-momentum": ("network", F64, _plain("recorded", certify=True, momentum=0.7)),
    "certify-mixture": ("network", F64, _plain("mixture-offsets", certify=True)),
    "certify-paper-step": ("network", F64, _plain("mixture-offsets", certify=True, exact=False)),
    "certify-kronecker": ("network", F64, _plain("network-default", certify=True)),
    "certify-edited": ("network", F64, _plain("mixture-offsets", certify=True)),
    "momentum-edited": ("network", F64, _plain("recorded", momentum=0.9)),
    "tail-edited": ("network", F64, _plain("recorded", averaging="tail")),
    "safeguard": ("bursts", F64, _plain("mixture-offsets", safeguard=True)),
    "euclidean": ("network", F64, _potential(metamd.Euclidean, lr=0.1, momentum=0.9)),
    "p-norm": ("network", F64, _potential(lambda: metamd.PNorm(1.5), lr=0.1)),
    "entropy": ("orthant", F64, _potential(lambda: metamd.NegativeEntropy("orthant"), lr=0.3)),
    "float32-mixture": ("network", torch.float32, _plain("mixture-offsets")),
    "float32-polar": ("network", torch.float32, _prepared("network-default")),
    "bfloat16-average": ("network", torch.bfloat16, _plain("network-default", metric=AVERAGE)),
    "bfloat16-tail": ("network", torch.bfloat16, _plain("recorded", averaging="tail")),
}
"""By name: the problem, the type of its parameters, and what makes (optimiser, schedule)."""

EVALUATED = {"polar-file-evaluated"}
"""Cases whose state_dict was taken after `optimiser.eval()`."""

EDITED = {"certify-edited", "momentum-edited", "tail-edited"}
"""Cases in which a parameter is changed from outside before the state_dict was taken."""

CERTIFIED = ("bound", "realised", "identity", "published", "lipschitz", "last", "lag")
TOLERANCES = {F64: (1e-9, 1e-11), torch.float32: (1e-5, 1e-6), torch.bfloat16: (0.0, 0.0)}
POLAR = {F64: (1e-6, 1e-7), torch.float32: (2e-3, 1e-3)}
"""Of polar steps: whitening magnifies the rounding of the shortest directions, by up to the root of the precision a step.

Processors round differently: two of them were 2e-4 apart after a whole run in float32."""

SINGLE = (1e-6, 1e-7)
"""Of runs in float64 with a file whose metrics are float32: processors differ in the last bit of their exponentials."""


def ended(name, optimiser, params):
    """What a case is judged by: the parameters, the pieces, the average, and the certificate."""
    found = {"params": values(params), "pieces": optimiser.active_pieces.clone()}
    if name.startswith("certify"):
        start, _ = problem(CASES[name][0])
        found["certificate"] = optimiser.certificate({n: 0.5 * x for n, x in start.items()})
    optimiser.eval()
    return {**found, "evaluated": values(params)}


# recorded runs

RUNS = ("run-parameter", "run-column")


def learned_from_runs():
    """What is learned from the saved runs, by name."""
    first, second = (metamd.Run.load(path_of(name)) for name in RUNS)
    return {
        "first": metamd.learn([first]),
        "first-no-prior": metamd.learn([first], prior=0.0),
        "first-role": metamd.learn([first], tying="role"),
        "second": metamd.learn([second]),
        "both": metamd.learn([second, first], tying="column"),
        "weighted": metamd.learn([first, second], weights=[2.0, 1.0], tying="column"),
    }


# the command line


def command(*words):
    """Run `python -m metamd` with these words in this process; the exit code."""
    before = sys.argv
    sys.argv = ["metamd", *map(str, words)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # runpy's, where the module was imported before
            runpy.run_module("metamd", run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    finally:
        sys.argv = before
    return 0

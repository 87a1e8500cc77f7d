"""Writes the frozen artefacts: the record of how they were made, by the version of the package before it was restructured.

    python -m tests.frozen.write              all of them, with that version on the path
    python -m tests.frozen.write surface OUT  names, signatures and help of the version on the path, into OUT

`test_frozen.py` holds the present version against them. They are not written again when the package changes.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import metamd
from metamd import Diagonal, Kronecker, LearnedOptimiser, MaxDiagonal, Online, Recorder, Usage, tasks
from tests.frozen import problems
from tests.frozen.compare_sentences import raised
from tests.frozen.problems import (
    CASES,
    EDITED,
    EVALUATED,
    F64,
    FILES,
    HERE,
    MIDDLE,
    RECIPES,
    SHIPPED,
    STEPS,
    command,
    ended,
    held_out_task,
    learned_from_runs,
    network_family,
    parameters,
    path_of,
    plain_end,
    problem,
    quadratic_family,
    recipe,
    recommended_end,
    values,
    walk,
)

SUBMODULES = ("tasks", "rivals", "models", "data")
LAYERS = {"fc1.weight": (4, 3), "fc1.bias": (4,), "fc2.weight": (2, 4), "fc2.bias": (2,)}
ROLES = {"a.weight": (5, 7), "a.bias": (5,), "b.weight": (4, 5), "b.bias": (4,), "c.weight": (3, 4), "c.bias": (3,)}
RECORDED = 18


# gradients


def along_sgd(task, lr):
    """The start of a task, and its gradients along a run of SGD."""
    start = task.init()
    params = parameters(start)
    sgd, grads = torch.optim.SGD(params.values(), lr=lr), {n: [] for n in start}
    for t in range(STEPS):
        sgd.zero_grad()
        task.loss(params, task.batch(t)).backward()
        for n, p in params.items():
            grads[n].append(p.grad.clone())
        sgd.step()
    return {"start": start, "grads": {n: torch.stack(g) for n, g in grads.items()}}


def at_random(shapes, scale, seed):
    """A random start, and random gradients around a common one."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    start = {n: 0.5 * normal(*s) for n, s in shapes.items()}
    return {"start": start, "grads": {n: scale * (normal(*s) + normal(STEPS, *s)) for n, s in shapes.items()}}


def write_problems():
    network = along_sgd(held_out_task(network_family()), 0.1)
    burst = 1 + 40.0 * torch.tensor([t in (8, 9, 16) for t in range(STEPS)], dtype=F64)
    bursts = {n: torch.einsum("t,t...->t...", burst, g) for n, g in network["grads"].items()}
    found = {
        "quadratic": along_sgd(held_out_task(quadratic_family()), 0.01),
        "network": network,
        "bursts": {"start": network["start"], "grads": bursts},
        "orthant": {"start": {n: x.abs() + 0.1 for n, x in network["start"].items()}, "grads": network["grads"]},
        "layers": at_random(LAYERS, 0.2, 1),
        "roles": at_random(ROLES, 0.003, 2),
    }
    torch.save(found, HERE / "problems.pt")


# recorded runs


def write_runs():
    for name, seed, options in (
        ("run-parameter", 1, {"phases": 3, "steps": RECORDED, "batch_size": 12, "name": "monday"}),
        ("run-column", 2, {"tying": "column", "phases": 2, "name": "tuesday"}),
    ):
        task = held_out_task(network_family(), seed)
        params = parameters(task.init())
        adam = torch.optim.Adam(params.items(), lr=0.02)
        recorder = Recorder(adam, **options)
        for t in range(RECORDED):
            adam.zero_grad()
            task.loss(params, task.batch(t)).backward()
            adam.step()
        recorder.finish().save(path_of(name))


# learned files


def random_metrics(potential, start, *, level=1.0, spread=0.5, offsets=0.0, seed=0):
    """A learned optimiser with random metrics."""
    g = torch.Generator().manual_seed(seed)
    bound = potential.bind(start)
    log_d = {k: level + spread * torch.randn(v.shape, generator=g, dtype=F64) for k, v in bound.log_d.items()}
    shift = offsets * torch.randn(bound.pieces, generator=g, dtype=F64)
    return LearnedOptimiser.from_potential(bound.with_metrics(log_d, shift))


def with_usage(learned, usage, online=None):
    header = replace(learned.header, usage=usage.to_dict(), online=None if online is None else online.to_dict())
    return replace(learned, header=header)


def write_files():
    network, quadratic = network_family(), quadratic_family()
    start, _ = problem("network")
    few = {"outer_steps": 3, "tasks_per_step": 3}
    learned = {
        "quadratic-diagonal": metamd.meta_train(quadratic, Diagonal(), **few),
        "quadratic-default": metamd.meta_train(quadratic, **few),
        "mixture-gradient": metamd.meta_train(quadratic, MaxDiagonal(3), estimator=metamd.Forward(), **few),
        "mixture-phases": metamd.meta_train(network, MaxDiagonal(3), **few, seed=2),
        "mixture-offsets": random_metrics(MaxDiagonal(3), start, level=0.5, spread=1.0, offsets=0.05, seed=1),
        "column": random_metrics(Diagonal(tying="column"), start, seed=2),
        "channel": random_metrics(MaxDiagonal(2, tying="channel", centre="origin"), start, seed=3),
        "role": random_metrics(Diagonal(tying="role"), start, seed=4),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", metamd.NotConvergedWarning)
        learned["mixture-paper"] = metamd.meta_train(
            quadratic, **metamd.paper(outer_steps=5, stable=False), tasks_per_step=3
        )
    shared = tasks.starting_at(quadratic, {"theta": torch.tensor([1.0, -1.0], dtype=F64)})
    learned["quadratic-start"] = metamd.meta_train(shared, Diagonal(), **few).with_start(metamd.learn_start(shared, tasks=3))
    learned["network-default"] = default = metamd.meta_train(network, tasks_per_step=2, seed=5)
    offered = {"momenta": (0.0, 0.9), "factors": (0.5, 0.7, 1.0), "tasks": 2}
    usage = {
        "network-schedule": {"metrics": ("learned",), "schedules": ("learned",)},
        "network-average": {"metrics": ("online",), "rules": (Online(),), "schedules": ("linear",)},
        "network-sum": {"metrics": ("online",), "rules": (Online("sum"),), "averages": ("constant",)},
    }
    for name, options in usage.items():
        learned[name] = metamd.learn_usage(default, network, **{**offered, **options})
    diagonal = metamd.meta_train(network, Diagonal(), **few)
    learned["network-diagonal-usage"] = with_usage(diagonal, Usage("learned", 0.9, "quadratic", 0.7))
    learned["network-both"] = metamd.meta_train(network, Kronecker(sides="both"), outer_steps=2, tasks_per_step=2)
    followed = replace(learned["network-average"].online, refresh=3)
    learned["network-refresh"] = with_usage(default, Usage("online", 0.9, "linear"), followed)
    for name, run in (("recorded", "run-parameter"), ("recorded-column", "run-column")):
        learned[name] = metamd.learn([metamd.Run.load(path_of(run))])
    for name, found in learned.items():
        found.save(path_of(name))
    words = ["certify", path_of("quadratic-diagonal"), "quadratic", "--held-out-tasks", 20, "--regret-cap", 500]
    with TemporaryDirectory() as folder:  # a command leaves its lock beside the file
        certified = Path(folder) / "certified.safetensors"
        assert command(*words, "--out", certified) == 0
        shutil.copy(certified, path_of("quadratic-certified"))


def write_expected():
    """Where learned files lead, and what is learned from runs."""
    expected = {"plain": {}, "recommended": {}, "shipped": {}, "shipped-recommended": {}, "runs": {}}
    about = {}
    for name, where in FILES.items():
        learned = metamd.load(path_of(name))
        expected["plain"][name] = plain_end(learned, where)
        expected["recommended"][name] = recommended_end(learned, where)
        about[name] = {"fingerprint": learned.fingerprint(), "repr": repr(learned), "usage": learned.usage.to_dict()}
        about[name]["online"] = None if learned.online is None else learned.online.to_dict()
    for name, where in SHIPPED.items():
        learned = metamd.load(name)
        expected["shipped"][name] = plain_end(learned, where)
        expected["shipped-recommended"][name] = recommended_end(learned, where)
        about[f"shipped {name}"] = {"fingerprint": learned.fingerprint()}
    for name, learned in learned_from_runs().items():
        expected["runs"][name] = {k: v.detach().clone() for k, v in learned.potential.log_d.items()}
        about[f"learn {name}"] = {"horizon": learned.header.horizon, "gradient_scale": dict(learned.header.gradient_scale)}
    for name in problems.RUNS:
        run = metamd.Run.load(path_of(name))
        about[name] = {"fingerprint": run.fingerprint(), "repr": repr(run), "steps": run.steps, "tying": run.tying}
    torch.save(expected, HERE / "expected.pt")
    return about


# states


def write_states():
    for name, (where, dtype, build) in CASES.items():
        start, grads = problem(where, dtype)
        params = parameters(start)
        optimiser, schedule = build(params)
        walk(optimiser, schedule, params, grads, 0, MIDDLE, edited=name in EDITED)
        if name in EVALUATED:
            optimiser.eval()
        found = {
            "middle": values(params),
            "optimiser": optimiser.state_dict(),
            "schedule": None if schedule is None else schedule.state_dict(),
        }
        torch.save(found, HERE / f"state-{name}.pt")  # now, since the state is not copied
        if name in EVALUATED:
            optimiser.train()
        walk(optimiser, schedule, params, grads, MIDDLE)
        found = torch.load(HERE / f"state-{name}.pt", weights_only=True) | {"end": ended(name, optimiser, params)}
        torch.save(found, HERE / f"state-{name}.pt")
        group = found["optimiser"]["param_groups"][0]
        print(f"{name}: pieces {sorted(set(found['end']['pieces'].tolist()))}, damping {float(group['safeguard'][0]):.3g}")


# names, signatures and help


def signature(thing):
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return None
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text)  # in which module a type lives does not matter


def signatures():
    found = {}
    for name in sorted(metamd.__all__):
        thing = getattr(metamd, name)
        if not callable(thing):
            continue
        found[name] = signature(thing)
        for member in sorted(vars(thing)) if inspect.isclass(thing) else ():
            if not member.startswith("_") and callable(getattr(thing, member)):
                found[f"{name}.{member}"] = signature(getattr(thing, member))
    return found


def help_texts():
    def said(*words):
        environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "dumb"}
        done = subprocess.run(
            [sys.executable, "-m", "metamd", *words, "--help"], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    found, waiting = {}, [()]
    while waiting:
        words = waiting.pop(0)
        found[" ".join(("metamd", *words))] = text = said(*words)
        usage = text.split("\n\n")[0] if "subcommands" in text else ""
        inner = re.search(r"\{([a-z0-9,-]+)\}", usage)
        waiting += [(*words, name) for name in inner.group(1).split(",")] if inner else []
    return found


def public(module):
    """The names that a module offers: those in its `__all__`, or else those that are defined in it."""
    own = [n for n, x in vars(module).items() if not n.startswith("_") and getattr(x, "__module__", "") == module.__name__]
    return sorted(getattr(module, "__all__", own))


def surface():
    submodules = {name: getattr(metamd, name) for name in SUBMODULES}
    return {
        "version": metamd.__version__,
        "names": {"metamd": sorted({*metamd.__all__, *dir(metamd)})}
        | {f"metamd.{n}": public(m) for n, m in submodules.items()},
        "signatures": signatures(),
        "help": help_texts(),
    }


def write_json(path, found):
    Path(path).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def recipes():
    found = {}
    for name in RECIPES:
        learned, losses = recipe(name)
        found[name] = {
            "losses": [float(f"{loss:.12g}") for loss in losses],
            "usage": learned.usage.to_dict(),
            "online": None if learned.online is None else learned.online.to_dict(),
        }
        print(name, learned, learned.online, losses[0], losses[-1])
    return found


def main():
    torch.set_num_threads(1)
    write_problems()
    write_runs()
    write_files()
    write_states()
    write_json(HERE / "expected.json", {"about": write_expected(), "recipes": recipes()})
    write_json(HERE / "surface.json", surface())
    write_json(HERE / "sentences.json", [list(row) for row in raised(Path(metamd.__file__).parent)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["surface"]:
        write_json(sys.argv[2], surface())
    else:
        main()

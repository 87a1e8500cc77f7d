"""What learned coordinates cost and gain, by rank and by rule: seconds and bytes against Adam, Muon and SOAP.

    python benchmarks/coordinates.py [--rounds ROUNDS]

A geometry is learned from runs of Adam for every rank: the one that is found by itself, 64, and all directions. A step is
the whole of it, loss and gradient of a batch of 100 included, on one thread; optimisers take turns, and ratios are to that
of Adam in the same run, medians over rounds. The state is all tensors that are there between two steps beside parameters and
gradients, those of MetaMD's file too, in copies of the parameters. The loss is the mean over three held-out runs of the same
family, plainly used with a constant rate and no momentum or by a rule with linear decay, over the same with all directions;
steps are those to the loss that these have at three quarters of the run. Needs the datasets: METAMD_DATA.
"""

import argparse
import gc
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from metamd import Kronecker, Measuring, Online, learn_from_reference, learned_rival, load, tasks
from metamd.comparison.training import Outcome, step_seconds, train_contender
from metamd.files.usage import Usage
from metamd.inner.objectives import Reference
from metamd.learning.parts import Parts
from metamd.learning.reference import draw_tasks, solved
from metamd.learning.usage import learn_scale
from metamd.rivals import Contender, rival
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import Counted

OUT = Path(__file__).parent / "results" / "coordinates.json"
RANKS: Mapping[str, Any] = {"found by itself": "auto", "64": 64, "all": None}
RIVALS = ("adam", "muon", "soap")
RULES = {
    "rule average": (Online(), Usage("online", momentum=0.9, schedule="linear")),
    "rule polar": (Online("polar", beta=0.9), Usage("online", schedule="linear", factor=0.35)),
}


def families() -> dict[str, TaskFamily]:
    return {
        "MLP": tasks.rotated_mnist(hold_out=45, images=2000, steps=200),
        "LeNet": tasks.diverse_digits(hold_out="kmnist", images=2000, steps=200),
    }


def contenders(files: Mapping[str, Path]) -> dict[str, Callable[[], Contender]]:
    """What is timed, each made anew from its file."""
    found: dict[str, Callable[[], Contender]] = {rival(name).title: rival(name).untuned for name in RIVALS}
    return found | {f"MetaMD, {kind}": partial(_ours, kind, path) for kind, path in files.items()}


def _ours(kind: str, path: Path) -> Contender:
    return learned_rival(load(path), name=f"metamd-{kind}").untuned()


def learned_files(family: TaskFamily, folder: Path) -> dict[str, Path]:
    """A geometry for every rank, used plainly and by the rules of an online metric."""
    reference, parts, found = Reference(lr=1e-3, factor=1.0), Parts(Counted(family)), {}
    ends = solved(draw_tasks(family, 0, "scale", 2), reference, parts)
    for rank, kept in RANKS.items():
        plain = learn_from_reference(family, Kronecker(rank=kept), reference=reference, tasks=8)
        found[f"rank {rank}"] = plain
        for name, (rule, usage) in RULES.items():
            online = learn_scale(plain, ends, rule, reference.lr, parts)
            header = replace(plain.header, usage=usage.to_dict(), online=online.to_dict())
            found[f"{name}, rank {rank}"] = replace(plain, header=header)
    paths = {kind: folder / f"{kind}.safetensors" for kind in found}
    for kind, learned in found.items():
        learned.save(paths[kind])
    return paths


def state_size(make: Callable[[], Contender], family: TaskFamily) -> float:
    """Bytes of all tensors that are there after a step and were not there before, over those of the parameters."""
    task = family.build(family.sample(torch.Generator().manual_seed(0)))
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    leaves = list(params.values())
    for p, g in zip(leaves, torch.autograd.grad(task.loss(params, task.batch(0)), leaves), strict=True):
        p.grad = g
    before = _live()
    optimiser = make().start(list(params.items()))
    optimiser.step()
    kept = {place: size for place, size in _live().items() if place not in before}
    return sum(kept.values()) / sum(p.numel() * p.element_size() for p in leaves)


def _live() -> dict[int, int]:
    """The size of every storage in use, by its place."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = [x.untyped_storage() for x in gc.get_objects() if isinstance(x, Tensor)]
    return {s.data_ptr(): s.nbytes() for s in storages}


def measured(family: TaskFamily, rounds: int, folder: Path) -> list[dict[str, Any]]:
    makers, side = contenders(learned_files(family, folder)), family.held_out()
    who = {label: make() for label, make in makers.items()}
    task = side.build(side.sample(torch.Generator().manual_seed(1)))
    seconds = step_seconds(task, who, rounds=rounds)
    rows = []
    runs = {label: _runs(side, c) for label, c in who.items() if ", rank " in label}
    for label, make in makers.items():
        row: dict[str, Any] = {"optimiser": label, "step": seconds[label] / seconds["Adam"], "ms": 1000 * seconds[label]}
        row["state"] = state_size(make, family)
        if label in runs:
            row |= _against(runs[label], runs[label[: label.index("rank ")] + "rank all"])
        rows.append({k: v if isinstance(v, str) else round(v, 4) if math.isfinite(v) else None for k, v in row.items()})
    return rows


def _runs(side: TaskFamily, contender: Contender) -> list[Outcome]:
    """Three held-out ones."""
    generator = torch.Generator().manual_seed(1)
    return [train_contender(side.build(side.sample(generator)), contender, measuring=Measuring(splits=())) for _ in range(3)]


def _against(runs: Sequence[Outcome], whole: Sequence[Outcome]) -> dict[str, float]:
    """Mean losses over those with all directions, and steps to the loss that these have at three quarters of the run."""
    target = fmean(o.loss_after(0.75) for o in whole)
    mine, theirs = (fmean(o.steps_to(target) for o in x) for x in (runs, whole))
    return {"mean_loss": fmean(o.mean_loss for o in runs) / fmean(o.mean_loss for o in whole), "steps": mine / theirs}


def table(found: Mapping[str, Any]) -> str:
    """Rivals, and MetaMD at the rank that is found by itself, plain and polar; the rest is in the record."""
    lines = ["| | step, of Adam's | state, copies of the parameters | mean loss, of all directions |", "|---" * 4 + "|"]
    for name, model in found.items():
        for row in model:
            if ", rank " in row["optimiser"] and (
                "found by itself" not in row["optimiser"] or "average" in row["optimiser"]
            ):
                continue
            loss = f"{row['mean_loss']:.2f} x" if "mean_loss" in row else ""
            who = row["optimiser"].replace(", rank found by itself", "")
            lines.append(f"| {name}: {who} | {row['step']:.2f} x | {row['state']:.2f} | {loss} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with TemporaryDirectory() as folder:
        found = {name: measured(family, rounds, Path(folder)) for name, family in families().items()}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()

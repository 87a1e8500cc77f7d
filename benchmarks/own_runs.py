"""What a file learned from two recorded AdamW runs is worth on a third task: nothing is trained to learn it.

    python benchmarks/own_runs.py [--only mlp lenet sequences text] [--text PATH] [--nights]

Of every family two tasks are trained by AdamW at its default rate, 1e-3, and recorded. `metamd.learn` makes a file of the
two records. A third task, which nothing was chosen on, is trained from three initialisations with the file, and by AdamW at
five rates. The best rate is chosen on that task, by the mean training loss, and with or without the tail average that the
file recommends: all rates from the first initialisation, and the best two from the others too. With `--nights` the file is
then used for three nights on other tasks, each recorded with its mean loss as score and added by `metamd.update`, and the
third task is trained once more with the file that came out.

The mean loss is that of the batches before every step; of a tail average it is corrected by what the average is better or
worse on every fifth batch. The constants of `metamd.learning.recorded` were chosen on the tasks in `TRIED`. A run that is in
the result file already is not made again.
"""

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

import metamd
from metamd.rivals.optimisers import Averaged
from metamd.tasks import diverse_digits, rotated_mnist, supervised

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SCREENED = 2  # rates that are best from the first initialisation, which are run from the others too
LOOK = 5  # steps between two losses of the tail average
SEEDS = 3

RECORDED = {"mlp": ("0", "60"), "lenet": ("usps", "fashionmnist"), "sequences": ("reverse", "maximum"), "text": ("0", "1")}
TRIED = {"mlp": "15", "lenet": "mnist", "sequences": "shift", "text": "2"}
HELD_OUT = {"mlp": "30", "lenet": "kmnist", "sequences": "sort", "text": "7"}
NIGHTS = {
    "mlp": ("45", "75", "45"),
    "lenet": ("svhn", "mnist", "usps"),
    "sequences": ("swap", "minimum", "difference"),
    "text": ("4", "5", "6"),
}


class Transformer(nn.Module):
    """Two layers of width 48 with the norm first, as torch has them."""

    def __init__(self, symbols, length, causal, width=48):
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        layer = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **layer) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, symbols)
        mask = torch.full((length, length), -torch.inf).triu(1) if causal else torch.zeros(length, length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, codes):
        x = self.symbol(codes) + self.place(torch.arange(codes.shape[1]))
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.output(self.norm(x)).transpose(1, 2)  # (batch, symbols, places)


RULES = {
    "reverse": lambda x: x.flip(1),
    "maximum": lambda x: x.cummax(1).values,
    "shift": lambda x: x.roll(1, 1),
    "swap": lambda x: x.reshape(len(x), -1, 2).flip(2).reshape(len(x), -1),
    "minimum": lambda x: x.cummin(1).values,
    "difference": lambda x: (x - x.roll(1, 1)) % 10,
    "sort": lambda x: x.sort(1).values,
}
"""From twelve digits to twelve digits."""


def sequences():
    data = {}
    for number, (name, rule) in enumerate(RULES.items()):
        generator = torch.Generator().manual_seed(number)
        train, test = (torch.randint(10, (n, 12), generator=generator) for n in (4000, 1000))
        data[name] = {"train": (train, rule(train)), "test": (test, rule(test))}
    return supervised(lambda: Transformer(10, 12, causal=False), data, batch_size=64, steps=250, name="sequences")


def text(path, parts=10, length=48):
    """Tenths of a text, the last tenth of each for the test; windows do not cross."""
    characters = Path(path).read_text()
    alphabet = {c: i for i, c in enumerate(sorted(set(characters)))}
    codes = torch.tensor([alphabet[c] for c in characters])

    def windows(codes, every):
        rows = codes.unfold(0, length + 1, every)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    data = {}
    for i, part in enumerate(codes.tensor_split(parts)):
        cut = int(0.9 * len(part))
        data[str(i)] = {"train": windows(part[:cut], 8), "test": windows(part[cut:], length)}
    return supervised(lambda: Transformer(len(alphabet), length, causal=True), data, batch_size=16, steps=250, name="text")


def families(path):
    images = {"images": 5000, "batch_size": 100, "hold_out": None}
    return {
        "mlp": lambda: rotated_mnist(model="mlp", steps=300, **images),
        "lenet": lambda: diverse_digits(model="lenet", steps=200, **images),
        "sequences": sequences,
        "text": lambda: text(path),
    }


def built(family, domain, seed):
    return family.build({"family": family.name, family.kind: domain, "init_seed": 1000 + seed, "batch_seed": 2000 + seed})


def train(task, params, optimiser, recorder=None):
    """Mean losses, of the iterates and of their tail average where there is one, and both at the end on test data."""
    losses, gains, averaged, began = [], [], hasattr(optimiser, "eval"), time.perf_counter()
    for step in range(task.steps):
        batch = task.batch(step)
        loss = task.loss(params, batch)
        for p in params.values():
            p.grad = None
        loss.backward()
        losses.append(float(loss.detach()))
        if averaged and step and step % LOOK == LOOK // 2:
            optimiser.eval()
            with torch.no_grad():
                gains.append(float(task.loss(params, batch)) - losses[-1])
            optimiser.train()
        optimiser.step()
    seconds = time.perf_counter() - began
    found = {"mean_loss": fmean(losses), "seconds": seconds}
    ends = {"": {n: p.detach().clone() for n, p in params.items()}}
    if averaged:
        optimiser.eval()
        found["mean_loss_averaged"] = found["mean_loss"] + fmean(gains)
        ends["_averaged"] = {n: p.detach().clone() for n, p in params.items()}
    for name, end in ends.items():
        test = task.evaluate(end, "test")
        found |= {f"test_loss{name}": test.loss, f"test_accuracy{name}": test.accuracy}
    run = None if recorder is None else recorder.finish(score=found.get("mean_loss_averaged", found["mean_loss"]))
    return found, run


def parameters(task):
    return {n: nn.Parameter(x) for n, x in task.init().items()}


def by_adamw(task, rate):
    params = parameters(task)
    inner = torch.optim.AdamW(params.values(), lr=rate)
    return train(task, params, Averaged(inner, list(params.values())))[0]


def record(task, name):
    params = parameters(task)
    adamw = torch.optim.AdamW(params.items())
    return train(task, params, adamw, metamd.Recorder(adamw, name=name))[1]


def with_file(task, learned, name=""):
    params = parameters(task)
    optimiser = metamd.MetaMD(params.items(), learned, steps=task.steps)
    return train(task, params, optimiser, metamd.Recorder(optimiser, name=name) if name else None)


def lowest_mean(row):
    """Of the iterates or of their tail average, whichever is lower; infinite for a run that diverged."""
    found = min(row["mean_loss"], row["mean_loss_averaged"])
    return found if math.isfinite(found) else math.inf


def measure(name, family, rows, keep, nights):
    """Fill the rows of a family; what is there is not computed again."""

    def row(label, compute):
        if label not in rows:
            rows[label] = compute()
            keep()
        print(f"{name} {label}: {json.dumps(rows[label])}", flush=True)

    runs = [record(built(family, domain, i), f"{name}-{domain}") for i, domain in enumerate(RECORDED[name])]
    learned = metamd.learn(runs)
    tasks = [built(family, HELD_OUT[name], 100 + seed) for seed in range(SEEDS)]
    for seed, task in enumerate(tasks):
        row(f"file, {seed}", lambda task=task: with_file(task, learned)[0])
    for rate in RATES:
        row(f"AdamW {rate:g}, 0", lambda rate=rate: by_adamw(tasks[0], rate))
    for rate in sorted(RATES, key=lambda rate: lowest_mean(rows[f"AdamW {rate:g}, 0"]))[:SCREENED]:
        for seed, task in enumerate(tasks[1:], 1):
            row(f"AdamW {rate:g}, {seed}", lambda task=task, rate=rate: by_adamw(task, rate))
    if not nights:
        return
    updated, factors = learned, [learned.usage.factor]
    if f"updated, {SEEDS - 1}" in rows:
        return
    for night, domain in enumerate(NIGHTS[name]):
        found, run = with_file(built(family, domain, 10 + night), updated, f"night {night}")
        updated = metamd.update(updated, [run])
        factors.append(updated.usage.factor)
        row(f"night {night}", lambda found=found, night=night: {**found, "factor": factors[night]})
    for seed, task in enumerate(tasks):
        row(f"updated, {seed}", lambda task=task: {**with_file(task, updated)[0], "factor": factors[-1]})


def summary(rows):
    """Per family: the means over seeds of the file, of the best setting of AdamW, and of the file after three nights."""

    def over_seeds(label, of):
        found = [rows[f"{label}, {seed}"][of] for seed in range(SEEDS) if f"{label}, {seed}" in rows]
        return fmean(found) if len(found) == SEEDS else float("nan")

    rates = [rate for rate in RATES if f"AdamW {rate:g}, {SEEDS - 1}" in rows]
    settings = [(rate, ending) for rate in rates for ending in ("", "_averaged")]
    best = min(settings, key=lambda s: over_seeds(f"AdamW {s[0]:g}", f"mean_loss{s[1]}"))
    found = {"AdamW lowest test loss": min(over_seeds(f"AdamW {rate:g}", f"test_loss{ending}") for rate, ending in settings)}
    for label, key, ending in (
        ("AdamW", f"AdamW {best[0]:g}", best[1]),
        ("file", "file", "_averaged"),
        ("updated", "updated", "_averaged"),
    ):
        for of in ("mean_loss", "test_loss", "test_accuracy"):
            found[f"{label} {of}"] = over_seeds(key, of + ending)
    found |= {"AdamW rate": best[0], "AdamW averaged": bool(best[1])}
    found["ratio"] = found["file mean_loss"] / found["AdamW mean_loss"]
    found["ratio updated"] = found["updated mean_loss"] / found["AdamW mean_loss"]
    found["factor updated"] = rows.get("updated, 0", {}).get("factor", float("nan"))
    return found


def as_markdown(rows):
    nights = any("updated, 0" in each for each in rows.values())
    head = ["", "AdamW: rate", "mean loss", "test loss", "file: mean loss", "ratio", "test loss"]
    head += ["factor after 3 nights", "ratio"] if nights else []
    lines = ["# A file learned from two recorded AdamW runs, on a third task", "", "`python benchmarks/own_runs.py`", ""]
    lines += [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for name, each in rows.items():
        s = summary(each)
        rate = f"{s['AdamW rate']:g}{', averaged' if s['AdamW averaged'] else ''}"
        cells = [f"{name}, {HELD_OUT[name]}", rate, f"{s['AdamW mean_loss']:.4f}", f"{s['AdamW test_loss']:.4f}"]
        cells += [f"{s['file mean_loss']:.4f}", f"{s['ratio']:.2f}", f"{s['file test_loss']:.4f}"]
        cells += [f"{s['factor updated']:.3g}", f"{s['ratio updated']:.2f}"] if nights else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(RECORDED), default=list(RECORDED))
    parser.add_argument("--nights", action="store_true", help="then use and update the file for three nights")
    official = Path(os.environ.get("METAMD_OFFICIAL", "data"))
    parser.add_argument("--text", type=Path, default=official / "shakespeare" / "tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "own_runs.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {"rows": {}}
    record |= {"versions": {"torch": torch.__version__, "python": platform.python_version()}, "rates": RATES}

    def keep():
        finished = {
            n: r for n, r in record["rows"].items() if any(f", {SEEDS - 1}" in x for x in r if x.startswith("AdamW"))
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(as_markdown(finished))

    for name in arguments.only:
        measure(name, families(arguments.text)[name](), record["rows"].setdefault(name, {}), keep, arguments.nights)
    keep()
    print(arguments.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()

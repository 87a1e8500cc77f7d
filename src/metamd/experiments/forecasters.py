"""`metamd reproduce cash-machines`: a forecaster per cash machine of NN5, one network for all of them, and no network.

Half of the series are learned from. The global network is the same one, trained on the training days of all 111 series, the
held-out ones among them. Its rate, and the rate at which it is tuned further on each series, are chosen for validation days
of the series that are learned from. The seasonal naive forecast repeats the last week. AutoETS chooses among exponential
smoothings with a weekly season, by the days before those that it forecasts [Hyndman2002]; where its package is not
installed (the extra `series`), its row is left out.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metamd import tasks
from metamd.comparison.comparison import Comparison
from metamd.comparison.sections import Section, interval
from metamd.comparison.statistics import bootstrap
from metamd.comparison.training import Measuring, one_thread
from metamd.experiments.declare import Entrant, Family, Scale, coordinates
from metamd.experiments.experiment import Experiment
from metamd.experiments.per_instance import CPU, GEOMETRY, PAPER, SMOKE, per_side, summarised
from metamd.files.store import Records, Result, as_json
from metamd.inner.run import OptimiserSteps, train
from metamd.potentials.base import Params
from metamd.tasks.base import Split, seeded
from metamd.tasks.series import HORIZON, CashMachines, Forecaster, SeriesTask, filled, smape
from metamd.tasks.supervised import SupervisedTask

RATES, FURTHER = (1e-3, 3e-3, 1e-2), (1e-4, 3e-4, 1e-3)
GLOBAL_FACTOR = 10
"""How many times as many steps as a forecaster of one series the global network takes."""

AUTO_ETS = "auto-ets"
"""The name of its cell, apart from the others that need no package."""


def _family(scale: Scale, hold_out: str) -> Family:
    return tasks.cash_machines(steps=scale.steps, **scale.sizes)


def _summarised(found: list[Comparison], folder: Path) -> list[Result]:
    """The rows of the comparison, and the forecasts of those that are no optimiser."""
    about = {"experiment": "cash-machines, others", "family": found[0].settings["family"]}
    said = found[0].settings["family"]
    family = tasks.cash_machines(**{key: said[key] for key in ("lags", "width", "batch_size", "steps")})
    records = Records(folder / "others", about)
    kept = dict(records.cell("others", partial(others, family))["sMAPE"])
    if records.has(AUTO_ETS) or find_spec("statsforecast") is not None:
        kept |= records.cell(AUTO_ETS, partial(auto_ets, family))["sMAPE"]
    errors = {label: np.array(each, dtype=np.float64) for label, each in kept.items()}
    more = [{"label": label, "other": asdict(bootstrap(each, range(len(each))))} for label, each in errors.items()]
    return [*summarised(found, folder), *map(as_json, more)]


def others(family: CashMachines) -> Result:
    """The sMAPE of every held-out series by the seasonal naive forecast, one network for all, and the same tuned further."""
    held, known = family.held_out(), [task_of(family, name) for name in family.domains]
    mine = [task_of(held, name) for name in held.domains]
    with one_thread():
        pooled = [torch.cat(parts) for parts in zip(*(t.splits["train"] for t in (*known, *mine)), strict=True)]
        networks = {rate: global_network(family, pooled, rate) for rate in RATES}
        rate = min(RATES, key=lambda x: errors(known, networks[x], "validation"))
        common = networks[rate]
        some = known[:: max(1, len(known) // 8)]
        near = {x: fmean(t.evaluate(further(t, common, x), "validation").loss for t in some) for x in FURTHER}
        best = min(FURTHER, key=near.__getitem__)
        return {
            "rates": {"global": rate, "further": best},
            "sMAPE": {
                "Seasonal naive": [naive(t) for t in mine],
                "One network for all series": [t.evaluate(common, "test").loss for t in mine],
                "One network, then Adam on each series": [t.evaluate(further(t, common, best), "test").loss for t in mine],
            },
        }


def task_of(family: CashMachines, name: str) -> SeriesTask:
    """A task on a series."""
    config = {"family": family.name, "series": name, "init_seed": 0, "batch_seed": 0}
    found = family.build(config)
    assert isinstance(found, SeriesTask)
    return found


def naive(task: SeriesTask) -> float:
    """The sMAPE on test of the last week before it, again and again."""
    days, wanted = (part[torch.arange(1)] for part in task.splits["test"])
    return smape(days[0, -7:].repeat(HORIZON // 7), wanted[0])


def auto_ets(family: CashMachines) -> Result:
    """The sMAPE of every held-out series by AutoETS."""
    ets: Any = import_module("statsforecast.models").AutoETS(season_length=7)
    held, found = family.held_out(), []
    for name in held.domains:
        days = filled(held.series[name])[:-HORIZON].double().numpy()
        forecast = torch.from_numpy(ets.forecast(days, HORIZON)["mean"])
        (_, wanted) = (part[torch.arange(1)] for part in task_of(held, name).splits["test"])
        found.append(smape(forecast, wanted[0]))
    return {"sMAPE": {"AutoETS": found}}


def errors(some: Sequence[SeriesTask], params: Params, split: Split) -> float:
    """The mean loss of one network on series."""
    return fmean(task.evaluate(params, split).loss for task in some)


def global_network(family: CashMachines, pooled: Sequence[Tensor], rate: float) -> Params:
    """One network on the windows of all series, by Adam with linear decay."""
    config = {"family": "pooled", "dataset": "all", "init_seed": 0, "batch_seed": 0}
    recipe = replace(family.recipe, make_model=partial(Forecaster, family.lags, family.width))
    task = SupervisedTask(config, recipe, {"train": (pooled[0], pooled[1])})
    return by_adam(task, task.init(), rate, GLOBAL_FACTOR * family.steps)


def further(task: SeriesTask, start: Params, rate: float) -> Params:
    """The network for all, tuned on one series for as many steps as a forecaster of its own takes."""
    return by_adam(task, start, rate, task.steps)


def by_adam(task: SupervisedTask, start: Params, rate: float, steps: int) -> Params:
    """A run of Adam with linear decay."""
    rule = OptimiserSteps.beginning(
        start, lambda named: torch.optim.Adam(named, lr=rate, fused=True), lambda t: 1 - t / steps
    )
    with seeded(0):
        train(task, rule, steps)
    return rule.model()


def sections(rows: Sequence[Result]) -> list[Section]:
    """The tables of the comparison, and a line for each forecast that no optimiser makes."""
    lines = [[row["label"], interval(row["other"])] for row in rows if "other" in row]
    return [*per_side(rows), Section(columns=["other forecasts", "sMAPE, %, test"], rows=lines)]


# few windows of one series are soon learned by heart: a second file is judged on what it forecasts
ON_VALIDATION = coordinates({"MetaMD, judged on validation data": Entrant()}, judged_on="validation")
SERIES_RIVALS = ("adam", "muon", "soap")
EXPERIMENTS = (
    Experiment(
        "cash-machines",
        _family,
        {**GEOMETRY, "validated": ON_VALIDATION},
        {
            "smoke": replace(
                SMOKE,
                sizes={"lags": 14, "width": 3, "batch_size": 4},
                measuring=Measuring(every=4, examples=20, looks=(4, 8)),
            ),
            "cpu": replace(CPU, steps=200, rivals=SERIES_RIVALS, usage_tasks=6, measuring=Measuring(looks=(20, 100, 200))),
            "paper": replace(PAPER, steps=200, rivals=SERIES_RIVALS, measuring=Measuring(looks=(20, 100, 200))),
        },
        target="Adam",
        summarise=_summarised,
        sections=sections,
    ),
)

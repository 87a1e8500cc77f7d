"""A forecaster per cash machine: the NN5 competition, 111 daily series with missing days."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from metamd.data.loading import stored
from metamd.data.raw_files import files
from metamd.tasks.base import Evaluation, Split
from metamd.tasks.sources import Arrays
from metamd.tasks.supervised import Recipe, SupervisedTask, TwoSides

HORIZON = 56
"""Days to forecast, as in the competition; the last ones are its test."""

MACHINES, LEARNED = 111, 55
"""The number of series, and how many of them are learned from."""


class Forecaster(nn.Module):
    """The mean of each weekday, and a network with one hidden layer that says by how much the coming days differ from it.

    Args:
        lags: days in, whole weeks.
        width: of the hidden layer.
    """

    def __init__(self, lags: int, width: int) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(lags, width), nn.Linear(width, HORIZON)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, days: Tensor) -> Tensor:
        """The next `HORIZON` days."""
        week = days.reshape(*days.shape[:-1], -1, 7).mean(-2)
        apart = days - week.repeat(1, days.shape[-1] // 7)
        return week.repeat(1, HORIZON // 7) + self.output(F.relu(self.hidden(apart)))


class SeriesTask(SupervisedTask):
    """One forecaster; validation and test have one window each, whose targets are NaN where a day is missing."""

    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """Mean absolute error on the training windows, in parts of the mean; on validation and test the sMAPE."""
        if split == "train":
            return super().evaluate(params, split)
        if split not in self.splits:
            raise ValueError(f"This task has the splits {', '.join(self.splits)}, got {split!r}.")
        days, wanted = (part[torch.arange(1)] for part in self.splits[split])
        with torch.no_grad():
            found = smape(self._functional(params, days)[0], wanted[0])
        return Evaluation(found, None, {"sMAPE, %": found})


def cash_machines(*, lags: int = 70, width: int = 32, batch_size: int = 32, steps: int = 200) -> "CashMachines":
    """Forecast the withdrawals from one cash machine: a task is a series of NN5 and an initialisation.

    The last `lags` days go in, the next 56 come out. The network says how these differ from the mean of their weekday
    in the days that went in, and begins at no difference. Of the 111 series, drawn once, 55 are learned from and 56 are for
    `held_out()`. The last 56 days of a series are for test, the 56 before them for validation. A series is divided by the
    mean of its training days. A missing day has the median of the training days of its weekday; such a day counts in no
    error on validation or test. The training loss is the mean absolute error. On validation and test the loss is the
    competition's sMAPE in percent, mean of |y - f| / ((|y| + |f|) / 2).

    Args:
        lags: days in, whole weeks.
        width: of the hidden layer.
        batch_size: windows per step.
        steps: T.
    """
    if not 7 <= lags <= 364 or lags % 7:
        raise ValueError(f"lags must be whole weeks, from 7 to 364 days, got {lags}. Pass lags=70, ten weeks.")
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}. Pass width=32, say.")
    return CashMachines(lags, width, batch_size, steps)


class CashMachines(TwoSides):
    """See `cash_machines`."""

    kind = "series"
    task = SeriesTask

    def __init__(self, lags: int, width: int, batch_size: int, steps: int) -> None:
        recipe = Recipe(partial(Forecaster, lags, width), F.l1_loss, batch_size, steps)
        drawn = torch.randperm(MACHINES, generator=torch.Generator().manual_seed(0)).add(1).tolist()
        names = [f"NN5-{number:03d}" for number in drawn]
        super().__init__("cash-machines", recipe, (sorted(names[:LEARNED]), sorted(names[LEARNED:])))
        self.lags, self.width = lags, width

    @cached_property
    def series(self) -> dict[str, NDArray[np.float64]]:
        """Every series by name, NaN where a day is missing."""
        values, names = stored(files("nn5")["nn5.npz"], "series", "names")
        return {str(name): days for name, days in zip(names, values, strict=True)}

    def splits(self, name: str) -> Mapping[Split, Arrays]:
        """The windows of a series."""
        return windows(self.series[name], self.lags)

    def describe(self) -> dict[str, Any]:
        """The settings, and what is done to the series."""
        settings = {"lags": self.lags, "width": self.width, "batch_size": self.recipe.batch_size, "steps": self.steps}
        how = "missing days have the median of the training days of their weekday, and count in no error"
        return {"family": self.name, "domains": list(self.domains), **settings, "preparation": how, "dataset": "nn5"}


def smape(forecast: Tensor, wanted: Tensor) -> float:
    """100 mean |y - f| / ((|y| + |f|) / 2) over the days that are there; 0 where both are zero."""
    there = ~wanted.isnan()
    f, y = forecast[there].double(), wanted[there].double()
    size = (f.abs() + y.abs()) / 2
    return float(100 * ((y - f).abs() / size.clamp_min(1e-12)).mean())


def filled(days: NDArray[np.float64]) -> Tensor:
    """A series without missing days, divided by the mean of its training days."""
    training, weekday = days[: -2 * HORIZON], np.arange(len(days)) % 7
    medians = np.array([np.nanmedian(training[weekday[: len(training)] == day]) for day in range(7)])
    return torch.from_numpy(np.where(np.isnan(days), medians[weekday], days) / float(np.nanmean(training))).float()


def windows(days: NDArray[np.float64], lags: int) -> Mapping[Split, Arrays]:
    """Inputs and targets of a series: all windows of the training days, and one window for each of validation and test."""
    ends = {"train": len(days) - 2 * HORIZON, "validation": len(days) - HORIZON, "test": len(days)}
    whole, missing = filled(days), torch.from_numpy(np.isnan(days))
    rows = whole[: ends["train"]].unfold(0, lags + HORIZON, 1)
    found: dict[Split, Arrays] = {"train": (rows[:, :lags].contiguous(), rows[:, lags:].contiguous())}
    for split in ("validation", "test"):
        begin = ends[split] - HORIZON
        wanted = whole[begin : ends[split]].masked_fill(missing[begin : ends[split]], torch.nan)
        found[split] = whole[None, begin - lags : begin], wanted[None]
    return found

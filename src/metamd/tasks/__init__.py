"""Families of training problems."""

from collections.abc import Callable

from metamd.tasks.base import Config, Drawn, Evaluation, SolvedTask, Split, Task, TaskFamily, config_hash
from metamd.tasks.equations import advection, burgers
from metamd.tasks.language import speakers, texts
from metamd.tasks.pictures import pictures
from metamd.tasks.series import cash_machines
from metamd.tasks.supervised import supervised
from metamd.tasks.synthetic import logistic, quadratic, rosenbrock, tabular
from metamd.tasks.vision import (
    adapt_rotated_mnist,
    diverse_digits,
    images,
    leave_one_out,
    rotated_mnist,
    rotated_mnist_continuous,
)
from metamd.tasks.wrapped import starting_at

__all__ = [
    "Config",
    "Drawn",
    "Evaluation",
    "SolvedTask",
    "Split",
    "Task",
    "TaskFamily",
    "adapt_rotated_mnist",
    "advection",
    "burgers",
    "cash_machines",
    "config_hash",
    "diverse_digits",
    "images",
    "leave_one_out",
    "logistic",
    "pictures",
    "quadratic",
    "rosenbrock",
    "rotated_mnist",
    "rotated_mnist_continuous",
    "speakers",
    "starting_at",
    "supervised",
    "tabular",
    "texts",
]

FAMILIES: dict[str, Callable[..., TaskFamily]] = {
    "quadratic": quadratic,
    "rosenbrock": rosenbrock,
    "logistic": logistic,
    "tabular": tabular,
    "rotated-mnist": rotated_mnist,
    "rotated-mnist-continuous": rotated_mnist_continuous,
    "adapt-rotated-mnist": adapt_rotated_mnist,
    "diverse-digits": diverse_digits,
    "images": images,
    "pictures": pictures,
    "speakers": speakers,
    "texts": texts,
    "burgers": burgers,
    "advection": advection,
    "cash-machines": cash_machines,
}
"""The families that have a name on the command line."""

"""Families of training problems."""

from metamd.tasks.base import Config, Evaluation, SolvedTask, Split, Task, TaskFamily, config_hash
from metamd.tasks.logistic import logistic
from metamd.tasks.supervised import supervised
from metamd.tasks.synthetic import quadratic, rosenbrock
from metamd.tasks.tabular import tabular

__all__ = [
    "Config",
    "Evaluation",
    "SolvedTask",
    "Split",
    "Task",
    "TaskFamily",
    "config_hash",
    "logistic",
    "quadratic",
    "rosenbrock",
    "supervised",
    "tabular",
]

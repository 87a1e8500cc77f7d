"""Families of training problems."""

from metamd.tasks.base import Config, Drawn, Evaluation, SolvedTask, Split, Task, TaskFamily, config_hash
from metamd.tasks.logistic import logistic
from metamd.tasks.shared_start import starting_at
from metamd.tasks.supervised import supervised
from metamd.tasks.synthetic import quadratic, rosenbrock
from metamd.tasks.tabular import tabular
from metamd.tasks.vision.adaptation import adapt_rotated_mnist
from metamd.tasks.vision.continuous import rotated_mnist_continuous
from metamd.tasks.vision.families import diverse_digits, images, rotated_mnist
from metamd.tasks.vision.family import leave_one_out

__all__ = [
    "Config",
    "Drawn",
    "Evaluation",
    "SolvedTask",
    "Split",
    "Task",
    "TaskFamily",
    "adapt_rotated_mnist",
    "config_hash",
    "diverse_digits",
    "images",
    "leave_one_out",
    "logistic",
    "quadratic",
    "rosenbrock",
    "rotated_mnist",
    "rotated_mnist_continuous",
    "starting_at",
    "supervised",
    "tabular",
]

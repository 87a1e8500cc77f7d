"""The families that have a name on the command line."""

from collections.abc import Callable

from metamd.tasks.base import TaskFamily
from metamd.tasks.logistic import logistic
from metamd.tasks.synthetic import quadratic, rosenbrock
from metamd.tasks.tabular import tabular
from metamd.tasks.vision.adaptation import adapt_rotated_mnist
from metamd.tasks.vision.continuous import rotated_mnist_continuous
from metamd.tasks.vision.families import diverse_digits, images, rotated_mnist

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
}

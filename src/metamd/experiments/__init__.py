"""The experiments of the paper and ours, by name; a variant changes rivals, ways to use a file, or the protocol."""

from importlib import import_module
from typing import Any

EXPERIMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "quadratic": ("quadratic", ()),
    "rosenbrock": ("rosenbrock", ()),
    "rotated-mnist-linear": ("paper_tables", ()),
    "rotated-mnist-mlp": ("paper_tables", ("all-rivals", "bayesian", "averages", "refresh")),
    "diverse-digits-lenet": ("paper_tables", ("bayesian",)),
    "resnet18-cifar10": ("paper_tables", ()),
    "adaptation": ("adaptation", ("learned-start",)),
    "pieces": ("pieces", ()),
    "ablation": ("ablation", ("paper-preset",)),
    "out-of-distribution": ("out_of_distribution", ()),
    "learned-rivals": ("learned_rivals", ()),
}
"""The module that declares each experiment, and the names of its variants, in the order in which `all` runs them."""

MOVED = {
    "adapt-rotated-mnist": "adaptation",
    "adapt-rotated-mnist-learned": "adaptation --variant learned-start",
    "averages": "rotated-mnist-mlp --variant averages",
    "bayesian": "rotated-mnist-mlp --variant bayesian",
    "bayesian-lenet": "diverse-digits-lenet --variant bayesian",
    "by-the-clock": "rotated-mnist-mlp --variant refresh",
    "every-rival": "rotated-mnist-mlp --variant all-rivals",
    "paper-preset": "ablation --variant paper-preset",
}
"""What became of experiments that had a name of their own."""


def find(name: str, variant: str = "") -> Any:
    """An experiment: what has a name, a variant, `scales`, `run` and `sections`."""
    if name in MOVED:
        raise ValueError(f"{name} is no experiment of its own any more. Run: metamd reproduce {MOVED[name]}.")
    if name not in EXPERIMENTS:
        raise ValueError(f"the experiment must be one of {', '.join(EXPERIMENTS)}; got {name!r}.")
    module, variants = EXPERIMENTS[name]
    if variant and variant not in variants:
        known = f"has the variants {', '.join(variants)}" if variants else "has no variants"
        raise ValueError(f"{name} {known}, got {variant!r}. Leave out --variant, or name one of these.")
    found = import_module(f"metamd.experiments.{module}").EXPERIMENTS
    return next(e for e in found if (e.name, e.variant) == (name, variant))


def every() -> list[tuple[str, str]]:
    """The name and the variant of every experiment, in the order in which `all` runs them."""
    return [(name, variant) for name, (_, variants) in EXPERIMENTS.items() for variant in ("", *variants)]


def folder_name(name: str, variant: str = "") -> str:
    """The folder of an experiment under the directory of all.

    Example:
        >>> folder_name("rotated-mnist-mlp", "averages")
        'rotated-mnist-mlp-averages'
    """
    return f"{name}-{variant}" if variant else name

"""The experiments of the paper and ours, by name; a variant changes rivals, ways to use a file, or the protocol."""

from metamd.experiments import (
    ablation,
    adaptation,
    forecasters,
    out_of_distribution,
    paper_tables,
    per_instance,
    pieces,
    published,
    quadratic,
    rosenbrock,
)
from metamd.experiments.experiment import Experiment
from metamd.experiments.synthetic import Synthetic

_MODULES = (
    quadratic,
    rosenbrock,
    paper_tables,
    published,
    adaptation,
    pieces,
    ablation,
    out_of_distribution,
    per_instance,
    forecasters,
)
EXPERIMENTS: dict[tuple[str, str], Experiment | Synthetic] = {
    (experiment.name, experiment.variant): experiment for module in _MODULES for experiment in module.EXPERIMENTS
}
"""By name and variant, in the order in which `all` runs them."""

MOVED = {
    "adapt-rotated-mnist": "adaptation",
    "adapt-rotated-mnist-learned": "adaptation --variant learned-start",
    "averages": "rotated-mnist-mlp --variant averages",
    "bayesian": "rotated-mnist-mlp --variant bayesian",
    "bayesian-lenet": "diverse-digits-lenet --variant bayesian",
    "by-the-clock": "rotated-mnist-mlp --variant seconds",
    "every-rival": "rotated-mnist-mlp --variant all-rivals",
    "paper-preset": "ablation --variant paper-preset",
}
"""What became of experiments that had a name of their own."""


def find(name: str, variant: str = "") -> Experiment | Synthetic:
    """An experiment by its name and variant."""
    if name in MOVED:
        raise ValueError(f"{name} is no experiment of its own any more. Run: metamd reproduce {MOVED[name]}.")
    names = list(dict.fromkeys(known for known, _ in EXPERIMENTS))
    if name not in names:
        raise ValueError(f"the experiment must be one of {', '.join(names)}; got {name!r}.")
    if (name, variant) not in EXPERIMENTS:
        variants = [v for known, v in EXPERIMENTS if known == name and v]
        said = f"has the variants {', '.join(variants)}" if variants else "has no variants"
        raise ValueError(f"{name} {said}, got {variant!r}. Leave out --variant, or name one of these.")
    return EXPERIMENTS[name, variant]


def folder_name(name: str, variant: str = "") -> str:
    """The folder of an experiment under the directory of all.

    Example:
        >>> folder_name("rotated-mnist-mlp", "averages")
        'rotated-mnist-mlp-averages'
    """
    return f"{name}-{variant}" if variant else name

"""One training of one task by one contender, and what is measured of it: the cell that every comparison is made of."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch

from metamd.files.progress import Progress
from metamd.files.store import as_json, shortened
from metamd.inner.run import OptimiserSteps, has_exploded, not_finite, seconds_per_step
from metamd.inner.run import train as train_task
from metamd.optimiser.certificate import CertifiedRun, certificate_within, certify_run
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials.base import Params
from metamd.rivals.base import Contender
from metamd.tasks.base import Config, SolvedTask, Split, Task, config_hash, derive_seed, seeded

LARGEST_LOSS = 1e300
"""What a loss may be in a record: the sum of some is a number still."""

LOSS_DIGITS = 5
"""Digits of the losses in a record. No table shows more; with seven of them an archive is a quarter larger."""


@dataclass(frozen=True)
class Measuring:
    """How a training is watched, the same for all contenders of a comparison.

    Args:
        every: steps between two evaluations of the training loss.
        examples: of the training split that it is evaluated on, fixed.
        splits: on which loss and accuracy are taken at the end; problems without data have none.
        looks: steps after which the test split is evaluated on the way, with what the field states beside the loss.
    """

    every: int = 10
    examples: int = 2000
    splits: tuple[Split, ...] = ("validation", "test")
    looks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.every < 1 or self.examples < 1 or min(self.looks, default=1) < 1:
            raise ValueError(
                f"every, examples and looks must be at least 1, got {self.every}, {self.examples} and {self.looks}."
            )

    def settings(self) -> dict[str, Any]:
        """In JSON's types; looks where there are some, so that records without them stay as they are."""
        return dict(as_json({k: v for k, v in asdict(self).items() if k != "looks" or v}))


@dataclass(frozen=True)
class Outcome:
    """What one training gave."""

    config: Config  # of the task
    contender: Mapping[str, Any]  # what `Contender.describe` says
    places: tuple[int, ...]  # after how many steps the loss was evaluated, from 0 to the last
    # the training loss on the fixed examples there; infinite from the place where the run was given up
    losses: tuple[float, ...]
    batch_loss: float  # the mean loss of the batches over the run, before each step
    # loss and accuracy at the end by split; the accuracy is None where there is none
    ends: Mapping[str, tuple[float, float | None]]
    gradients: int  # gradient evaluations
    failed: str = ""  # why the run was given up; empty if it was not
    # by the number of steps, where `Measuring.looks` asks: the loss on test data, and the measures of `Evaluation`
    looks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # of a run by MetaMD: the `bound` on how far the mean loss of a model within `radius` of the start, where the run
    # ended, can lie below that of the run if losses are convex; and the `lowest` loss of a batch
    certificate: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_loss(self) -> float:
        """The training loss averaged over the evaluations after the first step."""
        return fmean(self.losses[1:])

    @property
    def final_loss(self) -> float:
        """The training loss at the end."""
        return self.losses[-1]

    def loss_after(self, share: float) -> float:
        """The training loss after a share of the steps, at the last evaluation until then."""
        return self.losses[max(i for i, place in enumerate(self.places) if place <= share * self.places[-1])]

    def loss_on(self, split: str) -> float:
        """The loss at the end on a split that was measured; infinite for a run that was given up."""
        if split not in self.ends and not self.failed:
            raise ValueError(
                f"the loss on {split!r} was not measured, or the task has no such data. Pass Measuring(splits=({split!r},))."
            )
        return self.ends.get(split, (math.inf, None))[0]

    def accuracy(self, split: str) -> float:
        """The share of right answers on a split that was measured; 0 for a run that was given up."""
        found = self.ends.get(split, (math.inf, None))[1]
        if found is None and not self.failed:
            raise ValueError(
                f"the accuracy on {split!r} was not measured, or the task has none. The protocol paper tunes by it; use "
                "handicap, which compares losses."
            )
        return found or 0.0

    def steps_to(self, target: float) -> float:
        """The first evaluation at or below a target whose successor is too; infinite if there is none."""
        for place, here, after in zip(self.places, self.losses, self.losses[1:], strict=False):
            if here <= target and after <= target:
                return float(place)
        return math.inf

    def to_json(self) -> dict[str, Any]:
        """In JSON's types, with None for what is infinite."""
        return dict(as_json({k: v for k, v in asdict(self).items() if k not in ("looks", "certificate") or v}))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Outcome":
        """Read a record, whatever it holds; one that does not hold together is refused in a sentence."""
        try:
            places, losses = tuple(int(x) for x in found["places"]), tuple(_loss_from_json(x) for x in found["losses"])
            ends = {str(s): (_loss_from_json(v[0]), None if v[1] is None else float(v[1])) for s, v in found["ends"].items()}
            rest = (
                dict(found["config"]),
                dict(found["contender"]),
                places,
                losses,
                _loss_from_json(found["batch_loss"]),
                ends,
            )
            looked = dict(found.get("looks", {}))
            looks = {str(int(t)): {str(n): _loss_from_json(x) for n, x in look.items()} for t, look in looked.items()}
            certificate = {str(n): _loss_from_json(x) for n, x in dict(found.get("certificate", {})).items()}
            outcome = cls(*rest, int(found["gradients"]), str(found["failed"]), looks, certificate)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"this is not the record of a training: {error!r}. Delete it, and it is made again.") from None
        increasing = len(places) > 1 and places[0] == 0 and list(places) == sorted(set(places))
        required = {
            "places and counts below 2^53": max([*places, outcome.gradients]) <= 2**53,
            f"losses below {LARGEST_LOSS:g}, or none where it failed": all(
                abs(x) <= LARGEST_LOSS for x in losses if x < math.inf
            ),
            "one loss for each of at least two places, counted from 0": increasing and len(places) == len(losses),
            "accuracies between 0 and 1": all(a is None or 0 <= a <= 1 for _, a in ends.values()),
            "no negative count": outcome.gradients >= 0,
        }
        if missing := next((what for what, holds in required.items() if not holds), ""):
            raise ValueError(f"the record of a training must have {missing}.")
        return outcome


def _loss_from_json(value: Any) -> float:
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a number is required, got {type(value).__name__}")
    return float(value)


def train_contender(
    task: Task, contender: Contender, *, steps: int | None = None, measuring: Measuring | None = None
) -> Outcome:
    """Train a task with a contender.

    The same task, contender and number of steps give the same outcome, bit for bit: batches and initialisation are in the
    task's config, one thread computes, and torch's global generator is seeded by the config meanwhile.
    """
    measuring, steps = measuring or Measuring(), task.steps if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    asked = {place for place in measuring.looks if place <= steps}
    places, about = tuple(sorted({*range(0, steps + 1, measuring.every), *asked, steps})), contender.describe()
    if why := contender.rival.unlearned:
        return Outcome(task.config, about, places, (math.inf,) * len(places), math.inf, {}, 0, failed=why)
    losses, looks, total, failed = list[float](), dict[str, dict[str, float]](), 0.0, ""
    lowest = math.inf
    with one_thread(), seeded(derive_seed(config_hash(task.config), "optimiser")):
        rule, monitor = begun(task, contender, steps), task.monitor(measuring.examples)
        run = certify_run(rule.optimiser) if isinstance(rule.optimiser, MetaMD) else None
        for place in places:
            done = train_task(task, rule, range(rule.taken, place), until=not_finite)
            for batch_loss in done.losses:
                total, lowest = total + batch_loss, min(lowest, batch_loss)
            if failed := done.diverged:
                break
            loss = monitor(rule.model())
            if has_exploded(losses[0] if losses else loss, loss):
                failed = f"The training loss rose from {losses[0] if losses else loss:g} to {loss:g} by step {place}."
                break
            losses.append(loss)
            if place in asked:
                seen = task.evaluate(rule.model(), "test")
                found = {"loss": seen.loss, **seen.measures}
                looks[str(place)] = {name: shortened(x, LOSS_DIGITS) for name, x in found.items()}
        # a function whose minimum is known, and which has no data, has no loss but the one that is trained
        splits = () if failed or (isinstance(task, SolvedTask) and not task.splits) else measuring.splits
        ends = {s: task.evaluate(rule.model(), s) for s in splits}
        certificate = {} if failed or run is None else _certificate(run, rule.model(), lowest)
    watched = tuple(shortened([*losses, *[math.inf] * (len(places) - len(losses))], LOSS_DIGITS))
    mean = math.inf if failed else shortened(total / steps, LOSS_DIGITS)
    measured: dict[str, tuple[float, float | None]] = {
        s: (shortened(e.loss, LOSS_DIGITS), e.accuracy) for s, e in ends.items()
    }
    return Outcome(task.config, about, places, watched, mean, measured, rule.taken, failed, looks, certificate)


def _certificate(run: CertifiedRun, model: Params, lowest: float) -> dict[str, float]:
    """What a record keeps of the certificate of a run; nothing where nothing is guaranteed."""
    found = certificate_within(run, model)
    if not found.guaranteed or found.mean is None or not isinstance(found.radius, float):
        return {}
    numbers = {"bound": found.mean, "radius": found.radius, "lowest": lowest}
    return {name: shortened(x, LOSS_DIGITS) for name, x in numbers.items()}


def begun(task: Task, contender: Contender, steps: int) -> OptimiserSteps:
    """A contender before its first step on a task, with its schedule over so many."""
    constant = contender.schedule == "constant" and not contender.warm_up
    schedule = None if constant else lambda t: contender.factor(t, steps)
    return OptimiserSteps.beginning(task.init(), contender.start, schedule)


def step_seconds(
    task: Task,
    contenders: Mapping[str, Contender],
    *,
    steps: int | None = None,
    rounds: int = 15,
    block: int = 10,
    warm_up: int = 3,
) -> dict[str, float]:
    """The seconds that one step of each contender takes, see `seconds_per_step`.

    The steps of SOAP and Shampoo differ in cost with a period of 10, which is why a block has as many.
    """
    horizon = task.steps if steps is None else steps
    begin = {label: partial(begun, task, contender, horizon) for label, contender in contenders.items()}
    progress = Progress("timing steps", (rounds + warm_up) * len(begin))
    with one_thread(), seeded(derive_seed(config_hash(task.config), "seconds")), progress:
        return seconds_per_step(task, begin, horizon, rounds=rounds, block=block, warm_up=warm_up, told=progress.advance)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread: the same sums everywhere, and processes do not compete for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

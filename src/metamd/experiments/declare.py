"""What an experiment learns before it compares: geometries, how each enters, and at which scale."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metamd.comparison.entrants import ProtocolName
from metamd.comparison.training import Measuring, one_thread
from metamd.experiments.race import Training, train
from metamd.files.container import write_atomically
from metamd.files.learned import LearnedOptimiser, LearnedStart, total_cost
from metamd.files.store import Journal, Result
from metamd.files.usage import Usage
from metamd.inner.objectives import PRIOR, End, Objective, Reference, Regret
from metamd.learning.network import learn_network
from metamd.learning.reference import tuned_reference
from metamd.learning.usage import Choices, learn_usage
from metamd.optimiser.averaging import AveragingName
from metamd.potentials import Kronecker, MaxDiagonal
from metamd.rivals import Schedule
from metamd.tasks.base import derive_seed
from metamd.tasks.vision.families import ImageFamily
from metamd.tasks.wrapped import Counted, SharedStart

Family = ImageFamily | SharedStart


@dataclass(frozen=True)
class Entry:
    """One way in which a learned geometry enters the comparison.

    Args:
        usage: metric, momentum, schedule and factor; None for what was chosen on the training tasks, or plainly.
        exact: False takes the paper's step.
        averaging: the kind of average, as for `MetaMD`; that of the usage if not given.
        refresh: how often polar steps find their directions, if not as the file says; nothing where it recommends others.
        piece: counted from 0, to use one piece of a mixture alone.
        instead: the geometry that enters where this one was learned for tensors of other shapes than the task has.
    """

    usage: Usage | None = None
    exact: bool = True
    averaging: AveragingName | None = None
    refresh: int | None = None
    piece: int | None = None
    instead: str | None = None


@dataclass(frozen=True)
class Geometry:
    """What is learned for each held-out domain.

    Args:
        potential: a new one at every call.
        entries: how it enters, by label.
        objective: what is minimised.
        choose_usage: whether metric, momentum, schedule and factor are chosen on training tasks, at a scale that does so.
        choices: among what, where it is not all: options of `learn_usage`.
        follow: learn from runs of a reference optimiser, whose rate is chosen on training tasks, instead of in rounds: runs
            so many times longer than those of the comparison, at a rate as many times lower; as many of them as a round has
            tasks, twice. 0 for rounds.
        reference: what is followed, if its rate is not to be chosen.
        options: of `meta_train`, beside the closed form's: an estimator, a method.
        rounds: outer steps, as a multiple of the scale's.
        then: options of a second meta-training, from what the first has learned.
        same_tasks: whether it learns from the very tasks that every other geometry with this mark learns from.
    """

    potential: Callable[[], MaxDiagonal]
    entries: Mapping[str, Entry]
    objective: Objective = field(default_factory=lambda: Regret(comparator=Reference(lr=1e-3, factor=1.0)))
    choose_usage: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict)
    follow: float = 0
    reference: Reference | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 1
    then: Callable[[LearnedOptimiser], Mapping[str, Any]] | None = None
    same_tasks: bool = False


@dataclass(frozen=True)
class Scale:
    """How much is computed.

    Args:
        domains: held out in turn; or names of repetitions, where the same domain is held out in all of them.
        images: training images per domain; None for all.
        steps: T, in learning.
        outer_steps: of the meta-training, at most.
        tasks_per_step: of the meta-training.
        seeds: runs per domain.
        budget: settings per rival and schedule.
        rivals: names in `metamd.rivals.RIVALS` or `LEARNERS`.
        schedules: of the rivals.
        protocol: by which rivals are tuned.
        usage_tasks: training tasks to choose a usage on; 0 for none.
        search: by which rivals are tuned under the protocol `paper`, a name in `SEARCHES`; the paper has grids for the
            linear model and the MLP, and Bayesian optimisation for the others.
        screen: settings that go on from the first seed to the others, by each quantity; None for all.
        batch_size: images per step.
        width: of a ResNet18.
        measuring: how the runs of the comparison are watched.
        test_steps: of the runs of the comparison, where they are not as long as those that were learned on.
    """

    domains: tuple[str, ...]
    images: int | None
    steps: int = 500
    outer_steps: int = 6
    tasks_per_step: int = 5
    seeds: int = 3
    budget: int = 25
    rivals: tuple[str, ...] = ("sgd", "sgdm", "rmsprop", "adam")
    schedules: tuple[Schedule, ...] = ("constant", "linear")
    protocol: ProtocolName = "handicap"
    search: str = "bayes"
    usage_tasks: int = 6
    screen: int | None = None
    batch_size: int = 100
    width: int = 64
    measuring: Measuring = field(default_factory=Measuring)
    test_steps: int | None = None


COORDINATES = partial(Kronecker, rank="auto")


def coordinates(
    entries: Mapping[str, Entry],
    *,
    follow: float = 1.0,
    reference: Reference | None = None,
    same_tasks: bool = False,
    potential: Callable[[], MaxDiagonal] = COORDINATES,
    **choices: Any,
) -> Geometry:
    """The default for networks: learned coordinates from runs of a reference, with the best usage among the choices."""
    return Geometry(
        potential,
        entries,
        choose_usage=True,
        choices=choices,
        follow=follow,
        reference=reference,
        same_tasks=same_tasks,
    )


def learned_file(folder: Path, domain: str, geometry: str) -> Path:
    """Where a learned geometry is kept."""
    return folder / "learned" / f"{domain}-{geometry}.safetensors"


def alone(learned: LearnedOptimiser, piece: int) -> LearnedOptimiser:
    """One piece of a mixture, counted from 0, as a geometry of its own."""
    phi, header = learned.potential, learned.header
    if not 0 <= piece < phi.pieces:
        raise ValueError(f"a mixture of {phi.pieces} pieces has none of number {piece}, counted from 0.")
    single = MaxDiagonal(1, tying=phi.tying, centre=phi.centre, basis=phi.basis)
    single = single.with_metrics({k: v[piece : piece + 1].detach().clone() for k, v in phi.log_d.items()})
    about = {k: getattr(header, k) for k in ("model", "family", "horizon", "batch_size", "gradient_scale", "cost")}
    return LearnedOptimiser.from_potential(single, **about)


def settings_of(size: Scale) -> dict[str, Any]:
    """What learned files depend on: rivals and seeds may be added to a folder later."""
    kept = ("domains", "images", "steps", "outer_steps", "tasks_per_step", "protocol", "usage_tasks")
    found = {k: v for k, v in asdict(size).items() if k in kept}
    found |= {} if (size.batch_size, size.width) == (100, 64) else {"batch_size": size.batch_size, "width": size.width}
    return found | ({} if size.search == "bayes" else {"search": size.search})


def kept_start(path: Path, find: Callable[[], LearnedStart]) -> LearnedStart:
    """The learned start that a file holds; if there is none it is found, on one thread, and written."""
    if not path.exists():
        with one_thread():
            found = find()
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    return LearnedStart.load(path)


def learn(size: Scale, family: Family, geometry: Geometry, path: Path, seed: int, name: str) -> Result:
    """Learn one geometry from tasks drawn under a name, and save it; one that cannot be learned is a result too.

    Finished parts are kept beside the file, so that learning which was stopped continues. What a learned start of the family
    has cost is a part of the cost.
    """
    began, counted, journal = time.perf_counter(), Counted(family), Journal(path.with_suffix(".run"))
    choose, reference = geometry.choose_usage and size.usage_tasks > 0, geometry.reference
    choices = Choices(**{"tasks": size.usage_tasks, **geometry.choices}) if choose else None
    drawn, warned = derive_seed(seed, "learning", name), list[str]()
    if geometry.follow not in (0, 1):
        tuned = reference or tuned_reference(counted, seed=drawn, journal=journal)
        reference = replace(tuned, lr=tuned.lr / geometry.follow, factor=geometry.follow)
    costs = [counted.cost(began)]
    learned: LearnedOptimiser | str
    if geometry.follow:
        objective = Regret(reference or End(), prior=PRIOR)
        learned = learn_network(
            family,
            geometry.potential(),
            objective,
            tasks=size.tasks_per_step,
            choices=choices,
            seed=drawn,
            journal=journal,
        )
    else:
        learned, warned = _meta_train(size, family, geometry, geometry.options, path, drawn)
        if geometry.then is not None and not isinstance(learned, str):
            costs.append(learned.header.cost)
            options = geometry.then(learned)
            learned, more = _meta_train(size, family, geometry, options, path.with_stem(f"{path.stem}-then"), drawn)
            warned = sorted({*warned, *more})
    if isinstance(learned, str):
        return {"failed": learned, "warnings": warned}
    if choices is not None and not geometry.follow:
        learned = learn_usage(learned, family, choices, reference=reference, seed=drawn, journal=journal)
    if isinstance(family, SharedStart) and isinstance(family.start, LearnedStart):
        learned = learned.with_start(family.start)
    learned = replace(learned, header=replace(learned.header, cost=total_cost(learned.header.cost, *costs)))
    learned.save(path)
    return {"file": path.name, "fingerprint": learned.fingerprint(), "cost": learned.header.cost, "warnings": warned}


def learn_away(size: Scale, family: Family, geometry: Geometry, seed: int, name: str) -> Result:
    """Learn one geometry on a machine that shares no folder with the records: the file comes with the result."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "learned.safetensors"
        found = learn(size, family, geometry, path, seed, name)
        return found if "failed" in found else {**found, "content": path.read_bytes()}


def bring(path: Path, found: Result) -> Result:
    """Write the file that came with a result of `learn_away`; the rest of it is its record."""
    if "failed" in found:
        return found
    write_atomically(path, found["content"])
    return {k: v for k, v in found.items() if k != "content"} | {"file": path.name}


def _meta_train(
    size: Scale, family: Family, geometry: Geometry, options: Mapping[str, Any], path: Path, seed: int
) -> Training:
    usual = {
        "potential": geometry.potential(),
        "objective": geometry.objective,
        "outer_steps": geometry.rounds * size.outer_steps,
        "tasks_per_step": size.tasks_per_step,
        "journal": Journal(path.with_suffix(".run")),
    }
    return train(family, {**usual, **options}, seed)

"""What an experiment learns before it compares: geometries, how each enters, and at which scale."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metamd.comparison.entrants import Protocol, ProtocolName
from metamd.comparison.training import Measuring
from metamd.comparison.tuning import SEARCHES
from metamd.experiments.synthetic import Attempt, try_meta_train
from metamd.files.container import write_atomically
from metamd.files.learned import LearnedOptimiser, LearnedStart, total_cost
from metamd.files.store import Journal, Result
from metamd.files.usage import Average, Usage
from metamd.inner.objectives import Reference, Regret
from metamd.learning.meta import learn_network
from metamd.learning.reference import tuned_reference
from metamd.learning.usage import Choices
from metamd.potentials import Kronecker, MaxDiagonal
from metamd.rivals import Schedule
from metamd.tasks.base import TaskFamily, derive_seed
from metamd.tasks.wrapped import Counted, SharedStart

Family = TaskFamily
"""Any family; an experiment on one without a `held_out()` names its sides."""


def held_out(family: TaskFamily) -> TaskFamily:
    """The side of a family that learning never sees."""
    side: Callable[[], TaskFamily] | None = getattr(family, "held_out", None)
    if side is None:
        raise ValueError(f"{family.name} has no held-out side. Name the sides of the experiment.")
    return side()


@dataclass(frozen=True)
class Entrant:
    """One way in which a learned geometry enters the comparison."""

    # metric, momentum, schedule and factor; None for what was chosen on the training tasks, or plainly
    usage: Usage | None = None
    exact: bool = True  # False takes the paper's step
    averaging: Average | None = None  # the kind of average, as for `MetaMD`; that of the usage if not given
    paced: bool = False  # whether its pace is shown beside that of our first entry
    piece: int | None = None  # counted from 0, to use one piece of a mixture alone
    # the rival whose grid and ranges it is tuned in, if not a decade on either side of the factor of its file
    searched_as: str | None = None
    # the geometry that enters where this one was learned for tensors of other shapes than the task has
    instead: str | None = None


PLAIN, PAPERS_STEP = Entrant(Usage()), Entrant(Usage(), exact=False)


@dataclass(frozen=True)
class Geometry:
    """What is learned for each held-out domain: in rounds, or from runs of a reference if a usage is chosen."""

    potential: MaxDiagonal
    entries: Mapping[str, Entrant]  # how it enters, by label
    # learn from runs of a reference optimiser, and choose a usage among these `Choices` at a scale that does so
    choices: Mapping[str, Any] | None = None
    # how many times longer the reference's runs are than those of the comparison, at a rate that is lower by this factor
    longer: float = 1
    reference: Reference | None = None  # if its rate is not to be chosen on training tasks
    # of `meta_train` in rounds, beside the closed form's: an objective, an estimator, a method
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 1  # outer steps, as a multiple of the scale's
    # options of a second meta-training, from what the first has learned
    then: Callable[[LearnedOptimiser], Mapping[str, Any]] | None = None
    same_tasks: bool = False  # whether it learns from the very tasks that every other geometry with this mark learns from


@dataclass(frozen=True)
class Scale:
    """How much is computed."""

    domains: tuple[str, ...]  # held out in turn; or names of repetitions, where the same domain is held out in all of them
    images: int | None  # training images per domain; None for all
    steps: int = 500  # T, in learning
    outer_steps: int = 6  # of the meta-training, at most
    tasks_per_step: int = 5  # of the meta-training
    seeds: int = 3  # runs per domain
    budget: int = 25  # settings per rival and schedule
    rivals: tuple[str, ...] = ("sgd", "sgdm", "rmsprop", "adam")  # names in `metamd.rivals.RIVALS` or `LEARNERS`
    schedules: tuple[Schedule, ...] = ("constant", "linear")  # of the rivals
    protocol: ProtocolName = "handicap"  # by which rivals are tuned
    # by which rivals are tuned under the protocol `paper`, a name in `SEARCHES`; the paper has grids for the linear model
    # and the MLP, and Bayesian optimisation for the others; "extended" is the grid until the best is inside
    search: str = "bayes"
    usage_tasks: int = 6  # training tasks to choose a usage on; 0 for none
    screen: int | None = None  # settings that go on from the first seed to the others, by each quantity; None for all
    batch_size: int = 100  # images per step
    width: int = 64  # of a ResNet18
    # of a family that is no dataset of images, by the argument's name; it has these in place of the three above
    sizes: Mapping[str, int] = field(default_factory=dict)
    measuring: Measuring = field(default_factory=Measuring)  # how the runs of the comparison are watched
    geometries: tuple[str, ...] | None = None  # those of the experiment that enter; all if not given
    test_steps: int | None = None  # of the runs of the comparison, where they are not as long as those that were learned on

    @property
    def data(self) -> dict[str, Any]:
        """What families of images have in common."""
        return {"images": self.images, "batch_size": self.batch_size, "steps": self.steps}

    def rules(self, **given: Any) -> Protocol:
        """The protocol of a comparison at this scale."""
        shared = {k: getattr(self, k) for k in ("seeds", "measuring", "screen", "budget", "schedules")}
        return Protocol(self.protocol, search=SEARCHES[self.search], **shared, **given)


COORDINATES = Kronecker(rank="auto")


def coordinates(entries: Mapping[str, Entrant], potential: MaxDiagonal = COORDINATES, **choices: Any) -> Geometry:
    """The default for networks: learned coordinates from runs of a reference, with the best usage among the choices."""
    return Geometry(potential, entries, choices)


def learned_file(folder: Path, domain: str, geometry: str) -> Path:
    """Where a learned geometry is kept."""
    return folder / "learned" / f"{domain}-{geometry}.safetensors"


def alone(learned: LearnedOptimiser, piece: int) -> LearnedOptimiser:
    """One piece of a mixture, counted from 0, as a geometry of its own."""
    phi, header = learned.potential, learned.header
    single = MaxDiagonal(1, tying=phi.tying, centre=phi.centre, basis=phi.basis)
    single = single.with_metrics({k: v[piece : piece + 1].detach().clone() for k, v in phi.log_d.items()})
    about = {k: getattr(header, k) for k in ("model", "family", "horizon", "batch_size", "gradient_scale", "cost", "usage")}
    return LearnedOptimiser.from_potential(single, **about)


def learning_settings(size: Scale) -> dict[str, Any]:
    """What learned files depend on: rivals and seeds may be added to a folder later."""
    kept = ("domains", "images", "steps", "outer_steps", "tasks_per_step", "protocol", "usage_tasks")
    found = {k: v for k, v in asdict(size).items() if k in kept}
    found |= {} if (size.batch_size, size.width) == (100, 64) else {"batch_size": size.batch_size, "width": size.width}
    found |= {"sizes": dict(size.sizes)} if size.sizes else {}
    return found | ({} if size.search == "bayes" else {"search": size.search})


def learn_geometry(size: Scale, family: Family, geometry: Geometry, path: Path, seed: int, name: str) -> Result:
    """Learn one geometry from tasks drawn under a name, and save it; one that cannot be learned is a result too.

    Finished parts are kept beside the file, so that learning which was stopped continues. The cost includes that of a
    learned start of the family.
    """
    began, counted, drawn = time.perf_counter(), Counted(family), derive_seed(seed, "learning", name)
    costs, warned = list[Mapping[str, float]](), list[str]()
    learned: LearnedOptimiser | str
    if geometry.choices is not None:
        kept: dict[str, Any] = {"seed": drawn, "journal": Journal(path.with_suffix(".run"))}
        reference = geometry.reference
        if geometry.longer != 1:
            tuned = tuned_reference(counted, **kept)
            reference = replace(tuned, lr=tuned.lr / geometry.longer, factor=geometry.longer)
            costs.append(counted.cost(began))
        kept["choices"] = Choices(**{"tasks": size.usage_tasks, **geometry.choices}) if size.usage_tasks > 0 else None
        learned = learn_network(family, geometry.potential, reference=reference, tasks=size.tasks_per_step, **kept)
    else:
        learned, warned = _meta_train(size, family, geometry, geometry.options, path, drawn)
        if geometry.then is not None and not isinstance(learned, str):
            costs.append(learned.header.cost)
            options = geometry.then(learned)
            learned, more = _meta_train(size, family, geometry, options, path.with_stem(f"{path.stem}-then"), drawn)
            warned = sorted({*warned, *more})
    if isinstance(learned, str):
        return {"failed": learned, "warnings": warned}
    if isinstance(family, SharedStart) and isinstance(family.start, LearnedStart):
        learned = learned.with_start(family.start)
    learned = replace(learned, header=replace(learned.header, cost=total_cost(learned.header.cost, *costs)))
    learned.save(path)
    return {"file": path.name, "fingerprint": learned.fingerprint(), "cost": learned.header.cost, "warnings": warned}


def learn_away(size: Scale, family: Family, geometry: Geometry, seed: int, name: str) -> Result:
    """Learn one geometry on a machine that shares no folder with the records: the file comes with the result."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "learned.safetensors"
        found = learn_geometry(size, family, geometry, path, seed, name)
        return found if "failed" in found else {**found, "content": path.read_bytes()}


def bring(path: Path, found: Result) -> Result:
    """Write the file that came with a result of `learn_away`; the rest of it is its record."""
    if "failed" in found:
        return found
    write_atomically(path, found["content"])
    return {k: v for k, v in found.items() if k != "content"} | {"file": path.name}


def _meta_train(
    size: Scale, family: Family, geometry: Geometry, options: Mapping[str, Any], path: Path, seed: int
) -> Attempt:
    usual = {
        "potential": geometry.potential,
        "objective": Regret(comparator=Reference(lr=1e-3, factor=1.0)),
        "outer_steps": geometry.rounds * size.outer_steps,
        "tasks_per_step": size.tasks_per_step,
        "journal": Journal(path.with_suffix(".run")),
    }
    return try_meta_train(family, {**usual, **options}, seed)

"""certify: run a learned optimiser on held-out tasks as its file recommends, and say what follows for the tasks to come."""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from metamd.certification.generalisation import solve, theory
from metamd.certification.statements import HeldOutCertificate, Stated, Statement
from metamd.certification.statistics import checked, mean_below, next_task
from metamd.files.header import Radius
from metamd.files.learned import LearnedOptimiser
from metamd.files.progress import ends_with
from metamd.inner.executor import Executor
from metamd.inner.objectives import Reference
from metamd.inner.run import OptimiserSteps, all_finite, has_exploded, not_finite, train
from metamd.learning.first_look import draw_config
from metamd.optimiser.guard import OffFamilyWarning
from metamd.optimiser.optimiser import MetaMD
from metamd.tasks.base import Config, SolvedTask, Split, Task, TaskFamily, config_hash, derive_seed, require_family, seeded

LOOKS = 50
"""How often a run is looked at, at equal intervals."""

MOST = 1_000_000
"""Held-out tasks: all of them are drawn before the first one runs."""

LONGER = 2
"""How many times longer than a run that one is which finds a solution, where none is known and no comparator is given."""

SCALED = 3
"""Further tasks, none of them held out, by which the distances of the tensors are brought to one scale."""


@ends_with(lambda found: f"{found}\nKeep it: certificate.into(learned).save(path).")
def certify(
    learned: LearnedOptimiser,
    family: TaskFamily,
    *,
    held_out_tasks: int = 50,
    delta: float = 0.05,
    seed: int = 0,
    stated: Stated | None = None,
    comparator: Reference | None = None,
    executor: Executor | None = None,
) -> HeldOutCertificate:
    """Train held-out tasks as the file recommends, nothing tuned, and say what follows for the next ones.

    Split conformal prediction bounds the steps to a target and the losses of the next task, and how far its solution lies
    from its start. Hoeffding's or the empirical Bernstein inequality bounds the mean of the steps.

    Args:
        learned: the optimiser; a task that it was learned from is refused.
        family: where the held-out tasks and the next one come from.
        held_out_tasks: m. A bound on the next task at 95 % needs 19 at least.
        delta: each statement holds with probability 1 - delta.
        seed: of the held-out tasks.
        stated: the target, chosen without looking at the held-out tasks; and what the bounds of the paper need.
        comparator: finds the solutions of tasks whose optimum is not known; by default a run as the file recommends, twice
            as long.
        executor: where the tasks are trained; in this process if not given.

    Example:
        >>> from metamd import Diagonal, meta_train, tasks
        >>> family = tasks.quadratic(steps=50)
        >>> learned = meta_train(family, Diagonal(), outer_steps=3, tasks_per_step=4)
        >>> found = certify(learned, family, held_out_tasks=20)
        >>> found.of("next task", "training loss").verdict
        'holds'
    """
    if not isinstance(learned, LearnedOptimiser):
        raise TypeError(f"learned must be a LearnedOptimiser, got {type(learned).__name__}. Pass metamd.load(path).")
    require_family(family)
    if held_out_tasks < 1:
        raise ValueError(f"held_out_tasks must be at least 1, got {held_out_tasks}. 50 is usual.")
    if held_out_tasks > MOST:
        raise ValueError(f"held_out_tasks must be at most {MOST:,}, got {held_out_tasks:,}. 50 is usual.")
    checked([0.0], delta)
    stated, executor = stated or Stated(), executor or Executor()
    target = learned.header.target_loss if stated.target is None else stated.target
    if target is None:
        raise ValueError(
            "there must be a loss to count steps to, and the file has none from its training tasks. State one: "
            "stated=Stated(target=0.1) (--target 0.1), chosen without looking at held-out tasks."
        )
    configs = [draw_config(family, seed, "certify", i) for i in range(held_out_tasks)]
    used = {config_hash(c) for c in configs} & set(learned.header.task_hashes)
    if used:
        raise ValueError(
            f"{len(used)} of the {len(configs)} tasks drawn were used in learning this file, and a task that was used is "
            f"not held out (such as {sorted(used)[0]}). Pass another seed, or a family that has other tasks."
        )

    def run(config: Config) -> Score:
        return run_task(family.build(config), learned, target, comparator)

    def away(config: Config) -> Mapping[str, float]:
        return distances(family.build(config), learned, comparator)

    pieces = {f"task {i}": partial(run, config) for i, config in enumerate(configs, 1)}
    scores = list(executor.all(pieces, "held-out tasks").values())
    others = {f"scale {i}": partial(away, draw_config(family, seed, "radius", i)) for i in range(1, SCALED + 1)}
    scales = list(executor.all(others, "tasks for the scale of distances").values())
    reasons = [s.diverged for s in scores if s.diverged]
    task = family.build(configs[0])
    radius, about = _radius([s.distances for s in scores], scales, delta, reference_words(task, comparator))
    return HeldOutCertificate(
        family=family.name,
        fingerprint=learned.fingerprint(),
        tasks=held_out_tasks,
        diverged=len(reasons),
        steps=family.steps,
        seed=seed,
        delta=delta,
        target=target,
        task=family.drawn(),
        statements=(
            *_statements(scores, delta, target, family.steps),
            about,
            *(theory(learned, family, configs, delta, stated, comparator, executor) if stated.theory else ()),
        ),
        assumptions=_assumptions(learned, family),
        across_domains=across_domains(learned, family),
        reason=reasons[0] if reasons else "",
        radius=radius,
        scores={name: tuple(values) for name, values in _scores(scores).items()},
    )


# the runs


@dataclass(frozen=True)
class Score:
    """What one held-out run came to. What failed or did not arrive is infinite."""

    steps: float  # to the target, see `steps_to`
    losses: Mapping[str, float]  # after the last step, by split; of the training split a fixed part
    distances: Mapping[str, float]  # N_l(solution - start) by tensor
    diverged: str  # why the run was given up; empty if it was not


def run_task(task: Task, learned: LearnedOptimiser, target: float, comparator: Reference | None = None) -> Score:
    """Train a task as the file recommends, by the loop that comparisons use, and score the run."""
    # The target is a loss, not a distance above the minimum, by which tasks that know theirs are watched.
    look = Task.monitor(task) if isinstance(task, SolvedTask) else task.monitor()
    splits: list[Split] = [s for s in ("validation", "test") if s in task.splits]
    with _alone(task, "optimiser"):
        rule = recommended(task, learned, task.steps)
        looks, failed, every = [(0, look(rule.model()))], "", max(1, task.steps // LOOKS)
        while rule.taken < task.steps and not failed:
            end = min(rule.taken + every, task.steps)
            failed = train(task, rule, range(rule.taken, end), until=not_finite).diverged
            looks.append((rule.taken, math.inf if failed else look(rule.model())))
            if not failed and has_exploded(looks[0][1], looks[-1][1]):
                failed = f"The training loss rose from {looks[0][1]:g} to {looks[-1][1]:g} by step {rule.taken}."
        model = rule.model()
        losses = {"training": looks[-1][1]} | {str(s): task.evaluate(model, s).loss for s in splits}
    if failed or any(math.isnan(x) for x in losses.values()):
        failed = failed or "The loss at the end is not a number."
        losses = dict.fromkeys(losses, math.inf)
    steps = math.inf if failed else steps_to(target, looks)
    return Score(steps, losses, distances(task, learned, comparator), failed)


@contextmanager
def _alone(task: Task, purpose: str) -> Iterator[None]:
    """Inside, torch's generator is the task's own, as in a comparison, and no task is warned of: all of them count."""
    with seeded(derive_seed(config_hash(task.config), purpose)), warnings.catch_warnings():
        warnings.simplefilter("ignore", OffFamilyWarning)
        yield


def recommended(task: Task, learned: LearnedOptimiser, steps: int) -> OptimiserSteps:
    """The steps that the file recommends for a run of this length, from the start of the task."""
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    return OptimiserSteps(params, MetaMD(list(params.items()), learned, steps=steps, check_finite=False))


def distances(task: Task, learned: LearnedOptimiser, comparator: Reference | None) -> dict[str, float]:
    """N_l(solution - start) by tensor; infinite where the run that was to find the solution failed."""
    start, solution = task.init(), solve(task, comparator)
    if solution is None:
        with _alone(task, "reference"):
            rule = recommended(task, learned, LONGER * task.steps)
            done = train(task, rule, LONGER * task.steps, until=not_finite)
            solution = {} if done.diverged else rule.model()
    phi = learned.potential.bind(start)
    moved: dict[str, Tensor] = {n: (x - start[n]).double() for n, x in solution.items()}
    if not moved or not all_finite(moved):
        return dict.fromkeys(start, math.inf)
    return {n: phi.norm({n: x}) for n, x in moved.items()}


def reference_words(task: Task, comparator: Reference | None) -> str:
    """What finds solutions, in words."""
    if isinstance(task, SolvedTask):
        return "its optimum"
    return "the end of a run as recommended, twice as long" if comparator is None else f"the end of a run of {comparator}"


def steps_to(target: float, looks: Sequence[tuple[int, float]]) -> float:
    """The step of the first of two looks in a row at a loss of at most the target; infinite if there is none.

    Example:
        >>> steps_to(1.0, [(0, 3.0), (10, 0.9), (20, 1.1), (30, 0.8), (40, 1.0)])
        30.0
    """
    arrived = (float(step) for (step, one), (_, two) in pairwise(looks) if one <= target and two <= target)
    return next(arrived, math.inf)


# the statements


def _scores(scores: Sequence[Score]) -> dict[str, list[float]]:
    """The numbers of all tasks, by what they are of."""
    found = {"steps": [s.steps for s in scores]}
    return found | {f"{name} loss": [s.losses[name] for s in scores] for name in scores[0].losses}


def _statements(scores: Sequence[Score], delta: float, target: float, steps: int) -> list[Statement]:
    """About the next task, and the mean over tasks."""
    counts, *_ = (found := _scores(scores)).values()
    arrival = f"steps to a training loss of {target:.4g}"
    names = {name: arrival if name == "steps" else f"{name} after {steps} steps" for name in found}
    return [
        *(next_task(values, delta, names[name]) for name, values in found.items()),
        mean_below(counts, steps, delta, f"min({arrival}, {steps})"),
    ]


def _radius(
    found: Sequence[Mapping[str, float]], scales: Sequence[Mapping[str, float]], delta: float, reference: str
) -> tuple[Radius | None, Statement]:
    """rho_l = q s_l by tensor, q the conformal quantile of max_l N_l/s_l: a score for each task, not for each tensor."""
    means = {n: sum(s[n] for s in scales) / len(scales) for n in scales[0]}
    largest = max(means.values())
    usable = 0 < largest < math.inf
    # A tensor that did not move in these few tasks may do so in the next one.
    fixed = {n: max(s, 1e-6 * largest) for n, s in means.items()} if usable else dict.fromkeys(means, 1.0)
    scores = [max(d[n] / fixed[n] for n in fixed) for d in found]
    about = next_task(scores, delta, "distance of the solution from the start, largest over tensors, by their scales")
    if about.bound is None or not usable:
        return None, about
    confidence = about.numbers["rank"] / (about.numbers["tasks"] + 1)
    return Radius(about.bound, fixed, confidence, len(scores), reference), about


def across_domains(learned: LearnedOptimiser, family: TaskFamily) -> str:
    """What the certificate says of domains that it has no tasks of: nothing."""
    domains = family.drawn().domains
    if not domains:
        return "no guarantee for tasks that are drawn in another way than these"
    new = [d for d in domains if d not in learned.domains]
    names = f": {', '.join(new)}" if new else ""
    return (
        f"no guarantee across domains: as a statement about a new domain this has m = {len(new)} held-out "
        f"domain{'s' * (len(new) != 1)}{names}; its tasks differ from each other within the domain"
        f"{'s' * (len(domains) != 1)} {', '.join(domains)} only"
    )


def _assumptions(learned: LearnedOptimiser, family: TaskFamily) -> tuple[str, ...]:
    known = len(learned.header.task_hashes)
    unseen = (
        f"none of the tasks is one of the {known} used in learning, or to choose what to keep (checked by their hashes)"
        if known
        else "none of the tasks was used in learning: not checked, since the file does not say which tasks were"
    )
    about = learned.header.family or {}
    now = json.loads(json.dumps(family.describe()))
    changed = sorted(k for k in about if k != "name" and about[k] != now.get(k, about[k]))
    other = (f"the family is not the one of learning: {', '.join(changed)} differ",) if changed else ()
    return (
        "held-out tasks and the next one are independent draws of the family, and the next is trained as these were: as the "
        f"file recommends for {family.steps} steps ({learned.usage})",
        unseen,
        "each statement is true with its probability by itself, over the draw of all tasks, not all of them at once; "
        "the target was not chosen by looking at these tasks, nor was this file chosen among others by them",
        "steps are counted on a fixed part of the training split at equal intervals, and end at the first of two looks in a "
        "row at or below the target",
        *other,
    )

"""certify: run a learned optimiser on held-out tasks and say what follows for the tasks to come."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from metamd.certification.generalisation import UNKNOWN, from_training_tasks, measure, solve
from metamd.certification.statements import HeldOutCertificate, Stated, Statement
from metamd.certification.statistics import checked, clopper_pearson, mean_below, next_task
from metamd.files.learned import LearnedOptimiser
from metamd.files.usage import Usage
from metamd.inner.executor import Executor
from metamd.inner.objectives import Reference
from metamd.inner.run import MirrorDescent, train
from metamd.learning.rounds import draw_config
from metamd.tasks.base import Config, SolvedTask, Task, TaskFamily, config_hash

LOOKS = 50
"""How often a run is looked at, at equal intervals."""


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
    """Train held-out tasks with a learned optimiser, nothing tuned, and say what follows for the next ones.

    Split conformal prediction bounds steps, loss and distance of the next task. Hoeffding's or the empirical Bernstein
    inequality bounds means of capped quantities.

    Args:
        learned: the optimiser; a task that it was learned from is refused.
        family: where the held-out tasks and the next one come from.
        held_out_tasks: m. A bound on the next task at 95 % needs 19 at least.
        delta: each statement holds with probability 1 - delta.
        seed: of the held-out tasks.
        stated: target, cap and radius, chosen without looking at the held-out tasks.
        comparator: finds theta_* of tasks whose optimum is not known.
        executor: where the tasks are trained; in this process if not given.

    Example:
        >>> from metamd import Diagonal, meta_train, tasks
        >>> family = tasks.quadratic(steps=50)
        >>> learned = meta_train(family, Diagonal(), outer_steps=3, tasks_per_step=4)
        >>> found = certify(learned, family, held_out_tasks=20)
        >>> found.of("next task", "loss").verdict
        'holds'
    """
    if not isinstance(learned, LearnedOptimiser):
        raise TypeError(f"learned must be a LearnedOptimiser, got {type(learned).__name__}. Pass metamd.load(path).")
    if not isinstance(family, TaskFamily):
        raise TypeError(f"family must be a TaskFamily, got {type(family).__name__}. See metamd.tasks for some.")
    if held_out_tasks < 1:
        raise ValueError(f"held_out_tasks must be at least 1, got {held_out_tasks}. 50 is usual.")
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

    pieces = {f"task {i}": partial(run, config) for i, config in enumerate(configs, 1)}
    scores = list(executor.all(pieces, "held-out tasks").values())
    reasons, lipschitz = [s.diverged for s in scores if s.diverged], max(s.largest_gradient for s in scores)
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
            *_statements(scores, delta, target, family.steps, stated.regret_cap),
            *from_training_tasks(learned, family, delta, lipschitz, stated, comparator, executor),
        ),
        assumptions=_assumptions(learned, family),
        across_domains=across_domains(learned, family),
        reason=reasons[0] if reasons else "",
    )


# the runs


@dataclass(frozen=True)
class Score:
    """What one held-out run came to. What failed or did not arrive is infinite; what is not known is None."""

    steps: float  # to the target, see `steps_to`
    loss: float  # after the last step, on a fixed part of the training split
    distance: float | None  # sqrt(2 B(theta_*||theta_1)), which is ||theta_* - theta_1||_D for one piece
    regret: float | None  # sum_t <g_t, theta_t - theta_*>
    largest_gradient: float  # max_t |g_t|
    diverged: str  # why the run was given up; empty if it was not


def run_task(task: Task, learned: LearnedOptimiser, target: float, comparator: Reference | None = None) -> Score:
    """Train a task by exact mirror descent at lr = 1 and score the run."""
    descent = MirrorDescent(task, learned.potential.bind(task.init()), certify=True)
    # The target is a loss, not a distance above the minimum, by which tasks that know theirs are watched.
    look = Task.monitor(task) if isinstance(task, SolvedTask) else task.monitor()
    every = max(1, descent.steps // LOOKS)
    looks = [(0, look(descent.params))]
    while descent.going:
        train(task, descent, range(descent.taken, min(descent.taken + every, descent.steps)), until=None)
        looks.append((descent.taken, look(descent.params)))
    run, loss = descent.finish(), looks[-1][1]
    failed = run.diverged or ("The loss at the end is not a number." if math.isnan(loss) else "")
    steps, loss = (math.inf, math.inf) if failed else (steps_to(target, looks), loss)
    distance = regret = None
    if (solution := solve(task, comparator)) is not None:
        distance = math.sqrt(2 * max(measure(descent.potential, run.start, solution)[0], 0.0))
        regret = run.regret(solution)
        regret = math.inf if failed or math.isnan(regret) else regret
    return Score(steps, loss, distance, regret, run.largest_gradient, failed)


def steps_to(target: float, looks: Sequence[tuple[int, float]]) -> float:
    """The step of the first of two looks in a row at a loss of at most the target; infinite if there is none.

    Example:
        >>> steps_to(1.0, [(0, 3.0), (10, 0.9), (20, 1.1), (30, 0.8), (40, 1.0)])
        30.0
    """
    arrived = (float(step) for (step, one), (_, two) in pairwise(looks) if one <= target and two <= target)
    return next(arrived, math.inf)


# the statements


def _statements(scores: Sequence[Score], delta: float, target: float, steps: int, cap: float | None) -> list[Statement]:
    """About the next task, the mean over tasks and the share of tasks above the cap."""
    counts, distances = [s.steps for s in scores], [s.distance for s in scores if s.distance is not None]
    regrets = [s.regret for s in scores if s.regret is not None]
    arrival, distance = f"steps to a loss of {target:.4g}", "distance sqrt(2 B(theta_*||theta_1))"
    solved = len(distances) == len(scores)
    missing = Statement("next task", distance, None, "no bound", UNKNOWN, 1 - delta)
    found = [
        next_task(counts, delta, arrival),
        next_task([s.loss for s in scores], delta, f"loss after {steps} steps"),
        next_task(distances, delta, distance) if solved else missing,
        mean_below(counts, steps, delta, f"min({arrival}, {steps})"),
    ]
    if not solved or cap is None:
        unstated = "the regret has no range of its own: state one beforehand with Stated(regret_cap=b) (--regret-cap)"
        return [*found, Statement("mean", "regret", None, "no bound", unstated if solved else UNKNOWN, 1 - delta)]
    above, tasks = sum(r > cap for r in regrets), len(regrets)
    share, numbers = clopper_pearson(above, tasks, delta / 2), {"above": above, "tasks": tasks}
    quantity, basis = f"regret above {cap:.4g}", f"{above} of {tasks} were above; Clopper-Pearson"
    # both together at 1 - delta
    found.append(mean_below(regrets, cap, delta / 2, f"min(regret, {cap:.4g})"))
    found.append(Statement("share", quantity, share, "holds" if share < 1 else "vacuous", basis, 1 - delta / 2, numbers))
    return found


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
    plain = () if learned.usage == Usage() else (f"the usage that the file recommends ({learned.usage}) is not certified",)
    return (
        "held-out tasks and the next one are independent draws of the family, and the next is trained as these were: exact "
        f"mirror descent, lr = 1, {family.steps} steps, no momentum, no decay",
        unseen,
        "each statement is true with its probability by itself, over the draw of all tasks, not all of them at once; "
        "target, caps and radius were not chosen by looking at these tasks, nor was this file chosen among others by them",
        "steps are counted on a fixed part of the training split at equal intervals, and end at the first of two looks in a "
        "row at or below the target",
        *plain,
        *other,
    )

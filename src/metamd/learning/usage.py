"""How a learned geometry is best used on its family: which metric, momentum, schedule and factor, chosen on training tasks.

The bound that a geometry minimises is for a run without momentum at a constant rate. Here runs of the family's own
training tasks decide the rest, so that nothing is left to tune on the next task.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from metamd.files.learned import LearnedOptimiser, LearnedStart, total_cost
from metamd.files.store import Journal, Result
from metamd.files.usage import Average, Metric, Schedule, Usage
from metamd.inner.comparators import Reference
from metamd.learning.parts import Parts, parts_of
from metamd.learning.rounds.round import draw_config
from metamd.learning.trial import train
from metamd.learning.usage_trials import LEFT, JudgedOn, Trials, Watch, best_usage, first_usages, tail_loss
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.online import Online
from metamd.tasks.base import Task, TaskFamily, config_hash, domain_of
from metamd.tasks.wrapped import Counted, SharedStart

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""Adam's rates that a reference run may have."""

RULES = (Online(), Online("polar", beta=0.7, signal=0.95), Online("polar", beta=0.9, signal=0.95))
"""Online metrics that a usage may have, before their scales are learned."""


def rules_for_refresh(refresh: int) -> tuple[Online, ...]:
    """The same with the directions of polar steps found every so many steps, to choose a usage of cheaper steps.

    Args:
        refresh: as for `Online`.

    Example:
        >>> [rule.refresh for rule in rules_for_refresh(4)]
        [0, 4, 4]
    """
    return tuple(replace(rule, refresh=refresh) if rule.rule == "polar" else rule for rule in RULES)


OFFERED = 4
"""Tasks that are drawn for each that is kept, so that no domain is left out by chance."""

MOMENTA = (0.0, 0.9)
FACTORS = (0.09, 0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
SHORT = (0.008, 0.011, 0.016, 0.022, 0.032, 0.045, 0.064)
"""Factors beside these where a usage is judged on validation data: what does not overfit may be much slower."""


def tuned_reference(
    family: TaskFamily,
    *,
    rates: Sequence[float] = RATES,
    factor: float = 1.0,
    tasks: int = 2,
    seed: int = 0,
    journal: Journal | None = None,
) -> Reference:
    """An Adam run whose rate is the best of a few on training tasks, to compare runs with.

    Args:
        family: its training side.
        rates: to choose from; the one whose run has the lowest training loss at its end, averaged over the tasks.
        factor: how many times longer than a run it is.
        tasks: how many.
        seed: draws them.
        journal: where to keep the loss of every rate, so that the same call continues one that was stopped.
    """
    family = family if isinstance(family, Counted) else Counted(family)
    built = draw_tasks(family, seed, "reference", tasks)

    def tried(rate: float) -> Result:
        ends = [Reference(torch.optim.Adam, rate, factor).run(task, task.init(), task.steps)[0] for task in built]
        loss = sum(tail_loss(task, end) for task, end in zip(built, ends, strict=True))
        return {"rate": rate, "loss": loss if math.isfinite(loss) else None}

    with parts_of(journal, "reference", family, {"factor": factor, "tasks": tasks, "seed": seed}) as parts:
        losses = {rate: parts.part(f"rate-{rate!r}", partial(tried, rate))["loss"] for rate in rates}
    finite = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not finite:
        for task in built:
            first = tail_loss(task, task.init(), 1)
            if not math.isfinite(first):
                raise ValueError(
                    f"the loss is {first} at the start of a task of {family.name!r} ({domain_of(task.config)}), before any "
                    "step was taken. Check its data and its initialisation, or leave it out of the family."
                )
        raise ValueError(
            f"Adam diverged on {family.name!r} at all of the rates {', '.join(map(str, rates))}. Give lower ones."
        )
    best = min(finite, key=lambda rate: finite[rate])
    return Reference(torch.optim.Adam, best, factor, chosen_on=tuple(config_hash(task.config) for task in built))


def said_reference(reference: Reference | None) -> list[object]:
    """What tells a reference run from others, in JSON's types.

    Args:
        reference: if there is one.
    """
    return [] if reference is None else [repr(reference), reference.lr, reference.factor]


def learn_scale(
    learned: LearnedOptimiser,
    family: TaskFamily,
    *,
    reference: Reference,
    online: Online | None = None,
    usage: Usage | None = None,
    rounds: int = 2,
    tasks: int = 4,
    seed: int = 0,
) -> Online:
    """The scale of every key that minimises the bound (s x + y/s) / 2 over training tasks: s = sqrt(y/x).

    It holds the mean metric of the run fixed, as the closed form holds the gradients. The first scale is such that steps
    are as long as the reference's.

    Args:
        learned: whose basis is used.
        family: its training side.
        reference: what finds the comparator.
        online: the rule; its scales are not looked at.
        usage: momentum and schedule of the runs.
        rounds: of training the tasks and setting the scale.
        tasks: in each.
        seed: draws them.
    """
    solved = _solved(_drawn_to_scale(family, tasks, seed), reference)
    return _scaled(learned, solved, online or Online(), reference.lr, usage, rounds)


Solved = Sequence[tuple[Task, Params]]
"""Tasks, with what a reference run came to on each."""


def _drawn_to_scale(family: TaskFamily, tasks: int, seed: int) -> list[Task]:
    return draw_tasks(family, seed, "scale", tasks)


def _solved(tasks: Sequence[Task], reference: Reference) -> Solved:
    return [(task, reference.run(task, task.init(), task.steps)[0]) for task in tasks]


def _all_scaled(
    learned: LearnedOptimiser, tasks: Sequence[Task], rules: Sequence[Online], reference: Reference, parts: Parts
) -> list[Online]:
    """The rules with their scales: one part, as all of them are learned from the same solutions."""

    def scaled() -> Result:
        solved = _solved(tasks, reference)
        return {"online": [_scaled(learned, solved, rule, reference.lr).to_dict() for rule in rules]}

    name = f"scales-{config_hash({'rules': [rule.to_dict() for rule in rules]})[:8]}"
    return [Online(**found) for found in parts.part(name, scaled)["online"]]


def _scaled(
    learned: LearnedOptimiser, solved: Solved, rule: Online, lr: float, usage: Usage | None = None, rounds: int = 2
) -> Online:
    own = 0.0 if rule.rule == "polar" else 0.8
    how = replace(usage or Usage(momentum=own, schedule="linear"), metric="online")
    task = solved[0][0]
    phi = learned.potential.bind(task.init())
    unit = _unit_steps(phi, task.init(), rule, task.steps)
    found = replace(rule, scale={key: step / lr for key, step in unit.items()})
    for _ in range(rounds):
        runs = [train(t, phi, how, online=found, comparator=u) for t, u in solved]
        tallies = [run.tally for run in runs if run.tally is not None and math.isfinite(run.loss)]
        if not tallies:
            found = replace(found, scale={k: 2 * s for k, s in found.scale.items()})
            continue
        x, y = (_added([getattr(t, side) for t in tallies]) for side in ("x", "y"))
        found = replace(
            found, scale={k: math.sqrt(y[k] / x[k]) if x.get(k) and y.get(k) else s for k, s in found.scale.items()}
        )
    return found


def _unit_steps(potential: MaxDiagonal, params: Params, online: Online, steps: int) -> dict[str, float]:
    """How far a number of each key moves in a step with s = 1, roughly."""
    found = {}
    for name, x in params.items():
        step = 1 / math.sqrt(steps) if online.rule == "sum" else 1.0
        if online.rule == "polar" and x.ndim > 1 and x.numel():
            longer = max(x.shape[0], x.numel() // x.shape[0])
            step = float((1 / potential.metric(name)[0]).mean().detach() / longer) ** 0.5
        found[potential.slots[name].key] = step
    return found


def learn_usage(
    learned: LearnedOptimiser,
    family: TaskFamily,
    *,
    reference: Reference | None = None,
    metrics: Sequence[Metric] = get_args(Metric),
    momenta: Sequence[float] = MOMENTA,
    schedules: Sequence[Schedule] = get_args(Schedule),
    averages: Sequence[Average] = ("tail", "constant"),
    factors: Sequence[float] | None = None,
    rules: Sequence[Online] = RULES,
    judged_on: JudgedOn = "train",
    tasks: int = 6,
    seed: int = 0,
    watch: Watch | None = None,
    journal: Journal | None = None,
) -> LearnedOptimiser:
    """Choose metric, momentum, schedule, average and factor on training tasks; the choice is stored in the file.

    First the best two pairs of metric and momentum, on two tasks; then, on all, the factor of each and the better of them;
    then the schedule or average that is best on two tasks in its place, if it is better on all. A factor is left for its
    neighbour as long as that is better. What counts is the geometric mean of two losses, so that it is the ratios that
    matter: the mean over the run, and that of fresh batches of the training data at its end, where a hundredth of the first
    loss is added unless the family counts digits: what is far below is chance. Losses below zero are counted from the lowest
    of their task. What diverges on any task is out. Judged on "validation", the loss there at the end of a run counts alone.

    Args:
        learned: the geometry.
        family: its training side; nothing else is seen.
        reference: what finds the comparator that online scales are learned with; `tuned_reference` if not given.
        metrics: to choose from, and so are the others.
        momenta: see there.
        schedules: see there.
        averages: see there; a usage with momentum has no other. Others are tried against the first.
        factors: see there; from 0.09 to 2.8, or from 0.008 judged on validation data, if not given.
        rules: online metrics, whose scales are learned first. The rule "polar" averages gradients, so has no momentum too.
        judged_on: "validation" for usages that generalise, where low training losses do not; data of the training tasks.
        tasks: to decide on, and as many to learn scales on. The end of a run is noisy: few tasks decide by chance.
        seed: draws them.
        watch: called with every usage tried, its online metric if it has one, and its score.
        journal: where to keep the online scales and every run of a usage, so that the same call continues one that was
            stopped, to the same result.

    Example:
        >>> from metamd import Diagonal, meta_train, tasks
        >>> family = tasks.tabular(steps=20)
        >>> learned = meta_train(family, Diagonal(), outer_steps=1, tasks_per_step=2)
        >>> learn_usage(learned, family, tasks=1, factors=(1.0,), momenta=(0.0,)).usage.metric in ("learned", "online")
        True
    """
    factors = factors if factors is not None else FACTORS if judged_on == "train" else (*SHORT, *FACTORS)
    choices = {"momenta": momenta, "schedules": schedules, "averages": averages, "factors": factors, "rules": rules}
    _check_choices(learned, judged_on, metrics=metrics, **choices)
    began, family = time.perf_counter(), Counted(family)
    finder = (reference or tuned_reference(family, seed=seed, journal=journal)) if "online" in metrics else None
    left = 0.0 if family.counts_digits else LEFT
    settings = {"learned": learned.fingerprint(), "reference": said_reference(finder), "tasks": tasks, "seed": seed}
    settings |= {"left": left} | ({} if judged_on == "train" else {"judged_on": judged_on})
    with parts_of(journal, "usage", family, settings) as parts:
        found: list[Online | None] = [None] if "learned" in metrics else []
        if finder is not None:
            found += _all_scaled(learned, _drawn_to_scale(family, tasks, seed), rules, finder, parts)
        built = draw_tasks(family, seed, "usage", tasks)
        trials = Trials(built, learned.potential.bind(built[0].init()), watch, parts, left, judged_on)
        starts = [(o, u) for o in found for u in first_usages(o, momenta, factors)]
        best, online = best_usage(trials, starts, schedules, averages, factors)
        value = trials.score(best, online)
    if not math.isfinite(value):
        raise ValueError(f"every usage of this geometry diverged on training tasks of {family.name!r}. Learn it again.")
    seen = [*(() if finder is None else finder.chosen_on), *family.tasks]
    return _with_usage(learned, best, online, seen, family.cost(began))


def _with_usage(
    learned: LearnedOptimiser, usage: Usage, online: Online | None, seen: Sequence[str], cost: Mapping[str, float]
) -> LearnedOptimiser:
    """The file with a usage, and with the tasks and the cost of choosing it."""
    header = replace(
        learned.header,
        usage=usage.to_dict(),
        online=None if online is None else online.to_dict(),
        task_hashes=tuple(dict.fromkeys([*learned.header.task_hashes, *seen])),
        cost=total_cost(learned.header.cost, cost),
    )
    return replace(learned, header=header)


def _check_choices(learned: object, judged_on: object, **choices: Sequence[Any]) -> None:
    if not isinstance(learned, LearnedOptimiser):
        raise TypeError(f"learned must be a LearnedOptimiser, got {type(learned).__name__}. Pass metamd.load(path).")
    if judged_on not in get_args(JudgedOn):
        raise ValueError(f'judged_on must be "train" or "validation", got {judged_on!r}. Test data is for what is reported.')
    for name, offered in choices.items():
        if not offered:
            raise ValueError(f"{name} must have one to choose from at least, got none. Leave it out for the usual ones.")
    kinds = {"metrics": Metric, "schedules": Schedule, "averages": Average}
    for name, known in ((name, get_args(kind)) for name, kind in kinds.items()):
        for offered in choices[name]:
            if offered not in known:
                raise ValueError(f"{name} must be some of {', '.join(map(repr, known))}; got {offered!r}.")
    if not all(0 < factor < math.inf for factor in choices["factors"]):
        raise ValueError(
            f"factors must be positive numbers, got {tuple(choices['factors'])}. 1.0 takes the steps as they are."
        )


def learn_start(
    family: TaskFamily,
    *,
    reference: Reference | None = None,
    tasks: int = 8,
    seed: int = 0,
    journal: Journal | None = None,
) -> LearnedStart:
    """The start that minimises the bound over training tasks: the mean of their solutions.

    For every convex potential with a fixed centre E B(u||v) = E phi(u) - phi(mean u) + B(mean u||v), which v = mean u
    minimises [Khodak2019]. The tasks must begin at one model already: means over unrelated initialisations say nothing.

    Args:
        family: of tasks with a shared start; its training side.
        reference: what finds the solutions; `tuned_reference` if not given.
        tasks: how many.
        seed: draws them.
        journal: where to keep it, so that the same call does not compute it again.

    Example:
        >>> from metamd.tasks import quadratic, starting_at
        >>> family = starting_at(quadratic(steps=20), {"theta": torch.ones(2, dtype=torch.float64)})
        >>> start = learn_start(family, reference=Reference(lr=0.05), tasks=2)
        >>> list(start), len(start.tasks), start.cost["gradient_evaluations"]
        (['theta'], 2, 80)
    """
    if not isinstance(family.family if isinstance(family, Counted) else family, SharedStart):
        raise ValueError(
            f"a learned start needs tasks that begin at one model, but those of {family.name!r} have initialisations of "
            "their own. Give them one with metamd.tasks.starting_at(family, parameters)."
        )
    began, counted = time.perf_counter(), Counted(family)
    # in a folder of its own, since what follows from the learned start has a reference of its own too
    inside = None if journal is None else Journal(Path(journal.folder) / "start")
    finder = reference or tuned_reference(counted, seed=seed, journal=inside)
    built = draw_tasks(counted, seed, "start", tasks)

    def found() -> LearnedStart:
        ends = [end for _, end in _solved(built, finder) if all(bool(x.isfinite().all()) for x in end.values())]
        if not ends:
            raise ValueError(f"all {tasks} reference runs diverged. Give a reference with a lower lr.")
        used = (*finder.chosen_on, *(config_hash(task.config) for task in built))
        mean = {n: torch.stack([end[n] for end in ends]).mean(0) for n in ends[0]}
        return LearnedStart(mean, dict.fromkeys(used), counted.cost(began))

    settings = {"reference": said_reference(finder), "tasks": tasks, "seed": seed}
    with parts_of(journal, "start", counted, settings) as parts:
        return parts.file("start", found, LearnedStart.load)


def draw_tasks(family: TaskFamily, seed: int, purpose: str, count: int) -> list[Task]:
    """Tasks that depend on the family and these words alone, spread evenly over the domains that their configs name.

    Args:
        family: where from.
        seed: of the learning.
        purpose: what the tasks are for.
        count: how many.
    """
    if count < 1:
        raise ValueError(f"tasks must be at least 1, got {count}.")
    offered = [draw_config(family, seed, "usage", purpose, i) for i in range(OFFERED * count)]
    domains = [domain_of(config) for config in offered]
    turns = [domains[:i].count(domain) for i, domain in enumerate(domains)]
    chosen = sorted(range(len(offered)), key=lambda i: (turns[i], i))[:count]
    return [family.build(offered[i]) for i in chosen]


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total

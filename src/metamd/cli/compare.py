"""`metamd compare`: a learned optimiser against tuned rivals on held-out tasks; a stopped run continues."""

import sys
from functools import partial
from typing import Any

from torch import nn

from metamd.certification.certification import recommended
from metamd.cli import report as report_command
from metamd.cli.families import build_family, duration, held_out_side, show_plan
from metamd.cli.options import Compare, Report
from metamd.comparison.compare import compare, comparison_settings
from metamd.comparison.comparison import Target, evaluations
from metamd.comparison.entrants import Protocol, draw_configs, enough, entrants, labels, said_beforehand
from metamd.comparison.once import AGAIN, EXPLORED, Once
from metamd.comparison.tuning import SEARCHES
from metamd.files.learned import LearnedOptimiser, load
from metamd.files.store import Records, write_json
from metamd.files.text import one_line
from metamd.inner.executor import Executor
from metamd.learning.meta import seconds_beside_adam
from metamd.learning.usage import FIRST
from metamd.rivals import LEARNERS, Contender, Rival, known_rival, learned_rival
from metamd.rivals.learned import source
from metamd.tasks.base import TaskFamily
from metamd.tasks.wrapped import SharedStart, starting_at


def run(options: Compare) -> None:
    """Carry out the command."""
    _check_options(options)
    protocol = Protocol(
        options.protocol,
        seeds=options.seeds,
        steps=options.steps,
        seed=options.seed,
        aim=_aim(options),
        budget=options.budget,
        once=Once(options.gradients),
        schedules=options.schedules,
        search=SEARCHES[options.search],
    )
    executor = Executor(options.workers, options.ray)  # refuses too few workers before anything is computed
    learned = load(options.file)
    known, family = sides(options, learned)
    ours: dict[str, Contender] = {"MetaMD": _our_contender(learned, options)}
    # A file that does not fit the models of the family is refused here, and data that are not at hand are found missing.
    ours["MetaMD"].start([(n, nn.Parameter(x)) for n, x in family.example().items()])
    protocol = enough(family, protocol, _others(options))
    if options.dry_run:
        show_plan(family, _plan(options, family, learned, protocol), as_json=options.json)
        return
    rivals = [_known_or_learned(name, known, options) for name in options.rivals]
    Records(
        options.out, comparison_settings(family, protocol)
    )  # refuses the folder of another comparison before a long search
    trials = None
    if options.protocol != "handicap":
        about = {"family": family.describe(), "seed": options.seed}
        about |= {"budget": options.budget} if options.protocol == "paper" else {}
        trials = Records(options.out / "tuning", about)
    print(said_beforehand(family, protocol, _others(options)), file=sys.stderr)
    try:
        everybody = entrants(ours, rivals, family, protocol, training=known, records=trials, workers=executor)
        compare(everybody, family, protocol, folder=options.out, workers=options.workers, ray=options.ray)
    except KeyboardInterrupt:
        print(f"Stopped; the same command continues from {one_line(str(options.out))}.", file=sys.stderr)
        raise
    certificate = options.out / "certificate.json"
    if learned.header.held_out:
        write_json(certificate, learned.header.held_out)
    else:
        certificate.unlink(missing_ok=True)  # that of another file, compared here before
    report_command.run(Report(options.out, json=options.json))


def _check_options(options: Compare) -> None:
    """Refuse what cannot be compared before anything is computed or written."""
    if not options.rivals:
        raise ValueError("--rivals must name at least one, got none.")
    if not options.schedules:
        raise ValueError("--schedules must name one of constant, linear, quadratic or more, got none. Leave it out for two.")
    known = labels(["MetaMD"], [known_rival(name) for name in options.rivals], options.schedules, options.protocol)
    if options.target is not None and options.target not in (*options.rivals, *known):
        raise ValueError(
            f"--target must be one of the rivals ({', '.join(options.rivals)}) or a label of the table "
            f"({'; '.join(known)}), got {options.target!r}."
        )
    if options.search != Compare.search and options.protocol != "paper":
        raise ValueError("--search would change nothing without --protocol paper. Leave it out, or add that.")
    if options.gradients is not None and options.protocol != "once":
        raise ValueError("--gradients would change nothing without --protocol once. Leave it out, or add that.")


def _others(options: Compare) -> int:
    """The rows beside ours, at most: under once everybody may have a second one."""
    known = labels([], [known_rival(name) for name in options.rivals], options.schedules, options.protocol)
    return len(known) + (len(options.rivals) + 1 if options.protocol == "once" else 0)


def _aim(options: Compare) -> Target:
    """What sets the target: under once the final loss of Adam, if it is there."""
    if options.protocol != "once":
        return Target(options.target or options.rivals[-1])
    return Target(options.target or ("adam" if "adam" in options.rivals else options.rivals[-1]), 1.0)


def _plan(options: Compare, family: TaskFamily, learned: LearnedOptimiser, protocol: Protocol) -> str:
    """What a dry run says of the runs; what learned rivals take to learn is not known beforehand."""
    groups = draw_configs(family, protocol.seeds or 1, protocol.seed)
    task = family.build(next(iter(groups.values()))[0])
    steps = task.steps if protocol.steps is None else protocol.steps
    seconds = seconds_beside_adam(task, {"MetaMD": partial(recommended, task, learned, task.steps)})
    tasks, each = sum(map(len, groups.values())), len(options.rivals) * len(protocol.schedules)
    tuned = each * protocol.budget if protocol.name == "handicap" else each
    searched = 0 if protocol.name == "handicap" else (1 + each) * protocol.budget * len(groups)
    if protocol.name == "once":
        given = options.gradients or evaluations(learned.header.cost) or 25 / EXPLORED * FIRST * steps
        tuned, searched = 2 * len(options.rivals), round((len(options.rivals) + 1 / AGAIN) * given / steps)
    others = tasks * (tuned + len(options.rivals)) + searched
    whole = steps * (tasks * seconds["MetaMD"] + others * seconds["Adam"]) / options.workers
    more = " Learned rivals are learned first, which takes longer." * any(n in LEARNERS for n in options.rivals)
    return (
        f"{tasks} tasks in {len(groups)} domain{'s' * (len(groups) > 1)}: {tasks} runs of MetaMD and {others} of rivals, of "
        f"{steps} steps each, which take {1e3 * seconds['MetaMD']:.2g} ms, and {1e3 * seconds['Adam']:.2g} for Adam: about "
        f"{duration(whole)} with {options.workers} worker{'s' * (options.workers > 1)}.{more}"
    )


def _our_contender(learned: LearnedOptimiser, options: Compare) -> Contender:
    """As the file says that it is best used, unless something else was asked."""
    usage = learned.usage
    made = learned_rival(learned, refresh=options.refresh, averaging="constant" if options.momentum else None)
    momentum = usage.momentum if options.momentum is None else options.momentum
    return made.with_setting(options.schedule or usage.schedule, momentum=momentum)


def _known_or_learned(name: str, family: TaskFamily, options: Compare) -> Rival:
    """A rival; one that is learned is learned on the training side, once, and kept beside the records."""
    known = known_rival(name)
    if isinstance(known, Rival):
        return known
    (options.out / "learned").mkdir(parents=True, exist_ok=True)
    path = options.out / "learned" / f"{name}-{source(family, options.seed)}.safetensors"
    return known.rival(family, options.seed, path)


def sides(options: Compare, learned: LearnedOptimiser) -> tuple[TaskFamily, TaskFamily]:
    """The family to learn rivals on and the one to compare on: its held-out side, if something is held out."""
    known: dict[str, Any] = learned.header.family or {}
    family = build_family(options, known)
    if options.start is None and learned.start is not None:
        family = starting_at(family, learned.start)
        print("Note: everybody begins at the learned start that is in the file.", file=sys.stderr)
    elif known.get("start") == "shared" and not isinstance(family, SharedStart):
        raise ValueError(
            f"{one_line(str(options.file))} was learned on tasks that begin at one model, which is not in the file. Pass "
            "it with --start CHECKPOINT."
        )
    side = held_out_side(family)
    trained = [d for d in side.drawn().domains if d in learned.domains]
    if trained:
        print(f"Note: the file was trained on {one_line(', '.join(trained))}: not held out.", file=sys.stderr)
    return family, side

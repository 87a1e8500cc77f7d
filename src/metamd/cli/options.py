"""The options of each `metamd` command, free of torch; `HOMES` names what carries each out.

Names in braces are filled in by `metamd.cli.names`, when a command that has some is asked for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg, subcommand


@dataclass(frozen=True, kw_only=True)
class Printed:
    """What every command has.

    Args:
        json: print one JSON object on standard output instead of text.
    """

    json: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Printed):
    """What commands that train tasks of a family have.

    Args:
        steps: training steps of one run; if not given those that the file records, or the family's own.
        model: of a family of images: linear, mlp, lenet or resnet18; of pictures: siren or fourier.
        hold_out: the domain of a family of images that is not learned from, but compared and certified on: an angle, or a
            dataset; of texts a kind, of speakers speakers or presidents. Compare and certify take that of the file if not
            given.
        images: per domain, at most.
        width: of the network: of a resnet18 (64 is the published one, 16 runs on a small CPU), or an mlp; for {wide}.
        start: a checkpoint with the parameters that every task begins at, safetensors or torch.save; otherwise each has its
            own initialisation.
        workers: processes that share the runs; the result does not depend on them.
        ray: address of a Ray cluster to compute on, with so many workers; local starts one on this machine.
        seed: of everything random.
        dry_run: print the tasks, the shapes, how many runs, and how long they take about; train and write nothing.
    """

    steps: int | None = None
    model: str | None = None
    hold_out: str | None = None
    images: int | None = None
    width: int | None = None
    start: Annotated[Path | None, arg(metavar="CHECKPOINT")] = None
    workers: int = 1
    ray: Annotated[str | None, arg(metavar="ADDRESS")] = None
    seed: int = 0
    dry_run: bool = False


@dataclass(frozen=True)
class Certify(TaskOptions):
    """Run a learned optimiser on held-out tasks, print what follows for the next ones, and write it into the file.

    Args:
        file: a path, or the name of a learned optimiser shipped with the package.
        family: as for `metamd train`; settings that the file records are used again.
        held_out_tasks: how many tasks are run; a bound on the next one at 95 percent needs 19 at least.
        delta: each statement holds with probability 1 - delta.
        target: the loss to count steps to, stated beforehand; the one in the file, from its training tasks, if not given.
        theory: add the bounds of the paper, for plain mirror descent; each of the next three options asks for them too.
        regret_cap: what the regret is clipped at, stated beforehand, for a bound on its mean.
        radius: on the distance from start to solution of any task, stated beforehand, for the bound from training tasks.
        reach: the same on the largest coordinate of that distance.
        reference_lr: rate of runs of Adam, twice as long, that find solutions where the family does not know them; else they
            are found by runs as the file recommends, twice as long.
        out: write the file here instead, and leave FILE as it is.
        report: write a page here too, such as certificate.html.
    """

    file: Annotated[Positional[str], arg(metavar="FILE")]
    family: Annotated[Positional[str], arg(metavar="FAMILY")]
    held_out_tasks: int = 50
    delta: float = 0.05
    target: float | None = None
    theory: bool = False
    regret_cap: float | None = None
    radius: float | None = None
    reach: float | None = None
    reference_lr: float | None = None
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    report: Annotated[Path | None, arg(metavar="HTML")] = None


@dataclass(frozen=True)
class Demo(Printed):
    """Learn from two recorded runs, fit networks to photographs with the file, and compare it with tuned rivals.

    Args:
        out: directory for what it writes.
        seed: of everything random.
    """

    opening: ClassVar[str] = (
        "Recording two runs of AdamW, learning from them, and comparing with tuned rivals; about a minute on one core."
    )
    """What is said at once: importing torch takes seconds."""

    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/demo")
    seed: int = 0


@dataclass(frozen=True)
class Inspect(Printed):
    """Print what a learned-optimiser file says about itself and the distribution of its step sizes.

    Args:
        file: a path, or the name of a learned optimiser shipped with the package; without one, those are listed.
        figure: draw the distributions into this image, such as steps.png.
    """

    file: Annotated[Positional[str | None], arg(metavar="[FILE]")] = None
    figure: Annotated[Path | None, arg(metavar="PNG")] = None


@dataclass(frozen=True)
class DataList(Printed):
    """List the datasets: what is here, where it came from, its licence."""


@dataclass(frozen=True)
class DataFetch(Printed):
    """Download a dataset, check it, and keep it decoded.

    Args:
        name: of the dataset.
        split: train or test; both if not given.
        force: download again what is there.
    """

    name: Positional[str]
    split: str | None = None
    force: bool = False


@dataclass(frozen=True)
class DataVerify(Printed):
    """Read what is here and hold it against the recorded checksums.

    Args:
        name: of the dataset; all of them if not given.
    """

    name: Positional[str | None] = None


@dataclass(frozen=True)
class DataPath(Printed):
    """Print where a dataset is, or where all of them are kept.

    Args:
        name: of the dataset.
        split: train or test.
    """

    name: Positional[str | None] = None
    split: str = "train"


@dataclass(frozen=True)
class Data:
    """List, download and check the datasets.

    Args:
        action: what to do.
    """

    action: (
        Annotated[DataList, subcommand("list")]
        | Annotated[DataFetch, subcommand("fetch")]
        | Annotated[DataVerify, subcommand("verify")]
        | Annotated[DataPath, subcommand("path")]
    )


@dataclass(frozen=True)
class Reproduce(Printed):
    """Run one of the experiments, or all; what is computed stays in records, and the same command continues it.

    Args:
        name: {experiments}; all runs one after another.
        variant: {variants}.
        protocol: once, handicap or paper instead of that of the experiment; the folder has it in its name.
        scale: smoke takes minutes for all, cpu minutes to hours each on two cores; paper is what was published, for a GPU.
        out: directory for records and figures; runs/NAME-SCALE if not given. With all, each has a folder inside.
        workers: processes.
        ray: address of a Ray cluster to compute on, for the experiments with networks; local starts one on this machine.
        only: domains to hold out now, and to make the tables of; the others can follow. All if not given.
        seed: of everything random.
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]
    variant: str = ""
    protocol: Literal["", "once", "handicap", "paper"] = ""
    scale: Literal["smoke", "cpu", "paper"] = "cpu"
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    workers: int = 1
    ray: Annotated[str | None, arg(metavar="ADDRESS")] = None
    only: Annotated[tuple[str, ...], arg(metavar="DOMAIN [DOMAIN ...]")] = ()
    seed: int = 0


@dataclass(frozen=True)
class Train(TaskOptions):
    """Learn an optimiser for a family of tasks; the same command continues a run that was stopped.

    Args:
        family: {families}; or my.py:family for your own, where family is a TaskFamily in the file my.py, or a function
            that makes one. The file is executed, with your rights.
        out: the learned-optimiser file; checkpoint and log are kept beside it, in FILE.run.
        potential: kronecker, learned coordinates of every weight matrix, for networks; diagonal for all others. Networks may
            be given diagonal too.
        tying: which coordinates share a metric: parameter, channel, column, tensor or role.
        rank: leading directions of learned coordinates that are kept: a number, auto, or all.
        learn_start: begin at the mean of the tasks' solutions, which is kept in the file; for tasks with a shared start.
        judged_on: auto to judge the end of a run on validation data of the training tasks, where they have some, when a
            usage is chosen; train for training data alone; validation for validation data alone.
        prefer: steps, or seconds to choose the usage that gets farthest in the same time on this machine.
        refresh: choose the usage for cheaper polar steps, with directions found every so many steps; in all if not given.
        outer_steps: learn a diagonal in at most so many rounds of training tasks; 10 if not given, 150 for the
            paper's, 300 for its plain rule.
            Networks are learned from runs of Adam and not in rounds, unless this is given.
        tasks: in each round; for networks half as many runs as are learned from.
        preset: default; paper for the published algorithm, with all that is unpublished chosen on training tasks;
            paper-plain for its plain outer rule. For both, quadratics start at (0.1, 0.1) and not at (3, 3).
        k: the constant of the paper's objective; chosen on training tasks if not given, 7 for the plain rule.
        tensorboard: write event files beside the log.
    """

    family: Annotated[Positional[str], arg(metavar="FAMILY")]
    out: Annotated[Path, arg(metavar="FILE")] = Path("learned.safetensors")
    potential: str | None = None
    tying: str | None = None
    rank: str = "auto"
    learn_start: bool = False
    judged_on: str = "auto"
    prefer: str = "steps"
    refresh: int = 0
    outer_steps: int | None = None
    tasks: int = 8
    preset: str = "default"
    k: float | None = None
    tensorboard: bool = False


@dataclass(frozen=True)
class Update(Printed):
    """Add recorded runs to those that a file was learned from, and learn it anew.

    Args:
        file: what metamd.learn(runs).save(...) or an earlier update wrote; it is replaced, whole or not at all.
        runs: files of recorder.finish().save(...).
        decay: the factor on the weights of the earlier runs: 1 keeps all nights alike, 0.9 forgets slowly.
        weight: of each new run.
        out: write here instead, and leave FILE as it is.
    """

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]")]
    decay: float = 1.0
    weight: float = 1.0
    out: Annotated[Path | None, arg(metavar="FILE")] = None


@dataclass(frozen=True)
class Compare(TaskOptions):
    """Train tasks of a family with a learned optimiser and with tuned rivals; the same command continues a stopped run.

    Args:
        file: a path, or the name of a learned optimiser shipped with the package.
        family: as for metamd train.
        rivals: {rivals}.
        protocol: once lets everybody choose on training tasks, with the gradient evaluations that learning FILE took;
            handicap gives rivals the best rate on the very tasks, and MetaMD nothing; paper tunes everybody alike.
        gradients: of the protocol once, evaluations that each rival may take instead.
        budget: settings tried per rival and schedule; under once the search has as many as its evaluations allow.
        search: of the protocol paper: bayes, random, grid, or extended for the grid until the best is inside.
        schedules: of the rivals' rates: constant, linear or quadratic decay to zero.
        momentum: of MetaMD; as FILE has it if not given. One above 0 takes the place of a tail average that FILE has, too.
        schedule: of MetaMD's rate; as FILE has it if not given.
        refresh: of MetaMD, how often polar steps find their directions: 4 makes a step of a small network half as long.
        target: the rival that sets the target, by its name or its label in the table; if not given Adam under once, else the
            last one.
        seeds: tasks, or tasks per domain; if not given as many as can decide.
        out: directory for records and the report.
    """

    file: Annotated[Positional[str], arg(metavar="FILE")]
    family: Annotated[Positional[str], arg(metavar="FAMILY")]
    rivals: tuple[str, ...] = ("sgd", "sgdm", "adam")
    protocol: Literal["once", "handicap", "paper"] = "once"
    gradients: int | None = None
    budget: int = 25
    search: Literal["bayes", "random", "grid", "extended"] = "bayes"
    schedules: tuple[Literal["constant", "linear", "quadratic"], ...] = ("constant", "linear")
    momentum: float | None = None
    schedule: Literal["constant", "linear", "quadratic"] | None = None
    refresh: int | None = None
    target: str | None = None
    seeds: int | None = None
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/comparison")


@dataclass(frozen=True)
class Report(Printed):
    """Write the page of a comparison, HTML and Markdown, from its records.

    Args:
        folder: what metamd compare or metamd reproduce wrote; comparisons in its folders are joined, and what compares in a
            way of its own, as quadratic and rosenbrock do, is shown with its tables and figures.
        target: the optimiser that sets the target, by its name or its label; that of the records if not given.
        share: of the steps after which its loss is the target; that of the records, 0.75 as a rule, if not given.
        out: directory for the pages; that of the records if not given.
    """

    folder: Annotated[Positional[Path], arg(metavar="DIR")]
    target: str | None = None
    share: float | None = None
    out: Annotated[Path | None, arg(metavar="DIR")] = None


Options = Certify | Compare | Data | Demo | Inspect | Report | Reproduce | Train | Update

NAMED = ("train", "compare", "certify", "reproduce")
"""Commands whose help has names that are declared elsewhere."""

HOMES: dict[type, tuple[str, str]] = {Update: ("train", "run_update"), Reproduce: ("report", "run_reproduce")}
"""The module of `metamd.cli` and its function that carry out a command, where it is not `run` in the module of its name."""

"""Rotated 8x8 digits on a small network: learn on some rotations, compare on one that was held out.

The digits come with scikit-learn: nothing is downloaded. The rivals' rates are tuned on the held-out task itself, for the
quantity that is reported; MetaMD is used as it was learned. A learned diagonal, the paper's potential, stands beside it: it
has the certificate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from metamd import tasks
from metamd.files.learned import LearnedOptimiser
from metamd.files.store import Result
from metamd.inner.objectives import Reference, Regret
from metamd.inner.run import OptimiserSteps, not_finite, run_inner
from metamd.inner.run import train as train_task
from metamd.learning.meta import meta_train
from metamd.optimiser.optimiser import MetaMD
from metamd.potentials import Diagonal
from metamd.potentials.base import Params
from metamd.tasks.base import Task, TaskFamily, derive_seed

Named = list[tuple[str, nn.Parameter]]
Made = tuple[Optimizer, Callable[[int], float] | None]
Make = Callable[[Named], Made]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is trained, and how often.

    Args:
        angles: rotations to learn from, in degrees.
        held_out: the rotation to test on.
        start_angle: where every task starts: a network trained at this rotation; None for a new one every time.
        steps: T.
        batch_size: of every step.
        hidden: units of the hidden layer.
        outer_steps: of the meta-training.
        tasks_per_step: of the meta-training.
        seeds: test tasks: other batches, and other initialisations if there is no common start.
        rates: learning rates to try, per rival.
    """

    angles: tuple[int, ...] = (0, 15, 60, 75, 90)
    held_out: int = 30
    start_angle: int | None = 45
    steps: int = 200
    batch_size: int = 50
    hidden: int = 64
    outer_steps: int = 5
    tasks_per_step: int = 4
    seeds: int = 5
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def images() -> tuple[Tensor, Tensor]:
    """The digits, (1797, 1, 8, 8) between 0 and 1, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ValueError(
            "the digits come with scikit-learn, which is not installed. Run: pip install 'metamd[demo]'"
        ) from None
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)


def rotated(pictures: Tensor, degrees: float) -> Tensor:
    """The pictures turned counter-clockwise about their middle, bilinear, flattened.

    Args:
        pictures: (n, 1, h, w).
        degrees: the angle.
    """
    a = math.radians(degrees)
    turn = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]]).expand(len(pictures), 2, 3)
    places = F.affine_grid(turn, list(pictures.shape), align_corners=False)
    return F.grid_sample(pictures, places, align_corners=False).flatten(1)


def families(plan: Plan, seed: int) -> tuple[TaskFamily, TaskFamily]:
    """The tasks to learn from, and those to test on.

    Args:
        plan: what is trained.
        seed: of the common start.
    """
    pictures, labels = images()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, plan.hidden), nn.ReLU(), nn.Linear(plan.hidden, 10))

    def family(angles: Sequence[int], start: dict[str, Tensor] | None) -> TaskFamily:
        data = {f"{a} degrees": (rotated(pictures, a), labels) for a in angles}
        made = tasks.supervised(make, data, batch_size=plan.batch_size, steps=plan.steps, name="rotated digits")
        return made if start is None else tasks.starting_at(made, start)

    start = None
    if plan.start_angle is not None:
        first = family([plan.start_angle], None)
        task = first.build(first.sample(torch.Generator().manual_seed(derive_seed(seed, "start"))))
        start, _ = Reference(Adam, lr=3e-3, factor=2.0).run(task, task.init(), plan.steps)
    return family(plan.angles, start), family([plan.held_out], start)


def compare(plan: Plan, seed: int, say: Say) -> tuple[Result, LearnedOptimiser]:
    """Learn, then train the held-out tasks with what was learned and with the rivals.

    Args:
        plan: what is trained.
        seed: of everything random.
        say: told what is being done.
    """
    known, unseen = families(plan, seed)
    say("learning from " + ", ".join(str(a) for a in plan.angles) + " degrees")
    learned = meta_train(known, tasks_per_step=plan.tasks_per_step, seed=seed)
    say("learning a diagonal from the same")
    plain = meta_train(known, Diagonal(), outer_steps=plan.outer_steps, tasks_per_step=plan.tasks_per_step, seed=seed)
    generator = torch.Generator().manual_seed(derive_seed(seed, "held out"))
    held_out = [unseen.build(unseen.sample(generator)) for _ in range(plan.seeds)]
    say("MetaMD on the held-out rotation")
    ours: dict[str, Make] = {
        "MetaMD": lambda named: (MetaMD(named, learned, steps=plan.steps), None),
        "MetaMD, diagonal": lambda named: (MetaMD(named, plain), None),
    }
    members = {name: _summary([train(task, make) for task in held_out]) for name, make in ours.items()}
    for name, maker in RIVALS.items():
        found = {}
        for rate in plan.rates:
            say(f"{name} on the held-out rotation, rate {rate:g}")
            found[rate] = _summary([train(task, partial(maker, rate, plan.steps)) for task in held_out])
        best = min(found, key=lambda rate: found[rate]["mean_loss"])
        members[name] = found[best] | {"rate": best, "tried": len(plan.rates)}
        if name == "Adam" and UNTUNED in found:
            members["Adam, untuned"] = found[UNTUNED] | {"rate": UNTUNED, "tried": 1}
    say("the certificate")
    return {"members": members, "certificate": certificate(held_out[0], plain), "usage": str(learned.usage)}, learned


UNTUNED = 0.001
"""Adam's default rate in torch: what a run costs no search for."""


def _sgd(rate: float, steps: int, named: Named) -> Made:
    return SGD([p for _, p in named], lr=rate), None


def _momentum(rate: float, steps: int, named: Named) -> Made:
    return SGD([p for _, p in named], lr=rate, momentum=0.9), None


def _adam(rate: float, steps: int, named: Named) -> Made:
    return Adam([p for _, p in named], lr=rate), None


def _decaying_adam(rate: float, steps: int, named: Named) -> Made:
    return Adam([p for _, p in named], lr=rate), lambda t: 1 - t / steps


RIVALS = {"SGD": _sgd, "SGD-M": _momentum, "Adam": _adam, "Adam, linear decay": _decaying_adam}


def train(task: Task, make: Make) -> Result:
    """One training: the loss of every batch, and loss and accuracy at the end.

    Args:
        task: the problem.
        make: the optimiser for named parameters, and the factor on its rates in step t if it has a schedule.
    """
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    rule = OptimiserSteps(params, *make(list(params.items())))
    losses: list[float] = []

    @torch.no_grad()
    def watch(t: int, loss: Tensor, grads: Params) -> None:
        # MetaMD may keep an average: the loss of the parameters that the model would be used with now
        averaged = isinstance(rule.optimiser, MetaMD)
        losses.append(float(task.loss(rule.model(), task.batch(t)) if averaged else loss))

    done = train_task(task, rule, task.steps, watch=watch, until=not_finite)
    if done.diverged or not all(map(math.isfinite, losses)):
        return {"losses": [math.inf] * task.steps, "train_loss": math.inf, "accuracy": 0.0}
    end = rule.model()
    return {
        "losses": losses,
        "train_loss": task.evaluate(end, "train").loss,
        "accuracy": task.evaluate(end, "test").accuracy or 0.0,
    }


def _summary(runs: Sequence[Result]) -> Result:
    """Means over the seeds and the curve; the mean loss over the run is what rates are chosen by."""
    losses = torch.tensor([r["losses"] for r in runs], dtype=torch.float64)
    each = losses.mean(1)
    return {
        "mean_loss": float(each.mean()),
        "deviation": float(each.std()) if len(runs) > 1 else 0.0,
        "train_loss": sum(r["train_loss"] for r in runs) / len(runs),
        "accuracy": sum(r["accuracy"] for r in runs) / len(runs),
        "curve": losses.mean(0).tolist(),
        "each": each.tolist(),
    }


def certificate(task: Task, learned: LearnedOptimiser) -> Result:
    """The regret bound of one run against a longer run of Adam, and what was realised.

    sum_t <g_t, theta_t - u> <= B(u||theta_1) + 1/2 sum_t g_t' D^-1 g_t for any losses; where they are convex the left side
    is at least the regret.

    Args:
        task: the problem.
        learned: the geometry, lr = 1.
    """
    objective = Regret(comparator=Reference(Adam, lr=1e-2, factor=2.0))
    run = run_inner(task, learned.potential, reference=objective.reference, certify=True)
    if run.diverged or run.reference is None:
        return {"diverged": run.diverged}
    bound = float(objective.value(run, learned.bind(list(run.start.items())).potential).detach())
    return {"bound": bound / run.steps, "realised": run.regret(run.reference) / run.steps, "steps": run.steps}

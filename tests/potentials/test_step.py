"""One formula of the mirror step, `mirror_step`, and every other spelling of it, held against it in one table."""

import pytest
import torch
from torch import nn

from metamd import Diagonal, Euclidean, MaxDiagonal, MetaMD, NegativeEntropy, PNorm, Potential, Regret, Usage, mirror_step
from metamd.inner.derivatives import Recursion, TakenStep
from metamd.inner.run import MirrorDescent, gradient, run_inner
from metamd.inner.together import run_many
from metamd.learning.usage import run_usage as trial
from metamd.potentials.base import Move
from tests.helpers import random_basis, randomised
from tests.small_tasks import Small

LR, STEPS = 0.3, 8


class Bowl(Small):
    """A convex loss that couples the rows of a weight and a bias, with other targets in every step."""

    def __init__(self, seed=0, steps=STEPS) -> None:
        super().__init__(seed, steps)
        self.a, self.targets = self.normal(6, 4), self.normal(steps, 6, 3)
        self.start = {"w": self.normal(3, 4).softmax(-1), "b": self.normal(3).softmax(-1)}

    def batch(self, step):
        return self.targets[step]

    def loss(self, params, batch):
        return 0.1 * (self.a @ params["w"].mT + params["b"] - batch).square().sum()


def bound(potential):
    return potential.bind(Bowl().init())


def mixture(centre="start", **options):
    return randomised(bound(MaxDiagonal(3, centre=centre, **options)), 5, spread=0.5, offsets=0.3)


GEOMETRIES = {
    "diagonal": bound(randomised(bound(Diagonal()), 1, spread=0.5)),
    "by column": bound(randomised(bound(Diagonal(tying="column")), 2, spread=0.5)),
    "one number each": bound(randomised(bound(Diagonal(tying="tensor")), 3, spread=0.5)),
    "learned basis": random_basis(Bowl().init()),
    "learned basis, rank 2": random_basis(Bowl().init(), rank=2),
    "basis of an old file, both sides": random_basis(Bowl().init(), sides="both", rank=2),
    "mixture": bound(mixture()),
    "mixture around the origin": bound(mixture("origin", tying="channel")),
    "mixture in a learned basis": random_basis(Bowl().init(), pieces=3, centre="origin"),
}
CLASSICAL = {
    "euclidean": Euclidean(),
    "entropy": NegativeEntropy(),
    "entropy of the orthant": NegativeEntropy("orthant"),
    "p-norm": PNorm(1.5),
}
ONE_PIECE = [name for name, phi in GEOMETRIES.items() if phi.pieces == 1]
DIAGONAL_MIXTURES = ["mixture", "mixture around the origin"]


def formula(task, phi):
    """theta_{t+1} = argmin <g_t, theta> + B(theta||theta_t)/lr, again and again."""
    x, active = task.init(), None
    for t in range(STEPS):
        with torch.no_grad():
            step = mirror_step(x, gradient(task, x, task.batch(t))[1], phi, LR, active=active)
        x, active = step.params, step.active
    return x


def argmin(task, phi):
    """The definition itself: Newton's method on phi(theta) - <grad phi(theta_t) - lr g, theta>, by `value` alone."""

    class ValueOnly(Potential):
        def value(self, params):
            return phi.value(params)

    return formula(task, ValueOnly())


def in_place(task, phi):
    x, active = task.init(), None
    for t in range(STEPS):
        moves = {n: Move(g, LR) for n, g in gradient(task, x, task.batch(t))[1].items()}
        with torch.no_grad():
            active = phi.step(x, moves, active=active, into=x).active
    return x


def optimiser(task, phi, **options):
    params = {n: nn.Parameter(x) for n, x in task.init().items()}
    opt = MetaMD(params.items(), phi, lr=LR, **options)
    for t in range(STEPS):
        opt.zero_grad()
        task.loss(params, task.batch(t)).backward()
        opt.step()
    return {n: p.detach() for n, p in params.items()}


def fused(task, phi):
    return optimiser(task, phi, fused=True)


def differentiable(task, phi):
    """The recursion that hypergradients are taken of, along the run that it belongs to."""
    walk = MirrorDescent(task, phi, lr=LR)
    recursion = Recursion(walk, phi, Regret())
    x = task.init()
    for t in range(STEPS):
        loss, grads = gradient(task, x, task.batch(t))
        before = walk.active.weights
        walk.step(loss, grads)
        taken = TakenStep(x, grads, loss, before, walk.active.weights)
        _, outputs = recursion.graph(taken)
        x = {n: outputs[f"params/{n}"].detach() for n in x}
    return x


def side_by_side(task, phi):
    """Many tasks in one pass; the others are different."""
    return run_many([task, *(Bowl(seed) for seed in (1, 2))], phi, lr=LR)[0].end


def inner_run(task, phi):
    return run_inner(task, phi, lr=LR).end


def usage_trial(task, phi):
    return trial(task, phi, Usage(factor=LR)).end


SPELLINGS = {
    argmin: ["diagonal", "learned basis", "euclidean", "entropy of the orthant"],
    in_place: [*GEOMETRIES, *CLASSICAL],
    optimiser: [*GEOMETRIES, *CLASSICAL],
    fused: DIAGONAL_MIXTURES,
    differentiable: list(GEOMETRIES),
    inner_run: list(GEOMETRIES),
    side_by_side: ONE_PIECE,
    usage_trial: list(GEOMETRIES),
}


def check(spelling, geometry, rtol=1e-9):
    phi = {**GEOMETRIES, **CLASSICAL}[geometry]
    torch.testing.assert_close(spelling(Bowl(), phi), formula(Bowl(), phi), rtol=rtol, atol=1e-9)


@pytest.mark.parametrize(
    ("spelling", "geometry"),
    [pytest.param(s, g, id=f"{s.__name__}, {g}") for s, geometries in SPELLINGS.items() for g in geometries],
)
def test_every_spelling_of_the_step_is_the_formula(spelling, geometry):
    check(spelling, geometry)


def papers(task, phi):
    """The paper's step, which is not exact where the active piece changes."""
    return optimiser(task, phi, exact=False)


def roots(task, phi):
    """M for M^2: the step divides by the root of the metric."""
    return formula(task, phi.with_metrics({k: v.detach() / 2 for k, v in phi.log_d.items()}).bind(task.init()))


def stale(task, phi):
    """All gradients are taken at the start."""
    x = task.init()
    for t in range(STEPS):
        with torch.no_grad():
            x = mirror_step(x, gradient(task, task.init(), task.batch(t))[1], phi, LR).params
    return x


@pytest.mark.parametrize(
    ("broken", "geometry"),
    [
        (papers, "mixture"),
        (papers, "mixture around the origin"),
        (roots, "diagonal"),
        (roots, "learned basis"),
        (stale, "diagonal"),
    ],
)
def test_the_table_rejects_broken_doubles(broken, geometry):
    with pytest.raises(AssertionError, match="not close"):
        check(broken, geometry, rtol=1e-4)


@pytest.mark.parametrize("geometry", DIAGONAL_MIXTURES)
def test_the_mixtures_of_the_table_change_their_pieces(geometry):
    run = run_inner(Bowl(), GEOMETRIES[geometry], lr=LR)
    assert run.switches > 0

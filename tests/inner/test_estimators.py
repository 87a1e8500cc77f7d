"""Every estimator against a number known otherwise: differences, the paper's recursion, closed forms, each other."""

import gc
import math

import numpy as np
import pytest
import torch

from metamd import (
    ClosedForm,
    Direct,
    Evolution,
    Forward,
    LogGap,
    MaxDiagonal,
    PaperBound,
    Regret,
    Reverse,
    TrainingLoss,
)
from metamd.inner.derivatives import Recursion, batched, hessian_products
from metamd.inner.objectives import Fixed, FromLipschitz, Reference
from metamd.inner.run import gradient, run_inner
from tests.live_memory import LiveMemory, peak_of
from tests.small_tasks import F64, BecomesNaN, ConvNet, Quadratic, Separable, TanhNet, potential_for

EXACT = {"forward": Forward(), "forward in parts": Forward(tangents=2), "reverse": Reverse(), "full tape": Reverse(1)}

PROBLEMS = {
    "quadratic": (Quadratic(0, 12, wave=0.1), {"pieces": 1}),
    "quadratic, kinks": (Quadratic(0, 12, wave=0.1), {"pieces": 3, "offsets": 0.1}),
    "quadratic, kinks, origin": (
        Quadratic(1, 12, wave=0.1),
        {"pieces": 3, "seed": 2, "spread": 0.7, "centre": "origin", "tying": "tensor"},
    ),
    "tanh network": (TanhNet(0, 12), {"pieces": 2, "tying": "tensor", "offsets": 0.3}),
    "convolution": (ConvNet(0, 6), {"pieces": 1, "tying": "channel"}),
}

OBJECTIVES = {
    "regret": Regret(Reference(lr=0.05), prior=0.1),
    "paper": PaperBound(FromLipschitz(), "exact"),
    "loss": TrainingLoss(),
    "gap": LogGap(0.1),
}


def flat(h):
    return torch.cat([*[g.reshape(-1).double() for g in h.grads.values()], h.offsets])


def relative(a, b):
    return float((a - b).norm() / b.norm())


def differences(task, potential, objective, eps=1e-5, **options):
    """Central differences of the objective through whole runs, with what it holds fixed held fixed."""
    base = run_inner(task, potential, reference=objective.reference, **options)
    held, found = objective.held(base), []
    for leaf in [*potential.log_d.values(), potential.offsets]:
        entries = leaf.data.view(-1)
        for i in range(entries.numel()):
            ends = []
            for step in (eps, -2 * eps):
                entries[i] += step
                run = run_inner(task, potential, reference=base.reference, **options)
                assert run.switches == base.switches
                ends.append(float(held.value(run, potential).detach()))
            entries[i] += eps
            found.append((ends[0] - ends[1]) / (2 * eps))
    return torch.tensor(found, dtype=F64)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_exact_estimators_agree_with_differences(problem, objective):
    task, settings = PROBLEMS[problem]
    phi, e = potential_for(task, **settings), OBJECTIVES[objective]
    expected = differences(task, phi, e, lr=0.8)
    for name, estimator in EXACT.items():
        h = estimator(task, phi, e, lr=0.8)
        assert relative(flat(h), expected) < 1e-6, name
        assert math.isfinite(h.value)
        assert h.cost.hvps > 0


@pytest.mark.parametrize("problem", ["quadratic, kinks", "quadratic, kinks, origin"])
def test_runs_with_kinks_are_among_the_problems(problem):
    task, settings = PROBLEMS[problem]
    run = run_inner(task, potential_for(task, **settings), lr=0.8)
    assert (run.weights.max(1) < 1).any()


def test_weights_held_fixed_on_kinks_are_rejected(monkeypatch):
    """The broken double: no implicit differentiation of w."""
    task, settings = PROBLEMS["quadratic, kinks"]
    phi = potential_for(task, **settings)
    expected = differences(task, phi, TrainingLoss(), lr=0.8)
    monkeypatch.setattr(Recursion, "newton", lambda self, taken: None)
    for estimator in (Forward(), Reverse()):
        assert relative(flat(estimator(task, phi, TrainingLoss(), lr=0.8)), expected) > 1e-3


def test_the_papers_step_is_differentiated_between_its_jumps():
    task = Quadratic(2, 12, wave=0.1)
    phi = potential_for(task, 3, centre="origin")
    expected = differences(task, phi, PaperBound(2.0), lr=0.8, exact=False)
    for estimator in EXACT.values():
        h = estimator(task, phi, PaperBound(2.0), lr=0.8, exact=False)
        assert h.trajectory.switches > 0
        assert relative(flat(h), expected) < 1e-6


def papers_recursion(task, potential, k, lr, factor=2.0):
    """Z_t = A_t Z_{t-1} + B_t with dense Hessians, in M: [GaoMetaMD2022], appendix "Gradient Computation".

    A_t = I - eta M^-2 H_t, B_t = 2 eta g M^-3; then dE/dM = direct + (dB/d theta_T) Z_T, E = B(theta_T||theta_1) + k/min M.
    """
    start = task.init()
    names, shapes = list(start), [x.shape for x in start.values()]

    def unflatten(v):
        parts = v.split([math.prod(s) for s in shapes])
        return {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}

    m = torch.cat([potential.metric(n)[0].detach().reshape(-1) for n in names]).sqrt()
    first = theta = torch.cat([x.reshape(-1) for x in start.values()])
    z = torch.zeros(len(m), len(m), dtype=F64)
    for t in range(task.steps):
        loss = lambda v, t=t: task.loss(unflatten(v), task.batch(t))  # noqa: E731
        g, hessian = torch.func.grad(loss)(theta), torch.func.hessian(loss)(theta)
        z = (torch.eye(len(m), dtype=F64) - lr * hessian / m[:, None] ** 2) @ z + torch.diag(factor * lr * g / m**3)
        theta = theta - lr * g / m**2
    delta = theta - first
    by_m = m * delta**2 + (m**2 * delta) @ z
    by_m[m.argmin()] -= k / m.min() ** 2
    return by_m * m / 2  # by log D = 2 log M


@pytest.mark.parametrize("task", [Quadratic(0, 12, wave=0.1), TanhNet(1, 8, width=3)], ids=["quadratic", "network"])
def test_exact_estimators_agree_with_the_papers_recursion(task):
    phi = potential_for(task)
    expected = papers_recursion(task, phi, 3.0, 0.5)
    for estimator in (Forward(), Reverse()):
        found = torch.cat([g.reshape(-1) for g in estimator(task, phi, PaperBound(3.0), lr=0.5).grads.values()])
        assert relative(found, expected) < 1e-9
    assert relative(found, papers_recursion(task, phi, 3.0, 0.5, factor=1.0)) > 1e-2


def test_direct_is_what_remains_without_the_indirect_part():
    task = Quadratic(0, 12)
    phi = potential_for(task)
    run = run_inner(task, phi, lr=0.5)
    d = {n: phi.metric(n)[0].detach() for n in run.start}
    h = Direct()(task, phi, Regret(), lr=0.5)
    for n in d:
        delta, squares = run.end[n] - run.start[n], run.squares[n]
        assert torch.allclose(h.grads[n][0], d[n] * delta**2 / (2 * 0.5) - 0.25 * squares / d[n])
    assert relative(flat(Forward()(task, phi, Regret(), lr=0.5)), flat(h)) > 1e-3
    assert float(flat(Direct()(task, phi, TrainingLoss(), lr=0.5)).abs().sum()) == 0


# evolution strategies


def test_evolution_is_unbiased():
    """A mean of 60 estimates is within 4 standard errors in every one of 5 entries: a false alarm once in 1,500 seeds."""
    estimator = Evolution(pairs=2, sigma=1e-3)
    task = Quadratic(3, 8, wave=0.1)
    phi, g = potential_for(task), torch.Generator().manual_seed(0)
    exact = flat(Forward()(task, phi, TrainingLoss(), lr=0.8))[:5]
    draws = torch.stack([flat(estimator(task, phi, TrainingLoss(), lr=0.8, generator=g))[:5] for _ in range(60)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert bool(((draws.mean(0) - exact).abs() <= 4 * error + 1e-9).all())
    # twice the gradient would not pass
    assert not bool(((2 * draws.mean(0) - exact).abs() <= 4 * 2 * error + 1e-9).all())


def test_randomness_is_an_argument():
    estimator = Evolution()
    task = Quadratic(0, 4)
    phi = potential_for(task)
    with pytest.raises(ValueError, match="needs a generator"):
        estimator(task, phi, Regret(), lr=0.5)
    twice = [flat(estimator(task, phi, Regret(), lr=0.5, generator=torch.Generator().manual_seed(1))) for _ in range(2)]
    assert torch.equal(*twice)


# all of them

ESTIMATORS = [ClosedForm(), Direct(), Forward(), Reverse(), Evolution(2)]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_a_run_that_diverges_is_reported_and_gives_nothing(estimator):
    task = BecomesNaN(3, steps=6)
    h = estimator(task, potential_for(task, log=3.0), Regret(), generator=torch.Generator())
    assert "nan" in h.diverged
    assert h.value == math.inf
    assert float(flat(h).abs().sum()) == 0


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_records_have_the_run_its_value_and_cost(estimator):
    task = Quadratic(0, 6)
    phi = potential_for(task)
    h = estimator(task, phi, Regret(), lr=0.5, generator=torch.Generator())
    assert h.value == pytest.approx(float(Regret().value(run_inner(task, phi, lr=0.5), phi).detach()), rel=1e-12)
    assert h.cost.gradients >= 6
    assert h.cost.seconds > 0
    assert h.trajectory.switches == 0
    assert {k: g.shape for k, g in h.grads.items()} == {k: v.shape for k, v in phi.log_d.items()}
    assert all(v.grad is None for v in phi.log_d.values())


@pytest.mark.parametrize("estimator", [Forward(), Reverse()], ids=lambda e: type(e).__name__)
def test_an_unbound_potential_is_bound(estimator):
    assert set(estimator(Quadratic(0, 3), MaxDiagonal(2), TrainingLoss(), lr=0.1).grads) == {"a", "b"}


def test_single_precision_follows_the_task():
    task = TanhNet(0, 6, dtype=torch.float32)
    phi = potential_for(task, 2, tying="tensor")
    found = [flat(e(task, phi, Regret(Reference(lr=0.05)), lr=0.3)) for e in (Forward(), Reverse())]
    assert relative(*found) < 1e-4
    assert phi.log_d["0.weight"].dtype == torch.float32


def test_bad_estimators_are_refused():
    for wrong in (
        lambda: Forward(0),
        lambda: Reverse(0),
        lambda: Evolution(0),
        lambda: Evolution(1, 0),
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong()


def test_a_fixed_comparator_does_not_follow_the_run():
    task = Quadratic(0, 12, wave=0.1)
    phi, u = potential_for(task), Fixed(task.solution())
    expected = differences(task, phi, Regret(u), lr=0.8)
    assert relative(flat(Reverse()(task, phi, Regret(u), lr=0.8)), expected) < 1e-6


@pytest.mark.parametrize("task", [Quadratic(0, 12, wave=0.1), TanhNet(0, 7), ConvNet()], ids=["quadratic", "tanh", "conv"])
def test_products_in_turn_are_those_of_all_at_once(task):
    g = torch.Generator().manual_seed(0)
    leaves = {n: x.detach().requires_grad_() for n, x in task.init().items()}
    z = {n: torch.randn(3, *x.shape, generator=g, dtype=F64) for n, x in leaves.items()}
    _, grads = gradient(task, leaves, task.batch(0), graph=True)
    together = {n: x.clone() for n, x in batched({n: 1 * y for n, y in grads.items()}, leaves, z).items()}
    _, grads = gradient(task, leaves, task.batch(0), graph=True)
    apart = batched(grads, leaves, z, in_turn=True)
    assert all(torch.allclose(apart[n], together[n], rtol=1e-10, atol=1e-12) for n in leaves)


def test_batch_norm_is_differentiated_right():
    # Forward over forward is silently wrong through batch norm: the product must agree with differences of gradients.
    task = ConvNet()
    point = task.init()
    g = torch.Generator().manual_seed(0)
    z = {n: torch.randn(2, *x.shape, generator=g, dtype=F64) for n, x in point.items()}
    _, _, products = hessian_products(task, point, None, z)
    for i in range(2):
        ends = [gradient(task, {n: x + s * 1e-5 * z[n][i] for n, x in point.items()}, None)[1] for s in (1, -1)]
        for n in point:
            assert np.allclose(products[n][i], (ends[0][n] - ends[1][n]) / 2e-5, atol=1e-7)


# peak memory in live tensors: flat in the number of steps going forwards, its square root going back


def peak(estimator, steps, size=2):
    """Bytes beyond the record of the losses, 8 for every step."""
    task = Separable(0, steps, curvatures=(1.0, 2.0) * (size // 2))
    phi = potential_for(task, log=3.0, spread=0.1)
    return peak_of(lambda: estimator(task, phi, Regret(), generator=torch.Generator())) - 8 * steps


def is_flat(estimator, lengths):
    peaks = [peak(estimator, steps) for steps in lengths]
    return max(peaks) <= 1.02 * min(peaks)


def test_live_memory_counts_what_is_alive():
    def compute():
        first = [torch.ones(1000) for _ in range(10)]
        del first
        return [torch.ones(1000) for _ in range(5)]

    assert peak_of(compute) == 40_000


def test_direct_is_flat_in_the_number_of_steps():
    assert is_flat(Direct(), (50, 500))


def test_forward_is_flat_over_thousands_of_steps():
    assert is_flat(Forward(), (50, 500, 5000))


def test_a_tape_is_not_flat():
    assert not is_flat(Reverse(checkpoints=1), (50, 100))


def growth(estimator):
    """How the peak grows with the number of steps: 2 if like its root, 4 if in proportion."""
    first, second, third = (peak(estimator, steps, size=64) for steps in (64, 256, 1024))
    return (third - second) / (second - first)


def test_reverse_grows_like_the_square_root():
    assert growth(Reverse()) == pytest.approx(2.0, rel=0.1)
    assert growth(Reverse(checkpoints=1)) == pytest.approx(4.0, rel=0.1)


def left_alive(estimator, lr):
    """Bytes that are still alive after a run, without help of the garbage collector."""
    task = Separable(0, 60, curvatures=(1.0, 2.0) * 500)
    phi = potential_for(task, log=3.0, spread=0.1)
    gc.collect()
    gc.disable()
    try:
        with LiveMemory() as memory:
            found = estimator(task, phi, Regret(), lr=lr)
            diverged = bool(found.diverged)
            del found
        return memory.live, diverged
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpoints", [1, 5])
@pytest.mark.parametrize("lr", [1.0, 100.0], ids=["finished", "diverged"])
def test_no_tape_outlives_its_run(checkpoints, lr):
    live, diverged = left_alive(Reverse(checkpoints), lr)
    assert diverged == (lr > 1)
    assert live < 20 * 8000, "a thousand numbers a step, for sixty steps"

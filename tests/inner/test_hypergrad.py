"""Every estimator against a number known otherwise: differences, the paper's recursion, closed forms, each other."""

import math

import numpy as np
import pytest
import torch

from metamd import (
    ClosedForm,
    Diagonal,
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
from metamd.inner.estimators.step import Recursion
from metamd.inner.objectives import Fixed, FromLipschitz, Reference
from metamd.inner.run import gradient, run_inner
from metamd.inner.sums import moments_of
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
    monkeypatch.setattr(Recursion, "newton", lambda self, passage: None)
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


# the closed form


@pytest.mark.parametrize("tying", ["parameter", "channel", "column", "tensor", "role"])
@pytest.mark.parametrize("objective", [Regret(), Regret(prior=0.2), Regret(Reference(lr=0.05))], ids=["end", "prior", "ref"])
def test_the_closed_form_is_stationary(tying, objective):
    tasks = [TanhNet(seed, 10) for seed in range(3)]
    phi = potential_for(tasks[0], tying=tying, log=2.0)
    runs = [run_inner(t, phi, lr=0.5, reference=objective.reference) for t in tasks]

    def slope(log_d):
        there = phi.with_metrics(log_d).bind(tasks[0].init())
        value = torch.stack([objective.value(r, there) for r in runs]).mean()
        by = torch.autograd.grad(value, list(there.log_d.values()))
        return float(torch.cat([g.reshape(-1) for g in by]).norm() / value.detach())

    best = ClosedForm().minimise(runs, phi, objective)
    assert slope(best) < 1e-12
    assert slope({k: v + 0.1 for k, v in best.items()}) > 1e-3


def test_the_closed_form_is_the_formula():
    tasks = [TanhNet(seed, 10) for seed in range(3)]
    phi = potential_for(tasks[0], log=2.0)
    runs = [run_inner(t, phi, lr=0.5) for t in tasks]
    best = ClosedForm().minimise(runs, phi, Regret())
    for n in phi.slots:
        y = sum(r.squares[n] for r in runs)
        x = sum((r.end[n] - r.start[n]) ** 2 for r in runs)
        assert torch.allclose(best[n][0].exp(), 0.5 * (y / x).sqrt())


def test_the_closed_form_finds_newtons_metric():
    """On a separable quadratic with c = eta a / D the round is c -> sqrt(c (2 - c)) once runs are long: c = 1, D = eta a."""
    task = Separable(0, 400, curvatures=(0.3, 14.0, 2.0))
    lr, c = 0.5, torch.tensor([0.6, 1.7, 0.9], dtype=F64)
    phi = Diagonal().bind(task.init()).with_metrics({"x": (lr * task.a / c).log().unsqueeze(0)}).bind(task.init())
    for _ in range(6):
        phi = phi.with_metrics(ClosedForm().minimise([run_inner(task, phi, lr=lr)], phi, Regret())).bind(task.init())
        c = (c * (2 - c)).sqrt()
        assert torch.allclose(lr * task.a / phi.metric("x")[0].detach(), c, atol=1e-8)
    assert torch.allclose(c, torch.ones(3, dtype=F64), atol=1e-8)


def test_the_closed_form_keeps_metrics_that_runs_say_nothing_about():
    class Idle(Separable):
        def init(self):
            return {**super().init(), "idle": torch.ones(2, dtype=F64)}

    task = Idle(0, 5)
    phi = potential_for(task, log=3.0)
    best = ClosedForm().minimise([run_inner(task, phi)], phi, Regret())
    assert torch.equal(best["idle"], phi.log_d["idle"])
    prior = ClosedForm().minimise([run_inner(task, phi)], phi, Regret(prior=0.1))
    assert torch.equal(prior["idle"], phi.log_d["idle"])


def test_the_closed_form_weighs_runs_and_leaves_out_those_that_diverged():
    good, bad = Separable(0, 30), BecomesNaN(3, seed=1, steps=30)
    phi = potential_for(good, log=3.0)
    runs = [run_inner(t, phi) for t in (good, Separable(2, 30), bad)]
    both = ClosedForm().minimise(runs, phi, Regret())
    assert torch.equal(both["x"], ClosedForm().minimise(runs[:2], phi, Regret())["x"])
    one = ClosedForm().minimise(runs, phi, Regret(), weights=[1.0, 0.0, 5.0])
    assert torch.allclose(one["x"], ClosedForm().minimise(runs[:1], phi, Regret())["x"])
    with pytest.raises(ValueError, match="diverged"):
        ClosedForm().minimise(runs[2:], phi, Regret())
    with pytest.raises(ValueError, match="one weight for every run"):
        ClosedForm().minimise(runs, phi, Regret(), weights=[1.0])


def test_moments_carry_the_objective():
    task = TanhNet(0, 10)
    phi = potential_for(task, tying="role")
    run = run_inner(task, phi, lr=0.5)
    objective = Regret(prior=0.3)
    m = moments_of(run, phi, objective)
    value = sum(0.5 * (phi.log_d[k].detach().exp() * m.x[k] + m.y[k] / phi.log_d[k].detach().exp()).sum() for k in m.x)
    assert float(value) == pytest.approx(float(objective.value(run, phi).detach()))


def test_the_closed_form_refuses_what_it_cannot_minimise():
    task = Quadratic(0, 4)
    with pytest.raises(ValueError, match="one piece"):
        ClosedForm()(task, potential_for(task, 3), Regret())
    with pytest.raises(ValueError, match="minimises Regret"):
        ClosedForm()(task, potential_for(task), TrainingLoss())


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
    from metamd.inner.estimators.forward import batched

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
    from metamd.inner.estimators.forward import hessian_products

    task = ConvNet()
    point = task.init()
    g = torch.Generator().manual_seed(0)
    z = {n: torch.randn(2, *x.shape, generator=g, dtype=F64) for n, x in point.items()}
    _, _, products = hessian_products(task, point, None, z)
    for i in range(2):
        ends = [gradient(task, {n: x + s * 1e-5 * z[n][i] for n, x in point.items()}, None)[1] for s in (1, -1)]
        for n in point:
            assert np.allclose(products[n][i], (ends[0][n] - ends[1][n]) / 2e-5, atol=1e-7)

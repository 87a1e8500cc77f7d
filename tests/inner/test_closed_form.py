"""The closed form: of diagonals against its formula and fixed point, of matrices against sixty digits, and its choices."""

import itertools

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from metamd import ClosedForm, Diagonal, Kronecker, Regret, TrainingLoss
from metamd.files.learned import Moments
from metamd.inner.closed_form import (
    LARGEST_RANK,
    FullMetric,
    Iterate,
    _raised,
    best_metric,
    best_shares,
    learn_factors,
    matrix_geometric_mean,
    moments_of,
    root,
    towards,
)
from metamd.inner.objectives import Reference
from metamd.inner.run import run_inner
from tests.helpers import closed_form, random_basis
from tests.small_tasks import F64, Quadratic, Regression, Separable, TanhNet, potential_for

# diagonals


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

    best = closed_form(runs, phi, objective)
    assert slope(best) < 1e-12
    assert slope({k: v + 0.1 for k, v in best.items()}) > 1e-3


def test_the_closed_form_is_the_formula():
    tasks = [TanhNet(seed, 10) for seed in range(3)]
    phi = potential_for(tasks[0], log=2.0)
    runs = [run_inner(t, phi, lr=0.5) for t in tasks]
    best = closed_form(runs, phi, Regret())
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
        phi = phi.with_metrics(closed_form([run_inner(task, phi, lr=lr)], phi, Regret())).bind(task.init())
        c = (c * (2 - c)).sqrt()
        assert torch.allclose(lr * task.a / phi.metric("x")[0].detach(), c, atol=1e-8)
    assert torch.allclose(c, torch.ones(3, dtype=F64), atol=1e-8)


def test_the_closed_form_keeps_metrics_that_runs_say_nothing_about():
    class Idle(Separable):
        def init(self):
            return {**super().init(), "idle": torch.ones(2, dtype=F64)}

    task = Idle(0, 5)
    phi = potential_for(task, log=3.0)
    best = closed_form([run_inner(task, phi)], phi, Regret())
    assert torch.equal(best["idle"], phi.log_d["idle"])
    prior = closed_form([run_inner(task, phi)], phi, Regret(prior=0.1))
    assert torch.equal(prior["idle"], phi.log_d["idle"])


def test_the_closed_form_weighs_runs():
    good = Separable(0, 30)
    phi = potential_for(good, log=3.0)
    runs = [run_inner(t, phi) for t in (good, Separable(2, 30))]
    one = closed_form(runs, phi, Regret(), weights=[1.0, 0.0])
    assert torch.allclose(one["x"], closed_form(runs[:1], phi, Regret())["x"])


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


# matrices


def spd(n: int, seed: int, condition: float = 1e2) -> Tensor:
    """A random positive definite matrix."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=F64))
    return (q * torch.logspace(0, -np.log10(condition), n, dtype=F64)) @ q.T


def bound_of(d: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.trace(d @ x) + torch.trace(torch.linalg.solve(d, y))


@pytest.mark.parametrize("condition", [1e2, 1e6])
@pytest.mark.parametrize("n", [1, 4, 12])
def test_the_closed_form_is_the_geometric_mean_of_the_textbook(n, condition):
    x, y = spd(n, 1, condition), spd(n, 2, condition)
    root = scipy.linalg.sqrtm(x.numpy()).real
    back = np.linalg.inv(root)
    expected = back @ scipy.linalg.sqrtm(root @ y.numpy() @ root).real @ back
    assert np.allclose(best_metric(x, y), expected, rtol=1e-6 * np.sqrt(condition), atol=0)
    assert torch.allclose(matrix_geometric_mean(torch.linalg.inv(x), y), best_metric(x, y), rtol=1e-6 * np.sqrt(condition))


def test_the_closed_form_of_ill_conditioned_and_rank_deficient_matrices():
    x, y = spd(8, 1, 1e12), spd(8, 2, 1e12)
    d = best_metric(x, y)
    assert float((d @ x @ d - y).norm() / y.norm()) < 1e-8
    assert float(torch.linalg.eigvalsh(d).min()) > 0
    thin = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    d = best_metric(x + 1e-6 * torch.eye(8), thin @ thin.T)
    assert bool(d.isfinite().all())
    assert float((d @ (x + 1e-6 * torch.eye(8)) @ d - thin @ thin.T).norm()) < 1e-6


def to_sixty_digits(x: Tensor, y: Tensor) -> mpmath.matrix:
    """X^-1 # Y by its definition, with roots from eigenvalues of 60 digits."""

    def exact_root(a: mpmath.matrix) -> mpmath.matrix:
        values, vectors = mpmath.eigsy(a)
        return vectors * mpmath.diag([mpmath.sqrt(v) for v in values]) * vectors.T

    half = exact_root(mpmath.matrix(x.tolist()))
    back = mpmath.inverse(half)
    return back * exact_root(half * mpmath.matrix(y.tolist()) * half) * back


@pytest.mark.parametrize(("condition", "close"), [(1e2, 1e-12), (1e6, 1e-8), (1e12, 2e-2)])
def test_the_closed_form_to_sixty_digits(condition, close):
    x, y = spd(6, 1, condition), spd(6, 2, condition)
    deficient = torch.ones(6, 1, dtype=F64) @ torch.ones(1, 6, dtype=F64)
    raised = _raised(deficient, 1 / condition)
    with mpmath.workdps(60):
        for one, other in ((x, y), (raised, y), (x, raised)):
            exact = torch.tensor([[float(v) for v in row] for row in to_sixty_digits(one, other).tolist()], dtype=F64)
            apart = lambda d, exact=exact: float((d - exact).norm() / exact.norm())  # noqa: E731
            assert apart(best_metric(one, other)) < close
            assert apart(torch.linalg.inv(one) @ root(other)) > close, "the law sees a metric that is not the mean"


def test_nothing_near_the_closed_form_is_better_and_its_gradient_is_zero():
    x, y = spd(6, 3), spd(6, 4)

    def gradient_is_zero(d: Tensor) -> bool:
        root = torch.linalg.cholesky(d).requires_grad_()
        value = bound_of(root @ root.T, x, y)
        (slope,) = torch.autograd.grad(value, root)
        return float(slope.tril().abs().max()) < 1e-8 * float(value.detach())

    def descent_gains(d: Tensor) -> float:
        root = torch.linalg.cholesky(d).requires_grad_()
        optimiser = torch.optim.Adam([root], lr=1e-3)
        for _ in range(300):
            optimiser.zero_grad()
            bound_of(root.tril() @ root.tril().T, x, y).backward()
            optimiser.step()
        after = root.detach().tril()
        return 1 - float(bound_of(after @ after.T, x, y)) / float(bound_of(d, x, y))

    assert gradient_is_zero(best_metric(x, y))
    assert descent_gains(best_metric(x, y)) < 1e-6
    for broken in (matrix_geometric_mean(x, y), 0.5 * (torch.linalg.inv(x) + y)):
        assert not gradient_is_zero(broken)
        assert descent_gains(broken) > 1e-3


def test_a_step_towards_a_metric_is_limited_in_every_direction():
    now, best = spd(5, 1), spd(5, 2)
    d, vectors = torch.linalg.eigh(now)
    far, _ = towards(FullMetric(vectors, d), best, 100.0)
    assert torch.allclose(far.matrix, best)
    near, change = towards(FullMetric(vectors, d), best, 0.3)
    ratios = torch.from_numpy(scipy.linalg.eigh(near.matrix.numpy(), now.numpy(), eigvals_only=True))
    assert float(ratios.log().abs().max()) <= 0.3 + 1e-9
    assert change == pytest.approx(float(ratios.log().square().mean().sqrt()), rel=1e-9)


def learned_of(y, rank, share=1e-9):
    """The basis and the bound from X = 1 and Y with these eigenvalues in random directions, and those directions."""
    n = len(y)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=F64))
    now = Iterate.of(Kronecker(rank=rank, shrinkage=(share, share)).bind({"w": torch.zeros(2, n)}))
    moments = Moments({"right/w": torch.eye(n, dtype=F64)}, {"right/w": (q * y) @ q.T})
    found = learn_factors(now, moments, 100.0)
    return found.basis.factors["right/w"].double(), found.after, q


def test_the_automatic_rank_keeps_as_few_leading_directions_as_lose_a_twentieth_of_the_bound():
    leading = torch.ones(60, dtype=F64)
    leading[:5] = torch.tensor([100.0, 90.0, 80.0, 1e-4, 70.0])  # short steps, and one that is long
    columns, bound, q = learned_of(leading, "auto")
    best = learned_of(leading, None)[1]
    assert best == pytest.approx(float(leading.sqrt().sum()))
    assert columns.shape == (60, 4), "the long one shares the number of the rest at next to no cost"
    kept = q[:, [0, 1, 2, 4]]
    assert (columns.T @ kept).square().sum() == pytest.approx(4, abs=1e-5)
    assert bound <= 1.05 * best
    assert learned_of(leading, 3)[1] > 1.05 * best


def test_the_automatic_rank_stops_at_its_largest():
    spread = torch.logspace(0, 3, 120, dtype=F64)
    columns, bound, q = learned_of(spread, "auto")
    best = learned_of(spread, None)[1]
    assert columns.shape == (120, LARGEST_RANK)
    assert LARGEST_RANK == 24
    assert bound > 1.05 * best, "24 were enough: the limit was not met"
    top = (q[:, -LARGEST_RANK // 2 :].T @ columns).square().sum()
    assert top == pytest.approx(LARGEST_RANK / 2, abs=1e-5), "the steepest half of them leads"


def samples(runs: int = 3, steps: int = 20, lr: float = 0.3) -> list[tuple[Tensor, list[Tensor]]]:
    """Displacements and gradients of plain runs: all that the bound depends on."""
    found = []
    for seed in range(runs):
        task, grads = Regression(seed, steps), []
        params = task.init()
        for t in range(steps):
            leaves = {n: x.detach().requires_grad_() for n, x in params.items()}
            got = torch.autograd.grad(task.loss(leaves, task.batch(t)), list(leaves.values()))
            params = {n: x.detach() - lr * g for (n, x), g in zip(leaves.items(), got, strict=True)}
            grads.append(got[0])
        found.append((params["fc.weight"] - task.init()["fc.weight"], grads))
    return found


def dense_right(now: Iterate) -> Tensor:
    """R of the weight of a `Regression`, of phi(W) = 1/2 tr(W R W')."""
    v, logs = now.basis.factors.get("right/fc.weight", torch.eye(5)).double(), now.log_d["fc.weight"][0].double()
    return (v * logs.exp()) @ v.T


def regret_bound(right: Tensor, lr: float, data) -> float:
    """The bound of one tensor from its definition, summed over runs."""
    moved = sum(float(torch.trace(delta @ right @ delta.T)) for delta, _ in data)
    spent = sum(float(torch.trace(g @ torch.linalg.inv(right) @ g.T)) for _, grads in data for g in grads)
    return 0.5 * (moved / lr + lr * spent)


def test_the_moments_of_runs_are_their_sums_of_products_and_no_step_increases_the_bound():
    lr, data = 0.3, samples()
    now = Iterate.of(Kronecker(shrinkage=(1e-9, 1e-9)).bind(Regression().init()))
    values = []
    for _ in range(4):
        phi = now.apply(Kronecker()).bind(Regression().init())
        values.append(regret_bound(dense_right(now), lr, data))
        x = {"right/fc.weight": sum(d.T @ d for d, _ in data) / lr}
        y = {"right/fc.weight": lr * sum(g.T @ g for _, grads in data for g in grads)}
        if not values[1:]:  # the runs were made with D = 1
            parts = [moments_of(run_inner(Regression(s, 20), phi, lr=lr, products=True), phi, Regret()) for s in range(3)]
            found = Moments.total(parts, [1.0] * 3)
            assert all(torch.allclose(found.x[k], x[k]) and torch.allclose(found.y[k], y[k]) for k in x)
        turned_now = learn_factors(now, Moments(x, y), 100.0)
        now = now.moved(dict(now.log_d) | turned_now.log_d, basis=turned_now.basis)
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(values)), values
    assert values[-1] < 0.9 * values[0]


def test_automatic_shrinkage_is_the_best_on_tasks_not_learned_from():
    """With few samples it shrinks more, and what it takes is better on the truth than the least of its candidates."""
    generator = torch.Generator().manual_seed(0)
    truth, shares = (spd(8, 1), spd(8, 2)), {}
    roots = [torch.linalg.cholesky(m) for m in truth]

    def sample(n: int, root: Tensor) -> Tensor:
        rows = root @ torch.randn(8, n, generator=generator, dtype=F64)
        return rows @ rows.T / n

    for n in (6, 4000):
        halves = [[sample(n, root) for root in roots] for _ in range(2)]
        x, y = (a + b for a, b in zip(*halves, strict=True))
        shares[n] = best_shares(x, y, *halves[0])
        raised = [
            [m + s * m.diagonal().mean() * torch.eye(8) for m, s in zip((x, y), pair, strict=True)]
            for pair in (shares[n], (0.01, 1e-4))
        ]
        found, least = (float(bound_of(best_metric(*pair), *truth)) for pair in raised)
        assert found <= least
    assert shares[6][0] > shares[4000][0] == 0.01
    assert best_shares(x, y, x, y) == (0.1, 0.001), "without another half there is nothing to compare with"


def test_the_middle_of_two_metrics_in_different_bases_is_their_geometric_mean():
    start = Regression().init()
    a, b = (Iterate.of(random_basis(start, seed=seed)) for seed in (1, 2))
    first, second, middle = (dense_right(i) for i in (a, b, a.halfway(b)))
    assert torch.allclose(middle, matrix_geometric_mean(first, second), rtol=1e-5)
    bias = [float(i.log_d["fc.bias"]) for i in (a, b, a.halfway(b))]
    assert bias[2] == pytest.approx((bias[0] + bias[1]) / 2)

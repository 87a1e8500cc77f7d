"""Laws over the catalogue of potentials, each shown to reject a broken double."""

import numpy as np
import pytest
import torch

import metamd
from metamd.potentials import Diagonal, Euclidean, MaxDiagonal, NegativeEntropy, PNorm, Potential, bregman
from tests.helpers import (
    POTENTIALS,
    SHAPES,
    MaxOfDivergences,
    NotConvex,
    ValueOnly,
    WrongMirror,
    broken_max,
    diagonals,
    normal_point,
    positive_point,
    simplex_point,
)

catalogue = pytest.mark.parametrize("name", POTENTIALS)


def close(a, b, tolerance=1e-10):
    return all(torch.allclose(a[n], b[n], rtol=tolerance, atol=tolerance) for n in a)


def inner(y, x):
    return sum((y[n] * x[n]).sum() for n in x)


def mirror_is_the_gradient(potential, point):
    leaves = {n: x.clone().requires_grad_() for n, x in point.items()}
    grads = torch.autograd.grad(potential.value(leaves), list(leaves.values()))
    return close(potential.mirror(point), dict(zip(leaves, grads, strict=True)))


def inverse_undoes_mirror(potential, point):
    tolerance = 1e-7 if type(potential).inverse is Potential.inverse else 1e-10
    return close(potential.inverse(potential.mirror(point), point), point, tolerance)


def divergence_is_its_definition(potential, u, v):
    direct = potential.value(u) - potential.value(v) - inner(potential.mirror(v), {n: u[n] - v[n] for n in u})
    return torch.allclose(potential.divergence(u, v), direct.to(torch.float64), rtol=1e-8, atol=1e-9)


def divergence_is_positive(potential, points):
    apart = all(potential.divergence(u, v) > 0 for u, v in zip(points[1:], points, strict=False))
    same = all(abs(potential.divergence(u, u)) < 1e-12 for u in points)
    return apart and same


def three_points(potential, u, v, w):
    """B(u||w) = B(u||v) + B(v||w) + <grad phi(v) - grad phi(w), u - v>."""
    right = potential.divergence(u, v) + potential.divergence(v, w)
    right = right + inner(
        {n: y - potential.mirror(w)[n] for n, y in potential.mirror(v).items()}, {n: u[n] - v[n] for n in u}
    )
    return torch.allclose(potential.divergence(u, w), right, rtol=1e-8, atol=1e-9)


@catalogue
def test_mirror_is_the_gradient_of_the_value(name):
    potential, point = POTENTIALS[name]
    assert all(mirror_is_the_gradient(potential, point(seed)) for seed in range(5))


@catalogue
def test_inverse_undoes_mirror(name):
    potential, point = POTENTIALS[name]
    assert all(inverse_undoes_mirror(potential, point(seed)) for seed in range(5))


@catalogue
def test_divergence(name):
    potential, point = POTENTIALS[name]
    points = [point(seed) for seed in range(5)]
    assert all(divergence_is_its_definition(potential, u, v) for u, v in zip(points[1:], points, strict=False))
    assert divergence_is_positive(potential, points)
    assert three_points(potential, *points[:3])


@catalogue
def test_strong_convexity_constant_is_valid(name):
    """phi(u) - phi(v) - <mirror v, u - v> >= lambda/2 |u - v|^2 in the norm that the potential names."""
    potential, point = POTENTIALS[name]
    claim = potential.strong_convexity()
    for seed in range(5):
        u, v = point(seed), point(seed + 50)
        norms = {
            "l2": lambda x: torch.sqrt(sum((t * t).sum() for t in x.values())),
            "l1": lambda x: sum(t.abs().sum() for t in x.values()),
            "l1 of each row": lambda x: torch.sqrt(sum((t.abs().sum(-1) ** 2).sum() for t in x.values())),
            "l1.2 of each tensor": lambda x: torch.sqrt(sum(torch.linalg.vector_norm(t, 1.2) ** 2 for t in x.values())),
            "l2 of each tensor": lambda x: torch.sqrt(sum((t * t).sum() for t in x.values())),
        }
        distance = norms[claim.norm]({n: u[n] - v[n] for n in u})
        assert potential.divergence(u, v) >= claim.constant / 2 * distance**2 - 1e-12


def test_strong_convexity_of_one_piece_is_attained():
    """lambda is the smallest D, not the smallest M = sqrt(D): with min M the inequality fails (the paper's slip)."""
    phi = Diagonal(centre="origin").bind({"x": torch.zeros(2, dtype=torch.float64)})
    phi = phi.with_metrics({"x": torch.log(torch.tensor([[0.01, 4.0]], dtype=torch.float64))}).bind({"x": torch.zeros(2)})
    u, v = {"x": torch.tensor([1.0, 0.0], dtype=torch.float64)}, {"x": torch.zeros(2, dtype=torch.float64)}
    constant = phi.strong_convexity().constant
    distance = phi.divergence(u, v).item()
    assert distance == pytest.approx(constant / 2)
    assert distance < np.sqrt(constant) / 2


def test_laws_reject_broken_doubles():
    u, v, w = (normal_point(seed) for seed in range(3))
    assert not mirror_is_the_gradient(WrongMirror(), u)
    assert not inverse_undoes_mirror(WrongMirror(), u)
    assert not three_points(WrongMirror(), u, v, w)
    assert not divergence_is_positive(NotConvex(), [u, v, w])
    wrong = broken_max(MaxOfDivergences)
    assert not all(divergence_is_its_definition(wrong, normal_point(s), normal_point(s + 1)) for s in range(10))
    assert not all(three_points(wrong, normal_point(s), normal_point(s + 1), normal_point(s + 2)) for s in range(10))


def test_value_only_inverse_agrees_with_the_closed_forms():
    """The general mirror loop, given nothing but the value, finds what the closed forms find."""
    for potential, point in (
        (Euclidean(), normal_point),
        (NegativeEntropy("orthant"), positive_point),
        (PNorm(1.5), normal_point),
        (diagonals(1), normal_point),
    ):
        for seed in range(3):
            y = potential.mirror(point(seed))
            assert close(Potential.inverse(potential, y, point(seed + 20)), potential.inverse(y), 1e-6)
            assert close(Potential.mirror(potential, point(seed)), y)


def test_value_only_step_holds_what_has_no_gradient():
    x = normal_point(0)
    step = metamd.mirror_step(x, {"a.weight": torch.ones(4, 3, dtype=torch.float64)}, ValueOnly(), lr=0.1)
    assert all(torch.equal(step.params[n], x[n]) for n in SHAPES if n != "a.weight")
    free = step.params["a.weight"].clone().requires_grad_()
    # Stationary in what is free: grad phi(theta+) = grad phi(theta) - lr g.
    (gradient,) = torch.autograd.grad(ValueOnly().value({**step.params, "a.weight": free}), free)
    assert torch.allclose(gradient, ValueOnly().mirror(x)["a.weight"] - 0.1, atol=1e-8)


def test_newton_refuses_a_start_outside_the_domain_and_a_concave_value():
    class Log(Potential):
        def value(self, params):
            return -params["x"].log().sum()

    class Concave(Potential):
        def value(self, params):
            return -(params["x"] ** 2).sum()

    with pytest.raises(ArithmeticError, match="not finite at the starting point"):
        Log().inverse({"x": -torch.ones(2)}, {"x": -torch.ones(2)})
    with pytest.raises(ArithmeticError, match="did not converge"):
        Concave().inverse({"x": torch.ones(2, dtype=torch.float64)}, {"x": torch.ones(2, dtype=torch.float64)})
    x = {"x": torch.tensor([0.5, 2.0], dtype=torch.float64)}
    assert close(Log().inverse(Log().mirror(x), {"x": torch.ones(2, dtype=torch.float64)}), x, 1e-7)


def test_entropy_is_exponentiated_gradient():
    p, g = simplex_point(0), simplex_point(1)
    stepped = metamd.mirror_step(p, g, NegativeEntropy(), lr=0.3).params
    for n in p:
        raised = p[n] * torch.exp(-0.3 * g[n])
        assert torch.allclose(stepped[n], raised / raised.sum(-1, keepdim=True), rtol=1e-12)
    q = positive_point(0)
    stepped = metamd.mirror_step(q, normal_point(1), NegativeEntropy("orthant"), lr=0.3).params
    assert all(torch.allclose(stepped[n], q[n] * torch.exp(-0.3 * normal_point(1)[n])) for n in q)


def test_entropy_keeps_zeros_and_does_not_overflow():
    p = {"p": torch.tensor([0.0, 0.5, 0.5])}
    stepped = metamd.mirror_step(p, {"p": torch.tensor([-1e4, 1e4, -1e4])}, NegativeEntropy(), lr=1.0).params["p"]
    assert torch.equal(stepped, torch.tensor([0.0, 0.0, 1.0]))


def test_p_norm_map_at_extremes():
    for scale in (1e-30, 1.0, 1e30):
        x = {"x": scale * torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)}
        back = PNorm(1.1).inverse(PNorm(1.1).mirror(x))["x"]
        assert torch.allclose(back, x["x"], rtol=1e-9, atol=0)
    assert torch.equal(PNorm(1.5).mirror({"x": torch.zeros(3)})["x"], torch.zeros(3))


def test_domain_checks_are_sentences():
    with pytest.raises(ValueError, match="positive parameters, but 'p' has an entry of -1"):
        NegativeEntropy().check({"p": torch.tensor([-1.0, 2.0])})
    with pytest.raises(ValueError, match="rows that sum to one"):
        NegativeEntropy().check({"p": torch.tensor([1.0, 2.0])})
    NegativeEntropy("orthant").check({"p": torch.tensor([1.0, 2.0])})
    for bad in (lambda: PNorm(1.0), lambda: PNorm(3), lambda: NegativeEntropy("ball"), lambda: MaxDiagonal(0)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="must be"):
            bad()
    with pytest.raises(ValueError, match="tying must be one of"):
        MaxDiagonal(tying="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="centre must be"):
        MaxDiagonal(centre="middle")  # type: ignore[arg-type]


def test_bregman_of_tensors_and_mappings():
    u, v = torch.tensor([0.2, 0.8]), torch.tensor([0.5, 0.5])
    assert bregman(NegativeEntropy(), u, v) == pytest.approx(float((u * (u / v).log()).sum()), rel=1e-6)
    with pytest.raises(ValueError, match="same form"):
        bregman(Euclidean(), u, {"x": v})
    with pytest.raises(ValueError, match="same names"):
        bregman(Euclidean(), {"x": u}, {"y": v})


def test_metrics_cannot_turn_negative():
    phi = diagonals(3)
    with torch.no_grad():
        for log_d in phi.log_d.values():
            log_d.sub_(50.0)
    assert all((phi.metric(n) > 0).all() for n in SHAPES)
    assert phi.value(normal_point(0)) > 0

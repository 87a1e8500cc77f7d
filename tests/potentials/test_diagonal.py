"""The exact step of a mixture against brute force, against the paper's step, and through its tyings."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metamd.potentials import Active, Diagonal, MaxDiagonal
from metamd.potentials.base import bregman, mirror_step
from tests.helpers import SHAPES, brute_force_weights, diagonals, normal_point, randomised


def flat(params):
    return np.concatenate([params[n].detach().reshape(-1).numpy() for n in params])


def flat_metrics(phi, params):
    return np.concatenate(
        [phi.metric(n).detach().expand(-1, *x.shape).reshape(phi.pieces, -1).numpy() for n, x in params.items()], 1
    )


def brute_step(phi, x, g, lr, weights):
    """y = D(w)(theta - c) - lr g, then the simplex problem in extended precision."""
    d, b = flat_metrics(phi, x), phi.offsets.detach().numpy()
    centre = flat(phi.start) if phi.start else np.zeros(d.shape[1])
    y = (weights @ d) * (flat(x) - centre) - lr * flat(g)
    _, point, missed = brute_force_weights(d, y, b)
    assert missed < 1e-15
    return point.astype(float) + centre


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
@pytest.mark.parametrize("tying", ["parameter", "channel", "column", "tensor", "role"])
@pytest.mark.parametrize("offsets", [0.0, 3.0])
def test_step_agrees_with_brute_force(pieces, tying, offsets):
    for seed, centre in enumerate(("origin", "start")):
        phi = diagonals(pieces, tying=tying, centre=centre, offsets=offsets)
        x, g = normal_point(seed), normal_point(seed + 100)
        active, visited = None, 0
        for t in range(6):
            before = phi.activate(x) if active is None else active
            expected = brute_step(phi, x, g, 0.7, before.weights)
            step = mirror_step(x, g, phi, 0.7, active=active)
            assert np.abs(flat(step.params) - expected).max() < 1e-10 * max(1, np.abs(expected).max())
            x, active, g = step.params, step.active, normal_point(1000 + 10 * seed + t)
            visited += int((active.weights > 0).sum() > 1)
        if pieces == 3 and tying == "parameter" and not offsets:
            assert visited > 0, "no kink was visited, so the comparison says little"


def test_dual_variable_telescopes_on_kinks():
    """y_{t+1} = y_t - lr g_t with the weights carried along; it fails with weights recomputed at every step."""
    phi, x, active, stale = diagonals(3), normal_point(0), None, 0.0
    y = phi.mirror(x)
    for t in range(20):
        g = normal_point(50 + t)
        step = mirror_step(x, g, phi, 0.3, active=active)
        y = {n: y[n] - 0.3 * g[n] for n in y}
        x, active = step.params, step.active
        carried, recomputed = phi.mirror(x, active), phi.mirror(x)
        assert all(torch.allclose(carried[n], y[n], atol=1e-9) for n in y)
        stale = max(stale, max(float((recomputed[n] - y[n]).detach().abs().max()) for n in y))
    assert stale > 1e-3


def test_the_divergence_of_a_maximum_is_not_the_maximum_of_divergences():
    """The appendix of the paper has the latter. Both agree where v is the centre."""
    d = torch.tensor([[2.0, 0.5], [0.5, 2.0]], dtype=torch.float64)
    u, v = ({"x": torch.tensor(x, dtype=torch.float64)} for x in ([0.1, 1.0], [1.0, 0.1]))
    largest = float(0.5 * (d * (u["x"] - v["x"]) ** 2).sum(1).max())
    for centre, same in (("origin", False), ("start", True)):
        phi = MaxDiagonal(2, centre=centre).with_metrics({"x": d.log()}).bind(v)
        gap = abs(float(bregman(phi, u, v).detach()) - largest)
        assert gap < 1e-12 if same else gap > 0.1


def test_step_minimises_the_mirror_problem():
    """<g, theta> + B(theta||theta_t)/lr is smallest at the step among points around it; the paper's step is not."""
    better_than_paper, generator = 0, torch.Generator().manual_seed(0)
    for seed in range(10):
        phi, x, g = diagonals(3), normal_point(seed), normal_point(seed + 100)
        exact = mirror_step(x, g, phi, 1.0).params
        paper = mirror_step(x, g, phi, 1.0, exact=False).params

        def objective(point, phi=phi, x=x, g=g):
            return float((sum((g[n] * point[n]).sum() for n in g) + phi.divergence(point, x)).detach())

        for _ in range(100):
            around = {n: v + 0.05 * torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in exact.items()}
            assert objective(around) >= objective(exact) - 1e-9
        better_than_paper += objective(exact) < objective(paper) - 1e-9
    assert better_than_paper > 0


def test_equals_the_papers_step_while_the_piece_does_not_change():
    same = 0
    for seed in range(60):
        phi = diagonals(3, offsets=8.0)
        x, g = normal_point(seed), normal_point(seed + 100)
        exact, paper = mirror_step(x, g, phi, 0.2), mirror_step(x, g, phi, 0.2, exact=False)
        if exact.active.weights.max() == 1 and exact.active.piece == phi.activate(x).piece:
            same += 1
            assert all(torch.equal(exact.params[n], paper.params[n]) for n in x)
            assert exact.iterations == 0
    assert same > 20


def test_papers_step_is_the_papers():
    phi, x, g = diagonals(3), normal_point(1), normal_point(2)
    j = int(np.argmax([sum(float((phi.metric(n)[j] * x[n] ** 2).sum().detach()) for n in x) for j in range(3)]))
    step = mirror_step(x, g, phi, 0.5, exact=False).params
    assert all(torch.allclose(step[n], x[n] - 0.5 * g[n] / phi.metric(n)[j], rtol=1e-12) for n in x)


def test_the_papers_step_jumps_where_the_exact_one_is_continuous():
    """The first step ends where both pieces are equally large, for the scale 1: the second then takes one or the other."""
    begin = {"x": torch.tensor([1.0, 0.1], dtype=torch.float64)}
    push = {"x": torch.tensor([1.0, -0.2], dtype=torch.float64)}

    def end(scale, exact):
        metrics = torch.tensor([[2.0, 0.5], [0.5 * scale, 2.0 * scale]], dtype=torch.float64)
        mixture = MaxDiagonal(2, centre="origin").with_metrics({"x": metrics.log()}).bind(begin)
        first = mirror_step(begin, push, mixture, exact=exact)
        return mirror_step(first.params, push, mixture, active=first.active, exact=exact).params["x"].detach()

    gaps = [(end(1 - 1e-9, exact) - end(1 + 1e-9, exact)).norm() for exact in (False, True)]
    assert gaps[0] > 1
    assert gaps[1] < 1e-6


def test_random_pieces_leave_no_single_piece_consistent():
    """Why the exact step needs weights: with random metrics in ten dimensions most steps end on a kink."""
    kinks = 0
    for seed in range(50):
        x = {"x": torch.randn(10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}
        phi = randomised(MaxDiagonal(3, centre="origin").bind(x), seed, spread=2.0).bind(x)
        g = {"x": torch.randn(10, generator=torch.Generator().manual_seed(seed + 500), dtype=torch.float64)}
        kinks += int((mirror_step(x, g, phi, 3.0).active.weights > 0).sum() > 1)
    assert kinks > 25


def test_held_tensors_stay_and_enter_as_offsets():
    phi, x, g = diagonals(3), normal_point(0), normal_point(1)
    grads = {n: g[n] for n in ("a.weight", "scale")}
    step = mirror_step(x, grads, phi, 0.5)
    assert all(torch.equal(step.params[n], x[n]) for n in x if n not in grads)
    # The same problem over the moving tensors alone, with the forms of the held ones as offsets.
    held = phi.forms({n: x[n] for n in x if n not in grads}).detach() - phi.offsets.detach()
    alone = phi.with_metrics({n: phi.log_d[n] for n in grads}, held).bind({n: x[n] for n in grads})
    expected = mirror_step({n: x[n] for n in grads}, grads, alone, 0.5).params
    assert all(torch.allclose(step.params[n], expected[n], rtol=1e-10) for n in grads)


def test_a_zero_gradient_may_move_a_parameter_where_the_pieces_change():
    phi, x = diagonals(3), normal_point(0)
    moved = 0
    for seed in range(10):
        g = {n: torch.zeros_like(v) if n == "a.bias" else v for n, v in normal_point(seed + 10).items()}
        moved += not torch.equal(mirror_step(x, g, phi, 0.5).params["a.bias"], x["a.bias"])
    assert moved > 0


def test_weight_decay_acts_in_the_dual_at_the_origin():
    """theta+ = grad phi*((1 - lr wd) y - lr g)."""
    phi, x, g = diagonals(3), normal_point(3), normal_point(4)
    step = mirror_step(x, g, phi, 0.5, weight_decay=0.2)
    y = phi.mirror(x)
    expected = phi.inverse({n: (1 - 0.1) * y[n] - 0.5 * g[n] for n in y})
    assert all(torch.allclose(step.params[n], expected[n], rtol=1e-9) for n in x)


def test_weight_decay_pulls_to_zero_whatever_the_centre():
    x = {"x": torch.full((3,), 2.0, dtype=torch.float64)}
    phi = Diagonal().bind(x)
    assert torch.allclose(mirror_step(x, {"x": torch.zeros(3)}, phi, 0.5, weight_decay=0.1).params["x"], 0.95 * x["x"])


def test_activate_keeps_valid_weights_only():
    phi, x, active = diagonals(3), normal_point(0), None
    for t in range(20):
        step = mirror_step(x, normal_point(t + 5), phi, 0.3, active=active)
        x, active = step.params, step.active
    assert (active.weights > 0).sum() > 1
    assert np.array_equal(phi.activate(x, active).weights, active.weights)
    edited = {n: v + 1.0 for n, v in x.items()}
    assert phi.activate(edited, active).weights.max() == 1
    assert phi.activate(x, Active(np.array([0.2, 0.5, 0.3]), active.forms)).weights.sum() == pytest.approx(1)


def test_into_writes_in_place_and_equals_the_pure_step():
    for pieces in (1, 3):
        phi, x, g = diagonals(pieces), normal_point(0), normal_point(1)
        pure = mirror_step(x, g, phi, 0.5)
        target = {n: v.clone() for n, v in x.items()}
        from metamd.potentials import Move

        with torch.no_grad():
            phi.step(target, {n: Move(g[n], 0.5) for n in g}, into=target)
        assert all(torch.equal(target[n], pure.params[n]) for n in x)


def test_pure_step_is_differentiable_in_the_metrics():
    """With one active piece the derivative by autograd equals finite differences."""
    x, g = normal_point(0), normal_point(1)
    phi = diagonals(1)
    parameter = phi.log_d["a.weight"]
    out = mirror_step(x, g, phi, 0.5).params["a.weight"].square().sum()
    (gradient,) = torch.autograd.grad(out, parameter)
    with torch.no_grad():
        parameter[0, 1, 2] += 1e-6
        up = mirror_step(x, g, phi, 0.5).params["a.weight"].square().sum()
        parameter[0, 1, 2] -= 2e-6
        down = mirror_step(x, g, phi, 0.5).params["a.weight"].square().sum()
    assert float(gradient[0, 1, 2]) == pytest.approx(float(up - down) / 2e-6, rel=1e-6)


@given(
    seed=st.integers(0, 10**6),
    pieces=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=40)
def test_any_shapes_and_dtypes(seed, pieces, dtype):
    g = torch.Generator().manual_seed(seed)
    shapes = {f"t{i}": tuple(torch.randint(0, 4, (i % 4,), generator=g).tolist()) for i in range(4)}
    x = {n: torch.randn(s, generator=g).to(dtype) for n, s in shapes.items()}
    phi = randomised(MaxDiagonal(pieces).bind(x), seed).bind(x)
    step = mirror_step(x, {n: torch.randn(s, generator=g).to(dtype) for n, s in shapes.items()}, phi, 0.1)
    assert all(step.params[n].dtype == dtype and step.params[n].shape == x[n].shape for n in x)
    assert all(torch.isfinite(v).all() for v in step.params.values())


def test_unbound_potential_says_what_to_do():
    with pytest.raises(ValueError, match=r"Call potential\.bind"):
        MaxDiagonal(2).value(normal_point(0))
    with pytest.raises(ValueError, match="one row for each of the 2 pieces"):
        MaxDiagonal(2).with_metrics({"x": torch.zeros(3, 4)})


def test_bind_returns_a_new_object():
    fresh = MaxDiagonal(2)
    bound = fresh.bind(normal_point(0))
    assert not fresh.slots
    assert not len(fresh.table)
    assert set(bound.slots) == set(SHAPES)
    again = bound.bind(normal_point(1))
    assert again is not bound
    assert again.log_d["scale"] is bound.log_d["scale"]


@pytest.mark.parametrize("name", ["forward", "keys", "values", "training", "_parameters", "a~1b.c", "log_d:", ""])
def test_any_name_can_carry_a_metric(name):
    x = {name: torch.ones(2, dtype=torch.float64)}
    phi = randomised(MaxDiagonal(2, centre="origin").bind(x), 0).bind(x)
    assert list(phi.log_d) == [name]
    assert phi.value(x) > 0


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_metrics_stored_in_another_precision_than_the_parameters(stored, dtype):
    x, g = normal_point(0, dtype=dtype), normal_point(1, dtype=dtype)
    fresh = MaxDiagonal(3).bind(normal_point(0, dtype=torch.float64))
    exact = randomised(fresh, 0)
    phi = exact.with_metrics({k: v.detach().to(stored) for k, v in exact.log_d.items()}).bind(x)
    step = mirror_step(x, g, phi, 0.3)
    assert all(v.dtype == dtype for v in step.params.values())
    wide = mirror_step(normal_point(0), normal_point(1), exact.bind(normal_point(0)), 0.3).params
    coarse = max(torch.finfo(stored).eps, torch.finfo(dtype).eps)
    assert all(torch.allclose(step.params[n].double(), wide[n], rtol=30 * coarse, atol=30 * coarse) for n in x)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 3, 30, pytest.param(1000, marks=pytest.mark.slow)])
def test_step_with_metrics_over_eight_orders_of_magnitude(pieces, size):
    """Two steps, the second from wherever the first ended: on a kink or off it."""
    kinds = set()
    for seed in range(6 if size < 1000 else 2):
        rng = np.random.default_rng(1000 * pieces + 10 * size + seed)
        logs = torch.tensor(np.log(10.0) * rng.uniform(-4, 4, (pieces, size)))
        offsets = torch.tensor(rng.normal(size=pieces)) if seed % 2 else None
        x = {"x": torch.tensor(rng.normal(size=size))}
        phi = MaxDiagonal(pieces, centre=("origin", "start")[seed % 3 == 0]).with_metrics({"x": logs}, offsets).bind(x)
        active = None
        for _ in range(2):
            g = {"x": torch.tensor(rng.normal(size=size) * 10 ** rng.uniform(-2, 2))}
            before = active or phi.activate(x)
            step = mirror_step(x, g, phi, 1.0, active=active)
            expected = brute_step(phi, x, g, 1.0, before.weights)
            assert np.abs((flat(step.params) - expected) / expected).max() < 1e-10
            x, active = {"x": step.params["x"].detach()}, step.active
            kinds.add(int((active.weights > 0).sum()))
    assert max(kinds) > 1 or pieces == 1 or size == 1, "no kink was met"

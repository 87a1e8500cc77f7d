"""Objectives by hand, their direct gradients against differences, comparators, and the starving of coordinates."""

import math
from dataclasses import replace

import pytest
import torch

from metamd import Diagonal, LogGap, PaperBound, Regret, TrainingLoss
from metamd.inner.objectives import PRIOR, End, Fixed, FromLipschitz, Point, Reference
from metamd.inner.run import run_inner
from tests.helpers import closed_form
from tests.small_tasks import F64, NoisyCoordinate, Quadratic, Separable, TanhNet, potential_for

ELSEWHERE = Fixed({"a": torch.tensor([1.0, 2.0], dtype=F64), "b": torch.tensor([0.3, -1.0, 2.0], dtype=F64)})

OBJECTIVES = {
    "regret": Regret(ELSEWHERE),
    "regret, end": Regret(),
    "regret, reference": Regret(Reference(lr=0.05)),
    "regret, prior": Regret(ELSEWHERE, prior=0.3),
    "paper": PaperBound(3.0),
    "paper, exact": PaperBound(3.0, "exact"),
    "paper, theory": PaperBound(FromLipschitz()),
    "paper, smooth": PaperBound(3.0, smooth=0.2),
    "loss": TrainingLoss(),
    "gap": LogGap(0.1),
}


@pytest.fixture
def quadratic_run():
    """A potential and a run with it."""
    task = Quadratic(1, 8)
    phi = potential_for(task)
    return phi, run_inner(task, phi, lr=0.5)


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def differences(value, potential, eps=1e-5):
    """Central differences of a function of the potential, by every metric and offset."""
    found = []
    for leaf in [*potential.log_d.values(), potential.offsets]:
        flat = leaf.data.view(-1)
        for i in range(flat.numel()):
            flat[i] += eps
            up = float(value().detach())
            flat[i] -= 2 * eps
            down = float(value().detach())
            flat[i] += eps
            found.append((up - down) / (2 * eps))
    return torch.tensor(found, dtype=F64)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("pieces", [1, 3])
def test_the_direct_gradient_is_that_of_the_value(name, pieces):
    task, objective = Quadratic(1, 8), OBJECTIVES[name]
    phi = potential_for(task, pieces, offsets=0.5)
    run = run_inner(task, phi, lr=0.5, reference=objective.reference)
    # A run can end on a kink, where phi has no derivative by D: the direct gradient is compared beside it.
    run = replace(run, end={n: x + 0.1 for n, x in run.end.items()})
    value = objective.value(run, phi)
    leaves = [*phi.log_d.values(), phi.offsets]
    if name in ("loss", "gap"):
        assert not value.requires_grad
        return
    exact = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, leaves)])
    assert relative(exact, differences(lambda: objective.value(run, phi), phi)) < 1e-7


def test_regret_by_hand(quadratic_run):
    phi, run = quadratic_run
    d = {n: phi.metric(n)[0].detach() for n in run.start}
    far = sum(0.5 * (d[n] * (run.end[n] - run.start[n]) ** 2).sum() for n in d)
    near = sum((run.squares[n] / d[n]).sum() for n in d)
    assert float(Regret().value(run, phi).detach()) == pytest.approx(float(far / 0.5 + 0.25 * near))


def test_the_paper_by_hand(quadratic_run):
    phi, run = quadratic_run
    m = {n: phi.metric(n)[0].detach().sqrt() for n in run.start}
    divergence = float(sum(0.5 * ((m[n] * (run.end[n] - run.start[n])) ** 2).sum() for n in m))
    smallest = min(float(v.min()) for v in m.values())
    k = 0.5**2 * 8 * run.largest_gradient**2 / 2
    assert float(PaperBound(3.0).value(run, phi).detach()) == pytest.approx(divergence + 3 / smallest)
    assert float(PaperBound(3.0, "exact").value(run, phi).detach()) == pytest.approx(divergence + 3 / smallest**2)
    assert float(PaperBound(FromLipschitz()).value(run, phi).detach()) == pytest.approx(divergence + k / smallest)


def test_the_smooth_minimum_is_a_power_mean_between_the_smallest_entry_and_all_of_them(quadratic_run):
    phi, run = quadratic_run
    still = replace(run, end=run.start)  # no divergence, so that k / lambda is all there is
    m = torch.cat([phi.metric(n)[0].detach().sqrt().reshape(-1) for n in run.start])
    for s in (1.0, 0.3, 0.05):
        expected = m.pow(-1 / s).mean() ** s
        assert float(PaperBound(2.0, smooth=s).value(still, phi).detach()) == pytest.approx(2 * float(expected))
        exact = PaperBound(2.0, "exact", s).value(still, phi).detach()
        assert float(exact) == pytest.approx(2 * float(expected) ** 2)
        assert float(m.min()) < 1 / float(expected) < float(m.min()) * len(m) ** s
    assert float(PaperBound(2.0, smooth=1e-6).value(still, phi).detach()) == pytest.approx(2 / float(m.min()), rel=1e-4)
    by = torch.autograd.grad(PaperBound(2.0, smooth=0.3).value(still, phi), list(phi.log_d.values()))
    assert all(bool((g < 0).all()) for g in by), "every entry has a part of the gradient, and not the smallest alone"
    with pytest.raises(ValueError, match="smooth must be finite"):
        PaperBound(smooth=-0.1)


def test_training_loss_by_hand(quadratic_run):
    phi, run = quadratic_run
    assert float(TrainingLoss().value(run, phi)) == pytest.approx(float(run.losses.mean()))


def test_smallest_entries_that_tie_share_the_gradient_equally():
    task = Quadratic(1, 3)
    phi = Diagonal().bind(task.init())  # all metrics are one: five ties over two tensors
    run = run_inner(task, phi, lr=0.1)
    still = replace(run, end=run.start)  # no divergence, so that k / lambda is all there is
    by = torch.autograd.grad(PaperBound(2.0).value(still, phi), list(phi.log_d.values()))
    # lambda = exp(min log_d / 2): d (k / lambda) = -k/2, in five equal parts
    assert torch.allclose(torch.cat([g.reshape(-1) for g in by]), torch.full((5,), -0.2, dtype=F64))


def test_the_papers_objective_rewards_not_moving():
    """Steps of 1e-13 are the best to PaperBound, whose comparator is the end of the run, and the worst to a fixed one."""
    task = Quadratic(1, 50)

    def value(objective, log_d):
        phi = Diagonal().with_metrics({n: torch.full((1, *x.shape), log_d, dtype=F64) for n, x in task.init().items()})
        phi = phi.bind(task.init())
        return float(objective.value(run_inner(task, phi), phi).detach())

    paper, regret = PaperBound(10.0), Regret(Fixed(task.solution()))
    assert value(paper, 30.0) < 1e-3 < value(paper, 3.5)
    assert value(regret, 30.0) > 1e9 > value(regret, 3.5)


def test_what_is_held_fixed_has_the_value_of_the_run():
    task = Quadratic(1, 8)
    phi = potential_for(task)
    run, other = run_inner(task, phi, lr=0.5), run_inner(task, phi, lr=0.4)
    for objective in OBJECTIVES.values():
        run, other = replace(run, reference=run.end), replace(other, reference=run.start)
        held = objective.held(run)
        assert float(held.value(run, phi).detach()) == pytest.approx(float(objective.value(run, phi).detach()), rel=1e-12)
    held = Regret(prior=0.5).held(run)
    assert held.comparator.of(other) is run.end
    assert held.pseudo(other, run.end) is held.pseudo(run, run.start)
    assert PaperBound(FromLipschitz()).held(run).k == FromLipschitz().of(run)


def test_the_reference_is_a_longer_run_that_metrics_do_not_move():
    task = TanhNet(0, 20)
    objective = Regret(Reference(torch.optim.Adam, lr=0.05, factor=3))
    runs = [run_inner(task, potential_for(task, seed=s), lr=0.1, reference=objective.reference) for s in (0, 1)]
    assert all(torch.equal(runs[0].reference[n], runs[1].reference[n]) for n in runs[0].start)
    assert runs[0].cost.gradients == 20 + 60
    assert task.loss(runs[0].reference, task.batch(0)) < task.loss(runs[0].end, task.batch(0))
    assert repr(objective) == "Regret(comparator=Reference(Adam, lr=0.05, factor=3), prior=0.0)"


def test_a_given_point_can_be_the_reference():
    task = Quadratic(0, 5)
    run = run_inner(task, Diagonal(), lr=0.1, reference=task.solution())
    assert torch.equal(run.reference["a"], task.solution()["a"])


def test_a_reference_that_diverges_is_reported():
    task = Separable(0, 200)
    run = run_inner(task, Diagonal(), lr=0.01, reference=Reference(torch.optim.SGD, lr=1e9))
    assert "reference run diverged" in run.diverged


def test_bad_objectives_are_refused():
    task = Quadratic(0, 5)
    with pytest.raises(ValueError, match="has no reference point"):
        Regret(Reference()).value(run_inner(task, Diagonal(), lr=0.1), potential_for(task))
    for wrong in (
        lambda: Regret(prior=-1.0),
        lambda: LogGap(0.0),
        lambda: PaperBound(-1.0),
        lambda: PaperBound(1.0, "other"),
        lambda: Reference(lr=0.0),
        lambda: Reference(factor=math.nan),
    ):
        with pytest.raises(ValueError, match=r"must|needs"):
            wrong()


# starving


def rate_of_noise(objective, rounds):
    """The step size that the closed form gives a coordinate of pure noise, relative to that of a real one."""
    family = [NoisyCoordinate(seed) for seed in range(4)]
    phi = Diagonal().bind(family[0].init())
    for _ in range(rounds):
        runs = [run_inner(task, phi, reference=objective.reference) for task in family]
        phi = phi.with_metrics(closed_form(runs, phi, objective)).bind(family[0].init())
    return float((phi.metric("signal") / phi.metric("noise")).detach().sum())


def test_coordinates_starve_under_the_end_of_the_run():
    # Noise moves the coordinate by |sum g| / D, so that every round multiplies its D by sqrt(S) / |sum g| = 1 / 0.3:
    # nothing pulls back.
    rates = [rate_of_noise(Regret(End()), rounds) for rounds in (2, 4)]
    assert rates[1] == pytest.approx(0.3**2 * rates[0], rel=0.15)


def test_the_prior_averages_squared_step_sizes_with_those_of_tensor_and_model(quadratic_run):
    (phi, run), s = quadratic_run, 0.3
    found = closed_form([run], phi, Regret(prior=s))
    x = {n: (run.end[n] - run.start[n]) ** 2 for n in run.start}
    y = {n: run.squares[n] for n in run.start}
    model = sum(v.sum() for v in x.values()) / sum(v.sum() for v in y.values())
    for n in x:
        typical = (x[n].sum() / y[n].sum() + model) / 2
        expected = (x[n] / y[n] + s * typical) / (1 + s) / 0.5**2
        torch.testing.assert_close((-2 * found[n][0]).exp(), expected, rtol=1e-12, atol=0)


def test_the_closed_form_with_a_prior_is_a_stationary_point(quadratic_run):
    phi, run = quadratic_run
    at = phi.with_metrics(closed_form([run], phi, Regret(prior=0.3))).bind(run.start)
    value = Regret(prior=0.3).value(run, at)
    for slope in torch.autograd.grad(value, list(at.log_d.values())):
        assert float(slope.abs().max()) < 1e-10 * float(value.detach())
    (slope, *_) = torch.autograd.grad(Regret(prior=0.5).value(run, at), list(at.log_d.values()))
    assert float(slope.abs().max()) > 1e-3, "another strength is refused"


def test_the_prior_does_not_depend_on_the_units_of_a_single_tensor():
    """theta -> c theta divides g by c and multiplies delta by c, so that D is divided by c^2."""
    run = run_inner(Separable(0, 20), Diagonal(), lr=0.01)
    scaled = replace(
        run,
        start={n: 10 * v for n, v in run.start.items()},
        end={n: 10 * v for n, v in run.end.items()},
        squares={n: v / 100 for n, v in run.squares.items()},
    )
    phi = Diagonal().bind(run.start)
    plain, other = (closed_form([r], phi, Regret(prior=0.3))["x"] for r in (run, scaled))
    torch.testing.assert_close(other, plain - math.log(100), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "objective",
    [Regret(prior=0.1), Regret(prior=PRIOR), Regret(Reference(lr=0.1, factor=2))],
    ids=["prior", "default prior", "reference"],
)
def test_a_prior_or_a_reference_prevents_starving(objective):
    # the weaker the prior, the more rounds until its floor, here 0.0002 of the other coordinate's rate, is reached
    rates = [rate_of_noise(objective, rounds) for rounds in ((4, 8, 12) if objective.prior != PRIOR else (12, 16, 20))]
    assert rates[1] == pytest.approx(rates[0], rel=0.1)
    assert rates[2] == pytest.approx(rates[1], rel=0.02)


def test_the_log_of_the_gap_by_hand(quadratic_run):
    phi, run = quadratic_run
    lowest, first = float(run.losses.min()), float(run.losses[0] - run.losses.min())
    wanted = sum(math.asinh((float(v) - lowest) / (0.01 * first)) for v in run.losses) / 8
    assert float(LogGap(0.01).value(run, phi)) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(ValueError, match="held"):
        LogGap(0.01).running(Point(run.losses[0], lambda: run.losses[0], 0.5, 8))


def test_half_the_steps_to_the_tolerance_is_half_the_value():
    """gap_t = c^t: n = log(tolerance) / log(c) steps to the tolerance, and E is about n log(1/tolerance) / (2T)."""
    run = run_inner(Quadratic(1, 8), Diagonal(), lr=0.01)
    fast, slow = (replace(run, losses=torch.logspace(0, -200 / n, 200, 1e10, dtype=F64) + 3, steps=200) for n in (20, 40))
    values = [float(LogGap(1e-10).value(r, potential_for(Quadratic(1, 8)))) for r in (fast, slow)]
    assert values[1] == pytest.approx(2 * values[0], rel=0.05)
    assert values[0] == pytest.approx(20 * math.log(1e10) / 2 / 200, rel=0.15)

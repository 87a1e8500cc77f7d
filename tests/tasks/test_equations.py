"""A network per equation: derivatives against autograd, exact solutions against others, and the laws of families."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from metamd.data.raw_files import files
from metamd.tasks import advection, burgers
from metamd.tasks.equations import SolutionNetwork, cole_hopf, derivatives, solution, travelling
from tests.loopback import needs_files
from tests.task_laws import LAWS, draw

SMALL = {"width": 4, "depth": 2, "places": 9, "edges": 5, "steps": 5}
MAKERS = {"burgers": burgers, "advection": advection}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_families_keep_the_laws(law, make):
    assert law(make(**SMALL))


def by_autograd(params, places):
    """The same by three calls of autograd."""
    at = places.clone().requires_grad_()
    u = solution(params, at)
    (first,) = torch.autograd.grad(u.sum(), at, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), at, create_graph=True)
    return u, first[:, 0], first[:, 1], second[:, 0]


def test_derivatives_are_those_of_autograd():
    torch.manual_seed(0)
    model = SolutionNetwork(8, 3).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    params, places = dict(model.named_parameters()), torch.rand(11, 2, dtype=torch.float64)
    found, wanted = derivatives(params, places), by_autograd(params, places)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    # and of the loss, by which a network is trained
    one, other = (
        torch.autograd.grad(sum(x.square().sum() for x in parts), [*params.values()], allow_unused=True)
        for parts in (found, wanted)
    )
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("exact", "residual"), [("cole_hopf", 1.0), ("travelling", 0.0)])
def test_exact_solutions_solve_their_equations(exact, residual):
    """By finite differences of fourth order, on draws that are smooth."""
    numbers = {"viscosity": 0.1, "speed": 0.9, "first": 1.1, "second": -0.2}
    function = {"cole_hopf": cole_hopf, "travelling": travelling}[exact]
    x, t = (a.ravel() for a in np.meshgrid(np.linspace(-0.9, 0.9, 7), np.linspace(0.2, 0.8, 4)))
    h, steps = 1e-3, np.array([-2, -1, 0, 1, 2])
    in_x = np.stack([function(x + k * h, t, numbers) for k in steps])
    in_t = np.stack([function(x, t + k * h, numbers) for k in steps])
    slope, curve = np.array([1, -8, 0, 8, -1]) / (12 * h), np.array([-1, 16, -30, 16, -1]) / (12 * h * h)
    u, u_x, u_t, u_xx = in_x[2], slope @ in_x, slope @ in_t, curve @ in_x
    moved = u * u_x if residual else numbers["speed"] * u_x
    assert np.abs(u_t + moved - numbers["viscosity"] * u_xx).max() < 1e-6
    assert np.abs(u_t + 1.1 * moved - numbers["viscosity"] * u_xx).max() > 1e-2


def test_the_residual_and_the_edges_are_those_of_the_exact_solution():
    for make in MAKERS.values():
        task = draw(make(**SMALL), 3)
        numbers, places = task.config, task.whole["inside"].double().numpy()
        assert np.abs(places[:, 0]).max() <= 1
        assert places[:, 1].min() >= 0
        assert places[:, 1].max() <= 1
        begun = task.whole["known"][: SMALL["edges"]]
        x = np.linspace(-1, 1, SMALL["edges"])
        sign = -1 if make is burgers else 1
        start = sign * numbers["first"] * np.sin(np.pi * x) + numbers["second"] * np.sin(2 * np.pi * x)
        assert begun.tolist() == pytest.approx(start.tolist(), abs=1e-6)
        if make is burgers:
            assert task.whole["known"][SMALL["edges"] :].abs().max() < 1e-6


def test_the_error_is_relative_and_zero_for_the_exact_solution(monkeypatch):
    task = draw(burgers(**SMALL))
    assert task.evaluate({n: torch.zeros_like(p) for n, p in task.init().items()}).loss == pytest.approx(1)
    wanted = task.reference[1]
    monkeypatch.setattr("metamd.tasks.equations.solution", lambda params, places: 1.5 * wanted)
    found = task.evaluate(task.init())
    assert found.measures == {"relative L2 error": found.loss}
    assert found.loss == pytest.approx(0.5)


def test_numbers_lie_in_their_ranges():
    drawn = [burgers().sample(torch.Generator().manual_seed(s)) for s in range(200)]
    nu = np.array([config["viscosity"] for config in drawn])
    assert 0.01 / math.pi <= nu.min() < 0.012 / math.pi
    assert 0.08 / math.pi < nu.max() <= 0.1 / math.pi
    assert np.log10(nu * math.pi).mean() == pytest.approx(-1.5, abs=0.08)  # four standard errors


def test_bad_input_is_a_sentence():
    with pytest.raises(ValueError, match=r"must be at least 2, got width=1, edges=0"):
        burgers(width=1, edges=0)
    with pytest.raises(ValueError, match="speed is missing"):
        advection().build({**burgers().sample(torch.Generator()), "family": "advection"})


@pytest.mark.real_data
def test_the_solution_is_the_published_one():
    needs_files("burgers")
    from scipy.io import loadmat

    held = loadmat(files("burgers")["burgers_shock.mat"])
    x, t = (a.ravel()[::5] for a in np.meshgrid(held["x"][:, 0], held["t"][:, 0], indexing="ij"))
    found = cole_hopf(x, t, {"viscosity": 0.01 / math.pi, "first": 1.0, "second": 0.0})
    assert np.abs(found - held["usol"].ravel()[::5]).max() < 1e-9

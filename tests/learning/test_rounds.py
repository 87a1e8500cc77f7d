"""The norm of the metrics and the projection onto its ball; how many directions `rank="auto"` keeps."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from metamd import Diagonal, Journal, Kronecker, MaxDiagonal, Refine, Regret, learn_from_reference, load, meta_train, tasks
from metamd.inner.closed_form import LARGEST_RANK, Iterate
from metamd.inner.objectives import Reference
from metamd.learning.first_look import AFFORDED, affording, gradient_operations
from metamd.learning.outer import metric_norms, project
from metamd.learning.rounds import TaskRunner
from metamd.potentials.basis import Basis
from metamd.tasks.models import LeNet

SHAPES = {"first.weight": (4, 3), "first.bias": (4,), "last.weight": (2, 4), "scale": ()}


TYINGS = ["parameter", "channel", "role"]
BASES = ["right"]


def iterate(pieces, tying, seed=0, dtype=torch.float64):
    """Random metrics under a tying, or in a random basis, with fewer columns than all of one of them."""
    g, model = torch.Generator().manual_seed(seed), {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    if tying in BASES:
        factors = {}
        for n, (_, columns) in {n: s for n, s in SHAPES.items() if len(s) == 2}.items():
            square = torch.linalg.qr(torch.randn(columns, columns, generator=g, dtype=torch.float64))[0]
            factors[f"right/{n}"] = square[:, : columns - (columns > 3) * 2]
        potential = MaxDiagonal(pieces, tying="tensor", basis=Basis(tying, factors=factors)).bind(model)
    else:
        potential = MaxDiagonal(pieces, tying=tying).bind(model)
    log_d = {k: torch.randn(v.shape, generator=g, dtype=torch.float64).to(dtype) for k, v in potential.log_d.items()}
    return Iterate(log_d, torch.zeros(pieces, dtype=torch.float64), basis=potential.basis), potential


def spelled_out(now, potential):
    """sqrt(trace D) by piece, D y had for every unit vector y of the model from the step theta - D^-1 g."""
    model = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    norms = []
    for j in range(len(now.offsets)):
        one = Iterate({k: v[j : j + 1] for k, v in now.log_d.items()}, torch.zeros(1, dtype=torch.float64), basis=now.basis)
        fit, total = one.apply(potential).bind(model), 0.0
        for n, s in SHAPES.items():
            for i in range(math.prod(s)):
                unit = torch.zeros(math.prod(s), dtype=torch.float64)
                unit[i] = 1.0
                total += 2 * float(fit.value({**model, n: unit.reshape(s)}).detach())
        norms.append(math.sqrt(total))
    return torch.tensor(norms, dtype=torch.float64)


def norms_of(now, potential):
    return metric_norms(now.apply(potential).bind({n: torch.zeros(s) for n, s in SHAPES.items()}), SHAPES)


@pytest.mark.parametrize("tying", [*TYINGS, "column", "tensor", *BASES])
def test_the_norm_is_the_root_of_the_trace(tying):
    now, potential = iterate(2, tying)
    assert torch.allclose(norms_of(now, potential), spelled_out(now, potential))


@pytest.mark.parametrize("tying", [*TYINGS, *BASES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_projection_is_inside_and_leaves_the_inside_alone(tying, dtype):
    now, potential = iterate(3, tying, dtype=dtype)
    norms = norms_of(now, potential)
    radius = float(norms.sort().values[1])  # one piece is outside, one on the sphere, one inside
    found = norms_of(project(now, radius, potential, SHAPES), potential)
    assert bool((found <= radius).all())
    assert torch.allclose(found, norms.clamp_max(radius), rtol=1e-5)
    assert project(now, 2 * float(norms.max()), potential, SHAPES) is now


@pytest.mark.parametrize("tying", TYINGS)
def test_the_projection_is_the_nearest_point(tying):
    """Against scipy: minimise sum_i count_i (m_i - m0_i)^2 over sum_i count_i m_i^2 <= C^2."""
    now, potential = iterate(1, tying)
    counts = dict.fromkeys(now.log_d, 0.0)
    for n, slot in potential.slots.items():
        counts[slot.key] += math.prod(SHAPES[n]) / math.prod(slot.stored)
    weights = np.concatenate([np.full(v.numel(), counts[k]) for k, v in now.log_d.items()])
    m0 = np.concatenate([(0.5 * v).exp().flatten().numpy() for v in now.log_d.values()])
    radius = 0.6 * math.sqrt(weights @ m0**2)
    inside = {"type": "ineq", "fun": lambda m: radius**2 - weights @ m**2, "jac": lambda m: -2 * weights * m}
    best = minimize(
        lambda m: weights @ (m - m0) ** 2,
        0.5 * m0,
        jac=lambda m: 2 * weights * (m - m0),
        constraints=[inside],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    ours = project(now, radius, potential, SHAPES)
    m = np.concatenate([(0.5 * v).exp().flatten().numpy() for v in ours.log_d.values()])
    assert np.allclose(m, best.x, rtol=1e-4)
    clipped = m0.clip(max=math.sqrt(radius**2 / weights.sum()))  # a double that is inside, and farther away
    assert weights @ (clipped - m0) ** 2 > weights @ (m - m0) ** 2 + 1e-6


def norm(learned):
    """The largest of the pieces."""
    return math.sqrt(float(learned.potential.log_d["theta"].detach().exp().sum(1).max()))


@pytest.mark.parametrize(
    "options",
    [{}, {"refine": Refine(2)}, {"potential": MaxDiagonal(3), "refine": Refine(2)}],
    ids=["closed", "refine", "pieces"],
)
def test_meta_training_stays_inside_and_says_so(options, tmp_path):
    family, potential = tasks.quadratic((1.0, 1.0), coupling=0.05, steps=30), options.get("potential", Diagonal())
    options = {n: v for n, v in options.items() if n != "potential"}
    free = meta_train(family, potential, outer_steps=4, tasks_per_step=4, **options)
    bound = 0.9 * norm(free)
    kept = meta_train(family, potential, outer_steps=4, tasks_per_step=4, max_norm=bound, **options)
    assert norm(kept) <= bound
    kept.save(tmp_path / "x.safetensors")
    assert load(tmp_path / "x.safetensors").header.max_norm == bound
    assert free.header.max_norm is None


def test_no_iterate_is_ever_outside(monkeypatch):
    """Also not those of the first scale, which is found by raising the metrics, nor the candidates."""
    seen = []
    fit = TaskRunner.fit

    def watched(self, iterate, task):
        seen.append(math.sqrt(float(iterate.log_d["theta"].exp().sum(1).max())))
        return fit(self, iterate, task)

    monkeypatch.setattr(TaskRunner, "fit", watched)
    meta_train(tasks.quadratic(steps=40), MaxDiagonal(2), outer_steps=3, tasks_per_step=4, max_norm=5.0, refine=Refine(2))
    assert len(seen) > 10
    assert max(seen) <= 5.0


def test_a_learned_basis_stays_inside_too():
    family = tasks.tabular(features=4, width=3, examples=50, batch_size=25, steps=15)
    options = {"outer_steps": 2, "tasks_per_step": 3, "objective": Regret(prior=0.01)}
    free = meta_train(family, Kronecker(), **options)
    shapes = {n: tuple(x.shape) for n, x in family.example().items()}
    bound = 0.95 * float(metric_norms(free.potential.bind(family.example()), shapes).max())
    kept = meta_train(family, Kronecker(), max_norm=bound, **options)
    assert kept.potential.basis.factors
    assert float(metric_norms(kept.potential.bind(family.example()), shapes).max()) <= bound


def test_a_ball_without_any_stable_metric_is_refused():
    with pytest.raises(ValueError, match=r"diverged.*with max_norm = 0.5, which may be too small"):
        meta_train(tasks.quadratic(steps=200), Diagonal(), outer_steps=2, tasks_per_step=2, max_norm=0.5)
    with pytest.raises(ValueError, match="max_norm must be positive and finite, got 0"):
        meta_train(tasks.quadratic(steps=20), Diagonal(), outer_steps=2, tasks_per_step=2, max_norm=0)


def test_another_bound_does_not_continue_a_run(tmp_path):
    options = {"outer_steps": 2, "tasks_per_step": 2, "journal": Journal(tmp_path / "run")}
    family = tasks.quadratic(steps=30)
    one = meta_train(family, Diagonal(), max_norm=6.0, **options)
    assert meta_train(family, Diagonal(), max_norm=6.0, **options).header.target_loss == one.header.target_loss
    with pytest.raises(ValueError, match="other settings: max_norm"):
        meta_train(family, Diagonal(), max_norm=7.0, **options)


# directions that can be afforded


SIZES = (100, 60, 4)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.Tanh(), nn.Linear(SIZES[1], SIZES[2]))


def family(batch_size, model=network, shape=(SIZES[0],), classes=SIZES[2]):
    generator = torch.Generator().manual_seed(0)
    data = {n: (torch.randn(300, *shape, generator=generator), torch.arange(300) % classes) for n in "ab"}
    return tasks.supervised(model, data, batch_size=batch_size, steps=10)


def first(found):
    return found.build(found.sample(torch.Generator().manual_seed(0)))


def kept(batch_size, **options):
    task = first(family(batch_size))
    potential = Kronecker(rank="auto", **options).bind(task.init())
    return affording(potential, task).basis.whole


def test_operations_are_those_of_the_products():
    numbers = SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2]
    assert gradient_operations(first(family(7))) == 3 * 2 * 7 * numbers
    # a kernel is used at every place of its output: 28 x 28 and 10 x 10
    images = first(family(5, LeNet, (1, 28, 28), 10))
    shapes = {n: x.shape for n, x in images.init().items() if x.ndim > 1}
    places = dict.fromkeys(shapes, 1) | {"first.weight": 28 * 28, "second.weight": 10 * 10}
    assert gradient_operations(images) == 3 * 2 * 5 * sum(shapes[n].numel() * places[n] for n in shapes)


@pytest.mark.parametrize("batch_size", [1, 10, 66, 67, 100, 150, 200])
def test_all_directions_are_kept_where_a_quarter_of_a_gradient_pays(batch_size):
    costs = {}
    for place, (columns, rows) in {"0": SIZES[:2], "2": SIZES[1:]}.items():
        numbers = rows * columns
        costs[f"right/{place}.weight"] = (4 * numbers * min(columns, LARGEST_RANK), 2 * numbers * columns)
    budget = AFFORDED * 3 * 2 * batch_size * (SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2])
    whole = kept(batch_size)
    spent = sum(costs[f][f in whole] for f in costs)
    assert spent <= budget or not whole
    for factor in set(costs) - whole:
        assert spent - costs[factor][0] + costs[factor][1] > budget, "one more could have been afforded"


def test_larger_batches_pay_for_more():
    assert not kept(1)
    assert kept(100) == {"right/2.weight"}
    assert kept(200) == {"right/0.weight", "right/2.weight"}
    assert not affording(Kronecker(rank=3).bind(first(family(200)).init()), first(family(200))).basis.whole


@pytest.mark.parametrize("learn", ["reference", "rounds"])
def test_what_is_learned_has_these_directions(learn):
    for batch_size, columns in ((100, LARGEST_RANK), (200, SIZES[0])):
        if learn == "reference":
            found = learn_from_reference(family(batch_size), Kronecker(rank="auto"), reference=Reference(lr=1e-2), tasks=2)
        else:
            found = meta_train(family(batch_size), Kronecker(rank="auto"), outer_steps=2, tasks_per_step=2)
        factors = found.potential.basis.factors
        assert factors["right/2.weight"].shape == (SIZES[1], SIZES[1])
        assert factors["right/0.weight"].shape[1] <= columns
        assert (factors["right/0.weight"].shape[1] == SIZES[0]) == (batch_size == 200)

"""Certificates in use: options of the optimiser, any optimiser of torch, saving, edits, comparators, what they say."""

import copy
import io
import json
import math
import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import metamd
from metamd import Diagonal, Euclidean, LearnedOptimiser, MaxDiagonal, MetaMD, NegativeEntropy, PNorm, certify_run
from metamd.files.header import Radius
from metamd.optimiser.certificate import VERSION
from metamd.potentials.online import Online
from tests.helpers import equal_parameters, random_basis, random_geometry, small_model, train

POLAR = {n: 30.0 for n, _ in small_model().named_parameters()}


def recorded(model, optimiser):
    """Gradients and parameters of every step from now on, in float64."""
    steps = []

    def look(*_):
        named = list(model.named_parameters())
        steps.append({n: (p.grad.double().clone(), p.detach().double().clone()) for n, p in named if p.grad is not None})

    optimiser.register_step_pre_hook(look)
    return steps


def regret(steps, reference):
    return sum(float((g * (x - reference[n].double())).sum()) for step in steps for n, (g, x) in step.items())


def near(model, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {n: (p.detach() + 0.2 * torch.randn(p.shape, generator=g).to(p.dtype)) for n, p in model.named_parameters()}


GEOMETRIES = {
    "one piece": {"pieces": 1},
    "mixture": {"pieces": 3},
    "origin": {"pieces": 3, "centre": "origin"},
    "by role": {"pieces": 2, "tying": "role"},
}
OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.1},
    "the paper's step": {"exact": False},
    "tail": {"averaging": "tail"},
    "average": {"metric": Online("average", scale=POLAR)},
    "polar": {"metric": Online("polar", scale=POLAR), "averaging": "tail"},
}


def certified(model, geometry=None, **options):
    geometry = random_geometry(model, pieces=1 if "metric" in options else 3) if geometry is None else geometry
    return MetaMD(model.named_parameters(), geometry, lr=0.1, certify=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_realised_regret_is_that_of_the_gradients_used(dtype, options, geometry):
    if "metric" in OPTIONS[options] and geometry != "one piece":
        pytest.skip("online metrics have one piece")
    model = small_model(dtype=dtype)
    optimiser = certified(model, random_geometry(model, **GEOMETRIES[geometry]), **OPTIONS[options])
    steps = recorded(model, optimiser)
    train(model, optimiser, 12)
    reference = near(model)
    found = optimiser.certificate(reference, radius=1.0)
    truth = regret(steps, reference)
    assert found.realised == pytest.approx(truth, rel=1e-12, abs=1e-12)
    assert abs(found.realised - truth) <= found.rounding
    assert found.steps == 12
    assert found.guaranteed
    plain = options in ("plain", "tail") and dtype != torch.bfloat16
    assert (optimiser.certificate(reference).mirror is not None) == plain or options == "the paper's step"
    assert 0 < found.rounding < 1e-9


def test_learned_coordinates():
    """The dual norm with dense matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(27, 2)).double()
    phi = random_basis(dict(model.named_parameters()), pieces=1)
    optimiser = certified(model, phi)
    steps = recorded(model, optimiser)
    for t in range(5):
        x = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(t)).double()
        optimiser.zero_grad()
        (model(x) - x.sum((1, 2, 3), keepdim=True)[:, :, 0, 0]).square().mean().backward()
        optimiser.step()
    start, square, path = {n: x for n, (_, x) in steps[0].items()}, 0.0, 0.0
    for n, p in model.named_parameters():
        eye = torch.eye(p.numel(), dtype=torch.float64).view(p.numel(), *p.shape)
        d = torch.stack([phi.basis.out_of(n, phi.metric(n)[0].detach() * phi.basis.into(n, e)).flatten() for e in eye])
        total = sum(step[n][0] for step in steps).flatten()
        square += float(total @ torch.linalg.solve(d, total))
        path += sum(float((g * (x - start[n])).sum()) for g, x in (step[n] for step in steps))
    found = optimiser.certificate(radius=0.3)
    assert found.bound - found.rounding == pytest.approx(path + 0.3 * math.sqrt(square), rel=1e-9)


def test_a_radius_for_every_tensor():
    model = small_model(dtype=torch.float64)
    optimiser = certified(model, Euclidean())
    steps = recorded(model, optimiser)
    train(model, optimiser, 7)
    radii = {n: 0.1 * (i + 1) for i, (n, _) in enumerate(model.named_parameters())}
    found = optimiser.certificate(radius=radii)
    duals = {n: float(sum(step[n][0] for step in steps).norm()) for n in radii}
    path = regret(steps, {n: x for n, (_, x) in steps[0].items()})
    assert found.bound == pytest.approx(path + sum(radii[n] * duals[n] for n in radii), rel=1e-10)
    assert found.per_layer["0.weight"].dual == pytest.approx(duals["0.weight"], rel=1e-12)
    assert optimiser.certificate(radius={f"module._orig_mod.{n}": r for n, r in radii.items()}) == found
    with pytest.raises(ValueError, match=r"the radius must name every tensor that was trained, but '0\.bias' is missing"):
        optimiser.certificate(radius={"0.weight": 1.0})


@pytest.mark.parametrize("potential", [Euclidean(), PNorm(1.5), NegativeEntropy("orthant")], ids=repr)
def test_potentials_without_forms_have_the_euclidean_ball(potential):
    p = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimiser = MetaMD([p], potential, lr=0.1, certify=True)
    for _ in range(3):
        p.grad = torch.ones(2, dtype=torch.float64)
        optimiser.step()
    found = optimiser.certificate(radius=1.0)
    assert found.per_layer["0"].dual == pytest.approx(3 * math.sqrt(2))
    assert "in the Euclidean norm" in str(found)
    assert (found.mirror is not None) == isinstance(potential, Euclidean)


def test_sums_of_half_precision_are_not_lost():
    """bfloat16 swallows every step, and its largest sum of ones is 256."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimiser = MetaMD([p], Euclidean(), lr=1e-5, certify=True)
    for _ in range(1000):
        p.grad = torch.full((4,), 0.333984375, dtype=torch.bfloat16)
        optimiser.step()
    assert optimiser.certificate([torch.zeros(4)]).realised == pytest.approx(1000 * 0.333984375 * 4, rel=1e-12)


def test_large_tensors_are_summed_in_chunks_and_whatever_their_strides():
    g = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(1))
    for turn in (False, True):
        values = torch.randn(50_000, 3).t() if turn else torch.randn(3, 50_000)
        p = nn.Parameter(values)
        optimiser = MetaMD([p], Euclidean(), lr=0.5, certify=True)
        start = p.detach().clone()
        for _ in range(2):
            p.grad = torch.empty_like(p).copy_(g)
            optimiser.step()
        found = optimiser.certificate([start])
        assert found.realised == pytest.approx(-0.5 * float(g.double().square().sum()), rel=1e-6)
        assert torch.equal(optimiser.state[p]["certificate_sum"], 2 * g.double())


@pytest.mark.parametrize(
    ("geometry", "options", "more"),
    [
        (MaxDiagonal(2), {}, {"certificate_sum"}),
        (Diagonal(), {}, {"certificate_sum", "certificate_start"}),
        (Euclidean(), {}, {"certificate_sum", "certificate_start"}),
        (Diagonal(), {"averaging": "tail"}, {"certificate_sum", "certificate_start", "certificate_averaged"}),
    ],
)
def test_a_run_keeps_the_sum_of_its_gradients_and_the_start_where_nothing_else_does(geometry, options, more):
    kept = {}
    for certify in (False, True):
        model = small_model()
        optimiser = MetaMD(model.named_parameters(), geometry, lr=0.1, certify=certify, **options)
        train(model, optimiser, 2)
        kept[certify] = {k: x.dtype for k, x in optimiser.state[model[0].weight].items() if isinstance(x, torch.Tensor)}
    assert kept[True].keys() - kept[False].keys() == more
    assert {kept[True][k] for k in more} <= {torch.float64, torch.float32}
    assert kept[True].get("certificate_start", torch.float32) == torch.float32, "in the type of the parameter"


# the tail average


def tail_run(f, start, steps, *, certify=True, geometry=None, lr=0.3):
    """A run with a tail average and the same loss in every step, and the points where its gradients were taken."""
    x, points = nn.Parameter(start.clone()), []
    geometry = Euclidean() if geometry is None else geometry
    optimiser = MetaMD([("x", x)], geometry, lr=lr, averaging="tail", certify=certify)
    for _ in range(steps):
        optimiser.zero_grad()
        f(x).backward()
        points.append(x.detach().clone())
        optimiser.step()
    return x, optimiser, points


def evaluated(x, optimiser):
    with optimiser.averaged():
        return x.detach().clone()


def test_the_certificate_is_that_of_the_model_of_eval():
    """f(mean) - f(u) for one convex f and every u of the ball, and equal for a linear f and the worst u."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 4, generator=g).double(), torch.randn(20, generator=g).double()
    start, slope = torch.randn(4, generator=g).double(), torch.randn(4, generator=g).double()

    def f(x):
        return torch.nn.functional.softplus(a @ x - b).mean() + (a @ x).square().mean()

    for steps in (1, 2, 3, 30):
        x, optimiser, _ = tail_run(f, start, steps)
        found, mean = optimiser.certificate(radius=1.0), evaluated(x, optimiser)
        for seed in range(5):
            way = torch.randn(4, generator=torch.Generator().manual_seed(seed)).double()
            assert float(f(mean) - f(start + way / way.norm())) <= found.average + 1e-9
        x, optimiser, _ = tail_run(lambda x: slope @ x, start, steps)
        worst, mean = start - 2.0 * slope / slope.norm(), evaluated(x, optimiser)
        tight = optimiser.certificate(radius=2.0).average
        assert tight == pytest.approx(float(slope @ (mean - worst)), rel=1e-12)
        # The average of a run without certify has one point more: the equality tells them apart.
        later = evaluated(*tail_run(lambda x: slope @ x, start, steps, certify=False)[:2])
        assert tight != pytest.approx(float(slope @ (later - worst)), rel=1e-3)
    assert found.average < found.mean, "the average is better than the mean of the run"
    assert "the tail average, which opt.eval() puts into the model" in str(found)


def test_the_newest_iterate_cannot_be_certified():
    """A second convex loss has the same gradients all along, as large as one likes where the newest iterate counts."""
    slope, start, steps = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64), 5
    x, optimiser, points = tail_run(lambda x: slope @ x, start, steps)
    found, mean, lowest = optimiser.certificate(radius=1.0), evaluated(x, optimiser), float(slope @ points[-1])

    def steep(x):
        return slope @ x + 1e6 * torch.relu(lowest - slope @ x)

    x, optimiser, same = tail_run(steep, start, steps)
    assert torch.equal(torch.stack(points), torch.stack(same))
    assert optimiser.certificate(radius=1.0) == found
    later = evaluated(*tail_run(steep, start, steps, certify=False)[:2])
    assert float(steep(mean) - steep(start)) <= found.average
    assert float(steep(later) - steep(start)) > 1e3 * found.average


@pytest.mark.parametrize("options", [{}, {"metric": Online("polar", scale=POLAR)}], ids=["plain", "polar"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_certify_changes_no_step_and_the_average_ends_a_step_earlier(dtype, options):
    ways = []
    for certify, steps in ((True, 9), (False, 9), (False, 8)):
        model = small_model(dtype=dtype)
        optimiser = MetaMD(
            model.named_parameters(), random_geometry(model, pieces=1), lr=0.1, averaging="tail", certify=certify, **options
        )
        train(model, optimiser, steps)
        ways.append((copy.deepcopy(model), model))
        optimiser.eval()
    (ours, ours_averaged), (theirs, theirs_averaged), (_, earlier) = ways
    assert equal_parameters(ours, theirs)
    assert equal_parameters(ours_averaged, earlier)
    assert not equal_parameters(ours_averaged, theirs_averaged)


def test_an_average_that_began_without_a_certificate_has_none():
    """Its first points have no gradients in the sums; no point of it counts twice."""
    f, start = torch.linalg.vector_norm, torch.tensor([3.0, 4.0], dtype=torch.float64)
    x, optimiser, _ = tail_run(f, start, 4, certify=False)
    mean = evaluated(x, optimiser)
    resumed = MetaMD([("x", x)], Euclidean(), lr=0.3, averaging="tail", certify=True)
    resumed.load_state_dict(optimiser.state_dict())
    for steps in range(2):
        resumed.zero_grad()
        f(x).backward()
        resumed.step()
        found = resumed.certificate(radius=1.0)
        assert (found.steps, found.average) == (steps + 1, None)
        assert torch.equal(evaluated(x, resumed), mean) == (steps == 0)


def test_an_average_that_begins_again_is_certified_from_there():
    slope = torch.tensor([1.0, -2.0], dtype=torch.float64)
    x = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimiser = MetaMD([("x", x)], Euclidean(), lr=0.1, averaging="tail", certify=True)
    for t in range(6):
        if t == 3:
            with torch.no_grad():
                x.mul_(2)
        x.grad = slope.clone()
        optimiser.step()
        worst = torch.ones(2, dtype=torch.float64) - slope / slope.norm()
        gap = float(slope @ (evaluated(x, optimiser) - worst))
        assert optimiser.certificate(radius=1.0).average == pytest.approx(gap, rel=1e-12)


# saving


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_resumed_run_has_the_certificate_of_an_uninterrupted_one(dtype, options):
    model = small_model(dtype=dtype)
    kind = OPTIONS[options]
    geometry = random_geometry(model, pieces=1 if "metric" in kind else 3)
    optimiser = certified(model, geometry, **kind)
    train(model, optimiser, 6)
    saved = saved_and_loaded({"model": model.state_dict(), "optimiser": optimiser.state_dict()})
    other = small_model(seed=9, dtype=dtype)
    resumed = certified(other, geometry, **kind)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimiser"])
    reference = near(model)
    train(model, optimiser, 6, first=6)
    train(other, resumed, 6, first=6)
    assert equal_parameters(model, other)
    assert resumed.certificate(reference, radius=1.0) == optimiser.certificate(reference, radius=1.0)
    resumed.eval()
    optimiser.eval()
    assert equal_parameters(model, other)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_with_the_same_certificate(copier):
    model = small_model()
    optimiser = certified(model)
    train(model, optimiser, 5)
    other, copied = copier((model, optimiser))
    train(model, optimiser, 5, first=5)
    reference = near(model)
    assert copied.certificate(reference).steps == 5
    train(other, copied, 5, first=5)
    assert copied.certificate(reference, radius=2.0) == optimiser.certificate(reference, radius=2.0)


CHECKPOINTED = {
    "one piece": (lambda m: random_geometry(m, pieces=1), {}),
    "origin": (lambda m: random_geometry(m, centre="origin"), {}),
    "Euclidean": (lambda m: Euclidean(), {}),
    "sum": (lambda m: Diagonal(), {"metric": Online("sum", scale=POLAR)}),
    "tail": (lambda m: Diagonal(), {"averaging": "tail"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CHECKPOINTED)
@pytest.mark.filterwarnings("ignore:.*torch.distributed is")
def test_certified_runs_resume_through_distributed_checkpoints(dtype, case, tmp_path):
    """In one process; test_distributed.py has DDP and FSDP2."""
    geometry, options = CHECKPOINTED[case]

    def made():
        model = small_model(dtype=dtype)
        return model, certified(model, geometry(model), **options)

    (model, optimiser), (other, resumed) = made(), made()
    train(model, optimiser, 5)
    state = dict(zip(("model", "optimiser"), get_state_dict(model, optimiser), strict=True))
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    template = dict(zip(("model", "optimiser"), get_state_dict(other, resumed), strict=True))
    dcp.load(template, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    set_state_dict(other, resumed, model_state_dict=template["model"], optim_state_dict=template["optimiser"])
    train(model, optimiser, 5, first=5)
    train(other, resumed, 5, first=5)
    assert equal_parameters(model, other)
    reference = near(model)
    assert resumed.certificate(reference, radius=1.0) == optimiser.certificate(reference, radius=1.0)


def test_the_empty_step_that_a_checkpoint_takes_is_none():
    """torch.distributed.checkpoint steps a fresh optimiser with zero gradients and lr 0: the mean must not count it."""
    model = small_model()
    optimiser = certified(model)
    get_state_dict(model, optimiser)
    with pytest.raises(ValueError, match="no gradient was counted yet"):
        optimiser.certificate(radius=1.0)
    train(model, optimiser, 3)
    assert optimiser.certificate(radius=1.0).steps == 3


def test_a_run_continued_from_a_state_dict_without_sums_begins_again():
    model = small_model()
    plain = MetaMD(model.named_parameters(), random_geometry(model), lr=0.1)
    train(model, plain, 5)
    optimiser = certified(model, random_geometry(model))
    optimiser.load_state_dict(plain.state_dict())
    steps = recorded(model, optimiser)
    train(model, optimiser, 4, first=5)
    reference = near(model)
    found = optimiser.certificate(reference)
    assert found.steps == 4
    assert found.realised == pytest.approx(regret(steps, reference), rel=1e-6)
    assert "Earlier steps do not count: the run was continued from a state_dict without these sums" in str(found)
    assert found.mirror is None
    plain.load_state_dict(optimiser.state_dict())
    assert "certificate" not in plain.state_dict()["param_groups"][0], "the sums of earlier steps would be taken for all"


def test_sums_of_an_earlier_version_begin_again():
    model = small_model(dtype=torch.bfloat16)
    optimiser = certified(model)
    train(model, optimiser, 3)
    state = optimiser.state_dict()
    for group in state["param_groups"]:  # as that version wrote it
        group["certificate"] = json.dumps({"paper": False, "steps": 3, "rows": {}, "weights": [1.0]})
    optimiser.load_state_dict(state)
    steps = recorded(model, optimiser)
    train(model, optimiser, 2, first=3)
    reference = near(model)
    assert optimiser.certificate(reference).realised == pytest.approx(regret(steps, reference), rel=1e-6)


# edits from outside, and whatever else the old certificates were wrong about


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"averaging": "tail"}], ids=str)
def test_an_edit_from_outside_does_no_harm(options):
    model = small_model(dtype=torch.float64)
    optimiser = certified(model, random_geometry(model, pieces=1), **options)
    steps = recorded(model, optimiser)
    train(model, optimiser, 5)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    train(model, optimiser, 5, first=5)
    reference = near(model)
    found = optimiser.certificate(reference)
    assert (found.steps, found.mirror) == (10, None)
    assert found.realised == pytest.approx(regret(steps, reference), rel=1e-12)


@pytest.mark.parametrize("edit", ["data", "after load_state_dict", "after deepcopy"])
def test_edits_that_nobody_notices_take_the_papers_bounds_away(edit):
    model = small_model(dtype=torch.float64)
    optimiser = certified(model, random_geometry(model, pieces=1))
    train(model, optimiser, 5)
    assert optimiser.certificate(near(model)).mirror is not None
    if edit == "after load_state_dict":
        optimiser.load_state_dict(optimiser.state_dict())
    if edit == "after deepcopy":
        model, optimiser = copy.deepcopy((model, optimiser))
    model[0].weight.data = model[0].weight.data * 1.5
    train(model, optimiser, 5, first=5)
    assert optimiser.certificate(near(model)).mirror is None
    assert optimiser.certificate(near(model)).guaranteed


def test_frozen_tensors_that_the_reference_moves_are_named():
    model = small_model(dtype=torch.float64)
    model[0].requires_grad_(False)
    optimiser = certified(model)
    steps = recorded(model, optimiser)
    train(model, optimiser, 5)
    reference = near(model)
    found = optimiser.certificate(reference, radius=1.0)
    assert found.realised == pytest.approx(regret(steps, reference), rel=1e-12)
    words = str(found)
    assert "here '0.weight', '0.bias' had none" in words
    assert "The reference differs there, in '0.weight', '0.bias'" in words
    assert "and with this model in those outside the optimiser" in words
    same = {**reference, **{f"0.{n}": p for n, p in model[0].named_parameters()}}
    assert "The reference differs there" not in str(optimiser.certificate(same))
    model[0].requires_grad_(True)
    train(model, optimiser, 5, first=5)
    late = optimiser.certificate(radius=1.0)
    assert "Losses of steps in which '0.weight', '0.bias' had no gradient must not depend on it." in str(late)


def test_clipped_gradients_are_weights():
    """f = 50 (x - 9)^2 from 0, clipped to length 1: unweighted, the sums say nothing of sum f."""
    for given in (False, True):
        x, factor = nn.Parameter(torch.zeros(1, dtype=torch.float64)), [1.0]
        opt = torch.optim.SGD([x], lr=0.1)
        run = certify_run(opt, scale=(lambda factor=factor: factor[0]) if given else None)
        weighted = weight = 0.0
        for _ in range(20):
            opt.zero_grad()
            loss = 50 * (x - 9).square().sum()
            loss.backward()
            length = nn.utils.clip_grad_norm_([x], 1.0)
            factor[0] = min(1.0, 1.0 / (float(length) + 1e-6))
            weighted, weight = weighted + factor[0] * loss.item(), weight + factor[0]
            opt.step()
        found = run.certificate([torch.tensor([9.0])], radius=9.0)
        assert weighted <= found.realised <= found.bound
        if given:
            assert found.weight == pytest.approx(weight)
            assert weighted / weight <= found.mean
            assert "weighted by their factors" in str(found)
        else:
            assert "If gradients were clipped in norm or scaled, the sum bound is weighted by the clipping" in str(found)
            assert weighted / weight > found.mean, "without the factors the mean is too small, as the print says"
            assert "The mean then needs the factors, which certify_run(scale=) takes." in str(found)
        assert "After clipping by value or per tensor nothing follows." in str(found)


@pytest.mark.parametrize("wrong", ["clipped by value", "clipped per tensor", "gradients elsewhere, as SAM takes them"])
def test_what_is_not_covered_breaks_the_statement_and_is_said(wrong):
    """f = |x - 2| / 20 + 9 |y - 3|: gradients that are no multiples of its own give a bound that its regret is above."""
    x, y = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    opt = torch.optim.SGD([x, y], lr=0.1)
    run, start = certify_run(opt), 0.1 + 27.0

    def f():
        return (x - 2).abs().sum() / 20 + 9 * (y - 3).abs().sum()

    opt.zero_grad()
    if wrong == "gradients elsewhere, as SAM takes them":
        with torch.no_grad():
            y.add_(4.0)
        f().backward()
        with torch.no_grad():
            y.sub_(4.0)
    else:
        f().backward()
        if wrong == "clipped by value":
            nn.utils.clip_grad_value_([x, y], 0.05)
        else:
            for p in (x, y):
                nn.utils.clip_grad_norm_([p], 0.05)
    opt.step()
    found = run.certificate([torch.tensor([0.0]), torch.tensor([3.0])], radius=3.0)
    assert found.realised < start - 0.1, "the regret against (0, 3) is 27"
    assert "After clipping by value or per tensor nothing follows." in str(found)
    assert "Gradients must have been taken at the parameters of the step, which SAM and closures that" in str(found)


SCALED = {
    "MetaMD": (lambda x: MetaMD([x], Euclidean(), lr=0.1, certify=True), False),
    "SGD": (lambda x: torch.optim.SGD([x], lr=0.1), False),
    "SGD that scales itself": (lambda x: torch.optim.SGD([x], lr=0.1, fused=True), False),
    "the same, unscaled before": (lambda x: torch.optim.SGD([x], lr=0.1, fused=True), True),
}


@pytest.mark.parametrize("kind", SCALED)
def test_steps_that_amp_skips_are_not_counted(kind):
    """A real GradScaler: gradients overflow at first, and it skips until its scale is small enough.

    A fused optimiser gets scaled gradients, and skips steps itself: the scale is a weight then.
    """
    made, unscaled = SCALED[kind]
    x = nn.Parameter(torch.tensor([3.0, -1.0]))
    opt = made(x)
    run, taken, total, weight = opt if kind == "MetaMD" else certify_run(opt), 0, 0.0, 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-8)
    for _ in range(6):
        opt.zero_grad()
        loss = x.square().sum()
        scaler.scale(loss).backward()
        if unscaled:
            scaler.unscale_(opt)
        before, scale = x.detach().clone(), scaler.get_scale() if kind == "SGD that scales itself" else 1.0
        scaler.step(opt)
        scaler.update()
        if not torch.equal(before, x):
            taken, total, weight = taken + 1, total + scale * loss.item(), weight + scale
    found = run.certificate([torch.zeros(2)], radius=4.0)
    assert 0 < found.steps == taken < 6
    assert found.weight == weight
    assert total <= found.realised <= found.bound
    assert "Steps that AMP skips are not counted." in str(found)


def test_groups_with_rates_of_their_own_are_certified_together():
    model = small_model(dtype=torch.float64)
    named = list(model.named_parameters())
    groups = [{"params": named[:2], "lr": 0.3}, {"params": named[2:], "weight_decay": 0.1, "momentum": 0.5}]
    optimiser = MetaMD(groups, random_geometry(model), lr=0.05, certify=True)
    steps = recorded(model, optimiser)
    train(model, optimiser, 6)
    reference = near(model)
    found = optimiser.certificate(reference, radius=1.0)
    assert found.realised == pytest.approx(regret(steps, reference), rel=1e-12)
    assert found.mirror is None, "the rates differ"


def test_maximising_certifies_the_negative_loss_and_games_are_none():
    p = nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.float64))
    optimiser = MetaMD([p], MaxDiagonal(2), lr=0.1, maximize=True, certify=True)
    reference, total = torch.ones(2, dtype=torch.float64), 0.0
    for _ in range(10):
        optimiser.zero_grad()
        gain = -(p - reference).square().sum()
        gain.backward()
        total -= gain.item()
        optimiser.step()
    found = optimiser.certificate([reference], radius=3.0)
    assert total <= found.realised <= found.bound
    assert "about its negative" in str(found)
    model = small_model()
    named = list(model.named_parameters())
    game = MetaMD([{"params": named[:2]}, {"params": named[2:], "maximize": True}], Euclidean(), 0.1, certify=True)
    train(model, game, 3)
    assert "a game, and not the regret of one loss" in str(game.certificate(radius=1.0))


def test_a_diverged_run_has_no_guarantee():
    x = nn.Parameter(torch.ones(1))
    run = certify_run(opt := torch.optim.SGD([x], lr=1.0))
    x.grad = torch.tensor([math.inf])
    opt.step()
    found = run.certificate(radius=1.0)
    assert not found.guaranteed
    assert "No guarantee: the sums are not finite" in str(found)


# any optimiser of torch


def test_certify_run_counts_every_evaluation_of_a_closure():
    x, seen = nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64)), []
    opt = torch.optim.LBFGS([x], max_iter=4, line_search_fn="strong_wolfe")
    run = certify_run(opt)

    def closure():
        opt.zero_grad()
        loss = torch.cosh(x).sum()
        loss.backward()
        seen.append((x.detach().clone(), x.grad.clone(), loss.item()))
        return loss

    for _ in range(3):
        opt.step(closure)
    opt.step(closure=closure)
    u = torch.zeros(2, dtype=torch.float64)
    found = run.certificate([u], radius=4.0)
    assert found.steps == len(seen) > 4
    assert found.realised == pytest.approx(sum(float(g @ (at - u)) for at, g, _ in seen), rel=1e-12)
    assert found.mean_loss == pytest.approx(sum(loss for *_, loss in seen) / len(seen))
    assert sum(loss - 2.0 for *_, loss in seen) <= found.realised


def test_certify_run_and_metamd_itself_agree():
    model = small_model()
    optimiser = certified(model, momentum=0.5)
    run = certify_run(optimiser)
    train(model, optimiser, 6)
    reference = near(model)
    inside, outside = (o.certificate(reference, radius=2.0) for o in (optimiser, run))
    assert (inside.bound, inside.realised) == (outside.bound, outside.realised)
    run.remove()
    train(model, optimiser, 1, first=6)
    assert run.certificate(radius=1.0).steps == 6


def test_certify_run_goes_on_from_its_state():
    def made():
        model = small_model()
        optimiser = torch.optim.Adam(model.named_parameters(), lr=0.01)
        return model, optimiser, certify_run(optimiser, random_geometry(model))

    model, optimiser, run = made()
    train(model, optimiser, 4)
    saved = saved_and_loaded([model.state_dict(), optimiser.state_dict(), run.state_dict()])
    other, again, resumed = made()
    for thing, state in zip((other, again, resumed), saved, strict=True):
        thing.load_state_dict(state)
    train(model, optimiser, 4, first=4)
    train(other, again, 4, first=4)
    reference = near(model)
    assert resumed.certificate(reference, radius=2.0) == run.certificate(reference, radius=2.0)
    stranger = certify_run(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    with pytest.raises(ValueError, match=r"these sums are of a run with a parameter '0\.bias', but the optimiser has '0'"):
        stranger.load_state_dict(saved[2])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda things: pickle.loads(pickle.dumps(things))])
def test_a_copy_of_certify_run_watches_the_copy_of_the_optimiser(copier):
    """torch gives copies of an optimiser no hooks: steps of the copy would not be counted."""
    for made in (torch.optim.Adam, lambda named: MetaMD(named, MaxDiagonal(2), lr=0.1)):
        model = small_model()
        run = certify_run(optimiser := made(model.named_parameters()))
        train(model, optimiser, 3)
        other, copied, again = copier((model, optimiser, run))
        train(model, optimiser, 4, first=3)
        assert again.certificate(radius=1.0).steps == 3
        train(other, copied, 4, first=3)
        assert again.certificate(radius=1.0) == run.certificate(radius=1.0)
        run.remove()
        run.remove()
        other, copied, still = copier((model, optimiser, run))
        train(other, copied, 1)
        assert still.certificate(radius=1.0).steps == 7, "a run that is not watched has copies that are not"


def test_clipped_runs_of_a_file_have_its_radius():
    """The print sends those who clip to certify_run: there the file must say as much as with certify=True."""
    first = small_model()
    pair = first, certified(first, with_radius(first))
    for model, optimiser in (pair, copy.deepcopy(pair)):
        runs = [certify_run(optimiser, scale=0.5), certify_run(optimiser, random_geometry(model))]
        train(model, optimiser, 3)
        clipped, own = runs[0].certificate(), optimiser.certificate()
        assert (clipped.source, clipped.expected) == (own.source, own.expected)
        assert "To expect of training on digits as the file recommends" in str(clipped)
        with pytest.raises(ValueError, match="no file has given a radius"):  # it is one in the metric of the file
            runs[1].certificate()


def test_a_wrapper_that_is_an_optimiser_by_its_type_alone_is_refused():
    """Accelerate has such a one, and its steps have no hooks."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = small_model()
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped = accelerator.prepare(torch.optim.Adam(model.named_parameters()))
    with pytest.raises(TypeError, match=r"got AcceleratedOptimizer. Pass .* which a wrapper has as \.optimizer"):
        certify_run(wrapped)
    run = certify_run(wrapped.optimizer)
    for t in range(3):
        wrapped.zero_grad()
        accelerator.backward(model(torch.full((2, 5), float(t))).square().mean())
        wrapped.step()
    assert run.certificate(radius=1.0).steps == 3


def test_certify_run_refuses_what_it_cannot_count():
    layer = nn.Embedding(4, 2, sparse=True)
    opt = torch.optim.SparseAdam(list(layer.parameters()))
    run = certify_run(opt)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"certify_run needs dense real gradients, but that of '0' is sparse"):
        opt.step()
    run.remove()
    opt.step()
    with pytest.raises(TypeError, match="certify_run needs a torch optimiser, got Linear"):
        certify_run(nn.Linear(2, 2))
    model, other = small_model(), nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"'0\.weight'"):  # at once, and not when the run is over
        certify_run(torch.optim.Adam(other.named_parameters(prefix="0")), random_geometry(model))


def test_the_frozen_base_of_a_model_with_adapters_has_no_metric():
    """As for MetaMD: a geometry of the adapters alone."""
    base, adapter = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)
    geometry = random_geometry(adapter, pieces=1).bind(dict(adapter.named_parameters()))
    named = [*((f"base.{n}", p) for n, p in base.named_parameters()), *adapter.named_parameters()]
    ways = []
    for made in (lambda: MetaMD(named, geometry, lr=0.1, certify=True), lambda: torch.optim.SGD(named, lr=0.1)):
        run = optimiser = made()
        run = run if isinstance(run, MetaMD) else certify_run(run, geometry)
        optimiser.zero_grad()
        adapter(base(torch.ones(2, 3))).sum().backward()
        optimiser.step()
        ways.append(run.certificate(radius=1.0))
    assert ways[0].bound == pytest.approx(ways[1].bound, rel=1e-12)
    assert "here 'base.weight', 'base.bias' had none" in str(ways[1])


def test_loss_scales_that_an_optimiser_takes_off_itself_are_weights():
    """GradScaler leaves gradients scaled for fused optimisers, and tells them which steps to skip."""
    x = nn.Parameter(torch.ones(2, dtype=torch.float64))
    run = certify_run(opt := torch.optim.SGD([x], lr=0.1))
    for found_inf in (0.0, 1.0, 0.0):
        opt.grad_scale, opt.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
        x.grad = torch.full((2,), math.nan if found_inf else 8.0, dtype=torch.float64)
        run._count(None)
    found = run.certificate([torch.zeros(2)])
    assert (found.steps, found.weight) == (2, 16)
    assert found.realised / found.weight == pytest.approx(2.0)
    again = certify_run(torch.optim.SGD([x], lr=0.1))
    again.load_state_dict(saved_and_loaded(run.state_dict()))
    assert again.certificate([torch.zeros(2)]) == found


def quadratic_run(steps=3, scale=None, lr=0.1, closure=False, maximize=False):
    """f = |x|^2 in float64 by SGD, whose every loss is known where it has a closure."""
    x = nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64))
    opt = torch.optim.SGD([x], lr=lr, maximize=maximize)
    run, losses = certify_run(opt, scale=scale), []
    for _ in range(steps):

        def evaluate():
            opt.zero_grad()
            loss = x.square().sum() * (-1 if maximize else 1)
            factor = scale() if callable(scale) else scale
            (loss * (1.0 if factor is None else factor)).backward()
            losses.append(loss.item())
            return loss

        if closure:
            opt.step(evaluate)
        else:
            evaluate()
            opt.step()
    return run, losses


@pytest.mark.parametrize(
    ("scale", "kind", "sentence"),
    [
        (-1.0, ValueError, "the scale of a gradient must be finite and not negative, got -1"),
        (math.nan, ValueError, "the scale of a gradient must be finite and not negative, got nan"),
        (lambda: "x", TypeError, "the scale of a gradient must be a number, got 'x'"),
        (0.0, ValueError, "the factors of all gradients are zero"),
        (torch.tensor(0.0), ValueError, "the factors of all gradients are zero"),
    ],
)
def test_factors_that_are_no_weights_are_refused(scale, kind, sentence):
    """A negative factor would turn the statement round."""
    x = nn.Parameter(torch.ones(1))
    run = certify_run(opt := torch.optim.SGD([x], lr=0.1), scale=scale)
    x.grad = torch.ones(1)

    def step_and_ask():
        opt.step()
        run.certificate(radius=1.0)

    with pytest.raises(kind, match=sentence):
        step_and_ask()


def test_a_negative_factor_on_the_device_leaves_no_guarantee():
    x = nn.Parameter(torch.ones(1))
    run = certify_run(opt := torch.optim.SGD([x], lr=0.1), scale=lambda: torch.tensor(-1.0))
    x.grad = torch.ones(1)
    opt.step()
    assert not run.certificate(radius=1.0).guaranteed


def test_the_mean_loss_is_weighted_as_the_bound_is():
    factors = iter([1.0, 1.0, 0.1, 0.1, 0.01, 0.01])  # asked for by the closure, and by the certificate
    run, losses = quadratic_run(3, scale=lambda: next(factors), closure=True)
    found = run.certificate(radius=0.1)
    assert found.weight == pytest.approx(1.11)
    assert found.mean_loss == pytest.approx((losses[0] + 0.1 * losses[1] + 0.01 * losses[2]) / 1.11)


@pytest.mark.parametrize("returned", [None, "loss", {"loss": 1.0}, torch.ones(3), torch.ones(1)], ids=str)
def test_what_a_closure_returns_does_not_break_a_run(returned):
    x = nn.Parameter(torch.ones(1))
    own = MetaMD([x], Euclidean(), lr=0.1, certify=True)
    run = certify_run(opt := torch.optim.SGD([x], lr=0.1))

    def closure():
        x.grad = torch.ones(1)
        return returned

    for optimiser, certified_run in ((opt, run), (own, own)):
        optimiser.step(closure)
        known = isinstance(returned, torch.Tensor) and returned.numel() == 1
        assert certified_run.certificate(radius=1.0).mean_loss == (1.0 if known else None)


def test_the_mean_loss_of_a_maximised_loss_is_that_of_its_negative():
    run, losses = quadratic_run(3, closure=True, maximize=True)
    found = run.certificate(radius=100.0)
    assert found.mean_loss == pytest.approx(-sum(losses) / 3)
    assert found.says_nothing
    run, _ = quadratic_run(3, closure=True)
    assert not replace(run.certificate(radius=100.0), mean_loss=-1.0).says_nothing, "such losses are not >= 0"


def test_a_warm_up_from_rate_zero_is_counted_from_its_first_step():
    """Its gradients were taken; the empty step of a checkpoint has none, also where the rate is a tensor."""
    model = small_model()
    for lr in (0.1, torch.tensor(0.1)):
        opt = torch.optim.Adam(model.named_parameters(), lr=lr)
        run = certify_run(opt)
        get_state_dict(model, opt)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: t / 3)
        for t in range(4):
            train(model, opt, 1, first=t)
            schedule.step()
        assert run.certificate(radius=1.0).steps == 4
    own = certified(model)
    own.param_groups[0]["lr"] = 0.0
    train(model, own, 1)
    assert own.certificate(radius=1.0).steps == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_covers_what_lies_below_the_smallest_normal_number(dtype):
    """Against exact sums: numbers near the smallest of a type, whose squares are zero in it."""
    off = []
    for size in (1e-25, 1e-42) if dtype == torch.float32 else (1e-25, 1e-160, 1e-310):
        scale, true = min(1.0, size * 1e150), Fraction(0)
        x = nn.Parameter(torch.full((200,), 0.7 * scale, dtype=dtype))
        run = certify_run(opt := torch.optim.SGD([x], lr=min(1e38, scale / size)))
        for t in range(5):
            x.grad = torch.randn(200, generator=torch.Generator().manual_seed(t)).to(dtype) * size
            true += sum(Fraction(g) * Fraction(y) for g, y in zip(x.grad.tolist(), x.tolist(), strict=True))
            opt.step()
        found = run.certificate([torch.zeros(200)])
        off.append(abs(Fraction(found.realised) - true))
        assert off[-1] <= Fraction(found.rounding) < Fraction(1e-20)
    assert any(off), "nothing was rounded"


def test_rounding_covers_the_sum_of_the_gradients():
    """Against exact sums, far from the start: there counts what G is off by, and nothing else does."""
    below = 0
    for seed in range(10):
        x, g = nn.Parameter(torch.zeros(50, dtype=torch.float64)), torch.Generator().manual_seed(seed)
        run = certify_run(opt := torch.optim.SGD([x], lr=1e-30))
        path, total = Fraction(0), [Fraction(0)] * 50
        for _ in range(30):
            x.grad = torch.randn(50, generator=g, dtype=torch.float64)
            rows = list(zip(map(Fraction, x.grad.tolist()), map(Fraction, x.tolist()), strict=True))
            path, total = path + sum(a * b for a, b in rows), [s + a for s, (a, _) in zip(total, rows, strict=True)]
            opt.step()
        found = run.certificate([torch.full((50,), 1e6)], radius=1e6)
        assert abs(Fraction(found.realised) - (path - 10**6 * sum(total))) <= Fraction(found.rounding) < 1
        attained = path + 10**6 * Fraction(math.isqrt(int(sum(t * t for t in total) * 10**40))) / 10**20
        assert Fraction(found.bound) >= attained
        below += Fraction(found.bound) - Fraction(found.rounding) < attained
    assert below, "nothing was rounded"


def test_coordinates_that_are_not_quite_orthogonal_are_in_the_rounding_and_others_have_no_guarantee():
    """V'G stands for V^-1 G. Files that are far off are refused; a potential in memory may be."""
    model = nn.Linear(4, 3, bias=False).double()
    phi = random_basis(dict(model.named_parameters()), pieces=1)
    found = {}
    for size in (1.0, 0.999, 0.1):
        bad = copy.copy(phi)
        bad.basis = phi.basis.with_factors({k: v * size for k, v in phi.basis.factors.items()})
        optimiser = MetaMD(model.named_parameters(), bad, lr=0.1, certify=True)
        optimiser.zero_grad()
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        optimiser.step()
        found[size] = optimiser.certificate(radius=1.0)
    assert [c.guaranteed for c in found.values()] == [True, True, False]
    exact, near = (found[size] for size in (1.0, 0.999))  # of one gradient, at the start: rho N*(G)
    assert near.bound - near.rounding < exact.bound < (exact.bound - exact.rounding) / 0.999 <= near.bound


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"radius": "x"}, TypeError, "radius must be a number, or one for every tensor, got 'x'"),
        ({"radius": 1.0, "mean_loss": "x"}, TypeError, "mean_loss must be a number, got 'x'"),
    ],
)
def test_texts_for_numbers_are_refused(options, kind, sentence):
    run, _ = quadratic_run()
    with pytest.raises(kind, match=sentence):
        run.certificate(**options)


def test_numbers_may_be_those_of_numpy_and_torch():
    run, _ = quadratic_run()
    right = run.certificate(radius=1.0, mean_loss=0.5)
    assert run.certificate(radius=np.float32(1), mean_loss=np.float32(0.5)) == right
    assert run.certificate(radius=torch.tensor(1.0), mean_loss=torch.tensor(0.5)) == right
    assert run.certificate(radius=1.0, mean_loss=math.nan).mean_loss is None, "a run that diverged has no mean loss"


def test_sums_that_are_not_those_of_a_run_are_refused():
    run, _ = quadratic_run()
    right = run.state_dict()
    shapes = {"0": {**right["stores"]["0"], "certificate_sum": torch.zeros(5)}}
    for wrong in ({}, None, {"stores": {"0": 1}}, {"sums": "{}", "stores": []}):
        with pytest.raises(ValueError, match="this is not what state_dict of a certified run gave"):
            run.load_state_dict(wrong)
    for sums in (
        "x",
        "[" * 100_000,
        "[1]",
        json.dumps({"version": VERSION}),
        right["sums"].replace('"names": ["0"]', '"names": ["0", "1"]'),
    ):
        with pytest.raises(ValueError, match="the sums of a certificate must be as state_dict wrote them"):
            run.load_state_dict({**right, "sums": sums})
    for stores in (shapes, {}, {"0": {}}):
        with pytest.raises(ValueError, match=r"the sums of '0' must have a tensor 'certificate_.*' of its shape \(2,\)"):
            run.load_state_dict({**right, "stores": stores})
    model = small_model()
    optimiser = certified(model)
    train(model, optimiser, 2)
    state = optimiser.state_dict()
    state["state"] = {**state["state"], 0: {**state["state"][0], "certificate_sum": torch.zeros(5)}}
    with pytest.raises(ValueError, match=r"'certificate_sum' in its state has \(5,\)"):
        optimiser.load_state_dict(state)
    state = optimiser.state_dict()
    state["param_groups"][0]["certificate"] = "x"
    with pytest.raises(ValueError, match="the sums of a certificate must be as state_dict wrote them"):
        optimiser.load_state_dict(state)
    assert run.state_dict()["sums"] == right["sums"], "a refusal changes nothing"


def test_parameters_that_join_later():
    model, extra = small_model(), nn.Linear(3, 1)
    for run_of in (lambda o: o, certify_run):
        optimiser = MetaMD(model.named_parameters(), MaxDiagonal(2), lr=0.1, certify=True)
        run = run_of(optimiser)
        train(model, optimiser, 3)
        optimiser.add_param_group({"params": [(f"extra.{n}", p) for n, p in extra.named_parameters()]})
        model(torch.ones(2, 5)).sum().backward()
        extra(torch.ones(3)).sum().backward()
        optimiser.step()
        assert "Losses of steps in which 'extra.weight', 'extra.bias' had no gradient" in str(run.certificate(radius=1.0))
        optimiser.zero_grad()


# comparators and words


def test_a_reference_may_be_given_in_several_ways():
    model = small_model()
    optimiser = certified(model)
    train(model, optimiser, 5)
    other = small_model(seed=1)
    first = optimiser.certificate(other.state_dict())
    wrapped = {f"module._orig_mod.{n}": x for n, x in other.state_dict().items()} | {"extra": torch.zeros(1)}
    for reference in (other, list(other.parameters()), other.parameters(), wrapped):
        assert optimiser.certificate(reference) == first
    with pytest.raises(ValueError, match=r"has no tensor '0\.bias'; it has '0\.weight'. Pass the state_dict of a model"):
        optimiser.certificate({"0.weight": other[0].weight})
    unnamed = certify_run(sgd := torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, sgd, 1)
    with pytest.raises(ValueError, match=r"have no names: .* or pass reference=list\(model\.parameters\(\)\)"):
        unnamed.certificate(other)
    assert unnamed.certificate(list(other.parameters())).realised is not None
    with pytest.raises(ValueError, match="has 1 tensors, but the optimiser has 4 parameters"):
        optimiser.certificate([other[0].weight])
    with pytest.raises(ValueError, match=r"'0\.weight' in shape \(3,\), but the parameter has \(8, 5\)"):
        optimiser.certificate({**other.state_dict(), "0.weight": torch.zeros(3)})
    for wrong in (3, "model.pt", [1.0, 2.0]):
        with pytest.raises(TypeError, match=r"a reference must be a state_dict, a module, or tensors"):
            optimiser.certificate(wrong)


def test_what_is_missing_is_said():
    model = small_model()
    optimiser = certified(model)
    with pytest.raises(ValueError, match="no gradient was counted yet"):
        optimiser.certificate(model)
    train(model, optimiser, 1)
    with pytest.raises(ValueError, match=r"no file has given a radius. Run metamd certify FILE FAMILY"):
        optimiser.certificate()
    for wrong in (-1.0, math.nan, {"0.weight": -1.0}):
        with pytest.raises(ValueError, match="radius must be finite and not negative"):
            optimiser.certificate(radius=wrong)
    with pytest.raises(ValueError, match="Build MetaMD with certify=True"):
        MetaMD(model.named_parameters(), Euclidean()).certificate(model)


def with_radius(model, **said):
    radius = {"quantile": 2.0, "scales": {n: 0.5 for n, _ in model.named_parameters()}, "confidence": 0.95, "tasks": 39}
    statement = {"about": "next task", "quantity": "loss after 50 steps", "bound": 0.25, "verdict": "holds"}
    made = {"radius": {**radius, "reference": "a longer run", **said}, "statements": [{**statement, "confidence": 0.95}]}
    learned = LearnedOptimiser.from_potential(random_geometry(model, pieces=1))
    return replace(learned, header=replace(learned.header, held_out={"certificates": {"digits": made}}))


def test_a_file_with_a_radius_certifies_without_being_asked():
    model = small_model()
    optimiser = certified(model, with_radius(model))
    train(model, optimiser, 5)
    found = optimiser.certificate(mean_loss=0.5)
    assert found == replace(optimiser.certificate(radius=dict.fromkeys(POLAR, 1.0), mean_loss=0.5), source=found.source)
    lines = str(found).splitlines()
    assert lines[1] == (
        "  To expect of training on digits as the file recommends, convex or not: loss after 50 steps <= 0.25 with "
        "probability 95 %."
    )
    assert lines[2].startswith(
        "  No model within the radius of every tensor of the start (with probability 95 % over 39 held-out tasks and this "
        "one, its reference solution, a longer run, lies there) would have had a mean loss, on this run's own batches, "
    )
    assert "if the loss were convex. In general this bounds the linearised loss." in lines[2]


def test_a_file_without_a_certificate_leads_with_the_command_that_makes_one():
    model = small_model()
    optimiser = certified(model, LearnedOptimiser.from_potential(random_geometry(model, pieces=1)))
    train(model, optimiser, 2)
    first = str(optimiser.certificate(radius=1.0)).splitlines()[1]
    assert first == "  metamd certify FILE FAMILY finds what to expect of training as the file recommends, convex or not."
    assert "metamd certify" not in str(certified_by_adam(2)), "there is no file"


def certified_by_adam(steps):
    model = small_model()
    run = certify_run(adam := torch.optim.Adam(model.named_parameters()))
    train(model, adam, steps)
    return run.certificate(radius=1.0)


@pytest.mark.parametrize(
    "said",
    [
        *({"quantile": "x"}, {"quantile": -1.0}, {"scales": [1]}, {"more": 1}, {"tasks": 1.5}),
        *({"tasks": -3}, {"confidence": 5.0}, {"reference": 5}, {"quantile": 1e308, "scales": {"x": 1e10}}),
    ],
)
def test_a_radius_of_a_file_is_not_trusted(said):
    assert with_radius(small_model()).header.radius is not None
    assert with_radius(small_model(), **said).header.radius is None


def test_words_of_a_file_are_printed_safely():
    model = small_model()
    learned = with_radius(model, reference="\x1b[2J\n" + "x" * 10_000)
    learned.header.held_out["certificates"]["digits"]["statements"][0]["quantity"] = "\x1b[31m\nloss"
    optimiser = certified(model, learned)
    train(model, optimiser, 1)
    said = str(optimiser.certificate())
    assert "\x1b" not in said
    assert len(said) < 3000
    assert len(said.splitlines()) < 10


def test_where_it_says_nothing_it_says_so():
    model = small_model()
    optimiser = certified(model)
    losses = []

    def closure():
        optimiser.zero_grad()
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(4):
        optimiser.step(closure)
    wide, narrow = optimiser.certificate(radius=100.0), optimiser.certificate(radius=0.0)
    assert wide.mean_loss == pytest.approx(np.mean(losses))
    assert wide.says_nothing
    assert "that says nothing here: the run's own mean loss is" in str(wide)
    assert not narrow.says_nothing
    assert "less than" in str(narrow), "the start itself was worse than the run"
    train(model, optimiser, 1)
    assert "only if it is below the run's own mean loss" in str(optimiser.certificate(radius=1.0))


def test_the_prepared_pair_is_certified():
    model = small_model()
    learned = with_radius(model)
    optimiser, schedule = metamd.prepare(model.named_parameters(), learned, steps=6, certify=True)
    for t in range(6):
        train(model, optimiser, 1, first=t)
        schedule.step()
    assert optimiser.certificate().steps == 6
    assert isinstance(learned.header.radius, Radius)


def test_fused_steps_have_the_certificate_of_plain_ones():
    found = []
    for fused in (False, True):
        model = small_model(dtype=torch.float64)
        optimiser = certified(model, fused=fused)
        train(model, optimiser, 20)
        found.append(optimiser.certificate(small_model(seed=2, dtype=torch.float64), radius=1.0))
    plain, fused = found
    assert fused.bound == pytest.approx(plain.bound, rel=1e-6)
    assert fused.mirror.bound == pytest.approx(plain.mirror.bound, rel=1e-6)

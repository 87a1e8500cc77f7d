"""MetaMD: its step, its groups, what it refuses, what it remembers."""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import metamd
from metamd import Diagonal, Euclidean, MaxDiagonal, MetaMD, NegativeEntropy, PNorm, mirror_step
from tests.helpers import equal_parameters, random_geometry, small_model, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"lr": torch.tensor(0.05)}])
def test_euclidean_is_sgd_bit_for_bit(dtype, options):
    ours, theirs = small_model(dtype=dtype), small_model(dtype=dtype)
    train(ours, MetaMD(ours.named_parameters(), Euclidean(), **{"lr": 0.1, **options}), 30)
    train(theirs, torch.optim.SGD(theirs.parameters(), **{"lr": 0.1, **options}), 30)
    assert equal_parameters(ours, theirs)


def test_bit_for_bit_rejects_another_learning_rate():
    ours, theirs = small_model(), small_model()
    train(ours, MetaMD(ours.named_parameters(), Euclidean(), lr=0.1 * (1 + 1e-6)), 5)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 5)
    assert not equal_parameters(ours, theirs)


def test_decoupled_decay_is_that_of_adamw():
    """With zero gradients both shrink by 1 - lr wd."""
    for geometry in (Euclidean(), MaxDiagonal(3), Diagonal(centre="origin")):
        p, q = (nn.Parameter(torch.arange(4.0)) for _ in range(2))
        p.grad, q.grad = torch.zeros(4), torch.zeros(4)
        MetaMD([p], geometry, lr=0.5, weight_decay=0.1).step()
        torch.optim.AdamW([q], lr=0.5, weight_decay=0.1).step()
        assert torch.allclose(p, q)


def test_optimiser_takes_the_pure_step():
    """Step by step the optimiser and the pure function agree, on kinks too."""
    for centre in ("start", "origin"):
        model = small_model(dtype=torch.float64)
        geometry = random_geometry(model, centre=centre)
        optimiser = MetaMD(model.named_parameters(), geometry, lr=0.3)
        phi = geometry.bind(list(model.named_parameters()))
        params, active, kinks = {n: p.detach().clone() for n, p in model.named_parameters()}, None, 0
        for t in range(40):
            train(model, optimiser, 1, first=t)
            step = mirror_step(params, {n: p.grad for n, p in model.named_parameters()}, phi, 0.3, active=active)
            params, active = {n: x.detach() for n, x in step.params.items()}, step.active
            kinks += int((active.weights > 0).sum() > 1)
            assert all(torch.equal(params[n], p) for n, p in model.named_parameters())
        assert kinks > 0


def test_argmax_is_over_the_whole_model():
    """Two groups see one piece; an argmax per group would choose differently."""
    a, b = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([1.0]))
    phi = MaxDiagonal(2, centre="origin").with_metrics(
        {"a": torch.tensor([[1.0], [0.1]]).log(), "b": torch.tensor([[1.0], [2.0]]).log()}
    )
    optimiser = MetaMD([{"params": [("a", a)]}, {"params": [("b", b)], "lr": 0.5}], phi, lr=0.1, exact=False)
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    optimiser.step()
    # Whole model: 9 + 1 > 0.9 + 2, so piece 0 for both. Alone, b would take piece 1 (2 > 1) and half the step.
    assert torch.allclose(a, torch.tensor([2.9]))
    assert torch.allclose(b, torch.tensor([0.5]))
    assert optimiser.active_piece == 0


def test_group_learning_rates_scale_the_groups_gradient():
    x = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.tensor([-1.0], dtype=torch.float64)}
    phi = random_geometry(nn.ParameterDict(x), pieces=3, centre="origin")
    a, b = (nn.Parameter(v.clone()) for v in x.values())
    a.grad, b.grad = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    optimiser = MetaMD([{"params": [("a", a)]}, {"params": [("b", b)], "lr": 0.1}], phi, lr=0.5)
    expected = mirror_step(x, {"a": 5 * a.grad, "b": b.grad}, phi.bind(x), 0.1).params
    optimiser.step()
    assert torch.allclose(a, expected["a"])
    assert torch.allclose(b, expected["b"])


def test_parameters_without_gradient_stay_exactly():
    model = small_model()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.3)
    train(model, optimiser, 20)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items() if n.startswith("0."))
    assert not torch.equal(before["2.weight"], model[2].weight)
    assert all("start" not in optimiser.state[p] for p in model[0].parameters())


def test_unfreezing_later():
    model = small_model()
    model[0].requires_grad_(False)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.3)
    train(model, optimiser, 5)
    model[0].requires_grad_(True)
    losses = train(model, optimiser, 60, first=5)
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_parameters_added_later():
    model, extra = small_model(), nn.Linear(3, 3)
    optimiser = MetaMD(model.named_parameters(), MaxDiagonal(2), lr=0.1)
    train(model, optimiser, 3)
    optimiser.add_param_group({"params": [(f"extra.{n}", p) for n, p in extra.named_parameters()], "lr": 0.01})
    before = extra.weight.detach().clone()
    extra(torch.ones(3)).sum().backward()
    optimiser.step()
    assert torch.allclose(extra.weight, before - 0.01 * extra.weight.grad)


def test_parameters_added_to_a_learned_geometry_need_a_metric():
    model, extra = small_model(), nn.Linear(3, 3)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model))
    with pytest.raises(ValueError, match=r"'extra\.weight' of shape \(3, 3\) has no metric"):
        optimiser.add_param_group({"params": [(f"extra.{n}", p) for n, p in extra.named_parameters()]})
    assert len(optimiser.param_groups) == 1
    train(model, optimiser, 2)


def test_outside_edits_are_noticed():
    """After an edit the weights are recomputed: the optimiser equals a fresh one at that point. A stale w would not."""
    model = small_model(dtype=torch.float64)
    geometry = random_geometry(model, centre="origin")
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.3)
    train(model, optimiser, 15)
    assert (optimiser._active.weights > 0).sum() > 1, "not on a kink: the edit would not matter"
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.linspace(0.5, 2.0, p.numel(), dtype=p.dtype).reshape(p.shape))
    twin = copy.deepcopy(model)
    stale, fresh = copy.deepcopy(optimiser._active), MetaMD(twin.named_parameters(), geometry, lr=0.3)
    train(model, optimiser, 1, first=15)
    train(twin, fresh, 1, first=15)
    assert equal_parameters(model, twin)
    phi = geometry.bind(list(model.named_parameters()))
    assert phi.activate(dict(model.named_parameters()), stale).weights.max() == 1


def test_nonfinite_gradients_are_refused_before_anything_is_written():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model))
    train(model, optimiser, 2)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimiser.state_dict())
    for bad in (torch.nan, torch.inf, -torch.inf):
        model[2].bias.grad[1] = bad
        with pytest.raises(
            RuntimeError, match=r"gradient of '2\.bias' \(and of 0 more\) is not finite; nothing was changed"
        ):
            optimiser.step()
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert optimiser.state_dict()["param_groups"][0]["step"] == state["param_groups"][0]["step"]
    unchecked = MetaMD(model.named_parameters(), Euclidean(), check_finite=False)
    unchecked.step()
    assert not torch.isfinite(model[2].bias).all()


@pytest.mark.parametrize("lr", [float("nan"), float("inf")])
def test_a_rate_that_is_no_number_is_refused_before_anything_moves(lr):
    p = torch.nn.Parameter(torch.ones(2))
    opt = MetaMD([("p", p)], Euclidean(), lr=0.1)
    p.grad = torch.ones(2)
    opt.step()
    before, opt.param_groups[0]["lr"] = p.detach().clone(), lr
    with pytest.raises(ValueError, match=f"lr must be finite, got {lr}"):
        opt.step()
    assert torch.equal(p, before)
    opt.param_groups[0]["lr"] = 0.1
    opt.step()
    torch.testing.assert_close(p.detach(), before - 0.1)


def test_large_finite_gradients_are_not_refused():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.full((3,), 3e38)
    MetaMD([p], Euclidean(), lr=1e-38).step()
    assert torch.isfinite(p).all()


def test_sparse_and_complex_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="'weight' is sparse"):
        MetaMD(table.named_parameters(), Euclidean()).step()
    z = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    z.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="is complex"):
        MetaMD([z], Euclidean()).step()


def test_entropy_and_p_norm_train():
    p = nn.Parameter(torch.full((4,), 0.25))
    cost = torch.tensor([3.0, 1.0, 2.0, 4.0])
    optimiser = MetaMD([p], NegativeEntropy(), lr=0.5)
    for _ in range(100):
        optimiser.zero_grad()
        (p @ cost).backward()
        optimiser.step()
    assert p.sum().item() == pytest.approx(1, abs=1e-5)
    assert p[1] > 0.99
    x = nn.Parameter(torch.zeros(20))
    target = torch.zeros(20)
    target[3] = 1.0
    optimiser = MetaMD([x], PNorm(1.3), lr=0.2)
    for _ in range(200):
        optimiser.zero_grad()
        (x - target).square().sum().backward()
        optimiser.step()
    assert torch.allclose(x, target, atol=1e-2)


def test_domain_is_checked_at_the_first_step():
    p = nn.Parameter(torch.tensor([-1.0, 2.0]))
    p.grad = torch.ones(2)
    optimiser = MetaMD([p], NegativeEntropy())
    for _ in range(2):  # a second try writes nothing either
        with pytest.raises(ValueError, match="positive parameters"):
            optimiser.step()
    assert p.tolist() == [-1.0, 2.0]


def test_the_domain_of_parameters_that_join_is_checked_too():
    p, late = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([-1.0]))
    optimiser = MetaMD([p], NegativeEntropy("orthant"), lr=0.1)
    p.grad, late.grad = torch.ones(2), torch.ones(1)
    optimiser.step()
    optimiser.add_param_group({"params": [late]})
    with pytest.raises(ValueError, match="positive parameters"):
        optimiser.step()
    assert late.tolist() == [-1.0]


def test_roles_are_those_of_the_layers_whatever_the_order_of_the_groups():
    learned = metamd.load("mlp-by-role")
    named = list(metamd.models.MLP().named_parameters())
    in_order = MetaMD(named, learned, steps=10).potential.slots
    head_first = MetaMD([{"params": named[4:], "lr": 0.5}, {"params": named[:4]}], learned, steps=10)
    assert {n: s.key for n, s in head_first.potential.slots.items()} == {n: s.key for n, s in in_order.items()}
    other = [(n.replace("first", "embed"), p) for n, p in named]
    bound = learned.bind(other)
    again = MetaMD([{"params": other[4:]}, {"params": other[:4]}], bound, steps=10).potential.slots
    assert again["embed.weight"].key == "first.weight"
    assert again["output.weight"].key == "last.weight"


def test_records_the_active_piece_of_every_step():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model, centre="origin"), lr=0.3, exact=False)
    assert optimiser.active_piece is None
    seen = []
    for t in range(30):
        train(model, optimiser, 1, first=t)
        seen.append(optimiser.active_piece)
    assert optimiser.active_pieces.tolist() == seen
    assert MetaMD(model.named_parameters(), Euclidean()).active_pieces.tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"pieces": 1}, {"pieces": 3}, {"pieces": 3, "centre": "origin"}, {"pieces": 2, "tying": "role"}]
)
def test_resume_is_bit_exact(dtype, options):
    model = small_model(dtype=dtype)
    geometry = random_geometry(model, **options)
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.3, weight_decay=0.01, safeguard=True)
    train(model, optimiser, 25)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small_model(seed=9, dtype=dtype)
    resumed = MetaMD(other.named_parameters(), geometry, lr=99.0, safeguard=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimiser"])
    train(model, optimiser, 25, first=25)
    train(other, resumed, 25, first=25)
    assert equal_parameters(model, other)
    assert torch.equal(optimiser.active_pieces, resumed.active_pieces)
    assert len(resumed.active_pieces) == 50


def test_bit_exact_resume_rejects_a_lost_start():
    """The check above can fail: without the saved start the centre is elsewhere and the run goes another way."""
    model = small_model()
    geometry = random_geometry(model)
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.3)
    train(model, optimiser, 25)
    other = copy.deepcopy(model)
    fresh = MetaMD(other.named_parameters(), geometry, lr=0.3)
    train(model, optimiser, 10, first=25)
    train(other, fresh, 10, first=25)
    assert not equal_parameters(model, other)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle_continue_alike(copier):
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.3)
    train(model, optimiser, 10)
    other, copied = copier((model, optimiser))
    train(model, optimiser, 10, first=10)
    train(other, copied, 10, first=10)
    assert equal_parameters(model, other)
    assert copied.exact
    assert torch.equal(optimiser.active_pieces, copied.active_pieces)


def test_state_dict_of_something_else_is_refused():
    model = small_model()
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, 1)
    optimiser = MetaMD(model.named_parameters(), random_geometry(model))
    with pytest.raises(ValueError, match="not a state_dict of MetaMD"):
        optimiser.load_state_dict(adam.state_dict())
    two = MetaMD(model.named_parameters(), random_geometry(model, pieces=2))
    with pytest.raises(ValueError, match="with 2 pieces, but this optimiser's geometry has 3"):
        optimiser.load_state_dict(two.state_dict())


def test_resuming_in_another_geometry_warns():
    model = small_model()
    state = MetaMD(model.named_parameters(), random_geometry(model, seed=1)).state_dict()
    with pytest.warns(UserWarning, match="another geometry"):
        MetaMD(model.named_parameters(), random_geometry(model, seed=2)).load_state_dict(state)
    MetaMD(model.named_parameters(), random_geometry(model, seed=1)).load_state_dict(state)


def test_unnamed_parameters_of_a_learned_geometry_are_refused():
    model = small_model()
    with pytest.raises(ValueError, match=r"Pass model\.named_parameters\(\)"):
        MetaMD(model.parameters(), random_geometry(model))
    MetaMD(model.parameters(), MaxDiagonal(2))


def test_geometry_must_be_one():
    with pytest.raises(TypeError, match="must be a LearnedOptimiser or a Potential, got float"):
        MetaMD([nn.Parameter(torch.zeros(1))], 0.1)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no learned optimiser 'adam' is shipped"):
        MetaMD([nn.Parameter(torch.zeros(1))], "adam")


def test_closure_and_hooks():
    model, calls = small_model(), []
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.02)
    optimiser.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimiser.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        assert torch.is_grad_enabled()
        optimiser.zero_grad()
        loss = model(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    first = optimiser.step(closure)
    for _ in range(20):
        last = optimiser.step(closure)
    assert last < first
    assert calls[:2] == ["pre", "post"]


def test_a_step_without_gradients_does_nothing():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model))
    optimiser.step()
    assert optimiser.active_piece is None
    assert equal_parameters(model, small_model())


def test_tied_weights():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.1)
    losses = train(model, optimiser, 60)
    assert model[2].weight is model[0].weight
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    pieces=st.integers(1, 4),
)
@settings(max_examples=30)
def test_any_groups_shapes_and_dtypes_resume(seed, groups, dtype, pieces):
    """Whatever the groups, saving and loading in the middle changes nothing."""
    g = torch.Generator().manual_seed(seed)
    shapes = [
        tuple(torch.randint(1, 4, (int(torch.randint(0, 4, (1,), generator=g)),), generator=g).tolist())
        for _ in range(groups)
    ]
    start = {f"p{i}": torch.randn(s, generator=g).to(dtype) for i, s in enumerate(shapes)}
    geometry = random_geometry(nn.ParameterDict(start), pieces=pieces, seed=seed)

    def build():
        params = {n: nn.Parameter(x.clone()) for n, x in start.items()}
        options = [{"params": [(n, p)], "lr": 0.1 * (i + 1)} for i, (n, p) in enumerate(params.items())]
        return params, MetaMD(options, geometry)

    def run(params, optimiser, steps):
        for t in steps:
            for i, p in enumerate(params.values()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + i)).to(dtype)
            optimiser.step()

    params, optimiser = build()
    run(params, optimiser, range(4))
    others, resumed = build()
    with torch.no_grad():
        for n, p in params.items():
            others[n].copy_(p)
    resumed.load_state_dict(optimiser.state_dict())
    run(params, optimiser, range(4, 8))
    run(others, resumed, range(4, 8))
    assert all(torch.equal(params[n], others[n]) for n in params)


def test_learned_optimiser_needs_no_warning_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small_model()
        losses = train(model, metamd.MetaMD(model.named_parameters(), MaxDiagonal(3), lr=0.1), 3)
    assert len(losses) == 3


def test_a_rate_that_is_no_number_is_refused_before_the_first_step():
    x = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"lr must be a number or a tensor of one, got '0\.1'"):
        MetaMD([x], Euclidean(), lr="0.1")
    assert MetaMD([x], Euclidean(), lr=np.float32(0.1)).param_groups[0]["lr"] == np.float32(0.1)

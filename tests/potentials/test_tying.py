"""Tying, roles, names: which tensor reads which metric."""

import pytest
import torch
from torch import nn

from metamd import MaxDiagonal, MetaMD
from metamd.potentials.basis import Basis
from metamd.potentials.tying import clean_name, roles, stored_shape, tied_shape
from tests.helpers import random_geometry, small_model, train

TYINGS = ["parameter", "channel", "column", "tensor", "role"]


def conv_net(width=4, depth=1):
    layers = [nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(1, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 36, 10))


@pytest.mark.parametrize("tying", TYINGS)
def test_tied_coordinates_share_their_metric(tying):
    """A metric moves all the coordinates it is tied to, and no others."""
    model = conv_net()
    named = dict(model.named_parameters())
    phi = MaxDiagonal(2, tying=tying, centre="origin").bind(named)
    for name, x in named.items():
        metric = phi.metric(name).expand(2, *x.shape)
        slot = phi.slots[name]
        first = phi.log_d[slot.key].reshape(2, -1)[0, 0]
        (touched,) = torch.autograd.grad(first, phi.log_d[slot.key], retain_graph=True)
        with torch.no_grad():
            before = metric.clone()
            phi.log_d[slot.key].add_(touched)
            changed = (phi.metric(name).expand(2, *x.shape) != before)[0]
            phi.log_d[slot.key].sub_(touched)
        share = {"parameter": 1, "channel": x[:1].numel(), "tensor": x.numel(), "role": x.numel()}
        expected = share.get(tying, x.shape[0] if x.ndim > 1 else x.numel())
        assert int(changed.sum()) == expected


def test_shapes():
    assert tied_shape("channel", (16, 3, 5, 5)) == (16, 1, 1, 1)
    assert tied_shape("column", (16, 3, 5, 5)) == (1, 3, 5, 5)
    assert tied_shape("column", (16,)) == (1,)
    assert stored_shape("column", (16,)) == ()
    assert tied_shape("parameter", ()) == tied_shape("channel", ()) == tied_shape("tensor", ()) == ()


def test_roles_of_a_conv_net():
    found = roles({n: tuple(p.shape) for n, p in conv_net(depth=2).named_parameters()})
    assert found["0.weight"] == "first.weight"
    assert found["0.bias"] == "first.bias"
    assert found["1.weight"] == "norm.weight"
    assert found["1.bias"] == "norm.bias"
    assert found["3.weight"] == found["6.weight"] == "hidden.weight"
    assert found["10.weight"] == "last.weight"
    assert found["10.bias"] == "last.bias"


def test_roles_of_odd_models():
    assert roles({"weight": (3, 4), "bias": (3,)}) == {"weight": "last.weight", "bias": "last.bias"}
    assert roles({"scale": ()}) == {"scale": "other"}
    lstm = roles({n: tuple(p.shape) for n, p in nn.LSTM(3, 4).named_parameters()})
    assert lstm["weight_ih_l0"] == "first.weight"
    assert lstm["bias_ih_l0"].endswith(".bias")


def test_by_role_fits_another_width_and_depth():
    """Metrics learned by role on a small net drive a wider and deeper one; per-parameter ones are refused."""
    small, large = conv_net(), conv_net(width=7, depth=3)
    by_role = random_geometry(small, tying="role")
    bound = by_role.bind(list(large.named_parameters()))
    assert set(bound.log_d) == set(by_role.log_d)
    hidden = by_role.log_d["hidden.weight"].exp()
    assert all(torch.allclose(bound.metric(n).reshape(3, -1)[:, 0], hidden) for n in ("3.weight", "6.weight", "9.weight"))
    with pytest.raises(ValueError, match="role"):
        random_geometry(small).bind(list(large.named_parameters()))


def test_fewer_roles_are_fine_and_a_missing_one_is_named():
    deep = random_geometry(conv_net(), tying="role")
    deep.bind(list(small_model().named_parameters()))
    shallow = random_geometry(small_model(), tying="role")
    with pytest.raises(ValueError, match=r"'1\.weight' of shape \(4,\) has the role 'norm\.weight', for which nothing"):
        shallow.bind(list(conv_net().named_parameters()))
    lenient = shallow.bind(list(conv_net().named_parameters()), missing="euclidean")
    assert torch.equal(lenient.metric("1.weight"), torch.ones(3, 1))


def test_misfits_name_the_tensor_both_shapes_and_the_tyings_that_would_work():
    model = small_model()
    geometry = random_geometry(model, tying="channel")
    wrong = geometry.with_metrics({**geometry.log_d, "0.weight": torch.zeros(3, 8, 5)})
    expected = (
        r"'0\.weight' of shape \(8, 5\) needs a metric of shape \(8,\) under the tying 'channel'"
        r".*shape \(8, 5\).*'parameter'"
    )
    with pytest.raises(ValueError, match=expected):
        wrong.bind(list(model.named_parameters()))
    with pytest.raises(ValueError, match="No tying makes them fit"):
        geometry.with_metrics({**geometry.log_d, "0.weight": torch.zeros(3, 9, 9)}).bind(list(model.named_parameters()))
    with pytest.raises(ValueError, match=r"metric '2\.bias' of shape \(3,\) \(and 0 more\) has no tensor"):
        geometry.bind([(n, p) for n, p in model.named_parameters() if n != "2.bias"])
    with pytest.raises(ValueError, match=r"'extra' of shape \(8, 2\) has no metric.*'0\.weight' under the tying 'channel'"):
        geometry.bind([*model.named_parameters(), ("extra", torch.zeros(8, 2))])


def test_missing_euclidean_takes_plain_gradient_steps():
    model = small_model()
    geometry = random_geometry(model)
    partial = geometry.with_metrics({n: v for n, v in geometry.log_d.items() if not n.startswith("2.")})
    named = list(model.named_parameters())
    before = model[2].weight.detach().clone()
    optimiser = MetaMD(named, partial.bind(named, missing="euclidean"), lr=0.1)
    train(model, optimiser, 1)
    # Where the pieces change the whole model is rescaled; in the first step from the centre a bias of D = 1 moves by a
    # multiple of its gradient that is the same for all its coordinates.
    moved = (model[2].weight - before) / model[2].weight.grad
    assert torch.allclose(moved, moved.flatten()[0].expand_as(moved), rtol=1e-3)
    with pytest.raises(ValueError, match="missing must be"):
        partial.bind(named, missing="ignore")


def test_rename_by_mapping_and_by_function():
    model = small_model()
    geometry = random_geometry(model)
    renamed = [(f"net.{n}", p) for n, p in model.named_parameters()]
    mapping = {f"net.{n}": n for n, _ in model.named_parameters()}
    for rename in (mapping, lambda n: n.removeprefix("net.")):
        bound = geometry.bind(renamed, rename=rename)
        optimiser = MetaMD(renamed, bound, lr=0.1)
        train(model, optimiser, 2)
        assert set(optimiser.potential.slots) == {n for n, _ in model.named_parameters()}
    with pytest.raises(ValueError, match="two tensors are called 'x'"):
        geometry.bind(renamed, rename=lambda n: "x")


def test_wrapper_prefixes():
    assert clean_name("module.module._orig_mod.fc.weight") == "fc.weight"
    assert clean_name("layers.0._checkpoint_wrapped_module.w") == "layers.0.w"
    assert clean_name("block.module.w") == "block.module.w"
    assert clean_name("module") == "module"


def test_slots_follow_the_tying():
    shapes = {"0.weight": (8, 5), "0.bias": (8,)}
    assert Basis().slots("parameter", shapes)["0.weight"].key == "0.weight"
    assert Basis().slots("role", shapes)["0.weight"].key == "last.weight"

"""Parameter counts against published ones, shapes, and initial weights that follow the generator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metamd.tasks.models import MLP, MODELS, LeNet, Linear, ResNet18, channels_last

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
SMALL = {
    "linear": (lambda **k: Linear(**k), GREY),
    "mlp": (lambda **k: MLP(**k), GREY),
    "lenet": (lambda **k: LeNet(**k), GREY),
    "resnet18": (lambda **k: ResNet18(width=8, **k), COLOUR),
    "resnet18-group": (lambda **k: ResNet18(width=8, norm="group", **k), COLOUR),
}


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (Linear, 784 * 10 + 10),
        (MLP, 784 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10),
        (LeNet, 61_706),
        (ResNet18, 11_173_962),
        (lambda: ResNet18(norm="group"), 11_173_962),
        (lambda: ResNet18(width=16), 701_466),
        (lambda: ResNet18(classes=100), 11_220_132),
    ],
)
def test_parameter_counts_are_the_published_ones(model, published):
    assert size(model()) == published


def test_the_count_notices_a_stem_with_pooling_sized_kernels():
    broken = ResNet18()
    broken.stem = nn.Conv2d(3, 64, 7, padding=3, bias=False)  # the ImageNet stem, often left in by mistake
    assert size(broken) != 11_173_962


@pytest.mark.parametrize("name", SMALL)
def test_one_logit_per_class_and_every_parameter_is_used(name):
    make, shape = SMALL[name]
    model = make(classes=7)
    logits = model(torch.randn(5, *shape))
    assert logits.shape == (5, 7)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_lenet_is_relu_then_pooling_to_the_last_bit_with_and_without_gradients():
    model, images = LeNet(generator=torch.Generator().manual_seed(0)), torch.randn(7, *GREY)

    def textbook(pool):
        maps = pool(F.relu(model.second(pool(F.relu(model.first(channels_last(images))), 2))), 2)
        return model.output(F.relu(model.fourth(F.relu(model.third(maps.flatten(1))))))

    wanted, found = (
        torch.autograd.grad(f.square().sum(), model.parameters()) for f in (textbook(F.max_pool2d), model(images))
    )
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    with torch.no_grad():
        assert torch.equal(model(images), textbook(F.max_pool2d))
        assert not torch.equal(model(images), textbook(F.avg_pool2d))


@pytest.mark.parametrize("name", SMALL)
def test_the_generator_decides_the_weights_and_nothing_else_does(name):
    make, _ = SMALL[name]

    def weights(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(noise)
        model = make(generator=torch.Generator().manual_seed(seed))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(1, 1))


def test_drawn_weights_have_the_spread_of_torchs_own():
    torch.manual_seed(0)
    own, drawn = MLP(), MLP(generator=torch.Generator().manual_seed(0))
    for a, b in zip(own.parameters(), drawn.parameters(), strict=True):
        assert b.abs().max() <= a.abs().max() * 1.1
        if a.numel() > 1000:  # the std of n uniforms is known to about 0.45 / sqrt(n): 1.5 % here, so 10 % is safe
            assert b.std().item() == pytest.approx(a.std().item(), rel=0.1)


def test_group_norm_treats_examples_alone_and_batch_norm_does_not():
    images = torch.randn(4, *COLOUR)

    def alone(norm: str) -> float:
        model = ResNet18(width=8, norm=norm, generator=torch.Generator().manual_seed(0))
        return (model(images)[:2] - model(images[:2])).abs().max().item()

    assert alone("group") < 1e-5
    assert alone("batch") > 1e-3


def test_resnet_halves_the_maps_three_times():
    model = ResNet18(width=8)
    assert model.stages(model.stem(torch.randn(1, *COLOUR))).shape == (1, 64, 4, 4)


def test_grey_resnet_takes_one_channel():
    assert ResNet18(1, width=8)(torch.randn(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ResNet18(norm="layer"), "norm must be 'batch' or 'group', got 'layer'"),
        (lambda: ResNet18(width=0), "width must be a positive whole number, got 0"),
        (lambda: MLP(width=-1), "width must be a positive whole number, got -1"),
        (lambda: LeNet(classes=0), "classes must be a positive whole number, got 0"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_the_table_names_every_model():
    assert {name: type(make()).__name__ for name, make in MODELS.items() if name != "resnet18"} == {
        "linear": "Linear",
        "mlp": "MLP",
        "lenet": "LeNet",
    }
    assert MODELS["resnet18"] is ResNet18


@pytest.mark.parametrize("name", ["resnet18"])
def test_the_faster_layout_changes_no_value_and_no_parameters_layout(name, monkeypatch):
    build = {"lenet": LeNet, "resnet18": lambda: ResNet18(width=8)}[name]
    images = torch.rand(6, 3 if name == "resnet18" else 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = build()
    fast = model(images)
    fast.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    assert all(g.is_contiguous() for g in grads)
    monkeypatch.setattr("metamd.tasks.models.channels_last", lambda images: images)
    model.zero_grad()
    plain = model(images)
    plain.square().sum().backward()
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    for g, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-3, atol=1e-3)


def test_models_run_under_vmap_over_images():
    model = LeNet()
    images = torch.rand(3, 2, 1, 28, 28)
    each = torch.stack([model(x) for x in images])
    torch.testing.assert_close(torch.vmap(model)(images), each, rtol=1e-4, atol=1e-5)

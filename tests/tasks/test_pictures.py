"""A network per picture: the laws of families, the models, and PSNR."""

import math

import pytest
import torch

from metamd.tasks import pictures
from metamd.tasks.pictures import FourierFeatures, Siren, places, psnr
from tests.loopback import needs_files
from tests.task_laws import LAWS, draw
from tests.tiny_datasets import photograph, publish_files


@pytest.fixture
def kodak(tmp_path, monkeypatch):
    publish_files(tmp_path, monkeypatch, kodak={f"kodim{n:02d}.png": photograph(n) for n in range(1, 25)})


@pytest.mark.usefixtures("kodak")
@pytest.mark.parametrize("model", ["siren", "fourier"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_families_keep_the_laws(law, model):
    assert law(pictures(model=model, width=6, side=5, steps=5))


@pytest.mark.usefixtures("kodak")
def test_pictures_are_cut_to_their_square_and_both_sides_are_disjoint():
    family = pictures(width=4, side=5)
    assert len(family.domains) == 16
    assert family.held_out().domains == tuple(f"kodim{n}" for n in range(17, 25))
    inputs, targets = draw(family.held_out()).splits["train"]
    assert (inputs.shape, targets.shape) == ((25, 2), (25, 3))
    whole = family.colours["kodim03"].reshape(5, 5, 3)
    # Columns 2 to 11 of 14 are the square of 10; each pixel is the mean of 2 x 2.
    assert whole[0, 0].tolist() == pytest.approx([5 / 127.5 - 1, (255 - 9 * 2.5) / 127.5 - 1, 24 / 127.5 - 1], abs=0.01)
    assert whole[-1, -1, 0] == pytest.approx(85 / 127.5 - 1, abs=0.01)
    with pytest.raises(ValueError, match="asks for the domain 'kodim17'"):
        family.build({**family.sample(torch.Generator()), "domain": "kodim17"})


@pytest.mark.usefixtures("kodak")
def test_the_evaluation_states_the_psnr_of_all_pixels():
    task = draw(pictures(width=4, side=5))
    params = task.init()
    colours = task.splits["train"][1]
    found = task.evaluate(params)
    error = (task.model(places(5)) - colours).square().mean().item()
    assert found.loss == pytest.approx(error, rel=1e-5)
    # As usually written, for pixels from 0 to 1.
    assert found.measures["PSNR, dB"] == pytest.approx(-10 * math.log10(error / 4), rel=1e-5)
    assert task.monitor(3)(params) == pytest.approx(error, rel=1e-5)
    assert psnr(0.0) == math.inf
    flat = {n: torch.zeros_like(x) for n, x in params.items()}
    assert task.evaluate(flat).measures["PSNR, dB"] == pytest.approx(10 * math.log10(4 / colours.square().mean().item()))


def test_sines_keep_their_variance_from_layer_to_layer():
    torch.manual_seed(0)
    inputs = places(16)
    model = Siren(256, 3)
    for layer in model.hidden[1:]:
        layer.bias.detach().zero_()  # the published analysis is without them
    for layer in model.hidden:
        waves = model.frequency * layer(inputs).detach()
        inputs = waves.sin()
    # sec. 3.2 of [Sitzmann2020]: arguments are roughly normal with variance 1, and sines have variance near 1/2.
    assert waves.std() == pytest.approx(1, abs=0.15)
    assert inputs.var() == pytest.approx(0.5, abs=0.1)


def test_features_are_the_same_for_all_models_and_are_not_trained():
    one, two = FourierFeatures(8), FourierFeatures(8)
    assert torch.equal(one.projections, two.projections)
    assert "projections" not in dict(one.named_parameters())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"model": "nerf"}, "model must be one of siren, fourier"), ({"side": 600}, "got 600"), ({"width": 1}, "at least 2")],
)
def test_bad_input_is_a_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        pictures(**wrong)


@pytest.mark.real_data
def test_adam_fits_a_photograph():
    needs_files("kodak")
    task = draw(pictures(width=32, side=32).held_out())
    params = {n: x.requires_grad_() for n, x in task.init().items()}
    optimiser = torch.optim.Adam(params.values(), lr=3e-3)
    before = task.evaluate(params).measures["PSNR, dB"]
    for step in range(100):
        optimiser.zero_grad()
        task.loss(params, task.batch(step)).backward()
        optimiser.step()
    assert task.evaluate(params).measures["PSNR, dB"] > max(25, before + 8)

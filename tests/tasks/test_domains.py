"""Rotation, enlargement, normalisation and splits, each against something known otherwise."""

import numpy as np
import pytest
import scipy.ndimage
import torch

from metamd.tasks.vision import Domain, ImageSource, NormalisedImages, choose_images, enlarge, moments, rotate, turned


def noise(count=7, channels=1, side=28, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, side, side), generator=g, dtype=torch.uint8)


def smooth(count=5, seed=0):
    rng = np.random.default_rng(seed)
    fields = scipy.ndimage.gaussian_filter(rng.normal(size=(count, 28, 28)), (0, 2.5, 2.5), mode="wrap")
    low, high = fields.min((1, 2), keepdims=True), fields.max((1, 2), keepdims=True)
    return torch.from_numpy(((fields - low) / (high - low) * 255).round().astype(np.uint8))[:, None]


# --- rotation ---


@pytest.mark.parametrize("side", [28, 32, 27])
def test_rotation_by_right_angles_is_exact(side):
    images = noise(side=side)
    for quarter in range(-1, 5):
        assert torch.equal(rotate(images, 90 * quarter), torch.rot90(images, quarter, (2, 3)))
    assert not torch.equal(rotate(images, 90), torch.rot90(images, -1, (2, 3)))  # the law can tell the direction
    torch.testing.assert_close(turned(images.float() / 255, 90), torch.rot90(images / 255, 1, (2, 3)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("angle", [15, 37.5, 75, 200])
def test_rotation_agrees_with_scipy(angle):
    images = smooth()
    reference = scipy.ndimage.rotate(images[:, 0].float().numpy(), angle, axes=(2, 1), reshape=False, order=1)
    other = scipy.ndimage.rotate(images[:, 0].float().numpy(), angle + 2, axes=(2, 1), reshape=False, order=1)
    inside = np.hypot(*np.mgrid[-13.5:14, -13.5:14]) < 13  # borders differ: scipy drops a pixel it cannot surround
    ours = rotate(images, angle)[:, 0].float().numpy()
    assert np.abs(ours - reference)[:, inside].max() <= 0.51  # one rounding
    assert np.abs(ours - other)[:, inside].max() > 5  # two degrees would be seen


def test_rotation_treats_images_alone(monkeypatch):
    images = noise(9)
    together = rotate(images, 30)
    monkeypatch.setattr("metamd.tasks.vision.BLOCK", 4)
    assert torch.equal(rotate(images, 30), together)
    assert torch.equal(rotate(images[3:4], 30), together[3:4])


# --- enlargement ---


def test_enlargement_keeps_flat_images_and_symmetry():
    flat = torch.full((1, 1, 28, 28), 93, dtype=torch.uint8)
    assert torch.equal(enlarge(flat, 32), torch.full((1, 1, 32, 32), 93, dtype=torch.uint8))
    images = noise(3)
    assert torch.equal(enlarge(images.flip(3), 32), enlarge(images, 32).flip(3))


def test_enlargement_is_linear_interpolation_between_pixel_centres():
    image = smooth(1)
    centres = (np.arange(32) + 0.5) * 28 / 32 - 0.5
    grid = np.stack(np.meshgrid(centres, centres, indexing="ij"))
    expected = scipy.ndimage.map_coordinates(image[0, 0].double().numpy(), grid, order=1, mode="nearest")
    assert np.abs(enlarge(image, 32)[0, 0].double().numpy() - expected).max() <= 0.51


# --- normalisation ---


def floats(images, channels):
    return NormalisedImages(images, moments(images), channels)[torch.arange(len(images))]


def test_training_images_are_normal_after_normalisation():
    images = noise(50, channels=3)
    images[:, 1] //= 3
    normal = floats(images, 3).double()
    assert torch.allclose(normal.mean((0, 2, 3)), torch.zeros(3, dtype=torch.double), atol=1e-6)
    assert torch.allclose(normal.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.double), atol=1e-6)


def test_grey_images_are_repeated_for_a_colour_model():
    images = noise(4)
    normal = floats(images, 3)
    assert normal.shape == (4, 3, 28, 28)
    assert torch.equal(normal[:, 0], normal[:, 2])
    assert torch.equal(normal[:, :1], floats(images, 1))


def test_flat_training_images_are_refused():
    with pytest.raises(ValueError, match="must not all be one flat colour"):
        moments(torch.zeros(3, 1, 4, 4, dtype=torch.uint8))


# --- splits ---


def source(train=60, test=20):
    images = {"train": noise(train, side=4, seed=1), "test": noise(test, side=4, seed=2)}
    return ImageSource(images, {k: torch.arange(len(v)) % 10 for k, v in images.items()}, {})


def whole(made, train, validation):
    rows = {"train": train, "validation": validation, "test": torch.arange(len(made.labels["test"]))}
    return Domain(made, rows, lambda x: x, 1)


def rows(images):
    return {bytes(image.numpy().tobytes()) for image in images}


@pytest.mark.parametrize("images", [None, 20])
def test_splits_are_disjoint_and_fixed_by_the_seed(images):
    made = source()
    labels = made.labels["train"]
    train, validation = choose_images(labels, images, seed=3)
    assert len(train) == (images or 54)
    assert len(validation) == 6
    domain = whole(made, train, validation)
    parts = {split: rows(pictures.pixels) for split, (pictures, _) in domain.items()}
    assert len(set.union(*parts.values())) == sum(len(p) for p in parts.values()) == len(train) + 6 + 20
    again, other = choose_images(labels, images, seed=3), choose_images(labels, images, seed=4)
    assert all(torch.equal(a, b) for a, b in zip((train, validation), again, strict=True))
    assert not torch.equal(validation, other[1])
    overlapping = whole(made, train, train[:6])  # the law notices an overlap
    assert rows(overlapping["train"][0].pixels) & rows(overlapping["validation"][0].pixels)


def test_a_chosen_number_of_images_is_balanced_and_validation_does_not_depend_on_it():
    labels = torch.cat([torch.arange(10).repeat(30), torch.zeros(300, dtype=torch.long)])
    train, validation = choose_images(labels, 100, seed=0)
    assert labels[train].bincount().tolist() == [10] * 10
    assert torch.equal(validation, choose_images(labels, None, seed=0)[1])
    everything = choose_images(labels, None, seed=0)[0]
    assert labels[everything].bincount()[0] > 200  # all of them are as unbalanced as the data
    many = labels[choose_images(labels, 400, seed=0)[0]].bincount()
    assert sum(many.tolist()) == 400  # classes that run out give what they have
    assert len(choose_images(labels, 10_000, seed=0)[0]) == 540  # and so does a dataset


def test_normalisation_knows_the_training_split_alone():
    made, changed = source(), source()
    changed.images["test"].fill_(0)
    indices = choose_images(made.labels["train"], 20, seed=0)
    unused = torch.ones(60, dtype=torch.bool)
    unused[indices[0]] = False
    changed.images["train"][unused] = 255
    before, after = (whole(s, *indices)["train"][0].moments for s in (made, changed))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    changed.images["train"][indices[0][0]] = 0
    assert not torch.equal(before[0], whole(changed, *indices)["train"][0].moments[0])


def test_classes_are_renumbered():
    made = source()
    rows = {"train": (made.labels["train"] % 3 == 1).nonzero()[:, 0]}
    _, labels = Domain(made, rows, lambda x: x, 1, classes=[7, 1, 4])["train"]
    assert labels.tolist() == [[7, 1, 4].index(label) for label in made.labels["train"].tolist() if label in (1, 4, 7)]

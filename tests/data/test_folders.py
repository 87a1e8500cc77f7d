"""Image folders: what they hold, in which order, and the sentence for each way of being wrong."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from metamd.data import DataError, image_folder
from metamd.tasks import supervised

SEEDS = {"init_seed": 0, "batch_seed": 0}


def picture(path, shape=(6, 4), mode="L", seed=0):
    """Write a random picture and return its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"L": (), "RGB": (3,), "I;16": ()}[mode]
    kind = np.uint16 if mode == "I;16" else np.uint8
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, *channels)).astype(kind)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture
def folder(tmp_path):
    for i, name in enumerate(["cat/b.png", "cat/a.png", "ant/z.png"]):
        picture(tmp_path / name, seed=i)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "cat" / ".DS_Store").write_text("not an image")
    return tmp_path


def test_images_come_in_the_order_of_classes_and_names(folder):
    images, labels = image_folder(folder)
    assert images.shape == (3, 1, 6, 4)
    assert images.dtype == torch.float32
    assert labels.tolist() == [0, 1, 1]
    for i, name in enumerate(["ant/z.png", "cat/a.png", "cat/b.png"]):
        expected = torch.from_numpy(np.array(Image.open(folder / name))).float() / 255
        assert torch.equal(images[i, 0], expected)


def test_a_family_takes_folders_and_refuses_those_with_other_classes(folder, tmp_path):
    def family(**datasets):
        return supervised(lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 2)), datasets, batch_size=1, steps=1)

    other = tmp_path / "more"
    for i, name in enumerate(["ant/1.png", "cat/2.png"]):
        picture(other / name, seed=i)
    here = tmp_path / "here"
    here.mkdir()
    for name in ("ant", "cat"):
        (folder / name).rename(here / name)
    task = family(a=here, b={"train": str(here), "test": other}).build({"family": "supervised", "dataset": "b", **SEEDS})
    assert torch.equal(task.splits["test"][0], image_folder(other)[0])
    (other / "cat").rename(other / "bee")
    with pytest.raises(ValueError, match=r"same classes: .*here has ant, cat, .*more has ant, bee\. Give every"):
        family(a=here, b=other)


def test_one_colour_file_makes_three_channels(folder):
    pixels = picture(folder / "cat" / "c.png", mode="RGB")
    images, _ = image_folder(str(folder))
    assert images.shape == (4, 3, 6, 4)
    assert torch.equal(images[3], torch.from_numpy(pixels).permute(2, 0, 1).float() / 255)
    assert torch.equal(images[0, 0], images[0, 2])


def damage(path):
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: picture(f / "cat" / "c.png", shape=(5, 4)), r"one size: the first has 4x6, .*c\.png has 4x5\. Resize"),
        (lambda f: (f / "cat" / "c.png").write_text("hello"), r"c\.png cannot be read as an image \(.*\)\. Repair"),
        (lambda f: damage(f / "cat" / "b.png"), r"b\.png cannot be read as an image"),
        (lambda f: picture(f / "cat" / "c.png", mode="I;16"), r"c\.png has 'I;16' pixels, and 8 bits"),
        (lambda f: (f / "dog").mkdir(), r"dog must hold images of its class, and is empty\. Add some"),
    ],
)
def test_bad_files_are_named_in_a_sentence(folder, change, sentence):
    image_folder(folder)
    change(folder)
    with pytest.raises(DataError, match=sentence):
        image_folder(folder)


def test_bad_folders_are_refused(tmp_path, monkeypatch, folder):
    with pytest.raises(DataError, match=r"a sub-folder per class is required, got .*nowhere"):
        image_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="must have a sub-folder per class, and has none"):
        image_folder(tmp_path / "ant")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"needs Pillow\. In a clone of the repository, run: pip install '\.\[data\]'"):
        image_folder(folder)

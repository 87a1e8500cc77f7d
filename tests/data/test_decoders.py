"""Compressed files, tars and decoders against files the test writes itself, and against malformed ones and bombs."""

from __future__ import annotations

import bz2
import gzip
import io
import tarfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.io import savemat

from metamd.data import decoders
from metamd.data.registry import DataError
from tests.loopback import cifar_bytes, idx_bytes, libsvm_bytes, pictures, stl_bytes, tar_gz

# --- compressed files and tars ---


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_compressed_bombs_and_broken_files_are_refused(tmp_path, suffix, pack):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(pack(bytes(1000)))
    assert decoders.decompress(path, 1000) == bytes(1000)
    with pytest.raises(DataError, match="more than the 999 bytes expected"):
        decoders.decompress(path, 999)
    path.write_bytes(pack(bytes(50_000_000)))  # some 50 kB or less on disk
    with pytest.raises(DataError, match="more than the 1000 bytes expected"):
        decoders.decompress(path, 1000)
    for broken in (b"not compressed at all", pack(bytes(1000))[:-6]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="is not a complete"):
            decoders.decompress(path, 1000)


def test_tar_members_are_read_by_name_and_exact_size(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar_gz({"d/readme": b"hello", "d/one": b"1", "d/two": b"22"}))
    assert decoders.tar_members(path, {"d/two": 2, "d/one": 1}) == {"d/one": b"1", "d/two": b"22"}
    with pytest.raises(DataError, match=r"d/two in .* must be a file of 3 bytes, got 2"):
        decoders.tar_members(path, {"d/two": 3})
    with pytest.raises(DataError, match="must hold d/three and does not"):
        decoders.tar_members(path, {"d/three": 3})


def test_tar_links_are_refused(tmp_path):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        link = tarfile.TarInfo("d/one")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (tmp_path / "a.tar.gz").write_bytes(content.getvalue())
    with pytest.raises(DataError, match="must be a file of 0 bytes"):
        decoders.tar_members(tmp_path / "a.tar.gz", {"d/one": 0})


def test_tar_bombs_and_broken_tars_are_refused(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar_gz({"d/one": bytes(30_000_000)}))
    with pytest.raises(DataError, match="must be a file of 10 bytes, got 30000000"):
        decoders.tar_members(path, {"d/one": 10})
    for broken in (b"nothing", tar_gz({"d/one": bytes(np.random.default_rng(0).bytes(9999))})[:5000]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="is not a complete"):
            decoders.tar_members(path, {"d/one": 9999})


# --- idx ---


@given(
    hnp.arrays(
        st.sampled_from(["u1", "i1", "i2", "i4", "f4", "f8"]),
        hnp.array_shapes(min_dims=1, max_dims=4, max_side=5),
    )
)
@settings(max_examples=60)
def test_idx_round_trip(array):
    decoded = decoders.idx(idx_bytes(array), "digits.idx")
    assert decoded.shape == array.shape
    assert decoded.astype(array.dtype).tobytes() == array.tobytes()


GOOD = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "must start with an idx header, got nothing"),
        (b"\x01" + GOOD[1:], "must start with an idx header, got 01 00 08 03"),
        (GOOD[:2] + b"\x07" + GOOD[3:], "must start with an idx header"),
        (GOOD[:3] + b"\x00" + GOOD[4:], "must start with an idx header"),
        (GOOD[:9], "ends inside its idx header after 9 bytes"),
        (GOOD[:-1], "declares .2, 3, 4. values in 40 bytes, got 39"),
        (GOOD + b"\x00", "declares .2, 3, 4. values in 40 bytes, got 41"),
        (GOOD[:4] + b"\xff" * 4 + GOOD[8:], "declares .4294967295, 3, 4. values"),
    ],
)
def test_malformed_idx_is_refused(content, sentence):
    with pytest.raises(DataError, match=sentence):
        decoders.idx(content, "digits.idx")


@given(st.binary(max_size=64))
@settings(max_examples=200)
def test_idx_never_fails_otherwise_than_by_a_sentence(content):
    with suppress(DataError):
        decoders.idx(content, "digits.idx")


# --- labels ---


def test_qmnist_labels_are_the_first_of_eight_columns():
    table = np.arange(24, dtype=np.int32).reshape(3, 8) % 9
    assert decoders.class_labels(table, 10, "labels").tolist() == [0, 8, 7]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.array([0, 10]), "must hold classes 0 to 9, got 0 to 10"),
        (np.array([-1, 3]), "must hold classes 0 to 9, got -1 to 3"),
        (np.array([0.5]), "must hold one whole number per example, got float64"),
        (np.zeros((2, 2, 2), int), "must hold one whole number per example"),
        (np.zeros((2, 0), int), "must hold one whole number per example"),
    ],
)
def test_bad_labels_are_refused(labels, sentence):
    with pytest.raises(DataError, match=sentence):
        decoders.class_labels(labels, 10, "labels")


# --- LIBSVM ---


def usps(folder, content):
    path = folder / "usps.bz2"
    path.write_bytes(bz2.compress(content))
    return decoders.usps("train", 0, path)


def test_usps_fills_what_is_left_out_with_zero_and_counts_from_one(tmp_path):
    images, labels = usps(tmp_path, b"3 1:0.5 4:-1\n\n2\n")
    assert images.reshape(2, 256)[:, :5].tolist() == [[191, 127, 127, 0, 127], [127] * 5]
    assert labels.tolist() == [2, 1]


def test_usps_pixels_are_truncated_and_labels_start_at_zero(tmp_path):
    values = np.linspace(-1, 1, 512).reshape(2, 256)
    images, labels = usps(tmp_path, libsvm_bytes(values, np.array([1, 10])))
    assert images.shape == (2, 16, 16)
    assert (images[0, 0, 0], images[1, 15, 15]) == (0, 255)
    expected = ((np.round(values, 6) + 1) / 2 * 255).astype(np.uint8)
    assert np.array_equal(images.reshape(2, 256), expected)
    assert labels.tolist() == [0, 9]


def test_usps_pixels_are_computed_in_double_precision(tmp_path):
    # (1 - 0.027451) / 2 * 255 = 123.9999975: single precision makes it 124 before it is truncated.
    assert usps(tmp_path, b"1 1:-0.027451\n")[0][0, 0, 0] == 123


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"one 1:0\n", "Line 1 of .* is not 'label index:value"),
        (b"1 1:0\n1 2\n", "Line 2 of .* is not 'label index:value"),
        (b"1 1:x\n", "Line 1 of .* is not 'label index:value"),
        (b"1 257:0\n", "must use indices 1 to 256, got 257"),
        (b"1 0:0\n", "must use indices 1 to 256"),
        (b"1 1:1.5\n", "must hold pixel values from -1 to 1, got 1.5"),
        (b"1 1:nan\n", "must hold pixel values from -1 to 1"),
        (b"11 1:0\n", "must hold classes 0 to 9"),
    ],
)
def test_malformed_usps_is_refused(tmp_path, content, sentence):
    with pytest.raises(DataError, match=sentence):
        usps(tmp_path, content)


# --- MATLAB ---


def write_mat(path, **arrays):
    savemat(path, arrays, do_compression=True)
    return path


def test_svhn_takes_ten_for_zero_and_puts_the_number_first(tmp_path):
    images, _ = pictures(4, 32, 32, 3)
    path = write_mat(tmp_path / "a.mat", X=images.transpose(1, 2, 3, 0), y=np.array([[10], [1], [9], [5]], "u1"))
    decoded, labels = decoders.svhn("train", 4, path)
    assert np.array_equal(decoded, decoders.shrink(images, 28, "L", "BILINEAR"))
    assert labels.tolist() == [0, 1, 9, 5]


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"y": np.ones((2, 1), "u1")}, "must hold X, uint8 of shape .*, got absent"),
        ({"X": np.zeros((32, 32, 3, 2), "f8"), "y": np.ones((2, 1))}, "must hold X, uint8 .*, got double"),
        ({"X": np.zeros((2, 32, 32, 3), "u1"), "y": np.ones((2, 1))}, "must hold X, uint8 of shape"),
        ({"X": np.zeros((32, 32, 3, 2), "u1"), "y": np.ones((3, 1))}, "must hold y of shape .2, 1."),
        ({"X": np.zeros((32, 32, 3, 2), "u1"), "y": np.full((2, 1), 11)}, "must hold classes 0 to 9"),
    ],
)
def test_other_mat_files_are_refused(tmp_path, arrays, sentence):
    with pytest.raises(DataError, match=sentence):
        decoders.svhn("train", 4, write_mat(tmp_path / "a.mat", **arrays))


@pytest.mark.parametrize("keep", [0, 3, 200, 5000])
def test_truncated_and_foreign_mat_files_are_refused(tmp_path, keep):
    images, labels = pictures(2, 32, 32, 3)
    path = write_mat(tmp_path / "a.mat", X=images.transpose(1, 2, 3, 0), y=labels[:, None] + 1)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.mat"):
        decoders.svhn("train", 4, path)


# --- CIFAR-10 and STL-10 ---


def cifar(folder, batches, split="train"):
    """Decode batches of an archive of one image each."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    path = folder / "cifar.tar.gz"
    path.write_bytes(tar_gz({f"cifar-10-batches-bin/{n}.bin": b for n, b in zip(names, batches, strict=True)}))
    return decoders.cifar10(split, len(names), path)


def test_cifar_planes_become_pixels_in_the_order_of_the_batches(tmp_path):
    images, labels = pictures(5, 32, 32, 3)
    batches = [cifar_bytes(images[i : i + 1], labels[i : i + 1]) for i in range(5)]
    decoded, classes = cifar(tmp_path, batches)
    assert np.array_equal(decoded, images)
    assert classes.tolist() == labels.tolist()
    swapped, _ = cifar(tmp_path, batches[::-1])
    assert not np.array_equal(swapped, images)


@pytest.mark.parametrize("content", [b"", bytes(3072), bytes(3074)])
def test_cifar_of_another_size_is_refused(tmp_path, content):
    with pytest.raises(DataError, match=f"must be a file of 3073 bytes, got {len(content)}"):
        cifar(tmp_path, [content], "test")


def test_cifar_with_an_eleventh_class_is_refused(tmp_path):
    with pytest.raises(DataError, match="must hold classes 0 to 9, got 10 to 10"):
        cifar(tmp_path, [b"\x0a" + bytes(3072)], "test")


def stl(folder, images, labels):
    path = folder / "stl.tar.gz"
    path.write_bytes(tar_gz({"stl10_binary/test_X.bin": images, "stl10_binary/test_y.bin": labels}))
    return decoders.stl10("test", len(labels), path)


def test_stl_is_stored_by_columns(tmp_path):
    images, labels = pictures(3, 96, 96, 3)
    small = decoders.shrink(images, 32, "RGB", "BOX")
    decoded, classes = stl(tmp_path, stl_bytes(images), (labels + 1).tobytes())
    assert np.array_equal(decoded, small)
    assert classes.tolist() == labels.tolist()
    by_rows, _ = stl(tmp_path, images.transpose(0, 3, 1, 2).tobytes(), (labels + 1).tobytes())
    assert not np.array_equal(by_rows, small)


@pytest.mark.parametrize(("images", "labels"), [(bytes(27648), b"\1\1"), (bytes(27647), b"\1")])
def test_stl_of_another_size_is_refused(tmp_path, images, labels):
    with pytest.raises(DataError, match=f"must be a file of {27648 * len(labels)} bytes"):
        stl(tmp_path, images, labels)


def test_stl_label_zero_is_refused(tmp_path):
    with pytest.raises(DataError, match="must hold classes 0 to 9, got -1 to -1"):
        stl(tmp_path, bytes(27648), b"\0")


# --- canonical forms ---


def test_enlarging_agrees_with_a_slow_obvious_loop():
    images, _ = pictures(3, 16, 16)
    slow = np.zeros((3, 28, 28))
    for y in range(28):
        for x in range(28):
            v, u = (y + 0.5) * 16 / 28 - 0.5, (x + 0.5) * 16 / 28 - 0.5
            top, left = int(np.floor(v)), int(np.floor(u))
            for j, wy in ((top, 1 - (v - top)), (top + 1, v - top)):
                for i, wx in ((left, 1 - (u - left)), (left + 1, u - left)):
                    slow[:, y, x] += wy * wx * images[:, min(max(j, 0), 15), min(max(i, 0), 15)]
    # A value that is exactly a half may round either way in floating point.
    difference = np.abs(decoders.enlarge_to_28(images) - slow)
    assert difference.max() <= 0.5 + 1e-9


def test_enlarging_keeps_flat_images_and_symmetry():
    flat = np.full((1, 16, 16), 200, np.uint8)
    assert (decoders.enlarge_to_28(flat) == 200).all()
    images, _ = pictures(1500, 16, 16)  # more than one block of the loop
    assert np.array_equal(decoders.enlarge_to_28(images)[:, ::-1], decoders.enlarge_to_28(images[:, ::-1]))
    assert np.array_equal(decoders.enlarge_to_28(images)[1400:], decoders.enlarge_to_28(images[1400:]))


def test_shrinking_stl_is_the_mean_of_nine_to_one_grey_level():
    images, _ = pictures(4, 96, 96, 3)
    mean = images.reshape(4, 32, 3, 32, 3, 3).mean((2, 4))
    small = decoders.shrink(images, 32, "RGB", "BOX")
    assert np.abs(small - mean).max() < 1.0
    assert np.abs(small[:, ::-1] - mean).max() > 20


def test_shrinking_svhn_weights_the_colours_as_luminance():
    images = np.zeros((3, 32, 32, 3), np.uint8)
    for channel in range(3):
        images[channel, ..., channel] = 255
    assert decoders.shrink(images, 28, "L", "BILINEAR")[:, 14, 14].tolist() == [76, 150, 29]

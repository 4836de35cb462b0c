"""The embedded digits, and IDX files written here byte by byte, whole and broken."""

from __future__ import annotations

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pfedlms.data import load_dataset
from pfedlms.data.idx import WHOSE, read_idx
from pfedlms.data.pool import normalise
from pfedlms.data.sources import DATASETS
from pfedlms.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::pfedlms.errors.DataWarning")  # files of a few samples


def idx(array: np.ndarray) -> bytes:
    """Two zero bytes, type 8 (unsigned byte), the number of axes, their lengths big-endian, then the bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    return header + array.astype(np.uint8).tobytes()


IMAGES = {"train": np.arange(3 * 784).reshape(3, 28, 28) % 256, "t10k": np.full((2, 28, 28), 255)}
LABELS = {"train": np.array([5, 0, 9]), "t10k": np.array([1, 2])}


def write(folder: Path, *, packed: bool = False, dotted: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        for kind, content in (("images-idx3", idx(IMAGES[part])), ("labels-idx1", idx(LABELS[part]))):
            name = f"{part}-{kind}-ubyte"
            name = name.replace("-idx", ".idx") if dotted else name
            (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


# --- digits ---------------------------------------------------------------------------------------


def test_digits() -> None:
    """UCI's test set of 1,797 digits: published class counts, and the first image of the file."""
    x, y = load_dataset("digits")
    assert x.shape == (1797, 1, 8, 8)
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    assert np.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    first = (x[0, 0] * 0.3760 + 0.3053) * 16
    assert np.rint(first[:2]).tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]
    assert y[0] == 0
    assert abs(float(x.mean())) < 0.001
    assert abs(float(x.std()) - 1) < 0.001


def test_samples_are_normalised_channel_by_channel() -> None:
    """By Python's floats, two colour images of two pixels; and every operation is rounded to float32, one by one."""
    mean, std = (0.5, 0.25, 0.1), (0.5, 0.2, 0.3)
    raw = np.array([0, 1, 128, 255, 7, 9, 50, 60, 70, 80, 90, 100], dtype=np.uint8).reshape(2, 3, 1, 2)
    x = normalise(raw, mean, std)
    assert x.dtype == np.float32
    for place in np.ndindex(*raw.shape):
        channel = place[1]
        assert x[place] == pytest.approx((int(raw[place]) / 255 - mean[channel]) / std[channel], rel=1e-5, abs=1e-6)
        shifted = np.float32(raw[place]) / np.float32(255) - np.float32(mean[channel])
        assert x[place] == shifted / np.float32(std[channel])


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 1, 8, 7), (2, 3, 8, 8)])
def test_a_source_gives_images_of_its_shape(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made = np.zeros(shape, dtype=np.uint8), np.zeros(2, dtype=np.int64)
    monkeypatch.setitem(DATASETS, "digits", replace(DATASETS["digits"], read=lambda _: made))
    with pytest.raises(DataError, match=r"digits: got images of shape .*, expected \(1, 8, 8\)"):
        load_dataset("digits")


# --- IDX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fmnist"])
def test_idx_files_are_found_and_pooled(tmp_path: Path, name: str, inside: bool, dotted: bool, packed: bool) -> None:
    """Plain or gzipped, with "-idx" or ".idx", in the folder or its subfolder named as the set; train comes first."""
    write(tmp_path / name if inside else tmp_path, packed=packed, dotted=dotted)
    mean, std = {"mnist": (0.1307, 0.3081), "fmnist": (0.2860, 0.3530)}[name]
    x, y = load_dataset(name, str(tmp_path))
    assert y.tolist() == [5, 0, 9, 1, 2]
    assert y.dtype == np.int64
    assert x.shape == (5, 1, 28, 28)
    assert x.dtype == np.float32
    assert x[4, 0, 27, 27] == pytest.approx((1 - mean) / std, rel=1e-6)
    # Sample 1, row 2, column 3 is byte (784 + 2 · 28 + 3) mod 256 = 75.
    assert x[1, 0, 2, 3] == pytest.approx((75 / 255 - mean) / std, rel=1e-6)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fmnist", "FashionMNIST/raw")])
def test_torchvisions_folders_are_found(tmp_path: Path, name: str, folder: str) -> None:
    """Both sets below one folder, each in its own: labels of the other would be seen."""
    for other in ("MNIST/raw", "FashionMNIST/raw"):
        write(tmp_path / other)
        if other != folder:
            (tmp_path / other / "train-labels-idx1-ubyte").write_bytes(idx(np.array([7, 7, 7])))
    assert load_dataset(name, tmp_path)[1].tolist() == [5, 0, 9, 1, 2]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("file", ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"])
def test_files_of_another_data_set_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, packed: bool
) -> None:
    """Any one of the four, by its contents; files that nobody knows pass."""
    part, kind = file.split("-")[:2]
    content = {"images": IMAGES, "labels": LABELS}[kind][part].astype(np.uint8).tobytes()
    monkeypatch.setitem(WHOSE, hashlib.sha256(content).hexdigest()[:16], "mnist")
    write(tmp_path, packed=packed)
    assert len(load_dataset("mnist", tmp_path)[1]) == 5
    with pytest.raises(DataError, match=f"{file}-ubyte.*the data set 'mnist' .* of 'fmnist'; use --dataset mnist"):
        load_dataset("fmnist", tmp_path)


def test_four_files_of_each_set_are_known() -> None:
    assert sorted(WHOSE.values()) == ["fmnist"] * 4 + ["mnist"] * 4


def test_read_idx_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255]))
    assert read_idx(path, 2).tolist() == [[1, 2, 3], [4, 5, 255]]


WHOLE = idx(np.arange(6).reshape(2, 3))
BROKEN = {
    "empty": b"",
    "shorter than its header": WHOLE[:9],
    "one byte short": WHOLE[:-1],
    "one byte long": WHOLE + b"\0",
    "of another type": WHOLE[:2] + b"\x0d" + WHOLE[3:],
    "of other axes": idx(np.arange(6)),
    "something else": b"<html>404 not found</html>" * 3,
    "larger than any memory": bytes([0, 0, 8, 2]) + struct.pack(">2I", 2**32 - 1, 2**32 - 1) + bytes(6),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_idx_is_refused_by_name(tmp_path: Path, content: bytes, packed: bool) -> None:
    path = tmp_path / ("file.gz" if packed else "file")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=f"{path.name}: .*fetch the file again"):
        read_idx(path, 2)


def test_truncation_says_how_much_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE[:-1])
    with pytest.raises(DataError, match=r"got 5 bytes of data, expected 6 for shape \(2, 3\)"):
        read_idx(path, 2)


@pytest.mark.parametrize("cut", [3, 15, -4])
def test_truncated_gzip_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(WHOLE)[:cut])
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(path, 2)


def test_gzip_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(WHOLE))
    content[-8] ^= 1
    (tmp_path / "file.gz").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "file.gz", 2)


def test_gzip_with_broken_contents_is_refused(tmp_path: Path) -> None:
    """The first byte after the ten of the header opens a block; type 3 does not exist."""
    content = bytearray(gzip.compress(WHOLE))
    content[10] |= 0b110
    (tmp_path / "file.gz").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "file.gz", 2)


def test_no_gzip_under_the_name_of_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.gz").write_bytes(WHOLE)
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "file.gz", 2)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([1, 2, 3])))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte: has 2 images, but .*t10k-labels-idx1-ubyte 3 labels"):
        load_dataset("mnist", tmp_path)


def test_images_of_another_size_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((2, 28, 27))))
    with pytest.raises(
        DataError, match=r"t10k-images-idx3-ubyte: has images of \(28, 27\) pixels, expected \(28, 28\)"
    ):
        load_dataset("mnist", tmp_path)


@pytest.mark.parametrize("shape", [(14, 56), (28, 27)])
def test_images_of_another_size_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """14 x 56 holds as many pixels as 28 x 28 and would pass as garbage."""
    write(tmp_path)
    for part, labels in LABELS.items():
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(np.zeros((len(labels), *shape))))
    with pytest.raises(DataError):
        load_dataset("mnist", tmp_path)


def test_a_label_beyond_the_classes_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([5, 0, 10])))
    with pytest.raises(
        DataError, match=r"train-labels-idx1-ubyte: got label 10 in sample 2 \(from 0\), expected 0 to 9"
    ):
        load_dataset("mnist", tmp_path)


def test_a_missing_file_names_both_places(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\[\.gz\] is neither in .*mnist nor in .*--data-dir"):
        load_dataset("mnist", tmp_path)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        load_dataset("mnist", tmp_path / "nowhere")


@pytest.mark.parametrize("directory", [None, ""])
def test_a_folder_must_be_named(directory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PFEDLMS_DATA", raising=False)
    with pytest.raises(DataError, match="'mnist' is read from files; name their folder with --data-dir"):
        load_dataset("mnist", directory)


def test_unknown_data_set_names_the_nearest() -> None:
    with pytest.raises(DataError, match="'minst'; did you mean mnist"):
        load_dataset("minst")

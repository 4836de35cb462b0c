"""The embedded digits, MNIST in IDX files, SVHN in MATLAB files; missing files and unpublished samples of any set."""

from __future__ import annotations

import gzip
import io
import struct
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from pfedlms.data import load_dataset, load_pool
from pfedlms.data.formats import read_idx
from pfedlms.data.sources import DATASETS
from pfedlms.errors import DataError, DataWarning

small = pytest.mark.filterwarnings("ignore::pfedlms.errors.DataWarning")  # files of a few samples


def idx(array: np.ndarray) -> bytes:
    """Two zero bytes, type 8 (unsigned byte), the number of axes, their lengths big-endian, then the bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    return header + array.astype(np.uint8).tobytes()


IMAGES = {"train": np.arange(3 * 784).reshape(3, 28, 28) % 256, "t10k": np.full((2, 28, 28), 255)}
LABELS = {"train": np.array([5, 0, 9]), "t10k": np.array([1, 2])}


def write(folder: Path, *, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        for kind, content in (("images-idx3", idx(IMAGES[part])), ("labels-idx1", idx(LABELS[part]))):
            name = f"{part}-{kind}-ubyte" + ".gz" * packed
            (folder / name).write_bytes(gzip.compress(content) if packed else content)
    return folder


def test_digits_have_the_published_samples() -> None:
    """UCI's test set of 1,797 digits: published class counts, and the first image of the file."""
    x, y = load_dataset("digits")
    assert (x.shape, x.dtype, y.dtype) == ((1797, 1, 8, 8), np.float32, np.int64)
    assert np.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    raw = load_pool("digits", mean=(0.0,), std=(1.0,)).x
    assert (raw[0, 0, :2] * 16).tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]
    assert y[0] == 0
    assert np.allclose((raw - 0.3053) / 0.3760, x, atol=1e-6)
    assert abs(float(x.mean())) < 0.001
    assert abs(float(x.std()) - 1) < 0.001


@small
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fmnist", "FashionMNIST/raw"), ("fmnist", ".")]
)
def test_idx_files_are_found_and_pooled(tmp_path: Path, name: str, folder: str, packed: bool) -> None:
    """Plain or gzipped, in each place, some with a dot in their names; train comes first."""
    for file in list(write(tmp_path / folder, packed=packed).glob("*labels*")):
        file.rename(file.with_name(file.name.replace("-idx", ".idx")))
    for file in list((tmp_path / folder).glob("train-images-*")):  # a copy under its second name changes nothing
        file.with_name(file.name.replace("-idx", ".idx")).write_bytes(file.read_bytes())
    mean, std = {"mnist": (0.1307, 0.3081), "fmnist": (0.2860, 0.3530)}[name]
    x, y = load_dataset(name, str(tmp_path))
    assert y.tolist() == [5, 0, 9, 1, 2]
    assert (x.shape, x.dtype, y.dtype) == ((5, 1, 28, 28), np.float32, np.int64)
    assert x[4, 0, 27, 27] == pytest.approx((1 - mean) / std, rel=1e-6)
    # Sample 1, row 2, column 3 is byte (784 + 2 · 28 + 3) mod 256 = 75.
    assert x[1, 0, 2, 3] == pytest.approx((75 / 255 - mean) / std, rel=1e-6)


WHOLE = idx(np.arange(6).reshape(2, 3))
PACKED = gzip.compress(WHOLE)
BROKEN = {
    "one byte short": (WHOLE[:-1], "got 17 bytes .* expected an IDX file with 2 axes and 18 bytes"),
    "one byte long": (WHOLE + b"\0", "got 19 bytes .* 18 bytes"),
    "of another type": (WHOLE[:2] + b"\x0d" + WHOLE[3:], ".*begin with 00000d02, expected an IDX file with 2 axes"),
    "larger than any memory": (bytes([0, 0, 8, 2]) + struct.pack(">2I", 2**32 - 1, 2**32 - 1), "got 12 bytes"),
    "gzip without its end": (PACKED[:-4], "cannot be read"),
}


@pytest.mark.parametrize(("kind", "content", "message"), [(kind, *case) for kind, case in BROKEN.items()], ids=BROKEN)
def test_broken_idx_files_are_named(tmp_path: Path, kind: str, content: bytes, message: str) -> None:
    path = tmp_path / ("file.gz" if kind.startswith("gzip") else "file")
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: {message}.* fetch the file again"):
        read_idx(path, 2)


WRONG = {
    "more labels": ("t10k-labels-idx1", np.array([1, 2, 3]), r"t10k-images-idx3-ubyte and .*got images \(2, .* 3 lab"),
    "other pixels": ("t10k-images-idx3", np.zeros((2, 14, 56)), r"got images \(2, 1, 14, 56\) .* \*\(1, 28, 28"),
    "a label beyond": ("train-labels-idx1", np.array([5, 0, 10]), "3 labels from 0 to 10, expected .* from 0 to 9"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "array", "message"), WRONG.values(), ids=WRONG)
def test_idx_files_that_do_not_fit_are_named(tmp_path: Path, file: str, array: np.ndarray, message: str) -> None:
    """14 x 56 is as many pixels as 28 x 28 and would pass as garbage."""
    (write(tmp_path) / f"{file}-ubyte").write_bytes(idx(array))
    with pytest.raises(DataError, match=rf"{tmp_path}/.*{message}"):
        load_dataset("mnist", tmp_path)


def pixels(number: int, count: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3, count), dtype=np.uint8)


def numbers(count: int) -> np.ndarray:
    """1 to 10, again and again, as they are in the files."""
    return (np.arange(count, dtype=np.uint8) % 10 + 1).reshape(-1, 1)


def matlab(**arrays: np.ndarray) -> bytes:
    made = io.BytesIO()
    savemat(made, arrays, do_compression=True)
    return made.getvalue()


def write_svhn(folder: Path, test: bytes) -> Path:
    """Twelve images to train on, and the file of test; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_32x32.mat").write_bytes(matlab(X=pixels(0, 12), y=numbers(12)))
    (folder / "test_32x32.mat").write_bytes(test)
    return folder / "test_32x32.mat"


@small
@pytest.mark.parametrize("place", [".", "svhn", "SVHN"])
def test_svhn_files_are_found_and_pooled(tmp_path: Path, place: str) -> None:
    """Every pixel; label 10 is 0, and train comes first. Labels may be doubles, the default of MATLAB. The third
    published file is not read."""
    write_svhn(tmp_path / place, matlab(X=pixels(1, 6), y=numbers(6).astype(np.float64)))
    (tmp_path / place / "extra_32x32.mat").write_bytes(b"not read")
    x, y = load_dataset("svhn", tmp_path)
    assert (x.shape, x.dtype, y.dtype) == ((18, 3, 32, 32), np.float32, np.int64)
    assert y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 1, 2, 3, 4, 5, 6]
    raw = np.concatenate([pixels(0, 12), pixels(1, 6)], axis=3)
    np.testing.assert_allclose(x.transpose(2, 3, 1, 0), (raw / 255 - 0.5) / 0.5, rtol=1e-5, atol=1e-6)


WRONG_MATLAB = {
    "floats": (matlab(X=pixels(0, 6) / 1.0, y=numbers(6)), "of type float64 and 6 labels"),
    "broken label": (matlab(X=pixels(0, 2), y=np.array([[1.0], [2.5]])), "2 labels from 1.0 to 2.5, expected"),
    "no labels": (matlab(X=pixels(0, 6)), "not a whole MATLAB file with X and y (KeyError: 'y')"),
    "half": (matlab(X=pixels(0, 6), y=numbers(6))[:9000], "not a whole MATLAB file"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_MATLAB.values(), ids=WRONG_MATLAB)
def test_wrong_matlab_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = write_svhn(tmp_path, content)
    with pytest.raises(DataError) as caught:
        load_dataset("svhn", tmp_path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_missing_file_or_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write(tmp_path) / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}: t10k-images-idx3-ubyte is missing beside train-images"):
        load_dataset("mnist", tmp_path)
    with pytest.raises(
        DataError, match=r"nothing of mnist is in .*nowhere .*; looked for IDX files, Parquet files; point"
    ):
        load_dataset("mnist", tmp_path / "nowhere")
    monkeypatch.delenv("PFEDLMS_DATA", raising=False)
    with pytest.raises(DataError, match="'mnist' is read from files; name their folder with --data-dir"):
        load_dataset("mnist", "")
    with pytest.raises(DataError, match="'minst'; did you mean mnist"):
        load_dataset("minst")


def test_published_samples_are_recognised_by_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number of samples is used with a warning. With the published number, samples of another data set are
    refused and other samples are warned about."""
    write(tmp_path)
    with pytest.warns(DataWarning, match="mnist: got 5 samples that are not the 70,000 published"):
        load_dataset("mnist", tmp_path)
    rows = [image.astype(np.uint8).tobytes() + bytes([label]) for part, images in IMAGES.items()
            for image, label in zip(images, LABELS[part], strict=True)]  # fmt: skip
    checksum = sum(int.from_bytes(sha256(row).digest()[:8], "little") for row in reversed(rows)) % 2**64
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], samples=5, published=checksum))
    monkeypatch.setitem(DATASETS, "fmnist", replace(DATASETS["fmnist"], samples=5))
    load_dataset("mnist", tmp_path)  # no warning
    with pytest.raises(DataError, match=f"{tmp_path}: holds the data set 'mnist', expected 'fmnist'; use --dataset mn"):
        load_dataset("fmnist", tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([5, 0, 8])))
    with pytest.warns(DataWarning, match=rf"got 5 samples that are not the 5 published \({tmp_path}\)"):
        load_dataset("mnist", tmp_path)

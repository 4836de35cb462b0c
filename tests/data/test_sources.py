"""The embedded digits, IDX files written here byte by byte, and what holds for every named data set: what is published,
what is missing, and what is of another set."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pfedlms.data import load_dataset
from pfedlms.data.idx import read_idx
from pfedlms.data.sources import DATASETS, fingerprint
from pfedlms.errors import DataError, DataWarning

small = pytest.mark.filterwarnings("ignore::pfedlms.errors.DataWarning")  # files of a few samples


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


# --- digits and normalisation ---


def test_digits() -> None:
    """UCI's test set of 1,797 digits: published class counts, and the first image of the file."""
    x, y = load_dataset("digits")
    assert (x.shape, x.dtype, y.dtype) == ((1797, 1, 8, 8), np.float32, np.int64)
    assert np.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    first = (x[0, 0] * 0.3760 + 0.3053) * 16
    assert np.rint(first[:2]).tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]
    assert y[0] == 0
    assert abs(float(x.mean())) < 0.001
    assert abs(float(x.std()) - 1) < 0.001


# --- IDX ---


@small
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fmnist", ".")])
def test_idx_files_are_found_and_pooled(tmp_path: Path, name: str, folder: str, dotted: bool, packed: bool) -> None:
    """Plain or gzipped, with "-idx" or ".idx", in each place; train comes first."""
    write(tmp_path / folder, packed=packed, dotted=dotted)
    mean, std = {"mnist": (0.1307, 0.3081), "fmnist": (0.2860, 0.3530)}[name]
    x, y = load_dataset(name, str(tmp_path))
    assert y.tolist() == [5, 0, 9, 1, 2]
    assert (x.shape, x.dtype, y.dtype) == ((5, 1, 28, 28), np.float32, np.int64)
    assert x[4, 0, 27, 27] == pytest.approx((1 - mean) / std, rel=1e-6)
    # Sample 1, row 2, column 3 is byte (784 + 2 · 28 + 3) mod 256 = 75.
    assert x[1, 0, 2, 3] == pytest.approx((75 / 255 - mean) / std, rel=1e-6)


@small
def test_torchvisions_folders_are_not_mixed_up(tmp_path: Path) -> None:
    write(tmp_path / "MNIST/raw")
    write(tmp_path / "FashionMNIST/raw")
    (tmp_path / "FashionMNIST/raw/train-labels-idx1-ubyte").write_bytes(idx(np.array([7, 7, 7])))
    assert load_dataset("mnist", tmp_path)[1].tolist() == [5, 0, 9, 1, 2]
    assert load_dataset("fmnist", tmp_path)[1].tolist() == [7, 7, 7, 1, 2]


WHOLE = idx(np.arange(6).reshape(2, 3))
PACKED = gzip.compress(WHOLE)
BROKEN = {
    "empty": (b"", "not a whole IDX file"),
    "one byte short": (WHOLE[:-1], r"got 5 bytes of data, expected 6 for shape \(2, 3\)"),
    "one byte long": (WHOLE + b"\0", "got 7 bytes of data, expected 6"),
    "of another type": (WHOLE[:2] + b"\x0d" + WHOLE[3:], "not an IDX file of bytes with 2 axes"),
    "of other axes": (idx(np.arange(60)), "not an IDX file of bytes with 2 axes"),
    "larger than any memory": (bytes([0, 0, 8, 2]) + struct.pack(">2I", 2**32 - 1, 2**32 - 1), "got 0 bytes of data"),
    "gzip without its end": (PACKED[:-4], "not a whole IDX file"),
    "gzip with a wrong checksum": (PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:], "not a whole IDX file"),
}


@pytest.mark.parametrize(("kind", "content", "message"), [(kind, *case) for kind, case in BROKEN.items()], ids=BROKEN)
def test_broken_idx_is_refused_by_name(tmp_path: Path, kind: str, content: bytes, message: str) -> None:
    path = tmp_path / ("file.gz" if kind.startswith("gzip") else "file")
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: {message}.*; fetch the file again"):
        read_idx(path, 2)


WRONG = {
    "more labels": ("t10k-labels-idx1", np.array([1, 2, 3]), "t10k-images-idx3-ubyte and .*got 2 images and 3"),
    "none at all": ("t10k-labels-idx1", np.zeros(0), "got 2 images and 0 labels, expected as many and at least one"),
    "other pixels": ("t10k-images-idx3", np.zeros((2, 14, 56)), r"got images of shape \(1, 14, 56\), expected \(1, 28"),
    "a label beyond": ("train-labels-idx1", np.array([5, 0, 10]), r"got label 10 in sample 2 \(from 0\), expected"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "array", "message"), WRONG.values(), ids=WRONG)
def test_contents_that_do_not_fit_are_named(tmp_path: Path, file: str, array: np.ndarray, message: str) -> None:
    """14 x 56 is as many pixels as 28 x 28 and would pass as garbage."""
    (write(tmp_path) / f"{file}-ubyte").write_bytes(idx(array))
    with pytest.raises(DataError, match=rf"{tmp_path}/.*{message}"):
        load_dataset("mnist", tmp_path)


# --- any named data set ---


def test_a_missing_file_a_missing_folder_and_none_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write(tmp_path) / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}: t10k-images-idx3-ubyte is missing beside train-images"):
        load_dataset("mnist", tmp_path)
    with pytest.raises(DataError, match="nowhere is no folder; looked for IDX files, Parquet files; point --data-dir"):
        load_dataset("mnist", tmp_path / "nowhere")
    monkeypatch.delenv("PFEDLMS_DATA", raising=False)
    with pytest.raises(DataError, match="'mnist' is read from files; name their folder with --data-dir"):
        load_dataset("mnist", "")
    with pytest.raises(DataError, match="'minst'; did you mean mnist"):
        load_dataset("minst")


def test_a_folder_that_may_not_be_read_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match=rf"{tmp_path}.*: cannot be read \(Permission denied\)"):
        load_dataset("cifar10", tmp_path)


def test_fewer_and_more_samples_are_used_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    with pytest.warns(DataWarning, match=r"mnist: got 5 samples \(.*train.*: 3, .*t10k.*: 2\), published were 70,000"):
        load_dataset("mnist", tmp_path)
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], samples=4))
    with pytest.warns(DataWarning, match=r"mnist: got 5 samples .*, published were 4"):
        load_dataset("mnist", tmp_path)


def test_published_samples_are_known_by_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many samples as published: the same are complete, those of another data set refused, any others warned of."""
    write(tmp_path)
    raw = np.concatenate(list(IMAGES.values()))[:, None].astype(np.uint8), np.concatenate(list(LABELS.values()))
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], samples=5, published=fingerprint(*raw)))
    monkeypatch.setitem(DATASETS, "fmnist", replace(DATASETS["fmnist"], samples=5))
    load_dataset("mnist", tmp_path)  # no warning
    with pytest.raises(DataError, match=f"{tmp_path}: holds the data set 'mnist', expected 'fmnist'; use --dataset mn"):
        load_dataset("fmnist", tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([5, 0, 8])))
    with pytest.warns(DataWarning, match=rf"as many samples as were published, but not the same \({tmp_path}\)"):
        load_dataset("mnist", tmp_path)


def test_fingerprints_are_of_samples_in_any_order() -> None:
    """Of a label and of a pixel, but not of which sample comes first; one sample by hand."""
    from hashlib import sha256

    images, labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2), np.array([4, 7])
    own = [int.from_bytes(sha256(bytes(range(12 * n, 12 * n + 12)) + bytes([labels[n]])).digest()[:8], "little")
           for n in (0, 1)]  # fmt: skip
    assert fingerprint(images, labels) == sum(own) % 2**64
    assert fingerprint(images[::-1], labels[::-1]) == fingerprint(images, labels)
    assert fingerprint(images, labels[::-1]) != fingerprint(images, labels)


@small
def test_a_class_that_is_absent_from_many_samples_is_refused(tmp_path: Path) -> None:
    for part, count in (("train", 900), ("t10k", 100)):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(np.zeros((count, 28, 28))))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count) % 9))
    with pytest.raises(DataError, match="got 1000 samples and none of class 9, expected some of each of 10"):
        load_dataset("mnist", tmp_path)

"""SVHN in MATLAB files that SciPy writes here."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from pfedlms.data import load_dataset
from pfedlms.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::pfedlms.errors.DataWarning")  # files of a few samples

PARTS = {"train_32x32.mat": (0, 12), "test_32x32.mat": (1, 6)}
"""Seed and number of images of each file."""


def pixels(number: int, count: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3, count), dtype=np.uint8)


def digits(count: int) -> np.ndarray:
    """1 to 10, again and again, as they are in the files."""
    return (np.arange(count, dtype=np.uint8) % 10 + 1).reshape(-1, 1)


def part(**arrays: np.ndarray) -> bytes:
    made = io.BytesIO()
    savemat(made, arrays, do_compression=True)
    return made.getvalue()


def write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (number, count) in PARTS.items():
        (folder / name).write_bytes(part(X=pixels(number, count), y=digits(count)))
    return folder


@pytest.mark.parametrize("place", [".", "svhn", "SVHN"])
def test_both_files_are_found_and_pooled(tmp_path: Path, place: str) -> None:
    """Every pixel; 10 is 0, and train comes first. The third file that is published is not part of it."""
    (write(tmp_path / place) / "extra_32x32.mat").write_bytes(b"not read")
    x, y = load_dataset("svhn", tmp_path)
    assert (x.shape, x.dtype, y.dtype) == ((18, 3, 32, 32), np.float32, np.int64)
    assert y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 1, 2, 3, 4, 5, 6]
    raw = np.concatenate([pixels(*own) for own in PARTS.values()], axis=3)
    np.testing.assert_allclose(x.transpose(2, 3, 1, 0), (raw / 255 - 0.5) / 0.5, rtol=1e-5, atol=1e-6)


def test_labels_may_be_doubles(tmp_path: Path) -> None:
    """As MATLAB saves them unless told otherwise."""
    (write(tmp_path) / "test_32x32.mat").write_bytes(part(X=pixels(1, 6), y=digits(6).astype(np.float64)))
    assert load_dataset("svhn", tmp_path)[1].tolist()[12:] == [1, 2, 3, 4, 5, 6]


WHOLE = part(X=pixels(0, 6), y=digits(6))
WRONG = {
    "grey": (part(X=pixels(0, 6)[:, :, :1], y=digits(6)), "got X of shape (32, 32, 1, 6) and type uint8"),
    "floats": (part(X=pixels(0, 6) / 1.0, y=digits(6)), "and type float64, expected bytes of (32, 32, 3, n)"),
    "label 0": (part(X=pixels(0, 6), y=digits(6) - 1), "got label 0 in sample 0 (from 0), expected 1 to 10"),
    "broken label": (part(X=pixels(0, 2), y=np.array([[1.0], [2.5]])), "got label 2.5 in sample 1"),
    "no labels": (part(X=pixels(0, 6)), "not a whole MATLAB file with X and y (KeyError: 'y')"),
    "half": (WHOLE[:9000], "not a whole MATLAB file"),
    "one byte changed": (WHOLE[:9000] + bytes([WHOLE[9000] ^ 1]) + WHOLE[9001:], "not a whole MATLAB file"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path) / "test_32x32.mat"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_dataset("svhn", tmp_path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)

"""SVHN in MATLAB files made here; and a round trained on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_matlab import file, matrix, packed

import pfedlms
from pfedlms.data import load_dataset, svhn
from pfedlms.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::pfedlms.errors.DataWarning")  # files of a few samples

PARTS = {"train_32x32.mat": (0, 12), "test_32x32.mat": (1, 6)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PFEDLMS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pixels(number: int, count: int) -> np.ndarray:
    """`[32, 32, 3, count]`: row, column, channel, image."""
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3, count), dtype=np.uint8)


def digits(count: int) -> np.ndarray:
    """1 to 10, again and again, as they are in the files."""
    return (np.arange(count, dtype=np.uint8) % 10 + 1).reshape(-1, 1)


def part(images: np.ndarray, labels: np.ndarray, compressed: bool = True) -> bytes:
    arrays = [matrix("X", images), matrix("y", labels)]
    return file(*(map(packed, arrays) if compressed else arrays))


def write(folder: Path, compressed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (number, count) in PARTS.items():
        (folder / name).write_bytes(part(pixels(number, count), digits(count), compressed))
    return folder


def assert_all(loaded: tuple[np.ndarray, np.ndarray]) -> None:
    """By Python's floats, every pixel; 10 is 0, and train comes first."""
    x, y = loaded
    assert (x.shape, x.dtype, y.dtype) == ((18, 3, 32, 32), np.float32, np.int64)
    assert y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 1, 2, 3, 4, 5, 6]
    for start, (number, count) in zip((0, 12), PARTS.values(), strict=True):
        raw = pixels(number, count)
        for image in range(count):
            np.testing.assert_allclose(
                x[start + image].transpose(1, 2, 0), (raw[..., image] / 255 - 0.5) / 0.5, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("place", [".", "svhn", "SVHN"])
def test_both_files_are_found_and_pooled(tmp_path: Path, place: str, compressed: bool) -> None:
    """The third file that is published is not part of it."""
    (write(tmp_path / place, compressed) / "extra_32x32.mat").write_bytes(b"not read")
    assert_all(load_dataset("svhn", tmp_path))


def test_a_second_time_nothing_is_decoded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_dataset("svhn", write(tmp_path / "data"))
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(svhn, "_decode", None)
    assert_all(load_dataset("svhn", tmp_path / "data"))


def test_labels_may_be_doubles(tmp_path: Path) -> None:
    """As MATLAB saves them unless told otherwise, stored as bytes."""
    write(tmp_path)
    content = file(matrix("y", digits(6).astype(np.float64), "u1"), matrix("X", pixels(1, 6)))
    (tmp_path / "test_32x32.mat").write_bytes(content)
    assert_all(load_dataset("svhn", tmp_path))


def test_a_round_with_the_shipped_settings(tmp_path: Path) -> None:
    result = pfedlms.run(
        "svhn", dir=str(write(tmp_path)), method="pfedlms", clients=2, rounds=1, local_steps=1, batch_size=2,
        min_samples=2, evaluate_every=1, alpha=100.0, device="cpu",
    )  # fmt: skip
    assert (result.summary["model"], result.summary["parameters"]) == ("vgg8", 279_706)
    assert result.summary["rounds"] == 1
    assert np.isfinite(result.accuracy)


# --- what is refused ---


def refused(folder: Path, content: bytes | None) -> str:
    """What is said of another file for testing."""
    path = write(folder) / "test_32x32.mat"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_dataset("svhn", folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "test_32x32.mat is missing beside train_32x32.mat; fetch it" in refused(tmp_path, None)


WRONG = {
    "grey": (part(pixels(0, 6)[:, :, :1], digits(6)), r"got X of shape (32, 32, 1, 6) and type uint8"),
    "floats": (part(pixels(0, 6).astype(np.float32), digits(6)), "and type float32, expected bytes of (32, 32, 3, n)"),
    "images first": (part(pixels(0, 6).transpose(3, 0, 1, 2), digits(6)), "got X of shape (6, 32, 32, 3)"),
    "a single image": (part(pixels(0, 1)[..., 0], digits(1)), "got X of shape (32, 32, 3)"),
    "more labels": (part(pixels(0, 6), digits(7)), "got 6 images and 7 labels"),
    "nothing": (part(pixels(0, 0), digits(0)), "got 0 images and 0 labels"),
    "label 0": (part(pixels(0, 6), digits(6) - 1), "got label 0 in image 0 (from 0), expected 1 to 10"),
    "label 11": (part(pixels(0, 11), digits(11) + np.uint8(1)), "got label 11 in image 9 (from 0)"),
    "broken label": (part(pixels(0, 2), np.array([[1.0], [2.5]])), "got label 2.5 in image 1"),
    "no labels": (file(packed(matrix("X", pixels(0, 6)))), "got no array 'y', expected X and y"),
    "half": (part(pixels(0, 6), digits(6))[:9000], "not a whole MATLAB file"),
    "a page": (b"<html>404</html>" * 99, "not a MATLAB file of version 5; fetch the file again"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    said = refused(tmp_path, content)
    assert said.startswith(str(tmp_path / "test_32x32.mat"))
    assert message in said

"""Images in folders, made here: what is read, how it is normalised, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pfedlms.data import load_dataset, load_pool
from pfedlms.errors import DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PFEDLMS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def grey(*values: int, size: tuple[int, int] = (3, 2)) -> Image.Image:
    """`size` is width and height, as Pillow has it; a picture of one value, or of those given, row by row."""
    width, height = size
    return Image.fromarray(np.resize(np.array(values, dtype=np.uint8), (height, width)))


def colour(red: int, green: int, blue: int, size: tuple[int, int] = (3, 2)) -> Image.Image:
    return Image.new("RGB", size, (red, green, blue))


def save(root: Path, **images: Image.Image) -> Path:
    """Keys are paths with "__" for "/", PNG files all."""
    for name, image in images.items():
        path = root / (name.replace("__", "/") + ".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return root


def folder(root: Path, **settings: int) -> tuple[np.ndarray, list[int], tuple[str, ...]]:
    pool = load_pool(f"folder:{root}", None, **settings)
    return pool.x, pool.y.tolist(), pool.names


# --- what is read ---


def test_a_folder_by_hand(tmp_path: Path) -> None:
    """Classes by name, pictures by name within them. Values 0 (6 pixels), 255 (6) and 0..5: mean and deviation of all
    18, over 255."""
    root = save(tmp_path / "pets", dog__b=grey(255), cat__2=grey(0, 1, 2, 3, 4, 5), cat__1=grey(0))
    x, y, names = folder(root)
    assert names == ("cat", "dog")
    assert y == [0, 0, 1]
    assert x.shape == (3, 1, 2, 3)
    assert x.dtype == np.float32
    values = [0] * 6 + [0, 1, 2, 3, 4, 5] + [255] * 6
    mean = sum(values) / 18
    std = (sum((value - mean) ** 2 for value in values) / 18) ** 0.5
    assert x.flatten() == pytest.approx([(value - mean) / std for value in values], rel=1e-5, abs=1e-6)


def test_train_and_test_are_pooled(tmp_path: Path) -> None:
    save(tmp_path, train__cat__1=grey(1), test__cat__1=grey(2), train__dog__1=grey(3))
    root = save(tmp_path, val__eel__1=grey(4), test__dog__9=grey(5))
    x, y, names = folder(root)
    assert names == ("cat", "dog", "eel")
    assert y == [0, 0, 1, 1, 2]
    assert np.argsort(x[:, 0, 0, 0]).tolist() == [0, 1, 2, 4, 3]  # 1, 2, 3, 5, 4


def test_the_first_image_decides_between_grey_and_colour(tmp_path: Path) -> None:
    """Grey from colour by Pillow's weights: pure white stays 255, and so does colour from grey."""
    mixed = {"a__1": grey(0), "a__2": colour(255, 255, 255), "b__1": Image.new("1", (3, 2), 1)}
    x, _, _ = folder(save(tmp_path / "grey", **mixed))
    assert x.shape == (3, 1, 2, 3)
    assert x[1].tolist() == x[2].tolist() != x[0].tolist()
    x, _, _ = folder(save(tmp_path / "colour", a__0=colour(1, 2, 3), **mixed))
    assert x.shape == (4, 3, 2, 3)


def test_what_is_no_image_is_left_out(tmp_path: Path) -> None:
    """Notes, hidden files and hidden folders; images further down belong to the class."""
    root = save(tmp_path, a__1=grey(1), b__1=grey(2), b__more__2=grey(3), b__hidden__1=grey(4), **{".git__x": grey(5)})
    (root / "b" / "hidden").rename(root / "b" / ".hidden")
    (root / "a" / "notes.txt").write_text("none")
    (root / "a" / "._1.png").write_bytes(b"none")
    (root / "README.md").write_text("none")
    assert folder(root)[1:] == ([0, 1, 1], ("a", "b"))


def test_relative_paths_are_looked_up_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "pets", a__1=grey(1), b__1=grey(2))
    assert load_dataset("folder:pets", tmp_path)[1].tolist() == [0, 1]
    assert load_dataset(f"folder:{tmp_path / 'pets'}", "elsewhere")[1].tolist() == [0, 1]
    monkeypatch.chdir(tmp_path)
    assert load_dataset("folder:pets")[1].tolist() == [0, 1]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_dataset("folder:~/pets", "elsewhere")[1].tolist() == [0, 1]


# --- sizes ---


def test_the_first_image_of_another_size_is_named_with_the_remedy(tmp_path: Path) -> None:
    root = save(tmp_path, a__1=grey(1), b__1=grey(2, size=(4, 2)), b__2=grey(2, size=(5, 5)))
    with pytest.raises(DataError, match=r"b/1.png: got an image of 4x2 pixels, expected 3x2; .*data.image_size=32"):
        folder(root)


def test_images_are_resized(tmp_path: Path) -> None:
    """A picture of one value has it at any size; of two halves, the halves at half the size."""
    root = save(
        tmp_path, a__1=grey(0, size=(5, 9)), b__1=grey(255, size=(2, 2)), c__1=grey(0, 0, 255, 255, size=(4, 4))
    )
    x, _, _ = folder(root, image_size=4)
    assert x.shape == (3, 1, 4, 4)
    low, high = x[0, 0, 0, 0], x[1, 0, 0, 0]
    assert (x[0] == low).all()
    assert (x[1] == high).all()
    assert x[2, 0].tolist() == [[low, low, high, high]] * 4


# --- decoded copies ---


def test_a_copy_is_kept_and_found_out_of_date(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = save(tmp_path / "pets", a__1=grey(1), a__2=grey(9), b__1=grey(2))
    first = folder(root)
    assert len(list(own_cache.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("pfedlms.data.images.decode_anew", None)  # nothing is decoded again
        assert folder(root)[0].tolist() == first[0].tolist()
    save(root, b__1=grey(3))
    assert folder(root)[0].tolist() != first[0].tolist()
    (root / "a" / "2.png").rename(root / "b" / "0.png")  # the same pictures, another class
    assert folder(root)[1] == [0, 1, 1]


# --- what is refused ---


def wrong(root: Path, case: str) -> str:
    """Make a folder that cannot be read and return what the error must say."""
    save(root, a__1=grey(1), b__1=grey(2))
    if case == "an empty class":
        (root / "a" / "1.png").unlink()
        return "the class 'a' has no image that Pillow reads; remove its folder"
    if case == "no image":
        (root / "b" / "1.png").write_bytes(b"<html>not found</html>")
        return r"b/1.png: no image that Pillow can decode .*; replace it"
    if case == "cut image":
        noise = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
        for name in "ab":
            Image.fromarray(noise).save(root / name / "1.png")
        (root / "b" / "1.png").write_bytes((root / "a" / "1.png").read_bytes()[:400])
        return r"b/1.png: no image that Pillow can decode"
    if case == "deep colours":
        Image.fromarray(np.zeros((2, 3), dtype=np.uint16)).save(root / "b" / "1.png")
        return r"b/1.png: got an image of mode I;16, expected 8 bits per channel"
    save(root, train__a__1=grey(1))
    return r"got train/ with folders in it beside a/, expected classes, or train, test"


@pytest.mark.parametrize("case", ["an empty class", "no image", "cut image", "deep colours", "parts beside classes"])
def test_what_cannot_be_read_is_named(case: str, tmp_path: Path) -> None:
    message = wrong(tmp_path / "pets", case)
    with pytest.raises(DataError, match=message):
        folder(tmp_path / "pets")


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pets is no folder; folder:PATH names one"):
        folder(tmp_path / "pets")
    with pytest.raises(DataError, match="got no folders in it, expected one of images for each class"):
        folder(tmp_path)

"""Images in folders: what is read, cached and refused; and the constants that normalise images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pfedlms.data import Partitioning, load_dataset, load_pool, partitioned
from pfedlms.errors import DataError, DataWarning


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PFEDLMS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def grey(*values: int, size: tuple[int, int] = (3, 2)) -> Image.Image:
    """A picture of one value, or of several values row by row; `size` is width and height."""
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


def test_classes_are_folders_and_pixels_are_normalised(tmp_path: Path) -> None:
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
    root = save(tmp_path, val__ape__1=grey(4), test__dog__9=grey(5))
    x, y, names = folder(root)
    assert names == ("ape", "cat", "dog")
    assert y == [0, 1, 1, 2, 2]
    assert np.argsort(x[:, 0, 0, 0]).tolist() == [1, 2, 3, 0, 4]  # 4, 1, 2, 3, 5


def test_the_first_image_decides_between_grey_and_colour(tmp_path: Path) -> None:
    """Grey from colour by Pillow's weights: pure white stays 255. A grey value is all three channels, and a palette is
    looked up."""
    mixed = {"a__1": grey(0), "a__2": colour(255, 255, 255), "b__1": Image.new("1", (3, 2), 1)}
    with pytest.warns(DataWarning, match=r"a.2\.png: is in colour, as are 1 of 3 images, .* so all become grey"):
        x, _, _ = folder(save(tmp_path / "grey", **mixed))
    assert x.shape == (3, 1, 2, 3)
    assert x[1].tolist() == x[2].tolist() != x[0].tolist()
    palette = grey(0, 1)
    palette.putpalette([10, 20, 30, 200, 100, 0])
    root = save(tmp_path / "colour", a__0=colour(1, 2, 3), b__2=palette, **mixed)
    pixels = np.rint(load_pool(f"folder:{root}", mean=[0] * 3, std=[1] * 3).x * 255)
    assert pixels[:, :, 0, 0].tolist() == [[1, 2, 3], [0] * 3, [255] * 3, [255] * 3, [10, 20, 30]]
    assert pixels[4, :, 0, 1].tolist() == [200, 100, 0]


def test_files_that_are_not_images_are_ignored(tmp_path: Path) -> None:
    """Notes, hidden files and hidden folders; images further down belong to the class, which may be called train."""
    root = save(tmp_path, train__1=grey(1), x__1=grey(2), x__more__2=grey(3), **{".git__x": grey(5)})
    save(root, **{"x__.hidden__1": grey(4)})
    (root / "train" / "notes.txt").write_text("none")
    (root / "train" / "._1.png").write_bytes(b"none")
    (root / "README.md").write_text("none")
    assert folder(root)[1:] == ([0, 1, 1], ("train", "x"))


def test_a_folder_is_found_by_absolute_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="got no folders in it, expected one of images for each class"):
        folder(tmp_path)
    with pytest.raises(DataError, match="pets is no folder; folder:PATH names one"):
        folder(tmp_path / "pets")
    save(tmp_path / "pets", a__1=grey(1), b__1=grey(2))
    assert load_dataset("folder:pets", tmp_path)[1].tolist() == [0, 1]
    assert load_dataset(f"folder:{tmp_path / 'pets'}", "elsewhere")[1].tolist() == [0, 1]
    monkeypatch.chdir(tmp_path)
    assert load_dataset("folder:pets")[1].tolist() == [0, 1]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_dataset("folder:~/pets", "elsewhere")[1].tolist() == [0, 1]


def test_images_of_several_sizes_are_refused_or_resized(tmp_path: Path) -> None:
    """A picture of one value has it at any size; of two halves, the halves at half the size."""
    halves = grey(0, 0, 255, 255, size=(4, 4))
    root = save(tmp_path / "pets", a__1=grey(0, size=(4, 4)), b__1=grey(255, size=(5, 9)), c__1=halves)
    x, _, _ = folder(root, image_size=4)
    # The cached images of another size must not be used here.
    with pytest.raises(DataError, match=r"b/1.png: got an image of 5x9 pixels, expected 4x4; .*data.image_size=32"):
        folder(root)
    assert x.shape == (3, 1, 4, 4)
    low, high = x[0, 0, 0, 0], x[1, 0, 0, 0]
    assert (x[0] == low).all()
    assert (x[1] == high).all()
    assert x[2, 0].tolist() == [[low, low, high, high]] * 4


def test_images_are_cached_until_files_change(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = save(tmp_path / "pets", a__1=grey(1), a__2=grey(9), b__1=grey(2))
    first = folder(root)
    assert len(list(cache.iterdir())) == 1
    root = root.rename(tmp_path / "moved")
    with monkeypatch.context() as patch:
        patch.setattr("pfedlms.data.images.decode_uncached", None)  # nothing is decoded again
        assert folder(root)[0].tolist() == first[0].tolist()
    save(root, b__1=grey(3))
    assert folder(root)[0].tolist() != first[0].tolist()
    (root / "a" / "2.png").rename(root / "b" / "0.png")  # the same pictures, another class
    assert folder(root)[1] == [0, 1, 1]


DEEP = Image.fromarray(np.zeros((2, 3), dtype=np.uint16))
WRONG: dict[str, tuple[str, Image.Image, int | None, str]] = {
    "an empty class": ("b/1.png", grey(1), None, "the class 'b' has no image that Pillow reads; remove its folder"),
    "no image": ("b/1.png", grey(1), 9, r"b/1.png: no image that Pillow can decode .*; replace it"),
    "deep colours": ("b/1.png", DEEP, 10**9, "b/1.png: got an image of mode I;16, expected 8 bits per channel"),
    "parts beside classes": (
        "train/a/1.png", grey(1), 10**9, "got train/ with folders in it beside other folders"
    ),
}  # fmt: skip
"""Path of a wrong file, its image, the number of bytes that it is cut to (None: it is removed), and the message."""


@pytest.mark.parametrize(("file", "image", "length", "message"), WRONG.values(), ids=WRONG)
def test_images_that_cannot_be_read_are_named(
    file: str, image: Image.Image, length: int | None, message: str, tmp_path: Path
) -> None:
    root = save(tmp_path / "pets", a__1=grey(1), b__1=grey(2))
    path = save(root, **{file.removesuffix(".png").replace("/", "__"): image}) / file
    path.write_bytes(path.read_bytes()[:length]) if length else path.unlink()
    with pytest.raises(DataError, match=message):
        folder(root)


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its images are not left out. Tests may run as root, who may read every folder."""
    root = save(tmp_path / "pets", a__1=grey(1), a__more__2=grey(2), b__1=grey(3))
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "more":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"pets/a/more: cannot be read \(Permission denied\)"):
        folder(root)


PIXELS = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
CHANNELS = PIXELS.transpose(0, 3, 1, 2).astype(np.float64) / 255
MEAN, STD = CHANNELS.mean((0, 2, 3)), CHANNELS.std((0, 2, 3))


@pytest.fixture(params=["folder", "file"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same four colour images of two classes, as a folder and as arrays."""
    if request.param == "file":
        np.savez(tmp_path / "images.npz", x=PIXELS, y=[0, 0, 1, 1])
        return f"file:{tmp_path / 'images.npz'}"
    images = {f"{'ab'[number // 2]}__{number}": Image.fromarray(own) for number, own in enumerate(PIXELS)}
    return f"folder:{save(tmp_path / 'images', **images)}"


def test_constants_are_computed_from_the_images_or_given(source: str) -> None:
    pool = load_pool(source)
    assert pool.mean == pytest.approx(MEAN)
    assert pool.std == pytest.approx(STD)
    assert np.allclose(pool.x, (CHANNELS - MEAN[:, None, None]) / STD[:, None, None], atol=1e-5)
    again = load_pool(source, mean=pool.mean, std=pool.std)
    assert again.x.tobytes() == pool.x.tobytes()
    data = partitioned(pool, Partitioning(1, 1.0, 0, min_samples=4))
    assert (data.mean, data.std) == (pool.mean, pool.std)
    given = load_pool(source, mean=[0.5, 0.25, 0], std=[0.5, 1, 2])
    assert (given.mean, given.std) == ((0.5, 0.25, 0.0), (0.5, 1.0, 2.0))
    assert np.allclose(given.x[:, 0], (CHANNELS[:, 0] - 0.5) / 0.5, atol=1e-6)
    assert np.allclose(given.x[:, 2], CHANNELS[:, 2] / 2, atol=1e-6)


def test_tables_are_not_normalised(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,label\n1,x\n2,y\n")
    assert load_pool(f"file:{path}").mean is None
    with pytest.raises(DataError, match=r"data.mean: got \(0.5,\), but .*rows.csv holds no images"):
        load_pool(f"file:{path}", mean=[0.5], std=[0.5])


@pytest.mark.parametrize(
    ("mean", "std", "problem"),
    [
        ([0.5], None, "give both"),
        ([0.5, 0.5], [0.5], "as many of each"),
        ([0.5, 0.5], [0.5, 0.5], "data.mean: got 2 numbers, expected 1, one per channel"),
        ([0.5], [0.0], "got .* above 0"),
    ],
)
def test_wrong_constants_are_refused(mean: list[float], std: list[float] | None, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load_pool("digits", mean=mean, std=std)

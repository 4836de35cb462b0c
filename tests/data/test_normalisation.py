"""The constants that images are normalised by: which are used, that a pool and a federation carry them, and that
given ones are applied instead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pfedlms.data import Partitioning, load_pool, partitioned
from pfedlms.errors import DataError

PIXELS = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
CHANNELS = PIXELS.transpose(0, 3, 1, 2).astype(np.float64) / 255
MEAN, STD = CHANNELS.mean((0, 2, 3)), CHANNELS.std((0, 2, 3))


@pytest.fixture(params=["folder", "file"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same four colour images of two classes, as a folder and as arrays."""
    if request.param == "file":
        np.savez(tmp_path / "images.npz", x=PIXELS, y=[0, 0, 1, 1])
        return f"file:{tmp_path / 'images.npz'}"
    for number, pixels in enumerate(PIXELS):
        folder = tmp_path / "images" / "ab"[number // 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return f"folder:{tmp_path / 'images'}"


def test_own_constants_are_carried_and_give_the_same_samples_again(source: str) -> None:
    pool = load_pool(source)
    assert pool.mean == pytest.approx(MEAN)
    assert pool.std == pytest.approx(STD)
    assert np.allclose(pool.x, (CHANNELS - MEAN[:, None, None]) / STD[:, None, None], atol=1e-5)
    again = load_pool(source, mean=pool.mean, std=pool.std)
    assert again.x.tobytes() == pool.x.tobytes()
    data = partitioned(pool, Partitioning(1, 1.0, 0, min_samples=4))
    assert (data.mean, data.std) == (pool.mean, pool.std)


def test_given_constants_are_applied(source: str) -> None:
    pool = load_pool(source, mean=[0.5, 0.25, 0], std=[0.5, 1, 2])
    assert (pool.mean, pool.std) == ((0.5, 0.25, 0.0), (0.5, 1.0, 2.0))
    assert np.allclose(pool.x[:, 0], (CHANNELS[:, 0] - 0.5) / 0.5, atol=1e-6)
    assert np.allclose(pool.x[:, 2], CHANNELS[:, 2] / 2, atol=1e-6)


def test_a_named_data_set_has_its_own_constants() -> None:
    """Digits' pixels are 0 to 16."""
    pool = load_pool("digits")
    assert (pool.mean, pool.std) == ((0.3053,), (0.3760,))
    raw = load_pool("digits", mean=(0.0,), std=(1.0,))
    assert np.allclose((raw.x - 0.3053) / 0.3760, pool.x, atol=1e-6)
    assert raw.x.max() == 1


def test_a_table_is_not_normalised(tmp_path: Path) -> None:
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
        ([float("nan")], [1.0], "got .* finite"),
    ],
)
def test_constants_that_do_not_fit(mean: list[float], std: list[float] | None, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load_pool("digits", mean=mean, std=std)

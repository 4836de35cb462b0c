"""Published data sets in Parquet files, correct and broken; and the cache of decoded images."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from pfedlms.data import load_dataset, load_pool
from pfedlms.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::pfedlms.errors.DataWarning")  # files of a few samples

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
SPLITS = {"train-00000-of-00002": (0, 3), "train-00001-of-00002": (3, 5), "test-00000-of-00001": (5, 7)}
LABELS = [6, 9, 0, 4, 1, 3, 8]


def picture(number: int) -> np.ndarray:
    """`[32, 32, 3]`, random pixels."""
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def table(
    images: Sequence[bytes | None], labels: Sequence[int | None], image: str = "img", label: str = "label"
) -> pa.Table:
    rows = [{"bytes": content, "path": f"{row}.png"} for row, content in enumerate(images)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table({image: pa.array(rows, kind), label: pa.array(labels, pa.int64())})


def write(folder: Path, encode: Callable[[np.ndarray], bytes] = encoded) -> Path:
    """Seven images in three files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (start, stop) in SPLITS.items():
        images = [encode(picture(number)) for number in range(start, stop)]
        parquet.write_table(table(images, LABELS[start:stop]), folder / f"{name}.parquet")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PFEDLMS_CACHE", str(folder))
    return folder


def assert_all(loaded: tuple[np.ndarray, np.ndarray]) -> None:
    """The seven images in order, normalised by Python's floats."""
    x, y = loaded
    assert y.tolist() == LABELS
    assert (x.shape, x.dtype, y.dtype) == ((7, 3, 32, 32), np.float32, np.int64)
    assert_pixels(x)


def assert_pixels(x: np.ndarray) -> None:
    for number in range(7):
        expected = (picture(number) / 255 - np.array(MEAN)) / np.array(STD)
        np.testing.assert_allclose(x[number].transpose(1, 2, 0), expected, rtol=1e-5, atol=1e-6)


def test_files_are_found_decoded_and_pooled(tmp_path: Path) -> None:
    """Image formats may differ from row to row, and names end in a hash."""
    kinds = iter(["PNG", "WEBP", "WEBP", "BMP", "PNG", "TIFF", "WEBP"])
    for path in write(tmp_path, lambda pixels: encoded(pixels, next(kinds), lossless=True)).iterdir():
        path.rename(path.with_name(f"{path.stem}-1a2b3c4d5e6f7890.parquet"))
    (tmp_path / "train-notes.parquet").write_text("not a shard")
    assert_all(load_dataset("cifar10", tmp_path))


HUBS = {
    "mnist": ("mnist", "label", 10, (1, 28, 28)), "fmnist": ("fashion_mnist", "label", 10, (1, 28, 28)),
    "svhn": ("cropped_digits", "label", 10, (3, 32, 32)), "cifar10": ("plain_text", "label", 10, (3, 32, 32)),
    "cifar100": ("cifar100", "fine_label", 100, (3, 32, 32)),
}  # fmt: skip
"""The name of the set and of its labels on hubs, the number of classes and the shape of a sample."""


@pytest.mark.parametrize("place", [".", "{name}", "{name}/{hub}", "{name}/data"])
@pytest.mark.parametrize("name", HUBS)
def test_every_data_set_is_read_as_hubs_publish_it(tmp_path: Path, name: str, place: str) -> None:
    """Fine labels and coarse ones beside each other; the last class is there; grey or colour."""
    hub, label, classes, shape = HUBS[name]
    folder = tmp_path / place.format(name=name, hub=hub)
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (*shape[1:], shape[0]), dtype=np.uint8).squeeze()
    for number, part in enumerate(("train", "test")):
        made = table([encoded(pixels)], [classes - 1 - number], "image", label)
        made = made.append_column("coarse_label", pa.array([0])) if name == "cifar100" else made
        parquet.write_table(made, folder / f"{part}-00000-of-00001.parquet")
    raw = load_pool(name, tmp_path, mean=[0] * shape[0], std=[1] * shape[0])
    assert raw.y.tolist() == [classes - 1, classes - 2]
    assert raw.x.shape == (2, *shape)
    assert np.array_equal(np.rint(raw.x[1] * 255), pixels.reshape(*shape[1:], shape[0]).transpose(2, 0, 1))


def error_of(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset("cifar10", folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_and_duplicate_files_are_named(tmp_path: Path) -> None:
    for name, problem in (("train-00001-of-00002", "as many as their names"), ("test-00000-of-00001", "is missing")):
        folder = write(tmp_path / name)
        (folder / f"{name}.parquet").unlink()
        message = error_of(folder)
        assert message.startswith(f"{folder}: ")
        assert problem in message
    for other in ("train-00000-of-00001", "train-00002-of-00002"):
        folder = write(tmp_path / other)
        (folder / f"{other}.parquet").write_bytes((folder / "train-00001-of-00002.parquet").read_bytes())
        assert re.search(f"got .*{other}.parquet.*, expected as many as their names say, each once", error_of(folder))


def error_with_test_file(folder: Path, made: pa.Table) -> str:
    """The error if the file of test samples is replaced by this table."""
    path = write(folder) / "test-00000-of-00001.parquet"
    parquet.write_table(made, path)
    message = error_of(folder)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


GOOD = encoded(picture(0))
WRONG_COLUMNS = {
    "no image": pa.table({"label": [1]}),
    "bare bytes": pa.table({"img": [GOOD], "label": [1]}),
    "labels in words": pa.table({"img": table([GOOD], [1])["img"], "label": ["cat"]}),
}


@pytest.mark.parametrize("made", WRONG_COLUMNS.values(), ids=WRONG_COLUMNS)
def test_wrong_columns_are_named_with_the_expected_ones(tmp_path: Path, made: pa.Table) -> None:
    message = error_with_test_file(tmp_path, made)
    assert message.startswith(": cannot be read (")
    assert "expected rows with img or image (struct with bytes) and label or fine_label (whole numbers)" in message


WRONG_ROWS = {
    "no image file": (b"<html>404</html>", 3, ", row 2 (from 0): no image that Pillow can decode"),
    "null": (None, 3, ": cannot be read (row 2 has no image)"),
    "cut": (GOOD[: len(GOOD) // 2], 3, ", row 2 (from 0): no image that Pillow can decode"),
    "small": (encoded(picture(0)[:31]), 3, ", row 2 (from 0): got an image of 32x31 pixels, expected 32x32"),
    "no label": (GOOD, None, ": cannot be read ("),
}


@pytest.mark.parametrize(("image", "label", "problem"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_wrong_rows_are_named(
    tmp_path: Path, cache: Path, image: bytes | None, label: int | None, problem: str
) -> None:
    message = error_with_test_file(tmp_path / "data", table([GOOD, GOOD, image, GOOD], [1, 2, label, 3]))
    assert message.startswith(problem)
    assert "0x" not in message
    assert len(list(cache.iterdir())) == 2  # of train


def test_changed_bytes_raise_a_data_error_or_do_not_matter(tmp_path: Path) -> None:
    """A change at any of 150 places raises no other error; PNG has checksums, so pixels that are read are right."""
    path = write(tmp_path) / "test-00000-of-00001.parquet"
    content = path.read_bytes()
    places, outcomes = np.random.default_rng(0).integers(0, len(content), 150), set()
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            assert_pixels(load_dataset("cifar10", tmp_path)[0])
            outcomes.add("harmless")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"harmless", "refused"}


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    script = (
        "import sys; sys.modules[sys.argv[2]] = None; from pfedlms.data import load_dataset\n"
        "try: load_dataset('cifar10', sys.argv[1])\nexcept Exception as error: print(type(error).__name__, error)"
    )
    for missing in ("pyarrow", "PIL"):
        line = [sys.executable, "-c", script, str(tmp_path), missing]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.startswith("DataError data: ")
        assert f"need {missing} (" in done.stdout
        assert "install what is missing with: pip install 'pfedlms[data]'" in done.stdout


def test_a_damaged_copy_is_made_again(tmp_path: Path, cache: Path) -> None:
    """Empty, cut, longer, and with one bit changed among the pixels, the names or the directory."""
    data = write(tmp_path / "data")
    load_dataset("cifar10", data)
    copy = max(cache.iterdir(), key=lambda path: path.stat().st_size)
    valid = copy.read_bytes()
    place = valid.index(b"images.npy")
    flips = [valid[:n] + bytes([valid[n] ^ 1]) + valid[n + 1 :] for n in (500, place + 2, len(valid) - 30)]
    for damage in (b"", valid[: len(valid) // 2], valid[:-1], b"not a zip file" * 20, *flips):
        copy.write_bytes(damage)
        assert_all(load_dataset("cifar10", data))
        assert copy.read_bytes()[:100] == valid[:100]
        assert copy.stat().st_size == len(valid)


def test_a_copy_that_cannot_be_written_is_left_out_with_a_warning(tmp_path: Path, cache: Path) -> None:
    """A file size limit of 1000 bytes makes writing fail."""
    data = write(tmp_path / "data")
    script = """
        import resource, signal, sys, warnings
        from pfedlms.data import load_dataset, load_pool
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(len(load_dataset("cifar10", sys.argv[1])[1]))
        print(*(warning.message for warning in caught), sep="\\n")
    """
    line = [sys.executable, "-c", textwrap.dedent(script), str(data)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[0] == "7"
    assert f"{cache}: cannot be written (File too large), so images will be decoded again next time" in done.stdout
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"PFEDLMS_CACHE": "{}/here", "XDG_CACHE_HOME": "{}/xdg"}, "here"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/pfedlms"),
        ({"PFEDLMS_CACHE": "", "XDG_CACHE_HOME": "relative"}, "home/.cache/pfedlms"),
    ],
)
def test_environment_variables_name_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("PFEDLMS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    load_dataset("cifar10", write(tmp_path / "data"))
    assert len(list((tmp_path / folder).iterdir())) == 3

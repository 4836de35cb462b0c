"""Data sets by name: the embedded digits, and IDX files (MNIST, Fashion-MNIST) from a folder of the user's."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pfedlms.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Dataset:
    """A pooled data set: normalised samples `x: [samples, channels, height, width]` and labels `y: [samples]`."""

    name: str
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    classes: int


@dataclass(frozen=True)
class Source:
    """How one data set is found and described."""

    description: str
    shape: tuple[int, ...]
    classes: int
    needs_dir: bool
    read: Callable[[Path | None], tuple[NDArray[np.uint8], NDArray[np.int64]]]
    scale: float
    mean: float
    std: float


def load(name: str, directory: str | Path | None = None) -> Dataset:
    """Read the data set `name`, train and test pooled, normalised by its published mean and standard deviation."""
    if name not in DATASETS:
        raise DataError(f"data.dataset: got {name!r}; {did_you_mean(name, DATASETS)}")
    source = DATASETS[name]
    if source.needs_dir and not directory:
        raise DataError(f"data.dir: the data set {name!r} is read from files; name their folder with --data-dir DIR")
    raw, labels = source.read(Path(directory) if directory else None)
    if raw.shape[1:] != source.shape[-2:]:
        raise DataError(
            f"{name}: got images of {raw.shape[1:]} pixels, expected {source.shape[-2:]}; the files are not {name}'s"
        )
    if labels.max() >= source.classes:
        raise DataError(
            f"{name}: got label {labels.max()}, expected below {source.classes}; the files are not {name}'s"
        )
    x = (raw.astype(np.float32) / np.float32(source.scale) - np.float32(source.mean)) / np.float32(source.std)
    return Dataset(name, x.reshape(-1, *source.shape), labels, source.classes)


def _read_digits(_: Path | None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with resources.files("pfedlms.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["images"], arrays["labels"].astype(np.int64)


def _idx_reader(folder: str) -> Callable[[Path | None], tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    def read(directory: Path | None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        assert directory is not None  # load() has checked
        images, labels = [], []
        for part in ("train", "t10k"):
            images.append(read_idx(_find(directory, folder, f"{part}-images-idx3-ubyte"), 3))
            labels.append(read_idx(_find(directory, folder, f"{part}-labels-idx1-ubyte"), 1))
            if len(images[-1]) != len(labels[-1]):
                raise DataError(
                    f"{directory}: {part} has {len(images[-1])} images but {len(labels[-1])} labels; "
                    "the files do not belong together"
                )
        return np.concatenate(images), np.concatenate(labels).astype(np.int64)

    return read


def _find(directory: Path, folder: str, stem: str) -> Path:
    places = [base / (stem + end) for base in (directory / folder, directory) for end in ("", ".gz")]
    places += [
        base / (stem.replace("-idx", ".idx") + end) for base in (directory / folder, directory) for end in ("", ".gz")
    ]
    for path in places:
        if path.is_file():
            return path
    raise DataError(
        f"data.dir: {stem}[.gz] is neither in {directory / folder} nor in {directory}; "
        "point --data-dir at the folder that holds it"
    )


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes, gzipped or not, and check that it is complete."""
    try:
        opened = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115 - closed by the with below
        with opened as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); fetch the file again") from error
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path}: not an IDX file of {dimensions}-dimensional unsigned bytes; fetch the file again")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = int(np.prod(shape, dtype=np.int64))
    if len(content) - header != expected:
        raise DataError(
            f"{path}: got {len(content) - header} bytes of data, expected {expected} for shape {shape}; "
            "fetch the file again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _grey(folder: str, what: str, mean: float, std: float) -> Source:
    """A data set of 28x28 grey images in ten classes, as MNIST's four IDX files."""
    return Source(f"{what}, 28x28 grey, IDX files", (1, 28, 28), 10, True, _idx_reader(folder), 255.0, mean, std)


_DIGITS = "1,797 handwritten digits, 8x8 grey, in the package (UCI Optical Recognition of Handwritten Digits)"
DATASETS: dict[str, Source] = {
    "digits": Source(_DIGITS, (1, 8, 8), 10, False, _read_digits, 16.0, 0.3053, 0.3760),
    "mnist": _grey("mnist", "MNIST, 70,000 handwritten digits", 0.1307, 0.3081),
    "fmnist": _grey("fmnist", "Fashion-MNIST, 70,000 articles of clothing", 0.2860, 0.3530),
}


def load_dataset(name: str, directory: str | Path | None = None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Samples and labels of a data set by name, as `run` and `compare` take them."""
    loaded = load(name, directory)
    return loaded.x, loaded.y

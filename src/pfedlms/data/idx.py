"""IDX files of unsigned bytes, the form in which MNIST and Fashion-MNIST are published."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pfedlms.errors import DataError

WHOSE = {
    "741c988805d008ac": "mnist",  # train images, train labels, test images, test labels
    "1feba77c54802fa5": "mnist",
    "6d87418db22cc802": "mnist",
    "ddeff807876a9661": "mnist",
    "2e487a6c89124f78": "fmnist",
    "657fbd221bfc9f41": "fmnist",
    "c867c93ff9536059": "fmnist",
    "3d0e6c6ea990b53b": "fmnist",
}
"""Data sets whose files have the same names and shapes, by the first 64 bits of the SHA-256 of what is after the
header."""


def read_images(directory: Path, name: str, folders: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Grey images `[n, 1, h, w]` and labels of the four files of MNIST and its kin, train and test pooled; in
    `directory` or in one of its subfolders `folders`. Files known to be of another data set than `name` are refused."""
    images, labels = [], []
    for part in ("train", "t10k"):
        images.append(_read_own(_find(directory, folders, f"{part}-images-idx3-ubyte"), 3, name))
        labels.append(_read_own(_find(directory, folders, f"{part}-labels-idx1-ubyte"), 1, name))
        if len(images[-1]) != len(labels[-1]):
            raise DataError(
                f"{directory}: {part} has {len(images[-1])} images but {len(labels[-1])} labels; "
                "the files do not belong together"
            )
        if images[-1].shape[1:] != images[0].shape[1:]:
            raise DataError(
                f"{directory}: {part} has images of {images[-1].shape[1:]} pixels, expected {images[0].shape[1:]} as "
                "in train; the files do not belong together"
            )
    return np.concatenate(images)[:, np.newaxis], np.concatenate(labels).astype(np.int64)


def _find(directory: Path, folders: Sequence[str], stem: str) -> Path:
    bases = [*(directory / folder for folder in folders), directory]
    for name in (stem, stem.replace("-idx", ".idx")):
        for path in (base / (name + end) for base in bases for end in ("", ".gz")):
            if path.is_file():
                return path
    raise DataError(
        f"data.dir: {stem}[.gz] is neither in {' nor in '.join(map(str, bases))}; "
        "point --data-dir at the folder that holds it"
    )


def _read_own(path: Path, dimensions: int, name: str) -> NDArray[np.uint8]:
    content = read_idx(path, dimensions)
    whose = WHOSE.get(hashlib.sha256(content.data).hexdigest()[:16], name)
    if whose != name:
        raise DataError(
            f"{path}: holds what the data set {whose!r} has under this name, expected that of {name!r}; "
            f"use --dataset {whose}, or put the files of {name} there"
        )
    return content


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

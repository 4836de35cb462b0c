"""IDX files of unsigned bytes, the form in which MNIST and Fashion-MNIST are published."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pfedlms.errors import DataError


def read_images(directory: Path, folder: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Grey images `[n, 1, h, w]` and labels of the four files of MNIST and its kin, train and test pooled; in
    `directory` or in its subfolder `folder`."""
    images, labels = [], []
    for part in ("train", "t10k"):
        images.append(read_idx(_find(directory, folder, f"{part}-images-idx3-ubyte"), 3))
        labels.append(read_idx(_find(directory, folder, f"{part}-labels-idx1-ubyte"), 1))
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


def _find(directory: Path, folder: str, stem: str) -> Path:
    for name in (stem, stem.replace("-idx", ".idx")):
        for path in (base / (name + end) for base in (directory / folder, directory) for end in ("", ".gz")):
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

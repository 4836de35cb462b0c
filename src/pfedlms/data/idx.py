"""IDX files of unsigned bytes, the form in which MNIST and Fashion-MNIST are published."""

from __future__ import annotations

import gzip
import hashlib
import struct
import warnings
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.cache import Raw
from pfedlms.data.formats import Format, Found
from pfedlms.data.published import WHOSE
from pfedlms.errors import DataError

_FULL = {(60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,)}
"""Shapes of the published files."""
_STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_format(name: str, folders: Sequence[str]) -> Format:
    """The four files of MNIST and its kin, in a directory or in one of its subfolders `folders`. Files known to be of
    another data set than `name` are refused."""
    return Format("IDX files", partial(_find, folders), lambda path: (path.parent, _read_own(name, path)), _join)


def _join(parts: Sequence[tuple[Path, NDArray[np.uint8]]]) -> Raw:
    """Grey images `[n, 1, h, w]` and labels, train and test pooled; each file comes with the folder it is in."""
    images, labels = ([content for _, content in parts[first::2]] for first in (0, 1))
    for part, (folder, _), own, numbers in zip(("train", "t10k"), parts[0::2], images, labels, strict=True):
        if len(own) != len(numbers):
            raise DataError(
                f"{folder}: {part} has {len(own)} images but {len(numbers)} labels; the files do not belong together"
            )
        if own.shape[1:] != images[0].shape[1:]:
            raise DataError(
                f"{folder}: {part} has images of {own.shape[1:]} pixels, expected {images[0].shape[1:]} as in train; "
                "the files do not belong together"
            )
    return np.concatenate(images)[:, np.newaxis], np.concatenate(labels).astype(np.int64)


def _find(folders: Sequence[str], directory: Path) -> Found:
    bases = [*(directory / folder for folder in folders), directory]
    found = {stem: _first(bases, stem) for stem in _STEMS}
    problems = [
        f"data.dir: {stem}[.gz] is neither in {' nor in '.join(map(str, bases))}; point --data-dir at the folder that "
        "holds it"
        for stem, path in found.items()
        if path is None
    ]
    return Found(tuple(path for path in found.values() if path is not None), tuple(problems))


def _first(bases: Sequence[Path], stem: str) -> Path | None:
    for name in (stem, stem.replace("-idx", ".idx")):
        for path in (base / (name + end) for base in bases for end in ("", ".gz")):
            if path.is_file():
                return path
    return None


def _read_own(name: str, path: Path) -> NDArray[np.uint8]:
    content = read_idx(path, 3 if "idx3" in path.name else 1)
    digest = hashlib.sha256(content.data).hexdigest()[:16]
    whose = WHOSE.get(digest, name)
    if content.shape in _FULL and digest not in WHOSE:
        warnings.warn(
            f"{path}: is as long as the published file of {name}, but not the same; unless that is meant, fetch it "
            f"again: pfedlms data download {name}",
            stacklevel=2,
        )
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

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
from pfedlms.data.formats import Format, Found, is_file
from pfedlms.data.published import WHOSE, samples_in
from pfedlms.errors import DataError, DataWarning

_CLASSES, _PIXELS = 10, (28, 28)
"""Of MNIST and its kin."""
_STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_format(name: str, folders: Sequence[str]) -> Format:
    """The four files of MNIST and its kin, in a directory or in one of its subfolders `folders`. Files known to be of
    another data set than `name` are refused."""
    return Format("IDX files", partial(_find, folders), lambda path: (path, _read_own(name, path)), _join)


def _join(parts: Sequence[tuple[Path, NDArray[np.uint8]]]) -> Raw:
    """Grey images `[n, 1, h, w]` and labels, train and test pooled; each file's contents come with its path."""
    for (file, images), (other, labels) in zip(parts[0::2], parts[1::2], strict=True):
        if len(images) != len(labels):
            raise DataError(
                f"{file}: has {len(images)} images, but {other} {len(labels)} labels; the files do not belong together"
            )
    images, labels = (np.concatenate([content for _, content in parts[first::2]]) for first in (0, 1))
    return images[:, np.newaxis], labels.astype(np.int64)


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
            if is_file(path):
                return path
    return None


def _read_own(name: str, path: Path) -> NDArray[np.uint8]:
    content = read_idx(path, 3 if "idx3" in path.name else 1)
    digest = hashlib.sha256(content.data).hexdigest()[:16]
    whose = WHOSE.get(digest, name)
    if len(content) == samples_in(path) and digest not in WHOSE:
        warnings.warn(
            f"{path}: is as long as the published file of {name}, but not the same; unless that is meant, remove it "
            f"and fetch it again: pfedlms data download {name}",
            DataWarning,
            stacklevel=2,
        )
    if whose != name:
        raise DataError(
            f"{path}: holds what the data set {whose!r} has under this name, expected that of {name!r}; "
            f"use --dataset {whose}, or put the files of {name} there"
        )
    _check(content, path, name)
    return content


def _check(content: NDArray[np.uint8], path: Path, name: str) -> None:
    """Images or labels as `name` has them."""
    if not len(content):
        raise DataError(f"{path}: got no samples, expected at least one; fetch the file again")
    if content.ndim == 3 and content.shape[1:] != _PIXELS:
        raise DataError(
            f"{path}: has images of {content.shape[1:]} pixels, expected {_PIXELS}; the file is not of {name}"
        )
    if content.ndim == 1 and content.max() >= _CLASSES:
        wrong = int(np.argmax(content >= _CLASSES))
        raise DataError(
            f"{path}: got label {content[wrong]} in sample {wrong} (from 0), expected 0 to {_CLASSES - 1}; fetch the "
            "file again, or it is of another data set"
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

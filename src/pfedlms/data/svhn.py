"""SVHN, house numbers cut to 32x32 pixels, as published: `train_32x32.mat` and `test_32x32.mat`, each with `X`, bytes
[32, 32, 3, n], and `y` [n, 1], the digits, where 10 stands for 0. The third file, `extra`, is not used."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pfedlms.data.cache import Raw, decoded
from pfedlms.data.formats import Format, Found, contents, joined, of_one_folder
from pfedlms.data.matlab import read_arrays
from pfedlms.data.published import check_published
from pfedlms.errors import DataError

_SHAPE = (3, 32, 32)


def _find(directory: Path) -> Found:
    bases = [directory / "svhn", directory / "SVHN", directory]
    return of_one_folder(bases, ("train_32x32.mat", "test_32x32.mat"))


def read_part(path: Path) -> Raw:
    """One of the two files; the decoded copy is kept (see `data.cache`)."""
    content = contents(path)
    check_published("svhn", path, content)
    return decoded(content, "svhn 1", _SHAPE, lambda: _decode(content, path))


def _decode(content: bytes, path: Path) -> Raw:
    arrays = read_arrays(content, path, ("X", "y"))
    images, labels = arrays["X"], arrays["y"].reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise DataError(
            f"{path}: got X of shape {images.shape} and type {images.dtype}, expected bytes of (32, 32, 3, n); the "
            "file is of another data set"
        )
    if len(labels) != images.shape[3] or not len(labels):
        raise DataError(
            f"{path}: got {images.shape[3]} images and {len(labels)} labels, expected as many and at least one; fetch "
            "the file again"
        )
    wrong = np.flatnonzero(~np.isin(labels, np.arange(1, 11)))
    if len(wrong):
        raise DataError(
            f"{path}: got label {labels[wrong[0]]} in image {wrong[0]} (from 0), expected 1 to 10, which is 0; the "
            "file is of another data set"
        )
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10


FORMAT = Format("train_32x32.mat and test_32x32.mat", _find, read_part, joined)

"""SVHN's MATLAB files `train_32x32.mat` and `test_32x32.mat`: `X`, bytes [32, 32, 3, n], and `y` [n, 1], where 10
stands for the digit 0. The third published file, `extra`, is not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from pfedlms.data.formats import Format, Part, contents, extra, wanted
from pfedlms.errors import DataError, reason


def read(files: Sequence[Path]) -> Iterator[Part]:
    with extra("MATLAB files"):
        from scipy.io import loadmat
    for path in files:
        content = BytesIO(contents(path))
        try:
            arrays = loadmat(content, variable_names=("X", "y"))
            images, labels = arrays["X"], arrays["y"].reshape(-1)
        except Exception as error:  # SciPy raises almost anything on damaged bytes
            raise DataError(
                f"{path}: not a whole MATLAB file with X and y ({reason(error)}); fetch the file again"
            ) from error
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
            raise DataError(
                f"{path}: got X of shape {images.shape} and type {images.dtype}, expected bytes of (32, 32, 3, n); the "
                "file is of another data set"
            )
        wrong = np.flatnonzero(~np.isin(labels, np.arange(1, 11)))
        if len(wrong):
            raise DataError(
                f"{path}: got label {labels[wrong[0]]} in sample {wrong[0]} (from 0), expected 1 to 10, which stands "
                "for 0; the file is of another data set"
            )
        yield str(path), np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10


FORMAT = Format("MATLAB files", ("svhn", "SVHN", ""), wanted("train_32x32.mat", "test_32x32.mat"), read)

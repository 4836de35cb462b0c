"""One file with samples, labels and perhaps clients, or with clients and text, as `file:PATH`.

| columns | called (case does not matter; the first that is there) |
|---|---|
| label | `label`, `class`, `target`, `y`, `labels`, or the name in `data.label_column` |
| client | `client`, `user`, `client_id`, `clients`, or the name in `data.owner_column`; optional |
| samples | `x`, `samples`, `images`, if it has two axes or more; else every other column is a feature |
| text | `text` where there is no label, or the name in `data.text_column`; then all others but the client are unused |

Classes and clients are the values found, in their order. Samples are taken as they are, but images of bytes are
normalised as those of a folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.arrays import array_of, checked, column_of
from pfedlms.data.columns import Columns, read_columns
from pfedlms.data.pool import Constants, Pool, normalised, numbered
from pfedlms.data.text import Windows, joined_by_client, windows_of
from pfedlms.errors import DataError, did_you_mean

_LABELS, _CLIENTS = ("label", "class", "target", "y", "labels"), ("client", "user", "client_id", "clients")
_SAMPLES = ("x", "samples", "images")


def read_file(
    path: Path, label: str = "", client: str = "", mean: Constants = None, std: Constants = None, text: str = "",
    windows: Windows | None = None,
) -> Pool:  # fmt: skip
    """The samples of `path`; `label`, `client` and `text` name the columns of the class, the client and the text where
    they are called otherwise. Images are normalised by `mean` and `std`, or by those of their own channels; text is
    cut into `windows`."""
    read = read_columns(path)
    if texts := texts_in(path, read, label, client, text):
        return windows_of(texts, windows or Windows(), path)
    columns = {name: array_of(values, f"{path}, column {name!r}:") for name, values in read.items()}
    labels = _chosen(path, columns, label, _LABELS, "label_column")
    clients = _chosen(path, columns, client, _CLIENTS, "owner_column")
    x = _samples(path, columns, labels, clients)
    y, names = _classes(path, labels, columns[labels])
    owner, owners = numbered(_values(path, clients, columns[clients], "client")) if clients else (None, ())
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        x, mean, std = normalised(_channels_first(x), mean, std)
    elif mean is not None:
        raise DataError(f"data.mean: got {mean}, but {path} holds no images of bytes, which alone are normalised")
    return replace(checked([(str(path), x, y)], names), owner=owner, owners=owners, mean=mean, std=std)


def texts_in(path: Path, columns: Columns, label: str = "", client: str = "", text: str = "") -> dict[str, str]:
    """The text of every client; nothing where the file has no text to be predicted."""
    lowered = {name.lower(): name for name in columns}
    column = _chosen(path, columns, text, (), "text_column")
    if not column and not label and not any(name in lowered for name in _LABELS):
        column = lowered.get("text", "")
    if not column:
        return {}
    owner = _chosen(path, columns, client, _CLIENTS, "owner_column")
    return joined_by_client(path, columns[column], columns[owner] if owner else None)


def _samples(path: Path, columns: Columns, labels: str, clients: str) -> NDArray[Any]:
    """The column of samples, or all features beside each other; other arrays of an `.npz` are left alone."""
    whole = [each for known in _SAMPLES for each in columns if each.lower() == known and columns[each].ndim > 1][:1]
    features = whole or [name for name in columns if name not in (labels, clients)]
    rows = {name: len(np.atleast_1d(columns[name])) for name in (labels, *features, clients) if name}
    if wrong := [name for name in rows if rows[name] != rows[labels] or not rows[name]]:
        raise DataError(
            f"{path}: got {rows[labels]} rows of {labels!r} and {rows[wrong[-1]]} of {wrong[-1]!r}, expected as many "
            "and at least one"
        )
    if whole:
        samples: NDArray[Any] = columns[whole[0]]
        if samples.dtype.kind not in "fiub":
            raise DataError(f"{path}: got {whole[0]} of type {samples.dtype}, expected numbers, a row per sample")
        return samples
    for name in features:
        if name.lower() in _CLIENTS:
            warnings.warn(
                f"{path}: data.owner_column is {clients!r}, so the column {name!r} is a feature like any other; take "
                "it out of the file if that is not meant",
                stacklevel=2,
            )
    if not features:
        raise DataError(f"{path}: got {len(columns[labels])} rows and no features, expected at least one")
    return np.stack([_feature(path, name, columns[name]) for name in features], axis=1)


def _values(path: Path, name: str, column: NDArray[Any], what: str = "label") -> NDArray[Any]:
    """One label or client per sample; none may be missing."""
    kind, values = column_of(column, f"{path}, column {name!r}", what)
    return values.argmax(axis=1) if kind == "one-hot" else values


def _classes(path: Path, label: str, values: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    y, names = numbered(_values(path, label, values))
    if any("." in name for name in names) and all(map(_is_finite, names)):
        raise DataError(
            f"{path}: got {names[-1]} in {label!r}, expected class numbers or names; name another column with --set "
            "data.label_column=COLUMN, or round to classes first; numbers to be predicted as they are need a loss, "
            "which is given in Python: pfedlms.run((x, y), model, loss=…)"
        )
    return y, names


def _chosen(path: Path, columns: Columns, asked: str, known: Sequence[str], setting: str) -> str:
    """The name of the column; "" where there is none and it may be missing."""
    if asked and asked not in columns:
        raise DataError(f"data.{setting}: got {asked!r}, but {path} has no such column; {did_you_mean(asked, columns)}")
    lowered = {name.lower(): name for name in columns}
    found = asked or next((lowered[name] for name in known if name in lowered), "")
    if not found and setting == "label_column":
        shown = ", ".join([*list(columns)[:10], *["…"] * (len(columns) > 10)])
        raise DataError(
            f"{path}: got {shown}, expected one called {' or '.join(known)}; name it with --set data.{setting}=COLUMN"
        )
    return found


def _feature(path: Path, name: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """A column of numbers; the first value that is none is named."""
    try:
        with np.errstate(over="ignore"):
            column = values.astype(np.float32)
        if column.ndim == 1 and np.isfinite(column).all():
            return column
    except (TypeError, ValueError):
        pass
    if values.ndim > 1:
        raise DataError(f"{path}: got {name!r} of shape {values.shape}; samples of several numbers must be called x")
    row, value = next((row, value) for row, value in enumerate(values.tolist()) if not _is_finite(value))
    raise DataError(
        f"{path}, column {name!r}, sample {row} (from 0): got {value!r}, expected a finite number; turn all into "
        "numbers, or leave the column out"
    )


def _is_finite(value: Any) -> bool:
    try:
        with np.errstate(over="ignore"):
            return isfinite(np.float32(value))
    except (TypeError, ValueError):
        return False


def _channels_first(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[n, h, w]`, `[n, h, w, channels]` or `[n, channels, h, w]` as the last; 1 and 3 are numbers of channels."""
    if images.ndim == 3:
        return images[:, np.newaxis]
    last = images.shape[3] in (1, 3) and images.shape[1] not in (1, 3)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if last else images

"""One file with samples, labels and perhaps clients, or with clients and text, named as `file:PATH`. A new format is a
reader and its line in `READERS`. A reader may raise any of `_ERRORS`: the message names the file and what is expected.

| columns | names (case does not matter; the first that is there) |
|---|---|
| label | `label`, `class`, `target`, `y`, `labels`, or the name in `data.label_column` |
| client | `client`, `user`, `client_id`, `clients`, or the name in `data.owner_column`; optional |
| samples | `x`, `samples`, `images`, if it has two axes or more; else every other column is a feature |
| index | the first column of a CSV if it has no name, or what pandas calls an index; it is left out, with a warning |
| text | `text` where there is no label, or the name in `data.text_column`; then all others but the client are unused |

Classes and clients are the values in their columns, in ascending order. Samples stay as they are, but images of bytes
are normalised like those of a folder.
"""

from __future__ import annotations

import csv
import json
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.disk import open_parquet, read_contents
from pfedlms.data.images import normalise
from pfedlms.data.pool import Constants, Pool, as_array, build_pool, label_column, number_values
from pfedlms.data.text import Windows, cut_windows
from pfedlms.errors import DataError, DataWarning, did_you_mean, reason

Columns = dict[str, Any]
"""Sequences or arrays by name, one entry per sample."""
_LABELS, _CLIENTS = ("label", "class", "target", "y", "labels"), ("client", "user", "client_id", "clients")
_SAMPLES = ("x", "samples", "images")
_INDEX = re.compile(r"Unnamed: 0(\.\d+)?|__index_level_\d+__")
"""What pandas calls the numbers of rows. In a CSV they are a first column without a name."""


# --- what columns mean ---


def read_file(
    path: Path, label: str = "", client: str = "", mean: Constants = None, std: Constants = None, text: str = "",
    windows: Windows | None = None,
) -> Pool:  # fmt: skip
    """The pool of one file. `label`, `client` and `text` name the columns of the class, the client and the text where
    these have other names than above. Images are normalised by `mean` and `std`, or by those of their own channels;
    text is cut into `windows`."""
    columns = read_columns(path)
    if texts := texts_by_client(path, columns, label, client, text):
        return cut_windows(texts, windows or Windows(), path)
    clients = _find_column(path, columns, client, _CLIENTS, "owner_column")
    labels = _find_column(path, columns, label, _LABELS, "label_column")
    for name, values in columns.items():
        if isinstance(values, tuple) and name in (labels, clients):  # a CSV holds only text
            values = _parse_names(values, name == labels)
        columns[name] = as_array(values, f"{path}, column {name!r}:")
    x = _samples(path, columns, labels, clients)
    y, names = _number_column(path, columns, labels, "label")
    owner, client_names = _number_column(path, columns, clients, "client") if clients else (None, ())
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        x, mean, std = normalise(_channels_first(x), mean, std)
    elif mean is not None:
        raise DataError(f"data.mean: got {mean}, but {path} holds no images of bytes, which alone are normalised")
    pool = build_pool([(str(path), x, y)], names)
    return replace(pool, owner=owner, client_names=client_names, mean=mean, std=std)


def texts_by_client(path: Path, columns: Columns, label: str = "", client: str = "", text: str = "") -> dict[str, str]:
    """The text of each client, its rows joined by newlines. Empty where the file holds labels and no `text` is named,
    or no text at all."""
    labelled = label or any(name.lower() in _LABELS for name in columns)
    column = _find_column(path, columns, text, () if labelled else ("text",), "text_column")
    if not column:
        return {}
    owner = _find_column(path, columns, client, _CLIENTS, "owner_column")
    if not owner:
        raise DataError(
            f"{path}: got text and no column called {' or '.join(_CLIENTS)}; name it with --set "
            "data.owner_column=COLUMN (owner_column in Python)"
        )
    texts: dict[str, list[str]] = {}
    for row, (name, words) in enumerate(zip(columns[owner], columns[column], strict=True)):
        if not isinstance(words, str) or name is None:
            raise DataError(f"{path}, row {row} (from 0): got {name!r} and {words!r}, expected a client and its text")
        texts.setdefault(str(name), []).append(words)
    return {name: "\n".join(rows) for name, rows in texts.items()}


def _find_column(path: Path, columns: Columns, chosen: str, names: Sequence[str], setting: str) -> str:
    """The column that the user has chosen, or the first of `names` that is there; "" if there is none. A column of
    labels must be there."""
    if chosen and chosen not in columns:
        raise DataError(
            f"data.{setting}: got {chosen!r}, but {path} has no such column; {did_you_mean(chosen, columns)}"
        )
    lowered = {name.lower(): name for name in columns}
    column = chosen or next((lowered[name] for name in names if name in lowered), "")
    if not column and setting == "label_column":
        shown = ", ".join([*list(columns)[:10], *["…"] * (len(columns) > 10)]) or "no columns"
        raise DataError(
            f"{path}: got {shown}, expected one called {' or '.join(names)}; name it with --set data.{setting}=COLUMN "
            f"({setting} in Python)"
        )
    return column


def _samples(path: Path, columns: Columns, labels: str, clients: str) -> NDArray[Any]:
    """The column of samples, or all feature columns as one array. Further arrays of an `.npz` are not used."""
    arrays = [column for name in _SAMPLES for column in columns if column.lower() == name and columns[column].ndim > 1]
    others = [name for name in columns if name != labels and not (clients and name == clients)]
    index = [name for name in others if _INDEX.fullmatch(name) or (not name and name == next(iter(columns)))]
    features = arrays[:1] or [name for name in others if name not in index]
    sizes = {len(np.atleast_1d(columns[name])) for name in (labels, *features, clients) if name}
    if len(sizes) > 1 or 0 in sizes or not features:
        raise DataError(
            f"{path}: got {len(features)} features and columns of {sorted(sizes)} rows, expected as "
            "many rows in each column, and at least one feature and one row"
        )
    if arrays:
        samples: NDArray[Any] = columns[arrays[0]]
        return samples
    if index:
        warnings.warn(
            f"{path}: the column {index[0]!r} is left out, as it numbers rows; write the table without its index, or "
            "give the column a name if it is a feature",
            DataWarning,
            stacklevel=3,
        )
    for setting, column, names in (("owner", clients, _CLIENTS), ("label", labels, _LABELS)):
        if unused := [name for name in features if name.lower() in names]:
            warnings.warn(
                f"{path}: data.{setting}_column is {column!r}, so the column {unused[0]!r} is a feature like any "
                "other; take it out of the file if that is not meant",
                DataWarning,
                stacklevel=3,
            )
    return np.stack([_feature(path, name, columns[name]) for name in features], axis=1)


def _feature(path: Path, name: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """A column as numbers. An error names the first value that is no finite number."""
    if values.ndim > 1:
        raise DataError(f"{path}: got {name!r} of shape {values.shape}; samples of several numbers must be called x")
    with np.errstate(over="ignore"):  # too large a number becomes infinite, which is refused
        numbers = values if values.dtype.kind in "fiub" else np.array([_float_or_nan(each) for each in values.tolist()])
        column = numbers.astype(np.float32)
    if len(wrong := np.flatnonzero(~np.isfinite(column))):
        raise DataError(
            f"{path}, column {name!r}, sample {wrong[0]} (from 0): got {values.tolist()[wrong[0]]!r}, expected a "
            "finite number; turn all into numbers, or leave the column out"
        )
    return column


def _float_or_nan(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return nan


def _number_column(path: Path, columns: Columns, name: str, what: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The number of each sample's label or client, and the names by number. None may be missing."""
    values = label_column(columns[name], f"{path}, column {name!r}", what)
    return number_values(values.argmax(axis=1) if values.ndim > 1 else values)


def _channels_first(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images `[n, h, w]`, `[n, h, w, channels]` or `[n, channels, h, w]` as the last of these. An axis of 1, 3 or 4 is
    that of the channels."""
    if images.ndim == 3:
        return images[:, np.newaxis]
    last = images.shape[3] in (1, 3, 4) and images.shape[1] not in (1, 3, 4)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if last else images


# --- formats ---


def _read_npz(path: Path) -> Columns:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _read_npy(path: Path) -> Columns:
    """All arrays of the folder by the names of their files, memory-mapped: only the samples that are used are read."""
    return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in path.parent.glob("*.npy")}


def _read_csv(path: Path) -> Columns:
    """Columns of text, as tuples. The separator of `.tsv` is the tab, else whichever of comma, semicolon and tab is the
    most frequent in the header."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        file.seek(0)
        delimiter = "\t" if path.suffix == ".tsv" else max(",;\t", key=header.count)
        reader = csv.reader(file, delimiter=delimiter)
        rows = [(reader.line_num, row) for row in reader if row]
    names = [name.strip() for _, header in rows[:1] for name in header]
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names)}")
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(f"line {line}: got {len(row)} values")
    columns = list(zip(*(row for _, row in rows[1:]), strict=True)) or [()] * len(names)
    return dict(zip(names, columns, strict=True))


def _parse_names(column: Sequence[str], are_labels: bool) -> Any:
    """The numbers of a column of labels or clients in which every value is spelled as 2.0 is; else the column itself,
    since 01 is not 1. Labels that are numbers but not whole become floats, which are refused as labels."""
    try:
        numbers = [float(value) for value in column]
    except ValueError:
        return column
    if all(number.is_integer() for number in numbers):
        return numbers if [str(number) for number in numbers] == list(column) else column
    return numbers if are_labels else column


def _read_parquet(path: Path) -> Columns:
    with open_parquet(path) as file:
        table = file.read()
        nested = {field.name for field in table.schema if field.type.num_fields}
        return {
            name: table[name].to_pylist() if name in nested else table[name].to_numpy() for name in table.column_names
        }


def _read_leaf(path: Path) -> Columns:
    """`{"user_data": {user: {"x": [...], "y": [...]}}}`, the layout of the LEAF benchmark. If x are texts, each with
    the character that follows it as y, they are joined to the running text of each user."""
    users = json.loads(read_contents(path))["user_data"]
    rows = [(user, x, y) for user, own in users.items() for x, y in zip(own["x"], own["y"], strict=True)]
    clients, x, y = (list(column) for column in zip(*rows, strict=True))
    if not all(isinstance(each, str) for each in (*x, *y)):
        return {"x": x, "y": y, "client": clients}
    if longer := [following for following in y if len(following) != 1]:
        raise ValueError(f"the y of a text is {longer[0]!r}")
    return {"client": list(users), "text": [_running_text(path, own["x"], own["y"]) for own in users.values()]}


def _running_text(path: Path, inputs: list[str], targets: list[str]) -> str:
    """The text from which windows were cut. A window that shares less than half of itself with the one before begins on
    a new line; with a warning, if that is most of them."""
    pieces: list[str] = []
    before, lines = "", 0
    for window, following in zip(inputs, targets, strict=True):
        lengths = range(min(len(window), len(before)), max(0, (len(window) - 1) // 2), -1)
        shared = next((length for length in lengths if before.endswith(window[:length])), 0)
        lines += not shared
        pieces.append("\n" * (not shared) + window[shared:] + following)
        before = window + following
    if lines - 1 > len(inputs) // 2:
        warnings.warn(
            f"{path}: most windows of text share less than half of themselves with the one before, so each of these "
            "begins on a new line; give running text if that is wrong",
            DataWarning,
            stacklevel=2,
        )
    return "".join(pieces)[1:]  # without the newline before the first line


def _read_json_lines(path: Path) -> Columns:
    """One JSON object per line, all with the same keys, such as `{"client": "a", "x": [1, 2], "y": 0}`."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_contents(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
            same = rows[-1].keys() == rows[0].keys()
        except (ValueError, AttributeError):
            same = False
        if not same:
            raise ValueError(f"line {number}: got {line[:60]!r}")
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


_TABLE = "text in UTF-8, a header with different names and as many values in each line"
_LINES = "JSON in UTF-8, an object with the same keys in each line"
_LEAF = "user_data with as many x as y for each user; y of a text are the one character that follows each"
READERS: dict[str, tuple[Callable[[Path], Columns], str]] = {
    ".npz": (_read_npz, "arrays of numpy.savez, Python objects as numpy.array(objects.tolist())"),
    ".csv": (_read_csv, _TABLE),
    ".tsv": (_read_csv, _TABLE),
    ".parquet": (_read_parquet, "a whole Parquet file"),
    ".json": (_read_leaf, _LEAF),
    ".jsonl": (_read_json_lines, _LINES),
    ".jsonl.gz": (_read_json_lines, _LINES),
    ".npy": (_read_npy, "arrays in its folder, each written by numpy.save"),
}
"""By how the name of a file ends: its reader, and what is expected of the file."""
_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    TypeError,
    KeyError,
    AttributeError,
    csv.Error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_columns(path: Path) -> Columns:
    """The columns of a file, read by the reader of its format."""
    ending = next((ending for ending in READERS if path.name.lower().endswith(ending)), None)
    if ending is None:
        raise DataError(f"data.dataset: got file:{path}, expected a file that ends in {', '.join(READERS)}")
    if not path.is_file():
        raise DataError(f"data.dataset: {path} is no file; file:PATH names one")
    reader, expected = READERS[ending]
    try:
        return reader(path)
    except _ERRORS as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}), expected {expected}") from error
